"""Trees of positions, with upper bounds on the covariances of an example's positions.

A position is the step of an epoch in which an example takes part. The positions are the
leaves of a tree. Two positions are joined into a pair, two pairs into a group of four,
and so on. Each join leaves a gap between its two parts. The n_b steps of an epoch form
a circle, in which the first step follows the last step. The final group is repeated
around this circle. Positions in different parts of a join are at least the join's gap
apart, so that their covariance is at most the covariance at that gap
(docs/amplification.md). Let L be the likelihood ratio of the outputs with and without
an example that has a random position of the tree. The distribution of L is computed
from the leaves upwards. Each join computes the mean of two independent copies, and
multiplies the mean by a lognormal factor that both copies share. The covariance of two
positions is the covariance of the Gaussian variables in the logs of the likelihood
ratios of these positions.

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
_DECAYS = (0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
# Candidates for the number of first joins in which the covariance does not fall.
_FLAT_JOINS = (0, 1, 2)
_MAX_JOINS = 7
_COARSE_POINTS = 128  # the number of grid points for the comparison of trees


class Tree(NamedTuple):
    """A tree that joins positions, and its copies around the circle of an epoch.

    A position is a step of the epoch in which an example may take part. The steps of an
    epoch form a circle, in which the first step follows the last step. Join j, counted
    from 0, combines two parts of 2^j positions each.

    Attributes:
      gaps: the distance between the two parts of each join, i[m]. Entries from index
        `joins` on are unused.
      joins: the number of joins, i[].
      copies: the number of copies of the tree around the circle, i[]; 0 if no copy
        fits.
      copy_gap: the distance between two neighbouring copies, or the last join's gap if
        there is at most one copy, i[].
    """

    gaps: jax.Array
    joins: jax.Array
    copies: jax.Array
    copy_gap: jax.Array


def candidates(by_gap: jax.Array, n_b: jax.Array) -> Tree:
    """Trees of positions whose covariances fall by about equal factors between joins.

    Positions are steps of an epoch. The first join of a tree combines positions into
    pairs, the second join combines pairs into groups of four, and so on. The covariance
    of a join is the covariance of two positions in different parts of one group. In
    some trees, the first two or three joins have the same covariance. The trees are
    stacked along a new first axis.

    Args:
      by_gap: for each distance d around the circle that the steps of an epoch form, an
        upper bound on the covariance of any two positions at distance d or more, f[m].
        Entries beyond the largest distance are zero.
      n_b: the number of steps in an epoch, i[].
    """
    # Settings that differ only in unused joins give the same tree. Such settings have
    # equal tuples, so that the set contains each tree only once.
    settings = {
        (joins, min(flat, max(joins - 1, 0)), decay if joins > flat + 1 else 0.5)
        for joins in range(_MAX_JOINS + 1)
        for flat in _FLAT_JOINS
        for decay in _DECAYS
    }
    joins, flat, decay = np.array(sorted(settings)).T

    def build_tree(decay: jax.Array, flat: jax.Array, joins: jax.Array) -> Tree:
        level = jnp.arange(_MAX_JOINS + 1)
        adjacent_covariance = by_gap[jnp.minimum(1, n_b // 2)]
        targets = adjacent_covariance * decay ** jnp.maximum(level - flat, 0.0)
        # The least gap whose covariance is at most the target covariance, if there is
        # such a gap. The tolerance covers rounding errors, so that equal covariances
        # are accepted.
        gap = 1 + jnp.sum(by_gap[None, 1:] > targets[:, None] * (1 + 1e-9), axis=1)
        gaps, length = gap[:-1], jnp.ones_like(gap[0])
        for k in range(_MAX_JOINS):
            length = jnp.where(k < joins, 2 * length + gaps[k] - 1, length)
        copies = n_b // (length + gap[joins] - 1)
        copy_gap = n_b // jnp.maximum(copies, 1) - length + 1
        last_gap = gaps[jnp.maximum(joins - 1, 0)]
        return Tree(gaps, joins, copies, jnp.where(copies > 1, copy_gap, last_gap))

    return jax.lax.stop_gradient(jax.vmap(build_tree)(decay, flat, joins.astype(int)))


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
    resolved = variance >= law.grid.spacing**2
    safe = jnp.where(resolved, variance, 1.0)
    law = jax.lax.cond(
        resolved, lambda x: spread.times_lognormal(x, safe, tail), lambda x: x, law
    )
    return law, jnp.where(resolved, 0.0, variance)


def _covariances(
    tree: Tree, by_gap: jax.Array, n_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Upper bounds on the covariances of an example's positions, from a tree.

    A position is a step of an epoch in which the example may take part. Each position
    has a Gaussian variable, and the covariance of two positions is the covariance of
    their variables. Each join of the tree combines two sets of positions, its parts.
    The bounds are the entries of `by_gap` at the gap between the two parts of a join,
    and at the gap between two copies of the tree.

    Args:
      tree: the tree of positions, with copies around the circle that the steps of an
        epoch form.
      by_gap: for each distance d around this circle, an upper bound on the covariance
        of any two positions at distance d or more.
      n_b: the number of steps in an epoch, i[].

    Returns:
      For each join, the covariance of positions in different parts of the join, f[m];
      and the covariance of positions in different copies of the tree, f[]. The entries
      of unused joins are equal to the second result. For a single copy of a tree
      without joins, the second result is by_gap[0].
    """
    farthest = n_b // 2
    by_join = by_gap[jnp.minimum(tree.gaps, farthest)]
    across = by_gap[jnp.minimum(tree.copy_gap, farthest)]
    across = jnp.where((tree.joins == 0) & (tree.copies == 1), by_gap[0], across)
    return jnp.where(jnp.arange(by_join.size) < tree.joins, by_join, across), across


