"""What a number of successes says about their probability, with a stated confidence."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.searches import bisect
from dpjax._core.typing import ArrayLike
from dpjax.accounting._numerics.pld.overflow import upper_tail

# The tail errs by less than this, relatively.
_MARGIN = 2e-8
_tail = jnp.vectorize(upper_tail)


def lower(successes: ArrayLike, trials: int, error: ArrayLike) -> jax.Array:
    """The probability that as many successes refute from below, f64[*b].

    Whatever the true one is, this exceeds it with at most the probability `error`.
    """
    k = jnp.asarray(successes, jnp.float64)
    # Clopper and Pearson (1934), https://doi.org/10.1093/biomet/26.4.404: the largest p
    # for which P(Bin(n, p) >= k) is at most the error.
    p = bisect(
        lambda p: _tail(k, jnp.asarray(trials, k.dtype), p) <= error * (1 - _MARGIN),
        jnp.ones_like(k),
        jnp.zeros_like(k),
        times=64,
    )
    return jnp.where(k > 0, p, 0.0)


def upper(successes: ArrayLike, trials: int, error: ArrayLike) -> jax.Array:
    """The probability that as few successes refute from above, f64[*b]."""
    return 1 - lower(trials - jnp.asarray(successes, jnp.float64), trials, error)


def counts(trials: int) -> np.ndarray:
    """The counts from 1 to n at which a band over all thresholds is computed, i[k].

    The steps between them are one, or half a standard deviation, √(k (1 − k/n)) / 2,
    which are equal ones of arcsin √(k/n).
    """
    steps = int(np.ceil(2 * np.pi * np.sqrt(trials)))
    spaced = trials * np.sin(np.linspace(0, np.pi / 2, steps + 1)) ** 2
    return np.unique(np.clip(np.rint(spaced), 1, trials)).astype(np.int32)
