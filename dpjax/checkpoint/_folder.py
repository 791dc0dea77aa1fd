"""Checkpoints of a run: one folder for each checkpoint, in the folder of the run.

The folder of step 7 has the name `7.unfinished` while `save` writes or removes it, and
the name `7` only while it is complete. `save` removes a folder such as `7.unfinished`
if all names in the folder are names that `save` uses. `save` removes a folder `7` only
if that folder is a checkpoint of this run. `save` removes nothing else.
"""

import os
import pathlib
import shutil
from typing import Any

from dpjax._core import validate
from dpjax._core.plain import to_plain
from dpjax._plan.plan import Plan
from dpjax.checkpoint import _record as rec
from dpjax.checkpoint._disk import read_arrays, sync, sync_all, write, write_arrays
from dpjax.checkpoint._processes import (
    check_equal_across_processes,
    everywhere,
    gather_values,
    on_primary_process,
)
from dpjax.checkpoint._record import Record, Run, digest

_RECORD, _ARRAYS, _UNFINISHED = "record.json", "arrays", ".unfinished"
Folder = str | os.PathLike[str]


def save(
    folder: Folder, plan: Plan, run: Run, *, data: str = "", keep: int = 2
) -> None:
    """Save a checkpoint of a run atomically: a partial checkpoint is never restored.

    With several processes, all of them call `save`, and each writes its own shards of
    the arrays.

    Args:
      folder: the folder for the checkpoints of this run and of no other run, on a local
        or mounted disk that all processes share. `save` creates the folder if it does
        not exist. Only the owner of a checkpoint can access its files.
      plan: the run's plan.
      run: the run, which `save` stores under the number of its step. In two cases,
        `save` writes nothing. In the first case, the folder has a checkpoint of this
        step whose arrays have the same bits. In the second case, the folder has a
        checkpoint of a later step, but no checkpoint of this step. The run was then
        resumed from an older checkpoint, and `save` compares the run with the later
        checkpoint when the run reaches the later step.
      data: a name for the current content of the data set, such as its digest. `save`
        stores this name, and `restore` compares it.
      keep: the number of newest checkpoints that `save` retains, at least 1. Every
        checkpoint contains the key, and only the newest checkpoint is needed to resume
        the run. `save` never removes a checkpoint whose record is damaged, nor a folder
        that contains names that `save` does not use.

    Raises:
      ValueError: the folder belongs to a run with another key, plan, name of the data
        set, structure of arrays or random draws; the folder has a checkpoint of this
        step whose arrays have other bits, because the run was resumed from an earlier
        step and continued differently; the folder's newest checkpoint, or the
        checkpoint of this step, has a damaged record; a file or folder that `save` did
        not write has the name of the checkpoint; or an argument has the wrong type, is
        out of range, or differs between processes.
      OSError: the disk is full or fails. Earlier checkpoints remain intact. If one of
        several processes cannot write, the others raise OSError five minutes later,
        after a timeout of orbax. Then restart all processes.
      ImportError: orbax is not installed.

    Privacy: a checkpoint is not private. The files contain the key, the state of
    correlated noise, and sums without noise. Do not release them.

    Example:
      >>> import dpjax, jax.numpy as jnp, optax, tempfile
      >>> plan = dpjax.plan(num_examples=100, batch_size=10, num_steps=10, delta=1e-3,
      ...                   noise_multiplier=1.0, clip_norm=1.0, sampling="fixed",
      ...                   adjacency=dpjax.Adjacency.REPLACE)
      >>> key, w = dpjax.random_key(), jnp.zeros(3)
      >>> run = Run(key, 0, w, plan.optimizer(optax.sgd(0.1), key=key).init(w))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save(folder, plan, run)
      ...     steps(folder)
      (0,)
    """
    rec.check(plan, run)
    keep = validate.static_int("keep", keep, minimum=1)
    folder = pathlib.Path(folder).absolute()
    # The record includes a digest of all arrays, which every process computes.
    record = rec.make_record(plan, run, data)
    # The comparison leaves out the time, since each process has its own clock.
    check_equal_across_processes(to_plain(record) | {"time": ""})
    if on_primary_process(lambda: _needs_no_save(folder, plan, run, record)):
        return
    _write(folder, rec.tree_of(run), record)
    on_primary_process(lambda: _clear(folder, steps(folder)[-keep:], record.key))


