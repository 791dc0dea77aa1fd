"""Laws from above: mean-preserving spreads to the points of a grid.

Between neighbours x < y, what is at u goes to y with probability (u − x) / (y − x).
What is below the first point goes there and to 0; what is above the last one goes there
and to infinity, where Q has nothing and P the rest of the mean.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core.float64 import SMALL, ULP
from dpjax.accounting._numerics.convex_order import pairing
from dpjax.accounting._numerics.convex_order.fold import copies
from dpjax.accounting._numerics.convex_order.grid import (
    NODES,
    OFF,
    Grid,
    make_grid,
    normal,
    rounding,
)
from dpjax.accounting._numerics.pld.pairs import DiscreteLosses, tail_quantile

# ε is within 3e-4 of exact at noise 1 and 100 steps; errors fall with the square.
POINTS = 1024


class Masses(NamedTuple):
    """Of one law on a grid, or of several.

    Attributes:
      mass: Q's at each point, f[*b, n].
      zero: Q's where L is 0, f[*b].
      lost: P's where L is infinite, f[*b].
    """

    mass: jax.Array
    zero: jax.Array
    lost: jax.Array


class Law(NamedTuple):
    """A law and where it is."""

    grid: Grid
    masses: Masses


def _lognormal(variance: jax.Array, grid: Grid, n: int) -> Masses:
    """L with log L ~ N(−v/2, v), on n points."""
    log = grid.log(n)
    law = normal(variance, log[0], n - 1, grid.spacing)
    up = jnp.expm1(grid.spacing * NODES) / jnp.expm1(grid.spacing)
    mass, _ = law.nodes
    nothing = jnp.zeros(1)
    mass = jnp.concatenate([jnp.sum(mass * (1 - up), 0), nothing]) + jnp.concatenate(
        [nothing, jnp.sum(mass * up, 0)]
    )
    (low, low_p), (high, high_p) = law.below, law.above
    first = low_p * jnp.exp(-log[0])
    return Masses(
        mass.at[0].add(first).at[-1].add(high),
        jnp.maximum(low - first, 0.0),
        jnp.maximum(high_p - high * jnp.exp(log[-1]), 0.0),
    )


def lognormal(variance: jax.Array, tail: jax.Array, n: int) -> Law:
    """L with log L ~ N(−v/2, v): the ratio of N(√v, 1) and N(0, 1)."""
    grid = make_grid(variance, tail, n)
    return Law(grid, _lognormal(variance, grid, n))


def _coarser(mass: jax.Array, grid: Grid, factor: jax.Array) -> tuple[jax.Array, Grid]:
    """f[k, m] on every so manieth point alone, the rest of f[k, m + 1] empty."""
    m = mass.shape[1]
    point = grid.first + jnp.arange(m)
    to = jnp.floor(point / factor)
    wide = Grid(to[0], grid.spacing * factor)
    up = jnp.expm1(grid.spacing * (point - factor * to)) / jnp.expm1(wide.spacing)
    at = (to - to[0]).astype(jnp.int32)
    out = jnp.zeros((mass.shape[0], m + 1))
    out = out.at[:, at].add((1 - up)[None] * mass)
    return out.at[:, at + 1].add(up[None] * mass), wide


def _window(grid: Grid, masses: Masses, tail: jax.Array, n: int) -> tuple[Grid, Masses]:
    """The n points that matter, of about 2n, each two of them made one if need be."""
    mass, zero, lost = masses
    x = jnp.exp(grid.log(mass.shape[1]))[None]
    below = jnp.max(jnp.cumsum(mass, axis=1), axis=0)
    above = jnp.max(jnp.cumsum((mass * x)[:, ::-1], axis=1), axis=0)
    start = jnp.sum(below <= tail)
    stop = below.size - jnp.sum(above <= tail)
    factor = jnp.where(stop - start > n, 2.0, 1.0)
    start = grid.first + jnp.minimum(start, stop - 1)
    mass, grid = _coarser(mass, grid, factor)
    size = mass.shape[1]
    start = jnp.clip(jnp.floor(start / factor) - grid.first, 0, size - n)
    start = start.astype(jnp.int32)

    place, x = jnp.arange(size)[None], jnp.exp(grid.log(size))[None]
    before = jnp.where(place < start, mass, 0.0)
    beyond = jnp.where(place >= start + n, mass, 0.0)
    first, last = x[0, start], x[0, start + n - 1]
    mass = jax.lax.dynamic_slice_in_dim(mass, start, n, axis=1)
    mass = mass.at[:, 0].add(jnp.sum(before * (x / first), axis=1))
    mass = mass.at[:, -1].add(jnp.sum(beyond, axis=1))
    zero = zero + jnp.sum(before * jnp.maximum(1 - x / first, 0.0), axis=1)
    lost = lost + jnp.sum(beyond * jnp.maximum(x - last, 0.0), axis=1)
    return Grid(grid.first + start, grid.spacing), Masses(mass, zero, lost)


def _sum(own: Masses, other: Masses, share: jax.Array, spacing: jax.Array) -> Masses:
    """The mean of two, the first one's share given, on twice as many points."""
    moves = pairing.to_neighbours(share, spacing, own.mass.size)
    mass = pairing.combine_pairs(own.mass[None], other.mass[None], moves)
    # A mean w x with a zero: to x with probability w, and to 0.
    kept = other.zero * share * own.mass + own.zero * (1 - share) * other.mass
    zero = own.zero * (other.zero + share) + other.zero * (1 - share)
    lost = share * own.lost + (1 - share) * other.lost
    return Masses(mass.at[::2].add(kept), zero, lost)


