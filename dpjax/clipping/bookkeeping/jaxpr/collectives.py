"""Refuse losses that see other examples: what they, or their derivatives, bind.

A collective over a named axis mixes what lies along it. It may stand in the loss, or
only in a derivative that the loss brings along (custom_jvp, custom_vjp): that is
nowhere in the loss's jaxpr, so each such equation is differentiated here and its
derivative searched. Primitives' own derivatives communicate only where they do.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core.typing import Atom
from dpjax.clipping.bookkeeping.jaxpr.equations import aval, bind

# What was searched already, by its identity, which lasts as long as it is held here.
_Seen = dict[tuple[int, ...], jex.Jaxpr | jex.JaxprEqn]
# They read an axis name without mixing what lies along it.
_NOT_MIXING = frozenset({"axis_index", "pvary", "pcast"})
# Their bodies have their inputs, one for one.
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"})


def refuse_collectives(jaxpr: jex.Jaxpr, num_parameters: int) -> None:
    """Refuse a loss's jaxpr, the first inputs of which are differentiated by.

    Raises:
      ValueError: it or its derivative communicates along a named axis.
    """
    active = [i < num_parameters for i in range(len(jaxpr.invars))]
    try:
        _search(jaxpr, active, {})
    except NameError as error:
        if "unbound axis name" in str(error):
            raise mixes_examples(str(error)) from error
        raise


def uses(eqns: Sequence[jex.JaxprEqn], primitive: str) -> bool:
    """Whether a primitive of such a name stands anywhere in equations."""
    return any(
        eqn.primitive.name.startswith(primitive)
        or any(uses(inner.eqns, primitive) for inner in _inner_jaxprs(eqn))
        for eqn in eqns
    )


def mixes_examples(what: str) -> ValueError:
    """The refusal."""
    return ValueError(
        "loss_fn must see one example at a time, but it communicates along a named "
        f"axis ({what}), as BatchNorm in training mode does: then no bound on one "
        "example's gradient bounds its influence. Use GroupNorm or LayerNorm, or "
        "BatchNorm with its running averages."
    )


def _search(jaxpr: jex.Jaxpr, active: Sequence[bool], seen: _Seen) -> None:
    """Refuse collectives in a jaxpr and its derivative by the active inputs.

    `seen` holds what was searched already: calls of one function share their body.
    """
    if (id(jaxpr), *active) in seen:
        return
    seen[id(jaxpr), *active] = jaxpr
    depends = {v for v, on in zip(jaxpr.invars, active, strict=True) if on}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        flags = [isinstance(v, jex.Var) and v in depends for v in eqn.invars]
        if name not in _NOT_MIXING:
            _refuse_names(eqn)
        custom = name.startswith("custom_")
        if custom and any(flags):
            _search_derivative(eqn, flags, seen)
        if name != "shard_map":  # it binds the names it uses
            for inner in _inner_jaxprs(eqn):
                # A custom derivative takes its body's place.
                if name in _CALLS and len(inner.invars) == len(flags):
                    _search(inner, flags, seen)
                else:
                    on = any(flags) and not custom
                    _search(inner, [on] * len(inner.invars), seen)
        if any(flags):
            depends.update(eqn.outvars)


def _search_derivative(eqn: jex.JaxprEqn, flags: Sequence[bool], seen: _Seen) -> None:
    """Refuse collectives in an equation's derivative by some of its inputs."""
    by = [i for i, v in enumerate(eqn.invars) if flags[i] and _is_inexact(v)]
    derived = (id(eqn), *by)
    if not by or derived in seen:
        return
    seen[derived] = eqn

    def derivative(*inputs: jax.Array) -> list[jax.Array]:
        def of(*some: jax.Array) -> list[jax.Array]:
            full = list(inputs)
            for i, x in zip(by, some, strict=True):
                full[i] = x
            outs = bind(eqn, full)
            return [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)]

        outs, vjp = jax.vjp(of, *(inputs[i] for i in by))
        return list(vjp([jnp.ones_like(x) for x in outs]))

    closed = jax.make_jaxpr(derivative)(*(v.aval for v in eqn.invars))
    # Nobody differentiates it once more.
    _search(closed.jaxpr, [False] * len(closed.jaxpr.invars), seen)


def _refuse_names(eqn: jex.JaxprEqn) -> None:
    for param in ("axes", "axis_name"):
        names = eqn.params.get(param, ())
        names = names if isinstance(names, tuple | list) else (names,)
        named = [name for name in names if isinstance(name, str)]
        if named:
            raise mixes_examples(f"{eqn.primitive.name} over {named}")


def _inner_jaxprs(eqn: jex.JaxprEqn) -> Iterator[jex.Jaxpr]:
    """The jaxprs of an equation's bodies and branches."""
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, jex.ClosedJaxpr):
                yield inner.jaxpr
            elif isinstance(inner, jex.Jaxpr):
                yield inner


def _is_inexact(atom: Atom) -> bool:
    return jnp.issubdtype(aval(atom).dtype, jnp.inexact)
