"""The optimal shifts of a noisy iteration, as a greatest convex minorant.

Two runs on neighbouring data sets are coupled. Step k multiplies the distance of the
two runs by at most c_k, adds at most s_k to the distance, and has noise of standard
deviation τ_k. A shift in each step reduces the distance at a cost in μ², and the
optimal shifts have the least total cost. Let w_k = Π_{j>k} c_j be the weight of step k.
The points (Σ_{i<=k} w_i² τ_i², Σ_{i<=k} w_i s_i), for k = 0, …, T, have a greatest
convex minorant, and

    μ² = Σ over the minorant's edges of (rise)² / run.

The rise of an edge is the vertical difference of the edge's two ends, and the run is
the horizontal difference. Each edge is a block of consecutive steps, and the slopes of
the edges increase.

For each step k, the algorithm finds the minorant of the steps from k on. The algorithm
goes from the last step to the first. At step k, the new first edge is step k alone. As
long as the first edge is steeper than the next edge, the algorithm pools the two edges.
The minorant of the steps from k on is then the first edge, followed by the minorant of
the steps after this edge. The minorants therefore form a tree, in which each step has a
first edge and a pointer to the step after this edge. The algorithm has O(T) sequential
operations for T steps.

The weights of steps may span more than the range of a float, so that rises and runs are
stored with a separate power of two.
"""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import TINY, ULP

_EMPTY = -(2**29)  # the exponent of an empty block, below every other exponent


class Block(NamedTuple):
    """A block of consecutive steps, which is one edge of a greatest convex minorant.

    The points of the minorant are (cumulative noise variance, cumulative sensitivity)
    of the steps, with the weights of the module's docstring. The separate exponent
    avoids overflow.

    Attributes:
      exponent: e, i32[*b].
      rise: the vertical difference of the edge's two ends, divided by 2^e, f[*b].
      run: the horizontal difference of the edge's two ends, divided by 4^e, f[*b].
    """

    exponent: jax.Array
    rise: jax.Array
    run: jax.Array


class Minorants(NamedTuple):
    """For each step k, the greatest convex minorant of the steps k, …, T.

    The points of the minorant are (cumulative noise variance, cumulative sensitivity)
    of the steps, with the weights of the module's docstring. The arrays have an entry
    for each of the T steps, and a last entry for the empty minorant.

    Attributes:
      edge: the first edge of each minorant.
      following: the first step after the first edge, i32[T + 1].
      cost: the sum of rise² / run over all edges of each minorant, f[T + 1].
    """

    edge: Block
    following: jax.Array
    cost: jax.Array


_Record = TypeVar("_Record", Block, Minorants)


def _exp2(k: jax.Array) -> jax.Array:
    """2^k for an integer k of at most 1023, and 0 for k <= −1023."""
    # The exponent field of a float64 is k + 1023. Unlike the result of `jnp.exp2`, this
    # result is exact.
    bits = (jnp.maximum(k, -1023) + 1023).astype(jnp.int64) << 52
    return jax.lax.bitcast_convert_type(bits, jnp.float64)


def pool(x: Block, y: Block) -> Block:
    """Pool two adjacent blocks of steps into one, and add their rises and runs.

    The result has the larger of the two exponents.
    """
    is_smaller = x.exponent < y.exponent
    large, small = where(is_smaller, y, x), where(is_smaller, x, y)
    scale = _exp2(-jnp.abs(x.exponent - y.exponent))
    run = large.run + small.run * (scale * scale)
    return Block(large.exponent, large.rise + small.rise * scale, run)


def steeper(x: Block, y: Block) -> jax.Array:
    """Whether edge x of a minorant has a larger slope (rise over run) than edge y.

    A run of 0 gives an infinite slope.
    """
    slope_x, slope_y = (
        jnp.where(b.run > 0, b.rise / jnp.where(b.run > 0, b.run, 1.0), jnp.inf)
        for b in (x, y)
    )
    # A slope is (rise / run) / 2^exponent. Only the slope with the larger exponent is
    # multiplied, by a factor below 1, so that no slope overflows. The clip makes the
    # factor positive, because 0 times an infinite slope is NaN.
    gap = jnp.clip(x.exponent - y.exponent, -1022, 1022)
    return slope_x * _exp2(jnp.minimum(-gap, 0)) > slope_y * _exp2(jnp.minimum(gap, 0))