def restore(
    folder: Folder, plan: Plan, like: Run, *, step: int | None = None, data: str = ""
) -> Run:
    """Restore a run as it was saved, bit for bit.

    Args:
      folder: the folder of the run's checkpoints.
      plan: the run's plan. All of its attributes except `epsilon`, `solved_for` and
        `comparison` must equal the saved ones exactly. If `dpjax.plan` solved for a
        number, use `plan_of`, which returns the saved plan.
      like: a run of the same structure at its beginning. The restored arrays have the
        sharding of the arrays in `like`, on a mesh of any shape. Leaves that are not
        numeric come from `like`.
      step: the step of the checkpoint to restore; None for the newest. After restoring
        an older checkpoint, you must repeat all later releases exactly. Otherwise, two
        different releases have the same noise.
      data: the name of the data set that you passed to `save`.

    Returns:
      The `Run`. Continue with `plan.batches(examples, key=run.key, start=run.step)`,
      where examples is the data set itself.

    Raises:
      ValueError: the folder has no such checkpoint; the checkpoint is damaged, or its
        folder was renamed; or the checkpoint has another plan, another name of the data
        set, arrays of other shapes or dtypes than `like`, or random draws that differ
        in this environment (another generator, or other versions), and the message
        names the differences; or an argument has the wrong type or is out of range.
      OSError: the disk fails. The checkpoint may be intact.
      ImportError: orbax is not installed.

    Example:
      >>> import dpjax, jax.numpy as jnp, optax, tempfile
      >>> plan = dpjax.plan(num_examples=100, batch_size=10, num_steps=10, delta=1e-3,
      ...                   noise_multiplier=1.0, clip_norm=1.0, sampling="fixed",
      ...                   adjacency=dpjax.Adjacency.REPLACE)
      >>> def begin():
      ...     key, w = dpjax.random_key(), jnp.zeros(3)
      ...     return Run(key, 0, w, plan.optimizer(optax.sgd(0.1), key=key).init(w))
      >>> run = begin()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save(folder, plan, run)
      ...     found = restore(folder, plan, begin())
      >>> bool(found.key == run.key)
      True
    """
    rec.check(plan, like)
    folder = pathlib.Path(folder).absolute()
    step = on_primary_process(lambda: _choose_step(folder, step))
    record = everywhere(lambda: _read(folder, step))
    everywhere(lambda: rec.refuse_another(folder, record, plan, like, data))
    restored = read_arrays(folder / str(step) / _ARRAYS, rec.tree_of(like))
    # The digest depends on the values, and not on the sharding.
    if set(gather_values(digest(restored))) != {record.arrays}:
        raise ValueError(
            f"the checkpoint {folder / str(step)} is damaged: its arrays differ from "
            "the arrays that were saved."
        )
    return Run(step=step, released=record.released, **restored)


def resume(
    folder: Folder, plan: Plan, run: Run, *, data: str = "", keep: int = 2
) -> Run:
    """Restore the newest checkpoint of a run, or save a new run at its beginning.

    Call `resume` at the start of the program. The key is then on the disk before any
    draw from the key, and you may restart the program any number of times.

    Args:
      folder: as for `save`.
      plan: as for `restore`.
      run: the run at its beginning, with a new key.
      data: as for `save`.
      keep: as for `save`.

    Returns:
      The run that `restore` returns, if the folder has a checkpoint; otherwise `run`.

    Raises:
      ValueError: as for `restore` and `save`.
      OSError: as for `restore` and `save`.
      ImportError: orbax is not installed.

    Example:
      >>> import dpjax, jax.numpy as jnp, optax, tempfile
      >>> plan = dpjax.plan(num_examples=100, batch_size=10, num_steps=10, delta=1e-3,
      ...                   noise_multiplier=1.0, clip_norm=1.0, sampling="fixed",
      ...                   adjacency=dpjax.Adjacency.REPLACE)
      >>> def begin():
      ...     key, w = dpjax.random_key(), jnp.zeros(3)
      ...     return Run(key, 0, w, plan.optimizer(optax.sgd(0.1), key=key).init(w))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     first = resume(folder, plan, begin())
      ...     again = resume(folder, plan, begin())
      >>> bool(first.key == again.key)
      True
    """
    if on_primary_process(lambda: bool(steps(folder))):
        return restore(folder, plan, run, data=data)
    save(folder, plan, run, data=data, keep=keep)
    return run


