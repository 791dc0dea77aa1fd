"""Many independent copies of a law, by doubling."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from dpjax.accounting._numerics.convex_order.grid import Grid

# What a law has on a grid, each array with an axis for two such laws in front or not.
_On = TypeVar("_On")
# From two laws on one grid, another one there, and the two's shares of copies, f[2].
Combine = Callable[[Grid, _On, _On, jax.Array], tuple[Grid, _On]]


def copies(
    combine: Combine[_On], grid: Grid, none: _On, one: _On, count: jax.Array
) -> tuple[Grid, _On]:
    """What combine makes of count copies, a whole number from 1 on.

    From those of c and c + 1 copies, on one grid, follow those of 2c + b and of one
    more, b being the next binary digit of the count.
    """
    count = count.astype(jnp.int64)
    digits = 64 - jax.lax.clz(count)

    def at(pair: _On, which: jax.Array | int) -> _On:
        return jax.tree.map(lambda x: x[which], pair)

    def following(k: jax.Array, state: tuple[jax.Array, Grid, _On]):
        c, grid, pair = state
        digit = (count >> (digits - 1 - k)) & 1
        own, other = c + jnp.arange(2), c + digit
        share = own / (own + other)
        return c + other, *combine(grid, pair, at(pair, digit), share)

    both = jax.tree.map(lambda x, y: jnp.stack([x, y]), none, one)
    state = jnp.zeros_like(count), grid, both
    _, grid, pair = jax.lax.fori_loop(0, digits, following, state)
    return grid, at(pair, 0)
