"""Derivatives of a root that some search has found, and of what need not be."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpjax._float64 import scoped


def with_derivative(
    residual: Callable[..., Any], root: jax.Array, met: jax.Array
) -> jax.Array:
    """The root with the derivatives that the implicit function theorem gives it.

    The residual is evaluated for them alone. Where it was not met there are none.
    """
    residual, constants = jax.closure_convert(residual, root)

    @jax.custom_jvp
    def found(root: jax.Array, met: jax.Array, *constants: jax.Array) -> jax.Array:
        return root

    @found.defjvp
    @scoped
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        root, met, *constants = primals
        x = jnp.where(met, found(*primals), jnp.ones_like(root))
        by_x = jax.jvp(lambda x: residual(x, *constants), (x,), (jnp.ones_like(x),))[1]
        moved = jax.jvp(
            lambda *c: residual(x, *c), tuple(constants), tuple(tangents[2:])
        )[1]
        moves = met & (by_x != 0) & jnp.isfinite(by_x)
        return root, jnp.where(moves, -moved / jnp.where(moves, by_x, 1.0), 0.0)

    return found(jax.lax.stop_gradient(root), met, *constants)


def with_derivative_of(fn: Callable[[], jax.Array], value: jax.Array) -> jax.Array:
    """The value with the derivatives of fn(), which is evaluated for them alone."""
    fn, constants = jax.closure_convert(fn)

    @jax.custom_jvp
    def known(value: jax.Array, *constants: jax.Array) -> jax.Array:
        return value

    @known.defjvp
    @scoped
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        value, *constants = primals
        return value, jax.jvp(fn, tuple(constants), tuple(tangents[1:]))[1]

    return known(jax.lax.stop_gradient(value), *constants)
