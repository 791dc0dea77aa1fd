"""Strategies: their coefficients, optimisation, lower bounds and schedules."""

import itertools

import jax
import numpy as np
import pytest
import scipy.linalg
import scipy.signal

from dpjax import Adjacency, strategies, workloads
from dpjax.accounting import calibrate, correlated
from dpjax.strategies import _optimize

MADE = {
    "independent": strategies.independent(),
    "geometric": strategies.geometric(0.7),
    "rational": strategies.rational([0.3, -0.5], [0.8, 0.95]),
    "banded": strategies.banded([1.0, 0.5, 0.2]),
    "banded_inverse": strategies.banded_inverse([1.0, -0.5, -0.1]),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("n", [1, 2, 3, 4, 50])
def test_coefficients_and_inverse_coefficients_convolve_to_one(n, x64):
    @jax.jit
    def series_of_all(made):
        return {
            x: (y.coefficients(n), y.inverse_coefficients(n)) for x, y in made.items()
        }

    for name, series in series_of_all(MADE).items():
        product = np.convolve(*map(np.asarray, series))
        np.testing.assert_allclose(
            product[:n], np.eye(1, n)[0], atol=1e-13, err_msg=name
        )


def test_coefficients_match_the_given_ones(x64):
    given = [1.0, 0.5, -0.25]

    @jax.jit
    def coefficients_of_each():
        return [
            strategies.banded(given).coefficients(4),
            strategies.banded_inverse(given).inverse_coefficients(4),
            strategies.geometric(0.75).coefficients(3),
            strategies.rational([0.25, -0.5], [0.5, 0.5]).coefficients(3),
        ]

    *exact, rational = map(np.asarray, coefficients_of_each())
    for result, expected in zip(
        exact, [[*given, 0.0], [*given, 0.0], [1, 0.75, 0.75**2]], strict=True
    ):
        np.testing.assert_array_equal(result, expected)
    # (1 − .25 L)(1 + .5 L) / (1 − .5 L)²
    np.testing.assert_allclose(rational, [1, 1.25, 0.875], rtol=1e-14)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", MADE)
def test_strategies_are_exact_in_float32(name):
    for x in MADE[name]:
        np.testing.assert_array_equal(x, np.asarray(x, np.float32))
    traced = jax.jit(lambda s: s.coefficients(9))(MADE[name])
    np.testing.assert_allclose(traced, MADE[name].coefficients(9), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: strategies.geometric(1.0), "decay"),
        (lambda: strategies.geometric(-0.1), "decay"),
        (lambda: strategies.geometric(1 - 1e-12), "decay"),  # 1 in float32
        (lambda: strategies.geometric(np.nan), "decay"),
        (lambda: strategies.geometric([0.5]), "decay"),
        (lambda: strategies.tree(1.0), "decay"),
        (lambda: strategies.tree(1 - 1e-12), "decay"),
        (lambda: strategies.tree([0.5]), "decay"),
        (lambda: strategies.scaled(strategies.tree(0.5), [1.0]), "strategy"),
        (lambda: strategies.scaled(strategies.geometric(0.5), [0.0]), "factors"),
        (lambda: strategies.scaled(strategies.geometric(0.5), []), "factors"),
        (lambda: strategies.scaled(strategies.geometric(0.5), [np.nan]), "factors"),
        (lambda: strategies.scaled(strategies.geometric(0.5), [1e9]), "factors"),
        (lambda: strategies.rational([0.5], [1.0]), "poles"),
        (lambda: strategies.rational([-1.5], [0.5]), "zeros"),
        (lambda: strategies.rational([0.5], [0.5, 0.2]), "poles"),
        (lambda: strategies.rational(0.5, 0.5), "poles"),
        (lambda: strategies.rational([], []), "zeros"),
        (lambda: strategies.rational([0.1 + 0.5j, 0.1 - 0.5j], [0.9, 0.8]), "zeros"),
        (lambda: strategies.rational([np.nan], [0.5]), "zeros"),
        (lambda: strategies.rational(["a"], [0.5]), "zeros"),
        (lambda: strategies.rational([0.0] * 4, [0.99] * 4), "float32"),
        (lambda: strategies.banded([1.0, 0.5j]), "coefficients"),
        (lambda: strategies.banded([1.0, 1e300]), "float32"),
        (lambda: strategies.banded([1.0, 10**400]), "coefficients"),
        (lambda: strategies.banded([0.5, 0.5]), "begin with 1"),
        (lambda: strategies.banded([]), "coefficients"),
        (lambda: strategies.banded_inverse([1.0, np.inf]), "finite"),
    ],
)
def test_invalid_strategies_raise(make, match):
    with pytest.raises(ValueError, match=match):
        make()


