"""What to do for one loss and one batch: sites, components, forms and costs."""

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex

from dpjax.clipping.bookkeeping.analysis.components import Component, Root, components
from dpjax.clipping.bookkeeping.analysis.sites import (
    KeptSite,
    RuledSite,
    Scope,
    Site,
    analyse,
)
from dpjax.clipping.bookkeeping.evaluate.run import operands
from dpjax.clipping.bookkeeping.jaxpr.alike import of_function
from dpjax.clipping.bookkeeping.jaxpr.equations import aval
from dpjax.clipping.bookkeeping.jaxpr.trace import inline
from dpjax.clipping.bookkeeping.rules.base import Layout
from dpjax.clipping.bookkeeping.rules.factors import MOST_ROWS, Size

# Reading or writing a number takes as long as this many multiplications: on CPUs, as
# measured, and on GPUs of NVIDIA, where it is not. Data sheets say 20 for A100 (19.5
# TFLOP/s in float32 outside of tensor cores, two a multiplication and sum; 2.0 TB/s),
# 28 for H200 (67; 4.8) and 40 for H100 SXM (67; 3.35).
_TRAFFIC, _TRAFFIC_ON_GPU = 16, 28
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
    """The analysis of a loss, or of a block in it that is kept.

    Attributes:
      scope: the jaxpr and its sites.
      sites: all sites, by number.
      from_leaves: the jaxpr from parameter leaves to the sites' operands.
      components: leaves and operands that belong together.
      forms: of each component.
      forms_on_gpu: the same where it is lowered for CUDA.
      blocks: those that are kept, by the first of their sites.
    """

    scope: Scope
    sites: list[Site]
    from_leaves: jex.ClosedJaxpr
    components: list[Component]
    forms: list[Form]
    forms_on_gpu: list[Form]
    blocks: dict[KeptSite, "Block"]

    @property
    def automatic(self) -> bool:
        """Whether engine="auto" takes this engine.

        Where a rule knows a parameter: else it does what the vmap engine does.
        """
        return any(
            all(isinstance(site, RuledSite) for site in c.sites)
            for c in self.components
        )

    def inputs(self, known: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """For each component, what enters its path, from the leaves and what is known.

        Of a loss the leaves are all that is known.
        """
        jaxpr, consts = self.from_leaves.jaxpr, self.from_leaves.consts
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, known, strict=True))
        return [[values[v] for v in c.path.inputs] for c in self.components]


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A rematerialised block that is kept, as a function of its own.

    Attributes:
      plan: its analysis; its inputs are the leaves, what else is known, the examples.
      order: these inputs among the block's own.
      num_known: how many are known, leaves or not.
      of_leaves: for each leaf its group among the block's own.
      groups: for each of these, which it is around the block.
      outputs: which of its outputs are differentiated.
    """

    plan: Plan
    order: tuple[int, ...]
    num_known: int
    of_leaves: tuple[int, ...]
    groups: tuple[int, ...]
    outputs: tuple[int, ...]

    def features(self) -> Hashable:
        """What it computes, and of what; where it is in the loss does not matter."""
        jaxpr, consts = self.plan.scope.closed.jaxpr, self.plan.scope.closed.consts
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        computed = of_function(inputs, jaxpr.eqns, jaxpr.outvars)
        where = self.num_known, self.of_leaves, self.outputs
        return computed, tuple(map(id, consts)), where


def plan(
    closed: jex.ClosedJaxpr,
    groups: Sequence[int],
    *,
    num_known: int | None = None,
    outputs: Sequence[int] = (0,),
    keep_blocks: bool = False,
) -> Plan:
    """Analyse a loss of parameter leaves and one example's, as `trace` gives it.

    Args:
      closed: its jaxpr.
      groups: for each of its first inputs, the leaves, what it is clipped with.
      num_known: how many inputs no example enters, the leaves and those after them.
      outputs: which outputs are differentiated, and so must depend on the example.
      keep_blocks: whether a rematerialised block stays one, where the leaves that enter
        it enter nothing else.
    """
    num_known = len(groups) if num_known is None else num_known
    inputs = range(len(closed.in_avals))
    known = [i < num_known for i in inputs]
    parametric = [i < len(groups) for i in inputs]
    steps = [frozenset() if on else None for on in known]
    of_known = closed.in_avals[:num_known]
    opened: set[int] = set()

    def kept(eqn: jex.JaxprEqn) -> bool:
        return keep_blocks and id(eqn.params["jaxpr"]) not in opened

    while True:
        flat = inline(closed, known, parametric, kept)
        scope, _ = analyse(flat, steps, parametric, outputs=outputs, kept=kept)
        sites = scope.all_sites()
        values = functools.partial(operand_values, scope)
        from_leaves = jax.make_jaxpr(values)(*of_known)
        found = components(from_leaves, sites, groups)
        shared = {
            id(site.eqn.params["jaxpr"])
            for component in found
            for site in component.sites
            if isinstance(site, KeptSite) and not component.kept
        }
        if not shared:
            break
        opened |= shared
    sizes = [x.size for x in of_known]
    forms, on_gpu = (
        [_form(c, sizes, traffic) for c in found]
        for traffic in (_TRAFFIC, _TRAFFIC_ON_GPU)
    )
    blocks = _blocks(sites, found)
    return Plan(scope, sites, from_leaves, found, forms, on_gpu, blocks)


def _blocks(sites: Sequence[Site], found: Sequence[Component]) -> dict[KeptSite, Block]:
    """The kept blocks, by the first of their sites; those that are alike are one."""
    group = {site: c.groups[0] for c in found for site in c.sites}
    kept = [site for site in sites if isinstance(site, KeptSite)]
    blocks: dict[KeptSite, Block] = {}
    made: dict[Hashable, Block] = {}
    for _, together in itertools.groupby(kept, key=lambda site: id(site.eqn)):
        own = list(together)
        groups = tuple(group[site] for site in own)
        features = (*(site.features() for site in own), groups)
        if features not in made:
            made[features] = _block(own, groups)
        blocks[own[0]] = made[features]
    return blocks


def _block(sites: Sequence[KeptSite], groups: Sequence[int]) -> Block:
    """The block that some sites enter, which are clipped with some groups."""
    eqn, known = sites[0].eqn, sites[0].known
    leaves = [site.position for site in sites]
    places = range(len(known))
    others = [i for i in places if known[i] and i not in leaves]
    order = (*leaves, *others, *(i for i in places if not known[i]))
    body = eqn.params["jaxpr"]
    closed = jex.ClosedJaxpr(body.replace(invars=[body.invars[i] for i in order]), [])
    own = tuple(dict.fromkeys(groups))
    of_leaves = tuple(map(own.index, groups))
    num_known = len(leaves) + len(others)
    analysed = plan(
        closed,
        of_leaves,
        num_known=num_known,
        outputs=sites[0].outputs,
        keep_blocks=True,
    )
    return Block(analysed, order, num_known, of_leaves, own, sites[0].outputs)


def operand_values(scope: Scope, *known: jax.Array) -> list[jax.Array]:
    """The operands of all sites."""
    unused = len(scope.closed.jaxpr.invars) - len(known)
    return operands(scope, (*known, *[None] * unused))


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


def match_sites(component: Component) -> list[list[Matched]] | None:
    """The sites of each root, or None where some cannot be matched."""
    if component.roots is None:
        return None
    found = [_match_root(component, root) for root in component.roots]
    whole = [sites for sites in found if sites is not None]
    return whole if len(whole) == len(found) else None


def _match_root(component: Component, root: Root) -> list[Matched] | None:
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


def _form(component: Component, leaf_sizes: list[int], traffic: int) -> Form:
    numbers = sum(leaf_sizes[i] for i in component.leaves)
    ruled = [size(site) for site in component.sites if isinstance(site, RuledSite)]
    products = sum(_products(s, traffic) for s in ruled)
    # A gradient is written, and read for the norm and the sum.
    gradients = products + 3 * traffic * numbers
    if (roots := match_sites(component)) is None:
        return Form(False, gradients, gradients)
    stored = sum(s.groups * s.rows * s.num_stored for s in ruled)
    sizes = [[size(m.site) for m in root] for root in roots]
    pairs = products + sum(_pairs(root, traffic) for root in sizes)
    gram = stored < numbers and (pairs < gradients or numbers > _ROOM * stored)
    gram = gram and sum(s.rows for s in ruled) <= MOST_ROWS
    return Form(gram, pairs if gram else gradients, gradients)


def _products(size: Size, traffic: int) -> int:
    """Multiplications for the gradient at a site."""
    added = traffic if size.one_hot else size.left
    return size.groups * size.rows * size.right * added


def _pairs(sizes: Sequence[Size], traffic: int) -> int:
    """Multiplications for a root's norm from rows, in pairs or added by position."""
    total = 0
    for i, one in enumerate(sizes):
        for j, other in enumerate(sizes):
            both = one.one_hot and other.one_hot
            alone = 2 * _products(one, traffic) if i == j else 0
            shared = min(one.num_stored, other.num_stored)
            pairs = one.groups * one.rows * other.rows * shared
            total += alone if both else pairs
    return total
