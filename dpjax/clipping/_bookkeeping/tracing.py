"""Trace a loss to a jaxpr, inline its calls, and refuse losses that mix examples.

An example's gradient must not depend on other examples. A collective over a named axis
mixes the values along the axis. The collective may be an equation of the loss. Or the
collective may be only in a custom derivative (custom_jvp, custom_vjp), so that the
loss's jaxpr does not contain the collective. So `trace` also differentiates each
equation that has a custom derivative and an input that may depend on a parameter, and
searches the jaxpr of the derivative. Built-in primitives need no such search: their
derivatives communicate only if the primitives communicate. A `jax.shard_map` in the
loss may communicate along the axes that it binds, since each of its calls has one
example.

The search takes the derivative with respect to all inputs that may depend on a
parameter, for cotangents of ones. A rule that communicates only for some symbolic zeros
(`symbolic_zeros=True`) is not detected.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core.meshes import varying_axes
from dpjax._core.typing import ArrayLike, Arrays, Atom
from dpjax.clipping._bookkeeping import equations as eqs

# Calls that may be replaced by their body. Calls of custom_jvp and custom_vjp are not
# among them, since the derivative of such a call differs from that of its body.
_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})
# The jaxprs and equations already searched, by id. As the object is stored, no other
# object can get its id.
_Searched = dict[tuple[Any, ...], jex.Jaxpr | jex.JaxprEqn]
# Primitives that name an axis but do not mix the values along the axis.
_NOT_MIXING = frozenset({"axis_index", "pvary", "pcast"})
# Calls whose inputs are, in the same order, the inputs of their bodies.
_CALLS = _INLINED | {"checkpoint", "remat2"}


def trace(
    loss_and_aux: Callable[[Arrays, Arrays], tuple[ArrayLike, object]],
    parameters: Arrays,
    example: Sequence[jax.ShapeDtypeStruct],
    *,
    search: bool = True,
) -> tuple[jex.ClosedJaxpr, Any]:
    """Trace `loss_and_aux`, a function of two lists of leaves, to a jaxpr.

    Args:
      loss_and_aux: a function of the parameters' leaves and the leaves of one example.
        It returns the loss of the example, and aux.
      parameters: the parameters' leaves.
      example: the types of the leaves of one example.
      search: whether to search for communication. If `trace` searches inside a
        `jax.shard_map`, the parameters must vary along all axes along which the loss
        varies. Otherwise, derivatives are sums over devices.

    Returns:
      The jaxpr of a function from the leaves of the parameters and of the example to
      the loss and the leaves of aux. The tree structure of aux.

    Raises:
      ValueError: search is True, and the loss or its derivative with respect to the
        parameters communicates along a named axis; or the loss names an axis that
        nothing binds.
    """

    def outputs(parameters: Arrays, example: Arrays) -> tuple[jax.Array, object]:
        loss, aux = loss_and_aux(parameters, example)
        return jnp.asarray(loss), aux

    # Tracing fails with this NameError if the loss or a derivative names an axis that
    # no surrounding transformation binds.
    try:
        make = jax.make_jaxpr(outputs, return_shape=True)
        jaxpr, (_, aux) = make(parameters, example)
        inputs = range(len(jaxpr.in_avals))
        if search:
            _search(jaxpr.jaxpr, [i < len(parameters) for i in inputs], {})
    except NameError as error:
        if "unbound axis name" in str(error):
            raise _collective_error(str(error)) from error
        raise
    jaxpr = jex.ClosedJaxpr(jaxpr.jaxpr, eqs.as_arrays(jaxpr.consts))
    return jaxpr, jax.tree.structure(aux)


def inline(
    closed: jex.ClosedJaxpr,
    invariant: Sequence[bool],
    parametric: Sequence[bool],
    retained: Callable[[jex.JaxprEqn], bool] = lambda eqn: False,
) -> jex.ClosedJaxpr:
    """Replace jit calls and checkpointed blocks that use a parameter by their bodies.

    Blocks for which `retained` is true stay, and so do calls of `custom_jvp` and
    `custom_vjp`, whose derivatives may differ from those of their bodies. Calls that no
    parameter enters stay, because JAX differentiates, batches and lowers a body once
    for all calls that share the body.

    Args:
      closed: the jaxpr.
      invariant: for each input, whether it depends on no example.
      parametric: for each input, whether it depends on a parameter and on no example.
      retained: a function that takes the equation of a rematerialised block that an
        example enters, and says whether the block stays checkpointed.
    """
    outer = closed.jaxpr
    constants = dict(zip(outer.constvars, closed.consts, strict=True))
    invariants = {v for v, on in zip(outer.invars, invariant, strict=True) if on}
    parameters = {v for v, on in zip(outer.invars, parametric, strict=True) if on}
    invariants.update(outer.constvars)
    eqns: list[jex.JaxprEqn] = []

    def flatten(jaxpr: jex.Jaxpr, names: dict[jex.Var, Atom]) -> list[Atom]:
        def rename(atom: Atom) -> Atom:
            return atom if isinstance(atom, jex.Literal) else names.get(atom, atom)

        for eqn in jaxpr.eqns:
            inputs = [rename(v) for v in eqn.invars]
            variables = [v for v in inputs if isinstance(v, jex.Var)]
            entered = not parameters.isdisjoint(variables)
            body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            call = eqn.primitive.name in _INLINED
            # A block that no example enters has no sites inside, and is inlined.
            if eqs.is_rematerialised(eqn):
                call = invariants.issuperset(variables) or not retained(eqn)
            if entered and call and body is not None:
                inner = getattr(body, "jaxpr", body)
                body_constants = dict(
                    zip(inner.constvars, getattr(body, "consts", ()), strict=True)
                )
                constants.update(body_constants)
                invariants.update(body_constants)
                outs = flatten(inner, dict(zip(inner.invars, inputs, strict=True)))
                names.update(zip(eqn.outvars, outs, strict=True))
                continue
            # Several calls may share one body. Each inlined copy needs its own
            # variables.
            if jaxpr is not outer:
                fresh = [jex.Var(v.aval) for v in eqn.outvars]
                names.update(zip(eqn.outvars, fresh, strict=True))
                eqn = eqn.replace(outvars=fresh)
            if invariants.issuperset(variables):
                invariants.update(eqn.outvars)
                if entered:
                    parameters.update(eqn.outvars)
            eqns.append(eqn.replace(invars=inputs))
        return [rename(v) for v in jaxpr.outvars]

    outvars = flatten(outer, {})
    flat = outer.replace(constvars=list(constants), eqns=eqns, outvars=outvars)
    return jex.ClosedJaxpr(flat, eqs.as_arrays(list(constants.values())))


def _collective_error(cause: str) -> ValueError:
    """Make the error for a loss that mixes examples.

    Args:
      cause: the collective and its axes, or JAX's message on an unbound axis.
    """
    return ValueError(
        "loss_fn must use one example at a time, but loss_fn or its derivative "
        f"communicates along a named axis ({cause}), as BatchNorm does in training "
        "mode. One example would then change the gradients of other examples, and "
        "clipping would not bound its influence on the sum. Use GroupNorm or "
        "LayerNorm, or BatchNorm with its running averages."
    )


def _search(
    jaxpr: jex.Jaxpr,
    active: Sequence[bool],
    searched: _Searched,
    bound: frozenset[str] = frozenset(),
) -> None:
    """Raise ValueError if a jaxpr, or a custom derivative in it, communicates.

    Communication is a collective over a named axis that no `shard_map` in the loss
    binds. A custom derivative is searched only if an input of its equation depends on
    an active input of the jaxpr.

    Args:
      jaxpr: the jaxpr to search.
      active: for each input, whether it depends on a parameter.
      searched: the jaxprs and equations that were already searched. Calls of the same
        function share a body, which is searched once.
      bound: the named axes that the calls of `shard_map` around the jaxpr bind.
    """
    if (id(jaxpr), bound, *active) in searched:
        return
    searched[id(jaxpr), bound, *active] = jaxpr
    depends = {v for v, on in zip(jaxpr.invars, active, strict=True) if on}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        flags = [isinstance(v, jex.Var) and v in depends for v in eqn.invars]
        if name not in _NOT_MIXING:
            _refuse_named_axes(eqn, bound)
        # The derivative of a shard_map contains the custom derivatives in its body,
        # which can be traced only inside the shard_map.
        custom = name.startswith(("custom_", "shard_map", "call_hi_primitive"))
        if custom and any(flags):
            _search_eqn(eqn, flags, searched)
        names = bound | eqn.params.get("newly_manual_axes", frozenset())
        for inner in eqs.inner_jaxprs(eqn):
            # For other primitives, all inputs of the bodies are treated as active if an
            # input of the equation is. In the body of a function with a custom
            # derivative no input is active: the custom derivative replaces the
            # derivative of the body.
            same = name in _CALLS and len(inner.invars) == len(flags)
            on = any(flags) and not custom
            inputs = flags if same else [on] * len(inner.invars)
            _search(inner, inputs, searched, names)
        if any(flags):
            depends.update(eqn.outvars)


def _search_eqn(eqn: jex.JaxprEqn, flags: Sequence[bool], searched: _Searched) -> None:
    """Raise ValueError if the custom derivative of an equation communicates.

    Communication is a collective over a named axis.

    Args:
      eqn: the equation.
      flags: for each input, whether it depends on a parameter.
      searched: the jaxprs and equations that were already searched.
    """
    active = [i for i, v in enumerate(eqn.invars) if flags[i] and eqs.is_inexact(v)]
    search_key = (id(eqn), *active)
    if not active or search_key in searched:
        return
    searched[search_key] = eqn
    # In `jax.shard_map`, JAX casts an output that does not vary along the axis of the
    # examples before it meets an example. The cast's derivative is a sum over devices.
    axes = frozenset().union(*(varying_axes(eqn.invars[i].aval) for i in active))
    for out in filter(eqs.is_inexact, eqn.outvars):
        if lost := axes - varying_axes(out.aval):
            raise _collective_error(f"{eqn.primitive.name} is constant along {[*lost]}")

    def derivative(*inputs: jax.Array) -> list[jax.Array]:
        def function(*active_inputs: jax.Array) -> list[jax.Array]:
            replaced = dict(zip(active, active_inputs, strict=True))
            values = [replaced.get(i, x) for i, x in enumerate(inputs)]
            # Integer outputs have no derivative.
            return [x for x in eqs.bind(eqn, values) if eqs.is_inexact(x)]

        outs, vjp = jax.vjp(function, *(inputs[i] for i in active))
        return list(vjp([jnp.ones_like(x) for x in outs]))

    closed = jax.make_jaxpr(derivative)(*(v.aval for v in eqn.invars))
    # The engine computes no second derivatives. So no input is active here.
    _search(closed.jaxpr, [False] * len(closed.jaxpr.invars), searched)


def _refuse_named_axes(eqn: jex.JaxprEqn, bound: frozenset[str]) -> None:
    for param in ("axes", "axis_name"):
        names = eqn.params.get(param, ())
        names = names if isinstance(names, tuple | list) else (names,)
        # Integers are axes of the array itself; names are axes of a mesh or a vmap.
        named = [x for x in names if not hasattr(x, "__index__")]
        if any(x not in (None, *bound) for x in named):
            raise _collective_error(f"{eqn.primitive.name} over {named}")
