"""The norm of a gradient whose rows are one-hot, by adding up rows per position.

A one-hot row on one side selects a position in a table. The rows of the other side are
added up by these positions, in a table with one slot for each distinct position.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core.rounding import margin, square_sum


class Table(NamedTuple):
    """Bounds for a table in which rows are added up by their position.

    Attributes:
      square: an upper bound f[...] of the table's squared norm.
      size: the norm f[...] of the table that adds up the rows' lengths instead.
      rounded: a bound f[...] on the rounding error of adding up the rows.
    """

    square: jax.Array
    size: jax.Array
    rounded: jax.Array


def by_position(
    position: jax.Array, rows: jax.Array, lengths: jax.Array, sites: int
) -> Table:
    """Bounds for the table of rows f[..., t, p] at the positions i[..., t].

    Where k rows share a position, the rounding error of their sum is at most γ_k times
    the sum of their lengths. Where no rows share a position, nothing is added and the
    error is close to zero.

    Args:
      position: the position of each row.
      rows: the rows.
      lengths: upper bounds f[..., t] of the rows' norms.
      sites: the number of sites over which the caller adds gradients.
    """
    slot = jnp.vectorize(_slots, signature="(t)->(t)")(position)
    add = jnp.vectorize(
        lambda slot, x: jnp.zeros_like(x).at[slot].add(x), signature="(t),(t,p)->(t,p)"
    )
    table = add(slot, rows)
    size = add(slot, lengths[..., None])
    count = add(slot, jnp.ones_like(lengths)[..., None])

    dtype = rows.dtype
    # This call only checks that the bound holds for so many terms: it raises if not.
    margin(position.shape[-1] + sites + 16, dtype)
    # γ_count times the lengths, where count is the number of rows in a slot.
    error = (count + (sites + 16)) * margin(1, dtype) * size

    def norm(x: jax.Array) -> jax.Array:
        return jnp.sqrt(square_sum(x, kept=position.ndim - 1))

    rounded = norm(error)
    return Table(jnp.square(norm(table) + rounded), norm(size), rounded)


def _slots(position: jax.Array) -> jax.Array:
    """For each position a slot below the number of rows, the same for equal positions.

    The slot is the first index of the position in sorted order. A table then needs only
    as many slots as there are rows, however large the vocabulary is.
    """
    order = jnp.argsort(position)
    ordered = position[order]
    places = jnp.arange(position.shape[0], dtype=order.dtype)
    # The running maximum carries the first index of each run of equal positions.
    # jnp.searchsorted would compute the same, but does not run in `jax.shard_map`.
    first = jax.lax.cummax(jnp.where(ordered != jnp.roll(ordered, 1), places, 0))
    return jnp.zeros_like(order).at[order].set(first)
