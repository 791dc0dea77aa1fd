"""Lower bounds on ε and μ from the scores of independent attacks.

An attack gives a score to each run of a mechanism, with or without an example. A test
guesses that the example took part if the score is above a threshold. Let a be the
test's false-positive rate and b its true-positive rate. If the mechanism is (ε, δ)-DP,
then b <= e^ε a + δ and 1 − a <= e^ε (1 − b) + δ. If the mechanism is μ-GDP, then
Φ⁻¹(b) − Φ⁻¹(a) <= μ, where Φ is the standard normal distribution function. Clopper and
Pearson's confidence intervals bound the rates. These intervals assume that the scores
with the example are independent draws from one distribution, and that the scores
without the example are independent draws from another distribution.

Suppose that the threshold is the kth largest of n scores, and that a new score has the
same distribution as these n scores. Each of the following two statements holds with the
confidence of its bound. The probability that the new score is above the threshold is at
most the upper confidence bound for k − 1 successes in n trials. The probability that
the new score is at least the threshold is at least the lower confidence bound for k
successes in n trials. A union bound over k therefore gives a confidence band over all
thresholds.

For Gaussian scores of a Gaussian mechanism, `gaussian_mu_lower` uses no thresholds. Its
bound is from the means and the standard deviation of the scores.

`auroc`, `true_positive_rate` and `bootstrap_quantiles` estimate an attack's success,
without a confidence bound.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr, ndtri

from dpjax._core import validate
from dpjax._core.float64 import ULP, float64
from dpjax._core.keys import stream
from dpjax._core.searches import bisect
from dpjax._core.typing import ArrayLike, Key
from dpjax.accounting._numerics.pld.pairs import upper_tail

# The relative error of the binomial tail `upper_tail` is less than this margin.
_MARGIN = 2e-8
_binomial_tail = jnp.vectorize(upper_tail)


def lower_bound(successes: ArrayLike, trials: int, error: ArrayLike) -> jax.Array:
    """A lower confidence bound for a success probability, from a number of successes.

    The trials are independent. The probability that the bound exceeds the true success
    probability is at most `error`.

    Args:
      successes: the number of successes, i[*b].
      trials: the number of trials.
      error: the allowed probability that the bound is wrong, f[*b].

    Returns:
      The bound, f64[*b].
    """
    k = jnp.asarray(successes, jnp.float64)
    # Clopper and Pearson (1934), https://doi.org/10.1093/biomet/26.4.404: the largest p
    # for which P(Bin(n, p) >= k) is at most the error.
    n = jnp.asarray(trials, k.dtype)
    p = bisect(
        lambda p: _binomial_tail(k, n, p) <= error * (1 - _MARGIN),
        jnp.ones_like(k),
        jnp.zeros_like(k),
        times=64,
    )
    # Without successes, the bound is 0.
    return jnp.where(k > 0, p, 0.0)


def upper_bound(successes: ArrayLike, trials: int, error: ArrayLike) -> jax.Array:
    """An upper confidence bound for a success probability, f64[*b].

    The arguments are those of `lower_bound`. The probability that the true success
    probability exceeds the bound is at most `error`.
    """
    # The upper bound for successes is 1 minus the lower bound for failures.
    return 1 - lower_bound(trials - jnp.asarray(successes, jnp.float64), trials, error)


def choose_ranks(trials: int) -> np.ndarray:
    """Choose some of the ranks 1, ..., n of n = trials sorted scores, i[*].

    For each chosen rank k, `band` uses the kth largest score. Neighbouring chosen ranks
    differ by about half of √(k (1 − k/n)), and by at least 1. This root is the standard
    deviation of the binomial distribution with n trials and success probability k/n.
    """
    # With few ranks, the union bound costs little. The bounds at two neighbouring ranks
    # differ little.
    steps = int(np.ceil(2 * np.pi * np.sqrt(trials)))
    spaced = trials * np.sin(np.linspace(0, np.pi / 2, steps + 1)) ** 2
    return np.unique(np.clip(np.rint(spaced), 1, trials)).astype(np.int32)


class _Rates(NamedTuple):
    """Confidence bounds on the rates of a test, with one entry for each threshold.

    Attributes:
      false_positive: upper bounds on the false-positive rates, f64[*k].
      true_positive: lower bounds on the true-positive rates, f64[*k].
    """

    false_positive: jax.Array
    true_positive: jax.Array


def _epsilon(rates: _Rates, delta: jax.Array) -> jax.Array:
    """Compute lower bounds on ε from bounds on the rates of a test, f64[*k].

    With the false-positive rate a and the true-positive rate b, (ε, δ)-DP is refuted if
    b > e^ε a + δ, or if 1 − a > e^ε (1 − b) + δ. The result is the supremum of the
    refuted ε, rounded down, or 0 if no ε is refuted.
    """
    a, b = rates
    # Wasserman and Zhou (2010), Theorem 2.4, https://arxiv.org/abs/0811.2501:
    # b <= e^ε a + δ and 1 − a <= e^ε (1 − b) + δ.
    ratios = jnp.stack([(b - delta) / a, (1 - a - delta) / (1 - b)])
    epsilon = jnp.log(jnp.maximum(jnp.max(ratios, axis=0), 1.0))
    # The margin covers the rounding of the ratio and of the logarithm. If δ is NaN, the
    # result is 0.
    return jnp.where(delta >= 0, epsilon * (1 - 16 * ULP), 0.0)


def _mu(rates: _Rates) -> jax.Array:
    """Compute lower bounds on μ from bounds on the rates of a test, f64[*k]."""
    a, b = rates
    # Dong, Roth and Su (2022), Definition 6, https://arxiv.org/abs/1905.02383:
    # 1 − b >= Φ(Φ⁻¹(1 − a) − μ).
    # The margin covers the rounding of the two quantiles, which may nearly cancel.
    gap = ndtri(b) - ndtri(a) - 64 * ULP * (jnp.abs(ndtri(b)) + jnp.abs(ndtri(a)))
    return jnp.where((a < 1) & (b > 0), jnp.maximum(gap, 0.0), 0.0)


def replace_nan_scores(
    scores_in: jax.Array, scores_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Replace each NaN by a wrong guess: −inf in scores_in, and inf in scores_out."""
    return (
        jnp.where(jnp.isnan(scores_in), -jnp.inf, scores_in),
        jnp.where(jnp.isnan(scores_out), jnp.inf, scores_out),
    )


