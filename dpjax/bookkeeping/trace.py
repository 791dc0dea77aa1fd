"""From a loss to one flat jaxpr: calls inlined, cross-example layers refused."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

# Calls that mean no more than their body. A rematerialised block is one: the engine
# records what its sites need, and the recomputation is given up. custom_jvp and
# custom_vjp calls are not: their derivative is not their body's.
_INLINED = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
)
# They read an axis name without mixing what lies along it.
_NOT_MIXING = frozenset({"axis_index", "pvary", "pcast"})


def trace(
    loss_and_aux: Callable[..., Any], parameters: Sequence[Any], example: Sequence[Any]
) -> tuple[jex.ClosedJaxpr, Any]:
    """Trace `loss_and_aux(parameters, example)`, both of them lists of leaves.

    Returns:
      A jaxpr from the parameters and the example to the loss and the leaves of aux,
      and the structure of aux.

    Raises:
      ValueError: the loss communicates along a named axis.
    """

    def outputs(parameters: Any, example: Any) -> tuple[Any, Any]:
        loss, aux = loss_and_aux(parameters, example)
        return jnp.asarray(loss), aux

    try:
        jaxpr, (_, aux) = jax.make_jaxpr(outputs, return_shape=True)(
            parameters, example
        )
    except NameError as error:
        if "unbound axis name" in str(error):
            raise _mixes_examples(str(error)) from error
        raise
    _refuse_collectives(jaxpr.jaxpr)
    return inline(jaxpr), jax.tree.structure(aux)


def bind(eqn: jex.JaxprEqn, values: Sequence[Any], **changed: Any) -> list[Any]:
    """The outputs of one equation, with some parameters changed."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    functions, params = params if isinstance(params, tuple) else ((), params)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def aval(atom: Any) -> Any:
    """The shape and dtype of a variable or literal."""
    return atom.aval


def varying_axes(of: Any) -> frozenset[str]:
    """The axes of `jax.shard_map` along which a value of this type differs."""
    return of.manual_axis_type.varying


def like(aval: Any, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """What differs along the same axes as a variable, with another shape and dtype."""
    axes = aval.manual_axis_type
    if not axes.varying:
        return jax.ShapeDtypeStruct(tuple(shape), dtype)
    mesh = jax.sharding.NamedSharding(aval.sharding.mesh, jax.P())
    return jax.ShapeDtypeStruct(
        tuple(shape), dtype, sharding=mesh, manual_axis_type=axes
    )


def inline(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same jaxpr without calls."""

    def flat(*inputs: Any) -> list[Any]:
        return _evaluate(closed.jaxpr, closed.consts, inputs)

    avals = [like(a, a.shape, a.dtype) for a in closed.in_avals]
    return jax.make_jaxpr(flat)(*avals)


def _evaluate(jaxpr: jex.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> Any:
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name in _INLINED and body is not None:
            inner = getattr(body, "jaxpr", body)
            out = _evaluate(inner, getattr(body, "consts", ()), inputs)
        else:
            out = bind(eqn, inputs)
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _refuse_collectives(jaxpr: jex.Jaxpr) -> None:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in _NOT_MIXING:
            for param in ("axes", "axis_name"):
                names = eqn.params.get(param, ())
                names = names if isinstance(names, tuple | list) else (names,)
                named = [name for name in names if isinstance(name, str)]
                if named:
                    raise _mixes_examples(f"{eqn.primitive.name} over {named}")
        if eqn.primitive.name != "shard_map":  # it binds the names it uses
            for inner in _within(eqn):
                _refuse_collectives(inner)


def uses(jaxpr: jex.Jaxpr, primitive: str) -> bool:
    """Whether a primitive of such a name stands anywhere in a jaxpr."""
    return any(
        eqn.primitive.name.startswith(primitive)
        or any(uses(inner, primitive) for inner in _within(eqn))
        for eqn in jaxpr.eqns
    )


def _within(eqn: jex.JaxprEqn) -> Iterator[jex.Jaxpr]:
    """The jaxprs of an equation's bodies and branches."""
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, jex.ClosedJaxpr):
                yield inner.jaxpr
            elif isinstance(inner, jex.Jaxpr):
                yield inner


def _mixes_examples(what: str) -> ValueError:
    return ValueError(
        "loss_fn must see one example at a time, but it communicates along a named "
        f"axis ({what}), as BatchNorm in training mode does: then no bound on one "
        "example's gradient bounds its influence. Use GroupNorm or LayerNorm, or "
        "BatchNorm with its running averages."
    )
