"""From a target ε to the parameter that meets it."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpjax._core import validate
from dpjax._core.float64 import cast, default_float, scope
from dpjax._core.searches import implicit_derivative
from dpjax.accounting._numerics.search import Point, bracket, close, crossing

_CLOSE = {8: 1e-12, 4: 1e-8}  # by itemsize: the relative width of a closed bracket
_FAR = 2.0  # |log ε − log target| beyond this says no more than its sign


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


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _admissible(
    x: jax.Array, dtype: np.dtype, increasing: bool, integer: bool
) -> jax.Array:
    """The nearest parameter that could be returned, on the side where ε is less."""
    if integer:
        x = jnp.floor(x) if increasing else jnp.ceil(x)
    # Ends are admissible, so that this does not leave them.
    return cast(x, dtype, "down" if increasing else "up").astype(jnp.float64)


@jax.jit
def _excess(epsilon: jax.Array, target: jax.Array) -> jax.Array:
    """By how much log ε is too large, within ±_FAR."""
    ratio = jnp.log(jnp.maximum(epsilon, 0.0)) - jnp.log(target)
    # The sign is that of ε − target, which the logarithm may round away.
    meets, misses = jnp.clip(ratio, -_FAR, 0.0), jnp.clip(ratio, 1e-12, _FAR)
    meets = jnp.where(jnp.isnan(ratio), -_FAR, meets)  # 0 for a target of 0
    misses = jnp.where(jnp.isnan(ratio), _FAR, misses)
    return jnp.where(epsilon <= target, meets, misses)


@jax.jit
def _find_parameter(
    crossed: jax.Array, closed: jax.Array, end: Point
) -> tuple[jax.Array, jax.Array]:
    """The parameter, and whether it meets the target."""
    return jnp.where(crossed, closed, end.at), crossed | (end.excess <= 0)


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
    validate.positive("target_epsilon", target_epsilon)
    _scalar("target_epsilon", target_epsilon)
    validate.positive("start", start)
    dtype = default_float()
    ends = _ends(upper, dtype, integer)
    direction = "down" if increasing else "up"
    with scope():
        target = jnp.asarray(target_epsilon, jnp.float64)
        goal = jax.lax.stop_gradient(target)

        def epsilon_at(x: jax.Array) -> jax.Array:
            epsilon = jnp.asarray(epsilon_fn(x), jnp.float64)
            _scalar("epsilon_fn's result", epsilon)
            return epsilon

        known: dict[float, jax.Array] = {}  # near a root few parameters are left

        def epsilon_near(x: jax.Array) -> jax.Array:
            asked = _admissible(x, dtype, increasing, integer)
            if isinstance(asked, Tracer):
                return epsilon_at(asked)
            at = float(asked)
            if at not in known:
                known[at] = epsilon_at(asked)
            return known[at]

        def excess(x: jax.Array) -> jax.Array:
            # The search needs no derivatives: they come from the root alone.
            return _excess(jax.lax.stop_gradient(epsilon_near(x)), goal)

        beginning = jnp.clip(jnp.asarray(start, jnp.float64), *ends)
        traced = any(isinstance(x, Tracer) for x in (epsilon_near(beginning), target))
        first, second = bracket(excess, beginning, increasing, ends)
        crossed, bad, good = crossing(first, second)
        closed = close(excess, bad, good, _CLOSE[dtype.itemsize])
        found, met = _find_parameter(crossed, closed, second)
        found = _admissible(jax.lax.stop_gradient(found), dtype, increasing, integer)
        if not isinstance(met, Tracer) and not met:
            raise ValueError(
                f"target_epsilon {target_epsilon!r} is not met by any parameter"
                f"{f' up to upper {upper!r}' if upper < np.inf else ''}; the search "
                f"began at {start!r} and ended at {float(found)!r}."
            )
        if isinstance(met, Tracer):
            found = jnp.where(met, found, 0.0 if increasing else jnp.inf)
        if traced and not integer:
            found = implicit_derivative(
                lambda x: epsilon_at(x) - target, found, crossed
            )
        return cast(found, dtype, direction)


def _scalar(name: str, value: jax.typing.ArrayLike) -> None:
    if jnp.shape(value) != ():
        raise ValueError(
            f"{name} must be a scalar, and jax.vmap solves for several; got shape "
            f"{jnp.shape(value)}."
        )