def band(
    scores_in: jax.Array, scores_out: jax.Array, error: jax.Array, *, union: bool
) -> tuple[jax.Array, _Rates]:
    """Compute confidence bounds on a test's rates, at thresholds in descending order.

    Args:
      scores_in: the scores with the example's participation, f[n].
      scores_out: the scores without the example's participation, f[m].
      error: the allowed probability that the bounds are wrong, 1 − confidence, f[].
      union: whether the bounds hold at all thresholds simultaneously. If False, the
        bounds hold only at a single threshold, whose rank in scores_out is fixed in
        advance.

    Returns:
      The thresholds, and bounds on the rates at each threshold. With `union`, the
      thresholds are the scores in scores_out whose ranks `choose_ranks` chooses.
      Otherwise, the thresholds are all scores in scores_out.
    """
    scores_in, scores_out = replace_nan_scores(scores_in, scores_out)
    ranks_in, ranks_out = (
        choose_ranks(x.size) if union else np.arange(1, x.size + 1)
        for x in (scores_in, scores_out)
    )
    # Each of the two rates has half of the error. In a union bound, all ranks of a rate
    # have equal shares of this half.
    errors = [error / 2 / (len(k) if union else 1) for k in (ranks_in, ranks_out)]
    # For each rank k above, these arrays have the kth largest score.
    thresholds = jnp.sort(scores_out, descending=True)[ranks_out - 1]
    scores_at_ranks = jnp.sort(scores_in, descending=True)[ranks_in - 1]
    false_positive = upper_bound(ranks_out - 1, scores_out.size, errors[1])
    true_positive = lower_bound(ranks_in, scores_in.size, errors[0])
    # The true-positive bound at a threshold is the bound at the lowest score in
    # `scores_at_ranks` above the threshold. `above` counts the scores in
    # `scores_at_ranks` above each threshold. The signs give the ascending order that
    # searchsorted needs.
    above = jnp.searchsorted(-scores_at_ranks, -thresholds)
    true_positive = jnp.where(above > 0, true_positive[jnp.maximum(above, 1) - 1], 0.0)
    return thresholds, _Rates(false_positive, true_positive)


