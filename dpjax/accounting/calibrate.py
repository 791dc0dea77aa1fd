"""The search for the parameter at which the ε of a mechanism meets a target."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpjax._core import searches, validate
from dpjax._core.float64 import cast, default_float, scope
from dpjax._core.interpret import without_compiler
from dpjax._core.typing import ArrayLike

# The relative width of the last bracket, for each itemsize of the dtype.
_TOLERANCES = {8: 1e-12, 4: 1e-8}
_MAX_EXCESS = 2.0  # the limit of |log ε − log target|


class _Ends(NamedTuple):
    """The smallest and largest parameter that a search may return, both positive."""

    smallest: float
    largest: float


def _ends(upper: float, dtype: np.dtype, integer: bool) -> _Ends:
    """The smallest and largest number of this dtype that a search may return.

    The largest number is at most `upper`. If `integer` is true, both numbers are whole.

    Raises:
      ValueError: upper is below the smallest number.
    """
    smallest = 1.0 if integer else float(np.finfo(dtype).tiny)
    if not upper >= smallest:
        raise ValueError(f"upper must be at least {smallest!r}; got {upper!r}.")
    largest = dtype.type(min(upper, np.finfo(dtype).max))
    # The cast to the dtype may round up past upper.
    if float(largest) > upper:
        largest = np.nextafter(largest, dtype.type(0))
    return _Ends(smallest, float(np.floor(largest) if integer else largest))


@without_compiler
def _round_parameter(
    x: jax.Array, *, dtype: np.dtype, increasing: bool, integer: bool
) -> jax.Array:
    """Round x to a parameter that the search may return, towards smaller ε.

    `dtype` is the dtype of the parameter. The other arguments are as for `solve`.
    """
    if integer:
        x = jnp.floor(x) if increasing else jnp.ceil(x)
    # The search may return both ends of its range, so rounding stays between them.
    return cast(x, dtype, "down" if increasing else "up").astype(jnp.float64)


@without_compiler
def _excess(epsilon: jax.Array, target: jax.Array) -> jax.Array:
    """The difference log ε − log target, limited to the range from −2 to 2.

    The result is positive if ε is above the target, and 2 if ε is NaN.
    """
    ratio = jnp.log(jnp.maximum(epsilon, 0.0)) - jnp.log(target)
    # The sign is that of ε − target. The logarithms may round a small difference to 0,
    # hence the least positive excess of 1e-12.
    meets = jnp.clip(ratio, -_MAX_EXCESS, 0.0)
    misses = jnp.clip(ratio, 1e-12, _MAX_EXCESS)
    meets = jnp.where(jnp.isnan(ratio), -_MAX_EXCESS, meets)  # 0 − 0, or ε is NaN
    misses = jnp.where(jnp.isnan(ratio), _MAX_EXCESS, misses)
    return jnp.where(epsilon <= target, meets, misses)


@without_compiler
def _clip(x: jax.Array, ends: _Ends) -> jax.Array:
    return jnp.clip(x, ends.smallest, ends.largest)


def solve(
    epsilon_fn: Callable[[jax.Array], jax.Array],
    target_epsilon: ArrayLike,
    *,
    increasing: bool = False,
    integer: bool = False,
    start: float = 1.0,
    upper: float = float("inf"),
) -> jax.Array:
    """The cheapest parameter whose ε is at most the target.

    The cheapest parameter is the smallest one if ε falls with the parameter (a noise
    multiplier), and the largest one if ε grows with the parameter (steps, sampling
    rate, batch size). The search evaluates `epsilon_fn` only at valid parameters
    (positive, at most upper, and whole if `integer`), and returns a parameter whose
    evaluated ε meets the target. The result is therefore valid even if ε is not
    monotone, but a cheaper parameter may then exist.

    Args:
      epsilon_fn: ε as a function of the parameter, f[] to f[], monotone. An ε of NaN
        counts as inf. The search calls the function in float64. Compile a slow function
        with `jax.jit`.
      target_epsilon: f[], positive and finite. `jax.vmap` solves for several targets.
      increasing: whether ε grows with the parameter.
      integer: whether the parameter must be a whole number, at least 1. `epsilon_fn`
        gets this number as a float64.
      start: the first parameter that the search evaluates, positive. If start is not a
        valid parameter, the search begins at a valid parameter near start. From there,
        the search finds two parameters whose ε are on both sides of the target.
      upper: the largest possible parameter, such as 1 for a sampling rate.

    Returns:
      The parameter, f[], positive and at most upper, at which ε is at most the target.
      If every parameter meets the target, the result is the largest valid finite float
      if `increasing`, and otherwise the least positive normal float (1 if `integer`).
      The derivatives of this result are 0. In other cases, unless `integer` is true,
      JAX can differentiate the parameter with respect to the target and to all values
      that epsilon_fn closes over. Under `jax.jit` or `jax.vmap`, the result is inf (0
      if `increasing`) if no parameter meets the target or the target is NaN.

    Raises:
      ValueError: the target or start is not positive and finite; upper is below the
        least positive normal float (1 if `integer`); no parameter meets the target,
        outside `jax.jit` and `jax.vmap`; the target or ε is not a scalar.

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
    _check_scalar("target_epsilon", target_epsilon)
    validate.positive("start", start)
    dtype = default_float()
    ends = _ends(upper, dtype, integer)
    direction = "down" if increasing else "up"
    with scope():
        target = jnp.asarray(target_epsilon, jnp.float64)
        fixed_target = _stop_gradient(target)

        def epsilon_at(x: jax.Array) -> jax.Array:
            epsilon = jnp.asarray(epsilon_fn(x), jnp.float64)
            _check_scalar("epsilon_fn's result", epsilon)
            return epsilon

        round_parameter = functools.partial(
            _round_parameter, dtype=dtype, increasing=increasing, integer=integer
        )
        # Near a root, few parameters round to different values, so results are reused.
        evaluations: dict[float, jax.Array] = {}

        def epsilon_at_rounded(x: jax.Array) -> jax.Array:
            parameter = round_parameter(x)
            if isinstance(parameter, Tracer):
                return epsilon_at(parameter)
            key = float(parameter)
            if key not in evaluations:
                evaluations[key] = epsilon_at(jnp.asarray(parameter))
            return evaluations[key]

        def excess(x: jax.Array) -> jax.Array:
            # The search is not differentiated: derivatives come from the root alone.
            return _excess(_stop_gradient(epsilon_at_rounded(x)), fixed_target)

        first_parameter = _clip(jnp.asarray(start, jnp.float64), ends)
        numbers = target, epsilon_at_rounded(first_parameter)
        traced = any(isinstance(x, Tracer) for x in numbers)
        first, second = searches.bracket(excess, first_parameter, increasing, ends)
        crossed, met, bad, good = searches.find_bracket(first, second)
        root = searches.close(excess, bad, good, _TOLERANCES[dtype.itemsize], log=True)
        solution = round_parameter(_stop_gradient(root))
        if isinstance(met, Tracer):
            solution = jnp.where(met, solution, 0.0 if increasing else jnp.inf)
        elif not met:
            raise ValueError(
                f"target_epsilon {target_epsilon!r} is not met by any parameter"
                f"{f' up to upper {upper!r}' if upper < np.inf else ''}; the search "
                f"began at parameter {start!r} and ended at {float(solution)!r}."
            )
        if traced and not integer:
            solution = searches.implicit_derivative(
                lambda x: epsilon_at(x) - target, solution, crossed
            )
        return cast(solution, dtype, direction)


def _stop_gradient(x: jax.Array) -> jax.Array:
    """The value without derivatives. JAX compiles nothing for a concrete value."""
    return jax.lax.stop_gradient(x) if isinstance(x, Tracer) else x


def _check_scalar(name: str, value: ArrayLike) -> None:
    if jnp.shape(value) != ():
        raise ValueError(
            f"{name} must be a scalar; got shape {jnp.shape(value)}. Use jax.vmap to "
            "solve for several values."
        )
