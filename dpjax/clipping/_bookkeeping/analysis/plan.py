"""Choose how the book-keeping engine computes the gradient norms of one loss.

The norms are those of per-example gradients. They come either from inner products of
activations and cotangents, or from the per-example gradients themselves. `explanation`
makes a table of the choices for all parameters.
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
    BlockSite,
    RuledSite,
    Scope,
    Site,
    analyse,
    operands,
)
from dpjax.clipping._bookkeeping.factors import MAX_ROWS, Size
from dpjax.clipping._bookkeeping.rules import Layout
from dpjax.clipping._bookkeeping.tracing import inline

# Reading or writing a number takes as long as this many multiplications, as measured on
# CPUs. Data sheets of NVIDIA GPUs imply 20 to 40. With 20 to 40, few layers would get
# another form, since for most layers the memory determines the form.
_ACCESS_COST = 16
# Where per-example gradients are cheaper to compute than rows, the gradients may take
# up to this many times the memory of the rows.
_MAX_RATIO = 2


class Form(NamedTuple):
    """How to compute the per-example gradient norms of the leaves of one component.

    A component is a set of parameter leaves that are combined with each other before
    they meet the example.

    Attributes:
      gram: True if the norms come from inner products of rows of activations and of
        cotangents (the Gram form). False if the norms come from per-example gradients
        (the direct form).
      cost: the estimated number of multiplications per example, for the norms and the
        sum. The time to read or write numbers is converted to multiplications.
      vmap_cost: the estimated cost of engine="vmap" for the same leaves, in the same
        unit. This engine forms all per-example gradients.
    """

    gram: bool
    cost: float
    vmap_cost: float


class Plan(NamedTuple):
    """The analysis of a loss, or of a checkpointed block in a loss.

    An operand is a value that is computed from parameters alone. A site is an equation
    that combines an operand with a value that depends on the example. An equation with
    several operands counts as one site for each operand. A value is batch-invariant if
    it depends on no example.

    Attributes:
      scope: the loss's jaxpr and its sites.
      sites: all sites of the loss, including sites in scans, in the order of
        `Scope.all_sites`.
      from_leaves: the jaxpr that computes the sites' operands from the batch-invariant
        inputs. The first inputs are the parameter leaves.
      num_leaves: the number of parameter leaves.
      components: the components, which are sets of leaves with the operands that are
        computed from these leaves.
      forms: for each component, how the norms of its gradients are computed.
      blocks: the analyses of the `jax.checkpoint` blocks that combine parameters with
        the example and are not inlined. The key of a block is the first site at the
        block's equation.
    """

    scope: Scope
    sites: list[Site]
    from_leaves: jex.ClosedJaxpr
    num_leaves: int
    components: list[Component]
    forms: list[Form]
    blocks: dict[BlockSite, "Block"]

    @property
    def automatic(self) -> Engine:
        """The engine that engine="auto" selects.

        If a block stays checkpointed (`plan` with `keep_blocks`), memory matters more
        than time. The ghost and vmap engines both retain the checkpoint. The ghost
        engine stores the activations and cotangents of one block at a time, in each of
        two passes. The vmap engine stores gradients, in one pass. The selected engine
        is the engine that stores fewer numbers for an example. But if a parameter is
        sharded along an explicit mesh axis, the selected engine is always ghost. The
        reason is that the batch may be sharded along the same axis. JAX then refuses
        the type of per-example gradients.

        If no block stays checkpointed, the selected engine is book-keeping if all sites
        of some component have a rule (`RuledSite`), and the vmap engine otherwise. In
        the second case, book-keeping would also form all per-example gradients.
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
        """The number of entries of rows that the ghost engine stores for one example.

        The rows are those of activations and cotangents, whose outer products add up to
        gradients. The number includes all rows outside of checkpointed blocks, and the
        rows of the block whose rows have the most entries.
        """
        ruled = (site for site in self.sites if isinstance(site, RuledSite))
        outside = sum(site.size.entries for site in ruled)
        inside = (block.plan.num_row_entries for block in self.blocks.values())
        return outside + max(inside, default=0)

    def inputs(self, invariants: Arrays) -> list[list[jax.Array]]:
        """For each component, the values of the inputs of its computation `path`.

        `Component.path` computes the component's operands from its leaves, and from
        other values that depend on no example.

        Args:
          invariants: the batch-invariant inputs, which depend on no example, parameter
            leaves first. If the plan analyses a loss and not a checkpointed block, the
            leaves are the only batch-invariant inputs.
        """
        values = eqs.values_of_inputs(self.from_leaves, invariants)
        return [[values[v] for v in c.path.invars] for c in self.components]


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A checkpointed block of a loss, analysed as if it were a loss.

    The analysed function has the block's inputs in another order. First come the inputs
    that are computed from parameters alone, which are called the leaves of the block.
    Then come the other inputs that depend on no example, and then the inputs that
    depend on the example.

    Attributes:
      plan: the analysis of the function.
      order: for each input of the function, its index among the inputs of the block's
        equation.
      num_invariant: the number of inputs that depend on no example, which include the
        leaves.
      group_indices: for each leaf, the index of its clipping group in `groups`.
      groups: for each distinct clipping group of the leaves, the group's number in the
        plan of the loss around the block.
      outputs: the indices of the block's outputs that are differentiated.
    """

    plan: Plan
    order: tuple[int, ...]
    num_invariant: int
    group_indices: tuple[int, ...]
    groups: tuple[int, ...]
    outputs: tuple[int, ...]

    def description(self) -> Hashable:
        """A hashable description, equal only for blocks that compute the same function.

        Constants are compared by identity.
        """
        jaxpr, consts = self.plan.scope.closed.jaxpr, self.plan.scope.closed.consts
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        computed = eqs.describe_function(inputs, jaxpr.eqns, jaxpr.outvars)
        interface = self.num_invariant, self.group_indices, self.outputs
        return computed, tuple(map(id, consts)), interface


def plan(
    closed: jex.ClosedJaxpr,
    groups: Sequence[int],
    *,
    num_invariant: int | None = None,
    outputs: Sequence[int] = (0,),
    keep_blocks: bool = False,
) -> Plan:
    """Find a loss's sites and components, and choose how to compute gradient norms.

    The loss is a function of the parameter leaves and the leaves of one example.

    Args:
      closed: the loss's jaxpr, as returned by `trace`.
      groups: for each parameter leaf, the index of its group. The leaves of a group are
        clipped together. The parameter leaves are the jaxpr's first inputs.
      num_invariant: the number of inputs that depend on no example. These inputs come
        first. None if only the parameter leaves depend on no example.
      outputs: the indices of the outputs that are differentiated.
      keep_blocks: if true, a `jax.checkpoint` block stays checkpointed if
        `Component.is_in_blocks` is true for each component with a site in the block.
        All other blocks are inlined. If false, all blocks are inlined.
    """
    num_invariant = len(groups) if num_invariant is None else num_invariant
    inputs = range(len(closed.in_avals))
    invariant = [i < num_invariant for i in inputs]
    parametric = [i < len(groups) for i in inputs]
    varying_scans = [frozenset() if on else None for on in invariant]
    # Operands do not depend on the examples. None stands for each leaf of the example.
    pairs = zip(closed.in_avals, invariant, strict=True)
    constants = [x if on else None for x, on in pairs]
    inlined_ids: set[int] = set()

    def retained(eqn: jex.JaxprEqn) -> bool:
        return keep_blocks and id(eqn.params["jaxpr"]) not in inlined_ids

    # A block is inlined if its leaves also enter another part of the loss, because the
    # block's squared norms would miss cross terms. Afterwards, another block may share
    # leaves with the inlined equations. So the analysis is repeated.
    while True:
        flat = inline(closed, invariant, parametric, retained)
        scope, _ = analyse(
            flat, varying_scans, parametric, outputs=outputs, retained=retained
        )
        sites = scope.all_sites()
        from_leaves = jax.make_jaxpr(functools.partial(operands, scope))(constants)
        parts = components(from_leaves, sites, groups)
        shared = {
            id(site.eqn.params["jaxpr"])
            for component in parts
            for site in component.sites
            if isinstance(site, BlockSite) and not component.is_in_blocks
        }
        if not shared:
            break
        inlined_ids |= shared
    forms = [_choose_form(component) for component in parts]
    blocks = _analyse_blocks(sites, parts)
    return Plan(scope, sites, from_leaves, len(groups), parts, forms, blocks)


def _analyse_blocks(
    sites: Sequence[Site], parts: Sequence[Component]
) -> dict[BlockSite, Block]:
    """The checkpointed blocks of a loss.

    A site of a block is an input of the block that is computed from parameters alone.
    The key of each block is the block's first site. Blocks that differ only in the
    names of variables share one analysis.

    Args:
      sites: the sites of the loss, including those of blocks.
      parts: the components of the loss.
    """
    group_of_site = {site: c.groups[0] for c in parts for site in c.sites}
    block_sites = [site for site in sites if isinstance(site, BlockSite)]
    blocks: dict[BlockSite, Block] = {}
    analysed: dict[Hashable, Block] = {}
    for _, sites_of_block in itertools.groupby(
        block_sites, key=lambda site: id(site.eqn)
    ):
        own_sites = list(sites_of_block)
        groups = tuple(group_of_site[site] for site in own_sites)
        description = (*(site.description() for site in own_sites), groups)
        if description not in analysed:
            analysed[description] = _analyse_block(own_sites, groups)
        blocks[own_sites[0]] = analysed[description]
    return blocks


def _analyse_block(sites: Sequence[BlockSite], groups: Sequence[int]) -> Block:
    """Analyse one checkpointed block.

    Args:
      sites: the block's sites, each of which is one input of the block's equation that
        is computed from parameters alone.
      groups: for each site, the number of the clipping group of the parameter leaves
        from which the site's input is computed.
    """
    eqn, invariant = sites[0].eqn, sites[0].invariant
    leaves = [site.position for site in sites]
    positions = range(len(invariant))
    others = [i for i in positions if invariant[i] and i not in leaves]
    order = (*leaves, *others, *(i for i in positions if not invariant[i]))
    body = eqn.params["jaxpr"]
    closed = jex.ClosedJaxpr(body.replace(invars=[body.invars[i] for i in order]), [])
    distinct_groups = tuple(dict.fromkeys(groups))
    group_indices = tuple(map(distinct_groups.index, groups))
    num_invariant = len(leaves) + len(others)
    analysed = plan(
        closed,
        group_indices,
        num_invariant=num_invariant,
        outputs=sites[0].outputs,
        keep_blocks=True,
    )
    return Block(
        analysed, order, num_invariant, group_indices, distinct_groups, sites[0].outputs
    )


class MatchedSite(NamedTuple):
    """A site whose gradient can be added to the gradients of other sites.

    A site is an equation that combines a value computed from parameters with the
    example. The gradient is a sum of outer products of left and right rows. The sites
    whose gradients are added all use the same array or its transpose.

    Attributes:
      site_index: the index of the site in `Component.sites`.
      site: the site.
      swapped: whether left and right rows must be exchanged before the addition,
        because the site uses the transpose. Rows of a lookup are never exchanged.
    """

    site_index: int
    site: RuledSite
    swapped: bool


def match_sites(component: Component) -> list[list[MatchedSite]] | None:
    """Group a component's sites by the array that they use.

    A site is an equation that combines a value computed from parameter leaves with the
    example. Sites are in one group if their values have the same root: an array that
    equals each of these values except for the order of axes, axes of size one, and the
    dtype. At each site, the gradient is a sum of outer products of left and right rows.
    The pairs of rows of all sites in a group form one list, whose outer products sum to
    the gradient of the root. The result is None if the component has no roots, or if
    the rows of some group cannot form one list.
    """
    # A component that has roots has at least one root.
    matches = [_match_root(component, root) for root in component.roots or ()]
    combinable = [sites for sites in matches if sites is not None]
    return combinable if combinable and len(combinable) == len(matches) else None


def _match_root(component: Component, root: Root) -> list[MatchedSite] | None:
    matches, layouts = [], []
    for site_index, axes in root:
        site = component.sites[site_index]
        if not isinstance(site, RuledSite):
            return None
        matches.append(MatchedSite(site_index, site, False))
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
    """The `Layout` of a site's operand, expressed in the axes of the operand's root.

    The root is the array from which the operand of `site` is computed by steps that
    only move axes, add or remove axes of size one, or change the dtype. For each axis
    of the operand, `axes` has the axis of the root, or −1 for an added axis. The result
    leaves out the operand's axes of size one. If the operand differs between the
    iterations of a scan, the axes of the iterations are the first axes of the groups.
    """
    # If an operand differs between iterations, the axes of the iterations come first.
    stacked = sum(not loop.shared for loop in site.loops)
    groups, left, right = (
        tuple(axes[i + stacked] for i in part if site.rule.shape[i] != 1)
        for part in site.rule.layout
    )
    return Layout((*axes[:stacked], *groups), left, right)


def _choose_form(component: Component) -> Form:
    leaves = component.path.invars[: len(component.leaves)]
    num_entries = sum(eqs.aval(v).size for v in leaves)
    ruled = [site.size for site in component.ruled_sites]
    products = sum(map(_gradient_cost, ruled))
    # A gradient is written once, and read for the norm and for the sum.
    gradients = products + 3 * _ACCESS_COST * num_entries
    if (roots := match_sites(component)) is None:
        return Form(False, gradients, gradients)
    stored = sum(size.entries for size in ruled)
    sizes = [[m.site.size for m in root] for root in roots]
    pairs = products + sum(map(_rows_cost, sizes))
    # Rows must need less memory, and must be cheaper or save much memory.
    gram = stored < num_entries and (
        pairs < gradients or num_entries > _MAX_RATIO * stored
    )
    # With more than MAX_ROWS rows, the bound on rounding errors would inflate norms.
    gram = gram and sum(s.rows for s in ruled) <= MAX_ROWS
    return Form(gram, pairs if gram else gradients, gradients)


def _gradient_cost(size: Size) -> int:
    """The cost of forming one example's gradient at one equation, in multiplications.

    The gradient is a sum of outer products of rows. `size` has the sizes of the rows.
    """
    # One-hot rows need no multiplication. But each right row is added to a row of a
    # table. The time to read and write these numbers is converted to multiplications.
    cost_per_entry = _ACCESS_COST if size.one_hot else size.left
    return size.groups * size.rows * size.right * cost_per_entry


def _rows_cost(sizes: Sequence[Size]) -> int:
    """The cost of one example's gradient norm from rows, in multiplications.

    The gradient of one array, which several equations use, is a sum of outer products
    of rows. `sizes` has the sizes of the rows at each equation. The norm needs the
    inner products of all pairs of rows, except for pairs of equations with one-hot left
    rows. The right rows of these equations are added to the rows of one table, and the
    time to read and write this table is converted to multiplications.
    """
    total = sum(2 * _gradient_cost(one) for one in sizes if one.one_hot)
    for one, other in itertools.product(sizes, repeat=2):
        # Two sites with one-hot rows need no inner products: the rows of both sites are
        # added to one table.
        if not (one.one_hot and other.one_hot):
            shared = min(one.entries_per_row, other.entries_per_row)
            total += one.groups * one.rows * other.rows * shared
    return total


class Row(NamedTuple):
    """A row of an `Explanation`: how one parameter's norms and sum are computed.

    The computation is that of the book-keeping engine.

    Attributes:
      parameter: the parameter's path in the tree of parameters.
      shape: the parameter's shape.
      sites: the primitives that combine the parameter with the example. A name in
        brackets, such as dense, says that the gradient is a sum of outer products. The
        name "output" stands for an output, of the loss or of a scan's body, that
        depends on the parameter but on no example.
      norm: the source of the norms: "rows" of activations and cotangents; "gradients"
        of each example; or "none" if the loss has no derivative by the parameter.
      cost: the estimated cost of the norms and the sum, in multiplications per example.
        If several parameters are combined before they meet the example, then the `Row`
        of each parameter has the cost for all these parameters together.
      vmap_cost: the estimated cost of engine="vmap", in the same unit.
      why: the reason for forming per-example gradients; empty if `norm` is "rows" or
        "none". The reason "cheaper than rows" is also given if rows need as much memory
        as a gradient or more, if there are more than 65,536 rows, or if the rows of
        several equations cannot be combined.
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
    """How the book-keeping engine computes norms and the sum for each parameter.

    The sum is that of the clipped gradients of a batch. The repr is a table.

    Attributes:
      rows: one row for each parameter.
      auto: the engine that engine="auto" selects with arithmetic="real".
    """

    rows: tuple[Row, ...]
    auto: Engine

    def __repr__(self) -> str:
        """The explanation as a table."""
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
    """Make the `Explanation` of a plan.

    Args:
      plan: the book-keeping engine's plan for a loss, which is unrelated to
        `dpjax.plan`.
      parameters: for each leaf, its path in the tree of parameters, and its shape.
      auto: the engine that engine="auto" selects.
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
