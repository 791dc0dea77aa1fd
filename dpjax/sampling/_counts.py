"""How many of n uniformly random numbers are below a cut, without drawing them.

Of n numbers in [0, 1) those below 1/2 are Binomial(n, 1/2) many, and so on in both
halves. The way to a cut is its binary digits, one half at each, until no number is left
that they do not tell from the cut. A half's count is drawn from a key that the digits
before it lead to: all cuts see the same numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.sampling import _binomial

# Bits of a count that are drawn together: so many coins, or sums of 2⁸, 2¹⁶, 2²⁴ coins.
_DIGIT = 8


def _heads(key: jax.Array, n: jax.Array, most: int) -> jax.Array:
    """Binomial(n, 1/2) for n <= most < 2³¹, i32[].

    Up to 2⁸ coins are tossed. Of 2⁸ᵏ the sum is off by less than 2⁻¹²⁸ for each row of
    its table in total variation, and there are fewer rows than coins but for k = 1,
    which has one more: altogether by less than n 2⁻¹²⁷.
    """
    own, key = jax.random.split(key)
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
    """How many of n numbers are below cut / parts, for cut <= parts < 2³¹, i32[].

    All counts of a key are together within 2⁻⁹⁰ of their law in total variation: the
    numbers that are split at any one digit are at most n < 2³¹, and fewer than 2⁸ are
    left together after 32 digits, whose coins are exact.
    """
    nothing = jax.random.key_data(key).ravel()[0] & cut & np.uint32(0)
    zero = nothing.astype(jnp.int32)
    # All that is carried must vary over a mesh as the key and the cut do.
    start = jax.random.fold_in(key, nothing), zero + n, cut + nothing, zero

    def undecided(carry: tuple[jax.Array, ...]) -> jax.Array:
        _, left, rest, _ = carry
        return (left > 0) & (rest > 0)

    def digit(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        key, left, rest, found = carry
        heads = _heads(jax.random.fold_in(key, 2), left, n)
        one = 2 * rest >= np.uint32(parts)
        return (
            jax.random.fold_in(key, one.astype(jnp.uint32)),
            jnp.where(one, left - heads, heads),
            2 * rest - jnp.where(one, np.uint32(parts), np.uint32(0)),
            found + jnp.where(one, heads, 0),
        )

    return jax.lax.while_loop(undecided, digit, start)[-1]
