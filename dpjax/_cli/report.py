"""The command `report`: a statement for a paper, computed again from a record."""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any, Literal

import jax
import numpy as np

from dpjax._cli.page import page, text_plot
from dpjax._core.plain import from_plain, to_plain
from dpjax._plan import RunGuarantee
from dpjax._plan.mechanisms import SAMPLINGS
from dpjax._plan.parameters import RunParameters
from dpjax._plan.schedule import values_at
from dpjax._plan.solve import plan
from dpjax.accounting.events import Event

# A record may claim less than the value computed here by this relative tolerance, since
# machines round differently. The printed value is always the one computed here.
_ROUNDING = 1e-5
# Fields of `RunParameters` that are not arguments of `dpjax.plan`, or are arguments of
# only some plans.
_NOT_GIVEN = {"epsilon", "solved_for", "max_batch_size"}
_NOT_GIVEN |= {"schedule", "quantile", "shape"}


def report(path: str, form: Literal["text", "json", "html"]) -> str:
    """Return the statement for a paper, from a file that `guarantee.to_json` wrote.

    The function computes the guarantee again from the run's numbers in the file.

    Raises:
      ValueError: the file is not JSON or not such a record; no plan has the record's
        numbers; or the record claims more privacy than its numbers give.
    """
    try:
        record = json.loads(pathlib.Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} must contain JSON; the parser reports: {error}."
        ) from error
    try:
        versions = _versions(record)
        guarantee = guarantee_of(record)
        _check(record, guarantee)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{path}: {error}") from error
    # The last line names the versions, which must be those of the run.
    statement = str(guarantee).rpartition("\n")[0] + f"\n{versions}"
    if form == "html":
        return page(guarantee, statement)
    if form == "text":
        return (
            f"{statement}\n\n{text_plot(guarantee)}\n\nε and the bounds on attacks "
            f"were computed again from the run's numbers in {path}."
        )
    delta = guarantee.plan.delta
    said = {"epsilon": guarantee.epsilon(delta), "delta": delta, "statement": statement}
    return json.dumps(to_plain(said), indent=2, ensure_ascii=False)


def guarantee_of(record: Any) -> RunGuarantee:
    """Compute the guarantee of the run that a record describes, by a new plan.

    Raises:
      ValueError: the value is not a record, or no plan can have its numbers.
    """
    run = _field(record, "plan", RunParameters)
    names = {field.name for field in dataclasses.fields(run)} - _NOT_GIVEN
    given: dict[str, Any] = {name: getattr(run, name) for name in names}
    given["clip_norm"] = run.quantile or run.clip_norm
    if run.sampling in SAMPLINGS and SAMPLINGS[run.sampling].overflows:
        given["max_batch_size"] = run.max_batch_size
    if run.shape is not None:
        given["strategy"] = run.shape.strategy(run.num_steps)
    found = plan(**given, **_factors(run))
    if run.schedule != found.schedule:
        raise ValueError(
            f"schedule must be one that dpjax.plan makes; got {run.schedule!r}."
        )
    return found.guarantee.at(_field(record, "num_steps", int))


def _field(record: Any, name: str, kind: Any) -> Any:
    """The value of one field of a record.

    Raises:
      ValueError: the field is missing or has another type.
    """
    if not isinstance(record, dict) or name not in record:
        raise ValueError(
            "the record must be the output of plan.guarantee.to_json(); its field "
            f"{name} is missing."
        )
    return from_plain(kind, record[name], name)


def _factors(run: RunParameters) -> dict[str, Any]:
    """The arguments of `dpjax.plan` for a schedule, as functions of the step."""
    if not run.schedule:
        return {}
    at = functools.partial(values_at, run.schedule)
    found: dict[str, Any] = {"noise_schedule": lambda step: at(step).noise}
    # Not all plans allow a clip schedule or a batch schedule.
    if any(piece.clip != 1 for piece in run.schedule):
        found["clip_schedule"] = lambda step: at(step).clip
    if any(piece.batch_size != run.batch_size for piece in run.schedule):
        found["batch_schedule"] = lambda step: at(step).batch_size / run.batch_size
    return found


def _check(record: Any, found: RunGuarantee) -> None:
    """Raise a ValueError if a record claims more privacy than its numbers give.

    Args:
      record: the record with its claims.
      found: the guarantee that was computed again.
    """
    event = _field(record, "event", Event)
    (claims, structure), (costs, own) = map(jax.tree.flatten, (event, found.event))
    if structure != own or not np.allclose(claims, costs, rtol=_ROUNDING, atol=0):
        raise ValueError(
            f"event must be the plan's event, {found.event!r}; got {event!r}."
        )
    of_attacks, follows = "attack_true_positive_rate_at_most", "clip_norm_follows"
    costs, names = found.record(), ("epsilon", "delta", "mu")
    claims = {name: _field(record, name, float | None) for name in names}
    claims |= _field(record, of_attacks, dict[str, float])
    costs |= costs[of_attacks]
    if costs[follows]:
        claims |= _field(record, follows, dict[str, float])
        costs |= costs[follows]
    for name, claim in claims.items():
        cost = costs.get(name)
        # None stands for an infinite value, which claims nothing.
        claim = math.inf if claim is None else claim
        cost = math.inf if cost is None else cost
        # The "not" ensures that a NaN is refused.
        if not claim >= cost - _ROUNDING * (abs(cost) if cost < math.inf else 0):
            raise ValueError(
                f"{name} is {claim!r} in the record, but the record's other numbers "
                f"give {cost!r}. The record was changed, or its {name} was never a "
                "valid bound."
            )


def _versions(record: Any) -> str:
    """Format the versions of dpjax and JAX in a record as text."""
    versions = _field(record, "versions", dict[str, str])
    return ", ".join(f"{x} {_field(versions, x, str)}" for x in ("dpjax", "jax")) + "."
