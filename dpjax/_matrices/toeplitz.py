"""Lower-triangular Toeplitz matrices as ratios of two polynomials of the shift.

With L the shift by one step, a matrix is N(L) / D(L), and both begin with 1. Its
inverse is D(L) / N(L), products multiply numerators and denominators, and a recursion
applies it to a stream, with as many vectors stored as the longer of the two has
coefficients after the 1.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import ArrayLike


class Toeplitz(NamedTuple):
    """The strategy C = (1 + Σ n_k L^k) / (1 + Σ d_k L^k), L the shift by one step.

    It is pure data, a pytree, which `dpjax.correlated_noise` and the accountants read.

    Attributes:
      numerator: n_1, n_2, ..., f[k].
      denominator: d_1, d_2, ..., f[m].
    """

    numerator: ArrayLike
    denominator: ArrayLike

    def coefficients(self, n: int) -> jax.Array:
        """The first n coefficients of C, c_0 = 1 and on, f[n]."""
        return series(self.numerator, self.denominator, n)

    def inverse_coefficients(self, n: int) -> jax.Array:
        """The first n coefficients of C⁻¹, from 1 on, f[n].

        The noise of step t is Σ_j of the jth one times z_{t−j}.
        """
        return series(self.denominator, self.numerator, n)

    def matrix(self, n: int) -> jax.Array:
        """C over n steps, f[n, n]."""
        return lower(self.coefficients(n))

    def inverse_matrix(self, n: int) -> jax.Array:
        """C⁻¹ over n steps, f[n, n]."""
        return lower(self.inverse_coefficients(n))

    @property
    def num_vectors(self) -> int:
        """How many vectors of the parameters' size the noise carries along."""
        return max(np.shape(x)[-1] for x in self)


def lower(c: jax.Array) -> jax.Array:
    """The lower-triangular matrix of coefficients f[n], f[n, n]."""
    lag = np.subtract.outer(np.arange(c.size), np.arange(c.size))
    return jnp.where(lag >= 0, c[np.maximum(lag, 0)], 0.0)


def times(p: ArrayLike, q: ArrayLike) -> jax.Array:
    """The product of two polynomials that begin with 1, without the 1."""
    p, q = (jnp.concatenate([jnp.ones(1), jnp.asarray(x, float)]) for x in (p, q))
    return jnp.convolve(p, q)[1:]


def product(roots: ArrayLike) -> jax.Array:
    """Π_k (1 − r_k L) without the leading 1, f[k]."""
    factors = [-r[None] for r in jnp.asarray(roots)]
    return functools.reduce(times, factors, jnp.zeros(0))


def series(numerator: ArrayLike, denominator: ArrayLike, n: int) -> jax.Array:
    """The first n coefficients of a ratio, f[n], by its recursion."""
    top = jnp.concatenate([jnp.ones(1), jnp.asarray(numerator, float)])
    top = jnp.pad(top, (0, max(n - top.size, 0)))[:n]
    bottom = jnp.asarray(denominator, top.dtype)
    if not bottom.size:
        return top

    # h_t = n_t − Σ_k d_k h_{t−k}. Powers of the recursion's matrix would need fewer
    # steps one after the other, and cancel where poles are close to each other.
    def step(last: jax.Array, driven: jax.Array) -> tuple[jax.Array, jax.Array]:
        now = driven - bottom @ last
        return jnp.concatenate([now[None], last[:-1]]), now

    return jax.lax.scan(step, jnp.zeros_like(bottom), top)[1]


def series_error(strategy: Toeplitz, h: jax.Array) -> jax.Array:
    """How far off N / D, in L2 norm, its coefficients h can be that `series` computed.

    The computed ones satisfy D h = N − r, r being the roundings of the recursion's
    steps, so that they are off by r / D. For series cut off at n terms the norms obey
    ‖a b‖₂ <= ‖a‖₁ ‖b‖₂ and ‖a b‖₁ <= ‖a‖₁ ‖b‖₁. With g for the computed 1 / D and its
    own roundings s, 1 / D = g / (1 − s).
    """
    n, bottom = h.size, jnp.asarray(strategy.denominator, h.dtype)
    if not bottom.size:
        return jnp.zeros((), h.dtype)
    g = series(jnp.zeros(0), bottom, n)
    # A step has so many operations, on terms of these sizes together.
    unit = (bottom.size + 4) * jnp.finfo(h.dtype).eps
    taps = 2 + jnp.sum(jnp.abs(bottom))
    top = jnp.linalg.norm(jnp.asarray(strategy.numerator, h.dtype)) + 1
    r = unit * (taps * jnp.linalg.norm(h) + top)
    s = unit * (taps * jnp.sum(jnp.abs(g)) + 1)
    inverse = jnp.sum(jnp.abs(g)) / (1 - s)
    # The sums here are rounded, too: a few percent cover that.
    return jnp.where(s < 0.5, 1.1 * inverse * r, jnp.inf)
