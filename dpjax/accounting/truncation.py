"""What it costs to leave examples out when a Poisson batch overflows its shape."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from dpjax import _validate
from dpjax._float64 import float64

_ULP = float(np.finfo(np.float64).eps)


def _overflow_probability(num_examples: int, rate: float, max_batch_size: int) -> float:
    """P[Binomial(n, q) > b] = I_q(b + 1, n − b), rounded up."""
    if max_batch_size >= num_examples or rate == 0.0:
        return 0.0
    tail = scipy.special.betainc(
        max_batch_size + 1, num_examples - max_batch_size, rate
    )
    # The incomplete beta function has the exponential of log-gammas for a factor.
    error = 16 * _ULP * (scipy.special.gammaln(num_examples + 2) + 64)
    return min(float(tail) * (1 + error) + np.finfo(np.float64).tiny, 1.0)


@float64("up")
def _overflow_delta64(epsilon: jax.Array, expected_overflows: jax.Array) -> jax.Array:
    return jnp.minimum(
        (1 + jnp.exp(epsilon)) * expected_overflows * (1 + 8 * _ULP), 1.0
    )


def overflow_delta(
    epsilon: jax.typing.ArrayLike,
    *,
    num_examples: int,
    sampling_rate: float,
    max_batch_size: int,
    num_steps: int,
) -> jax.Array:
    """What to add to δ when `dpjax.sampling.poisson` may leave examples out.

    A step that overflows is another mechanism than the one accounted for. On either
    data set the run differs from an ideal one with probability at most p = T P[more
    than b examples are drawn], and an ideal (ε, δ) guarantee becomes one for
    (ε, δ + p + e^ε p).

    Args:
      epsilon: the ε at which δ is stated, f[*b], at least 0.
      num_examples: n, the size of the larger of the two data sets, at least 1.
      sampling_rate: q, in [0, 1], static.
      max_batch_size: b, the shape of the batch, at least 1.
      num_steps: T, at least 1.

    Returns:
      (1 + e^ε) p, f[*b], rounded up, at most 1.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> extra = overflow_delta(
      ...     2.0, num_examples=10_000, sampling_rate=0.01, max_batch_size=180,
      ...     num_steps=1_000)
      >>> print(f"{extra:.1e}")
      1.4e-09
    """
    _validate.nonnegative("epsilon", epsilon, finite=False)
    n = _validate.static_int("num_examples", num_examples, minimum=1)
    _validate.closed_unit("sampling_rate", sampling_rate)
    b = _validate.static_int("max_batch_size", max_batch_size, minimum=1)
    steps = _validate.static_int("num_steps", num_steps, minimum=1)
    once = _overflow_probability(n, float(sampling_rate), b)
    return _overflow_delta64(epsilon, steps * once)