@float64("down", vectors=(0, 1), elementwise=True)
def _epsilon_lower64(
    scores_in: jax.Array, scores_out: jax.Array, delta: jax.Array, confidence: jax.Array
) -> jax.Array:
    _, rates = band(scores_in, scores_out, 1 - confidence, union=True)
    return jnp.max(_epsilon(rates, delta))


@float64("down", vectors=(0, 1), elementwise=True)
def _mu_lower64(
    scores_in: jax.Array, scores_out: jax.Array, confidence: jax.Array
) -> jax.Array:
    _, rates = band(scores_in, scores_out, 1 - confidence, union=True)
    return jnp.max(_mu(rates))


@float64("down", vectors=(0, 1), elementwise=True)
def _epsilon_at64(
    scores_in: jax.Array,
    scores_out: jax.Array,
    threshold: jax.Array,
    delta: jax.Array,
    confidence: jax.Array,
) -> jax.Array:
    scores_in, scores_out = replace_nan_scores(scores_in, scores_out)
    # The threshold does not depend on these scores, so each count is binomial.
    hits, alarms = (jnp.sum(x > threshold) for x in (scores_in, scores_out))
    error = (1 - confidence) / 2
    false_positive = upper_bound(alarms, scores_out.size, error)
    true_positive = lower_bound(hits, scores_in.size, error)
    return _epsilon(_Rates(false_positive, true_positive), delta)


# The threshold equals a score. If the threshold were rounded down, this score would be
# above the threshold. So the threshold is rounded up.
@float64("up", vectors=(0, 1), elementwise=True)
def _best_threshold64(
    scores_in: jax.Array, scores_out: jax.Array, delta: jax.Array, confidence: jax.Array
) -> jax.Array:
    thresholds, rates = band(scores_in, scores_out, 1 - confidence, union=False)
    return thresholds[jnp.argmax(_epsilon(rates, delta))]


def check_scores(**scores: ArrayLike) -> None:
    """Raise a ValueError unless each array of scores has a non-empty last axis."""
    for name, value in scores.items():
        if jnp.ndim(value) == 0 or jnp.shape(value)[-1] == 0:
            raise ValueError(f"{name} must have a non-empty last axis; got {value!r}.")


def check_attack(
    confidence: ArrayLike, *, delta: ArrayLike = 0.0, **scores: ArrayLike
) -> None:
    """Check the arguments of a bound from scores.

    Raises:
      ValueError: an array of scores is a scalar or has an empty last axis; the
        confidence is not in (1/2, 1); or δ is not in [0, 1).
    """
    check_scores(**scores)
    validate.open_unit("confidence", confidence)
    concrete = validate.concrete(confidence)
    if concrete is not None and not (concrete > 0.5).all():
        raise ValueError(f"confidence must be above 0.5; got {confidence!r}.")
    validate.half_open_unit("delta", delta)


def epsilon_lower(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    delta: ArrayLike,
    *,
    confidence: ArrayLike,
) -> jax.Array:
    """A lower confidence bound on ε, from an attack's scores at many thresholds.

    Args:
      scores_in: the attack's scores with the example's participation, f[*b, n]. Larger
        scores are evidence of participation. A NaN in scores_in or scores_out counts as
        a wrong guess of the attack.
      scores_out: the scores without the example's participation, f[*b, m].
      delta: δ, f[*b], in [0, 1).
      confidence: the bound holds with at least this probability, f[*b], in (0.5, 1).

    Returns:
      A lower bound ε, f[*b], rounded down: with this confidence, the mechanism is not
      (ε′, δ)-DP for any ε′ < ε. The thresholds are up to about 2π√m of the scores in
      scores_out, at certain ranks. The result is the largest of the bounds at these
      thresholds, or 0 if no bound is positive. The bounds on the true-positive rate use
      up to about 2π√n of the scores in scores_in. By a union bound over the ranks of
      all scores in use, all bounds hold simultaneously.

    Raises:
      ValueError: an argument is out of range, or there are no scores.

    Privacy: the result bounds the mechanism's ε from below, and is no guarantee. The
    bound assumes that all scores are independent, that all scores_in have one
    distribution, and that all scores_out have one distribution. Scores are independent
    if each score is from a run with its own key, or if the scores are from canaries in
    one run and have independent noise. For dependent scores, use
    `one_run_epsilon_lower`.

    Reference: Wasserman and Zhou (2010), Theorem 2.4, with confidence limits for the
    error rates by Clopper and Pearson (1934).

    Example:
      >>> import numpy as np
      >>> noise = np.random.default_rng(0).standard_normal((2, 5000))
      >>> found = epsilon_lower(noise[0] + 1.0, noise[1], 1e-5, confidence=0.99)
      >>> print(f"{found:.2f} of 4.38")
      1.64 of 4.38
    """
    check_attack(confidence, delta=delta, scores_in=scores_in, scores_out=scores_out)
    return _epsilon_lower64(scores_in, scores_out, delta, confidence)


