"""Random bins: each example picks one step of an epoch.

A statistical test compares a p-value with ALARM, its rate of false alarms over keys.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dpjax import sampling
from dpjax.sampling import _bins

KEY = jax.random.wrap_key_data(np.array([0, 11], np.uint32))  # key(11), not compiled
ALARM = 1e-6


def slow_case(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def matches_distribution(observed, probabilities):
    expected = np.asarray(probabilities) * np.sum(observed)
    assert expected.min() > 5
    return scipy.stats.chisquare(observed, expected).pvalue > ALARM


def batch_rows(batch):
    found = zip(np.asarray(batch.indices), np.asarray(batch.mask), strict=True)
    return [row[mask].tolist() for row, mask in found]


@pytest.mark.parametrize(
    ("n", "bins"),
    [(50, 7), *(slow_case(*x) for x in [(5, 9), (1, 1), (6, 1), (1, 5), (400, 3)])],
)
def test_each_example_is_in_one_bin_per_epoch(n, bins):
    given = {"max_batch_size": n, "key": KEY, "epoch": 2}
    rows = batch_rows(jax.jit(lambda: sampling.random_bins(n, bins, **given))())
    assert len(rows) == bins
    assert all(row == sorted(row) for row in rows)
    assert sorted(itertools.chain(*rows)) == list(range(n))


@pytest.mark.slow
def test_all_bin_assignments_are_equally_likely():
    """Four examples in three bins: 3⁴ assignments, 3000 epochs."""
    epochs = 3000

    def epoch(number):
        return sampling.random_bins(4, 3, max_batch_size=4, key=KEY, epoch=number)

    indices, mask = map(np.asarray, jax.jit(jax.vmap(epoch))(jnp.arange(epochs)))
    chosen = np.zeros((epochs, 4), int)
    at, step, place = np.nonzero(mask)
    chosen[at, indices[at, step, place]] = step
    ways = np.bincount(chosen @ 3 ** np.arange(4), minlength=81)
    assert matches_distribution(ways, np.full(81, 1 / 81))


def test_unfair_draws_are_drawn_again():
    """Three in ten draws of 32 bits are beyond the multiples of 1.5e9 bins."""
    bins = 1_500_000_000
    chosen = np.asarray(jax.jit(lambda: _bins._choices(9000, bins, KEY))())
    cells = np.bincount(chosen // (bins // 10), minlength=10)
    assert matches_distribution(cells, np.full(10, 0.1))


@pytest.mark.slow
def test_bins_of_a_million_examples_are_disjoint_and_binomial():
    """A false alarm on the binomial sizes in 1e9, and no example twice."""
    n, bins, b = 10**6, 1000, 1300
    step = jax.jit(
        lambda step: sampling.random_bins_step(
            n, bins, max_batch_size=b, key=KEY, epoch=7, step=step
        )
    )
    rows = []
    for number in (bins // 3, bins - 2, bins - 1):
        batch = step(number)
        row = np.asarray(batch.indices)[np.asarray(batch.mask)]
        assert abs(row.size - 1000) < 6.5 * np.sqrt(1000)
        assert np.all(np.diff(row) > 0)
        rows.append(row)
    assert np.concatenate(rows).max() < n
    assert np.unique(np.concatenate(rows)).size == sum(map(len, rows))
    assert not np.asarray(step(bins).mask).any()
    # Uniform over the data: a false alarm in 1e6.
    assert scipy.stats.kstest(np.concatenate(rows) / n, "uniform").pvalue > ALARM
