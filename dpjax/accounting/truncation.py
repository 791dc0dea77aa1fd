"""The privacy cost of dropping examples when a Poisson batch exceeds its capacity.

`poisson_gaussian` accounts for dropped examples in the privacy-loss distribution of a
step. If batches seldom exceed their capacity, ε hardly increases. For any other
accountant, `overflow_delta` is a union bound on the increase of δ.
"""

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.float64 import TINY, ULP, float64
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax.accounting import events, pld


def _overflow_probability(num_examples: int, rate: float, max_batch_size: int) -> float:
    """The probability that a Poisson sample exceeds max_batch_size, rounded up."""
    if max_batch_size >= num_examples or rate == 0.0:
        return 0.0
    from scipy.special import betainc, gammaln

    tail = betainc(max_batch_size + 1, num_examples - max_batch_size, rate)
    # The incomplete beta function has a factor exp(sum of log-gammas), whose relative
    # error is the absolute error of that sum.
    error = 16 * ULP * (gammaln(num_examples + 2) + 64)
    return min(float(tail) * (1 + error) + TINY, 1.0)


@float64("up")
def _overflow_delta64(epsilon: jax.Array, expected_overflows: jax.Array) -> jax.Array:
    # The clip at 709 avoids e^ε = ∞. The clip does not change δ: a positive probability
    # of overflow is above e^{−709}, so that δ is 1 for larger ε.
    growth = 1 + jnp.exp(jnp.clip(epsilon, 0.0, 709.0))
    delta = jnp.minimum(growth * expected_overflows * (1 + 8 * ULP), 1.0)
    return jnp.where(epsilon >= 0, delta, 1.0)


def poisson_gaussian(
    noise_multiplier: ArrayLike,
    sampling_rate: ArrayLike,
    *,
    num_examples: int,
    max_batch_size: int,
    adjacency: Adjacency,
) -> pld.PLD:
    """The privacy-loss distribution of a Gaussian step on a truncated Poisson batch.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], positive.
      sampling_rate: q, the probability that an example is drawn, f[*b], in [0, 1].
      num_examples: n, the size of the larger of the two data sets, at least 1, static.
      max_batch_size: b, the capacity of the batch, at least 1, static.
      adjacency: the relation between the data sets that are compared.

    Returns:
      A `pld.PLD` of one step. If b is n or more, the result is the PLD that
      `pld.poisson_gaussian` returns.

    Raises:
      ValueError: a static argument is out of range; adjacency is not an `Adjacency`.

    Privacy: the batches are those of `dpjax.sampling.poisson`. Every example is drawn
    independently of all other examples and steps. If more than b examples are drawn, a
    uniformly random subset of b examples takes part. Each example contributes at most
    one clip norm. Let D ~ Binomial(n − 1, q) be the number of drawn examples other than
    the differing example. If D < b, the dominating pair is that of
    `pld.poisson_gaussian`. If D >= b, the differing example takes part with probability
    r = q E[b / (D + 1) | D >= b], and then displaces another example, so that the sum
    changes by up to two clip norms. The dominating pair for D >= b is that of a step on
    batches of fixed size, with the sampling rate r and the GDP parameter
    2 / noise_multiplier (docs/accounting.md has the proof).

    Reference: the setting is that of Chua et al. (2024), "Scalable DP-SGD: Shuffling
    vs. Poisson Subsampling".

    Example:
      >>> step = poisson_gaussian(
      ...     1.0, 0.01, num_examples=10_000, max_batch_size=150,
      ...     adjacency=Adjacency.ADD_REMOVE)
      >>> print(f"{pld.epsilon(pld.compose(step, 1000), 1e-5):.3f}")
      1.830
    """
    n = validate.static_int("num_examples", num_examples, minimum=1)
    b = validate.static_int("max_batch_size", max_batch_size, minimum=1)
    usual = pld.poisson_gaussian(noise_multiplier, sampling_rate, adjacency=adjacency)
    truncated = events.TruncatedPoissonGaussian(
        noise_multiplier, sampling_rate, n, b, adjacency
    )
    return pld.of(truncated) if b < n else usual


def overflow_delta(
    epsilon: ArrayLike,
    *,
    num_examples: int,
    sampling_rate: float,
    max_batch_size: int,
    num_steps: int,
) -> jax.Array:
    """A bound on the increase of δ because `dpjax.sampling.poisson` drops examples.

    If you account with PLDs, use `truncation.poisson_gaussian` instead, which accounts
    for dropped examples with a tighter bound.

    Accountants assume an ideal run, which uses all drawn examples. On each of the two
    data sets, the actual run differs from the ideal run with a probability of at most
    p = T P[more than b examples are drawn]. If the ideal run is (ε, δ)-DP, the actual
    run is (ε, δ + (1 + e^ε) p)-DP.

    Args:
      epsilon: the ε at which δ is stated, f[*b], at least 0.
      num_examples: n, the size of the larger of the two data sets, at least 1.
      sampling_rate: the probability that an example is drawn, in [0, 1], static.
      max_batch_size: b, the capacity of the batch, at least 1.
      num_steps: T, the number of steps, at least 1.

    Returns:
      (1 + e^ε) p, f[*b], rounded up, at most 1. The result is 1 for a traced ε below 0
      and for a NaN.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> extra = overflow_delta(
      ...     2.0, num_examples=10_000, sampling_rate=0.01, max_batch_size=180,
      ...     num_steps=1_000)
      >>> print(f"{extra:.1e}")
      1.4e-09
    """
    validate.nonnegative("epsilon", epsilon, finite=False)
    n = validate.static_int("num_examples", num_examples, minimum=1)
    validate.closed_unit("sampling_rate", sampling_rate)
    b = validate.static_int("max_batch_size", max_batch_size, minimum=1)
    steps = validate.static_int("num_steps", num_steps, minimum=1)
    probability = _overflow_probability(n, float(sampling_rate), b)
    return _overflow_delta64(epsilon, steps * probability)
