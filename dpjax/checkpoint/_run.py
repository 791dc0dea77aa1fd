"""The state of a run, its arrays by name, and the digest of their bits."""

import hashlib
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from dpjax._core.typing import Key, Tree

_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


class Run(NamedTuple):
    """The complete state of a private run, as secret as the data: it holds the key.

    Attributes:
      key: the run's typed key, from which batches and noise are drawn.
      step: how many steps are done.
      params: the parameters that are trained.
      opt_state: the state of the plan's optimizer.
      released: the digest of the parameters of this run that `dpjax.ledger` released
        last; "" if none were released.

    Example:
      >>> import dpjax, jax.numpy as jnp, optax
      >>> plan = dpjax.plan(num_examples=100, batch_size=10, num_steps=10, delta=1e-3,
      ...                   noise_multiplier=1.0, clip_norm=1.0, sampling="fixed",
      ...                   adjacency=dpjax.Adjacency.REPLACE)
      >>> key, w = dpjax.random_key(), jnp.zeros(3)
      >>> run = Run(key, 0, w, plan.optimizer(optax.sgd(0.1), key=key).init(w))
      >>> run.step
      0
    """

    key: Key
    step: int
    params: Tree
    opt_state: optax.OptState
    released: str = ""


def digest(tree: Any) -> str:
    """The SHA-256 of a tree's bits: of names, dtypes, shapes and values of its leaves.

    Args:
      tree: a pytree of arrays, keys and numbers. For other leaves only the type counts.

    Returns:
      64 hexadecimal digits, which do not depend on the devices or the sharding of the
      arrays. If an array is sharded over several processes, all of them must call
      `digest`, and each process holds one whole array at a time.

    Privacy: none. The digest of private data lets anyone who has a guess check whether
    the guess is right. The digest of released parameters reveals no more than the
    parameters do.

    Example:
      >>> import jax.numpy as jnp
      >>> digest({"w": jnp.ones(3)}) == digest({"w": jnp.array([1.0, 1.0, 1.0])})
      True
      >>> digest(jnp.array([0.0])) == digest(jnp.array([-0.0]))
      False
    """
    found = hashlib.sha256()
    paths, _ = jax.tree.flatten_with_path(tree)
    for path, leaf in paths:
        name = f"{jax.tree_util.keystr(path)} {leaf_type(leaf)}\n"
        found.update(name.encode())
        if is_saved(leaf):
            found.update(np.ascontiguousarray(_gather_array(raw_data(leaf))).tobytes())
    return found.hexdigest()


def is_saved(leaf: object) -> bool:
    """Whether a leaf is a number or an array, and not, say, a function or a string."""
    return isinstance(leaf, _NUMBERS)


def is_key(leaf: object) -> TypeGuard[jax.Array]:
    """Whether a leaf is a typed key, or an array of typed keys."""
    typed = isinstance(leaf, jax.Array)
    return typed and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def raw_data(leaf: Any) -> jax.Array | np.ndarray:
    """A leaf as an array of an ordinary dtype: typed keys become their key data."""
    if is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _gather_array(leaf: jax.Array | np.ndarray) -> np.ndarray:
    """The whole array in host memory, gathered if other processes hold parts of it."""
    if spans_processes(leaf) and not leaf.is_fully_replicated:
        return multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def spans_processes(leaf: object) -> TypeGuard[jax.Array]:
    """Whether a leaf is an array on the devices of several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def leaf_type(leaf: Any) -> str:
    """A leaf's dtype and shape, or the name of its type if it is not an array."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return type(leaf).__name__


def restore_leaf(leaf: Any, found: np.ndarray | jax.Array) -> Any:
    """The restored array `found` as a leaf of the same type as `leaf`."""
    if isinstance(leaf, jax.Array):
        # Orbax restores a `jax.Array` with the requested sharding; a NumPy array still
        # has to be transferred.
        there = leaf.sharding if leaf.committed else None
        put = found if isinstance(found, jax.Array) else jax.device_put(found, there)
        if is_key(leaf):
            return jax.random.wrap_key_data(put, impl=jax.random.key_impl(leaf))
        return put
    if isinstance(leaf, np.ndarray):
        return np.asarray(found)
    # A Python or NumPy scalar was saved as an array without axes.
    return type(leaf)(np.asarray(found)[()])
