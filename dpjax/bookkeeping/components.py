"""Which parameters belong together, and when norms at the sites are norms of leaves.

Between a leaf and a site's operand lie computations of parameters alone: transposes,
casts, weight normalisation. Leaves and operands that they connect form a component.
Operands that are one array up to the order of axes have it as their root. Where the
leaves only move their entries into the roots', each entry to one place at most, the
gradient's square over the leaves is the sum of its squares at the roots. Elsewhere the
roots' gradients say too little, and each example's is pulled back to the leaves.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._dtypes import at_least_float32
from dpjax.bookkeeping.trace import aval, bind


class Root(NamedTuple):
    """Operands that are one array up to the order of axes.

    Attributes:
      operands: their indices.
      axes: for each of them, the root's axis that each of its axes is (-1 for an axis
        of size one).
    """

    operands: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]


class Component(NamedTuple):
    """Connected leaves and operands.

    Attributes:
      leaves: the indices of the leaves.
      operands: the indices of the operands.
      roots: of the operands, or None where their norms are not the leaves'.
      reason: why not.
    """

    leaves: tuple[int, ...]
    operands: tuple[int, ...]
    roots: tuple[Root, ...] | None
    reason: str


def components(
    closed: jex.ClosedJaxpr, num_leaves: int, has_rule: Sequence[bool]
) -> list[Component]:
    """Split the jaxpr from leaves (its first inputs) to operands (its outputs)."""
    jaxpr = closed.jaxpr
    sources: dict[jex.Var, frozenset[int]] = {
        v: frozenset({i}) for i, v in enumerate(jaxpr.invars[:num_leaves])
    }
    for eqn in jaxpr.eqns:
        reached = frozenset().union(*(_sources(v, sources) for v in eqn.invars))
        if reached and eqn.primitive.name != "stop_gradient":
            sources.update(dict.fromkeys(eqn.outvars, reached))

    groups: list[tuple[set[int], list[int]]] = []
    for number, out in enumerate(jaxpr.outvars):
        leaves, members = set(_sources(out, sources)), [number]
        for group in [g for g in groups if g[0] & leaves]:
            groups.remove(group)
            leaves |= group[0]
            members += group[1]
        groups.append((leaves, sorted(members)))

    found = []
    for leaves, members in groups:
        if all(has_rule[i] for i in members):
            roots, reason = _isometry(jaxpr, members, sources)
        else:
            roots, reason = None, "tapped itself"
        found.append(Component(tuple(sorted(leaves)), tuple(members), roots, reason))
    return found


def pull_back(
    closed: jex.ClosedJaxpr,
    component: Component,
    leaves: Sequence[Any],
    cotangents: Sequence[Any],
) -> list[Any]:
    """Gradients of the component's leaves from those of its operands.

    Where entries only move, in float32 at least, whatever the casts between.
    """
    inputs = [leaves[i] for i in component.leaves]
    if component.roots is not None:
        inputs = [x.astype(at_least_float32(x.dtype)) for x in inputs]
    outs, vjp = jax.vjp(at_operands(closed, component, leaves), *inputs)
    matched = [
        c.astype(o.dtype).reshape(o.shape)
        for c, o in zip(cotangents, outs, strict=True)
    ]
    return list(vjp(matched))


def at_operands(
    closed: jex.ClosedJaxpr, component: Component, leaves: Sequence[Any]
) -> Callable[..., list[Any]]:
    """The function from the component's leaves to its operands."""
    outs = [closed.jaxpr.outvars[i] for i in component.operands]

    def forward(*inputs: Any) -> list[Any]:
        full = list(leaves)
        for i, x in zip(component.leaves, inputs, strict=True):
            full[i] = x
        widened = component.roots is not None
        return _evaluate(closed, outs, full, widen_casts=widened)

    return forward


def _isometry(
    jaxpr: jex.Jaxpr, members: Sequence[int], sources: dict[jex.Var, frozenset[int]]
) -> tuple[tuple[Root, ...] | None, str]:
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    roots: dict[Any, tuple[Any, list[int], list[tuple[int, ...]]]] = {}
    for i in members:
        var: Any = jaxpr.outvars[i]
        axes = tuple(range(aval(var).ndim))
        while var in made_by and (back := _relabelling(made_by[var])) is not None:
            axes = tuple(back[a] if a >= 0 else -1 for a in axes)
            var = made_by[var].invars[0]
        # The same part taken twice is one root.
        name = _taken(made_by[var], var) if var in made_by else var
        _, operands, all_axes = roots.setdefault(name, (var, [], []))
        operands.append(i)
        all_axes.append(axes)

    pending: list[tuple[Any, Part | None]] = [(r[0], None) for r in roots.values()]
    uses: dict[Any, list[Part | None]] = {}
    while pending:
        var, part = pending.pop()
        if any(_overlap(part, other) for other in uses.get(var, ())):
            return None, "used in several forms"
        uses.setdefault(var, []).append(part)
        eqn = made_by.get(var)
        if eqn is None or len(uses[var]) > 1:
            continue
        if not _moves_entries(eqn) or not all(_sources(v, sources) for v in eqn.invars):
            return None, f"made by {eqn.primitive.name}"
        pending.extend((v, _part(eqn, var)) for v in eqn.invars)
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


def _taken(eqn: jex.JaxprEqn, out: jex.Var) -> Any:
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


def _evaluate(
    closed: jex.ClosedJaxpr,
    outs: Sequence[Any],
    inputs: Sequence[Any],
    widen_casts: bool,
) -> list[Any]:
    """Some outputs of a jaxpr."""
    jaxpr = closed.jaxpr
    needed = {v for v in outs if isinstance(v, jex.Var)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if needed & set(eqn.outvars):
            eqns.append(eqn)
            needed |= {v for v in eqn.invars if isinstance(v, jex.Var)}
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in reversed(eqns):
        args = [v.val if isinstance(v, jex.Literal) else values[v] for v in eqn.invars]
        if widen_casts and eqn.primitive.name == "convert_element_type":
            out = [args[0].astype(at_least_float32(aval(eqn.outvars[0]).dtype))]
        else:
            out = bind(eqn, args)
        values.update(zip(eqn.outvars, out, strict=True))
    return [values[v] for v in outs]


def _sources(atom: Any, sources: dict[jex.Var, frozenset[int]]) -> frozenset[int]:
    return (
        frozenset() if isinstance(atom, jex.Literal) else sources.get(atom, frozenset())
    )
