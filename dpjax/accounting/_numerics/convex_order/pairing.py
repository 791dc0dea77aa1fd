"""All pairs of points of two grids, moved to where their mean is."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Moves(NamedTuple):
    """Where pairs go that are j − i = d apart, for each |d| < n.

    Attributes:
      rows: by how many points of the wide grid, and then of twice as many, i32[2n − 1].
      shares: what goes to the even and the odd point there and to the next even one,
        f[2n − 1, 3].
    """

    rows: jax.Array
    shares: jax.Array


def _offsets(share: jax.Array, spacing: jax.Array, n: int) -> jax.Array:
    """Log (w + (1 − w) e^{hd}) in points of half the spacing, f[2n − 1]."""
    apart = spacing * jnp.arange(-(n - 1.0), n)
    return jnp.logaddexp(jnp.log(share), jnp.log1p(-share) + apart) / (spacing / 2)


def to_neighbours(share: jax.Array, spacing: jax.Array, n: int) -> Moves:
    """To both neighbouring points, such that the mean stays."""
    place = _offsets(share, spacing, n)
    point = jnp.floor(place)
    half = spacing / 2
    up = jnp.expm1(half * (place - point)) / jnp.expm1(half)
    even, zero = point % 2 == 0, jnp.zeros_like(up)
    shares = jnp.where(
        even, jnp.stack([1 - up, up, zero]), jnp.stack([zero, 1 - up, up])
    )
    return Moves(jnp.floor(point / 2).astype(jnp.int32), shares.T)


def to_nearest(share: jax.Array, spacing: jax.Array, n: int) -> Moves:
    """To the nearest point."""
    point = jnp.round(_offsets(share, spacing, n))
    odd = (point % 2).astype(point.dtype)
    shares = jnp.stack([1 - odd, odd, jnp.zeros_like(odd)], axis=1)
    return Moves(jnp.floor(point / 2).astype(jnp.int32), shares)


def combine_pairs(left: jax.Array, right: jax.Array, moves: Moves) -> jax.Array:
    """Σ_k left[k, i] right[k, j] of all pairs, moved; f[r, n] twice gives f[2n].

    A mean is between what it is of, so that nothing leaves the grid.
    """
    n = left.shape[1]
    left = jnp.pad(left, ((0, 0), (n, n)))
    right = jnp.pad(right, ((0, 0), (2 * n, 2 * n)))

    def add(
        total: jax.Array, now: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        apart, row, shares = now
        i = jax.lax.dynamic_slice_in_dim(left, n - 1 - row, n + 1, axis=1)
        j = jax.lax.dynamic_slice_in_dim(right, 2 * n - 1 - row + apart, n + 1, axis=1)
        # Three aligned sums, which are put where they belong once, at the end.
        return total + shares[:, None] * jnp.sum(i * j, axis=0)[None], None

    apart = jnp.arange(-(n - 1), n, dtype=jnp.int32)
    total, _ = jax.lax.scan(
        add, jnp.zeros((3, n + 1)), (apart, moves.rows, moves.shares), unroll=2
    )
    even, odd, following = total
    return jnp.stack([even[1:] + following[:-1], odd[1:]], axis=1).ravel()
