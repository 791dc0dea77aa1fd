"""A tree of arrays on a disk, by orbax: each array in pieces, as it is cut.

What is handed to orbax is a flat dictionary by number, so that it need not know of the
classes that a tree is made of, nor of typed keys. Of several processes each writes its
own pieces of an array that lies on all of them. What each has for itself, as the count
of steps, is the same in all, and the first writes it.
"""

import pathlib
from typing import Any

import jax
import numpy as np

from dpjax.checkpoint._run import is_saved, raw_data, restore_leaf, spans_processes


def write_arrays(path: pathlib.Path, tree: Any) -> None:
    """All leaves that are numbers; the folder is there once all of it is."""
    leaves = jax.tree.leaves(tree)
    kept = {str(i): _as_orbax_array(x) for i, x in enumerate(leaves) if _nonempty(x)}
    ocp = _orbax()
    try:
        with _checkpointer(ocp) as writer:
            writer.save(path, args=ocp.args.StandardSave(kept))
    except Exception as error:  # of many kinds, and groups of them
        raise OSError(f"the arrays were not written to {path}: {error}") from error


def read_arrays(path: pathlib.Path, like: Any) -> Any:
    """The arrays, where those of like lie.

    Raises:
      ValueError: they are missing or damaged.
    """
    leaves, structure = jax.tree.flatten(like)
    wanted = {str(i): _place(x) for i, x in enumerate(leaves) if _nonempty(x)}
    ocp = _orbax()
    try:
        with _checkpointer(ocp) as reader:
            found = reader.restore(path, args=ocp.args.StandardRestore(wanted))
    except Exception as error:  # of many kinds
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise  # a disk that fails is not a checkpoint that is damaged
        raise ValueError(
            f"the checkpoint {path.parent} is damaged: its arrays cannot be read: "
            f"{error}"
        ) from error
    return structure.unflatten(
        restore_leaf(x, found[str(i)]) if _nonempty(x) else x
        for i, x in enumerate(leaves)
    )


def _checkpointer(ocp: Any) -> Any:
    """One that waits for other processes for some minutes, and not for ever."""
    several = jax.process_count() > 1
    options = ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())) if several else None
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _as_orbax_array(leaf: Any) -> jax.Array | np.ndarray:
    """An array as orbax takes it: of all processes, or NumPy's and the same in each."""
    as_array = raw_data(leaf)
    alone = jax.process_count() == 1 or spans_processes(as_array)
    return as_array if alone else np.asarray(as_array)


def _nonempty(leaf: object) -> bool:
    """Orbax keeps no arrays without entries, nor need it."""
    return is_saved(leaf) and np.size(raw_data(leaf)) > 0


def _place(leaf: Any) -> jax.ShapeDtypeStruct | np.ndarray:
    """Where an array is to lie: on the host, if it is not bound to devices."""
    as_array = _as_orbax_array(leaf)
    if isinstance(as_array, jax.Array) and leaf.committed:
        return jax.ShapeDtypeStruct(
            as_array.shape, as_array.dtype, sharding=as_array.sharding
        )
    return np.zeros(as_array.shape, as_array.dtype)


def _orbax() -> Any:
    """Orbax, which is imported when it is needed: an extra, and slow to import."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "dpjax.checkpoint needs orbax: pip install 'dpjax[checkpoint]'."
        ) from error
    return ocp
