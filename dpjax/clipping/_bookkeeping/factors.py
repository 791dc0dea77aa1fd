"""Norms of a gradient that is a sum of outer products of rows.

Consider an equation that is linear in a parameter, such as a matrix product, a
convolution or a lookup. One example's gradient with respect to this parameter has one
matrix f[n, p] for each of g groups, such as feature groups. This matrix is

    Σ_t a_t ⊗ d_t,

where the left row a_t, f[n], has entries of the equation's other input, and the right
row d_t, f[p], has entries of the cotangent of the equation's output. The index t runs
over the rows, which are sequence positions, pixels or iterations. The length of a row
is its Euclidean norm.

**One-hot rows.** A left row may be a unit vector. The position of its entry 1 then
selects the row of the matrix to which the right row is added. Right rows with the same
position are added up in a shorter table, with one row for each distinct position.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core.rounding import HIGHEST, margin, square_sum, staged_sum
from dpjax._core.typing import ArrayLike, DTypeLike

# An inner product is split into at most 16 segments of at least 256 terms. Its rounding
# error then grows with the number of terms of a segment plus the number of segments.
_MAX_SEGMENTS, _MIN_TERMS = 16, 256

# With more rows, the bound on the rounding of their sum would increase norms too much.
MAX_ROWS = 2**16

# A norm is at least 1/512 of the size of its terms. So an example's terms in a clipped
# sum are at most 512 times as large as the clipped gradient. Larger terms that cancel
# would make a partial sum so large that rounding loses other examples.
MIN_NORM_RATIO = 2.0**-9


class OneHot(NamedTuple):
    """Rows that are unit vectors, stored as the positions of their entries 1.

    They are the left rows a_t of a gradient Σ_t a_t ⊗ d_t, as in a lookup in a table.

    Attributes:
      position: i[..., t], at least 0 and less than the number n of a row's entries.
    """

    position: jax.Array


class Factors(NamedTuple):
    """The vectors a_t and d_t of one example's gradient Σ_t a_t ⊗ d_t at one equation.

    The vectors a_t are called left rows, and the vectors d_t are called right rows.

    Attributes:
      left: the left rows a_t, f[..., g, t, n], for each of g groups. Each group has its
        own matrix f[n, p] of the gradient.
      right: the right rows d_t, f[..., g, t, p].
    """

    left: jax.Array | OneHot
    right: jax.Array

    @property
    def rows(self) -> int:
        """The number of outer products whose sum is one matrix of the gradient."""
        return self.right.shape[-2]


class Size(NamedTuple):
    """The number and sizes of the rows of one example's gradient Σ_t a_t ⊗ d_t.

    Attributes:
      groups: the number of groups, each with its own sum.
      rows: the number of outer products in the sum of a group.
      left: the number of entries of a left row a_t.
      right: the number of entries of a right row d_t.
      one_hot: whether the left rows are unit vectors, stored as the positions of their
        entries 1.
    """

    groups: int
    rows: int
    left: int
    right: int
    one_hot: bool = False

    @property
    def entries_per_row(self) -> int:
        """The number of stored entries of a left row and a right row together.

        A left row that is a unit vector is stored as one number, the position of its
        entry 1.
        """
        return (1 if self.one_hot else self.left) + self.right

    @property
    def entries(self) -> int:
        """The number of stored entries of all left and right rows of all groups."""
        return self.groups * self.rows * self.entries_per_row


def square_norm(sites: list[Factors], clip_norm: ArrayLike) -> jax.Array:
    """An upper bound f[b] of ‖Σ_t a_t ⊗ d_t / clip_norm‖², computed from rows only.

    `sites` has the left rows a_t and right rows d_t of all equations that use one
    parameter. The sum over all these rows has the squared norm Σ_ts α_ts δ_ts with
    α_ts = ⟨a_t, a_s⟩ and δ_ts = ⟨d_t, d_s⟩. These terms may cancel. The errors of the
    computed inner products α̂ and δ̂ are at most e_α = γ‖a_t‖‖a_s‖ and e_δ =
    γ'‖d_t‖‖d_s‖, where γ and γ' are bounds on the relative rounding errors of sums
    (`dpjax._core.rounding`). Therefore

        α δ ≤ α̂ δ̂ − |α̂ δ̂| + (|α̂| + e_α)(|δ̂| + e_δ) = P + 2 min(α̂ δ̂, 0)

    where P = (|α̂| + e_α)(|δ̂| + e_δ). The right-hand side has absolute value at most P.
    The right-hand sides are added over t and s. So the rounding error of this addition
    is at most the sum of P times another bound on relative rounding errors of sums. The
    inner product α of two one-hot rows is 0 or 1. So the right rows of equal one-hot
    left rows are added up, without inner products of all pairs.

    Two other computations have rounding errors: the scaling of rows, and the sum
    Σ_t a_t ⊗ d_t for the clipped sum. Their errors are at most γ″ Σ_t ‖a_t‖‖d_t‖, where
    γ″ is another bound on relative rounding errors. The bound on the norm includes
    these errors, and is at least `MIN_NORM_RATIO` = 1/512 times
    Σ_t ‖a_t‖‖d_t‖ / clip_norm. For one-hot rows, the smaller `Table.size` replaces
    Σ_t ‖a_t‖‖d_t‖, and `Table.error` replaces the bound on the errors.

    The gradient has one matrix Σ_t a_t ⊗ d_t for each group, such as a feature group.
    The bounds above are for one group. The result is the sum of the squared bounds on
    the norms of all groups.
    """
    sites = _join_rows(_in_units_of_clip_norm(sites, clip_norm))
    sides = [(_with_lengths(f.left), _with_lengths(f.right)) for f in sites]
    rows = [left.lengths * right.lengths for left, right in sides]
    dtype = rows[0].dtype
    # With a single row there is no sum. The norm is the product of the two lengths.
    if len(sites) == 1 and rows[0].shape[-1] == 1:
        return _sum_over_groups(jnp.square(rows[0][..., 0]) * (1 + margin(16, dtype)))

    # The number of roundings in the sums over pairs of sites, and in the operations on
    # each term, of which there are about a dozen.
    other_roundings = len(sites) ** 2 + 48
    total = total_size = total_error = jnp.zeros(rows[0].shape[:-1], dtype)
    for i, one in enumerate(sides):
        left, right = sites[i]
        if isinstance(left, OneHot):
            table = table_bounds(left.position, right, rows[i], len(sites))
            size, site_error = table.size, table.error
            total += (1 + margin(other_roundings, dtype)) * table.square
        else:
            size = jnp.sum(rows[i], axis=-1)
            site_error = margin(rows[i].shape[-1] + len(sites) + 16, dtype) * size
            total += _sum_over_pairs(one, one, other_roundings)
        total_size += size
        total_error += site_error
        for other in sides[:i]:
            # The double sum is symmetric. So each pair of sites is computed once.
            total += 2 * _sum_over_pairs(one, other, other_roundings)
    norm = (jnp.sqrt(total) + total_error) * (1 + margin(16, dtype))
    return _sum_over_groups(jnp.square(jnp.maximum(norm, MIN_NORM_RATIO * total_size)))


class Terms(NamedTuple):
    """Bounds on the terms of a sum, and on the rounding error of the sum.

    Attributes:
      size: an upper bound f[b] of the norm of the sum of the terms' absolute values.
      k: a number k of roundings. The rounding error of the sum is at most γ_k times
        `size`, where γ_k = k u / (1 − k u) for the unit roundoff u.
    """

    size: jax.Array
    k: int


def upper_norm(norm: jax.Array, terms: Sequence[Terms], dtype: DTypeLike) -> jax.Array:
    """An upper bound f[b] of the norm of each example's gradient, with rounding errors.

    One example's gradient is a sum of terms. This sum is computed twice: to compute its
    norm, and as a part of the scaled sum over the batch. The bound covers the rounding
    errors of both computations. The bound is also at least `MIN_NORM_RATIO` = 1/512
    times the sum of all `Terms.size`.

    Args:
      norm: the computed norm f[b] of each example's gradient.
      terms: bounds on the terms whose sum is the gradient.
      dtype: the least precise dtype in which the terms were rounded.
    """
    # The sum is formed twice: for the norm, and within the scaled sum over the batch.
    # Both computations have rounding errors, which gives the factor 2.
    error = sum(2 * margin(k + 4, dtype) * size for size, k in terms)
    size = sum(size for size, _ in terms)
    return jnp.maximum(norm + error, MIN_NORM_RATIO * size) * (1 + margin(16, dtype))


def size(factors: Factors, clip_norm: ArrayLike) -> jax.Array:
    """An upper bound f[b] of the norm of Σ_t |a_t| ⊗ |d_t| / clip_norm.

    `factors` has the rows a_t and d_t of one example's gradient Σ_t a_t ⊗ d_t. The
    result is infinite or NaN if the rows exceed the limit of `mark_large`.
    """
    marked = mark_large(factors, clip_norm, False)
    ((left, right),) = _in_units_of_clip_norm([marked], clip_norm)
    lengths = _with_lengths(left).lengths * _with_lengths(right).lengths
    if isinstance(left, OneHot):
        row_sum = table_bounds(left.position, right, lengths, 1).size
    else:
        row_sum = jnp.sum(lengths, axis=-1)
    row_sum *= 1 + margin(factors.rows + 4, lengths.dtype)
    return jnp.sqrt(_sum_over_groups(jnp.square(row_sum)))


def mark_large(factors: Factors, clip_norm: ArrayLike, swapped: bool) -> Factors:
    """Make right rows infinite where underflows could change a term of a clipped sum.

    `factors` has activations as left rows and cotangents as right rows. The norm of an
    example with an infinite entry is infinite or NaN, so that the example contributes
    zero. XLA replaces numbers below tiny (2⁻¹²⁶ in float32) by zero. If entries of
    scaled cotangents are replaced, a sum of T outer products f[n, p] in each of g
    groups changes by at most tiny √(gnp) T times the largest activation. If this bound
    exceeds 2⁻³² clip_norm for the largest activation of a left row, the right row that
    belongs to this left row becomes infinite. Hence the changes at a thousand equations
    add up to less than 2⁻²² clip_norm. XLA also replaces the reciprocal of a number
    above 1 / tiny by zero. So the right row also becomes infinite if an activation of
    the left row exceeds 2¹⁰⁰. If the cotangents will be the left rows of `square_norm`
    (`swapped`), each cotangent above 2¹⁰⁰ becomes infinite, too. Cotangents that are
    zero stay zero in all these cases.
    """
    left, right = factors
    # The largest entry of a unit vector is 1.
    dense = jnp.ones_like(right[..., :1]) if isinstance(left, OneHot) else left
    dtype = jnp.result_type(dense, right, jnp.float32)
    area = max(math.sqrt(math.prod(dense.shape[-3:]) * math.prod(right.shape[-2:])), 1)
    limit = jnp.asarray(clip_norm, dtype) * (2.0**-32 / jnp.finfo(dtype).tiny / area)
    is_large = _largest_entries(dense.astype(dtype)) > jnp.minimum(limit, 2.0**100)
    is_large = is_large | (jnp.abs(right) > 2.0**100) if swapped else is_large
    # Two factors above 1 / tiny make an entry infinite, but not a zero. A comparison of
    # each entry with 0 would need memory for one more array.
    factor = jnp.where(is_large, jnp.finfo(right.dtype).max, 1).astype(right.dtype)
    return Factors(left, right * factor * factor)


def _largest_entries(x: jax.Array) -> jax.Array:
    """The largest absolute entry f[..., 1] of each row f[..., n].

    The result is at least the dtype's smallest normal number, also for a row of zeros.
    """
    return jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=jnp.finfo(x.dtype).tiny)


def _in_units_of_clip_norm(sites: list[Factors], clip_norm: ArrayLike) -> list[Factors]:
    """Divide gradients by the clip norm, and scale left rows to entries of at most 1.

    `sites` has the left and right rows of each gradient. A left row that is not one-hot
    is divided by its maximum absolute entry, and its right row is multiplied by this
    entry. A scaled left row with n entries then has a squared norm from 1 to n, or 0.
    So the squared norm of a right row is at most that of the outer product, and at
    least 1/n of it, if the left row is not 0. The entries of a left row must be at most
    2¹⁰⁰, unless its right row is zero or has an infinite entry (`mark_large`).
    """
    dtype = jnp.result_type(
        *(x for f in sites for x in f if not isinstance(x, OneHot)), jnp.float32
    )
    scaled = []
    for left, right in sites:
        right = right.astype(dtype)
        if not isinstance(left, OneHot):
            left = left.astype(dtype)
            # For a row of zeros, the entry is replaced by tiny, since 0 / 0 is NaN.
            largest = _largest_entries(left)
            # The multiplication comes first, so that the right side overflows only if
            # the gradient overflows.
            left, right = left / largest, right * largest
        scaled.append(Factors(left, right / clip_norm))
    return scaled


def _sum_over_groups(squares: jax.Array) -> jax.Array:
    # Groups are separate blocks of the gradient. So their squared norms add up.
    total, terms = staged_sum(squares, kept=1)
    return total * (1 + margin(terms + 4, squares.dtype))


class _Side(NamedTuple):
    """The left or the right rows of a gradient, with upper bounds of their norms.

    The gradient is the sum of the outer products of left and right rows.

    Attributes:
      rows: the rows f[..., t, n].
      lengths: upper bounds f[..., t] of the rows' norms.
    """

    rows: jax.Array | OneHot
    lengths: jax.Array


def _with_lengths(rows: jax.Array | OneHot) -> _Side:
    """Return rows f[..., t, n] together with upper bounds f[..., t] of their norms."""
    # The norm of a unit vector is exactly 1.
    if isinstance(rows, OneHot):
        return _Side(rows, jnp.ones(rows.position.shape, jnp.float32))
    squares = square_sum(rows, kept=rows.ndim - 1)
    return _Side(rows, jnp.sqrt(squares) * (1 + margin(4, rows.dtype)))


def _join_rows(sites: list[Factors]) -> list[Factors]:
    """Merge all `Factors` whose left rows are one-hot into one `Factors`.

    The result is a list of the other `Factors`, followed by the merged one if any. All
    elements of `sites` have rows of the same gradient. The merged `Factors` has every
    right row whose left row is one-hot. So these right rows can be added to the rows of
    one table.
    """
    dense = [f for f in sites if not isinstance(f.left, OneHot)]
    positions = [f.left.position for f in sites if isinstance(f.left, OneHot)]
    if not positions:
        return dense
    rows = [f.right for f in sites if isinstance(f.left, OneHot)]
    left = OneHot(jnp.concatenate(positions, axis=-1))
    return [*dense, Factors(left, jnp.concatenate(rows, axis=-2))]


def _sum_over_pairs(
    one: tuple[_Side, _Side], other: tuple[_Side, _Side], other_roundings: int
) -> jax.Array:
    """An upper bound f[..., g] of Σ_ts ⟨a_t, a_s⟩⟨d_t, d_s⟩, in each of g groups.

    The sum is the inner product of two gradients Σ_t a_t ⊗ d_t and Σ_s a_s ⊗ d_s.

    Args:
      one: the left rows a_t and the right rows d_t.
      other: the left rows a_s and the right rows d_s.
      other_roundings: the number of roundings that the bound must cover in addition to
        those of the sums over rows.
    """
    (alpha, of_alpha), (delta, of_delta) = map(_inner_products, one, other)
    bound = (jnp.abs(alpha) + of_alpha) * (jnp.abs(delta) + of_delta)
    # The sum has two stages, one for each site's rows. So the number of roundings is
    # the sum of the numbers of rows, and not their product. The barrier prevents XLA
    # from merging the stages.
    rows = sum(left.lengths.shape[-1] for left, _ in (one, other))
    sum_margin = margin(rows + other_roundings, bound.dtype)
    terms = (1 + sum_margin) * bound + 2 * jnp.minimum(alpha * delta, 0.0)
    return jnp.sum(jax.lax.optimization_barrier(jnp.sum(terms, axis=-1)), axis=-1)


def _inner_products(one: _Side, other: _Side) -> tuple[jax.Array, jax.Array | float]:
    """Inner products f[..., t, s] of the rows of two sides, and bounds on their errors.

    The row t is from `one`, and the row s is from `other`. The bounds have the shape of
    the products. The bound is 0.0 if the rows of `one` are one-hot.
    """
    # One-hot rows are joined into one site, which is never paired with itself.
    assert not isinstance(other.rows, OneHot)
    if isinstance(one.rows, OneHot):
        # The inner product with a unit vector is exactly the entry at its position.
        position = one.rows.position[..., None, :]
        products = jnp.take_along_axis(other.rows, position, axis=-1)
        return jnp.swapaxes(products, -1, -2), 0.0
    size = one.rows.shape[-1]
    step = max(_MIN_TERMS, math.ceil(size / _MAX_SEGMENTS))
    segments = [
        jnp.einsum(
            "...tn,...sn->...ts",
            one.rows[..., start : start + step],
            other.rows[..., start : start + step],
            precision=HIGHEST,
        )
        for start in range(0, size, step)
    ]
    products = sum(segments[1:], segments[0])
    error = margin(min(step, size) + len(segments) + 4, products.dtype)
    return products, error * one.lengths[..., :, None] * other.lengths[..., None, :]


class Table(NamedTuple):
    """Bounds for a table to which rows are added, as in the gradient of a lookup.

    Each row has a position in the table. Rows with the same position are added up.

    Attributes:
      square: an upper bound f[...] of the table's squared norm.
      size: an upper bound f[...] of the norm of a vector that has, for each position,
        the sum of the norms of the rows at this position.
      error: a bound f[...] on the norm of the table's rounding error.
    """

    square: jax.Array
    size: jax.Array
    error: jax.Array


def table_bounds(
    position: jax.Array, rows: jax.Array, lengths: jax.Array, sites: int
) -> Table:
    """Bounds for the table to which rows f[..., t, p] are added at positions i[..., t].

    If k rows share a position, the rounding error of their sum is at most the sum of
    their norms times γ_k = k u / (1 − k u), for the unit roundoff u.

    Args:
      position: the position of each row.
      rows: the rows.
      lengths: upper bounds f[..., t] of the rows' norms.
      sites: the number of gradients that the caller adds up. The table is one of these
        gradients. `Table.square` and `Table.error` also cover the rounding errors of
        the caller's sum.
    """
    slot = jnp.vectorize(_slot_indices, signature="(t)->(t)")(position)
    add = jnp.vectorize(
        lambda slot, x: jnp.zeros_like(x).at[slot].add(x), signature="(t),(t,p)->(t,p)"
    )
    table = add(slot, rows)
    size = add(slot, lengths[..., None])
    count = add(slot, jnp.ones_like(lengths)[..., None])

    dtype = rows.dtype
    # This call only checks that the bound holds for so many terms. If not, it raises.
    margin(position.shape[-1] + sites + 16, dtype)
    # γ_count times the lengths, where count is the number of rows in a slot.
    error = (count + (sites + 16)) * margin(1, dtype) * size

    def norm(x: jax.Array) -> jax.Array:
        return jnp.sqrt(square_sum(x, kept=position.ndim - 1))

    table_error = norm(error)
    return Table(jnp.square(norm(table) + table_error), norm(size), table_error)


def _slot_indices(position: jax.Array) -> jax.Array:
    """For each entry of `position`, the index i[t] of a row in a short table.

    The entries are positions in a table that may be much longer. Equal entries get the
    same index: the index of the first of them in the sorted `position`. So a table with
    as many rows as `position` has entries suffices.
    """
    order = jnp.argsort(position)
    ordered = position[order]
    indices = jnp.arange(position.shape[0], dtype=order.dtype)
    # The running maximum carries the first index of each run of equal positions.
    # jnp.searchsorted would compute the same, but does not run in `jax.shard_map`.
    first = jax.lax.cummax(jnp.where(ordered != jnp.roll(ordered, 1), indices, 0))
    return jnp.zeros_like(order).at[order].set(first)