# --- the best of a kind

SMALL = {"num_steps": 60, "steps_per_epoch": 15}


def sensitivity_times_error(strategy, workload, order="fixed", **asked):
    cost = correlated.mu(
        strategy, 1.0, order=order, adjacency=Adjacency.ZERO_OUT, **asked
    )
    return cost * correlated.error(strategy, workload, asked["num_steps"])


def dense_toeplitz_product(c, workload, *, num_steps, steps_per_epoch):
    """The same product for coefficients c >= 0 and a fixed order, from the matrices."""
    c = np.tril(scipy.linalg.toeplitz(np.pad(c, (0, num_steps - len(c)))))
    columns = [c[:, place::steps_per_epoch].sum(1) for place in range(steps_per_epoch)]
    error = np.linalg.norm(dense_workload(workload, num_steps) @ np.linalg.inv(c))
    return np.max(np.linalg.norm(columns, axis=1)) * error / np.sqrt(num_steps)


@pytest.mark.parametrize(
    "order",
    [
        "fixed",
        pytest.param("reshuffled", marks=pytest.mark.matrix),
        pytest.param("separated", marks=pytest.mark.matrix),
    ],
)
def test_optimized_decay_is_the_best(order, x64):
    workload = workloads.momentum_sum(0.9)
    best = strategies.optimize("geometric", workload, order=order, **SMALL)
    decays = np.linspace(0, 0.99, 100).astype(np.float32).astype(float)
    if order == "fixed":
        powers = decays[:, None] ** np.arange(60)
        others = [dense_toeplitz_product(c, workload, **SMALL) for c in powers]
    else:
        others = jax.jit(
            jax.vmap(
                lambda d: sensitivity_times_error(
                    strategies.geometric(d), workload, order, **SMALL
                )
            )
        )(decays)
    least = np.asarray(others).min()
    assert least * (1 - 1e-3) <= best.product <= least * (1 + 1e-6)
    assert best.gap >= 1


@pytest.mark.matrix
def test_optimality_gap_decreases_with_memory(x64):
    workload = workloads.momentum(0.95)
    gaps = [
        strategies.optimize(kind, workload, num_vectors=size, **SMALL).gap
        for kind, size in (
            ("geometric", 1),
            ("rational", 1),
            ("rational", 2),
            ("banded", 14),
        )
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert 1 <= gaps[-1] < 1.03


def test_one_band_per_step_of_an_epoch_is_nearly_optimal(x64):
    best = strategies.optimize(
        "banded", workloads.momentum(0.95), num_vectors=14, **SMALL
    )
    assert 1 <= best.gap < 1.03


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["momentum", "momentum_sum", "prefix_sum"])
def test_one_inverse_band_equals_the_geometric_optimum(workload, x64):
    """Too long a step gives growing coefficients; the descent must not stop there."""
    workload = getattr(workloads, workload)(*[0.99] * (workload != "prefix_sum"))
    options = {"num_steps": 1000, "steps_per_epoch": 100}
    one = strategies.optimize("geometric", workload, **options)
    other = strategies.optimize("banded_inverse", workload, **options)
    np.testing.assert_allclose(other.product, one.product, rtol=1e-5)
    more = strategies.optimize("banded_inverse", workload, num_vectors=3, **options)
    assert more.product < one.product


def test_reflection_coefficients_round_trip(x64):
    a = np.poly([0.9, 0.5, -0.3, 0.2])[1:]
    back = jax.jit(_optimize._bands)(np.asarray(_optimize._free_bands(a)))
    np.testing.assert_allclose(back, a, rtol=1e-12)
    x = np.random.default_rng(0).normal(size=(20, 5))
    for row in np.asarray(jax.jit(jax.vmap(_optimize._bands))(x)):
        assert np.all(np.abs(np.roots(np.append(1, row))) < 1)


