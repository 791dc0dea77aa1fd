"""The record of a checkpoint, a JSON file that describes the run and its arrays.

`restore` compares the record with the caller's plan and run before it restores arrays.
The record contains a digest of the arrays, which is a hash of their names, dtypes,
shapes and values. The file ends with a second digest, of all values in the record. This
digest uses no secret key. Therefore, it detects damage and mistakes, but not a change
by anyone who recomputes the digest.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import pathlib
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from dpjax._core import validate
from dpjax._core.plain import from_plain, to_plain
from dpjax._core.typing import Key, Tree
from dpjax._plan.modules import is_key
from dpjax._plan.parameters import RunParameters
from dpjax._plan.plan import Plan
from dpjax.checkpoint._fingerprint import (
    describe_draws,
    differences,
    digest_of,
    primary_fields,
)

_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


class Run(NamedTuple):
    """The complete state of a private run, which is as secret as the data.

    Attributes:
      key: the run's typed key, from which the plan draws batches and noise.
      step: the number of completed steps.
      params: the current parameters.
      opt_state: the state of the plan's optimizer.
      released: the digest of the run's parameters that were released last, as
        `dpjax.ledger` recorded them; "" if no parameters were released.

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
    """The SHA-256 of the names, dtypes, shapes and values of a tree's leaves.

    Args:
      tree: a pytree of arrays, keys and numbers. Of other leaves, the digest includes
        only the type.

    Returns:
      64 hexadecimal digits, which do not depend on the devices or the sharding of the
      arrays. If an array is sharded over several processes, all of them must call
      `digest`, and each process holds one whole array at a time.

    Privacy: none. With the digest of private data, anyone can check whether a guess of
    the data is right. The digest of released parameters reveals no more than the
    parameters do.

    Example:
      >>> import jax.numpy as jnp
      >>> digest({"w": jnp.ones(3)}) == digest({"w": jnp.array([1.0, 1.0, 1.0])})
      True
      >>> digest(jnp.array([0.0])) == digest(jnp.array([-0.0]))
      False
    """
    hashed = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = f"{jax.tree_util.keystr(path)} {leaf_type(leaf)}\n"
        hashed.update(name.encode())
        if is_saved(leaf):
            hashed.update(np.ascontiguousarray(_gather_array(raw_data(leaf))).tobytes())
    return hashed.hexdigest()


def is_saved(leaf: object) -> bool:
    """Whether a leaf is a number or an array, and not a function or a string."""
    return isinstance(leaf, _NUMBERS)


def raw_data(leaf: Any) -> jax.Array | np.ndarray:
    """A leaf as an array of an ordinary dtype; a typed key becomes its key data."""
    if is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _gather_array(leaf: jax.Array | np.ndarray) -> np.ndarray:
    """The whole array in host memory, including parts that other processes hold."""
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


def restore_leaf(leaf: Any, array: np.ndarray | jax.Array) -> Any:
    """Convert a restored array to a leaf of the same type as `leaf`."""
    if isinstance(leaf, jax.Array):
        # Orbax restores a `jax.Array` with the requested sharding. A NumPy array must
        # still be transferred.
        there = leaf.sharding if leaf.committed else None
        put = array if isinstance(array, jax.Array) else jax.device_put(array, there)
        if is_key(leaf):
            return jax.random.wrap_key_data(put, impl=jax.random.key_impl(leaf))
        return put
    if isinstance(leaf, np.ndarray):
        return np.asarray(array)
    # A Python or NumPy scalar was saved as an array without axes.
    return type(leaf)(np.asarray(array)[()])


_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Record:
    """The description of a run at one step, which is saved beside the run's arrays.

    Attributes:
      format: the version of the record's fields.
      step: the number of completed steps.
      released: the SHA-256 of the parameters that were released last; "" for none.
      plan: the run's plan.
      data: the caller's name for the data set.
      draws: a description of how the key gives batches and noise.
      key: the SHA-256 of the run's key.
      leaves: the dtype and shape of each leaf, by the leaf's number and path.
      arrays: the SHA-256 of the names, dtypes, shapes and values of all arrays.
      time: the time at which the record was made, UTC.
      versions: the versions of dpjax and JAX that made the record.
    """

    format: int
    step: int
    released: str
    plan: RunParameters
    data: str
    draws: dict[str, str | int | bool]
    key: str
    leaves: dict[str, str]
    arrays: str
    time: str
    versions: dict[str, str]


