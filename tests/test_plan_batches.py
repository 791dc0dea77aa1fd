"""Prefetched and sharded batches of a plan equal those read one by one."""

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax._plan.parameters import Segment

SIZE, ROOM = 60, 24
KEY = jax.random.wrap_key_data(np.array([0, 11], np.uint32))
X = np.random.default_rng(0).normal(size=(SIZE, 3)).astype(np.float32)
DATA = {"x": X, "y": np.arange(SIZE)}


@functools.cache
def make_plan(room=ROOM, size=SIZE, batch_size=8, **others):
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


def data_sharding(*spec):
    return jax.NamedSharding(jax.make_mesh((2, 2), ("data", "model")), jax.P(*spec))


def assert_batches_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.diagonal
@pytest.mark.parametrize("prefetch", [0, 1, 9])
@pytest.mark.parametrize("spec", [None, "data", ("data", "model")])
def test_batches_do_not_depend_on_prefetch_or_sharding(prefetch, spec):
    sharding = spec and data_sharding(spec)
    result = list(
        make_plan().batches(DATA, key=KEY, sharding=sharding, prefetch=prefetch)
    )
    assert_batches_equal(result, make_plan().batches(DATA, key=KEY))
    for examples in result:
        for leaf in jax.tree.leaves(examples._replace(step=None)):
            assert sharding is None or leaf.sharding == sharding
    later = make_plan().batches(
        DATA, key=KEY, sharding=sharding, prefetch=prefetch, start=2
    )
    assert_batches_equal(later, result[2:])


class RecordingDataset:
    """A data set that records which examples and threads read it."""

    def __init__(self):
        self.asked, self.threads = [], set()

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        self.asked.append(i)
        self.threads.add(threading.get_ident())
        return X[i], i


def test_sharded_batches_read_each_example_once():
    one, other = RecordingDataset(), RecordingDataset()
    plain = list(make_plan().batches(one, key=KEY))
    laid_out = make_plan().batches(
        other, key=KEY, sharding=data_sharding("data"), prefetch=2
    )
    for expected, result in zip(plain, laid_out, strict=True):
        mask = np.asarray(expected.mask)
        np.testing.assert_array_equal(result.mask, mask)
        rows = np.asarray(result.data[0])[mask]
        np.testing.assert_array_equal(rows, expected.data[0][mask])
    masks = [np.asarray(examples.mask) for examples in plain]
    taking_part = [
        i for e, mask in zip(plain, masks, strict=True) for i in e.data[1][mask]
    ]
    # Where half of a batch is padding, the first example is read for its shape.
    nobody = [i for mask in masks for i in (0, 12) if not mask[i : i + 12].any()]
    assert sorted(other.asked) == sorted(taking_part + [0] * len(nobody))
    assert threading.get_ident() not in other.threads


def test_reading_error_is_raised_to_the_caller():
    class Broken(RecordingDataset):
        def __getitem__(self, i):
            raise OSError(f"example {i} is gone")

    for prefetch in (0, 2):
        with pytest.raises(OSError, match="is gone"):
            next(make_plan().batches(Broken(), key=KEY, prefetch=prefetch))


class BatchedDataset(RecordingDataset):
    """A data set that only reads many examples in one call."""

    def __getitem__(self, i):
        raise AssertionError("one by one")

    def __getitems__(self, positions):
        self.asked.append(positions)
        return [{"x": X[i], "y": np.int64(i)} for i in positions]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_getitems_reads_a_batch_in_one_call(prefetch):
    stored = BatchedDataset()
    result = list(make_plan().batches(stored, key=KEY, prefetch=prefetch))
    expected = list(make_plan().batches(DATA, key=KEY))
    positions = [e.data["y"][e.mask].tolist() for e in expected]
    assert stored.asked == positions  # the sampled examples, and no others
    assert all(type(i) is int for i in stored.asked[0])
    for one, other in zip(result, expected, strict=True):
        np.testing.assert_array_equal(one.mask, other.mask)
        for name in DATA:
            rows = other.data[name][other.mask]
            np.testing.assert_array_equal(one.data[name][one.mask], rows)


def test_data_sets_returning_too_few_examples_raise():
    class Short(BatchedDataset):
        def __getitems__(self, positions):
            return super().__getitems__(positions)[1:]

    class Filtered(RecordingDataset):  # like those of grain, which give None
        def __getitem__(self, i):
            return super().__getitem__(i) if i % 2 else None

    for data in (Short(), Filtered()):
        with pytest.raises(
            ValueError, match=r"must return \d+ examples for \d+ positions"
        ):
            next(make_plan().batches(data, key=KEY))
    for stream in (iter(RecordingDataset()), (X[i] for i in range(SIZE))):
        with pytest.raises(ValueError, match=r"data must be .* or support len and int"):
            make_plan().batches(stream, key=KEY)


