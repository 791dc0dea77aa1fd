"""The books of a batch: what one forward and one backward pass leave at the sites."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from dpjax._core.dtypes import at_least_float32
from dpjax._core.meshes import explicit_mesh, leading_axis, varying_axes, zeros_like
from dpjax.clipping.bookkeeping.analysis.components import Component
from dpjax.clipping.bookkeeping.analysis.plan import Plan
from dpjax.clipping.bookkeeping.analysis.sites import KeptSite, RuledSite
from dpjax.clipping.bookkeeping.evaluate import at_site
from dpjax.clipping.bookkeeping.evaluate.run import AtBlock, Ran, run
from dpjax.clipping.bookkeeping.jaxpr.alike import Alike
from dpjax.clipping.bookkeeping.jaxpr.equations import aval


class SiteRecords(NamedTuple):
    """What one forward and one backward pass leave, each with a leading axis b.

    Attributes:
      outputs: the loss and the leaves of aux.
      records: by site number, the other inputs of the site's equation.
      cotangents: by site number, of what was tapped.
    """

    outputs: list[jax.Array]
    records: dict[int, tuple[jax.Array, ...]]
    cotangents: list[jax.Array]

    def seen_by(self, component: Component) -> "Seen":
        """What a component's operands left."""
        return Seen(
            [self.records.get(i, ()) for i in component.operands],
            [self.cotangents[i] for i in component.operands],
        )

    def without_aux(self) -> "SiteRecords":
        """The same with the loss as only output."""
        return self._replace(outputs=self.outputs[:1])


class Seen(NamedTuple):
    """The part of the books that is of some sites, in their order."""

    records: list[tuple[jax.Array, ...]]
    cotangents: list[jax.Array]


class AtBlocks(NamedTuple):
    """What becomes of kept blocks.

    Attributes:
      sums: whether sums are wanted, in the shapes of what enters a block, and else the
        squares f[b].
      each: what the blocks need of every example, a tree with a leading axis b.
      outputs: from `each` of one example, what to do at a block.
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
    """Run the loss on the batch and back to the taps."""
    axes = varying_axes(plan.scope.closed.out_avals[0])
    taps, forward = _run_with_taps(plan, leaves, examples, batch, axes, at_blocks)

    def loss_first(taps: Sequence[jax.Array]) -> tuple[jax.Array, Ran]:
        outputs, records = forward(taps, examples)
        return outputs[0], (outputs, records)

    loss, vjp, (outputs, records) = jax.vjp(loss_first, taps, has_aux=True)
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
    """Run a block on the batch and back, from the cotangents of what is used.

    Returns:
      The books, and the cotangents of the examples, None where these have none.
    """
    batch = examples[0].shape[0]
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in cotangents))
    taps, forward = _run_with_taps(plan, known, examples, batch, axes, at_blocks)
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
    """Zeros for all sites, and what a batch of examples leaves with them."""
    numbers = {site: i for i, site in enumerate(plan.sites)}
    leading, mesh = leading_axis(examples), explicit_mesh((known, examples))

    @functools.cache  # many taps are of one type
    def zeros(kind: jax.core.ShapedArray, lengths: tuple[int, ...]) -> jax.Array:
        shape = (batch, *lengths, *kind.shape)
        return zeros_like(kind, shape, leading=leading, mesh=mesh)

    sums = at_blocks is not None and at_blocks.sums
    in_sum = [sums and isinstance(site, KeptSite) for site in plan.sites]
    taps = []
    for site, summed in zip(plan.sites, in_sum, strict=True):
        kind, lengths = aval(site.tapped), tuple(loop.length for loop in site.loops)
        if isinstance(site, KeptSite):
            kind = kind.update(dtype=at_least_float32(kind.dtype))
            one = jax.core.ShapedArray((), kind.dtype)
            taps.append(
                zeros_like(kind, (*lengths, *kind.shape), mesh=mesh)
                if summed
                else zeros(one, lengths)
            )
        else:
            taps.append(zeros(kind, lengths))
    # Each device's own, or derivatives by them would be sums over devices.
    taps = jax.lax.pcast(taps, tuple(sorted(axes)), to="varying")
    each = () if at_blocks is None else at_blocks.each

    def forward(taps: Sequence[jax.Array], examples: Sequence[jax.Array]) -> Ran:
        def one(
            example: Sequence[jax.Array], own: Sequence[jax.Array], each: Any
        ) -> Ran:
            at_block = None if at_blocks is None else at_blocks.outputs(each)
            given = iter(own)
            # Closed over, what is one for all may be sharded as the examples are.
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
    """The books with what sites saw settled, for norms and sums alike."""
    records, cotangents = dict(books.records), list(books.cotangents)
    for i, site in enumerate(plan.sites):
        if isinstance(site, RuledSite):
            seen = at_site.canonicalize(Alike(site), records[i], cotangents[i])
            records[i], cotangents[i] = seen
    return books._replace(records=records, cotangents=cotangents)


def is_inexact(x: jax.Array) -> bool:
    """Whether it may have a cotangent."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