def epsilon_at(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    delta: ArrayLike,
    *,
    threshold: ArrayLike,
    confidence: ArrayLike,
) -> jax.Array:
    """A lower confidence bound on ε, from an attack with one threshold.

    Args:
      scores_in: the attack's scores with the example's participation, f[*b, n], as for
        `epsilon_lower`.
      scores_out: the scores without the example's participation, f[*b, m].
      delta: δ, f[*b], in [0, 1).
      threshold: the attack guesses participation for a score above this number, f[*b].
        The threshold must not depend on scores_in or scores_out: choose the threshold
        from other scores, by `best_threshold`.
      confidence: the bound holds with at least this probability, f[*b], in (0.5, 1).

    Returns:
      A lower bound ε, f[*b], rounded down. The bound has the same meaning and makes the
      same assumptions as the bound of `epsilon_lower`.

    Raises:
      ValueError: an argument is out of range, or there are no scores.

    Reference: Wasserman and Zhou (2010), Theorem 2.4, with confidence limits for the
    error rates by Clopper and Pearson (1934).

    Example:
      >>> import numpy as np
      >>> noise = np.random.default_rng(0).standard_normal((2, 5000))
      >>> inside, outside = noise[0] + 1.0, noise[1]
      >>> t = best_threshold(inside[:2500], outside[:2500], 1e-5, confidence=0.99)
      >>> found = epsilon_at(
      ...     inside[2500:], outside[2500:], 1e-5, threshold=t, confidence=0.99)
      >>> print(f"{found:.2f} of 4.38")
      1.83 of 4.38
    """
    check_attack(confidence, delta=delta, scores_in=scores_in, scores_out=scores_out)
    return _epsilon_at64(scores_in, scores_out, threshold, delta, confidence)


def best_threshold(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    delta: ArrayLike,
    *,
    confidence: ArrayLike,
) -> jax.Array:
    """The threshold at which the given scores would prove the largest bound on ε.

    Pass the threshold to `epsilon_at` together with other, independent scores.

    Args:
      scores_in: the attack's scores with the example's participation, f[*b, n], as for
        `epsilon_lower`.
      scores_out: the scores without the example's participation, f[*b, m].
      delta: δ, f[*b], in [0, 1).
      confidence: the confidence of the bound of `epsilon_at`, f[*b], in (0.5, 1).

    Returns:
      The threshold, f[*b]: one of scores_out, rounded up to the dtype of the result. A
      NaN in scores_out counts as inf.

    Raises:
      ValueError: an argument is out of range, or there are no scores.

    Example:
      >>> import numpy as np
      >>> inside, outside = np.array([2.0, 3.0]), np.array([0.0, 1.0])
      >>> print(best_threshold(inside, outside, 0.0, confidence=0.9))
      1.0
    """
    check_attack(confidence, delta=delta, scores_in=scores_in, scores_out=scores_out)
    return _best_threshold64(scores_in, scores_out, delta, confidence)


def mu_lower(
    scores_in: ArrayLike, scores_out: ArrayLike, *, confidence: ArrayLike
) -> jax.Array:
    """A lower confidence bound on μ, from an attack's scores at many thresholds.

    Args:
      scores_in: the attack's scores with the example's participation, f[*b, n], as for
        `epsilon_lower`.
      scores_out: the scores without the example's participation, f[*b, m].
      confidence: the bound holds with at least this probability, f[*b], in (0.5, 1).

    Returns:
      A lower bound μ, f[*b], rounded down: with this confidence, the mechanism is not
      μ′-GDP for any μ′ < μ. The bound makes the same assumptions as the bound of
      `epsilon_lower`. In particular, the scores need not be Gaussian.

    Raises:
      ValueError: an argument is out of range, or there are no scores.

    Reference: Dong, Roth and Su (2022), Definition 6, with confidence limits for the
    error rates by Clopper and Pearson (1934).

    Example:
      >>> import numpy as np
      >>> noise = np.random.default_rng(0).standard_normal((2, 5000))
      >>> print(f"{mu_lower(noise[0] + 1.0, noise[1], confidence=0.99):.2f} of 1")
      0.84 of 1
    """
    check_attack(confidence, scores_in=scores_in, scores_out=scores_out)
    return _mu_lower64(scores_in, scores_out, confidence)


