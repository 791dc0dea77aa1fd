"""A uniformly random order of n places, to within 2⁻⁹⁰, at those that are wanted.

`_permutation` looks random. This one is, given uniform random bits, at the price of
some hundred rounds: what the privacy of a sampler rests on needs a proof.

A round pairs all places, x with K − x modulo n for a random K, and swaps each pair or
not by a random bit of its own. Let a_x be what the law of one more example's place,
given where q others went and all Ks, differs by from uniform. Where K − x is free, a_x
and a_{K−x} become their mean, elsewhere they move: Σ a_x² falls to (n + q) / 2n of it
on average. So r rounds leave q places, together, within

    ½ √n Σ_{l<q} ((n + l) / 2n)^{r/2} <= 2 n^{3/2} / (r + 2) ((n + q) / 2n)^{r/2 + 1}

of uniform in total variation. They are half of all, q <= n / 2, and those in the other
half are put in order in the same way, and so on.

Reference: Hoang, Morris and Rogaway (2012) for a round, Morris and Rogaway (2014) for
halves.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.sampling import _distinct

_SORTED = 2**10  # what is left is sorted from here on
_BITS = 90
_TURNS = (13, 15, 26, 6), (17, 29, 16, 24)


def _threefry(key: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    """The first word of Threefry-2x32 at (0, x): JAX's generator in one fused loop.

    Reference: Salmon et al. (2011), https://doi.org/10.1145/2063384.2063405.
    """
    words = *key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    a, b = jnp.broadcast_to(words[0], x.shape), x + words[1]
    for i in range(5):
        for turn in _TURNS[i % 2]:
            a = a + b
            b = a ^ ((b << np.uint32(turn)) | (b >> np.uint32(32 - turn)))
        a = a + words[(i + 1) % 3]
        b = b + (words[(i + 2) % 3] + np.uint32(i + 1))
    return a


def rounds(n: int) -> int:
    """So many that all halves together are within 2⁻⁹⁰.

    The sum of n^{3/2} over n, ⌈n/2⌉, ... is less than 2 n^{3/2}. No K is more likely
    than 1 / n by 2⁻³² of that, which is less than the factor 1 / (r + 2) left out.
    """
    return math.ceil(2 * (_BITS + 2 + 1.5 * math.log2(n)) / math.log2(4 / 3))


def _modulo(high: jax.Array, low: jax.Array, n: jax.Array) -> jax.Array:
    """(2³² high + low) modulo n <= 2³¹, by long division."""

    def digit(i: jax.Array, rest: jax.Array) -> jax.Array:
        bit = (low >> (np.uint32(31) - i.astype(jnp.uint32))) & np.uint32(1)
        rest = 2 * rest + bit
        return jnp.where(rest >= n, rest - n, rest)

    return jax.lax.fori_loop(0, 32, digit, high % n)


def _mix(key: jax.Array, n: jax.Array, x: jax.Array, times: int) -> jax.Array:
    """Where so many rounds on n places bring x, u32[b]."""
    words = jax.random.bits(key, (4, times), jnp.uint32)
    centres = _modulo(words[0], words[1], n)

    def swap(x: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        centre, *key = now
        other = jnp.where(centre >= x, centre - x, centre + (n - x))
        bit = _threefry((key[0], key[1]), jnp.maximum(x, other)) & np.uint32(1)
        return jnp.where(bit > 0, other, x), None

    return jax.lax.scan(swap, x, (centres, words[2], words[3]))[0]


def examples_at(key: jax.Array, n: int, places: jax.Array) -> jax.Array:
    """The examples at some places of the order, i32[b], for n < 2³¹.

    Half of the places cost `rounds(n)` rounds, a quarter twice as many, and so on.

    Args:
      key: one typed key.
      n: static.
      places: u32[b], below n.
    """
    halves = [n]
    while halves[-1] > _SORTED:
        halves.append(-(-halves[-1] // 2))
    *halves, last = halves
    order = _distinct.permutation(jax.random.fold_in(key, len(halves)), last)
    inner = order[jnp.minimum(places, np.uint32(last - 1))].astype(jnp.uint32)
    x = jnp.where(places < last, inner, places)
    if not halves:
        return x.astype(jnp.int32)
    sizes, times = np.asarray(halves, np.uint32), rounds(n)

    def level(i: jax.Array, x: jax.Array) -> jax.Array:
        """From the smallest part that has one of the places to all."""
        which = len(halves) - 1 - i
        own, size = jax.random.fold_in(key, which), jnp.asarray(sizes)[which]
        moved = _mix(own, size, jnp.minimum(x, size - 1), times)
        return jnp.where(places < size, moved, x)

    fits = jnp.min(places) < sizes
    outer = len(halves) - jnp.sum(fits, dtype=jnp.int32)
    return jax.lax.fori_loop(outer, len(halves), level, x).astype(jnp.int32)
