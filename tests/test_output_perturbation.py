"""Output perturbation: sensitivity, noise, and the paper's constants."""

import functools
import math

import jax
import numpy as np
import pytest
import scipy.stats

from dpjax import Adjacency, solvers
from dpjax.accounting import gdp, iteration
from dpjax.noise import _gaussian as noise
from dpjax.solvers import choose_num_steps, losses

# The key of seed 3, made without compiling anything.
KEY = jax.random.wrap_key_data(np.array([0, 3], np.uint32))
LOSS = losses.logistic(feature_norm=1.5)
SETTING = {
    **LOSS.setting,
    "step_size": 1.5,
    "regularization": 0.0,
    "diameter": math.inf,
    "adjacency": Adjacency.REPLACE,
}
sensitivity = functools.partial(
    iteration.gradient_descent_sensitivity, num_examples=40, **SETTING
)


def make_data(n=40, d=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)).astype(np.float32)
    return x, np.sign(x[:, 0] + 0.1).astype(np.float32)


run = functools.partial(
    solvers.output_perturbation,
    LOSS,
    np.zeros(3, np.float32),
    delta=1e-3,
    key=KEY,
    num_steps=30,
)


def test_sensitivity_equals_sum_of_powers(x64):
    eta, L, n = 1.5, 1.5, 40
    for strong, expand in [(0.0, 0.0), (0.1, 0.0), (0.0, 0.2)]:
        c = max(1 + eta * (expand - strong), eta * (LOSS.smoothness + strong) - 1)
        for T in (1, 2, 17, 400):
            given = {"regularization": strong, "weak_convexity": expand}
            result = iteration.gradient_descent_sensitivity(
                num_steps=T, num_examples=n, **SETTING | given
            )
            exact = 2 * eta * L / n * sum(c**k for k in range(T))
            np.testing.assert_allclose(result, exact, rtol=1e-10)
            assert result >= exact * (1 - 1e-14)
    assert sensitivity(num_steps=1000) == 2 * sensitivity(
        num_steps=1000, adjacency=Adjacency.ZERO_OUT
    )
    far = sensitivity(num_steps=1000, diameter=0.3)
    np.testing.assert_allclose(far, 0.3)
    # The derivative of Σ_{k<T} (1 − ηλ)^k is exact at λ = 0, where c is 1.
    slope = jax.grad(lambda x: sensitivity(num_steps=9, regularization=x))(0.0)
    eta, C = SETTING["step_size"], SETTING["gradient_norm"]
    exact = -2 * eta * C / 40 * eta * sum(range(9))
    np.testing.assert_allclose(slope, exact, rtol=1e-10)
    # Traced numbers of steps are rounded up; invalid ones give infinity.
    traced = jax.jit(jax.vmap(lambda n: sensitivity(num_steps=n)))
    steps = np.array([0.3, 1.0, 16.2, 17.0, 0.0, -3.0, math.nan, math.inf])
    expected = [sensitivity(num_steps=n) for n in (1, 1, 17, 17)] + [math.inf] * 4
    np.testing.assert_allclose(traced(steps), expected, rtol=1e-12)


@pytest.fixture
def neighbouring_runs(strong):
    """Runs with opposite labels of one example whose feature no other one has."""
    x, y = make_data()
    x[:, 2], x[0] = 0.0, [0.0, 0.0, 1.5]
    other = y.copy()
    y[0], other[0] = 1.0, -1.0
    given = {"regularization": strong}
    return [run((x, labels), epsilon=1e6, **SETTING | given) for labels in (y, other)]


@pytest.mark.diagonal
@pytest.mark.parametrize("strong", [0.0, 0.1])
def test_replaced_example_moves_last_iterate_within_sensitivity(
    neighbouring_runs, strong
):
    for result in neighbouring_runs:
        scale, bound = float(result.scale), float(result.sensitivity)
        assert scale < 1e-2 * bound
    one, other = (np.asarray(result.params) for result in neighbouring_runs)
    distance = np.linalg.norm(one - other)
    slack = 6 * math.sqrt(6) * scale  # both draws, six deviations
    assert distance <= bound + slack
    assert distance >= 0.25 * bound  # the bound is not vacuous


