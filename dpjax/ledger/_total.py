"""The total ε of all releases in a ledger."""

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
      run: the run's name; "" for a release without a run.
      start: how many steps of the run were released before.
      stop: how many steps of the run are released now.
      epsilon: the ε of the run's whole plan, or of the other release; inf if there is
        no bound.
      delta: the δ for which epsilon holds.
      repeated: whether the noise of this release was also used for another release.
      words: what was released, or why the run ended.
      released: the digest of the parameters.
      plan: the fingerprint of the plan and its draws.
      time: when the line was written, UTC.
      hash: the hash of the line, which covers all lines before it.
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
    """The cost of one run: a plan, and the number of its steps that are counted."""

    plan: Plan
    num_steps: int


@dataclasses.dataclass(frozen=True)
class Ledger:
    """A ledger that was read from its file and verified.

    Attributes:
      entries: the ledger's lines.
      plans: a dictionary from fingerprints to plans.
      head: the hash of the last line, which covers all lines. Keep the head elsewhere.
    """

    entries: tuple[Entry, ...]
    plans: dict[str, Plan]
    head: str

    def runs(self) -> dict[str, Cost]:
        """For each run, its plan and the number of steps whose cost is counted.

        All steps of the plan are counted, or the released steps of a run with an entry
        of `end`.
        """
        found: dict[str, Cost] = {}
        for entry in self.entries:
            if entry.what == "release":
                plan = self.plans[entry.plan]
                found[entry.run] = Cost(plan, plan.num_steps)
            elif entry.what == "end":
                found[entry.run] = Cost(found[entry.run].plan, entry.stop)
        return found

    def epsilon(self, delta: float) -> float:
        """The ε of all releases together, if all plans were fixed before any release.

        Args:
          delta: δ, in (0, 1).

        Returns:
          ε, rounded up. Runs whose plans have a privacy-loss distribution or a GDP
          parameter are composed by privacy-loss distributions. The ε of this
          composition, of each other run and of each release without a plan are added.
          From δ the δs of the releases without a plan are subtracted, and the rest is
          divided equally among the composition and each other run. The result is
          infinite if a noise was used twice, or if the δs of releases without a plan
          exceed δ or leave no part of δ for the runs.

        Raises:
          ValueError: delta is out of range.

        Privacy: the bound holds if every run has a key of its own, and the plans of all
        runs and the costs of all other releases were fixed before any output was seen.
        The bound is not a privacy filter: it does not hold if a plan was chosen by the
        outputs of earlier runs, even if the total stayed below a number that was fixed
        before. For some first run and two alternatives for the second plan, both with
        the same total, choosing between the alternatives by the first output nearly
        doubles δ at that ε.

        Reference: Dwork and Roth (2014), Theorem 3.16, for the addition of costs.
        """
        validate.open_unit("delta", delta)
        others = [x for x in self.entries if x.what == "other"]
        # The difference of two sums under the same noise has no noise: no ε is finite.
        if any(x.repeated for x in self.entries):
            return math.inf
        # Dwork and Roth (2014), Theorem 3.16, https://doi.org/10.1561/0400000042:
        # (Σ ε_i, Σ δ_i), where δ_i is the recorded δ for a release without a plan, and
        # an equal part of the remaining δ for each group of runs.
        total = _up(x.epsilon for x in others)
        # Rounded down, as is each part below: the δs of all must not exceed delta.
        left = math.nextafter(delta - _up(x.delta for x in others), -math.inf)
        groups = self._groups()
        if not groups:
            return total if _up(x.delta for x in others) <= delta else math.inf
        part = math.nextafter(left / len(groups), -math.inf)
        if part <= 0:
            return math.inf
        return _up([total, *(float(group.epsilon(part)) for group in groups)])

    def _groups(self) -> list[Profile]:
        """The privacy profiles to add up.

        All runs that have privacy-loss distributions, or are μ-GDP, are composed into
        one profile. Each of the other runs has a profile of its own.
        """
        parts, rest = [], []
        for plan, num_steps in self.runs().values():
            profile = mechanism_of(plan).profile(plan.parameters(num_steps=num_steps))
            if isinstance(profile, pld.PLD):
                parts.append(profile)
            elif profile.mu is not None:
                # A μ-GDP run composes like one Gaussian mechanism of that μ.
                parts.append(pld.gaussian(float(np.asarray(profile.mu))))
            else:
                rest.append(profile)
        # Privacy losses of independent mechanisms add: composition joins their steps.
        together = pld.PLD(tuple(step for part in parts for step in part.steps))
        return [*([together] if parts else []), *rest]

    def __str__(self) -> str:
        """The ledger's entries in words, one line for each."""
        return "\n".join(map(_line, self.entries))


def read(path: str | os.PathLike[str], *, head: str | None = None) -> Ledger:
    """Read a ledger and verify that no line was changed.

    Args:
      path: the ledger's file. A file that does not exist is an empty ledger.
      head: `Ledger.head` from an earlier reading, kept elsewhere. The line with that
        hash must still be in the file.

    Returns:
      A `Ledger`.

    Raises:
      ValueError: a line was changed, removed, inserted or moved, or the file ends
        within a line; or no line has the hash `head`, so that the file's end was cut
        off or the whole file rewritten. Without `head`, a cut or a rewritten file
        cannot be detected.

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
    # JSON has no infinity: the ledger stores null.
    return math.inf if epsilon is None else epsilon


def _up(numbers: Iterable[float]) -> float:
    """The sum of non-negative numbers, rounded up."""
    total = 0.0
    for number in numbers:
        # The first addition, to zero, is exact and needs no rounding.
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
