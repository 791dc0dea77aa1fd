"""The clipped sum from one forward and one backward pass."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core.dtypes import at_least_float32, narrowest_float
from dpjax._core.meshes import compiler_sharded, leading_axis
from dpjax._core.platforms import on_platform
from dpjax._core.rounding import margin, square_sum, staged_sum, upper_sum
from dpjax._core.typing import ArrayLike
from dpjax.clipping._clip import Summed, clip_scales, sum_in_memory
from dpjax.clipping.bookkeeping.analysis.components import Component
from dpjax.clipping.bookkeeping.analysis.plan import Plan, size
from dpjax.clipping.bookkeeping.analysis.sites import RuledSite
from dpjax.clipping.bookkeeping.evaluate import at_component as at
from dpjax.clipping.bookkeeping.evaluate.at_component import factors_of
from dpjax.clipping.bookkeeping.evaluate.books import (
    Seen,
    SiteRecords,
    canonicalize_records,
    keep_books,
)
from dpjax.clipping.bookkeeping.evaluate.reach import Reach, reach
from dpjax.clipping.bookkeeping.jaxpr.equations import Alike
from dpjax.clipping.bookkeeping.rules import factors as fac


class Norms(NamedTuple):
    """Bounds of the examples' squared norms, and the gradients formed for them.

    Attributes:
      squares: for each group an upper bound f[b] of ‖gradient / clip norm‖².
      kept: for each component its leaves' per-example gradients, or None where they
        are not formed.
    """

    squares: list[jax.Array]
    kept: list[list[jax.Array] | None]


def clipped_sum(
    plan: Plan,
    clip_norms: Sequence[ArrayLike],
    leaves: Sequence[jax.Array],
    examples: Sequence[jax.Array],
    mask: jax.Array,
    *,
    by_platform: bool,
) -> Summed:
    """The sum of clipped gradients from one forward and one backward pass.

    Args:
      plan: the analysis of the loss.
      clip_norms: the bound of each group.
      leaves: the parameters' leaves.
      examples: the leaves of the batch arguments, with a leading axis b.
      mask: b[b]; a masked example contributes zero.
      by_platform: whether code lowered for a TPU forms all per-example gradients, and
        makes the sum of them. Products on a TPU are outside the rounding model of
        `dpjax._core.rounding`.
    """
    rows = [form.gram for form in plan.forms]
    rows_on_gpu = [form.gram for form in plan.forms_on_gpu]
    # Without any component that uses rows, the TPU's branch would be the same code.
    by_platform = by_platform and any(rows + rows_on_gpu)

    def chosen(
        books: SiteRecords,
        leaves: Sequence[jax.Array],
        clip_norms: Sequence[ArrayLike],
        mask: jax.Array,
    ) -> tuple[list[jax.Array], jax.Array]:
        books = canonicalize_records(plan, books)
        by_rows = functools.partial(_in_one_pass, plan, rows, clip_norms)
        # The platform is chosen at lowering: one trace may serve several platforms.
        if rows_on_gpu != rows:
            on_gpu = functools.partial(_in_one_pass, plan, rows_on_gpu, clip_norms)
            by_rows = functools.partial(on_platform, "cuda", on_gpu, by_rows)
        if not by_platform:
            return by_rows(books, leaves, mask)
        formed = [False] * len(rows)
        directly = functools.partial(_in_one_pass, plan, formed, clip_norms)
        return on_platform("tpu", directly, by_rows, books, leaves, mask)

    books = keep_books(plan, leaves, examples, mask.shape[0])
    loss, *aux = books.outputs
    shardings = [jax.typeof(x).sharding.spec for x in leaves]
    of_examples = jax.P(leading_axis(examples))
    arrays = (leaves, examples)
    summed = compiler_sharded(chosen, arrays, (shardings, of_examples))
    grads, norm = summed(books.without_aux(), leaves, clip_norms, mask)
    return Summed(grads, loss, norm, aux)


def _in_one_pass(
    plan: Plan,
    by_rows: Sequence[bool],
    clip_norms: Sequence[ArrayLike],
    books: SiteRecords,
    leaves: Sequence[jax.Array],
    mask: jax.Array,
) -> tuple[list[jax.Array], jax.Array]:
    """The sum of clipped gradients, and the norms f[b].

    Where `by_rows` is true for a component, its norms come from rows, and its sum from
    one product over the batch. Elsewhere the norms are taken of per-example gradients,
    and the sum is made of the same gradients.
    """
    # No component needs a reach: its sum uses the very gradients whose norms are taken.
    entering, reaches = plan.inputs(leaves), [None] * len(plan.components)
    squares, kept = _squares(plan, books, entering, clip_norms, by_rows, reaches)
    finite, scales, norm = clip_scales(squares, clip_norms, mask)
    sums = _sums(plan, leaves, by_rows, books, entering, kept, scales, finite)
    return sums, norm


def _squares(
    plan: Plan,
    books: SiteRecords,
    entering: Sequence[Sequence[jax.Array]],
    clip_norms: Sequence[ArrayLike],
    by_rows: Sequence[bool],
    reaches: Sequence[Reach | None],
) -> Norms:
    """Upper bounds of the squared norms, and the per-example gradients formed for them.

    Where a component has a reach, its sum is pulled back once for the whole batch, and
    not made of the per-example gradients formed here. The norm of those gradients is
    then enlarged by a bound on the rounding of both computations.
    """
    batch = books.outputs[0].shape[:1]
    # Zeros give a group without a component a norm of zero.
    squares = [[jnp.zeros(batch, jnp.float32)] for _ in clip_norms]
    kept: list[list[jax.Array] | None] = []
    for component, inputs, rows, found in zip(
        plan.components, entering, by_rows, reaches, strict=True
    ):
        alike, seen = Alike(component), books.seen_by(component)
        if component.kept:
            # The cotangents of a checkpointed block's taps are its squared norms, with
            # an axis for each scan around the block. Only their sum is left to do.
            (group,) = component.own_groups
            for found in seen.cotangents:
                square, terms = staged_sum(found, kept=1)
                squares[group].append(square * (1 + margin(terms + 2, square.dtype)))
            kept.append(None)
            continue
        bounds = [clip_norms[group] for group in component.own_groups]
        if rows:
            (group,) = component.own_groups
            squares[group] += at.squares_of_rows(alike, seen, *bounds)
            kept.append(None)
            continue
        formed = at.form_gradients(alike, seen, inputs, bounds)
        kept.append(formed.gradients)
        for group, square in zip(component.own_groups, formed.squares, strict=True):
            if found is not None:
                # The bound on rounding assumes the least precise dtype involved.
                sizes = _sizes(component, seen, found, clip_norms[group])
                arrays = [*seen.cotangents, *(x for xs in seen.records for x in xs)]
                dtype = narrowest_float([found.dtype, *(x.dtype for x in arrays)])
                square = jnp.square(fac.upper_norm(jnp.sqrt(square), sizes, dtype))
            squares[group].append(square)
    return Norms([upper_sum(parts) for parts in squares], kept)


def _reaches(plan: Plan, entering: Sequence[Sequence[jax.Array]]) -> list[Reach | None]:
    """For each component that forms gradients its reach, or None.

    Such a component has a reach if its sum may be pulled back once for the whole batch.
    Only the engine with two passes needs this: in one pass the gradients formed for the
    norms are still in memory for the sum.
    """
    return [
        None if form.gram else _reach(component, inputs)
        for component, form, inputs in zip(
            plan.components, plan.forms, entering, strict=True
        )
    ]


def _reach(component: Component, inputs: Sequence[jax.Array]) -> Reach | None:
    """The component's reach, or None where its sum needs per-example gradients."""
    ruled = [site for site in component.sites if isinstance(site, RuledSite)]
    # With more rows, the bound on the rounding of their sum would inflate the norm.
    if any(size(site).rows > fac.MOST_ROWS for site in ruled):
        return None
    return reach(component, inputs)


