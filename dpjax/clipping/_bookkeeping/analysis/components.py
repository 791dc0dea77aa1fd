"""Group parameter leaves into components, and decide where their norms are computed.

An operand is a value that is computed from parameter leaves alone, for example by a
transpose, a cast or weight normalisation, and that meets the example in an equation.
This equation is the operand's site (`analysis.sites`). Leaves and operands that such
computations connect form a component. The path of a component is the computation from
its leaves to its operands. The layout of an array is the order of its axes, its axes of
size one, and its dtype. The root of an operand is the earliest array on this path that
differs from the operand only in layout. Several operands may have the same root.

In some components the path only moves the entries of the leaves into the roots, each
entry to one position at most. The squared norm of the gradient over the leaves is then
the sum of the squared norms at the roots. In other components the norms at the roots do
not determine the norm over the leaves. For these components, each example's gradient is
pulled back to the leaves.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._core.dtypes import at_least_float32
from dpjax._core.typing import Arrays, DTypeLike
from dpjax.clipping._bookkeeping import equations as eqs
from dpjax.clipping._bookkeeping.analysis.sites import (
    BlockSite,
    RuledSite,
    Site,
    Sources,
    sources_of,
)


def _widest_dtype(minimum: DTypeLike, dtype: DTypeLike) -> DTypeLike:
    """The widest of the dtypes `minimum`, `dtype` and float32."""
    # JAX does not promote 8-bit floats, nor, in strict mode, floats of two widths.
    return np.promote_types(minimum, at_least_float32(dtype))


class Member(NamedTuple):
    """An operand that equals another array, the root, except for its layout.

    An operand is a value that is computed from parameter leaves alone and then meets
    the example. The layout is the order of axes, the axes of size one, and the dtype.

    Attributes:
      operand_index: the operand's index among the component's operands.
      axes: for each axis of the operand, the corresponding axis of the root. For some
        axes of size one, the entry is -1 and names no axis of the root.
    """

    operand_index: int
    axes: tuple[int, ...]


# The operands that are equal to one array, except for their layout.
Root = tuple[Member, ...]


class Component(NamedTuple):
    """Parameter leaves, and operands that are computed from these leaves alone.

    An operand is a value that meets the example in an equation, which is called the
    operand's site. Two leaves that enter the same operand are in one component.

    Attributes:
      leaves: the indices of the parameter leaves.
      operands: the indices of the operands among all operands of the loss. The site of
        an operand has the same index among all sites of the loss.
      sites: the sites of the operands.
      path: the computation from the leaves to the operands, as a jaxpr. The jaxpr's
        first inputs are the leaves. The other inputs are treated as constants. No
        example enters the path.
      groups: for each leaf, the number of the leaf's clipping group. The leaves of a
        clipping group are clipped together.
      roots: the arrays to which the operands are equal except for the layout. None if
        a site is neither a `RuledSite` nor a `BlockSite`, or if the norms at these
        arrays do not give the norm over each clipping group.
      reason: why `roots` is None; empty if there are roots.
    """

    leaves: tuple[int, ...]
    operands: tuple[int, ...]
    sites: tuple[Site, ...]
    path: jex.Jaxpr
    groups: tuple[int, ...]
    roots: tuple[Root, ...] | None
    reason: str

    @property
    def ruled_sites(self) -> list[RuledSite]:
        """The sites whose rule gives the gradient as a sum of outer products.

        A site is an equation that combines an operand of this component with the
        example.
        """
        return [site for site in self.sites if isinstance(site, RuledSite)]

    @property
    def is_in_blocks(self) -> bool:
        """Whether checkpointed blocks compute all of this component's norms and sums.

        A block is a part of the loss that `jax.checkpoint` encloses. Blocks compute the
        norms and sums if three conditions hold: the leaves meet the example only in
        blocks; `roots` is not None, so that the computation of the blocks' inputs from
        the leaves only moves entries; and each entry of a leaf enters at most one
        block, and at most one iteration of a scan around the block. The squared norms
        from the blocks then add up to the squared norm over the leaves.
        """
        return (
            self.roots is not None
            and all(len(root) == 1 for root in self.roots)
            and all(isinstance(site, BlockSite) for site in self.sites)
            and not any(loop.shared for site in self.sites for loop in site.loops)
        )

    @property
    def is_leaf(self) -> bool:
        """Whether the component has one leaf, which is itself the only operand."""
        return self.path.outvars == self.path.invars and len(self.leaves) == 1

    @property
    def distinct_groups(self) -> tuple[int, ...]:
        """The distinct clipping groups of the component's leaves.

        A group is a set of leaves that are clipped together. The groups are in the
        order of their first leaves.
        """
        return tuple(dict.fromkeys(self.groups))

    @property
    def group_indices(self) -> tuple[int, ...]:
        """For each leaf, the index of its clipping group in `distinct_groups`."""
        return tuple(map(self.distinct_groups.index, self.groups))

    def forward(
        self, others: Arrays, *, min_dtype: DTypeLike | None
    ) -> Callable[..., list[jax.Array]]:
        """Make the function that computes the operands from the leaves.

        An operand is a value that is computed from parameter leaves alone, and then
        meets the example in an equation.

        Args:
          others: the values of the inputs of `path` that follow the leaves. These
            values depend on no example, and are treated as constants.
          min_dtype: the dtype to which casts to narrower dtypes are widened; None to
            leave casts unchanged.
        """
        closed = jex.ClosedJaxpr(self.path, [])

        def operands(*leaves: jax.Array) -> list[jax.Array]:
            return eqs.evaluate(closed, [*leaves, *others], evaluate_equation)

        def evaluate_equation(eqn: jex.JaxprEqn, args: Arrays) -> list[jax.Array]:
            # A cast to bfloat16 would round its cotangents to bfloat16 as well.
            if min_dtype is not None and eqn.primitive.name == "convert_element_type":
                dtype = _widest_dtype(min_dtype, eqs.aval(eqn.outvars[0]).dtype)
                return [args[0].astype(dtype)]
            return eqs.bind(eqn, args)

        return operands

    def pull_back(
        self, inputs: Arrays, cotangents: Arrays, min_dtype: DTypeLike = jnp.float32
    ) -> list[jax.Array]:
        """The gradients of the leaves, given the gradients of the operands.

        Operands are the values that `path` computes from the leaves. If the component
        has `roots`, the pull-back is computed in the dtype `min_dtype` or wider, even
        if `path` has casts to narrower dtypes.

        Args:
          inputs: the values of all inputs of `path`, the leaves first.
          cotangents: the gradients of the operands.
          min_dtype: float32 or float64.
        """
        has_roots, num_leaves = self.roots is not None, len(self.leaves)
        leaves = list(inputs[:num_leaves])
        if has_roots:
            leaves = [x.astype(_widest_dtype(min_dtype, x.dtype)) for x in leaves]
        if self.is_leaf:
            (leaf,), (cotangent,) = leaves, cotangents
            return [cotangent.astype(leaf.dtype).reshape(leaf.shape)]
        widest = min_dtype if has_roots else None
        forward = self.forward(inputs[num_leaves:], min_dtype=widest)
        outs, vjp = jax.vjp(forward, *leaves)
        # The vjp expects each cotangent in the dtype and shape of its output.
        cast_cotangents = [
            c.astype(o.dtype).reshape(o.shape)
            for c, o in zip(cotangents, outs, strict=True)
        ]
        return list(vjp(cast_cotangents))

    def description(self) -> Hashable:
        """A hashable description, equal only for components with the same computation.

        The description does not depend on the names of variables.
        """
        sites, path = tuple(site.description() for site in self.sites), self.path
        computed = eqs.describe_function(path.invars, path.eqns, path.outvars)
        return sites, len(self.leaves), computed, self.group_indices, self.roots


def components(
    closed: jex.ClosedJaxpr, sites: Sequence[Site], groups: Sequence[int]
) -> list[Component]:
    """Group parameter leaves and operands into components.

    An operand is a value that is computed from parameter leaves alone and meets the
    example in an equation, the operand's site. A leaf is in the same component as all
    operands that are computed from the leaf. A leaf that enters no operand is in no
    component.

    Args:
      closed: the jaxpr whose first inputs are the parameter leaves, and whose outputs
        are the operands.
      sites: the site of each operand.
      groups: for each parameter leaf, the number of the leaf's clipping group. The
        leaves of a clipping group are clipped together.
    """
    jaxpr = closed.jaxpr
    made_by = {v: (i, eqn) for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    sources = {v: frozenset({i}) for i, v in enumerate(jaxpr.invars[: len(groups)])}
    for eqn in jaxpr.eqns:
        dependencies = sources_of(eqn.invars, sources)
        # Behind stop_gradient an operand does not depend on any leaf by a derivative.
        if dependencies and eqn.primitive.name != "stop_gradient":
            sources.update(dict.fromkeys(eqn.outvars, dependencies))

    result = []
    for leaves, indices in _connected_components(
        [sources_of([v], sources) for v in jaxpr.outvars]
    ):
        operands = [jaxpr.outvars[i] for i in indices]
        own_sites = tuple(sites[i] for i in indices)
        own = tuple(groups[i] for i in leaves)
        roots, reason = None, "no rule"
        if not any(site.has_operand_tap for site in own_sites):
            roots, reason = _find_roots(made_by, operands, sources)
        # A norm at a root adds up entries of all leaves. So it cannot give a separate
        # norm for each of several groups.
        if roots is not None and len(set(own)) > 1:
            roots, reason = None, "leaves of several groups"
        invars = [jaxpr.invars[i] for i in leaves]
        path = _extract_path(jaxpr, made_by, invars, operands)
        result.append(Component(leaves, indices, own_sites, path, own, roots, reason))
    return result


def _connected_components(
    leaves_of_operands: Sequence[frozenset[int]],
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The connected components of the graph whose edges join operands and leaves.

    An operand is a value that is computed from parameter leaves. `leaves_of_operands`
    gives, for each operand, the leaves on which the operand depends. A component in the
    result is a pair: the indices of its leaves, and the indices of its operands.
    """
    parts: list[tuple[frozenset[int], list[int]]] = []
    for operand, leaves in enumerate(leaves_of_operands):
        # The operand joins all components that share a leaf with it.
        joined = [part for part in parts if not leaves.isdisjoint(part[0])]
        parts = [part for part in parts if leaves.isdisjoint(part[0])]
        indices = [i for _, operands in joined for i in operands]
        leaves = leaves.union(*(part[0] for part in joined))
        parts.append((leaves, [*indices, operand]))
    pairs = sorted((sorted(indices), sorted(leaves)) for leaves, indices in parts)
    return [(tuple(leaves), tuple(indices)) for indices, leaves in pairs]


