"""Discrete Gaussian noise on the integers, drawn from one table of integer weights.

The discrete Gaussian D_σ has a mass proportional to e^{−z²/2σ²} at each integer z. One
table holds D_512, and sums of draws give wider distributions. For X_i ~ D_{σ_i}, the
sum X₁ + M X₂ has the distribution D_σ with σ² = σ₁² + M²σ₂², within a factor e^{±4ϑ(v)}
at every point. Here v = σ₁σ₂/σ and

    ϑ(r) = 2 Σ_{k>=1} e^{−2π²r²k²}

(Micciancio and Walter 2017, https://eprint.iacr.org/2017/259). With σ₁ = 512 and
M = 256 the number v is 2.0, and 4ϑ(v) is below 1e-33. So two draws give σ of about 2¹⁷,
three draws give 2²⁵, and four draws give 2³³.

**Table.** The table is that of Walker's alias method (1977), with integer weights that
add up to exactly 2¹¹². All columns are equally probable, and each has capacity 2⁹⁸. In
each column, values below a threshold give the column's own number, and the other values
give one other number, its alias. The weights differ from those of D_512 by less than
2⁻⁹⁸ in total variation.

**Draw.** 14 random bits choose the column, and 98 bits are compared with the threshold.
The first 50 of these bits decide unless they equal those of the threshold, which
happens once in 2⁵⁰ draws. The other 48 bits are drawn only in this case.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core import validate
from dpjax._core.dtypes import cast_like, widen
from dpjax._core.keys import map_with_keys, stream, word_pairs
from dpjax._core.meshes import draw_like
from dpjax._core.rounding import round_up_float32
from dpjax._core.typing import ArrayLike, Key, Shaped, Tree
from dpjax.noise._gaussian import transformation

WIDTH = 512  # σ of the table
SCALE = 256  # M, the factor between the draws of a wider discrete Gaussian
_COLUMN_BITS = 14  # for the numbers −8192, ..., 8191; the other mass is below 1e-56
_COLUMNS = 2**_COLUMN_BITS
_THRESHOLD_BITS = 98
# A threshold has 98 bits: 18 bits are packed with the alias, then come 32, then 48.
_SECOND, _LAST = 32, 48
# Fixed-point numbers with 256 binary digits make the weights.
_DIGITS = 256
# A bound on the total variation between a draw and D_512. It covers the rounding of 2¹⁴
# weights to multiples of 2⁻¹¹², and the mass outside the table.
TOTAL_VARIATION = 2.0**-97


class AliasTable(NamedTuple):
    """The columns of the table for Walker's alias method.

    Attributes:
      packed: the first 18 bits of the threshold, then the 14 bits of the alias, u32[k].
      second: the next 32 bits of the threshold, u32[k].
      last: the last 48 bits of the threshold and 16 zeros, as two words, u32[k, 2].
    """

    packed: np.ndarray
    second: np.ndarray
    last: np.ndarray


def _exp_fixed(numerator: int, denominator: int) -> int:
    """e^{−numerator / denominator} as a fixed-point integer, for a value in [0, 1]."""
    one = 1 << (_DIGITS + 32)  # 32 extra digits absorb the rounding errors
    total, term, k = one, one, 1
    while term:
        term = term * numerator // (denominator * k)
        total += term if k % 2 == 0 else -term
        k += 1
    return total >> 32


def integer_weights() -> list[int]:
    """The integer weights of −8192, ..., 8191, which add up to exactly 2¹¹²."""
    half = _COLUMNS // 2
    # w(z + 1) / w(z) = e^{−(2z + 1) / 2σ²}, which is a geometric sequence in z.
    ratio, fade = _exp_fixed(1, 2 * WIDTH**2), _exp_fixed(1, WIDTH**2)
    masses = [1 << _DIGITS]
    for _ in range(half):
        masses.append(masses[-1] * ratio >> _DIGITS)
        ratio = ratio * fade >> _DIGITS
    both = masses[:0:-1] + masses[:half]
    total, all_weights = sum(both), 1 << (_COLUMN_BITS + _THRESHOLD_BITS)
    weights = [mass * all_weights // total for mass in both]
    # Rounding down loses less than 1 per number. So the numbers around zero, whose
    # weights are the largest, each get 1 more.
    left = all_weights - sum(weights)
    for i in range(left):
        weights[half - left // 2 + i] += 1
    return weights


@functools.cache
def alias_table() -> AliasTable:
    """The table of D_512, computed at the first use."""
    capacity = 1 << _THRESHOLD_BITS
    thresholds, aliases = [0] * _COLUMNS, list(range(_COLUMNS))
    # Vose (1991): a column that is not full gets weight from a column that overflows.
    rest = integer_weights()
    small = [i for i, w in enumerate(rest) if w < capacity]
    large = [i for i, w in enumerate(rest) if w >= capacity]
    while small:
        column, donor = small.pop(), large[-1]
        thresholds[column], aliases[column] = rest[column], donor
        rest[donor] -= capacity - rest[column]
        if rest[donor] < capacity:
            small.append(large.pop())
    # The remaining columns are full, so that their alias is their own number.
    shift = _SECOND + _LAST
    packed = [
        t >> shift << _COLUMN_BITS | a for t, a in zip(thresholds, aliases, strict=True)
    ]
    second = [t >> _LAST & (1 << _SECOND) - 1 for t in thresholds]
    last = [(t >> 16 & 0xFFFFFFFF, t << 16 & 0xFFFFFFFF) for t in thresholds]
    return AliasTable(*(np.array(x, np.uint32) for x in (packed, second, last)))


def draw_table(key: Key, shape: Sequence[int]) -> jax.Array:
    """Independent draws from D_512, i32[shape]."""
    table = alias_table()
    for_words, for_ties = jax.random.split(stream(key, "table"))
    word, bits = word_pairs(for_words, shape)
    column = (word & (_COLUMNS - 1)).astype(jnp.int32)
    first = word >> _COLUMN_BITS
    # One lookup of a row of the table gives both packed and second.
    rows = jnp.asarray(np.stack([table.packed, table.second], axis=1))
    packed, second = jnp.moveaxis(rows.at[column].get(mode="promise_in_bounds"), -1, 0)
    threshold = packed >> _COLUMN_BITS
    below = (first < threshold) | ((first == threshold) & (bits < second))
    tied = (first == threshold) & (bits == second)
    # An array of b draws has a tie with probability b 2⁻⁵⁰.
    below = jax.lax.cond(
        jnp.any(tied),
        lambda: _settle_ties(for_ties, below, tied, column),
        lambda: below,
    )
    alias = (packed & (_COLUMNS - 1)).astype(jnp.int32)
    return jnp.where(below, column, alias) - _COLUMNS // 2


def _settle_ties(
    key: Key, below: jax.Array, tied: jax.Array, column: jax.Array
) -> jax.Array:
    """Decide each tie: compare 64 more random bits with the threshold's last bits.

    The loop settles one tie in each iteration, because a generator of two words
    compiles faster than a generator for the whole array.
    """
    # An axis of length 0 has no maximum.
    if not tied.size:
        return below
    last = jnp.asarray(alias_table().last)
    shape, columns = column.shape, column.reshape(-1)
    places = jnp.arange(columns.size, dtype=jnp.uint32)

    def settle(flags: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        below, tied = flags
        place = jax.lax.argmax(tied, 0, jnp.uint32)
        high, low = jax.random.bits(jax.random.fold_in(key, place), (2,), jnp.uint32)
        # Selections instead of indexing: devices of a mesh then exchange scalars only.
        here = places == place
        upper, lower = last[jnp.sum(jnp.where(here, columns, 0), dtype=jnp.int32)]
        is_below = (high < upper) | ((high == upper) & (low < lower))
        return jnp.where(here, is_below, below), tied & ~here

    flags = below.reshape(-1), tied.reshape(-1)
    below, _ = jax.lax.while_loop(lambda flags: jnp.any(flags[1]), settle, flags)
    return below.reshape(shape)


def width(draws: int) -> float:
    """σ of the sum of draws with the factors 1, M, M², ...: about 2⁹, 2¹⁷ or 2²⁵."""
    return WIDTH * math.sqrt(sum(SCALE ** (2 * i) for i in range(draws)))


def discrete_gaussian(
    key: Key,
    shape: Sequence[int],
    draws: int,
    *,
    out_sharding: jax.NamedSharding | None = None,
) -> jax.Array:
    """Independent draws from D_σ for σ = `width(draws)`, i32[shape], draws <= 3.

    The absolute values of results are at most 8192 Σ_{i < draws} 256^i, which is below
    2³⁰ for three draws.
    """

    def add(key: Key) -> jax.Array:
        # One draw follows the other, so that the generator is compiled only once.
        keys = jax.random.split(key, draws)
        drawn = jax.lax.map(lambda key: draw_table(key, shape), keys)
        factors = SCALE ** jnp.arange(draws, dtype=jnp.int32)
        return jnp.tensordot(factors, drawn, axes=1)

    if out_sharding is None:
        return add(key)
    # The compiler decides the sharding of intermediate results.
    axes = out_sharding.mesh.explicit_axes
    sharded: Any = jax.sharding.auto_axes(add, axes=axes, out_sharding=out_sharding)
    return sharded(key)


def discrete_gaussian_like(key: Key, tree: Shaped, draws: int) -> Shaped:
    """One number of `discrete_gaussian` for each entry of the tree's leaves.

    `draws` is as for `add_discrete_gaussian_noise`.
    """
    return map_with_keys(
        lambda key, x: draw_like(discrete_gaussian, key, x, draws), key, tree
    )


def lattice_spacing(stddev: ArrayLike, draws: int = 2) -> ArrayLike:
    """The distance q between the values that `add_discrete_gaussian_noise` releases.

    Args:
      stddev: the noise standard deviation, f[], as for `add_discrete_gaussian_noise`.
      draws: 2 or 3, as for `add_discrete_gaussian_noise`.

    Returns:
      q, f[]: stddev / 131,073 for two draws, and stddev / 33,554,944 for three.

    Example:
      >>> print(f"{lattice_spacing(1.0):.2e}")
      7.63e-06
    """
    validate.nonnegative("stddev", stddev)
    if draws not in (2, 3) or not isinstance(draws, int):
        raise ValueError(f"draws must be 2 or 3; got {draws!r}.")
    return round_up_float32("stddev", stddev) / _deviation(draws)


def _deviation(draws: int) -> float:
    """The standard deviation of the noise in units of the lattice, rounded down.

    Randomized rounding with variance 4 turns a Gaussian of variance σ² − 4 into the
    discrete Gaussian of width σ (see Privacy in `add_discrete_gaussian_noise`).
    """
    # The margin of 2⁻²² makes up for a quotient that float32 rounds down, which would
    # lower the noise.
    return math.sqrt(width(draws) ** 2 - 4) * (1 - 2.0**-22)


class LatticeNoise(NamedTuple):
    """The noise of a mechanism on a lattice.

    Attributes:
      stddev: the noise standard deviation, f[].
      draws: the number of draws from the table in one draw of the noise.
    """

    stddev: ArrayLike
    draws: int


def lattice_noise(
    sensitivity: ArrayLike,
    noise_multiplier: ArrayLike,
    dimension: int,
    *,
    most: float,
    draws: int | None = None,
) -> LatticeNoise:
    """The noise that gives sums on a lattice the privacy of the noise multiplier.

    Rounding to a lattice of spacing q adds √d q (1 + 2⁻¹¹) to the sensitivity C of the
    sums, where d is the number of coordinates. q is proportional to the noise. The
    returned standard deviation is the noise multiplier times the sensitivity of the
    rounded sums.

    Args:
      sensitivity: C, the L2 sensitivity of the floats before rounding.
      noise_multiplier: the noise multiplier z of the accountant; may be traced.
      dimension: d; or d T if a result depends on the rounded sums of T steps.
      most: the maximum value of the noise multiplier.
      draws: 2 or 3. If None, 2 if rounding then adds at most 0.4 %, else 3.

    Raises:
      ValueError: rounding would add more than the sensitivity itself.
    """
    # The sensitivity of rounded sums is C + z (C + ...) √d (1 + 2⁻¹¹) / σ, a geometric
    # series.
    added = {n: math.sqrt(dimension) * (1 + 2.0**-11) / _deviation(n) for n in (2, 3)}
    if draws is None:
        # Three draws take less than twice the time of two.
        draws = 2 if most * added[2] <= 2.0**-8 else 3
    if most * added[draws] > 0.5:
        raise ValueError(
            f"noise_multiplier must be smaller for a lattice of {dimension} "
            "coordinates, because rounding would add more than the sensitivity; got "
            f"{most!r}."
        )
    factor = 1 - noise_multiplier * added[draws]
    # The margin covers the float32 rounding errors of these four operations.
    stddev = noise_multiplier * sensitivity / factor * (1 + 2.0**-21)
    return LatticeNoise(stddev, draws)


# The maximum number of draws from the table in a run: coordinates times steps times
# draws per step. Together they are within 2⁵⁰ 2⁻⁹⁷ of ideal draws in total variation.
# The margin of a factor 2 covers the factors e^{±4ϑ(2)}, in total below 1e-18 in ε.
MOST_DRAWS = 2**50
RUN_TOTAL_VARIATION = 2 * MOST_DRAWS * TOTAL_VARIATION


def num_coordinates(tree: Tree) -> int:
    """The number of entries of all leaves together."""
    return sum(jnp.size(x) for x in jax.tree.leaves(tree))


def check_draws(dimension: int, num_steps: int) -> None:
    """Raise if a run exceeds the total variation that its accounting assumes."""
    if 3 * dimension * num_steps > MOST_DRAWS:
        raise ValueError(
            "num_steps must be smaller, or arithmetic must be 'real': a run of "
            f"{num_steps} steps with {dimension} parameters draws more than 2**50 "
            "numbers from the table of the discrete Gaussian, and the accounting of "
            "arithmetic='discrete' covers at most 2**50."
        )


class DiscreteGaussianNoiseState(NamedTuple):
    """The state of `add_discrete_gaussian_noise`. Keep it as secret as the data.

    Attributes:
      key: the typed key from which the next step's key is split.
    """

    key: Key


def add_discrete_gaussian_noise(
    stddev: ArrayLike, *, key: Key, draws: int = 2
) -> optax.GradientTransformation:
    """Round every step's sums to a lattice, and add discrete Gaussian noise.

    The released numbers are integers times q = `lattice_spacing(stddev)`. So the bits
    of a released number reveal only an integer, and the guarantee holds for the bits
    that are released. In contrast, `add_gaussian_noise` adds floats to floats, and the
    bits of its results may reveal whether an example took part.

    Args:
      stddev: the noise standard deviation per coordinate, f[], in the units of the
        incoming sum (noise multiplier times clip norm), 0 or from 2⁻¹⁰⁰ to 2¹⁰⁰. With
        stddev 0 the sums do not change, and there is no privacy.
      key: one typed key, as `dpjax.random_key` makes, for one transformation and one
        run. The state holds a separate stream of this key.
      draws: 2 for 131,073 lattice points per standard deviation, or 3 for 33,554,944.

    Returns:
      An optax transformation for real updates of any dtypes. Sums are rounded in
      float64, even if `jax_enable_x64` is off. Coordinates beyond ±2⁴⁰ q are clipped to
      ±2⁴⁰ q. If an update holds a NaN or an infinity, the result is NaN. The result is
      cast to the update's dtype.

    Raises:
      ValueError: stddev is out of range; draws is neither 2 nor 3; key is not a
        typed key; an update is not real; inside `jax.shard_map`, check_vma is False.

    Privacy: let the incoming sums of any two neighbouring data sets differ by at most S
    in L2 norm, where the sums are the exact values of the floats, with d coordinates.
    Then a step is at least as private as a Gaussian mechanism with
    μ = (S + √d q (1 + 2⁻¹¹)) / stddev, up to 8 d draws ϑ(2) (1 + 1e-2) <= 3e-33 d in ε
    and (1 + e^ε) d draws 2⁻⁹⁷ in δ for each step. Steps compose as those of the
    Gaussian mechanism. The term in ε has a factor e^{±4ϑ} on both data sets for the
    rounding and for each draw after the first. Whether an update is finite depends on
    the data, and is not covered.

    Reason: in units of q, the rounded sums differ by at most S / q + √d (1 + 2⁻¹¹).
    Discrete Gaussian noise of width σ is a post-processing of Gaussian noise of
    standard deviation √(σ² − 4): round y at random to the integer z with a mass
    proportional to e^{−(z − y)² / 8}. The guarantee assumes uniform random bits. S must
    bound the floats. For example, a sum of b clipped gradients in float32 differs from
    the exact sum by its rounding errors, which depend on the data.

    Leaves, masks, meshes and `jax.vmap` are treated as in `dpjax.add_gaussian_noise`.

    Reference: Canonne, Kamath and Steinke (2020), https://arxiv.org/abs/2004.00010, for
    the discrete Gaussian in differential privacy.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = add_discrete_gaussian_noise(0.5, key=jax.random.key(0))
      >>> zeros = jnp.zeros(10_000)
      >>> noisy, state = tx.update(zeros, tx.init(zeros))
      >>> print(f"{noisy.std():.2f}")
      0.50
    """
    validate.scalar("stddev", stddev)
    validate.typed_key("key", key)
    lattice_spacing(stddev, draws)  # raises if an argument is out of range

    def init(_: Tree) -> DiscreteGaussianNoiseState:
        return DiscreteGaussianNoiseState(stream(key, "discrete noise"))

    def update(updates: Tree, state: Any) -> tuple[Tree, DiscreteGaussianNoiseState]:
        # The current key is used only once. So no later state reveals this noise.
        following, current = jax.random.split(state.key)
        noisy = release_on_lattice(current, updates, LatticeNoise(stddev, draws))
        return noisy, DiscreteGaussianNoiseState(following)

    return transformation(init, update)


def release_on_lattice(key: Key, sums: Shaped, noise: LatticeNoise) -> Shaped:
    """Round sums to the lattice, add discrete Gaussian noise, and keep the dtypes.

    Args:
      key: the key of this release alone. Each leaf gets its own key.
      sums: a pytree of real arrays.
      noise: the standard deviation, and the number of draws.
    """
    spacing = lattice_spacing(*noise)
    wide = widen(sums)
    drawn = discrete_gaussian_like(key, wide, noise.draws)
    noisy = jax.tree.map(lambda x, z: _release(x, z, spacing), wide, drawn)
    return cast_like(noisy, sums)


def _release(x: jax.Array, noise: jax.Array, spacing: ArrayLike) -> jax.Array:
    """Round x to the lattice and add the noise, in the dtype of x; NaN if not finite.

    Integers of 64 bits hold the sums, and float64 holds them exactly, since they are
    below 2⁴¹. For a number below 2⁴⁰ q, the error of the quotient is at most 2⁻¹³.
    """
    with jax.enable_x64(True):
        q = jnp.asarray(spacing, jnp.float64)
        # With stddev 0 there is no lattice, and the sums stay as they are.
        given = x.astype(jnp.float64)
        y = given / jnp.where(q == 0, 1.0, q)
        finite = jnp.isfinite(y)
        most = 2.0**40
        rounded = jnp.rint(jnp.clip(jnp.where(finite, y, 0.0), -most, most))
        total = rounded.astype(jnp.int64) + noise.astype(jnp.int64)
        released = jnp.where(finite, total.astype(jnp.float64) * q, jnp.nan)
        released = jnp.where(q == 0, given, released)
        return released.astype(x.dtype)