def test_gamma_noise_has_gamma_norm_and_uniform_direction():
    tree = {"a": np.zeros((2, 2), np.float32), "b": np.zeros(3, np.float32)}

    @jax.jit
    def draws():
        keys = jax.random.split(KEY, 4000)
        return jax.vmap(lambda k: noise.gamma_norm_like(k, tree, 0.3))(keys)

    draw = jax.device_get(draws())
    z = np.concatenate([draw["a"].reshape(-1, 4), draw["b"]], axis=1)
    norms = np.linalg.norm(z, axis=1)
    # Kolmogorov-Smirnov and χ² tests with fixed keys; each alarms once in 1,000.
    assert scipy.stats.kstest(norms, scipy.stats.gamma(7, scale=0.3).cdf).pvalue > 1e-3
    directions = z / norms[:, None]
    covariance = directions.T @ directions / len(z)
    np.testing.assert_allclose(covariance, np.eye(7) / 7, atol=5 * 0.15 / 4000**0.5)
    signs = ((directions > 0) @ 2 ** np.arange(7)).astype(int)
    assert scipy.stats.chisquare(np.bincount(signs, minlength=128)).pvalue > 1e-3
    # The norm is independent of the direction.
    assert abs(np.corrcoef(norms, directions[:, 0])[0, 1]) < 5 / 4000**0.5


@pytest.fixture(scope="module")
def noise_only_runs():
    """Runs on zero features with Gaussian noise, and with noise of a gamma norm."""
    d = 5000
    data = np.zeros((9, d), np.float32), np.ones(9, np.float32)
    train = functools.partial(
        solvers.output_perturbation,
        LOSS,
        np.zeros(d, np.float32),
        data,
        num_steps=3,
        key=KEY,
    )
    return [train(epsilon=0.7, delta=delta, **SETTING) for delta in (1e-3, 0.0)]


def test_noise_in_the_result_has_the_stated_scale(noise_only_runs):
    d = 5000
    result = noise_only_runs[0]
    sigma = float(sensitivity(num_steps=3, num_examples=9)) / float(gdp.mu(0.7, 1e-3))
    np.testing.assert_allclose(result.scale, sigma, rtol=2e-6)
    actual = np.std(np.asarray(result.params))
    np.testing.assert_allclose(actual, sigma, rtol=5 / math.sqrt(2 * d))
    scale = float(sensitivity(num_steps=3, num_examples=9)) / 0.7
    norm = np.linalg.norm(np.asarray(noise_only_runs[1].params))
    np.testing.assert_allclose(norm, d * scale, rtol=5 / math.sqrt(d))


@pytest.fixture(scope="module")
def runs_by_epsilon():
    """Runs with Gaussian noise and with pure privacy, for two targets."""
    strong = SETTING | {"regularization": 0.1}
    return {
        epsilon: (
            run(make_data(), epsilon=epsilon, **SETTING),
            run(make_data(), epsilon=epsilon, **strong, delta=0.0),
        )
        for epsilon in (0.1, 2.0)
    }


def test_guarantees_meet_their_targets(runs_by_epsilon):
    for epsilon, (result, pure) in runs_by_epsilon.items():
        assert epsilon * (1 - 1e-4) <= result.guarantee.epsilon(1e-3) <= epsilon
        assert epsilon * (1 - 1e-4) <= pure.guarantee.epsilon(0.0) <= epsilon
        assert pure.guarantee.epsilon(0.01) < epsilon
        assert pure.guarantee.delta(epsilon) == 0


@pytest.fixture(scope="module")
def run_with_radius():
    return run(make_data(), epsilon=0.5, **SETTING, num_steps=None, radius=3.0)


