"""Discrete Gaussian noise on the integers, drawn from one table of integer weights.

The discrete Gaussian D_σ has a mass proportional to e^{−z²/2σ²} at each integer z. One
table holds D_512, and sums of draws are wider: X₁ + M X₂ with X_i ~ D_{σ_i} is D_σ with
σ² = σ₁² + M²σ₂², within a factor e^{±4ϑ(v)} at every point, for v = σ₁σ₂/σ and

    ϑ(r) = 2 Σ_{k>=1} e^{−2π²r²k²}

(Micciancio and Walter 2017, https://eprint.iacr.org/2017/259). With σ₁ = 512 and
M = 256 the number v is 2.0, and 4ϑ(v) is below 1e-33. So two draws give σ of about 2¹⁷,
three give 2²⁵, and four give 2³³.

**Table.** Walker's alias method (1977) with integer weights that add up to exactly
2¹¹². The columns are equally probable, and each holds 2⁹⁸: the weight of its own number up to
a threshold, and the weight of one other number, its alias, from there on. The weights
differ from those of D_512 by less than 2⁻⁹⁸ in total variation.

**Draw.** 14 random bits choose the column, and 98 bits are compared with the threshold.
The first 34 of these bits decide unless they equal those of the threshold, once in 2³⁴
draws. The other 64 bits are drawn for such a draw alone.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.keys import stream
from dpjax._core.typing import Key

WIDTH = 512  # σ of the table
SCALE = 256  # M, the factor between the draws of a wider discrete Gaussian
_COLUMN_BITS = 14  # the numbers −8192, ..., 8191; the mass beyond is below 1e-56
_COLUMNS = 2**_COLUMN_BITS
_THRESHOLD_BITS = 98
# The bits of a threshold: the first 18 are packed with the alias, then 16, then 64.
_FIRST, _SECOND, _LAST = 18, 16, 64
# Fixed-point numbers with 256 binary digits make the weights.
_DIGITS = 256
# A bound on the total variation between a draw and D_512: rounding 2¹⁴ weights to
# multiples of 2⁻¹¹², and what the table leaves out.
TOTAL_VARIATION = 2.0**-97


class AliasTable(NamedTuple):
    """The columns of the table.

    Attributes:
      packed: the first 18 bits of the threshold, then the 14 bits of the alias, u32[k].
      second: the next 16 bits of the threshold, u16[k].
      last: the last 64 bits of the threshold, as two words, u32[k, 2].
    """

    packed: np.ndarray
    second: np.ndarray
    last: np.ndarray


def _exp_fixed(numerator: int, denominator: int) -> int:
    """e^{−numerator / denominator} in fixed point, for an exponent from 0 to 1."""
    one = 1 << (_DIGITS + 32)  # 32 more digits, so that rounding does not matter
    total, term, k = one, one, 1
    while term:
        term = term * numerator // (denominator * k)
        total += term if k % 2 == 0 else -term
        k += 1
    return total >> 32


def integer_weights() -> list[int]:
    """The weights of −8192, ..., 8191, integers that add up to 2¹¹² exactly."""
    half = _COLUMNS // 2
    # w(z + 1) / w(z) = e^{−(2z + 1) / 2σ²}, itself a geometric sequence in z.
    ratio, fade = _exp_fixed(1, 2 * WIDTH**2), _exp_fixed(1, WIDTH**2)
    masses = [1 << _DIGITS]
    for _ in range(half):
        masses.append(masses[-1] * ratio >> _DIGITS)
        ratio = ratio * fade >> _DIGITS
    both = masses[:0:-1] + masses[:half]
    total, all_weights = sum(both), 1 << (_COLUMN_BITS + _THRESHOLD_BITS)
    weights = [mass * all_weights // total for mass in both]
    # Rounding down leaves less than one for each number; the numbers around zero, whose
    # weights are the largest, get one more each.
    left = all_weights - sum(weights)
    for i in range(left):
        weights[half - left // 2 + i] += 1
    return weights


@functools.cache
def alias_table() -> AliasTable:
    """The table of D_512, made when it is first used."""
    capacity = 1 << _THRESHOLD_BITS
    thresholds, aliases = [0] * _COLUMNS, list(range(_COLUMNS))
    # Vose (1991): a column with room gets the rest of its capacity from one with more.
    rest = integer_weights()
    small = [i for i, w in enumerate(rest) if w < capacity]
    large = [i for i, w in enumerate(rest) if w >= capacity]
    while small:
        column, donor = small.pop(), large[-1]
        thresholds[column], aliases[column] = rest[column], donor
        rest[donor] -= capacity - rest[column]
        if rest[donor] < capacity:
            small.append(large.pop())
    # The columns that are left are full: their alias is their own number.
    shift = _SECOND + _LAST
    packed = [
        t >> shift << _COLUMN_BITS | a for t, a in zip(thresholds, aliases, strict=True)
    ]
    second = [t >> _LAST & (1 << _SECOND) - 1 for t in thresholds]
    last = [(t >> 32 & 0xFFFFFFFF, t & 0xFFFFFFFF) for t in thresholds]
    return AliasTable(
        np.array(packed, np.uint32),
        np.array(second, np.uint16),
        np.array(last, np.uint32),
    )


def draw_table(key: Key, shape: Sequence[int]) -> jax.Array:
    """Independent draws from D_512, i32[shape]."""
    table = alias_table()
    keys = [stream(key, f"discrete Gaussian {name}") for name in ("column", "bits")]
    words = jax.random.bits(keys[0], shape, jnp.uint32)
    bits = jax.random.bits(keys[1], shape, jnp.uint16)
    column = (words & (_COLUMNS - 1)).astype(jnp.int32)
    first = words >> _COLUMN_BITS
    packed = jnp.asarray(table.packed)[column]
    second = jnp.asarray(table.second)[column]
    threshold = packed >> _COLUMN_BITS
    below = (first < threshold) | ((first == threshold) & (bits < second))
    tied = (first == threshold) & (bits == second)
    below = _settle_ties(stream(key, "discrete Gaussian ties"), below, tied, column)
    alias = (packed & (_COLUMNS - 1)).astype(jnp.int32)
    return jnp.where(below, column, alias) - _COLUMNS // 2


def _settle_ties(
    key: Key, below: jax.Array, tied: jax.Array, column: jax.Array
) -> jax.Array:
    """Whether each draw is below its threshold, with 64 more bits for tied draws."""
    last, shape = jnp.asarray(alias_table().last), below.shape

    def settle(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        below, tied = state
        at = jnp.argmax(tied)
        high, low = jax.random.bits(jax.random.fold_in(key, at), (2,), jnp.uint32)
        upper, lower = last[jnp.ravel(column)[at]]
        less = (high < upper) | ((high == upper) & (low < lower))
        return below.at[at].set(less), tied.at[at].set(False)

    # The loop ends at once but for one array in 2³⁴ / size.
    flat = below.ravel(), tied.ravel()
    return jax.lax.while_loop(lambda s: jnp.any(s[1]), settle, flat)[0].reshape(shape)


def width(draws: int) -> float:
    """σ of the sum of draws with the factors 1, M, M², ..., about 2⁹, 2¹⁷ or 2²⁵."""
    return WIDTH * math.sqrt(sum(SCALE ** (2 * i) for i in range(draws)))


def discrete_gaussian(key: Key, shape: Sequence[int], draws: int) -> jax.Array:
    """Independent draws from D_σ for σ = `width(draws)`, i32[shape], draws <= 3.

    The magnitude of a result is at most 8192 Σ_{i < draws} 256^i, below 2³⁰ for three.
    """
    total = jnp.zeros(shape, jnp.int32)
    for i in range(draws):
        total += SCALE**i * draw_table(jax.random.fold_in(key, i), shape)
    return total
