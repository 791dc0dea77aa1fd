"""An interrupted run resumes bit for bit, or an error says why it cannot."""

import dataclasses
import gc
import hashlib
import itertools
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from killed_runs import DATA, SETTING, STEPS, N, initial_run, make_step, run_in_process

import dpjax
from dpjax import Adjacency, checkpoint, ledger, strategies
from dpjax._plan.comparison import Comparison
from dpjax.checkpoint import _disk, _folder, _record

KEY = jax.random.wrap_key_data(np.array([0, 11], np.uint32))


@pytest.fixture(scope="module")
def plan():
    return dpjax.plan(**SETTING)


@pytest.fixture(scope="module")
def step(plan):
    return make_step(plan)


@pytest.fixture(scope="module")
def uninterrupted_runs(plan, step):
    """The states of an uninterrupted run after each step."""
    runs = [initial_run(plan, KEY)]
    for _ in range(STEPS):
        runs.append(step(runs[-1]))
    return runs


def runs_equal(a, b):
    return checkpoint.digest(a._replace(released="")) == checkpoint.digest(
        b._replace(released="")
    )


# --- bit for bit


def test_restored_run_continues_bit_for_bit(plan, step, uninterrupted_runs, tmp_path):
    checkpoint.save(tmp_path, plan, uninterrupted_runs[3])
    run = checkpoint.restore(tmp_path, plan, initial_run(plan, jax.random.key(0)))
    assert runs_equal(run, uninterrupted_runs[3])
    while run.step < STEPS:
        run = step(run)
    assert runs_equal(run, uninterrupted_runs[STEPS])
    assert run.params["w"].dtype == jnp.float32
    assert type(run.opt_state) is type(uninterrupted_runs[0].opt_state)


PLANS = {
    "correlated": {
        "noise": "correlated",
        "strategy": strategies.rational([0.2, 0.4], [0.3, 0.9]),
    },
    "tree": {"noise": "correlated", "strategy": strategies.tree(0.8)},
    "quantile": {"clip_norm": dpjax.QuantileClip(0.6)},
    "schedule": {
        "noise_schedule": lambda t: 1.0 + (t > 3),
        "clip_schedule": lambda t: 1.0 + (t > 5),
    },
}


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        pytest.param("tree", "regenerate", marks=pytest.mark.matrix),
        pytest.param("quantile", "stored", marks=pytest.mark.matrix),
        *(
            pytest.param(name, "stored", marks=pytest.mark.slow)
            for name in ("tree", "correlated", "schedule")
        ),
    ],
)
def test_every_kind_of_noise_continues_bit_for_bit(name, buffer, tmp_path):
    """After a checkpoint the noise is that of the uninterrupted run."""
    plan = dpjax.plan(**{**SETTING, **PLANS[name]})
    w = jnp.asarray(np.linspace(-1, 1, 5, dtype=np.float32))
    tx = plan.optimizer(optax.adam(0.1), key=KEY, buffer=buffer)
    sums = dpjax.Bounded(w, np.ones((), np.float32)) if plan.quantile else w

    @jax.jit
    def step(w, state):
        updates, state = tx.update(sums, state, w)
        return w + updates, state

    def continue_until(run, stop):
        while run.step < stop:
            w, state = step(run.params, run.opt_state)
            run = checkpoint.Run(run.key, run.step + 1, w, state)
        return run

    first = checkpoint.Run(KEY, 0, w, jax.jit(tx.init)(w))
    middle = continue_until(first, 5)
    checkpoint.save(tmp_path, plan, middle)
    assert checkpoint.plan_of(tmp_path) == plan
    result = checkpoint.restore(tmp_path, checkpoint.plan_of(tmp_path), first)
    assert runs_equal(continue_until(result, STEPS), continue_until(middle, STEPS))


