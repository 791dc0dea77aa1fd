"""The total ε of all releases in a ledger."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterable

import numpy as np

from dpjax._core import validate
from dpjax.accounting import pld, profiles
from dpjax.accounting.events import Event
from dpjax.accounting.profiles import Profile
from dpjax.ledger import _chain
from dpjax.ledger._entry import Entry, Other, Release, entry_of


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
        """For each run, the event whose cost is counted.

        It covers all steps of the plan, or the released steps of a run with an entry of
        `end`.
        """
        return {x.run: x.event for x in self.entries if not isinstance(x, Other)}

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
        others = [x.event for x in self.entries if isinstance(x, Other)]
        # The difference of two sums under the same noise has no noise: no ε is finite.
        if any(isinstance(x, Release) and x.repeated for x in self.entries):
            return math.inf
        # Dwork and Roth (2014), Theorem 3.16, https://doi.org/10.1561/0400000042:
        # (Σ ε_i, Σ δ_i), where δ_i is the recorded δ for a release without a plan, and
        # an equal part of the remaining δ for each group of runs.
        total = _up(x.epsilon for x in others)
        # Rounded down, as is each part below: the δs of all must not exceed delta.
        used = _up(x.delta for x in others)
        left = math.nextafter(delta - used, -math.inf)
        groups = self._groups()
        if not groups:
            return total if used <= delta else math.inf
        part = math.nextafter(left / len(groups), -math.inf)
        if part <= 0:
            return math.inf
        return _up([total, *(float(group.epsilon(part)) for group in groups)])

    def _groups(self) -> list[Profile]:
        """The privacy profiles to add up.

        All runs that have privacy-loss distributions, or are μ-GDP, are composed into
        one profile. Each of the other runs has a profile of its own.
        """
        parts, rest, total_variation = [], [], 0.0
        for whole in map(profiles.of, self.runs().values()):
            profile = whole
            if isinstance(whole, profiles.LatticeProfile):
                profile = whole.gaussian
            if isinstance(profile, pld.PLD):
                parts.append(profile)
            elif profile.mu is not None:
                # A μ-GDP run composes like one Gaussian mechanism of that μ.
                parts.append(pld.gaussian(float(np.asarray(profile.mu))))
            else:
                rest.append(whole)
                continue
            # Distances in total variation of the runs on lattices add up.
            if isinstance(whole, profiles.LatticeProfile):
                total_variation += whole.total_variation
        # Privacy losses of independent mechanisms add: composition joins their steps.
        together = pld.PLD(tuple(step for part in parts for step in part.steps))
        if total_variation:
            together = profiles.LatticeProfile(together, total_variation)
        return [*([together] if parts else []), *rest]

    def __str__(self) -> str:
        """The ledger's entries in words, one line for each."""
        return "\n".join(map(str, self.entries))


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
    entries = tuple(entry_of(line, path) for line in lines)
    return Ledger(entries, lines[-1]["hash"] if lines else _chain.NOTHING)


def _up(numbers: Iterable[float]) -> float:
    """The sum of non-negative numbers, rounded up."""
    total = 0.0
    for number in numbers:
        # The first addition, to zero, is exact and needs no rounding.
        total = number if total == 0 else math.nextafter(total + number, math.inf)
    return total
