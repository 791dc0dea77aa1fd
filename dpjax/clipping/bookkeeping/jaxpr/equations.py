"""The equations of a jaxpr: their sizes, their inputs and how one is evaluated."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import cast

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core.meshes import lets_compiler_decide
from dpjax._core.typing import ArrayLike, Atom

# Blocks that are rematerialised. They are inlined too where their books are kept with
# all others: what their sites need is recorded, and the recomputation is given up.
_REMATERIALISED = frozenset({"remat", "remat2", "checkpoint"})
# Parameters of equations that say how their output is sharded along explicit axes.
_LAYOUT = ("sharding", "out_sharding")


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


def select_needed(
    eqns: Sequence[jex.JaxprEqn], outs: Sequence[Atom]
) -> list[jex.JaxprEqn]:
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
