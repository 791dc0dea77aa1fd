"""Sums of outer products: the form of a parameter's gradient at a site.

One example's gradient of an operand is, for each of g groups,

    Σ_t a_t ⊗ d_t,

a_t f[n] from the site's input and d_t f[p] from its output's cotangent; t runs over
the rows: positions, pixels, iterations.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._dtypes import at_least_float32
from dpjax._rounding import HIGHEST, margin, square_sum, staged_sum

# Inner products are taken in pieces: at most so many, of at least so many terms.
_PIECES, _PIECE = 16, 256


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


def square_norm(sites: list[Factors], clip_norm: jax.typing.ArrayLike) -> jax.Array:
    """At least ‖Σ a_t ⊗ d_t / clip_norm‖², f[b], by inner products of rows.

    The sum is over the rows of all sites. Its square is Σ_ts α_ts δ_ts with
    α_ts = ⟨a_t, a_s⟩ and δ_ts = ⟨d_t, d_s⟩, whose terms may cancel. Computed ones, α̂
    and δ̂, are off by at most e_α = γ‖a_t‖‖a_s‖ and e_δ = γ'‖d_t‖‖d_s‖
    (`dpjax._rounding`), so that

        α δ ≤ α̂ δ̂ − |α̂ δ̂| + (|α̂| + e_α)(|δ̂| + e_δ) = P + 2 min(α̂ δ̂, 0)

    with P the last product, and no term is above P. What scaling the rows and forming
    Σ a_t ⊗ d_t itself round is at most γ″ Σ ‖a_t‖‖d_t‖, which the norm includes.
    """
    sites = _scaled(sites, clip_norm)
    lengths = [(_lengths(f.left), _lengths(f.right)) for f in sites]
    rows = [a * d for a, d in lengths]
    dtype = rows[0].dtype
    if len(sites) == 1 and rows[0].shape[-1] == 1:
        return _over_groups(jnp.square(rows[0][..., 0]) * (1 + margin(16, dtype)))

    count = sum(r.shape[-1] for r in rows)
    # Two stages of at most count terms, and a dozen operations on each term.
    sum_margin = margin(2 * count + len(sites) ** 2 + 48, dtype)
    total = jnp.zeros(rows[0].shape[:-1], dtype)
    for i, (one, one_lengths) in enumerate(zip(sites, lengths, strict=True)):
        for j in range(i + 1):
            inner = [
                _inner_and_error(x, y, x_lengths, y_lengths)
                for x, y, x_lengths, y_lengths in zip(
                    one, sites[j], one_lengths, lengths[j], strict=True
                )
            ]
            (alpha, of_alpha), (delta, of_delta) = inner
            bound = (jnp.abs(alpha) + of_alpha) * (jnp.abs(delta) + of_delta)
            terms = (1 + sum_margin) * bound + 2 * jnp.minimum(alpha * delta, 0.0)
            by_row = jax.lax.optimization_barrier(jnp.sum(terms, axis=-1))
            total += (1.0 if i == j else 2.0) * jnp.sum(by_row, axis=-1)
    forming = margin(count + len(sites) + 16, dtype) * sum(
        jnp.sum(r, axis=-1) for r in rows
    )
    norm = (jnp.sqrt(total) + forming) * (1 + margin(16, dtype))
    return _over_groups(jnp.square(norm))


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


def _scaled(sites: list[Factors], clip_norm: jax.typing.ArrayLike) -> list[Factors]:
    """The same gradient in units of the clip norm, left rows at most one.

    Neither side's squares overflow or vanish where their product's does not.
    """
    dtype = jnp.result_type(
        *(x for f in sites for x in f if not isinstance(x, OneHot)), jnp.float32
    )
    out = []
    for left, right in sites:
        if isinstance(left, OneHot):
            assert not isinstance(right, OneHot)
            out.append(Factors(left, right.astype(dtype) / clip_norm))
        elif isinstance(right, OneHot):
            out.append(Factors(left.astype(dtype) / clip_norm, right))
        else:
            left, right = left.astype(dtype), right.astype(dtype)
            largest = jnp.max(jnp.abs(left), axis=-1, keepdims=True, initial=0.0)
            largest = jnp.where(largest > 0, largest, 1.0)
            # In this order it overflows only where the gradient does.
            out.append(Factors(left / largest, right * largest / clip_norm))
    return out


def _over_groups(squares: jax.Array) -> jax.Array:
    total, terms = staged_sum(squares, kept=1)
    return total * (1 + margin(terms + 4, squares.dtype))


def _lengths(rows: jax.Array | OneHot) -> jax.Array:
    """At least the rows' norms, f[..., t]."""
    if isinstance(rows, OneHot):
        return (rows.position >= 0).astype(jnp.float32)
    squares = square_sum(rows, kept=rows.ndim - 1)
    return jnp.sqrt(squares) * (1 + margin(4, rows.dtype))


def _inner_and_error(
    one: jax.Array | OneHot,
    other: jax.Array | OneHot,
    one_lengths: jax.Array,
    other_lengths: jax.Array,
) -> tuple[jax.Array, jax.Array | float]:
    """Inner products of all pairs of rows, f[..., t, s], and what they are off by."""
    products, terms = _inner(one, other)
    if terms == 0:
        return products, 0.0
    error = margin(terms + 4, products.dtype)
    return products, error * one_lengths[..., :, None] * other_lengths[..., None, :]


def _inner(one: jax.Array | OneHot, other: jax.Array | OneHot) -> tuple[jax.Array, int]:
    """The inner products of all pairs of rows, and k in their error's bound."""
    if isinstance(one, OneHot) and isinstance(other, OneHot):
        same = one.position[..., :, None] == other.position[..., None, :]
        return same.astype(jnp.float32), 0
    if isinstance(one, OneHot):
        return jnp.swapaxes(_inner(other, one)[0], -1, -2), 0
    if isinstance(other, OneHot):
        position = other.position[..., None, :]
        picked = jnp.take_along_axis(one, jnp.maximum(position, 0), axis=-1)
        return jnp.where(position >= 0, picked, 0.0), 0
    size = one.shape[-1]
    step = max(_PIECE, math.ceil(size / _PIECES))
    pieces = [
        jnp.einsum(
            "...tn,...sn->...ts",
            one[..., start : start + step],
            other[..., start : start + step],
            precision=HIGHEST,
        )
        for start in range(0, size, step)
    ]
    return sum(pieces[1:], pieces[0]), min(step, size) + len(pieces)
