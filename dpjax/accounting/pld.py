"""Upper bounds on the privacy-loss distributions of mechanisms and compositions.

A PLD in this module is a list of events with their counts, not a grid of losses.
Composition only extends the list, and every call of `delta` or `epsilon` computes a new
grid (`_numerics.pld.composition`). Such a call has two stages. The first stage
computes, for each mechanism, a pair of discrete distributions that dominates the
mechanism (`pairs` and `atoms` in `_numerics.pld`). The second stage inverts the
characteristic function of the composed pairs (`_numerics.pld.inversion`). Each stage
results in an upper bound.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpjax._core import validate
from dpjax._core.interpret import without_compiler
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax.accounting import events
from dpjax.accounting._numerics.pld import composition, lower, mechanisms
from dpjax.accounting._numerics.pld.mechanisms import WEIGHTS_TOLERANCE


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

    mu = None  # a PLD in general has no GDP parameter

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


def gaussian(mu: ArrayLike) -> PLD:
    """The privacy-loss distribution of a μ-GDP mechanism.

    Args:
      mu: the GDP parameter, f[*b], at least 0. For a Gaussian mechanism, μ is the
        sensitivity over the noise standard deviation.

    Returns:
      A `PLD`. If a composition has only such PLDs, its `delta` and `epsilon` are exact
      up to rounding, as in `accounting.gdp`.

    Raises:
      ValueError: a static μ is negative.

    Reference: Dong, Roth and Su (2022), Definition 6.

    Example:
      >>> from dpjax.accounting import pld
      >>> print(f"{pld.epsilon(pld.compose(pld.gaussian(0.1), 100), 1e-5):.4f}")
      4.3772
    """
    validate.nonnegative("mu", mu, finite=False)
    return of(events.Gaussian(mu))


def poisson_gaussian(
    noise_multiplier: ArrayLike, sampling_rate: ArrayLike, *, adjacency: Adjacency
) -> PLD:
    """The privacy-loss distribution of the Gaussian mechanism on a Poisson sample.

    Args:
      noise_multiplier: σ, noise standard deviation over clip norm, f[*b], positive.
      sampling_rate: q, the probability that an example takes part, f[*b], in [0, 1].
      adjacency: which data sets are compared. The second data set lacks one example of
        the first data set (ADD_REMOVE), or this example contributes zero (ZERO_OUT), or
        another example replaces this example (REPLACE).

    Returns:
      A `PLD` of one step.

    Raises:
      ValueError: a static argument is out of range; adjacency is not an `Adjacency`.

    Privacy: every example takes part independently of all other examples and steps, and
    contributes at most one clip norm. Under ADD_REMOVE and ZERO_OUT the dominating
    pair is N(0, σ²) against (1 − q) N(0, σ²) + q N(1, σ²), in the worse of both
    orders. Under REPLACE the dominating pair is (1 − q) N(0, σ²) + q N(1, σ²) against
    (1 − q) N(0, σ²) + q N(−1, σ²). This pair dominates all contributions in the unit
    ball (docs/accounting.md has the proof).

    Reference: Zhu, Dong and Wang (2022), Theorem 11, for ADD_REMOVE.

    Example:
      >>> from dpjax import Adjacency
      >>> from dpjax.accounting import pld
      >>> step = pld.poisson_gaussian(1.0, 0.01, adjacency=Adjacency.ADD_REMOVE)
      >>> print(f"{pld.epsilon(pld.compose(step, 1000), 1e-5):.3f}")
      1.828
    """
    validate.positive("noise_multiplier", noise_multiplier)
    validate.closed_unit("sampling_rate", sampling_rate)
    validate.adjacency(adjacency)
    return of(events.PoissonGaussian(noise_multiplier, sampling_rate, adjacency))


def subsampled_gdp(mu: ArrayLike, sampling_rate: ArrayLike) -> PLD:
    """The privacy-loss distribution of a μ-GDP mechanism on a batch of fixed size.

    Args:
      mu: the GDP parameter of the mechanism on its batch, f[*b], at least 0. For a
        clipped sum with Gaussian noise, μ is twice the clip norm over the noise
        standard deviation.
      sampling_rate: batch size over number of examples, f[*b], in [0, 1].

    Returns:
      A `PLD` of one step.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: the adjacency is REPLACE. Each batch is a uniformly random subset of fixed
    size, drawn without replacement and anew in each step.

    Reference: Bok, Su and Altschuler (2024), Proposition D.4, for the trade-off curve
    C_p(G_μ) of the batch with the sampling rate p.

    Example:
      >>> from dpjax.accounting import pld
      >>> run = pld.compose(pld.subsampled_gdp(0.5, 0.01), 1000)
      >>> print(f"{pld.epsilon(run, 1e-5):.3f}")
      0.719
    """
    validate.nonnegative("mu", mu, finite=False)
    validate.closed_unit("sampling_rate", sampling_rate)
    return of(events.FixedSizeGaussian(mu, sampling_rate))


def gaussian_mixture(
    noise_multiplier: ArrayLike,
    sensitivities: Sequence[ArrayLike],
    weights: Sequence[ArrayLike],
    *,
    adjacency: Adjacency,
) -> PLD:
    """The privacy-loss distribution of a Gaussian mechanism with a random sensitivity.

    Args:
      noise_multiplier: noise standard deviation in the units of sensitivities, f[*b],
        positive.
      sensitivities: the possible norms of an example's contribution, each f[*b], finite
        and at least 0. An example that does not take part contributes 0.
      weights: the probability of each sensitivity, f[*b] each, at least 0. The sum of
        the weights may differ from 1 by at most 1e-6. The code divides the weights by
        this sum.
      adjacency: ADD_REMOVE or ZERO_OUT.

    Returns:
      A `PLD` of one step. Its ε is infinite if traced weights do not add up to 1.

    Raises:
      ValueError: a static argument is out of range; sensitivities and weights are empty
        or differ in length; adjacency is not ADD_REMOVE or ZERO_OUT.

    Privacy: the contribution is drawn independently of all other examples and steps. If
    only a bound on the contribution's norm is known, then P[norm > s] must be at most
    P[sensitivity > s] for each s. With weights w_i, sensitivities s_i and the noise
    multiplier σ, the dominating pair is N(0, σ²) against Σ w_i N(s_i, σ²), in the worse
    of both orders. This one-dimensional pair also dominates contributions that are
    vectors of any directions. For REPLACE, no dominating pair is proven.

    Reference: Choquette-Choo, Ganesh, Steinke and Thakurta (2024), Corollary 4.7.

    Example:
      >>> from dpjax import Adjacency
      >>> from dpjax.accounting import pld
      >>> twice = pld.gaussian_mixture(  # two draws, each of which takes the example
      ...     1.0, (0.0, 1.0, 2.0), (0.9801, 0.0198, 0.0001),
      ...     adjacency=Adjacency.ADD_REMOVE)
      >>> print(f"{pld.epsilon(pld.compose(twice, 1000), 1e-5):.3f}")
      3.979
    """
    validate.positive("noise_multiplier", noise_multiplier)
    for one in sensitivities:
        validate.nonnegative("sensitivities", one)
    for one in weights:
        validate.nonnegative("weights", one)
    if not any(isinstance(one, Tracer) for one in weights):
        total = sum(np.asarray(one, np.float64) for one in weights)
        if not np.all(np.abs(total - 1) <= WEIGHTS_TOLERANCE):
            raise ValueError(f"weights must add up to one; got {weights!r}.")
    values, weights = tuple(sensitivities), tuple(weights)
    return of(events.GaussianMixture(noise_multiplier, values, weights, adjacency))


def laplace(scale: ArrayLike) -> PLD:
    """The privacy-loss distribution of the Laplace mechanism.

    Args:
      scale: the mean of the noise's absolute value, divided by the L1 sensitivity,
        f[*b], positive.

    Returns:
      A `PLD`. A single mechanism has δ(ε) = max(0, 1 − e^{(ε − 1/scale)/2}).

    Raises:
      ValueError: a static scale is not positive and finite.

    Privacy: each coordinate gets independent Laplace noise, whose mean absolute value
    is scale times the L1 sensitivity. The L1 sensitivity bounds the sum of the absolute
    changes of all coordinates. In units of this sensitivity, the dominating pair is
    Laplace noise around 0 against Laplace noise around 1. At every ε, a change of
    several coordinates has at most the δ of an equal total change of one coordinate.
    Proof: let two coordinates change by a and b, in units of the noise's mean absolute
    value. Integration over one coordinate gives δ(ε) <= max(0, 1 − e^{(ε − a − b)/2}).

    Example:
      >>> from dpjax.accounting import pld
      >>> print(f"{pld.epsilon(pld.compose(pld.laplace(5.0), 10), 1e-5):.3f}")
      1.990
    """
    validate.positive("scale", scale)
    return of(events.Laplace(scale))


def discrete_laplace(scale: ArrayLike, sensitivity: int) -> PLD:
    """The privacy-loss distribution of the Laplace mechanism on integers.

    Args:
      scale: the scale of the noise, f[*b], positive. The noise is an integer z with a
        probability proportional to e^{−|z|/scale}.
      sensitivity: the L1 sensitivity, an integer, at least 0.

    Returns:
      A `PLD`. The privacy losses of a single mechanism are exact if sensitivity is at
      most 2048.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: each integer coordinate gets independent noise. The L1 sensitivity bounds
    the sum of the absolute changes of all coordinates. The worst case is a change of a
    single coordinate by this sensitivity.

    Reference: Ghosh, Roughgarden and Sundararajan (2012), where the noise is called
    geometric.

    Example:
      >>> from dpjax.accounting import pld
      >>> run = pld.compose(pld.discrete_laplace(5.0, 1), 10)
      >>> print(f"{pld.epsilon(run, 1e-5):.3f}")
      1.996
    """
    validate.positive("scale", scale)
    sensitivity = validate.static_int("sensitivity", sensitivity, minimum=0)
    return of(events.DiscreteLaplace(scale, sensitivity))


def discrete_gaussian(stddev: ArrayLike, sensitivity: int) -> PLD:
    """The privacy-loss distribution of discrete Gaussian noise on one integer.

    Args:
      stddev: the parameter σ of the noise, f[*b], positive. The noise is an integer z
        with a probability proportional to e^{−z²/(2σ²)}. The standard deviation of z is
        at most σ.
      sensitivity: the maximum change of the released integer by one example, an
        integer, at least 0.

    Returns:
      A `PLD`. The ε of the PLD is inf if σ is above a limit, which depends on δ: about
      1e7 at δ = 1e-30, and about 2e7 at δ = 1e-5.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: the mechanism releases one integer. If one example changes several released
    integers, the release of each integer is a mechanism with its own sensitivity, and
    the PLD of their composition is a bound.

    Reference: Canonne, Kamath and Steinke (2020), Definition 1 and Theorem 7.

    Example:
      >>> from dpjax.accounting import pld
      >>> print(f"{pld.epsilon(pld.discrete_gaussian(10.0, 10), 1e-5):.3f}")
      4.378
    """
    validate.positive("stddev", stddev)
    sensitivity = validate.static_int("sensitivity", sensitivity, minimum=0)
    return of(events.DiscreteGaussian(stddev, sensitivity))


def randomized_response(noise_parameter: ArrayLike, num_buckets: ArrayLike) -> PLD:
    """The privacy-loss distribution of randomised response.

    Args:
      noise_parameter: the probability p that the answer is uniformly random over all
        buckets, f[*b], in (0, 1]. Otherwise the answer is the example's own bucket.
      num_buckets: the number k of buckets, f[*b], a whole number, at least 1.

    Returns:
      A `PLD` with exact losses. The largest loss is log(1 + k (1 − p) / p) for k >= 2,
      and 0 for k = 1.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: the adjacency is REPLACE, since the number of answers is released. One
    example's bucket is replaced by another bucket.

    Reference: Kairouz, Bonawitz and Ramage (2016).

    Example:
      >>> from dpjax.accounting import pld
      >>> print(f"{pld.delta(pld.randomized_response(0.5, 4), 1.0):.4f}")
      0.2852
    """
    validate.closed_unit("noise_parameter", noise_parameter)
    validate.positive("noise_parameter", noise_parameter)
    validate.positive("num_buckets", num_buckets)
    validate.whole_count("num_buckets", num_buckets)
    return of(events.RandomizedResponse(noise_parameter, num_buckets))


def pure(epsilon: ArrayLike) -> PLD:
    """The privacy-loss distribution that dominates every ε-DP mechanism.

    The table has the ε of four mechanisms that compare scores:

    | mechanism, with a bound Δ on the change of each score | ε |
    | --- | --- |
    | exponential mechanism: probability ∝ e^{score / t} | 2Δ / t |
    | permute-and-flip: acceptance probability e^{(score − best) / t} | 2Δ / t |
    | report-noisy-max: exponential or Laplace noise of scale t | 2Δ / t |
    | sparse vector: c positive answers, noise of scales t and s | Δ / t + 2cΔ / s |

    The first three mechanisms release the chosen option alone, without its score. Their
    ε is Δ / t instead of 2Δ / t if, between any two neighbouring data sets, either no
    score rises or no score falls. Counts under ADD_REMOVE are an example. Sparse vector
    draws Laplace noise of scale t once for the threshold, and Laplace noise of scale s
    for every score. Sparse vector releases only whether each noisy score exceeds the
    noisy threshold, and stops after the c-th score that exceeds the threshold.

    Args:
      epsilon: ε at δ = 0, f[*b], at least 0.

    Returns:
      A `PLD` with the dominating pair of randomised response, whose losses are ±ε.

    Raises:
      ValueError: a static ε is negative.

    Reference: Kairouz, Oh and Viswanath (2015), Theorem 3.3. For the table: McSherry
    and Talwar (2007), Theorem 6; McKenna and Sheldon (2020); Dwork and Roth (2014),
    Claim 3.9; Ding et al. (2021); Lyu, Su and Li (2017).

    Example:
      >>> from dpjax.accounting import pld
      >>> print(f"{pld.epsilon(pld.compose(pld.pure(0.1), 100), 1e-5):.3f}")
      4.307
    """
    validate.nonnegative("epsilon", epsilon, finite=False)
    return of(events.Pure(epsilon))


def epsilon_delta(epsilon: ArrayLike, delta: ArrayLike) -> PLD:
    """The privacy-loss distribution that dominates every (ε, δ)-DP mechanism.

    Args:
      epsilon: ε, f[*b], at least 0.
      delta: the δ at which ε holds, f[*b], in [0, 1].

    Returns:
      A `PLD` with an exact dominating pair. The privacy loss is infinite with
      probability δ, and otherwise ±ε, as for randomised response.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Kairouz, Oh and Viswanath (2015), Theorem 3.3 and its proof.

    Example:
      >>> from dpjax.accounting import pld
      >>> several = pld.compose(pld.epsilon_delta(0.1, 1e-8), 100)
      >>> print(f"{pld.epsilon(several, 1e-5):.3f}")
      4.330
    """
    validate.nonnegative("epsilon", epsilon, finite=False)
    validate.closed_unit("delta", delta)
    return of(events.EpsilonDelta(epsilon, delta))


def compose(pld: PLD, count: ArrayLike) -> PLD:
    """The privacy-loss distribution of all mechanisms of a PLD, repeated count times.

    Args:
      pld: the PLD of the mechanisms that are repeated.
      count: the number of repetitions, f[*b], a whole number, at least 0. The count may
        be traced.

    Returns:
      A `PLD`. A traced count that is not whole is rounded up to the next whole number,
      and derivatives with respect to the count are the derivatives at this whole
      number. If a traced count is negative, infinite or NaN, ε is infinite and δ is 1.

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
    """The product of two counts. A JAX product that may be inexact is rounded up."""
    if isinstance(one, int) and isinstance(other, int):
        return one * other
    if not any(isinstance(x, jax.Array) for x in (one, other)):
        return np.asarray(one, np.float64) * np.asarray(other, np.float64)
    # A product of 32-bit integers could wrap around to a smaller count.
    doubles = any(getattr(x, "dtype", None) == jnp.float64 for x in (one, other))
    dtype = jnp.float64 if doubles else jnp.float32
    return _multiply_arrays(jnp.asarray(one, dtype), jnp.asarray(other, dtype))


