"""Arrays of the caller, converted so that indexing is by position.

A `pandas.Series` is indexed by labels, and shuffling a table moves the labels with the
rows, so that label i is no longer in row i. So arrays of libraries other than NumPy and
JAX are converted to NumPy arrays first.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_tree_of_arrays(data: Any) -> bool:
    """Whether data is a tree whose leaves are all arrays with a leading axis.

    A list at the top is taken as a list of examples, not as a tree of arrays.
    """
    if isinstance(data, list | Iterator):
        return False
    leaves = jax.tree.leaves(data)
    return bool(leaves) and all(_is_array(x) and np.ndim(x) for x in leaves)


def by_position(data: Any) -> Any:
    """Convert the leaves of a tree of arrays to NumPy or JAX arrays.

    Raises:
      ValueError: a leaf of another library does not hold numbers or booleans; a NumPy
        array has masked entries.
    """
    leaves, treedef = jax.tree.flatten_with_path(data)
    return treedef.unflatten([_array(path, x) for path, x in leaves])


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") or hasattr(x, "__array__")


def _array(path: Any, x: Any) -> np.ndarray | jax.Array:
    name = jax.tree_util.keystr(path) or "data"
    if np.ma.is_masked(x):
        raise ValueError(
            f"arrays must not have masked entries, which would be read; got {name}."
        )
    if isinstance(x, np.ndarray | jax.Array):
        return x
    array = np.asarray(x)
    # jnp.issubdtype knows bfloat16. Time spans, of kind "m", count as numbers in NumPy.
    numbers = jnp.issubdtype(array.dtype, np.number) and array.dtype.kind != "m"
    if not (numbers or array.dtype == np.bool_):
        raise ValueError(
            "arrays of other libraries than NumPy and JAX must hold numbers or "
            f"booleans; got {name}, a {type(x).__module__}.{type(x).__name__} that "
            f"becomes an array of dtype {array.dtype}. Convert it to a NumPy array "
            "first."
        )
    return array
