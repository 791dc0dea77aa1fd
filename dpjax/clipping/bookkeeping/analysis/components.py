"""Which parameters belong together, and when norms at the sites are norms of leaves.

Between a leaf and a site's operand lie computations of parameters alone: transposes,
casts, weight normalisation. Leaves and operands that they connect form a component.
Operands that are one array up to the order of axes have it as their root. Where the
leaves only move their entries into the roots', each entry to one place at most, the
gradient's square over the leaves is the sum of its squares at the roots. Elsewhere the
roots' gradients say too little, and each example's is pulled back to the leaves.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, cast

import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core.typing import Atom
from dpjax.clipping.bookkeeping.analysis.sites import KeptSite, RuledSite, Site
from dpjax.clipping.bookkeeping.jaxpr.equations import aval
from dpjax.clipping.bookkeeping.jaxpr.path import Path

Sources = Mapping[jex.Var, frozenset[int]]


class Root(NamedTuple):
    """Operands that are one array up to the order of axes.

    Attributes:
      members: which of the component's operands.
      axes: for each of them, the root's axis that each of its axes is (-1 for an axis
        of size one).
    """

    members: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]


class Component(NamedTuple):
    """Connected leaves and operands.

    Attributes:
      leaves: the indices of the leaves.
      operands: the indices of the operands.
      sites: of the operands.
      path: from the leaves to the operands.
      groups: for each leaf, the group that it is clipped with.
      roots: of the operands, or None where their norms are not the leaves'.
      reason: why not.
    """

    leaves: tuple[int, ...]
    operands: tuple[int, ...]
    sites: tuple[Site, ...]
    path: Path
    groups: tuple[int, ...]
    roots: tuple[Root, ...] | None
    reason: str

    @property
    def kept(self) -> bool:
        """Whether each of its sites is a kept block's, which alone has its entries."""
        return (
            self.roots is not None
            and all(len(root.members) == 1 for root in self.roots)
            and all(isinstance(site, KeptSite) for site in self.sites)
            and not any(loop.shared for site in self.sites for loop in site.loops)
        )

    @property
    def own_groups(self) -> tuple[int, ...]:
        """The groups of its leaves, once each."""
        return tuple(dict.fromkeys(self.groups))

    def features(self) -> Hashable:
        """All that does not depend on where in the loss it is."""
        groups = tuple(map(self.own_groups.index, self.groups))
        sites = tuple(site.features() for site in self.sites)
        return sites, self.path.features(), groups, self.roots


def components(
    closed: jex.ClosedJaxpr, sites: Sequence[Site], groups: Sequence[int]
) -> list[Component]:
    """Split the jaxpr from leaves (its first inputs) to the sites' operands.

    Leaves of one group are clipped together.
    """
    jaxpr = closed.jaxpr
    made_by = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    sources = {v: frozenset({i}) for i, v in enumerate(jaxpr.invars[: len(groups)])}
    for eqn in jaxpr.eqns:
        reached = frozenset().union(*(_sources(v, sources) for v in eqn.invars))
        if reached and eqn.primitive.name != "stop_gradient":
            sources.update(dict.fromkeys(eqn.outvars, reached))

    found = []
    for leaves, members in _connected_components(
        [_sources(v, sources) for v in jaxpr.outvars]
    ):
        operands = tuple(jaxpr.outvars[i] for i in members)
        its_sites = tuple(sites[i] for i in members)
        its_groups = tuple(groups[i] for i in leaves)
        roots, reason = None, "tapped itself"
        if all(isinstance(site, RuledSite | KeptSite) for site in its_sites):
            roots, reason = _isometry(jaxpr, made_by, operands, sources)
        if roots is not None and len(set(its_groups)) > 1:
            roots, reason = None, "leaves of several groups"
        path = _path(jaxpr, made_by, tuple(jaxpr.invars[i] for i in leaves), operands)
        found.append(
            Component(leaves, members, its_sites, path, its_groups, roots, reason)
        )
    return found