def find_refuted_value(
    is_refuted: Callable[[jax.Array], jax.Array], upper_end: ArrayLike, times: int
) -> jax.Array:
    """Find a value in [0, upper_end] that an attack's scores refute, by bisection.

    `is_refuted(value)` states whether the scores refute a value of a parameter. Suppose
    that the scores refute exactly the values up to a limit below `upper_end`. Then the
    result is this limit, up to the precision of `times` bisections. If the scores do
    not refute 0, the result is 0. The function never tests the value `upper_end`.
    """
    zero = jnp.zeros(())
    refuted = bisect(is_refuted, jnp.asarray(upper_end), zero, times=times)
    return jnp.where(is_refuted(zero), refuted, 0.0)


# The minimum number of scores for which the quadrature below is exact to 1e-14.
_MIN_SCORES = 32
# Nodes of the quadrature, in standard deviations.
_NODES = np.linspace(-12.0, 12.0, 193)


@float64("down", vectors=(0, 1), elementwise=True)
def _gaussian_mu_lower64(
    scores_in: jax.Array,
    scores_out: jax.Array,
    confidence: jax.Array,
    rounding: jax.Array,
) -> jax.Array:
    n, m = scores_in.size, scores_out.size
    # Degrees of freedom of the pooled variance.
    freedom = n + m - 2
    # Comparisons detect equal scores exactly. The computed variance of equal scores may
    # be positive, since a fused multiply-add leaves a rounding error.
    constant = (jnp.min(scores_in) == jnp.max(scores_in)) & (
        jnp.min(scores_out) == jnp.max(scores_out)
    )
    largest = jnp.maximum(jnp.max(jnp.abs(scores_in)), jnp.max(jnp.abs(scores_out)))
    # After subtracting an offset, rounding is relative to the range of the scores.
    offset = scores_out[0]
    scores_in, scores_out = scores_in - offset, scores_out - offset
    centered = jnp.maximum(*(jnp.max(jnp.abs(x)) for x in (scores_in, scores_out)))
    gap = jnp.mean(scores_in) - jnp.mean(scores_out)
    stddev = jnp.sqrt((n * jnp.var(scores_in) + m * jnp.var(scores_out)) / freedom)
    # If every score has an error of at most e, then the errors of the means and of the
    # standard deviation are at most about e. A float64 sum of k terms has a relative
    # error of at most k ULP / 2.
    error = rounding * largest + (n + m + 16) * ULP * centered
    gap, stddev = gap - 2 * error, stddev + 2 * error
    gap_scale = np.sqrt(1 / n + 1 / m)
    # Without separation or without spread, t is a finite number that is not used.
    is_separated = (stddev > 0) & (gap > 0)
    safe_stddev = jnp.where(is_separated, stddev, 1.0)
    t = jnp.where(is_separated, gap, 1.0) / (safe_stddev * gap_scale)

    # Owen (1968), https://doi.org/10.1080/00401706.1968.10490580: with w² = χ²_ν / ν
    # and θ = μ / √(1/n + 1/m), P((Z + θ) / w >= t) = E Φ(θ − t w). The logarithm x of
    # w has the density exp(ν (x − e^{2x}/2)), up to a factor, and a standard deviation
    # near 1 / √(2ν). Since this function is smooth and decays fast, a sum over equal
    # steps equals the integral to within rounding.
    x = _NODES / np.sqrt(2 * freedom)
    weights = np.exp(freedom * (x - np.expm1(2 * x) / 2))
    w, weights = np.exp(x), weights / weights.sum()

    def is_refuted(theta: jax.Array) -> jax.Array:
        tail = jnp.sum(weights * ndtr(theta - t * w))
        # The factor is far above the rounding error of the tail.
        return tail * (1 + 1e-9) <= 1 - confidence

    theta = find_refuted_value(is_refuted, 2 * t, times=64)
    mu = jnp.where(is_separated, theta * gap_scale * (1 - (n + m) * ULP), 0.0)
    return jnp.where(constant & (gap > 0), jnp.inf, mu)


