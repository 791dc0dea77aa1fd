"""Checkpointed blocks, whose records exist only during their own backward pass.

For a block of `jax.checkpoint` JAX stores only the inputs, and computes the values
inside again in the backward pass. The engine saves memory in the same way. The block
becomes one function with a custom derivative. From the cotangents of the block's
outputs, that derivative records the inputs and cotangents at the sites inside, computes
the result that `Wanted` describes, and drops the records. The result is returned as the
cotangent of the taps at the block's sites. In the pass for the norms the result is the
squared norms f[b]; in the pass for the sums it is the sums themselves. A scan over
blocks stacks these results as it stacks any cotangent.
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
from dpjax.clipping.bookkeeping.jaxpr.equations import Alike, aval, evaluate

_Arrays = list[jax.Array]


class Wanted(NamedTuple):
    """Which result a block's backward pass computes from its records.

    The result is the squared norms where `scales` is empty, and the scaled sums
    otherwise.

    Attributes:
      clip_norms: the bound of each group.
      scales: for each group the factors f[b], or f[] for one example; empty for the
        squared norms.
      finite: with scales, one array b[b], or b[] for one example, that says whether the
        gradient is finite; empty for the squared norms.
    """

    clip_norms: Sequence[ArrayLike]
    scales: Sequence[jax.Array] = ()
    finite: Sequence[jax.Array] = ()


def process_blocks(blocks: Mapping[KeptSite, Block], wanted: Wanted) -> AtBlocks:
    """How to evaluate checkpointed blocks in the pass for norms or the pass for sums.

    Args:
      blocks: each block, by the first of its sites.
      wanted: which of the two results the blocks compute for the batch.
    """

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
    """The block's outputs for one example, with the custom derivative under vmap.

    The derivative is that of the whole batch, because one vmap rule replaces the
    mapped function by `_batch`.
    """
    # Literals are NumPy values of any dtype; custom_vmap and custom_vjp expect arrays.
    types = [aval(v) for v in site.eqn.invars]
    inputs = [
        x if isinstance(x, jax.Array) else jnp.asarray(x, t.dtype)
        for x, t in zip(inputs, types, strict=True)
    ]
    # The block's own inputs are reordered: leaves, other batch-invariant values, then
    # the values that depend on the example.
    ordered = [inputs[i] for i in block.order]
    known, example = ordered[: block.num_known], ordered[block.num_known :]
    # Inside the block, groups are numbered by first use, so that equal blocks of
    # different groups share one trace.
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
        # `_batch` maps over all of these inputs, so unmapped ones get a batch axis.
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
    """The block's outputs f[b, ...] for a batch.

    `taps` and `wanted` do not enter the outputs. They are arguments because `_backward`
    reads `wanted` and returns its result as the cotangent of `taps`.
    """
    return jax.vmap(functools.partial(_evaluate_block, block, known))(examples)


def _forward(
    block: Block, *given: Any
) -> tuple[_Arrays, tuple[_Arrays, _Arrays, Wanted]]:
    # With symbolic_zeros, each argument is a pair of its value and a perturbed flag.
    values = jax.tree.map(lambda x: x.value, given)
    known, examples, _, wanted = values
    return _batch(block, *values), (known, examples, wanted)


def _backward(
    block: Block, saved: tuple[_Arrays, _Arrays, Wanted], cotangents: Sequence[Any]
) -> tuple[None, list[jax.Array | None], _Arrays, None]:
    # Outputs that the loss does not use are left out: their zero cotangent times an
    # infinite derivative would be NaN. Symbolic zeros are not arrays. In a scan an
    # unused output has an array of zeros instead, so block.outputs is needed too.
    used = tuple(
        i in block.outputs and isinstance(c, jax.Array) and is_inexact(c)
        for i, c in enumerate(cotangents)
    )
    real = [c for c, on in zip(cotangents, used, strict=True) if on]
    # As in jax.checkpoint, the barrier stops XLA from starting the recomputation before
    # the cotangents exist, and from merging it with the forward pass, which would store
    # all values inside the block.
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
    """The cotangents of the examples, and the wanted result for each leaf.

    Args:
      alike: the block.
      used: which of the block's outputs have a cotangent.
      saved: batch-invariant values, examples, and which result is wanted.
      cotangents: the cotangents of the used outputs, with a leading batch axis.
    """
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
    """For each leaf f[b]: its group's squared norms at the group's first leaf, else 0.

    The caller adds the leaves' squares, so each group must be counted once.
    """
    squares = squares_alone(block.plan, books, known, wanted.clip_norms)
    out = []
    for i, group in enumerate(block.of_leaves):
        # A cotangent has the dtype of its tap, which is at least float32 but may be
        # narrower than the dtype of the square.
        square = _round_up(squares[group], at_least_float32(known[i].dtype))
        is_first = block.of_leaves.index(group) == i
        out.append(square if is_first else jnp.zeros_like(square))
    return out


def _round_up(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Upper bounds, in a dtype that may be narrower, of non-negative numbers x."""
    if jnp.promote_types(x.dtype, dtype) == dtype:
        return x.astype(dtype)
    return (x * (1 + margin(4, dtype))).astype(dtype)


def _sums(
    block: Block, books: SiteRecords, known: Sequence[jax.Array], wanted: Wanted
) -> list[jax.Array]:
    """The scaled sum of the examples' gradients for each of the block's leaves."""
    leaves, (finite,) = known[: len(block.of_leaves)], wanted.finite
    return sums_alone(block.plan, books, known, leaves, wanted.scales, finite)
