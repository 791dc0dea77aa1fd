"""Draw the number of examples in a step from a binomial distribution, to 128 bits.

Let n be the number of examples, q the sampling rate and b the maximum batch size. Exact
integer arithmetic tabulates the distribution of min(Binomial(n, q), b) once. A draw
compares 128 random bits with the cumulative probabilities in the table. The number of
these probabilities is of order √n.
"""

import functools
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.keys import random_words

# The weight of the mode is 2²⁵⁶. All other weights together are too small by less than
# 2⁶². This is negligible compared to 2⁻¹²⁸, the resolution of the thresholds.
_WEIGHT_BITS = 256
_BITS = 128  # the number of random bits for a count, which are four 32-bit words


class Table(NamedTuple):
    """The cumulative distribution of a count, as thresholds for 128-bit integers.

    A uniformly random 128-bit integer u determines the count.

    Attributes:
      thresholds: u32[r, 4], one 128-bit threshold in each row, in ascending order, most
        significant word first. The count exceeds first + i if and only if u is at least
        the threshold in row i. If u is below the threshold in row 0, the count is 0.
        Counts from 1 to `first` are never drawn. Unless `first` is 0, the counts up to
        `first` together have a probability of at most about 2⁻¹²⁸.
      first: the count whose cumulative probability is in row 0.
    """

    thresholds: np.ndarray
    first: int


def _tail(n: int, mode: int, p: int, q: int) -> list[int]:
    """Integer weights of the counts mode + 1, mode + 2, ... of a binomial distribution.

    Up to rounding down, the weight of a count k is 2²⁵⁶ P(k) / P(mode). Here P(k) is
    the probability of k under Binomial(n, p / (p + q)), and mode is the most probable
    count. The list ends with the first weight that is 0, or with the weight of n.
    """
    weights, weight, k = [], 1 << _WEIGHT_BITS, mode
    # P(k + 1) / P(k) = (n − k) p / ((k + 1) q) is at most 1 from the mode on.
    while weight and k < n:
        weight = weight * (n - k) * p // ((k + 1) * q)
        weights.append(weight)
        k += 1
    return weights


def _weights(n: int, p: int, q: int) -> tuple[int, list[int]]:
    """Integer weights proportional to the probabilities of a binomial distribution.

    The distribution is Binomial(n, p / (p + q)), with n below 2³¹. The weight of the
    most probable count (the mode) is 2²⁵⁶, and every other weight is rounded down. On
    each side of the mode, the weights end with the first weight that rounds to zero, or
    with the weight of the last possible count, which is 0 or n.

    Outwards from the mode, each weight is its inner neighbour times a ratio of at most
    1, so that a rounding error does not grow. There are fewer than 2³¹ weights on each
    side. So each weight is too small by less than 2³¹.

    Returns:
      The smallest count in the list of weights, and the weights in ascending order of
      the counts.
    """
    mode = min((n + 1) * p // (p + q), n)
    above = _tail(n, mode, p, q)
    # If n − k of n coins are heads, k coins are tails.
    below = _tail(n, n - mode, q, p)
    return mode - len(below), [*below[::-1], 1 << _WEIGHT_BITS, *above]


@functools.lru_cache(maxsize=256)
def table(n: int, rate: float, limit: int) -> Table:
    """Tabulate the distribution of min(Binomial(n, rate), limit).

    n is below 2³¹, and `limit` is at most n. Each cumulative probability is rounded up
    by less than 2⁻¹²⁷. So for every k, the probability that a drawn count exceeds k is
    at most the exact probability. Fewer than 2²⁰ cumulative probabilities are between
    2⁻¹²⁸ and 1 − 2⁻¹²⁸. So the total variation distance from the exact distribution is
    below 2⁻¹⁰⁶, which is less than 1.3e-32.
    """
    # A float is exactly a fraction of two integers. So the rate is not rounded.
    exact = Fraction(rate)
    p, q = exact.numerator, exact.denominator - exact.numerator
    start, weights = _weights(n, p, q)
    total = sum(weights)
    # A bound on the total weight lost by rounding down: 2³¹ weights lose less than 2³¹
    # each. For rates 0 and 1 there is one possible count, whose weight is exact.
    below = 1 << 62 if p and q else 0

    # The lost weight is added to the smallest counts, so that every cumulative
    # probability is rounded up.
    thresholds, first, passed = [], min(start, limit), below
    if first:  # all counts below the first weight share the smallest threshold
        first, thresholds = first - 1, [int(below > 0)]
    for k, weight in enumerate(weights[: max(limit - start, 0)], start):
        passed += weight
        threshold = -(-(passed << _BITS) // total)  # division that rounds up
        if threshold >= 1 << _BITS:
            break  # no 128-bit integer reaches this threshold or a later one
        if threshold <= 1:
            first, thresholds = k, []  # equal rows before this one are redundant
        thresholds.append(threshold)
    words = [[t >> s & 0xFFFFFFFF for s in (96, 64, 32, 0)] for t in thresholds]
    rows = np.asarray(words, np.uint32).reshape(-1, 4)
    rows.flags.writeable = False  # the cache returns the same array to every caller
    return Table(rows, first)


def draw(key: jax.Array, n: int, rate: float, limit: int) -> jax.Array:
    """Draw a number from min(Binomial(n, rate), limit), i32[]."""
    thresholds, first = table(n, rate, limit)
    if not len(thresholds):
        return jnp.zeros((), jnp.int32)
    words = random_words(key, (4,))
    count = jnp.sum(_passed(words, thresholds), dtype=jnp.int32)
    return jnp.where(count > 0, first + count, 0)


def _passed(words: jax.Array, thresholds: np.ndarray | jax.Array) -> jax.Array:
    """Whether each 128-bit integer is at least its threshold, bool[...].

    Both arguments are u32[..., 4], with the most significant word first.
    """
    passed = jnp.ones((), bool)
    # The loop starts at the least significant word. At each position, the comparison of
    # the two words overrides the result so far, unless the two words are equal.
    for i in (3, 2, 1, 0):
        word, threshold = words[..., i], thresholds[..., i]
        passed = (word > threshold) | ((word == threshold) & passed)
    return passed


def draws(key: jax.Array, n: int, rate: float, times: int) -> jax.Array:
    """Draw `times` independent counts from Binomial(n, rate), i32[times].

    A bisection finds each count in a `Table`.
    """
    rows, first = table(n, rate, n)
    thresholds = jnp.asarray(rows)
    words = jax.random.bits(key, (times, 4), jnp.uint32)

    def halve(_: int, ends: tuple[jax.Array, jax.Array]):
        """Halve, for each draw, the interval in which the bisection searches.

        The bisection searches for the number of thresholds that the draw's random
        integer reaches. `ends` holds the lower and the upper ends of the intervals.
        """
        low, high = ends
        middle = (low + high) // 2
        passed = _passed(words, thresholds[middle])
        searched = low < high
        low = jnp.where(searched & passed, middle + 1, low)
        return low, jnp.where(searched & ~passed, middle, high)

    # `jax.shard_map` requires that a loop's carry varies over the mesh as the words do.
    # Zeros computed from the random words vary in this way.
    zero = words[:, 0].astype(jnp.int32) & 0
    ends = zero, zero + len(rows)
    count, _ = jax.lax.fori_loop(0, len(rows).bit_length(), halve, ends)
    return jnp.where(count > 0, first + count, 0)