@pytest.mark.matrix
def test_leaves_of_every_kind_are_restored(plan, tmp_path):
    words = np.arange(8, dtype=np.uint32).reshape(2, 4)
    key = jax.random.wrap_key_data(words[0], impl="rbg")
    params = {
        "half": jnp.asarray(np.linspace(-1, 1, 6).astype(jnp.bfloat16)),
        "none": None,
        "empty": jnp.asarray(np.zeros((0, 4), np.float32)),
        "keys": jax.random.wrap_key_data(words, impl="rbg"),
        "host": np.arange(3, dtype=np.int8),
        "number": 0.25,
        "flag": True,
        "function": jnp.tanh,
    }
    state = jax.jit(optax.adam(0.1).init)(np.ones(2, np.float32))
    run = checkpoint.Run(key, 2, params, state)
    checkpoint.save(tmp_path, plan, run)
    like = {**params, "host": np.zeros(3, np.int8), "number": 0.0, "flag": False}
    result = checkpoint.restore(tmp_path, plan, run._replace(params=like))
    assert runs_equal(result, run)
    assert result.params["number"] == 0.25
    assert result.params["flag"] is True
    assert isinstance(result.params["host"], np.ndarray)
    assert jax.random.key_impl(result.key) == "rbg"


def test_digest_depends_on_every_bit():
    zeros, ones = np.zeros(3, np.float32), np.ones(2, np.float32)
    minus = np.array([0.0, -0.0, 0.0], np.float32)
    tree = {"a": zeros, "b": ones}
    others = [
        {"a": minus, "b": ones},
        {"a": zeros, "c": ones},
        {"a": zeros.astype(np.int32), "b": ones},
        {"a": zeros[:, None], "b": ones},
        {"a": ones, "b": zeros},
    ]
    others = jax.tree.map(jnp.asarray, others)
    digests = {checkpoint.digest(x) for x in [tree, *others]}
    assert len(digests) == 6


# --- meshes


def test_run_is_restored_onto_another_mesh(plan, uninterrupted_runs, tmp_path):
    """From four devices to two, to one, and to arrays without a sharding."""

    def sharding_on(count, cut):
        mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])
        return jax.NamedSharding(mesh, jax.P("x") if cut else jax.P())

    zeros = np.zeros((8, 2), np.float32)
    w = jnp.asarray(np.arange(16, dtype=np.float32).reshape(8, 2))
    state = jax.jit(plan.optimizer(optax.adam(0.1), key=KEY).init)(w)
    run = checkpoint.Run(KEY, 1, w, state)
    wide = run._replace(
        params=jax.device_put(w, sharding_on(4, True)),
        opt_state=jax.device_put(state, sharding_on(4, False)),
    )
    checkpoint.save(tmp_path, plan, wide)
    for like_params in (
        jax.device_put(zeros, sharding_on(2, True)),
        jax.device_put(zeros, sharding_on(1, True)),
        jnp.asarray(zeros),
    ):
        result = checkpoint.restore(tmp_path, plan, run._replace(params=like_params))
        assert result.params.sharding == like_params.sharding
        assert result.params.committed == like_params.committed
        assert runs_equal(result, run)


# --- invalid changes


@pytest.fixture
def saved_folder(plan, uninterrupted_runs, tmp_path):
    checkpoint.save(tmp_path, plan, uninterrupted_runs[2], data="2026-11")
    return tmp_path


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_examples": N + 1}, "num_examples (saved 40, given 41)"),
        ({"noise_multiplier": 1.3000000001}, "noise_multiplier (saved 1.3, given 1.3"),
        ({"clip_norm": 0.7}, "clip_norm (saved 0.6, given 0.7)"),
        ({"num_steps": STEPS + 1}, "num_steps (saved 8, given 9)"),
        ({"max_batch_size": 30}, "max_batch_size (saved 8, given 30)"),
        ({"sampling": "poisson"}, "sampling (saved 'reshuffled', given"),
        ({"adjacency": Adjacency.REPLACE}, "adjacency (saved 'ZERO_OUT', given"),
        ({"quantile": dpjax.QuantileClip(0.6)}, "quantile (saved None, given"),
    ],
)
def test_restoring_with_another_plan_raises(
    saved_folder, plan, uninterrupted_runs, changed, named
):
    other = dataclasses.replace(plan, **changed)
    with pytest.raises(ValueError, match="the differences are") as error:
        checkpoint.restore(saved_folder, other, uninterrupted_runs[0], data="2026-11")
    assert f"plan.{named}" in str(error.value)
    with pytest.raises(ValueError, match="the differences are"):
        checkpoint.save(saved_folder, other, uninterrupted_runs[3], data="2026-11")


