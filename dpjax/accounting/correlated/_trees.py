"""Trees of positions, whose covariances bound those of an example's possible positions.

A position is the step of an epoch at which an example takes part for the first time.
The positions are the leaves of a tree. Two positions are joined into a pair, two pairs
into a group of four, and so on. Each join leaves a gap between its two parts. The final
group is repeated around the circle of an epoch. Positions in different parts of a join
are at least the join's gap apart, so that the covariance at that gap is an upper bound
(docs/amplification.md). Let L be the likelihood ratio of the outputs with and without
an example that has a random position of the tree. The distribution of L is computed
from the leaves upwards. Each join computes the mean of two independent copies, and
multiplies the mean by a lognormal factor that both copies share.

The tree leaves out the positions in the gaps. The n_b rotations of the tree around the
circle together contain each position equally often. The mean over all positions is
therefore the mean, over the rotations, of the mean over a rotated tree. By Jensen's
inequality, a convex function of the mean over all positions is at most the mean of this
function over rotations.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.accounting._numerics.convex_order import spread

# The factors by which the covariance may fall from one join to the next.
_FALLS = (0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
# Candidates for the number of first joins in which the covariance does not fall.
_CLOSE = (0, 1, 2)
_MOST_JOINS = 7
_COARSE = 128  # the number of grid points for the comparison of trees


class Tree(NamedTuple):
    """A tree that joins positions, and its copies around the circle of an epoch.

    A position is a step of the epoch at which an example may take part. Join j combines
    two parts of 2^j positions each.

    Attributes:
      gaps: the distance between the two parts of each join, i[m]. Entries from index
        `joins` on are unused.
      joins: the number of joins, i[].
      copies: the number of copies of the tree around the circle, i[]; 0 if no copy
        fits.
      apart: the distance between two copies, i[].
    """

    gaps: jax.Array
    joins: jax.Array
    copies: jax.Array
    apart: jax.Array


def candidates(by_gap: jax.Array, n_b: jax.Array) -> Tree:
    """Trees of positions whose covariances fall by equal factors from join to join.

    A tree joins positions, which are steps of an epoch, into groups of 2, 4, 8, …. The
    covariance of a join is the covariance of two positions in different parts of the
    join. In some trees, the first two or three joins have the same covariance. The
    trees are stacked along a new first axis.

    Args:
      by_gap: the covariance of two positions by their distance around the circle of an
        epoch, padded with zeros beyond the largest distance, f[m].
      n_b: the number of steps in an epoch, i[].
    """
    # Settings that differ only in unused joins give the same tree. Such settings have
    # equal tuples, so that the set contains each tree only once.
    settings = {
        (joins, min(close, max(joins - 1, 0)), fall if joins > close + 1 else 0.5)
        for joins in range(_MOST_JOINS + 1)
        for close in _CLOSE
        for fall in _FALLS
    }
    joins, close, fall = np.array(sorted(settings)).T

    def one(fall: jax.Array, close: jax.Array, joins: jax.Array) -> Tree:
        level = jnp.arange(_MOST_JOINS + 1)
        near = by_gap[jnp.minimum(1, n_b // 2)]
        wanted = near * fall ** jnp.maximum(level - close, 0.0)
        # The least gap whose covariance is at most the wanted covariance, if there is
        # such a gap. The tolerance covers rounding errors, so that equal covariances
        # are accepted.
        gap = 1 + jnp.sum(by_gap[None, 1:] > wanted[:, None] * (1 + 1e-9), axis=1)
        gaps, length = gap[:-1], jnp.ones_like(gap[0])
        for k in range(_MOST_JOINS):
            length = jnp.where(k < joins, 2 * length + gaps[k] - 1, length)
        copies = n_b // (length + gap[joins] - 1)
        apart = n_b // jnp.maximum(copies, 1) - length + 1
        alone = gaps[jnp.maximum(joins - 1, 0)]
        return Tree(gaps, joins, copies, jnp.where(copies > 1, apart, alone))

    trees = jax.vmap(one)(fall, close, joins.astype(int))
    return jax.lax.stop_gradient(trees)


def _multiply_lognormal(
    law: spread.Law, variance: jax.Array, tail: jax.Array
) -> tuple[spread.Law, jax.Array]:
    """Multiply L, with the distribution `law`, by a lognormal variable of mean one.

    The lognormal variable is independent of L, and its log has the given variance. The
    grid of the result leaves out a probability of about `tail`. If the standard
    deviation of the log is below the spacing of the grid of L, the function returns
    `law` unchanged.

    Returns:
      The distribution of the product and 0, or `law` and the given variance.
    """
    fits = variance >= law.grid.spacing**2
    safe = jnp.where(fits, variance, 1.0)
    law = jax.lax.cond(
        fits, lambda x: spread.times_lognormal(x, safe, tail), lambda x: x, law
    )
    return law, jnp.where(fits, 0.0, variance)


def _covariances(
    tree: Tree, by_gap: jax.Array, n_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The covariances that a tree gives two positions, which are steps of an epoch.

    A join of the tree combines two parts, and the tree has copies around the circle of
    the n_b positions. The covariances are the entries of `by_gap` at the gaps between
    parts and between copies.

    Returns:
      For each join, the covariance of positions in different parts of the join, f[m];
      and the covariance of positions in different copies of the tree, f[].
    """
    last = n_b // 2
    of = by_gap[jnp.minimum(tree.gaps, last)]
    top = by_gap[jnp.minimum(tree.apart, last)]
    top = jnp.where((tree.joins == 0) & (tree.copies == 1), by_gap[0], top)
    return jnp.where(jnp.arange(of.size) < tree.joins, of, top), top


