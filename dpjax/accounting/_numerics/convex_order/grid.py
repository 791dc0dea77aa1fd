"""Grids of likelihood ratios L that are evenly spaced in log L, and masses on them.

Derivatives treat grids as constants, since a grid changes how tight a bound is, but not
whether the bound is valid.

`combine_pairs` computes the distribution of a weighted mean of two independent ratios
from all pairs of grid points. `combine_copies` computes the distribution of the mean or
product of many independent ratios, by repeated doubling of the number of ratios.
"""

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr

from dpjax._core.float64 import ULP
from dpjax._core.typing import ArrayLike
from dpjax.accounting._numerics.gaussian import LOG_SQRT_2PI, gauss_rule
from dpjax.accounting._numerics.pld.pairs import tail_quantile

# The composite rule for a cell [0, 1], whose weights add up to one.
NODES, _WEIGHTS = (x[:, None] for x in gauss_rule(8, panels=4))


class Grid(NamedTuple):
    """A grid of likelihood ratios, whose point i = 0, 1, … is e^{h (first + i)}.

    Attributes:
      first: log L at the first point in units of h, a whole number, f[].
      spacing: h, the spacing in log L, f[].
    """

    first: jax.Array
    spacing: jax.Array

    def log(self, n: int) -> jax.Array:
        """The values of log L at the first n points, f[n]."""
        return self.spacing * (self.first + jnp.arange(n))


class Normal(NamedTuple):
    """The masses of a normal variable inside and outside of m adjacent intervals.

    Attributes:
      nodes: the mass at each of the k Gauss-Legendre nodes in each interval, f[k, m].
      below: the mass below the first interval, f[].
      above: the mass above the last interval, f[].
    """

    nodes: jax.Array
    below: jax.Array
    above: jax.Array


def make_grid(variance: jax.Array, tail: jax.Array, n: int) -> Grid:
    """A grid of n points for the log-likelihood ratio log L of P to Q.

    Let v be the variance. Under Q, log L ~ N(−v/2, v), and under P, log L ~ N(v/2, v).
    Q has about the mass `tail` below the grid, and P has about this mass above the
    grid.
    """
    variance = jax.lax.stop_gradient(variance)
    end = variance / 2 + jnp.sqrt(variance) * tail_quantile(tail)
    spacing = 2 * end / (n - 2)
    return Grid(jnp.floor(-end / spacing), spacing)


def normal(
    variance: jax.Array, start: jax.Array, cells: int, spacing: jax.Array
) -> tuple[Normal, Normal]:
    """The masses of a log-likelihood ratio log L in adjacent intervals, under Q and P.

    L = dP/dQ, and log L is N(−v/2, v) under Q and N(v/2, v) under P, where v is the
    variance. There are `cells` intervals of the width `spacing`, and the first interval
    begins at start. The result has the masses at 8 Gauss-Legendre nodes in each of the
    4 equal parts of every interval. In a part of width w, the quadrature error of the
    mass is 1.7e-23 w^17 times the 16th derivative of the density. This error is at most
    1e-12 of the mass if the interval is at most √v wide and at most 16 √v away from
    both means ±v/2.
    """
    deviation = jnp.sqrt(variance)
    ends = (start + spacing * jnp.arange(cells + 1) + variance / 2) / deviation
    width = spacing / deviation
    z = ends[None, :-1] + width * NODES

    def masses_around(mean: ArrayLike) -> Normal:
        distance = z - mean
        mass = width * _WEIGHTS * jnp.exp(-distance * distance / 2 - LOG_SQRT_2PI)
        return Normal(mass, ndtr(ends[0] - mean), ndtr(mean - ends[-1]))

    # In units of the deviation, the mean under P is larger by the deviation.
    return masses_around(0.0), masses_around(deviation)


def rounding(n: int, count: jax.Array) -> jax.Array:
    """A bound on the relative rounding error of each mass from `combine_copies`.

    `combine_copies` computes the mean or product of `count` independent likelihood
    ratios on n grid points. Each doubling of the number of ratios sums products of two
    masses over about 2n pairs of points. The relative errors of the two factors of a
    product add up.
    """
    return ULP * (4.0 * n + 128) * count


# A bound on the error of log L after a hundred sums of logarithms below 1e3.
LOG_ERROR = 1e-11


# The masses of a distribution on a grid, or of two distributions. The arrays of two
# distributions have a leading axis of length 2.
_Masses = TypeVar("_Masses")


class Law(NamedTuple, Generic[_Masses]):
    """The distribution of a likelihood ratio L = dP/dQ.

    Attributes:
      grid: values of L. In an upper bound, the masses are at these values. In a lower
        bound, the masses are in cells (intervals of L), and each value labels a cell.
      masses: the masses of P and Q at these values or in these cells, as
        `spread.Masses` or `cells.Masses`.
    """

    grid: Grid
    masses: _Masses


