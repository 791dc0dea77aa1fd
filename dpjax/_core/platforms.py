"""Code that depends on the platform that a program is lowered for."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from dpjax._core.typing import Tree

Out = TypeVar("Out")

_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


def on_platform(
    name: str,
    there: Callable[..., Out],
    elsewhere: Callable[..., Out],
    *args: Tree,
) -> Out:
    """`there(*args)` on one platform, `elsewhere(*args)` on all others.

    Which one is not known when a program is traced: it may be lowered for another
    platform than this machine's, or for several (`jax.export`).
    """
    if _is_staged_out():
        return jax.lax.platform_dependent(*args, default=elsewhere, **{name: there})
    # Nothing is staged: it runs where the arrays are.
    leaves = [x for x in jax.tree.leaves(args) if _is_concrete(x)]
    found = {d.platform for x in leaves for d in x.devices()}
    name = "gpu" if name == "cuda" else name  # as devices and backends call it
    return (there if name in (found or {jax.default_backend()}) else elsewhere)(*args)


def _is_staged_out() -> bool:
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _is_concrete(x: object) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


@functools.cache
def host() -> Any:
    """This process's first CPU; None where JAX was told not to start one."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def without_mesh() -> contextlib.AbstractContextManager[object]:
    """Computes on one device what is not staged, whatever mesh the context has."""
    if jax.sharding.get_abstract_mesh().empty or _is_staged_out():
        return contextlib.nullcontext()
    return jax.set_mesh(_NO_MESH)


def needs_float64(x: jax.Array) -> jax.Array:
    """The same number, in programs that cannot be lowered for a TPU.

    TPUs put a float64 together from two float32, whose exponents end at 1e-38: a δ or a
    tail below that would count as zero.
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
