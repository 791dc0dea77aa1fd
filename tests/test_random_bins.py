"""Random bins that are found without enumerating all examples.

A statistical test compares a p-value with ALARM, its rate of false alarms over keys.
"""

import collections
import functools
import itertools
from math import factorial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dpjax import sampling
from dpjax._core.keys import generator_of
from dpjax.sampling import _bins, _order

KEY = jax.random.wrap_key_data(np.array([0, 11], np.uint32))  # key(11), not compiled
ALARM = 1e-6


def slow_case(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def large_data_code(monkeypatch):
    """Use the code for many examples, for any number of them."""
    monkeypatch.setattr(_bins, "_ALL", 0)
    monkeypatch.setattr(_order, "_SORTED", 2)


def matches_distribution(observed, probabilities):
    expected = np.asarray(probabilities) * np.sum(observed)
    assert expected.min() > 5
    return scipy.stats.chisquare(observed, expected).pvalue > ALARM


@jax.jit
def split_into_4000(key):
    return jax.random.split(key, 4000)


def batch_rows(batch):
    result = zip(np.asarray(batch.indices), np.asarray(batch.mask), strict=True)
    return [row[mask].tolist() for row, mask in result]


@pytest.mark.usefixtures("large_data_code")
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
@pytest.mark.usefixtures("large_data_code")
@pytest.mark.parametrize("impl", ["rbg", "threefry2x32", "unsafe_rbg", "chacha20"])
def test_single_bin_equals_that_of_the_whole_epoch(impl):
    """Under vmap, jit and neither, also for generators that vmap changes."""
    key = jax.random.key(5, impl=generator_of(impl))
    given = {"max_batch_size": 9, "key": key, "epoch": 3}
    whole = sampling.random_bins(40, 5, **given)
    step = functools.partial(sampling.random_bins_step, 40, 5, **given)
    alone = jax.jit(jax.vmap(lambda i: step(step=i)))(jnp.arange(6))
    np.testing.assert_array_equal(whole.indices, alone.indices[:5])
    np.testing.assert_array_equal(whole.mask, alone.mask[:5])
    assert not alone.mask[5].any()
    with jax.enable_x64(True):
        one = step(step=2)
    np.testing.assert_array_equal(one.indices, whole.indices[2])
    other = sampling.random_bins(40, 5, **{**given, "epoch": 4})
    assert batch_rows(other) != batch_rows(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("large_data_code")
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


@pytest.mark.slow
@pytest.mark.usefixtures("large_data_code")
def test_overflowing_bin_keeps_a_random_subset():
    def epoch(number):
        return sampling.random_bins(5, 1, max_batch_size=2, key=KEY, epoch=number)

    result = np.asarray(jax.jit(jax.vmap(epoch))(jnp.arange(600)).indices)[:, 0]
    counts = collections.Counter(map(tuple, result.tolist()))
    assert set(counts) == set(itertools.combinations(range(5), 2))
    assert matches_distribution(list(counts.values()), np.full(10, 0.1))


@pytest.mark.matrix
@pytest.mark.parametrize("n", [slow_case(7), slow_case(256), slow_case(1000), 70_000])
def test_sums_of_coins_are_binomial(n):
    """4000 draws, with the count traced and at most 70 000."""
    keys = split_into_4000(KEY)
    heads = np.asarray(jitted_heads()(keys, n))
    # Some twenty cells of at least 1 % each.
    law = scipy.stats.binom(n, 0.5)
    edges = np.unique(law.ppf(np.linspace(0.02, 0.98, 20)))
    cells = np.bincount(np.searchsorted(edges, heads), minlength=edges.size + 1)
    shares = np.diff(np.concatenate([[0], law.cdf(edges), [1]]))
    some = shares > 0
    assert cells[~some].sum() == 0
    assert matches_distribution(cells[some], shares[some])


@functools.cache
def jitted_heads():
    one = functools.partial(_bins._heads, max_n=70_000)
    return jax.jit(jax.vmap(one, (0, None)))


def test_bin_sizes_are_multinomial():
    """All 15 ways to cut 4 numbers in three, from ranks under one key each."""
    keys = split_into_4000(KEY)
    cuts = np.arange(4, dtype=np.uint32)
    ranks = jax.jit(
        jax.vmap(
            lambda key: jax.vmap(lambda c: _bins.count_smaller(key, 4, c, 3))(cuts)
        )
    )(keys)
    ranks = np.asarray(ranks)
    assert np.all(ranks[:, 0] == 0)
    assert np.all(ranks[:, 3] == 4)
    sizes = collections.Counter(map(tuple, np.diff(ranks).tolist()))
    ways = [(i, j, 4 - i - j) for i in range(5) for j in range(5 - i)]
    law = [factorial(4) / np.prod([factorial(k) for k in w]) / 3**4 for w in ways]
    assert matches_distribution([sizes[w] for w in ways], law)


def test_hash_equals_jax_threefry():
    words = np.array([0x9E3779B9, 0x243F6A88], np.uint32)
    x = np.array([0, 1, 977, 2**31, 2**32 - 1], np.uint32)

    @jax.jit
    def both(words, x):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        folded = jax.vmap(jax.random.fold_in, (None, 0))(key, x)
        return _order.threefry((words[0], words[1]), x), jax.random.key_data(folded)

    ours, theirs = both(words, x)
    np.testing.assert_array_equal(np.stack(ours, axis=1), theirs)


@pytest.mark.slow
@pytest.mark.usefixtures("large_data_code")
def test_all_orders_are_equally_likely():
    """Orders of 5 positions, of which the first three are also ordered on their own."""
    keys = jax.random.split(KEY, 3000)
    places = jnp.arange(5, dtype=jnp.uint32)
    orders = jax.jit(jax.vmap(lambda key: _order.examples_at(key, 5, places)))(keys)
    counts = collections.Counter(map(tuple, np.asarray(orders).tolist()))
    assert set(counts) == set(itertools.permutations(range(5)))
    assert matches_distribution(list(counts.values()), np.full(120, 1 / 120))


@pytest.mark.diagonal
@pytest.mark.parametrize("n", [1, 2, 1025])
def test_order_contains_each_example_once(n):
    at = jax.jit(lambda key, places: _order.examples_at(key, n, places))
    whole, outer = (
        np.asarray(at(KEY, np.arange(start, n, dtype=np.uint32)))
        for start in (0, n // 2)
    )
    np.testing.assert_array_equal(np.sort(whole), np.arange(n))
    np.testing.assert_array_equal(whole[n // 2 :], outer)


@pytest.mark.parametrize(("n", "q"), [(4, 2), (5, 2), (7, 3)])
def test_swap_rounds_mix_within_the_bound(n, q):
    """Exact distribution of q positions after each round, by a transition matrix."""
    states = list(itertools.permutations(range(n), q))
    index = {s: i for i, s in enumerate(states)}
    moves = np.zeros((len(states), len(states)))
    for centre in range(n):
        other = [(centre - x) % n for x in range(n)]
        for i, state in enumerate(states):
            pairs = sorted({max(x, other[x]) for x in state})
            for bits in itertools.product((0, 1), repeat=len(pairs)):
                swaps = dict(zip(pairs, bits, strict=True))
                to = tuple(other[x] if swaps[max(x, other[x])] else x for x in state)
                moves[i, index[to]] += 1 / n / 2 ** len(pairs)
    law, distance = np.eye(len(states))[0], 1.0
    for r in range(1, 40):
        law = law @ moves
        distance = 0.5 * np.abs(law - 1 / len(states)).sum()
        shrink = (n + q) / (2 * n)
        assert distance <= 2 * n**1.5 / (r + 2) * shrink ** (r / 2 + 1) + 1e-12
    assert distance < 0.02


def test_number_of_rounds_meets_the_error_bound():
    for n in (3, 1000, 10**6, 2**31 - 1):
        r, total, size = _order.rounds(n), 0.0, n
        while size > 1:
            total += 2 * size**1.5 / (r + 2) * 0.75 ** (r / 2 + 1)
            size = -(-size // 2)
        # Centres are drawn with a bias of up to 2⁻³³.
        assert total * (1 + 2**-33) ** (r / 2 + 1) < 2**-90


@pytest.mark.matrix
def test_bins_of_a_billion_examples_are_disjoint_and_binomial():
    """A false alarm on the binomial sizes in 1e9, and no example twice."""
    n, bins, b = 10**9, 10**6, 1300
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


@pytest.mark.diagonal
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
