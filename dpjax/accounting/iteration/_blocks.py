"""Greatest convex minorants of all dyadic parts of a schedule, by merging halves.

Of two adjacent minorants, the last blocks of the left one and the first blocks of the
right one are pooled into one block, which two nested binary searches find, and the rest
stays. That is O(T log T) work in O(log³ T) vector operations, where a stack would need
O(T) operations one after the other.

The weights w_k span more than the range of a float, so rises and runs carry a power of
two of their own.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_NONE = -(2**29)  # the exponent of nothing, below every other
_MANY = 4096  # nodes beyond which a few levels get searches of their own width


class Block(NamedTuple):
    """Consecutive steps: the rise is 2^exponent rise, the run 4^exponent run."""

    exponent: jax.Array
    rise: jax.Array
    run: jax.Array


class Slope(NamedTuple):
    """A block's rise over its run: mantissa / 2^exponent."""

    exponent: jax.Array
    mantissa: jax.Array


class Nodes(NamedTuple):
    """The minorants of all nodes of one size.

    A node keeps its blocks in its first places.

    Attributes:
      ends: the last steps of the blocks, i32[n].
      slopes: of the blocks, f[n].
      number: how many blocks each node has, i32[nodes].
      prefix: the sums from a node's first step to each step.
      suffix: the sums from each step to its node's last step.
    """

    ends: jax.Array
    slopes: Slope
    number: jax.Array
    prefix: Block
    suffix: Block


class Tangent(NamedTuple):
    """Blocks that a sum before them absorbs.

    Attributes:
      number: how many.
      last: the last step of them.
      pooled: the sum with them.
    """

    number: jax.Array
    last: jax.Array
    pooled: Block


_Record = TypeVar("_Record", Block, Slope)
_Seen = TypeVar("_Seen")


def _exp2(k: jax.Array) -> jax.Array:
    """2^k for an integer k, 0 from −1023 down."""
    bits = (jnp.maximum(k, -1023) + 1023).astype(jnp.int64) << 52
    return jax.lax.bitcast_convert_type(bits, jnp.float64)


def pool(x: Block, y: Block) -> Block:
    """Both blocks as one, in the larger power of two."""
    below = x.exponent < y.exponent
    large, small = where(below, y, x), where(below, x, y)
    by = _exp2(-jnp.abs(x.exponent - y.exponent))
    run = large.run + small.run * (by * by)
    return Block(large.exponent, large.rise + small.rise * by, run)


def slope(x: Block) -> Slope:
    """Rise over run; infinite without a run."""
    some = x.run > 0
    return Slope(
        x.exponent, jnp.where(some, x.rise / jnp.where(some, x.run, 1.0), jnp.inf)
    )


def steeper(x: Slope, y: Slope) -> jax.Array:
    """Whether x is steeper than y."""
    gap = jnp.clip(x.exponent - y.exponent, -1022, 1022)
    mine = x.mantissa * _exp2(jnp.minimum(-gap, 0))
    return mine > y.mantissa * _exp2(jnp.minimum(gap, 0))


def take(x: _Record, i: jax.Array) -> _Record:
    """Those at the places i."""
    return jax.tree.map(lambda a: a[i], x)


def where(mask: jax.Array, x: _Record, y: _Record) -> _Record:
    """X where the mask is true, else y."""
    return jax.tree.map(lambda a, b: jnp.where(mask, a, b), x, y)


def nothing(x: Block) -> Block:
    """Blocks without a step, as many as x has."""
    return Block(
        jnp.full_like(x.exponent, _NONE), jnp.zeros_like(x.rise), jnp.zeros_like(x.run)
    )


def _last_index(holds: Callable[[jax.Array], jax.Array], upper: jax.Array) -> jax.Array:
    """The last i in 1..upper with holds(i), true and then false; 0 if there is none."""
    steps = 32 - jax.lax.clz(jnp.max(upper))

    def body(_: int, ends: tuple[jax.Array, jax.Array]):
        low, high = ends
        middle = (low + high + 1) // 2
        ok = holds(jnp.maximum(middle, 1))
        up, down = (low < high) & ok, (low < high) & ~ok
        return jnp.where(up, middle, low), jnp.where(down, middle - 1, high)

    return jax.lax.fori_loop(0, steps, body, (jnp.zeros_like(upper), upper))[0]


def tangent(nodes: Nodes, mid: jax.Array, count: jax.Array, rest: Block) -> Tangent:
    """What the sum `rest` absorbs of the node with `count` blocks that begins at mid.

    It absorbs the next block for as long as its own slope is steeper.
    """
    n = nodes.ends.shape[0]

    def last(j: jax.Array) -> jax.Array:
        return jnp.where(j > 0, nodes.ends[jnp.minimum(mid + j - 1, n - 1)], mid - 1)

    def pooled(j: jax.Array) -> Block:
        return where(j > 0, pool(rest, take(nodes.prefix, last(j))), rest)

    def absorbs(j: jax.Array) -> jax.Array:
        block = take(nodes.slopes, jnp.minimum(mid + j - 1, n - 1))
        return steeper(slope(pooled(j - 1)), block)

    j = _last_index(absorbs, count)
    return Tangent(j, last(j), pooled(j))


