"""A run that is interrupted is the run that was not, bit for bit, or is refused."""

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
from killed_runs import DATA, SETTING, STEPS, N, begin, start, step_of

import dpjax
from dpjax import Adjacency, checkpoint, ledger, strategies
from dpjax._plan import Comparison
from dpjax.checkpoint import _fingerprint, _folder

KEY = jax.random.wrap_key_data(np.array([0, 11], np.uint32))


@pytest.fixture(scope="module")
def plan():
    return dpjax.plan(**SETTING)


@pytest.fixture(scope="module")
def step(plan):
    return step_of(plan)


@pytest.fixture(scope="module")
def whole(plan, step):
    """The run at every step, never interrupted."""
    runs = [begin(plan, KEY)]
    for _ in range(STEPS):
        runs.append(step(runs[-1]))
    return runs


def same(a, b):
    return checkpoint.digest(a._replace(released="")) == checkpoint.digest(
        b._replace(released="")
    )


# --- bit for bit


def test_a_run_goes_on_bit_for_bit(plan, step, whole, tmp_path):
    checkpoint.save(tmp_path, plan, whole[3])
    run = checkpoint.restore(tmp_path, plan, begin(plan, jax.random.key(0)))
    assert same(run, whole[3])
    while run.step < STEPS:
        run = step(run)
    assert same(run, whole[STEPS])
    assert run.params["w"].dtype == jnp.float32
    assert type(run.opt_state) is type(whole[0].opt_state)


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
        ("tree", "regenerate"),
        pytest.param("quantile", "stored", marks=pytest.mark.matrix),
        *(
            pytest.param(name, "stored", marks=pytest.mark.slow)
            for name in ("tree", "correlated", "schedule")
        ),
    ],
)
def test_every_kind_of_noise_goes_on_bit_for_bit(name, buffer, tmp_path):
    """Past the checkpoint the noise is what it would have been."""
    plan = dpjax.plan(**{**SETTING, **PLANS[name]})
    w = jnp.asarray(np.linspace(-1, 1, 5, dtype=np.float32))
    tx = plan.optimizer(optax.adam(0.1), key=KEY, buffer=buffer)
    sums = dpjax.Bounded(w, np.ones((), np.float32)) if plan.quantile else w

    @jax.jit
    def step(w, state):
        updates, state = tx.update(sums, state, w)
        return w + updates, state

    def go_on(run, stop):
        while run.step < stop:
            w, state = step(run.params, run.opt_state)
            run = checkpoint.Run(run.key, run.step + 1, w, state)
        return run

    first = checkpoint.Run(KEY, 0, w, jax.jit(tx.init)(w))
    middle = go_on(first, 5)
    checkpoint.save(tmp_path, plan, middle)
    assert checkpoint.plan_of(tmp_path) == plan
    found = checkpoint.restore(tmp_path, checkpoint.plan_of(tmp_path), first)
    assert same(go_on(found, STEPS), go_on(middle, STEPS))


def test_leaves_of_every_kind_come_back(plan, tmp_path):
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
    found = checkpoint.restore(tmp_path, plan, run._replace(params=like))
    assert same(found, run)
    assert found.params["number"] == 0.25
    assert found.params["flag"] is True
    assert isinstance(found.params["host"], np.ndarray)
    assert jax.random.key_impl(found.key) == "rbg"


def test_a_digest_is_of_every_bit():
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


def test_a_mesh_may_change(plan, whole, tmp_path):
    """From four devices to two and to one, and back to where nothing was placed."""

    def on(count, cut):
        mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])
        return jax.NamedSharding(mesh, jax.P("x") if cut else jax.P())

    zeros = np.zeros((8, 2), np.float32)
    w = jnp.asarray(np.arange(16, dtype=np.float32).reshape(8, 2))
    state = jax.jit(plan.optimizer(optax.adam(0.1), key=KEY).init)(w)
    run = checkpoint.Run(KEY, 1, w, state)
    wide = run._replace(
        params=jax.device_put(w, on(4, True)),
        opt_state=jax.device_put(state, on(4, False)),
    )
    checkpoint.save(tmp_path, plan, wide)
    for like_params in (
        jax.device_put(zeros, on(2, True)),
        jax.device_put(zeros, on(1, True)),
        jnp.asarray(zeros),
    ):
        found = checkpoint.restore(tmp_path, plan, run._replace(params=like_params))
        assert found.params.sharding == like_params.sharding
        assert found.params.committed == like_params.committed
        assert same(found, run)


