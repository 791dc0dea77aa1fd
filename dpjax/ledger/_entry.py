"""The entries of a ledger: typed records, each of which is one line of the file."""

import dataclasses
import os
from typing import Any

from dpjax._core.adjacency import Adjacency
from dpjax._core.plain import from_plain
from dpjax.accounting.events import EpsilonDelta, Event


@dataclasses.dataclass(frozen=True)
class Release:
    """The release of a run's parameters.

    Attributes:
      run: the run's name.
      plan: the fingerprint of the plan and of its random draws.
      event: the event of all steps of the plan, whose cost the ledger counts.
      so_far: the event of the steps up to this release.
      start: the number of steps of the run that were released before.
      stop: the number of steps of the run that are released now.
      epsilon: the ε of the whole plan; inf if there is no bound.
      delta: the δ for which epsilon holds.
      adjacency: the relation between the data sets that the event compares.
      unit: the unit of privacy.
      released: the digest of the parameters.
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
      event: the event of the released steps, whose cost the ledger counts from now on.
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
    """A release without a plan.

    Attributes:
      what: a description of the released value.
      event: the ε and δ of the release.
      adjacency: the adjacency for which ε and δ hold.
      unit: the unit of privacy.
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


def entry_of(line: dict[str, Any], path: str | os.PathLike[str]) -> Entry:
    """Convert a line of the file to the entry in it, without the line's hashes.

    Raises:
      ValueError: the line is no entry, such as one in another format.
    """
    fields = {name: x for name, x in line.items() if name not in ("previous", "hash")}
    return from_plain(Entry, fields, f"a line of {path}")
