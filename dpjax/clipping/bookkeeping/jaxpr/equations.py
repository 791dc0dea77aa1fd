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

# The primitives of rematerialised blocks. A block is inlined too, unless it stays
# checkpointed: the values at its sites are then recorded, and not computed again.
_REMATERIALISED = frozenset({"remat", "remat2", "checkpoint"})
# The parameters of equations that fix the sharding of their output on explicit axes.
_LAYOUT = ("sharding", "out_sharding")


def bind(
    eqn: jex.JaxprEqn, values: Sequence[jax.Array], **changed: object
) -> list[jax.Array]:
    """The outputs of one equation, with some parameters changed.

    The loss may fix shardings along explicit mesh axes. Where the engine lets the
    compiler choose shardings instead, the loss's own shardings are dropped.
    """
    if eqn.primitive.name.startswith("custom_"):
        # A user's derivative rule may call methods that NumPy's arrays lack.
        values = as_arrays(values)
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
    """The abstract value of a variable or literal: its shape, dtype and sharding."""
    return cast(jax.core.ShapedArray, atom.aval)


def as_arrays(values: Sequence[ArrayLike]) -> list[jax.Array]:
    """The values as JAX arrays, converted from NumPy arrays or Python numbers."""
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in values]


def evaluate(closed: jex.ClosedJaxpr, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """The outputs of a jaxpr for some inputs."""
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        out = bind(eqn, [read(v, values) for v in eqn.invars])
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(v, values) for v in jaxpr.outvars]


def scan_sizes(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """The number of constants of a scan, and the number of values that it carries."""
    if "ft_in" in eqn.params:  # JAX 0.11 and later.
        consts, carried, _ = eqn.params["ft_in"].unpack()
        return len(list(consts)), len(list(carried))
    return eqn.params["num_consts"], eqn.params["num_carry"]


def select_needed(
    eqns: Sequence[jex.JaxprEqn], outs: Sequence[Atom]
) -> list[jex.JaxprEqn]:
    """The equations that the variables in `outs` depend on, in order."""
    wanted = {v for v in outs if isinstance(v, jex.Var)}
    found = []
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars):
            found.append(eqn)
            wanted.update(v for v in eqn.invars if isinstance(v, jex.Var))
    return found[::-1]


def read(atom: Atom, values: Mapping[jex.Var, jax.Array]) -> jax.Array:
    """The value of a variable or literal; JAX holds a literal's value in NumPy."""
    return atom.val if isinstance(atom, jex.Literal) else values[atom]


def is_rematerialised(eqn: jex.JaxprEqn) -> bool:
    """Whether the equation is a block of `jax.checkpoint`."""
    return eqn.primitive.name in _REMATERIALISED
