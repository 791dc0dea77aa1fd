"""A run as it stands, its arrays by name, and the digest of their bits."""

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
    """All that a private run goes on from. As secret as the data: it holds the key.

    Attributes:
      key: the run's typed key, which batches and noise are drawn from.
      step: how many steps are done.
      params: what is trained.
      opt_state: the state of the plan's optimizer.
      released: what `dpjax.ledger` released of this run last; "" for nothing.

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
      tree: a pytree of arrays, keys and numbers. Of other leaves only the types count.

    Returns:
      64 hexadecimal digits, the same wherever and in whatever pieces the arrays lie.
      Where an array lies on several processes, all of them must call it, and each holds
      one array after the other as a whole.

    Privacy: none. The digest of private data tells whoever has a guess whether it is
    right; that of released parameters tells nothing more than they do.

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
    """Whether it is a number or an array, and not a function or a name."""
    return isinstance(leaf, _NUMBERS)


def is_key(leaf: object) -> TypeGuard[jax.Array]:
    """Whether it is a typed key, or an array of them."""
    typed = isinstance(leaf, jax.Array)
    return typed and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def raw_data(leaf: Any) -> jax.Array | np.ndarray:
    """A leaf as an array that every library knows."""
    if is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _gather_array(leaf: jax.Array | np.ndarray) -> np.ndarray:
    """All of an array, also where other processes have parts of it."""
    if spans_processes(leaf) and not leaf.is_fully_replicated:
        return multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def spans_processes(leaf: object) -> TypeGuard[jax.Array]:
    """Whether it is one array of several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def leaf_type(leaf: Any) -> str:
    """Dtype and shape, or the name of the type."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return type(leaf).__name__


def restore_leaf(leaf: Any, found: np.ndarray | jax.Array) -> Any:
    """What was kept, as a leaf of the kind that this one is."""
    if isinstance(leaf, jax.Array):
        # What orbax has put on the devices is there already.
        there = leaf.sharding if leaf.committed else None
        put = found if isinstance(found, jax.Array) else jax.device_put(found, there)
        if is_key(leaf):
            return jax.random.wrap_key_data(put, impl=jax.random.key_impl(leaf))
        return put
    if isinstance(leaf, np.ndarray):
        return np.asarray(found)
    return type(leaf)(np.asarray(found)[()])