@pytest.mark.parametrize(
    "size", [1, *(pytest.param(x, marks=pytest.mark.matrix) for x in (3, 8))]
)
@pytest.mark.parametrize(
    "kind", ["banded", pytest.param("banded_inverse", marks=pytest.mark.matrix)]
)
def test_optimized_bands_improve_on_the_square_root(kind, size, x64):
    """The truncated square root of the workload is the start of the optimisation."""
    workload = workloads.prefix_sum()
    best = strategies.optimize(kind, workload, num_vectors=size, **SMALL)
    k = np.arange(1, size + 1)
    root = np.cumprod(np.r_[1.0, (2 * k - 1) / (2 * k)])
    inverse = np.cumprod(np.r_[1.0, (2 * k - 3) / (2 * k)])
    start = getattr(strategies, kind)(root if kind == "banded" else inverse)
    assert best.gap >= 1
    assert best.product < float(sensitivity_times_error(start, workload, **SMALL))


def test_descent_with_numpy_equals_descent_with_xla(x64):
    workload = workloads.momentum_sum(0.9, weight_decay=0.01)
    options = {
        "kind": "rational",
        "num_steps": 20,
        "steps_per_epoch": 5,
        "order": "fixed",
    }
    x = np.array([2.5, 0.5])
    result = _optimize._value_and_grad(x, workload, **options)
    assert all(isinstance(y, (np.ndarray, np.generic)) for y in result)
    compiled = _optimize._value_and_grad.__wrapped__(x, workload, **options)
    for one, other in zip(result, compiled, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_optimize_accounts_for_learning_rate_schedules(x64):
    rates = np.linspace(1.0, 0.0, 60)
    workload = workloads.momentum_sum(0.9, learning_rates=rates)
    best = strategies.optimize("banded", workload, num_vectors=2, **SMALL)
    result = np.append(1.0, best.numerator)
    np.testing.assert_allclose(
        best.product, dense_toeplitz_product(result, workload, **SMALL), rtol=1e-9
    )
    for factor in itertools.product((0.97, 1, 1.03), repeat=2):
        if factor != (1, 1):
            other = result * [1, *factor]
            assert best.product < dense_toeplitz_product(other, workload, **SMALL)
    assert np.isnan(best.gap)


@pytest.mark.slow
def test_poles_equal_in_float32_are_merged(x64):
    best = strategies.optimize(
        "rational",
        workloads.momentum_sum(0.9),
        num_steps=120,
        steps_per_epoch=12,
        num_vectors=8,
    )
    assert 1 <= best.num_vectors < 8
    assert best.gap >= 1


def test_invalid_optimize_arguments_raise():
    workload = workloads.momentum(0.9)
    for nothing in (None, workloads.prefix_sum(learning_rates=0.0)):
        with pytest.raises(ValueError, match="workload"):
            strategies.optimize("geometric", nothing, **SMALL)
    with pytest.raises(ValueError, match="num_vectors"):
        strategies.optimize("geometric", workload, num_vectors=2, **SMALL)
    for changed in ({"kind": "dense"}, {"num_vectors": 0}, {"order": "poisson"}):
        with pytest.raises(ValueError, match=next(iter(changed))):
            strategies.optimize(
                **{"kind": "banded", "workload": workload, **SMALL, **changed}
            )
    with pytest.raises(ValueError, match="traced"):
        jax.jit(
            lambda b: (
                strategies.optimize(
                    "geometric", workloads.momentum(b), **SMALL
                ).numerator
            )
        )(0.9)


# --- the certificate


def brute_force_product(c, a, n_b):
    """Sensitivity times error of any matrix, by all patterns and signs."""
    steps = len(c)
    square = 0.0
    for offset in range(n_b):
        columns = c[:, offset::n_b]
        for signs in itertools.product([-1, 1], repeat=columns.shape[1] - 1):
            square = max(square, np.sum((columns @ [1, *signs]) ** 2))
    return np.sqrt(square) * np.linalg.norm(a @ np.linalg.inv(c)) / np.sqrt(steps)


@pytest.mark.parametrize("decay", [0.0, 0.8, 0.99])
@pytest.mark.parametrize("shape", [(8, 8), (12, 4), (20, 4), (11, 3), (6, 9), (5, 1)])
def test_lower_bound_holds_for_all_matrices(decay, shape, monkeypatch):
    """For random matrices, and for the optimum without a limit on memory."""
    steps, n_b = shape
    rng = np.random.default_rng(0)
    workload = workloads.momentum_sum(decay)
    root = np.linalg.cholesky
    a = np.tril(np.ones((steps, steps)))
    lags = np.subtract.outer(np.arange(steps), np.arange(steps))
    a = a @ np.tril((1 - decay) * decay ** np.maximum(lags, 0.0))
    bound = _optimize.lower_bound(workload, steps, n_b)
    monkeypatch.setattr(_optimize, "_MAX_DENSE_SIZE", 0)
    quick = _optimize.lower_bound(workload, steps, n_b)
    assert 0 < quick <= bound * (1 + 1e-9)
    # CᵀC = (AᵀA)^{1/2} is optimal where every example takes part once.
    values, vectors = np.linalg.eigh(a.T @ a)
    best = root((vectors * np.sqrt(values)) @ vectors.T).T
    candidates = [best, np.eye(steps), a]
    candidates += [best @ np.diag(rng.uniform(0.5, 2, steps)) for _ in range(10)]
    noise = rng.normal(size=(100, steps, steps))
    candidates += list(best + 0.3 * noise * np.abs(best).max())
    products = [brute_force_product(c, a, min(n_b, steps)) for c in candidates]
    assert min(products) >= bound
    # It is not vacuous, also where it omits the last epoch.
    assert min(products) <= 2.2 * bound


def test_diagonal_sums_match_dense_matrices():
    a, n_b = np.random.default_rng(0).normal(size=12), 4
    matrix = sum(np.diag(np.full(12 - k, x), -k) for k, x in enumerate(a))
    average = np.kron(np.full((3, 3), 1 / 3), np.eye(n_b))
    for got, dense in zip(
        _optimize._diagonals(a, n_b), (matrix, matrix @ average), strict=True
    ):
        want = [np.trace(dense, -lag) for lag in range(-11, 12)]
        np.testing.assert_allclose(got, want, atol=1e-12)


# --- noise that varies

NUM_STEPS, N_B = 60, 12


def scheduled_product(strategy, workload, order):
    cost = correlated.mu(
        strategy,
        1.0,
        num_steps=NUM_STEPS,
        steps_per_epoch=N_B,
        order=order,
        adjacency=Adjacency.ZERO_OUT,
    )
    return float(cost * correlated.error(strategy, workload, NUM_STEPS))


FALLING = np.cos(np.linspace(0, 1.5, NUM_STEPS)) ** 2
SCHEDULES = {
    "momentum": workloads.momentum(0.9, learning_rates=FALLING),
    "sums": workloads.momentum_sum(0.8, learning_rates=FALLING),
    "sums at one rate": workloads.momentum_sum(0.8),
    "no rate at first": workloads.momentum(0.5, learning_rates=1 - FALLING),
}


@pytest.mark.diagonal("order")
@pytest.mark.parametrize("order", ["fixed", "reshuffled"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_of_independent_noise_attains_the_dual_bound(name, order, x64):
    """The product of the schedule equals the dual bound."""
    workload, shape = SCHEDULES[name], strategies.independent()
    a = np.asarray(dense_workload(workload, NUM_STEPS))
    w = np.sum(a**2, axis=0)
    epochs = NUM_STEPS // N_B

    def squared_product(s):
        """Squared error times squared sensitivity, for columns f[E, n_b] or f[E, 1]."""
        sensitivity = np.max(np.sum(s**2, axis=0))
        return np.sum(w.reshape(epochs, N_B) / s**2) / NUM_STEPS * sensitivity

    result = strategies.scheduled(
        shape, workload, num_steps=NUM_STEPS, steps_per_epoch=N_B, order=order
    )
    s = 1 / result.factors.reshape(epochs, N_B)
    best = scheduled_product(result, workload, order)
    np.testing.assert_allclose(best, np.sqrt(squared_product(s)), rtol=1e-9)
    # The dual: for multipliers λ_r of the positions, Σ_t 2 √(w_t λ_r) bounds them all.
    if order == "fixed":
        by_place = np.sum(np.sqrt(w.reshape(epochs, N_B)), axis=0)
        bound = np.sum(by_place**2) / NUM_STEPS
    else:
        bound = np.sum(np.sqrt(w.reshape(epochs, N_B).sum(1))) ** 2 / NUM_STEPS
    np.testing.assert_allclose(best, np.sqrt(bound), rtol=1e-5)
    assert best <= scheduled_product(shape, workload, order) * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("momentum", "reshuffled"),
        ("sums", "fixed"),
        ("sums at one rate", "reshuffled"),
        ("no rate at first", "fixed"),
    ],
)
def test_schedules_improve_correlated_noise(name, order, x64):
    workload = SCHEDULES[name]
    given = {"num_steps": NUM_STEPS, "steps_per_epoch": N_B, "order": order}
    shape = strategies.optimize("rational", workload, **given)
    result = strategies.scheduled(shape, workload, **given)
    best = scheduled_product(result, workload, order)
    # At a constant rate the gain is small; where rates fall it is at least a tenth.
    assert best <= scheduled_product(shape, workload, order) * (
        1 if "one" in name else 0.9
    )
    # Changing the factors of whole epochs at random is no better.
    factors = result.factors.reshape(-1, N_B)
    rng = np.random.default_rng(0)
    for _ in range(4):
        perturbed = factors * (1 + 0.05 * rng.normal(size=(factors.shape[0], 1)))
        other = strategies.scaled(shape, perturbed.ravel())
        assert scheduled_product(other, workload, order) >= best * (1 - 1e-3)
    np.testing.assert_allclose(np.mean(result.factors**-2), 1, rtol=1e-6)


def dense_workload(workload, num_steps):
    """The workload matrix A, row by row from its definition."""
    top, bottom = (np.append(1.0, np.asarray(x)) for x in workload[:2])
    h = scipy.signal.lfilter(top, bottom, np.eye(num_steps), axis=0)
    rows, now = [], np.zeros(num_steps)
    rates, keep = (np.broadcast_to(x, num_steps) for x in workload[2:])
    for row, rate, k in zip(h, rates, keep, strict=True):
        now = k * now + rate * row
        rows.append(now)
    return np.array(rows)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"strategy": strategies.tree(0.5)}, "strategy"),
        ({"strategy": None}, "strategy"),
        ({"workload": workloads.momentum(0.5, learning_rates=0.0)}, "rate"),
        ({"workload": workloads.momentum(0.5, learning_rates=np.ones(9))}, "num_steps"),
        ({"order": "separated"}, "order"),
        ({"num_steps": 0}, "num_steps"),
        ({"steps_per_epoch": 0}, "steps_per_epoch"),
    ],
)
def test_invalid_schedule_arguments_raise(changed, match):
    given = {
        "strategy": strategies.geometric(0.5),
        "workload": workloads.momentum(0.5),
        "num_steps": 10,
        "steps_per_epoch": 5,
        **changed,
    }
    with pytest.raises(ValueError, match=match):
        strategies.scheduled(given.pop("strategy"), given.pop("workload"), **given)


