"""Random bins: each example picks one step of an epoch, or several.

A statistical test compares a p-value with ALARM, its rate of false alarms over keys.
"""

import collections
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


# --- several steps an epoch


def read_allocation(n, num_steps, num_selected, epoch, key=KEY):
    """Whether each example takes part in each step, bool[num_steps, n]."""

    @jax.jit
    def draw(step):
        batch = sampling.random_allocation_step(
            n,
            num_steps,
            num_selected=num_selected,
            max_batch_size=n,
            key=key,
            epoch=epoch,
            step=step,
        )
        return jnp.zeros(n, jnp.int32).at[batch.indices].add(batch.mask), batch

    members, batches = jax.lax.map(draw, jnp.arange(num_steps, dtype=jnp.uint32))
    assert members.max() <= 1  # no example twice in one batch
    order = np.where(batches.mask, batches.indices, n)
    assert (np.diff(order, axis=1) >= 0).all()  # the data's order, padding last
    return np.asarray(members, bool)


@pytest.mark.parametrize(("num_steps", "num_selected"), [(5, 2), (5, 5), (7, 1)])
def test_all_sets_of_steps_are_equally_likely(num_steps, num_selected):
    members = read_allocation(4_000, num_steps, num_selected, epoch=3)
    assert (members.sum(0) == num_selected).all()
    counts = collections.Counter(map(tuple, members.T))
    sets = [
        tuple(t in chosen for t in range(num_steps))
        for chosen in itertools.combinations(range(num_steps), num_selected)
    ]
    assert set(counts) <= set(sets)
    if len(sets) > 1:
        observed = [counts[x] for x in sets]
        assert matches_distribution(observed, np.full(len(sets), 1 / len(sets)))


def test_allocation_drops_the_last_examples_and_pads():
    def draw(size, epoch, step):
        return sampling.random_allocation_step(
            50,
            3,
            num_selected=2,
            max_batch_size=size,
            key=KEY,
            epoch=epoch,
            step=step,
        )

    cases = (50, 1, 1), (10, 1, 1), (10, 1, 3), (50, 2, 1)
    batches = jax.jit(lambda: [draw(*case) for case in cases])()
    whole, part, beyond, other = jax.tree.map(np.asarray, batches)
    np.testing.assert_array_equal(part.indices, whole.indices[:10])
    assert part.mask.all()
    assert not beyond.mask.any()
    assert (other.indices != whole.indices).any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_selected": 4}, "num_selected must be at most num_steps, 3; got 4"),
        ({"num_selected": 0}, "num_selected"),
        ({"step": -1}, "step"),
        ({"max_batch_size": 0}, "max_batch_size"),
    ],
)
def test_wrong_allocation_arguments_raise(changed, message):
    given = {"num_selected": 2, "max_batch_size": 4, "epoch": 0, "step": 0, **changed}
    with pytest.raises(ValueError, match=message):
        sampling.random_allocation_step(4, 3, key=KEY, **given)
