"""Batches: who is in them, how often, and in what shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import sampling

KEY = jax.random.key(7)


@pytest.mark.parametrize(("n", "b"), [(12, 4), (13, 4), (5, 8), (1, 1), (7, 1)])
def test_every_example_once_an_epoch(n, b):
    for batch in (
        sampling.cyclic(n, b),
        sampling.reshuffled(n, b, key=KEY, epoch=3),
    ):
        assert batch.indices.shape == batch.mask.shape == (-(-n // b), b)
        taken = np.sort(np.asarray(batch.indices)[np.asarray(batch.mask)])
        np.testing.assert_array_equal(taken, np.arange(n))


def test_cyclic_is_in_order():
    batch = sampling.cyclic(10, 4)
    np.testing.assert_array_equal(batch.indices[0], [0, 1, 2, 3])
    np.testing.assert_array_equal(batch.mask[2], [True, True, False, False])


def test_reshuffled_changes_by_epoch_and_key_alone():
    def order(key, epoch):
        return sampling.reshuffled(50, 10, key=key, epoch=epoch).indices

    first = jax.jit(order)(KEY, 0)
    np.testing.assert_array_equal(first, order(KEY, 0))
    assert np.any(first != order(KEY, 1))
    assert np.any(first != order(jax.random.key(8), 0))
    # Each place is uniform: 4000 epochs, 5 values, z = 5 in 25 cells.
    many = jax.vmap(
        lambda e: sampling.reshuffled(5, 5, key=KEY, epoch=e).indices.ravel()
    )(jnp.arange(4000))
    counts = np.stack([np.bincount(column, minlength=5) for column in many.T])
    assert np.max(np.abs(counts - 800)) < 5 * np.sqrt(4000 * 0.2 * 0.8)


@pytest.mark.parametrize("rate", [0.003, 0.2, 0.9])
def test_poisson_takes_each_example_independently(rate):
    n, steps = 400, 1500
    draw = functools.partial(sampling.poisson, n, rate, max_batch_size=n, key=KEY)
    batches = jax.jit(jax.vmap(lambda step: draw(step=step)))(jnp.arange(steps))
    taken = np.zeros((steps, n), int)
    rows, places = np.nonzero(np.asarray(batches.mask))
    np.add.at(taken, (rows, np.asarray(batches.indices)[rows, places]), 1)
    assert taken.max() == 1  # nobody twice
    spread = np.sqrt(rate * (1 - rate))
    # z = 6 over 400 columns, 1500 rows, one total: false alarm below 1e-5
    # (the binomial tails at rate 0.003 are heavier: z = 9 there).
    z = 9 if rate < 0.01 else 6
    assert np.max(np.abs(taken.mean(0) - rate)) < z * spread / np.sqrt(steps)
    assert np.max(np.abs(taken.mean(1) - rate)) < z * spread / np.sqrt(n)
    assert abs(taken.mean() - rate) < z * spread / np.sqrt(n * steps)


def test_poisson_rates_are_never_exceeded():
    # A float32 uniform below 1e-8 happens with probability 2⁻²³, twelve times more.
    draw = jax.jit(
        lambda step: sampling.poisson(
            1_000_000, 1e-8, max_batch_size=64, key=KEY, step=step
        ).mask.sum()
    )
    total = sum(int(draw(step)) for step in range(200))
    assert total <= 10  # Poisson with mean 2: more than 10 has probability 9e-6
    for rate, everyone in [(0.0, 0), (1.0, 9)]:
        batch = sampling.poisson(9, rate, max_batch_size=9, key=KEY, step=0)
        assert batch.mask.sum() == everyone


def test_poisson_overflow_keeps_the_shape_and_the_first():
    batch = sampling.poisson(100, 1.0, max_batch_size=16, key=KEY, step=0)
    np.testing.assert_array_equal(batch.indices, np.arange(16))
    assert batch.mask.all()


def test_static_mistakes_name_the_argument():
    for n, b, name in [(0, 1, "num_examples"), (5, 0, "batch_size"), (5, 2.5, "batch")]:
        with pytest.raises(ValueError, match=f"^{name}"):
            sampling.cyclic(n, b)
    with pytest.raises(ValueError, match="^key must"):
        sampling.reshuffled(5, 2, key=None, epoch=0)
    poisson = functools.partial(sampling.poisson, 10, step=0, key=KEY)
    for rate in (-0.1, 1.1, np.nan):
        with pytest.raises(ValueError, match="^sampling_rate must"):
            poisson(rate, max_batch_size=3)
    with pytest.raises(ValueError, match="^max_batch_size must"):
        poisson(0.1, max_batch_size=0)
