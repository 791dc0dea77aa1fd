"""The combination of many independent copies of a distribution, by doubling."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from dpjax.accounting._numerics.convex_order.grid import Grid

# The masses of a distribution on a grid, or of two distributions, whose arrays then
# have an axis of length 2 in front.
_On = TypeVar("_On")
# The arguments are a grid, a pair of distributions on it, a single distribution on it,
# and the share of copies that each of the pair has in its combination, f[2].
Combine = Callable[[Grid, _On, _On, jax.Array], tuple[Grid, _On]]


def copies(
    combine: Combine[_On], grid: Grid, none: _On, one: _On, count: jax.Array
) -> tuple[Grid, _On]:
    """The combination of count independent copies, and its grid.

    The loop holds the combinations of c and of c + 1 copies on one grid. Those of
    2c + b and of 2c + b + 1 copies follow from them, with b the next binary digit of
    the count.

    Args:
      combine: the combination of a pair of distributions with a third one.
      grid: the grid of both distributions.
      none: the distribution of no copies.
      one: the distribution of one copy.
      count: the number of copies, a whole number, at least 1.
    """
    count = count.astype(jnp.int64)
    # The number of binary digits of the count.
    digits = 64 - jax.lax.clz(count)

    def at(pair: _On, which: jax.Array | int) -> _On:
        return jax.tree.map(lambda x: x[which], pair)

    def following(k: jax.Array, state: tuple[jax.Array, Grid, _On]):
        c, grid, pair = state
        digit = (count >> (digits - 1 - k)) & 1
        own, other = c + jnp.arange(2), c + digit
        # The mean of the combination weights each part by its number of copies.
        share = own / (own + other)
        return c + other, *combine(grid, pair, at(pair, digit), share)

    both = jax.tree.map(lambda x, y: jnp.stack([x, y]), none, one)
    state = jnp.zeros_like(count), grid, both
    _, grid, pair = jax.lax.fori_loop(0, digits, following, state)
    return grid, at(pair, 0)