def log_square(tree: Tree, by_gap: jax.Array, n_b: jax.Array) -> jax.Array:
    """The log of the second moment E L² of the likelihood ratio L for a tree.

    L is the likelihood ratio of the outputs with and without an example that has a
    random position of the tree. L is the mean of exp(X_i − Var X_i / 2) over the
    positions i, for a Gaussian vector X with the covariances of the tree. E L² is
    therefore the mean of e^{Cov(X_i, X_j)} over all ordered pairs (i, j) of positions,
    including i = j.

    Args:
      tree: the tree of positions.
      by_gap: the covariance of two positions by their distance around the circle of an
        epoch, divided by the square of the noise multiplier, f[m].
      n_b: the number of steps in an epoch, i[].
    """
    of, top = _covariances(tree, by_gap, n_b)
    size = jnp.exp2(1.0 * tree.joins)
    parts = jnp.where(np.arange(of.size) < tree.joins, np.exp2(np.arange(of.size)), 0.0)
    others = jnp.stack([jnp.ones_like(size), (tree.copies - 1) * size])
    pairs = jnp.concatenate([others, parts])
    common = jnp.concatenate([jnp.stack([by_gap[0], top]), of])
    total = jax.scipy.special.logsumexp(common, b=pairs)
    return total - jnp.log(size * tree.copies)


def ratio(
    tree: Tree, by_gap: jax.Array, n_b: jax.Array, tail: jax.Array, n: int
) -> tuple[spread.Law, jax.Array]:
    """The likelihood ratio of a tree of positions, as a product of two random factors.

    The likelihood ratio compares the outputs with and without an example that takes
    part at a random position. The first result is the distribution of the first factor,
    on a grid of n points that leaves out a probability of about `tail`. The second
    factor is lognormal, and a Gaussian mechanism accounts for this factor. The second
    result is the variance of the log of the second factor. by_gap has the covariance of
    two positions by their distance around the circle of n_b positions, divided by the
    square of the noise multiplier.

    If the variance of a join is below the resolution of the grid, the variance is added
    to the variance of the next join, which a larger group shares. This addition only
    increases covariances.
    """
    of, top = _covariances(tree, by_gap, n_b)
    following = jnp.append(of[1:], top)
    # The spacing of a leaf's grid would be 0 for a variance of 0. A larger variance
    # gives a valid bound.
    leaf = jnp.maximum(by_gap[0] - of[0], 1e-9 * by_gap[0])
    law = spread.lognormal(leaf, tail, n)

    def join(
        k: jax.Array, x: tuple[spread.Law, jax.Array]
    ) -> tuple[spread.Law, jax.Array]:
        law, rest = x
        rest = rest + of[k] - following[k]
        return _multiply_lognormal(spread.double(law, tail), rest, tail)

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
    """An estimate of the bound that a tree of positions gives, f[], to compare trees.

    The estimate uses a coarse grid. by_gap and n_b are as for `ratio`. For one epoch,
    the estimate approximates ε(δ). For several epochs, the estimate is the sum of the
    Kullback-Leibler divergences in both directions for one epoch. The divergence of the
    whole run is this sum times the number of epochs.
    """
    tail = 1e-4 * delta
    law, variance = ratio(tree, by_gap, n_b, tail, _COARSE)
    law, _ = _multiply_lognormal(law, variance, tail)
    log = law.grid.log(_COARSE)

    def of_one() -> jax.Array:
        return spread.epsilon(law, delta)

    def of_each() -> jax.Array:
        # KL(P‖Q) + KL(Q‖P), which is E_Q (L − 1) log L.
        return jnp.sum(law.masses.mass * jnp.expm1(log) * log)

    return jax.lax.cond(num_epochs > 1, of_each, of_one)


def best(
    by_gap: jax.Array, n_b: jax.Array, delta: jax.Array, num_epochs: jax.Array
) -> Tree:
    """The tree of positions with the least estimate of the privacy loss of a run.

    Positions are the n_b steps of an epoch, which form a circle. by_gap has the
    covariance of two positions by their distance, divided by the square of the noise
    multiplier. The run has num_epochs independent epochs. Any tree gives a valid bound,
    so that an estimate is sufficient to choose a tree.
    """
    by_gap, delta = jax.lax.stop_gradient((by_gap, delta))
    trees = candidates(by_gap, n_b)

    def estimate(tree: Tree) -> jax.Array:
        about = jax.lax.cond(
            tree.copies > 0,  # the tree fits into an epoch
            lambda: _estimate(tree, by_gap, n_b, delta, num_epochs),
            lambda: jnp.full((), jnp.inf),
        )
        return jnp.where(jnp.isnan(about), jnp.inf, about)

    about = jax.lax.map(estimate, trees)
    # The first tree has no joins and always fits. argmin is not used, since JAX lowers
    # argmin under the caller's configuration, which may have no float64.
    place = np.arange(about.size)
    first = jnp.min(jnp.where(about <= jnp.min(about), place, about.size - 1))
    return jax.tree.map(lambda x: x[first], trees)
