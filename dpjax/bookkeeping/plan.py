"""What to do for one loss and one batch: sites, components, forms and costs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from dpjax.bookkeeping.components import Component, Root, components
from dpjax.bookkeeping.factors import MOST_ROWS, Size
from dpjax.bookkeeping.run import operands
from dpjax.bookkeeping.sites import Scope, Site, analyse
from dpjax.bookkeeping.trace import aval, inline

# Reading or writing a number takes as long as this many multiplications.
_TRAFFIC = 16
# Where gradients are cheaper than rows, they may take this many times the rows' memory.
_ROOM = 2


class Form(NamedTuple):
    """How a component's norm is taken.

    Attributes:
      gram: from inner products of rows; otherwise from per-example gradients.
      cost: multiplications an example, with memory traffic in the same unit.
      vmap_cost: of the vmap engine for the same leaves.
    """

    gram: bool
    cost: float
    vmap_cost: float


class Plan(NamedTuple):
    """The analysis of a loss.

    Attributes:
      groups: for each leaf, the group that it is clipped with.
      scope: the loss's jaxpr and its sites.
      sites: all sites, by number.
      from_leaves: the jaxpr from parameter leaves to the sites' operands.
      components: leaves and operands that belong together.
      forms: of each component.
    """

    groups: tuple[int, ...]
    scope: Scope
    sites: list[Site]
    from_leaves: jex.ClosedJaxpr
    components: list[Component]
    forms: list[Form]

    @property
    def automatic(self) -> bool:
        """Whether engine="auto" takes this engine (but on TPUs).

        Where a rule knows a parameter: else it does what the vmap engine does.
        """
        return any(
            all(self.sites[i].rule is not None for i in c.operands)
            for c in self.components
        )


def plan(closed: jex.ClosedJaxpr, groups: Sequence[int]) -> Plan:
    """Analyse a loss of parameter leaves and one example's, as `trace` gives it.

    Leaves of one group are clipped together.
    """
    n = len(groups)
    leaves = closed.in_avals[:n]
    parametric = [i < n for i in range(len(closed.in_avals))]
    steps = [frozenset() if on else None for on in parametric]
    closed = inline(closed, parametric, parametric)
    scope, _ = analyse(closed, steps, parametric)
    sites = scope.all_sites()
    from_leaves = jax.make_jaxpr(lambda *xs: operand_values(scope, xs))(*leaves)
    found = components(from_leaves, n, [site.rule is not None for site in sites])
    found = [_within_groups(c, groups) for c in found]
    return Plan(
        tuple(groups),
        scope,
        sites,
        from_leaves,
        found,
        [_form(c, sites, [x.size for x in leaves]) for c in found],
    )


def operand_values(scope: Scope, leaves: Sequence[Any]) -> list[Any]:
    """The operands of all sites."""
    unused = len(scope.closed.jaxpr.invars) - len(leaves)
    return operands(scope, [*leaves, *[None] * unused])


def size(site: Site) -> Size:
    """The sizes of a site's factors over all iterations of its loops."""
    assert site.rule is not None
    assert site.eqn is not None
    size = site.rule.size(site.eqn, site.position)
    for loop in site.loops:
        if loop.shared:
            size = size._replace(rows=size.rows * loop.length)
        else:
            size = size._replace(groups=size.groups * loop.length)
    return size


def _root_layout(site: Site, axes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The root's axes that are groups, left and right."""
    assert site.rule is not None
    assert site.eqn is not None
    stacked = sum(not loop.shared for loop in site.loops)
    shape = aval(site.operand).shape
    parts = []
    for part in site.rule.layout(site.eqn, site.position):
        long = [i for i in part if shape[i] != 1]
        parts.append(tuple(axes[i + stacked] for i in long))
    parts[0] = (*axes[:stacked], *parts[0])
    return tuple(parts)


def aligned(root: Root, sites: Sequence[Site]) -> list[bool] | None:
    """For each site, whether its sides must be exchanged to match the first one's.

    None where they cannot be matched.
    """
    members = [sites[i] for i in root.operands]
    layouts = [
        _root_layout(s, axes) for s, axes in zip(members, root.axes, strict=True)
    ]
    groups, left, right = layouts[0]
    swaps = []
    for site, layout in zip(members, layouts, strict=True):
        if layout[0] != groups or size(site).groups != size(members[0]).groups:
            return None
        if layout[1:] == (left, right):
            swaps.append(False)
        elif layout[1:] == (right, left):
            swaps.append(True)
        else:
            return None
    return swaps


def _within_groups(component: Component, groups: Sequence[int]) -> Component:
    """The component, without norms at its roots if its leaves need several norms."""
    if component.roots is None or len({groups[i] for i in component.leaves}) == 1:
        return component
    return component._replace(roots=None, reason="leaves of several groups")


def _form(component: Component, sites: Sequence[Site], leaf_sizes: list[int]) -> Form:
    numbers = sum(leaf_sizes[i] for i in component.leaves)
    ruled = [size(sites[i]) for i in component.operands if sites[i].rule is not None]
    products = sum(_products(s) for s in ruled)
    # A gradient is written, and read for the norm and the sum.
    gradients = products + 3 * _TRAFFIC * numbers
    if component.roots is None or None in [aligned(r, sites) for r in component.roots]:
        return Form(False, gradients, gradients)
    stored = sum(s.groups * s.rows * s.stored for s in ruled)
    pairs = products + sum(
        _pairs([size(sites[i]) for i in r.operands]) for r in component.roots
    )
    gram = stored < numbers and (pairs < gradients or numbers > _ROOM * stored)
    gram = gram and sum(s.rows for s in ruled) <= MOST_ROWS
    return Form(gram, pairs if gram else gradients, gradients)


def _products(size: Size) -> int:
    """Multiplications for the gradient at a site."""
    added = _TRAFFIC if size.one_hot else size.left
    return size.groups * size.rows * size.right * added


def _pairs(sizes: Sequence[Size]) -> int:
    """Multiplications for a root's norm from rows, in pairs or added by position."""
    total = 0
    for i, one in enumerate(sizes):
        for j, other in enumerate(sizes):
            both = one.one_hot and other.one_hot
            alone = 2 * _products(one) if i == j else 0
            pairs = one.groups * one.rows * other.rows * min(one.stored, other.stored)
            total += alone if both else pairs
    return total
