"""The clipped sum from two passes: one for the norms, and one for the scaled sum.

The first pass returns the loss, aux and the norms. The activations and cotangents from
which the norms are computed are not stored for the second pass.

**Checkpointed blocks.** For a block of `jax.checkpoint`, JAX stores only the inputs.
JAX computes the values inside the block again in the backward pass. The engine saves
memory in the same way: it makes the block a function with a custom derivative. This
derivative starts from the cotangents of the block's outputs, and records the
activations and cotangents inside the block. In the pass for the norms, the derivative
computes the squared norms f[b] of the gradients of the block's parameters. In the pass
for the sums, the derivative computes the sums of scaled gradients. No recorded arrays
remain in memory after the block's backward pass. The function has additional arguments,
arrays of zeros called taps. The derivative returns its results as the cotangents of the
taps. A scan over blocks stacks these results as it stacks any cotangent.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from dpjax._core.dtypes import at_least_float32
from dpjax._core.meshes import leading_axis, let_compiler_shard, spec_of, varying_axes
from dpjax._core.rounding import margin
from dpjax._core.typing import ArrayLike, Arrays
from dpjax.clipping._bookkeeping import equations as eqs
from dpjax.clipping._bookkeeping.analysis.plan import Block, Plan
from dpjax.clipping._bookkeeping.analysis.sites import BlockSite
from dpjax.clipping._bookkeeping.evaluate.engine import squares_alone, sums_alone
from dpjax.clipping._bookkeeping.evaluate.run import (
    BlockEvaluation,
    Records,
    Request,
    RunResult,
    record_sites,
    run_with_taps,
)
from dpjax.clipping._clip import Inputs, PerExample, Scales, Summed, clip_scales

_Arrays = list[jax.Array]
# The values of a block's batch-invariant inputs, the values of its other inputs
# f[b, ...], and the `Request` that says whether norms or sums are computed.
_Saved = tuple[_Arrays, _Arrays, Request]


def clipped_sum_in_two_passes(
    plan: Plan, clip_norms: Sequence[ArrayLike], inputs: Inputs
) -> Summed:
    """The sum of clipped gradients, and per-example results, from two passes.

    The blocks in `Plan.blocks` stay checkpointed.

    Args:
      plan: the analysis of the loss.
      clip_norms: for each group of leaves that are clipped together, the bound on the
        norm.
      inputs: the parameters, the examples and the mask of the batch.
    """

    def compute_scales(
        recorded: Records, clip_norms: Sequence[ArrayLike], mask: jax.Array
    ) -> Scales:
        squares = squares_alone(plan, mask.shape, recorded, clip_norms)
        return clip_scales(squares, clip_norms, mask)

    leaves, examples, mask = inputs
    outputs = partial(_outputs_of_one_example, plan.blocks)
    in_blocks = BlockEvaluation(Request(clip_norms), outputs)
    (loss, *aux), recorded = record_sites(plan, leaves, examples, in_blocks)
    arrays = (leaves, examples)
    sharding = jax.P(leading_axis(examples))
    sharded_scales = let_compiler_shard(compute_scales, arrays, sharding)
    finite, scales, norm = sharded_scales(recorded, clip_norms, mask)
    # Because of the barrier, XLA treats the second pass as a different computation.
    # Otherwise XLA could reuse values of the first pass, and would store these values.
    leaves, scales = jax.lax.optimization_barrier((leaves, scales))
    in_blocks = BlockEvaluation(Request(clip_norms, scales, [finite]), outputs)
    _, recorded = record_sites(plan, leaves, examples, in_blocks)
    shardings = [spec_of(x) for x in leaves]
    sharded_sums = let_compiler_shard(partial(sums_alone, plan), arrays, shardings)
    return sharded_sums(recorded, scales, finite), PerExample(loss, norm, aux)


def _outputs_of_one_example(
    blocks: Mapping[BlockSite, Block],
    request: Request,
    sites: Sequence[BlockSite],
    inputs: Arrays,
    taps: Arrays,
) -> list[jax.Array]:
    """The outputs of a checkpointed block for one example.

    Under vmap, a batching rule replaces this function by `_batch_outputs`, which has a
    custom derivative for the whole batch. A site is an input of the block that is
    computed from parameters alone. A tap is an array of zeros for one site. The custom
    derivative returns squared norms or sums as the taps' cotangents.

    Args:
      blocks: the checkpointed blocks. The key of each block is its first site.
      request: whether the backward pass computes norms or sums, for one example.
      sites: the sites of the block.
      inputs: the values of the block's inputs.
      taps: the tap at each site.
    """
    # Literals are NumPy values of any dtype; custom_vmap and custom_vjp expect arrays.
    block = blocks[sites[0]]
    inputs = [
        x if isinstance(x, jax.Array) else jnp.asarray(x, eqs.aval(v).dtype)
        for x, v in zip(inputs, sites[0].eqn.invars, strict=True)
    ]
    # The order of the block's inputs changes: first leaves, then other batch-invariant
    # values, then the values that depend on the example.
    ordered = [inputs[i] for i in block.order]
    invariants, example = ordered[: block.num_invariant], ordered[block.num_invariant :]
    # Inside the block, groups are numbered by first use. So equal blocks of different
    # groups share one trace.
    block_request = Request(
        [request.clip_norms[group] for group in block.groups],
        [request.scales[group] for group in block.groups if request.scales],
        request.finite,
    )

    @jax.custom_batching.custom_vmap
    def outputs(
        invariants: _Arrays, example: _Arrays, taps: _Arrays, request: Request
    ) -> _Arrays:
        return _evaluate_block(block, invariants, example)

    @outputs.def_vmap
    def outputs_of_batch(
        size: int, mapped: Sequence[Any], *arguments: Any
    ) -> tuple[_Arrays, list[bool]]:
        invariants, example, taps, request = arguments
        # `_batch_outputs` maps over all these inputs. So unmapped inputs get a batch
        # axis.
        examples = [
            x if on else jnp.broadcast_to(x, (size, *x.shape))
            for x, on in zip(example, mapped[1], strict=True)
        ]
        outs = cast(_Arrays, _batch_outputs(block, invariants, examples, taps, request))
        return outs, [True] * len(outs)

    return outputs(invariants, example, list(taps), block_request)


def _evaluate_block(block: Block, invariants: _Arrays, example: _Arrays) -> _Arrays:
    return eqs.evaluate(block.plan.scope.closed, [*invariants, *example])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _batch_outputs(
    block: Block,
    invariants: _Arrays,
    examples: _Arrays,
    taps: _Arrays,
    request: Request,
) -> _Arrays:
    """The outputs f[b, ...] of a checkpointed block for a batch.

    The arguments `taps` and `request` do not affect the outputs. The derivative
    (`_backward`) computes sums of scaled gradients if `request.scales` is not empty,
    and squared norms otherwise. The derivative returns these results as the cotangents
    of `taps`.
    """
    return jax.vmap(partial(_evaluate_block, block, invariants))(examples)


def _forward(block: Block, *arguments: Any) -> tuple[_Arrays, _Saved]:
    # With symbolic_zeros, each argument is a pair of its value and a perturbed flag.
    values = jax.tree.map(lambda x: x.value, arguments)
    invariants, examples, _, request = values
    return _batch_outputs(block, *values), (invariants, examples, request)


def _backward(
    block: Block, saved: _Saved, cotangents: Sequence[Any]
) -> tuple[None, list[jax.Array | None], _Arrays, None]:
    # Outputs that the loss does not use are left out, since their zero cotangent times
    # an infinite derivative would be NaN. Their cotangent is a symbolic zero, which is
    # not an array. But in a scan it is an array of zeros, so that block.outputs is also
    # needed.
    used = tuple(
        i in block.outputs and isinstance(c, jax.Array) and eqs.is_inexact(c)
        for i, c in enumerate(cotangents)
    )
    used_cts = [c for c, on in zip(cotangents, used, strict=True) if on]
    # As in jax.checkpoint, XLA must not start the recomputation before the cotangents
    # exist, and must not merge it with the forward pass, which would store all values
    # inside the block. The barrier prevents both.
    saved, used_cts = jax.lax.optimization_barrier((saved, used_cts))
    shared = eqs.Comparable(block)
    of_examples, of_taps = _backward_on_batch(shared, used, saved, used_cts)
    return None, of_examples, of_taps, None


_batch_outputs.defvjp(_forward, _backward, symbolic_zeros=True)


@partial(jax.jit, static_argnums=(0, 1))
def _backward_on_batch(
    comparable: eqs.Comparable[Block],
    used: tuple[bool, ...],
    saved: _Saved,
    cotangents: _Arrays,
) -> tuple[list[jax.Array | None], _Arrays]:
    """Run the backward pass of a checkpointed block on a batch.

    The pass also computes the norms of the examples' gradients for the block's leaves,
    or the sums of the scaled gradients.

    Args:
      comparable: the block.
      used: for each of the block's outputs, whether it has a cotangent.
      saved: the values of the block's inputs, and the `Request` for norms or sums.
      cotangents: the cotangents of the used outputs, with a leading batch axis.

    Returns:
      For each input that depends on the example, its cotangent, or None for an input of
      a dtype without cotangents.
      For each leaf of the block (`Block`), the sum of its scaled gradients if
      `Request.scales` is not empty, and otherwise squared norms f[b] (`_squares`).
    """
    block, (invariants, examples, request) = comparable.part, saved
    evaluate = partial(_outputs_of_one_example, block.plan.blocks)
    inner_blocks = BlockEvaluation(request, evaluate)
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in cotangents))
    taps, forward = run_with_taps(block.plan, invariants, examples, axes, inner_blocks)

    def used_outputs(taps: Arrays, examples: Arrays) -> RunResult:
        outputs, records = forward(taps, examples)
        return [x for x, on in zip(outputs, used, strict=True) if on], records

    _, vjp, records = jax.vjp(used_outputs, taps, examples, has_aux=True)
    of_taps, of_examples = vjp(cotangents)
    recorded = Records(records, of_taps, invariants)
    # Only floating-point and complex inputs have cotangents.
    pairs = zip(of_examples, examples, strict=True)
    of_inexact = [c if eqs.is_inexact(x) else None for c, x in pairs]
    if request.scales:
        compute = partial(sums_alone, block.plan)
        arguments = (request.scales, *request.finite)
        specs = [spec_of(x) for x in invariants[: block.plan.num_leaves]]
    else:
        batch = examples[0].shape[:1]
        compute, arguments = (partial(_squares, block, batch), (request.clip_norms,))
        specs = jax.P(leading_axis(examples))
    sharded_compute = let_compiler_shard(compute, (invariants, examples), specs)
    return of_inexact, sharded_compute(recorded, *arguments)


def _squares(
    block: Block,
    batch: tuple[int, ...],
    recorded: Records,
    clip_norms: Sequence[ArrayLike],
) -> list[jax.Array]:
    """For each leaf of a checkpointed block, squared norms divided by C², f[b].

    C is the clip norm of the leaf's group, and the norms are those of gradients. The
    leaves of a block are its inputs that are computed from parameters alone. A group is
    a set of leaves that are clipped together. The first leaf of each group gets the
    squared norms of the whole group, and all other leaves get 0. The engine later adds
    the squares of all leaves, so that each group counts once.
    """
    squares = squares_alone(block.plan, batch, recorded, clip_norms)
    out = []
    for i, group in enumerate(block.group_indices):
        # A cotangent has the dtype of its tap, which is at least float32 but may be
        # narrower than the dtype of the square.
        square = _round_up(squares[group], at_least_float32(recorded.inputs[i].dtype))
        is_first = block.group_indices.index(group) == i
        out.append(square if is_first else jnp.zeros_like(square))
    return out


def _round_up(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Cast non-negative numbers to a dtype, and round up if the dtype is narrower."""
    if jnp.promote_types(x.dtype, dtype) == dtype:
        return x.astype(dtype)
    return (x * (1 + margin(4, dtype))).astype(dtype)
