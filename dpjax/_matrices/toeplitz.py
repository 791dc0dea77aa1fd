"""Lower-triangular Toeplitz matrices as ratios of two polynomials of the shift.

With L the shift by one step, a matrix is N(L) / D(L), and both polynomials begin with
1. The inverse is D(L) / N(L), and a product of matrices multiplies their numerators and
their denominators. A recursion applies the matrix to vectors that arrive one step after
the other. The recursion stores as many vectors as the longer polynomial has
coefficients after its leading 1.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import ArrayLike

# Up to this number of coefficients, operations on numbers are faster than on arrays.
_SHORT = 4


class Toeplitz(NamedTuple):
    """The strategy C = (1 + Σ n_k L^k) / (1 + Σ d_k L^k), L the shift by one step.

    C is the matrix of correlated noise C⁻¹z, where z is independent Gaussian noise.
    This class is pure data and a pytree. `dpjax.correlated_noise` and the accountants
    read the data.

    Attributes:
      numerator: n_1, n_2, ..., f[k].
      denominator: d_1, d_2, ..., f[m].
    """

    numerator: ArrayLike
    denominator: ArrayLike

    def coefficients(self, n: int) -> jax.Array:
        """The first n coefficients of C, f[n], which begin with c_0 = 1.

        Entry (t, s) of C is c_{t−s} for s <= t.
        """
        return series(self.numerator, self.denominator, n)

    def inverse_coefficients(self, n: int) -> jax.Array:
        """The first n coefficients of C⁻¹, f[n], which begin with 1.

        Let b be these coefficients, and let z_t be independent Gaussian vectors. Then
        the correlated noise of step t is Σ_j b_j z_{t−j}.
        """
        return series(self.denominator, self.numerator, n)

    def matrix(self, n: int) -> jax.Array:
        """The first n rows and columns of the matrix C, f[n, n]."""
        return lower(self.coefficients(n))

    @property
    def num_vectors(self) -> int:
        """The number of vectors that a recursion for the noise C⁻¹z stores.

        Each vector has the size of the parameters.
        """
        return max(np.shape(x)[-1] for x in self)


def lower(c: jax.Array) -> jax.Array:
    """The lower-triangular Toeplitz matrix f[n, n] with the coefficients c, f[n]."""
    lag = np.subtract.outer(np.arange(c.size), np.arange(c.size))
    # Above the diagonal the index is clamped to 0, and the entry replaced by 0.
    return jnp.where(lag >= 0, c[np.maximum(lag, 0)], 0.0)


def times(p: ArrayLike, q: ArrayLike) -> jax.Array:
    """The coefficients of the product of two polynomials that begin with 1.

    The arguments and the result omit this leading 1.
    """
    p, q = (jnp.concatenate([jnp.ones(1), jnp.asarray(x, float)]) for x in (p, q))
    return jnp.convolve(p, q)[1:]


def product(roots: ArrayLike) -> jax.Array:
    """The coefficients of Π_k (1 − r_k L) after the leading 1, f[k].

    The roots r_k are the reciprocals of the zeros of this polynomial in L.
    """
    factors = [-r[None] for r in jnp.asarray(roots)]
    return functools.reduce(times, factors, jnp.zeros(0))


def series(numerator: ArrayLike, denominator: ArrayLike, n: int) -> jax.Array:
    """The first n coefficients of the power series of N / D, f[n].

    The arguments are the coefficients of the polynomials N and D after their leading 1.
    """
    top = jnp.concatenate([jnp.ones(1), jnp.asarray(numerator, float)])
    top = jnp.pad(top, (0, max(n - top.size, 0)))[:n]
    bottom = jnp.asarray(denominator, top.dtype)
    if not bottom.size:
        return top

    # h_t = n_t − Σ_k d_k h_{t−k}. Powers of the recursion's companion matrix would need
    # fewer sequential steps, but their terms cancel where poles are close together.
    def step(last: jax.Array, driven: jax.Array) -> tuple[jax.Array, jax.Array]:
        now = driven - bottom @ last
        return jnp.concatenate([now[None], last[:-1]]), now

    def short_step(last: tuple[jax.Array, ...], driven: jax.Array):
        products = (d * h for d, h in zip(taps, last, strict=True))
        now = driven - functools.reduce(operator.add, products)
        return (now, *last[:-1]), now

    if bottom.size > _SHORT:
        return jax.lax.scan(step, jnp.zeros_like(bottom), top)[1]
    taps = [bottom[k] for k in range(bottom.size)]
    return jax.lax.scan(short_step, (jnp.zeros_like(top[0]),) * bottom.size, top)[1]


def series_error(strategy: Toeplitz, h: jax.Array) -> jax.Array:
    """An upper bound on the L2 norm of the rounding errors of h, f[].

    The strategy is N / D for two polynomials N and D. h has the first n coefficients
    of its power series, as `series` computed them by a recursion. Let r be the rounding
    errors of the recursion's steps. Then D h = N − r, and the error of h is r / D. Let
    g be the computed coefficients of 1 / D, and s the rounding errors of the recursion
    for g. Then D g = 1 − s, and so 1 / D = g / (1 − s). For power series a and b cut
    off at n terms, ‖a b‖₂ <= ‖a‖₁ ‖b‖₂ and ‖a b‖₁ <= ‖a‖₁ ‖b‖₁. Therefore the error has
    norm ‖r g / (1 − s)‖₂ <= ‖r‖₂ ‖g‖₁ / (1 − ‖s‖₁).
    """
    n, bottom = h.size, jnp.asarray(strategy.denominator, h.dtype)
    if not bottom.size:
        return jnp.zeros((), h.dtype)
    g = series(jnp.zeros(0), bottom, n)
    # A step of the recursion has at most bottom.size + 4 roundings. These roundings are
    # relative to the sizes of the step's terms, which the norms below bound.
    unit = (bottom.size + 4) * jnp.finfo(h.dtype).eps
    taps = 2 + jnp.sum(jnp.abs(bottom))
    top = jnp.linalg.norm(jnp.asarray(strategy.numerator, h.dtype)) + 1
    r = unit * (taps * jnp.linalg.norm(h) + top)
    s = unit * (taps * jnp.sum(jnp.abs(g)) + 1)
    inverse = jnp.sum(jnp.abs(g)) / (1 - s)
    # The factor 1.1 covers the rounding of the sums in this bound itself. The geometric
    # series 1 / (1 − s) needs s < 1. From s = 1/2 on, the bound is infinite.
    return jnp.where(s < 0.5, 1.1 * inverse * r, jnp.inf)
