"""The minorant in closed form, for identical steps with the same cycle of batches.

One of every l steps uses the differing example and moves the two runs apart by r noise
standard deviations. All steps are c-Lipschitz. The number of steps from the last use to
the end, including the use, is m. The points of the minorant of `_minorant` rise only at
uses. The last n uses therefore make n blocks. Each block has l steps, except for the
last block, which has m steps. If the runs start at distance Δ just after an earlier
use, another block of l − 1 steps precedes these blocks.

For c <= 1 the slopes of the blocks between the first and the last decrease. These
blocks are pooled, which leaves a minorant of three blocks. For c > 1 the slopes
increase: each block stays separate, except those that the initial distance Δ absorbs.

The bound on μ is proportional to r if Δ / r is fixed. In this module r is 1, so that
distances are divided by r, and the bounds are on μ² / r². The symbol y is log c.
Geometric sums of powers of c are computed without dividing by 1 − c, so that they and
their derivatives are correct at c = 1.
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
      assumed: the static assumptions. If losses are known to be convex, steps with
        c > 1 are not expected, and the code does not compute a bound for such steps.
    """

    epochs: int
    period: int
    reshuffled: bool
    assumed: Assumed


def _expm1_ratio(t: jax.Array) -> jax.Array:
    """(e^t − 1)/t for t <= 0, with its derivatives at 0."""
    near = jnp.abs(t) < 1e-2  # 8 terms of the series suffice here
    small, large = jnp.where(near, t, 0.0), jnp.where(near, -1.0, t)
    series = jnp.ones_like(t)
    for i in range(8, 1, -1):
        series = 1 + series * small / i
    return jnp.where(near, series, jnp.expm1(large) / large)


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
    """The sums Σ_{i<k} e^{iy} for k = 0, …, count, f[count + 1]."""
    terms = jnp.exp(jnp.arange(count) * y)
    return jnp.concatenate([jnp.zeros((1,), y.dtype), jnp.cumsum(terms)])


def _pool(a: _Block, b: _Block) -> _Block:
    return a[0] + b[0], a[1] + b[1]


def _steep(a: _Block, b: _Block) -> jax.Array:
    """Whether block a is at least as steep as the next block b.

    The slope of a block is its rise over its run. The greatest convex minorant pools a
    block with the next one if it is at least as steep.
    """
    # The slopes are compared without a division, since runs may be 0.
    return a[0] * b[1] >= b[0] * a[1]


def _two(a: _Block, b: _Block) -> jax.Array:
    """The sum of rise²/run over the edges of the minorant of two blocks.

    A block of steps is an edge with a rise and a run, and b follows a. The minorant is
    the greatest convex one.
    """
    return jnp.where(_steep(a, b), cost(*_pool(a, b)), cost(*a) + cost(*b))


def _three(a: _Block, b: _Block, c: _Block) -> jax.Array:
    """The sum of rise²/run over the edges of the minorant of three blocks in order.

    A block of steps is an edge with a rise and a run. The minorant is the greatest
    convex one.
    """
    apart = cost(*a) + cost(*b) + cost(*c)
    rest = jnp.where(_steep(b, c), _two(a, _pool(b, c)), apart)
    return jnp.where(_steep(a, b), _two(_pool(a, b), c), rest)


def _falling_blocks(
    y: jax.Array, m: jax.Array, period: int, uses: int
) -> tuple[_Block, _Block]:
    """The two blocks of the minorant of the last n uses, for c = e^y <= 1.

    A use is a step whose batch contains the differing example. The last use is m steps
    before the end of the run, including the use. The first block pools all of these
    uses but the last, and has an entry for each n = 1, …, uses. The second block is the
    last use.
    """
    runs = powers(2 * y, period)
    last = jnp.exp((m - 1) * y), runs[m]
    rise = jnp.exp((m - 1 + period) * y) * powers(period * y, uses - 1)
    run = jnp.exp(2 * m * y) * runs[-1] * powers(2 * period * y, uses - 1)
    return (rise, run), last


