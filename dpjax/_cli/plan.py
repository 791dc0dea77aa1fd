"""The output of the commands `epsilon`, `noise` and `plan`."""

import json
from typing import Any

from dpjax import workloads
from dpjax._core.adjacency import Adjacency
from dpjax._core.plain import to_plain
from dpjax._plan.guarantee import up
from dpjax._plan.plan import Plan
from dpjax._plan.solve import plan

# The caller leaves out exactly one of these numbers, and the plan solves for it.
_SOLVABLE = ("epsilon", "noise_multiplier", "batch_size", "num_steps")
_ASSUMPTIONS = (
    "The statement holds where each {unit}'s gradient is clipped, {noise}, every "
    "released value is computed from these noisy sums alone, and no choice was made "
    "by looking at the data."
)
_NOISE = {
    "independent": "each step's sum gets Gaussian noise of its own",
    "correlated": "the sums get Gaussian noise that is correlated as stated",
}


def show_plan(command: str, given: dict[str, Any], as_json: bool) -> str:
    """Make a plan from the options, and return its numbers as text or JSON."""
    planned = make_plan_from_options(command, given)
    return _json(command, planned) if as_json else _table(command, planned)


def make_plan_from_options(command: str, given: dict[str, Any]) -> Plan:
    """Make a plan from the options of a command.

    Args:
      command: "epsilon", "noise" or "plan".
      given: the values of the options, by the names of the options.

    Raises:
      ValueError: the options do not leave out exactly one of ε, the noise multiplier,
        the number of steps and the batch size; momentum is given for independent noise,
        or missing for correlated or "auto" noise; the number of epochs is given without
        the batch size; the number of epochs is given, and this number or the batch size
        is below 1; or `dpjax.plan` raises.
    """
    given = {name: value for name, value in given.items() if value is not None}
    epochs = given.pop("num_epochs", None)
    if epochs is not None:
        given["num_steps"] = _count_steps(epochs, given)
    missing = [f"--{x.replace('_', '-')}" for x in _SOLVABLE if x not in given]
    if len(missing) != 1:
        raise ValueError(
            "exactly one of --epsilon, --noise-multiplier, --batch-size and "
            "--num-steps must be left out, and dpjax solves for that one; left out: "
            f"{', '.join(missing) or 'none'}."
        )
    given["adjacency"] = Adjacency(given["adjacency"])
    momentum = given.pop("momentum", None)
    if (momentum is None) != (given.get("noise", "independent") == "independent"):
        raise ValueError(
            "--momentum must be given with --noise correlated or auto, and must not "
            "be given with --noise independent."
        )
    if momentum is not None:
        given["workload"] = workloads.momentum_sum(momentum)
    if command != "plan":
        given["clip_norm"] = 1.0  # neither ε nor the noise multiplier depend on it
        # Other accountants of Poisson sampling also assume that no batch overflows.
        if given["sampling"] == "poisson":
            given.setdefault("max_batch_size", given["num_examples"])
    return plan(**given)


def _count_steps(epochs: int, given: dict[str, Any]) -> int:
    """Compute the number of steps in a given number of epochs.

    An epoch has ⌈n / b⌉ steps, for n examples and the batch size b.

    Args:
      epochs: the number of epochs.
      given: the values of the options, by the names of the options.

    Raises:
      ValueError: the batch size is missing; the batch size or `epochs` is below 1.
    """
    size, n = given.get("batch_size"), given["num_examples"]
    if size is None:
        raise ValueError(
            "--num-epochs must be given together with --batch-size. If dpjax solves "
            "for the batch size, give --num-steps instead."
        )
    for name, value in (("--num-epochs", epochs), ("--batch-size", size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")
    return epochs * -(-n // size)


def _json(command: str, planned: Plan) -> str:
    """Format a plan as JSON.

    For the command `plan`, the JSON is the output of `plan.guarantee.to_json()`. For
    the commands `epsilon` and `noise`, the JSON has the GDP parameter μ, the privacy
    event of the run, and all parameters of the run (the fields of `RunParameters`)
    except the clip norm.
    """
    if command == "plan":
        return planned.guarantee.to_json()
    # The clip norm is arbitrary, since the noise is relative to it.
    numbers = to_plain(planned.parameters())
    del numbers["clip_norm"]
    guarantee = {"mu": planned.guarantee.mu, "event": planned.guarantee.event}
    return json.dumps(numbers | to_plain(guarantee), indent=2)


def _table(command: str, planned: Plan) -> str:
    """Format a plan as text, with one property per line, and state its assumptions.

    The first property is the number that the caller left out and the plan computed.
    """
    record = planned.guarantee.record()
    sampling = record["sampling_means"]
    # If no batch overflows, omit the description of overflow.
    if planned.max_batch_size == planned.num_examples:
        sampling = sampling.split(";")[0]
    noise: Any = planned.noise_multiplier
    if planned.solved_for == "noise_multiplier":
        noise = f"{up(noise, 6)}, rounded up"
    rows = {
        "epsilon": f"{up(planned.epsilon, 4)} at delta = {planned.delta:g}, rounded up",
        "noise_multiplier": noise,
        "num_steps": planned.num_steps,
        "batch_size": f"{planned.batch_size} of {planned.num_examples}",
    }
    rows = {planned.solved_for: rows[planned.solved_for]} | rows
    if command == "plan":
        rows["max_batch_size"] = planned.max_batch_size
        rows["clip_norm"] = planned.clip_norm
    mu = record["mu"]
    if mu is not None:
        rows["mu"] = f"{up(mu, 4)} (Gaussian differential privacy), rounded up"
    rows["sampling"] = f"{planned.sampling}: {sampling}"
    rows["adjacency"] = f"{planned.adjacency.value}: {record['adjacency_means']}"
    if planned.shape is not None:
        rows["noise"] = f"correlated, C⁻¹z where C is {planned.shape}"
    rates = record["attack_true_positive_rate_at_most"]
    powers = " / ".join(up(power, 4) for power in rates.values())
    rows["attacks"] = (
        f"true-positive rate at most {powers} at a false-positive rate of "
        f"{' / '.join(rates)}"
    )
    width = max(map(len, rows)) + 2
    lines = [f"{name:{width}}{value}" for name, value in rows.items()]
    assumptions = _ASSUMPTIONS.format(unit=planned.unit, noise=_NOISE[planned.noise])
    if planned.comparison is not None:
        lines += ["", str(planned.comparison)]
    return "\n".join([*lines, "", assumptions])