def mean(law: Law, count: jax.Array, tail: jax.Array) -> Law:
    """The mean of count independent copies."""
    n = law.masses.mass.size

    def combine(grid: Grid, pair: Masses, other: Masses, shares: jax.Array):
        both = jax.lax.map(
            lambda x: _sum(x[0], other, x[1], grid.spacing), (pair, shares)
        )
        return _window(Grid(2 * grid.first, grid.spacing / 2), both, tail, n)

    return Law(*copies(combine, law.grid, law.masses, law.masses, count))


def _in_own_window(grid: Grid, masses: Masses, tail: jax.Array, n: int) -> Law:
    """One law in its window."""
    grid, masses = _window(grid, jax.tree.map(lambda x: x[None], masses), tail, n)
    return Law(grid, jax.tree.map(lambda x: x[0], masses))


def double(law: Law, tail: jax.Array) -> Law:
    """The mean of two independent copies."""
    (first, spacing), masses = law
    both = _sum(masses, masses, jnp.asarray(0.5), spacing)
    return _in_own_window(Grid(2 * first, spacing / 2), both, tail, masses.mass.size)


def times_lognormal(law: Law, variance: jax.Array, tail: jax.Array) -> Law:
    """The product with an independent lognormal of mean one and variance >= h² > 0."""
    mass, zero, lost = law.masses
    n = mass.size
    # A grid on which the lognormal has no more than n points.
    ends = variance / 2 + jnp.sqrt(variance) * tail_quantile(tail)
    doublings = jnp.ceil(jnp.log2(2 * ends / (law.grid.spacing * (n - 2))))
    factor = jax.lax.stop_gradient(jnp.exp2(jnp.maximum(doublings, 0.0)))
    mass, grid = _coarser(mass[None], law.grid, factor)
    other = Grid(jax.lax.stop_gradient(jnp.floor(-ends / grid.spacing)), grid.spacing)
    factors = _lognormal(variance, other, n)
    product = jnp.convolve(mass[0], factors.mass, precision="highest")
    masses = Masses(product, zero + factors.zero, lost + factors.lost)
    return _in_own_window(Grid(grid.first + other.first, grid.spacing), masses, tail, n)


def losses(law: Law, count: jax.Array) -> DiscreteLosses:
    """As privacy losses, in both directions, after means of count copies in all."""
    (mass, zero, lost), n = law.masses, law.masses.mass.size
    log, log_mass = law.grid.log(n), jnp.log(jnp.maximum(mass, SMALL))
    return DiscreteLosses(
        jnp.stack([log, -log]) + OFF,
        jnp.stack([log_mass + log, log_mass]),
        jnp.stack([lost, zero]),
        rounding(n, count),
    )


def replacement_losses(law: Law, count: jax.Array) -> DiscreteLosses:
    """As losses of two runs, each with this ratio to a third, whatever they share.

    For ratios L and L′ and any s, (L − e^ε L′)₊ <= (L − s)₊ + (s − e^ε L′)₊, and there
    is an s of equality where L′ falls as L grows. So with F the law's quantiles nothing
    is worse than L = F(u) and L′ = F(1 − u): at each depth t < 1/2 there are two pairs,
    of the lower quantile F(t) and the upper one F(1 − t), one for either order.
    """
    (mass, zero, lost), n = law.masses, law.masses.mass.size
    # Depths from both ends, each with the relative precision of its own tail.
    lower = jnp.append(zero, zero + jnp.cumsum(mass))
    upper = jnp.cumsum(mass[::-1])
    middle = lower[-1] / 2
    ends = jnp.minimum(jnp.sort(jnp.concatenate([lower, upper])), middle)
    starts = jnp.append(0.0, ends[:-1])
    width = ends - starts
    low = jnp.searchsorted(lower, starts, side="right") - 1  # −1 where L is 0
    high = jnp.maximum(n - 1 - jnp.searchsorted(upper, starts, side="right"), 0)
    log, log_width = law.grid.log(n), jnp.log(jnp.maximum(width, SMALL))
    above, below = log[high], log[jnp.maximum(low, 0)]
    apart = jnp.maximum(above - below, 0.0)
    there = low >= 0
    # Where L′ is 0 the loss is infinite, as it is where L is.
    gone = jnp.sum(jnp.where(there, 0.0, width * jnp.exp(above)))
    log_mass = jnp.stack([log_width + above, log_width + below])
    return DiscreteLosses(
        jnp.stack([apart, -apart]).reshape(1, -1) + 2 * OFF,
        jnp.where(there, log_mass, -jnp.inf).reshape(1, -1),
        (lost + gone)[None],
        rounding(n, count) + 8 * n * ULP,
    )


def allocation(
    noise_multiplier: jax.Array, num_steps: jax.Array, tail: jax.Array
) -> Law:
    """One of so many steps, at random: the mean of as many independent ratios."""
    one = lognormal(1 / noise_multiplier**2, tail, POINTS)
    return mean(one, num_steps, tail)


def narrow(tail: jax.Array) -> jax.Array:
    """A tail for `replacement_losses`, which pairs what is cut off with the top."""
    return tail**1.5


def delta(law: Law, epsilon: jax.Array) -> jax.Array:
    """The larger of E(L − e^ε)₊ and E(1 − e^ε L)₊, but for rounding."""
    mass, zero, lost = law.masses
    x, e = jnp.exp(law.grid.log(mass.size)), jnp.exp(epsilon)
    above = jnp.sum(mass * jnp.maximum(x - e, 0.0)) + lost
    below = jnp.sum(mass * jnp.maximum(1 - e * x, 0.0)) + zero
    return jnp.maximum(above, below)
