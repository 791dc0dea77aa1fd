"""Discrete Gaussian noise on the integers, drawn from a table of integer weights.

The discrete Gaussian D_σ has a mass proportional to e^{−z²/2σ²} at each integer z. One
table holds D_512. Sums of draws from the table give wider distributions. For
independent X_i ~ D_{σ_i} and an integer M, the sum X₁ + M X₂ has the distribution D_σ
with σ² = σ₁² + M²σ₂², within a factor e^{±4ϑ(v)} at every point. Here v = σ₁σ₂/σ and

    ϑ(r) = 2 Σ_{k>=1} e^{−2π²r²k²}

(Micciancio and Walter 2017, https://eprint.iacr.org/2017/259). With σ₁ = 512 and
M = 256 the number v is 2.0, and 4ϑ(v) is below 1e-33. So a sum of two draws has a σ of
about 2¹⁷, and a sum of three draws has a σ of about 2²⁵.

**Table.** The table is that of Walker's alias method (1977), for integer weights that
add up to exactly 2¹¹². The table has 2¹⁴ columns. Each column stands for an integer,
and has a threshold and a second integer, the alias. A draw selects a column uniformly,
and a random value from 0 to 2⁹⁸ − 1. If the value is below the threshold, the draw
gives the column's integer. Otherwise the draw gives the alias. The total variation
distance between the table's distribution and D_512 is below 2⁻⁹⁸, and the accounting
assumes 2⁻⁹⁷.

**Draw.** 14 random bits select the column, and 98 random bits are the value. The first
50 bits of the value are drawn and compared with the first 50 bits of the threshold. If
these 50 bits are equal, with probability 2⁻⁵⁰, the other 48 bits are drawn, too.
"""

import decimal
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
from dpjax.noise._gaussian import IndependentNoiseState, transformation

WIDTH = 512  # σ of the table
SCALE = 256  # M, the factor between the draws of a wider discrete Gaussian
_COLUMN_BITS = 14  # for −8192, ..., 8191; all other integers have mass below 1e-56
_COLUMNS = 2**_COLUMN_BITS
_THRESHOLD_BITS = 98
# A threshold has 98 bits: first 18 bits, which are packed with the alias, then 32 bits,
# then 48 bits.
_SECOND, _LAST = 32, 48
# Fixed-point numbers with 256 binary digits make the weights.
_WEIGHT_DIGITS = 256
# Sums are clipped to integers of this many binary digits, or of fewer digits if the
# caller has a smaller bound on the sums.
DIGITS = 40
# A bound on the total variation of a draw and D_512. The bound covers the rounding of
# 2¹⁴ weights to multiples of 2⁻¹¹², and the mass outside the table.
TOTAL_VARIATION = 2.0**-97


class AliasTable(NamedTuple):
    """The table of Walker's alias method for a discrete Gaussian with σ = 512.

    The probability of an integer z is proportional to e^{−z²/(2·512²)}. The table has
    k = 2¹⁴ columns. Column i stands for the integer i − 8192, and has a threshold and
    an alias, which is the index of a column. A draw selects a column uniformly. If a
    random number of 98 bits is below the threshold, the draw gives the integer of the
    selected column. Otherwise the draw gives the integer of the alias.

    Attributes:
      packed: the first 18 bits of the threshold, then the 14 bits of the alias, u32[k].
      second: the next 32 bits of the threshold, u32[k].
      last: the last 48 bits of the threshold and 16 zeros, as two words, u32[k, 2].
    """

    packed: np.ndarray
    second: np.ndarray
    last: np.ndarray


def _exp_fixed(denominator: int) -> int:
    """The number 2²⁵⁶ e^{−1 / denominator}, rounded down to an integer."""
    # 120 decimal digits are about 400 binary digits. So rounding errors are far below
    # the last digit of the result.
    with decimal.localcontext(prec=120):
        return int((decimal.Decimal(-1) / denominator).exp() * 2**_WEIGHT_DIGITS)


