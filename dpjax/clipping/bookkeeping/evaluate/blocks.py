"""Rematerialised blocks, whose books are kept only while something is made of them.

Of a block of `jax.checkpoint` only the inputs are stored; what is within is computed
again on the way back. So it is here: the block is one function with a derivative of its
own, which from the cotangent of its outputs keeps the block's books, makes of them what
is `Wanted`, and drops them. What is wanted travels as the cotangent of what is tapped
at the block's sites: in the pass for the norms the squares f[b], in that for the sums
the sums themselves, which a scan over blocks stacks as it does any cotangent.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from dpjax._core.dtypes import at_least_float32
from dpjax._core.meshes import compiler_sharded, leading_axis
from dpjax._core.rounding import margin
from dpjax._core.typing import ArrayLike
from dpjax.clipping.bookkeeping.analysis.plan import Block
from dpjax.clipping.bookkeeping.analysis.sites import KeptSite
from dpjax.clipping.bookkeeping.evaluate.books import (
    AtBlocks,
    SiteRecords,
    books_of_block,
    is_inexact,
)
from dpjax.clipping.bookkeeping.evaluate.engine import squares_alone, sums_alone
from dpjax.clipping.bookkeeping.evaluate.run import AtBlock
from dpjax.clipping.bookkeeping.jaxpr.alike import Alike
from dpjax.clipping.bookkeeping.jaxpr.equations import aval, evaluate

_Arrays = list[jax.Array]


class Wanted(NamedTuple):
    """What is made of a block's books: the norms' squares, or with scales the sums.

    Attributes:
      clip_norms: the bound of each group.
      scales: for each group f[b], or of one example f[]; none for the squares.
      finite: b[b] or b[] with the scales, else none.
    """

    clip_norms: Sequence[ArrayLike]
    scales: Sequence[jax.Array] = ()
    finite: Sequence[jax.Array] = ()


def process_blocks(blocks: Mapping[KeptSite, Block], wanted: Wanted) -> AtBlocks:
    """What becomes of kept blocks, for the batch's norms or sums."""

    def outputs(each: tuple[Sequence[jax.Array], Sequence[jax.Array]]) -> AtBlock:
        of_one = Wanted(wanted.clip_norms, *each)

        def at_block(
            sites: Sequence[KeptSite],
            inputs: Sequence[jax.Array],
            taps: Sequence[jax.Array],
        ) -> list[jax.Array]:
            return _outputs_of_one_example(
                blocks[sites[0]], sites[0], inputs, taps, of_one
            )

        return at_block

    return AtBlocks(bool(wanted.scales), (wanted.scales, wanted.finite), outputs)


def _outputs_of_one_example(
    block: Block,
    site: KeptSite,
    inputs: Sequence[jax.Array],
    taps: Sequence[jax.Array],
    wanted: Wanted,
) -> list[jax.Array]:
    """The block's outputs for one example; a batch of them has the derivative."""
    # Literals are NumPy's.
    types = [aval(v) for v in site.eqn.invars]
    inputs = [
        x if isinstance(x, jax.Array) else jnp.asarray(x, t.dtype)
        for x, t in zip(inputs, types, strict=True)
    ]
    ordered = [inputs[i] for i in block.order]
    known, example = ordered[: block.num_known], ordered[block.num_known :]
    own = Wanted(
        [wanted.clip_norms[group] for group in block.groups],
        [wanted.scales[group] for group in block.groups if wanted.scales],
        wanted.finite,
    )

    @jax.custom_batching.custom_vmap
    def outputs(
        known: _Arrays, example: _Arrays, taps: _Arrays, wanted: Wanted
    ) -> _Arrays:
        return _evaluate_block(block, known, example)

    @outputs.def_vmap
    def of_batch(
        size: int,
        mapped: Sequence[Any],
        known: _Arrays,
        example: _Arrays,
        taps: _Arrays,
        wanted: Wanted,
    ) -> tuple[_Arrays, list[bool]]:
        examples = [
            x if on else jnp.broadcast_to(x, (size, *x.shape))
            for x, on in zip(example, mapped[1], strict=True)
        ]
        outs = cast(_Arrays, _batch(block, known, examples, taps, wanted))
        return outs, [True] * len(outs)

    return outputs(known, example, list(taps), own)