def _machine_epsilon(scores: ArrayLike) -> float:
    """The machine epsilon of the scores' dtype; 0 for integer dtypes."""
    dtype = getattr(scores, "dtype", np.dtype(np.float64))
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


def gaussian_mu_lower(
    scores_in: ArrayLike, scores_out: ArrayLike, *, confidence: ArrayLike
) -> jax.Array:
    """A lower confidence bound on a Gaussian mechanism's μ, from an attack's scores.

    Args:
      scores_in: the scores with the example's participation, f[*b, n]. Scores of
        `matched_filter` give the tightest bound.
      scores_out: the scores without the example's participation, f[*b, m]. n + m must
        be at least 32.
      confidence: the bound holds with at least this probability, f[*b], in (0.5, 1).

    Returns:
      A lower bound on μ, f[*b], rounded down. Let q be the difference of the means of
      the two distributions of scores, divided by the standard deviation of these
      distributions. The μ of the mechanism is at least q. For q >= 0 and in exact
      arithmetic, the bound would exceed q with a probability of exactly
      1 − confidence. The returned bound is slightly lower, since it allows each score
      an error of two units in the last place of the largest score. The returned bound
      is never negative. If all scores_in are equal and all scores_out are equal, the
      bound is inf if scores_in exceed scores_out by more than these errors, and 0
      otherwise. If a score is NaN, the bound is 0.

    Raises:
      ValueError: an argument is out of range, or there are too few scores.

    Privacy: the result bounds the mechanism's μ from below, and is no guarantee. The
    bound assumes that all scores are independent and Gaussian with one variance, that
    all scores_in have one mean, and that all scores_out have one mean. The variance and
    the means may be unknown. `matched_filter` computes such scores from releases of
    `add_gaussian_noise`, `tree_momentum` and `correlated_noise`, for canaries with
    gradients of equal norm. For all other scores, such as the scores of canaries that
    take part in random steps, use `mu_lower`.

    Reference: Owen (1968), on the non-central t distribution.

    Example:
      >>> import numpy as np
      >>> noise = 3.0 * np.random.default_rng(0).standard_normal((2, 5000))
      >>> found = gaussian_mu_lower(noise[0] + 3.0, noise[1], confidence=0.99)
      >>> print(f"{found:.3f} of 1")
      0.931 of 1
    """
    check_attack(confidence, scores_in=scores_in, scores_out=scores_out)
    count = np.shape(scores_in)[-1] + np.shape(scores_out)[-1]
    if count < _MIN_SCORES:
        raise ValueError(
            f"scores_in and scores_out must contain at least {_MIN_SCORES} scores in "
            f"total; got {count}."
        )
    # Two units in the last place of the largest score.
    rounding = 2 * max(_machine_epsilon(scores_in), _machine_epsilon(scores_out))
    return _gaussian_mu_lower64(scores_in, scores_out, confidence, rounding)


@float64("nearest", vectors=(0, 1), elementwise=True)
def _auroc64(scores_in: jax.Array, scores_out: jax.Array) -> jax.Array:
    ordered = jnp.sort(scores_out)
    below, at_most = (
        jnp.searchsorted(ordered, scores_in, side=side) for side in ("left", "right")
    )
    # Pairs of equal scores count half. Without the cast, JAX would divide int32 numbers
    # in float32.
    return jnp.mean((below + at_most).astype(scores_in.dtype) / 2) / scores_out.size


@float64("nearest", vectors=(0, 1), elementwise=True)
def _true_positive_rate64(
    scores_in: jax.Array, scores_out: jax.Array, false_positive_rate: jax.Array
) -> jax.Array:
    ordered = jnp.sort(scores_out, descending=True)
    # If rounding moves the product just below an integer, the factor moves it back.
    allowed = jnp.floor(false_positive_rate * scores_out.size * (1 + 1e-12))
    index = jnp.minimum(allowed, scores_out.size - 1).astype(jnp.int32)
    above = jnp.mean(scores_in > ordered[index])
    return jnp.where(allowed >= scores_out.size, 1.0, above)