# --- what is refused


@pytest.fixture
def kept(plan, whole, tmp_path):
    checkpoint.save(tmp_path, plan, whole[2], data="2026-11")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_examples": N + 1}, "num_examples (kept 40, given 41)"),
        ({"noise_multiplier": 1.3000000001}, "noise_multiplier (kept 1.3, given 1.3"),
        ({"clip_norm": 0.7}, "clip_norm (kept 0.6, given 0.7)"),
        ({"num_steps": STEPS + 1}, "num_steps (kept 8, given 9)"),
        ({"max_batch_size": 30}, "max_batch_size (kept 8, given 30)"),
        ({"sampling": "poisson"}, "sampling (kept 'reshuffled', given"),
        ({"adjacency": Adjacency.REPLACE}, "adjacency (kept 'ZERO_OUT', given"),
        ({"quantile": dpjax.QuantileClip(0.6)}, "quantile (kept None, given"),
    ],
)
def test_another_plan_is_refused(kept, plan, whole, changed, named):
    other = dataclasses.replace(plan, **changed)
    with pytest.raises(ValueError, match="what differs") as error:
        checkpoint.restore(kept, other, whole[0], data="2026-11")
    assert f"plan.{named}" in str(error.value)
    with pytest.raises(ValueError, match="what differs"):
        checkpoint.save(kept, other, whole[3], data="2026-11")


def test_how_a_plan_was_found_is_no_difference(kept, plan, whole):
    chosen = dataclasses.replace(plan, comparison=Comparison(()))
    found = checkpoint.restore(kept, chosen, whole[0], data="2026-11")
    assert same(found, whole[2])
    assert checkpoint.plan_of(kept) == chosen


def test_other_data_are_refused(kept, plan, whole):
    with pytest.raises(ValueError, match="data \\(kept '2026-11', given ''\\)"):
        checkpoint.restore(kept, plan, whole[0])
    with pytest.raises(ValueError, match="num_examples"):
        next(plan.batches(DATA[1:], key=KEY))


def test_other_draws_are_refused(kept, plan, whole, monkeypatch):
    """Whatever draws other batches or noise from the same key, here or in JAX."""
    again = {"data": "2026-11"}
    rbg = whole[0]._replace(key=jax.random.key(0, impl="rbg"))
    with pytest.raises(ValueError, match=r"draws\.generator|key<rbg>"):
        checkpoint.restore(kept, plan, rbg, **again)
    with (
        jax.threefry_partitionable(False),
        pytest.raises(ValueError, match="jax_threefry_partitionable"),
    ):
        checkpoint.restore(kept, plan, whole[0], **again)
    with monkeypatch.context() as changed:
        changed.setattr(_fingerprint, "DRAWS", _fingerprint.DRAWS + 1)
        with pytest.raises(ValueError, match=r"draws\.version"):
            checkpoint.restore(kept, plan, whole[0], **again)
    assert checkpoint.restore(kept, plan, whole[0], **again).step == 2


@pytest.mark.parametrize(
    "part",
    [
        "dpjax.noise._gaussian.stream",
        pytest.param("jax.random.normal", marks=pytest.mark.slow),
    ],
)
def test_draws_that_changed_are_seen(plan, monkeypatch, part):
    """By what a public key draws: no version says so."""
    before = _fingerprint.describe_draws(plan, KEY)
    module, _, name = part.rpartition(".")
    old = getattr(sys.modules[module], name)

    def other(key, *args, **named):
        if name == "stream":
            return old(key, f"other {args[0]}")
        return -old(key, *args, **named)

    monkeypatch.setattr(sys.modules[module], name, other)
    _fingerprint._probe.cache_clear()
    try:
        after = _fingerprint.describe_draws(plan, KEY)
    finally:
        _fingerprint._probe.cache_clear()
    found = _fingerprint.differences(before, after)
    assert len(found) == 1
    assert found[0].startswith("of a public key")