def _best_contracting_restart(y, start, m, period: int, epochs: int) -> jax.Array:
    """The least μ² / r² over restarts right after a use, if c = e^y <= 1.

    A restart ignores all steps up to the use, and begins with the two runs at the
    distance `start`, in units of the distance r of one use.
    """
    runs = powers(2 * y, period)
    # A restart after the last use leaves one block: the m − 1 steps after this use.
    best = cost(start * jnp.exp((m - 1) * y), runs[jnp.maximum(m - 1, 0)])
    if epochs == 1:
        return best
    n = jnp.arange(1, epochs)
    # Each other restart has three blocks: the steps before the next use, all later uses
    # but the last, and the last use.
    middle, last = _falling_blocks(y, m, period, epochs - 1)
    rise = start * jnp.exp((m - 1 + n * period) * y)
    run = jnp.exp(2 * (m + (n - 1) * period) * y) * runs[-2]
    return jnp.minimum(best, jnp.min(_three((rise, run), middle, last)))


def _best_expanding_restart(y, start, m, period: int, epochs: int) -> jax.Array:
    """The least μ² / r² over restarts right after a use, for c = e^y > 1.

    A restart ignores all steps up to the use. The candidates are restarts, with the
    distance start, whose first block pools all later uses, or all but the last. An
    earlier restart would pool fewer uses. An earlier restart is never better: the uses
    that it does not pool have a cost, and a later restart ignores these uses.
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
    absorbs = rise * weight * runs[-1] >= run
    reached = jnp.concatenate([jnp.ones((1,), bool), absorbs[:-1]])
    use = weight, jnp.square(weight) * runs[m]
    apart = cost(rise, run) + 1 / runs[m]
    pooled = cost(*_pool((rise, run), use))
    square = jnp.where(_steep((rise, run), use), pooled, apart)
    return jnp.minimum(best, jnp.min(jnp.where(reached, square, jnp.inf)))


def contraction(y: jax.Array, m: jax.Array, cycle: Cycle) -> jax.Array:
    """The value of μ² / r² for all uses of the example in a run, f[].

    Every step has the Lipschitz constant c = e^y. For c > 1, the value is inf if losses
    are known to be convex. If batches are reshuffled, m has to be 1. For c <= 1, moving
    a use to a later step never lowers the bound. The last step of each epoch is
    therefore the worst position. For c > 1, a use that is g steps before the next one
    costs 1 / Σ_{i<g} c^{−2i}. The cost is convex in g, so that the worst positions
    alternate between the last and the first of an epoch.
    """
    epochs, period, reshuffled, assumed = cycle
    down = jnp.where(y <= 0, y, 0.0)
    (rises, widths), last = _falling_blocks(down, m, period, epochs)
    falling = _two((rises[-1], widths[-1]), last)
    if assumed.convex:
        return jnp.where(y <= 0, falling, jnp.inf)
    up = jnp.where(y <= 0, 0.0, y)
    runs = powers(-2 * up, 2 * period)
    # The distance from one use to the next is 1 and 2l − 1 steps by turns in pairs of
    # reshuffled epochs, and otherwise l steps. The last use is m steps from the end.
    pairs = (epochs - 1) // 2 if reshuffled else 0
    rest = epochs - 1 - 2 * pairs
    growing = pairs + pairs / runs[2 * period - 1] + rest / runs[period] + 1 / runs[m]
    return jnp.where(y <= 0, falling, growing)


def restart_variance(
    y: jax.Array, start: jax.Array, m: jax.Array, cycle: Cycle
) -> jax.Array:
    """The value of μ² / r² for a run with iterates in a set of diameter `start`, f[].

    The bound starts at the best step, where the distance of the two runs is at most
    `start`, and ignores all uses before that step. The candidates are the steps right
    after a use. For reshuffled batches and a Lipschitz constant e^y > 1 the last step
    is the only candidate.
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
