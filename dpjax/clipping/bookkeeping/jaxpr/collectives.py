"""Refuse losses in which an example's gradient depends on other examples.

A collective over a named axis mixes the values along that axis. The collective may be
an equation of the loss. It may also be part of a custom derivative (custom_jvp,
custom_vjp) only, and then it is nowhere in the loss's jaxpr. Each equation with a
custom derivative is therefore differentiated here, and the jaxpr of the derivative is
searched too. The derivative of a built-in primitive communicates only if the primitive
does.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core.typing import Atom
from dpjax.clipping.bookkeeping.jaxpr.equations import aval, bind

# The jaxprs and equations searched already, by id. Storing the object keeps its id from
# being used again.
_Seen = dict[tuple[int, ...], jex.Jaxpr | jex.JaxprEqn]
# These primitives name an axis but do not mix the values along it.
_NOT_MIXING = frozenset({"axis_index", "pvary", "pcast"})
# The inputs of these calls are the inputs of their bodies, one for one.
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"})


def refuse_collectives(jaxpr: jex.Jaxpr, num_parameters: int) -> None:
    """Refuse a loss that communicates along a named axis, itself or in a derivative.

    Args:
      jaxpr: the jaxpr of the loss.
      num_parameters: how many of its inputs, the first ones, are parameters.

    Raises:
      ValueError: the loss or its derivative communicates along a named axis.
    """
    active = [i < num_parameters for i in range(len(jaxpr.invars))]
    # Tracing a derivative fails with this NameError if it names an axis that no
    # surrounding transformation binds.
    try:
        _search(jaxpr, active, {})
    except NameError as error:
        if "unbound axis name" in str(error):
            raise mixes_examples(str(error)) from error
        raise


def uses(eqns: Sequence[jex.JaxprEqn], primitive: str) -> bool:
    """Whether the equations, or the jaxprs inside them, use a primitive.

    Args:
      eqns: the equations.
      primitive: the beginning of the primitive's name.
    """
    return any(
        eqn.primitive.name.startswith(primitive)
        or any(uses(inner.eqns, primitive) for inner in _inner_jaxprs(eqn))
        for eqn in eqns
    )


def mixes_examples(what: str) -> ValueError:
    """The error for a loss that mixes examples; `what` names the collective."""
    return ValueError(
        "loss_fn must see one example at a time, but it communicates along a named "
        f"axis ({what}), as BatchNorm in training mode does: then no bound on one "
        "example's gradient bounds its influence. Use GroupNorm or LayerNorm, or "
        "BatchNorm with its running averages."
    )


def _search(jaxpr: jex.Jaxpr, active: Sequence[bool], seen: _Seen) -> None:
    """Refuse collectives in a jaxpr and in its derivative by the active inputs.

    Args:
      jaxpr: the jaxpr to search.
      active: for each input, whether it depends on a parameter.
      seen: the jaxprs and equations searched already. Calls of one function share a
        body, which is searched once.
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
        # A shard_map binds the axis names that its body uses.
        if name != "shard_map":
            for inner in _inner_jaxprs(eqn):
                # For other primitives the inputs of the bodies are matched loosely: all
                # are active, or none in a custom derivative's body, which JAX does not
                # differentiate because the custom rule replaces its derivative.
                if name in _CALLS and len(inner.invars) == len(flags):
                    _search(inner, flags, seen)
                else:
                    on = any(flags) and not custom
                    _search(inner, [on] * len(inner.invars), seen)
        if any(flags):
            depends.update(eqn.outvars)


def _search_derivative(eqn: jex.JaxprEqn, flags: Sequence[bool], seen: _Seen) -> None:
    """Refuse collectives in the derivative of an equation with a custom derivative.

    Args:
      eqn: the equation.
      flags: for each input, whether it depends on a parameter.
      seen: the jaxprs and equations searched already.
    """
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
            # Integer outputs have no derivative.
            outs = bind(eqn, full)
            return [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)]

        outs, vjp = jax.vjp(of, *(inputs[i] for i in by))
        return list(vjp([jnp.ones_like(x) for x in outs]))

    closed = jax.make_jaxpr(derivative)(*(v.aval for v in eqn.invars))
    # The engine takes no second derivatives, so no input is active here.
    _search(closed.jaxpr, [False] * len(closed.jaxpr.invars), seen)


def _refuse_names(eqn: jex.JaxprEqn) -> None:
    for param in ("axes", "axis_name"):
        names = eqn.params.get(param, ())
        names = names if isinstance(names, tuple | list) else (names,)
        # Integers are axes of the array itself; names are axes of a mesh or a vmap.
        named = [name for name in names if isinstance(name, str)]
        if named:
            raise mixes_examples(f"{eqn.primitive.name} over {named}")


def _inner_jaxprs(eqn: jex.JaxprEqn) -> Iterator[jex.Jaxpr]:
    """The jaxprs in an equation's parameters, such as bodies and branches."""
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, jex.ClosedJaxpr):
                yield inner.jaxpr
            elif isinstance(inner, jex.Jaxpr):
                yield inner


def _is_inexact(atom: Atom) -> bool:
    return jnp.issubdtype(aval(atom).dtype, jnp.inexact)
