"""Norms, gradients and scaled sums of one component, traced once per kind.

Each function takes the component, wrapped in `Alike` so that JAX traces identical
components once, and `Seen`: the recorded inputs and the cotangents at the component's
sites, with a leading batch axis. Arguments named `inputs` are the values that enter the
component's path, the parameter leaves first.
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
      gradients: for each leaf, its per-example gradients f[b, ...].
      squares: for each of the component's groups, an upper bound f[b] of
        ‖gradient / C‖².
    """

    gradients: list[jax.Array]
    squares: list[jax.Array]


@functools.partial(jax.jit, static_argnums=0)
def squares_of_rows(
    alike: Alike[Component], seen: Seen, clip_norm: ArrayLike
) -> list[jax.Array]:
    """Upper bounds f[b] of the squared norms at the component's roots, from rows.

    The list has one entry per root, and is empty where the sites cannot be matched.
    """
    squares = []
    for root in match_sites(alike.part) or ():
        rows = []
        for i, site, swapped in root:
            left, right = factors_of(Alike(site), seen.records[i], seen.cotangents[i])
            # A site may use the transposed matrix. Exchanging its two sides gives rows
            # that can be added to those of the root's first site.
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
    """Per-example gradients of the leaves, and upper bounds of their squared norms.

    `clip_norms` has one bound for each of the component's groups.
    """
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
        # At a tapped site the cotangent is the operand's gradient already.
        if isinstance(site, RuledSite):
            gradient = gradient_of(Alike(site), others, gradient)
        # All iterations of a shared loop use one operand: its gradient is their sum.
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
    """The scaled sum for each leaf, from per-example gradients formed only for it.

    `scales` has one array f[b] for each of the component's groups.
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
    """The scaled sum for each leaf, by one product over the batch for each site."""
    groups, own = alike.part.groups, alike.part.own_groups
    # One pull-back serves all leaves but only one scale, so there is one per group.
    sums = [_sums_by_sites(alike.part, seen, inputs, s, finite) for s in scales]
    return [sums[own.index(group)][k] for k, group in enumerate(groups)]


def _sums_by_sites(
    component: Component,
    seen: Seen,
    inputs: Sequence[jax.Array],
    scale: jax.Array,
    finite: jax.Array,
) -> list[jax.Array]:
    """The sums for all leaves, with the per-example factors f[b] in `scale`."""
    records = [
        [zero_if_not_finite(x, finite) if is_real(x) else x for x in others]
        for others in seen.records
    ]
    # The dtype in which the norms were taken, which is float32 at least.
    dtype = jnp.result_type(
        jnp.float32, *map(fac.wide, filter(is_real, sum(records, seen.cotangents)))
    )
    sums = []
    for site, others, cotangent in zip(
        component.sites, records, seen.cotangents, strict=True
    ):
        # The backward pass of a checkpointed block has scaled and summed already.
        if isinstance(site, KeptSite):
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
    # If no example has a finite gradient, the sum is zero by definition. The pull-back
    # of zeros can still be NaN, because the parameters on the path may be infinite.
    return [jnp.where(jnp.any(finite), x, 0.0) for x in pulled]
