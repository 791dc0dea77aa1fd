"""Numbers, dtypes and rounding: solvers run as their guarantees assume."""

import functools
import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_solver_soundness import (
    KEY,
    LOGISTIC,
    SETTING,
    SOLVERS,
    make_neighbours,
    run_solver,
)

from dpjax import Adjacency, solvers
from dpjax.noise import _reduced_momentum as reduced_momentum
from dpjax.solvers import _checks, _descent, _precision, losses, prox
from dpjax.solvers.prox import none

pytestmark = pytest.mark.rounding

OUTPUT = {"epsilon": 10.0, "delta": 1e-3, "num_steps": 1, "key": KEY}


def test_numbers_are_rounded_to_adjacent_float32():
    rng = np.random.default_rng(0)
    values = np.exp(rng.uniform(-80, 80, 2000))
    up, down = _precision.round_up(values), _precision.round_down(values)
    for x, above, below in zip(values, up, down, strict=True):
        assert Fraction(below) <= Fraction(x) <= Fraction(above)
        assert np.float32(above) == above
        assert np.float32(below) == below
        assert np.nextafter(np.float32(below), np.float32(np.inf)) >= above
    for exact in (0.0, 1.0, 0.5, -3.3, math.inf):
        assert _precision.round_up(exact) == _precision.round_down(exact) == exact
    # Noise that may be flushed to zero is rounded up, and overflow gives infinity.
    assert _precision.round_up(1e-42) == np.finfo(np.float32).tiny
    assert _precision.round_down(1e-42) == 0.0
    assert _precision.round_up(1e39) == math.inf
    assert _precision.round_down(1e39) == np.finfo(np.float32).max
    assert math.isnan(_precision.round_up(math.nan))
    with pytest.raises(ValueError, match="^noise_multiplier times"):
        _precision.stddev(1e30, 1e10)


GAPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-10}


@pytest.fixture
def run_between_numbers(dtype):
    """A run that ends with every coordinate half-way between two numbers."""
    gap, n, d = GAPS[dtype], 20_000, 100
    loss = losses.huber(1.0, feature_norm=1.0)
    data = np.full((n, d), gap / 2, np.float32), np.full(n, 50.0, np.float32)
    setting = {**loss.setting, "regularization": 0.0, "step_size": 1.0}
    return solvers.output_perturbation(
        loss,
        np.ones(d, jnp.dtype(dtype)),
        data,
        diameter=math.inf,
        adjacency=Adjacency.REPLACE,
        **OUTPUT,
        **setting,
    )


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", GAPS)
def test_output_noise_is_added_before_the_cast(run_between_numbers, dtype):
    # The noise is far smaller than the gap, so that it decides the rounding evenly.
    result, gap = run_between_numbers, GAPS[dtype]
    assert result.params.dtype == dtype
    assert result.scale < gap / 8
    above = np.sum(np.float64(result.params) > 1 + gap / 2)
    # Binomial(100, 1/2): within 30 to 70 but once in 25,000.
    assert 30 <= above <= 70


FAR = SETTING | {"clipped": False, "gradient_norm": 1.1, "step_size": 1e-3}


@pytest.fixture(scope="module")
def run_far_from_zero():
    """A run whose steps move 1e5 by 1e-3, which float32 could not represent."""
    return solvers.output_perturbation(
        LOGISTIC,
        np.full(3, 1e5, np.float32),
        make_neighbours()[0],
        **OUTPUT,
        **FAR | {"regularization": 0.0},
    )


@pytest.fixture(scope="module")
def error_further_away():
    with pytest.raises(ValueError, match="num_steps") as error:
        solvers.output_perturbation(
            LOGISTIC,
            np.full(3, 1e12, np.float32),
            make_neighbours()[0],
            **OUTPUT,
            **FAR,
        )
    return error


def test_output_perturbation_runs_in_double_precision(
    run_far_from_zero, error_further_away
):
    result = run_far_from_zero
    assert result.curve.loss.dtype == jnp.float32
    assert result.curve.left_out.dtype == jnp.int32
    assert result.params.dtype == jnp.float32
    assert 1e-4 < result.sensitivity < 1e-3  # includes the rounding of 1e5
    # So large that rounding in float64 separates two runs more than an example does.
    assert str(error_further_away.value).startswith("num_steps, the number")


class RoundedRuns(NamedTuple):
    """Last iterates in both precisions, and the bounds on their rounding."""

    single: np.ndarray
    double: np.ndarray
    in_float32: tuple[float, float]
    in_float64: tuple[float, float]
    num_steps: int