def test_plan_comparison_may_differ_when_restoring(
    saved_folder, plan, uninterrupted_runs
):
    chosen = dataclasses.replace(plan, comparison=Comparison(()))
    result = checkpoint.restore(
        saved_folder, chosen, uninterrupted_runs[0], data="2026-11"
    )
    assert runs_equal(result, uninterrupted_runs[2])
    assert checkpoint.plan_of(saved_folder) == chosen


def test_restoring_with_other_data_raises(saved_folder, plan, uninterrupted_runs):
    with pytest.raises(ValueError, match="data \\(saved '2026-11', given ''\\)"):
        checkpoint.restore(saved_folder, plan, uninterrupted_runs[0])
    with pytest.raises(ValueError, match="num_examples"):
        next(plan.batches(DATA[1:], key=KEY))


def test_restoring_with_another_random_generator_raises(
    saved_folder, plan, uninterrupted_runs, monkeypatch
):
    """Any setting that changes the batches or noise of a key, in dpjax or in JAX."""
    again = {"data": "2026-11"}
    rbg = uninterrupted_runs[0]._replace(key=jax.random.key(0, impl="rbg"))
    with pytest.raises(ValueError, match=r"draws\.generator|key<rbg>"):
        checkpoint.restore(saved_folder, plan, rbg, **again)
    with (
        jax.threefry_partitionable(False),
        pytest.raises(ValueError, match="jax_threefry_partitionable"),
    ):
        checkpoint.restore(saved_folder, plan, uninterrupted_runs[0], **again)
    with monkeypatch.context() as changed:
        changed.setattr(_record, "DRAWS", _record.DRAWS + 1)
        with pytest.raises(ValueError, match=r"draws\.version"):
            checkpoint.restore(saved_folder, plan, uninterrupted_runs[0], **again)
    assert (
        checkpoint.restore(saved_folder, plan, uninterrupted_runs[0], **again).step == 2
    )


@pytest.mark.parametrize(
    "part",
    [
        "dpjax.noise._gaussian.stream",
        pytest.param("jax.random.normal", marks=pytest.mark.slow),
    ],
)
def test_changed_random_draws_are_detected(plan, monkeypatch, part):
    """By the draws of a public key, since no version number shows the change."""
    before = _record.describe_draws(plan, KEY)
    module, _, name = part.rpartition(".")
    old = getattr(sys.modules[module], name)

    def other(key, *args, **named):
        if name == "stream":
            return old(key, f"other {args[0]}")
        return -old(key, *args, **named)

    monkeypatch.setattr(sys.modules[module], name, other)
    _record._probe.cache_clear()
    try:
        after = _record.describe_draws(plan, KEY)
    finally:
        _record._probe.cache_clear()
    result = _record.differences(before, after, "draws")
    assert len(result) == 1
    assert result[0].startswith("draws.of a public key")


