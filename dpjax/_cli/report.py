"""The command `report`, which writes a statement for a paper from a record.

A record is the JSON that `plan.guarantee.to_json()` wrote for a run. The command
computes the guarantee again from the numbers in the record. The output is JSON, an HTML
page that loads no other file, or text with a plot that is made of characters.
"""

import html
import importlib.resources
import json
import math
import pathlib
from typing import Any, Literal

import jax
import numpy as np

from dpjax._core.plain import from_plain, to_plain
from dpjax._plan.guarantee import RunGuarantee, up
from dpjax._plan.mechanisms import SAMPLINGS
from dpjax._plan.parameters import RunParameters
from dpjax._plan.solve import plan
from dpjax.accounting.events import Event
from dpjax.accounting.profiles import tradeoff_curve

# A record's number may be below the number computed in this module by this relative
# tolerance, since machines round differently. The report has only computed numbers.
_TOLERANCE = 1e-5
# Fields of `RunParameters` that are not arguments of `dpjax.plan`, or are arguments of
# only some plans.
_NOT_ARGUMENTS = {"epsilon", "solved_for", "max_batch_size"}
_NOT_ARGUMENTS |= {"schedule", "quantile", "shape"}


def report(path: str, form: Literal["text", "json", "html"]) -> str:
    """Return the statement for a paper, from a file with a run's record.

    The record is the output of `plan.guarantee.to_json()`. The function computes the
    guarantee again from the numbers in the record.

    Args:
      path: the file with the record.
      form: "json", "html" for an HTML page, or "text" for text with a plot that is made
        of characters.

    Raises:
      ValueError: the file is not JSON or not a record; no plan has the record's
        numbers; the record's privacy event is not the event of its numbers; or the
        record claims more privacy than its numbers give.
      OSError: the file cannot be read.
    """
    try:
        record = json.loads(pathlib.Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} must contain JSON; the parser reports: {error}."
        ) from error
    try:
        names = _read(record, "versions", dict[str, str])
        versions = ", ".join(f"{x} {_read(names, x, str)}" for x in ("dpjax", "jax"))
        guarantee = guarantee_of(record)
        _check_claims(record, guarantee)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{path}: {error}") from error
    # The last line names the versions, which must be the versions of the run.
    statement = str(guarantee).rpartition("\n")[0] + f"\n{versions}."
    if form == "html":
        return page(guarantee, statement)
    if form == "text":
        return (
            f"{statement}\n\n{text_plot(guarantee)}\n\nε and the bounds on attacks "
            f"were computed again from the run's numbers in {path}."
        )
    delta = guarantee.plan.delta
    epsilon = guarantee.epsilon(delta)
    output = {"epsilon": epsilon, "delta": delta, "statement": statement}
    return json.dumps(to_plain(output), indent=2, ensure_ascii=False)


def guarantee_of(record: Any) -> RunGuarantee:
    """Recompute the guarantee of the run that a record describes.

    The record is the output of `plan.guarantee.to_json()`, read as JSON. The function
    calls `dpjax.plan` with the record's numbers, and returns the guarantee after the
    number of steps in the record.

    Raises:
      ValueError: the argument is not a record, or no plan has the record's numbers.
    """
    run = _read(record, "plan", RunParameters)
    arguments = {name: x for name, x in vars(run).items() if name not in _NOT_ARGUMENTS}
    arguments["clip_norm"] = run.quantile or run.clip_norm
    if run.sampling in SAMPLINGS and SAMPLINGS[run.sampling].overflows:
        arguments["max_batch_size"] = run.max_batch_size
    if run.shape is not None:
        arguments["strategy"] = run.shape.strategy(run.num_steps)
    planned = plan(**arguments, **_schedules_of(run))
    if run.schedule != planned.schedule:
        raise ValueError(f"schedule must be made by dpjax.plan; got {run.schedule!r}.")
    return planned.guarantee.at(_read(record, "num_steps", int))


