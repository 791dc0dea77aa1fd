"""A keyed pseudo-random permutation of n positions, evaluated at given positions."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.sampling import _distinct

SORTED = 2**14  # up to this size the whole permutation is drawn, exactly uniform
_ROUNDS = 12  # of the Feistel network, half of them for each coordinate


def _mix(x: jax.Array, key: jax.Array) -> jax.Array:
    """A hash of 32-bit words under a 64-bit key.

    Reference: Wellons (2018), hash prospector; here the key's second word is mixed in
    half-way.
    """
    x = x ^ key[0]
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = x ^ key[1]
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def values_at(key: jax.Array, n: int, places: jax.Array) -> jax.Array:
    """The values of the permutation at the given positions, i32[...], for n < 2³¹.

    For n above `SORTED`, the permutation is a Feistel network on a grid of nearly √n by
    √n cells, the smallest that holds n positions. Each round rotates one coordinate by
    a hash of the other coordinate, which is invertible. A value outside [0, n) passes
    through the network again until the value is in [0, n), and the result is still a
    permutation (Black and Rogaway, 2002, sections 3 and 4).

    Args:
      key: one typed key.
      n: how many positions there are, static.
      places: the positions, u32[...], below n.
    """
    if n <= SORTED:
        return _distinct.permutation(key, n)[places]

    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    keys = jax.random.bits(key, (_ROUNDS, 2), jnp.uint32)

    # Addition modulo `size` without a second division: the sum is below 2 size.
    def turned(x: jax.Array, by: jax.Array, size: int) -> jax.Array:
        moved = x + by % np.uint32(size)
        return jnp.where(moved >= size, moved - np.uint32(size), moved)

    def through(x: jax.Array) -> jax.Array:
        row, column = x // np.uint32(columns), x % np.uint32(columns)
        for i in range(0, _ROUNDS, 2):
            row = turned(row, _mix(column, keys[i]), rows)
            column = turned(column, _mix(row, keys[i + 1]), columns)
        return row * np.uint32(columns) + column

    # Cycle walking: the grid has few cells more than n, so that few values repeat.
    def again(x: jax.Array) -> jax.Array:
        return jnp.where(x >= n, through(x), x)

    inside = jax.lax.while_loop(lambda x: jnp.any(x >= n), again, through(places))
    return inside.astype(jnp.int32)
