"""The privacy-loss distribution of a composition, and its δ(ε) and ε(δ)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpjax._core import validate
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax.accounting import events
from dpjax.accounting._numerics.pld import composition, lower, mechanisms


@events.record
class PLD:
    """The privacy-loss distribution (PLD) of a composition of mechanisms.

    A PLD is a pytree of the events' numbers, and passes through `jax.jit`, `jax.vmap`
    and `jax.grad`.

    Attributes:
      steps: the events that run on the same data, with their counts. An event may
        depend on the outputs of earlier events. All numbers of an event must be fixed
        before any output is seen.
    """

    steps: tuple[events.Repeated, ...]

    @property
    def mu(self) -> None:
        """None: a PLD in general has no GDP parameter."""

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """An ε at which the composition is (ε, δ)-DP, for δ in (0, 1), rounded up."""
        return epsilon(self, delta)

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """A δ at which the composition is (ε, δ)-DP, for ε >= 0, rounded up."""
        return delta(self, epsilon)

    def __repr__(self) -> str:
        """A text with one line for each event, with the event's count and numbers."""
        lines = [f"\n  {step.count} x {step.event}" for step in self.steps]
        return f"PLD({','.join(lines)}\n)" if lines else "PLD()"


def _steps(pld: PLD) -> tuple[events.Repeated, ...]:
    if not isinstance(pld, PLD):
        raise ValueError(f"pld must be a dpjax.accounting.pld.PLD; got {pld!r}.")
    return pld.steps


def of(event: events.Step) -> PLD:
    """The privacy-loss distribution of one event.

    Args:
      event: the event, which runs once.

    Returns:
      A `PLD`.

    Example:
      >>> from dpjax.accounting import events
      >>> print(f"{epsilon(of(events.Gaussian(1.0)), 1e-5):.4f}")
      4.3772
    """
    return PLD((events.Repeated(event),))


def compose(pld: PLD, count: ArrayLike) -> PLD:
    """The privacy-loss distribution of running all mechanisms of a PLD count times.

    Args:
      pld: the PLD of the mechanisms that are repeated.
      count: the number of repetitions, f[*b], a whole number, at least 0. The count may
        be traced.

    Returns:
      A `PLD`. A traced count that is not whole is rounded up to the next whole number,
      and derivatives by the count are taken at that number. If the count is negative or
      NaN, ε is infinite and δ is 1.

    Raises:
      ValueError: a static count is negative or not a whole number.

    Example:
      >>> from dpjax.accounting import pld
      >>> print(f"{pld.epsilon(pld.compose(pld.gaussian(1.0), 4), 1e-5):.4f}")
      9.9973
    """
    count = validate.whole_count("count", count)
    repeated = (
        dataclasses.replace(step, count=_multiply_counts(step.count, count))
        for step in _steps(pld)
    )
    return PLD(tuple(repeated))


def _multiply_counts(one: ArrayLike, other: ArrayLike) -> ArrayLike:
    """The product of two counts, rounded up where a float cannot represent it."""
    if isinstance(one, int) and isinstance(other, int):
        return one * other
    if not any(isinstance(x, jax.Array) for x in (one, other)):
        return np.asarray(one, np.float64) * np.asarray(other, np.float64)
    # A product of 32-bit integers could wrap around to a smaller count.
    doubles = any(getattr(x, "dtype", None) == jnp.float64 for x in (one, other))
    dtype = jnp.float64 if doubles else jnp.float32
    product = jnp.asarray(one, dtype) * jnp.asarray(other, dtype)
    # Up to 1 / eps the product is exact. Above 1 / eps, each of three roundings loses
    # at most half of eps, and the factor compensates for that loss.
    epsilon = jnp.finfo(dtype).eps
    exact = product <= 1 / epsilon
    return product * jnp.where(exact, 1.0, 1 + 4 * epsilon).astype(dtype)


def convolve(a: PLD, b: PLD) -> PLD:
    """The privacy-loss distribution of two mechanisms that run on the same data.

    The second mechanism may depend on the output of the first one. In that case, b must
    be a PLD of the second mechanism for every possible output of the first one. Both
    PLDs must be fixed before any output is seen. Otherwise the result is not valid.

    Args:
      a: the PLD of one mechanism. Exchanging a and b changes nothing.
      b: the PLD of the other mechanism, on the same data, under the same adjacency.

    Returns:
      A `PLD`.

    Raises:
      ValueError: one PLD is for ADD_REMOVE or ZERO_OUT, and the other one for REPLACE.

    Example:
      >>> from dpjax.accounting import pld
      >>> steps = pld.compose(pld.subsampled_gdp(1.0, 0.1), 10)
      >>> both = pld.convolve(steps, pld.gaussian(0.5))
      >>> print(f"{pld.epsilon(both, 1e-5):.3f}")
      3.505
    """
    steps = _steps(a) + _steps(b)
    # ADD_REMOVE and ZERO_OUT have the same losses and may be mixed. Gaussian events
    # state no adjacency and may be composed with any event.
    adjacencies = {getattr(step.event, "adjacency", None) for step in steps} - {None}
    if Adjacency.REPLACE in adjacencies and len(adjacencies) > 1:
        raise ValueError(
            "a and b must hold for the same adjacency; got mechanisms for ADD_REMOVE "
            f"or ZERO_OUT and for REPLACE: {PLD(steps)}."
        )
    return PLD(steps)


