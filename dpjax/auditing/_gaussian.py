"""A lower confidence bound on the μ of a Gaussian mechanism, from Gaussian scores."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr

from dpjax._core.float64 import ULP, float64
from dpjax._core.searches import bisect
from dpjax._core.typing import ArrayLike
from dpjax.auditing._thresholds import check_attack

# The minimum number of draws for which the quadrature below is exact to 1e-14.
_FEWEST = 32
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
    reach = jnp.maximum(jnp.max(jnp.abs(scores_in)), jnp.max(jnp.abs(scores_out)))
    gap = jnp.mean(scores_in) - jnp.mean(scores_out)
    stddev = jnp.sqrt((n * jnp.var(scores_in) + m * jnp.var(scores_out)) / freedom)
    # If every score is off by at most e, so are each mean and the standard deviation. A
    # float64 sum of k terms has a relative error of at most k ULP / 2.
    error = rounding * largest + (n + m + 16) * ULP * reach
    gap, stddev = gap - 2 * error, stddev + 2 * error
    unit = np.sqrt(1 / n + 1 / m)
    # Without separation or without spread, t is a finite number that is not used.
    some = (stddev > 0) & (gap > 0)
    t = jnp.where(some, gap, 1.0) / (jnp.where(some, stddev, 1.0) * unit)

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

    # Search θ between 0, which may be refuted, and 2t, which is not tested.
    zero = jnp.zeros_like(t)
    theta = bisect(is_refuted, 2 * t, zero, times=64)
    mu = jnp.where(some & is_refuted(zero), theta * unit * (1 - (n + m) * ULP), 0.0)
    return jnp.where(constant & (gap > 0), jnp.inf, mu)


def _machine_epsilon(scores: ArrayLike) -> float:
    """The spacing of floats at 1 in the scores' dtype; 0 for integer dtypes."""
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
      A lower bound μ, f[*b], rounded down. For exact scores, a bound without margins
      would fail with a probability of exactly 1 − confidence. The returned bound is
      slightly lower. Its margin for rounding allows each score to be off by two units
      in the last place of the largest score. If the scores contain no noise, the bound
      is inf if scores_in exceed scores_out by more than this margin, and 0 otherwise.
      The bound is 0 if a score is NaN.

    Raises:
      ValueError: an argument is out of range, or there are too few scores.

    Privacy: the result bounds the mechanism's μ from below, and is no guarantee. The
    bound assumes that all scores are independent and Gaussian with one variance, that
    all scores_in have one mean, and that all scores_out have one mean. The variance and
    the means may be unknown. The releases of `add_gaussian_noise`, `tree_momentum` and
    `correlated_noise` at canaries of equal norm give such scores. For all other scores,
    such as those of canaries that take part in random steps, use `mu_lower`.

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
    if count < _FEWEST:
        raise ValueError(
            f"scores_in and scores_out must contain at least {_FEWEST} scores in "
            f"total; got {count}."
        )
    # Two units in the last place of the largest score.
    rounding = 2 * max(_machine_epsilon(scores_in), _machine_epsilon(scores_out))
    return _gaussian_mu_lower64(scores_in, scores_out, confidence, rounding)
