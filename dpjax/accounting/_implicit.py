"""Derivatives of a root that some search has found."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def with_derivative(
    residual: Callable[..., Any], root: jax.Array, met: jax.Array
) -> jax.Array:
    """The root with the derivatives that the implicit function theorem gives it.

    Newton's method from the root stays there, and its first step has the root's first
    derivative, its second step the second. Where the residual was not met it has none.
    """
    one = jnp.ones_like(root)
    x = jnp.where(met, root, one)
    for _ in range(2):
        value, slope = jax.jvp(residual, (x,), (one,))
        moves = met & (slope != 0) & jnp.isfinite(slope)
        x = x - jnp.where(moves, value, 0.0) / jnp.where(moves, slope, one)
    return root + (x - jax.lax.stop_gradient(x))
