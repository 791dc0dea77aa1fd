"""Checkpoints of a run: one folder each, in the folder of the run.

The folder of step 7 is `7.unfinished` while it is written and while it is removed, and
`7` only while it is whole. So `save` removes folders such as `7.unfinished`, and a
folder `7` only if it is a checkpoint of this run; everything else stays.
"""

import os
import pathlib
import shutil
from typing import Any

from dpjax._core import validate
from dpjax._plan import Plan
from dpjax._plan.parameters import RunParameters
from dpjax.checkpoint import _durable
from dpjax.checkpoint._arrays import read_arrays, write_arrays
from dpjax.checkpoint._processes import (
    check_equal_across_processes,
    everywhere,
    on_primary_process,
    told,
)
from dpjax.checkpoint._record import (
    check,
    decode_record,
    encode_record,
    make_record,
    refuse_another,
    tree_of,
)
from dpjax.checkpoint._run import Run, digest

_RECORD, _ARRAYS, _UNFINISHED = "record.json", "arrays", ".unfinished"
Folder = str | os.PathLike[str]


def save(
    folder: Folder, plan: Plan, run: Run, *, data: str = "", keep: int = 2
) -> None:
    """Keep a run as it stands, so that nothing less than all of it is ever restored.

    Of several processes all call it, and each writes its own pieces of the arrays.

    Args:
      folder: where this run's checkpoints are, and no other's: on a local or mounted
        disk, the same for all processes. It is made for its owner alone.
      plan: the run's.
      run: what is kept, under the number of its step. Where that step is kept already
        with the same bits, nothing is done, nor where a later one is kept: a run that
        went back is compared when it gets there.
      data: a name for the data set as it is now, such as a digest of it. It is compared
        on restoring, and stays in the checkpoint.
      keep: how many of the newest checkpoints stay, at least 1. An older one is of use
        for going back alone, and holds the key. A folder that holds other names than
        those of `save` is never removed, nor is an older checkpoint that is damaged.

    Raises:
      ValueError: the folder is of another run, or holds other bits for this step: the
        run was resumed from before it and went another way. Or the folder's newest
        checkpoint is damaged, or something that `save` did not write is where the
        checkpoint would go. Or the arguments are of other types, or not the same in all
        processes.
      OSError: the disk is full, or the like. The checkpoints before stay what they are.
        Where one process of several cannot write, the others raise it five minutes
        later, when orbax has waited for it: start them all again.
      ImportError: orbax is not installed.

    Privacy: none. The files hold the key, the noise's memory, and sums without noise.

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
    check(plan, run)
    keep = validate.static_int("keep", keep, minimum=1)
    folder = pathlib.Path(folder).absolute()
    name = digest(run.key)
    on_primary_process(lambda: _refuse_another(folder, plan, run, data, name))
    found = make_record(plan, run, data)
    check_equal_across_processes(found | {"time": ""})
    if on_primary_process(lambda: _is_kept(folder, run.step, found["arrays"])):
        return
    _write(folder, run.step, tree_of(run), found)
    on_primary_process(lambda: _clear(folder, steps(folder)[-keep:], name))


def restore(
    folder: Folder, plan: Plan, like: Run, *, step: int | None = None, data: str = ""
) -> Run:
    """A run as it was kept, bit for bit.

    Args:
      folder: the run's.
      plan: the run's. It must be the same to the last digit: where it was solved for
        something, `plan_of` has it.
      like: a run of the same structure, as it begins, whose arrays lie as those that
        are restored shall lie, on a mesh of any shape. Its leaves that are no numbers
        are taken over.
      step: which checkpoint; the newest if None. What was released since an older one
        must be repeated exactly, or the noise has been used twice.
      data: what `save` was given.

    Returns:
      The `Run`. Go on at `plan.batches(data, key=run.key, start=run.step)`.

    Raises:
      ValueError: nothing is kept, or of another plan, another size of the data set,
        other arrays, or with draws that differ here (another generator, or other
        versions), and it says which; or the checkpoint is damaged, or its folder was
        renamed.
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
    check(plan, like)
    folder = pathlib.Path(folder).absolute()
    step = on_primary_process(lambda: _choose_step(folder, step))
    found = everywhere(lambda: _read(folder, step))
    everywhere(lambda: refuse_another(folder, found, plan, like, data))
    restored = read_arrays(folder / str(step) / _ARRAYS, tree_of(like))
    if set(told(digest(restored))) != {found["arrays"]}:
        raise ValueError(
            f"the checkpoint {folder / str(step)} is damaged: its arrays are not those "
            "that were saved."
        )
    return Run(step=step, released=found["released"], **restored)