@without_compiler
def _multiply_arrays(one: jax.Array, other: jax.Array) -> jax.Array:
    """The product of two counts of one float dtype, NaN if a count is negative.

    A product that may be inexact is rounded up.
    """
    # The product with a negative count must stay invalid: −1 times −1 is a valid count.
    product = jnp.where(jnp.minimum(one, other) < 0, jnp.nan, one * other)
    # Up to 1 / eps the product is exact. Above 1 / eps, each of three roundings loses
    # at most half of eps, and the factor compensates for that loss.
    epsilon = jnp.finfo(one.dtype).eps
    exact = product <= 1 / epsilon
    return product * jnp.where(exact, 1.0, 1 + 4 * epsilon).astype(one.dtype)


def convolve(a: PLD, b: PLD) -> PLD:
    """The privacy-loss distribution of two mechanisms that run on the same data.

    The second mechanism may depend on the output of the first mechanism. In that case,
    b must be a PLD of the second mechanism for every possible output of the first
    mechanism. Both PLDs must be fixed before any output is seen. Otherwise the result
    is not valid.

    Args:
      a: the PLD of the first mechanism.
      b: the PLD of the second mechanism, on the same data, under the same adjacency.
        An exchange of a and b does not change δ(ε).

    Returns:
      A `PLD`.

    Raises:
      ValueError: one PLD is for ADD_REMOVE or ZERO_OUT, and the other PLD for REPLACE.

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
            "a and b must be for the same adjacency; got mechanisms for ADD_REMOVE "
            f"or ZERO_OUT and for REPLACE: {PLD(steps)}."
        )
    return PLD(steps)


def delta(pld: PLD, epsilon: ArrayLike) -> jax.Array:
    """An upper bound on the least δ at which the composed mechanism is (ε, δ)-DP.

    Args:
      pld: the PLD of the composition of all mechanisms.
      epsilon: f[*b], at least 0.

    Returns:
      δ, f[*b], rounded up. For T steps with sampling rate q, the relative error is
      about 1e-3 for δ from 1e-30 to T q / 10. The result is 1 for a traced ε that is
      negative or NaN, and if a number of an event is NaN or out of range.

    Raises:
      ValueError: a static ε is negative or NaN.

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
      pld: the PLD of the composition of all mechanisms.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      ε, f[*b], rounded up. For ε below about 40 and δ from 1e-15, the result is at most
      1e-3 above the exact ε. For T sampled steps with sampling rate q and δ above
      T q / 10, the error may reach 3e-3. For δ from 1e-100 to 1e-15, the error is
      usually also at most 1e-3, but may reach 0.1 if each example takes part in few
      steps. These three statements do not hold for noise multipliers below 0.03: for
      sampled steps, the result may then be several times the exact ε. For noise
      multipliers of about 1e-5 or less, the result may be inf, because the numerical
      integration of the step's distributions is not precise enough.
      The result is inf for a traced δ at or below 0 (0 at δ = 0 if no event reveals
      anything), for a NaN, and if a number of an event is out of range.

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
    validate.concrete_numbers("pld", (steps, *others))
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
      pld: the PLD of the composition of all mechanisms, with concrete numbers.
      epsilon: f[*b], at least 0.

    Returns:
      δ, f[*b], rounded down; 0 if a number of an event is out of range. JAX cannot
      trace this function, and the result has no derivative.

    Raises:
      ValueError: a number is traced; ε is negative; an event is `RandomAllocation`, for
        which `allocation.epsilon_lower` has a bound.

    Privacy: (ε, δ′)-DP fails for every δ′ below the result, for a certain pair of
    neighbouring data sets. In these data sets, all examples except the differing
    example contribute zero. For `subsampled_gdp`, the other examples instead contribute
    the opposite of the differing example. For a `TruncatedPoissonGaussian`, the bound
    subtracts a term for the probability that a sample exceeds the capacity. For events
    that state only ε or (ε, δ), the bound is for the worst mechanism with this
    guarantee.

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
      pld: the PLD of the composition of all mechanisms, with concrete numbers.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      ε, f[*b], rounded down; 0 if a number of an event is out of range. The result is
      mostly within 0.5 % of the upper bound `epsilon`, or within 0.005 if the upper
      bound is small. For `subsampled_gdp`, the result may be 15 % below the upper
      bound, because data sets that attain the dominating pair are not known. JAX cannot
      trace this function, and the result has no derivative.

    Raises:
      ValueError: a number is traced; δ is not strictly between 0 and 1; an event is
        `RandomAllocation`, for which `allocation.epsilon_lower` has a bound.

    Privacy: (ε′, δ)-DP fails for every ε′ below the result, for a certain pair of
    neighbouring data sets, which `delta_lower` describes.

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
