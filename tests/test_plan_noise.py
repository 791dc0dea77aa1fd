"""Plans whose noise is correlated between steps."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import Adjacency, strategies, workloads
from dpjax.accounting import correlated, gdp


def loss(w, examples):
    x, y = examples
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def correlated_plan(**changed):
    given = {
        "num_examples": 90,
        "batch_size": 10,
        "num_steps": 30,
        "noise_multiplier": 3.0,
        "delta": 1e-5,
        "clip_norm": 0.5,
        "sampling": "fixed",
        "noise": "correlated",
        "strategy": strategies.geometric(0.75),
        "adjacency": Adjacency.REPLACE,
    }
    return dpjax.plan(**{**given, **changed})


SHAPES = {
    "geometric": strategies.geometric(0.75),
    "one vector": strategies.rational([0.25], [0.75]),
    "scaled": strategies.scaled(strategies.geometric(0.75), np.linspace(1, 4, 30)),
    "tree": strategies.tree(0.75),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("name", SHAPES)
def test_plan_on_a_lattice_runs_in_jit(name):
    run = correlated_plan(strategy=SHAPES[name], arithmetic="discrete")
    tx = run.optimizer(optax.identity(), key=jax.random.key(0))
    zeros = jnp.zeros(10_000)
    means, _ = jax.jit(tx.update)(zeros, jax.jit(tx.init)(zeros))
    # A scaled strategy's first factor is 1.
    assert float(means.std()) == pytest.approx(3.0 * 0.5 / 10, rel=0.05)


@pytest.mark.parametrize("arithmetic", ["real", "discrete"])
@pytest.mark.parametrize("options", [{}, {"noise": "independent", "strategy": None}])
def test_optimizer_refuses_what_is_not_one_typed_key(options, arithmetic):
    run = correlated_plan(**options, arithmetic=arithmetic)
    for key in (0, None, np.zeros(2, np.uint32), jax.random.split(jax.random.key(0))):
        with pytest.raises(ValueError, match="^key must be one typed JAX key"):
            run.optimizer(optax.sgd(0.1), key=key)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("sampling", ["fixed", "reshuffled"])
def test_epsilon_of_correlated_plan_matches_the_accountant(name, sampling):
    run = correlated_plan(strategy=SHAPES[name], sampling=sampling)
    with jax.enable_x64(True):
        mu = correlated.mu(
            SHAPES[name],
            3.0,
            num_steps=30,
            steps_per_epoch=9,
            order=sampling,
            adjacency=Adjacency.REPLACE,
        )
    assert run.guarantee.mu == pytest.approx(float(mu), rel=1e-12)
    assert run.guarantee.mu >= float(mu)
    assert run.epsilon == pytest.approx(float(gdp.epsilon(mu, 1e-5)), rel=1e-5)
    early = [float(run.guarantee.at(k).epsilon(1e-5)) for k in (1, 10, 30)]
    assert early[0] < early[1] < early[2]
    assert early[2] == pytest.approx(run.epsilon, rel=1e-6)


@pytest.fixture
def target_plan(name, sampling):
    return correlated_plan(
        strategy=SHAPES[name], sampling=sampling, noise_multiplier=None, epsilon=2.0
    )


@pytest.mark.diagonal
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("sampling", ["fixed", "reshuffled"])
def test_plan_finds_correlated_noise_for_a_target(target_plan, name, sampling):
    run = correlated_plan(strategy=SHAPES[name], sampling=sampling)
    assert 1.999 < target_plan.epsilon <= 2.0
    # The guarantee states no more than the plan, although float32 is between them.
    assert target_plan.guarantee.epsilon(target_plan.delta) == target_plan.epsilon
    record = json.loads(target_plan.guarantee.to_json())
    assert record["plan"]["noise"] == "correlated"
    assert record["event"]["strategy"] == record["plan"]["shape"]
    assert hash(run) != hash(target_plan)
    assert "C⁻¹z" in str(target_plan.guarantee)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", SHAPES)
def test_plan_noise_has_the_variance_of_its_strategy(name):
    """Variances of the first updates, within six deviations of their estimates."""
    run, size = correlated_plan(strategy=SHAPES[name]), 20_000
    key = jax.random.wrap_key_data(np.array([0, 4], np.uint32))
    optimizer = run.optimizer(optax.sgd(1.0), key=key)

    @jax.jit
    def first_updates():
        def step(state, _):
            updates, state = optimizer.update(zeros, state)
            return state, updates

        zeros = jnp.zeros(size)
        return jax.lax.scan(step, optimizer.init(zeros), length=4)[1]

    noise = np.asarray(first_updates())
    inverse = np.linalg.inv(SHAPES[name].matrix(30))
    want = (3.0 * 0.5 / 10 * inverse[:4]) ** 2
    np.testing.assert_allclose(
        np.var(noise, axis=1), want.sum(1), rtol=6 * np.sqrt(2 / size)
    )


@pytest.mark.slow  # a strategy is searched for
def test_plan_finds_the_best_strategy_for_a_workload():
    falling = workloads.momentum(0.9, learning_rates=np.linspace(1, 0.1, 30))
    result = correlated_plan(strategy=None, workload=falling)
    assert len(result.shape.numerator) == len(result.shape.denominator) == 1
    assert len(result.shape.factors) == 30
    options = {"steps_per_epoch": 9, "order": "fixed", "adjacency": Adjacency.REPLACE}
    products = [
        correlated.mu(s, 1.0, num_steps=30, **options)
        * correlated.error(s, falling, 30)
        for s in (result.strategy, *SHAPES.values())
        if s is not SHAPES["tree"]
    ]
    assert products[0] < min(products[1:])


def test_correlated_plan_trains_in_a_scan_and_raises_at_the_end():
    run = correlated_plan()
    key = jax.random.wrap_key_data(np.array([0, 0], np.uint32))
    optimizer = run.optimizer(optax.sgd(0.1), key=key, buffer="regenerate")
    loss_and_grad = run.value_and_grad(loss)
    data = np.ones((90, 3), np.float32), np.ones(90, np.float32)

    def step(carry, number):
        w, state = carry
        _, grads = loss_and_grad(w, run.load(data, number, key))
        updates, state = optimizer.update(grads, state, w)
        return (optax.apply_updates(w, updates), state), None

    @jax.jit
    def train(w):
        return jax.lax.scan(step, (w, optimizer.init(w)), jnp.arange(30))[0]

    w, state = train(np.zeros(3, np.float32))
    assert np.isfinite(w).all()
    # The state is a concrete array, so this raises before anything is computed.
    with pytest.raises(ValueError, match="num_steps"):
        jax.eval_shape(lambda: optimizer.update(w, state, w))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"sampling": "poisson"}, "sampling"),
        ({"sampling": "fixed_size"}, "sampling"),
        ({"noise": "independent"}, "strategy"),
        ({"strategy": None}, "workload"),
        ({"workload": workloads.momentum(0.5)}, "workload"),
        ({"strategy": strategies.scaled(SHAPES["geometric"], np.ones(9))}, "num_steps"),
        ({"strategy": 0.5}, "strategy"),
        ({"num_steps": None, "epsilon": 1.0}, "num_steps"),
        ({"batch_size": None, "epsilon": 1.0}, "batch_size"),
        ({"noise_schedule": lambda step: 1.0}, "schedule"),
        ({"clip_norm": dpjax.QuantileClip(0.5)}, "QuantileClip"),
        ({"adjacency": Adjacency.ADD_REMOVE}, "adjacency"),
    ],
)
def test_invalid_correlated_plans_raise(changed, match):
    with pytest.raises(ValueError, match=match):
        correlated_plan(**changed)
