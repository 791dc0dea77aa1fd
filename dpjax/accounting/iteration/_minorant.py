"""The optimal shifts of a noisy iteration, as a greatest convex minorant.

Step k moves two coupled runs apart by at most s_k, multiplies their distance by at most
c_k, and adds noise of standard deviation τ_k. With w_k = Π_{j>k} c_j, the points
(Σ_{i<=k} w_i² τ_i², Σ_{i<=k} w_i s_i) have a greatest convex minorant, and

    μ² = Σ over its edges of (rise)² / run.

Each edge of the minorant is a block of consecutive steps, and the slopes of the edges
increase. `_blocks` computes the edges.
"""

import jax
import jax.numpy as jnp

from dpjax._core.float64 import TINY, ULP
from dpjax.accounting.iteration import _blocks

# A diameter in units of the largest shift is ignored above HUGE, and replaced by 1 /
# HUGE below 1 / HUGE. Then the square of the sum of diameter and shift does not
# overflow or underflow.
HUGE = 1e120
# The largest number of restarts that are compared, which bounds the memory.
_GRID = 65535


def _block(log_w: jax.Array, s: jax.Array, tau: jax.Array) -> jax.Array:
    """The index of the edge of the minorant to which each step belongs, i32[T].

    An edge of the greatest convex minorant is a block of consecutive steps. Edges are
    counted from 0.

    Args:
      log_w: the logarithms of the weights w_k, f[T].
      s: the sensitivities s_k, f[T].
      tau: the noise standard deviations τ_k, f[T].
    """
    following = _blocks.ends(_blocks.single(log_w, s, tau)).following

    def step(vertex: jax.Array, now: tuple[jax.Array, jax.Array]):
        k, end = now
        begins = k == vertex
        return jnp.where(begins, end, vertex), begins

    order = jnp.arange(s.shape[0], dtype=jnp.int32)
    _, begins = jax.lax.scan(step, jnp.zeros_like(order[0]), (order, following[:-1]))
    return jnp.cumsum(begins) - 1


def _log_weights(lipschitz: jax.Array) -> jax.Array:
    """The logarithms log w_k = Σ_{j>k} log c_j of the weights of all steps, f[T].

    A Lipschitz constant c_j below the smallest normal float is replaced by that float.
    """
    logs = jnp.log(jnp.maximum(lipschitz, TINY))
    later = jnp.cumsum(logs[1:][::-1])[::-1]
    return jnp.concatenate([later, jnp.zeros_like(logs[:1])])


def _energy(lipschitz: jax.Array, sensitivity: jax.Array, stddev: jax.Array):
    """The value of μ² for one schedule, and a bound on the relative error of μ².

    A small change of almost any schedule does not change the blocks. At a schedule
    where two blocks merge, the merged and the separate blocks give the same μ² to first
    order. The derivative is therefore that of the sum over fixed blocks.
    """
    log_w = _log_weights(lipschitz)
    fixed = jax.lax.stop_gradient((log_w, sensitivity, stddev))
    steps = sensitivity.shape[0]
    block = _block(*fixed)
    # Weights are divided by the largest weight of their block, which does not change
    # rise²/run.
    top = jax.ops.segment_max(fixed[0], block, steps, indices_are_sorted=True)[block]
    w = jnp.exp(log_w - top)

    def total(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, block, steps, indices_are_sorted=True)

    # Bok, Su and Altschuler (2024), Theorem C.3, https://arxiv.org/abs/2403.00278:
    # shifts a_k with z_k = c_k z_{k−1} + s_k − a_k >= 0 and z_T = 0 prove
    # μ² = Σ a_k²/τ_k². In terms of A_k = w_k a_k the sum is least where A_k/(w_k τ_k)²
    # is constant on each edge of the minorant: Σ over edges of rise²/run.
    d, v = total(w * sensitivity), total(jnp.square(w * stddev))
    noisy = v > 0
    each = jnp.where(noisy, d * d / jnp.where(noisy, v, 1.0), 0.0)
    lost = jnp.any(~noisy & (d > 0))
    # A log weight of size x has an absolute error of about x ulps, which is a relative
    # error of the weight. Weights below e^{−40} of the largest in their block are
    # negligible, and a weight equal to the largest is exactly 1.
    counts = (fixed[0] - top > -40.0) & (fixed[0] != top)
    size = jnp.maximum(jnp.abs(fixed[0]), jnp.abs(top))
    reach = jnp.max(jnp.where(counts, size, 0.0))
    error = ULP * (128 + 2 * steps + 64 * reach)
    return jnp.where(lost, jnp.inf, jnp.sum(each)), error


