"""Data for the solvers: checked, and with non-finite examples masked."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core.typing import ArrayLike, LossFn, Tree
from dpjax.clipping._clip import batch_size as leading_axis


class Data(NamedTuple):
    """Finite examples, and a mask of the ones that count.

    Attributes:
      examples: the data, with zeros in place of examples that are not finite.
      finite: bool[n], whether an example was finite, and so is used.
    """

    examples: Tree
    finite: jax.Array


def check(loss_fn: LossFn, data: Tree) -> int:
    """The number of examples, or a ValueError for data that the loss cannot take."""
    num_examples = leading_axis("data", data)
    of_loss = getattr(loss_fn, "check", None)
    if of_loss is not None:
        of_loss(data)
    return num_examples


@jax.jit
def put_aside(data: Tree) -> Data:
    """Replace every example that has a NaN or an infinity by zeros, and mask it."""
    finite = jnp.ones(jax.tree.leaves(data)[0].shape[0], bool)
    for x in jax.tree.leaves(data):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            finite &= jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))

    # Where, not a product: 0 · NaN is NaN.
    def zero(x: jax.Array) -> jax.Array:
        keep = finite.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(keep, x, jnp.zeros_like(x))

    return Data(jax.tree.map(zero, data), finite)


def prepare(data: Tree) -> Data:
    """Convert the data to JAX arrays, and apply `put_aside`."""
    return put_aside(jax.tree.map(jnp.asarray, data))


def schedule(
    name: str, value: ArrayLike | optax.Schedule, num_steps: int
) -> np.ndarray:
    """The values f64[T] of a number, an array f[T] or an optax schedule."""
    if callable(value):
        value = jax.vmap(value)(jnp.arange(num_steps))
    array = np.asarray(value, np.float64)
    if array.shape not in ((), (num_steps,)):
        raise ValueError(
            f"{name} must be a number, a schedule, or an array of one value for each "
            f"of the {num_steps} steps; got shape {array.shape}."
        )
    return np.broadcast_to(array, (num_steps,))
