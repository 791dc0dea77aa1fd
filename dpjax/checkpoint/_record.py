"""The record of a checkpoint, a JSON file that describes the run and its arrays.

The record contains the plan and a description of the random draws. `fingerprint` is a
hash of the plan and of this description. By the fingerprint, a ledger detects that the
plan or the draws have changed.

`restore` compares the record with the caller's plan and run before it restores arrays.
The record contains a digest of the arrays, which is a hash of their names, dtypes,
shapes and values. The file ends with a second digest, of all values in the record. The
second digest uses no secret key. Therefore, the digest detects damage and mistakes, but
not a change by anyone who recomputes the digest.
"""

import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
import pathlib
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from dpjax._core import keys, validate
from dpjax._core.float64 import default_float
from dpjax._core.plain import from_plain, to_plain
from dpjax._core.typing import Key, Tree
from dpjax._plan.modules import is_key
from dpjax._plan.parameters import Bounded, RunParameters
from dpjax._plan.plan import Plan

# The version of the draws of samplers and noise. Raise the version if the same key
# gives other draws than before and `_probe` may not detect this change: `_probe` uses
# only the first steps of a plan, on one device.
DRAWS = 1
# Fields of a plan that are computed from its other fields.
_DERIVED = ("epsilon", "solved_for")
# The number of signs for each of two leaves. Two different streams agree in all 128
# signs of a step with probability 2⁻¹²⁸.
_SIGNS = 64
# The types of the leaves that a checkpoint saves.
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
      tree: a pytree of arrays, keys and numbers. Of any other leaf, the digest includes
        only the name and the type.

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
        hashed.update(f"{jax.tree_util.keystr(path)} {leaf_type(leaf)}\n".encode())
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
    """A leaf's dtype and shape, or the name of its type for a leaf without a dtype."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return type(leaf).__name__


def restore_leaf(leaf: Any, array: np.ndarray | jax.Array) -> Any:
    """Convert a restored array to a leaf of the same type as `leaf`."""
    if isinstance(leaf, jax.Array):
        # Orbax restores a `jax.Array` with the requested sharding. A NumPy array must
        # still be transferred.
        sharding = leaf.sharding if leaf.committed else None
        put = array if isinstance(array, jax.Array) else jax.device_put(array, sharding)
        if is_key(leaf):
            return jax.random.wrap_key_data(put, impl=jax.random.key_impl(leaf))
        return put
    if isinstance(leaf, np.ndarray):
        return np.asarray(array)
    # A Python or NumPy scalar was saved as an array without axes.
    return type(leaf)(np.asarray(array)[()])


def fingerprint(plan: Plan, key: Key) -> str:
    """Compute a fingerprint, 32 hexadecimal digits, of a plan and its random draws.

    The fingerprint covers the draws from a fixed key that is no secret, with the same
    generator as `key`. The fingerprint does not depend on the secret bits of `key`.
    """
    fields = {"plan": primary_fields(plan), "draws": describe_draws(plan, key)}
    return digest_of(fields)[:32]


def primary_fields(run: RunParameters) -> dict[str, Any]:
    """A plan's fields as JSON values, except `epsilon` and `solved_for`.

    Other fields determine `epsilon`, and `solved_for` has no effect on the run.
    """
    fields = to_plain(run.parameters())
    return {name: x for name, x in fields.items() if name not in _DERIVED}


def describe_draws(plan: Plan, key: Key) -> dict[str, Any]:
    """Describe how a key gives batches and noise under a plan, as JSON values.

    The description contains the name of the key's generator, JAX's setting
    `jax_threefry_partitionable`, the version of dpjax's random draws, and a digest of
    the draws from a public key. The description does not depend on the secret bits of
    the key.
    """
    generator = keys.generator_name(key)
    # This setting of JAX changes the bits that a threefry key gives.
    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore
    return {
        "generator": generator,
        "jax_threefry_partitionable": bool(partitionable),
        "version": DRAWS,
        # The last three arguments only extend the cache's key: the draws may depend on
        # those settings as well.
        "of a public key": _probe(
            plan, generator, partitionable, default_float(), jax.default_backend()
        ),
    }


@functools.lru_cache(maxsize=64)
def _probe(plan: Plan, generator: str, *_: object) -> str:
    """The digest of the batches and noise of a plan's first two steps for a public key.

    The digest covers only the signs of the noise. Rounding changes a sign only with
    negligible probability. So machines with the same random bits have the same digest.
    """
    key = jax.random.key(0, impl=keys.generator_of(generator))
    steps = min(2, plan.num_steps)

    @jax.jit
    def draw(key: Key) -> tuple[list[Any], list[Any]]:
        tree = {name: jnp.zeros(_SIGNS, jnp.float32) for name in "ab"}
        sums = Bounded(tree, jnp.zeros((), jnp.float32)) if plan.quantile else tree
        tx = plan.optimizer(optax.identity(), key=key)
        state, signs = tx.init(tree), []
        for _ in range(steps):
            noise, state = tx.update(sums, state)
            signs.append(jax.tree.map(lambda x: jnp.sign(x).astype(jnp.int8), noise))
        return [plan.batch(step, key) for step in range(steps)], signs

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(draw(key)):
        digest.update(np.asarray(leaf).astype(np.int64).tobytes())
    return digest.hexdigest()[:32]


def canonical(data: Any) -> str:
    """Return the JSON text of data, with sorted names and no space between tokens."""
    return json.dumps(
        data, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )


def digest_of(value: Any) -> str:
    """The SHA-256 of a value's canonical text, in hexadecimal digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def differences(saved: Any, given: Any, name: str) -> list[str]:
    """List the fields in which a saved and a given JSON value differ.

    Each string in the list has the name of a field, which begins with `name`, and both
    values of this field. A missing field has the value None.
    """
    if isinstance(saved, dict) and isinstance(given, dict):
        return [
            line
            for key in sorted(saved.keys() | given.keys())
            for line in differences(saved.get(key), given.get(key), f"{name}.{key}")
        ]
    return [] if saved == given else [f"{name} (saved {saved!r}, given {given!r})"]


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
    fields = to_plain(record)
    sealed = fields | {"digest": digest_of(fields)}
    return json.dumps(sealed, indent=1, ensure_ascii=False, allow_nan=False).encode()


