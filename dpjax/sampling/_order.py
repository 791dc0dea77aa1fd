"""A random order of n positions, within 2⁻⁹⁰ of uniform, evaluated at given positions.

The permutation in `_permutation` only looks random. The order here is provably close to
uniform, provided that the random bits are uniform, and costs some hundred rounds. The
privacy of a sampler depends on the order, and therefore needs the proof.

A round pairs every position x with K − x modulo n for a random K. A random bit for each
pair decides whether the pair is swapped. Condition on all Ks and on the positions of q
examples, and let a_x be the probability that one further example is at position x,
minus its uniform value. Where the position K − x is not one of the q, a round replaces
a_x and a_{K−x} by their mean; elsewhere a round moves a_x to another position. On
average, a round multiplies Σ a_x² by (n + q) / 2n. After r rounds, the joint
distribution of q positions is within

    ½ √n Σ_{l<q} ((n + l) / 2n)^{r/2} <= 2 n^{3/2} / (r + 2) ((n + q) / 2n)^{r/2 + 1}

of uniform in total variation. The r rounds are applied to all n positions and fix the
examples of one half of them, q <= n / 2. The examples in the other half are then
permuted in the same way, and so on recursively.

Reference: Hoang, Morris and Rogaway (2012) for a round, Morris and Rogaway (2014) for
halves.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.sampling import _distinct

_SORTED = 2**10  # up to this size a part is permuted by sorting, exactly uniformly
_BITS = 90  # the bound on the total variation distance is 2⁻⁹⁰
_TURNS = (13, 15, 26, 6), (17, 29, 16, 24)  # rotation constants of Threefry-2x32


def _threefry(key: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    """The first output word of Threefry-2x32 for the counter (0, x), u32[b].

    Threefry-2x32 is the default generator of JAX. Written out here, it fuses with the
    loop over rounds.

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
    """The number of rounds for which all halves together are within 2⁻⁹⁰ of uniform.

    The sum of n^{3/2} over n, ⌈n/2⌉, ... is less than 2 n^{3/2}. The probability of a K
    exceeds 1 / n by at most a relative 2⁻³². The omitted factor 1 / (r + 2) more than
    makes up for that excess.
    """
    # 4 n^{3/2} (3/4)^{r/2} <= 2⁻⁹⁰, solved for r: q <= n / 2 makes (n + q) / 2n <= 3/4.
    return math.ceil(2 * (_BITS + 2 + 1.5 * math.log2(n)) / math.log2(4 / 3))


def _modulo(high: jax.Array, low: jax.Array, n: jax.Array) -> jax.Array:
    """(2³² high + low) modulo n <= 2³¹, by long division in 32 bits.

    JAX has no 64-bit integers by default.
    """

    # The remainder is below n <= 2³¹, so that its double fits in a uint32.
    def digit(i: jax.Array, rest: jax.Array) -> jax.Array:
        bit = (low >> (np.uint32(31) - i.astype(jnp.uint32))) & np.uint32(1)
        rest = 2 * rest + bit
        return jnp.where(rest >= n, rest - n, rest)

    return jax.lax.fori_loop(0, 32, digit, high % n)


def _mix(key: jax.Array, n: jax.Array, x: jax.Array, times: int) -> jax.Array:
    """The positions, u32[b], that x has after `times` rounds on n positions."""
    words = jax.random.bits(key, (4, times), jnp.uint32)
    # 64 random bits modulo n are close enough to uniform; see `rounds`.
    centres = _modulo(words[0], words[1], n)

    def swap(x: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        centre, *key = now
        # K − x modulo n. The larger of the pair is hashed, so that both get one bit.
        other = jnp.where(centre >= x, centre - x, centre + (n - x))
        bit = _threefry((key[0], key[1]), jnp.maximum(x, other)) & np.uint32(1)
        return jnp.where(bit > 0, other, x), None

    return jax.lax.scan(swap, x, (centres, words[2], words[3]))[0]


def examples_at(key: jax.Array, n: int, places: jax.Array) -> jax.Array:
    """The examples at the given positions of the random order, i32[b], for n < 2³¹.

    The last half of the positions costs `rounds(n)` rounds, the quarter before it twice
    as many, and so on. The smallest of the given positions sets the cost of them all.

    Args:
      key: one typed key.
      n: how many positions there are, static.
      places: the positions, u32[b], below n.
    """
    halves = [n]
    while halves[-1] > _SORTED:
        halves.append(-(-halves[-1] // 2))
    *halves, last = halves
    order = _distinct.permutation(jax.random.fold_in(key, len(halves)), last)
    # The clamp makes every index valid; its result is used for the smallest part alone.
    inner = order[jnp.minimum(places, np.uint32(last - 1))].astype(jnp.uint32)
    x = jnp.where(places < last, inner, places)
    if not halves:
        return x.astype(jnp.int32)
    sizes, times = np.asarray(halves, np.uint32), rounds(n)

    def level(i: jax.Array, x: jax.Array) -> jax.Array:
        """Apply the rounds of one part, in order from small parts to all positions."""
        which = len(halves) - 1 - i
        own, size = jax.random.fold_in(key, which), jnp.asarray(sizes)[which]
        moved = _mix(own, size, jnp.minimum(x, size - 1), times)
        return jnp.where(places < size, moved, x)

    # Parts that hold none of the positions are skipped.
    fits = jnp.min(places) < sizes
    outer = len(halves) - jnp.sum(fits, dtype=jnp.int32)
    return jax.lax.fori_loop(outer, len(halves), level, x).astype(jnp.int32)