# The arguments are a pair of distributions on one grid, the masses of a single
# distribution on that grid, and the weights f[2] of the pair: the fraction of copies
# that each distribution of the pair contributes to its mean with the single one.
Combine = Callable[[Law[_Masses], _Masses, jax.Array], Law[_Masses]]


def combine_copies(
    combine: Combine[_Masses], law: Law[_Masses], identity: _Masses, count: jax.Array
) -> Law[_Masses]:
    """The distribution of a mean or product of `count` independent likelihood ratios.

    The state of the loop has the distributions for c and for c + 1 ratios, on the same
    grid. From these two distributions, an iteration computes the distributions for 2c +
    b and for 2c + b + 1 ratios, where b is the next binary digit of the count.

    Args:
      combine: a function that combines each of two distributions with a third
        distribution, by a mean or a product. The arguments of `combine` are the two
        distributions as one `Law`, the masses of the third distribution, and the
        weights f[2]. In a mean, distribution i = 0, 1 has the weight weights[i], and
        the third distribution has the weight 1 − weights[i].
      law: the distribution of one ratio.
      identity: for a product, the masses of the ratio 1, on the same grid. For a mean,
        any masses on this grid, which get the weight 0.
      count: the number of ratios, a whole number, at least 1.
    """
    count = count.astype(jnp.int64)
    # The number of binary digits of the count.
    digits = 64 - jax.lax.clz(count)

    def select(pair: _Masses, index: jax.Array | int) -> _Masses:
        return jax.tree.map(lambda x: x[index], pair)

    def add_digit(k: jax.Array, state: tuple[jax.Array, Law[_Masses]]):
        c, pair = state
        digit = (count >> (digits - 1 - k)) & 1
        pair_counts, third_count = c + jnp.arange(2), c + digit
        # The mean of the combination weights each part by its number of copies.
        weights = pair_counts / (pair_counts + third_count)
        return c + third_count, combine(pair, select(pair.masses, digit), weights)

    first_pair = jax.tree.map(lambda x, y: jnp.stack([x, y]), identity, law.masses)
    start = jnp.zeros_like(count), Law(law.grid, first_pair)
    _, pair = jax.lax.fori_loop(0, digits, add_digit, start)
    return Law(pair.grid, select(pair.masses, 0))


def choose_window(
    grid: Grid, mass: jax.Array, weight: jax.Array, tail: jax.Array, n: int
) -> tuple[jax.Array, jax.Array]:
    """The position of the n adjacent grid points to retain, and a spacing factor.

    L = dP/dQ is a likelihood ratio, and k pairs (P, Q) share one grid of m points. Each
    Q has at most the mass `tail` below the retained points, and each P has at most this
    mass above the retained points. If this requires more than n points, the caller
    first doubles the spacing, so that n points of the new grid cover 2n points of this
    grid. The doubled spacing is enough if m <= 2n.

    Args:
      grid: the grid of m points.
      mass: Q's mass at each point, f[k, m].
      weight: P's mass at each point, f[k, m].
      tail: the mass to leave outside at each end, f[].
      n: the number of points to retain.

    Returns:
      log L at the first retained point, in units of the grid's spacing; and the factor:
      2 if more than n points of the grid have to be retained, and otherwise 1. The
      caller multiplies the spacing by this factor.
    """
    below = jnp.max(jnp.cumsum(mass, axis=1), axis=0)
    above = jnp.max(jnp.cumsum(weight[:, ::-1], axis=1), axis=0)
    start = jnp.sum(below <= tail)
    stop = below.size - jnp.sum(above <= tail)
    factor = jnp.where(stop - start > n, 2.0, 1.0)
    return grid.first + jnp.minimum(start, stop - 1), factor


# The number of pairs of points that are combined at once. The arrays of a chunk fit
# into a processor's cache, and the loop over chunks is short.
_CHUNK = 2**16


class Moves(NamedTuple):
    """The points of a finer grid to which the mass of each pair of grid points moves.

    The first grid has n points, evenly spaced by h in log L, for a likelihood ratio L.
    The finer grid has the spacing h/2, and contains the points of the first grid. Let a
    pair have the indices i and j on the first grid. The difference d = j − i, with |d|
    < n, determines the move relative to point i. The mass moves to three adjacent
    points of the finer grid. The lowest of the three points is point i + rows[d] of the
    first grid.

    Attributes:
      rows: the shift from point i to the lowest of the three points, in units of h, for
        each d, i32[2n − 1].
      fractions: the fractions of the mass that move to the three points, in ascending
        order of the points, for each d, f[2n − 1, 3].
    """

    rows: jax.Array
    fractions: jax.Array