# For each computed variable, the index of its equation and the equation.
Makers = Mapping[jex.Var, tuple[int, jex.JaxprEqn]]


def _extract_path(
    jaxpr: jex.Jaxpr,
    made_by: Makers,
    leaves: Sequence[jex.Var],
    operands: Sequence[jex.Var],
) -> jex.Jaxpr:
    """The equations that compute the given operands from the given leaves, as a jaxpr.

    An operand is a value that is computed from parameter leaves alone, and that an
    equation of the loss combines with the example. The first inputs of the result are
    the given leaves. The other inputs are further variables that the equations read.

    Args:
      jaxpr: the jaxpr from all parameter leaves to all operands.
      made_by: for each computed variable, the index of its equation, and the equation.
      leaves: the variables of the given leaves.
      operands: the variables of the given operands.
    """
    pending, inputs_in_order = list(operands), dict.fromkeys(leaves)
    eqns: dict[int, jex.JaxprEqn] = {}
    while pending:
        var = pending.pop()
        if var not in made_by:
            inputs_in_order[var] = None
        elif made_by[var][0] not in eqns:
            index, eqn = made_by[var]
            eqns[index] = eqn
            pending.extend(v for v in eqn.invars if isinstance(v, jex.Var))
    ordered = [eqns[i] for i in sorted(eqns)]
    inputs, outs = list(inputs_in_order), list(operands)
    return jaxpr.replace(constvars=[], invars=inputs, eqns=ordered, outvars=outs)


