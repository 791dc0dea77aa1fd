"""From a target ε to the parameter that meets it."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpjax import _validate
from dpjax._float64 import cast, default_float, scope
from dpjax.accounting._roots import with_derivative

_CLOSE = {8: 1e-12, 4: 1e-8}  # by itemsize: the relative width of a closed bracket
_FAR = 2.0  # |log ε − log target| beyond this says no more than its sign
_Point = tuple[jax.Array, jax.Array]  # a parameter, and by how much its ε is too large
_Function = Callable[[jax.Array], jax.Array]
_Walk = tuple[_Point, _Point, jax.Array, jax.Array]  # and the stride, and if it moved
_Bracket = tuple[jax.Array, _Point, _Point]  # the radius, and the bad and good end
_State = TypeVar("_State")


def _while(
    cond: Callable[[_State], jax.Array],
    body: Callable[[_State], _State],
    state: _State,
) -> _State:
    """A loop that compiles nothing when its state is concrete."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(state)):
        return jax.lax.while_loop(cond, body, state)
    while bool(cond(state)):
        state = body(state)
    return state


class _Ends(NamedTuple):
    """The least and the largest parameter that are asked for, both positive."""

    least: float
    most: float


def _ends(upper: float, dtype: np.dtype, integer: bool) -> _Ends:
    """Those that the result's dtype holds, and whole numbers if need be."""
    least = 1.0 if integer else float(np.finfo(dtype).tiny)
    if not upper >= least:
        raise ValueError(f"upper must be at least {least!r}; got {upper!r}.")
    most = dtype.type(min(upper, np.finfo(dtype).max))
    most = np.nextafter(most, dtype.type(0)) if float(most) > upper else most
    return _Ends(least, float(np.floor(most) if integer else most))


def _bracket(
    excess: _Function, start: jax.Array, increasing: bool, ends: _Ends
) -> tuple[_Point, _Point]:
    """Walk from start, squaring the stride, until the sign of the excess changes.

    Returns the last two points, the last one at an end if the sign never changed.
    """

    def cond(state: _Walk) -> jax.Array:
        (_, before), (_, now), _, moved = state
        return ((before > 0) == (now > 0)) & moved

    def body(state: _Walk) -> _Walk:
        _, (x, now), stride, _ = state
        further = jnp.where((now > 0) != increasing, x * stride, x / stride)
        further = jnp.clip(further, *ends)
        return (x, now), (further, excess(further)), stride * stride, further != x

    first = (start, excess(start))
    stride = jnp.full_like(start, 2.0)
    before, now, _, _ = _while(cond, body, (first, first, stride, stride > 1))
    return before, now