@pytest.fixture
def rounded_runs(step):
    # The same descent in float32 and in float64, n large and iterates far from zero.
    rng = np.random.default_rng(1)
    n, T, start = 4000, 150, np.array([3.0, -20.0, 40.0], np.float32)
    x = rng.normal(size=(n, 3)).astype(np.float32)
    data = _checks.mask_nonfinite((x, np.sign(x[:, 0])))
    setting = SETTING | {"clipped": False, "gradient_norm": 1.1, "step_size": 0.5}

    def descend(params):
        return _descent.descend(
            params,
            data,
            _precision.to_float32(np.full((T, 1), 0.5)),
            np.zeros((T, 1), np.float32),
            _precision.to_float32(1.1),
            _precision.to_float32(_precision.round_down(0.1)),
            KEY,
            loss_fn=LOGISTIC,
            prox=step,
            clipped=False,
            batches="full",
            batch_size=n,
            microbatch_size=None,
        )[0]

    single = np.float64(descend(start))
    with jax.enable_x64(True):
        double = np.asarray(descend(np.float64(start)))
    allowed = functools.partial(
        _precision.bound_rounding,
        jax.device_put(start),
        step,
        num_steps=T,
        num_examples=n,
        setting=setting,
    )
    return RoundedRuns(single, double, allowed(dtype=np.float32), allowed(), T)


@pytest.mark.diagonal
@pytest.mark.parametrize("step", [none, prox.elastic_net(0.01, 0.2)])
def test_rounding_stays_under_its_bound(rounded_runs, step):
    share, shift = rounded_runs.in_float32
    steps = (1 - 0.95**rounded_runs.num_steps) / 0.05
    error = np.linalg.norm(rounded_runs.single - rounded_runs.double)
    assert 0 < error <= share / 2 * shift * steps
    assert share > 0.05  # in float32 there would be no guarantee
    share, _ = rounded_runs.in_float64
    assert 0 < share < 1e-6


def test_loss_below_double_precision_raises():
    data = make_neighbours()[0]

    def float32_loss(params, example):
        return LOGISTIC(params.astype(jnp.float32), example)

    def loss_narrowed_in_loop(params, example):
        def body(i, total):
            return total + float32_loss(params, example)

        return jax.lax.fori_loop(0, 2, body, 0.0)

    for loss in (float32_loss, loss_narrowed_in_loop):
        with pytest.raises(ValueError, match=r"^loss_fn must not reduce"):
            solvers.output_perturbation(loss, jnp.zeros(3), data, **OUTPUT, **SETTING)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [jnp.int64, jnp.uint32, jnp.int16, jnp.int8])
