"""The clipped sum from one forward and one backward pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax._dtypes import at_least_float32
from dpjax._meshes import (
    compiler_sharded,
    explicit_mesh,
    leading_axis,
    like,
    varying_axes,
    zeros_like,
)
from dpjax._rounding import square_sum, upper_sum
from dpjax.bookkeeping import factors as fac
from dpjax.bookkeeping.alike import Alike
from dpjax.bookkeeping.components import Component, Root, pull_back
from dpjax.bookkeeping.factors import Factors, OneHot
from dpjax.bookkeeping.plan import Plan, aligned, size
from dpjax.bookkeeping.reach import Reach, reach
from dpjax.bookkeeping.run import run
from dpjax.bookkeeping.sites import Site
from dpjax.bookkeeping.trace import aval, bind
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
    books = _keep_books(plan, leaves, examples, mask.shape[0])
    loss, *aux = books.outputs
    per_example = jax.P(leading_axis(examples))
    shardings = [jax.typeof(x).sharding.spec for x in leaves]

    def weights(books: _Books, leaves: Any, clip_norms: Any, mask: Any) -> Any:
        reaches = _reaches(plan, leaves, two_passes=two_passes)
        squares, kept = _squares(plan, books, leaves, clip_norms, reaches)
        return *clip_scales(squares, clip_norms, mask), kept

    def one_pass(books: _Books, leaves: Any, *inputs: Any) -> Any:
        books = _settled(plan, books)
        finite, scales, norm, kept = weights(books, leaves, *inputs)
        by_sites = [form.gram for form in plan.forms]
        grads = _scaled_sum(plan, books, kept, by_sites, leaves, scales, finite)
        return grads, norm

    def first_pass(books: _Books, *inputs: Any) -> Any:
        return weights(_settled(plan, books), *inputs)[:3]

    def second_pass(books: _Books, leaves: Any, scales: Any, finite: Any) -> Any:
        books, kept = _settled(plan, books), [None] * len(plan.components)
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
    books = _keep_books(plan, leaves, examples, mask.shape[0]).without_aux()
    summed = compiler_sharded(second_pass, arrays, shardings)
    return summed(books, leaves, scales, finite), loss, norm, aux


class _Books(NamedTuple):
    """What one forward and one backward pass leave, each with a leading axis b.

    Attributes:
      outputs: the loss and the leaves of aux.
      records: by site number, the other inputs of the site's equation.
      cotangents: by site number, of what was tapped.
    """

    outputs: list[Any]
    records: dict[int, tuple[Any, ...]]
    cotangents: list[Any]

    def without_aux(self) -> "_Books":
        """The same with the loss as only output."""
        return self._replace(outputs=self.outputs[:1])


def _keep_books(
    plan: Plan, leaves: Sequence[Any], examples: Sequence[Any], batch: int
) -> _Books:
    """Run the loss on the batch and back to the taps."""
    numbers = {site: i for i, site in enumerate(plan.sites)}
    axes = tuple(sorted(varying_axes(plan.scope.closed.out_avals[0])))
    taps = [
        zeros_like(
            aval(s.tapped),
            (batch, *(loop.length for loop in s.loops), *aval(s.tapped).shape),
            leading=leading_axis(examples),
            mesh=explicit_mesh((leaves, examples)),
        )
        for s in plan.sites
    ]
    # Each device's own, or derivatives by them would be sums over devices.
    taps = jax.lax.pcast(taps, axes, to="varying")

    def forward(taps: list[Any]) -> tuple[Any, Any]:
        def one(example: Sequence[Any], taps: Sequence[Any]) -> tuple[Any, Any]:
            inputs = [*leaves, *example]
            return run(plan.scope, inputs, dict(enumerate(taps)), numbers)

        outputs, records = jax.vmap(one, axis_size=batch)(examples, taps)
        return outputs[0], (outputs, records)

    loss, vjp, (outputs, records) = jax.vjp(forward, taps, has_aux=True)
    (cotangents,) = vjp(jnp.ones_like(loss))
    return _Books(outputs, records, cotangents)


def _settled(plan: Plan, books: _Books) -> _Books:
    """The books with what sites saw settled, for norms and sums alike."""
    records, cotangents = dict(books.records), list(books.cotangents)
    for i, site in enumerate(plan.sites):
        if site.rule is not None:
            records[i], cotangents[i] = _by_rule(
                Alike(site), "settled", records[i], cotangents[i]
            )
    return books._replace(records=records, cotangents=cotangents)


def _squares(
    plan: Plan,
    books: _Books,
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
    plan: Plan, component: Component, books: _Books, found: Reach, clip_norm: Any
) -> list[tuple[jax.Array, int]]:
    """Of the terms of a component's gradients, for each operand; see `upper_norm`."""
    out = []
    for i, enlarged in zip(component.operands, found.norms, strict=True):
        if plan.sites[i].rule is None:
            square = square_sum(fac.wide(books.cotangents[i]), 1, clip_norm)
            length, rows = jnp.sqrt(square), 1
        else:
            factors = _rows(Alike(plan.sites[i]), books.records[i], books.cotangents[i])
            length, rows = fac.size(factors, clip_norm), factors.rows
        out.append((enlarged * length, rows + found.terms))
    return out


