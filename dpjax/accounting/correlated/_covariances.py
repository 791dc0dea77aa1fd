"""Covariances of the patterns of one example, by how far apart they begin.

A pattern is known by its place, the step at which it begins. With c_t the most that it
then adds to (C x)_{place + t}, two patterns d places apart have Σ_t c_t c_{t+d} in
common, summed to the end of the run: the most for those that begin first.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import ULP
from dpjax._matrices.toeplitz import Toeplitz, series_error


class Covariances(NamedTuple):
    """Upper bounds for noise of standard deviation 1.

    Attributes:
      by_gap: of patterns at least so many places apart around the circle of places,
        f[n_b // 2 + 1].
      shared: of all patterns, beside that, f[].
    """

    by_gap: jax.Array
    shared: jax.Array


def _correlation(c: jax.Array, size: int) -> jax.Array:
    """Σ_t c_t c_{t+d} for d < size, from above, for c >= 0."""
    spectrum = jnp.fft.rfft(c, 2 * c.size)
    g = jnp.fft.irfft(jnp.square(jnp.abs(spectrum)), 2 * c.size)[: c.size]
    # What the transforms round by, as in `_patterns`.
    error = 64 * ULP * np.log2(2.0 * c.size) * jnp.sum(jnp.square(c))
    return jnp.pad(g + error, (0, max(size - c.size, 0)))[:size]


def _by_gap_on_circle(g: jax.Array, n_b: int) -> jax.Array:
    """By the least gap around the circle, from the gap along the line, f[n_b]."""
    gap = np.arange(n_b // 2 + 1)
    either = jnp.maximum(g[gap], jnp.where(gap > 0, g[-gap], 0.0))
    return jax.lax.cummax(either, reverse=True)


def random_bins(strategy: Toeplitz, num_steps: int, n_b: int) -> Covariances:
    """Of patterns that repeat in every epoch."""
    c, off = _coefficients(strategy, num_steps)
    epochs = -(-num_steps // n_b)
    moved = jnp.pad(c, (0, epochs * n_b - num_steps)).reshape(epochs, n_b)
    moved = jnp.cumsum(moved, axis=0).ravel()[:num_steps]
    # ⟨u + a, v + b⟩ with |u|, |v| at most the first one's norm.
    norm, off = jnp.linalg.norm(moved), epochs * off
    margin = 2 * norm * off + off**2 + 8 * num_steps * ULP * norm**2
    by_gap = _by_gap_on_circle(_correlation(moved, n_b), n_b) + margin
    return Covariances(by_gap, jnp.zeros(()))


def fresh_bins(strategy: Toeplitz, num_steps: int, n_b: int) -> Covariances:
    """Of what one epoch adds to them; across epochs they share the largest.

    Places of epochs e < f are at least (f − e) n_b − (n_b − 1) steps apart.
    """
    c, off = _coefficients(strategy, num_steps)
    epochs = -(-num_steps // n_b)
    margin = (2 * jnp.linalg.norm(c) + off) * off
    g = _correlation(c, max(num_steps, n_b)) + margin
    least = np.arange(1, epochs) * n_b - (n_b - 1)
    across = jax.lax.cummax(g, reverse=True)[least] if epochs > 1 else jnp.zeros(0)
    pairs = 2.0 * np.arange(epochs - 1, 0, -1)
    return Covariances(_by_gap_on_circle(g[:n_b], n_b), jnp.sum(pairs * across))


def _coefficients(strategy: Toeplitz, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """|c_t|, and how far off they may be in norm."""
    fixed = jax.lax.stop_gradient(strategy)
    off = series_error(fixed, fixed.coefficients(num_steps))
    return jnp.abs(strategy.coefficients(num_steps)), off
