"""Covariances of one example's participation patterns, by the distance of their starts.

A pattern is identified by the step s at which it begins. Let c_t be the largest norm
that the pattern adds to (C x)_{s + t}. Two patterns that begin d steps apart have the
covariance Σ_t c_t c_{t+d}, summed to the end of the run. The sum is largest for the
patterns that begin first, and their covariances bound all others.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import ULP
from dpjax._matrices.toeplitz import Toeplitz, series_error


class Covariances(NamedTuple):
    """Upper bounds on covariances of patterns, for noise of standard deviation 1.

    Attributes:
      by_gap: entry d bounds the covariance of patterns that begin at least d steps
        apart around the circle of an epoch, f[n_b // 2 + 1].
      shared: the covariance that all patterns share in addition, f[].
    """

    by_gap: jax.Array
    shared: jax.Array


def _correlation(c: jax.Array, size: int) -> jax.Array:
    """An upper bound on Σ_t c_t c_{t+d} for d < size, f[size], for c >= 0."""
    # Padding to twice the length makes the circular correlation a linear one.
    spectrum = jnp.fft.rfft(c, 2 * c.size)
    g = jnp.fft.irfft(jnp.square(jnp.abs(spectrum)), 2 * c.size)[: c.size]
    # A bound on the rounding errors of the Fourier transforms, as in `_patterns`.
    error = 64 * ULP * np.log2(2.0 * c.size) * jnp.sum(jnp.square(c))
    return jnp.pad(g + error, (0, max(size - c.size, 0)))[:size]


def _by_gap_on_circle(g: jax.Array, n_b: int) -> jax.Array:
    """Bounds by least distance around the circle, f[n_b // 2 + 1].

    The input g, f[n_b], has the covariances by distance along the line of an epoch.
    """
    # A distance d around the circle is d or n_b − d along the line. The cumulative
    # maximum from the end covers all distances of at least d.
    gap = np.arange(n_b // 2 + 1)
    either = jnp.maximum(g[gap], jnp.where(gap > 0, g[-gap], 0.0))
    return jax.lax.cummax(either, reverse=True)


def random_bins(strategy: Toeplitz, num_steps: int, n_b: int) -> Covariances:
    """The covariances of patterns that repeat the same position in every epoch.

    The inputs are the strategy, T and the number n_b of steps of an epoch.
    """
    c, off = _coefficients(strategy, num_steps)
    epochs = -(-num_steps // n_b)
    moved = jnp.pad(c, (0, epochs * n_b - num_steps)).reshape(epochs, n_b)
    moved = jnp.cumsum(moved, axis=0).ravel()[:num_steps]
    # ⟨u + a, v + b⟩ for patterns u, v, at most as long as the pattern that begins
    # first, and errors a, b of their coefficients, each at most `off` in norm.
    norm, off = jnp.linalg.norm(moved), epochs * off
    margin = 2 * norm * off + off**2 + 8 * num_steps * ULP * norm**2
    by_gap = _by_gap_on_circle(_correlation(moved, n_b), n_b) + margin
    return Covariances(by_gap, jnp.zeros(()))


def fresh_bins(strategy: Toeplitz, num_steps: int, n_b: int) -> Covariances:
    """The covariances of patterns that draw a new position in each epoch.

    `by_gap` holds the covariances within one epoch. A covariance across two epochs is
    bounded by its largest value over positions, which all patterns then share.
    Positions in epochs e < f are at least (f − e) n_b − (n_b − 1) steps apart.
    """
    c, off = _coefficients(strategy, num_steps)
    epochs = -(-num_steps // n_b)
    margin = (2 * jnp.linalg.norm(c) + off) * off
    g = _correlation(c, max(num_steps, n_b)) + margin
    least = np.arange(1, epochs) * n_b - (n_b - 1)
    across = jax.lax.cummax(g, reverse=True)[least] if epochs > 1 else jnp.zeros(0)
    # The number of ordered pairs of epochs that are 1, 2, … epochs apart.
    pairs = 2.0 * np.arange(epochs - 1, 0, -1)
    return Covariances(_by_gap_on_circle(g[:n_b], n_b), jnp.sum(pairs * across))


def _coefficients(strategy: Toeplitz, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """The |c_t|, f[num_steps], and a bound on the L2 norm of their rounding errors."""
    fixed = jax.lax.stop_gradient(strategy)
    # A bound on rounding errors needs no derivative.
    off = series_error(fixed, fixed.coefficients(num_steps))
    return jnp.abs(strategy.coefficients(num_steps)), off
