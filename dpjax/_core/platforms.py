"""Functions whose behaviour depends on the platform that a program is lowered for."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from dpjax._core.typing import Tree

Out = TypeVar("Out")
# A function from arrays to a list of arrays.
Flat: TypeAlias = Callable[..., list[jax.Array]]

# An empty mesh, with which `jax.set_mesh` unsets the mesh of the context.
_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


def on_platform(
    name: str,
    there: Callable[..., Out],
    elsewhere: Callable[..., Out],
    *args: Tree,
) -> Out:
    """Call `there(*args)` on one platform, and `elsewhere(*args)` on all others.

    The choice is made when a program is lowered, not when it is traced: the program may
    be lowered for another platform than this machine's, or for several (`jax.export`).
    The function for this machine is traced at once. The other function is traced only
    when a program is lowered for it, so it must not close over traced values.
    """
    backend = "gpu" if name == "cuda" else name  # as devices and backends call it
    if _is_staged_out():
        here = backend == jax.default_backend()
        now, later = (there, elsewhere) if here else (elsewhere, there)
        jaxpr, shapes = jax.make_jaxpr(now, return_shape=True)(*args)
        leaves, tree = jax.tree.flatten(args)

        def replacement(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(later(*tree.unflatten(leaves)))

        choice = (_choose_now if here else _choose_later)(name)
        out = choice.bind(
            *jaxpr.consts, *leaves, jaxpr=jaxpr.jaxpr, replacement=replacement
        )
        return jax.tree.unflatten(jax.tree.structure(shapes), out)
    # Without staging, the function runs on the devices of its arrays, or on the default
    # backend where no argument is an array.
    leaves = [x for x in jax.tree.leaves(args) if _is_concrete(x)]
    found = {d.platform for x in leaves for d in x.devices()}
    return (there if backend in (found or {jax.default_backend()}) else elsewhere)(
        *args
    )


@functools.cache
def _choose_now(name: str) -> jex.Primitive:
    """A primitive that evaluates its jaxpr on a platform, the replacement elsewhere."""
    primitive = _new_choice(lambda now, later: {name: now, "default": later})
    mlir.register_lowering(primitive, mlir.lower_fun(_replaced))
    mlir.register_lowering(primitive, mlir.lower_fun(_traced), platform=name)
    return primitive


@functools.cache
def _choose_later(name: str) -> jex.Primitive:
    """A primitive that evaluates the replacement on a platform, its jaxpr elsewhere."""
    primitive = _new_choice(lambda now, later: {name: later, "default": now})
    mlir.register_lowering(primitive, mlir.lower_fun(_traced))
    mlir.register_lowering(primitive, mlir.lower_fun(_replaced), platform=name)
    return primitive


def _traced(*xs: jax.Array, jaxpr: jex.Jaxpr, replacement: Flat) -> list[jax.Array]:
    """The outputs of the jaxpr, whose constants come first among the arrays."""
    count = len(jaxpr.constvars)
    return jax.core.eval_jaxpr(jaxpr, xs[:count], *xs[count:])


def _replaced(*xs: jax.Array, jaxpr: jex.Jaxpr, replacement: Flat) -> list[jax.Array]:
    return replacement(*xs[len(jaxpr.constvars) :])


def _new_choice(branches: Callable[[Flat, Flat], dict[str, Flat]]) -> jex.Primitive:
    """A primitive for a choice by platform, without rules for its lowering.

    Where the choice is mapped or differentiated, JAX's own choice takes its place, for
    which both functions are traced.
    """
    primitive = jex.Primitive("choose_by_platform")
    primitive.multiple_results = True

    def choose(**params: Any) -> Flat:
        found = (functools.partial(f, **params) for f in (_traced, _replaced))
        return functools.partial(jax.lax.platform_dependent, **branches(*found))

    def differentiate(
        primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        given = tuple(map(ad.instantiate_zeros, tangents))
        return jax.jvp(choose(**params), tuple(primals), given)

    def batch(
        axis: Any, xs: Sequence[jax.Array], places: Sequence[Any], **params: Any
    ) -> tuple[list[jax.Array], list[int]]:
        mapped = jax.vmap(
            choose(**params),
            in_axes=places,
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )
        out = mapped(*xs)
        return out, [0] * len(out)

    primitive.def_abstract_eval(lambda *_, jaxpr, **__: [v.aval for v in jaxpr.outvars])
    ad.primitive_jvps[primitive] = differentiate
    batching.fancy_primitive_batchers[primitive] = batch
    return primitive


def _is_staged_out() -> bool:
    # Inside of a trace that stages operations out, even a constant is a tracer.
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _is_concrete(x: object) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


@functools.cache
def host() -> Any:
    """The first CPU device of this process; None if JAX has no CPU backend.

    JAX has no CPU backend if its configuration names other platforms alone.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def without_mesh() -> contextlib.AbstractContextManager[object]:
    """A context manager under which operations that are not staged ignore any mesh.

    Such an operation then runs on one device.
    """
    if jax.sharding.get_abstract_mesh().empty or _is_staged_out():
        return contextlib.nullcontext()
    return jax.set_mesh(_NO_MESH)


def needs_float64(x: jax.Array) -> jax.Array:
    """The identity, which raises an error where a program is lowered for a TPU.

    TPUs represent a float64 by two float32 numbers, whose exponents end at 1e-38. A δ
    or a tail probability below 1e-38 would count as zero.
    """
    return _needs_float64.bind(x)


def _refuse_float64(*_: object) -> NoReturn:
    raise NotImplementedError(
        "dpjax's accountants need float64, of which a TPU has the digits but not the "
        "exponents. Call them outside of the program for the TPU: they then run on the "
        "CPU."
    )


# The identity, with a rule for lowering it that differs by platform.
_needs_float64 = jex.Primitive("needs_float64")
_needs_float64.def_impl(lambda x: x)
_needs_float64.def_abstract_eval(lambda x: x)
ad.deflinear2(_needs_float64, lambda cotangent, _: [cotangent])
batching.defvectorized(_needs_float64)
mlir.register_lowering(_needs_float64, lambda _, x: [x])
mlir.register_lowering(_needs_float64, _refuse_float64, platform="tpu")
