"""From a target ε to the parameter that meets it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from dpjax import _validate
from dpjax._float64 import cast, default_float
from dpjax.accounting._implicit import with_derivative

_CLOSE = 1e-12  # the relative width at which a bracket counts as closed
_FAR = 2.0  # |log ε − log target| beyond this says no more than its sign


def _while(cond: Callable[..., Any], body: Callable[..., Any], state: Any) -> Any:
    """A loop that compiles nothing when its state is concrete."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
        return jax.lax.while_loop(cond, body, state)
    while bool(cond(state)):
        state = body(state)
    return state


def _bracket(excess: Callable[..., Any], start: jax.Array, increasing: bool) -> Any:
    """Walk from start, squaring the stride, until the sign of the excess changes.

    Returns two points with the excess at each, the last one at 0 or inf if the sign
    never changed.
    """

    def cond(state: Any) -> Any:
        (_, before), (x, now), _ = state
        return ((before > 0) == (now > 0)) & (x > 0) & (x < jnp.inf)

    def body(state: Any) -> Any:
        _, (x, now), stride = state
        further = jnp.where((now > 0) != increasing, x * stride, x / stride)
        return (x, now), (further, excess(further)), stride * stride

    first = (start, excess(start))
    before, now, _ = _while(cond, body, (first, first, jnp.full_like(start, 2.0)))
    return before, now


def _close(excess: Callable[..., Any], bad: Any, good: Any) -> jax.Array:
    """The good end of the bracket once its relative width is at most _CLOSE.

    The ITP method on the logarithm, on which most accountants are nearly straight.

    Reference: Oliveira and Takahashi (2020), with κ₁ (b − a) = 0.2, κ₂ = 2, n₀ = 1.
    """
    width = jnp.abs(jnp.log(good[0]) - jnp.log(bad[0]))
    # The widest half bracket that bisection would leave before each step, and one more.
    radius = _CLOSE * jnp.exp2(jnp.ceil(jnp.log2(jnp.maximum(width / _CLOSE, 1.0))))
    curvature = 0.2 / jnp.maximum(width, _CLOSE)

    def cond(state: Any) -> Any:
        _, (bad, _), (good, _) = state
        return jnp.abs(jnp.log(good) - jnp.log(bad)) > _CLOSE

    def body(state: Any) -> Any:
        radius, (bad, high), (good, low) = state
        a, b = jnp.log(bad), jnp.log(good)
        width, half = jnp.abs(b - a), (a + b) / 2
        secant = a + (b - a) * high / (high - low)
        # Half a tolerance past the secant's zero at least, so that both ends move.
        nudge = jnp.maximum(curvature * width * width, 0.5 * _CLOSE)
        nudge = jnp.minimum(nudge, jnp.abs(half - secant))
        aim = secant + jnp.sign(half - secant) * nudge
        reach = jnp.maximum(radius - width / 2, 0.0)
        middle = jnp.exp(jnp.clip(aim, half - reach, half + reach))
        value = excess(middle)
        ok = value <= 0
        bad = (jnp.where(ok, bad, middle), jnp.where(ok, high, value))
        good = (jnp.where(ok, middle, good), jnp.where(ok, value, low))
        return radius / 2, bad, good

    _, _, (found, _) = _while(cond, body, (radius, tuple(bad), tuple(good)))
    return found


