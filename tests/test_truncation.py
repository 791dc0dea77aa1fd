"""The privacy cost of Poisson batches that keep a random subset on overflow."""

import dataclasses
import functools
import itertools

import dp_accounting.pld.privacy_loss_distribution as peer
import jax
import mpmath as mp
import numpy as np
import pytest
import reference_pld
import scipy.stats

from dpjax import Adjacency
from dpjax.accounting import pld, truncation
from dpjax.accounting._numerics.pld.pairs import TAIL_ERROR, upper_tail

ALL = tuple(Adjacency)
# All adjacencies share two programs, which take seconds to compile: the default suite
# runs each in one test.
ONE_OF_ALL = [
    pytest.param(x, marks=[pytest.mark.matrix] if x is not Adjacency.ADD_REMOVE else [])
    for x in ALL
]


def compiled_function(adjacency, function):
    """δ or ε of T steps, compiled once for each kind of pair; sizes are traced."""
    return _compile(adjacency is Adjacency.REPLACE, function)


@functools.cache
def _compile(replace, function):
    adjacency = Adjacency.REPLACE if replace else Adjacency.ZERO_OUT

    @jax.jit
    def value_of_steps(asked, noise, rate, n, b, count):
        step = truncation.poisson_gaussian(
            noise, rate, num_examples=9, max_batch_size=3, adjacency=adjacency
        )
        (one,) = step.steps
        event = dataclasses.replace(one.event, num_examples=n, max_batch_size=b)
        return function(pld.compose(pld.of(event), count), asked)

    return value_of_steps


def overflow_probabilities(n, q, b):
    """P[D >= b], and q E[b / (D + 1) | D >= b], for D ~ Binomial(n − 1, q)."""
    d = np.arange(b, n)
    chances = scipy.stats.binom.pmf(d, n - 1, q)
    return chances.sum(), q * np.sum(chances * b / (d + 1)) / chances.sum()


@pytest.mark.parametrize(
    ("k", "n", "q"),
    [
        (1, 1, 0.3),
        (1, 2, 1e-18),
        (9, 9, 0.999),
        (50, 1000, 0.05),
        (100, 1000, 0.05),
        (20, 1000, 0.05),
        (999_990, 10**6, 0.9999),
        (10**6 + 5000, 10**9, 1e-3),
        pytest.param(2**30 + 200_000, 2**31 - 2, 0.5, marks=pytest.mark.slow),
    ],
)
def test_binomial_tails_match_mpmath(x64, k, n, q):
    with mp.workdps(40):
        p, upper = mp.mpf(q), k >= (n + 1) * q

        def pmf(j):
            log_ways = mp.loggamma(n + 1) - mp.loggamma(j + 1) - mp.loggamma(n - j + 1)
            return mp.exp(log_ways + j * mp.log(p) + (n - j) * mp.log1p(-p))

        j = k if upper else k - 1
        term, total = pmf(j), mp.mpf(0)
        while 0 <= j <= n and term > total * mp.mpf(10) ** -20:
            total += term
            if upper:
                term, j = term * (n - j) * p / ((j + 1) * (1 - p)), j + 1
            else:
                term, j = term * j * (1 - p) / ((n - j + 1) * p), j - 1
        exact = total if upper else 1 - total
    tail = TAIL(float(k), float(n), q)
    assert abs(float(tail) / float(exact) - 1) < TAIL_ERROR / 100


TAIL = jax.jit(upper_tail)


