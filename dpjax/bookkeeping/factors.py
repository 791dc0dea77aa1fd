"""Sums of outer products: the form of a parameter's gradient at a site.

One example's gradient of an operand is, for each of g groups,

    Σ_t a_t ⊗ d_t,

a_t f[n] from the site's input and d_t f[p] from its output's cotangent; t runs over
the rows: positions, pixels, iterations.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._dtypes import at_least_float32

# The bound on an example's influence rests on these products: no reduced precision.
HIGHEST = jax.lax.Precision.HIGHEST

# Inner products of a few hundred terms, of rounding errors 2⁻²⁴ with random signs.
_ROUNDING = 2.0**-20


class OneHot(NamedTuple):
    """Rows that are unit vectors, or zero where the position is negative.

    Attributes:
      position: i[..., t].
    """

    position: jax.Array


class Factors(NamedTuple):
    """The rows of both sides, f[..., g, t, n] and f[..., g, t, p]."""

    left: jax.Array | OneHot
    right: jax.Array | OneHot


class Size(NamedTuple):
    """The sizes of one site's factors; stored counts the numbers of a row pair."""

    groups: int
    rows: int
    left: int
    right: int
    stored: int


def scaled(factors: Factors, clip_norm: jax.Array) -> Factors:
    """The same gradient in units of the clip norm, the left rows at most one.

    Neither side's squares overflow or vanish where their product's does not.
    """
    left, right = factors
    assert not isinstance(right, OneHot)
    if isinstance(left, OneHot):
        return Factors(left, right / clip_norm)
    largest = jnp.max(jnp.abs(left), axis=-1, keepdims=True, initial=0.0)
    largest = jnp.where(largest > 0, largest, 1.0)
    # In this order it overflows only where the gradient does.
    return Factors(left / largest, right * largest / clip_norm)


def square_norm(sites: list[Factors]) -> jax.Array:
    """An upper estimate of ‖Σ over sites and rows‖², f[b], by inner products of rows.

    Σ_ts ⟨a_t, a_s⟩⟨d_t, d_s⟩ is a difference of terms as large as
    (Σ_t ‖a_t‖‖d_t‖)²; a multiple of that covers their rounding. Otherwise an example
    whose rows cancel could seem small, and escape the clipping.
    """
    rows = [jnp.sqrt(_row_squares(f.left) * _row_squares(f.right)) for f in sites]
    largest = jnp.square(sum(jnp.sum(r, axis=-1) for r in rows))
    if len(sites) == 1 and rows[0].shape[-1] == 1:
        return jnp.sum(largest, axis=-1)
    total = jnp.zeros_like(largest)
    for i, one in enumerate(sites):
        for j, other in enumerate(sites[: i + 1]):
            products = _inner(one.left, other.left) * _inner(one.right, other.right)
            total += (1.0 if i == j else 2.0) * jnp.sum(products, axis=(-2, -1))
    return jnp.sum(jnp.maximum(total, 0.0) + _ROUNDING * largest, axis=-1)


def outer(factors: Factors, left_size: int) -> jax.Array:
    """The gradient itself, f[..., g, n, p]."""
    left, right = factors
    assert not isinstance(right, OneHot)
    if isinstance(left, OneHot):
        left = jax.nn.one_hot(left.position, left_size, dtype=right.dtype)
    return jnp.einsum("...tn,...tp->...np", left, right, precision=HIGHEST)


def wide(x: jax.Array) -> jax.Array:
    """The array in float32 at least."""
    return x.astype(at_least_float32(x.dtype))


def _row_squares(rows: jax.Array | OneHot) -> jax.Array:
    if isinstance(rows, OneHot):
        return (rows.position >= 0).astype(jnp.float32)
    return jnp.sum(jnp.square(rows), axis=-1)


def _inner(one: jax.Array | OneHot, other: jax.Array | OneHot) -> jax.Array:
    """The inner products of all pairs of rows, f[..., t, s]."""
    if isinstance(one, OneHot) and isinstance(other, OneHot):
        return one.position[..., :, None] == other.position[..., None, :]
    if isinstance(one, OneHot):
        return jnp.swapaxes(_inner(other, one), -1, -2)
    if isinstance(other, OneHot):
        position = other.position[..., None, :]
        picked = jnp.take_along_axis(one, jnp.maximum(position, 0), axis=-1)
        return jnp.where(position >= 0, picked, 0.0)
    return jnp.einsum("...tn,...sn->...ts", one, other, precision=HIGHEST)
