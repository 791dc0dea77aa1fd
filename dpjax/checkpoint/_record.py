"""What is written beside a checkpoint's arrays, and compared before they are read."""

import datetime
import importlib.metadata
import json
import pathlib
from typing import Any

import jax

from dpjax import _validate
from dpjax._plan import Plan
from dpjax.checkpoint._fingerprint import differences, draws, given, record
from dpjax.checkpoint._run import Run, digest, kind


def written(plan: Plan, run: Run, data: str) -> dict[str, Any]:
    """The record of a run as it stands."""
    tree = tree_of(run)
    return {
        "format": 1,
        "step": int(run.step),
        "released": run.released,
        "plan": record(plan),
        "data": data,
        "draws": draws(plan, run.key),
        "key": digest(run.key),
        "leaves": _leaves(tree),
        "digest": digest(tree),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {x: importlib.metadata.version(x) for x in ("dpjax", "jax")},
    }


def check(plan: Plan, run: Run) -> None:
    """Refuse what is no run of the plan."""
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be a dpjax.Plan; got {plan!r}.")
    if not isinstance(run, Run):
        raise ValueError(f"run must be a dpjax.checkpoint.Run; got {type(run)}.")
    _validate.typed_key("run.key", run.key)
    if _validate.static_int("run.step", run.step, minimum=0) > plan.num_steps:
        raise ValueError(
            f"run.step must be at most the plan's {plan.num_steps}; got {run.step!r}."
        )


def tree_of(run: Run) -> dict[str, Any]:
    """What has arrays."""
    return {"key": run.key, "params": run.params, "opt_state": run.opt_state}


def _leaves(tree: Any) -> dict[str, str]:
    """From the name of each leaf to its kind."""
    paths, _ = jax.tree.flatten_with_path(tree)
    return {
        f"{i} {jax.tree_util.keystr(path)}": kind(leaf)
        for i, (path, leaf) in enumerate(paths)
    }


def refuse_another(
    folder: pathlib.Path, kept: dict[str, Any], plan: Plan, run: Run, data: str
) -> None:
    """Refuse to go on as another run."""
    here = {"plan": given(record(plan)), "data": data, "leaves": _leaves(tree_of(run))}
    there = {
        "plan": given(kept["plan"]),
        "data": kept["data"],
        "leaves": kept["leaves"],
    }
    # As the record says it: what is a tuple here is a list there.
    found = differences(there, json.loads(json.dumps(here)))
    if not found:  # and so there is something to draw by
        found = differences(kept["draws"], draws(plan, run.key), "draws")
    if found:
        more = f", and {len(found) - 8} more" if len(found) > 8 else ""
        raise ValueError(
            "plan, data, arrays and draws must be those of the run in "
            f"{folder}, whose noise would hide something else; what differs: "
            f"{', '.join(found[:8])}{more}."
        )
