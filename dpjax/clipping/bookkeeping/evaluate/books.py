"""Run the loss forward and backward once, and record inputs and cotangents at sites."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from dpjax._core.dtypes import at_least_float32
from dpjax._core.meshes import explicit_mesh, leading_axis, sharded_zeros, varying_axes
from dpjax.clipping.bookkeeping.analysis.components import Component
from dpjax.clipping.bookkeeping.analysis.plan import Plan
from dpjax.clipping.bookkeeping.analysis.sites import KeptSite, RuledSite
from dpjax.clipping.bookkeeping.evaluate import at_component
from dpjax.clipping.bookkeeping.evaluate.run import AtBlock, Ran, run
from dpjax.clipping.bookkeeping.jaxpr.equations import Alike, aval


class SiteRecords(NamedTuple):
    """The results of one forward and one backward pass, with a leading batch axis b.

    Attributes:
      outputs: the loss and the leaves of aux.
      records: by site number, the values of the equation's inputs except the operand;
        only for sites with a rule.
      cotangents: by site number, the cotangent of the site's tap.
    """

    outputs: list[jax.Array]
    records: dict[int, tuple[jax.Array, ...]]
    cotangents: list[jax.Array]

    def seen_by(self, component: Component) -> "Seen":
        """The records and cotangents at the sites of one component."""
        return Seen(
            [self.records.get(i, ()) for i in component.operands],
            [self.cotangents[i] for i in component.operands],
        )

    def without_aux(self) -> "SiteRecords":
        """The same records with the loss as the only output."""
        return self._replace(outputs=self.outputs[:1])


class Seen(NamedTuple):
    """The records and cotangents of some sites, in the order of the sites."""

    records: list[tuple[jax.Array, ...]]
    cotangents: list[jax.Array]


class AtBlocks(NamedTuple):
    """How checkpointed blocks are evaluated.

    Attributes:
      sums: whether the blocks return sums, in the shapes of their parameters. Otherwise
        the blocks return squared norms f[b].
      each: the per-example values that the blocks need, a tree with a leading axis b.
      outputs: a function from one example's entry of `each` to the function that
        evaluates a block for that example.
    """

    sums: bool
    each: Any
    outputs: Callable[[Any], AtBlock]


def keep_books(
    plan: Plan,
    leaves: Sequence[jax.Array],
    examples: Sequence[jax.Array],
    batch: int,
    at_blocks: AtBlocks | None = None,
) -> SiteRecords:
    """Run the loss on the batch, and differentiate it by the taps.

    Args:
      plan: the analysis of the loss.
      leaves: the parameters' leaves.
      examples: the leaves of the batch arguments, with a leading batch axis.
      batch: the batch size b.
      at_blocks: how checkpointed blocks are evaluated, where the plan has any.
    """
    axes = varying_axes(plan.scope.closed.out_avals[0])
    taps, forward = _run_with_taps(plan, leaves, examples, batch, axes, at_blocks)

    def loss_first(taps: Sequence[jax.Array]) -> tuple[jax.Array, Ran]:
        outputs, records = forward(taps, examples)
        return outputs[0], (outputs, records)

    loss, vjp, (outputs, records) = jax.vjp(loss_first, taps, has_aux=True)
    # One example's loss depends on its own taps alone, so a cotangent of ones gives
    # the cotangents of all examples in one backward pass.
    (cotangents,) = vjp(jnp.ones_like(loss))
    return SiteRecords(outputs, records, cotangents)


def books_of_block(
    plan: Plan,
    known: Sequence[jax.Array],
    examples: Sequence[jax.Array],
    used: Sequence[bool],
    cotangents: Sequence[jax.Array],
    at_blocks: AtBlocks | None = None,
) -> tuple[SiteRecords, list[jax.Array | None]]:
    """Run a block on the batch and back, from the cotangents of the used outputs.

    Args:
      plan: the analysis of the block.
      known: the block's batch-invariant inputs, parameter leaves first.
      examples: the block's other inputs, with a leading batch axis.
      used: which of the block's outputs have a cotangent.
      cotangents: the cotangents of those outputs.
      at_blocks: how checkpointed blocks inside this block are evaluated.

    Returns:
      The records, and for each array of examples its cotangent, or None for an array of
      integers or booleans.
    """
    batch = examples[0].shape[0]
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in cotangents))
    taps, forward = _run_with_taps(plan, known, examples, batch, axes, at_blocks)
    # Only floating-point and complex inputs have cotangents.
    real = [is_inexact(x) for x in examples]

    def real_outputs(
        taps: Sequence[jax.Array], reals: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], Ran]:
        given = iter(reals)
        full = [next(given) if on else x for on, x in zip(real, examples, strict=True)]
        outputs, records = forward(taps, full)
        kept = [x for x, on in zip(outputs, used, strict=True) if on]
        return kept, (outputs, records)

    reals = [x for on, x in zip(real, examples, strict=True) if on]
    _, vjp, (outputs, records) = jax.vjp(real_outputs, taps, reals, has_aux=True)
    of_taps, of_reals = vjp(list(cotangents))
    given = iter(of_reals)
    return (
        SiteRecords(outputs, records, of_taps),
        [next(given) if on else None for on in real],
    )


def _run_with_taps(
    plan: Plan,
    known: Sequence[jax.Array],
    examples: Sequence[jax.Array],
    batch: int,
    axes: frozenset[str],
    at_blocks: AtBlocks | None,
) -> tuple[list[jax.Array], Callable[..., Ran]]:
    """Zero taps for all sites, and the function from taps and examples to outputs.

    The function also returns the records of the sites with a rule.
    """
    numbers = {site: i for i, site in enumerate(plan.sites)}
    leading, mesh = leading_axis(examples), explicit_mesh((known, examples))

    @functools.cache  # Many taps have the same type: they share one array of zeros.
    def zeros(kind: jax.core.ShapedArray, lengths: tuple[int, ...]) -> jax.Array:
        shape = (batch, *lengths, *kind.shape)
        return sharded_zeros(kind, shape, leading=leading, mesh=mesh)

    sums = at_blocks is not None and at_blocks.sums
    in_sum = [sums and isinstance(site, KeptSite) for site in plan.sites]
    taps = []
    for site, summed in zip(plan.sites, in_sum, strict=True):
        kind, lengths = aval(site.tapped), tuple(loop.length for loop in site.loops)
        if isinstance(site, KeptSite):
            # A block's result comes back as the cotangent of this tap, so the tap has
            # the result's type: one number per example, or an operand-shaped sum.
            kind = kind.update(dtype=at_least_float32(kind.dtype))
            one = jax.core.ShapedArray((), kind.dtype)
            taps.append(
                sharded_zeros(kind, (*lengths, *kind.shape), mesh=mesh)
                if summed
                else zeros(one, lengths)
            )
        else:
            taps.append(zeros(kind, lengths))
    # In `jax.shard_map` the taps must vary over the devices. The derivative by a value
    # that devices share would be a sum over the devices.
    taps = jax.lax.pcast(taps, tuple(sorted(axes)), to="varying")
    each = () if at_blocks is None else at_blocks.each

    def forward(taps: Sequence[jax.Array], examples: Sequence[jax.Array]) -> Ran:
        def one(
            example: Sequence[jax.Array], own: Sequence[jax.Array], each: Any
        ) -> Ran:
            at_block = None if at_blocks is None else at_blocks.outputs(each)
            given = iter(own)
            # Taps for sums have no batch axis. They are closed over instead of passed
            # to vmap, so that they may be sharded along the same mesh axes as examples.
            tapped = [
                tap if summed else next(given)
                for tap, summed in zip(taps, in_sum, strict=True)
            ]
            inputs = [*known, *example]
            return run(plan.scope, inputs, dict(enumerate(tapped)), numbers, at_block)

        own = [tap for tap, summed in zip(taps, in_sum, strict=True) if not summed]
        return jax.vmap(one, axis_size=batch)(list(examples), own, each)

    return taps, forward


def canonicalize_records(plan: Plan, books: SiteRecords) -> SiteRecords:
    """The records and cotangents in canonical form, as norms and sums both use them."""
    records, cotangents = dict(books.records), list(books.cotangents)
    for i, site in enumerate(plan.sites):
        if isinstance(site, RuledSite):
            seen = at_component.canonicalize(Alike(site), records[i], cotangents[i])
            records[i], cotangents[i] = seen
    return books._replace(records=records, cotangents=cotangents)


def is_inexact(x: jax.Array) -> bool:
    """Whether x has a floating-point or complex dtype, and so may have a cotangent."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