def test_windows_accept_steps_of_any_integer_dtype(x64, dtype):
    n, d, beta = 5, 2, 0.8
    values = np.random.default_rng(2).normal(size=(17, d))

    @jax.jit
    def windowed(steps, values):
        key, decay = jax.random.key(0), jnp.float64(beta)

        def one(ring, given):
            step, value = given
            ring = reduced_momentum.push(
                ring, value, jnp.float64(0), key, step=step, decay=decay, window=n
            )
            return ring, reduced_momentum.query(ring, step, decay=decay, window=n)

        return jax.lax.scan(one, reduced_momentum.empty_ring(n, d), (steps, values))[1]

    result = windowed(np.arange(1, 18, dtype=dtype), values)
    for t in range(1, 18):
        first = max(t - n, 0)
        expected = sum(beta ** (t - i - 1) * values[i] for i in range(first, t))
        np.testing.assert_allclose(result[t - 1], expected, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
def test_runs_agree_with_and_without_x64(solver):
    # With float32 parameters the draws and steps are the same, except for scalars.
    data = make_neighbours()[0]
    plain = run_solver(solver, LOGISTIC, data, jnp.float32)
    with jax.enable_x64(True):
        other = run_solver(solver, LOGISTIC, data, jnp.float32)
    assert other.params.dtype == jnp.float32
    # Steps are about 1 long, and up to nine: 16 roundings are allowed each.
    np.testing.assert_allclose(plain.params, other.params, atol=9 * 16 * 2**-24)
    mu = plain.guarantee.mu
    assert (mu is None) == (solver in ("noisy_sgd", "random_round_sgd"))
    if mu is None:
        assert other.guarantee.mu is None
    else:
        np.testing.assert_allclose(other.guarantee.mu, mu, rtol=1e-6)


SINGLE = [
    ("noisy_gd", {"num_steps": 1}),
    ("noisy_cyclic_gd", {"num_epochs": 1, "batch_size": 1}),
    ("noisy_sgd", {"num_steps": 1, "batch_size": 1}),
    ("random_round_sgd", {"max_rounds": 1, "batch_size": 1}),
    ("output_perturbation", {"num_steps": 1}),
    ("dp_nsgd", {"num_epochs": 1, "batch_size": 1}),
    ("sensitivity_reduced_nsgd", {"num_epochs": 1, "batch_size": 1}),
]


@pytest.fixture
def sound_and_damaged_runs(solver, changed):
    x, y = make_neighbours()[0]
    bad = np.where(np.arange(8)[:, None] == 0, np.nan, x)
    return [
        run_solver(solver, LOGISTIC, (features[:1], y[:1]), jnp.float32, **changed)
        for features in (x, bad)
    ]


@pytest.mark.diagonal
@pytest.mark.parametrize(("solver", "changed"), SINGLE)
def test_single_step_on_one_example_is_finite(sound_and_damaged_runs, solver, changed):
    one, damaged = sound_and_damaged_runs
    assert np.all(np.isfinite(one.params))
    # A damaged example contributes zero, and the run is finite, too.
    assert np.all(np.isfinite(damaged.params))
    assert damaged.guarantee.mu == one.guarantee.mu


@pytest.mark.diagonal
@pytest.mark.parametrize("solver", ["noisy_gd", "noisy_cyclic_gd", "noisy_sgd"])
def test_missing_or_contradictory_assumptions_raise(solver):
    data = make_neighbours()[0]
    assert_assumptions_checked(solver, data)


def test_output_perturbation_requires_all_assumptions():
    assert_assumptions_checked("output_perturbation", make_neighbours()[0])


def assert_assumptions_checked(solver, data):
    train = getattr(solvers, solver)
    given = SOLVERS[solver]
    for names in [(name,) for name in SETTING] + [("smoothness", "diameter")]:
        rest = {k: v for k, v in given.items() if k not in names}
        for kind in (ValueError, TypeError):
            with pytest.raises(kind, match=rf"^{', '.join(names)} must be given"):
                train(LOGISTIC, jnp.zeros(3), data, key=KEY, **rest)
    with pytest.raises(ValueError, match="^strong_convexity_ must not"):
        train(LOGISTIC, jnp.zeros(3), data, key=KEY, **given, strong_convexity_=0.1)
    whole = {"batch_size": 4} if "batch_size" in given else {}
    softmax = losses.softmax(2, feature_norm=1.1)
    labels = data[0], (data[1] > 0).astype(int)
    for name, loss, bad in [
        ("smoothness", LOGISTIC, {"smoothness": 0.1}),
        ("gradient_norm", LOGISTIC, {"clipped": False, "gradient_norm": 1.0}),
        ("strong_convexity", LOGISTIC, {"strong_convexity": 0.01}),
        ("generalised_linear", softmax, {"smoothness": 9.0}),
    ]:
        with pytest.raises(ValueError, match=f"^{name} must"):
            train(
                loss,
                jnp.zeros((3, 2)) if loss is softmax else jnp.zeros(3),
                labels if loss is softmax else data,
                key=KEY,
                **given | bad | whole,
            )


def matrix_products(fn, *args):
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return [
        e
        for e in _precision.innermost_equations(jaxpr)
        if e.primitive.name == "dot_general"
    ]


HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (losses.logistic(feature_norm=0.7), (5,)),
        (losses.huber(0.4, feature_norm=0.7), (5,)),
        (losses.softmax(3, feature_norm=0.7), (5, 3)),
    ],
)
def test_matrix_products_use_the_highest_precision(loss, shape, dtype):
    with jax.enable_x64(dtype == "float64"):
        params, labels = jnp.zeros(shape, dtype), jnp.ones(4)
        batch = jnp.ones((4, 5), dtype), labels
        one = batch[0][0], labels[0]
        result = matrix_products(loss, params, one) + matrix_products(
            jax.grad(loss), params, one
        )
        assert len(result) >= 2
        result += matrix_products(jax.vmap(jax.grad(loss), (None, 0)), params, batch)
        for clip_norm in (None, 0.3):
            total = functools.partial(_descent.gradient_sum, loss, clip_norm=clip_norm)
            data = _checks.Data(batch, jnp.ones(4, bool))
            result += matrix_products(lambda p, d, t=total: t(p, d), params, data)
        assert all(e.params["precision"] == HIGHEST for e in result)


@pytest.mark.diagonal
@pytest.mark.parametrize("bound", [1e-30, 0.7, 1e30])
def test_losses_project_features_into_balls_of_any_size(bound):
    rng = np.random.default_rng(3)
    directions = rng.normal(size=(5, 4))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    loss = losses.logistic(feature_norm=bound)
    gradient = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))
    for length in (1e-36, 1e-25, 1e-3, 0.69, 5.0, 1e20, 1e37):
        x = np.float32(directions * length)
        result = np.float64(gradient(jnp.zeros(4), (x, jnp.ones(5))))
        half = np.linalg.norm(np.float64(x), axis=1) / 2
        norms = np.linalg.norm(result, axis=1)
        assert np.all(norms <= bound / 2)
        if (
            length < 1e18 * bound
        ):  # beyond it squares overflow, and the example contributes zero
            assert np.all(norms >= np.minimum(half, bound / 2) * (1 - 2**-19))
