"""Privacy-loss distributions of Laplace, discrete and other non-Gaussian mechanisms."""

from dpjax._core import validate
from dpjax._core.typing import ArrayLike
from dpjax.accounting import events
from dpjax.accounting.pld._distribution import PLD, of


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
      A `PLD`. The discrete pair of a single mechanism is exact if sensitivity is at
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
      A `PLD`, whose discrete pair is exact. The largest loss is log(1 + k (1 − p) / p).

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

    The first three mechanisms release the chosen option alone, without its score. If no
    score rises, or no score falls, between two neighbouring data sets, as for counts
    under ADD_REMOVE, their ε is Δ / t in place of 2Δ / t. Sparse vector draws Laplace
    noise of scale t for the threshold once, and of scale s for every score. Sparse
    vector releases only whether each noisy score exceeds the noisy threshold, and stops
    after the c-th score that exceeds the threshold.

    Args:
      epsilon: ε at δ = 0, f[*b], at least 0.

    Returns:
      A `PLD` with the pair of randomised response, whose losses are ±ε.

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
