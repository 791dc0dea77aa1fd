"""How many of n examples take part: a binomial count, to 128 bits.

The distribution is a table that integer arithmetic makes once for each n, q and b; a
count is where 128 random bits fall in it. Nothing is left of order n.
"""

import functools
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_WEIGHT_BITS = 256
_BITS = 128


class Table(NamedTuple):
    """Where 128 random bits u pass from one count to the next.

    Attributes:
      thresholds: u32[r, 4], most significant word first. Count first + i is passed
        where u is not below row i; counts below first where row 0 is.
      first: the count that row 0 is about.
    """

    thresholds: np.ndarray
    first: int


def _weights(n: int, taken: int, left: int) -> tuple[int, list[int]]:
    """The probabilities of Binomial(n, taken / (taken + left)), in proportion.

    They are from the first to the last that is not nothing beside the largest, 2²⁵⁶,
    each rounded down. A rounding is carried on by ratios below 1, so that each of fewer
    than 2³¹ weights is too small by less than 2³¹.
    """
    mode = min((n + 1) * taken // (taken + left), n)
    below, above = [], []
    weight, k = 1 << _WEIGHT_BITS, mode
    while weight and k:
        weight = weight * k * left // ((n - k + 1) * taken)
        below.append(weight)
        k -= 1
    weight, k = 1 << _WEIGHT_BITS, mode
    while weight and k < n:
        weight = weight * (n - k) * taken // ((k + 1) * left)
        above.append(weight)
        k += 1
    return mode - len(below), [*below[::-1], 1 << _WEIGHT_BITS, *above]


@functools.lru_cache(maxsize=256)
def table(n: int, rate: float, most: int) -> Table:
    """For min(Binomial(n, rate), most), with n < 2³¹ and most <= n.

    Thresholds are rounded up, by less than 2⁻¹²⁷: a count is never more likely to be
    above k than it should be. Fewer than 2²⁰ of them lie between 2⁻¹²⁸ and 1 − 2⁻¹²⁸,
    so that the distance in total variation is below 2⁻¹⁰⁶, which is 1.3e-32.
    """
    exact = Fraction(rate)
    taken, left = exact.numerator, exact.denominator - exact.numerator
    start, weights = _weights(n, taken, left)
    total = sum(weights)
    below = 1 << 62 if taken and left else 0  # what the weights may lack, all together

    thresholds, first, passed = [], min(start, most), below
    if first:  # counts that nothing is left of
        first, thresholds = first - 1, [int(below > 0)]
    for k, weight in enumerate(weights[: max(most - start, 0)], start):
        passed += weight
        threshold = -(-(passed << _BITS) // total)
        if threshold >= 1 << _BITS:
            break
        if threshold <= 1:
            first, thresholds = k, []
        thresholds.append(threshold)
    words = [[t >> s & 0xFFFFFFFF for s in (96, 64, 32, 0)] for t in thresholds]
    rows = np.asarray(words, np.uint32).reshape(-1, 4)
    rows.flags.writeable = False
    return Table(rows, first)


def draw(key: jax.Array, n: int, rate: float, most: int) -> jax.Array:
    """min(Binomial(n, rate), most), i32[]."""
    thresholds, first = table(n, rate, most)
    if not len(thresholds):
        return jnp.zeros((), jnp.int32)
    words = jax.random.bits(key, (4,), jnp.uint32)
    passed = jnp.ones(len(thresholds), bool)
    for word, column in reversed(list(zip(words, thresholds.T, strict=True))):
        passed = (word > column) | ((word == column) & passed)
    count = jnp.sum(passed, dtype=jnp.int32)
    return jnp.where(count > 0, first + count, 0)


def draws(key: jax.Array, n: int, rate: float, times: int) -> jax.Array:
    """So many independent Binomial(n, rate), i32[times], each found by bisection."""
    rows, first = table(n, rate, n)
    thresholds = jnp.asarray(rows)
    words = jax.random.bits(key, (times, 4), jnp.uint32)

    def halve(_: int, ends: tuple[jax.Array, jax.Array]):
        """How many thresholds are passed is from low to high."""
        low, high = ends
        middle = (low + high) // 2
        at = thresholds[middle]
        passed = jnp.ones(times, bool)
        for i in (3, 2, 1, 0):
            word, threshold = words[:, i], at[:, i]
            passed = (word > threshold) | ((word == threshold) & passed)
        searched = low < high
        low = jnp.where(searched & passed, middle + 1, low)
        return low, jnp.where(searched & ~passed, middle, high)

    zero = words[:, 0].astype(jnp.int32) & 0
    ends = zero, zero + len(rows)
    count, _ = jax.lax.fori_loop(0, len(rows).bit_length(), halve, ends)
    return jnp.where(count > 0, first + count, 0)
