"""Choose how the book-keeping engine computes the gradient norms of one loss.

The norms are those of per-example gradients. They come either from inner products of
activations and cotangents, or from the per-example gradients themselves. `explanation`
turns the choices into a table, with the source of each parameter's norms.
"""

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex

from dpjax._core.typing import Arrays, Engine
from dpjax.clipping._bookkeeping import equations as eqs
from dpjax.clipping._bookkeeping.analysis.components import Component, Root, components
from dpjax.clipping._bookkeeping.analysis.sites import (
    KeptSite,
    RuledSite,
    Scope,
    Site,
    analyse,
    operands,
)
from dpjax.clipping._bookkeeping.factors import MOST_ROWS, Size
from dpjax.clipping._bookkeeping.rules import Layout
from dpjax.clipping._bookkeeping.tracing import inline

# Reading or writing a number takes as long as this many multiplications, as measured on
# CPUs. Data sheets of NVIDIA GPUs imply 20 to 40. With these values, few layers would
# take another form, since memory decides for most layers.
_TRAFFIC = 16
# Where per-example gradients are cheaper to compute than rows, the gradients may take
# up to this many times the memory of the rows.
_ROOM = 2


class Form(NamedTuple):
    """How to compute the per-example gradient norms of the leaves of one component.

    A component is a set of parameter leaves that are combined with each other before
    they meet the example. A gradient is a sum of outer products of rows of activations
    and rows of cotangents.

    Attributes:
      gram: True if the norms come from inner products of these rows (the Gram form);
        False if they come from per-example gradients (the direct form).
      cost: the estimated number of multiplications for each example, with memory
        traffic converted to multiplications.
      vmap_cost: the estimated cost of engine="vmap" for the same leaves, in the same
        unit. This engine forms all per-example gradients.
    """

    gram: bool
    cost: float
    vmap_cost: float


