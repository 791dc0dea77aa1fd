"""A random number of rounds: its accounting, its distribution, its steps."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import Adjacency, sampling, solvers
from dpjax._core.keys import stream
from dpjax.accounting import gdp, pld
from dpjax.accounting import random_rounds as accounting
from dpjax.solvers import _checks, losses
from dpjax.solvers._random_round_sgd import _train, round_probabilities, thresholds

KEY = jax.random.wrap_key_data(np.array([0, 8], np.uint32))  # key(8), not compiled
LOSS = losses.logistic(feature_norm=1.0)


def make_data(n=40, d=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)).astype(np.float32)
    return x, np.sign(x[:, 0] + 0.1).astype(np.float32)


run = functools.partial(
    solvers.random_round_sgd,
    LOSS,
    np.zeros(3, np.float32),
    epsilon=2.0,
    delta=1e-3,
    adjacency=Adjacency.REPLACE,
    max_rounds=50,
    batch_size=2,
    step_size=0.5,
    smoothness=0.25,
    clip_norm=0.4,
    key=KEY,
)


@pytest.mark.slow
def test_mixture_delta_bounds_the_mean_of_its_parts(x64, compiled):
    # Full batches, where every part is Gaussian and known exactly.
    weights = np.random.default_rng(0).uniform(size=60)
    weights[[3, 17]] = 0
    weights /= weights.sum()
    for sigma, epsilon in [(8.0, 0.5), (20.0, 0.1), (3.0, 4.0)]:
        exact = np.sum(
            weights * gdp.delta(2 * np.sqrt(np.arange(1, 61)) / sigma, epsilon)
        )
        grouped = []
        for groups in (16, 58):
            rounds = accounting.group(weights, groups)
            assert rounds.probability.sum() >= 1 - 1e-12
            delta = accounting.delta(sigma, epsilon, rounds=rounds, sampling_rate=1.0)
            grouped.append(float(delta))
        assert grouped[0] >= grouped[1] >= exact * (1 - 1e-9)
        assert grouped[1] <= exact * 1.01
        assert grouped[0] <= exact * 1.25
        at_most = gdp.delta(2 * math.sqrt(60) / sigma, epsilon)
        assert grouped[0] < at_most


def test_grouping_never_loses_probability_or_shortens_a_run():
    rng = np.random.default_rng(1)
    for size in (1, 2, 7, 100):
        for groups in (1, 3, 16):
            weights = rng.exponential(size=size) * (rng.uniform(size=size) < 0.7)
            weights[rng.integers(size)] += 0.1
            weights /= weights.sum()
            rounds = accounting.group(weights, groups)
            assert np.all(np.diff(rounds.largest) > 0)
            below = [
                rounds.probability[rounds.largest <= k].sum()
                for k in range(1, size + 1)
            ]
            # At every k the grouped mass up to k is at most the true one.
            assert np.all(below <= np.cumsum(weights) + 1e-9)
            np.testing.assert_allclose(rounds.probability.sum(), 1)


@pytest.mark.slow
def test_epsilon_inverts_delta():
    rounds = accounting.group(np.full(200, 1 / 200), 4)
    args = {"rounds": rounds, "sampling_rate": 0.05}
    epsilon = float(accounting.epsilon(3.0, 1e-4, **args))
    assert accounting.delta(3.0, epsilon, **args) <= 1e-4 * (1 + 1e-5)
    assert accounting.delta(3.0, 0.999 * epsilon, **args) > 1e-4
    assert accounting.epsilon(3.0, 0.99, **args) == 0.0
    worst = pld.compose(pld.subsampled_gdp(2 / 3.0, 0.05), 200)
    assert epsilon < pld.epsilon(worst, 1e-4)


@pytest.mark.slow
def test_less_noise_than_published_meets_the_target():
    # At the paper's own n² rounds.
    n = 1000
    rounds = accounting.group(np.full(n * n, n**-2.0))
    delta = jax.jit(
        lambda sigma, epsilon: accounting.delta(
            sigma, epsilon, rounds=rounds, sampling_rate=1 / n
        )
    )
    for epsilon, factor in [(0.1, 4.0), (1.0, 4.0)]:
        # Zhang et al. (2017), Algorithm 2, line 5, in units of L.
        sigma = 2 * math.sqrt(math.log(3 * n / 1e-3) * math.log(2 / 1e-3)) / epsilon
        assert float(delta(sigma / factor, epsilon)) <= 1e-3


def test_rounds_have_the_stated_distribution():
    eta = np.linspace(1.5, 0.1, 30)
    probabilities = round_probabilities(eta, 1.0)
    np.testing.assert_allclose(probabilities.sum(), 1)
    np.testing.assert_allclose(
        probabilities[4] / probabilities[20],
        (2 * eta[4] - eta[4] ** 2) / (2 * eta[20] - eta[20] ** 2),
    )
    edges = thresholds(probabilities)
    assert edges[-1] == 2**32
    realised = np.diff(edges.astype(np.float64), prepend=0) / 2**32
    np.testing.assert_allclose(realised, probabilities, atol=2**-31)

    @jax.jit
    def draw(key):
        keys = jax.random.split(key, 20_000)
        return jax.vmap(lambda k: jax.random.bits(k, (), jnp.uint32))(keys)

    bits = np.asarray(draw(KEY))
    counts = np.bincount(np.searchsorted(edges, bits, side="right"), minlength=30)
    # χ² with 29 degrees of freedom is below 64 but twice in 10,000.
    assert (
        np.sum((counts - 20_000 * probabilities) ** 2 / (20_000 * probabilities)) < 64
    )


@pytest.mark.slow
def test_steps_match_reference_sgd():
    x, y = make_data()
    x[7] = np.nan
    eta = np.linspace(1.0, 0.2, 60)
    last, curve = _train(
        jnp.zeros(3),
        _checks.mask_nonfinite((x, y)),
        jnp.asarray(45),
        jnp.asarray(eta),
        jnp.asarray(0.4),
        jnp.asarray(0.0),
        KEY,
        loss_fn=LOSS,
        batch_size=4,
        microbatch_size=None,
    )
    batch_key = stream(KEY, "batches")
    w, missing, losses = np.zeros(3), 0, []
    ball = np.float64(x)
    ball *= np.minimum(1, (1 - 2**-20) / np.linalg.norm(ball, axis=1, keepdims=True))
    for k in range(45):
        total = np.zeros(3)
        for i in sampling.fixed_size(40, 4, key=batch_key, step=k).indices:
            if i == 7:
                missing += 1
                continue
            losses.append(np.logaddexp(0, -y[i] * ball[i] @ w))
            g = -y[i] * ball[i] / (1 + np.exp(y[i] * ball[i] @ w))
            total += g * min(1, 0.4 / np.linalg.norm(g))
        w = w - eta[k] * total / 4
    # Clipped norms are below the bound by less than a hundred roundings in every step.
    short = 100 * 2**-24 * 0.4 * eta[:45].sum()
    np.testing.assert_allclose(last, w, atol=3e-6 + short)
    assert curve.left_out == missing > 0
    np.testing.assert_allclose(curve.loss, np.mean(losses), rtol=1e-5)


@pytest.mark.slow
def test_run_noise_has_the_scale_of_the_guarantee(compiled):
    # Gradients of zero: x is the sum of R draws.
    d = 20_000
    data = np.zeros((40, d), np.float32), np.ones(40, np.float32)
    result = solvers.random_round_sgd(
        LOSS,
        jnp.zeros(d),
        data,
        epsilon=2.0,
        delta=1e-3,
        adjacency=Adjacency.REPLACE,
        max_rounds=50,
        batch_size=2,
        step_size=0.5,
        smoothness=0.25,
        clip_norm=0.4,
        key=KEY,
    )
    sigma, R = float(result.noise_multiplier), int(result.num_steps)
    assert 1 <= R <= 50
    std = 0.5 / 2 * 0.4 * sigma * math.sqrt(R)
    np.testing.assert_allclose(np.std(result.params), std, rtol=5 / math.sqrt(2 * d))
    assert 1e-3 * 0.999 <= result.guarantee.delta(2.0) <= 1e-3
    # Half the noise would not suffice.
    rounds = result.guarantee.profile.delta.keywords["rounds"]
    assert rounds.largest[-1] == 50
    less = accounting.delta(sigma / 2, 2.0, rounds=rounds, sampling_rate=2 / 40)
    assert less > 3e-3


def test_invalid_arguments_raise():
    data = make_data()
    for name, bad in [
        ("epsilon", {"epsilon": 0.0}),
        ("delta", {"delta": 1.0}),
        ("adjacency", {"adjacency": Adjacency.ZERO_OUT}),
        ("max_rounds", {"max_rounds": 0}),
        ("batch_size", {"batch_size": 41}),
        ("step_size", {"step_size": 8.0}),
        ("step_size", {"step_size": np.ones(3)}),
        ("smoothness", {"smoothness": 0.0}),
        ("clip_norm", {"clip_norm": -1.0}),
        ("key", {"key": 1}),
        ("noise_multiplier", {"noise_multiplier": 1.0}),
        ("noise_multiplier", {"epsilon": None}),
        (
            "noise_multiplier",
            {"noise_multiplier": 0.0, "epsilon": None, "delta": None},
        ),
    ]:
        with pytest.raises(ValueError, match=f"^{name} must"):
            run(data, **bad)
    with pytest.raises(ValueError, match="^probabilities must"):
        accounting.group(np.ones(3))
    for bad in ((data[0], data[1][1:]), (data[0], data[1] + 0.5)):
        with pytest.raises(ValueError, match="^data must"):
            run(bad)
    # A vector would be paired with the groups of rounds.
    rounds = accounting.group(np.full(8, 1 / 8), groups=2)
    given = {"noise_multiplier": 2.0, "epsilon": 1.0, "sampling_rate": 0.01}
    for name, value in given.items():
        with pytest.raises(ValueError, match=f"^{name} must be one real number"):
            accounting.delta(**given | {name: np.full(2, value)}, rounds=rounds)


@pytest.mark.matrix
def test_delta_is_positive_unless_nothing_is_released():
    rounds = accounting.group(np.full(8, 1 / 8), groups=2)
    delta = jax.jit(functools.partial(accounting.delta, epsilon=1.0, rounds=rounds))
    for sigma in (-np.inf, -1.0, 0.0, np.nan):
        assert float(delta(sigma, sampling_rate=0.1)) == 1
    assert float(delta(0.0, sampling_rate=0.0)) == 1
    assert float(delta(2.0, sampling_rate=0.0)) == 0
    # In float32, 2/σ is below the least normal number.
    assert float(delta(3e38, sampling_rate=0.1)) > 0


@pytest.mark.matrix
def test_narrow_noise_multipliers_are_exact():
    rounds = accounting.group(np.full(8, 1 / 8), groups=2)

    @jax.jit
    def deltas():
        narrow = jnp.bfloat16(2.234375), jnp.float16(2.998046875)
        wide = np.float32(2.234375), np.float32(2.998046875)
        of = functools.partial(accounting.delta, rounds=rounds, sampling_rate=0.1)
        return [[of(x, 1.0) for x in numbers] for numbers in (narrow, wide)]

    np.testing.assert_array_equal(*deltas())
