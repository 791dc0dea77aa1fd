"""What all releases of a ledger cost together."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dpjax._core import validate
from dpjax._plan import Plan
from dpjax._plan.mechanisms import mechanism_of
from dpjax._plan.parameters import RunParameters
from dpjax.accounting import pld
from dpjax.accounting.profiles import Profile
from dpjax.ledger import _chain


class Entry(NamedTuple):
    """A line of a ledger.

    Attributes:
      what: "release", "end" or "other".
      run: the run's name, "" where there is none.
      start: the steps that were released before.
      stop: the steps that are released now.
      epsilon: what the run's whole plan costs, or the other release; inf without bound.
      delta: at this δ.
      repeated: whether the run's noise has hidden something else as well.
      words: what was released, or why the run ended.
      released: the digest of the parameters.
      plan: the fingerprint of the plan and its draws.
      time: when it was written, UTC.
      hash: of the line, and so of all before.
    """

    what: str
    run: str
    start: int
    stop: int
    epsilon: float
    delta: float
    repeated: bool
    words: str
    released: str
    plan: str
    time: str
    hash: str


class Cost(NamedTuple):
    """What is counted of one run: so many steps of a plan."""

    plan: Plan
    num_steps: int


@dataclasses.dataclass(frozen=True)
class Ledger:
    """A ledger as it was read, and verified.

    Attributes:
      entries: its lines.
      plans: from a fingerprint to the plan.
      head: the hash of the last line, which stands for all of them. Keep it elsewhere.
    """

    entries: tuple[Entry, ...]
    plans: dict[str, Plan]
    head: str

    def runs(self) -> dict[str, Cost]:
        """What is counted of each run: its whole plan, or its steps if it ended."""
        found: dict[str, Cost] = {}
        for entry in self.entries:
            if entry.what == "release":
                plan = self.plans[entry.plan]
                found[entry.run] = Cost(plan, plan.num_steps)
            elif entry.what == "end":
                found[entry.run] = Cost(found[entry.run].plan, entry.stop)
        return found

    def epsilon(self, delta: float) -> float:
        """ε of all releases together, if all plans were fixed before any release.

        Args:
          delta: δ, in (0, 1).

        Returns:
          ε, rounded up: by privacy-loss distributions where the plans have them, and
          for the rest by adding up, with equal parts of δ. Infinite where a noise was
          used twice, or δ is less than what other releases take of it.

        Raises:
          ValueError: delta is out of range.

        Privacy: the bound holds where every run has a key of its own, and the plans of
        all runs and the costs of all other releases were fixed before any output was
        seen. It is not a privacy filter: it does not hold where a plan was chosen by
        the outputs of earlier runs, even if the total stayed below a number that was
        fixed before. There is a first run and two second plans, each with the same
        total, where choosing between the plans by the first output nearly doubles δ at
        that ε.

        Reference: Dwork and Roth (2014), Theorem 3.16, for adding up.
        """
        validate.open_unit("delta", delta)
        others = [x for x in self.entries if x.what == "other"]
        if any(x.repeated for x in self.entries):
            return math.inf
        # Dwork and Roth (2014), Theorem 3.16, https://doi.org/10.1561/0400000042:
        # (Σ ε_i, Σ δ_i), where δ_i is what another release says, or an equal part of
        # what is left of δ.
        total = _up(x.epsilon for x in others)
        left = math.nextafter(delta - _up(x.delta for x in others), -math.inf)
        groups = self._groups()
        if not groups:
            return total if _up(x.delta for x in others) <= delta else math.inf
        part = math.nextafter(left / len(groups), -math.inf)
        if part <= 0:
            return math.inf
        return _up([total, *(float(group.epsilon(part)) for group in groups)])

    def _groups(self) -> list[Profile]:
        """The runs, those that compose by their privacy-loss distributions as one."""
        parts, rest = [], []
        for plan, num_steps in self.runs().values():
            profile = mechanism_of(plan).profile(plan.parameters(num_steps=num_steps))
            if isinstance(profile, pld.PLD):
                parts.append(profile)
            elif profile.mu is not None:
                parts.append(pld.gaussian(float(np.asarray(profile.mu))))
            else:
                rest.append(profile)
        together = pld.PLD(tuple(step for part in parts for step in part.steps))
        return [*([together] if parts else []), *rest]

    def __str__(self) -> str:
        """A line each."""
        return "\n".join(map(_line, self.entries))


def read(path: str | os.PathLike[str], *, head: str | None = None) -> Ledger:
    """A ledger, if nothing in it was changed.

    Args:
      path: the ledger's file. One that is not there is empty.
      head: `Ledger.head` as it was some time ago, kept elsewhere: its line must still
        be there.

    Returns:
      A `Ledger`.

    Raises:
      ValueError: a line was changed, taken out, put in or moved, or the file ends
        within one; or no line has this head, so that the end was cut off or all of it
        written anew. Without a head neither of these last two can be seen.

    Example:
      >>> read("nothing.jsonl").epsilon(1e-6)
      0.0
    """
    lines = _chain.read(pathlib.Path(path))
    if head not in {None, _chain.NOTHING, *(x["hash"] for x in lines)}:
        raise ValueError(
            f"head must be that of a line of {path}; got {head!r}: lines were cut off "
            "at its end, or it was written anew."
        )
    entries = tuple(
        Entry(
            what=x["what"],
            run=x.get("run", ""),
            start=x.get("start", 0),
            stop=x.get("stop", 0),
            epsilon=_bound(x.get("epsilon", 0.0)),
            delta=x.get("delta", 0.0),
            repeated=x.get("repeated", False),
            words=x.get("words", x.get("why", "")),
            released=x.get("released", ""),
            plan=x.get("plan", ""),
            time=x["time"],
            hash=x["hash"],
        )
        for x in lines
    )
    plans = {
        x["plan"]: Plan.of(RunParameters.from_dict(x["record"]))
        for x in lines
        if "record" in x
    }
    return Ledger(entries, plans, lines[-1]["hash"] if lines else _chain.NOTHING)


def _bound(epsilon: float | None) -> float:
    return math.inf if epsilon is None else epsilon


def _up(numbers: Iterable[float]) -> float:
    """Their sum, rounded up."""
    total = 0.0
    for number in numbers:
        # What is added exactly stays what it is.
        total = number if total == 0 else math.nextafter(total + number, math.inf)
    return total


def _line(entry: Entry) -> str:
    """An entry in words."""
    if entry.what == "other":
        words = f"{entry.words}: ({entry.epsilon:g}, {entry.delta:g})"
    elif entry.what == "end":
        words = f"run {entry.run} ended after {entry.stop} steps: {entry.words}"
    else:
        words = (
            f"run {entry.run}, steps {entry.start + 1} to {entry.stop} of a plan for "
            f"({entry.epsilon:.3f}, {entry.delta:g})"
            + ", with noise that was used before"
            * entry.repeated
        )
    return f"{entry.time}  {words}"