def make_record(plan: Plan, run: Run, data: str) -> Record:
    """Make the record of a run at the run's current step."""
    tree = tree_of(run)
    return Record(
        format=_FORMAT,
        step=int(run.step),
        released=run.released,
        plan=plan.parameters(),
        data=data,
        draws=describe_draws(plan, run.key),
        key=digest(run.key),
        leaves=_leaves(tree),
        arrays=digest(tree),
        time=now(),
        versions={x: importlib.metadata.version(x) for x in ("dpjax", "jax")},
    )


def now() -> str:
    """The current date and time in UTC, by ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def encode_record(record: Record) -> bytes:
    """Encode a record and its digest as JSON, the content of the record's file."""
    found = to_plain(record)
    sealed = found | {"digest": digest_of(found)}
    return json.dumps(sealed, indent=1, ensure_ascii=False, allow_nan=False).encode()


def decode_record(content: bytes, step: int) -> Record:
    """Decode and verify the content of the file with the record of a step.

    Raises:
      ValueError: the content is not JSON, or the digest, the format or the step of the
        record is wrong.
    """
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError(f"its record is a {type(found).__name__}, not an object.")
    if found.pop("digest", None) != digest_of(found):
        raise ValueError("its record differs from the record that was written.")
    if found.get("format") != _FORMAT:
        raise ValueError(
            f"its format is {found.get('format')!r}, but this version of dpjax reads "
            f"format {_FORMAT}."
        )
    record = from_plain(Record, found, "record")
    if record.step != step:
        raise ValueError(f"its record is of step {record.step}, not of step {step}.")
    return record


def check(plan: Plan, run: Run) -> None:
    """Raise a ValueError unless `run` is a `Run` whose step is within the plan."""
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be a dpjax.Plan; got {plan!r}.")
    if not isinstance(run, Run):
        raise ValueError(f"run must be a dpjax.checkpoint.Run; got {type(run)}.")
    validate.typed_key("run.key", run.key)
    validate.static_int("run.step", run.step, minimum=0)
    validate.at_most("run.step", run.step, plan.num_steps, "the plan's num_steps, ")


def tree_of(run: Run) -> dict[str, Any]:
    """The parts of a run that hold arrays, as one pytree."""
    return {"key": run.key, "params": run.params, "opt_state": run.opt_state}


def _leaves(tree: Any) -> dict[str, str]:
    """A dictionary from the number and path of each leaf to its dtype and shape."""
    return {
        f"{i} {jax.tree_util.keystr(path)}": leaf_type(leaf)
        for i, (path, leaf) in enumerate(jax.tree.leaves_with_path(tree))
    }


def refuse_another(
    folder: pathlib.Path, kept: Record, plan: Plan, run: Run, data: str
) -> None:
    """Raise a ValueError if a run differs from the run whose record is `kept`.

    The function compares the plan, the name of the data set, the dtypes and shapes of
    the arrays, and how the key gives random draws. `folder` is for error messages.
    """
    changes = [
        *differences(kept.data, data, "data"),
        *differences(kept.leaves, _leaves(tree_of(run)), "leaves"),
        *differences(primary_fields(kept.plan), primary_fields(plan), "plan"),
    ]
    if not changes:  # the plans are equal, so that their draws can be compared
        changes = differences(kept.draws, describe_draws(plan, run.key), "draws")
    if changes:
        more = f", and {len(changes) - 8} more" if len(changes) > 8 else ""
        raise ValueError(
            "plan, data, arrays and draws must be identical to those of the run in "
            f"{folder}, because the noise of that run must not be added to other "
            f"sums; the differences are {', '.join(changes[:8])}{more}."
        )