def steps(folder: Folder) -> tuple[int, ...]:
    """The steps for which a folder has a checkpoint, in ascending order.

    `steps` reads only names. `restore` detects whether a checkpoint is damaged.

    Args:
      folder: the folder of a run's checkpoints; the folder need not exist.

    Returns:
      The number of completed steps of each checkpoint.

    Example:
      >>> steps("nothing/here")
      ()
    """
    names = [path.parent.name for path in pathlib.Path(folder).glob(f"*/{_RECORD}")]
    return tuple(sorted(int(x) for x in names if _is_step(x)))


def plan_of(folder: Folder) -> Plan:
    """Return the plan of the run whose checkpoints are in a folder, exactly as saved.

    If `dpjax.plan` solves for the noise multiplier, the last digits of the result may
    differ between machines. The saved plan has the digits of the original run.

    Args:
      folder: the folder of the run's checkpoints.

    Returns:
      A `Plan`.

    Raises:
      ValueError: the folder has no checkpoint, or the newest checkpoint is damaged or
        was renamed.

    Example:
      >>> import dpjax, jax.numpy as jnp, optax, tempfile
      >>> plan = dpjax.plan(num_examples=100, batch_size=10, num_steps=10, delta=1e-3,
      ...                   noise_multiplier=1.0, clip_norm=1.0, sampling="fixed",
      ...                   adjacency=dpjax.Adjacency.REPLACE)
      >>> key, w = dpjax.random_key(), jnp.zeros(3)
      >>> run = Run(key, 0, w, plan.optimizer(optax.sgd(0.1), key=key).init(w))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save(folder, plan, run)
      ...     plan_of(folder) == plan
      True
    """
    folder = pathlib.Path(folder)
    return Plan.of(_read(folder, _choose_step(folder, None)).plan)


def _read(folder: pathlib.Path, step: int) -> Record:
    """Read and verify the record of a step.

    Raises:
      ValueError: the record is damaged, has another format, or is of another step.
    """
    where = folder / str(step)
    content = (where / _RECORD).read_bytes()
    try:
        return rec.decode_record(content, step)
    # A damaged file may contain deeply nested JSON, which raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the checkpoint {where} is damaged or was changed: {error}"
        ) from error


def _needs_no_save(folder: pathlib.Path, plan: Plan, run: Run, record: Record) -> bool:
    """Whether `save` need not write the checkpoint of a run with the given record.

    The checkpoint is not needed if the folder has a checkpoint of the same step or of a
    later step.

    Raises:
      ValueError: the folder belongs to another run, plan or data set; the folder has a
        checkpoint of this step whose arrays have another digest; or the record of the
        newest checkpoint, or of this step, is damaged.
    """
    saved = steps(folder)
    if not saved:
        return False
    newest = _read(folder, saved[-1])
    rec.refuse_another(folder, newest, plan, run, record.data)
    if newest.key != record.key:
        raise ValueError(
            f"run must be the run whose checkpoints are in {folder}, but its key "
            "differs. Use a separate folder for each run."
        )
    if run.step not in saved:
        # A run that was resumed at an earlier step is compared at the next saved step.
        return run.step < saved[-1]
    if _read(folder, run.step).arrays != record.arrays:
        raise ValueError(
            f"run must be the run of which {folder} contains step {run.step}, but its "
            "arrays differ from the saved arrays. The run was resumed from an "
            "earlier step, and something has changed since then. Both runs used the "
            "same noise, so at most one of them may be released. To continue from an "
            "earlier step in another way, start a run with a new key in another "
            "folder."
        )
    return True