class BlockingDataset(BatchedDataset):
    """A data set that blocks each read until an event is set."""

    def __init__(self):
        super().__init__()
        self.begun = [threading.Event() for _ in range(4)]
        self.let = [threading.Event() for _ in range(4)]

    def __getitems__(self, positions):
        number = len(self.asked)
        result = super().__getitems__(positions)
        self.begun[number].set()
        assert self.let[number].wait(20)
        if number == 2:
            raise OSError("the disk is gone")
        return result


def test_static_step_out_of_range_raises():
    """Also where a schedule makes the batch size depend on the step."""
    pieces = Segment(0, 1.0, 1.0, 8), Segment(2, 1.0, 1.0, 16)
    varied = dataclasses.replace(make_plan(), schedule=pieces)
    below = jnp.asarray(np.int32(-2))
    for step in (-1, 4, np.int64(4), np.uint8(200), below, 1.5, True, [0]):
        for plan in (make_plan(), varied):
            for call in (plan.batch, functools.partial(plan.load, DATA)):
                with pytest.raises(ValueError, match="^step must be an integer") as e:
                    call(step, KEY)
                assert "from 0 to 3" in str(e.value)
                assert f"got {step!r}" in str(e.value)


def test_traced_step_loads_the_batch_of_the_static_step():
    plan = make_plan()
    load = jax.jit(lambda step: plan.load(DATA, step, KEY))
    for step in (0, 3):
        static = jax.jit(lambda step=step: plan.load(DATA, step, KEY))
        assert_batches_equal([load(step)], [static()])
    assert load(4).mask.shape == (ROOM,)  # out of range, which is unknown under jit


def test_next_batch_is_prefetched():
    data = BlockingDataset()
    data.let[0].set()
    data.let[3].set()  # may be requested before the error of batch 2 arrives
    batches = make_plan().batches(data, key=KEY, prefetch=1)
    next(batches)
    assert data.begun[1].wait(20)  # not requested yet, and still blocked
    data.let[1].set()
    next(batches)
    data.let[2].set()
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_closing_waits_only_for_the_batch_being_read():
    data = BlockingDataset()
    data.let[0].set()
    batches = make_plan().batches(data, key=KEY, prefetch=3)
    next(batches)
    assert data.begun[1].wait(20)
    threading.Timer(0.1, data.let[1].set).start()
    batches.close()  # waits for the batch that is being read
    assert not data.begun[2].is_set()


def test_grain_and_hugging_face_data_sets_give_equal_batches(tmp_path):
    """The same examples as from arrays, where these libraries are installed."""
    grain = pytest.importorskip("grain")
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(DATA).save_to_disk(tmp_path)
    mapped = datasets.load_from_disk(tmp_path).with_format("numpy")
    rows = [{"x": X[i], "y": i} for i in range(SIZE)]
    expected = list(make_plan().batches(rows, key=KEY))
    for data in (mapped, grain.MapDataset.source(rows).map(lambda row: dict(row))):
        result = list(make_plan().batches(data, key=KEY, prefetch=2))
        assert_batches_equal(result, expected)
    repeated = grain.MapDataset.source(rows).repeat(2)
    filtered = grain.MapDataset.source(rows).filter(lambda row: row["y"] % 2)
    for data, words in [
        (repeated, "num_examples"),
        (filtered, "must return"),
        (filtered.to_iter_dataset(), "len and integer indexing"),
        (mapped.to_iterable_dataset(), "len and integer indexing"),
    ]:
        with pytest.raises(ValueError, match=words):
            next(make_plan().batches(data, key=KEY))


def test_sharding_that_does_not_divide_the_batch_raises():
    for spec, capacity in [(("data",), 25), (("data", "model"), 24)]:
        with pytest.raises(
            ValueError, match=f"sharding must divide the {capacity} slots"
        ):
            make_plan(capacity).batches(DATA, key=KEY, sharding=data_sharding(*spec))
    with pytest.raises(ValueError, match="prefetch"):
        make_plan().batches(DATA, key=KEY, prefetch=-1)


def test_batches_do_not_depend_on_the_device_of_the_key():
    away = jax.devices()[3]
    expected = make_plan().batches(DATA, key=KEY)
    with jax.default_device(away):
        assert_batches_equal(
            make_plan().batches(DATA, key=jax.device_put(KEY, away)), expected
        )


def test_memory_mapped_files_are_read_by_row(tmp_path):
    """A sparse file of 40 GB, of which only the examples of the batch are read."""
    rows = 10**9
    file = np.memmap(tmp_path / "x", np.float32, "w+", shape=(rows, 10))
    file[::250_000_000] = 3
    plan = make_plan(32, rows, batch_size=16)
    for examples in plan.batches(
        file, key=KEY, sharding=data_sharding("data"), prefetch=2
    ):
        assert examples.data.shape == (32, 10)
        assert np.isfinite(np.asarray(examples.data)).all()
