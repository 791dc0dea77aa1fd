"""The total ε of all releases in a ledger."""

import dataclasses
import math
import os
import pathlib

from dpjax._core import validate
from dpjax.accounting import composition
from dpjax.accounting.events import Event
from dpjax.ledger import _chain
from dpjax.ledger._budget import Budget
from dpjax.ledger._entry import End, Entry, Other, Release, entry_of


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
        """The event whose cost the ledger counts for each run, by the name of the run.

        The event covers all steps of the plan, or after `end`, only the released steps.
        """
        return {x.run: x.event for x in self.entries if not isinstance(x, Other)}

    def epsilon(self, delta: float) -> float:
        """The ε of all releases together, if all plans were fixed before any release.

        Args:
          delta: δ, in (0, 1).

        Returns:
          The total ε, rounded up, which is a sum of several ε. The first ε is that of
          all runs whose plans have a privacy-loss distribution or a GDP parameter,
          composed by privacy-loss distributions. Each other run, and each release
          without a plan, adds its own ε. Releases without a plan take their own δ; the
          composition and each other run share the rest of δ equally. The result is
          infinite if a noise was used twice, or if releases without a plan take more
          than δ, or leave no δ for the runs.

        Raises:
          ValueError: delta is out of range.

        Privacy: the bound holds if every run has its own key, and the plans of all runs
        and the costs of all other releases were fixed before any output was seen. The
        bound is no privacy filter: it does not hold if outputs of earlier runs
        determined a plan, not even if a limit on the total ε was fixed in advance. For
        example, let the first output select the second plan from two alternatives with
        the same total ε. There are runs for which the true δ at this ε is nearly twice
        the reported δ. `spend` is the privacy filter.
        """
        validate.open_unit("delta", delta)
        # The difference of two sums under the same noise has no noise: ε is infinite.
        if any(isinstance(x, Release) and x.repeated for x in self.entries):
            return math.inf
        others = [x.event for x in self.entries if isinstance(x, Other)]
        return composition.epsilon([*self.runs().values(), *others], delta)

    def spend(self, budget: Budget) -> Budget:
        """Draw all runs and other releases of this ledger from a budget.

        Args:
          budget: a budget from `dpjax.budget`, which was fixed before the first
            release. No release of the ledger has drawn from this budget yet.

        Returns:
          The new budget.

        Raises:
          ValueError: the releases take more than the budget, have another adjacency or
            unit, or used a noise twice.

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


def read(path: str | os.PathLike[str], *, head: str | None = None) -> Ledger:
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