def cost(rise: jax.Array, run: jax.Array) -> jax.Array:
    """The contribution rise² / run of an edge of a minorant to μ².

    The result is inf if only the run is 0, and 0 if the rise and the run are 0.
    """
    has_run = run > 0
    without_run = jnp.where(rise > 0, jnp.inf, 0.0)
    return jnp.where(has_run, rise * rise / jnp.where(has_run, run, 1.0), without_run)


def take(x: _Record, i: jax.Array) -> _Record:
    """The entries at the indices i, for every array of the record x."""
    return jax.tree.map(lambda a: a[i], x)


def where(mask: jax.Array, x: _Record, y: _Record) -> _Record:
    """The record x where the mask is true, else the record y, array by array."""
    return jax.tree.map(lambda a, b: jnp.where(mask, a, b), x, y)


def step_blocks(log_w: jax.Array, s: jax.Array, tau: jax.Array) -> Block:
    """The block of each single step, from log weights, sensitivities and noise.

    A block is an edge of a greatest convex minorant. The rise and the run of the edge
    are the vertical and the horizontal difference of the edge's two ends. A step has
    the weight w = e^log_w, the sensitivity s and the noise standard deviation tau. The
    block of the step has the rise w s and the run (w tau)².
    """
    # The weight is 2^e w with 1 <= w < 2, so that no product below overflows or
    # underflows because of the weight.
    exponent = jnp.floor(log_w / np.log(2.0))
    w = jnp.exp(log_w - exponent * np.log(2.0))
    rise, run = w * s, jnp.square(w * tau)
    exponent = jnp.where((rise > 0) | (run > 0), exponent, _EMPTY).astype(jnp.int32)
    return Block(exponent, rise, run)


def suffix_minorants(blocks: Block) -> Minorants:
    """For each step k, the greatest convex minorant of the steps k, …, T.

    The points of the minorant are (cumulative noise variance, cumulative sensitivity)
    of these steps, with the weights of the module's docstring. The argument `blocks`
    has the block of each single step, as `step_blocks` computes it.
    """
    steps = blocks.rise.shape[0]
    # The empty minorant is an edge with a run of 0, which no edge absorbs.
    empty_edges = jax.tree.map(lambda x: jnp.pad(x, (0, 1)), blocks)
    empty_following = jnp.full(steps + 1, steps, jnp.int32)
    minorants = Minorants(empty_edges, empty_following, jnp.zeros(steps + 1))

    def add_step(minorants: Minorants, k: jax.Array) -> tuple[Minorants, None]:
        def can_absorb(carry: tuple[Block, jax.Array]) -> jax.Array:
            edge, end = carry
            return steeper(edge, take(minorants.edge, end))

        def absorb(carry: tuple[Block, jax.Array]) -> tuple[Block, jax.Array]:
            edge, end = carry
            return pool(edge, take(minorants.edge, end)), minorants.following[end]

        start = take(blocks, k), k + 1
        edge, end = jax.lax.while_loop(can_absorb, absorb, start)
        first = Minorants(edge, end, cost(edge.rise, edge.run) + minorants.cost[end])
        return jax.tree.map(lambda x, y: x.at[k].set(y), minorants, first), None

    order = jnp.arange(steps, dtype=jnp.int32)
    return jax.lax.scan(add_step, minorants, order, reverse=True)[0]


def costs_from(starts: Block, minorants: Minorants) -> jax.Array:
    """For each step k, the cost of a given block followed by the steps after k, f[T].

    The cost is the sum of rise² / run over the edges of the greatest convex minorant.
    The given block for step k is starts[k], and `minorants` is the result of
    `suffix_minorants` for all steps. The block absorbs the first edges of the minorant
    of the steps after k, as long as the pooled edge is steeper than the next edge. The
    function finds the number of absorbed edges bit by bit, from pools of 1, 2, 4, …
    edges.
    """
    steps = starts.rise.shape[0]

    def double(level: tuple[Minorants, Block], _: None):
        pools, last_edges = level
        later = take(pools, pools.following)
        doubled = Minorants(pool(pools.edge, later.edge), later.following, pools.cost)
        return (doubled, take(last_edges, pools.following)), level

    num_levels = steps.bit_length()
    _, levels = jax.lax.scan(double, (minorants, minorants.edge), length=num_levels)

    def absorb(carry: tuple[Block, jax.Array], level: tuple[Minorants, Block]):
        (edge, end), (pools, last_edges) = carry, level
        pooled = pool(edge, take(pools.edge, end))
        # If the last edge of a pool is absorbed, all earlier edges of the pool are
        # absorbed too, because they are less steep.
        absorbs = steeper(pooled, take(last_edges, end))
        end = jnp.where(absorbs, pools.following[end], end)
        return (where(absorbs, pooled, edge), end), None

    following = jnp.arange(1, steps + 1, dtype=jnp.int32)
    (edge, end), _ = jax.lax.scan(absorb, (starts, following), levels, reverse=True)
    return cost(edge.rise, edge.run) + minorants.cost[end]


