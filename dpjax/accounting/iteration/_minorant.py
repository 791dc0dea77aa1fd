"""The optimal shifts of a noisy iteration, as a greatest convex minorant.

Step k moves two coupled runs apart by at most s_k, multiplies their distance by at most
c_k, and adds noise of standard deviation τ_k. With w_k = Π_{j>k} c_j, the points
(Σ_{i<=k} w_i² τ_i², Σ_{i<=k} w_i s_i) have a greatest convex minorant, and

    μ² = Σ over its edges of (rise)² / run.

An edge is a block of consecutive steps; the slopes of the blocks increase. Blocks are
found by merging halves: of two adjacent minorants, the last blocks of the left one and
the first blocks of the right one are pooled into one block, which two nested binary
searches find, and the rest stays. That is O(T log T) work in O(log³ T) vector
operations, where a stack would need O(T) operations one after the other.

The weights w_k span more than the range of a float, so rises and runs carry a power of
two of their own: (e, d, v) stands for the rise 2^e d and the run 4^e v.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._float64 import TINY, ULP

# A diameter in units of the largest shift is at most that, or there is none, and at
# least its inverse: the square of a sum of both neither overflows nor underflows.
HUGE = 1e120
_NONE = -(2**29)  # the exponent of nothing, below every other
_MANY = 4096  # nodes beyond which a few levels get searches of their own width
_GRID = 65535  # restarts that are compared at most, and one step before them all

_Pair = tuple[jax.Array, ...]  # (e, d, v) of a block, or (e, m) for the slope m / 2^e


def _exp2(k: jax.Array) -> jax.Array:
    """2^k for an integer k, 0 from −1023 down."""
    bits = (jnp.maximum(k, -1023) + 1023).astype(jnp.int64) << 52
    return jax.lax.bitcast_convert_type(bits, jnp.float64)


def _pool(x: _Pair, y: _Pair) -> _Pair:
    below = x[0] < y[0]
    (e, d, v), (_, small, thin) = _where(below, y, x), _where(below, x, y)
    by = _exp2(-jnp.abs(x[0] - y[0]))
    return e, d + small * by, v + thin * (by * by)


def _slope(x: _Pair) -> _Pair:
    e, d, v = x
    return e, jnp.where(v > 0, d / jnp.where(v > 0, v, 1.0), jnp.inf)


def _steeper(x: _Pair, y: _Pair) -> jax.Array:
    gap = jnp.clip(x[0] - y[0], -1022, 1022)
    return x[1] * _exp2(jnp.minimum(-gap, 0)) > y[1] * _exp2(jnp.minimum(gap, 0))


def _take(x: _Pair, i: jax.Array) -> _Pair:
    return tuple(a[i] for a in x)


def _where(mask: jax.Array, x: _Pair, y: _Pair) -> _Pair:
    return tuple(jnp.where(mask, a, b) for a, b in zip(x, y, strict=True))


def _nothing(x: _Pair) -> _Pair:
    return jnp.full_like(x[0], _NONE), jnp.zeros_like(x[1]), jnp.zeros_like(x[2])


def _last(holds: Any, upper: jax.Array) -> jax.Array:
    """The last i in 1..upper with holds(i), true and then false; 0 if there is none."""
    steps = 32 - jax.lax.clz(jnp.max(upper))

    def body(_: Any, ends: Any) -> Any:
        low, high = ends
        middle = (low + high + 1) // 2
        ok = holds(jnp.maximum(middle, 1))
        up, down = (low < high) & ok, (low < high) & ~ok
        return jnp.where(up, middle, low), jnp.where(down, middle - 1, high)

    return jax.lax.fori_loop(0, steps, body, (jnp.zeros_like(upper), upper))[0]


def _tangent(level: jax.Array, state: Any, mid: jax.Array, count: Any, rest: _Pair):
    """Blocks of the node that begins at mid which a sum before it absorbs, and the sum.

    It absorbs the next block for as long as its own slope is steeper.
    """
    ends, slopes, _, prefix, _ = state
    n = ends.shape[0]

    def last(j: jax.Array) -> jax.Array:
        return jnp.where(j > 0, ends[jnp.minimum(mid + j - 1, n - 1)], mid - 1)

    def pooled(j: jax.Array) -> _Pair:
        return _where(j > 0, _pool(rest, _take(prefix, last(j))), rest)

    def absorbs(j: jax.Array) -> jax.Array:
        block = _take(slopes, jnp.minimum(mid + j - 1, n - 1))
        return _steeper(_slope(pooled(j - 1)), block)

    j = _last(absorbs, count)
    return j, last(j), pooled(j)


def _merge(level: jax.Array, state: Any) -> Any:
    """From the minorants of nodes of 2^level steps to those of twice as many.

    A node keeps the last steps of its blocks and their slopes in its first places, and
    the sums from its first step to each step, and from each step to its last.
    """
    ends, slopes, count, prefix, suffix = state
    n, half = ends.shape[0], jnp.left_shift(1, level).astype(jnp.int32)
    node = jnp.arange(count.shape[0] // 2, dtype=jnp.int32)
    left = jnp.minimum(2 * half * node, n - 1)
    mid = jnp.minimum(left + half, n - 1)
    in_left, in_right = count[::2], count[1::2]

    # From what the left node holds after its first i blocks.
    def tangent(i: jax.Array):
        start = jnp.where(i > 0, ends[left + i - 1] + 1, left)
        rest = _take(suffix, jnp.minimum(start, n - 1))
        rest = _where(i < in_left, rest, _nothing(rest))
        return _tangent(level, state, mid, in_right, rest)

    def stays(i: jax.Array) -> jax.Array:
        return ~_steeper(_take(slopes, left + i - 1), _slope(tangent(i)[2]))

    kept = _last(stays, in_left)
    absorbed, last, pooled = tangent(kept)
    pools = kept < in_left
    absorbed = jnp.where(pools, absorbed, 0)
    slope = _slope(pooled)

    place = jnp.arange(n, dtype=jnp.int32)
    mine, offset = place >> (level + 1), place & (2 * half - 1)
    shift = half + absorbed - kept - pools
    moved = jnp.minimum(place + shift[mine], n - 1)
    source = jnp.where(offset < kept[mine], place, moved)
    here = jnp.where(pools, 2 * half * node + kept, n)

    def place_blocks(blocks: jax.Array, pooled: jax.Array) -> jax.Array:
        return blocks[source].at[here].set(pooled, mode="drop")

    ends = place_blocks(ends, last)
    slopes = tuple(map(place_blocks, slopes, slope))
    # Sums that begin in one half and end in the other have the rest of it added.
    on_left, side = offset < half, place >> level
    rest = tuple(
        jnp.stack([after[mid], before[mid - 1]], 1).ravel()[side]
        for after, before in zip(suffix, prefix, strict=True)
    )
    grown = _pool(_where(on_left, suffix, prefix), rest)
    prefix = _where(on_left, prefix, grown)
    suffix = _where(on_left, grown, suffix)
    count = kept + pools + in_right - absorbed
    pad = jnp.ones_like(count)  # nodes that the next level does not have
    return ends, slopes, jnp.concatenate([count, pad]), prefix, suffix


def _sums(log_w: jax.Array, s: jax.Array, tau: jax.Array, length: int) -> _Pair:
    """The rise and run of each step, padded in front to a power of two >= length."""
    e = jnp.floor(log_w / np.log(2.0))
    w = jnp.exp(log_w - e * np.log(2.0))
    d, v = w * s, jnp.square(w * tau)
    e = jnp.where((d > 0) | (v > 0), e, _NONE).astype(jnp.int32)
    pad = ((1 << (length - 1).bit_length()) - s.shape[0], 0)
    return jnp.pad(e, pad, constant_values=_NONE), jnp.pad(d, pad), jnp.pad(v, pad)


def _climb(each: _Pair, visit: Any, seen: Any) -> Any:
    """Merge level by level; visit(level, state, seen) looks at each before it does."""
    n = each[1].shape[0]
    place = jnp.arange(n, dtype=jnp.int32)
    state = place, _slope(each), jnp.ones_like(place), each, each

    def body(level: jax.Array, carry: Any) -> Any:
        state, seen = carry
        return _merge(level, state), visit(level, state, seen)

    level, levels = 0, n.bit_length() - 1
    while level < levels:
        nodes = n >> level
        until = min(level + 1 + (level > 1), levels) if nodes > _MANY else levels
        state = (*state[:2], state[2][:nodes], *state[3:])
        state, seen = jax.lax.fori_loop(level, until, body, (state, seen))
        level = until
    return state, seen


def _blocks(log_w: jax.Array, s: jax.Array, tau: jax.Array) -> jax.Array:
    """For each step the number of blocks that end before it, i32[T]."""
    each = _sums(log_w, s, tau, s.shape[0])
    (ends, _, count, _, _), _ = _climb(each, lambda level, state, seen: seen, ())
    place = jnp.arange(ends.shape[0], dtype=jnp.int32)
    closes = jnp.zeros_like(place).at[ends].add((place < count[0]).astype(jnp.int32))
    return (jnp.cumsum(closes) - closes)[-s.shape[0] :]


def _log_weights(lipschitz: jax.Array) -> jax.Array:
    """Log w_k = Σ_{j>k} log c_j, with c_j no less than the least float."""
    logs = jnp.log(jnp.maximum(lipschitz, TINY))
    later = jnp.cumsum(logs[1:][::-1])[::-1]
    return jnp.concatenate([later, jnp.zeros_like(logs[:1])])


def _energy(lipschitz: jax.Array, sensitivity: jax.Array, stddev: jax.Array):
    """μ² of one schedule, and a bound on its relative rounding error.

    Blocks are constant near almost every schedule, and where they change, merging two
    of them or not makes no difference to first order. So the derivative is that of the
    sum over fixed blocks.
    """
    log_w = _log_weights(lipschitz)
    fixed = jax.lax.stop_gradient((log_w, sensitivity, stddev))
    steps = sensitivity.shape[0]
    block = _blocks(*fixed)
    top = jax.ops.segment_max(fixed[0], block, steps, indices_are_sorted=True)[block]
    w = jnp.exp(log_w - top)

    def total(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, block, steps, indices_are_sorted=True)

    d, v = total(w * sensitivity), total(jnp.square(w * stddev))
    noisy = v > 0
    each = jnp.where(noisy, d * d / jnp.where(noisy, v, 1.0), 0.0)
    lost = jnp.any(~noisy & (d > 0))
    # Weights below e^{−40} of the largest in their block do not count.
    counts = (fixed[0] - top > -40.0) & (fixed[0] != top)
    reach = jnp.max(
        jnp.where(counts, jnp.maximum(jnp.abs(fixed[0]), jnp.abs(top)), 0.0)
    )
    error = ULP * (128 + 2 * steps + 64 * reach)
    return jnp.where(lost, jnp.inf, jnp.sum(each)), error


def _restart(log_w: jax.Array, s: jax.Array, tau: jax.Array, start: jax.Array):
    """After which step it is best to start at that distance: a mask, bool[T].

    It is nowhere if it is better not to. All steps are compared, by the tangents from
    their starting points to the minorant of the steps after them, which are met at each
    level of the tree. Beyond _GRID steps only every so many steps.
    """
    steps = s.shape[0]
    stride = -(-steps // _GRID)
    pad = (-steps % stride, 0)
    grid = jnp.pad(log_w, pad, mode="edge").reshape(-1, stride)
    top = jnp.max(grid, axis=1, keepdims=True)
    w = jnp.exp(grid - top)
    rise = jnp.sum(w * jnp.pad(s, pad).reshape(-1, stride), axis=1)
    run = jnp.sum(jnp.square(w * jnp.pad(tau, pad).reshape(-1, stride)), axis=1)
    rows = rise.shape[0]
    each = _sums(top[:, 0], rise, jnp.sqrt(run), rows + 1)
    distance = jnp.full_like(rise, start)
    first = _sums(grid[:, -1], distance, jnp.zeros_like(rise), rows + 1)

    n = each[1].shape[0]
    place = jnp.arange(n, dtype=jnp.int32)
    both = tuple(jnp.stack([a, b]) for a, b in zip(first, _nothing(first), strict=True))
    far = tuple(jnp.full((2, n), x) for x in (0, np.inf, 1.0))
    vertex = jnp.full((2, n), n - 1, jnp.int32)

    # Tangents to the right neighbours of the nodes, from the steps in the left.
    def visit(level: jax.Array, state: Any, seen: Any) -> Any:
        half = jnp.left_shift(1, level).astype(jnp.int32)
        on_left = (place & half) == 0
        mid = jnp.minimum((place // half + 1) * half, n - 1)
        rest = _take(state[4], jnp.minimum(place + 1, n - 1))
        rest = _where(place + 1 < mid, rest, _nothing(rest))
        count = state[2][jnp.minimum(mid // half, state[2].shape[0] - 1)]

        def nearer(start: _Pair, nearest: _Pair, vertex: jax.Array) -> Any:
            _, last, sums = _tangent(level, state, mid, count, _pool(start, rest))
            better = on_left & _steeper(_slope(nearest), _slope(sums))
            return _where(better, sums, nearest), jnp.where(better, last, vertex)

        return jax.vmap(nearer)(both, *seen)

    _, (edge, vertex) = _climb(each, visit, (far, vertex))
    cost = jnp.where(
        edge[2] > 0, edge[1] ** 2 / jnp.where(edge[2] > 0, edge[2], 1), jnp.inf
    )
    cost = cost.at[1, n - 1].set(0.0)

    def double(_: Any, carry: Any) -> Any:
        after, jump = carry
        return after + after[jump], jump[jump]

    levels = n.bit_length()
    after, _ = jax.lax.fori_loop(0, levels, double, (cost[1], vertex[1]))
    total = (cost[0] + after[vertex[0]])[-rows:]
    better = total < after[-rows - 1]
    index = jnp.arange(rows)
    best = jnp.min(jnp.where(better & (total == jnp.min(total)), index, rows))
    return jnp.arange(steps) == (best + 1) * stride - 1 - pad[0]


def schedule_mu(
    lipschitz, sensitivity, stddev, diameter, *, bounded: bool
) -> jax.Array:
    """μ of one schedule, f[T] each and f[], rounded up.

    Scales cancel, and are taken out so that no square overflows or underflows. A
    diameter that is too small or large for that is taken for a larger one.
    """
    shift, noise = (
        jnp.where(most > 0, most, 1.0)
        for most in jax.lax.stop_gradient((jnp.max(sensitivity), jnp.max(stddev)))
    )
    some = jnp.any(sensitivity > 0)
    sensitivity, stddev, diameter = (
        sensitivity / shift,
        stddev / noise,
        diameter / shift,
    )
    diameter = jnp.where(diameter < HUGE, jnp.maximum(diameter, 1 / HUGE), jnp.inf)
    if bounded:
        finite = jnp.isfinite(diameter)
        start = jnp.where(finite, diameter, 1.0)
        fixed = (_log_weights(lipschitz), sensitivity, stddev, start)
        here = _restart(*jax.lax.stop_gradient(fixed)) & finite
        before = jnp.cumsum(here[::-1])[::-1] > 0
        stddev = jnp.where(before, 0.0, stddev)
        sensitivity = jnp.where(here, start, jnp.where(before, 0.0, sensitivity))
    square, error = _energy(lipschitz, sensitivity, stddev)
    bound = square * (1 + error)
    regular = (bound > 0) & (bound < jnp.inf)
    mu = jnp.sqrt(jnp.where(regular, bound, 1.0)) * (1 + 4 * ULP)
    mu = jnp.where(regular, mu, jnp.where(bound == 0, 0.0, jnp.inf))  # NaN is inf
    mu = mu * (shift / noise) * (1 + 2 * ULP)
    return jnp.where(some, jnp.maximum(mu, TINY), 0.0)