def decode_record(content: bytes, step: int) -> Record:
    """Decode and verify a record of the given step from the content of its file.

    Raises:
      ValueError: the content is not JSON, or the digest, the format or the step of the
        record is wrong.
    """
    fields = json.loads(content)
    if not isinstance(fields, dict):
        raise ValueError(f"its record is a {type(fields).__name__}, not an object.")
    if fields.pop("digest", None) != digest_of(fields):
        raise ValueError("its record differs from the record that was written.")
    if fields.get("format") != _FORMAT:
        raise ValueError(
            f"its format is {fields.get('format')!r}, but this version of dpjax reads "
            f"format {_FORMAT}."
        )
    record = from_plain(Record, fields, "record")
    if record.step != step:
        raise ValueError(f"its record is of step {record.step}, not of step {step}.")
    return record


def check(plan: Plan, run: Run) -> None:
    """Raise a ValueError unless `plan` is a `Plan` and `run` is a valid `Run`.

    The run's key must be one typed key. The run's step must be an integer from 0 to the
    plan's number of steps.
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be a dpjax.Plan; got {plan!r}.")
    if not isinstance(run, Run):
        raise ValueError(f"run must be a dpjax.checkpoint.Run; got {type(run)}.")
    validate.typed_key("run.key", run.key)
    validate.static_int("run.step", run.step, minimum=0)
    validate.at_most("run.step", run.step, plan.num_steps, "the plan's num_steps, ")


def tree_of(run: Run) -> dict[str, Any]:
    """A run's key, parameters and optimizer state, as one pytree."""
    return {"key": run.key, "params": run.params, "opt_state": run.opt_state}


def _leaves(tree: Any) -> dict[str, str]:
    """A dictionary from each leaf's number and path to the leaf's dtype and shape."""
    return {
        f"{i} {jax.tree_util.keystr(path)}": leaf_type(leaf)
        for i, (path, leaf) in enumerate(jax.tree.leaves_with_path(tree))
    }


def refuse_another(
    folder: pathlib.Path, saved: Record, plan: Plan, run: Run, data: str
) -> None:
    """Raise a ValueError if a run differs from the run whose record is `saved`.

    The function compares the plan, the name of the data set, the dtypes and shapes of
    the arrays, and how the key gives random draws. `folder` is for error messages.
    """
    changes = [
        *differences(saved.data, data, "data"),
        *differences(saved.leaves, _leaves(tree_of(run)), "leaves"),
        *differences(primary_fields(saved.plan), primary_fields(plan), "plan"),
    ]
    if not changes:  # the plans are equal, so that their draws can be compared
        changes = differences(saved.draws, describe_draws(plan, run.key), "draws")
    if changes:
        more = f", and {len(changes) - 8} more" if len(changes) > 8 else ""
        raise ValueError(
            "plan, data, arrays and draws must be identical to those of the run in "
            f"{folder}, because the noise of that run must not be added to other "
            f"sums; the differences are {', '.join(changes[:8])}{more}."
        )
