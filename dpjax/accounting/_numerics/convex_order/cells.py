"""Lower bounds in convex order: the conditional means of a likelihood ratio L on cells.

A cell is an interval of values of L = dP/dQ. A distribution is stored as the masses of
P and Q in each cell. The mean of L in a cell is exactly the mass of P divided by the
mass of Q. The label of a cell is a grid point near this mean. When two independent
ratios are combined, the labels of two cells determine the cell to which their joint
mass moves. Labels change how tight a bound is. Every choice of labels gives a valid
bound (Jensen's inequality).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core.float64 import SMALL, float64
from dpjax._core.searches import bisect, implicit_derivative
from dpjax.accounting._numerics.convex_order import grid as grids
from dpjax.accounting._numerics.convex_order.grid import Grid

_POINTS = 1024
_BISECTIONS = 50
# The mass of the likelihood ratio's distribution outside of the grid at each end. In
# the lower bound this mass is merged into the end cells, not lost.
_TAIL = 1e-12


class Masses(NamedTuple):
    """The masses of distributions P and Q in cells, intervals of L = dP/dQ.

    The leading axes *b are a batch of pairs (P, Q).

    Attributes:
      mass: Q's mass in each of the n cells, f[*b, n].
      weight: P's mass in each cell, f[*b, n]: Q's mass times the mean of L in the cell.
    """

    mass: jax.Array
    weight: jax.Array


# A law's grid has the label of each cell, a value of L near the cell's mean. Labels
# determine the cell to which the mass of a pair of cells is assigned when two
# independent ratios are combined, and do not affect validity.
Law = grids.Law[Masses]


def lognormal(variance: jax.Array, tail: jax.Array, n: int) -> Law:
    """A lower bound, in convex order, on the likelihood ratio L of N(√v, 1) to N(0, 1).

    The argument variance is v: under N(0, 1), log L ~ N(−v/2, v). The result is a
    distribution of L on n cells (intervals of L). N(0, 1) has about the mass `tail`
    below the cells, and N(√v, 1) has about this mass above the cells. The masses below
    and above are merged into the first and the last cell.
    """
    grid = grids.make_grid(variance, tail, n)
    # Cells are centred on grid points. The tails belong to the first and last cell.
    start = grid.log(n)[0] - grid.spacing / 2
    masses = (
        jnp.sum(nodes, axis=0).at[0].add(below).at[-1].add(above)
        for nodes, below, above in grids.normal(variance, start, n, grid.spacing)
    )
    return Law(grid, Masses(*masses))


def _window(grid: Grid, masses: Masses, tail: jax.Array, n: int) -> Law:
    """Restrict likelihood ratios L = dP/dQ on about 2n cells to n adjacent cells.

    A cell is an interval of L, and `masses` is a batch of distributions. Below the n
    cells, Q has at most the mass `tail`. Above the n cells, P has at most this mass.
    The masses below and above are merged into the first and the last cell. If the
    restriction needs more than n cells, pairs of neighbouring cells are merged first.
    """
    start, factor = grids.choose_window(grid, *masses, tail, n)
    first = jnp.floor(start / factor)
    # Cells outside the window are merged into the window's first or last cell.
    # (Rounding down puts labels below the means of merged cells, by the same distance
    # for all cells. So the differences between labels do not change.)
    point = grid.first + jnp.arange(masses.mass.shape[1])
    index = jnp.clip(jnp.floor(point / factor) - first, 0, n - 1).astype(jnp.int32)

    def move_masses(x: jax.Array) -> jax.Array:
        return jnp.zeros((*x.shape[:-1], n)).at[..., index].add(x)

    return Law(Grid(first, grid.spacing * factor), jax.tree.map(move_masses, masses))


def mean(law: Law, count: jax.Array, tail: jax.Array) -> Law:
    """A lower bound, in convex order, on the mean of independent copies of a ratio L.

    The argument law is the distribution of the likelihood ratio L, and count is the
    number of copies. Each doubling of the number of copies merges at most the mass
    `tail` at each end into the end cells.
    """
    n = law.masses.mass.shape[-1]

    def combine(pair: Law, third: Masses, weights: jax.Array) -> Law:
        grid = pair.grid

        def merge(x: tuple[Masses, jax.Array]) -> Masses:
            masses, w = x
            moves = grids.to_nearest(w, grid.spacing, n)
            left = jnp.stack([w * masses.weight, (1 - w) * masses.mass])
            weight = grids.combine_pairs(left, jnp.stack(third), moves)
            mass = grids.combine_pairs(masses.mass[None], third.mass[None], moves)
            return Masses(mass, weight)

        fine = Grid(2 * grid.first, grid.spacing / 2)
        return _window(fine, jax.lax.map(merge, (pair.masses, weights)), tail, n)

    return grids.combine_copies(combine, law, law.masses, count)


def product(law: Law, count: jax.Array, tail: jax.Array) -> Law:
    """A lower bound, in convex order, on a product of independent copies of a ratio L.

    The argument law is the distribution of the likelihood ratio L, and count is the
    number of copies. Each doubling of the number of copies merges at most the mass
    `tail` at each end into the end cells.
    """
    n = law.masses.mass.shape[-1]

    def combine(pair: Law, third: Masses, _: jax.Array) -> Law:
        def merge(masses: Masses) -> Masses:
            return jax.tree.map(
                lambda x, y: jnp.convolve(x, y, precision="highest"), masses, third
            )

        wide = Grid(2 * pair.grid.first, pair.grid.spacing)
        return _window(wide, jax.lax.map(merge, pair.masses), tail, n)

    # The product of no copies is 1, in the cell whose label is nearest to log L = 0.
    index = jnp.clip(-law.grid.first, 0, n - 1)
    unit_mass = jnp.where(jnp.arange(n) == index, 1.0, 0.0)
    return grids.combine_copies(combine, law, Masses(unit_mass, unit_mass), count)


def delta(law: Law, epsilon: jax.Array, count: jax.Array) -> jax.Array:
    """A lower bound on δ(ε), the larger of E(L − e^ε)₊ and E(1 − e^ε L)₊.

    The argument law is a lower bound, in convex order, on the likelihood ratio L. The
    law was computed from independent copies of the likelihood ratio of one step, and
    count is the number of copies. The result allows for the rounding errors of the
    law's masses, which grow with count.
    """
    q, p = law.masses
    error = grids.rounding(q.size, count)
    # The bound on rounding enlarges the subtracted term and shrinks the other term, so
    # that the result errs downwards.
    e = jnp.exp(epsilon) * (1 + error)
    above = jnp.sum(jnp.maximum(p * (1 - error) - e * q, 0.0))
    below = jnp.sum(jnp.maximum(q * (1 - error) - e * p, 0.0))
    return jnp.maximum(above, below)


def allocation_lower_bound(
    noise_multiplier: jax.Array, num_steps: jax.Array, num_epochs: jax.Array
) -> Law:
    """A lower bound, in convex order, on the likelihood ratio of random allocation.

    In random allocation, an example takes part in one random step of each epoch. The
    ratio is the density of the outputs of all epochs with the example, divided by their
    density without the example. There are num_epochs epochs of num_steps steps.
    """
    tail = jnp.asarray(_TAIL)
    epoch_law = mean(lognormal(1 / noise_multiplier**2, tail, _POINTS), num_steps, tail)
    return product(epoch_law, num_epochs, tail)


@float64("down", one_by_one=True)
def epsilon_lower64(
    noise_multiplier: jax.Array,
    target_delta: jax.Array,
    num_steps: jax.Array,
    num_epochs: jax.Array,
) -> jax.Array:
    """A lower bound on the ε(δ) of random allocation, for δ = target_delta.

    In random allocation, an example takes part in one random step of each of num_epochs
    epochs, and an epoch has num_steps steps. The result is 0 if the noise multiplier is
    not positive and finite, or if target_delta is not between 0 and 1.
    """
    is_valid = (noise_multiplier > 0) & (noise_multiplier < jnp.inf)
    noise_multiplier = jnp.where(is_valid, noise_multiplier, 1.0)
    law = allocation_lower_bound(noise_multiplier, num_steps, num_epochs)
    is_valid &= (target_delta > 0) & (target_delta < 1)
    log_delta = jnp.log(jnp.where(is_valid, target_delta, 0.5))

    def excess(epsilon: jax.Array) -> jax.Array:
        bound = delta(law, epsilon, num_steps * num_epochs)
        return jnp.log(jnp.maximum(bound, SMALL)) - log_delta

    # δ(ε) is zero beyond some ε. Labels may be a few points away from the means of
    # their cells, hence the margin of 100 points.
    ends = jnp.abs(law.grid.log(law.masses.mass.size))
    top = jnp.max(ends) + 100 * law.grid.spacing
    # At the ε that bisect returns, δ(ε) is above target_delta. So ε(target_delta) is at
    # least this ε.
    zero = jnp.zeros_like(log_delta)
    solution = bisect(lambda e: excess(e) > 0, top, zero, _BISECTIONS)
    solution = jnp.where(is_valid & (excess(zero) > 0), solution, 0.0)
    return implicit_derivative(excess, solution, solution > 0)