def _sizes(
    component: Component, seen: Seen, found: Reach, clip_norm: ArrayLike
) -> list[fac.Terms]:
    """For each operand, a bound of the terms that the component's gradients sum up.

    Args:
      component: the component.
      seen: the records and cotangents at its sites.
      found: how much the pull-back can enlarge absolute values.
      clip_norm: the unit of the sizes.
    """
    out = []
    for site, others, cotangent, enlarged in zip(
        component.sites, *seen, found.norms, strict=True
    ):
        if isinstance(site, RuledSite):
            factors = factors_of(Alike(site), others, cotangent)
            length, rows = fac.size(factors, clip_norm), factors.rows
        else:
            # A tapped operand's cotangent is its gradient: a sum of one term.
            square = square_sum(fac.wide(cotangent), 1, clip_norm)
            length, rows = jnp.sqrt(square), 1
        out.append(fac.Terms(enlarged * length, rows + found.terms))
    return out


def _sums(
    plan: Plan,
    leaves: Sequence[jax.Array],
    by_sites: Sequence[bool],
    books: SiteRecords,
    entering: Sequence[Sequence[jax.Array]],
    kept: Sequence[list[jax.Array] | None],
    scales: Sequence[jax.Array],
    finite: jax.Array,
) -> list[jax.Array]:
    """The scaled sum of the examples' gradients for each leaf.

    A component's sum comes from one product over the batch for each site where
    `by_sites` is true: its norms must then include a bound on the rounding of these
    products. Elsewhere the sum comes from per-example gradients: those in `kept`, or
    the same gradients formed again.
    """
    total = {}
    for component, pulled, inputs, held in zip(
        plan.components, by_sites, entering, kept, strict=True
    ):
        # The same gradients as for the norms, so the sum needs no further bound.
        if held is not None and not pulled:
            sums = [
                sum_in_memory(x, scales[group], finite)
                for x, group in zip(held, component.groups, strict=True)
            ]
        else:
            function = at.sums_by_sites if pulled else at.sums_of_gradients
            own = [scales[group] for group in component.own_groups]
            seen = books.seen_by(component)
            sums = function(Alike(component), seen, inputs, own, finite)
        total.update(zip(component.leaves, sums, strict=True))
    dtypes = [at_least_float32(x.dtype) for x in leaves]
    # A leaf that no component contains does not enter the loss: its sum is zero.
    return [
        total[i].astype(dtype) if i in total else jnp.zeros(x.shape, dtype)
        for i, (x, dtype) in enumerate(zip(leaves, dtypes, strict=True))
    ]


def squares_alone(
    plan: Plan,
    books: SiteRecords,
    known: Sequence[jax.Array],
    clip_norms: Sequence[ArrayLike],
) -> list[jax.Array]:
    """Upper bounds f[b] of the squared norms, in a pass that makes no sums."""
    books, entering = canonicalize_records(plan, books), plan.inputs(known)
    rows = [form.gram for form in plan.forms]
    reaches = _reaches(plan, entering)
    return _squares(plan, books, entering, clip_norms, rows, reaches).squares


def sums_alone(
    plan: Plan,
    books: SiteRecords,
    known: Sequence[jax.Array],
    leaves: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    finite: jax.Array,
) -> list[jax.Array]:
    """The scaled sum for each leaf, in a pass that knows the scales already."""
    books, entering = canonicalize_records(plan, books), plan.inputs(known)
    by_sites = [
        form.gram or found is not None
        for form, found in zip(plan.forms, _reaches(plan, entering), strict=True)
    ]
    nothing = [None] * len(plan.components)
    return _sums(plan, leaves, by_sites, books, entering, nothing, scales, finite)