def _read(record: Any, name: str, kind: Any) -> Any:
    """Read one field of a record, and convert it to the type `kind`.

    Args:
      record: the output of `plan.guarantee.to_json()`, read as JSON.
      name: the name of the field.
      kind: the type of the field in Python.

    Raises:
      ValueError: the field is missing or has another type.
    """
    if not isinstance(record, dict) or name not in record:
        raise ValueError(
            "the record must be the output of plan.guarantee.to_json(); its field "
            f"{name} is missing."
        )
    return from_plain(kind, record[name], name)


def _schedules_of(run: RunParameters) -> dict[str, Any]:
    """The schedules of a run as arguments of `dpjax.plan`: functions of the step.

    The keys of the result are the names of the arguments. The result is empty if the
    run has no schedule.
    """
    if not run.schedule:
        return {}
    values = run.values_at
    schedules: dict[str, Any] = {"noise_schedule": lambda step: values(step).noise}
    # Not all plans allow a clip schedule or a batch schedule.
    if any(segment.clip != 1 for segment in run.schedule):
        schedules["clip_schedule"] = lambda step: values(step).clip
    if any(segment.batch_size != run.batch_size for segment in run.schedule):
        schedules["batch_schedule"] = lambda step: (
            run.values_at(step).batch_size / run.batch_size
        )
    return schedules


def _check_claims(record: Any, computed: RunGuarantee) -> None:
    """Check that a record claims no more privacy than its numbers give.

    The claims are ε, δ, μ and the bounds on attacks. Each claim must be at least the
    number that `computed` gives. If the clip norm follows a quantile, the record also
    has four settings: the quantile, the learning rate, and the noise multipliers of the
    sum and of the count. Each setting must equal the number that `computed` gives.

    Args:
      record: the output of `plan.guarantee.to_json()`, read as JSON.
      computed: the guarantee that was computed again from the numbers in the record.

    Raises:
      ValueError: a claim is below the number that `computed` gives, or a setting or the
        privacy event differs. All checks have a tolerance for rounding.
    """
    event = _read(record, "event", Event)
    claims, structure = jax.tree.flatten(event)
    values, expected = jax.tree.flatten(computed.event)
    if structure != expected or not np.allclose(
        claims, values, rtol=_TOLERANCE, atol=0
    ):
        raise ValueError(
            f"event must be the plan's event, {computed.event!r}; got {event!r}."
        )
    values, names = computed.record(), ("epsilon", "delta", "mu")
    claims = {name: _read(record, name, float | None) for name in names}
    for group in ("attack_true_positive_rate_at_most", "clip_norm_follows"):
        if values[group]:
            claims |= _read(record, group, dict[str, float])
            values |= values[group]
    for name, claim in claims.items():
        value = values.get(name)
        # None stands for an infinite value, which claims nothing.
        claim = math.inf if claim is None else claim
        value = math.inf if value is None else value
        slack = _TOLERANCE * (abs(value) if value < math.inf else 0)
        # A claimed bound may be larger. The settings of a clip norm must be equal.
        equal = name in (values["clip_norm_follows"] or ())
        most = value + slack if equal else math.inf
        # The "not" ensures that a NaN is refused.
        if not value - slack <= claim <= most:
            raise ValueError(
                f"{name} is {claim!r} in the record, but the record's other numbers "
                f"give {value!r}. The record was changed, or it was written with an "
                f"invalid {name}."
            )


# Facts that no record of a run contains (docs/reporting.md).
_MISSING_FACTS = (
    "anyone else who sees the data, the losses, the keys and the optimizer's state",
    "every other use of the same data: the choice of hyperparameters, earlier "
    "releases, statistics, filters",
    "unplanned events, such as a restart of the run",
)


