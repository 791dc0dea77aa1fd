"""Random orders of n positions, evaluated at given positions.

**The order of `examples_at`** is provably close to uniform, provided that the random
bits are uniform, but takes several hundred rounds or more. A sampler needs this proof
if the sampler's privacy depends on the order.

The order is the result of rounds of swaps. A round draws a random number K from 0 to
n − 1, and pairs every position x with the position K − x modulo n. For each pair, a
random bit decides whether the examples at the two positions are swapped.

The distance of the order from uniform has the following bound. Condition on the numbers
K of all rounds, and on the positions of q examples in all rounds. For each of the n − q
positions x without such an example, let a_x be the probability that one further example
is at position x, minus 1 / (n − q). If none of the q examples is at position K − x, a
round replaces a_x and a_{K−x} by their mean. Otherwise a round retains a_x or moves the
value a_x to position K − x. On average, a round multiplies Σ a_x² by (n + q) / 2n.
After r rounds, the joint distribution of q positions is within

    ½ √n Σ_{l<q} ((n + l) / 2n)^{r/2} <= 2 n^{3/2} / (r + 2) ((n + q) / 2n)^{r/2 + 1}

of uniform in total variation. First, r rounds on all n positions determine the examples
in the last half of the positions, so that q <= n / 2. The examples in the first half
are then permuted in the same way, and so on recursively.

Reference: Hoang, Morris and Rogaway (2012) for a round, Morris and Rogaway (2014) for
the recursion on halves.

**The permutation of `values_at`** is faster, but only pseudo-random for large n. Like
the order of `examples_at`, the permutation is evaluated only at given positions.

**`permutation` and `distinct`** return numbers in an exactly uniform random order. A
draw fails if two random sort keys are equal, or if there are too few distinct numbers.
If a draw fails, the functions draw everything again. The order remains exactly uniform,
since renaming the numbers changes neither the distribution of the draws nor the
probability of a failure. So all orders are equally likely in an accepted draw.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.keys import random_words, threefry

_Draw = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def _draw_until_accepted(draw: _Draw, key: jax.Array, size: int) -> jax.Array:
    """Call `draw` with new keys until it accepts its numbers, and return the numbers.

    `draw` maps a key to numbers, i32[size], and to whether the numbers are accepted,
    bool[].
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
    """The integers from 0 to n − 1 in a uniformly random order, i32[n]."""

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        # With sort keys of 64 bits, equal keys are so rare that drawing again costs
        # almost no time. Equal keys would bias the order.
        high, low = random_words(key, (2, n))
        positions = jnp.arange(n, dtype=jnp.int32)
        high, low, order = jax.lax.sort((high, low, positions), num_keys=2)
        return order, ~jnp.any((high[1:] == high[:-1]) & (low[1:] == low[:-1]))

    return _draw_until_accepted(draw, key, n)


def _draws(n: int, count: int, accepted: float) -> int:
    """The number of draws that `distinct` makes to get `count` distinct numbers.

    With a probability of at most about 1e-9, the draws give fewer than `count` distinct
    numbers. `distinct` then draws again.

    Args:
      n: the number of integers in the range [0, n).
      count: the number of distinct numbers that `distinct` needs.
      accepted: the probability that a draw of 32 bits gives a number in [0, n).
    """
    # The mean number of draws of a coupon collector, plus eight standard deviations and
    # a margin for small counts. The value affects the speed, not the distribution.
    mean = -n * math.log1p(-count / n) / accepted
    probability = accepted * (1 - count / n)
    spread = math.sqrt(count * (1 - probability)) / probability
    return math.ceil(mean + 8 * spread) + 16