def delta(pld: PLD, epsilon: ArrayLike) -> jax.Array:
    """An upper bound on the least δ at which the composed mechanism is (ε, δ)-DP.

    Args:
      pld: the PLD of all mechanisms.
      epsilon: f[*b], at least 0.

    Returns:
      δ, f[*b], rounded up. For δ from 1e-30 to a tenth of steps times sampling rate,
      the relative error is about 1e-3. The result is 1 for a traced ε below 0 and for a
      NaN.

    Raises:
      ValueError: a static ε is negative.

    Privacy: the errors of discretisation, truncation, aliasing and rounding only
    increase the result.

    Example:
      >>> from dpjax.accounting import pld
      >>> run = pld.compose(pld.gaussian(0.1), 100)
      >>> print(f"{pld.delta(run, 1.0):.4f}")
      0.1269
    """
    validate.nonnegative("epsilon", epsilon, finite=False)
    return composition.delta64(epsilon, _steps(pld))


def epsilon(pld: PLD, delta: ArrayLike) -> jax.Array:
    """An upper bound on the least ε >= 0 at which the composed mechanism is (ε, δ)-DP.

    Args:
      pld: the PLD of all mechanisms.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      ε, f[*b], rounded up. For ε below about 40 and δ from 1e-15, ε is within 1e-3 of
      the exact ε, or within 3e-3 if δ is above a tenth of steps times sampling rate.
      For δ down to 1e-100, ε is finite. There, its error is mostly as small, but up to
      a tenth if examples seldom take part. For sampled steps with a noise multiplier
      below 0.03, ε may be several times too large. For noise multipliers below 0.006
      (below 0.03 at sampling rate 1) ε is inf, because the numerical integration of the
      step's distributions is then not precise enough. The result is inf for a traced δ
      at or below 0 and for a NaN.

    Raises:
      ValueError: a static δ is not strictly between 0 and 1.

    Privacy: the errors of discretisation, truncation, aliasing and rounding only
    increase the result.

    Example:
      >>> from dpjax import Adjacency
      >>> from dpjax.accounting import pld
      >>> def of(noise_multiplier):
      ...     step = pld.poisson_gaussian(
      ...         noise_multiplier, 0.01, adjacency=Adjacency.ADD_REMOVE)
      ...     return pld.epsilon(pld.compose(step, 1000), 1e-5)
      >>> print(f"{of(0.8):.3f} {jax.grad(of)(0.8):.2f}")
      3.141 -10.79
    """
    validate.open_unit("delta", delta)
    return composition.epsilon64(delta, _steps(pld))


def _steps_with_lower_bounds(pld: PLD, *others: object) -> tuple[events.Repeated, ...]:
    steps = _steps(pld)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((steps, others))):
        raise ValueError(
            f"pld must have concrete numbers, not traced values; got {pld!r}."
        )
    for step in steps:
        if not mechanisms.has_lower_losses(step.event):
            raise ValueError(
                "pld must contain only events with a lower bound, and "
                f"{type(step.event).__name__} has no lower bound; got {pld!r}."
            )
    return steps


def delta_lower(pld: PLD, epsilon: ArrayLike) -> jax.Array:
    """A lower bound on the least δ at which the composed mechanism is (ε, δ)-DP.

    Args:
      pld: the PLD of all mechanisms, with known numbers.
      epsilon: f[*b], at least 0.

    Returns:
      δ, f[*b], rounded down; 0 for numbers out of range. JAX cannot trace this
      function, and the result has no derivative.

    Raises:
      ValueError: a number is traced; ε is negative; an event is `RandomAllocation`, for
        which `allocation.epsilon_lower` has a bound.

    Privacy: two neighbouring data sets exist whose outputs need at least this δ. In
    these data sets, all examples but the differing one contribute zero. For
    `subsampled_gdp`, all other examples contribute the opposite of this example. For a
    `TruncatedPoissonGaussian`, the bound subtracts a term for the probability that a
    sample exceeds the capacity. For events that state only ε or (ε, δ), the worst
    mechanism with this guarantee has at least this δ.

    Example:
      >>> from dpjax.accounting import pld
      >>> run = pld.compose(pld.laplace(5.0), 10)
      >>> print(f"{pld.delta_lower(run, 0.5):.4f} {pld.delta(run, 0.5):.4f}")
      0.0896 0.0902
    """
    validate.nonnegative("epsilon", epsilon, finite=False)
    return lower.delta64(epsilon, _steps_with_lower_bounds(pld, epsilon))


def epsilon_lower(pld: PLD, delta: ArrayLike) -> jax.Array:
    """A lower bound on the least ε >= 0 at which the composed mechanism is (ε, δ)-DP.

    Args:
      pld: the PLD of all mechanisms, with known numbers.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      ε, f[*b], rounded down; 0 for numbers out of range. The result is mostly within
      0.5 % of the upper bound `epsilon`, or within 0.005 if that bound is small. For
      `subsampled_gdp`, the result may be 15 % below the upper bound, because no data
      sets are known that attain the dominating pair. JAX cannot trace this function,
      and the result has no derivative.

    Raises:
      ValueError: a number is traced; δ is not strictly between 0 and 1; an event is
        `RandomAllocation`, for which `allocation.epsilon_lower` has a bound.

    Privacy: as for `delta_lower`.

    Example:
      >>> from dpjax import Adjacency
      >>> from dpjax.accounting import pld
      >>> step = pld.poisson_gaussian(1.0, 0.01, adjacency=Adjacency.ADD_REMOVE)
      >>> run = pld.compose(step, 1000)
      >>> print(f"{pld.epsilon_lower(run, 1e-5):.3f} {pld.epsilon(run, 1e-5):.3f}")
      1.823 1.828
    """
    validate.open_unit("delta", delta)
    return lower.epsilon64(delta, _steps_with_lower_bounds(pld, delta))