def test_restoring_into_other_array_shapes_raises(
    saved_folder, plan, uninterrupted_runs
):
    w = {"w": jnp.zeros(4), "b": jnp.zeros(())}
    with pytest.raises(ValueError, match=r"\['w'\] \(saved 'float32\[3\]'"):
        checkpoint.restore(
            saved_folder, plan, uninterrupted_runs[0]._replace(params=w), data="2026-11"
        )
    sgd = jax.jit(plan.optimizer(optax.sgd(0.1), key=KEY).init)(
        uninterrupted_runs[0].params
    )
    with pytest.raises(ValueError, match="opt_state"):
        checkpoint.restore(
            saved_folder,
            plan,
            uninterrupted_runs[0]._replace(opt_state=sgd),
            data="2026-11",
        )


def test_saving_other_values_for_a_saved_step_raises(
    saved_folder, plan, uninterrupted_runs
):
    other = uninterrupted_runs[2]._replace(params=uninterrupted_runs[3].params)
    with pytest.raises(ValueError, match="at most one of them may be released"):
        checkpoint.save(saved_folder, plan, other, data="2026-11")
    checkpoint.save(
        saved_folder, plan, uninterrupted_runs[2], data="2026-11"
    )  # the same: nothing to do
    assert checkpoint.steps(saved_folder) == (2,)


def test_solved_for_and_comparison_may_differ_when_saving(
    saved_folder, plan, uninterrupted_runs
):
    chosen = dataclasses.replace(plan, comparison=object(), solved_for="batch_size")
    assert (
        checkpoint.restore(
            saved_folder, chosen, uninterrupted_runs[0], data="2026-11"
        ).step
        == 2
    )
    checkpoint.save(saved_folder, chosen, uninterrupted_runs[3], data="2026-11")
    assert checkpoint.plan_of(saved_folder) == dataclasses.replace(
        plan, solved_for="batch_size"
    )


def test_saving_a_run_with_another_key_raises(saved_folder, plan, uninterrupted_runs):
    other = uninterrupted_runs[3]._replace(key=jax.random.key(12))
    with pytest.raises(ValueError, match="its key differs"):
        checkpoint.save(saved_folder, plan, other, data="2026-11")


def test_rewound_run_must_match_later_checkpoints(plan, uninterrupted_runs, tmp_path):
    """A folder never holds two versions of a run."""
    for i in (1, 4):
        checkpoint.save(tmp_path, plan, uninterrupted_runs[i])
    other = uninterrupted_runs[2].params
    checkpoint.save(tmp_path, plan, uninterrupted_runs[3]._replace(params=other))
    assert checkpoint.steps(tmp_path) == (1, 4)
    with pytest.raises(ValueError, match="something has changed since"):
        checkpoint.save(tmp_path, plan, uninterrupted_runs[4]._replace(params=other))
    checkpoint.save(tmp_path, plan, uninterrupted_runs[4])


# --- damaged checkpoints


