"""Plans with random batches for noise that is correlated from step to step."""

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


def make(sampling, **changed):
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
def test_with_room_for_all_it_costs_what_the_accountant_says(sampling, optimized):
    run = make(sampling, max_batch_size=N)
    assert make(sampling).max_batch_size <= (67 if sampling == "cyclic_poisson" else N)
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


@pytest.mark.slow  # the room is searched for
@pytest.mark.parametrize("sampling", ["random_bins", "fresh_bins"])
def test_bins_that_overflow_are_paid_for(sampling, optimized):
    """δ = (1 − share) δ and the rest for what overflow adds, once for each drawing."""
    least, roomy = make(sampling), make(sampling, max_batch_size=N)
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
    # A room that overflows every other time leaves no guarantee.
    full = make(sampling, max_batch_size=B)
    assert full.epsilon == np.inf
    if sampling == "random_bins":
        np.testing.assert_array_equal(full.guarantee.delta(np.array([3.0])), [1.0])


@pytest.mark.slow  # noise so small makes distributions wide
@pytest.mark.parametrize("sampling", ["random_bins", "cyclic_poisson"])
def test_noise_that_hides_nothing_is_no_error(sampling):
    assert make(sampling, noise_multiplier=0.001).epsilon > 1e5


@pytest.mark.slow  # noise is solved for
def test_noise_is_found_for_a_target(optimized):
    found = make("random_bins", noise_multiplier=None, epsilon=1.5)
    assert 1.49 < found.epsilon <= 1.5
    assert found.epsilon == pytest.approx(float(found.guarantee.epsilon(DELTA)))
    words = str(found.guarantee)
    assert "picks one of the 10 steps" in words
    assert "the same in every epoch" in words


@pytest.mark.slow  # noise is solved for, for each strategy that is tried
def test_a_plan_gives_up_correlation_for_amplification(optimized):
    """More bands at a larger ε, and never more noise than without."""
    workload = workloads.momentum_sum(0.9)
    asked = {"noise_multiplier": None, "strategy": None, "workload": workload}
    small, large = (
        make("cyclic_poisson", num_examples=2000, **asked, epsilon=e)
        for e in (0.5, 8.0)
    )
    bands = [1 + len(run.shape.numerator) for run in (small, large)]
    assert bands[0] < bands[1]
    independent = make(
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


def batches(run, steps):
    key = jax.random.key(3)
    found = jax.jit(jax.vmap(lambda step: run.batch(step, key)))(jnp.arange(steps))
    return [
        set(np.asarray(i)[np.asarray(m)].tolist()) for i, m in zip(*found, strict=True)
    ]


@pytest.mark.slow
def test_everyone_keeps_the_step_or_picks_anew():
    kept, anew = (batches(make(s, max_batch_size=N), 20) for s in list(SHAPES)[:2])
    for epoch in (kept[:10], kept[10:], anew[:10], anew[10:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(N))
    assert kept[:10] == kept[10:]
    assert anew[:10] != anew[10:]


def test_groups_come_in_turn():
    for step, batch in enumerate(batches(make("cyclic_poisson", max_batch_size=N), 7)):
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
def test_what_is_not_accounted_for(sampling, changed, match):
    with pytest.raises(ValueError, match=match):
        make(sampling, **changed)
