"""The clipped sum from one forward and one backward pass."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpjax._dtypes import at_least_float32
from dpjax._meshes import compiler_sharded, leading_axis
from dpjax._rounding import square_sum, upper_sum
from dpjax.bookkeeping import factors as fac
from dpjax.bookkeeping.alike import Alike
from dpjax.bookkeeping.at_site import (
    by_rule,
    factors_of,
    is_real,
    square_of_rows,
    transposed,
    widened,
)
from dpjax.bookkeeping.books import Books, keep_books, settled
from dpjax.bookkeeping.components import Component, Root, pull_back
from dpjax.bookkeeping.plan import Plan, aligned, size
from dpjax.bookkeeping.reach import Reach, reach
from dpjax.clipping import clip_scales, if_finite, scaled, scaled_sum, sum_of_held


def clipped_sum(
    plan: Plan,
    leaves: Sequence[Any],
    examples: Sequence[jax.Array],
    clip_norms: Sequence[jax.typing.ArrayLike],
    mask: jax.Array,
    *,
    two_passes: bool,
) -> tuple[list[jax.Array], jax.Array, jax.Array, list[Any]]:
    """The sum of clipped gradients; per-example losses, norms and leaves of aux.

    Args:
      plan: the analysis of the loss.
      leaves: the parameters' leaves.
      examples: the leaves of the batch arguments, with a leading axis b.
      clip_norms: the bound of each of the plan's groups.
      mask: b[b]; a masked example contributes zero.
      two_passes: whether the sum comes from a second pass, so that nothing of the
        first is kept but the norms.
    """
    books = keep_books(plan, leaves, examples, mask.shape[0])
    loss, *aux = books.outputs
    per_example = jax.P(leading_axis(examples))
    shardings = [jax.typeof(x).sharding.spec for x in leaves]

    def weights(books: Books, leaves: Any, clip_norms: Any, mask: Any) -> Any:
        reaches = _reaches(plan, leaves, two_passes=two_passes)
        squares, kept = _squares(plan, books, leaves, clip_norms, reaches)
        return *clip_scales(squares, clip_norms, mask), kept

    def one_pass(books: Books, leaves: Any, *inputs: Any) -> Any:
        books = settled(plan, books)
        finite, scales, norm, kept = weights(books, leaves, *inputs)
        by_sites = [form.gram for form in plan.forms]
        grads = _scaled_sum(plan, books, kept, by_sites, leaves, scales, finite)
        return grads, norm

    def first_pass(books: Books, *inputs: Any) -> Any:
        return weights(settled(plan, books), *inputs)[:3]

    def second_pass(books: Books, leaves: Any, scales: Any, finite: Any) -> Any:
        books, kept = settled(plan, books), [None] * len(plan.components)
        reaches = _reaches(plan, leaves, two_passes=True)
        by_sites = [
            form.gram or found is not None
            for form, found in zip(plan.forms, reaches, strict=True)
        ]
        return _scaled_sum(plan, books, kept, by_sites, leaves, scales, finite)

    arrays = (leaves, examples)
    inputs = (books.without_aux(), leaves, clip_norms, mask)
    if not two_passes:
        summed = compiler_sharded(one_pass, arrays, (shardings, per_example))
        grads, norm = summed(*inputs)
        return grads, loss, norm, aux

    weighed = compiler_sharded(first_pass, arrays, per_example)
    finite, scales, norm = weighed(*inputs)
    # Behind the barrier XLA takes it for another computation.
    leaves, scales = jax.lax.optimization_barrier((leaves, scales))
    books = keep_books(plan, leaves, examples, mask.shape[0]).without_aux()
    summed = compiler_sharded(second_pass, arrays, shardings)
    return summed(books, leaves, scales, finite), loss, norm, aux


def _squares(
    plan: Plan,
    books: Books,
    leaves: Sequence[Any],
    clip_norms: Sequence[Any],
    reaches: Sequence[Reach | None],
) -> tuple[list[jax.Array], list[list[jax.Array] | None]]:
    """For each group at least ‖gradient / clip norm‖², f[b].

    And for each component its leaves' per-example gradients, where they were formed.
    Where a component has a reach the sum is not made of these: their norm is enlarged
    by what the terms of either may round.
    """
    squares = [[jnp.zeros(books.outputs[0].shape, jnp.float32)] for _ in clip_norms]
    kept: list[list[jax.Array] | None] = []
    for number, (component, form) in enumerate(
        zip(plan.components, plan.forms, strict=True)
    ):
        groups = [plan.groups[i] for i in component.leaves]
        if form.gram:
            clip_norm = clip_norms[groups[0]]
            squares[groups[0]] += [
                _gram_square(plan, root, books, clip_norm)
                for root in component.roots or ()
            ]
            kept.append(None)
            continue
        gradients = _per_example(plan, component, books, leaves)
        kept.append(gradients)
        for group in dict.fromkeys(groups):
            clip_norm = clip_norms[group]
            square = upper_sum(
                [
                    square_sum(g, 1, unit=clip_norm)
                    for i, g in zip(groups, gradients, strict=True)
                    if i == group
                ]
            )
            if (found := reaches[number]) is not None:
                sizes = _sizes(plan, component, books, found, clip_norm)
                square = jnp.square(fac.upper_norm(jnp.sqrt(square), sizes))
            squares[group].append(square)
    return [upper_sum(parts) for parts in squares], kept


def _reaches(
    plan: Plan, leaves: Sequence[Any], *, two_passes: bool
) -> list[Reach | None]:
    """For each component its reach, where its sum may be pulled back in a second pass.

    In one pass the gradients that were formed for the norm are at hand.
    """
    return [
        _reach(plan, component, leaves) if two_passes and not form.gram else None
        for component, form in zip(plan.components, plan.forms, strict=True)
    ]


def _reach(plan: Plan, component: Component, leaves: Sequence[Any]) -> Reach | None:
    """The component's reach, or None where its gradients are to be formed."""
    sites = [plan.sites[i] for i in component.operands]
    if any(site.rule is not None and size(site).rows > fac.MOST_ROWS for site in sites):
        return None
    return reach(plan.from_leaves, component, leaves)


