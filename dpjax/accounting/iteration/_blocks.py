"""The greatest convex minorants of a schedule, from each of its steps on.

`_minorant` defines the points. An edge of a minorant is a block of consecutive steps.
The rise and the run of an edge are the differences of the coordinates of the edge's end
points. The algorithm goes from the last step to the first. The first edge of the
minorant from step k on begins as step k alone. As long as this edge is steeper than the
edge that follows, the algorithm pools both edges. The later edges are those of the
minorant from the end of the pooled edge on. The minorants therefore form a tree, in
which each step has a first edge and a pointer to the end of that edge. The algorithm
has O(T) sequential operations.

The weights of steps may span more than the range of a float, so that rises and runs are
stored with a separate power of two.
"""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_NONE = -(2**29)  # the exponent of an empty block, below every other exponent


class Block(NamedTuple):
    """A block of consecutive steps, which is one edge of a minorant.

    The edge's rise is 2^exponent · rise, and its run is 4^exponent · run.
    """

    exponent: jax.Array
    rise: jax.Array
    run: jax.Array


class Ends(NamedTuple):
    """For each step k, the minorant of the steps k, …, T.

    The arrays have an entry for each step, and a last entry for the empty minorant.

    Attributes:
      edge: the first edge of each minorant.
      following: the first step after that edge, i32[T + 1].
      cost: the sum of rise² / run over all edges, f[T + 1].
    """

    edge: Block
    following: jax.Array
    cost: jax.Array


_Record = TypeVar("_Record", Block, Ends)


def _exp2(k: jax.Array) -> jax.Array:
    """2^k for an integer k, and 0 for k <= −1023."""
    # The exponent field of a float64 is k + 1023. The result is exact, and that of
    # `jnp.exp2` is not.
    bits = (jnp.maximum(k, -1023) + 1023).astype(jnp.int64) << 52
    return jax.lax.bitcast_convert_type(bits, jnp.float64)


def pool(x: Block, y: Block) -> Block:
    """Pool two adjacent blocks into one, with the larger of their two exponents."""
    below = x.exponent < y.exponent
    large, small = where(below, y, x), where(below, x, y)
    by = _exp2(-jnp.abs(x.exponent - y.exponent))
    run = large.run + small.run * (by * by)
    return Block(large.exponent, large.rise + small.rise * by, run)


def steeper(x: Block, y: Block) -> jax.Array:
    """Whether edge x has a larger slope than edge y. A run of 0 gives the slope inf."""
    mine, other = (
        jnp.where(b.run > 0, b.rise / jnp.where(b.run > 0, b.run, 1.0), jnp.inf)
        for b in (x, y)
    )
    # A slope is mantissa / 2^exponent. Only the slope with the larger exponent is
    # scaled, and only down, so that nothing overflows. The clip keeps the factor
    # positive: 0 times an infinite slope is NaN.
    gap = jnp.clip(x.exponent - y.exponent, -1022, 1022)
    return mine * _exp2(jnp.minimum(-gap, 0)) > other * _exp2(jnp.minimum(gap, 0))


def cost(x: Block) -> jax.Array:
    """The rise² / run of an edge: inf if only the run is 0, and 0 if both are 0."""
    some = x.run > 0
    never = jnp.where(x.rise > 0, jnp.inf, 0.0)
    return jnp.where(some, x.rise**2 / jnp.where(some, x.run, 1.0), never)


def take(x: _Record, i: jax.Array) -> _Record:
    """The entries at the indices i, for every array of the record x."""
    return jax.tree.map(lambda a: a[i], x)


def where(mask: jax.Array, x: _Record, y: _Record) -> _Record:
    """The record x where the mask is true, else the record y, array by array."""
    return jax.tree.map(lambda a, b: jnp.where(mask, a, b), x, y)


def single(log_w: jax.Array, s: jax.Array, tau: jax.Array) -> Block:
    """The block of each single step, for weights e^log_w, shifts s and noise tau."""
    # w_k = 2^e w with 1 <= w < 2, so that no product below overflows or underflows
    # because of the weight.
    e = jnp.floor(log_w / np.log(2.0))
    w = jnp.exp(log_w - e * np.log(2.0))
    d, v = w * s, jnp.square(w * tau)
    e = jnp.where((d > 0) | (v > 0), e, _NONE).astype(jnp.int32)
    return Block(e, d, v)


def ends(each: Block) -> Ends:
    """For each step k, the first edge of the minorant of the steps k, k + 1, ..., T.

    Args:
      each: the blocks of single steps.

    Returns:
      `Ends`, with the edges and the steps at which they end.
    """
    steps = each.rise.shape[0]
    # The empty minorant is an edge with a run of 0, which no edge absorbs.
    nothing = jax.tree.map(lambda x: jnp.pad(x, (0, 1)), each)
    last = jnp.full(steps + 1, steps, jnp.int32)
    found = Ends(nothing, last, jnp.zeros(steps + 1))

    def add_step(found: Ends, k: jax.Array) -> tuple[Ends, None]:
        def absorbs(now: tuple[Block, jax.Array]) -> jax.Array:
            edge, end = now
            return steeper(edge, take(found.edge, end))

        def absorb(now: tuple[Block, jax.Array]) -> tuple[Block, jax.Array]:
            edge, end = now
            return pool(edge, take(found.edge, end)), found.following[end]

        start = take(each, k), k + 1
        edge, end = jax.lax.while_loop(absorbs, absorb, start)
        first = Ends(edge, end, cost(edge) + found.cost[end])
        return jax.tree.map(lambda x, y: x.at[k].set(y), found, first), None

    order = jnp.arange(steps, dtype=jnp.int32)
    return jax.lax.scan(add_step, found, order, reverse=True)[0]


def costs_from(starts: Block, found: Ends) -> jax.Array:
    """The cost of the minorant of each starting block and the later steps, f[T].

    The block absorbs the first edges of the minorant of the later steps, as long as the
    pooled edge is steeper than the edge that follows. The function finds the number of
    absorbed edges bit by bit, from pools of 1, 2, 4, … edges.
    """
    steps = starts.rise.shape[0]

    def double(several: tuple[Ends, Block], _: None):
        ends, last = several
        rest = take(ends, ends.following)
        twice = Ends(pool(ends.edge, rest.edge), rest.following, ends.cost)
        return (twice, take(last, ends.following)), several

    levels = steps.bit_length()
    _, several = jax.lax.scan(double, (found, found.edge), length=levels)

    def absorb(now: tuple[Block, jax.Array], several: tuple[Ends, Block]):
        (edge, end), (ends, last) = now, several
        longer = pool(edge, take(ends.edge, end))
        # If the last of these edges is absorbed, so are all edges before it, which are
        # less steep.
        absorbs = steeper(longer, take(last, end))
        return (
            where(absorbs, longer, edge),
            jnp.where(absorbs, ends.following[end], end),
        ), None

    following = jnp.arange(1, steps + 1, dtype=jnp.int32)
    (edge, end), _ = jax.lax.scan(absorb, (starts, following), several, reverse=True)
    return cost(edge) + found.cost[end]