def resume(
    folder: Folder, plan: Plan, run: Run, *, data: str = "", keep: int = 2
) -> Run:
    """The newest checkpoint of a run, or its beginning, which is kept first.

    So the key is on the disk before anything is drawn from it. Call it at the head of a
    program that is started as often as it takes.

    Args:
      folder: as for `save`.
      plan: as for `restore`.
      run: the run as it would begin, with a new key.
      data: as for `save`.
      keep: as for `save`.

    Returns:
      What `restore` gives if the folder holds a checkpoint, or run.

    Raises:
      ValueError: as `restore` and `save`.
      OSError: as `save`.
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
    """The steps of which a folder holds a checkpoint, the newest last.

    It looks at names alone: `restore` finds out whether a checkpoint is damaged.

    Args:
      folder: a run's; it need not exist.

    Returns:
      Numbers of steps that were done.

    Example:
      >>> steps("nothing/here")
      ()
    """
    found = pathlib.Path(folder).glob(f"*/{_RECORD}")
    names = [path.parent.name for path in found]
    return tuple(sorted(int(x) for x in names if _is_step(x)))


def plan_of(folder: Folder) -> Plan:
    """The plan that a folder's run was begun with, to the last digit.

    A noise multiplier that was solved for may have other last digits on another
    machine.

    Args:
      folder: the run's.

    Returns:
      A `Plan`.

    Raises:
      ValueError: the folder holds no checkpoint, or its newest one is damaged or was
        renamed.

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
    kept = steps(folder)
    if not kept:
        raise ValueError(f"folder must hold a checkpoint; {folder} holds none.")
    return Plan.of(
        RunParameters.from_dict(_read(pathlib.Path(folder), kept[-1])["plan"])
    )


def _read(folder: pathlib.Path, step: int) -> dict[str, Any]:
    where = folder / str(step)
    return decode_record((where / _RECORD).read_bytes(), step, where)


def _refuse_another(
    folder: pathlib.Path, plan: Plan, run: Run, data: str, key: str
) -> None:
    """Refuse what is not the run that a folder is of, if it is of any."""
    kept = steps(folder)
    if not kept:
        return
    newest = _read(folder, kept[-1])
    refuse_another(folder, newest, plan, run, data)
    if newest["key"] != key:
        raise ValueError(
            f"run must be the one that {folder} is of; it has another key. Give each "
            "run a folder of its own."
        )


def _is_kept(folder: pathlib.Path, step: int, bits: str) -> bool:
    """Whether there is nothing to keep of a step, nor something else is kept of it."""
    kept = steps(folder)
    if step not in kept:
        # On the way to what is kept, where it will be compared.
        return bool(kept) and step < kept[-1]
    if _read(folder, step)["arrays"] != bits:
        raise ValueError(
            f"run is another one than what {folder} keeps of step {step}: it was "
            "resumed from before it, and something has changed since. The same noise "
            "has hidden both, so that at most one of them may be released. To branch "
            "off, start a run with a key of its own in another folder."
        )
    return True


def _choose_step(folder: pathlib.Path, step: int | None) -> int:
    """This step, or the newest that is kept."""
    kept = steps(folder)
    if not kept or (step is not None and step not in kept):
        raise ValueError(
            f"folder must hold a checkpoint{'' if step is None else f' of step {step}'}"
            f"; {folder} holds {list(kept)}."
        )
    return kept[-1] if step is None else int(step)


def _is_step(name: str) -> bool:
    """Whether a name is a step as `save` writes it: digits, without a leading zero."""
    return name.isdecimal() and name == str(int(name))


def _write(folder: pathlib.Path, step: int, tree: Any, found: dict[str, Any]) -> None:
    """The arrays and the record, which become a checkpoint by one change of name."""
    target = _unfinished(folder, step)
    on_primary_process(lambda: _make_room(folder, step))
    write_arrays(target / _ARRAYS, tree)
    everywhere(lambda: _durable.sync_all(target))
    on_primary_process(lambda: _finish(folder, step, found))


def _unfinished(folder: pathlib.Path, step: int) -> pathlib.Path:
    return folder / f"{step}{_UNFINISHED}"


def _make_room(folder: pathlib.Path, step: int) -> None:
    """An empty folder in the run's, for their owner alone."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    _durable.sync(folder.parent)
    target = _unfinished(folder, step)
    for path in (folder / str(step), target):
        if os.path.lexists(path) and not (path == target and _is_ours(path)):
            raise ValueError(
                f"folder must be for the checkpoints of one run alone; {path} is there "
                "and was not written by save. Move it elsewhere."
            )
    if target.exists():
        shutil.rmtree(target)  # of a process that was killed meanwhile
    os.makedirs(target, mode=0o700)


def _is_ours(path: pathlib.Path) -> bool:
    """Whether a folder holds nothing but names that `save` and orbax give."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(
        x.name in (_ARRAYS, _RECORD, f"{_RECORD}.new")
        # The name of arrays that orbax has not finished.
        or x.name.startswith(f"{_ARRAYS}.orbax-checkpoint-tmp")
        for x in path.iterdir()
    )


def _finish(folder: pathlib.Path, step: int, found: dict[str, Any]) -> None:
    """Write the record, and give the folder the name of a checkpoint."""
    target = _unfinished(folder, step)
    _durable.write(target / _RECORD, encode_record(found))
    os.rename(target, folder / str(step))
    _durable.sync(folder)


def _clear(folder: pathlib.Path, kept: tuple[int, ...], key: str) -> None:
    """Remove older checkpoints of the run, and what killed processes left."""
    for path in list(folder.glob(f"*{_UNFINISHED}")):
        if _is_step(path.stem) and _is_ours(path):
            shutil.rmtree(path)
    for step in steps(folder):
        path, target = folder / str(step), _unfinished(folder, step)
        if step in kept or os.path.lexists(target) or not _is_of(path, step, key):
            continue
        os.rename(path, target)
        _durable.sync(folder)
        shutil.rmtree(target)


def _is_of(path: pathlib.Path, step: int, key: str) -> bool:
    """Whether a folder is a checkpoint of this step and key, and nothing besides."""
    try:
        return _is_ours(path) and _read(path.parent, step)["key"] == key
    except ValueError:  # it is damaged
        return False
