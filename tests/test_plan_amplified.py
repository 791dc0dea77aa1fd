"""Plans with random batches and noise that is correlated between steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import Adjacency, strategies, workloads
from dpjax.accounting import correlated, truncation

N, B, T, DELTA = 200, 20, 25, 1e-4
BANDED = strategies.banded([1.0, 0.5, 0.25])
SHAPES = {
    "random_bins": strategies.rational([0.25], [0.75]),
    "fresh_bins": strategies.geometric(0.5),
    "cyclic_poisson": BANDED,
}


def make_plan(sampling, **changed):
    given = {
        "num_examples": N,
        "batch_size": B,
        "num_steps": T,
        "noise_multiplier": 2.0,
        "delta": DELTA,
        "clip_norm": 1.0,
        "sampling": sampling,
        "noise": "correlated",
        "strategy": SHAPES[sampling],
        "adjacency": Adjacency.ZERO_OUT,
    }
    return dpjax.plan(**{**given, **changed})


@pytest.mark.slow  # δ of a given ε is searched for
@pytest.mark.parametrize("sampling", SHAPES)
def test_epsilon_at_full_capacity_matches_the_accountant(
    sampling, optimized_from_here, compiled
):
    run = make_plan(sampling, max_batch_size=N)
    assert make_plan(sampling).max_batch_size <= (
        67 if sampling == "cyclic_poisson" else N
    )
    want = correlated.epsilon(
        SHAPES[sampling],
        2.0,
        DELTA,
        num_steps=T,
        steps_per_epoch=N // B,
        sampling=sampling,
        adjacency=Adjacency.ZERO_OUT,
    )
    np.testing.assert_allclose(run.epsilon, want, rtol=2e-3)
    assert run.guarantee.mu is None
    assert run.guarantee.at(10).epsilon(DELTA) <= run.epsilon
    if sampling != "fresh_bins":  # it is searched for
        np.testing.assert_allclose(run.guarantee.delta(run.epsilon), DELTA, rtol=1e-2)


@pytest.mark.slow  # the capacity is searched for
@pytest.mark.parametrize("sampling", ["random_bins", "fresh_bins"])
def test_overflowing_bins_increase_epsilon_slightly(sampling, optimized_from_here):
    """A share of δ pays for overflow, once for each draw of the bins."""
    least, roomy = make_plan(sampling), make_plan(sampling, max_batch_size=N)
    assert B < least.max_batch_size < N
    assert roomy.epsilon <= least.epsilon <= 1.02 * roomy.epsilon
    drawings = T if sampling == "fresh_bins" else N // B
    extra = truncation.overflow_delta(
        least.epsilon,
        num_examples=N,
        sampling_rate=B / N,
        max_batch_size=least.max_batch_size,
        num_steps=drawings,
    )
    assert extra <= 0.01 * DELTA
    # A capacity that overflows every other time leaves no guarantee.
    full = make_plan(sampling, max_batch_size=B)
    assert full.epsilon == np.inf
    if sampling == "random_bins":
        np.testing.assert_array_equal(full.guarantee.delta(np.array([3.0])), [1.0])


@pytest.mark.slow  # noise so small makes distributions wide
@pytest.mark.parametrize("sampling", ["random_bins", "cyclic_poisson"])
def test_negligible_noise_gives_huge_epsilon(sampling):
    assert make_plan(sampling, noise_multiplier=0.001).epsilon > 1e5


@pytest.mark.slow  # noise is solved for
def test_plan_finds_noise_for_a_target(optimized_from_here, compiled):
    result = make_plan("random_bins", noise_multiplier=None, epsilon=1.5)
    assert 1.49 < result.epsilon <= 1.5
    assert result.epsilon == pytest.approx(float(result.guarantee.epsilon(DELTA)))
    words = str(result.guarantee)
    assert "takes part in one of the 10 steps" in words
    assert "the same in every epoch" in words


@pytest.mark.slow  # noise is solved for, for each strategy that is tried
def test_plan_trades_correlation_for_amplification(optimized_from_here, compiled):
    """More bands at a larger ε, and less error than independent noise."""
    workload = workloads.momentum_sum(0.9)
    options = {"noise_multiplier": None, "strategy": None, "workload": workload}
    small, large = (
        make_plan("cyclic_poisson", num_examples=2000, **options, epsilon=e)
        for e in (0.5, 8.0)
    )
    bands = [1 + len(run.shape.numerator) for run in (small, large)]
    assert bands[0] < bands[1]
    independent = make_plan(
        "cyclic_poisson",
        num_examples=2000,
        noise_multiplier=None,
        noise="independent",
        strategy=None,
        epsilon=8.0,
    )
    left = large.noise_multiplier * correlated.error(large.strategy, workload, T)
    without = independent.noise_multiplier * correlated.error(
        strategies.independent(), workload, T
    )
    assert left < 0.8 * without


def example_sets(run, steps):
    key = jax.random.key(3)
    result = jax.jit(jax.vmap(lambda step: run.batch(step, key)))(jnp.arange(steps))
    return [
        set(np.asarray(i)[np.asarray(m)].tolist()) for i, m in zip(*result, strict=True)
    ]


@pytest.mark.slow
def test_random_bins_are_kept_and_fresh_bins_redrawn_each_epoch():
    same, anew = (
        example_sets(make_plan(s, max_batch_size=N), 20) for s in list(SHAPES)[:2]
    )
    for epoch in (same[:10], same[10:], anew[:10], anew[10:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(N))
    assert same[:10] == same[10:]
    assert anew[:10] != anew[10:]


def test_cyclic_poisson_groups_take_turns():
    for step, batch in enumerate(
        example_sets(make_plan("cyclic_poisson", max_batch_size=N), 7)
    ):
        assert batch
        assert {i % 3 for i in batch} == {step % 3}


@pytest.mark.parametrize(
    ("sampling", "changed", "match"),
    [
        ("cyclic_poisson", {"adjacency": Adjacency.ADD_REMOVE}, "adjacency"),
        ("cyclic_poisson", {"strategy": strategies.geometric(0.5)}, "strategy"),
        ("cyclic_poisson", {"batch_size": 80}, "batch_size"),
        ("random_bins", {"strategy": strategies.tree(0.5)}, "strategy"),
        (
            "fresh_bins",
            {"strategy": strategies.scaled(strategies.geometric(0.5), np.ones(T))},
            "strategy",
        ),
        (
            "random_bins",
            {"strategy": None, "workload": workloads.momentum(0.9)},
            "epsilon",
        ),
        (
            "random_bins",
            {"noise": "independent", "strategy": None, "clip_schedule": lambda t: 1.0},
            "sampling",
        ),
        (
            "cyclic_poisson",
            {
                "noise": "independent",
                "strategy": None,
                "clip_norm": dpjax.QuantileClip(0.5),
            },
            "sampling",
        ),
    ],
)
def test_unsupported_combinations_raise(sampling, changed, match):
    with pytest.raises(ValueError, match=match):
        make_plan(sampling, **changed)
