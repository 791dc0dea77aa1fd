"""Checks of the arguments of statistics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import Adjacency, ArrayLike


def as_number(name: str, value: ArrayLike) -> float | jax.Array:
    """Check that a number is finite and at least 0; return a float or a tracer."""
    validate.scalar(name, value)
    validate.nonnegative(name, value)
    array = validate.concrete(value)
    return jnp.asarray(value) if array is None else float(array)


def as_positive(name: str, value: ArrayLike) -> ArrayLike:
    """Check that a number is positive and finite, and return it."""
    validate.scalar(name, value)
    validate.positive(name, value)
    return value


def as_examples(
    name: str, value: Any, *, ndim: int | None = None
) -> jax.Array | np.ndarray:
    """Return the value as an array of real numbers with a leading axis of examples.

    Raises:
      ValueError: the value is not an array of real numbers, or has no leading axis, or
        does not have `ndim` axes.
    """
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
    except (TypeError, ValueError):  # lists of different lengths
        array = np.empty(0, object)
    if not (
        array.dtype == bool
        or jnp.issubdtype(array.dtype, jnp.integer)
        or jnp.issubdtype(array.dtype, jnp.floating)
    ):
        raise ValueError(f"{name} must be an array of real numbers; got {value!r}.")
    if array.ndim == 0 or (ndim is not None and array.ndim != ndim):
        rule = "a leading axis of examples" if ndim is None else f"{ndim} axes"
        raise ValueError(f"{name} must have {rule}; got shape {array.shape}.")
    return array


def as_num_examples(value: ArrayLike | None, length: int, adjacency: Adjacency) -> Any:
    """The public divisor of a sum: the given number, or else the length of the data.

    Raises:
      ValueError: the number is missing although the length of the data is private, or
        the number is not positive.
    """
    if value is None:
        if adjacency is Adjacency.ADD_REMOVE:
            raise ValueError(
                "num_examples must be a public number under Adjacency.ADD_REMOVE, "
                "where the length of the data is private; got None."
            )
        value = length
    return as_positive("num_examples", value)
