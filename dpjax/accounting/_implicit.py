"""Derivatives of a root that some search has found."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def with_derivative(
    residual: Callable[..., Any], root: jax.Array, met: jax.Array
) -> jax.Array:
    """The root with the derivatives that the implicit function theorem gives it.

    Newton's method from the root stays there (it is made to, as the root may be rounded
    and the residual flat), and its first step has the root's first derivative, its
    second step the second. Where the residual was not met it has none.
    """
    one = jnp.ones_like(root)
    x = jnp.where(met, root, one)
    for _ in range(2):
        value, slope = jax.jvp(residual, (x,), (one,))
        moves = met & (slope != 0) & jnp.isfinite(slope) & jnp.isfinite(value / slope)
        step = jnp.where(moves, value, 0.0) / jnp.where(moves, slope, one)
        x = x - (step - jax.lax.stop_gradient(step))
    return root + (x - jax.lax.stop_gradient(x))
