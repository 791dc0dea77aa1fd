"""Functions whose behaviour depends on the platform for which a program is lowered."""

import contextlib
import functools
import os
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

# An empty mesh. `jax.set_mesh` with this mesh unsets the mesh of the context.
_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


def on_platform(
    name: str, on_it: Callable[..., Out], elsewhere: Callable[..., Out], *args: Tree
) -> Out:
    """Call `on_it(*args)` on the named platform, and `elsewhere(*args)` on all others.

    Inside a program, the choice is made when the program is lowered, and not when it is
    traced. The program may be lowered for a platform that this machine does not have,
    or for several platforms (`jax.export`). Outside a program, the platform is that of
    the arguments' devices. Without a concrete array in the arguments, the platform
    is that of the default backend.
    """
    if _is_staged_out():
        return jax.lax.platform_dependent(*args, default=elsewhere, **{name: on_it})
    # Without staging, the function runs on the devices of its arrays, or on the default
    # backend if no argument is an array.
    arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
    concrete = [x for x in arrays if not isinstance(x, jax.core.Tracer)]
    platforms = {d.platform for x in concrete for d in x.devices()}
    is_there = name in (platforms or {jax.default_backend()})
    return on_it(*args) if is_there else elsewhere(*args)


def _is_staged_out() -> bool:
    # Inside a trace that stages operations out, even a constant is a tracer.
    return isinstance(jnp.zeros(()), jax.core.Tracer)


@functools.cache
def host() -> Any:
    """The first CPU device of this process; None if JAX has no CPU backend.

    JAX has no CPU backend if its configuration names only other platforms.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def without_mesh() -> contextlib.AbstractContextManager[object]:
    """A context manager under which JAX has no mesh, outside of compiled programs.

    An operation outside of a compiled program then runs on one device, unless one of
    its arguments is on several devices. Inside a program that is being traced, such as
    a jitted function, the context manager does nothing.
    """
    if jax.sharding.get_abstract_mesh().empty or _is_staged_out():
        return contextlib.nullcontext()
    return jax.set_mesh(_NO_MESH)


def needs_float64(x: jax.Array) -> jax.Array:
    """The identity, which raises an error if a program is lowered for a TPU.

    The error is a NotImplementedError. TPUs represent a float64 by two float32 numbers,
    whose least normal number is about 1e-38. A δ or a tail probability below 1e-38
    would count as zero.
    """
    return _needs_float64.bind(x)


def _refuse_float64(*_: object) -> NoReturn:
    raise NotImplementedError(
        "dpjax's accountants need float64, and float64 on a TPU lacks the exponent "
        "range. Call the accountants outside the program for the TPU; they then run "
        "on the CPU."
    )


def needs_one_order(x: jax.Array) -> jax.Array:
    """The identity, which raises an error if a GPU may vary the order of additions.

    On GPUs, XLA adds the terms of a scatter, such as the gradient of an embedding, in
    an order that varies from run to run, unless `XLA_FLAGS` forbids a varying order.

    Raises:
      RuntimeError: a program is lowered for GPUs, or runs on a GPU outside jit, and
        `XLA_FLAGS` does not forbid operations with a varying order.
    """
    return _needs_one_order.bind(x)


def _check_xla_flags(x: Out) -> Out:
    flags = {}
    for flag in os.environ.get("XLA_FLAGS", "").split():
        name, _, value = flag.partition("=")
        flags[name] = value.lower()
    if not any(flags.get(name) in ("", "1", "true") for name in _ONE_ORDER):
        raise RuntimeError(
            'arithmetic="discrete" needs sums that a GPU computes in the same order in '
            f"each run. Set the environment variable XLA_FLAGS={_ONE_ORDER[0]}=true "
            "before the program starts."
        )
    return x


# Either of these flags of XLA forbids operations whose result varies from run to run.
_ONE_ORDER = "--xla_gpu_exclude_nondeterministic_ops", "--xla_gpu_deterministic_ops"


def _identity(name: str, run: Callable[[jax.Array], jax.Array]) -> jex.Primitive:
    """Make a primitive that returns its argument.

    Outside of compiled programs, `run` computes the result, and may raise an error.
    """
    primitive = jex.Primitive(name)
    primitive.def_impl(run)
    primitive.def_abstract_eval(lambda x: x)
    ad.deflinear2(primitive, lambda cotangent, _: [cotangent])
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lambda _, x: [x])
    return primitive


def _check_where(x: jax.Array) -> jax.Array:
    on_gpu = any(device.platform == "gpu" for device in x.devices())
    return _check_xla_flags(x) if on_gpu else x


# The lowering rules of these primitives differ by platform.
_needs_float64 = _identity("needs_float64", lambda x: x)
mlir.register_lowering(_needs_float64, _refuse_float64, platform="tpu")
_needs_one_order = _identity("needs_one_order", _check_where)
for _platform in "cuda", "rocm":
    mlir.register_lowering(
        _needs_one_order, lambda _, x: [_check_xla_flags(x)], platform=_platform
    )