def add_digest(record):
    """A record with the digest of its other values added."""
    others = {name: x for name, x in record.items() if name != "digest"}
    plain = json.dumps(
        others, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    return {**others, "digest": hashlib.sha256(plain.encode()).hexdigest()}


def assert_every_reader_raises(folder, plan, run, number):
    """Every function that reads the newest checkpoint raises and names its folder."""
    before = sorted(folder.rglob("*"))
    where = re.escape(str(folder / str(number)))
    for call in (
        lambda: checkpoint.plan_of(folder),
        lambda: checkpoint.restore(folder, plan, run, data="2026-11"),
        lambda: checkpoint.restore(folder, plan, run, step=number, data="2026-11"),
        lambda: checkpoint.resume(folder, plan, run, data="2026-11"),
        lambda: checkpoint.save(folder, plan, run, data="2026-11"),
    ):
        with pytest.raises(ValueError, match=f"the checkpoint {where} is damaged"):
            call()
    assert checkpoint.steps(folder)[-1] == number
    assert sorted(folder.rglob("*")) == before


def test_any_changed_value_of_a_record_raises(saved_folder, plan, uninterrupted_runs):
    """Each number, string and dictionary is covered by the digest."""
    path = saved_folder / "2/record.json"
    record = json.loads(path.read_text())
    assert add_digest(record) == record
    changes = [{name: x + 1} for name, x in record.items() if isinstance(x, int)]
    changes += [{name: x + "0"} for name, x in record.items() if isinstance(x, str)]
    changes += [
        {name: {**x, "more": 1}} for name, x in record.items() if isinstance(x, dict)
    ]
    assert len(changes) == len(record)
    changes += [
        {"plan": {**record["plan"], "noise_multiplier": 0.13}},
        {"plan": {**record["plan"], "num_steps": 10**6}},
        {"released": "0" * 64},
    ]
    for change in changes:
        path.write_text(json.dumps({**record, **change}))
        assert_every_reader_raises(saved_folder, plan, uninterrupted_runs[0], 2)
    path.write_text(json.dumps(record))  # another layout of the same values
    assert (
        checkpoint.restore(
            saved_folder, plan, uninterrupted_runs[0], data="2026-11"
        ).step
        == 2
    )


def test_unreadable_record_raises(saved_folder, plan, uninterrupted_runs):
    """Truncated, incomplete, of other types or not JSON: one error names the folder."""
    path = saved_folder / "2/record.json"
    content = path.read_bytes()
    record = json.loads(content)
    damaged = [content[:size] for size in (0, 1, len(content) // 2, len(content) - 1)]
    damaged += [b"[]", b"null", b"3", b"{}", b"\xff" + content, b"[" * 100_000]
    damaged += [content.replace(b'"ZERO_OUT"', b'"ZERO\xff"')]
    damaged += [content.replace(b'"noise_multiplier": 1.3', b'"noise_multiplier": NaN')]
    odd = [{x: y for x, y in record.items() if x != name} for name in record]
    odd += [{**record, name: None} for name in record]
    # With a digest that was recomputed.
    odd += [add_digest(x) for x in odd if x.get("digest")]
    odd += [add_digest({**record, "format": 2}), add_digest({**record, "step": 3})]
    of_plan = record["plan"]
    odd += [
        add_digest({**record, "plan": {**of_plan, **change}})
        for change in (
            {"noise_multiplier": "1.3"},
            {"num_steps": 8.0},
            {"clip_norm": True},
            {"adjacency": "NONE"},
            {"schedule": 1},
            {"shape": {"x": 1}},
            {"shape": {"type": "Segment"}},
            {"more": 1},
        )
    ]
    for text in damaged + [json.dumps(x).encode() for x in odd]:
        path.write_bytes(text)
        if len(text) == 100_000 or text in damaged[:2]:
            assert_every_reader_raises(saved_folder, plan, uninterrupted_runs[0], 2)
        else:  # all functions read it by the same code
            with pytest.raises(
                ValueError, match=f"{saved_folder}/2 is damaged or was changed"
            ):
                checkpoint.plan_of(saved_folder)


# Orbax leaves tasks behind that it has not awaited.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_changed_or_missing_arrays_raise(saved_folder, plan, uninterrupted_runs):
    path = saved_folder / "2/record.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(add_digest({**record, "arrays": "0" * 64})))
    with pytest.raises(ValueError, match="/2 is damaged: its arrays differ from"):
        checkpoint.restore(saved_folder, plan, uninterrupted_runs[0], data="2026-11")
    path.write_text(json.dumps(record))
    cut = next((saved_folder / "2/arrays/d").iterdir())
    cut.write_bytes(cut.read_bytes()[:-5])
    with pytest.raises(ValueError, match="/2 is damaged: its arrays cannot be read"):
        checkpoint.restore(saved_folder, plan, uninterrupted_runs[0], data="2026-11")
    shutil.rmtree(saved_folder / "2/arrays")
    with pytest.raises(ValueError, match="/2 is damaged: its arrays cannot be read"):
        checkpoint.restore(saved_folder, plan, uninterrupted_runs[0], data="2026-11")
    gc.collect()


@pytest.mark.parametrize("name", ["1", "5"])
def test_renamed_checkpoint_folder_raises(saved_folder, plan, uninterrupted_runs, name):
    """Batches would continue at another step than the noise."""
    (saved_folder / "2").rename(saved_folder / name)
    assert_every_reader_raises(saved_folder, plan, uninterrupted_runs[0], int(name))
    (saved_folder / name).rename(saved_folder / "2")
    for other in ("02", "２", "²", "2.old"):
        shutil.copytree(saved_folder / "2", saved_folder / other)
    assert checkpoint.steps(saved_folder) == (2,)
    assert (
        checkpoint.restore(
            saved_folder, plan, uninterrupted_runs[0], data="2026-11"
        ).step
        == 2
    )


def test_save_never_removes_foreign_files(plan, uninterrupted_runs, tmp_path):
    """Any file or folder in the run's folder, with or without a number as its name."""
    other, run = tmp_path / "other", tmp_path / "run"
    checkpoint.save(other, plan, uninterrupted_runs[1]._replace(key=jax.random.key(12)))
    for name in ("0", "7", "007", "notes", "7.unfinished", "x.unfinished"):
        (run / name).mkdir(parents=True)
        (run / name / "mine.txt").write_text(name)
    (run / "9").mkdir()  # empty
    (run / "10").write_text("a file")
    checkpoint.save(run, plan, uninterrupted_runs[2])
    shutil.copytree(other / "1", run / "1")  # a checkpoint of another key
    shutil.copytree(run / "2", run / "02")
    (run / "2/mine.txt").write_text("2")  # added to a checkpoint
    before = {x.relative_to(run): x.stat().st_mtime for x in run.rglob("*")}
    for t in (3, 4, 5):
        checkpoint.save(run, plan, uninterrupted_runs[t], keep=1)
    after = {x.relative_to(run): x.stat().st_mtime for x in run.rglob("*")}
    assert before.items() <= after.items()
    assert checkpoint.steps(run) == (1, 2, 5)
    assert checkpoint.restore(run, plan, uninterrupted_runs[0]).step == 5


def test_save_keeps_damaged_older_checkpoint(plan, uninterrupted_runs, tmp_path):
    """It cannot be distinguished from files that something else wrote."""
    for t in (1, 2):
        checkpoint.save(tmp_path, plan, uninterrupted_runs[t])
    (tmp_path / "1/record.json").write_text("{}")
    for t in (3, 4):
        checkpoint.save(tmp_path, plan, uninterrupted_runs[t], keep=1)
    assert checkpoint.steps(tmp_path) == (1, 4)


@pytest.mark.parametrize("name", ["3", "3.unfinished"])
def test_saving_over_a_foreign_path_raises(plan, uninterrupted_runs, tmp_path, name):
    """A folder that save did not write, a file or a link; all of them are kept."""
    checkpoint.save(tmp_path / "run", plan, uninterrupted_runs[2])
    place, aim = tmp_path / "run" / name, tmp_path / "aim"
    aim.mkdir()
    (aim / "mine.txt").write_text("mine")
    for put in (
        lambda: shutil.copytree(aim, place),
        lambda: place.write_text("mine"),
        lambda: place.symlink_to(aim),
        lambda: place.symlink_to(tmp_path / "nowhere"),
    ):
        put()
        with pytest.raises(ValueError, match=f"save did not write {place}"):
            checkpoint.save(tmp_path / "run", plan, uninterrupted_runs[3])
        assert checkpoint.steps(tmp_path / "run") == (2,)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()
    assert (aim / "mine.txt").read_text() == "mine"
    checkpoint.save(tmp_path / "run", plan, uninterrupted_runs[3])


def test_invalid_arguments_raise(plan, uninterrupted_runs, tmp_path):
    with pytest.raises(ValueError, match="must contain a checkpoint"):
        checkpoint.restore(tmp_path, plan, uninterrupted_runs[0])
    with pytest.raises(ValueError, match="must contain a checkpoint"):
        checkpoint.plan_of(tmp_path)
    with pytest.raises(ValueError, match=r"run\.step must be at most"):
        checkpoint.save(tmp_path, plan, uninterrupted_runs[0]._replace(step=STEPS + 1))
    with pytest.raises(ValueError, match="typed JAX key"):
        checkpoint.save(tmp_path, plan, uninterrupted_runs[0]._replace(key=np.zeros(2)))
    with pytest.raises(ValueError, match="plan must be"):
        checkpoint.save(tmp_path, SETTING, uninterrupted_runs[0])
    with pytest.raises(ValueError, match="keep must be at least 1"):
        checkpoint.save(tmp_path, plan, uninterrupted_runs[0], keep=0)


# --- disks


def test_save_keeps_newest_checkpoints_readable_by_owner_only(
    plan, uninterrupted_runs, tmp_path
):
    folder = tmp_path / "run"
    for i in range(4):
        checkpoint.save(folder, plan, uninterrupted_runs[i], keep=2)
    assert checkpoint.steps(folder) == (2, 3)
    assert sorted(x.name for x in folder.iterdir()) == ["2", "3"]
    assert folder.stat().st_mode & 0o077 == 0
    assert checkpoint.restore(folder, plan, uninterrupted_runs[0], step=2).step == 2


# Orbax leaves tasks behind that it has not awaited.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_full_disk_leaves_earlier_checkpoints_intact(
    plan, uninterrupted_runs, tmp_path
):
    """No file may grow beyond a few bytes, as on a full disk."""
    checkpoint.save(tmp_path, plan, uninterrupted_runs[2])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for most in (0, 100, 1_000):  # for one file or another
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
            with pytest.raises(OSError, match="arrays were not written"):
                checkpoint.save(tmp_path, plan, uninterrupted_runs[4])
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert checkpoint.steps(tmp_path) == (2,)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert runs_equal(
        checkpoint.restore(tmp_path, plan, uninterrupted_runs[0]), uninterrupted_runs[2]
    )
    checkpoint.save(tmp_path, plan, uninterrupted_runs[4])
    assert checkpoint.steps(tmp_path) == (2, 4)
    gc.collect()


class Killed(BaseException):
    """Stands for SIGKILL: no program catches it."""


def test_interrupted_save_leaves_a_complete_checkpoint_or_none(
    plan, uninterrupted_runs, one_checkpoint, tmp_path, monkeypatch
):
    """The process ends before each call that writes to disk, or after the last one."""
    result, ended = [], False
    while not ended:
        folder = shutil.copytree(one_checkpoint, tmp_path / str(len(result)))
        count = itertools.count(-len(result))

        def die_at_count(count=count):
            if next(count) == 0:
                raise Killed

        def die_before(real, last=die_at_count):
            def call(*args, **named):
                last()
                return real(*args, **named)

            return call

        def rmtree(path, last=die_at_count):
            last()
            shutil.rmtree(path / "arrays", ignore_errors=True)
            last()
            shutil.rmtree(path)

        with monkeypatch.context() as changed:
            # Only these modules are patched, and not those that Orbax uses.
            calls = vars(os) | {
                name: die_before(getattr(os, name))
                for name in ("makedirs", "rename", "replace", "fsync")
            }
            for module in (_disk, _folder):
                changed.setattr(module, "os", types.SimpleNamespace(**calls))
            changed.setattr(_folder, "shutil", types.SimpleNamespace(rmtree=rmtree))
            changed.setattr(_folder, "write_arrays", die_before(_folder.write_arrays))
            changed.setattr(_folder, "sync_all", die_before(lambda _: None))
            try:
                checkpoint.save(folder, plan, uninterrupted_runs[2], keep=1)
                ended = True
            except Killed:
                pass
        newest = checkpoint.steps(folder)[-1]
        run = checkpoint.restore(folder, plan, uninterrupted_runs[0])
        assert run.step == newest
        assert runs_equal(run, uninterrupted_runs[newest])
        result.append(newest)
        checkpoint.save(
            folder, plan, uninterrupted_runs[2], keep=1
        )  # again, over the remains
        checkpoint.save(folder, plan, uninterrupted_runs[3], keep=1)
        assert [x.name for x in folder.iterdir()] == ["3"]
    assert result == sorted(result)
    assert set(result) == {1, 2}
    assert result.count(1) > 6  # calls before there is a second checkpoint
    assert result.count(2) > 4  # and while the first one is removed


@pytest.fixture(scope="module")
def one_checkpoint(plan, uninterrupted_runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    checkpoint.save(folder, plan, uninterrupted_runs[1])
    return folder


def test_saving_without_orbax_names_the_extra(
    plan, uninterrupted_runs, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"'\.\[checkpoint\]'"):
        checkpoint.save(tmp_path, plan, uninterrupted_runs[0])


def test_dpjax_imports_without_orbax():
    root = pathlib.Path(dpjax.__file__).parent
    for path in root.rglob("*.py"):
        for line in path.read_text().splitlines():
            assert not line.startswith(("import orbax", "from orbax")), path


# --- killed


def test_nan_example_does_not_change_a_resumed_run(plan, step, tmp_path):
    """One example is NaN: it contributes zero before and after the checkpoint."""
    batch = jax.jit(plan.batch)
    sampled = [set(np.asarray(batch(t, KEY).indices).tolist()) for t in range(8)]
    index = sorted(sampled[1] & (sampled[5] | sampled[6]))[0]  # before and after
    data = DATA.copy()
    data[index] = np.nan
    runs = [initial_run(plan, KEY)]
    for _ in range(STEPS):
        runs.append(step(runs[-1], data))
    checkpoint.save(tmp_path, plan, runs[4])
    run = checkpoint.restore(tmp_path, plan, runs[0])
    while run.step < STEPS:
        run = step(run, data)
    assert runs_equal(run, runs[STEPS])
    assert np.isfinite(run.params["w"]).all()
    assert not runs_equal(
        run, step(step(step(step(runs[4]))))
    )  # without it there is more


def kill_and_resume(folder, plan, draws, kills):
    """Kill runs this many times in all, and resume each until it ends."""
    killed, folders = 0, []
    while killed < kills:
        folders.append(folder / str(len(folders)))
        checkpoint.save(folders[-1] / "run", plan, initial_run(plan, KEY))
        code = None
        while code != 0:
            spared = killed >= kills
            # A save takes about as long as the longest of these delays.
            at = (0, 0.0) if spared else (draws.randint(1, 3), draws.uniform(0, 0.2))
            code = run_in_process(folders[-1], *at)
            assert code in (0, -signal.SIGKILL)
            killed += code != 0
    return folders


def assert_resumed_runs_match(folders, plan, whole):
    """Parameters and everything published equal those of the uninterrupted run."""
    digests = {f"{i} {checkpoint.digest(whole[i].params)}" for i in (2, 4, 6, 8)}
    for folder in folders:
        run = checkpoint.restore(folder / "run", plan, initial_run(plan, KEY))
        assert runs_equal(run, whole[STEPS])
        assert set((folder / "published").read_text().splitlines()) <= digests
        result = ledger.read(folder / "ledger")
        assert [x.stop for x in result.entries] == [2, 4, 6, 8]
        assert {f"{x.stop} {x.released}" for x in result.entries} == digests
        assert not any(x.repeated for x in result.entries)
        assert result.epsilon(plan.delta) == plan.epsilon


@pytest.mark.slow
def test_run_killed_many_times_equals_uninterrupted_run(
    plan, uninterrupted_runs, tmp_path
):
    assert_resumed_runs_match(
        kill_and_resume(tmp_path, plan, random.Random(2), 12), plan, uninterrupted_runs
    )
