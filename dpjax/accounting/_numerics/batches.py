"""Batches of evaluations, one after the other.

Loops that end early and slices at places of their own are slower side by side.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


def one_by_one(scalar: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of numbers, and of keywords, for arrays that broadcast."""

    @functools.wraps(scalar)
    def batched(*args: jax.Array, **kwargs: object) -> jax.Array:
        one = functools.partial(scalar, **kwargs)
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in args))
        if shape == ():
            return one(*args)
        flat = [jnp.broadcast_to(x, shape).ravel() for x in args]
        return jax.lax.map(lambda xs: one(*xs), flat).reshape(shape)

    return batched