def _find_roots(
    made_by: Makers, operands: Sequence[jex.Var], sources: Sources
) -> tuple[tuple[Root, ...] | None, str]:
    # First find each operand's root: go back through the equations that only change the
    # layout. Then go from the roots back to the leaves, and check that the equations
    # only move entries, and that no entry is used twice.
    def defining_eqn(var: jex.Var) -> jex.JaxprEqn | None:
        return made_by[var][1] if var in made_by else None

    roots: dict[Hashable, tuple[jex.Var, list[Member]]] = {}
    for i, operand in enumerate(operands):
        var = operand
        axes = tuple(range(eqs.aval(var).ndim))
        eqn = defining_eqn(var)
        while eqn is not None and (input_axes := _axis_map(eqn)) is not None:
            axes = tuple(input_axes[a] if a >= 0 else -1 for a in axes)
            # The input depends on a leaf, so that it is a variable and not a literal.
            var = cast(jex.Var, eqn.invars[0])
            eqn = defining_eqn(var)
        # Two equations that slice the same part of an array have the same root.
        name = var if eqn is None else _slice_key(eqn, var)
        roots.setdefault(name, (var, []))[1].append(Member(i, axes))

    pending: list[tuple[jex.Var, Region | None]] = [
        (r[0], None) for r in roots.values()
    ]
    uses: dict[jex.Var, list[Region | None]] = {}
    while pending:
        var, region = pending.pop()
        if any(_regions_overlap(region, other) for other in uses.get(var, ())):
            return None, "used in several forms"
        uses.setdefault(var, []).append(region)
        eqn = defining_eqn(var)
        # The equation of a variable is visited once, at the variable's first use.
        if eqn is None or len(uses[var]) > 1:
            continue
        from_leaves = all(sources_of([v], sources) for v in eqn.invars)
        if not _moves_entries(eqn) or not from_leaves:
            return None, f"made by {eqn.primitive.name}"
        pending.extend((cast(jex.Var, v), _source_region(eqn, var)) for v in eqn.invars)
    return tuple(tuple(root) for _, root in roots.values()), ""


