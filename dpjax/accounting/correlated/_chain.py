"""A Gaussian chain with upper bounds on the covariances of an example's positions.

A position is the step of an epoch in which an example takes part. A pattern is the set
of all steps in which the example takes part. Let L be the likelihood ratio of the
outputs with and without the example. L is the mean of exp(Z_i − Var Z_i / 2) over all
positions i, for a Gaussian variable Z_i of the pattern with position i
(docs/amplification.md). An upper bound on the covariance of Z_i and Z_j, for positions
d steps apart, is κ + a ρ^d. A chain X_{i+1} = ρ X_i + noise has the covariance a ρ^d at
distance d, where a is the variance of X_i. A variable of variance κ that all positions
share adds the covariance κ. The algorithm goes through the positions, and computes the
joint distribution of the state X_i and the partial sum of L. The grid of states is
coarse, and the grid of partial sums is fine. States and partial sums are rounded at
random to one of the two neighbouring grid points, so that their means do not change.

The positions of an epoch form a circle. To obtain a sequence with two ends, r − 1
neighbouring positions are removed. κ is an upper bound on the covariance of any two
positions whose distance around the circle is r or more. These include all pairs of
positions whose shorter way around the circle crosses the removed positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import SMALL, ULP
from dpjax.accounting._numerics.convex_order.grid import LOG_ERROR, NODES, Grid, normal
from dpjax.accounting._numerics.pld.composition import epsilon_of
from dpjax.accounting._numerics.pld.pairs import DiscreteLosses, tail_quantile

# The number of states. Rounding to the states adds 1/3 % to the variance of independent
# positions.
_STATES = 64
_SUMS = 2048  # points of the grid for the partial sum of L
MAX_POSITIONS = 2_000  # the running time grows with the number of positions
# Above this ε an evenly spaced grid that reaches e^ε is too coarse near L = 1.
_MAX_TREE_EPSILON = 12.0
# The chain's bound is computed if the chain has fewer than _FEW_POSITIONS positions, or
# if its log E L² is below _MAX_RATIO times the tree's log E L². Above this
# multiple, the chain gave a smaller ε in none of about 100 random runs.
_FEW_POSITIONS, _MAX_RATIO = 8, 0.995


class Chain(NamedTuple):
    """Gaussian variables for consecutive steps of an epoch, with covariance κ + a ρ^d.

    The steps are those in which an example may take part, here called positions. There
    is one variable for each position, and d is the distance of two positions. A chain
    X_{i+1} = ρ X_i + noise has the covariance a ρ^d, and a variable that all positions
    share adds the covariance κ.

    Attributes:
      size: the number of positions, f[].
      shared: κ, the variance of the shared variable, f[].
      variance: a, the variance of each X_i, f[].
      decay: ρ, f[].
    """

    size: jax.Array
    shared: jax.Array
    variance: jax.Array
    decay: jax.Array


class Rounded(NamedTuple):
    """The distribution of a normal variable y after random rounding to a grid.

    y is a value of a Gaussian chain: the first value, or the value X_{i+1} that follows
    a given value X_i (see `Chain`). The points of the grid are called states. The
    function `_round_to_neighbours` computes the distribution.

    Attributes:
      mass: the probability of each state after rounding, f[m].
      below: the probability that y is below the first state, f[].
      excess: the mean of e^y 1[y > the last state], f[].
    """

    mass: jax.Array
    below: jax.Array
    excess: jax.Array


def _log_square(chain: Chain, max_positions: int = MAX_POSITIONS) -> jax.Array:
    """The log of the second moment E L² of a likelihood ratio L, for a Gaussian chain.

    L is the likelihood ratio of the outputs with and without an example that picks a
    random position of the chain. E L² is the mean of e^K over all ordered pairs of
    positions, where K is the covariance κ + a ρ^d of two positions at distance d.
    `max_positions` is a static upper bound on the number of positions.
    """
    lags = np.arange(float(max_positions))
    num_pairs = np.where(lags > 0, 2.0, 1.0) * jnp.maximum(chain.size - lags, 0.0)
    covariances = chain.shared + chain.variance * chain.decay**lags
    total = jax.scipy.special.logsumexp(covariances, b=num_pairs)
    return total - 2 * jnp.log(chain.size)


def best(by_gap: jax.Array, n_b: jax.Array) -> Chain:
    """The Gaussian chain with the least second moment E L² of its likelihood ratio L.

    The covariances of the chain are upper bounds on the entries of `by_gap`. L compares
    the outputs with and without an example that picks a random position of the chain.
    The n_b steps of an epoch form a circle. A chain is what remains of this circle if
    r − 1 neighbouring steps are removed. The remaining n_b − r + 1 steps are the
    positions of the chain. The function compares the chains for all r from 1 to
    n_b // 2.

    Args:
      by_gap: for each distance d around the circle, an upper bound on the covariance of
        any two positions at distance d or more, divided by the square of the noise
        multiplier, f[m]. So the entries never increase with d. Entries beyond the
        largest distance are zero.
      n_b: the number of steps in an epoch, i[].
    """
    lags = np.arange(1, by_gap.size)
    # κ = K_r bounds the covariance of positions at distance r or more. Positions at a
    # distance d < r need K_d <= κ + a ρ^d. The chain has one entry for each r.
    shared, largest = by_gap[1:], by_gap[0]
    variance = largest - shared
    excess = by_gap[None, 1:] - shared[:, None]
    active = (lags[None] < lags[:, None]) & (excess > 0)
    ratio = jnp.where(active, excess, 1.0) / jnp.where(active, variance[:, None], 1.0)
    log_decay = jnp.where(active, jnp.log(ratio) / lags[None], -jnp.inf)
    # The noise multiplier cancels in this ratio of covariances, so that the derivative
    # with respect to the noise multiplier is zero.
    decay = jax.lax.stop_gradient(jnp.exp(jnp.max(log_decay, axis=1)))
    decay = decay * (1 + 16 * ULP)
    chains = Chain(jnp.maximum(n_b - lags + 1.0, 1.0), shared, variance, decay)
    fixed = jax.lax.stop_gradient(chains)
    squares = jax.vmap(lambda chain: _log_square(chain, 2 * by_gap.size))(fixed)
    squares = jnp.where(lags <= n_b // 2, squares, jnp.inf)
    # argmin is not used, since JAX lowers argmin under the caller's configuration,
    # which may have no float64.
    first = jnp.min(jnp.where(squares <= jnp.min(squares), lags, by_gap.size))
    return jax.tree.map(lambda x: jnp.sum(jnp.where(lags == first, x, 0.0)), chains)


def _round_to_neighbours(
    centre: jax.Array, variance: jax.Array, states: Grid
) -> Rounded:
    """The distribution N(centre, variance) after random rounding to the grid `states`.

    A value between two states is rounded to one of the two states at random, such that
    the mean does not change. A value below the first state is rounded to the first
    state, and a value above the last state is rounded to the last state.
    """
    # `normal` has mean −variance/2, so that the grid is shifted by the difference.
    start = states.log(1)[0] - centre - variance / 2
    cells, tilted = normal(variance, start, _STATES - 1, states.spacing)
    down, up = jnp.sum(cells.nodes * (1 - NODES), 0), jnp.sum(cells.nodes * NODES, 0)
    mass = jnp.pad(down, (0, 1)) + jnp.pad(up, (1, 0))
    excess = jnp.exp(centre + variance / 2) * tilted.above
    mass = mass.at[0].add(cells.below).at[-1].add(cells.above)
    return Rounded(mass, cells.below, excess)


def _states(chain: Chain, tail: jax.Array) -> Grid:
    """The grid of states, to which the values X_i of a Gaussian chain are rounded.

    Let Q and P be the output distributions without and with the example. Under Q, some
    value is below the grid with a probability of about `tail`. Under P, some value is
    above the grid with a probability of about `tail`.
    """
    deviation = jnp.sqrt(chain.variance)
    low = deviation * tail_quantile(tail / chain.size)
    high = chain.variance + deviation * tail_quantile(tail * (1 - chain.decay))
    spacing = (low + high) / (_STATES - 2)
    return jax.lax.stop_gradient(Grid(jnp.floor(-low / spacing), spacing))


class RatioBound(NamedTuple):
    """An upper bound, in convex order, on the distribution of a likelihood ratio L.

    P and Q are the output distributions with and without an example, and L = dP/dQ. The
    bound is a distribution on evenly spaced points from 0. To compute the bound, the
    values of a Gaussian chain are rounded to a grid of states.

    Attributes:
      mass: the probability of each point of L under Q, f[n].
      below: an upper bound on the probability, under Q, that a value of the chain is
        below the first state, f[].
      decrease: an upper bound on the decrease of the mean of L under Q, f[]. The
        mean decreases because the last point replaces larger values of L, and the last
        state replaces larger values of the chain. Under P, the bound has the mass
        `decrease` at L = ∞.
    """

    mass: jax.Array
    below: jax.Array
    decrease: jax.Array


def _sum_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """The sum of x · y over the last axis, f[m], for matrices f[m, n]."""
    return jnp.einsum("mn,mn->m", x, y, precision="highest")


def _ratio_bound(chain: Chain, states: Grid, spacing: jax.Array) -> RatioBound:
    """An upper bound, in convex order, on the likelihood ratio L of a Gaussian chain.

    L is the mean of exp(X_i − a / 2) over the positions i of the chain, where X_i is
    the chain's value at position i, and a is the variance of X_i. The factor of L that
    comes from the variable that all positions share is left out. `states` is the grid
    of the chain's values, and `spacing` is the spacing of the grid of L. The loop over
    positions carries the probability of each state, f[m], and of each pair of a state
    and a partial sum of L, f[m, n].
    """
    size, _, variance, decay = chain
    step = variance * (1 - decay) * (1 + decay)
    x = states.log(_STATES)
    # The first entry is the distribution at the first position. Entry i + 1 is the
    # distribution at the next position if the value at a position is state i.
    centres = jnp.append(0.0, decay * x)
    variances = jnp.append(variance, jnp.broadcast_to(step, x.shape))
    round_each = jax.vmap(_round_to_neighbours, (0, 0, None))
    transitions = round_each(centres, variances, states)
    initial = jax.tree.map(lambda x: x[0], transitions)
    transition = jax.tree.map(lambda x: x[1:], transitions)
    # The term that a position adds to L in each state, in spacings of the grid of L.
    # The mass moves by a whole number of points, and is split linearly between two
    # neighbouring points.
    increment = jnp.exp(x - variance / 2) / (size * spacing)
    point, last = np.arange(_SUMS)[None], _SUMS - 1
    shift = jax.lax.stop_gradient(jnp.clip(jnp.floor(increment), 0, last).astype(int))
    fraction = (jnp.minimum(increment, _SUMS) - shift)[:, None]
    overshoot = jnp.maximum(point - last + increment[:, None], 0.0) * spacing
    # The fraction of each mass that moves to the last point. Mass that would move
    # beyond the last point moves to the last point as well.
    gap = last - point - shift[:, None]
    to_last = jnp.where(gap <= 0, 1.0, jnp.where(gap == 1, fraction, 0.0))

    def add_position(mass: jax.Array) -> jax.Array:
        """Add the term of one more position to the partial sum of L.

        `mass`, f[m, n], has the probability of each pair of a state and a partial sum.
        The result has these probabilities after the addition.
        """
        padded = jnp.pad(mass, ((0, 0), (_SUMS, 0)))
        shifted = jax.vmap(
            lambda row, n: jax.lax.dynamic_slice(row, (last - n,), (_SUMS,))
        )(padded, shift)
        shifted = (1 - fraction) * shifted[:, 1:] + fraction * shifted[:, :-1]
        last_point = _sum_products(mass, to_last)
        return jnp.concatenate([shifted, last_point[:, None]], axis=1)

    def visit(_: int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        mass, state, below, excess, decrease = carry
        decrease = decrease + jnp.sum(_sum_products(mass, overshoot))
        mass = jnp.matmul(transition.mass.T, add_position(mass), precision="highest")
        below = below + state @ transition.below
        excess = excess + state @ transition.excess
        return mass, state @ transition.mass, below, excess, decrease

    start = jnp.zeros((_STATES, _SUMS)).at[:, 0].set(initial.mass)
    carry = start, initial.mass, initial.below, initial.excess, jnp.zeros(())
    carry = jax.lax.fori_loop(0, size.astype(int), visit, carry)
    mass, _, below, excess, decrease = carry
    # A value y of position i above the last state, `top`, is replaced by `top`. The
    # replacement reduces the mean of the term of position i + j by at most
    # θ_j e^{−aθ_j²/2} (e^y − e^top) / n, with θ_j = ρ^j and n positions.
    theta = decay ** np.arange(float(MAX_POSITIONS))
    decrease += excess * jnp.sum(theta * jnp.exp(-variance * theta**2 / 2)) / size
    return RatioBound(jnp.sum(mass, axis=0), below, decrease)


def _losses(chain: Chain, states: Grid, limits: jax.Array) -> DiscreteLosses:
    """The privacy losses of a Gaussian chain, for both orders of the two data sets.

    L is the mean of exp(X_i − a / 2) over the positions i of the chain, where X_i is
    the chain's value at position i, and a is the variance of X_i. The factor of L that
    comes from the variable that all positions share is left out. The losses are log L
    in the first order and −log L in the second order. `limits`, f[2], has the last
    point of the grid of L for each order.
    """
    size, decay = chain.size, chain.decay
    spacing = jax.lax.stop_gradient(limits) / (_SUMS - 1)
    bounds = jax.lax.map(lambda h: _ratio_bound(chain, states, h), spacing)
    # Rounding to a grid of spacing h multiplies the mean of e^{θX} by 1 to e^{θ²h²/8}
    # (Hoeffding's lemma). The value of a position enters the value of the j-th position
    # after it with the factor θ = ρ^j.
    high = states.spacing**2 / (8 * (1 - decay) * (1 + decay))
    log = jnp.log(spacing[:, None] * np.arange(1.0, _SUMS)[None])
    log_mass = jnp.log(jnp.maximum(bounds.mass[:, 1:], SMALL))
    # A bound on rounding errors: one sum over states for each position. Gauss's rule
    # for the normal masses has an error of at most 1e-12 (`convex_order.grid`).
    error = size * (ULP * (2 * _STATES + 64) + 1e-12)
    return DiscreteLosses(
        jnp.stack([log[0], high - log[1]]) + LOG_ERROR,
        jnp.stack([log_mass[0] + log[0], log_mass[1]]),
        jnp.stack([bounds.decrease[0], bounds.mass[1, 0] + bounds.below[1]]),
        jax.lax.stop_gradient(error),
    )


def _limits(
    chain: Chain, states: Grid, epsilon: jax.Array, num_epochs: jax.Array
) -> jax.Array:
    """An estimate of the largest likelihood ratio L that δ(ε) depends on, f[2].

    The result has one estimate for each order of the two data sets. L is the likelihood
    ratio of a Gaussian chain in one epoch, without the factor that all positions share.
    L has mean 1 without the example, so that the values of L below a limit determine
    the mean of L above the limit. For a run of one epoch, δ(ε) therefore depends only
    on the values of L below e^ε in the first order, and below e^{−ε} in the second
    order. The estimate is this limit times a margin, which allows for the shared
    factor. For several epochs, L is one factor of a product, and δ(ε) depends on all
    values of L. The estimate is then the mean of L, plus ten standard deviations and a
    margin.
    """
    # The factor that all positions share multiplies L. As margins, four standard
    # deviations of the factor's log are added, and the second order has −ε/2 in place
    # of −ε.
    single = jnp.exp(epsilon * np.array([1, -0.5]) + 4 * jnp.sqrt(chain.shared))
    log_square = _log_square(chain._replace(shared=jnp.zeros(())))
    largest = jnp.exp(states.log(_STATES)[-1] - chain.variance / 2) / chain.size
    repeated = 1 + 10 * jnp.sqrt(jnp.expm1(log_square)) + 2 * largest
    return jnp.where(num_epochs > 1, repeated, single)


def smaller_epsilon(
    tree_epsilon: jax.Array,
    tree_square: jax.Array,
    chain: Chain,
    shared: jax.Array,
    delta: jax.Array,
    tail: jax.Array,
    num_epochs: jax.Array,
) -> jax.Array:
    """The smaller of two upper bounds on the ε of a run with random positions, f[].

    A position is the step of an epoch in which an example takes part. Each position has
    a Gaussian variable in the exponent of the likelihood ratio. Both bounds replace the
    covariances of these variables by larger covariances: the covariances of a tree
    (`_trees`) or of a Gaussian chain. The function composes the likelihood ratio of the
    chain over the epochs, without the factor that all positions share. The shared
    factors of all epochs are one Gaussian mechanism with μ² = num_epochs · chain.shared
    + shared.

    Args:
      tree_epsilon: the bound from the tree, f[].
      tree_square: log E L² for the tree's likelihood ratio L, f[]. The function
        computes the chain's bound only if the chain has very few positions or a smaller
        log E L².
      chain: the chain, with covariances divided by σ², where σ is the noise multiplier.
      shared: the covariance across epochs, divided by σ², f[].
      delta: δ, f[].
      tail: the probability of values of the chain beyond each end of their grid, f[].
      num_epochs: the number of independent epochs, f[].
    """
    states = _states(chain, tail)
    step = chain.variance * (1 - chain.decay) * (1 + chain.decay)
    # The error of Gauss's rule is bounded for cells of at most one standard deviation.
    usable = (states.spacing > 0) & (states.spacing**2 <= step) & (chain.size > 1)
    gaussian = num_epochs * chain.shared + shared
    # Without a Gaussian part, epochs may be combined by a union bound, which assumes
    # that L has mean one. Rounding to states increases the mean of L.
    usable &= (num_epochs <= 1) | (gaussian > 0)
    # Without a smaller log E L², the chain's coarse grids increase ε by more than the
    # chain's covariances reduce ε.
    better = _log_square(chain) < _MAX_RATIO * tree_square
    usable &= (chain.size < _FEW_POSITIONS) | better

    def chain_epsilon() -> jax.Array:
        # The tree's ε determines the last point of the chain's grid of L.
        limits = _limits(chain, states, tree_epsilon, num_epochs)
        losses = _losses(chain, states, limits)
        # Rounding to states makes the mean of L larger than one. The mass truncated in
        # one epoch is therefore multiplied by the means of all other epochs.
        mean = jnp.maximum(jnp.sum(jnp.exp(losses.log_mass), axis=1), 1.0)
        losses = losses._replace(inf_mass=losses.inf_mass * mean ** (num_epochs - 1))
        return epsilon_of([(losses, num_epochs)], gaussian, delta)

    helps = usable & (tree_epsilon < _MAX_TREE_EPSILON)
    value = jax.lax.cond(helps, chain_epsilon, lambda: tree_epsilon)
    return jnp.where(value < tree_epsilon, value, tree_epsilon)
