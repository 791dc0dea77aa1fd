"""Batches of a plan, read ahead and laid out over a mesh, are those read one by one."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax

SIZE, ROOM = 60, 24
KEY = jax.random.key(11)
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
        assert jnp.isfinite(examples.data).all()
