"""Run a loss forward and backward once, and keep inputs and cotangents at its sites."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from dpjax._core.dtypes import at_least_float32
from dpjax._core.meshes import explicit_mesh, leading_axis, sharded_zeros, varying_axes
from dpjax._core.typing import Arrays
from dpjax.clipping._bookkeeping.analysis.plan import Plan
from dpjax.clipping._bookkeeping.analysis.sites import KeptSite, RuledSite
from dpjax.clipping._bookkeeping.evaluate.run import AtBlock, Ran, run
from dpjax.clipping._bookkeeping.jaxpr.equations import aval, is_inexact


class SiteRecords(NamedTuple):
    """The records of one forward and one backward pass, with a leading batch axis b.

    Attributes:
      outputs: the loss and the leaves of aux.
      records: for each site, the values of the equation's inputs except the operand;
        empty for a site without a rule.
      cotangents: for each site, the cotangent of the site's tap; without the axis b
        where a checkpointed block returns sums.
    """

    outputs: list[jax.Array]
    records: list[tuple[jax.Array, ...]]
    cotangents: list[jax.Array]

    def without_aux(self) -> "SiteRecords":
        """The same records with the loss as the only output."""
        return self._replace(outputs=self.outputs[:1])


class AtBlocks(NamedTuple):
    """How to evaluate the checkpointed blocks of a loss.

    Attributes:
      sums: True if the backward passes of the blocks return sums in the shapes of their
        parameters; False if they return squared norms f[b].
      each: the per-example values that the blocks need, a tree with a leading axis b.
      outputs: a function of one example's entry of `each`. It returns the function that
        evaluates a block for this example.
    """

    sums: bool = False
    each: Any = ()
    outputs: Callable[[Any], AtBlock | None] = lambda each: None


NO_BLOCKS = AtBlocks()


def keep_books(
    plan: Plan, leaves: Arrays, examples: Arrays, at_blocks: AtBlocks = NO_BLOCKS
) -> SiteRecords:
    """Run a loss on a batch, and record inputs and cotangents at its sites.

    To get a cotangent at each site, zeros called taps are added there, and the loss is
    differentiated by the taps.

    Args:
      plan: the analysis of the loss.
      leaves: the parameters' leaves.
      examples: the leaves of the batch arguments, with a leading batch axis.
      at_blocks: how checkpointed blocks are evaluated, if the plan has any.
    """
    axes = varying_axes(plan.scope.closed.out_avals[0])
    taps, forward = _run_with_taps(plan, leaves, examples, axes, at_blocks)

    def loss_first(taps: Arrays) -> tuple[jax.Array, Ran]:
        outputs, records = forward(taps, examples)
        return outputs[0], (outputs, records)

    loss, vjp, (outputs, records) = jax.vjp(loss_first, taps, has_aux=True)
    # One example's loss depends only on its own taps. So a cotangent of ones gives the
    # cotangents of all examples in one backward pass.
    (cotangents,) = vjp(jnp.ones_like(loss))
    return SiteRecords(outputs, records, cotangents)


def books_of_block(
    plan: Plan,
    known: Arrays,
    examples: Arrays,
    used: Sequence[bool],
    cotangents: Arrays,
    at_blocks: AtBlocks = NO_BLOCKS,
) -> tuple[SiteRecords, list[jax.Array | None]]:
    """Run a block on a batch, then backward from the cotangents of its used outputs.

    Args:
      plan: the analysis of the block.
      known: the block's batch-invariant inputs, parameter leaves first.
      examples: the block's other inputs, with a leading batch axis.
      used: for each of the block's outputs, whether it has a cotangent.
      cotangents: the cotangents of these outputs.
      at_blocks: how checkpointed blocks inside this block are evaluated.

    Returns:
      The records of the block. For each array in `examples`, its cotangent, or None for
      an array of integers or booleans.
    """
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in cotangents))
    taps, forward = _run_with_taps(plan, known, examples, axes, at_blocks)

    def used_outputs(taps: Arrays, examples: Arrays) -> tuple[list[jax.Array], Ran]:
        outputs, records = forward(taps, examples)
        kept = [x for x, on in zip(outputs, used, strict=True) if on]
        return kept, (outputs, records)

    examples = list(examples)
    _, vjp, (outputs, records) = jax.vjp(used_outputs, taps, examples, has_aux=True)
    of_taps, of_examples = vjp(list(cotangents))
    # Only floating-point and complex inputs have cotangents.
    pairs = zip(of_examples, examples, strict=True)
    of_reals = [c if is_inexact(x) else None for c, x in pairs]
    return SiteRecords(outputs, records, of_taps), of_reals


def _run_with_taps(
    plan: Plan,
    known: Arrays,
    examples: Arrays,
    axes: frozenset[str],
    at_blocks: AtBlocks,
) -> tuple[list[jax.Array], Callable[..., Ran]]:
    """Make zeros to add at sites (taps), and a function that runs a batch with taps.

    The function maps the taps and the examples to the outputs and the records of all
    sites. `axes` are the mesh axes along which the taps vary.
    """
    batch = examples[0].shape[0]
    leading, mesh = leading_axis(examples), explicit_mesh((known, examples))

    @functools.cache  # Many taps have the same type. They share one array of zeros.
    def zeros(kind: jax.core.ShapedArray, lengths: tuple[int, ...]) -> jax.Array:
        shape = (batch, *lengths, *kind.shape)
        return sharded_zeros(kind, shape, leading=leading, mesh=mesh)

    in_sum = [at_blocks.sums and isinstance(site, KeptSite) for site in plan.sites]
    taps = []
    for site, summed in zip(plan.sites, in_sum, strict=True):
        kind = aval(site.tap_variable)
        lengths = tuple(loop.length for loop in site.loops)
        if isinstance(site, KeptSite):
            # The tap's cotangent is the block's result. So the tap has the type of the
            # result: one number per example, or a sum with the operand's shape.
            dtype = at_least_float32(kind.dtype)
            one = jax.core.ShapedArray((), dtype)
            kind = kind.update(dtype=dtype) if summed else one
        taps.append(
            sharded_zeros(kind, (*lengths, *kind.shape), mesh=mesh)
            if summed
            else zeros(kind, lengths)
        )
    # In `jax.shard_map` the taps must vary over the devices. For a value that devices
    # share, the derivative would be a sum over the devices.
    taps = jax.lax.pcast(taps, tuple(sorted(axes)), to="varying")

    def forward(taps: Arrays, examples: Arrays) -> Ran:
        def one(example: Arrays, own: Arrays, each: Any) -> Ran:
            given = iter(own)
            # Taps for sums have no batch axis. They are closed over, and not passed to
            # vmap, so that they may be sharded along the same mesh axes as examples.
            tapped = [
                tap if summed else next(given)
                for tap, summed in zip(taps, in_sum, strict=True)
            ]
            inputs, at_block = [*known, *example], at_blocks.outputs(each)
            outputs, records = run(plan.scope, inputs, tapped, at_block)
            remaining = iter(records)
            ruled = [isinstance(site, RuledSite) for site in plan.sites]
            return outputs, [next(remaining) if on else () for on in ruled]

        own = [tap for tap, summed in zip(taps, in_sum, strict=True) if not summed]
        return jax.vmap(one, axis_size=batch)(list(examples), own, at_blocks.each)

    return taps, forward