def _sizes(
    plan: Plan, component: Component, books: Books, found: Reach, clip_norm: Any
) -> list[tuple[jax.Array, int]]:
    """Of the terms of a component's gradients, for each operand; see `upper_norm`."""
    out = []
    for i, enlarged in zip(component.operands, found.norms, strict=True):
        if plan.sites[i].rule is None:
            square = square_sum(fac.wide(books.cotangents[i]), 1, clip_norm)
            length, rows = jnp.sqrt(square), 1
        else:
            factors = factors_of(
                Alike(plan.sites[i]), books.records[i], books.cotangents[i]
            )
            length, rows = fac.size(factors, clip_norm), factors.rows
        out.append((enlarged * length, rows + found.terms))
    return out


def _scaled_sum(
    plan: Plan,
    books: Books,
    kept: Sequence[list[jax.Array] | None],
    by_sites: Sequence[bool],
    leaves: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    finite: jax.Array,
) -> list[jax.Array]:
    """The leaves' gradients, summed over the examples by each group's scales.

    By one product for each site, where norms bound what becomes of an example there;
    elsewhere they bound the gradients that were formed, and nothing else is summed.
    """
    total = [jnp.zeros(x.shape, at_least_float32(x.dtype)) for x in leaves]
    for component, held, pulled in zip(plan.components, kept, by_sites, strict=True):
        groups = [plan.groups[i] for i in component.leaves]
        if pulled:
            of_group = {
                g: _sum_of_sites(plan, component, books, leaves, scales[g], finite)
                for g in dict.fromkeys(groups)
            }
            sums = [of_group[g][k] for k, g in enumerate(groups)]
        else:
            add, formed = sum_of_held, held
            if formed is None:
                add, formed = scaled_sum, _per_example(plan, component, books, leaves)
            sums = [
                add(x, scales[group], finite)
                for x, group in zip(formed, groups, strict=True)
            ]
        for i, x in zip(component.leaves, sums, strict=True):
            total[i] = x.astype(total[i].dtype)
    return total


def _gram_square(plan: Plan, root: Root, books: Books, clip_norm: Any) -> jax.Array:
    """A root's squared norm from rows."""
    swaps = aligned(root, plan.sites)
    assert swaps is not None
    return square_of_rows(
        tuple(Alike(plan.sites[i]) for i in root.operands),
        tuple(swaps),
        [books.records[i] for i in root.operands],
        [books.cotangents[i] for i in root.operands],
        clip_norm,
    )


def _per_example(
    plan: Plan, component: Component, books: Books, leaves: Sequence[Any]
) -> list[jax.Array]:
    """Per-example gradients of a component's leaves, f[b, ...]."""
    at_operands = []
    for i in component.operands:
        site, gradient = plan.sites[i], books.cotangents[i]
        if site.rule is not None:
            others = widened(books.records[i])
            gradient = by_rule(Alike(site), "gradient", others, fac.wide(gradient))
        shared = [1 + k for k, loop in enumerate(site.loops) if loop.shared]
        at_operands.append(jnp.sum(gradient, axis=shared) if shared else gradient)

    def pull(cotangents: list[Any]) -> list[Any]:
        return pull_back(plan.from_leaves, component, leaves, cotangents)

    return [fac.wide(g) for g in jax.vmap(pull)(at_operands)]


def _sum_of_sites(
    plan: Plan,
    component: Component,
    books: Books,
    leaves: Sequence[Any],
    scale: jax.Array,
    finite: jax.Array,
) -> list[jax.Array]:
    """The scaled sum of a component's gradients, by one product for each site."""
    cotangents = [books.cotangents[i] for i in component.operands]
    records = [
        [if_finite(x, finite) if is_real(x) else x for x in books.records.get(i, ())]
        for i in component.operands
    ]
    # The norm's own.
    dtype = jnp.result_type(
        jnp.float32, *map(fac.wide, filter(is_real, sum(records, cotangents)))
    )
    sums = []
    for i, others, cotangent in zip(
        component.operands, records, cotangents, strict=True
    ):
        share = scaled(cotangent.astype(dtype), scale, finite)
        if plan.sites[i].rule is None:
            sums.append(jnp.sum(share, axis=0))
        else:
            others = [x.astype(dtype) if is_real(x) else x for x in others]
            sums.append(transposed(Alike(plan.sites[i]), others, share))
    pulled = pull_back(plan.from_leaves, component, leaves, sums)
    # Without examples there is nothing to pull back, through parameters that may be
    # why no gradient is finite.
    return [jnp.where(jnp.any(finite), x, 0.0) for x in pulled]