def log_square(tree: Tree, by_gap: jax.Array, n_b: jax.Array) -> jax.Array:
    """The log of the second moment E L² of the likelihood ratio L for a tree.

    A position is a step of an epoch in which an example may take part. L is the
    likelihood ratio of the outputs with and without an example that takes part at a
    random position of the tree. L is the mean of exp(X_i − Var X_i / 2) over the
    positions i, for a Gaussian vector X with the covariances of the tree. E L² is
    therefore the mean of e^{Cov(X_i, X_j)} over all ordered pairs (i, j) of positions,
    including i = j.

    Args:
      tree: the tree of positions.
      by_gap: for each distance d around the circle that the steps of an epoch form, an
        upper bound on the covariance of any two positions at distance d or more,
        divided by the square of the noise multiplier, f[m].
      n_b: the number of steps in an epoch, i[].
    """
    by_join, across = _covariances(tree, by_gap, n_b)
    size = jnp.exp2(1.0 * tree.joins)
    level = np.arange(by_join.size)
    inner_pairs = jnp.where(level < tree.joins, np.exp2(level), 0.0)
    other_pairs = jnp.stack([jnp.ones_like(size), (tree.copies - 1) * size])
    num_pairs = jnp.concatenate([other_pairs, inner_pairs])
    covariances = jnp.concatenate([jnp.stack([by_gap[0], across]), by_join])
    total = jax.scipy.special.logsumexp(covariances, b=num_pairs)
    return total - jnp.log(size * tree.copies)


