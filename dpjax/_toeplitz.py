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

from dpjax._typing import ArrayLike


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

    def check_length(self, num_steps: int) -> None:
        """Raise where there are more coefficients than steps."""
        size = self.num_vectors
        if size > num_steps:
            raise ValueError(
                f"strategy must have at most num_steps, {num_steps}, coefficients "
                f"after its leading ones; got {size}."
            )

    @property
    def num_vectors(self) -> int:
        """How many vectors of the parameters' size the noise carries along."""
        return max(np.shape(x)[-1] for x in self)


def times(p: ArrayLike, q: ArrayLike) -> jax.Array:
    """The product of two polynomials that begin with 1, without the 1."""
    p, q = (jnp.concatenate([jnp.ones(1), jnp.asarray(x, float)]) for x in (p, q))
    return jnp.convolve(p, q)[1:]


def product(roots: ArrayLike) -> jax.Array:
    """Π_k (1 − r_k L) without the leading 1, f[k]."""
    factors = [-r[None] for r in jnp.asarray(roots)]
    return functools.reduce(times, factors, jnp.zeros(0))


def series(numerator: ArrayLike, denominator: ArrayLike, n: int) -> jax.Array:
    """The first n coefficients of a ratio, f[n], in O(n) parallel work."""
    top = jnp.concatenate([jnp.ones(1), jnp.asarray(numerator, float)])
    bottom = jnp.asarray(denominator, top.dtype)
    order = bottom.size
    if not order:
        return jnp.pad(top, (0, max(n - top.size, 0)))[:n]
    # h_t = n_t − Σ_k d_k h_{t−k}: step by step while the numerator lasts,
    first = max(top.size, order)
    drive = jnp.pad(top, (0, first - top.size))

    def step(last: jax.Array, driven: jax.Array) -> tuple[jax.Array, jax.Array]:
        now = driven - bottom @ last
        return jnp.concatenate([now[None], last[:-1]]), now

    last, head = jax.lax.scan(step, jnp.zeros(order, top.dtype), drive)
    # and from there (h_t, …, h_{t−m+1}) = M^{t−t₀} (h_{t₀}, …): the first rows of all
    # powers of M, twice as many at a time.
    matrix = jnp.concatenate([-bottom[None], jnp.eye(order - 1, order)])
    rows = matrix[:1]
    while rows.shape[0] < n - first:
        rows = jnp.concatenate([rows, rows @ matrix])
        matrix = matrix @ matrix
    return jnp.concatenate([head, rows @ last])[:n]