# A diameter in units of the largest shift is ignored above HUGE, and replaced by 1 /
# HUGE below 1 / HUGE. Then the square of the sum of diameter and shift does not
# overflow or underflow.
HUGE = 1e120
# The largest number of restarts that are compared, which bounds the memory.
_MAX_RESTARTS = 65535


def _edge_of_step(log_w: jax.Array, s: jax.Array, tau: jax.Array) -> jax.Array:
    """For each step, the index of the minorant's edge that contains the step, i32[T].

    An edge of the greatest convex minorant is a block of consecutive steps. Edges are
    counted from 0.

    Args:
      log_w: the logarithms of the steps' weights, f[T].
      s: the sensitivities of the steps, f[T].
      tau: the noise standard deviations of the steps, f[T].
    """
    following = suffix_minorants(step_blocks(log_w, s, tau)).following

    def visit(vertex: jax.Array, inputs: tuple[jax.Array, jax.Array]):
        k, end = inputs
        begins = k == vertex
        return jnp.where(begins, end, vertex), begins

    order = jnp.arange(s.shape[0], dtype=jnp.int32)
    _, begins = jax.lax.scan(visit, jnp.zeros_like(order[0]), (order, following[:-1]))
    return jnp.cumsum(begins) - 1


def _log_weights(lipschitz: jax.Array) -> jax.Array:
    """The logarithms of the weights w_k = Π_{j>k} c_j of all steps k, f[T].

    The Lipschitz constants of the steps are c_j. A constant below the smallest normal
    float is replaced by the smallest normal float.
    """
    logs = jnp.log(jnp.maximum(lipschitz, TINY))
    later_sums = jnp.cumsum(logs[1:][::-1])[::-1]
    return jnp.concatenate([later_sums, jnp.zeros_like(logs[:1])])


def _squared_mu(lipschitz: jax.Array, sensitivity: jax.Array, stddev: jax.Array):
    """The value of μ² for one schedule, and a bound on the relative error of μ².

    The value is a sum over blocks of steps, the edges of a greatest convex minorant. A
    small change of almost any schedule does not change the blocks. At a schedule where
    two blocks merge, the merged and the separate blocks give the same μ² to first
    order. The derivative of μ² is therefore the derivative of the sum for fixed blocks.
    """
    log_w = _log_weights(lipschitz)
    constants = jax.lax.stop_gradient((log_w, sensitivity, stddev))
    steps = sensitivity.shape[0]
    edges = _edge_of_step(*constants)
    # Weights are divided by the largest weight of their block, which does not change
    # rise²/run.
    top = jax.ops.segment_max(constants[0], edges, steps, indices_are_sorted=True)
    top = top[edges]
    w = jnp.exp(log_w - top)

    def sum_by_edge(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, edges, steps, indices_are_sorted=True)

    # Bok, Su and Altschuler (2024), Theorem C.3, https://arxiv.org/abs/2403.00278:
    # shifts a_k with z_k = c_k z_{k−1} + s_k − a_k >= 0 and z_T = 0 prove
    # μ² = Σ a_k²/τ_k². In terms of A_k = w_k a_k the sum is least where A_k/(w_k τ_k)²
    # is constant on each edge of the minorant: Σ over edges of rise²/run.
    rises, runs = sum_by_edge(w * sensitivity), sum_by_edge(jnp.square(w * stddev))
    # A log weight of size x has an absolute error of about x ulps, which is a relative
    # error of the weight. Weights below e^{−40} times the largest weight of their block
    # are negligible. A weight that equals the largest weight is exactly 1.
    matters = (constants[0] - top > -40.0) & (constants[0] != top)
    size = jnp.maximum(jnp.abs(constants[0]), jnp.abs(top))
    max_size = jnp.max(jnp.where(matters, size, 0.0))
    return jnp.sum(cost(rises, runs)), ULP * (128 + 2 * steps + 64 * max_size)