def ratio(
    tree: Tree, by_gap: jax.Array, n_b: jax.Array, tail: jax.Array, n: int
) -> tuple[spread.Law, jax.Array]:
    """The likelihood ratio of a tree of positions, as a product of two random factors.

    A position is a step of an epoch in which an example may take part. The likelihood
    ratio compares the outputs with and without an example that takes part at a random
    position of the tree. The first result is the distribution of the first factor, on a
    grid of n points that leaves out a probability of about `tail`. The second factor is
    lognormal, and a Gaussian mechanism accounts for this factor. The second result is
    the variance of the log of the second factor. by_gap has, for each distance around
    the circle that the n_b steps of an epoch form, an upper bound on the covariance of
    positions at this distance or more, divided by the square of the noise multiplier.

    Each join of the tree combines two sets of positions, and multiplies the ratio by a
    lognormal factor, which all positions of both sets share. If the standard deviation
    of this factor's log is below the spacing of the grid, the ratio is not multiplied
    by the factor. The variance of the factor's log is then added to that of the next
    join's factor, which more positions share. This addition only increases covariances.
    """
    by_join, across = _covariances(tree, by_gap, n_b)
    following = jnp.append(by_join[1:], across)
    # The spacing of a leaf's grid would be 0 for a variance of 0. A larger variance
    # gives a valid bound.
    leaf = jnp.maximum(by_gap[0] - by_join[0], 1e-9 * by_gap[0])
    law = spread.lognormal(leaf, tail, n)

    def add_join(
        k: jax.Array, carry: tuple[spread.Law, jax.Array]
    ) -> tuple[spread.Law, jax.Array]:
        law, pending = carry
        pending = pending + by_join[k] - following[k]
        return _multiply_lognormal(spread.double(law, tail), pending, tail)

    start = law, jnp.zeros_like(leaf)
    law, pending = jax.lax.fori_loop(0, tree.joins, add_join, start)
    return spread.mean(law, jnp.maximum(tree.copies, 1), tail), pending + across


def _estimate(
    tree: Tree,
    by_gap: jax.Array,
    n_b: jax.Array,
    delta: jax.Array,
    num_epochs: jax.Array,
) -> jax.Array:
    """Estimate the privacy loss of a tree of positions on a coarse grid, f[].

    A tree joins positions into groups. A position is a step of an epoch in which an
    example may take part. by_gap and n_b are as for `ratio`. If the run has one epoch,
    the result is an estimate of ε at `delta`. If the run has several epochs, the result
    is an estimate of the sum of the Kullback-Leibler divergences in both directions for
    a single epoch. The number of epochs is the same for all trees, so that a single
    epoch is sufficient to compare trees.
    """
    tail = 1e-4 * delta
    law, variance = ratio(tree, by_gap, n_b, tail, _COARSE_POINTS)
    law, _ = _multiply_lognormal(law, variance, tail)
    log_ratios = law.grid.log(_COARSE_POINTS)

    def epsilon() -> jax.Array:
        return spread.epsilon(law, delta)

    def divergence() -> jax.Array:
        # KL(P‖Q) + KL(Q‖P), which is E_Q (L − 1) log L.
        return jnp.sum(law.masses.mass * jnp.expm1(log_ratios) * log_ratios)

    return jax.lax.cond(num_epochs > 1, divergence, epsilon)


def best(
    by_gap: jax.Array, n_b: jax.Array, delta: jax.Array, num_epochs: jax.Array
) -> Tree:
    """The tree of `candidates` with the least estimate of the privacy loss of a run.

    A tree joins positions into groups. Positions are the n_b steps of an epoch, which
    form a circle. by_gap has, for each distance, an upper bound on the covariance of
    positions at this distance or more, divided by the square of the noise multiplier.
    The run has num_epochs independent epochs, and delta is the target δ. Any tree gives
    a valid bound, so that an estimate is sufficient to choose a tree.
    """
    by_gap, delta = jax.lax.stop_gradient((by_gap, delta))
    trees = candidates(by_gap, n_b)

    def estimate(tree: Tree) -> jax.Array:
        value = jax.lax.cond(
            tree.copies > 0,  # the tree fits into an epoch
            lambda: _estimate(tree, by_gap, n_b, delta, num_epochs),
            lambda: jnp.full((), jnp.inf),
        )
        return jnp.where(jnp.isnan(value), jnp.inf, value)

    values = jax.lax.map(estimate, trees)
    # The first tree has no joins and always fits. argmin is not used, since JAX lowers
    # argmin under the caller's configuration, which may have no float64.
    index = np.arange(values.size)
    first = jnp.min(jnp.where(values <= jnp.min(values), index, values.size - 1))
    return jax.tree.map(lambda x: x[first], trees)
