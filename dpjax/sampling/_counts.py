"""How many of n uniform random numbers are below a cut, without drawing the numbers.

Of n uniform numbers in [0, 1), the number below 1/2 has the distribution
Binomial(n, 1/2), and the same holds recursively within each half. The binary digits of
a cut select one half after another, until no number is left in the selected interval.
The key of each binomial draw is a function of the digits before it. Different cuts
under one key therefore count the same implicit numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.sampling import _binomial

# A count n of coins is split into its digits in base 2⁸: single coins, and sums of 2⁸,
# 2¹⁶ and 2²⁴ coins, fewer than 2⁸ of each kind.
_DIGIT = 8


def _heads(key: jax.Array, n: jax.Array, most: int) -> jax.Array:
    """A draw of Binomial(n, 1/2) for n <= most < 2³¹, i32[].

    Fewer than 2⁸ coins are flipped singly, which is exact. A sum of 2⁸ᵏ coins is drawn
    from a table, with an error in total variation of less than 2⁻¹²⁸ for each row of
    the table. The table has fewer rows than coins, except for k = 1, where it has one
    row more. The error of the whole draw is therefore less than n 2⁻¹²⁷.
    """
    own, key = jax.random.split(key)
    # `most` is static and n is not: the shape is the largest digit, and a mask selects
    # as many coins as the digit of n says.
    times = min(most, 2**_DIGIT - 1)
    coins = jax.random.bits(own, (times,), jnp.uint8) & np.uint8(1)
    first = jnp.arange(times) < n % 2**_DIGIT
    heads = jnp.sum(jnp.where(first, coins.astype(jnp.int32), 0), dtype=jnp.int32)
    for shift in range(_DIGIT, most.bit_length(), _DIGIT):
        own, key = jax.random.split(key)
        times = min(most >> shift, 2**_DIGIT - 1)
        sums = _binomial.draws(own, 2**shift, 0.5, times)
        first = jnp.arange(times) < (n >> shift) % 2**_DIGIT
        heads += jnp.sum(jnp.where(first, sums, 0), dtype=jnp.int32)
    return heads


def below(key: jax.Array, n: int, cut: jax.Array, parts: int) -> jax.Array:
    """How many of n uniform numbers are below cut / parts, i32[].

    The joint distribution of the counts for all cuts under one key is within 2⁻⁹⁰ of
    the exact one in total variation. At each digit at most n < 2³¹ numbers are split.
    After 32 digits fewer than 2⁸ numbers share an interval, and their coins are exact.

    Args:
      key: one typed key, which stands for the n numbers.
      n: how many numbers, static.
      cut: u32[], at most parts.
      parts: static, below 2³¹, so that twice the remainder fits in a uint32.
    """
    nothing = jax.random.key_data(key).ravel()[0] & cut & np.uint32(0)
    zero = nothing.astype(jnp.int32)
    # Inside `jax.shard_map`, all parts of a loop's carry must vary over the mesh as the
    # key and the cut do. Adding zeros made of both does that.
    start = jax.random.fold_in(key, nothing), zero + n, cut + nothing, zero

    def undecided(carry: tuple[jax.Array, ...]) -> jax.Array:
        _, left, rest, _ = carry
        # Stop once the interval holds no number, or once it begins at the cut.
        return (left > 0) & (rest > 0)

    def digit(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        key, left, rest, found = carry
        # The halves have the keys 0 and 1 of the interval's key, and its count key 2.
        heads = _heads(jax.random.fold_in(key, 2), left, n)
        # The next binary digit of rest / parts: if it is one, the lower half is below
        # the cut and counts, and the cut is in the upper half.
        one = 2 * rest >= np.uint32(parts)
        return (
            jax.random.fold_in(key, one.astype(jnp.uint32)),
            jnp.where(one, left - heads, heads),
            2 * rest - jnp.where(one, np.uint32(parts), np.uint32(0)),
            found + jnp.where(one, heads, 0),
        )

    return jax.lax.while_loop(undecided, digit, start)[-1]
