"""Write files and arrays to the disk, and read the arrays of a checkpoint.

After a loss of power, a file that `write` was writing is complete, or is as it was
before.

Orbax saves and restores arrays shard by shard. Orbax receives a dictionary from the
number of each leaf to the leaf's array, and therefore needs neither the classes of the
pytree nor support for typed keys. If an array is sharded over several processes, each
process writes its own shards. If all processes have equal copies of an array, such as
the count of steps, the first process writes the array.
"""

import os
import pathlib
from typing import Any

import jax
import numpy as np

from dpjax.checkpoint import _record as rec


def write(path: pathlib.Path, content: bytes) -> None:
    """Atomically write a file that only its owner can read.

    After the call, the file is on the disk. A process that has opened the old file
    continues to read the old content.
    """
    new = path.with_name(f"{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(os.open(new, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        # The content must be on the disk before the name refers to it.
        os.fsync(file.fileno())
    # The replacement is atomic: a reader sees the old content or the new content.
    os.replace(new, path)
    # The new name is on the disk only after its folder is synced.
    sync(path.parent)


def sync(path: pathlib.Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_all(folder: pathlib.Path) -> None:
    """Wait until everything in a folder is on the disk."""
    for inner, _, files in os.walk(folder):
        for name in files:
            sync(pathlib.Path(inner, name))
        sync(pathlib.Path(inner))


def write_arrays(path: pathlib.Path, tree: Any) -> None:
    """Write all numeric leaves of a tree to a new folder, atomically.

    Leaves without entries are not written, since orbax does not save empty arrays.
    The folder has a temporary name until the last leaf is written, and then gets the
    name `path`.

    Raises:
      OSError: the arrays could not be written.
      ImportError: orbax is not installed.
    """
    leaves = jax.tree.leaves(tree)
    arrays = {str(i): _as_orbax_array(x) for i, x in enumerate(leaves) if _nonempty(x)}
    ocp = _orbax()
    try:
        with _checkpointer(ocp) as writer:
            writer.save(path, args=ocp.args.StandardSave(arrays))
    # Orbax raises exceptions of many types, and exception groups.
    except Exception as error:
        raise OSError(f"the arrays were not written to {path}: {error}") from error


def read_arrays(path: pathlib.Path, like: Any) -> Any:
    """Read the arrays at `path`, with the structure and sharding of the tree `like`.

    Leaves that are not numeric, or have no entries, come from `like`.

    Raises:
      ValueError: the arrays are missing or damaged.
      OSError: the disk failed, and the arrays may be intact.
      ImportError: orbax is not installed.
    """
    leaves, structure = jax.tree.flatten(like)
    templates = {str(i): _place(x) for i, x in enumerate(leaves) if _nonempty(x)}
    ocp = _orbax()
    try:
        with _checkpointer(ocp) as reader:
            arrays = reader.restore(path, args=ocp.args.StandardRestore(templates))
    # Orbax raises exceptions of many types for a damaged checkpoint.
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise  # if the disk fails, the checkpoint may be intact
        raise ValueError(
            f"the checkpoint {path.parent} is damaged: its arrays cannot be read: "
            f"{error}"
        ) from error
    return structure.unflatten(
        rec.restore_leaf(x, arrays[str(i)]) if _nonempty(x) else x
        for i, x in enumerate(leaves)
    )


def _checkpointer(ocp: Any) -> Any:
    """Make an orbax checkpointer that waits only some minutes for other processes.

    Orbax waits with a timeout if the options state the set of active processes.
    """
    several = jax.process_count() > 1
    options = ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())) if several else None
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _as_orbax_array(leaf: Any) -> jax.Array | np.ndarray:
    """Convert a leaf to an array of a type that orbax can save.

    A typed key becomes its raw words. An array that spans several processes remains a
    `jax.Array`. With several processes, any other array becomes a NumPy array, of which
    every process must have an equal copy. With one process, arrays do not change. A
    number becomes a NumPy array.
    """
    as_array = rec.raw_data(leaf)
    alone = jax.process_count() == 1 or rec.spans_processes(as_array)
    return as_array if alone else np.asarray(as_array)


def _nonempty(leaf: object) -> bool:
    """Whether a leaf is numeric and has entries: orbax does not save empty arrays."""
    return rec.is_saved(leaf) and np.size(rec.raw_data(leaf)) > 0


def _place(leaf: Any) -> jax.ShapeDtypeStruct | np.ndarray:
    """Describe for orbax how to restore a leaf.

    Orbax restores a leaf with its sharding if the leaf is committed to devices and
    `_as_orbax_array` returns a `jax.Array`. Orbax restores any other leaf as a NumPy
    array.
    """
    as_array = _as_orbax_array(leaf)
    if isinstance(as_array, jax.Array) and leaf.committed:
        return jax.ShapeDtypeStruct(
            as_array.shape, as_array.dtype, sharding=as_array.sharding
        )
    return np.zeros(as_array.shape, as_array.dtype)


def _orbax() -> Any:
    """Import and return orbax, an optional package; raise ImportError without it."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "dpjax.checkpoint needs orbax. In a checkout of dpjax: "
            "pip install '.[checkpoint]'."
        ) from error
    return ocp
