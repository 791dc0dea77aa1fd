"""What to do for one loss and one batch: sites, components, forms and costs."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex

from dpjax.bookkeeping.components import Component, Root, components
from dpjax.bookkeeping.factors import MOST_ROWS, Size
from dpjax.bookkeeping.rules import Layout
from dpjax.bookkeeping.run import operands
from dpjax.bookkeeping.sites import RuledSite, Scope, Site, analyse
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
      scope: the loss's jaxpr and its sites.
      sites: all sites, by number.
      from_leaves: the jaxpr from parameter leaves to the sites' operands.
      components: leaves and operands that belong together.
      forms: of each component.
    """

    scope: Scope
    sites: list[Site]
    from_leaves: jex.ClosedJaxpr
    components: list[Component]
    forms: list[Form]

    @property
    def automatic(self) -> bool:
        """Whether engine="auto" takes this engine.

        Where a rule knows a parameter: else it does what the vmap engine does.
        """
        return any(
            all(isinstance(site, RuledSite) for site in c.sites)
            for c in self.components
        )

    def inputs(self, leaves: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """For each component, what enters its path."""
        jaxpr, consts = self.from_leaves.jaxpr, self.from_leaves.consts
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, leaves, strict=True))
        return [[values[v] for v in c.path.inputs] for c in self.components]


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
    found = components(from_leaves, sites, groups)
    sizes = [x.size for x in leaves]
    forms = [_form(c, sizes) for c in found]
    return Plan(scope, sites, from_leaves, found, forms)


def operand_values(scope: Scope, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands of all sites."""
    unused = len(scope.closed.jaxpr.invars) - len(leaves)
    return operands(scope, (*leaves, *[None] * unused))


def size(site: RuledSite) -> Size:
    """The sizes of a site's factors over all iterations of its loops."""
    size = site.rule.size(site.eqn, site.position)
    for loop in site.loops:
        if loop.shared:
            size = size._replace(rows=size.rows * loop.length)
        else:
            size = size._replace(groups=size.groups * loop.length)
    return size


class Matched(NamedTuple):
    """A site of a root.

    Attributes:
      member: which of the component's sites.
      site: the site.
      swapped: whether its sides are to be exchanged to match the first one's.
    """

    member: int
    site: RuledSite
    swapped: bool


def matched(component: Component) -> list[list[Matched]] | None:
    """The sites of each root, or None where some cannot be matched."""
    if component.roots is None:
        return None
    found = [_matched(component, root) for root in component.roots]
    whole = [sites for sites in found if sites is not None]
    return whole if len(whole) == len(found) else None


def _matched(component: Component, root: Root) -> list[Matched] | None:
    first, found = None, []
    for member, axes in zip(root.members, root.axes, strict=True):
        site = component.sites[member]
        if not isinstance(site, RuledSite):
            return None
        layout = _root_layout(site, axes)
        first = first or (layout, size(site).groups)
        if (layout.groups, size(site).groups) != (first[0].groups, first[1]):
            return None
        straight = (layout.left, layout.right) == (first[0].left, first[0].right)
        if not straight and (layout.right, layout.left) != first[0][1:]:
            return None
        found.append(Matched(member, site, not straight))
    return found


def _root_layout(site: RuledSite, axes: Sequence[int]) -> Layout:
    """The root's axes that are groups, left and right."""
    stacked = sum(not loop.shared for loop in site.loops)
    shape = aval(site.operand).shape
    groups, left, right = (
        tuple(axes[i + stacked] for i in part if shape[i] != 1)
        for part in site.rule.layout(site.eqn, site.position)
    )
    return Layout((*axes[:stacked], *groups), left, right)


def _form(component: Component, leaf_sizes: list[int]) -> Form:
    numbers = sum(leaf_sizes[i] for i in component.leaves)
    ruled = [size(site) for site in component.sites if isinstance(site, RuledSite)]
    products = sum(map(_products, ruled))
    # A gradient is written, and read for the norm and the sum.
    gradients = products + 3 * _TRAFFIC * numbers
    if (roots := matched(component)) is None:
        return Form(False, gradients, gradients)
    stored = sum(s.groups * s.rows * s.stored for s in ruled)
    pairs = products + sum(_pairs([size(m.site) for m in root]) for root in roots)
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