def _close(excess: _Function, bad: _Point, good: _Point, tolerance: float) -> jax.Array:
    """The good end of the bracket once its relative width is at most the tolerance.

    The ITP method on the logarithm, on which most accountants are nearly straight. The
    good end is always a point at which the excess was asked for, and at most 0.

    Reference: Oliveira and Takahashi (2020), with κ₁ (b − a) = 0.2, κ₂ = 2, n₀ = 1.
    """
    width = jnp.abs(jnp.log(good[0]) - jnp.log(bad[0]))
    # Oliveira and Takahashi (2020), https://doi.org/10.1145/3423597, their radius ρ:
    # the widest half bracket that bisection would leave before each step, and one more.
    radius = tolerance * jnp.exp2(
        jnp.ceil(jnp.log2(jnp.maximum(width / tolerance, 1.0)))
    )
    curvature = 0.2 / jnp.maximum(width, tolerance)

    def cond(state: _Bracket) -> jax.Array:
        _, (bad, _), (good, _) = state
        return jnp.abs(jnp.log(good) - jnp.log(bad)) > tolerance

    def body(state: _Bracket) -> _Bracket:
        radius, (bad, high), (good, low) = state
        a, b = jnp.log(bad), jnp.log(good)
        width, half = jnp.abs(b - a), (a + b) / 2
        secant = a + (b - a) * high / (high - low)
        # Half a tolerance past the secant's zero at least, so that both ends move.
        nudge = jnp.maximum(curvature * width * width, 0.5 * tolerance)
        nudge = jnp.minimum(nudge, jnp.abs(half - secant))
        aim = secant + jnp.sign(half - secant) * nudge
        reach = jnp.maximum(radius - width / 2, 0.0)
        middle = jnp.exp(jnp.clip(aim, half - reach, half + reach))
        value = excess(middle)
        ok = value <= 0
        bad = (jnp.where(ok, bad, middle), jnp.where(ok, high, value))
        good = (jnp.where(ok, middle, good), jnp.where(ok, value, low))
        return radius / 2, bad, good

    _, _, (found, _) = _while(cond, body, (radius, bad, good))
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
    the largest one where it grows (steps, sampling rate, batch size). ε is only asked
    for at parameters that could be returned, and the one returned met the target when
    it was asked: so it does whatever the function, and where ε is not quite monotone
    there may be a cheaper one.

    Args:
      epsilon_fn: ε as a function of the parameter, f[] to f[], monotone; NaN counts as
        inf. It is called in float64. Compile it (`jax.jit`) if it is slow.
      target_epsilon: f[], positive; `jax.vmap` solves for several.
      increasing: whether ε grows with the parameter.
      integer: whether epsilon_fn takes whole numbers only (given as float64, from 1).
      start: where the search begins, positive. It needs no bracket: it walks.
      upper: the largest parameter that makes sense, such as 1 for a sampling rate.

    Returns:
      The parameter, f[], positive and at most upper, at which ε is at most the target.
      Outside `integer` it can be differentiated by the target and by whatever
      epsilon_fn closes over; where every parameter up to upper (or down to the least
      positive number) meets the target, it is that end, and derivatives are 0. A traced
      target that no parameter meets gives inf (0 if increasing), and so does NaN.

    Raises:
      ValueError: the target or start is not positive, or upper below the least
        parameter; no parameter meets the target; the target or ε is not a scalar.

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
    _scalar("target_epsilon", target_epsilon)
    _validate.positive("start", start)
    dtype = default_float()
    ends = _ends(upper, dtype, integer)
    direction = "down" if increasing else "up"
    with scope():
        target = jnp.asarray(target_epsilon, jnp.float64)

        def admissible(x: jax.Array) -> jax.Array:
            if integer:
                x = jnp.floor(x) if increasing else jnp.ceil(x)
            # Ends are admissible, so that this does not leave them.
            return cast(x, dtype, direction).astype(jnp.float64)

        def epsilon_at(x: jax.Array) -> jax.Array:
            epsilon = jnp.asarray(epsilon_fn(x), jnp.float64)
            _scalar("epsilon_fn's result", epsilon)
            return epsilon

        def excess(x: jax.Array) -> jax.Array:
            # The search needs no derivatives: they come from the root alone.
            epsilon = jax.lax.stop_gradient(epsilon_at(admissible(x)))
            goal = jax.lax.stop_gradient(target)
            ratio = jnp.log(jnp.maximum(epsilon, 0.0)) - jnp.log(goal)
            # The sign is that of ε − target, which the logarithm may round away.
            meets, misses = jnp.clip(ratio, -_FAR, 0.0), jnp.clip(ratio, 1e-12, _FAR)
            meets = jnp.where(jnp.isnan(ratio), -_FAR, meets)  # 0 for a target of 0
            misses = jnp.where(jnp.isnan(ratio), _FAR, misses)
            return jnp.where(epsilon <= goal, meets, misses)

        beginning = jnp.clip(jnp.asarray(start, jnp.float64), *ends)
        traced = isinstance(epsilon_at(admissible(beginning)) - target, Tracer)
        first, second = _bracket(excess, beginning, increasing, ends)
        crossed = (first[1] > 0) != (second[1] > 0)
        # Without a crossing the search ended at an end, and any closed bracket will do.
        spare = jnp.array([1.0, 1.0]), jnp.array([1.0, -1.0])
        high = jnp.where(first[1] > 0, jnp.stack(first), jnp.stack(second))
        low = jnp.where(first[1] > 0, jnp.stack(second), jnp.stack(first))
        bad, good = (
            jnp.where(crossed, x, y) for x, y in zip((high, low), spare, strict=True)
        )
        closed = _close(
            excess, (bad[0], bad[1]), (good[0], good[1]), _CLOSE[dtype.itemsize]
        )
        found = jnp.where(crossed, closed, second[0])
        found = admissible(jax.lax.stop_gradient(found))
        met = crossed | (second[1] <= 0)
        if not isinstance(met, Tracer) and not met:
            raise ValueError(
                f"target_epsilon {target_epsilon!r} is not met by any parameter"
                f"{f' up to upper {upper!r}' if upper < np.inf else ''}; the search "
                f"began at {start!r} and ended at {float(found)!r}."
            )
        found = jnp.where(met, found, 0.0 if increasing else jnp.inf)
        if traced and not integer:
            found = with_derivative(lambda x: epsilon_at(x) - target, found, crossed)
        return cast(found, dtype, direction)


def _scalar(name: str, value: jax.typing.ArrayLike) -> None:
    if jnp.shape(value) != ():
        raise ValueError(
            f"{name} must be a scalar, and jax.vmap solves for several; got shape "
            f"{jnp.shape(value)}."
        )