def test_certain_and_impossible_tails_are_exact(x64):
    for k, n, q, exact in [(3, 2, 0.5, 0), (2, 2, 1.0, 1), (1, 5, 0.0, 0)]:
        assert float(TAIL(float(k), float(n), q)) == exact


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE])
def test_delta_of_one_step_is_the_mixture_over_overflow(x64, adjacency):
    kind = "replace" if adjacency is Adjacency.REPLACE else "remove"
    delta = compiled_function(adjacency, pld.delta)
    for n, b, q, noise in [(6, 2, 0.4, 1.3), (50, 8, 0.1, 0.7), (9, 8, 0.5, 2.1)]:
        full, fraction = overflow_probabilities(n, q, b)
        for epsilon in (0.0, 0.4, 3.0):
            usual = reference_pld.single_delta(kind, 1 / noise, q, epsilon)
            shifted = reference_pld.single_delta("fixed", 2 / noise, fraction, epsilon)
            exact = float((1 - full) * usual + full * shifted)
            result = float(delta(epsilon, noise, q, n, b, 1))
            # The error of a grid of 4096 intervals, as for one Poisson step.
            assert exact * (1 - 1e-7) <= result <= exact * 1.001 + 1e-12


def outputs_by_batch_size(mine, others, q, b):
    """Means of one step's outputs and their probabilities, for each min(|D|, b).

    `mine` is the example's contribution, or empty if it is absent.
    """
    cases = [[] for _ in range(b + 1)]
    for size in range(len(others) + 1):
        for drawn in itertools.combinations(others, size):
            chance = q**size * (1 - q) ** (len(others) - size)
            batches = [((), 1.0)] if not mine else [((), 1 - q), (tuple(mine), q)]
            for own, share in batches:
                batch = drawn + own
                subsets = list(itertools.combinations(batch, min(b, len(batch))))
                cases[min(size, b)] += [
                    (sum(k), chance * share / len(subsets)) for k in subsets
                ]
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ALL)
def test_delta_bounds_all_contributions(x64, adjacency):
    n, b, q, noise = 5, 2, 0.45, 0.9
    random = np.random.default_rng(3)
    z, width = np.linspace(-12.0, 12.0, 2401), 0.01
    epsilons = np.array([0.0, 0.5, 1.5, 3.0])
    delta = compiled_function(adjacency, pld.delta)
    bound = np.array([delta(e, noise, q, n, b, 1) for e in epsilons])
    worst = np.zeros(4)
    for trial in range(40):
        others = random.choice([-1.0, 1.0], n - 1) * (
            random.uniform(size=n - 1) if trial % 2 else 1
        )
        mine, new = random.choice([-1.0, 1.0, random.uniform(-1, 1)], 2)
        if trial == 0:  # the example against all others
            others, mine, new = -np.ones(n - 1), 1.0, -1.0
        second = {
            Adjacency.ADD_REMOVE: [],
            Adjacency.ZERO_OUT: [0.0],
            Adjacency.REPLACE: [new],
        }[adjacency]
        gaps = np.zeros((2, 4))
        for pair in zip(
            outputs_by_batch_size([mine], others, q, b),
            outputs_by_batch_size(second, others, q, b),
            strict=True,
        ):
            p, r = (
                np.sum(
                    [c * scipy.stats.norm.pdf(z, m, noise) for m, c in outcomes], axis=0
                )
                for outcomes in pair
            )
            for i, (x, y) in enumerate(((p, r), (r, p))):
                over = np.maximum(x - np.exp(epsilons)[:, None] * y, 0)
                gaps[i] += over.sum(1) * width
        worst = np.maximum(worst, gaps.max(0))
    # The rectangle rule errs by half the slope at a kink times the square of a step.
    assert np.all(worst <= bound + 2 * width**2)
    # Contributions opposite to the example's attain the bound. Under ZERO_OUT they do
    # so at small rates only: else a step without it often lacks the displaced one, too.
    if adjacency is Adjacency.ZERO_OUT:
        assert np.all(worst[:2] >= 0.5 * bound[:2])
    else:
        assert np.all(worst >= 0.99 * bound)


_GRID = 1e-3  # the largest excess of ε by the peer's discretization


