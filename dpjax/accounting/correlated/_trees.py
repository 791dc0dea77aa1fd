"""Trees of places, on which covariances are simple enough to compute with.

Places are joined two by two, then these pairs, and so on, with gaps between what is
joined, and what is made in the end is repeated around the circle of an epoch. What is
in two different parts of a join is at least its gap apart, so that the covariance at
that gap is a bound (docs/amplification.md). The ratio of a tree is computed from its
leaves: the mean of two independent copies, times a lognormal that both have in common,
and so on.

Places in gaps are left out: the mean over all places is a mean over the n_b rotations
of such a tree, and a convex function of it at most the mean over them (Jensen).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.searches import bisect
from dpjax.accounting._numerics.convex_order import spread

# How the covariance falls from one join to the next, after so many without a gap.
_FALLS = (0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
_CLOSE = (0, 1, 2)
_MOST_JOINS = 7
_COARSE = 128  # points of the grid on which trees are compared


class Tree(NamedTuple):
    """How places are joined.

    Attributes:
      gaps: how far the parts of each join are apart, i[most], the last ones unused.
      joins: how many there are, i[].
      copies: how often all of it is repeated around the circle, i[]; 0 if it does not
        fit.
      apart: how far these are apart, i[].
    """

    gaps: jax.Array
    joins: jax.Array
    copies: jax.Array
    apart: jax.Array


def candidates(by_gap: jax.Array, n_b: jax.Array) -> Tree:
    """Trees whose covariances fall evenly from join to join, with an axis for them.

    Of gaps that n_b places around a circle do not have, by_gap has zeros.
    """
    fall, close, joins = (
        np.ravel(x) for x in np.meshgrid(_FALLS, _CLOSE, np.arange(_MOST_JOINS + 1))
    )
    # What differs in joins that there are not is one tree.
    rows = [
        (fall[i] if j > c + 1 else 0.5, min(c, max(j - 1, 0)), j)
        for i, (c, j) in enumerate(zip(close, joins, strict=True))
    ]
    joins, close, fall = np.array(sorted({(j, c, f) for f, c, j in rows})).T

    def one(fall: jax.Array, close: jax.Array, joins: jax.Array) -> Tree:
        level = jnp.arange(_MOST_JOINS + 1)
        near = by_gap[jnp.minimum(1, n_b // 2)]
        wanted = near * fall ** jnp.maximum(level - close, 0.0)
        # The least gap of which it is small enough, if there is one.
        gap = 1 + jnp.sum(by_gap[None, 1:] > wanted[:, None] * (1 + 1e-9), axis=1)
        gaps = gap[:-1]

        def joined(length: jax.Array, x: tuple[jax.Array, jax.Array]):
            gap, there = x
            return jnp.where(there, 2 * length + gap - 1, length), None

        length, _ = jax.lax.scan(
            joined, jnp.ones_like(gap[0]), (gaps, level[:-1] < joins)
        )
        copies = n_b // (length + gap[joins] - 1)
        apart = n_b // jnp.maximum(copies, 1) - length + 1
        alone = gaps[jnp.maximum(joins - 1, 0)]
        return Tree(gaps, joins, copies, jnp.where(copies > 1, apart, alone))

    trees = jax.vmap(one)(fall, close, joins.astype(int))
    return jax.lax.stop_gradient(trees)


def ratio(
    tree: Tree, by_gap: jax.Array, n_b: jax.Array, tail: jax.Array, n: int
) -> tuple[spread.Law, jax.Array]:
    """The law of the tree's likelihood ratio, but for a Gaussian factor's variance.

    by_gap is over σ². Variance that is too small for the grid is left to the next join,
    where more has it in common.
    """
    last = n_b // 2
    of = by_gap[jnp.minimum(tree.gaps, last)]
    top = by_gap[jnp.minimum(tree.apart, last)]
    top = jnp.where((tree.joins == 0) & (tree.copies == 1), by_gap[0], top)
    level = jnp.arange(of.size)
    of = jnp.where(level < tree.joins, of, top)
    following = jnp.append(of[1:], top)
    leaf = jnp.maximum(by_gap[0] - of[0], 1e-9 * by_gap[0])
    law = spread.lognormal(leaf, tail, n)

    def multiplied(x: tuple[spread.Law, jax.Array]) -> tuple[spread.Law, jax.Array]:
        law, variance = x
        fits = variance >= law.grid.spacing**2
        safe = jnp.where(fits, variance, 1.0)
        law = jax.lax.cond(
            fits, lambda x: spread.times_lognormal(x, safe, tail), lambda x: x, law
        )
        return law, jnp.where(fits, 0.0, variance)

    def join(
        k: jax.Array, x: tuple[spread.Law, jax.Array]
    ) -> tuple[spread.Law, jax.Array]:
        law, rest = x
        return multiplied((spread.double(law, tail), rest + of[k] - following[k]))

    law, rest = jax.lax.fori_loop(0, tree.joins, join, (law, jnp.zeros_like(leaf)))
    law = spread.mean(law, jnp.maximum(tree.copies, 1), tail)
    return law, rest + top


def _estimate(
    tree: Tree,
    by_gap: jax.Array,
    n_b: jax.Array,
    delta: jax.Array,
    num_epochs: jax.Array,
) -> jax.Array:
    """About ε(δ), or what adds up over epochs, on a coarse grid."""
    tail = 1e-4 * delta
    law, variance = ratio(tree, by_gap, n_b, tail, _COARSE)
    felt = variance >= law.grid.spacing**2
    safe = jnp.where(felt, variance, 1.0)
    law = jax.lax.cond(
        felt, lambda x: spread.times_lognormal(x, safe, tail), lambda x: x, law
    )
    log = law.grid.log(_COARSE)

    def of_one() -> jax.Array:
        top = jnp.max(jnp.abs(log)) + 1
        return bisect(lambda e: spread.delta(law, e) <= delta, jnp.zeros(()), top, 30)

    def of_each() -> jax.Array:
        # The divergence of P from Q and that of Q from P.
        return jnp.sum(law.masses.mass * jnp.expm1(log) * log)

    return jax.lax.cond(num_epochs > 1, of_each, of_one)


def best(
    by_gap: jax.Array, n_b: jax.Array, delta: jax.Array, num_epochs: jax.Array
) -> Tree:
    """The tree that is about the best for so many independent epochs."""
    by_gap, delta = jax.lax.stop_gradient((by_gap, delta))
    trees = candidates(by_gap, n_b)

    def better(
        best: tuple[jax.Array, Tree], tree: Tree
    ) -> tuple[tuple[jax.Array, Tree], None]:
        about = jax.lax.cond(
            tree.copies > 0,
            lambda: _estimate(tree, by_gap, n_b, delta, num_epochs),
            lambda: jnp.full((), jnp.inf),  # it does not fit
        )
        now = about, tree
        return jax.tree.map(
            lambda x, y: jnp.where(now[0] < best[0], x, y), now, best
        ), None

    # The first has no joins, and fits.
    first = jax.tree.map(lambda x: x[0], trees)
    (_, tree), _ = jax.lax.scan(better, (jnp.full((), jnp.inf), first), trees)
    return tree