def _evaluate_block(block: Block, known: _Arrays, example: _Arrays) -> _Arrays:
    return evaluate(block.plan.scope.closed, [*known, *example])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _batch(
    block: Block, known: _Arrays, examples: _Arrays, taps: _Arrays, wanted: Wanted
) -> _Arrays:
    """The outputs of a batch, f[b, ...]."""
    return jax.vmap(functools.partial(_evaluate_block, block, known))(examples)


def _forward(
    block: Block, *given: Any
) -> tuple[_Arrays, tuple[_Arrays, _Arrays, Wanted]]:
    values = jax.tree.map(lambda x: x.value, given)
    known, examples, _, wanted = values
    return _batch(block, *values), (known, examples, wanted)


def _backward(
    block: Block, saved: tuple[_Arrays, _Arrays, Wanted], cotangents: Sequence[Any]
) -> tuple[None, list[jax.Array | None], _Arrays, None]:
    # What nothing uses is not differentiated: zero times infinity would be no zero. (In
    # a scan, an unused output has a cotangent of zeros instead of none.)
    used = tuple(
        i in block.outputs and isinstance(c, jax.Array) and is_inexact(c)
        for i, c in enumerate(cotangents)
    )
    real = [c for c, on in zip(cotangents, used, strict=True) if on]
    # As in jax.checkpoint: not before the cotangents are there, and not once for both.
    saved, real = jax.lax.optimization_barrier((saved, real))
    of_examples, of_taps = _share(Alike(block), used, saved, real)
    return None, of_examples, of_taps, None


_batch.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _share(
    alike: Alike[Block],
    used: tuple[bool, ...],
    saved: tuple[_Arrays, _Arrays, Wanted],
    cotangents: _Arrays,
) -> tuple[list[jax.Array | None], _Arrays]:
    """The cotangents of the examples, and what is wanted of each leaf."""
    block, (known, examples, wanted) = alike.part, saved
    leaves = known[: len(block.of_leaves)]
    inner = process_blocks(block.plan.blocks, wanted)
    books, of_examples = books_of_block(
        block.plan, known, examples, used, cotangents, inner
    )
    if wanted.scales:
        make, specs = _sums, [jax.typeof(x).sharding.spec for x in leaves]
    else:
        make, specs = _squares, jax.P(leading_axis(examples))
    made = compiler_sharded(functools.partial(make, block), (known, examples), specs)
    return of_examples, made(books, known, wanted)


def _squares(
    block: Block, books: SiteRecords, known: Sequence[jax.Array], wanted: Wanted
) -> list[jax.Array]:
    """The squares of each group, at its first leaf."""
    squares = squares_alone(block.plan, books, known, wanted.clip_norms)
    out = []
    for i, group in enumerate(block.of_leaves):
        square = _round_up(squares[group], at_least_float32(known[i].dtype))
        is_first = block.of_leaves.index(group) == i
        out.append(square if is_first else jnp.zeros_like(square))
    return out


def _round_up(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """At least numbers that are not negative, in what may be narrower."""
    if jnp.promote_types(x.dtype, dtype) == dtype:
        return x.astype(dtype)
    return (x * (1 + margin(4, dtype))).astype(dtype)


def _sums(
    block: Block, books: SiteRecords, known: Sequence[jax.Array], wanted: Wanted
) -> list[jax.Array]:
    """The leaves' scaled sums."""
    leaves, (finite,) = known[: len(block.of_leaves)], wanted.finite
    return sums_alone(block.plan, books, known, leaves, wanted.scales, finite)