def _choose_step(folder: pathlib.Path, step: int | None) -> int:
    """Return the step of a checkpoint in the folder: `step`, or the newest for None.

    Raises:
      ValueError: the folder has no such checkpoint.
    """
    saved = steps(folder)
    if not saved or (step is not None and step not in saved):
        raise ValueError(
            "folder must contain a "
            f"checkpoint{'' if step is None else f' of step {step}'}; {folder} "
            f"contains checkpoints of the steps {list(saved)}."
        )
    return saved[-1] if step is None else int(step)


def _is_step(name: str) -> bool:
    """Whether a name is a step number as `save` writes it, without a leading zero."""
    return name.isdecimal() and name == str(int(name))


def _write(folder: pathlib.Path, tree: Any, record: Record) -> None:
    """Write a checkpoint: the arrays of a tree, and the record of a run.

    The files are written to a temporary folder. When all files are on the disk, the
    folder gets the name of a complete checkpoint.
    """
    final = folder / str(record.step)
    target = folder / f"{record.step}{_UNFINISHED}"

    def finish() -> None:
        # The record is written last, and the rename is atomic: a folder with the name
        # of a checkpoint is always complete.
        write(target / _RECORD, rec.encode_record(record))
        os.rename(target, final)
        sync(folder)

    on_primary_process(lambda: _make_folders(final, target))
    write_arrays(target / _ARRAYS, tree)
    # Sync all arrays to the disk before the record that makes them a checkpoint.
    everywhere(lambda: sync_all(target))
    on_primary_process(finish)


def _make_folders(final: pathlib.Path, target: pathlib.Path) -> None:
    """Create the run's folder and an empty temporary folder, for the owner alone.

    Args:
      final: the path of the checkpoint that `save` writes.
      target: the path of the temporary folder.

    Raises:
      ValueError: `final` exists; or `target` exists, and `_is_ours(target)` is false.
    """
    # The files hold the run's key: mode 0700 excludes other users.
    os.makedirs(final.parent, mode=0o700, exist_ok=True)
    sync(final.parent.parent)
    for path in (final, target):
        if os.path.lexists(path) and not (path == target and _is_ours(path)):
            raise ValueError(
                "folder must contain only the checkpoints of one run, but save did "
                f"not write {path}. Move {path} elsewhere."
            )
    if target.exists():
        shutil.rmtree(target)  # left by a process that was killed while it wrote
    os.makedirs(target, mode=0o700)


def _is_ours(path: pathlib.Path) -> bool:
    """Whether a folder contains only names that `save` and orbax use."""
    # `save` makes folders and never symbolic links to folders.
    if path.is_symlink() or not path.is_dir():
        return False
    return all(
        x.name in (_ARRAYS, _RECORD, f"{_RECORD}.new")
        # Orbax uses this temporary name until all arrays are written.
        or x.name.startswith(f"{_ARRAYS}.orbax-checkpoint-tmp")
        for x in path.iterdir()
    )


def _clear(folder: pathlib.Path, saved: tuple[int, ...], key: str) -> None:
    """Remove unfinished folders, and a run's checkpoints of steps not in `saved`.

    `key` is the digest of the run's key. Folders for which `_is_ours` is false, and
    checkpoints with a damaged record, remain.
    """
    for path in list(folder.glob(f"*{_UNFINISHED}")):
        if _is_step(path.stem) and _is_ours(path):
            shutil.rmtree(path)
    for step in steps(folder):
        path, target = folder / str(step), folder / f"{step}{_UNFINISHED}"
        if step in saved or os.path.lexists(target) or not _is_of(path, step, key):
            continue
        # Rename first: a partly removed folder must not have the name of a checkpoint.
        os.rename(path, target)
        sync(folder)
        shutil.rmtree(target)


def _is_of(path: pathlib.Path, step: int, key: str) -> bool:
    """Whether a folder seems to be an intact checkpoint of a run at a given step.

    `key` is the digest of the run's key. The function checks the record and the names
    in the folder, but not the arrays.
    """
    try:
        return _is_ours(path) and _read(path.parent, step).key == key
    except ValueError:  # the checkpoint is damaged, and is left for the user
        return False
