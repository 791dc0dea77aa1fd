"""Run an accountant in float64 and hand back the caller's default dtype.

Accountants need float64 (δ reaches 1e-30), notebooks run in float32, and global
configuration is not ours to change. The decorator opens a float64 scope around
one jitted call, and rounds what comes out towards more privacy loss. Derivatives
pass through: the casts are linear, and the rounding has derivative one.
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


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _cast(x: jax.Array, dtype: np.dtype, direction: Direction) -> jax.Array:
    """The value in dtype, rounded in the given direction."""
    y = x.astype(dtype)
    if dtype == x.dtype or direction == "nearest":
        return y
    back = y.astype(x.dtype)
    if direction == "up":
        return jnp.where(back < x, jnp.nextafter(y, jnp.full_like(y, jnp.inf)), y)
    return jnp.where(back > x, jnp.nextafter(y, jnp.full_like(y, -jnp.inf)), y)


@_cast.defjvp
def _cast_jvp(dtype: np.dtype, direction: Direction, primals: Any, tangents: Any):
    (x,), (dx,) = primals, tangents
    return _cast(x, dtype, direction), dx.astype(dtype)


def float64(
    rounding: Direction, *, static: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a core function of float64 arrays into one for any caller.

    Args:
      rounding: the direction of the final cast, "up" for a quantity that grows
        with privacy loss.
      static: names of keyword arguments that are not arrays.

    Returns:
      A decorator. Positional arguments of the result may be Python numbers (taken
      exactly), NumPy or JAX arrays of any float dtype, or tracers.
    """

    def decorate(core: Callable[..., Any]) -> Callable[..., Any]:
        jitted = jax.jit(core, static_argnames=static)

        @functools.wraps(core)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            dtype = default_float()
            with jax.enable_x64(True):
                wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), args)
                out = jitted(*wide, **kwargs)
                return jax.tree.map(lambda x: _cast(x, dtype, rounding), out)

        return wrapper

    return decorate
