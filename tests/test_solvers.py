"""The dp_nsgd solver: its guarantees, and that it learns, also from damaged data."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import Adjacency, solvers, strategies
from dpjax.accounting import correlated, gdp
from dpjax.accounting import tree as accounting
from dpjax.solvers import published as paper

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
    inverse = jax.jit(lambda: strategy.inverse_matrix(144))()
    noise = momentum @ np.asarray(inverse, np.float64)
    norm = 1.5 * sigma / 25 * np.sqrt(5 * np.sum(noise**2, axis=1))
    np.testing.assert_allclose(result.curve.noise_norm, norm, rtol=1e-4)


@pytest.mark.parametrize(
    "changed",
    [
        {"strategy": strategies.tree(0.9)},
        {"strategy": 0.5},
        {"strategy": SHAPES["one vector"], "noise": "printed"},
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


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("n_b", "epochs", "decay", "exact"),
    [(100, 10, 0.99, 46.42), (32, 32, 0.99, 207.36), (1000, 8, 0.999, 56.50)],
)
def test_published_noise_is_at_least_twice_the_required(n_b, epochs, decay, exact):
    printed = paper.dp_nsgd_noise_multiplier(
        0.7, num_steps=n_b * epochs, steps_per_epoch=n_b
    )
    mu = accounting.momentum_mu(
        1.0,
        num_steps=n_b * epochs,
        decay=decay,
        steps_per_epoch=n_b,
        order="fixed",
        adjacency=Adjacency.REPLACE,
    )
    np.testing.assert_allclose(mu, 2 * math.sqrt(exact), rtol=1e-4)
    assert printed > 2 * float(mu) / 0.7


def test_published_noise_matches_the_table():
    values = {(100, 10): 81, (32, 32): 223, (1000, 8): 91}
    for (n_b, epochs), v in values.items():
        printed = paper.dp_nsgd_noise_multiplier(
            2.0, num_steps=n_b * epochs, steps_per_epoch=n_b
        )
        np.testing.assert_allclose(printed, 4 * math.sqrt(v) / 2)


@pytest.fixture(scope="module")
def exact_and_published_runs():
    run = functools.partial(train, make_data(), adjacency=Adjacency.REPLACE)
    return run(), run(noise="printed")


def test_published_noise_meets_the_target(exact_and_published_runs):
    exact, printed = exact_and_published_runs
    assert float(printed.noise_multiplier) > 1.5 * float(exact.noise_multiplier)
    assert printed.guarantee.epsilon(1e-5) < exact.guarantee.epsilon(1e-5) <= 6.0


def test_theorem_6_parameters_are_consistent():
    epsilon, delta, n_b, d = 3.0, 1e-5, 2000, 50
    p = solvers.published.dp_nsgd_parameters(
        epsilon, delta, steps_per_epoch=n_b, dimension=d
    )
    privacy = epsilon / math.sqrt(d * math.log(1 / delta))

    def step_cost(steps):
        return steps * math.log2(steps)

    assert p.num_steps % n_b == 0
    assert step_cost(p.num_steps) <= privacy * n_b**2 < step_cost(p.num_steps + n_b)
    assert p.learning_rate == pytest.approx((n_b * p.num_steps) ** -0.5)
    assert 1 - p.decay == pytest.approx(privacy * n_b / step_cost(p.num_steps))
    mu = epsilon / (2 * math.sqrt(math.log(1 / delta)))
    assert gdp.epsilon(mu, delta) < epsilon  # their conversion is the looser one


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
        ("noise", "none"),
        ("microbatch_size", 0),
    ]:
        with pytest.raises(ValueError, match=f"^{argument} must"):
            train(data, **{argument: bad})
    for bad in ((data[0], data[1][:-1]), (data[0][:0], data[1][:0])):
        with pytest.raises(ValueError, match="^data must"):
            train(bad)