def _merge(level: jax.Array, nodes: Nodes) -> Nodes:
    """From the minorants of nodes of 2^level steps to those of twice as many."""
    ends, slopes, count, prefix, suffix = nodes
    n, half = ends.shape[0], jnp.left_shift(1, level).astype(jnp.int32)
    node = jnp.arange(count.shape[0] // 2, dtype=jnp.int32)
    left = jnp.minimum(2 * half * node, n - 1)
    mid = jnp.minimum(left + half, n - 1)
    in_left, in_right = count[::2], count[1::2]

    # If the left node keeps its first i blocks, the rest of it is one sum, which
    # absorbs blocks of the right node for as long as it is steeper.
    def bridge(i: jax.Array) -> Tangent:
        start = jnp.where(i > 0, ends[left + i - 1] + 1, left)
        rest = take(suffix, jnp.minimum(start, n - 1))
        rest = where(i < in_left, rest, nothing(rest))
        return tangent(nodes, mid, in_right, rest)

    # It keeps the last block that is no steeper than what comes of the others.
    def stays(i: jax.Array) -> jax.Array:
        return ~steeper(take(slopes, left + i - 1), slope(bridge(i).pooled))

    kept = _last_index(stays, in_left)
    bridged = bridge(kept)
    pools = kept < in_left
    absorbed = jnp.where(pools, bridged.number, 0)

    # Blocks move up: those kept, then the bridge if there is one, then the right ones.
    place = jnp.arange(n, dtype=jnp.int32)
    mine, offset = place >> (level + 1), place & (2 * half - 1)
    shift = half + absorbed - kept - pools
    moved = jnp.minimum(place + shift[mine], n - 1)
    source = jnp.where(offset < kept[mine], place, moved)
    here = jnp.where(pools, 2 * half * node + kept, n)

    def place_blocks(blocks: jax.Array, pooled: jax.Array) -> jax.Array:
        return blocks[source].at[here].set(pooled, mode="drop")

    ends = place_blocks(ends, bridged.last)
    slopes = jax.tree.map(place_blocks, slopes, slope(bridged.pooled))
    # Sums that begin in one half and end in the other have the rest of it added.
    on_left, side = offset < half, place >> level

    def across(after: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.stack([after[mid], before[mid - 1]], 1).ravel()[side]

    rest = jax.tree.map(across, suffix, prefix)
    grown = pool(where(on_left, suffix, prefix), rest)
    prefix = where(on_left, prefix, grown)
    suffix = where(on_left, grown, suffix)
    count = kept + pools + in_right - absorbed
    pad = jnp.ones_like(count)  # nodes that the next level does not have
    return Nodes(ends, slopes, jnp.concatenate([count, pad]), prefix, suffix)


def single(log_w: jax.Array, s: jax.Array, tau: jax.Array, length: int) -> Block:
    """Each step as a block, padded in front to a power of two >= length."""
    e = jnp.floor(log_w / np.log(2.0))
    w = jnp.exp(log_w - e * np.log(2.0))
    d, v = w * s, jnp.square(w * tau)
    e = jnp.where((d > 0) | (v > 0), e, _NONE).astype(jnp.int32)
    pad = ((1 << (length - 1).bit_length()) - s.shape[0], 0)
    return Block(
        jnp.pad(e, pad, constant_values=_NONE), jnp.pad(d, pad), jnp.pad(v, pad)
    )


def climb(
    each: Block, visit: Callable[[jax.Array, Nodes, _Seen], _Seen], seen: _Seen
) -> tuple[Nodes, _Seen]:
    """Merge level by level; visit(level, nodes, seen) looks at each before it does."""
    n = each.rise.shape[0]
    place = jnp.arange(n, dtype=jnp.int32)
    state = Nodes(place, slope(each), jnp.ones_like(place), each, each)

    def body(level: jax.Array, carry: tuple[Nodes, _Seen]) -> tuple[Nodes, _Seen]:
        state, seen = carry
        return _merge(level, state), visit(level, state, seen)

    # A level has half as many nodes as the one before: each of the first few, which
    # have most of them, is compiled for its own number.
    level, levels = 0, n.bit_length() - 1
    while level < levels:
        nodes = n >> level
        until = min(level + 1 + (level > 1), levels) if nodes > _MANY else levels
        state = state._replace(number=state.number[:nodes])
        state, seen = jax.lax.fori_loop(level, until, body, (state, seen))
        level = until
    return state, seen
