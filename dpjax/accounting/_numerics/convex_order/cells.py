"""Laws from below: conditional means on cells.

A cell is known by a point of the grid, which is about where its mean is. Which pairs go
to which cell is decided by those points; where the means are follows from the masses
that P and Q have there, exactly, so that any choice gives a bound (Jensen).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core.float64 import SMALL
from dpjax.accounting._numerics.convex_order import pairing
from dpjax.accounting._numerics.convex_order.fold import copies
from dpjax.accounting._numerics.convex_order.grid import (
    Grid,
    make_grid,
    normal,
    rounding,
)


class Masses(NamedTuple):
    """Of one law in cells, or of several.

    Attributes:
      mass: Q's, f[*b, n].
      weight: P's, f[*b, n]: the mean of L in a cell times its mass.
    """

    mass: jax.Array
    weight: jax.Array


class Law(NamedTuple):
    """A law and where its cells are."""

    grid: Grid
    masses: Masses


def lognormal(variance: jax.Array, tail: jax.Array, n: int) -> Law:
    """L with log L ~ N(−v/2, v): the ratio of N(√v, 1) and N(0, 1)."""
    grid = make_grid(variance, tail, n)
    law = normal(variance, grid.log(n)[0] - grid.spacing / 2, n, grid.spacing)
    masses = (
        jnp.sum(inner, axis=0).at[0].add(below).at[-1].add(above)
        for inner, below, above in zip(law.nodes, law.below, law.above, strict=True)
    )
    return Law(grid, Masses(*masses))


def _window(grid: Grid, masses: Masses, tail: jax.Array, n: int) -> tuple[Grid, Masses]:
    """The n cells that matter, of about 2n, each two of them made one if need be."""
    below = jnp.max(jnp.cumsum(masses.mass, axis=-1), axis=0)
    above = jnp.max(jnp.cumsum(masses.weight[..., ::-1], axis=-1), axis=0)
    start = jnp.sum(below <= tail)
    stop = below.size - jnp.sum(above <= tail)
    factor = jnp.where(stop - start > n, 2.0, 1.0)
    first = jnp.floor((grid.first + jnp.minimum(start, stop - 1)) / factor)
    # What is beyond is in the cells at the ends. (Points fall behind the means of their
    # cells here, all alike, which moves nothing else.)
    to = jnp.floor((grid.first + jnp.arange(below.size)) / factor) - first
    at = jnp.clip(to, 0, n - 1).astype(jnp.int32)

    def moved(x: jax.Array) -> jax.Array:
        return jnp.zeros((*x.shape[:-1], n)).at[..., at].add(x)

    return Grid(first, grid.spacing * factor), jax.tree.map(moved, masses)


def mean(law: Law, count: jax.Array, tail: jax.Array) -> Law:
    """The mean of count independent copies."""
    n = law.masses.mass.shape[-1]

    def combine(grid: Grid, pair: Masses, other: Masses, shares: jax.Array):
        def one(x: tuple[Masses, jax.Array]) -> Masses:
            own, share = x
            moves = pairing.to_nearest(share, grid.spacing, n)
            left = jnp.stack([share * own.weight, (1 - share) * own.mass])
            weight = pairing.combine_pairs(left, jnp.stack(other), moves)
            return Masses(
                pairing.combine_pairs(own.mass[None], other.mass[None], moves), weight
            )

        fine = Grid(2 * grid.first, grid.spacing / 2)
        return _window(fine, jax.lax.map(one, (pair, shares)), tail, n)

    return Law(*copies(combine, law.grid, law.masses, law.masses, count))


def product(law: Law, count: jax.Array, tail: jax.Array) -> Law:
    """The product of count independent copies."""
    n = law.masses.mass.shape[-1]

    def combine(grid: Grid, pair: Masses, other: Masses, _: jax.Array):
        def one(own: Masses) -> Masses:
            return jax.tree.map(
                lambda x, y: jnp.convolve(x, y, precision="highest"), own, other
            )

        wide = Grid(2 * grid.first, grid.spacing)
        return _window(wide, jax.lax.map(one, pair), tail, n)

    # The law of no copies is 1, and its cell the one about there.
    at = jnp.clip(-law.grid.first, 0, n - 1)
    one = jnp.where(jnp.arange(n) == at, 1.0, 0.0)
    return Law(*copies(combine, law.grid, Masses(one, one), law.masses, count))


def delta(law: Law, epsilon: jax.Array, count: jax.Array) -> jax.Array:
    """E(L − e^ε)₊ or E(1 − e^ε L)₊, the larger, from below.

    The count is of all the copies that have been combined.
    """
    q, p = law.masses
    error = rounding(q.size, count)
    e = jnp.exp(epsilon) * (1 + error)
    above = jnp.sum(jnp.maximum(p * (1 - error) - e * q, 0.0))
    below = jnp.sum(jnp.maximum(q * (1 - error) - e * p, 0.0))
    return jnp.maximum(above, below)


def log_delta(law: Law, epsilon: jax.Array, count: jax.Array) -> jax.Array:
    """The logarithm of that."""
    return jnp.log(jnp.maximum(delta(law, epsilon, count), SMALL))


def largest_epsilon(law: Law) -> jax.Array:
    """Beyond which there is nothing."""
    ends = jnp.abs(law.grid.log(law.masses.mass.size))
    return jnp.max(ends) + 100 * law.grid.spacing