def epsilon_by_peer(noise, q, n, b, count, delta, adjacency):
    """ε with the pair proven for ADD_REMOVE on overflow, and with the peer's own.

    The peer takes REPLACE with twice the norm for any overflow: a shift by four.
    """
    full, fraction = overflow_probabilities(n, q, b)
    relation = (
        peer.NeighborRel.REPLACE_ONE
        if adjacency is Adjacency.REPLACE
        else peer.NeighborRel.ADD_OR_REMOVE_ONE
    )
    make = functools.partial(
        peer.from_gaussian_mechanism, value_discretization_interval=_GRID
    )
    shifted = make(noise / 2, sampling_prob=fraction)
    usual = make(noise, sampling_prob=q, neighboring_relation=relation)
    own = peer.from_truncated_subsampled_gaussian_mechanism(
        n,
        q,
        b,
        noise,
        value_discretization_interval=_GRID,
        neighboring_relation=relation,
    )
    return [
        x.self_compose(count).get_epsilon_for_delta(delta)
        for x in (shifted.compute_mixture(usual, full), own)
    ]


@pytest.mark.parametrize(
    "adjacency",
    [pytest.param(Adjacency.ADD_REMOVE, marks=pytest.mark.matrix), Adjacency.REPLACE],
)
@pytest.mark.parametrize(
    ("n", "q", "b", "noise", "count", "delta", "rare"),
    [
        pytest.param(
            *(10_000, 0.01, 150, 1.0, 1000, 1e-5, True), marks=pytest.mark.slow
        ),
        pytest.param(*(100, 0.1, 15, 2.0, 100, 1e-6, False), marks=pytest.mark.matrix),
        (100, 0.1, 8, 2.0, 100, 1e-6, False),
    ],
)
def test_epsilon_agrees_with_dp_accounting(
    x64, adjacency, n, q, b, noise, count, delta, rare
):
    proven, theirs = epsilon_by_peer(noise, q, n, b, count, delta, adjacency)
    ours = float(
        compiled_function(adjacency, pld.epsilon)(delta, noise, q, n, b, count)
    )
    assert proven - _GRID < ours < theirs * 1.001
    if rare:
        assert theirs - _GRID < ours


def delta_by_quadrature(noise, q, epsilon, adjacency):
    """δ(ε) of one Poisson step in which nothing overflows, to 40 digits."""
    kinds = ("replace",) if adjacency is Adjacency.REPLACE else ("remove", "add")
    return max(reference_pld.single_delta(k, 1 / noise, q, epsilon) for k in kinds)


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ONE_OF_ALL)
def test_one_step_with_little_noise_at_full_capacity_is_tight(x64, adjacency):
    epsilon = compiled_function(adjacency, pld.epsilon)
    # A batch that overflows has another privacy loss, which is large with this noise.
    for n, size, noise, delta in [
        (1000, 10, 0.2, 1e-5),
        (1000, 10, 0.05, 1e-5),
        (10, 5, 0.1, 1e-5),
        (10_000, 100, 0.02, 1e-5),
        (100_000, 1, 0.1, 1e-7),
    ]:
        q = size / n
        result = float(epsilon(delta, noise, q, n, n, 1))
        # The documented tightness is for a smaller ε; that of the intervals is the
        # square of their width over 6: of (1/σ + 12)/4096 with this noise.
        tight = max(1e-3, (1 / noise + 12) ** 2 / 4096**2)
        assert delta_by_quadrature(noise, q, result, adjacency) <= delta
        assert delta_by_quadrature(noise, q, result * (1 - tight), adjacency) > delta


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adjacency", "n", "size", "noise", "count", "interval"),
    [
        *((adjacency, 1000, 10, 0.2, 100, 1e-3) for adjacency in ALL),
        (Adjacency.REPLACE, 60_000, 600, 0.15, 1000, 1e-2),
    ],
)
def test_composed_steps_with_little_noise_agree_with_dp_accounting(
    x64, adjacency, n, size, noise, count, interval
):
    """Without overflow, and with enough of it to determine ε."""
    q, delta = size / n, 1e-5
    relation = (
        peer.NeighborRel.REPLACE_ONE
        if adjacency is Adjacency.REPLACE
        else peer.NeighborRel.ADD_OR_REMOVE_ONE
    )
    make = functools.partial(
        peer.from_gaussian_mechanism, value_discretization_interval=interval
    )
    usual = make(noise, sampling_prob=q, neighboring_relation=relation)
    epsilon = compiled_function(adjacency, pld.epsilon)
    theirs = usual.self_compose(count).get_epsilon_for_delta(delta)
    for b in (n, n - 1, size + 10 * round(size**0.5)):
        ours = float(epsilon(delta, noise, q, n, b, count))
        assert theirs - interval * count < ours < theirs * 1.001, b
    b = 2 * size if size < 100 else size + 3 * round(size**0.5)
    full, fraction = overflow_probabilities(n, q, b)
    shifted = make(noise / 2, sampling_prob=fraction)
    mixture = shifted.compute_mixture(usual, full).self_compose(count)
    theirs = mixture.get_epsilon_for_delta(delta)
    ours = float(epsilon(delta, noise, q, n, b, count))
    assert theirs - interval * count < ours < theirs * 1.001