def test_other_arrays_are_refused(kept, plan, whole):
    w = {"w": jnp.zeros(4), "b": jnp.zeros(())}
    with pytest.raises(ValueError, match=r"\['w'\] \(kept 'float32\[3\]'"):
        checkpoint.restore(kept, plan, whole[0]._replace(params=w), data="2026-11")
    sgd = jax.jit(plan.optimizer(optax.sgd(0.1), key=KEY).init)(whole[0].params)
    with pytest.raises(ValueError, match="opt_state"):
        checkpoint.restore(kept, plan, whole[0]._replace(opt_state=sgd), data="2026-11")


def test_another_way_of_the_same_step_is_refused(kept, plan, whole):
    other = whole[2]._replace(params=whole[3].params)
    with pytest.raises(ValueError, match="at most one of them may be released"):
        checkpoint.save(kept, plan, other, data="2026-11")
    checkpoint.save(kept, plan, whole[2], data="2026-11")  # the same: nothing to do
    assert checkpoint.steps(kept) == (2,)


def test_how_a_plan_was_found_is_no_part_of_it(kept, plan, whole):
    chosen = dataclasses.replace(plan, comparison=object(), solved_for="batch_size")
    assert checkpoint.restore(kept, chosen, whole[0], data="2026-11").step == 2
    checkpoint.save(kept, chosen, whole[3], data="2026-11")
    assert checkpoint.plan_of(kept) == dataclasses.replace(
        plan, solved_for="batch_size"
    )


def test_another_run_of_the_same_plan_is_refused(kept, plan, whole):
    other = whole[3]._replace(key=jax.random.key(12))
    with pytest.raises(ValueError, match="it has another key"):
        checkpoint.save(kept, plan, other, data="2026-11")


def test_a_run_that_went_back_is_compared_when_it_gets_there(plan, whole, tmp_path):
    """Two ways never lie in one folder."""
    for i in (1, 4):
        checkpoint.save(tmp_path, plan, whole[i])
    other = whole[2].params
    checkpoint.save(tmp_path, plan, whole[3]._replace(params=other))
    assert checkpoint.steps(tmp_path) == (1, 4)
    with pytest.raises(ValueError, match="something has changed since"):
        checkpoint.save(tmp_path, plan, whole[4]._replace(params=other))
    checkpoint.save(tmp_path, plan, whole[4])


# --- what is damaged


