"""Distinct numbers in an exactly uniform random order, at a cost set by their count.

A draw may fail: two random sort keys are equal, or there are too few distinct numbers.
A failure is detected, and everything is drawn again. Rejection leaves the order exactly
uniform. Renaming the numbers changes neither the distribution of the draws nor the
probability of a failure, so that all orders are equally likely in an accepted draw.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

_Draw = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def _redrawn(draw: _Draw, key: jax.Array, size: int) -> jax.Array:
    """The numbers of the first accepted draw, i32[size].

    `draw` maps a key to numbers, and to whether the draw is accepted.
    """

    def draw_again(carry: tuple[jax.Array, jax.Array, jax.Array]):
        following, now = jax.random.split(carry[0])
        return following, *draw(now)

    # Inside `jax.shard_map`, all parts of a loop's carry must vary over the mesh as the
    # key does. The carry is therefore a key, not a counter, and zeros made of the key.
    zero = jax.random.key_data(key)[0] & np.uint32(0)
    carry = key, jnp.full(size, zero, jnp.int32), zero > 0
    return jax.lax.while_loop(lambda carry: ~carry[2], draw_again, carry)[1]


def permutation(key: jax.Array, n: int) -> jax.Array:
    """The numbers of [0, n) in uniformly random order, i32[n], by sorting."""

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Sort keys of 64 bits: equal keys, which would bias the order, are rare enough
        # that drawing again costs nearly nothing.
        high, low = jax.random.bits(key, (2, n), jnp.uint32)
        places = jnp.arange(n, dtype=jnp.int32)
        high, low, order = jax.lax.sort((high, low, places), num_keys=2)
        equal = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        return order, ~jnp.any(equal)

    return _redrawn(draw, key, n)


def _draws(n: int, count: int, accepted: float) -> int:
    """How many draws from [0, n) hold `count` distinct numbers.

    They hold fewer about once in 1e9 times, and then `distinct` draws again.

    Args:
      n: the size of the range that is drawn from.
      count: how many distinct numbers are needed.
      accepted: the probability that a draw of 32 bits is accepted.
    """
    # The mean of a coupon collector's number of draws, eight standard deviations and a
    # margin for small counts. The value affects the speed, not the distribution.
    mean = -n * math.log1p(-count / n) / accepted
    least = accepted * (1 - count / n)
    spread = math.sqrt(count * (1 - least)) / least
    return math.ceil(mean + 8 * spread) + 16


def distinct(key: jax.Array, n: int, count: int) -> jax.Array:
    """Distinct numbers of [0, n), every ordered choice equally likely, i32[count].

    n must be below 2³¹. The time is O(count log count).
    """
    # As count nears n, new numbers become rare among the draws. From a quarter of the
    # range on, a permutation of the whole range costs O(n log n), which is enough.
    if 4 * count > n:
        return permutation(key, n)[:count]

    # The largest multiple of n up to 2³². A draw beyond it would favour small numbers
    # modulo n, and is rejected.
    multiples = n * (2**32 // n)
    size = _draws(n, count, multiples / 2**32)

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits = jax.random.bits(key, (size,), jnp.uint32)
        fair = bits <= np.uint32(multiples - 1)
        number = jnp.where(fair, bits % np.uint32(n), np.uint32(n))
        places = jnp.arange(size, dtype=jnp.int32)
        number, places = jax.lax.sort((number, places), num_keys=1, is_stable=True)
        new = jnp.concatenate([jnp.ones(1, bool), number[1:] != number[:-1]])
        new &= number < n  # n marks a rejected draw
        # Restore the order of the draws, with repeated and rejected ones at the end.
        places = jnp.where(new, places, size)
        _, number = jax.lax.sort((places, number), num_keys=1, is_stable=True)
        enough = jnp.sum(new, dtype=jnp.int32) >= count
        return number[:count].astype(jnp.int32), enough

    return _redrawn(draw, key, count)
