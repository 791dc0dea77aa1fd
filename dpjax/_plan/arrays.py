"""Users' arrays, indexed by position.

A `pandas.Series` is indexed by labels, and shuffling a table moves the labels too:
label i is then not row i. So arrays of other libraries become NumPy arrays first.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_tree_of_arrays(data: Any) -> bool:
    """Whether all leaves are arrays with a leading axis; a list holds examples."""
    if isinstance(data, list | Iterator):
        return False
    leaves = jax.tree.leaves(data)
    return bool(leaves) and all(_is_array(x) and np.ndim(x) for x in leaves)


def by_position(data: Any) -> Any:
    """A tree of arrays whose leaves are NumPy's or JAX's.

    Raises:
      ValueError: a leaf of another library does not hold numbers or booleans; entries
        of a NumPy array are masked.
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
    numbers = jnp.issubdtype(array.dtype, np.number) and array.dtype.kind != "m"
    if not (numbers or array.dtype == np.bool_):
        raise ValueError(
            "arrays of other libraries than NumPy and JAX must hold numbers or "
            f"booleans; got {name}, a {type(x).__module__}.{type(x).__name__} that "
            f"becomes an array of dtype {array.dtype}. Convert it to a NumPy array "
            "first."
        )
    return array