def _best_mask(log_w: jax.Array, s: jax.Array, tau: jax.Array, start: jax.Array):
    """A mask that is true at the step of the best restart, bool[T].

    A restart after step k ignores all steps up to step k, and uses that the iterates on
    the two data sets are at most `start` apart after step k. The mask is false
    everywhere if no restart reduces the bound on μ.

    A block of consecutive steps is an edge of a greatest convex minorant. The rise and
    the run of a block are the vertical and the horizontal difference of the edge's two
    ends. A restart after step k replaces the blocks up to step k by one block with the
    rise w_k · start and the run 0, where w_k is the weight of step k. The cost of the
    restart is the sum of rise² / run over the edges of the new minorant. If the
    schedule has more than _MAX_RESTARTS steps, the function compares only the restarts
    after evenly spaced steps.

    Args:
      log_w: the logarithms of the steps' weights, f[T].
      s: the sensitivities of the steps, f[T].
      tau: the noise standard deviations of the steps, f[T].
      start: the bound on the distance, f[].
    """
    steps = s.shape[0]
    # Sums over the rows of the grid. The weights of a row are divided by the row's
    # largest weight.
    stride = -(-steps // _MAX_RESTARTS)
    pad = (-steps % stride, 0)
    grid = jnp.pad(log_w, pad, mode="edge").reshape(-1, stride)
    top = jnp.max(grid, axis=1, keepdims=True)
    w = jnp.exp(grid - top)
    rise = jnp.sum(w * jnp.pad(s, pad).reshape(-1, stride), axis=1)
    run = jnp.sum(jnp.square(w * jnp.pad(tau, pad).reshape(-1, stride)), axis=1)
    rows = rise.shape[0]
    minorants = suffix_minorants(step_blocks(top[:, 0], rise, jnp.sqrt(run)))
    distance = jnp.full_like(rise, start)
    first_blocks = step_blocks(grid[:, -1], distance, jnp.zeros_like(rise))
    costs = costs_from(first_blocks, minorants)
    is_better = costs < minorants.cost[0]
    index = jnp.arange(rows)
    best = jnp.min(jnp.where(is_better & (costs == jnp.min(costs)), index, rows))
    return jnp.arange(steps) == (best + 1) * stride - 1 - pad[0]


def schedule_mu(
    lipschitz, sensitivity, stddev, diameter, *, bounded: bool
) -> jax.Array:
    """The GDP parameter μ of the last iterate of one schedule, f[], rounded up.

    The Lipschitz constants, the sensitivities and the noise standard deviations of the
    T steps are f[T]. The diameter, f[], is that of a set that contains all iterates. If
    bounded is false, the diameter is not used.

    The sensitivities are divided by the largest sensitivity, and the noise by the
    largest noise, so that no square overflows or underflows. μ for these ratios is
    multiplied by (largest sensitivity) / (largest noise). A diameter for which a square
    would still overflow or underflow is replaced by a larger diameter.
    """
    # The result does not depend on the scales, so that the scales need no derivative.
    unit, noise_scale = (
        jnp.where(largest > 0, largest, 1.0)
        for largest in jax.lax.stop_gradient((jnp.max(sensitivity), jnp.max(stddev)))
    )
    is_sensitive = jnp.any(sensitivity > 0)
    sensitivity, diameter = (sensitivity / unit, diameter / unit)
    stddev = stddev / noise_scale
    diameter = jnp.where(diameter < HUGE, jnp.maximum(diameter, 1 / HUGE), jnp.inf)
    if bounded:
        finite = jnp.isfinite(diameter)
        start = jnp.where(finite, diameter, 1.0)
        constants = (_log_weights(lipschitz), sensitivity, stddev, start)
        restarts = _best_mask(*jax.lax.stop_gradient(constants)) & finite
        # All steps up to the restart are replaced by one step without noise, whose
        # sensitivity is the diameter.
        before = jnp.cumsum(restarts[::-1])[::-1] > 0
        stddev = jnp.where(before, 0.0, stddev)
        sensitivity = jnp.where(restarts, start, jnp.where(before, 0.0, sensitivity))
    square, error = _squared_mu(lipschitz, sensitivity, stddev)
    bound = square * (1 + error)
    regular = (bound > 0) & (bound < jnp.inf)
    mu = jnp.sqrt(jnp.where(regular, bound, 1.0)) * (1 + 4 * ULP)
    mu = jnp.where(regular, mu, jnp.where(bound == 0, 0.0, jnp.inf))  # NaN becomes inf
    mu = mu * (unit / noise_scale) * (1 + 2 * ULP)
    return jnp.where(is_sensitive, jnp.maximum(mu, TINY), 0.0)
