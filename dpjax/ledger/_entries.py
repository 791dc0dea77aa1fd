"""The entries of a ledger, their total ε, and the functions that record them.

An entry is a typed record, and one line of the file. Each new entry is checked against
the earlier entries.
"""

import dataclasses
import hashlib
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpjax._core import keys, validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.plain import from_plain, to_plain
from dpjax._core.typing import Key
from dpjax._plan.plan import Plan
from dpjax.accounting import composition
from dpjax.accounting.events import EpsilonDelta, Event
from dpjax.checkpoint._processes import check_equal_across_processes, on_primary_process
from dpjax.checkpoint._record import Run, digest, fingerprint, now
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
      start: the number of steps that the run had done at its previous release; 0 for
        the run's first release, and if `repeated` is true.
      stop: the number of steps that the run had done at this release.
      epsilon: the ε of the whole plan; inf if there is no bound.
      delta: the δ for which epsilon holds.
      adjacency: the relation between the data sets that the guarantee compares.
      unit: the unit of privacy, "example" or "user".
      released: the digest of the released parameters.
      repeated: whether an earlier release may have used the noise of this release.
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
      event: an accounting event for the released steps. Unless the run has a later
        entry, the ledger counts only the cost of this event for the run.
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
      ValueError: the line does not describe an entry in this format.
    """
    fields = {name: x for name, x in line.items() if name not in ("previous", "hash")}
    return from_plain(Entry, fields, f"a line of {path}")


@dataclasses.dataclass(frozen=True)
class Ledger:
    """A ledger that was read from its file and verified.

    Attributes:
      entries: a `Release`, an `End` or an `Other` for each of the ledger's lines.
      head: the hash of the last line, which depends on all lines; 64 zeros for an empty
        ledger. Store the head apart from the file, so that `read` can check the file
        against the head later.
    """

    entries: tuple[Entry, ...]
    head: str

    def runs(self) -> dict[str, Event]:
        """Map each run's name to an event for the steps whose cost the ledger counts.

        The ledger counts all steps of a run's plan. For a run whose last entry is an
        `End`, the ledger counts only the released steps.
        """
        return {x.run: x.event for x in self.entries if not isinstance(x, Other)}

    def epsilon(self, delta: float) -> float:
        """The ε of all releases together, if all plans were fixed before any release.

        Args:
          delta: δ, in (0, 1).

        Returns:
          The total ε, rounded up, which is a sum of several ε. The first ε is that of
          the composition of all runs whose plans have a privacy-loss distribution or a
          GDP parameter. Each other run, and each release without a plan, adds its own
          ε. The δ of each release without a plan is subtracted from `delta`. The
          composition, and each of the other runs, gets an equal part of the remaining
          δ. The result is infinite if `Release.repeated` is true for an entry, or if
          the releases without a plan need more than δ, or leave nothing of δ for the
          runs.

        Raises:
          ValueError: delta is out of range.

        Privacy: the bound holds if every run has its own key, and the plans of all runs
        and the costs of all other releases were fixed before any output was seen. The
        bound is no privacy filter: it does not hold if outputs of earlier runs
        determined a plan, not even if a limit on the total ε was fixed in advance. For
        example, let the first output select the second plan from two plans that give
        the same total ε. For some choices of these plans, the true δ at this ε is
        nearly twice `delta`. A privacy filter is a `Budget` with adaptive composition,
        from which `spend` draws the releases.
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
        together, provided that the budget still covered each release, together with all
        earlier releases, before the release was made. Outputs of earlier runs may then
        determine a plan.
        """
        if any(isinstance(x, Release) and x.repeated for x in self.entries):
            raise ValueError(
                "entries must not use one noise twice: the total ε is then infinite."
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
      path: the ledger's file. A file that does not exist is an empty ledger, unless
        the same path with `.next` appended exists.
      head: `Ledger.head` from an earlier reading, which you stored elsewhere. The line
        with that hash must still be in the file.

    Returns:
      A `Ledger`.

    Raises:
      ValueError: a line was changed, removed, inserted or moved; the file ends within a
        line, and not because a write was interrupted; the file does not exist, but an
        interrupted write has left a file at the same path with `.next` appended; this
        other file is damaged; or no line has the hash `head`. The last error shows that
        the ledger's end was cut off, or that the ledger was rewritten. Without `head`,
        `read` detects neither of these two changes.

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


def run_name(key: Key) -> str:
    """A run's name in a ledger, which is 64 bits of a hash of the run's key.

    Runs with the same key draw the same noise, and therefore count as one run, even if
    they differ in everything else. A key of the generator `rbg` and a key of
    `unsafe_rbg` with the same `jax.random.key_data` draw the same noise in dpjax, and
    have the same name.

    Args:
      key: the run's typed key.

    Returns:
      16 hexadecimal digits.

    Raises:
      ValueError: key is not a typed key.

    Privacy: anyone who has the name, or the released parameters, can check whether a
    guess of the key is right. A key of `dpjax.random_key` is infeasible to guess.

    Example:
      >>> import jax
      >>> run_name(jax.random.key(0)) == run_name(jax.random.key(1))
      False
    """
    validate.typed_key("key", key)
    bits = np.asarray(jax.random.key_data(key)).tobytes()
    # The generator is part of the name, since other generators draw other noise.
    kind = f"dpjax run {keys.generator_name(key)} ".encode()
    return hashlib.sha256(kind + bits).hexdigest()[:16]


def release(path: Path, plan: Plan, run: Run, *, repeated: bool = False) -> Run:
    """Record the release of a run's parameters, before the parameters are used.

    Save the run by `dpjax.checkpoint.save` before the release, so that a resumed run
    repeats no released step. After resuming the run, call `release` again, since the
    saved run lacks the digest of the release. If the ledger already has this run's
    release of the same parameters at the same step, `release` adds no entry.

    Args:
      path: the ledger's file, one for all releases from one data set. The function
        creates a missing file.
      plan: the run's plan.
      run: the run after `run.step` steps, at least 1, whose parameters are released.
      repeated: whether to record the release even if an earlier release with the run's
        key may have used the same noise. If such an earlier release exists, the
        ledger's ε is infinite from then on.

    Returns:
      The run, with the digest of the released parameters in `released`. Use the
      parameters only after `release` has returned.

    Raises:
      ValueError: run.step is below 1 or above the number of steps of the plan; the
        processes have different runs; the ledger is damaged, or has another adjacency
        or unit; or `repeated` is false, and an earlier release may have used the same
        noise. The last error is raised if the ledger's last release with the run's key
        has another plan, other random draws, at least run.step steps, or a digest other
        than run.released. A release that the ledger already has raises no error.
        `release` cannot check that the data are the same.
      OSError: the entry could not be written. Do not use the parameters then.

    Privacy: the entry contains a digest of the parameters, the plan's event, and the
    run's name from `run_name`.

    Example:
      >>> import dpjax, jax.numpy as jnp, optax, pathlib, tempfile
      >>> plan = dpjax.plan(num_examples=100, batch_size=10, num_steps=10, delta=1e-3,
      ...                   noise_multiplier=1.0, clip_norm=1.0, sampling="fixed",
      ...                   adjacency=dpjax.Adjacency.REPLACE)
      >>> key, w = dpjax.random_key(), jnp.zeros(3)
      >>> state = plan.optimizer(optax.sgd(0.1), key=key).init(w)
      >>> run = dpjax.checkpoint.Run(key, 4, w, state)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "ledger.jsonl")
      ...     run = release(path, plan, run)
      ...     run = release(path, plan, run)  # the same parameters again
      ...     print(len(dpjax.ledger.read(path).entries))
      1
    """
    step = validate.static_int("run.step", run.step, minimum=1)
    validate.at_most("run.step", step, plan.num_steps, "the plan's num_steps, ")
    validate.flag("repeated", repeated)
    name, of_plan = run_name(run.key), fingerprint(plan, run.key)
    params = digest(run.params)
    check_equal_across_processes(
        {"key": name, "plan": of_plan, "step": step, "params": params}
    )

    def make(entries: list[Entry]) -> Release | None:
        past = [x for x in entries if isinstance(x, Release) and x.run == name]
        if any((x.plan, x.stop, x.released) == (of_plan, step, params) for x in past):
            return None  # the same release again
        # The ledger is locked during this check, so that no other process can add an
        # entry between the check and the new line.
        wrong = _find_conflict(past, of_plan, step, run.released)
        if wrong and not repeated:
            raise ValueError(
                f"run must not be released: {wrong}. The same noise would hide two "
                "sums, whose difference has no noise. The release would have been "
                f"line {len(entries) + 1} of {path}."
            )
        _check_same_adjacency(entries, plan.adjacency, plan.unit)
        return Release(
            run=name,
            plan=of_plan,
            event=plan.guarantee.event,
            so_far=plan.guarantee.at(step).event,
            start=past[-1].stop if past and not wrong else 0,
            stop=step,
            epsilon=plan.epsilon,
            delta=plan.delta,
            adjacency=plan.adjacency,
            unit=plan.unit,
            released=params,
            repeated=bool(wrong),
            time=now(),
        )

    _append(path, make)
    return run._replace(released=params)


def end(path: Path, key: Key, why: str) -> None:
    """Record that a run ended early, for a reason independent of the run's results.

    A run may stop because its results look good, and the number of steps then depends
    on the results. So from a run's first entry on, the ledger counts the cost of all
    steps of the run's plan. After `end`, the ledger counts only the cost of the steps
    up to the run's last release. If the run makes a further release, the ledger counts
    all steps again.

    Args:
      path: the ledger's file.
      key: the run's key.
      why: the reason, such as the loss of the machine. Good or bad results are no valid
        reason.

    Raises:
      ValueError: the ledger has no release with this key, or is damaged; why is blank.
      OSError: the entry could not be written.

    Example:
      >>> import dpjax, jax.numpy as jnp, optax, pathlib, tempfile
      >>> plan = dpjax.plan(num_examples=100, batch_size=50, num_steps=10, delta=1e-3,
      ...                   noise_multiplier=1.0, clip_norm=1.0, sampling="fixed",
      ...                   adjacency=dpjax.Adjacency.REPLACE)
      >>> key, w = dpjax.random_key(), jnp.zeros(3)
      >>> state = plan.optimizer(optax.sgd(0.1), key=key).init(w)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "ledger.jsonl")
      ...     _ = release(path, plan, dpjax.checkpoint.Run(key, 4, w, state))
      ...     whole = dpjax.ledger.read(path).epsilon(1e-3)
      ...     end(path, key, "the machine was sold")
      ...     dpjax.ledger.read(path).epsilon(1e-3) < whole
      True
    """
    name = run_name(key)
    if not why.strip():
        raise ValueError(
            f"why must be a non-empty text that says why the run ended; got {why!r}."
        )

    def make(entries: list[Entry]) -> End:
        past = [x for x in entries if isinstance(x, Release) and x.run == name]
        if not past:
            raise ValueError(f"key must be the key of a run in {path}; got {name}.")
        last = max(past, key=lambda x: x.stop)
        return End(name, last.so_far, last.stop, why, now())

    _append(path, make)


def other(
    path: Path,
    what: str,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    unit: str = "example",
) -> None:
    """Record a release that has no plan, such as a statistic or a solver's result.

    Args:
      path: the ledger's file.
      what: a description of the release, in words.
      epsilon: the ε of the release, at least 0 and finite.
      delta: the δ for which epsilon holds, in [0, 1).
      adjacency: the adjacency for which epsilon holds, equal to that of the ledger.
      unit: the unit of privacy for which epsilon holds, equal to that of the ledger.

    Raises:
      ValueError: a number is out of range; `what` is blank; unit is unknown; the ledger
        has another adjacency or unit, or is damaged.
      OSError: the entry could not be written. Do not release the value then.

    Example:
      >>> import dpjax, pathlib, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "ledger.jsonl")
      ...     other(path, "a histogram", epsilon=0.5, delta=0.0,
      ...           adjacency=dpjax.Adjacency.ADD_REMOVE)
      ...     print(dpjax.ledger.read(path).epsilon(1e-6))
      0.5
    """
    validate.nonnegative("epsilon", epsilon)
    validate.one_of("unit", unit, ("example", "user"))
    validate.half_open_unit("delta", delta)
    if not what.strip():
        raise ValueError(
            f"what must be a non-empty text that says what is released; got {what!r}."
        )
    neighbours = validate.adjacency(adjacency)

    def make(entries: list[Entry]) -> Other:
        _check_same_adjacency(entries, neighbours, unit)
        event = EpsilonDelta(float(epsilon), float(delta))
        return Other(what, event, neighbours, unit, now())

    _append(path, make)


def _append(path: Path, make: Callable[[list[Entry]], Entry | None]) -> None:
    """Append an entry to a ledger's file.

    `make` maps the existing entries to the new entry, or to None for no new entry. The
    file is locked while `make` runs, where `fcntl` exists. If JAX runs in several
    processes, only the first process appends.
    """

    def line(lines: list[_chain.Line]) -> _chain.Line | None:
        return to_plain(make([entry_of(x, path) for x in lines]))

    on_primary_process(lambda: _chain.append(pathlib.Path(path), line))


def _find_conflict(past: list[Release], of_plan: str, step: int, before: str) -> str:
    """Return the reason why a run's parameters must not be released; "" for no reason.

    A run that has released parameters must continue from its last release.

    Args:
      past: the ledger's earlier releases with the run's key.
      of_plan: the fingerprint of the run's plan and random draws.
      step: the number of completed steps of the run.
      before: the digest of the parameters that the run released last.
    """
    if not past:
        return ""
    # Each release was compared with the one before it, so the last one suffices.
    last = past[-1]
    if last.plan != of_plan:
        return "its key belongs to a run with another plan or with other draws"
    if last.stop >= step:
        return (
            f"its key has already released {last.stop} steps, and either no "
            f"parameters or other parameters after step {step}"
        )
    if last.released != before:
        return (
            f"its key has already released parameters after step {last.stop}, and "
            "this run did not release these parameters. If the run was resumed from "
            f"an earlier step, release it again when it reaches step {last.stop}"
        )
    return ""


def _check_same_adjacency(
    entries: list[Entry], adjacency: Adjacency, unit: str
) -> None:
    """Raise a ValueError if a ledger's entries have another adjacency or unit.

    Costs for different neighbouring relations do not compose.
    """
    for x in entries:
        if not isinstance(x, End) and (x.adjacency, x.unit) != (adjacency, unit):
            raise ValueError(
                f"adjacency and unit must be those of the ledger, {x.adjacency.name} "
                f"and {x.unit!r}; got {adjacency.name} and {unit!r}."
            )
