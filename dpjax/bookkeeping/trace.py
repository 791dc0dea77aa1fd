"""From a loss to one flat jaxpr: calls inlined, cross-example layers refused."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._meshes import lets_compiler_decide
from dpjax._typing import ArrayLike, Atom, LossOfLeaves

# Calls that mean no more than their body. custom_jvp and custom_vjp calls are not:
# their derivative is not their body's.
_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})
# Blocks that are rematerialised. They are inlined too where their books are kept with
# all others: what their sites need is recorded, and the recomputation is given up.
_REMATERIALISED = frozenset({"remat", "remat2", "checkpoint"})
# Parameters of equations that say how their output is sharded along explicit axes.
_LAYOUT = ("sharding", "out_sharding")


def trace(
    loss_and_aux: LossOfLeaves,
    parameters: Sequence[jax.Array],
    example: Sequence[jax.ShapeDtypeStruct],
) -> tuple[jex.ClosedJaxpr, Any]:
    """Trace `loss_and_aux(parameters, example)`, both of them lists of leaves.

    Returns:
      A jaxpr from the parameters and the example to the loss and the leaves of aux,
      and the structure of aux.

    Raises:
      ValueError: the loss or its derivative by the parameters communicates along a
        named axis.
    """
    from dpjax.bookkeeping.collectives import mixes_examples, refuse_collectives

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


def bind(
    eqn: jex.JaxprEqn, values: Sequence[jax.Array], **changed: object
) -> list[jax.Array]:
    """The outputs of one equation, with some parameters changed.

    Where the compiler lays out what the loss laid out itself, its layout is dropped.
    """
    if eqn.primitive.name.startswith("custom_"):
        values = as_arrays(values)  # rules may do with them what NumPy's cannot
    context = contextlib.nullcontext()
    if lets_compiler_decide() and eqn.ctx.cur_abstract_mesh.explicit_axes:
        if eqn.primitive.name == "reshard":
            return list(values)
        changed |= {name: None for name in _LAYOUT if name in eqn.params}
        mesh = jax.sharding.get_abstract_mesh()
        context = jax.sharding.use_abstract_mesh(mesh)
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    functions, params = params if isinstance(params, tuple) else ((), params)
    with eqn.ctx.manager, context:
        out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def aval(atom: Atom) -> jax.core.ShapedArray:
    """The shape and dtype of a variable or literal."""
    return cast(jax.core.ShapedArray, atom.aval)


def as_arrays(values: Sequence[ArrayLike]) -> list[jax.Array]:
    """Constants as JAX's arrays, where NumPy or Python hold them."""
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in values]


def evaluate(closed: jex.ClosedJaxpr, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """The outputs of a jaxpr."""
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        out = bind(eqn, [read(v, values) for v in eqn.invars])
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(v, values) for v in jaxpr.outvars]


def scan_sizes(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """How many constants a scan has, and how many values it carries."""
    if "ft_in" in eqn.params:  # since JAX 0.11
        consts, carried, _ = eqn.params["ft_in"].unpack()
        return len(list(consts)), len(list(carried))
    return eqn.params["num_consts"], eqn.params["num_carry"]


def needed(eqns: Sequence[jex.JaxprEqn], outs: Sequence[Atom]) -> list[jex.JaxprEqn]:
    """The equations that some variables depend on, in order."""
    wanted = {v for v in outs if isinstance(v, jex.Var)}
    found = []
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars):
            found.append(eqn)
            wanted.update(v for v in eqn.invars if isinstance(v, jex.Var))
    return found[::-1]


def read(atom: Atom, values: Mapping[jex.Var, jax.Array]) -> jax.Array:
    """The value of a variable or literal; a literal's is NumPy's, as JAX holds it."""
    return atom.val if isinstance(atom, jex.Literal) else values[atom]


def is_rematerialised(eqn: jex.JaxprEqn) -> bool:
    """Whether it is a block of `jax.checkpoint`."""
    return eqn.primitive.name in _REMATERIALISED


def inline(
    closed: jex.ClosedJaxpr,
    known: Sequence[bool],
    parametric: Sequence[bool],
    kept: Callable[[jex.JaxprEqn], bool] = lambda eqn: False,
) -> jex.ClosedJaxpr:
    """The same jaxpr without the calls in which a parameter may meet an example.

    Other calls stay: JAX differentiates, batches and lowers a body that several share
    once.

    Args:
      closed: the jaxpr.
      known: whether no example enters an input.
      parametric: whether an input is known and a parameter enters it.
      kept: which rematerialised blocks that an example enters stay too.
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
            if jaxpr is not outer:  # which may be called again
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
