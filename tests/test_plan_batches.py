"""Batches of a plan, read ahead and laid out over a mesh, are those read one by one."""

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._plan.schedule import Segment

SIZE, ROOM = 60, 24
KEY = jax.random.wrap_key_data(np.array([0, 11], np.uint32))
X = np.random.default_rng(0).normal(size=(SIZE, 3)).astype(np.float32)
DATA = {"x": X, "y": np.arange(SIZE)}


@functools.cache
def planned(room=ROOM, size=SIZE, batch_size=8, **others):
    return dpjax.plan(
        num_examples=size,
        batch_size=batch_size,
        num_steps=4,
        noise_multiplier=1.3,
        delta=1e-5,
        clip_norm=0.7,
        max_batch_size=room,
        **others,
    )


def over(*spec):
    return jax.NamedSharding(jax.make_mesh((2, 2), ("data", "model")), jax.P(*spec))


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.diagonal
@pytest.mark.parametrize("prefetch", [0, 1, 9])
@pytest.mark.parametrize("spec", [None, "data", ("data", "model")])
def test_the_same_in_every_way(prefetch, spec):
    sharding = spec and over(spec)
    found = list(planned().batches(DATA, key=KEY, sharding=sharding, prefetch=prefetch))
    assert_same(found, planned().batches(DATA, key=KEY))
    for examples in found:
        for leaf in jax.tree.leaves(examples._replace(step=None)):
            assert sharding is None or leaf.sharding == sharding
    later = planned().batches(
        DATA, key=KEY, sharding=sharding, prefetch=prefetch, start=2
    )
    assert_same(later, found[2:])


class Rows:
    """A data set that knows who asked for what."""

    def __init__(self):
        self.asked, self.threads = [], set()

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        self.asked.append(i)
        self.threads.add(threading.get_ident())
        return X[i], i


def test_what_several_devices_hold_is_read_once():
    one, other = Rows(), Rows()
    plain = list(planned().batches(one, key=KEY))
    laid_out = planned().batches(other, key=KEY, sharding=over("data"), prefetch=2)
    for expected, found in zip(plain, laid_out, strict=True):
        mask = np.asarray(expected.mask)
        np.testing.assert_array_equal(found.mask, mask)
        rows = np.asarray(found.data[0])[mask]
        np.testing.assert_array_equal(rows, expected.data[0][mask])
    masks = [np.asarray(examples.mask) for examples in plain]
    taking_part = [
        i for e, mask in zip(plain, masks, strict=True) for i in e.data[1][mask]
    ]
    # Where nobody is in a half of a batch, the first example is read for its shape.
    nobody = [i for mask in masks for i in (0, 12) if not mask[i : i + 12].any()]
    assert sorted(other.asked) == sorted(taking_part + [0] * len(nobody))
    assert threading.get_ident() not in other.threads


def test_reading_fails_where_it_is_asked_for():
    class Broken(Rows):
        def __getitem__(self, i):
            raise OSError(f"example {i} is gone")

    for prefetch in (0, 2):
        with pytest.raises(OSError, match="is gone"):
            next(planned().batches(Broken(), key=KEY, prefetch=prefetch))


class Stored(Rows):
    """A data set that reads many examples in one call, and no other way."""

    def __getitem__(self, i):
        raise AssertionError("one by one")

    def __getitems__(self, positions):
        self.asked.append(positions)
        return [{"x": X[i], "y": np.int64(i)} for i in positions]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_is_read_in_one_call(prefetch):
    stored = Stored()
    found = list(planned().batches(stored, key=KEY, prefetch=prefetch))
    expected = list(planned().batches(DATA, key=KEY))
    asked = [e.data["y"][e.mask].tolist() for e in expected]
    assert stored.asked == asked  # who takes part, and nobody else
    assert all(type(i) is int for i in stored.asked[0])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.mask, other.mask)
        for name in DATA:
            rows = other.data[name][other.mask]
            np.testing.assert_array_equal(one.data[name][one.mask], rows)


def test_what_gives_other_examples_is_refused():
    class Short(Stored):
        def __getitems__(self, positions):
            return super().__getitems__(positions)[1:]

    class Filtered(Rows):  # as grain's, which give None
        def __getitem__(self, i):
            return super().__getitem__(i) if i % 2 else None

    for data in (Short(), Filtered()):
        with pytest.raises(ValueError, match=r"must give \d+ examples for as many"):
            next(planned().batches(data, key=KEY))
    for stream in (iter(Rows()), (X[i] for i in range(SIZE))):
        with pytest.raises(ValueError, match=r"data must be .* or have len and int"):
            planned().batches(stream, key=KEY)


