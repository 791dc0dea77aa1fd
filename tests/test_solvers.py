"""The dp_nsgd solver: its guarantees, and that it learns, also from damaged data."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import Adjacency, solvers, strategies
from dpjax.accounting import correlated
from dpjax.accounting import tree as accounting

# The key of seed 11 and parameters, made without compiling anything.
KEY = jax.random.wrap_key_data(np.array([0, 11], np.uint32))


def loss(params, example):
    x, y = example
    return jnp.logaddexp(0.0, -y * (x @ params["w"] + params["b"]))


def make_data(n=590, seed=0):  # the last of 24 batches has 15
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    y = np.sign(x @ np.array([1.0, -2.0, 0.5, 0.0]) + 0.3).astype(np.float32)
    return x, y


PARAMS = jax.device_put({"w": np.zeros(4, np.float32), "b": np.float32(0)})
train = functools.partial(
    solvers.dp_nsgd,
    loss,
    PARAMS,
    epsilon=6.0,
    delta=1e-5,
    adjacency=Adjacency.ZERO_OUT,
    order="fixed",
    num_epochs=6,
    batch_size=25,
    learning_rate=0.1,
    decay=0.9,
    clip_norm=1.5,
    key=KEY,
)


def accuracy(params, data):
    x, y = data
    return np.mean(np.sign(x @ np.asarray(params["w"]) + float(params["b"])) == y)


@pytest.fixture(scope="module")
def plain_run():
    """One run that several tests use."""
    return train(make_data())


@pytest.fixture
def trained_run(order, adjacency):
    return train(make_data(), order=order, adjacency=adjacency, epsilon=8.0)


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("adjacency", "order"),
    [
        (Adjacency.ZERO_OUT, "fixed"),
        (Adjacency.REPLACE, "reshuffled"),
        pytest.param(Adjacency.ZERO_OUT, "reshuffled", marks=pytest.mark.matrix),
        pytest.param(Adjacency.REPLACE, "fixed", marks=pytest.mark.matrix),
    ],
)
def test_solver_learns_and_meets_its_target(trained_run, order, adjacency):
    data, result = make_data(), trained_run
    assert accuracy(result.params, data) > 0.85
    guarantee = result.guarantee
    assert guarantee.adjacency is adjacency
    assert 8.0 * (1 - 1e-4) < guarantee.epsilon(1e-5) <= 8.0
    assert guarantee.delta(8.0) <= 1e-5
    mu = accounting.momentum_mu(
        float(result.noise_multiplier),
        num_steps=144,
        decay=0.9,
        steps_per_epoch=24,
        order=order,
        adjacency=adjacency,
    )
    np.testing.assert_allclose(guarantee.mu, mu, rtol=1e-6)
    assert result.curve.loss.shape == result.curve.noise_norm.shape == (144,)
    loss = np.asarray(result.curve.loss)
    assert loss[-20:].mean() < loss[:5].mean()


def test_reported_noise_norm_of_first_step_is_as_accounted(plain_run):
    # The scale of tree noise is tested in test_noise. Here: its units, at step 1.
    sigma = float(plain_run.noise_multiplier)
    expected = 1.5 * sigma * (1 - 0.9) * math.sqrt(5) / 25
    noise_norm = np.asarray(plain_run.curve.noise_norm)
    np.testing.assert_allclose(noise_norm[0], expected, rtol=1e-5)


SHAPES = {
    "one vector": strategies.rational([0.25], [0.75]),
    "scaled": strategies.scaled(strategies.geometric(0.75), np.linspace(1, 3, 144)),
}


@pytest.fixture
def strategy_run(name, order):
    return train(make_data(), order=order, epsilon=8.0, strategy=SHAPES[name])


@pytest.mark.diagonal
@pytest.mark.parametrize("order", ["fixed", "reshuffled"])
@pytest.mark.parametrize("name", SHAPES)
def test_strategy_noise_matches_accountant_and_matrices(strategy_run, name, order):
    data, strategy, result = make_data(), SHAPES[name], strategy_run
    assert accuracy(result.params, data) > 0.8
    assert 8.0 * (1 - 1e-4) < result.guarantee.epsilon(1e-5) <= 8.0
    sigma = float(result.noise_multiplier)
    mu = correlated.mu(
        strategy,
        sigma,
        num_steps=144,
        steps_per_epoch=24,
        order=order,
        adjacency=Adjacency.ZERO_OUT,
    )
    np.testing.assert_allclose(result.guarantee.mu, mu, rtol=1e-6)
    # The root mean square norm of the noise in the momentum, from the matrices.
    lag = np.subtract.outer(np.arange(144), np.arange(144))
    momentum = np.where(lag >= 0, 0.1 * 0.9 ** np.maximum(lag, 0), 0.0)
    matrix = np.asarray(jax.jit(lambda: strategy.matrix(144))(), np.float64)
    noise = momentum @ np.linalg.inv(matrix)
    norm = 1.5 * sigma / 25 * np.sqrt(5 * np.sum(noise**2, axis=1))
    np.testing.assert_allclose(result.curve.noise_norm, norm, rtol=1e-4)


@pytest.mark.parametrize(
    "changed",
    [
        {"strategy": strategies.tree(0.9)},
        {"strategy": 0.5},
        {"strategy": strategies.scaled(SHAPES["one vector"], np.ones(9))},
    ],
)
def test_invalid_strategy_raises(changed):
    with pytest.raises(ValueError, match="^strategy must"):
        train(make_data(50), **changed)


@pytest.fixture
def damaged_run(bad):
    x, y = make_data()
    x[::10] = bad
    return train((x, y), microbatch_size=8)


@pytest.mark.diagonal
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_solver_learns_despite_nonfinite_examples(damaged_run):
    result, (x, y) = damaged_run, make_data()
    chex.assert_tree_all_finite((result.params, result.curve.loss))
    clean = np.arange(len(y)) % 10 != 0
    assert accuracy(result.params, (x[clean], y[clean])) > 0.85


@pytest.fixture(scope="module")
def params_with_one_damaged():
    runs = []
    for value in (np.nan, np.inf):
        x, y = make_data()
        x[3] = value
        runs.append(train((x, y)).params)
    return runs


def test_nan_and_infinite_example_give_the_same_run(params_with_one_damaged, plain_run):
    # An example of NaN or of infinity gives the same run, bit for bit.
    chex.assert_trees_all_equal(*params_with_one_damaged)
    assert np.any(params_with_one_damaged[0]["w"] != np.asarray(plain_run.params["w"]))


def test_partial_last_batch_is_finite(plain_run):
    assert plain_run.curve.loss.shape == (6 * 24,)
    assert np.all(np.isfinite(plain_run.curve.loss))


def test_invalid_arguments_raise():
    data = jax.device_put(make_data(50))
    for argument, bad in [
        ("epsilon", 0.0),
        ("epsilon", np.inf),
        ("delta", 0.0),
        ("delta", 1.0),
        ("adjacency", Adjacency.ADD_REMOVE),
        ("adjacency", None),
        ("order", "poisson"),
        ("num_epochs", 0),
        ("batch_size", 0),
        ("batch_size", 2.5),
        ("decay", 1.0),
        ("clip_norm", -1.0),
        ("key", 3),
        ("microbatch_size", 0),
    ]:
        with pytest.raises(ValueError, match=f"^{argument} must"):
            train(data, **{argument: bad})
    for bad in ((data[0], data[1][:-1]), (data[0][:0], data[1][:0])):
        with pytest.raises(ValueError, match="^data must"):
            train(bad)
