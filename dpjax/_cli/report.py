"""The command `report`: a statement for a paper, computed anew from a record."""

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.adjacency import Adjacency
from dpjax._matrices.spec import StrategySpec
from dpjax._matrices.strategy import Strategy
from dpjax._plan import Plan, QuantileClip, RunGuarantee
from dpjax._plan.mechanisms import SAMPLINGS
from dpjax._plan.schedule import Segment
from dpjax._plan.solve import plan

# The relative tolerance by which a record may claim less than the value computed here,
# as machines round differently. The printed value is always the one computed here.
_ROUNDING = 1e-5


def report(path: str, as_json: bool) -> str:
    """The statement for a paper, as text or JSON, from a file that `to_json` wrote.

    Raises:
      ValueError: the file is not JSON or not such a record, no plan has its numbers, or
        it claims more privacy than its numbers give.
    """
    try:
        record = json.loads(pathlib.Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    try:
        versions = _versions(record)
        guarantee = guarantee_of(record)
        _check(record, guarantee.record())
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{path}: {error}") from error
    # The last line names the versions. They must be those that ran, not those of today.
    statement = str(guarantee).rpartition("\n")[0] + f"\n{versions}"
    if not as_json:
        return (
            f"{statement}\n\nε and what attacks can achieve were computed again from "
            f"the run's numbers in {path}."
        )
    epsilon = float(guarantee.epsilon(guarantee.plan.delta))
    said = {"epsilon": epsilon if math.isfinite(epsilon) else None}
    said |= {"delta": guarantee.plan.delta, "statement": statement}
    return json.dumps(said, indent=2, ensure_ascii=False)


def guarantee_of(record: Any) -> RunGuarantee:
    """The guarantee of the run that a record describes, from a new plan.

    Raises:
      ValueError: the value is not such a record, or no plan can have its numbers.
    """
    sampling = _field(record, "sampling", str)
    names = ("num_examples", "batch_size", "num_steps")
    given: dict[str, Any] = {name: _field(record, name, int) for name in names}
    given |= {x: _field(record, x, float) for x in ("delta", "noise_multiplier")}
    if sampling in SAMPLINGS and SAMPLINGS[sampling].overflows:
        given["max_batch_size"] = _field(record, "max_batch_size", int)
    adjacency = _field(record, "adjacency", str)
    if adjacency not in Adjacency.__members__:
        raise ValueError(f"adjacency must be an Adjacency's name; got {adjacency!r}.")
    schedule = _pieces(record)
    given |= {
        "clip_norm": _clip(record),
        "sampling": sampling,
        "noise": _field(record, "noise", str),
        "adjacency": Adjacency[adjacency],
        "unit": _field(record, "unit_of_privacy", str).removeprefix("one "),
    }
    if record.get("strategy") is not None:
        given["strategy"] = _strategy(record, given["num_steps"])
    # The maximum avoids a division by zero here; `plan` then refuses a size of 0.
    factors = _factors(schedule, max(given["batch_size"], 1), given["num_steps"])
    planned = plan(**given, **factors)
    _check_schedule(schedule, planned)
    return planned.guarantee


def _field(record: Any, name: str, kind: type) -> Any:
    """The value of one field of a record.

    Raises:
      ValueError: the field is missing or has another type.
    """
    if not isinstance(record, dict) or name not in record:
        raise ValueError(
            f"not what plan.guarantee.to_json() writes: {name} is missing."
        )
    value = record[name]
    # JSON may write 1.0 as 1; and a bool is an int in Python.
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ValueError(f"{name} must be of type {kind.__name__}; got {value!r}.")
    return value


def _clip(record: Any) -> float | QuantileClip:
    """The clip norm of a record: a number, or a `QuantileClip`."""
    clip_norm = _field(record, "clip_norm", float)
    if record.get("clip_norm_follows") is None:
        return clip_norm
    follows = _field(record, "clip_norm_follows", dict)
    return QuantileClip(
        clip_norm,
        quantile=_field(follows, "quantile", float),
        learning_rate=_field(follows, "learning_rate", float),
        noise_multiplier=_field(follows, "noise_multiplier_of_count", float),
    )


def _strategy(record: Any, num_steps: int) -> Strategy:
    """The strategy of a record, which correlates the noise of the released steps."""
    said = _field(record, "strategy", dict)
    names = [x for x in ("numerator", "denominator", "factors") if x in said]
    rows = {name: tuple(_field(said, name, list)) for name in names}
    for x in (number for row in rows.values() for number in row):
        if not isinstance(x, int | float):
            raise ValueError(f"strategy must have numbers alone; got {x!r}.")
    decay = _field(said, "tree_decay", float) if "tree_decay" in said else None
    return StrategySpec(**rows, tree_decay=decay).strategy(max(num_steps, 1))


def _pieces(record: Any) -> tuple[Segment, ...]:
    """The segments of a record's schedule that begin within the released steps.

    Raises:
      ValueError: the segments do not start at step 0, or are not in increasing order.
    """
    kinds = {"start": int, "noise": float, "clip": float, "batch_size": int}
    pieces = [
        Segment(**{name: _field(piece, name, kind) for name, kind in kinds.items()})
        for piece in _field(record, "schedule", list)
    ]
    starts = [piece.start for piece in pieces]
    if starts and (starts[0] != 0 or sorted(set(starts)) != starts):
        raise ValueError(f"schedule must start at 0 and go on; got {starts!r}.")
    return tuple(p for p in pieces if p.start < _field(record, "num_steps", int))


def _factors(
    schedule: tuple[Segment, ...], batch_size: int, num_steps: int
) -> dict[str, Any]:
    """The arguments of `dpjax.plan` for a schedule, as functions of the step.

    A column that is 1 in all segments gets no argument.
    """
    starts = [piece.start for piece in schedule]
    lengths = np.diff([*starts, num_steps])

    def factor(values: list[float]) -> Callable[..., jax.Array]:
        # A traced step can index an array.
        by_step = jnp.asarray(np.repeat(values, lengths))
        return lambda step: by_step[step]

    columns = {
        "noise_schedule": [piece.noise for piece in schedule],
        "clip_schedule": [piece.clip for piece in schedule],
        "batch_schedule": [piece.batch_size / batch_size for piece in schedule],
    }
    return {name: factor(x) for name, x in columns.items() if any(v != 1 for v in x)}


def _check_schedule(schedule: tuple[Segment, ...], planned: Plan) -> None:
    """Raise for a schedule that differs from the one `dpjax.plan` makes of it."""
    if schedule and (planned.schedule or schedule[1:]) and schedule != planned.schedule:
        raise ValueError(
            f"schedule must be one that dpjax.plan makes; got {schedule!r}."
        )


def _check(record: dict[str, Any], computed: dict[str, Any]) -> None:
    """Raise for a record that claims more privacy than its numbers give.

    Args:
      record: the record with its claims.
      computed: the record of the guarantee that was computed anew.
    """
    of_attacks = "attack_true_positive_rate_at_most"
    claims = {"epsilon": record.get("epsilon"), "mu": record.get("mu")}
    costs = {"epsilon": computed["epsilon"], "mu": computed["mu"]}
    claims |= _field(record, of_attacks, dict)
    costs |= computed[of_attacks]
    if record.get("clip_norm_follows"):
        name = "noise_multiplier_of_gradients"
        claims[name] = _field(record["clip_norm_follows"], name, float)
        costs[name] = computed["clip_norm_follows"][name]
    for name, claim in claims.items():
        cost = costs.get(name)
        # None stands for a value without bound, which claims nothing.
        claim = math.inf if claim is None else claim
        cost = math.inf if cost is None else cost
        if not isinstance(claim, int | float) or isinstance(claim, bool):
            raise ValueError(f"{name} must be a number; got {claim!r}.")
        # Written with "not", so that a NaN is refused.
        if not claim >= cost - _ROUNDING * (abs(cost) if cost < math.inf else 0):
            raise ValueError(
                f"{name} is said to be {claim!r}, but the record's own numbers "
                f"give {cost!r}: it was changed, or was never a bound."
            )


def _versions(record: Any) -> str:
    """The versions of dpjax and JAX that ran, according to the record, as text."""
    versions = _field(record, "versions", dict)
    return ", ".join(f"{x} {_field(versions, x, str)}" for x in ("dpjax", "jax")) + "."
