"""Batches of evaluations, one after the other.

`jax.vmap` would be slower for loops whose trip counts differ between batch elements,
and for dynamic slices whose positions differ.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


def one_by_one(scalar: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The function of scalars as a function of arrays, which broadcast.

    Keyword arguments are passed on unchanged. The result has the broadcast shape.
    """

    @functools.wraps(scalar)
    def batched(*args: jax.Array, **kwargs: object) -> jax.Array:
        one = functools.partial(scalar, **kwargs)
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in args))
        if shape == ():
            return one(*args)
        flat = [jnp.broadcast_to(x, shape).ravel() for x in args]
        return jax.lax.map(lambda xs: one(*xs), flat).reshape(shape)

    return batched