def solve(
    epsilon_fn: Callable[[jax.Array], jax.Array],
    target_epsilon: jax.typing.ArrayLike,
    *,
    increasing: bool = False,
    integer: bool = False,
    start: float = 1.0,
    upper: float = float("inf"),
) -> jax.Array:
    """The cheapest parameter whose ε is at most the target.

    That is the smallest one where ε falls with the parameter (a noise multiplier), and
    the largest one where it grows (steps, sampling rate, batch size).

    Args:
      epsilon_fn: ε as a function of the parameter, f[] to f[], monotone. It is called
        in float64. Compile it (`jax.jit`) if it is slow.
      target_epsilon: f[], positive.
      increasing: whether ε grows with the parameter.
      integer: whether epsilon_fn takes whole numbers only (given as float64).
      start: where the search begins, positive. It needs no bracket: it walks.
      upper: the largest parameter that makes sense, such as 1 for a sampling rate.

    Returns:
      The parameter, f[], rounded to the side of less privacy loss, so that its own ε
      is at most the target. Outside `integer` it can be differentiated by the target
      and by whatever epsilon_fn closes over. A traced target that no parameter meets
      gives inf (0 if increasing).

    Raises:
      ValueError: the target, start or upper is not positive; no parameter meets it.

    Example:
      >>> from dpjax import Adjacency
      >>> from dpjax.accounting import gdp, tree
      >>> def epsilon(noise_multiplier):
      ...     mu = tree.momentum_mu(
      ...         noise_multiplier, num_steps=1000, decay=0.9, steps_per_epoch=100,
      ...         order="fixed", adjacency=Adjacency.ZERO_OUT)
      ...     return gdp.epsilon(mu, 1e-5)
      >>> print(f"{solve(epsilon, 2.0):.3f}")
      9.973
    """
    _validate.positive("target_epsilon", target_epsilon)
    _validate.positive("start", start)
    if not upper > 0:
        raise ValueError(f"upper must be positive; got {upper!r}.")
    dtype = default_float()
    with jax.enable_x64(True):
        target = jnp.asarray(target_epsilon, jnp.float64)

        def admissible(x: jax.Array) -> jax.Array:
            x = jnp.minimum(x, upper)
            if integer:
                x = jnp.floor(x) if increasing else jnp.ceil(x)
            return x

        def epsilon_at(x: jax.Array) -> jax.Array:
            return jnp.asarray(epsilon_fn(x), jnp.float64)

        def excess(x: jax.Array) -> jax.Array:
            # The search needs no derivatives: they come from the root alone.
            epsilon = jax.lax.stop_gradient(epsilon_at(admissible(x)))
            goal = jax.lax.stop_gradient(target)
            ratio = jnp.log(jnp.maximum(epsilon, 0.0)) - jnp.log(goal)
            # The sign is that of ε − target, which the logarithm may round away.
            meets, misses = jnp.clip(ratio, -_FAR, 0.0), jnp.clip(ratio, _CLOSE, _FAR)
            misses = jnp.where(jnp.isnan(epsilon), _FAR, misses)
            return jnp.where(epsilon <= goal, meets, misses)

        beginning = jnp.asarray(start, jnp.float64)
        traced = isinstance(epsilon_at(admissible(beginning)) - target, Tracer)
        first, second = _bracket(excess, beginning, increasing)
        crossed = (first[1] > 0) != (second[1] > 0)
        # Without a crossing the search ended at 0 or inf, and any bracket will do.
        spare = jnp.array([2.0, 1.0]), jnp.array([1.0, -1.0])
        high = jnp.where(first[1] > 0, jnp.stack(first), jnp.stack(second))
        low = jnp.where(first[1] > 0, jnp.stack(second), jnp.stack(first))
        bad, good = (
            jnp.where(crossed, x, y) for x, y in zip((high, low), spare, strict=True)
        )
        found = jnp.where(crossed, _close(excess, bad, good), second[0])
        found = admissible(jax.lax.stop_gradient(found))
        met = (found > 0) if increasing else (found < jnp.inf)
        if not isinstance(met, Tracer) and not met:
            raise ValueError(
                f"target_epsilon {target_epsilon!r} is not met by any parameter; "
                f"the search began at {start!r} and went all the way to {found!r}."
            )
        if traced and not integer:
            found = with_derivative(lambda x: epsilon_at(x) - target, found, met)
        return cast(found, dtype, "down" if increasing else "up")