def integer_weights() -> list[int]:
    """Integer weights that add up to 2¹¹², for the integers z = −8192, ..., 8191.

    The weights are proportional to e^{−z²/(2·512²)} up to rounding.
    """
    half = _COLUMNS // 2
    # w(z + 1) / w(z) = e^{−(2z + 1) / 2σ²}, which is a geometric sequence in z.
    ratio, ratio_of_ratios = _exp_fixed(2 * WIDTH**2), _exp_fixed(WIDTH**2)
    masses = [1 << _WEIGHT_DIGITS]
    for _ in range(half):
        masses.append(masses[-1] * ratio >> _WEIGHT_DIGITS)
        ratio = ratio * ratio_of_ratios >> _WEIGHT_DIGITS
    all_masses = masses[:0:-1] + masses[:half]
    total, weight_total = sum(all_masses), 1 << (_COLUMN_BITS + _THRESHOLD_BITS)
    weights = [mass * weight_total // total for mass in all_masses]
    # Rounding down lowers each weight by less than 1. So the remainder is below the
    # number of weights. As many weights around zero, which are the largest, increase
    # by 1.
    remainder = weight_total - sum(weights)
    for i in range(remainder):
        weights[half - remainder // 2 + i] += 1
    return weights


@functools.cache
def alias_table() -> AliasTable:
    """Return the `AliasTable`, computed at the first call and then cached."""
    capacity = 1 << _THRESHOLD_BITS
    thresholds, aliases = [0] * _COLUMNS, list(range(_COLUMNS))
    # Vose (1991): a column that is not full gets weight from a column that overflows.
    unassigned = integer_weights()
    below_capacity = [i for i, w in enumerate(unassigned) if w < capacity]
    full = [i for i, w in enumerate(unassigned) if w >= capacity]
    while below_capacity:
        column, donor = below_capacity.pop(), full[-1]
        thresholds[column], aliases[column] = unassigned[column], donor
        unassigned[donor] -= capacity - unassigned[column]
        if unassigned[donor] < capacity:
            below_capacity.append(full.pop())
    # The remaining columns are full, so that their alias is their own number.
    shift = _SECOND + _LAST
    packed = [
        t >> shift << _COLUMN_BITS | a for t, a in zip(thresholds, aliases, strict=True)
    ]
    second = [t >> _LAST & (1 << _SECOND) - 1 for t in thresholds]
    last = [(t >> 16 & 0xFFFFFFFF, t << 16 & 0xFFFFFFFF) for t in thresholds]
    return AliasTable(*(np.array(x, np.uint32) for x in (packed, second, last)))


def draw_table(key: Key, shape: Sequence[int]) -> jax.Array:
    """Draw independent discrete Gaussian numbers with σ = 512, i32[shape].

    The probability of an integer z is proportional to e^{−z²/(2·512²)}, up to a total
    variation distance of 2⁻⁹⁷. The method is Walker's alias method (`AliasTable`).
    """
    table = alias_table()
    word_key, tie_key = jax.random.split(stream(key, "table"))
    word, bits = word_pairs(word_key, shape)
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
        lambda: _compare_tied_draws(tie_key, below, tied, column),
        lambda: below,
    )
    alias = (packed & (_COLUMNS - 1)).astype(jnp.int32)
    return jnp.where(below, column, alias) - _COLUMNS // 2


def _compare_tied_draws(
    key: Key, below: jax.Array, tied: jax.Array, column: jax.Array
) -> jax.Array:
    """Decide whether tied draws are below their thresholds, from more random bits.

    Each draw compares random bits with the threshold of a column of the `AliasTable`. A
    draw is tied if the first 50 random bits equal the first 50 bits of the threshold.
    For each tied draw, the function draws 64 more random bits, and compares these bits
    with 64 bits of the table: the last 48 bits of the threshold, and 16 zeros. A loop
    decides one draw at a time: code that draws two 32-bit words compiles faster than
    code that draws random bits for the whole array.

    Args:
      key: a typed key for the additional bits.
      below: whether each draw is below its threshold, bool[...]; ignored where tied.
      tied: whether each draw is tied, bool[...].
      column: the table's column of each draw, i32[...].

    Returns:
      The array `below`, in which the entries of tied draws are replaced.
    """
    # An axis of length 0 has no maximum.
    if not tied.size:
        return below
    last = jnp.asarray(alias_table().last)
    shape, columns = column.shape, column.reshape(-1)
    positions = jnp.arange(columns.size, dtype=jnp.uint32)

    def compare_one(flags: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        below, tied = flags
        position = jax.lax.argmax(tied, 0, jnp.uint32)
        high, low = jax.random.bits(jax.random.fold_in(key, position), (2,), jnp.uint32)
        # A sum with `jnp.where` replaces indexing, so that devices of a mesh exchange
        # only scalars.
        selected = positions == position
        upper, lower = last[jnp.sum(jnp.where(selected, columns, 0), dtype=jnp.int32)]
        is_below = (high < upper) | ((high == upper) & (low < lower))
        return jnp.where(selected, is_below, below), tied & ~selected

    flags = below.reshape(-1), tied.reshape(-1)
    below, _ = jax.lax.while_loop(lambda flags: jnp.any(flags[1]), compare_one, flags)
    return below.reshape(shape)


def width(draws: int) -> float:
    """The parameter σ of the discrete Gaussian that `discrete_gaussian` draws.

    The discrete Gaussian has P(z) ∝ e^{−z²/2σ²} for integers z. The result is the σ of
    the sum of the first `draws` terms of X₁ + 256 X₂ + 256² X₃, where every X_i has
    σ = 512. For one, two and three draws, σ is 2⁹, about 2¹⁷ and about 2²⁵.
    """
    return WIDTH * math.sqrt(sum(SCALE ** (2 * i) for i in range(draws)))


def discrete_gaussian(
    key: Key,
    shape: Sequence[int],
    draws: int,
    *,
    out_sharding: jax.NamedSharding | None = None,
) -> jax.Array:
    """Independent discrete Gaussian samples with σ = `width(draws)`, i32[shape].

    Each sample is a weighted sum of results of `draw_table`, with the weights 1, 256
    and 256². The argument `draws`, from 1 to 3, is the number of terms of the sum. The
    absolute value of a sample is at most 8192 Σ_{i < draws} 256^i, which is below 2³⁰
    for three draws.
    """

    def sample(key: Key) -> jax.Array:
        # The draws are made one after the other, so that the generator is compiled
        # only once.
        keys = jax.random.split(key, draws)
        draws_of_table = jax.lax.map(lambda key: draw_table(key, shape), keys)
        factors = SCALE ** jnp.arange(draws, dtype=jnp.int32)
        return jnp.tensordot(factors, draws_of_table, axes=1)

    if out_sharding is None:
        return sample(key)
    # The compiler decides the sharding of intermediate results.
    axes = out_sharding.mesh.explicit_axes
    sharded: Any = jax.sharding.auto_axes(sample, axes=axes, out_sharding=out_sharding)
    return sharded(key)


def discrete_gaussian_like(key: Key, tree: Shaped, draws: int) -> Shaped:
    """Independent samples of `discrete_gaussian`, i32[...], shaped like the leaves.

    Each leaf has its own key, derived from the leaf's path. Each sample is a weighted
    sum of `draws` results of `draw_table`.
    """
    return map_with_keys(
        lambda key, x: draw_like(discrete_gaussian, key, x, draws), key, tree
    )


def lattice_spacing(stddev: ArrayLike, draws: int = 2) -> ArrayLike:
    """The spacing q of the lattice to which `add_discrete_gaussian_noise` rounds sums.

    Args:
      stddev: the noise standard deviation, f[], as for `add_discrete_gaussian_noise`.
      draws: 2 for a coarse lattice, or 3 for a fine lattice.

    Returns:
      q, f[]: about stddev / 131,073 for 2 draws, and about stddev / 33,554,680 for 3
      draws; 0 for stddev 0.

    Raises:
      ValueError: stddev is neither 0 nor from 2⁻¹⁰⁰ to 2¹⁰⁰ (a JAX array may give NaN
        instead); draws is neither 2 nor 3.

    Example:
      >>> print(f"{lattice_spacing(1.0):.2e}")
      7.63e-06
    """
    validate.nonnegative("stddev", stddev)
    if draws not in (2, 3) or not isinstance(draws, int):
        raise ValueError(f"draws must be 2 or 3; got {draws!r}.")
    return round_up_float32("stddev", stddev) / _unit_stddev(draws)


def _unit_stddev(draws: int) -> float:
    """The noise standard deviation that accountants assume, in lattice spacings.

    The value is √(σ² − 4) (1 − 2⁻²²) for σ = `width(draws)`. The root is there because
    random rounding with variance 4 turns a Gaussian of variance σ² − 4 into the
    discrete Gaussian with parameter σ (see `add_discrete_gaussian_noise`).
    """
    # The margin of 2⁻²² makes up for a quotient that float32 rounds down, which would
    # lower the noise.
    return math.sqrt(width(draws) ** 2 - 4) * (1 - 2.0**-22)


class LatticeNoise(NamedTuple):
    """The parameters of the noise of a mechanism that rounds sums to a lattice.

    Attributes:
      stddev: the noise standard deviation, f[].
      draws: the number of results of `draw_table` whose weighted sum is one noise
        value, 2 or 3. With 3, the lattice is 256 times as fine as with 2.
    """

    stddev: ArrayLike
    draws: int


def lattice_noise(
    sensitivity: ArrayLike,
    noise_multiplier: ArrayLike,
    dimension: int,
    *,
    maximum: float,
    draws: int | None = None,
) -> LatticeNoise:
    """Compute the noise that rounded sums need for a given noise multiplier.

    Rounding to a lattice of spacing q adds √d q (1 + 2⁻¹¹) to the sensitivity of the
    sums, where d is the number of coordinates, and q is proportional to the standard
    deviation of the noise. The returned standard deviation is at least the noise
    multiplier times the sensitivity of the rounded sums.

    Args:
      sensitivity: the L2 sensitivity of the sums before rounding.
      noise_multiplier: the noise multiplier of the accountant; may be traced.
      dimension: d for independent noise. For correlated noise over T steps, the result
        of `effective_dimension`, which is at least d T.
      maximum: the maximum value of noise_multiplier, a number that is not traced.
      draws: 2 for a coarse lattice, or 3 for a fine lattice. With None, the function
        chooses 2 if rounding then adds at most 0.4 % to the sensitivity, and else 3.

    Returns:
      The standard deviation of the noise, and the number of draws for one noise value.

    Raises:
      ValueError: rounding would more than double the sensitivity.
    """
    # Let S be the sensitivity, z the noise multiplier, and a the number in `added`. The
    # rounded sums have the sensitivity R = S + a z R. So R = S / (1 − a z).
    added = {n: math.sqrt(dimension) * (1 + 2.0**-11) / _unit_stddev(n) for n in (2, 3)}
    if draws is None:
        # Three draws take less than twice the time of two.
        draws = 2 if maximum * added[2] <= 2.0**-8 else 3
    if maximum * added[draws] > 0.5:
        raise ValueError(
            "noise_multiplier or the number of coordinates (for correlated noise, also "
            f"of steps) must be smaller for a lattice of dimension {dimension}: "
            "rounding would more than double the sensitivity of the sums; got "
            f"noise_multiplier {maximum!r}."
        )
    factor = 1 - noise_multiplier * added[draws]
    # The margin covers the float32 rounding errors of these four operations.
    stddev = noise_multiplier * sensitivity / factor * (1 + 2.0**-21)
    return LatticeNoise(stddev, draws)


# The maximum number of draws from the table in a run: coordinates times steps times
# draws per step. The total variation of all draws and ideal draws is at most 2⁵⁰ 2⁻⁹⁷.
# The margin of a factor 2 covers the factors e^{±4ϑ(2)}, in total below 1e-18 in ε.
MOST_DRAWS = 2**50
RUN_TOTAL_VARIATION = 2 * MOST_DRAWS * TOTAL_VARIATION


def check_draws(dimension: int, num_steps: int) -> None:
    """Raise ValueError if a run draws more random numbers than its accounting allows.

    The accounting for arithmetic="discrete" assumes that a run draws at most
    `MOST_DRAWS` = 2⁵⁰ numbers from `draw_table`. This limit bounds the total variation
    distance between the drawn noise and ideal noise. A step counts as three numbers for
    each coordinate, the maximum that a mechanism draws.

    Args:
      dimension: the number of coordinates of a step's noise.
      num_steps: the number of steps of the run.
    """
    if 3 * dimension * num_steps > MOST_DRAWS:
        raise ValueError(
            "num_steps must be smaller, or arithmetic must be 'real': a run of "
            f"{num_steps} steps with {dimension} parameters draws more than 2**50 "
            "numbers from the table of the discrete Gaussian, and the accounting of "
            "arithmetic='discrete' covers at most 2**50."
        )


def add_discrete_gaussian_noise(
    stddev: ArrayLike, *, key: Key, draws: int = 2
) -> optax.GradientTransformation:
    """Round every step's sums to a lattice, and add discrete Gaussian noise.

    The lattice consists of the multiples of q = `lattice_spacing(stddev, draws)`. The
    bits of a released number reveal only an integer. So the guarantee also holds in
    floating point. In contrast, `add_gaussian_noise` adds floats to floats, and the
    bits of a result may reveal whether an example took part.

    Args:
      stddev: the noise standard deviation per coordinate, f[], in the units of the
        incoming sum (noise multiplier times clip norm), 0 or from 2⁻¹⁰⁰ to 2¹⁰⁰. With
        stddev 0 the sums do not change, and there is no privacy.
      key: one typed key, as `dpjax.random_key` makes, for one transformation and one
        run. The state holds another key, derived from this key.
      draws: the number of random integers whose weighted sum is the noise of one
        coordinate, 2 or 3. The standard deviation of the noise is about 131,073 q for
        2, and about 33,554,680 q for 3.

    Returns:
      An optax transformation for real floating-point updates. Sums are rounded in
      float64, even if `jax_enable_x64` is off. Coordinates are clipped to
      [−2⁴⁰ q, 2⁴⁰ q]. If stddev is positive, the result is NaN in each coordinate where
      the update is NaN or infinite. The result is cast to the update's dtype.

    Raises:
      ValueError: stddev is out of range (a JAX array may give NaN updates instead);
        draws is neither 2 nor 3; key is not a typed key; an update is not a real
        floating-point array; inside `jax.shard_map`, check_vma is False.

    Privacy: let the incoming sums have d coordinates. For any two neighbouring data
    sets, let these sums, as computed in floating point, differ by at most S in L2 norm.
    Let m be the argument draws, and ϑ = 2 Σ_{k>=1} e^{−8π²k²}. Then a step is at least
    as private as a Gaussian mechanism with μ = (S + √d q (1 + 2⁻¹¹)) / stddev, except
    that each step adds at most 8 d m ϑ (1 + 1e-2) <= 3e-33 d to ε, and at most
    (1 + e^ε) d m 2⁻⁹⁷ to δ. Steps compose as those of the Gaussian mechanism. The
    guarantee does not cover whether an update is finite, which depends on the data.

    Reason: in units of q, the rounded sums differ by at most S / q + √d (1 + 2⁻¹¹). The
    discrete Gaussian with P(z) ∝ e^{−z²/2σ²} is a post-processing of Gaussian noise of
    standard deviation √(σ² − 4): round y at random to the integer z with a mass
    proportional to e^{−(z − y)² / 8}. The probabilities of the integers z are then
    exact up to a factor e^{±4ϑ}. In the weighted sum for a coordinate, each random
    integer after the first gives one more factor e^{±4ϑ}. The factors of two data sets
    together add 8 d m ϑ to ε.

    The guarantee assumes uniform random bits. S must cover the rounding errors of the
    sums. For example, a sum of clipped gradients in float32 differs from the exact sum
    by rounding errors, which depend on the data.

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

    def init(_: Tree) -> IndependentNoiseState:
        return IndependentNoiseState(stream(key, "discrete noise"))

    def update(updates: Tree, state: Any) -> tuple[Tree, IndependentNoiseState]:
        # The current key is used only once. So no later state reveals this noise.
        next_key, current_key = jax.random.split(state.key)
        noisy = release_on_lattice(current_key, updates, LatticeNoise(stddev, draws))
        return noisy, IndependentNoiseState(next_key)

    return transformation(init, update)


def release_on_lattice(key: Key, sums: Shaped, noise: LatticeNoise) -> Shaped:
    """Round sums to multiples of the lattice spacing, and add discrete Gaussian noise.

    Args:
      key: a typed key that no other release uses. Each leaf gets its own key.
      sums: a pytree of real floating-point arrays.
      noise: the noise's standard deviation and number of draws, which determine the
        lattice spacing.

    Returns:
      The noisy sums, cast back to the dtypes of the sums. Entries that are not finite
      become NaN. If the standard deviation is 0, the sums are returned unchanged.
    """
    spacing = lattice_spacing(*noise)
    wide = widen(sums)
    drawn = discrete_gaussian_like(key, wide, noise.draws)
    noisy = jax.tree.map(lambda x, z: _release(x, z, spacing), wide, drawn)
    return cast_like(noisy, sums)


def _release(x: jax.Array, noise: jax.Array, spacing: ArrayLike) -> jax.Array:
    """Round x to multiples of q and add noise, f[...].

    The result is NaN where x is not finite, unless q is 0. The quotient x / q is
    clipped to ±2⁴⁰ and rounded to an integer. This integer plus the noise is below 2⁴¹
    in absolute value, so that int64 and float64 hold the sum exactly. For |x| below
    2⁴⁰ q, the rounding error of the division x / q is at most 2⁻¹³.

    Args:
      x: one leaf of the sums, f[...].
      noise: integer noise in units of q, i32[...].
      spacing: the lattice spacing q, f[]. If q is 0, x is returned unchanged.
    """
    with jax.enable_x64(True):
        q = jnp.asarray(spacing, jnp.float64)
        units = divide_and_clip(x, jnp.where(q == 0, 1.0, q), DIGITS)
        released = round_and_add(units, noise) * q
        # With stddev 0 there is no lattice, and the sums do not change.
        return jnp.where(q == 0, x.astype(jnp.float64), released).astype(x.dtype)


def divide_and_clip(x: jax.Array, q: jax.Array, digits: int) -> jax.Array:
    """Divide x by the lattice spacing q, and clip to ±2^digits, f64[...].

    The result is NaN where x is not finite. The caller must enable 64-bit types.
    """
    limit = 2.0**digits
    clipped = jnp.clip(x.astype(jnp.float64) / q, -limit, limit)
    return jnp.where(jnp.isfinite(x), clipped, jnp.nan)


def round_and_add(x: jax.Array, noise: jax.Array) -> jax.Array:
    """Round x to integers and add integer noise, f64[...]; NaN where x is not finite.

    The caller must enable 64-bit types.
    """
    finite = jnp.isfinite(x)
    rounded = jnp.rint(jnp.where(finite, x, 0.0)).astype(jnp.int64)
    total = rounded + noise.astype(jnp.int64)
    return jnp.where(finite, total.astype(jnp.float64), jnp.nan)
