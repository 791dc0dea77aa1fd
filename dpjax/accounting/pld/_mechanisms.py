"""Privacy-loss distributions of Gaussian noise, sampled or not, and of other noise."""

from collections.abc import Sequence

import numpy as np

from dpjax._core import validate
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax.accounting import events
from dpjax.accounting._numerics.pld.mechanisms import WEIGHTS_TOLERANCE
from dpjax.accounting.pld._distribution import PLD, of


def gaussian(mu: ArrayLike) -> PLD:
    """The privacy-loss distribution of a μ-GDP mechanism.

    Args:
      mu: the GDP parameter, f[*b], at least 0. For a Gaussian mechanism, μ is the
        sensitivity over the noise standard deviation.

    Returns:
      A `PLD`. If all events of a PLD are Gaussian mechanisms, its δ and ε are exactly
      those of `gdp`.

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
    noise_multiplier: ArrayLike,
    sampling_rate: ArrayLike,
    *,
    adjacency: Adjacency,
) -> PLD:
    """The privacy-loss distribution of the Gaussian mechanism on a Poisson sample.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      sampling_rate: the probability that an example takes part, f[*b], in [0, 1].
      adjacency: which data sets are compared. Under ADD_REMOVE and ZERO_OUT, one
        example is present in one data set, and is absent or contributes zero in the
        other one. Under REPLACE, another example replaces it.

    Returns:
      A `PLD` of one step.

    Raises:
      ValueError: a static argument is out of range; adjacency is not an `Adjacency`.

    Privacy: every example takes part independently of all others and of other steps,
    and contributes at most one clip norm. Under ADD_REMOVE and ZERO_OUT the dominating
    pair is N(0, σ²) against (1 − q) N(0, σ²) + q N(1, σ²), in the worse of both
    directions. Under REPLACE the dominating pair is (1 − q) N(0, σ²) + q N(1, σ²)
    against (1 − q) N(0, σ²) + q N(−1, σ²). This pair dominates all contributions in the
    unit ball (docs/accounting.md has the proof).

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
      mu: the GDP parameter of the mechanism on its batch, f[*b], at least 0. Under
        REPLACE, μ is twice the clip norm over the noise standard deviation.
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
      noise_multiplier: noise standard deviation over the unit of sensitivities, f[*b],
        positive.
      sensitivities: the possible norms of an example's contribution, each f[*b], finite
        and at least 0. An example that does not take part contributes 0.
      weights: the probability of each sensitivity, f[*b] each, at least 0. Their sum
        may differ from 1 by at most 1e-6, and the weights are divided by their sum.
      adjacency: ADD_REMOVE or ZERO_OUT.

    Returns:
      A `PLD` of one step. Its ε is infinite if traced weights do not add up to 1.

    Raises:
      ValueError: a static argument is out of range; adjacency is not ADD_REMOVE or
        ZERO_OUT.

    Privacy: the contribution is drawn independently of all other examples and steps. If
    only a bound on the contribution's norm is known, then P[norm > s] must be at most
    P[sensitivity > s] for each s. With weights w_i, sensitivities s_i and the noise
    multiplier σ, the dominating pair is N(0, σ²) against Σ w_i N(s_i, σ²), in the worse
    of both orders. This one-dimensional pair also dominates vector contributions of any
    directions. No such statement is proven for REPLACE.

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
    if len(sensitivities) != len(weights) or not sensitivities:
        raise ValueError(
            "weights must have one entry for each of the sensitivities, and at least "
            f"one entry; got {weights!r} for {sensitivities!r}."
        )
    for one in sensitivities:
        validate.nonnegative("sensitivities", one)
    for one in weights:
        validate.nonnegative("weights", one)
    known = [validate.concrete(one) for one in weights]
    if not any(one is None for one in known):
        total = sum(np.asarray(one, np.float64) for one in known if one is not None)
        if not np.all(np.abs(total - 1) <= WEIGHTS_TOLERANCE):
            raise ValueError(f"weights must add up to one; got {weights!r}.")
    if validate.adjacency(adjacency) is Adjacency.REPLACE:
        raise ValueError(
            f"adjacency must be ADD_REMOVE or ZERO_OUT; got {adjacency!r}."
        )
    values, weights = tuple(sensitivities), tuple(weights)
    return of(events.GaussianMixture(noise_multiplier, values, weights, adjacency))


def laplace(scale: ArrayLike) -> PLD:
    """The privacy-loss distribution of the Laplace mechanism.

    Args:
      scale: the scale of the noise over the L1 sensitivity, f[*b], positive. The scale
        is the mean of the noise's absolute value.

    Returns:
      A `PLD`. A single mechanism has δ(ε) = max(0, 1 − e^{(ε − 1/scale)/2}).

    Raises:
      ValueError: a static scale is not positive and finite.

    Privacy: each coordinate gets independent Laplace noise of this scale, and one
    example moves the sum of all coordinates' absolute changes by at most the
    sensitivity. The dominating pair is Lap(0) against Lap(1). A change of several
    coordinates has a smaller δ at every ε than an equal total change of one coordinate:
    for changes a and b of two coordinates in units of the scale, an integral over one
    coordinate gives δ(ε) <= 1 − e^{(ε − a − b)/2}.

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

    Privacy: each integer coordinate gets independent noise, and one example moves the
    sum of all coordinates' absolute changes by at most sensitivity. As for `laplace`,
    the change of one coordinate is the worst case.

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
      A `PLD`. The ε of the PLD is inf if σ is above about 1e7.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: one integer is released. If one example moves several released integers,
    each integer is a mechanism with its own sensitivity, and the composition of these
    mechanisms is a bound.

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
      A `PLD` with exact losses. The largest loss is log(1 + k (1 − p) / p).

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
    | permute-and-flip: acceptance e^{(score − largest score) / t} | 2Δ / t |
    | report-noisy-max: exponential or Laplace noise of scale t | 2Δ / t |
    | sparse vector: c positive answers, noise of scales t and s | Δ / t + 2cΔ / s |

    The first three mechanisms release the chosen option alone, without its score. Their
    ε is Δ / t in place of 2Δ / t if no score rises, or if no score falls, between two
    neighbouring data sets. Counts under ADD_REMOVE are an example. Sparse vector draws
    Laplace noise of scale t for the threshold once, and of scale s for every score.
    Sparse vector releases only whether each noisy score exceeds the noisy threshold,
    and stops after the c-th score that exceeds the threshold.

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
