"""Trace a loss to one flat jaxpr, and refuse losses that mix examples."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core.typing import Atom, LossOfLeaves
from dpjax.clipping.bookkeeping.jaxpr.collectives import (
    mixes_examples,
    refuse_collectives,
)
from dpjax.clipping.bookkeeping.jaxpr.equations import (
    as_arrays,
    is_rematerialised,
)

# Calls that may be replaced by their body. Calls of custom_jvp and custom_vjp may not:
# the derivative of such a call is not the derivative of its body.
_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})


def trace(
    loss_and_aux: LossOfLeaves,
    parameters: Sequence[jax.Array],
    example: Sequence[jax.ShapeDtypeStruct],
) -> tuple[jex.ClosedJaxpr, Any]:
    """Trace `loss_and_aux(parameters, example)`, where both are lists of leaves.

    Args:
      loss_and_aux: the loss of one example.
      parameters: the parameters' leaves.
      example: the types of the leaves of one example.

    Returns:
      A jaxpr from the parameters and the example to the loss and the leaves of aux,
      and the structure of aux.

    Raises:
      ValueError: the loss or its derivative by the parameters communicates along a
        named axis.
    """

    def outputs(
        parameters: Sequence[jax.Array], example: Sequence[jax.Array]
    ) -> tuple[jax.Array, object]:
        loss, aux = loss_and_aux(parameters, example)
        return jnp.asarray(loss), aux

    try:
        jaxpr, (_, aux) = jax.make_jaxpr(outputs, return_shape=True)(
            parameters, example
        )
    except NameError as error:
        if "unbound axis name" in str(error):
            raise mixes_examples(str(error)) from error
        raise
    refuse_collectives(jaxpr.jaxpr, len(parameters))
    jaxpr = jex.ClosedJaxpr(jaxpr.jaxpr, as_arrays(jaxpr.consts))
    return jaxpr, jax.tree.structure(aux)


def inline(
    closed: jex.ClosedJaxpr,
    known: Sequence[bool],
    parametric: Sequence[bool],
    kept: Callable[[jex.JaxprEqn], bool] = lambda eqn: False,
) -> jex.ClosedJaxpr:
    """The same jaxpr, with calls that a parameter enters replaced by their bodies.

    Other calls stay, because JAX differentiates, batches and lowers a body once for all
    calls that share it.

    Args:
      closed: the jaxpr.
      known: for each input, whether it is batch-invariant: no example enters it.
      parametric: for each input, whether it is batch-invariant and depends on a
        parameter.
      kept: which of the rematerialised blocks that an example enters stay checkpointed.
    """
    outer = closed.jaxpr
    constants = dict(zip(outer.constvars, closed.consts, strict=True))
    knowns = {v for v, on in zip(outer.invars, known, strict=True) if on}
    parameters = {v for v, on in zip(outer.invars, parametric, strict=True) if on}
    knowns.update(outer.constvars)
    eqns: list[jex.JaxprEqn] = []

    def flatten(jaxpr: jex.Jaxpr, names: dict[jex.Var, Atom]) -> list[Atom]:
        def renamed(atom: Atom) -> Atom:
            return atom if isinstance(atom, jex.Literal) else names.get(atom, atom)

        for eqn in jaxpr.eqns:
            inputs = [renamed(v) for v in eqn.invars]
            variables = [v for v in inputs if isinstance(v, jex.Var)]
            entered = not parameters.isdisjoint(variables)
            body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            call = eqn.primitive.name in _INLINED
            # A block that no example enters has no sites inside, and is inlined.
            if is_rematerialised(eqn):
                call = knowns.issuperset(variables) or not kept(eqn)
            if entered and call and body is not None:
                inner = getattr(body, "jaxpr", body)
                held = dict(
                    zip(inner.constvars, getattr(body, "consts", ()), strict=True)
                )
                constants.update(held)
                knowns.update(held)
                outs = flatten(inner, dict(zip(inner.invars, inputs, strict=True)))
                names.update(zip(eqn.outvars, outs, strict=True))
                continue
            # Several calls may share one body. Each inlined copy needs variables of its
            # own.
            if jaxpr is not outer:
                fresh = [jex.Var(v.aval) for v in eqn.outvars]
                names.update(zip(eqn.outvars, fresh, strict=True))
                eqn = eqn.replace(outvars=fresh)
            if knowns.issuperset(variables):
                knowns.update(eqn.outvars)
                if entered:
                    parameters.update(eqn.outvars)
            eqns.append(eqn.replace(invars=inputs))
        return [renamed(v) for v in jaxpr.outvars]

    outvars = flatten(outer, {})
    flat = outer.replace(constvars=list(constants), eqns=eqns, outvars=outvars)
    return jex.ClosedJaxpr(flat, as_arrays(list(constants.values())))
