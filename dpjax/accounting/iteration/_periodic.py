"""The minorant of `_minorant` in closed form, for identical steps and cyclic batches.

A *use* is a step whose batch contains the differing example. One of every l steps is a
use, and moves two coupled runs apart by r noise standard deviations. All steps have the
Lipschitz constant c. After the last use, m − 1 steps follow. The sensitivity of a step
is 0 unless the step is a use. The steps from the n-th last use on form n blocks, each
of which begins with a use. Each block has l steps, except for the last block, which has
m steps. If the runs start at distance Δ just after the use before these n uses, another
block of l − 1 steps precedes the n blocks. A block has a rise and a run (see
`_minorant`), and the slope of the block is rise / run.

For c <= 1, the slopes of the blocks between the first and the last block do not
increase. The minorant pools these blocks, and has at most three edges. For c > 1, the
slopes increase. Each block is then an edge of its own, except for the blocks that are
pooled with the initial distance Δ.

The bound on μ is proportional to r if Δ / r is fixed. In this module, distances are
divided by r, and the bounds are on μ² / r². The symbol y is log c. Geometric sums of
powers of c are computed without dividing by 1 − c, so that the sums and their
derivatives are correct at c = 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax.accounting.iteration._minorant import cost
from dpjax.accounting.iteration._setting import Assumed

_Block = tuple[jax.Array, jax.Array]  # rise and run


class Cycle(NamedTuple):
    """The static description of a run.

    Attributes:
      epochs: E, the number of times that each example is used.
      period: l, the number of batches of an epoch.
      reshuffled: whether the order of batches may differ between epochs.
      assumed: the static assumptions. If `assumed.convex` is true, the bounds on μ are
        inf for steps with a Lipschitz constant above 1.
    """

    epochs: int
    period: int
    reshuffled: bool
    assumed: Assumed


def _expm1_ratio(t: jax.Array) -> jax.Array:
    """(e^t − 1)/t for t <= 0, with the value 1 and the correct derivatives at 0."""
    is_small = jnp.abs(t) < 1e-2  # 8 terms of the series suffice here
    small, large = jnp.where(is_small, t, 0.0), jnp.where(is_small, -1.0, t)
    series = jnp.ones_like(t)
    for i in range(8, 1, -1):
        series = 1 + series * small / i
    return jnp.where(is_small, series, jnp.expm1(large) / large)


def geometric(y: jax.Array, count: jax.Array) -> jax.Array:
    """The sum Σ_{i<count} e^{iy} for y <= 0. The count need not be static."""
    return count * _expm1_ratio(count * y) / _expm1_ratio(y)


def power_sum(y: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """The sum Σ e^{iy} over the whole numbers i from first to last, for y of any sign.

    The sum is 0 if last is below first.
    """
    # For y > 0 the sum starts from its largest power, so that `geometric` gets
    # decreasing terms. Each branch gets 0 where y has the sign of the other branch.
    down, up = jnp.where(y <= 0, y, 0.0), jnp.where(y <= 0, 0.0, y)
    count = jnp.maximum(last - first + 1, 0.0)
    falling = jnp.exp(first * down) * geometric(down, count)
    return jnp.where(y <= 0, falling, jnp.exp(last * up) * geometric(-up, count))


def powers(y: jax.Array, count: int) -> jax.Array:
    """The sums Σ_{j<k} e^{jy} for k = 0, …, count, f[count + 1]."""
    terms = jnp.exp(jnp.arange(count) * y)
    return jnp.concatenate([jnp.zeros((1,), y.dtype), jnp.cumsum(terms)])


def _pool(a: _Block, b: _Block) -> _Block:
    return a[0] + b[0], a[1] + b[1]


def _must_pool(a: _Block, b: _Block) -> jax.Array:
    """Whether block a of steps has at least the slope of the next block b.

    A block is a pair (rise, run), and has the slope rise / run. A greatest convex
    minorant pools both blocks if the result is true.
    """
    # The slopes are compared without a division, since runs may be 0.
    return a[0] * b[1] >= b[0] * a[1]


def _cost_of_two(a: _Block, b: _Block) -> jax.Array:
    """The sum of rise²/run over the edges of the greatest convex minorant of 2 blocks.

    A block of steps is a pair (rise, run), and b follows a. An edge is a block, or both
    blocks pooled.
    """
    return jnp.where(_must_pool(a, b), cost(*_pool(a, b)), cost(*a) + cost(*b))


def _cost_of_three(a: _Block, b: _Block, c: _Block) -> jax.Array:
    """The sum of rise²/run over the edges of the greatest convex minorant of 3 blocks.

    A block of steps is a pair (rise, run), and the order is a, b, c. An edge is a
    block, or adjacent blocks pooled.
    """
    separate = cost(*a) + cost(*b) + cost(*c)
    with_a_separate = jnp.where(
        _must_pool(b, c), _cost_of_two(a, _pool(b, c)), separate
    )
    return jnp.where(_must_pool(a, b), _cost_of_two(_pool(a, b), c), with_a_separate)


def _falling_blocks(
    y: jax.Array, m: jax.Array, period: int, uses: int
) -> tuple[_Block, _Block]:
    """The steps from the n-th last use on as two blocks, if c <= 1.

    A use is a step whose batch contains the differing example, c = e^y is the Lipschitz
    constant of a step, and a block of steps is a pair (rise, run). The block of a use
    has the steps from this use to the step before the next use. Uses are `period` steps
    apart, and the last use is followed by m − 1 more steps. The first result pools the
    blocks of all n uses except the last use, and has an entry for each n = 1, …, uses.
    The second result is the block of the last use. A greatest convex minorant of these
    steps has the two results as edges, or pools them into one edge.
    """
    runs = powers(2 * y, period)
    last = jnp.exp((m - 1) * y), runs[m]
    rise = jnp.exp((m - 1 + period) * y) * powers(period * y, uses - 1)
    run = jnp.exp(2 * m * y) * runs[-1] * powers(2 * period * y, uses - 1)
    return (rise, run), last


def _best_contracting_restart(y, start, m, period: int, epochs: int) -> jax.Array:
    """The smallest bound on μ² / r² over all restarts, if c = e^y <= 1.

    A use is a step whose batch contains the differing example, and moves two coupled
    runs apart by r noise standard deviations. A restart right after a use ignores all
    steps up to this use. At a restart, the runs are at most r · start noise standard
    deviations apart. There are `epochs` uses, `period` steps apart. After the last use,
    m − 1 steps follow, and c is the Lipschitz constant of a step.
    """
    runs = powers(2 * y, period)
    # A restart after the last use leaves one block: the m − 1 steps after this use.
    best = cost(start * jnp.exp((m - 1) * y), runs[jnp.maximum(m - 1, 0)])
    if epochs == 1:
        return best
    n = jnp.arange(1, epochs)
    # Each other restart has three blocks: the steps before the next use, all later uses
    # except the last use, and the last use.
    middle, last = _falling_blocks(y, m, period, epochs - 1)
    rise = start * jnp.exp((m - 1 + n * period) * y)
    run = jnp.exp(2 * (m + (n - 1) * period) * y) * runs[-2]
    return jnp.minimum(best, jnp.min(_cost_of_three((rise, run), middle, last)))


def _best_expanding_restart(y, start, m, period: int, epochs: int) -> jax.Array:
    """The smallest bound on μ² / r² over the best candidates for a restart, if e^y > 1.

    A use is a step whose batch contains the differing example, and moves two coupled
    runs apart by r noise standard deviations. A restart right after a use ignores all
    steps up to this use. At a restart, the runs are at most r · start noise standard
    deviations apart. There are `epochs` uses, `period` steps apart. After the last use,
    m − 1 steps follow, and e^y is the Lipschitz constant of a step.

    After a restart, each edge of the minorant is a block of steps. The candidates are
    the restarts for which the first edge contains all later uses, or all later uses
    except the last use. After any earlier restart, two or more uses come after the
    first edge. If this restart moves to the next use, rise² and run of the first edge
    change by the same factor, and one use fewer comes after the first edge. An earlier
    restart is therefore never better than a candidate.
    """
    z = -y  # the weights fall: e^{iz} after i steps
    runs = powers(2 * z, period)
    best = cost(start, jnp.exp(2 * z) * runs[jnp.maximum(m - 1, 0)])
    if epochs == 1:
        return best
    n = jnp.arange(1, epochs)
    weight = jnp.exp(period * n * z)
    # The block of the distance `start` and of the n − 1 uses after the restart.
    rise = start + jnp.exp(period * z) * powers(period * z, epochs - 2)
    blocks = runs[-1] * powers(2 * period * z, epochs - 2)
    run = jnp.exp(2 * z) * (blocks + jnp.exp(2 * period * (n - 1) * z) * runs[-2])
    absorbs_next = rise * weight * runs[-1] >= run
    is_candidate = jnp.concatenate([jnp.ones((1,), bool), absorbs_next[:-1]])
    use = weight, jnp.square(weight) * runs[m]
    separate = cost(rise, run) + 1 / runs[m]
    pooled = cost(*_pool((rise, run), use))
    square = jnp.where(_must_pool((rise, run), use), pooled, separate)
    return jnp.minimum(best, jnp.min(jnp.where(is_candidate, square, jnp.inf)))


def contraction_bound(y: jax.Array, m: jax.Array, cycle: Cycle) -> jax.Array:
    """The bound on μ² / r² for all uses of the example in a run, f[].

    A use is a step whose batch contains the differing example, and moves two coupled
    runs apart by r noise standard deviations. After the last use, m − 1 steps follow,
    and m must be 1 if batches are reshuffled. Every step has the Lipschitz constant c =
    e^y. For c > 1, the result is inf if `cycle.assumed.convex` is true.

    If batches are reshuffled, the bound is for the worst positions of the uses. For
    c <= 1, moving a use to a later step never reduces the bound. The worst position is
    therefore the last step of each epoch. For c > 1, a use that is g steps before the
    next use costs 1 / Σ_{i<g} c^{−2i}. This cost is convex in g, so that the worst
    positions alternate between the last and the first step of an epoch.
    """
    epochs, period, reshuffled, assumed = cycle
    down = jnp.where(y <= 0, y, 0.0)
    (rises, widths), last = _falling_blocks(down, m, period, epochs)
    falling = _cost_of_two((rises[-1], widths[-1]), last)
    if assumed.convex:
        return jnp.where(y <= 0, falling, jnp.inf)
    up = jnp.where(y <= 0, 0.0, y)
    runs = powers(-2 * up, 2 * period)
    # In pairs of reshuffled epochs, the distance from one use to the next use is 1 and
    # 2l − 1 steps in turn. All other distances are l steps. The last use is the first
    # of the last m steps.
    pairs = (epochs - 1) // 2 if reshuffled else 0
    rest = epochs - 1 - 2 * pairs
    growing = pairs + pairs / runs[2 * period - 1] + rest / runs[period] + 1 / runs[m]
    return jnp.where(y <= 0, falling, growing)


def restart_bound(
    y: jax.Array, start: jax.Array, m: jax.Array, cycle: Cycle
) -> jax.Array:
    """The bound on μ² / r² for a run with iterates in a bounded set, f[].

    A use is a step whose batch contains the differing example, and moves two coupled
    runs apart by r noise standard deviations. The diameter of the set is r · start
    noise standard deviations. After the last use, m − 1 steps follow. The bound ignores
    all steps up to the use that gives the smallest bound, and starts right after this
    use, where the runs are at most the diameter apart. Every step has the Lipschitz
    constant e^y.

    If batches are reshuffled and e^y > 1, the bound uses only the last step. Before
    the last step, the runs are at most the diameter apart. The bound assumes that the
    last step is a use. For e^y > 1, the result is inf if `cycle.assumed.convex` is
    true.
    """
    epochs, period, reshuffled, assumed = cycle
    down = jnp.where(y <= 0, y, 0.0)
    falling = _best_contracting_restart(down, start, m, period, epochs)
    if assumed.convex:
        return jnp.where(y <= 0, falling, jnp.inf)
    up = jnp.where(y <= 0, 0.0, y)
    if reshuffled:
        growing = jnp.square(jnp.exp(up) * start + 1)
    else:
        growing = _best_expanding_restart(up, start, m, period, epochs)
    return jnp.where(y <= 0, falling, growing)
