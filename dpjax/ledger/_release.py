"""Record releases in a ledger, and check each new entry against earlier entries."""

import hashlib
import pathlib
from collections.abc import Callable

import jax
import numpy as np

from dpjax._core import keys, validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.plain import to_plain
from dpjax._core.typing import Key
from dpjax._plan.plan import Plan
from dpjax.accounting.events import EpsilonDelta
from dpjax.checkpoint import Run, digest
from dpjax.checkpoint._fingerprint import fingerprint
from dpjax.checkpoint._processes import check_equal_across_processes, on_primary_process
from dpjax.checkpoint._record import now
from dpjax.ledger import _chain
from dpjax.ledger._chain import Line
from dpjax.ledger._entries import End, Entry, Other, Path, Release, entry_of


def run_name(key: Key) -> str:
    """A run's name in a ledger, which is 64 bits of a hash of the run's key.

    Runs with the same key draw the same noise, and therefore count as one run, even if
    they differ in everything else. Keys of `rbg` and `unsafe_rbg` with equal data draw
    the same noise in dpjax, and have the same name.

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

    Save the run by `dpjax.checkpoint.save` first, so that you never have to repeat the
    run's steps. After resuming the run, call `release` again. If the parameters are the
    same as before, they are the same release, and `release` adds no entry.

    Args:
      path: the ledger's file, one for all releases from one data set. The function
        creates a missing file.
      plan: the run's plan.
      run: the run after `run.step` steps, at least 1, whose parameters are released.
      repeated: whether to record the release even if another release has used the same
        noise. From then on, the ledger's ε is infinite.

    Returns:
      The run, with the digest of the released parameters in `released`. Use the
      parameters only after `release` has returned.

    Raises:
      ValueError: the run's key has released other parameters for these steps; the run
        continued from an earlier release with another plan or other random draws; or
        the ledger has another adjacency or unit, or is damaged. The ledger cannot check
        that the data are the same.
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
    found = digest(run.params)
    check_equal_across_processes(
        {"key": name, "plan": of_plan, "step": step, "params": found}
    )

    def make(entries: list[Entry]) -> Release | None:
        own = [x for x in entries if isinstance(x, Release) and x.run == name]
        if any((x.plan, x.stop, x.released) == (of_plan, step, found) for x in own):
            return None  # the same release again
        # The ledger is locked during this check, so that no other process can add an
        # entry between the check and the new line.
        wrong = _find_conflict(own, of_plan, step, run.released)
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
            start=own[-1].stop if own and not wrong else 0,
            stop=step,
            epsilon=plan.epsilon,
            delta=plan.delta,
            adjacency=plan.adjacency,
            unit=plan.unit,
            released=found,
            repeated=bool(wrong),
            time=now(),
        )

    _append(path, make)
    return run._replace(released=found)


def end(path: Path, key: Key, why: str) -> None:
    """Record that a run ended early, for a reason independent of the run's results.

    From a run's first entry on, the ledger counts the cost of all steps of the run's
    plan. The reason is that a run may stop because its results look good, and the
    number of steps then depends on the results. After `end`, the ledger counts only the
    cost of the steps up to the run's last release.

    Args:
      path: the ledger's file.
      key: the run's key.
      why: the reason, such as the loss of the machine. Good or bad results are no valid
        reason.

    Raises:
      ValueError: the ledger has no such run, or is damaged; why is blank.
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
        own = [x for x in entries if isinstance(x, Release) and x.run == name]
        if not own:
            raise ValueError(f"key must be the key of a run in {path}; got {name}.")
        last = max(own, key=lambda x: x.stop)
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
      epsilon: the ε of the release, at least 0.
      delta: the δ for which epsilon holds, in [0, 1).
      adjacency: the adjacency for which epsilon holds, equal to that of the ledger.
      unit: the unit of privacy for which epsilon holds, equal to that of the ledger.

    Raises:
      ValueError: a number is out of range; `what` is blank; the ledger has another
        adjacency or unit, or is damaged.
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

    `make` returns the new entry for the existing entries, or None for no new entry. The
    file is locked while `make` runs. Only the first of several processes appends.
    """

    def line(lines: list[Line]) -> Line | None:
        return to_plain(make([entry_of(x, path) for x in lines]))

    on_primary_process(lambda: _chain.append(pathlib.Path(path), line))


def _find_conflict(own: list[Release], of_plan: str, step: int, before: str) -> str:
    """Find the reason why a run's parameters must not be released; "" if none exists.

    A run that has released parameters must continue from its last release.

    Args:
      own: the ledger's earlier releases with the run's key.
      of_plan: the fingerprint of the run's plan and random draws.
      step: the number of completed steps of the run.
      before: the digest of the parameters that the run released last.
    """
    if not own:
        return ""
    # Each release was compared with the one before it, so the last one suffices.
    last = own[-1]
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
