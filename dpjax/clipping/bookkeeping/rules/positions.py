"""Rows that are added up by their position in a table, as one-hot rows are."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core.rounding import margin, square_sum


class Table(NamedTuple):
    """A sum of rows by position.

    Attributes:
      square: at least its squared norm, f[...].
      size: the norm of a table of the rows' lengths, f[...].
      rounded: what forming the sum rounds, f[...].
    """

    square: jax.Array
    size: jax.Array
    rounded: jax.Array


def by_position(
    position: jax.Array, rows: jax.Array, lengths: jax.Array, sites: int
) -> Table:
    """The table of the rows at i[..., t] of all these sites.

    Where k rows share a position, their sum rounds by γ_k times their lengths, which is
    next to nothing where they share none.
    """
    slot = jnp.vectorize(_slots, signature="(t)->(t)")(position)
    add = jnp.vectorize(
        lambda slot, x: jnp.zeros_like(x).at[slot].add(x), signature="(t),(t,p)->(t,p)"
    )
    table = add(slot, rows)
    size = add(slot, lengths[..., None])
    count = add(slot, jnp.ones_like(lengths)[..., None])

    dtype = rows.dtype
    margin(position.shape[-1] + sites + 16, dtype)  # there are not too many
    error = (count + (sites + 16)) * margin(1, dtype) * size

    def norm(x: jax.Array) -> jax.Array:
        return jnp.sqrt(square_sum(x, kept=position.ndim - 1))

    rounded = norm(error)
    return Table(jnp.square(norm(table) + rounded), norm(size), rounded)


def _slots(position: jax.Array) -> jax.Array:
    """For each position a slot of its own, below their number: its first, in order."""
    order = jnp.argsort(position)
    ordered = position[order]
    places = jnp.arange(position.shape[0], dtype=order.dtype)
    # jnp.searchsorted, which would say this, refuses to run in `jax.shard_map`.
    first = jax.lax.cummax(jnp.where(ordered != jnp.roll(ordered, 1), places, 0))
    return jnp.zeros_like(order).at[order].set(first)
