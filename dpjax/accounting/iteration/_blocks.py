"""Greatest convex minorants of all dyadic segments of a schedule, by merging halves.

The points of the minorant are defined in `_minorant`. An edge of a minorant is a block
of consecutive steps; its rise and run are the differences of its end points'
coordinates. To merge the minorants of two adjacent segments, the last blocks of the
left minorant and the first blocks of the right minorant are pooled into one block. Two
nested binary searches find these blocks, and all other blocks are unchanged. The work
is O(T log T) in O(log³ T) vector operations. The usual algorithm with a stack needs
O(T) sequential operations.

The weights of steps may span more than the range of a float, so that rises and runs are
stored with a separate power of two.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_NONE = -(2**29)  # the exponent of an empty block, below every other exponent
_MANY = 4096  # with more nodes, every one or two levels are compiled for their width


class Block(NamedTuple):
    """Consecutive steps that form one edge of a minorant.

    The edge's rise is 2^exponent · rise, and its run is 4^exponent · run.
    """

    exponent: jax.Array
    rise: jax.Array
    run: jax.Array


class Slope(NamedTuple):
    """The slope of a block, its rise over its run: mantissa / 2^exponent."""

    exponent: jax.Array
    mantissa: jax.Array


class Nodes(NamedTuple):
    """The minorants of all nodes of one size; a node is a dyadic segment of steps.

    Each node has as many array entries as steps, and stores its blocks in the first of
    these entries.

    Attributes:
      ends: the last step of each block, i32[n].
      slopes: the slope of each block, f[n].
      number: the number of blocks of each node, i32[nodes].
      prefix: the sums from a node's first step to each step.
      suffix: the sums from each step to its node's last step.
    """

    ends: jax.Array
    slopes: Slope
    number: jax.Array
    prefix: Block
    suffix: Block


class Tangent(NamedTuple):
    """The blocks of a node that are pooled with a sum of steps before them.

    Attributes:
      number: the number of these blocks.
      last: the last step of these blocks.
      pooled: the sum together with these blocks.
    """

    number: jax.Array
    last: jax.Array
    pooled: Block


_Record = TypeVar("_Record", Block, Slope)
_Seen = TypeVar("_Seen")


def _exp2(k: jax.Array) -> jax.Array:
    """2^k for an integer k, and 0 for k <= −1023."""
    # The exponent field of a float64 is k + 1023: exact, unlike `jnp.exp2`.
    bits = (jnp.maximum(k, -1023) + 1023).astype(jnp.int64) << 52
    return jax.lax.bitcast_convert_type(bits, jnp.float64)


def pool(x: Block, y: Block) -> Block:
    """Pool two adjacent blocks into one, with the larger of their two exponents."""
    below = x.exponent < y.exponent
    large, small = where(below, y, x), where(below, x, y)
    by = _exp2(-jnp.abs(x.exponent - y.exponent))
    run = large.run + small.run * (by * by)
    return Block(large.exponent, large.rise + small.rise * by, run)


def slope(x: Block) -> Slope:
    """The slope of a block, infinite if its run is 0."""
    some = x.run > 0
    mantissa = x.rise / jnp.where(some, x.run, 1.0)
    return Slope(x.exponent, jnp.where(some, mantissa, jnp.inf))


def steeper(x: Slope, y: Slope) -> jax.Array:
    """Whether x is steeper than y."""
    # Only the slope with the larger exponent is scaled, and only down, so that nothing
    # overflows. The clip keeps the factor positive: 0 times an infinite slope is NaN.
    gap = jnp.clip(x.exponent - y.exponent, -1022, 1022)
    mine = x.mantissa * _exp2(jnp.minimum(-gap, 0))
    return mine > y.mantissa * _exp2(jnp.minimum(gap, 0))


def take(x: _Record, i: jax.Array) -> _Record:
    """The entries at the indices i, for every array of the record x."""
    return jax.tree.map(lambda a: a[i], x)


def where(mask: jax.Array, x: _Record, y: _Record) -> _Record:
    """The record x where the mask is true, else the record y, array by array."""
    return jax.tree.map(lambda a, b: jnp.where(mask, a, b), x, y)


def empty_block(x: Block) -> Block:
    """As many empty blocks as x has blocks."""
    return Block(
        jnp.full_like(x.exponent, _NONE), jnp.zeros_like(x.rise), jnp.zeros_like(x.run)
    )


def _last_index(holds: Callable[[jax.Array], jax.Array], upper: jax.Array) -> jax.Array:
    """The last i in 1..upper with holds(i), by binary search; 0 if there is none.

    The condition must be true up to some i and false from there on.
    """
    # The bit length of the largest bound: enough halvings for every search.
    steps = 32 - jax.lax.clz(jnp.max(upper))

    def body(_: int, ends: tuple[jax.Array, jax.Array]):
        low, high = ends
        middle = (low + high + 1) // 2
        ok = holds(jnp.maximum(middle, 1))
        up, down = (low < high) & ok, (low < high) & ~ok
        return jnp.where(up, middle, low), jnp.where(down, middle - 1, high)

    return jax.lax.fori_loop(0, steps, body, (jnp.zeros_like(upper), upper))[0]


def tangent(nodes: Nodes, mid: jax.Array, count: jax.Array, rest: Block) -> Tangent:
    """Pool the block `rest` with the first blocks of the node that begins at step mid.

    The node has `count` blocks. `rest` is the sum of the steps before the node. It is
    pooled with the node's next block as long as its slope is steeper than the slope of
    that block.
    """
    n = nodes.ends.shape[0]

    def last(j: jax.Array) -> jax.Array:
        return jnp.where(j > 0, nodes.ends[jnp.minimum(mid + j - 1, n - 1)], mid - 1)

    def pool_blocks(j: jax.Array) -> Block:
        return where(j > 0, pool(rest, take(nodes.prefix, last(j))), rest)

    def absorbs(j: jax.Array) -> jax.Array:
        block = take(nodes.slopes, jnp.minimum(mid + j - 1, n - 1))
        return steeper(slope(pool_blocks(j - 1)), block)

    j = _last_index(absorbs, count)
    return Tangent(j, last(j), pool_blocks(j))


def _merge(level: jax.Array, nodes: Nodes) -> Nodes:
    """Merge pairs of nodes of 2^level steps into nodes of twice as many steps."""
    ends, slopes, count, prefix, suffix = nodes
    n, half = ends.shape[0], jnp.left_shift(1, level).astype(jnp.int32)
    node = jnp.arange(count.shape[0] // 2, dtype=jnp.int32)
    left = jnp.minimum(2 * half * node, n - 1)
    mid = jnp.minimum(left + half, n - 1)
    in_left, in_right = count[::2], count[1::2]

    # If the left node retains its first i blocks, its other steps are one sum, which
    # absorbs blocks of the right node as long as the sum is steeper.
    def bridge(i: jax.Array) -> Tangent:
        start = jnp.where(i > 0, ends[left + i - 1] + 1, left)
        rest = take(suffix, jnp.minimum(start, n - 1))
        rest = where(i < in_left, rest, empty_block(rest))
        return tangent(nodes, mid, in_right, rest)

    # The left node retains its blocks up to the last one that is no steeper than the
    # bridge, the block pooled from all later ones.
    def stays(i: jax.Array) -> jax.Array:
        return ~steeper(take(slopes, left + i - 1), slope(bridge(i).pooled))

    kept = _last_index(stays, in_left)
    bridged = bridge(kept)
    pools = kept < in_left
    absorbed = jnp.where(pools, bridged.number, 0)

    # Blocks move to the first slots of the merged node: first the retained blocks, then
    # the bridge if there is one, then the remaining blocks of the right node.
    place = jnp.arange(n, dtype=jnp.int32)
    mine, offset = place >> (level + 1), place & (2 * half - 1)
    shift = half + absorbed - kept - pools
    moved = jnp.minimum(place + shift[mine], n - 1)
    source = jnp.where(offset < kept[mine], place, moved)
    here = jnp.where(pools, 2 * half * node + kept, n)  # n is out of range: dropped

    def place_blocks(blocks: jax.Array, pooled: jax.Array) -> jax.Array:
        return blocks[source].at[here].set(pooled, mode="drop")

    ends = place_blocks(ends, bridged.last)
    slopes = jax.tree.map(place_blocks, slopes, slope(bridged.pooled))
    # A prefix sum that ends in the right half gains the whole left half, and a suffix
    # sum that begins in the left half gains the whole right half.
    on_left, side = offset < half, place >> level

    def across(after: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.stack([after[mid], before[mid - 1]], 1).ravel()[side]

    rest = jax.tree.map(across, suffix, prefix)
    grown = pool(where(on_left, suffix, prefix), rest)
    prefix = where(on_left, prefix, grown)
    suffix = where(on_left, grown, suffix)
    count = kept + pools + in_right - absorbed
    pad = jnp.ones_like(count)  # unused entries: a loop's carry has a fixed shape
    return Nodes(ends, slopes, jnp.concatenate([count, pad]), prefix, suffix)


def single(log_w: jax.Array, s: jax.Array, tau: jax.Array, length: int) -> Block:
    """A block for each step, after as many empty blocks as make a power of two.

    Args:
      log_w: the logarithms of the weights of the steps, f[T].
      s: the sensitivities, f[T].
      tau: the noise standard deviations, f[T].
      length: the number of blocks is the least power of two that is at least `length`.
    """
    # w_k = 2^e w with 1 <= w < 2, so that no product below overflows or underflows
    # because of the weight.
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
    """Merge the blocks of single steps level by level up to one node.

    Before each merge, visit(level, nodes, seen) updates the accumulator `seen`. The
    result is the node of all steps and the final accumulator.
    """
    n = each.rise.shape[0]
    place = jnp.arange(n, dtype=jnp.int32)
    state = Nodes(place, slope(each), jnp.ones_like(place), each, each)

    def body(level: jax.Array, carry: tuple[Nodes, _Seen]) -> tuple[Nodes, _Seen]:
        state, seen = carry
        return _merge(level, state), visit(level, state, seen)

    # A level has half as many nodes as the one before. The first levels have most of
    # the nodes, and are compiled for their own number of nodes.
    level, levels = 0, n.bit_length() - 1
    while level < levels:
        nodes = n >> level
        until = min(level + 1 + (level > 1), levels) if nodes > _MANY else levels
        state = state._replace(number=state.number[:nodes])
        state, seen = jax.lax.fori_loop(level, until, body, (state, seen))
        level = until
    return state, seen
