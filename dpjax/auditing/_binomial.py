"""Confidence bounds for the success probability of a binomial distribution."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.searches import bisect
from dpjax._core.typing import ArrayLike
from dpjax.accounting._numerics.pld.overflow import upper_tail

# The relative error of the binomial tail is less than this.
_MARGIN = 2e-8
_tail = jnp.vectorize(upper_tail)


def lower(successes: ArrayLike, trials: int, error: ArrayLike) -> jax.Array:
    """A lower confidence bound for the success probability, f64[*b].

    Takes the number of successes among the trials. Whatever the true probability is,
    the bound exceeds it with probability at most `error`.
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
    # No successes refute no probability.
    return jnp.where(k > 0, p, 0.0)


def upper(successes: ArrayLike, trials: int, error: ArrayLike) -> jax.Array:
    """An upper confidence bound for the success probability, f64[*b].

    The true probability exceeds the bound with probability at most `error`.
    """
    # Successes and failures exchanged.
    return 1 - lower(trials - jnp.asarray(successes, jnp.float64), trials, error)


def counts(trials: int) -> np.ndarray:
    """The counts from 1 to n at which a band over all thresholds is computed, i[k].

    Neighbouring counts differ by one, or by half a standard deviation of the count,
    √(k (1 − k/n)) / 2. Equal steps of arcsin √(k/n) have this size.
    """
    # Few counts keep the union bound over them small, at little loss between them.
    steps = int(np.ceil(2 * np.pi * np.sqrt(trials)))
    spaced = trials * np.sin(np.linspace(0, np.pi / 2, steps + 1)) ** 2
    return np.unique(np.clip(np.rint(spaced), 1, trials)).astype(np.int32)
