"""Run an accountant in float64 and hand back the caller's default dtype.

Accountants need float64 (δ reaches 1e-30), notebooks run in float32, and global
configuration is not ours to change. The decorator opens a float64 scope around
one jitted call, and rounds what comes out towards more privacy loss, a rounding with
derivative one.

JAX may trace a second derivative, and lower a caller's jit, long after the scope has
closed. Rules that make an array of a given dtype then fail, so every custom rule in a
core opens the scope again (`scoped`), and cores avoid the few functions whose own
rules would need it: `power` stands for `jnp.power`, `largest` for `jnp.max` and argmax.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Direction = Literal["up", "down", "nearest"]


def default_float() -> np.dtype:
    """The float dtype of the caller's configuration: float32 unless x64 is on."""
    return jax.dtypes.canonicalize_dtype(np.float64)


def scoped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a custom derivative rule, or a function, to run in the float64 scope."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(True):
            return fn(*args, **kwargs)

    return wrapper


@jax.custom_jvp
@scoped
def power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    """The base to a whole exponent >= 0, with its derivative also at base 0."""
    return jnp.power(base, exponent)


@power.defjvp
@scoped
def _power_jvp(primals: Any, tangents: Any) -> Any:
    base, exponent = primals
    slope = exponent * power(base, jnp.maximum(exponent - 1, 0))
    return power(base, exponent), slope * tangents[0]


@jax.custom_jvp
@scoped
def largest(x: jax.Array) -> jax.Array:
    """The maximum over the last axis."""
    return jnp.max(x, axis=-1)


@largest.defjvp
@scoped
def _largest_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    top = largest(x)
    share = (x == top[..., None]).astype(x.dtype)
    return top, jnp.sum(share * dx, axis=-1) / jnp.sum(share, axis=-1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
@scoped
def cast(x: jax.Array, dtype: np.dtype, direction: Direction) -> jax.Array:
    """The value in dtype, rounded in the given direction, with derivative one."""
    y = x.astype(dtype)
    if dtype == x.dtype or direction == "nearest":
        return y
    back = y.astype(x.dtype)
    if direction == "up":
        return jnp.where(back < x, jnp.nextafter(y, jnp.full_like(y, jnp.inf)), y)
    return jnp.where(back > x, jnp.nextafter(y, jnp.full_like(y, -jnp.inf)), y)


@cast.defjvp
@scoped
def _cast_jvp(dtype: np.dtype, direction: Direction, primals: Any, tangents: Any):
    (x,), (dx,) = primals, tangents
    return cast(x, dtype, direction), dx.astype(dtype)


def float64(
    rounding: Direction, *, static: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a core function of float64 arrays into one for any caller.

    Args:
      rounding: the direction of the final cast, "up" for a quantity that grows
        with privacy loss.
      static: names of keyword arguments that are not arrays.

    Returns:
      A decorator. Positional arguments of the result are pytrees of Python numbers
      (taken exactly), NumPy or JAX arrays of any real dtype, or tracers.
    """

    def decorate(core: Callable[..., Any]) -> Callable[..., Any]:
        jitted = jax.jit(core, static_argnames=static)

        @functools.wraps(core)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            dtype = default_float()
            leaves, treedef = jax.tree.flatten(args)
            # What is not a JAX array is a constant, and stays as precise as it is.
            places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

            def core_of(*wide: jax.Array) -> Any:
                merged = list(leaves)
                for i, x in zip(places, wide, strict=True):
                    merged[i] = x
                merged = [jnp.asarray(x, jnp.float64) for x in merged]
                return jitted(*jax.tree.unflatten(treedef, merged), **kwargs)

            @jax.custom_jvp
            @scoped
            def call(*arrays: jax.Array) -> Any:
                out = core_of(*(jnp.asarray(x, jnp.float64) for x in arrays))
                return jax.tree.map(lambda x: cast(x, dtype, rounding), out)

            @call.defjvp
            @scoped
            def _(primals: Any, tangents: Any) -> Any:
                out, dout = jax.jvp(
                    core_of,
                    [jnp.asarray(x, jnp.float64) for x in primals],
                    [_widen_tangent(t) for t in tangents],
                )
                return (
                    jax.tree.map(lambda x: cast(x, dtype, rounding), out),
                    jax.tree.map(lambda t: t.astype(dtype), dout),
                )

            return call(*(leaves[i] for i in places))

        return wrapper

    return decorate


def _widen_tangent(tangent: Any) -> jax.Array:
    if tangent.dtype == jax.dtypes.float0:  # of an integer argument
        return jnp.zeros(tangent.shape, jnp.float64)
    return jnp.asarray(tangent, jnp.float64)