def page(guarantee: RunGuarantee, statement: str) -> str:
    """Return an HTML page that explains a guarantee.

    Args:
      guarantee: the guarantee of a run.
      statement: the guarantee's statement for a paper. The last line names the versions
        of dpjax and JAX that made the record.
    """
    first, *others = [html.escape(line) for line in statement.splitlines()]
    sentence, _, where = first.partition(" where ")
    steps, delta = guarantee.num_steps, guarantee.plan.delta
    quarters = sorted({-(-steps * part // 4) for part in (1, 2, 3, 4)})
    epsilons = [up(float(guarantee.at(t).epsilon(delta))) for t in quarters]
    rows = [
        f"<tr><td>{t:,}</td><td>{t / steps:.0%}</td><td>{epsilon}</td></tr>"
        for t, epsilon in zip(quarters, epsilons, strict=True)
    ]
    lines = "".join(f"<p>{line}</p>" for line in [first, *others])
    missing = "".join(f"<li>{html.escape(line)}</li>" for line in _MISSING_FACTS)
    parts = {
        sentence: f"<p>This guarantee holds where {where}</p>",
        "What an attack can achieve": _draw_curve(guarantee),
        "The budget by part of the run": "<table><tr><th>steps</th><th>share</th>"
        f"<th>ε at δ = {delta:g}</th></tr>{''.join(rows)}</table><p>Each ε is that of "
        "a run that is planned to stop after these steps.</p>",
        "What to write in a paper": f"<blockquote>{lines}</blockquote><p>This record "
        f"does not contain the following, and a paper must add:</p><ul>{missing}</ul>",
        "What to cite": f"<pre>{html.escape(guarantee.citations())}</pre>",
    }
    (title, lead), *rest = parts.items()
    files = importlib.resources.files("dpjax._cli")
    style = files.joinpath("report.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>\n{style}</style></head><body>\n"
        f"<h1>{title}</h1>{lead}\n"
        + "\n".join(f"<h2>{name}</h2>{part}" for name, part in rest)
        + "\n</body></html>"
    )


def _draw_curve(guarantee: RunGuarantee) -> str:
    """Draw a guarantee's trade-off curve as an HTML figure with a caption."""
    rates = np.sin(np.linspace(0.0, np.pi / 2, 101)) ** 2  # dense at both ends
    false_negatives = tradeoff_curve(guarantee.profile, rates)
    line = " ".join(
        f"{60 + 300 * x:.1f},{310 - 300 * y:.1f}"
        for x, y in zip(rates, false_negatives, strict=True)
    )
    ticks = "".join(
        f'<text x="{60 + 300 * t}" y="328" text-anchor="middle">{t:g}</text>'
        f'<text x="53" y="{314 - 300 * t}" text-anchor="end">{t:g}</text>'
        for t in (0.0, 0.5, 1.0)
    )
    return (
        '<figure style="margin: 0"><svg viewBox="0 0 375 350" role="img" '
        'aria-label="Trade-off curve"><path d="M60 10V310H360" fill="none" '
        'stroke="currentColor"/><path d="M60 10L360 310" stroke="currentColor" '
        'stroke-dasharray="2 5" stroke-width="1.5"/>'
        f'<polyline points="{line}" fill="none" stroke="var(--line)" '
        f'stroke-width="3"/>{ticks}<text x="210" y="346" text-anchor="middle">'
        'false-positive rate</text><text transform="translate(14 160) rotate(-90)" '
        'text-anchor="middle">false-negative rate</text></svg><figcaption>The error '
        "rates of every attack are on or above the solid line. They are on the dotted "
        "line if the attack guesses.</figcaption></figure>"
    )


def text_plot(guarantee: RunGuarantee, width: int = 49, height: int = 11) -> str:
    """Plot a bound on attacks' true-positive rates by false-positive rate, as text.

    Args:
      guarantee: the guarantee of a run.
      width: the number of characters along the axis of false-positive rates.
      height: the number of lines along the axis of true-positive rates. Each rate is
        rounded up to the rate of a line.
    """
    rates = np.linspace(0.0, 1.0, width)
    powers = 1 - np.asarray(guarantee.tradeoff(rates), np.float64)
    rows = [[" "] * width for _ in range(height)]
    for column, (rate, power) in enumerate(zip(rates, powers, strict=True)):
        for value, mark in ((rate, "."), (power, "*")):
            rows[height - 1 - int(np.ceil(value * (height - 1)))][column] = mark
    labels = ["1.0", *[" " * 3] * (height - 2), "0.0"]
    lines = [
        f"{label} |{''.join(row)}".rstrip()
        for label, row in zip(labels, rows, strict=True)
    ]
    title = "true-positive rate of attacks, at most (*); of guesses (.)"
    axis = f"    +{'-' * width}"
    below = f"     0.0{'false-positive rate':^{width - 6}}1.0"
    return "\n".join([title, *lines, axis, below])