def _scaled_sum(
    plan: Plan,
    books: _Books,
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


def _gram_square(plan: Plan, root: Root, books: _Books, clip_norm: Any) -> jax.Array:
    """A root's squared norm from rows."""
    swaps = aligned(root, plan.sites)
    assert swaps is not None
    return _square_of_rows(
        tuple(Alike(plan.sites[i]) for i in root.operands),
        tuple(swaps),
        [books.records[i] for i in root.operands],
        [books.cotangents[i] for i in root.operands],
        clip_norm,
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _square_of_rows(
    sites: tuple[Alike, ...],
    swaps: tuple[bool, ...],
    records: list[Any],
    cotangents: list[Any],
    clip_norm: Any,
) -> jax.Array:
    rows = map(_rows, sites, records, cotangents)
    matched = [
        Factors(f.right, f.left) if swap else f
        for f, swap in zip(rows, swaps, strict=True)
    ]
    return fac.square_norm(matched, clip_norm)


@functools.partial(jax.jit, static_argnums=0)
def _rows(alike: Alike, records: Sequence[Any], cotangent: Any) -> Factors:
    """The factors of a site, all iterations in f[b, g, t, ...]."""
    site = alike.site
    function = site.rule.factors  # pyright: ignore[reportOptionalMemberAccess]
    left, right = _mapped(site, function)(_widened(records), fac.wide(cotangent))
    if isinstance(left, OneHot):
        left = OneHot(_merge(site, left.position[..., None])[..., 0])
    else:
        left = _merge(site, left)
    return Factors(left, _merge(site, right))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _by_rule(alike: Alike, method: str, records: Any, cotangent: Any) -> Any:
    """What a method of the site's rule makes of all iterations and examples."""
    return _mapped(alike.site, getattr(alike.site.rule, method))(records, cotangent)


def _mapped(site: Site, function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule's method over iterations and examples."""

    def one(others: Any, cotangent: Any) -> Any:
        return function(site.eqn, site.position, others, cotangent)

    for _ in range(len(site.loops) + 1):
        one = jax.vmap(one)
    return one


def _merge(site: Site, x: jax.Array) -> jax.Array:
    """Iterations into rows, or into groups where each has its operand."""
    for depth in reversed(range(len(site.loops))):
        axis = 1 + depth
        if site.loops[depth].shared:
            x = jnp.moveaxis(x, axis, -3)
            x = x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])
        else:
            x = jnp.moveaxis(x, axis, -4)
            x = x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])
    return x


def _per_example(
    plan: Plan, component: Component, books: _Books, leaves: Sequence[Any]
) -> list[jax.Array]:
    """Per-example gradients of a component's leaves, f[b, ...]."""
    at_operands = []
    for i in component.operands:
        site, gradient = plan.sites[i], books.cotangents[i]
        if site.rule is not None:
            others = _widened(books.records[i])
            gradient = _by_rule(Alike(site), "gradient", others, fac.wide(gradient))
        shared = [1 + k for k, loop in enumerate(site.loops) if loop.shared]
        at_operands.append(jnp.sum(gradient, axis=shared) if shared else gradient)

    def pull(cotangents: list[Any]) -> list[Any]:
        return pull_back(plan.from_leaves, component, leaves, cotangents)

    return [fac.wide(g) for g in jax.vmap(pull)(at_operands)]


def _sum_of_sites(
    plan: Plan,
    component: Component,
    books: _Books,
    leaves: Sequence[Any],
    scale: jax.Array,
    finite: jax.Array,
) -> list[jax.Array]:
    """The scaled sum of a component's gradients, by one product for each site."""
    cotangents = [books.cotangents[i] for i in component.operands]
    records = [
        [if_finite(x, finite) if _is_real(x) else x for x in books.records.get(i, ())]
        for i in component.operands
    ]
    # The norm's own.
    dtype = jnp.result_type(
        jnp.float32, *map(fac.wide, filter(_is_real, sum(records, cotangents)))
    )
    sums = []
    for i, others, cotangent in zip(
        component.operands, records, cotangents, strict=True
    ):
        share = scaled(cotangent.astype(dtype), scale, finite)
        if plan.sites[i].rule is None:
            sums.append(jnp.sum(share, axis=0))
        else:
            others = [x.astype(dtype) if _is_real(x) else x for x in others]
            sums.append(_transposed(Alike(plan.sites[i]), others, share))
    pulled = pull_back(plan.from_leaves, component, leaves, sums)
    # Without examples there is nothing to pull back, through parameters that may be
    # why no gradient is finite.
    return [jnp.where(jnp.any(finite), x, 0.0) for x in pulled]


@functools.partial(jax.jit, static_argnums=0)
def _transposed(alike: Alike, others: Sequence[Any], cotangent: jax.Array) -> jax.Array:
    """The operand's gradient, summed over the batch by the equation's transpose.

    All arrays are of one dtype, in which it is taken.
    """
    site, dtype = alike.site, cotangent.dtype
    eqn = site.eqn
    assert eqn is not None
    exact = {"preferred_element_type": dtype, "precision": fac.HIGHEST}
    changed = {name: exact[name] for name in exact if name in eqn.params}

    def forward(operand: Any, others: Sequence[Any]) -> Any:
        inputs = list(others)
        inputs.insert(site.position, operand)
        return bind(eqn, inputs, **changed)[0]

    lengths = ()
    for loop in reversed(site.loops):
        forward = jax.vmap(forward, in_axes=(None if loop.shared else 0, 0))
        if not loop.shared:
            lengths = (loop.length, *lengths)
    forward = jax.vmap(forward, in_axes=(None, 0))
    operand = aval(site.operand)
    operand = like(operand, (*lengths, *operand.shape), dtype)
    transpose = jax.linear_transpose(lambda w: forward(w, others), operand)
    return transpose(cotangent)[0]


def _widened(xs: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(fac.wide(x) if _is_real(x) else x for x in xs)


def _is_real(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
