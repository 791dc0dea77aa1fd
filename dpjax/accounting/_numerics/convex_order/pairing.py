"""The weighted means of all pairs of points of two grids, moved to grid points."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Moves(NamedTuple):
    """The targets of the pairs (i, j) with j − i = d, for each |d| < n.

    Pairs move from grids with spacing h to a grid with spacing h/2, whose even points
    are those of the wider grid.

    Attributes:
      rows: the offset of the target from i, in points of the wider grid, i32[2n − 1].
      shares: the shares of the mass that move to the even point at the target, the odd
        point after it and the next even point, f[2n − 1, 3].
    """

    rows: jax.Array
    shares: jax.Array


def _offsets(share: jax.Array, spacing: jax.Array, n: int) -> jax.Array:
    """The log of w + (1 − w) e^{hd} in units of half the spacing, f[2n − 1].

    w is the share of the first point of a pair in the mean.
    """
    apart = spacing * jnp.arange(-(n - 1.0), n)
    return jnp.logaddexp(jnp.log(share), jnp.log1p(-share) + apart) / (spacing / 2)


def to_neighbours(share: jax.Array, spacing: jax.Array, n: int) -> Moves:
    """Moves to both neighbouring points, such that the mean stays the same."""
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
    """Moves to the nearest point."""
    point = jnp.round(_offsets(share, spacing, n))
    odd = (point % 2).astype(point.dtype)
    shares = jnp.stack([1 - odd, odd, jnp.zeros_like(odd)], axis=1)
    return Moves(jnp.floor(point / 2).astype(jnp.int32), shares)


def combine_pairs(left: jax.Array, right: jax.Array, moves: Moves) -> jax.Array:
    """The masses Σ_k left[k, i] right[k, j] of all pairs (i, j) at their targets.

    Args:
      left: factors of the first point's mass, f[r, n].
      right: factors of the second point's mass, f[r, n].
      moves: the targets of all pairs.

    Returns:
      The mass at each point of the grid with half the spacing, f[2n]. A mean lies
      between the two points of its pair, so that no mass leaves the grid.
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
        # Three aligned sums, which are interleaved once, after the loop.
        return total + shares[:, None] * jnp.sum(i * j, axis=0)[None], None

    apart = jnp.arange(-(n - 1), n, dtype=jnp.int32)
    total, _ = jax.lax.scan(
        add, jnp.zeros((3, n + 1)), (apart, moves.rows, moves.shares), unroll=2
    )
    even, odd, following = total
    return jnp.stack([even[1:] + following[:-1], odd[1:]], axis=1).ravel()