def _restart(log_w: jax.Array, s: jax.Array, tau: jax.Array, start: jax.Array):
    """A mask that is true at the step of the best restart, bool[T].

    A restart after a step replaces all steps up to that step by one fact: the distance
    of the two runs is at most `start`. The mask is false everywhere if no restart
    lowers the bound. The cost of a restart is the cost of the minorant of the later
    steps, after a rise by `start` without a run. The function compares all restarts if
    there are at most _GRID steps, and otherwise only every stride-th restart.
    """
    steps = s.shape[0]
    # The sums are over rows of the grid. Each row's largest weight divides its weights.
    stride = -(-steps // _GRID)
    pad = (-steps % stride, 0)
    grid = jnp.pad(log_w, pad, mode="edge").reshape(-1, stride)
    top = jnp.max(grid, axis=1, keepdims=True)
    w = jnp.exp(grid - top)
    rise = jnp.sum(w * jnp.pad(s, pad).reshape(-1, stride), axis=1)
    run = jnp.sum(jnp.square(w * jnp.pad(tau, pad).reshape(-1, stride)), axis=1)
    rows = rise.shape[0]
    found = _blocks.ends(_blocks.single(top[:, 0], rise, jnp.sqrt(run)))
    distance = jnp.full_like(rise, start)
    first = _blocks.single(grid[:, -1], distance, jnp.zeros_like(rise))
    total = _blocks.costs_from(first, found)
    better = total < found.cost[0]
    index = jnp.arange(rows)
    best = jnp.min(jnp.where(better & (total == jnp.min(total)), index, rows))
    return jnp.arange(steps) == (best + 1) * stride - 1 - pad[0]


def schedule_mu(
    lipschitz, sensitivity, stddev, diameter, *, bounded: bool
) -> jax.Array:
    """The GDP parameter μ of the last iterate of one schedule, f[], rounded up.

    The inputs are f[T], and f[] for the diameter. So that no square overflows or
    underflows, the sensitivities and the noise are divided by their largest values, and
    the result is multiplied by the ratio of these values. A diameter for which a square
    would still overflow or underflow is replaced by a larger diameter.
    """
    # The result does not depend on the scales, so that the scales need no derivative.
    shift, noise = (
        jnp.where(most > 0, most, 1.0)
        for most in jax.lax.stop_gradient((jnp.max(sensitivity), jnp.max(stddev)))
    )
    some = jnp.any(sensitivity > 0)
    sensitivity, diameter = sensitivity / shift, diameter / shift
    stddev = stddev / noise
    diameter = jnp.where(diameter < HUGE, jnp.maximum(diameter, 1 / HUGE), jnp.inf)
    if bounded:
        finite = jnp.isfinite(diameter)
        start = jnp.where(finite, diameter, 1.0)
        fixed = (_log_weights(lipschitz), sensitivity, stddev, start)
        here = _restart(*jax.lax.stop_gradient(fixed)) & finite
        # All steps up to the restart are replaced by one shift without noise, of the
        # size of the diameter.
        before = jnp.cumsum(here[::-1])[::-1] > 0
        stddev = jnp.where(before, 0.0, stddev)
        sensitivity = jnp.where(here, start, jnp.where(before, 0.0, sensitivity))
    square, error = _energy(lipschitz, sensitivity, stddev)
    bound = square * (1 + error)
    regular = (bound > 0) & (bound < jnp.inf)
    mu = jnp.sqrt(jnp.where(regular, bound, 1.0)) * (1 + 4 * ULP)
    mu = jnp.where(regular, mu, jnp.where(bound == 0, 0.0, jnp.inf))  # NaN becomes inf
    mu = mu * (shift / noise) * (1 + 2 * ULP)
    return jnp.where(some, jnp.maximum(mu, TINY), 0.0)
