"""The separation of two Gaussians, from draws of each."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr

from dpjax._core.float64 import ULP, float64
from dpjax._core.searches import bisect
from dpjax._core.typing import ArrayLike
from dpjax.auditing._thresholds import check_confidence, check_scores

_FEWEST = 32  # draws in all, with which the quadrature below is exact to 1e-14
_NODES = np.linspace(-12.0, 12.0, 193)


@float64("down", vectors=(0, 1), elementwise=True)
def _gaussian_mu_lower64(
    scores_in: jax.Array,
    scores_out: jax.Array,
    confidence: jax.Array,
    rounding: jax.Array,
) -> jax.Array:
    n, m = scores_in.size, scores_out.size
    freedom = n + m - 2
    # Comparisons are exact, where means and variances of equal scores are not: a fused
    # multiply-add leaves a rounding of what should be zero.
    constant = (jnp.min(scores_in) == jnp.max(scores_in)) & (
        jnp.min(scores_out) == jnp.max(scores_out)
    )
    largest = jnp.maximum(jnp.max(jnp.abs(scores_in)), jnp.max(jnp.abs(scores_out)))
    # Subtract an offset first: rounding is then relative to the range of the scores.
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
    some = (stddev > 0) & (gap > 0)
    t = jnp.where(some, gap, 1.0) / (jnp.where(some, stddev, 1.0) * unit)

    # Owen (1968), https://doi.org/10.1080/00401706.1968.10490580: with w² = χ²_ν / ν
    # and θ = μ / √(1/n + 1/m), P((Z + θ) / w >= t) = E Φ(θ − t w). The logarithm x of
    # w has the density exp(ν (x − e^{2x}/2)), up to a factor, and a standard deviation
    # near 1 / √(2ν): of such a function, the sum over equal steps is the integral.
    x = _NODES / np.sqrt(2 * freedom)
    weights = np.exp(freedom * (x - np.expm1(2 * x) / 2))
    w, weights = np.exp(x), weights / weights.sum()

    def refuted(theta: jax.Array) -> jax.Array:
        tail = jnp.sum(weights * ndtr(theta - t * w))
        return tail * (1 + 1e-9) <= 1 - confidence

    zero = jnp.zeros_like(t)
    theta = bisect(refuted, 2 * t, zero, times=64)
    mu = jnp.where(some & refuted(zero), theta * unit * (1 - (n + m) * ULP), 0.0)
    return jnp.where(constant & (gap > 0), jnp.inf, mu)


def _machine_epsilon(scores: ArrayLike) -> float:
    """The spacing of floats at 1 in the scores' dtype; 0 where it is not of floats."""
    dtype = getattr(scores, "dtype", np.dtype(np.float64))
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


def gaussian_mu_lower(
    scores_in: ArrayLike, scores_out: ArrayLike, *, confidence: ArrayLike
) -> jax.Array:
    """A μ that a Gaussian mechanism exceeds, from an attack's scores.

    Args:
      scores_in: scores where the example took part, f[*b, n]: those of a matched
        filter (`matched_filter`), which loses nothing.
      scores_out: where it did not, f[*b, m]; 32 with scores_in at least.
      confidence: with at least this probability the bound holds, f[*b], in (0.5, 1).

    Returns:
      μ, f[*b], rounded down; exact, in that the bound fails with just the probability
      1 − confidence, but for what scores round: each is taken to be off by two units in
      the last place of the largest. Without any noise it is inf, if scores where the
      example took part are larger by more than that, and else 0; so it is where a score
      is NaN.

    Raises:
      ValueError: an argument is out of range, or there are too few scores.

    Privacy: it bounds the mechanism from below, and is no guarantee. It assumes that
    all scores are independent and Gaussian, with one variance, which need not be known,
    one mean where the example took part and one where it did not. What
    `add_gaussian_noise`, `tree_momentum` and `correlated_noise` release at canaries of
    one norm gives such scores. Anything else, and any mixture over samples, asks for
    `mu_lower`.

    Reference: Owen (1968), on Student's t with a non-centrality.

    Example:
      >>> import numpy as np
      >>> noise = 3.0 * np.random.default_rng(0).standard_normal((2, 5000))
      >>> found = gaussian_mu_lower(noise[0] + 3.0, noise[1], confidence=0.99)
      >>> print(f"{found:.3f} of 1")
      0.931 of 1
    """
    check_scores(scores_in=scores_in, scores_out=scores_out)
    check_confidence(confidence)
    count = np.shape(scores_in)[-1] + np.shape(scores_out)[-1]
    if count < _FEWEST:
        raise ValueError(
            f"scores_in and scores_out must be {_FEWEST} together at least; got "
            f"{count}."
        )
    rounding = 2 * max(_machine_epsilon(scores_in), _machine_epsilon(scores_out))
    return _gaussian_mu_lower64(scores_in, scores_out, confidence, rounding)