def with_digest(record):
    """A record with the digest of its other values, by the definition."""
    others = {name: x for name, x in record.items() if name != "digest"}
    plain = json.dumps(
        others, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    return {**others, "digest": hashlib.sha256(plain.encode()).hexdigest()}


def assert_all_refuse(folder, plan, run, number):
    """Whatever reads the newest checkpoint refuses it, and names its folder."""
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


def test_a_digest_covers_every_value_of_a_record(kept, plan, whole):
    """Any number or word that changed is refused, whatever it stands for."""
    path = kept / "2/record.json"
    record = json.loads(path.read_text())
    assert with_digest(record) == record
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
        assert_all_refuse(kept, plan, whole[0], 2)
    path.write_text(json.dumps(record))  # another layout of the same values
    assert checkpoint.restore(kept, plan, whole[0], data="2026-11").step == 2


def test_a_record_that_cannot_be_read_is_refused(kept, plan, whole):
    """Cut, without a value, of other types or not JSON: one error names the folder."""
    path = kept / "2/record.json"
    content = path.read_bytes()
    record = json.loads(content)
    damaged = [content[:size] for size in (0, 1, len(content) // 2, len(content) - 1)]
    damaged += [b"[]", b"null", b"3", b"{}", b"\xff" + content, b"[" * 100_000]
    damaged += [content.replace(b'"ZERO_OUT"', b'"ZERO\xff"')]
    damaged += [content.replace(b'"noise_multiplier": 1.3', b'"noise_multiplier": NaN')]
    odd = [{x: y for x, y in record.items() if x != name} for name in record]
    odd += [{**record, name: None} for name in record]
    # With a digest that somebody computed again.
    odd += [with_digest(x) for x in odd if x.get("digest")]
    odd += [with_digest({**record, "format": 2}), with_digest({**record, "step": 3})]
    of_plan = record["plan"]
    odd += [
        with_digest({**record, "plan": {**of_plan, **change}})
        for change in (
            {"noise_multiplier": "1.3"},
            {"num_steps": 8.0},
            {"clip_norm": True},
            {"adjacency": "NONE"},
            {"schedule": 1},
            {"shape": {"x": 1}},
            {"more": 1},
        )
    ]
    for text in damaged + [json.dumps(x).encode() for x in odd]:
        path.write_bytes(text)
        if len(text) == 100_000 or text in damaged[:2]:
            assert_all_refuse(kept, plan, whole[0], 2)
        else:  # they all read it in one way
            with pytest.raises(ValueError, match=f"{kept}/2 is damaged or was changed"):
                checkpoint.plan_of(kept)


# What orbax leaves behind of tasks that it has not waited for.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_arrays_that_changed_or_are_missing_are_refused(kept, plan, whole):
    path = kept / "2/record.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(with_digest({**record, "arrays": "0" * 64})))
    with pytest.raises(ValueError, match="/2 is damaged: its arrays are not those"):
        checkpoint.restore(kept, plan, whole[0], data="2026-11")
    path.write_text(json.dumps(record))
    cut = next((kept / "2/arrays/d").iterdir())
    cut.write_bytes(cut.read_bytes()[:-5])
    with pytest.raises(ValueError, match="/2 is damaged: its arrays cannot be read"):
        checkpoint.restore(kept, plan, whole[0], data="2026-11")
    shutil.rmtree(kept / "2/arrays")
    with pytest.raises(ValueError, match="/2 is damaged: its arrays cannot be read"):
        checkpoint.restore(kept, plan, whole[0], data="2026-11")
    gc.collect()


@pytest.mark.parametrize("name", ["1", "5"])
def test_a_folder_that_was_renamed_is_refused(kept, plan, whole, name):
    """Batches would go on at another step than the noise."""
    (kept / "2").rename(kept / name)
    assert_all_refuse(kept, plan, whole[0], int(name))
    (kept / name).rename(kept / "2")
    for other in ("02", "２", "²", "2.old"):
        shutil.copytree(kept / "2", kept / other)
    assert checkpoint.steps(kept) == (2,)
    assert checkpoint.restore(kept, plan, whole[0], data="2026-11").step == 2


def test_save_never_removes_what_it_did_not_write(plan, whole, tmp_path):
    """Whatever lies in a run's folder, with or without a number for a name."""
    other, run = tmp_path / "other", tmp_path / "run"
    checkpoint.save(other, plan, whole[1]._replace(key=jax.random.key(12)))
    for name in ("0", "7", "007", "notes", "7.unfinished", "x.unfinished"):
        (run / name).mkdir(parents=True)
        (run / name / "mine.txt").write_text(name)
    (run / "9").mkdir()  # empty
    (run / "10").write_text("a file")
    checkpoint.save(run, plan, whole[2])
    shutil.copytree(other / "1", run / "1")  # a checkpoint of another key
    shutil.copytree(run / "2", run / "02")
    (run / "2/mine.txt").write_text("2")  # added to a checkpoint
    before = {x.relative_to(run): x.stat().st_mtime for x in run.rglob("*")}
    for t in (3, 4, 5):
        checkpoint.save(run, plan, whole[t], keep=1)
    after = {x.relative_to(run): x.stat().st_mtime for x in run.rglob("*")}
    assert before.items() <= after.items()
    assert checkpoint.steps(run) == (1, 2, 5)
    assert checkpoint.restore(run, plan, whole[0]).step == 5


def test_save_leaves_a_damaged_older_checkpoint(plan, whole, tmp_path):
    """It cannot be told from what somebody else wrote."""
    for t in (1, 2):
        checkpoint.save(tmp_path, plan, whole[t])
    (tmp_path / "1/record.json").write_text("{}")
    for t in (3, 4):
        checkpoint.save(tmp_path, plan, whole[t], keep=1)
    assert checkpoint.steps(tmp_path) == (1, 4)


@pytest.mark.parametrize("name", ["3", "3.unfinished"])
def test_save_refuses_a_place_that_is_taken(plan, whole, tmp_path, name):
    """By a folder that it did not write, a file or a link; all of them stay."""
    checkpoint.save(tmp_path / "run", plan, whole[2])
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
        with pytest.raises(ValueError, match=f"{place} is there and was not written"):
            checkpoint.save(tmp_path / "run", plan, whole[3])
        assert checkpoint.steps(tmp_path / "run") == (2,)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()
    assert (aim / "mine.txt").read_text() == "mine"
    checkpoint.save(tmp_path / "run", plan, whole[3])


def test_mistakes_are_named(plan, whole, tmp_path):
    with pytest.raises(ValueError, match="must hold a checkpoint"):
        checkpoint.restore(tmp_path, plan, whole[0])
    with pytest.raises(ValueError, match="must hold a checkpoint"):
        checkpoint.plan_of(tmp_path)
    with pytest.raises(ValueError, match=r"run\.step must be at most"):
        checkpoint.save(tmp_path, plan, whole[0]._replace(step=STEPS + 1))
    with pytest.raises(ValueError, match="typed JAX key"):
        checkpoint.save(tmp_path, plan, whole[0]._replace(key=np.zeros(2)))
    with pytest.raises(ValueError, match="plan must be"):
        checkpoint.save(tmp_path, SETTING, whole[0])
    with pytest.raises(ValueError, match="keep must be at least 1"):
        checkpoint.save(tmp_path, plan, whole[0], keep=0)


# --- disks


def test_the_newest_stay_and_only_their_owner_reads_them(plan, whole, tmp_path):
    folder = tmp_path / "run"
    for i in range(4):
        checkpoint.save(folder, plan, whole[i], keep=2)
    assert checkpoint.steps(folder) == (2, 3)
    assert sorted(x.name for x in folder.iterdir()) == ["2", "3"]
    assert folder.stat().st_mode & 0o077 == 0
    assert checkpoint.restore(folder, plan, whole[0], step=2).step == 2


# What orbax leaves behind of tasks that it has not waited for.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_leaves_what_was_there(plan, whole, tmp_path):
    """No file may grow beyond a few bytes, as on a disk with no more room."""
    checkpoint.save(tmp_path, plan, whole[2])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for most in (0, 100, 1_000):  # for one file or another
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
            with pytest.raises(OSError, match="arrays were not written"):
                checkpoint.save(tmp_path, plan, whole[4])
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert checkpoint.steps(tmp_path) == (2,)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert same(checkpoint.restore(tmp_path, plan, whole[0]), whole[2])
    checkpoint.save(tmp_path, plan, whole[4])
    assert checkpoint.steps(tmp_path) == (2, 4)
    gc.collect()


class Killed(BaseException):
    """Nothing in a program expects it, as no program expects SIGKILL."""


def test_a_checkpoint_is_whole_or_not_there(plan, whole, one, tmp_path, monkeypatch):
    """Wherever a process ends: before each call to the disk, and after the last."""
    found, ended = [], False
    while not ended:
        folder = shutil.copytree(one, tmp_path / str(len(found)))
        count = itertools.count(-len(found))

        def last(count=count):
            if next(count) == 0:
                raise Killed

        def before(real, last=last):
            def call(*args, **named):
                last()
                return real(*args, **named)

            return call

        def rmtree(path, last=last):
            last()
            shutil.rmtree(path / "arrays", ignore_errors=True)
            last()
            shutil.rmtree(path)

        with monkeypatch.context() as changed:
            # Orbax has modules of its own, which are left alone.
            calls = vars(os) | {
                name: before(getattr(os, name))
                for name in ("makedirs", "rename", "replace", "fsync")
            }
            changed.setattr(_folder, "os", types.SimpleNamespace(**calls))
            changed.setattr(_folder, "shutil", types.SimpleNamespace(rmtree=rmtree))
            changed.setattr(_folder, "write_arrays", before(_folder.write_arrays))
            changed.setattr(_folder, "sync_all", before(lambda _: None))
            try:
                checkpoint.save(folder, plan, whole[2], keep=1)
                ended = True
            except Killed:
                pass
        newest = checkpoint.steps(folder)[-1]
        run = checkpoint.restore(folder, plan, whole[0])
        assert run.step == newest
        assert same(run, whole[newest])
        found.append(newest)
        checkpoint.save(folder, plan, whole[2], keep=1)  # once more, over what is left
        checkpoint.save(folder, plan, whole[3], keep=1)
        assert [x.name for x in folder.iterdir()] == ["3"]
    assert found == sorted(found)
    assert set(found) == {1, 2}
    assert found.count(1) > 6  # calls before there is a second checkpoint
    assert found.count(2) > 4  # and while the first one is removed


@pytest.fixture(scope="module")
def one(plan, whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    checkpoint.save(folder, plan, whole[1])
    return folder


def test_without_orbax_it_says_what_is_missing(plan, whole, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"dpjax\[checkpoint\]"):
        checkpoint.save(tmp_path, plan, whole[0])


def test_dpjax_imports_without_orbax():
    root = pathlib.Path(dpjax.__file__).parent
    for path in root.rglob("*.py"):
        for line in path.read_text().splitlines():
            assert not line.startswith(("import orbax", "from orbax")), path


# --- killed


def test_a_nan_on_the_way_does_not_tell_a_resumed_run(plan, step, tmp_path):
    """One example is without a value: it counts for nothing, before and after."""
    batch = jax.jit(plan.batch)
    taken = [set(np.asarray(batch(t, KEY).indices).tolist()) for t in range(8)]
    there = sorted(taken[1] & (taken[5] | taken[6]))[0]  # before and after
    data = DATA.copy()
    data[there] = np.nan
    runs = [begin(plan, KEY)]
    for _ in range(STEPS):
        runs.append(step(runs[-1], data))
    checkpoint.save(tmp_path, plan, runs[4])
    run = checkpoint.restore(tmp_path, plan, runs[0])
    while run.step < STEPS:
        run = step(run, data)
    assert same(run, runs[STEPS])
    assert np.isfinite(run.params["w"]).all()
    assert not same(run, step(step(step(step(runs[4])))))  # without it there is more


def survive(folder, plan, draws, kills):
    """Kill runs again and again, and let each come to its end."""
    killed, folders = 0, []
    while killed < kills:
        folders.append(folder / str(len(folders)))
        checkpoint.save(folders[-1] / "run", plan, begin(plan, KEY))
        code = None
        while code != 0:
            spared = killed >= kills
            # A save takes about as long as the longest of these delays.
            at = (0, 0.0) if spared else (draws.randint(1, 3), draws.uniform(0, 0.2))
            code = start(folders[-1], *at)
            assert code in (0, -signal.SIGKILL)
            killed += code != 0
    return folders


def check_survivors(folders, plan, whole):
    """The parameters of the run that was not killed, and nothing else made public."""
    digests = {f"{i} {checkpoint.digest(whole[i].params)}" for i in (2, 4, 6, 8)}
    for folder in folders:
        run = checkpoint.restore(folder / "run", plan, begin(plan, KEY))
        assert same(run, whole[STEPS])
        assert set((folder / "published").read_text().splitlines()) <= digests
        found = ledger.read(folder / "ledger")
        assert [x.stop for x in found.entries] == [2, 4, 6, 8]
        assert {f"{x.stop} {x.released}" for x in found.entries} == digests
        assert not any(x.repeated for x in found.entries)
        assert found.epsilon(plan.delta) == plan.epsilon


@pytest.mark.slow
def test_a_run_that_is_killed_is_the_run_that_was_not(plan, whole, tmp_path):
    check_survivors(survive(tmp_path, plan, random.Random(1), 2), plan, whole)


@pytest.mark.slow
def test_a_run_that_is_killed_fifty_times_is_the_run_that_was_not(
    plan, whole, tmp_path
):
    check_survivors(survive(tmp_path, plan, random.Random(2), 50), plan, whole)
