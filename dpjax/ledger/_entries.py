"""The entries of a ledger, and the total ε of their releases.

An entry is a typed record, and one line of the file.
"""

import dataclasses
import math
import os
import pathlib
from typing import Any

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.plain import from_plain
from dpjax.accounting import composition
from dpjax.accounting.events import EpsilonDelta, Event
from dpjax.ledger import _chain
from dpjax.ledger._budget import Budget

Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Release:
    """The release of a run's parameters.

    Attributes:
      run: the run's name.
      plan: the fingerprint of the plan and of the run's random draws.
      event: an accounting event for all steps of the plan, whose cost the ledger
        counts.
      so_far: an accounting event for the steps up to this release.
      start: the number of the run's steps at the release before this one; 0 for the
        first release, or if `repeated`.
      stop: the number of the run's steps at this release.
      epsilon: the ε of the whole plan; inf if there is no bound.
      delta: the δ for which epsilon holds.
      adjacency: the relation between the data sets that the guarantee compares.
      unit: the unit of privacy, "example" or "user".
      released: the digest of the released parameters.
      repeated: whether another release has used the noise of this release.
      time: the time at which the entry was written, UTC.
    """

    run: str
    plan: str
    event: Event
    so_far: Event
    start: int
    stop: int
    epsilon: float
    delta: float
    adjacency: Adjacency
    unit: str
    released: str
    repeated: bool
    time: str

    def __str__(self) -> str:
        """The entry in words."""
        used = ", with noise that was used before" * self.repeated
        return (
            f"{self.time}  run {self.run}, steps {self.start + 1} to {self.stop} of a "
            f"plan for ({self.epsilon:.3f}, {self.delta:g}){used}"
        )


@dataclasses.dataclass(frozen=True)
class End:
    """The early end of a run, for a reason independent of the run's results.

    Attributes:
      run: the run's name.
      event: an accounting event for the released steps, whose cost the ledger counts
        from now on.
      stop: the number of released steps of the run.
      why: the reason.
      time: the time at which the entry was written, UTC.
    """

    run: str
    event: Event
    stop: int
    why: str
    time: str

    def __str__(self) -> str:
        """The entry in words."""
        return f"{self.time}  run {self.run} ended after {self.stop} steps: {self.why}"


@dataclasses.dataclass(frozen=True)
class Other:
    """A release that has no `dpjax.Plan`, such as a statistic.

    Attributes:
      what: a description of the released value.
      event: the ε and δ of the release.
      adjacency: the adjacency for which ε and δ hold.
      unit: the unit of privacy, "example" or "user".
      time: the time at which the entry was written, UTC.
    """

    what: str
    event: EpsilonDelta
    adjacency: Adjacency
    unit: str
    time: str

    def __str__(self) -> str:
        """The entry in words."""
        costs = f"({self.event.epsilon:g}, {self.event.delta:g})"
        return f"{self.time}  {self.what}: {costs}"


Entry = Release | End | Other


def entry_of(line: dict[str, Any], path: Path) -> Entry:
    """Convert a line of a ledger's file to a typed entry.

    The entry does not contain the two hashes of the line.

    Raises:
      ValueError: the line is no entry, such as a line in another format.
    """
    fields = {name: x for name, x in line.items() if name not in ("previous", "hash")}
    return from_plain(Entry, fields, f"a line of {path}")


