"""A chain of places, on which neighbours have most in common and others little.

Places along a line, X_{i+1} = ρ X_i + noise: a Gaussian chain has the covariances
a ρ^d, which with what all places share are above those by gap (docs/amplification.md).
The law of its ratio is computed from place to place: of the chain's state, on a few
points, and of the sum so far, on many. States are rounded at random to the points
around them, such that their mean stays; so are sums.

The line is the circle of an epoch but for a few places in one gap, across which what
all places share is enough.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import SMALL, ULP
from dpjax.accounting._numerics.convex_order.grid import NODES, OFF, Grid, normal
from dpjax.accounting._numerics.pld.composition import epsilon_of
from dpjax.accounting._numerics.pld.pairs import DiscreteLosses, tail_quantile

_STATES = 64  # they add 1/3 % to the variance of independent places
_SUMS = 2048
MOST_PLACES = 2_000  # the time grows with them
_LARGEST = 12.0  # the ε beyond which even points of L are too far apart near 1


class Chain(NamedTuple):
    """Covariances κ + a ρ^d of places d apart on a line.

    Attributes:
      places: how many there are, f[].
      shared: κ, f[].
      variance: a, f[].
      decay: ρ, f[].
    """

    places: jax.Array
    shared: jax.Array
    variance: jax.Array
    decay: jax.Array


class Moved(NamedTuple):
    """Where N(centre, variance) goes when it is rounded to the states.

    Attributes:
      mass: on each state, f[m].
      below: what was below the first one, f[].
      excess: E e^y of what was above the last one, f[].
    """

    mass: jax.Array
    below: jax.Array
    excess: jax.Array


def _log_square(chain: Chain, most: int = MOST_PLACES) -> jax.Array:
    """Log E L², the log of the mean of e^{K′} over pairs of at most so many places."""
    lag = np.arange(float(most))
    pairs = np.where(lag > 0, 2.0, 1.0) * jnp.maximum(chain.places - lag, 0.0)
    common = chain.shared + chain.variance * chain.decay**lag
    total = jax.scipy.special.logsumexp(common, b=pairs)
    return total - 2 * jnp.log(chain.places)


def best(by_gap: jax.Array, n_b: jax.Array) -> Chain:
    """The chain with the least E L², of all gaps around the circle of n_b places.

    Of gaps that it does not have, by_gap has zeros.
    """
    apart = np.arange(1, by_gap.size)
    # Across the gap κ = K_r is enough. Within a line, K_d <= κ + a ρ^d for d < r.
    shared, top = by_gap[1:], by_gap[0]
    variance = top - shared
    over = by_gap[None, 1:] - shared[:, None]
    felt = (apart[None] < apart[:, None]) & (over > 0)
    share = jnp.where(felt, over, 1.0) / jnp.where(felt, variance[:, None], 1.0)
    log_decay = jnp.where(felt, jnp.log(share) / apart[None], -jnp.inf)
    # A ratio, which the noise does not change.
    decay = jax.lax.stop_gradient(jnp.exp(jnp.max(log_decay, axis=1)))
    decay = decay * (1 + 16 * ULP)
    places = jnp.maximum(n_b - apart + 1.0, 1.0)
    chains = Chain(places, shared, variance, decay)
    fixed = jax.lax.stop_gradient(chains)
    square = jax.vmap(lambda chain: _log_square(chain, 2 * by_gap.size))(fixed)
    square = jnp.where(apart <= n_b // 2, square, jnp.inf)
    # No argmin: one is lowered by the caller's configuration, to what has no float64.
    first = jnp.min(jnp.where(square <= jnp.min(square), apart, by_gap.size))
    return jax.tree.map(lambda x: jnp.sum(jnp.where(apart == first, x, 0.0)), chains)


def _round_to_neighbours(centre: jax.Array, variance: jax.Array, states: Grid) -> Moved:
    """To both neighbouring states, the mean kept; beyond the last one to that."""
    start = states.log(1)[0] - centre - variance / 2
    law = normal(variance, start, _STATES - 1, states.spacing)
    mass, below, above = (x[0] for x in law)
    down, up = jnp.sum(mass * (1 - NODES), 0), jnp.sum(mass * NODES, 0)
    mass = jnp.pad(down, (0, 1)) + jnp.pad(up, (1, 0))
    excess = jnp.exp(centre + variance / 2) * law.above[1]
    return Moved(mass.at[0].add(below).at[-1].add(above), below, excess)


def _states(chain: Chain, tail: jax.Array) -> Grid:
    """Points beyond which there is about tail of Q, and of P."""
    deviation = jnp.sqrt(chain.variance)
    low = deviation * tail_quantile(tail / chain.places)
    high = chain.variance + deviation * tail_quantile(tail * (1 - chain.decay))
    spacing = (low + high) / (_STATES - 2)
    return jax.lax.stop_gradient(Grid(jnp.floor(-low / spacing), spacing))


class Law(NamedTuple):
    """Of L on even points from 0 on, from above.

    Attributes:
      mass: Q's at each point, f[n].
      below: Q's that left the states below, f[].
      lost: P's beyond the last point or the last state, f[].
    """

    mass: jax.Array
    below: jax.Array
    lost: jax.Array


def _law(chain: Chain, states: Grid, spacing: jax.Array) -> Law:
    """From place to place: on the states, f[m], and the sum so far, f[m, n]."""
    places, _, variance, decay = chain
    step = variance * (1 - decay) * (1 + decay)
    x = states.log(_STATES)
    # The first place, and then the next one from each state.
    centres = jnp.append(0.0, decay * x)
    variances = jnp.append(variance, jnp.broadcast_to(step, x.shape))
    moves = jax.vmap(lambda c, v: _round_to_neighbours(c, v, states))(
        centres, variances
    )
    first, move = (
        jax.tree.map(lambda x, i=i: x[i], moves) for i in (0, slice(1, None))
    )
    # What a place adds to L in each state, in points of the sum.
    jump = jnp.exp(x - variance / 2) / (places * spacing)
    whole = jax.lax.stop_gradient(jnp.clip(jnp.floor(jump), 0, _SUMS).astype(int))
    part = (jnp.minimum(jump, _SUMS) - whole)[:, None]
    point = np.arange(_SUMS)[None]
    beyond = jnp.maximum(point - (_SUMS - 1.0) + jump[:, None], 0.0) * spacing

    def added(mass: jax.Array) -> jax.Array:
        """The sum with its next place, on both neighbouring points, up to the last."""
        wide = jnp.pad(mass, ((0, 0), (_SUMS, 0)))
        moved = jax.vmap(
            lambda row, n: jax.lax.dynamic_slice(row, (_SUMS - n,), (_SUMS,))
        )(wide, whole)
        ends = jnp.where(point + whole[:, None] >= _SUMS - 1, mass, 0.0)
        moved = moved.at[:, -1].set(0.0)
        moved = (1 - part) * moved + part * jnp.roll(moved, 1, axis=1)
        return moved.at[:, -1].add(jnp.sum(ends, axis=1))

    def place(_: int, now: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        mass, state, below, excess, lost = now
        lost = lost + jnp.sum(mass * beyond)
        mass = jnp.matmul(move.mass.T, added(mass), precision="highest")
        below, excess = below + state @ move.below, excess + state @ move.excess
        return mass, state @ move.mass, below, excess, lost

    start = jnp.zeros((_STATES, _SUMS)).at[:, 0].set(first.mass)
    now = start, first.mass, first.below, first.excess, jnp.zeros(())
    mass, _, below, excess, lost = jax.lax.fori_loop(0, places.astype(int), place, now)
    # A state above the last one adds at most θ_j e^{−aθ_j²/2} (e^y − e^top) / n to
    # place i + j of n, with θ_j = ρ^j.
    theta = decay ** np.arange(float(MOST_PLACES))
    lost = lost + excess * jnp.sum(theta * jnp.exp(-variance * theta**2 / 2)) / places
    return Law(jnp.sum(mass, axis=0), below, lost)


def _losses(chain: Chain, states: Grid, limits: jax.Array) -> DiscreteLosses:
    """Of L but for what all share.

    The limits are about the largest L to tell in each order of the data sets, f[2].
    """
    places, decay = chain.places, chain.decay
    spacing = jax.lax.stop_gradient(limits) / (_SUMS - 1)
    law = jax.lax.map(lambda h: _law(chain, states, h), spacing)
    # Rounding a state by at most h multiplies the mean of e^{θX} by 1 to e^{θ²h²/8}
    # (Hoeffding's lemma), at θ = ρ^j for all states before.
    high = states.spacing**2 / (8 * (1 - decay) * (1 + decay))
    log = jnp.log(spacing[:, None] * np.arange(1.0, _SUMS)[None])
    log_mass = jnp.log(jnp.maximum(law.mass[:, 1:], SMALL))
    # A sum over states for each place, and Gauss's rule.
    error = places * (ULP * (2 * _STATES + 64) + 1e-12)
    return DiscreteLosses(
        jnp.stack([log[0], high - log[1]]) + OFF,
        jnp.stack([log_mass[0] + log[0], log_mass[1]]),
        jnp.stack([law.lost[0], law.mass[1, 0] + law.below[1]]),
        jax.lax.stop_gradient(error),
    )


def _limits(
    chain: Chain, states: Grid, epsilon: jax.Array, num_epochs: jax.Array
) -> jax.Array:
    """About the largest L to tell in each order, f[2].

    One ratio counts up to e^ε in one order and up to e^{−ε} in the other. A factor of
    many counts as far as it goes.
    """
    of_one = jnp.exp(epsilon * np.array([1, -0.5]) + 4 * jnp.sqrt(chain.shared))
    square = _log_square(chain._replace(shared=jnp.zeros(())))
    top = jnp.exp(states.log(_STATES)[-1] - chain.variance / 2) / chain.places
    of_each = 1 + 10 * jnp.sqrt(jnp.expm1(square)) + 2 * top
    return jnp.where(num_epochs > 1, of_each, of_one)


def smallest_epsilon(
    tree: DiscreteLosses,
    variance: jax.Array,
    chain: Chain,
    shared: jax.Array,
    delta: jax.Array,
    tail: jax.Array,
    num_epochs: jax.Array,
) -> jax.Array:
    """ε(δ) of a tree's ratio, or of a chain's where that is less.

    Both for so many independent epochs, and Gaussian factors: the variance beside the
    tree's, and what is shared beside the chain's.
    """
    states = _states(chain, tail)
    step = chain.variance * (1 - chain.decay) * (1 + chain.decay)
    # Gauss's rule is for cells of at most one standard deviation.
    usable = (states.spacing > 0) & (states.spacing**2 <= step) & (chain.places > 1)
    missing = ((0, 0), (0, _SUMS - 1 - tree.loss.shape[1]))
    tree = tree._replace(
        loss=jnp.pad(tree.loss, missing),
        log_mass=jnp.pad(tree.log_mass, missing, constant_values=-np.inf),
    )

    gaussian = num_epochs * chain.shared + shared
    # Steps that are looked at apart must have a mean of one.
    usable &= (num_epochs <= 1) | (gaussian > 0)

    def of_chain(found: jax.Array) -> tuple[DiscreteLosses, jax.Array]:
        losses = _losses(chain, states, _limits(chain, states, found, num_epochs))
        # Rounded states make the mean of L more than one: what an epoch loses is that
        # many times as much beside the others.
        mean = jnp.maximum(jnp.sum(jnp.exp(losses.log_mass), axis=1), 1.0)
        lost = losses.lost * mean ** (num_epochs - 1)
        return losses._replace(lost=lost), gaussian

    def less(found: jax.Array, again: jax.Array) -> tuple[jax.Array, None]:
        # One program for both: the tree's ε says how far the chain's ratio is needed.
        losses, beside = jax.lax.cond(
            again & usable & (found < _LARGEST),
            of_chain,
            lambda _: (tree, variance),
            found,
        )
        now = epsilon_of([(losses, num_epochs)], beside, delta)
        return jnp.where(now < found, now, found), None

    return jax.lax.scan(less, jnp.full((), jnp.inf), jnp.array([False, True]))[0]