@pytest.mark.slow  # noise is solved for, for each strategy that is tried
@pytest.mark.parametrize(
    ("sampling", "num_steps"), [("cyclic_poisson", 60), ("random_bins", 24)]
)
def test_amplified_strategy_meets_target_with_less_error(
    sampling, num_steps, optimized, compiled
):
    workload = workloads.momentum(0.9)
    sizes = {"num_steps": num_steps, "steps_per_epoch": num_steps // 3}
    options = {**sizes, "sampling": sampling, "adjacency": Adjacency.ZERO_OUT}
    result = strategies.amplified(workload, **options, epsilon=2.0, delta=1e-4)
    with jax.enable_x64(True):  # a float32 of ε is rounded up, past the target
        used = float(
            correlated.epsilon(
                result.strategy, result.noise_multiplier, 1e-4, **options
            )
        )
    assert 1.99 < used <= 2.0
    error = correlated.error(result.strategy, workload, num_steps)
    np.testing.assert_allclose(result.error, result.noise_multiplier * error, rtol=1e-6)
    random = sampling == "random_bins"
    other = strategies.geometric(0.9) if random else strategies.independent()
    needed = calibrate.solve(
        lambda x: correlated.epsilon(other, x, 1e-4, **options), 2.0
    )
    assert needed * correlated.error(other, workload, num_steps) > result.error


@pytest.mark.parametrize(
    "changed",
    [
        {"sampling": "fixed"},
        {"epsilon": 0.0},
        {"delta": 1.5},
        {"num_steps": 0},
        {"adjacency": "replace"},
        {"workload": None},
    ],
)
def test_invalid_amplified_arguments_raise(changed):
    given = {
        "workload": workloads.momentum(0.9),
        "num_steps": 20,
        "steps_per_epoch": 10,
        "epsilon": 2.0,
        "delta": 1e-5,
        "sampling": "random_bins",
        "adjacency": Adjacency.ZERO_OUT,
        **changed,
    }
    (name,) = changed
    with pytest.raises(ValueError, match=f"^(the )?{name}"):
        strategies.amplified(given.pop("workload"), **given)