def auroc(scores_in: ArrayLike, scores_out: ArrayLike) -> jax.Array:
    """Estimate the area under the ROC curve, from pairs of scores.

    Args:
      scores_in: the scores with the example's participation, f[*b, n].
      scores_out: the scores without the example's participation, f[*b, m].

    Returns:
      The share of pairs in which the score of scores_in is larger, f[*b], in [0, 1]. A
      pair is any score of scores_in with any score of scores_out. A pair of equal
      scores counts half. A NaN counts as larger than every number. Random guessing
      gives 0.5.

    Raises:
      ValueError: there are no scores.

    Example:
      >>> import numpy as np
      >>> print(auroc(np.array([1.0, 3.0]), np.array([0.0, 1.0])))
      0.875
    """
    check_scores(scores_in=scores_in, scores_out=scores_out)
    return _auroc64(scores_in, scores_out)


def true_positive_rate(
    scores_in: ArrayLike, scores_out: ArrayLike, false_positive_rate: ArrayLike
) -> jax.Array:
    """Estimate the true-positive rate at a given false-positive rate.

    Args:
      scores_in: the scores with the example's participation, f[*b, n].
      scores_out: the scores without the example's participation, f[*b, m].
      false_positive_rate: the maximum share of scores_out that may be above the
        threshold of the attack, f[*b], in [0, 1].

    Returns:
      The share of scores_in above t, f[*b], where t is the lowest threshold such that
      the share of scores_out above t is at most false_positive_rate. A NaN in scores_in
      counts as below t, and a NaN in scores_out counts as above every other score. If
      false_positive_rate is 1, the result is 1. `accounting.fdp.true_positive_rate`
      computes the maximum true-positive rate that a guarantee allows.

    Raises:
      ValueError: there are no scores, or the rate is out of range.

    Example:
      >>> import numpy as np
      >>> inside, outside = np.array([1.0, 3.0, 5.0, 6.0]), np.arange(4.0)
      >>> print(true_positive_rate(inside, outside, 0.25))
      0.75
    """
    check_scores(scores_in=scores_in, scores_out=scores_out)
    validate.closed_unit("false_positive_rate", false_positive_rate)
    return _true_positive_rate64(scores_in, scores_out, false_positive_rate)


def bootstrap_quantiles(
    statistic: Callable[[jax.Array, jax.Array], jax.Array],
    scores_in: jax.Array,
    scores_out: jax.Array,
    quantiles: ArrayLike,
    *,
    num_samples: int,
    key: Key,
) -> jax.Array:
    """Estimate the spread of a statistic of scores by bootstrap quantiles.

    Bootstrap quantiles are not bounds. For a statistic such as ε, the quantiles tend to
    be too small if there are few scores. The quantiles ignore the tails of the scores'
    distributions beyond the observed scores.

    Args:
      statistic: a function from scores_in f[n] and scores_out f[m] to a number, such as
        `auroc`. `bootstrap_quantiles` vmaps the function.
      scores_in: the scores with the example's participation, f[n].
      scores_out: the scores without the example's participation, f[m].
      quantiles: the probabilities of the quantiles, f[q] or a number, in [0, 1].
      num_samples: the number of resamples, static, at least 1.
      key: one typed key, from which the function draws the resamples.

    Returns:
      The quantiles, f[q], or f[] if `quantiles` is a number.

    Raises:
      ValueError: an argument is out of range.

    Reference: Efron (1979), https://doi.org/10.1214/aos/1176344552.

    Example:
      >>> import jax
      >>> noise = jax.random.normal(jax.random.key(0), (2, 500))
      >>> found = bootstrap_quantiles(
      ...     auroc, noise[0] + 1.0, noise[1], jax.numpy.array([0.05, 0.95]),
      ...     num_samples=200, key=jax.random.key(1))
      >>> print(f"{found[0]:.2f} to {found[1]:.2f}")
      0.74 to 0.79
    """
    check_scores(scores_in=scores_in, scores_out=scores_out)
    validate.closed_unit("quantiles", quantiles)
    num_samples = validate.static_int("num_samples", num_samples, minimum=1)
    key = stream(validate.typed_key("key", key), "bootstrap")

    inside, outside = jnp.asarray(scores_in), jnp.asarray(scores_out)

    def resample(key: Key) -> jax.Array:
        key_in, key_out = jax.random.split(key)
        return statistic(
            jax.random.choice(key_in, inside, (len(inside),)),
            jax.random.choice(key_out, outside, (len(outside),)),
        )

    samples = jax.vmap(resample)(jax.random.split(key, num_samples))
    return jnp.quantile(samples, jnp.asarray(quantiles, samples.dtype))