def test_chosen_num_steps_minimises_the_error_bound(run_with_radius):
    # Convex: 2βD²/T + (β/2) d (2LT/(nβμ))², by brute force over all T.
    setting = SETTING | {"step_size": 1 / LOSS.smoothness}
    n, d, D, mu = 1000, 7, 3.0, float(gdp.mu(0.5, 1e-3))
    T = np.arange(1, 3000)
    noise_of = d * (2 * LOSS.gradient_norm * T / (n * LOSS.smoothness * mu)) ** 2
    bound = 2 * LOSS.smoothness * D**2 / T + LOSS.smoothness / 2 * noise_of
    chosen = choose_num_steps(
        0.5, 1e-3, radius=D, dimension=d, num_examples=n, **setting
    )
    near = T[bound <= 1.01 * bound.min()]
    assert abs(chosen / near[0] - 1) < 0.02
    assert near[0] < T[np.argmin(bound)] < near[-1]
    # It grows with n^(2/3) there, and with log n for a strongly convex objective.
    more = functools.partial(choose_num_steps, 0.5, 1e-3, radius=D, dimension=d)
    growth = more(num_examples=8 * n, **setting) / chosen
    assert 3.9 < growth < 4.1
    strong = setting | {"regularization": 0.1, "step_size": 1.0}
    steps = [more(num_examples=n * 10**k, **strong) for k in range(3)]
    assert abs((steps[2] - steps[1]) - (steps[1] - steps[0])) <= 0.1 * steps[0]
    assert run_with_radius.curve.loss.shape == (run_with_radius.num_steps,)


LAM = 0.05


@pytest.fixture(scope="module")
def damaged_data_and_run():
    x, y = make_data(2000)
    x[5] = np.nan
    result = run(
        (x, y),
        epsilon=1e5,
        num_steps=300,
        **SETTING | {"regularization": LAM, "step_size": 1.5},
    )
    return (x, y), result


@pytest.mark.slow
def test_result_is_close_to_minimiser_and_counts_damage(damaged_data_and_run):
    from sklearn.linear_model import LogisticRegression

    (x, y), result = damaged_data_and_run
    np.testing.assert_array_equal(result.curve.left_out, 1)
    keep = np.isfinite(x[:, 0])
    ball = x * np.minimum(1, 1.5 / np.linalg.norm(x, axis=1, keepdims=True))
    best = LogisticRegression(C=1 / (2000 * LAM), fit_intercept=False, tol=1e-8)
    best.fit(ball[keep], y[keep])
    np.testing.assert_allclose(result.params, best.coef_[0], atol=2e-3)


@pytest.mark.parametrize("delta", [0.0, 1e-3])
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("epsilon", 0.0),
        ("epsilon", -1.0),
        ("epsilon", math.nan),
        ("dimension", -3),
        ("dimension", 2.5),
        ("radius", 0.0),
        ("num_examples", 10.5),
        ("weak_convexity", 0.1),
        ("smoothness", math.inf),
    ],
)
def test_number_of_steps_needs_valid_arguments(delta, name, bad):
    arguments = {"epsilon": 1.0, "radius": 3.0, "dimension": 7, "num_examples": 1000}
    with pytest.raises(ValueError, match=f"{name} .*got"):
        choose_num_steps(**SETTING | arguments | {"delta": delta, name: bad})


@pytest.mark.parametrize("delta", [-0.1, 1.0, math.nan])
def test_number_of_steps_needs_a_delta_in_the_half_open_interval(delta):
    with pytest.raises(ValueError, match=r"delta must be in \[0, 1\)"):
        choose_num_steps(
            1.0, delta, radius=3.0, dimension=7, num_examples=1000, **SETTING
        )


def test_invalid_arguments_raise():
    data = make_data()
    for name, bad in [
        ("epsilon", {"epsilon": 0.0}),
        ("epsilon", {"epsilon": math.inf}),
        ("delta", {"delta": 1.0}),
        ("delta", {"delta": -0.1}),
        ("key", {"key": 0}),
        ("num_steps", {"num_steps": 0}),
        ("num_steps", {"num_steps": None}),
        ("radius", {"num_steps": None, "radius": 0.0}),
        ("adjacency", {"adjacency": Adjacency.ADD_REMOVE}),
        ("step_size", {"step_size": 100.0}),
        ("step_size", {"step_size": np.ones(30)}),
        ("diameter", {"diameter": 1.0}),
    ]:
        with pytest.raises(ValueError, match=f"^{name} must"):
            run(data, **{"epsilon": 1.0, **SETTING, **bad})
    with pytest.raises(ValueError, match="attainable with some noise"):
        run(data, epsilon=1.0, **SETTING | {"smoothness": math.inf})
    with pytest.raises(ValueError, match="^data must"):
        run((data[0], data[1][:-1]), epsilon=1.0, **SETTING)
    with pytest.raises(ValueError, match="^data must have labels"):
        run((data[0], data[1] * 2), epsilon=1.0, **SETTING)