def distinct(key: jax.Array, n: int, count: int) -> jax.Array:
    """Draw `count` distinct integers from [0, n), in random order, i32[count].

    All ordered choices are equally likely. n must be below 2³¹. The time is
    O(count log count).
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
        positions = jnp.arange(size, dtype=jnp.int32)
        pairs = number, positions
        number, positions = jax.lax.sort(pairs, num_keys=1, is_stable=True)
        new = jnp.concatenate([jnp.ones(1, bool), number[1:] != number[:-1]])
        new &= number < n  # the number n marks a rejected draw
        # Restore the order of the draws, with repeated and rejected draws at the end.
        positions = jnp.where(new, positions, size)
        _, number = jax.lax.sort((positions, number), num_keys=1, is_stable=True)
        enough = jnp.sum(new, dtype=jnp.int32) >= count
        return number[:count].astype(jnp.int32), enough

    return _draw_until_accepted(draw, key, count)


_SORTED = 2**10  # up to this size a part is permuted by sorting, exactly uniformly
_BITS = 90  # the bound on the total variation distance is 2⁻⁹⁰


def rounds(n: int) -> int:
    """The number of rounds of swaps in each permutation of `examples_at`.

    The order of `examples_at` is composed of permutations of the first n, ⌈n/2⌉, ...
    positions. With this number of rounds in each permutation, the order is within 2⁻⁹⁰
    of uniform in total variation.

    The number r of rounds follows from the bound in the module's docstring. The sum of
    n^{3/2} over the sizes n, ⌈n/2⌉, ... is less than 2 n^{3/2}. The random number K of
    a round has each value with a probability of at most (1 + 2⁻³²) / n, instead of
    1 / n. To make up for this difference, the solution for r omits the factor
    1 / (r + 2) of the bound, which is more than enough.
    """
    # 4 n^{3/2} (3/4)^{r/2} <= 2⁻⁹⁰ solved for r; q <= n / 2 gives (n + q) / 2n <= 3/4.
    return math.ceil(2 * (_BITS + 2 + 1.5 * math.log2(n)) / math.log2(4 / 3))


def _modulo(high: jax.Array, low: jax.Array, n: jax.Array) -> jax.Array:
    """(2³² high + low) modulo n, by long division in 32 bits, for n <= 2³¹.

    JAX has no 64-bit integers by default.
    """

    # The remainder is below n <= 2³¹. So twice the remainder fits in a uint32.
    def digit(i: jax.Array, rest: jax.Array) -> jax.Array:
        bit = (low >> (np.uint32(31) - i.astype(jnp.uint32))) & np.uint32(1)
        rest = 2 * rest + bit
        return jnp.where(rest >= n, rest - n, rest)

    return jax.lax.fori_loop(0, 32, digit, high % n)


def _mix(key: jax.Array, n: jax.Array, x: jax.Array, times: int) -> jax.Array:
    """Move positions x, u32[b], by rounds of random swaps among n positions.

    The module's docstring defines a round. `times` is the number of rounds.
    """
    words = jax.random.bits(key, (4, times), jnp.uint32)
    # 64 random bits modulo n are close enough to uniform; see `rounds`.
    centres = _modulo(words[0], words[1], n)

    def swap(x: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        centre, *key = now
        # K − x modulo n. The larger number of a pair is hashed: both get the same bit.
        other = jnp.where(centre >= x, centre - x, centre + (n - x))
        bit = threefry(key, jnp.maximum(x, other))[0] & np.uint32(1)
        return jnp.where(bit > 0, other, x), None

    return jax.lax.scan(swap, x, (centres, words[2], words[3]))[0]


def examples_at(key: jax.Array, n: int, positions: jax.Array) -> jax.Array:
    """The examples at given positions of a nearly uniform random order, i32[b].

    A sort permutes the first ⌈n/2^k⌉ positions, for the smallest k such that
    ⌈n/2^k⌉ <= 2¹⁰ (`_SORTED`). If k > 0, `rounds(n)` rounds of random swaps move the
    positions from ⌈n/2⌉ to n − 1. Twice as many rounds move the positions from ⌈n/4⌉ to
    ⌈n/2⌉ − 1, and so on, up to k `rounds(n)` rounds. All given positions are computed
    together, in the time that the smallest given position needs.

    Args:
      key: one typed key, which determines the order.
      n: the number of positions, static, below 2³¹.
      positions: the positions, u32[b], below n.
    """
    halves = [n]
    while halves[-1] > _SORTED:
        halves.append(-(-halves[-1] // 2))
    *halves, last = halves
    order = permutation(jax.random.fold_in(key, len(halves)), last)
    # The clamp makes every index valid. Its result is used only for the smallest part.
    inner = order[jnp.minimum(positions, np.uint32(last - 1))].astype(jnp.uint32)
    x = jnp.where(positions < last, inner, positions)
    if not halves:
        return x.astype(jnp.int32)
    sizes, times = np.asarray(halves, np.uint32), rounds(n)

    def level(i: jax.Array, x: jax.Array) -> jax.Array:
        """Apply rounds of random swaps to the first ⌈n / 2^k⌉ positions.

        The loop counter i determines k. The loop begins with the largest k that one of
        the positions needs, and ends with k = 0. Positions beyond the first ⌈n / 2^k⌉
        do not change.
        """
        which = len(halves) - 1 - i
        level_key, size = jax.random.fold_in(key, which), jnp.asarray(sizes)[which]
        image = _mix(level_key, size, jnp.minimum(x, size - 1), times)
        return jnp.where(positions < size, image, x)

    # A part without any of the positions is skipped.
    fits = jnp.min(positions) < sizes
    outer = len(halves) - jnp.sum(fits, dtype=jnp.int32)
    return jax.lax.fori_loop(outer, len(halves), level, x).astype(jnp.int32)


SORTED = 2**14  # up to this size the whole permutation is drawn, exactly uniformly
_ROUNDS = 12  # the rounds of the Feistel network, half of them for each coordinate


def _hash(x: jax.Array, key: jax.Array) -> jax.Array:
    """A hash of 32-bit words under a key of two 32-bit words.

    Reference: Wellons (2018), hash prospector. In this variant, the first word of the
    key is mixed in at the beginning and the second word half-way.
    """
    x = x ^ key[0]
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = x ^ key[1]
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def values_at(key: jax.Array, n: int, positions: jax.Array) -> jax.Array:
    """The values at given positions of a pseudo-random permutation, i32[...].

    The function permutes the numbers 0, ..., n − 1. For n up to 2¹⁴ (`SORTED`) the
    permutation is uniformly random. For larger n, the permutation is a Feistel network:
    each number becomes a pair of coordinates, row and column, each with about √n
    values. A round adds a hash of one coordinate to the other coordinate, modulo the
    number of values of the other coordinate. So a round is invertible. The network
    permutes slightly more than n numbers. A result of n or more passes through the
    network again, until the result is below n. The resulting map is still a permutation
    (Black and Rogaway, 2002, sections 3 and 4).

    Args:
      key: one typed key, which determines the permutation.
      n: the number of positions, static, below 2³¹.
      positions: the positions, u32[...], below n.
    """
    if n <= SORTED:
        return permutation(key, n)[positions]

    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    keys = jax.random.bits(key, (_ROUNDS, 2), jnp.uint32)

    # Addition modulo `size` without a second division, since the sum is below 2 size.
    def add_modulo(x: jax.Array, by: jax.Array, size: int) -> jax.Array:
        image = x + by % np.uint32(size)
        return jnp.where(image >= size, image - np.uint32(size), image)

    def permute_cells(x: jax.Array) -> jax.Array:
        row, column = x // np.uint32(columns), x % np.uint32(columns)
        for i in range(0, _ROUNDS, 2):
            row = add_modulo(row, _hash(column, keys[i]), rows)
            column = add_modulo(column, _hash(row, keys[i + 1]), columns)
        return row * np.uint32(columns) + column

    # Cycle walking: the grid has only a few more cells than n. So only a few numbers
    # pass through the network again.
    def walk_on(x: jax.Array) -> jax.Array:
        return jnp.where(x >= n, permute_cells(x), x)

    inside = jax.lax.while_loop(
        lambda x: jnp.any(x >= n), walk_on, permute_cells(positions)
    )
    return inside.astype(jnp.int32)