def _connected_components(
    reached: Sequence[frozenset[int]],
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Leaves and operands that belong together, from the leaves of each operand."""
    first: dict[int, int] = {}  # some leaf that a leaf belongs with, or itself

    def find(leaf: int) -> int:
        while (before := first.setdefault(leaf, leaf)) != leaf:
            first[leaf] = first[before]
            leaf = before
        return leaf

    for leaves in reached:
        for leaf in leaves:
            first[find(leaf)] = find(min(leaves))
    together: dict[int | tuple[int], tuple[set[int], list[int]]] = {}
    for number, leaves in enumerate(reached):
        name = find(min(leaves)) if leaves else (number,)
        all_leaves, members = together.setdefault(name, (set(), []))
        all_leaves |= leaves
        members.append(number)
    return [(tuple(sorted(a)), tuple(b)) for a, b in together.values()]


def _path(
    jaxpr: jex.Jaxpr,
    made_by: Mapping[jex.Var, int],
    leaves: tuple[jex.Var, ...],
    operands: tuple[jex.Var, ...],
) -> Path:
    """The equations between them."""
    pending, entering, numbers = list(operands), dict.fromkeys(leaves), set()
    while pending:
        var = pending.pop()
        if var not in made_by:
            entering[var] = None
        elif made_by[var] not in numbers:
            numbers.add(made_by[var])
            inputs = jaxpr.eqns[made_by[var]].invars
            pending.extend(v for v in inputs if isinstance(v, jex.Var))
    eqns = tuple(jaxpr.eqns[i] for i in sorted(numbers))
    return Path(leaves, tuple(entering)[len(leaves) :], eqns, operands)


def _isometry(
    jaxpr: jex.Jaxpr,
    made_by: Mapping[jex.Var, int],
    members: Sequence[jex.Var],
    sources: Sources,
) -> tuple[tuple[Root, ...] | None, str]:
    def maker(var: jex.Var) -> jex.JaxprEqn | None:
        return jaxpr.eqns[made_by[var]] if var in made_by else None

    roots: dict[Hashable, tuple[jex.Var, list[int], list[tuple[int, ...]]]] = {}
    for i, member in enumerate(members):
        var = member
        axes = tuple(range(aval(var).ndim))
        eqn = maker(var)
        while eqn is not None and (back := _relabelling(eqn)) is not None:
            axes = tuple(back[a] if a >= 0 else -1 for a in axes)
            var = cast(jex.Var, eqn.invars[0])  # what is of a leaf is no literal
            eqn = maker(var)
        # The same part taken twice is one root.
        name = var if eqn is None else _name_of_part(eqn, var)
        _, operands, all_axes = roots.setdefault(name, (var, [], []))
        operands.append(i)
        all_axes.append(axes)

    pending: list[tuple[jex.Var, Part | None]] = [(r[0], None) for r in roots.values()]
    uses: dict[jex.Var, list[Part | None]] = {}
    while pending:
        var, part = pending.pop()
        if any(_overlap(part, other) for other in uses.get(var, ())):
            return None, "used in several forms"
        uses.setdefault(var, []).append(part)
        eqn = maker(var)
        if eqn is None or len(uses[var]) > 1:
            continue
        if not _moves_entries(eqn) or not all(_sources(v, sources) for v in eqn.invars):
            return None, f"made by {eqn.primitive.name}"
        pending.extend((cast(jex.Var, v), _part(eqn, var)) for v in eqn.invars)
    found = [Root(tuple(ops), tuple(axes)) for _, ops, axes in roots.values()]
    return tuple(found), ""


# For each axis where a part of an array begins and ends.
Part = tuple[tuple[int, int], ...]


def _part(eqn: jex.JaxprEqn, out: jex.Var) -> Part | None:
    """The part of its input that an output is, or lies in; None for the whole."""
    shape = aval(eqn.invars[0]).shape if eqn.invars else ()
    if eqn.primitive.name == "slice":
        starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
        return tuple(zip(starts, limits, strict=True))
    if eqn.primitive.name == "split":
        sizes, axis = eqn.params["sizes"], eqn.params["axis"]
        place = eqn.outvars.index(out)
        start = sum(sizes[:place])
        whole = [(0, n) for n in shape]
        whole[axis] = (int(start), int(start + sizes[place]))
        return tuple(whole)
    return None


def _name_of_part(eqn: jex.JaxprEqn, out: jex.Var) -> Hashable:
    """A name for an output, which other equations that take the same part share."""
    if (part := _part(eqn, out)) is None:
        return out
    strides = eqn.params.get("strides") or (1,) * len(part)
    return eqn.invars[0], part, tuple(strides)


def _overlap(one: Part | None, other: Part | None) -> bool:
    if one is None or other is None:
        return True
    return all(
        max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True)
    )


def _moves_entries(eqn: jex.JaxprEqn) -> bool:
    """Whether each output entry is one input entry, none of them twice."""
    moving = {"reshape", "rev", "concatenate", "slice", "split"}
    return eqn.primitive.name in moving or _relabelling(eqn) is not None


def _relabelling(eqn: jex.JaxprEqn) -> tuple[int, ...] | None:
    """For a change of layout, the input's axis of each output axis, else None."""
    name = eqn.primitive.name
    if len(eqn.invars) == 0 or len(eqn.outvars) != 1:
        return None
    before, after = aval(eqn.invars[0]), aval(eqn.outvars[0])
    real = all(jnp.issubdtype(a.dtype, jnp.floating) for a in (before, after))
    if name in {"convert_element_type", "copy", "copy_p", "reshard"} and real:
        return tuple(range(after.ndim))
    if name == "transpose":
        return tuple(eqn.params["permutation"])
    if name == "broadcast_in_dim" and math.prod(before.shape) == after.size:
        places = eqn.params["broadcast_dimensions"]
        return tuple(places.index(i) if i in places else -1 for i in range(after.ndim))
    if name in {"reshape", "squeeze"}:
        if name == "reshape" and eqn.params.get("dimensions") is not None:
            return None
        kept = [i for i, n in enumerate(before.shape) if n != 1]
        if [before.shape[i] for i in kept] != [n for n in after.shape if n != 1]:
            return None
        remaining = iter(kept)
        return tuple(-1 if n == 1 else next(remaining) for n in after.shape)
    return None


def _sources(atom: Atom, sources: Sources) -> frozenset[int]:
    nothing: frozenset[int] = frozenset()
    return nothing if isinstance(atom, jex.Literal) else sources.get(atom, nothing)
