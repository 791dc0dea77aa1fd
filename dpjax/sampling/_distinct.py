"""Distinct numbers in uniformly random order, exactly, in the time their count takes.

Whatever may go wrong (two random sort keys are equal, there are too few different
draws) is seen, and all is drawn anew. That leaves the order uniform: neither what is
drawn nor what is seen changes its distribution when the numbers are renamed, so all
orders are equally likely among the draws that are kept.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

_Draw = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def _redrawn(draw: _Draw, key: jax.Array, size: int) -> jax.Array:
    """What the first good draw gives, i32[size]."""

    def again(carry: tuple[jax.Array, jax.Array, jax.Array]):
        following, now = jax.random.split(carry[0])
        return following, *draw(now)

    # A key instead of a counter and zeros made of it: all that is carried must vary
    # over a mesh as the key does.
    zero = jax.random.key_data(key)[0] & np.uint32(0)
    carry = key, jnp.full(size, zero, jnp.int32), zero > 0
    return jax.lax.while_loop(lambda carry: ~carry[2], again, carry)[1]


def permutation(key: jax.Array, n: int) -> jax.Array:
    """All of [0, n) in uniformly random order, i32[n], by sorting."""

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        high, low = jax.random.bits(key, (2, n), jnp.uint32)
        places = jnp.arange(n, dtype=jnp.int32)
        high, low, order = jax.lax.sort((high, low, places), num_keys=2)
        equal = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        return order, ~jnp.any(equal)

    return _redrawn(draw, key, n)


def _draws(n: int, count: int, accepted: float) -> int:
    """How many draws contain count different ones, but for about once in 1e9 times."""
    mean = -n * math.log1p(-count / n) / accepted
    least = accepted * (1 - count / n)
    spread = math.sqrt(count * (1 - least)) / least
    return math.ceil(mean + 8 * spread) + 16


def distinct(key: jax.Array, n: int, count: int) -> jax.Array:
    """Distinct numbers of [0, n), every ordered choice equally likely, i32[count].

    With n < 2³¹, in O(count log count).
    """
    if 4 * count > n:
        return permutation(key, n)[:count]

    # Multiples of n out of 2³²: what is beyond would favour small numbers.
    multiples = n * (2**32 // n)
    size = _draws(n, count, multiples / 2**32)

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits = jax.random.bits(key, (size,), jnp.uint32)
        fair = bits <= np.uint32(multiples - 1)
        number = jnp.where(fair, bits % np.uint32(n), np.uint32(n))
        places = jnp.arange(size, dtype=jnp.int32)
        number, places = jax.lax.sort((number, places), num_keys=1, is_stable=True)
        new = jnp.concatenate([jnp.ones(1, bool), number[1:] != number[:-1]])
        new &= number < n
        # Back to the order in which they were drawn, what is not new at the end.
        places = jnp.where(new, places, size)
        _, number = jax.lax.sort((places, number), num_keys=1, is_stable=True)
        enough = jnp.sum(new, dtype=jnp.int32) >= count
        return number[:count].astype(jnp.int32), enough

    return _redrawn(draw, key, count)