class Plan(NamedTuple):
    """The analysis of a loss, or of a checkpointed block in a loss.

    A site is an equation that combines an operand, a value computed from parameters
    alone, with a value that depends on the example. A value is batch-invariant if it
    depends on no example.

    Attributes:
      scope: the loss's jaxpr and its sites.
      sites: all sites of the loss, including sites in scans, in the order of their
        numbers.
      from_leaves: the jaxpr that computes the sites' operands from the batch-invariant
        inputs, which begin with the parameter leaves.
      num_leaves: the number of leaves among these inputs.
      components: the leaves and operands, in sets that computations connect.
      forms: for each component, how the norms of its gradients are computed.
      blocks: the rematerialised blocks that stay checkpointed. The key of a block is
        the first site at the block's equation.
    """

    scope: Scope
    sites: list[Site]
    from_leaves: jex.ClosedJaxpr
    num_leaves: int
    components: list[Component]
    forms: list[Form]
    blocks: dict[KeptSite, "Block"]

    @property
    def automatic(self) -> Engine:
        """The engine that engine="auto" takes, for a plan made with keep_blocks.

        A block that stays checkpointed shows that memory matters more than time. The
        ghost and vmap engines both keep it checkpointed. The ghost engine holds the
        activations and cotangents of one block at a time, and takes two passes. The
        vmap engine holds gradients, and takes one pass. The choice is the engine that
        holds less, or the ghost engine if a parameter is sharded along explicit axes.
        JAX would refuse the type of per-example gradients if the batch were sharded
        along the same axis.

        Without such a block, the choice is book-keeping or the vmap engine. It is
        book-keeping if there is a parameter leaf, or a set of leaves that are combined
        before they meet the example, whose gradient is made of outer products at every
        equation (`RuledSite`). Otherwise both engines would compute the same.
        """
        if self.blocks:
            leaves = self.scope.closed.in_avals[: self.num_leaves]
            gradient = sum(x.size for x in leaves)
            sharded = any(any(x.sharding.spec) for x in leaves)
            return "ghost" if sharded or self.num_row_entries < gradient else "vmap"
        ruled = any(len(c.ruled_sites) == len(c.sites) for c in self.components)
        return "bookkeeping" if ruled else "vmap"

    @property
    def num_row_entries(self) -> int:
        """How many numbers of one example's activations and cotangents are in memory.

        The count is of the rows whose outer products add up to gradients. It covers all
        rows outside of checkpointed blocks, and the rows of the largest block.
        """
        ruled = (site for site in self.sites if isinstance(site, RuledSite))
        outside = sum(site.size.entries for site in ruled)
        inside = (block.plan.num_row_entries for block in self.blocks.values())
        return outside + max(inside, default=0)

    def inputs(self, known: Arrays) -> list[list[jax.Array]]:
        """For each component, the values from which its operands are computed.

        A component is a set of parameter leaves, and of operands that are computed from
        these leaves and then meet the example.

        Args:
          known: the batch-invariant inputs, which depend on no example, parameter
            leaves first. For a whole loss, the leaves are the only such inputs.
        """
        values = eqs.values_of_inputs(self.from_leaves, known)
        return [[values[v] for v in c.path.invars] for c in self.components]


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A checkpointed block of a loss, analysed as a function of its own.

    The function has the block's inputs in another order. First come the inputs that are
    computed from parameters alone, which are the leaves of the function. Then come the
    other inputs that depend on no example, and then the inputs that depend on the
    example.

    Attributes:
      plan: the analysis of the function.
      order: for each input of the function, its index among the inputs of the block's
        equation.
      num_known: the number of inputs that depend on no example, which include the
        leaves.
      of_leaves: for each leaf, the index of its clipping group in `groups`.
      groups: the distinct clipping groups of the leaves, as numbered in the plan of the
        loss around the block.
      outputs: the indices of the block's outputs that are differentiated.
    """

    plan: Plan
    order: tuple[int, ...]
    num_known: int
    of_leaves: tuple[int, ...]
    groups: tuple[int, ...]
    outputs: tuple[int, ...]

    def features(self) -> Hashable:
        """A hashable description, equal for blocks that compute the same function."""
        jaxpr, consts = self.plan.scope.closed.jaxpr, self.plan.scope.closed.consts
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        computed = eqs.of_function(inputs, jaxpr.eqns, jaxpr.outvars)
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
    """Analyse a loss of parameter leaves and the leaves of one example.

    Args:
      closed: the loss's jaxpr, as returned by `trace`.
      groups: for each parameter leaf, the index of its group. The leaves of a group are
        clipped together. The parameter leaves are the jaxpr's first inputs.
      num_known: the number of inputs that depend on no example, which come first. None
        if the parameter leaves are the only ones.
      outputs: the indices of the outputs that are differentiated, and so must depend on
        the example.
      keep_blocks: whether a rematerialised block stays checkpointed if its parameter
        leaves enter no other part of the loss.
    """
    num_known = len(groups) if num_known is None else num_known
    inputs = range(len(closed.in_avals))
    known = [i < num_known for i in inputs]
    parametric = [i < len(groups) for i in inputs]
    steps = [frozenset() if on else None for on in known]
    # Operands do not depend on inputs of examples. None stands for these inputs.
    given = [x if on else None for x, on in zip(closed.in_avals, known, strict=True)]
    opened: set[int] = set()

    def keeps_block(eqn: jex.JaxprEqn) -> bool:
        return keep_blocks and id(eqn.params["jaxpr"]) not in opened

    # If the leaves of a block also enter another part of the loss, the block is opened,
    # that is, inlined: its squared norms alone would miss cross terms. Opening a block
    # may show that another block shares leaves. So this is a loop.
    while True:
        flat = inline(closed, known, parametric, keeps_block)
        scope, _ = analyse(flat, steps, parametric, outputs=outputs, kept=keeps_block)
        sites = scope.all_sites()
        from_leaves = jax.make_jaxpr(functools.partial(operands, scope))(given)
        parts = components(from_leaves, sites, groups)
        shared = {
            id(site.eqn.params["jaxpr"])
            for component in parts
            for site in component.sites
            if isinstance(site, KeptSite) and not component.is_in_blocks
        }
        if not shared:
            break
        opened |= shared
    forms, blocks = [_form(component) for component in parts], _blocks(sites, parts)
    return Plan(scope, sites, from_leaves, len(groups), parts, forms, blocks)


def _blocks(sites: Sequence[Site], parts: Sequence[Component]) -> dict[KeptSite, Block]:
    """The checkpointed blocks of a loss.

    A site of a block is one of its inputs, computed from parameters alone. The key of
    each block is its first site. Blocks that differ only in the names of variables
    share one analysis.

    Args:
      sites: the sites of the loss, including those of blocks.
      parts: the sets of parameter leaves and sites that computations connect, with the
        clipping groups of the leaves.
    """
    group = {site: c.groups[0] for c in parts for site in c.sites}
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
    """Analyse one checkpointed block.

    Args:
      sites: the block's sites, each of which is one input of the block's equation that
        is computed from parameters alone.
      groups: for each site, the number of the group of parameter leaves that are
        clipped together with the leaves from which this input is computed.
    """
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


class Matched(NamedTuple):
    """A site whose gradient can be added to those of other sites of the same array.

    A site is an equation that combines a value computed from parameters with the
    example. The gradient is a sum of outer products of a left row and a right row.

    Attributes:
      member: the index of the site in `Component.sites`.
      site: the site.
      swapped: whether left and right rows must be exchanged, because the site uses the
        transpose of the array. The rows of a lookup stay on the left.
    """

    member: int
    site: RuledSite
    swapped: bool


def match_sites(component: Component) -> list[list[Matched]] | None:
    """Group a component's sites by the parameter array that they use.

    A component is a set of parameter leaves and of sites. A site is an equation that
    combines a value computed from these leaves with the example. Sites are in one group
    if their values are the same array up to the order of axes (a root). Their rows of
    activations and cotangents can then be added to one gradient. The result is None if
    the rows of some group cannot be combined.
    """
    # A component with roots has at least one.
    matches = [_match_root(component, root) for root in component.roots or ()]
    whole = [sites for sites in matches if sites is not None]
    return whole if whole and len(whole) == len(matches) else None


def _match_root(component: Component, root: Root) -> list[Matched] | None:
    matches, layouts = [], []
    for member, axes in root:
        site = component.sites[member]
        if not isinstance(site, RuledSite):
            return None
        matches.append(Matched(member, site, False))
        groups, left, right = _root_layout(site, axes)
        layouts.append(((groups, site.size.groups), left, right))
    lookups = [m.site.size.one_hot for m in matches]
    groups, left, right = layouts[lookups.index(True) if any(lookups) else 0]
    for i, layout in enumerate(layouts):
        if layout != (groups, left, right):
            if lookups[i] or layout != (groups, right, left):
                return None
            matches[i] = matches[i]._replace(swapped=True)
    return matches


def _root_layout(site: RuledSite, axes: Sequence[int]) -> Layout:
    """The axes of a root in the roles of groups, left side and right side.

    The operand of the equation at `site` is its input computed from parameters alone.
    It equals the root up to the order of axes. The site's rule gives the role of each
    axis of the operand. `axes` maps the axes of the operand to the root's axes.
    """
    # If an operand differs between iterations, the axes of the iterations come first.
    stacked = sum(not loop.shared for loop in site.loops)
    groups, left, right = (
        tuple(axes[i + stacked] for i in part if site.rule.shape[i] != 1)
        for part in site.rule.layout
    )
    return Layout((*axes[:stacked], *groups), left, right)


def _form(component: Component) -> Form:
    leaves = component.path.invars[: len(component.leaves)]
    numbers = sum(eqs.aval(v).size for v in leaves)
    ruled = [site.size for site in component.ruled_sites]
    products = sum(map(_products, ruled))
    # A gradient is written once, and read for the norm and for the sum.
    gradients = products + 3 * _TRAFFIC * numbers
    if (roots := match_sites(component)) is None:
        return Form(False, gradients, gradients)
    stored = sum(size.entries for size in ruled)
    sizes = [[m.site.size for m in root] for root in roots]
    pairs = products + sum(map(_pairs, sizes))
    # The condition: rows need less memory, and they are cheaper or save much memory.
    gram = stored < numbers and (pairs < gradients or numbers > _ROOM * stored)
    # With more than MOST_ROWS rows, the bound on rounding errors would inflate norms.
    gram = gram and sum(s.rows for s in ruled) <= MOST_ROWS
    return Form(gram, pairs if gram else gradients, gradients)


def _products(size: Size) -> int:
    """The number of multiplications to form one example's gradient at one equation.

    The gradient is a sum of outer products of rows, and `size` has their sizes.
    """
    # For one-hot rows no multiplication is needed. Each row is added to a row of a
    # table, which costs memory traffic.
    added = _TRAFFIC if size.one_hot else size.left
    return size.groups * size.rows * size.right * added


def _pairs(sizes: Sequence[Size]) -> int:
    """The cost of one example's gradient norm from rows, in multiplications.

    The gradient is that of one array, which is used by several equations. It is a sum
    of outer products of rows. `sizes` has the sizes of the rows at each equation. Rows
    are multiplied in pairs. One-hot rows are instead added up by the position of their
    1, and the memory that this moves is converted to multiplications.
    """
    total = sum(2 * _products(one) for one in sizes if one.one_hot)
    for one, other in itertools.product(sizes, repeat=2):
        # Between two sites with one-hot rows there is nothing to compute: the rows of
        # both are added to one table.
        if not (one.one_hot and other.one_hot):
            shared = min(one.entries_per_row, other.entries_per_row)
            total += one.groups * one.rows * other.rows * shared
    return total


class Row(NamedTuple):
    """A row of an `Explanation`: how the engine computes norms and sum of a parameter.

    Attributes:
      parameter: the parameter's path in the tree of parameters.
      shape: the parameter's shape.
      sites: the primitives that combine the parameter with the example. A name in
        brackets, such as dense, says that the gradient is made of outer products.
      norm: the source of the norms: "rows" of activations and cotangents; "gradients"
        of each example; or "none" if the loss does not depend on the parameter.
      cost: the estimated cost of the norms and the sum, in multiplications per example.
        Parameters that are combined before they meet the example all show their common
        cost.
      vmap_cost: the estimated cost of engine="vmap", in the same unit.
      why: the reason for forming per-example gradients; empty if the norms come from
        rows.
    """

    parameter: str
    shape: tuple[int, ...]
    sites: str
    norm: str
    cost: float
    vmap_cost: float
    why: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How the book-keeping engine treats each parameter, with one row per parameter.

    The explanation prints as a table. `auto` is the engine that engine="auto" takes.
    """

    rows: tuple[Row, ...]
    auto: Engine

    def __repr__(self) -> str:
        """The explanation as the text of a table."""
        head = ("parameter", "shape", "sites", "norm from", "cost", "vmap", "why")
        cells: list[tuple[str, ...]] = [head]
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            costs = (f"{row.cost:.1e}", f"{row.vmap_cost:.1e}")
            cells.append((row.parameter, shape, row.sites, row.norm, *costs, row.why))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
        return "\n".join([*lines, f"auto: {self.auto}"])


def explanation(
    plan: Plan, parameters: Sequence[tuple[str, tuple[int, ...]]], auto: Engine
) -> Explanation:
    """Make the table of how the book-keeping engine treats each parameter.

    Args:
      plan: the engine's plan for a loss, which is unrelated to `dpjax.plan`.
      parameters: the path of each leaf in the tree of parameters, and its shape.
      auto: the engine that engine="auto" takes.
    """
    rows = [Row(*parameter, "", "none", 0.0, 0.0, "") for parameter in parameters]
    for component, form in zip(plan.components, plan.forms, strict=True):
        for i in component.leaves:
            rows[i] = rows[i]._replace(
                sites=", ".join(plan.sites[k].name for k in component.operands),
                norm="rows" if form.gram else "gradients",
                cost=form.cost,
                vmap_cost=form.vmap_cost,
                why="" if form.gram else component.reason or "cheaper than rows",
            )
    return Explanation(tuple(rows), auto)