class Waiting(Stored):
    """A data set of which each batch is read once somebody lets it."""

    def __init__(self):
        super().__init__()
        self.begun = [threading.Event() for _ in range(4)]
        self.let = [threading.Event() for _ in range(4)]

    def __getitems__(self, positions):
        number = len(self.asked)
        found = super().__getitems__(positions)
        self.begun[number].set()
        assert self.let[number].wait(20)
        if number == 2:
            raise OSError("the disk is gone")
        return found


def test_static_step_out_of_range_raises():
    """Also where a schedule makes the size of a batch depend on the step."""
    pieces = Segment(0, 1.0, 1.0, 8), Segment(2, 1.0, 1.0, 16)
    varied = dataclasses.replace(planned(), schedule=pieces)
    below = jnp.asarray(np.int32(-2))
    for step in (-1, 4, np.int64(4), np.uint8(200), below, 1.5, True, [0]):
        for plan in (planned(), varied):
            for call in (plan.batch, functools.partial(plan.load, DATA)):
                with pytest.raises(ValueError, match="^step must be an integer") as e:
                    call(step, KEY)
                assert "from 0 to 3" in str(e.value)
                assert f"got {step!r}" in str(e.value)


def test_traced_step_loads_the_batch_of_the_static_step():
    plan = planned()
    load = jax.jit(lambda step: plan.load(DATA, step, KEY))
    for step in (0, 3):
        static = jax.jit(lambda step=step: plan.load(DATA, step, KEY))
        assert_same([load(step)], [static()])
    assert load(4).mask.shape == (ROOM,)  # out of range, which cannot be seen


def test_the_next_batch_is_read_while_one_is_used():
    data = Waiting()
    data.let[0].set()
    batches = planned().batches(data, key=KEY, prefetch=1)
    next(batches)
    assert data.begun[1].wait(20)  # nobody has asked for it, nor lets it end
    data.let[1].set()
    next(batches)
    data.let[2].set()
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_who_stops_waits_for_no_more():
    data = Waiting()
    data.let[0].set()
    batches = planned().batches(data, key=KEY, prefetch=3)
    next(batches)
    assert data.begun[1].wait(20)
    threading.Timer(0.1, data.let[1].set).start()
    batches.close()  # the one that is being read comes to its end
    assert not data.begun[2].is_set()


def test_data_sets_of_grain_and_of_hugging_face(tmp_path):
    """The same examples as from arrays, where these libraries are installed."""
    grain = pytest.importorskip("grain")
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(DATA).save_to_disk(tmp_path)
    mapped = datasets.load_from_disk(tmp_path).with_format("numpy")
    rows = [{"x": X[i], "y": i} for i in range(SIZE)]
    expected = list(planned().batches(rows, key=KEY))
    for data in (mapped, grain.MapDataset.source(rows).map(lambda row: dict(row))):
        found = list(planned().batches(data, key=KEY, prefetch=2))
        assert_same(found, expected)
    repeated = grain.MapDataset.source(rows).repeat(2)
    filtered = grain.MapDataset.source(rows).filter(lambda row: row["y"] % 2)
    for data, words in [
        (repeated, "num_examples"),
        (filtered, "must give"),
        (filtered.to_iter_dataset(), "len and integer indexing"),
        (mapped.to_iterable_dataset(), "len and integer indexing"),
    ]:
        with pytest.raises(ValueError, match=words):
            next(planned().batches(data, key=KEY))


def test_a_batch_that_does_not_divide_is_refused():
    for spec, room in [(("data",), 25), (("data", "model"), 24)]:
        with pytest.raises(ValueError, match=f"sharding must divide the {room} places"):
            planned(room).batches(DATA, key=KEY, sharding=over(*spec))
    with pytest.raises(ValueError, match="prefetch"):
        planned().batches(DATA, key=KEY, prefetch=-1)


def test_drawn_on_the_cpu_wherever_the_key_is():
    away = jax.devices()[3]
    expected = planned().batches(DATA, key=KEY)
    with jax.default_device(away):
        assert_same(planned().batches(DATA, key=jax.device_put(KEY, away)), expected)


def test_files_larger_than_memory_are_read_by_the_row(tmp_path):
    """A sparse file of 40 GB; of n examples only those of the batch are touched."""
    rows = 10**9
    file = np.memmap(tmp_path / "x", np.float32, "w+", shape=(rows, 10))
    file[::250_000_000] = 3
    plan = planned(32, rows, batch_size=16)
    for examples in plan.batches(file, key=KEY, sharding=over("data"), prefetch=2):
        assert examples.data.shape == (32, 10)
        assert np.isfinite(np.asarray(examples.data)).all()