@dataclasses.dataclass(frozen=True)
class Ledger:
    """A ledger that was read from its file and verified.

    Attributes:
      entries: a `Release`, an `End` or an `Other` for each of the ledger's lines.
      head: the hash of the last line, which covers all lines. Keep the head elsewhere.
    """

    entries: tuple[Entry, ...]
    head: str

    def runs(self) -> dict[str, Event]:
        """Map each run's name to an event for the steps whose cost the ledger counts.

        The ledger counts all steps of a run's plan. For a run that `end` ended, the
        ledger counts only the released steps.
        """
        return {x.run: x.event for x in self.entries if not isinstance(x, Other)}

    def epsilon(self, delta: float) -> float:
        """The ε of all releases together, if all plans were fixed before any release.

        Args:
          delta: δ, in (0, 1).

        Returns:
          The total ε, rounded up, which is a sum of several ε. The first ε is for all
          runs whose plans have a privacy-loss distribution or a GDP parameter: these
          runs are composed by privacy-loss distributions. Each other run, and each
          release without a plan, adds its own ε. Each release without a plan also takes
          its own δ. The rest of δ is divided equally between the composition and each
          of the other runs. The result is infinite if the same noise was used twice,
          or if releases without a plan take more than δ, or leave no δ for the runs.

        Raises:
          ValueError: delta is out of range.

        Privacy: the bound holds if every run has its own key, and the plans of all runs
        and the costs of all other releases were fixed before any output was seen. The
        bound is no privacy filter: it does not hold if outputs of earlier runs
        determined a plan, not even if a limit on the total ε was fixed in advance. For
        example, let the first output select the second plan from two alternatives with
        the same total ε. There are runs for which the true δ at this ε is nearly twice
        the reported δ. The privacy filter is a `Budget` with adaptive composition, from
        which `spend` draws the releases.
        """
        validate.open_unit("delta", delta)
        # The difference of two sums under the same noise has no noise: ε is infinite.
        if any(isinstance(x, Release) and x.repeated for x in self.entries):
            return math.inf
        others = [x.event for x in self.entries if isinstance(x, Other)]
        return composition.epsilon([*self.runs().values(), *others], delta)

    def spend(self, budget: Budget) -> Budget:
        """Draw the costs of all runs and other releases of this ledger from a budget.

        Args:
          budget: a budget from `dpjax.budget`, which was fixed before the first
            release. No release of the ledger has drawn from this budget yet.

        Returns:
          The new budget.

        Raises:
          ValueError: the releases take more than the budget, or have another adjacency
            or unit; or two releases used the same noise.

        Privacy: with "adaptive" composition, the budget's ε and δ hold for all releases
        together, provided that each release was drawn from the budget before it was
        made. Outputs of earlier runs may then determine a plan.
        """
        if any(isinstance(x, Release) and x.repeated for x in self.entries):
            raise ValueError(
                "entries must not use the same noise twice, because the total ε is "
                "then infinite."
            )
        stated = {(x.adjacency, x.unit) for x in self.entries if not isinstance(x, End)}
        if stated - {(budget.adjacency, budget.unit)}:
            raise ValueError(
                f"budget must have the ledger's adjacency and unit, {stated}; got "
                f"{budget.adjacency!r} and {budget.unit!r}."
            )
        for run, event in self.runs().items():
            budget = budget.draw(event, name=f"run {run}")
        for x in self.entries:
            if isinstance(x, Other):
                budget = budget.draw(x.event, name=x.what)
        return budget

    def __str__(self) -> str:
        """The ledger's entries in words, one line for each entry."""
        return "\n".join(map(str, self.entries))


def read(path: Path, *, head: str | None = None) -> Ledger:
    """Read a ledger and verify that no line was changed.

    Args:
      path: the ledger's file. A file that does not exist is an empty ledger.
      head: `Ledger.head` from an earlier reading, which you kept elsewhere. The line
        with that hash must still be in the file.

    Returns:
      A `Ledger`.

    Raises:
      ValueError: a line was changed, removed, inserted or moved; the file ends within a
        line; or no line has the hash `head`, which shows that the file's end was cut
        off or the file was rewritten. Without `head`, `read` cannot detect these two.

    Example:
      >>> read("nothing.jsonl").epsilon(1e-6)
      0.0
    """
    lines = _chain.read(pathlib.Path(path))
    if head not in {None, _chain.NOTHING, *(x["hash"] for x in lines)}:
        raise ValueError(
            f"head must be the head of a line of {path}; got {head!r}: lines were "
            "removed from the end of the ledger, or the ledger was written anew."
        )
    entries = tuple(entry_of(line, path) for line in lines)
    return Ledger(entries, lines[-1]["hash"] if lines else _chain.NOTHING)