def _offsets(w: jax.Array, spacing: jax.Array, n: int) -> jax.Array:
    """The distance in log L from a grid point to its weighted mean with another point.

    The grid points are likelihood ratios L, with the spacing h in log L. The first
    point has the weight w in the mean, and the other point is d grid points above the
    first point. For each d with −n < d < n, the distance is log(w + (1 − w) e^{hd}), in
    units of h/2, f[2n − 1].
    """
    distance = spacing * jnp.arange(-(n - 1.0), n)
    return jnp.logaddexp(jnp.log(w), jnp.log1p(-w) + distance) / (spacing / 2)


def to_neighbours(w: jax.Array, spacing: jax.Array, n: int) -> Moves:
    """Compute how to split the mass of each pair of grid points between two points.

    The n grid points are likelihood ratios L, evenly spaced by `spacing` in log L. The
    first point of a pair has the weight w in the mean of the pair. The mass moves to
    the two points next to this mean, on a grid with half the spacing. The split does
    not change the mean of L. For each difference of the two indices, the result has the
    points that receive the mass, and their fractions.
    """
    offset = _offsets(w, spacing, n)
    point = jnp.floor(offset)
    half = spacing / 2
    up = jnp.expm1(half * (offset - point)) / jnp.expm1(half)
    even, zero = point % 2 == 0, jnp.zeros_like(up)
    fractions = jnp.where(
        even, jnp.stack([1 - up, up, zero]), jnp.stack([zero, 1 - up, up])
    )
    return Moves(jnp.floor(point / 2).astype(jnp.int32), fractions.T)


def to_nearest(w: jax.Array, spacing: jax.Array, n: int) -> Moves:
    """Move the mass of each pair of grid points to one point near their mean.

    The n grid points are likelihood ratios L, evenly spaced by `spacing` in log L. The
    first point of a pair has the weight w in the mean of the pair. The mass moves to a
    point of a grid with half the spacing: the point nearest to this mean in log L.
    """
    point = jnp.round(_offsets(w, spacing, n))
    odd = (point % 2).astype(point.dtype)
    fractions = jnp.stack([1 - odd, odd, jnp.zeros_like(odd)], axis=1)
    return Moves(jnp.floor(point / 2).astype(jnp.int32), fractions)


def combine_pairs(left: jax.Array, right: jax.Array, moves: Moves) -> jax.Array:
    """The distribution of the weighted mean of two variables on the same grid.

    The pair of grid points with the indices i and j has the mass Σ_k left[k, i]
    right[k, j], where k is an index on the first axis of both arrays. This mass moves
    to points of a finer grid near the weighted mean of the two points.

    Args:
      left: r arrays of factors of the masses, for the first variable, f[r, n].
      right: r arrays of factors of the masses, for the second variable, f[r, n].
      moves: the points of the finer grid to which the mass of each pair moves. `moves`
        also determines the weights of the mean.

    Returns:
      The mass at each point of the grid with half the spacing, f[2n]. The weighted mean
      of two points lies between them, so that no mass leaves the grid.
    """
    n = left.shape[1]
    # The entries outside of 0, ..., n − 1 are zero.
    left, right = (jnp.pad(x, ((0, 0), (2 * n, 2 * n))) for x in (left, right))
    window = jax.vmap(
        lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, n + 1, axis=1),
        in_axes=(None, 0),
        out_axes=1,
    )

    def add(total: jax.Array, inputs: tuple[jax.Array, jax.Array, jax.Array]):
        distance, rows, fractions = inputs
        # Row d has the masses of the pairs that are d apart, at the points to which the
        # masses move.
        start = 2 * n - 1 - rows
        masses = jnp.sum(window(left, start) * window(right, start + distance), axis=0)
        # The three sums are aligned here, and are interleaved once, after the loop.
        return total + jnp.matmul(fractions.T, masses, precision="highest"), None

    # One more distance, which no pair has and whose fractions are zero, makes the
    # number of distances even, and a multiple of the chunk's length.
    chunk = math.gcd(2 * n, max(_CHUNK // n, 1))
    distance = jnp.arange(-n, n)
    rows, fractions = (
        jnp.pad(x, ((1, 0), *[(0, 0)] * (x.ndim - 1)))
        for x in (moves.rows, moves.fractions)
    )
    distance, rows, fractions = (
        x.reshape(-1, chunk, *x.shape[1:]) for x in (distance, rows, fractions)
    )
    total, _ = jax.lax.scan(add, jnp.zeros((3, n + 1)), (distance, rows, fractions))
    even, odd, following = total
    return jnp.stack([even[1:] + following[:-1], odd[1:]], axis=1).ravel()
