"""Random orders of n positions, evaluated at given positions.

**The permutation of `values_at`** is only pseudo-random, and is evaluated at given
positions alone.

**`permutation` and `distinct`** return numbers in an exactly uniform random order. A
draw may fail: two random sort keys are equal, or there are too few distinct numbers.
The functions detect a failure and draw everything again. The order remains exactly
uniform. The reason is that renaming the numbers changes neither the distribution of the
draws nor the probability of a failure. So all orders are equally likely in an accepted
draw.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.keys import random_words

_Draw = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def _draw_until_accepted(draw: _Draw, key: jax.Array, size: int) -> jax.Array:
    """The numbers of the first accepted draw, i32[size].

    `draw` is a function of a key that returns numbers, and whether they are accepted.
    """

    def redraw(carry: tuple[jax.Array, jax.Array, jax.Array]):
        following, now = jax.random.split(carry[0])
        return following, *draw(now)

    # Inside `jax.shard_map`, all parts of a loop's carry must vary over the mesh as the
    # key does. So the carry is a key, instead of a counter, and zeros made of the key.
    zero = jax.random.key_data(key)[0] & np.uint32(0)
    carry = key, jnp.full(size, zero, jnp.int32), zero > 0
    return jax.lax.while_loop(lambda carry: ~carry[2], redraw, carry)[1]


def permutation(key: jax.Array, n: int) -> jax.Array:
    """The numbers of [0, n) in uniformly random order, i32[n], by sorting."""

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        # With sort keys of 64 bits, equal keys are so rare that drawing again costs
        # almost no time. Equal keys would bias the order.
        high, low = random_words(key, (2, n))
        places = jnp.arange(n, dtype=jnp.int32)
        high, low, order = jax.lax.sort((high, low, places), num_keys=2)
        equal = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        return order, ~jnp.any(equal)

    return _draw_until_accepted(draw, key, n)


def _draws(n: int, count: int, accepted: float) -> int:
    """A number of draws from [0, n) that nearly always has `count` distinct numbers.

    About once in 1e9 times the draws have fewer, and `distinct` then draws again.

    Args:
      n: the size of the range of the draws.
      count: the number of distinct numbers that are needed.
      accepted: the probability that a draw of 32 bits is accepted.
    """
    # The mean number of draws of a coupon collector, plus eight standard deviations and
    # a margin for small counts. The value affects the speed, not the distribution.
    mean = -n * math.log1p(-count / n) / accepted
    least = accepted * (1 - count / n)
    spread = math.sqrt(count * (1 - least)) / least
    return math.ceil(mean + 8 * spread) + 16


def distinct(key: jax.Array, n: int, count: int) -> jax.Array:
    """Distinct numbers of [0, n), i32[count]; all ordered choices are equally likely.

    n must be below 2³¹. The time is O(count log count).
    """
    # If count is near n, new numbers are rare among the draws. So from a quarter of the
    # range on, the whole range is permuted, in time O(n log n).
    if 4 * count > n:
        return permutation(key, n)[:count]

    # The largest multiple of n up to 2³². A draw beyond this multiple is rejected,
    # since it would favour small numbers modulo n.
    multiples = n * (2**32 // n)
    size = _draws(n, count, multiples / 2**32)

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits = random_words(key, (size,))
        fair = bits <= np.uint32(multiples - 1)
        number = jnp.where(fair, bits % np.uint32(n), np.uint32(n))
        places = jnp.arange(size, dtype=jnp.int32)
        number, places = jax.lax.sort((number, places), num_keys=1, is_stable=True)
        new = jnp.concatenate([jnp.ones(1, bool), number[1:] != number[:-1]])
        new &= number < n  # the number n marks a rejected draw
        # Restore the order of the draws, with repeated and rejected draws at the end.
        places = jnp.where(new, places, size)
        _, number = jax.lax.sort((places, number), num_keys=1, is_stable=True)
        enough = jnp.sum(new, dtype=jnp.int32) >= count
        return number[:count].astype(jnp.int32), enough

    return _draw_until_accepted(draw, key, count)


SORTED = 2**14  # up to this size the whole permutation is drawn, exactly uniform
_ROUNDS = 12  # the rounds of the Feistel network, half of them for each coordinate


def _hash(x: jax.Array, key: jax.Array) -> jax.Array:
    """A hash of 32-bit words under a 64-bit key.

    Reference: Wellons (2018), hash prospector. Here the second word of the key is mixed
    in half-way.
    """
    x = x ^ key[0]
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = x ^ key[1]
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def values_at(key: jax.Array, n: int, places: jax.Array) -> jax.Array:
    """The values of the permutation at the given positions, i32[...], for n < 2³¹.

    For n above `SORTED`, the permutation is a Feistel network on a grid of nearly √n by
    √n cells, the smallest grid with at least n cells. Each round rotates one coordinate
    by a hash of the other coordinate, which is invertible. A value outside [0, n)
    passes through the network again until it is in [0, n). The result is still a
    permutation (Black and Rogaway, 2002, sections 3 and 4).

    Args:
      key: one typed key.
      n: the number of positions, static.
      places: the positions, u32[...], below n.
    """
    if n <= SORTED:
        return permutation(key, n)[places]

    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    keys = jax.random.bits(key, (_ROUNDS, 2), jnp.uint32)

    # Addition modulo `size` without a second division, since the sum is below 2 size.
    def add_modulo(x: jax.Array, by: jax.Array, size: int) -> jax.Array:
        moved = x + by % np.uint32(size)
        return jnp.where(moved >= size, moved - np.uint32(size), moved)

    def permute_cells(x: jax.Array) -> jax.Array:
        row, column = x // np.uint32(columns), x % np.uint32(columns)
        for i in range(0, _ROUNDS, 2):
            row = add_modulo(row, _hash(column, keys[i]), rows)
            column = add_modulo(column, _hash(row, keys[i + 1]), columns)
        return row * np.uint32(columns) + column

    # Cycle walking: the grid has only few cells more than n, so that few values repeat.
    def walk_on(x: jax.Array) -> jax.Array:
        return jnp.where(x >= n, permute_cells(x), x)

    inside = jax.lax.while_loop(
        lambda x: jnp.any(x >= n), walk_on, permute_cells(places)
    )
    return inside.astype(jnp.int32)
