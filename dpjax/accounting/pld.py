"""Upper bounds on the privacy-loss distributions of Gaussian and subsampled mechanisms.

A PLD in this module is a list of events with their counts, not a grid of losses.
Composition therefore costs nothing, and every request for δ(ε) or ε(δ) makes a grid for
that request (`_numerics.pld.composition`). A request has two stages. Each stage gives
an upper bound and has its own file of `_numerics.pld`: a discrete pair of distributions
that dominates the mechanism (`pairs`), and the inversion of its composed characteristic
function (`inversion`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax.accounting import events
from dpjax.accounting._numerics.pld import composition
from dpjax.accounting.events import register_record


@register_record
@dataclasses.dataclass(frozen=True)
class PLD:
    """The privacy-loss distribution (PLD) of a composition of mechanisms.

    A PLD is a pytree of parameters, and passes through `jax.jit`, `jax.vmap` and
    `jax.grad`.

    Attributes:
      steps: the events that run on the same data, with their counts. An event may
        depend on the outputs of earlier events. All numbers of an event must be fixed
        before any output is seen.
    """

    steps: tuple[events.Repeated, ...]

    @property
    def mu(self) -> None:
        """No GDP parameter is known."""

    def epsilon(self, delta: jax.typing.ArrayLike) -> jax.Array:
        """The ε for a δ in (0, 1), rounded up."""
        return epsilon(self, delta)

    def delta(self, epsilon: jax.typing.ArrayLike) -> jax.Array:
        """The δ for an ε >= 0, rounded up."""
        return delta(self, epsilon)

    def __repr__(self) -> str:
        """One line for each event: its count and its numbers."""
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


def gaussian(mu: jax.typing.ArrayLike) -> PLD:
    """The privacy-loss distribution of a μ-GDP mechanism.

    Args:
      mu: the GDP parameter, f[*b], at least 0: sensitivity over noise standard
        deviation for a Gaussian mechanism.

    Returns:
      A `PLD`. If all events of a PLD are Gaussian mechanisms, its δ and ε are exactly
      those of `gdp`.

    Raises:
      ValueError: a static μ is negative.

    Reference: Dong, Roth and Su (2022), Definition 6.

    Example:
      >>> print(f"{epsilon(compose(gaussian(0.1), 100), 1e-5):.4f}")
      4.3772
    """
    validate.nonnegative("mu", mu, finite=False)
    return of(events.Gaussian(mu))


def poisson_gaussian(
    noise_multiplier: jax.typing.ArrayLike,
    sampling_rate: jax.typing.ArrayLike,
    *,
    adjacency: Adjacency,
) -> PLD:
    """The privacy-loss distribution of the Gaussian mechanism on a Poisson sample.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      sampling_rate: the probability that an example takes part, f[*b], in [0, 1].
      adjacency: under ADD_REMOVE and ZERO_OUT one example is present in one data set,
        and absent or without any contribution in the other. Under REPLACE it is
        replaced by another example.

    Returns:
      A `PLD` of one step.

    Raises:
      ValueError: a static argument is out of range; adjacency is not an `Adjacency`.

    Privacy: every example takes part independently of all others and of other steps,
    and contributes at most one clip norm. Under ADD_REMOVE and ZERO_OUT the pair is
    N(0, σ²) against (1 − q) N(0, σ²) + q N(1, σ²), and the worse of both directions is
    reported. Under REPLACE the pair is (1 − q) N(0, σ²) + q N(1, σ²) against
    (1 − q) N(0, σ²) + q N(−1, σ²), which dominates all other contributions in the unit
    ball (docs/accounting.md has the proof).

    Reference: Zhu, Dong and Wang (2022), Theorem 11, for ADD_REMOVE.

    Example:
      >>> from dpjax import Adjacency
      >>> step = poisson_gaussian(1.0, 0.01, adjacency=Adjacency.ADD_REMOVE)
      >>> print(f"{epsilon(compose(step, 1000), 1e-5):.3f}")
      1.828
    """
    validate.positive("noise_multiplier", noise_multiplier)
    validate.closed_unit("sampling_rate", sampling_rate)
    validate.adjacency(adjacency)
    return of(events.PoissonGaussian(noise_multiplier, sampling_rate, adjacency))


def subsampled_gdp(
    mu: jax.typing.ArrayLike, sampling_rate: jax.typing.ArrayLike
) -> PLD:
    """The privacy-loss distribution of a μ-GDP mechanism on a batch of fixed size.

    Args:
      mu: the GDP parameter of the mechanism on its batch, f[*b], at least 0. Under
        REPLACE that is twice the clip norm over the noise standard deviation.
      sampling_rate: batch size over number of examples, f[*b], in [0, 1].

    Returns:
      A `PLD` of one step.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: REPLACE adjacency; each batch is a uniformly random subset of fixed size,
    drawn without replacement and anew in each step.

    Reference: Bok, Su and Altschuler (2024), Proposition D.4: C_p(G_μ).

    Example:
      >>> print(f"{epsilon(compose(subsampled_gdp(0.5, 0.01), 1000), 1e-5):.3f}")
      0.719
    """
    validate.nonnegative("mu", mu, finite=False)
    validate.closed_unit("sampling_rate", sampling_rate)
    return of(events.FixedSizeGaussian(mu, sampling_rate))


def compose(pld: PLD, count: jax.typing.ArrayLike) -> PLD:
    """The privacy-loss distribution of all mechanisms of a PLD, run count times.

    Args:
      pld: the PLD of the mechanisms that are repeated.
      count: the number of repetitions, f[*b], a whole number, at least 0. The count may
        be traced.

    Returns:
      A `PLD`. A traced count that is not whole is rounded up to the next whole number,
      and derivatives by the count are taken there. A negative or NaN count makes ε
      infinite and δ one.

    Raises:
      ValueError: a static count is negative or not a whole number.

    Example:
      >>> print(f"{epsilon(compose(gaussian(1.0), 4), 1e-5):.4f}")
      9.9973
    """
    count = validate.whole_count("count", count)
    return PLD(
        tuple(
            dataclasses.replace(step, count=_multiply_counts(step.count, count))
            for step in _steps(pld)
        )
    )


def _multiply_counts(
    one: jax.typing.ArrayLike, other: jax.typing.ArrayLike
) -> jax.typing.ArrayLike:
    """The product of two counts, rounded up where a float cannot represent it."""
    if isinstance(one, int) and isinstance(other, int):
        return one * other
    if not any(isinstance(x, jax.Array) for x in (one, other)):
        return np.asarray(one, np.float64) * np.asarray(other, np.float64)
    # A product of 32-bit integers could wrap around to a smaller count.
    doubles = any(getattr(x, "dtype", None) == jnp.float64 for x in (one, other))
    dtype = jnp.float64 if doubles else jnp.float32
    product = jnp.asarray(one, dtype) * jnp.asarray(other, dtype)
    # Up to 1 / eps the product is exact. Above, each of three roundings loses at most
    # half of eps, which the factor makes up for.
    epsilon = jnp.finfo(dtype).eps
    exact = product <= 1 / epsilon
    return product * jnp.where(exact, 1.0, 1 + 4 * epsilon).astype(dtype)


def convolve(a: PLD, b: PLD) -> PLD:
    """The privacy-loss distribution of two mechanisms that run on the same data.

    The second mechanism may depend on the output of the first, but both distributions
    must be fixed before any output is seen. The result does not hold if a distribution
    was chosen by looking at an output.

    Args:
      a: the PLD of one mechanism; the order of the two does not matter.
      b: the PLD of the other mechanism, on the same data, under the same adjacency.

    Returns:
      A `PLD`.

    Raises:
      ValueError: one is stated for ADD_REMOVE or ZERO_OUT, the other for REPLACE.

    Example:
      >>> both = convolve(compose(subsampled_gdp(1.0, 0.1), 10), gaussian(0.5))
      >>> print(f"{epsilon(both, 1e-5):.3f}")
      3.505
    """
    steps = _steps(a) + _steps(b)
    # ADD_REMOVE and ZERO_OUT have the same losses and may be mixed. Gaussian events
    # state no adjacency and fit either.
    adjacencies = {getattr(step.event, "adjacency", None) for step in steps} - {None}
    if Adjacency.REPLACE in adjacencies and len(adjacencies) > 1:
        raise ValueError(
            "a and b must be stated for one adjacency; got mechanisms for ADD_REMOVE "
            f"or ZERO_OUT and for REPLACE: {PLD(steps)}."
        )
    return PLD(steps)


def delta(pld: PLD, epsilon: jax.typing.ArrayLike) -> jax.Array:
    """An upper bound on the least δ at which the composed mechanism is (ε, δ)-DP.

    Args:
      pld: the PLD of all mechanisms.
      epsilon: f[*b], at least 0.

    Returns:
      δ, f[*b], rounded up. The relative error is about 1e-3 for δ down to 1e-30, if δ
      is less than a tenth of steps times rate. A traced ε below 0, or a NaN, gives 1.

    Raises:
      ValueError: a static ε is negative.

    Privacy: discretisation, truncation, aliasing and rounding only increase the result.

    Example:
      >>> print(f"{delta(compose(gaussian(0.1), 100), 1.0):.4f}")
      0.1269
    """
    validate.nonnegative("epsilon", epsilon, finite=False)
    return composition.delta64(epsilon, _steps(pld))


def epsilon(pld: PLD, delta: jax.typing.ArrayLike) -> jax.Array:
    """An upper bound on the least ε >= 0 at which the composed mechanism is (ε, δ)-DP.

    Args:
      pld: the PLD of all mechanisms.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      ε, f[*b], rounded up. For ε below about 40 and δ of 1e-15 and more, ε is within
      1e-3 of exact, or within 3e-3 if δ is more than a tenth of steps times rate. For δ
      down to 1e-100, ε is finite and mostly as close, but up to a tenth off if a run
      seldom touches an example. For sampled steps with a noise multiplier below 0.03, ε
      may be several times too large. With a noise multiplier below 0.006 (at rate 1,
      below 0.03) ε is inf, because the intervals of the discrete pair are then too wide
      to integrate over. A traced δ at or below 0, or a NaN, gives inf.

    Raises:
      ValueError: a static δ is not strictly between 0 and 1.

    Privacy: discretisation, truncation, aliasing and rounding only increase the result.

    Example:
      >>> from dpjax import Adjacency
      >>> def of(noise_multiplier):
      ...     step = poisson_gaussian(
      ...         noise_multiplier, 0.01, adjacency=Adjacency.ADD_REMOVE)
      ...     return epsilon(compose(step, 1000), 1e-5)
      >>> print(f"{of(0.8):.3f} {jax.grad(of)(0.8):.2f}")
      3.141 -10.79
    """
    validate.open_unit("delta", delta)
    return composition.epsilon64(delta, _steps(pld))
