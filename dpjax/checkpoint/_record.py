"""The record beside a checkpoint's arrays, compared before the arrays are read.

A record ends with its digest, which covers all other values in the record, including
the digest of the arrays. The digest is computed without a secret key: it detects damage
and mistakes, but not a change by anyone who recomputes the digest.
"""

import datetime
import hashlib
import importlib.metadata
import json
import pathlib
from typing import Any

import jax

from dpjax._core import validate
from dpjax._plan import Plan
from dpjax._plan.parameters import RunParameters
from dpjax.checkpoint._fingerprint import (
    canonical,
    describe_draws,
    differences,
    primary_fields,
)
from dpjax.checkpoint._run import Run, digest, leaf_type

_FORMAT = 1
# The fields of a record, and their types in JSON.
_TYPES = {
    "format": int,
    "step": int,
    "released": str,
    "plan": dict,
    "data": str,
    "draws": dict,
    "key": str,
    "leaves": dict,
    "arrays": str,
    "time": str,
    "versions": dict,
    "digest": str,
}


def make_record(plan: Plan, run: Run, data: str) -> dict[str, Any]:
    """The record of a run at its current step, without the record's own digest."""
    tree = tree_of(run)
    return {
        "format": _FORMAT,
        "step": int(run.step),
        "released": run.released,
        "plan": plan.to_dict(),
        "data": data,
        "draws": describe_draws(plan, run.key),
        "key": digest(run.key),
        "leaves": _leaves(tree),
        "arrays": digest(tree),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {x: importlib.metadata.version(x) for x in ("dpjax", "jax")},
    }


def encode_record(found: dict[str, Any]) -> bytes:
    """The content of a record's file: the record with its digest, as JSON."""
    sealed = found | {"digest": _digest(found)}
    return json.dumps(sealed, indent=1, ensure_ascii=False, allow_nan=False).encode()


def _digest(found: dict[str, Any]) -> str:
    """The SHA-256 of all fields of a record except its digest."""
    others = {name: x for name, x in found.items() if name != "digest"}
    return hashlib.sha256(canonical(others).encode()).hexdigest()


def decode_record(content: bytes, step: int, where: pathlib.Path) -> dict[str, Any]:
    """Decode and verify the record of a step.

    Args:
      content: the content of the record's file.
      step: the step that the record must be of.
      where: the checkpoint's folder, for error messages.

    Raises:
      ValueError: the record is damaged, in another format, or of another step.
    """
    found: Any = None
    try:
        found = json.loads(content)
        wrong = _wrong(found, step)
    # Deeply nested JSON, as a damaged file may hold, raises RecursionError.
    except (ValueError, RecursionError) as error:
        wrong = f"its record cannot be read: {error}"
    if wrong:
        raise ValueError(f"the checkpoint {where} is damaged or was changed: {wrong}.")
    return found


def _wrong(found: Any, step: int) -> str:
    """The reason why a value is not a valid record of the step; "" if it is valid."""
    if not isinstance(found, dict):
        return f"its record is a {type(found).__name__}, not an object"
    if found.keys() != _TYPES.keys():
        return f"its record lacks or adds {sorted(found.keys() ^ _TYPES.keys())}"
    for name, expected in _TYPES.items():
        # Compares types exactly: isinstance would accept a bool as an int.
        if type(found[name]) is not expected:
            return f"{name} in its record is {found[name]!r}"
    if found["digest"] != _digest(found):
        return "its record is not what was written"
    if found["format"] != _FORMAT:
        return f"its format is {found['format']}, and this version reads {_FORMAT}"
    if found["step"] != step:
        return f"its record is of step {found['step']}"
    RunParameters.from_dict(found["plan"])  # raises ValueError for an invalid plan
    return ""


def check(plan: Plan, run: Run) -> None:
    """Raise ValueError unless `run` is a run of at most as many steps as `plan` has."""
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be a dpjax.Plan; got {plan!r}.")
    if not isinstance(run, Run):
        raise ValueError(f"run must be a dpjax.checkpoint.Run; got {type(run)}.")
    validate.typed_key("run.key", run.key)
    if validate.static_int("run.step", run.step, minimum=0) > plan.num_steps:
        raise ValueError(
            f"run.step must be at most the plan's {plan.num_steps}; got {run.step!r}."
        )


def tree_of(run: Run) -> dict[str, Any]:
    """The parts of a run that hold arrays, as one pytree."""
    return {"key": run.key, "params": run.params, "opt_state": run.opt_state}


def _leaves(tree: Any) -> dict[str, str]:
    """A dictionary from the number and path of each leaf to its dtype and shape."""
    paths, _ = jax.tree.flatten_with_path(tree)
    return {
        f"{i} {jax.tree_util.keystr(path)}": leaf_type(leaf)
        for i, (path, leaf) in enumerate(paths)
    }


def refuse_another(
    folder: pathlib.Path, kept: dict[str, Any], plan: Plan, run: Run, data: str
) -> None:
    """Raise ValueError if a run differs from the one in the record `kept`.

    The plan, the name of the data set, the structure of the arrays and the draws are
    compared. `folder` is for error messages.
    """
    here = {
        "plan": primary_fields(plan.to_dict()),
        "data": data,
        "leaves": _leaves(tree_of(run)),
    }
    there = {
        "plan": primary_fields(kept["plan"]),
        "data": kept["data"],
        "leaves": kept["leaves"],
    }
    # A round trip through JSON turns tuples into lists, as in the record.
    found = differences(there, json.loads(json.dumps(here)))
    if not found:  # the plans are equal, so that their draws can be compared
        found = differences(kept["draws"], describe_draws(plan, run.key), "draws")
    if found:
        more = f", and {len(found) - 8} more" if len(found) > 8 else ""
        raise ValueError(
            "plan, data, arrays and draws must be those of the run in "
            f"{folder}, whose noise would hide something else; what differs: "
            f"{', '.join(found[:8])}{more}."
        )