# A region of an array: for each axis, the start and the end of the region.
Region = tuple[tuple[int, int], ...]


def _source_region(eqn: jex.JaxprEqn, out: jex.Var) -> Region | None:
    """The region of an equation's first input that contains the entries of an output.

    For a slice or a split, the region has a start and an end for each axis of the
    input. For any other equation the result is None, which stands for the whole input.
    """
    shape = eqs.aval(eqn.invars[0]).shape if eqn.invars else ()
    if eqn.primitive.name == "slice":
        starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
        return tuple(zip(starts, limits, strict=True))
    if eqn.primitive.name == "split":
        sizes, axis = eqn.params["sizes"], eqn.params["axis"]
        position = eqn.outvars.index(out)
        start = sum(sizes[:position])
        region = [(0, n) for n in shape]
        region[axis] = (int(start), int(start + sizes[position]))
        return tuple(region)
    return None


def _slice_key(eqn: jex.JaxprEqn, out: jex.Var) -> Hashable:
    """A key of an equation's output. Equal slices of one variable have equal keys.

    If the equation is neither a slice nor a split, the key is the output itself.
    """
    if (region := _source_region(eqn, out)) is None:
        return out
    strides = eqn.params.get("strides") or (1,) * len(region)
    return eqn.invars[0], region, tuple(strides)


def _regions_overlap(one: Region | None, other: Region | None) -> bool:
    # None stands for the whole array, which overlaps with every part.
    if one is None or other is None:
        return True
    return all(
        max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True)
    )


def _moves_entries(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation only moves or casts entries, each to at most one position."""
    moving = {"reshape", "rev", "concatenate", "slice", "split"}
    return eqn.primitive.name in moving or _axis_map(eqn) is not None


def _axis_map(eqn: jex.JaxprEqn) -> tuple[int, ...] | None:
    """The input axis of each output axis, for an equation that only changes the layout.

    A change of layout permutes axes, casts real numbers, or adds or removes axes of
    size one. For some output axes of size one, the entry is -1 and names no input axis.
    The result is None for an equation that does more than change the layout.
    """
    name = eqn.primitive.name
    if len(eqn.invars) == 0 or len(eqn.outvars) != 1:
        return None
    before, after = eqs.aval(eqn.invars[0]), eqs.aval(eqn.outvars[0])
    real = eqs.is_real(eqn.invars[0], eqn.outvars[0])
    if name in {"convert_element_type", "copy", "copy_p", "reshard"} and real:
        return tuple(range(after.ndim))
    if name == "transpose":
        return tuple(eqn.params["permutation"])
    if name == "broadcast_in_dim" and math.prod(before.shape) == after.size:
        axes_out = eqn.params["broadcast_dimensions"]
        axes = range(after.ndim)
        return tuple(axes_out.index(i) if i in axes_out else -1 for i in axes)
    if name in {"reshape", "squeeze"}:
        if name == "reshape" and eqn.params.get("dimensions") is not None:
            return None
        # A reshape that only adds or removes axes of size one preserves the order of
        # entries along the other axes.
        long_axes = [i for i, n in enumerate(before.shape) if n != 1]
        if [before.shape[i] for i in long_axes] != [n for n in after.shape if n != 1]:
            return None
        remaining = iter(long_axes)
        return tuple(-1 if n == 1 else next(remaining) for n in after.shape)
    return None
