"""Samplers: which examples are in a batch, how often, and in what shape.

A statistical test compares a p-value with ALARM, its rate of false alarms over keys.
"""

import functools
import itertools
import math
from fractions import Fraction
from math import comb

import chex
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import scipy.sparse.csgraph
import scipy.stats
from jax.sharding import NamedSharding, PartitionSpec

from dpjax import sampling
from dpjax.accounting import events
from dpjax.sampling import _binomial, _order

# The key of seed 7, made without compiling anything.
KEY = jax.random.wrap_key_data(np.array([0, 7], np.uint32))
ALARM = 1e-6


def is_uniform(observed, cells):
    """Whether values are spread evenly over cells, by the chi-square test."""
    counts = np.bincount(np.asarray(observed).ravel(), minlength=cells)
    assert counts.size == cells
    assert counts.sum() >= 20 * cells
    return scipy.stats.chisquare(counts).pvalue > ALARM


@pytest.mark.diagonal
@pytest.mark.parametrize(("n", "b"), [(12, 4), (13, 4), (5, 8), (1, 1), (7, 1)])
def test_each_epoch_has_every_example_once(n, b):
    num_steps = -(-n // b)
    steps = np.array([*range(num_steps), num_steps, 2**31, 2**32 - 1], np.uint32)

    @jax.jit
    def all_epochs():
        cyclic = jax.vmap(lambda i: sampling.cyclic_step(n, b, step=i))
        draw = {"key": KEY, "epoch": 3}
        reshuffled = jax.vmap(lambda i: sampling.reshuffled_step(n, b, **draw, step=i))
        return (
            (sampling.cyclic(n, b), cyclic(steps)),
            (sampling.reshuffled(n, b, **draw), reshuffled(steps)),
        )

    for batch, by_step in jax.device_get(all_epochs()):
        alone = jax.tree.map(lambda x: x[:num_steps], by_step)
        chex.assert_trees_all_equal(alone, batch)
        assert not by_step.mask[num_steps:].any()
        assert batch.indices.shape == batch.mask.shape == (-(-n // b), b)
        sampled = np.sort(np.asarray(batch.indices)[np.asarray(batch.mask)])
        np.testing.assert_array_equal(sampled, np.arange(n))


def test_cyclic_is_in_order():
    batch = jax.device_get(jax.jit(lambda: sampling.cyclic(10, 4))())
    np.testing.assert_array_equal(batch.indices[0], [0, 1, 2, 3])
    np.testing.assert_array_equal(batch.mask[2], [True, True, False, False])


def test_reshuffled_order_depends_only_on_epoch_and_key():
    def order(key, epoch):
        return sampling.reshuffled(50, 10, key=key, epoch=epoch).indices

    @jax.jit
    def orders(epoch):
        others = order(KEY, epoch + 1), order(jax.random.key(8), epoch)
        return order(KEY, 0), order(KEY, epoch), *others

    first, again, *others = jax.device_get(orders(0))
    np.testing.assert_array_equal(first, again)
    for other in others:
        assert np.any(first != other)
    # Each position is uniform: 4000 epochs, 5 values, z = 5 in 25 cells.
    many = jax.jit(
        jax.vmap(lambda e: sampling.reshuffled(5, 5, key=KEY, epoch=e).indices.ravel())
    )(np.arange(4000))
    counts = np.stack(
        [np.bincount(column, minlength=5) for column in np.asarray(many).T]
    )
    assert np.max(np.abs(counts - 800)) < 5 * np.sqrt(4000 * 0.2 * 0.8)


@pytest.mark.diagonal
@pytest.mark.parametrize("rate", [0.003, 0.2, 0.9])
def test_poisson_sampling_is_independent_by_example(rate):
    n, steps = 400, 1500
    draw = functools.partial(sampling.poisson, n, rate, max_batch_size=n, key=KEY)
    batches = jax.jit(jax.vmap(lambda step: draw(step=step)))(np.arange(steps))
    sampled = np.zeros((steps, n), int)
    rows, places = np.nonzero(np.asarray(batches.mask))
    np.add.at(sampled, (rows, np.asarray(batches.indices)[rows, places]), 1)
    assert sampled.max() == 1  # no example twice
    spread = np.sqrt(rate * (1 - rate))
    # z = 6 over 400 columns, 1500 rows, one total: false alarm below 1e-5
    # (the binomial tails at rate 0.003 are heavier: z = 9 there).
    z = 9 if rate < 0.01 else 6
    assert np.max(np.abs(sampled.mean(0) - rate)) < z * spread / np.sqrt(steps)
    assert np.max(np.abs(sampled.mean(1) - rate)) < z * spread / np.sqrt(n)
    assert abs(sampled.mean() - rate) < z * spread / np.sqrt(n * steps)


@pytest.mark.matrix
def test_poisson_rate_is_exact_at_tiny_rates():
    # A float32 uniform below 1e-8 happens with probability 2⁻²³, twelve times more.
    draw = jax.jit(
        jax.vmap(
            lambda step: sampling.poisson(
                1_000_000, 1e-8, max_batch_size=64, key=KEY, step=step
            ).mask.sum()
        )
    )
    total = np.asarray(draw(np.arange(20_000))).sum()
    # Poisson with mean 200: both tails together have probability 1e-6 at z = 4.9.
    assert abs(total - 200) < 75
    for rate, everyone in [(0.0, 0), (1.0, 9)]:
        draw = functools.partial(sampling.poisson, 9, rate, max_batch_size=9)
        batch = jax.jit(lambda draw=draw: draw(key=KEY, step=0))()
        assert np.sum(batch.mask) == everyone


@pytest.mark.parametrize(
    ("n", "rate", "most"),
    [
        (1, 0.3, 1),
        (6, 0.3, 6),
        (30, 0.77, 30),
        (30, 0.77, 11),
        (40, 0.999, 7),
        (200, 1e-12, 200),
        (25, 1 - 2**-53, 25),
        (9, 5e-324, 9),
        (7, 0.0, 7),
        (7, 1.0, 7),
        (7, 1.0, 3),
    ],
)
def test_count_thresholds_are_binomial_to_127_bits(n, rate, most):
    q = Fraction(rate)
    exact, total = [], Fraction(0)
    for k in range(most):  # P[count <= k]
        total += comb(n, k) * q**k * (1 - q) ** (n - k)
        exact.append(total)
    thresholds, first = _binomial.table(n, rate, most)
    rows = [sum(int(w) << 32 * i for i, w in enumerate(t[::-1])) for t in thresholds]
    result = [rows[0]] * first + rows if rows else []
    result += [2**128] * (most - len(result))
    for threshold, below in zip(result, exact, strict=True):
        # Up by less than 2⁻¹²⁷, so that no count is more likely to be above k.
        assert 0 <= Fraction(threshold, 2**128) - below < Fraction(1, 2**127)


def test_count_thresholds_for_a_billion_examples_are_accurate():
    n, rate = 10**9, 1e-3
    table = _binomial.table(n, rate, n)
    assert len(table.thresholds) < 27 * np.sqrt(n * rate)
    with mp.workdps(45):
        q, k = mp.mpf(rate), 10**6 - 2500
        pmf = mp.exp(
            mp.loggamma(n + 1)
            - mp.loggamma(k + 1)
            - mp.loggamma(n - k + 1)
            + k * mp.log(q)
            + (n - k) * mp.log1p(-q)
        )
        tail, ratio, j = mp.mpf(0), mp.mpf(1), k
        while ratio > mp.mpf(10) ** -42:
            tail += ratio
            ratio *= j * (1 - q) / ((n - j + 1) * q)
            j -= 1
        words = table.thresholds[k - table.first]
        result = sum(int(w) << 32 * i for i, w in enumerate(words[::-1]))
        assert abs(result / mp.mpf(2) ** 128 - pmf * tail) < mp.mpf(2) ** -120


def test_count_draw_compares_128_bits_as_one_number(monkeypatch):
    thresholds = np.array([[0, 0, 0, 5], [0, 7, 0, 0], [3, 0, 0, 1]], np.uint32)
    monkeypatch.setattr(_binomial, "table", lambda *_: _binomial.Table(thresholds, 4))

    @jax.jit
    def draw(words):
        monkeypatch.setattr(_binomial, "random_words", lambda *_: words)
        return _binomial.draw(KEY, 0, 0.0, 0)

    edges = [sum(int(w) << 32 * i for i, w in enumerate(t[::-1])) for t in thresholds]
    for edge, below in zip(edges, (0, 5, 6), strict=True):
        for u, count in ((edge - 1, below), (edge, 7 - edges[::-1].index(edge))):
            words = np.array([u >> s & 0xFFFFFFFF for s in (96, 64, 32, 0)], np.uint32)
            assert draw(words) == count


@pytest.mark.diagonal
@pytest.mark.parametrize(("n", "rate", "b"), [(12, 0.4, 12), (48, 0.05, 12)])
def test_poisson_counts_and_pairs_have_expected_frequencies(n, rate, b):
    """The first case draws all of n, the second the first occurrences."""
    steps = 20_000
    draw = functools.partial(sampling.poisson, n, rate, max_batch_size=b, key=KEY)
    indices, mask = jax.jit(jax.vmap(lambda i: draw(step=i)))(np.arange(steps))
    counts = np.bincount(np.asarray(mask).sum(1), minlength=b + 1)
    expected = steps * scipy.stats.binom.pmf(np.arange(b + 1), n, rate)
    enough = expected > 20
    observed = [*counts[enough], counts[~enough].sum()]
    expected = [*expected[enough], steps - expected[enough].sum()]
    assert scipy.stats.chisquare(observed, expected).pvalue > ALARM
    sampled = np.zeros((steps, n))
    rows, places = np.nonzero(np.asarray(mask))
    sampled[rows, np.asarray(indices)[rows, places]] = 1
    # Each entry is binomial: z = 6.5, in at most 48² entries, is 2e-7 altogether where
    # tails are normal; that of 50 expected pairs reaches 6.5 with 1e-8.
    together = sampled.T @ sampled
    expected = np.where(np.eye(n), rate, rate**2) * steps
    assert np.all(np.abs(together - expected) < 6.5 * np.sqrt(expected))


@pytest.mark.diagonal
@pytest.mark.parametrize(("n", "rate", "b"), [(8, 0.6, 2), (6, 0.7, 3), (5, 1.0, 4)])
def test_poisson_overflow_keeps_a_random_subset(n, rate, b):
    draw = functools.partial(sampling.poisson, n, rate, max_batch_size=b, key=KEY)
    indices, mask = jax.jit(jax.vmap(lambda i: draw(step=i)))(np.arange(10_000))
    full = np.asarray(indices)[np.asarray(mask).all(1)]
    expected = scipy.stats.binom.sf(b - 1, n, rate)
    assert scipy.stats.binomtest(len(full), 10_000, expected).pvalue > ALARM
    subsets = list(itertools.combinations(range(n), b))
    retained = [subsets.index(tuple(sorted(row))) for row in full.tolist()]
    assert is_uniform(retained, len(subsets))


@pytest.mark.diagonal("redrawn")
@pytest.mark.parametrize(("n", "count"), [(9, 2), (5, 3), (4, 4)])
@pytest.mark.parametrize("redrawn", [False, True])
def test_distinct_numbers_are_uniform_over_orders(n, count, redrawn, monkeypatch):
    if redrawn:  # so few draws, or bits to sort by, that many must be drawn again
        random_words = _order.random_words

        def few_random_bits(key, shape):
            few = np.uint32(3 if len(shape) == 2 else 2**32 - 1)
            return random_words(key, shape) & few

        monkeypatch.setattr(_order, "_draws", lambda *_: count)
        monkeypatch.setattr(_order, "random_words", few_random_bits)
    draw = jax.jit(
        lambda: jax.vmap(lambda key: _order.distinct(key, n, count))(
            jax.random.split(KEY, 8_000)
        )
    )
    orders = list(itertools.permutations(range(n), count))
    drawn = draw().tolist()
    assert is_uniform([orders.index(tuple(row)) for row in drawn], len(orders))


@pytest.mark.diagonal
@pytest.mark.parametrize("n", [2**31 - 1, 3 * 2**29, 2**30 + 1])
def test_distinct_numbers_are_uniform_up_to_the_largest(n):
    # Without rejection, remainders below 2³² mod n would be up to twice as likely.
    draw = jax.jit(lambda: _order.distinct(KEY, n, 40_000))
    drawn = np.asarray(draw()).astype(np.int64)
    assert drawn.min() >= 0
    assert drawn.max() < n
    assert len(set(drawn.tolist())) == 40_000
    assert is_uniform(drawn * 24 // n, 24)


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("draw", "size"),
    [
        (lambda k: sampling.poisson(10**8, 1e-6, max_batch_size=200, key=k, step=1), 6),
        (lambda k: sampling.fixed_size(2**31 - 1, 200, key=k, step=1), 4),
        (lambda k: sampling.reshuffled_step(10**9, 200, key=k, epoch=1, step=9), 4),
        (
            lambda k: sampling.cyclic_poisson(
                2**31 - 1, 1e-6, num_groups=20, max_batch_size=200, key=k, step=39
            ),
            6,
        ),
    ],
    ids=["poisson", "fixed_size", "reshuffled_step", "cyclic_poisson"],
)
def test_sampling_step_uses_memory_linear_in_the_batch(draw, size):
    def iter_arrays(jaxpr):
        for equation in jaxpr.eqns:
            yield from (v.aval for v in equation.outvars)
            for value in jax.tree.leaves(list(equation.params.values())):
                if hasattr(value, "jaxpr"):
                    yield from iter_arrays(value.jaxpr)

    program = jax.make_jaxpr(lambda key: draw(key))(KEY)
    assert max(np.prod(a.shape) for a in iter_arrays(program.jaxpr)) < size * 200
    indices, mask = jax.jit(draw)(KEY)
    retained = np.asarray(indices)[np.asarray(mask)]
    assert len(set(retained.tolist())) == len(retained) > 50
    assert retained.max() > 5e7


@pytest.mark.slow
def test_orders_of_all_sizes_are_permutations(monkeypatch):
    def assert_is_permutation(n, places):
        values = _order.values_at(KEY, n, jnp.minimum(places, np.uint32(n - 1)))
        np.testing.assert_array_equal(np.sort(values[:n]), np.arange(n))

    with jax.disable_jit():  # compile one operation at a time, once for all sizes
        places = jnp.arange(2**17, dtype=jnp.uint32)
        for n in (2**14 + 1, 2**14 + 19, 129**2, 129**2 + 1, 130 * 129, 99_991):
            assert_is_permutation(n, places)
        monkeypatch.setattr(_order, "SORTED", 0)
        monkeypatch.setattr(_order, "_ROUNDS", 2)
        for n in (*range(1, 27), 35, 36, 37, 99, 100, 101):
            assert_is_permutation(n, places[:128])


@pytest.mark.slow
def test_large_orders_pass_randomness_tests():
    n, runs = 2**14 + 3, 300
    order = jax.jit(
        jax.vmap(lambda e: sampling.reshuffled(n, n, key=KEY, epoch=e).indices[0])
    )
    orders = np.asarray(order(jnp.arange(runs))).astype(np.int64)
    # The image of one position, and of two neighbours in a row or column of the grid.
    columns = -(-n // 129)
    few = jax.jit(
        jax.vmap(
            lambda key: _order.values_at(
                key, n, jnp.array([0, 1, columns, n - 1], jnp.uint32)
            )
        )
    )(jax.random.split(KEY, 20_000))
    few = np.asarray(few).astype(np.int64) * 16 // n
    for place in range(4):
        assert is_uniform(few[:, place], 16)
    for i, j in itertools.combinations(range(4), 2):
        assert is_uniform(few[:, i] * 16 + few[:, j], 256)
    # Differences of neighbours, along rows and columns.
    for step in (1, columns):
        assert is_uniform((orders[:, step:] - orders[:, :-step]) % n * 64 // n, 64)
    # Sums over runs: z = 5 has 6e-7. Fixed points are Poisson with mean and variance 1;
    # n cycles of length j have mean 1 / j each, and H_n − Σ j⁻² for the variance.
    fixed = np.sum(orders == np.arange(n))
    assert abs(fixed - runs) < 5 * np.sqrt(runs)
    cycles = [
        scipy.sparse.csgraph.connected_components(
            scipy.sparse.csr_array((np.ones(n), (np.arange(n), row)))
        )[0]
        for row in orders
    ]
    harmonic = np.sum(1 / np.arange(1, n + 1))
    spread = np.sqrt(runs * (harmonic - np.pi**2 / 6))
    assert abs(sum(cycles) - runs * harmonic) < 5 * spread
    odd = int(np.sum((n - np.array(cycles)) % 2))
    assert scipy.stats.binomtest(odd, runs).pvalue > ALARM


@pytest.mark.matrix
def test_orders_are_independent_of_noise_from_the_same_key():
    n = 1000

    def ranks(x):
        return np.argsort(np.argsort(np.asarray(x)))

    @jax.jit
    def draw():
        orders = [
            sampling.reshuffled(n, n, key=KEY, epoch=3).indices[0],
            sampling.fixed_size(n, n, key=KEY, step=3).indices,
            sampling.poisson(n, 1.0, max_batch_size=n, key=KEY, step=3).indices,
        ]
        fold = jax.vmap(jax.random.fold_in, (None, 0))
        leaves = jnp.arange(3)
        step = jax.random.fold_in(KEY, 3)
        inner = fold(step, leaves)
        innermost = jax.vmap(fold, (0, None))(inner, leaves).ravel()
        keys = jnp.concatenate([step[None], inner, innermost])
        return orders, jax.vmap(lambda key: jax.random.normal(key, (n,)))(keys)

    drawn, noise = jax.device_get(draw())
    noise = [ranks(line) for line in noise]
    assert len(noise) == 1 + 3 + 9
    for order in drawn:
        for line in noise:
            for other in (line, np.argsort(line)):
                # z = 6: 2e-9 each, below 2e-7 for all of them
                assert abs(np.corrcoef(np.asarray(order), other)[0, 1]) < 6 / n**0.5
    for a, b in itertools.combinations(drawn, 2):
        assert abs(np.corrcoef(np.asarray(a), np.asarray(b))[0, 1]) < 6 / n**0.5


@pytest.mark.slow
def test_batches_agree_under_jit_vmap_x64_and_meshes():
    def draw(key, i):
        return (
            sampling.poisson(90, 0.1, max_batch_size=16, key=key, step=i),
            sampling.reshuffled_step(2**14 + 1, 16, key=key, epoch=i, step=i),
        )

    keys, steps = jax.random.split(KEY, 4), jnp.array([0, 1, 2, 2**31 - 1])
    plain = jax.jit(draw)
    expected = [plain(keys[i], steps[i]) for i in range(4)]

    def assert_same_batches(batches, i):
        chex.assert_trees_all_equal(batches, expected[i], strict=True)

    assert_same_batches(plain(keys[1], np.uint32(1)), 1)
    with jax.enable_x64(True):
        assert_same_batches(plain(keys[3], jnp.int64(2**31 - 1)), 3)
    both = jax.jit(jax.vmap(draw))
    many = [both(keys, steps)]
    mesh = jax.make_mesh((4,), ("x",))
    split = jax.device_put((keys, steps), NamedSharding(mesh, PartitionSpec("x")))
    with jax.set_mesh(mesh):
        sharded = jax.shard_map(
            lambda key, i: jax.tree.map(lambda x: x[None], draw(key[0], i[0])),
            in_specs=PartitionSpec("x"),
            out_specs=PartitionSpec("x"),
        )
        many += [jax.tree.map(np.asarray, f(*split)) for f in (both, jax.jit(sharded))]
    for batches in many:
        for i in range(4):
            assert_same_batches(jax.tree.map(lambda x, i=i: x[i], batches), i)
    for indices, mask in plain(jax.random.key(3, impl="rbg"), np.uint32(2**32 - 1)):
        retained = np.asarray(indices)[np.asarray(mask)].tolist()
        assert len(set(retained)) == len(retained)


@pytest.mark.matrix
def test_extreme_sizes_and_rates_give_valid_batches():
    cases = [
        (1, 1.0, 1, 1),
        (1, 0.0, 1, 0),
        (3, 1.0, 8, 3),
        (8, 1.0, 3, 3),
        (2**31 - 1, 1e-12, 2, 0),
        (2**31 - 1, 1.0, 2, 2),
        (7, 5e-324, 7, 0),
    ]
    last = -(-(2**31 - 1) // 1000) - 1

    @jax.jit
    def draw(key):
        drawn = [
            sampling.poisson(n, rate, max_batch_size=b, key=key, step=0)
            for n, rate, b, _ in cases
        ]
        return (
            drawn,
            sampling.cyclic_step(2**31 - 1, 1000, step=last),
            sampling.reshuffled_step(2**31 - 1, 1000, key=key, epoch=0, step=last),
        )

    drawn, cyclic, reshuffled = jax.device_get(draw(KEY))
    for (n, _, b, sampled), (indices, mask) in zip(cases, drawn, strict=True):
        assert indices.shape == mask.shape == (b,)
        retained = np.asarray(indices)[np.asarray(mask)]
        assert len(set(retained.tolist())) == len(retained) == sampled
        assert np.all(mask == (np.arange(b) < sampled))
        assert np.all((indices >= 0) & (indices < n))
        assert not np.any(np.asarray(indices)[sampled:])
    for indices, mask in (cyclic, reshuffled):
        assert mask.sum() == (2**31 - 1) % 1000
        assert np.all(indices >= 0)
        assert indices.max() > 2**30
    assert cyclic.indices.max() == 2**31 - 2


@pytest.mark.diagonal
@pytest.mark.parametrize(("n", "groups"), [(23, 5), (24, 4), (7, 7), (6, 1)])
def test_cyclic_poisson_is_independent_within_its_group(n, groups):
    rate, steps = 0.3, 400 * groups
    draw = functools.partial(
        sampling.cyclic_poisson, n, rate, num_groups=groups, max_batch_size=n, key=KEY
    )
    indices, mask = jax.jit(jax.vmap(lambda i: draw(step=i)))(np.arange(steps))
    sampled = np.zeros((steps, n))
    rows, places = np.nonzero(np.asarray(mask))
    np.add.at(sampled, (rows, np.asarray(indices)[rows, places]), 1)
    assert sampled.max() == 1  # no example twice, and padding is not counted
    mine = np.arange(steps)[:, None] % groups == np.arange(n)[None] % groups
    assert not sampled[~mine].any()
    # 400 steps each: every pair of a group, z = 6.5 in at most 24² entries (2e-8).
    for group in range(groups):
        part = sampled[group::groups, group::groups]
        expected = 400 * np.where(np.eye(part.shape[1]), rate, rate**2)
        assert np.all(np.abs(part.T @ part - expected) < 6.5 * np.sqrt(expected))


def test_cyclic_poisson_at_rate_one_returns_the_whole_group():
    draw = functools.partial(sampling.cyclic_poisson, 9, 1.0, num_groups=4, key=KEY)
    draw = jax.jit(functools.partial(draw, max_batch_size=3))
    one = jax.device_get(draw(step=np.uint32(2**32 - 4)))
    assert sorted(one.indices[one.mask].tolist()) == [0, 4, 8]
    last = jax.device_get(draw(step=np.uint32(3)))
    assert sorted(last.indices[last.mask].tolist()) == [3, 7]


@pytest.mark.diagonal
@pytest.mark.parametrize(("n", "bins"), [(9, 4), (5, 1), (4, 9)])
def test_random_bins_are_independent_by_example(n, bins):
    epochs = 4000

    def epoch(number):
        return sampling.random_bins(n, bins, max_batch_size=n, key=KEY, epoch=number)

    indices, mask = jax.jit(jax.vmap(epoch))(np.arange(epochs))
    chosen = np.full((epochs, n), -1)
    rows, steps, places = np.nonzero(np.asarray(mask))
    examples = np.asarray(indices)[rows, steps, places]
    assert np.bincount(rows, minlength=epochs).tolist() == [n] * epochs
    chosen[rows, examples] = steps
    assert chosen.min() == 0
    assert chosen.max() == bins - 1
    sampled = chosen[:, :, None] == np.arange(bins)
    # Every choice, and every pair of choices of two examples: z = 6.5 in 36² entries.
    flat = sampled.reshape(epochs, -1).astype(float)
    expected = np.full((n, bins, n, bins), bins**-2.0)
    for i in range(n):
        expected[i, :, i, :] = np.eye(bins) / bins
    expected = epochs * expected.reshape(n * bins, n * bins)
    off = np.abs(flat.T @ flat - expected)
    assert np.all(off <= 6.5 * np.sqrt(expected))


@pytest.mark.diagonal
@pytest.mark.parametrize(("n", "bins", "b"), [(50, 7, 4), (50, 7, 30), (3, 5, 2)])
def test_single_bin_equals_that_of_the_whole_epoch(n, bins, b):
    given = {"max_batch_size": b, "key": KEY}
    epoch = jax.jit(lambda e: sampling.random_bins(n, bins, **given, epoch=e))
    whole, other = jax.device_get((epoch(3), epoch(4)))
    step = functools.partial(sampling.random_bins_step, n, bins, **given, epoch=3)
    by_step = jax.jit(jax.vmap(lambda i: step(step=i)))(np.arange(bins + 1))
    alone = jax.tree.map(lambda x: np.asarray(x)[:bins], by_step)
    np.testing.assert_array_equal(whole.mask, alone.mask)
    np.testing.assert_array_equal(whole.indices, alone.indices)
    counts = whole.mask.sum(1)
    assert counts.sum() == n if b == 30 else counts.max() <= b
    assert not np.asarray(by_step.mask)[bins].any()
    assert np.any(other.mask != whole.mask) or np.any(other.indices != whole.indices)


def test_bin_draws_reject_the_incomplete_multiple(monkeypatch):
    """Draws beyond the last multiple of 3 are rejected, except the last one."""
    top = np.uint32(2**32 - 1)
    draws = np.array([[top, 4, top], [5, top, top], [top, top, top], [7, 7, top]])
    monkeypatch.setattr(jax.random, "bits", lambda *_: jnp.asarray(draws, jnp.uint32))
    draw = functools.partial(sampling.random_bins, 3, 3, max_batch_size=3)
    batch = jax.device_get(jax.jit(lambda: draw(key=KEY, epoch=0))())
    # 5 mod 3, 4 mod 3, and for the last try 2³² − 1 mod 3 = 0.
    chosen = {int(i): k for k in range(3) for i in batch.indices[k][batch.mask[k]]}
    assert chosen == {0: 2, 1: 1, 2: 0}


def test_invalid_groups_and_bins_raise():
    bins = functools.partial(sampling.random_bins, max_batch_size=2, key=KEY, epoch=0)
    poisson = functools.partial(
        sampling.cyclic_poisson, 5, max_batch_size=2, key=KEY, step=0
    )
    for bad in (0, 2.5, 2**31):
        with pytest.raises(ValueError, match="^num_bins must"):
            bins(5, bad)
    for bad in (0, 6, 1.5):
        with pytest.raises(ValueError, match="^num_groups must"):
            poisson(0.5, num_groups=bad)
    with pytest.raises(ValueError, match="^sampling_rate must"):
        poisson(1.5, num_groups=2)
    with pytest.raises(ValueError, match="^epoch must"):
        sampling.random_bins(5, 2, max_batch_size=2, key=KEY, epoch=-1)


def test_invalid_arguments_raise():
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
    for n, b, name in [(2**31, 1, "num_examples"), (5, 2**31, "batch_size")]:
        with pytest.raises(ValueError, match=f"^{name} must be at most"):
            sampling.cyclic_step(n, b, step=0)
    for step in (-1, 2**32, 1.0, True, jnp.zeros(2, int)):
        with pytest.raises(ValueError, match="^step must"):
            sampling.fixed_size(5, 2, key=KEY, step=step)
        with pytest.raises(ValueError, match="^epoch must"):
            sampling.reshuffled(5, 2, key=KEY, epoch=step)


# --- examples with several owners


def random_owners(seed, n=200, num_owners=40):
    rng = np.random.default_rng(seed)
    return [
        rng.choice(num_owners, rng.integers(1, 4), replace=False).tolist()
        for _ in range(n)
    ]


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_no_owner_exceeds_the_limit_and_no_example_fits(most):
    owners = random_owners(seed=most)
    selected = sampling.bound_contributions_of_fixed_graph(owners, most, key=KEY)
    counts = np.bincount([x for i in selected for x in owners[i]], minlength=40)
    assert counts.max() <= most
    others = set(range(len(owners))) - set(selected.tolist())
    assert all(max(counts[x] for x in owners[i]) == most for i in others)
    assert bool(others) == (most < 1000)
    # The same graph in other words: repeated and renamed owners.
    words = [[f"owner {x}" for x in row + row[:1]] for row in owners]
    again = sampling.bound_contributions_of_fixed_graph(words, most, key=KEY)
    np.testing.assert_array_equal(again, selected)


def test_selection_with_one_owner_takes_the_limit_of_each():
    owner = np.array([3, 1, 1, 3, 3, 2, 3, 3])
    counts = np.zeros(8)
    for seed in range(40):
        key = jax.random.wrap_key_data(np.array([0, seed], np.uint32))
        selected = sampling.bound_contributions_of_fixed_graph(
            owner[:, None], 2, key=key
        )
        assert sorted(owner[selected].tolist()) == [1, 1, 2, 3, 3]
        pairs = sampling.bound_contributions_of_fixed_graph(
            np.stack([owner, owner], axis=1), 2, key=key
        )
        np.testing.assert_array_equal(pairs, selected)
        counts[selected] += 1
    # Each of the five examples of owner 3 is selected with probability 2 / 5: 16 of 40,
    # with a standard deviation of 3.1. Five of these are a false alarm in 1e6.
    assert np.all(np.abs(counts[owner == 3] - 16) <= 5 * 3.1)


def test_removing_an_owner_may_change_many_selected_examples():
    """The reason why the graph of owners must be fixed."""
    # Owner 0 shares one example with each other owner, who have one more each.
    shared = [[0, *range(1, 9)]]
    own = [[i] for i in range(1, 9)]
    for seed in range(100):
        key = jax.random.wrap_key_data(np.array([0, seed], np.uint32))
        selected = sampling.bound_contributions_of_fixed_graph(shared + own, 1, key=key)
        if 0 in selected:
            break
    assert selected.tolist() == [0]
    without = sampling.bound_contributions_of_fixed_graph(own, 1, key=KEY)
    assert len(without) == 8


def test_invalid_owners_raise():
    select = functools.partial(sampling.bound_contributions_of_fixed_graph, key=KEY)
    with pytest.raises(ValueError, match="max_contributions must be at least 1; got 0"):
        select([[1]], 0)
    with pytest.raises(ValueError, match="none for example 1"):
        select([[1], []], 1)
    with pytest.raises(ValueError, match="a sequence of owners for each example"):
        select(["eva", "jo"], 1)
    with pytest.raises(ValueError, match="NaN"):
        select(np.array([[1.0], [np.nan]]), 1)
    with pytest.raises(ValueError, match="a sequence of owners for each example"):
        select(np.array([1.0, 2.0]), 1)
    with pytest.raises(ValueError, match="masked"):
        select(np.ma.masked_equal([[1], [2]], 2), 1)
    with pytest.raises(ValueError, match="key"):
        select([[1]], 1, key=0)
    # A class differs from a value of the class, of which a field may be missing.
    assert select([[events.Gaussian], [events.Gaussian]], 1) == [0]
    for missing in (("a", math.nan), frozenset([math.nan])):
        with pytest.raises(ValueError, match="NaN"):
            select([[missing], [missing]], 1)


def test_owners_of_a_data_frame_are_read_by_row():
    owners = [[1, 2], [1, 3], [4, 5]]
    select = functools.partial(sampling.bound_contributions_of_fixed_graph, key=KEY)
    columns = pd.MultiIndex.from_tuples([("x", "p"), ("y", "q")])
    frame = pd.DataFrame(owners, columns=columns)
    np.testing.assert_array_equal(select(frame, 1), select(owners, 1))
    assert len(select(frame, 1)) == 2