@pytest.mark.slow
def test_derivatives_match_differences_and_limits_are_exact(x64):
    epsilon = compiled_function(Adjacency.ZERO_OUT, pld.epsilon)
    args = 1e-6, 2.0, 0.1, 100, 15, 100

    def epsilon_at(noise, rate):
        return epsilon(args[0], noise, rate, *args[3:])

    for place, h in ((0, 1e-4), (1, 1e-6)):
        up, down = (
            epsilon_at(*[x + s * h * (i == place) for i, x in enumerate((2.0, 0.1))])
            for s in (1, -1)
        )
        slope = jax.grad(epsilon_at, place)(2.0, 0.1)
        assert abs(slope / ((up - down) / (2 * h)) - 1) < 1e-3
    assert epsilon(1e-6, 2.0, 0.0, 100, 15, 100) == 0.0
    for n, b in [(100.0, 0.0), (100.0, 0.5), (100.0, np.nan), (np.nan, 15.0)]:
        assert epsilon(1e-6, 2.0, 0.1, n, b, 100) == np.inf
    certain = float(epsilon(1e-6, 2.0, 1.0, 100, 15, 1))
    fixed = pld.epsilon(pld.subsampled_gdp(1.0, 0.15), 1e-6)
    # All are drawn and 15 of 100 kept: fixed-size sampling.
    assert float(fixed) * (1 - 1e-6) <= certain < float(fixed) * 1.001


def test_full_capacity_equals_untruncated_poisson():
    def truncated_step(n, b):
        return truncation.poisson_gaussian(
            1.0, 0.1, num_examples=n, max_batch_size=b, adjacency=Adjacency.REPLACE
        )

    assert truncated_step(9, 9) == pld.poisson_gaussian(
        1.0, 0.1, adjacency=Adjacency.REPLACE
    )
    with pytest.raises(ValueError, match="the same adjacency"):
        pld.convolve(
            truncated_step(9, 3),
            pld.poisson_gaussian(1.0, 0.1, adjacency=Adjacency.ZERO_OUT),
        )
    for n, b, name in [(0, 3, "num_examples"), (9, 0, "max_batch_size")]:
        with pytest.raises(ValueError, match=f"^{name}"):
            truncated_step(n, b)


def test_overflow_delta_saturates_at_large_epsilon():
    add = functools.partial(
        truncation.overflow_delta, num_examples=100, sampling_rate=0.1, num_steps=9
    )
    epsilons = np.array([0.0, 709.0, 710.0, 1e4, np.inf], np.float32)
    np.testing.assert_array_equal(add(epsilons, max_batch_size=100), 0.0)
    at = jax.jit(functools.partial(add, max_batch_size=99))
    result = np.asarray(at(np.append(epsilons, np.float32([np.nan, -1.0]))))
    np.testing.assert_array_equal(result[1:], 1.0)
    assert 0 < result[0] <= np.finfo(np.float32).tiny

    @jax.jit
    def slopes(epsilon):
        return [
            jax.grad(lambda e, b=b: add(e, max_batch_size=b))(epsilon)
            for b in (99, 100)
        ]

    assert [float(x) for x in slopes(1e4)] == [0.0, 0.0]
