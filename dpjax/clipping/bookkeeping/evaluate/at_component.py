"""What becomes of a component's records and cotangents, for those that are alike.

`Seen` is what its operands left in the books, and inputs are what enters its path.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core.rounding import square_sum, upper_sum
from dpjax._core.typing import ArrayLike
from dpjax.clipping._clip import apply_scales, sum_with_scales, zero_if_not_finite
from dpjax.clipping.bookkeeping.analysis.components import Component
from dpjax.clipping.bookkeeping.analysis.plan import match_sites
from dpjax.clipping.bookkeeping.analysis.sites import KeptSite, RuledSite
from dpjax.clipping.bookkeeping.evaluate.at_site import (
    factors_of,
    gradient_of,
    is_real,
    transpose_sum,
)
from dpjax.clipping.bookkeeping.evaluate.books import Seen
from dpjax.clipping.bookkeeping.jaxpr.alike import Alike
from dpjax.clipping.bookkeeping.rules import factors as fac
from dpjax.clipping.bookkeeping.rules.factors import Factors


class PerExampleGradients(NamedTuple):
    """Per-example gradients of a component's leaves.

    Attributes:
      gradients: for each leaf, f[b, ...].
      squares: for each of the component's groups at least ‖gradient / C‖², f[b].
    """

    gradients: list[jax.Array]
    squares: list[jax.Array]


@functools.partial(jax.jit, static_argnums=0)
def squares_of_rows(
    alike: Alike[Component], seen: Seen, clip_norm: ArrayLike
) -> list[jax.Array]:
    """At least the squared norms, f[b], of the roots of a component that has some."""
    squares = []
    for root in match_sites(alike.part) or ():
        rows = []
        for i, site, swapped in root:
            left, right = factors_of(Alike(site), seen.records[i], seen.cotangents[i])
            rows.append(Factors(right, left) if swapped else Factors(left, right))
        squares.append(fac.square_norm(rows, clip_norm))
    return squares


@functools.partial(jax.jit, static_argnums=0)
def form_gradients(
    alike: Alike[Component],
    seen: Seen,
    inputs: Sequence[jax.Array],
    clip_norms: Sequence[ArrayLike],
) -> PerExampleGradients:
    """The gradients, and their norms; clip_norms are of the component's groups."""
    component = alike.part
    gradients = per_example_gradients(alike, seen, inputs)
    squares = []
    for group, clip_norm in zip(component.own_groups, clip_norms, strict=True):
        together = [
            square_sum(g, 1, unit=clip_norm)
            for i, g in zip(component.groups, gradients, strict=True)
            if i == group
        ]
        squares.append(upper_sum(together))
    return PerExampleGradients(gradients, squares)


@functools.partial(jax.jit, static_argnums=0)
def per_example_gradients(
    alike: Alike[Component], seen: Seen, inputs: Sequence[jax.Array]
) -> list[jax.Array]:
    """Per-example gradients of a component's leaves, f[b, ...]."""
    component, at_operands = alike.part, []
    for site, others, gradient in zip(component.sites, *seen, strict=True):
        if isinstance(site, RuledSite):
            gradient = gradient_of(Alike(site), others, gradient)
        shared = [1 + k for k, loop in enumerate(site.loops) if loop.shared]
        at_operands.append(jnp.sum(gradient, axis=shared) if shared else gradient)

    def pull(cotangents: list[jax.Array]) -> list[jax.Array]:
        moves = component.roots is not None
        return component.path.pull_back(inputs, cotangents, moves=moves)

    return [fac.wide(g) for g in jax.vmap(pull)(at_operands)]


@functools.partial(jax.jit, static_argnums=0)
def sums_of_gradients(
    alike: Alike[Component],
    seen: Seen,
    inputs: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    finite: jax.Array,
) -> list[jax.Array]:
    """The leaves' scaled sums, by gradients that nothing else needs.

    The scales are those of the component's groups.
    """
    component = alike.part
    of_group = dict(zip(component.own_groups, scales, strict=True))
    gradients = per_example_gradients(alike, seen, inputs)
    return [
        sum_with_scales(x, of_group[group], finite)
        for x, group in zip(gradients, component.groups, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=0)
def sums_by_sites(
    alike: Alike[Component],
    seen: Seen,
    inputs: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    finite: jax.Array,
) -> list[jax.Array]:
    """The leaves' scaled sums, by one product over the batch for each site."""
    groups, own = alike.part.groups, alike.part.own_groups
    sums = [_sums_by_sites(alike.part, seen, inputs, s, finite) for s in scales]
    return [sums[own.index(group)][k] for k, group in enumerate(groups)]


def _sums_by_sites(
    component: Component,
    seen: Seen,
    inputs: Sequence[jax.Array],
    scale: jax.Array,
    finite: jax.Array,
) -> list[jax.Array]:
    """All leaves' sums by one scale."""
    records = [
        [zero_if_not_finite(x, finite) if is_real(x) else x for x in others]
        for others in seen.records
    ]
    # The norm's own.
    dtype = jnp.result_type(
        jnp.float32, *map(fac.wide, filter(is_real, sum(records, seen.cotangents)))
    )
    sums = []
    for site, others, cotangent in zip(
        component.sites, records, seen.cotangents, strict=True
    ):
        if isinstance(site, KeptSite):  # whose block has made the sum
            sums.append(cotangent)
            continue
        share = apply_scales(cotangent.astype(dtype), scale, finite)
        if isinstance(site, RuledSite):
            others = [x.astype(dtype) if is_real(x) else x for x in others]
            sums.append(transpose_sum(Alike(site), others, share))
        else:
            sums.append(jnp.sum(share, axis=0))
    moves = component.roots is not None
    pulled = component.path.pull_back(inputs, sums, moves=moves)
    # Without examples there is nothing to pull back, through parameters that may be
    # why no gradient is finite.
    return [jnp.where(jnp.any(finite), x, 0.0) for x in pulled]
