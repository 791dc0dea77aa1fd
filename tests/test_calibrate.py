"""Calibration against closed forms and exhaustive search."""

import itertools
import math

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
import scipy.stats

from dpjax import Adjacency
from dpjax._core.searches import secants
from dpjax.accounting import calibrate, gdp, tree, truncation

# Outside `jax.jit` a search is some twenty small programs: the default suite has none.
JITTED = pytest.mark.parametrize(
    "jitted", [True, pytest.param(False, marks=pytest.mark.matrix)]
)


def epsilon_of_gaussian(sensitivity, noise_multiplier):
    return gdp.epsilon(sensitivity / noise_multiplier, 1e-5)


def epsilon_of_power(sensitivity, noise_multiplier):
    return (sensitivity / noise_multiplier) ** 1.5


# ε as a function of sensitivity and noise, its inverse in μ, and the allowed relative
# error of ε: NumPy's powers and compiled ones each round, by an ulp or two.
PROFILES = {
    "power": (epsilon_of_power, lambda target: target ** (2 / 3), 1e-15),
    "Gaussian": (
        epsilon_of_gaussian,
        lambda target: np.asarray(gdp.mu(target, 1e-5)),
        0.0,
    ),
}


@pytest.mark.parametrize(
    "profile", ["power", pytest.param("Gaussian", marks=pytest.mark.slow)]
)
@JITTED
def test_solve_finds_smallest_noise_multiplier(jitted, profile, x64):
    epsilon, mu, off = PROFILES[profile]
    grid = np.meshgrid([0.02, 7.0, 4000.0], [1e-6, 0.01, 2.0, 300.0])
    sensitivity, target = (x.ravel() for x in grid)

    def solve(sensitivity, target):
        return calibrate.solve(lambda s: epsilon(sensitivity, s), target)

    if jitted:
        result = np.asarray(jax.jit(jax.vmap(solve))(sensitivity, target))
    else:
        pairs = zip(sensitivity.tolist(), target.tolist(), strict=True)
        result = np.array([float(solve(*pair)) for pair in pairs])
    assert np.all(np.asarray(epsilon(sensitivity, result)) <= target * (1 + off))
    less = np.asarray(epsilon(sensitivity, result * (1 - 1e-9)))
    assert np.all(less > target)
    np.testing.assert_allclose(result, sensitivity / mu(target), rtol=1e-10)


def test_float32_rounds_to_the_safe_side():
    targets = np.linspace(0.5, 9.5, 40).astype(np.float32)
    solve = jax.jit(jax.vmap(lambda t: calibrate.solve(lambda s: 3 / s**1.5, t)))
    reached = 3 / np.asarray(solve(targets), np.float64) ** 1.5
    assert np.all(reached <= targets * (1 + 1e-15))  # a rounding or two of the power
    assert np.all(reached >= targets * (1 - 1e-6))


@pytest.mark.slow
def test_largest_number_of_steps_matches_exhaustive_search():
    def epsilon(steps):
        return gdp.epsilon(0.2 * jnp.sqrt(steps), 1e-5)

    grid = np.arange(1, 400)
    best = grid[np.asarray(epsilon(grid)) <= 3.0].max()
    assert calibrate.solve(epsilon, 3.0, increasing=True, integer=True) == best
    traced = jax.jit(
        lambda t: calibrate.solve(epsilon, t, increasing=True, integer=True)
    )
    assert traced(3.0) == best


@JITTED
def test_root_above_upper_returns_upper(jitted):
    def solve(target):
        return calibrate.solve(
            lambda q: 5 * q + q * q, target, increasing=True, upper=1.0
        )

    solve = jax.jit(solve) if jitted else solve
    assert float(solve(1e4)) == 1.0
    np.testing.assert_allclose(solve(2.75), 0.5, rtol=1e-6)


def gaussian_epsilon(noise_multiplier):
    return gdp.epsilon(1 / noise_multiplier, 1e-5)


def epsilon_of_rate(q):
    return gdp.epsilon(q, 1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize("kwargs", [{}, {"integer": True}, {"start": 1e6}])
def test_target_not_met_below_upper_raises(kwargs):
    # ε is 0.345 at 10, and 0.1 from 27 on.
    for upper in (10.0, 10.7):
        with pytest.raises(ValueError, match=rf"^target_epsilon 0\.1 .* {upper}"):
            calibrate.solve(gaussian_epsilon, 0.1, upper=upper, **kwargs)
    with pytest.raises(ValueError, match=r"^target_epsilon 0\.1 is not met"):
        calibrate.solve(epsilon_of_rate, 0.1, increasing=True, integer=True, upper=10.0)


# Two ways to search, both of which return infinity where there is no root.


def solve_traced(epsilon, target, wide, **kwargs):
    with jax.enable_x64(wide):
        solve = jax.jit(lambda t: calibrate.solve(epsilon, t, **kwargs))
        return float(solve(target))


def solve_eagerly(epsilon, target, wide, **kwargs):
    with jax.enable_x64(wide):
        try:
            return float(calibrate.solve(epsilon, target, **kwargs))
        except ValueError:
            return np.inf


BOTH_WAYS = pytest.mark.parametrize(
    "solve", [solve_traced, pytest.param(solve_eagerly, marks=pytest.mark.slow)]
)


@pytest.mark.parametrize(
    "epsilon",
    [
        pytest.param(lambda s: jnp.where(s < 30, jnp.inf, 1 / s), id="infinite"),
        pytest.param(lambda s: jnp.where(s < 30, jnp.nan, 1 / s), id="nan"),
        pytest.param(lambda s: jnp.where(s < 30, 1.0, 2.0**-7), id="plateaus"),
        pytest.param(lambda s: jnp.ceil(100 / s) / 300, id="stairs"),
        pytest.param(lambda s: 1 / s + 0.01 * jnp.sin(300 * s) ** 2, id="ripples"),
        pytest.param(lambda s: 1e-3 / s**3, id="steep"),
    ],
)
@pytest.mark.diagonal("integer")
@pytest.mark.parametrize("integer", [False, True])
@BOTH_WAYS
def test_returned_value_meets_the_target_exactly(solve, epsilon, integer):
    epsilon = jax.jit(epsilon)
    kwargs = {"integer": integer, "upper": 33.3, "start": 7.3}
    values = np.append(np.linspace(29.0, 33.3, 501), 2.0 ** np.arange(-20, 6))
    values = np.floor(values) if integer else values
    with jax.enable_x64(True):
        reached = np.asarray(epsilon(values[values > 0]))
    for wide in (False, True):
        for target in (2.0**-4, 2.0**-7):  # in float32, too
            value = solve(epsilon, target, wide, **kwargs)
            if value == np.inf:  # an evaluation may be 4 ulps off
                assert not np.any(reached <= target * (1 - 1e-15))
                continue
            assert 0 < value <= 33.3
            assert not integer or value == np.floor(value)
            with jax.enable_x64(True):
                assert float(epsilon(value)) <= target * (1 + 1e-15)


@BOTH_WAYS
def test_result_never_exceeds_upper_in_any_dtype(solve):
    # 0.1 is between two numbers of float32, and so is the root.
    def epsilon(noise_multiplier):
        return 0.1 / noise_multiplier - 1e-10

    assert float(np.float32(0.1)) > 0.1
    assert solve(epsilon, 1.0 - 1e-10, False, upper=0.1) == np.inf
    below = np.nextafter(np.float32(0.1), np.float32(0))
    up = {"increasing": True, "upper": 0.1}
    assert solve(lambda q: q, 0.5, False, **up) == below
    assert solve(lambda q: q, 0.5, True, **up) == 0.1
    assert solve(epsilon, 1.0 - 1e-10, True, upper=0.1) <= 0.1


@pytest.mark.slow
def test_derivative_at_the_end_of_the_range_is_zero():
    def solve_below_one(target):
        return calibrate.solve(epsilon_of_rate, target, increasing=True, upper=1.0)

    for transform in (lambda f: f, jax.jit):
        value, slope = transform(jax.value_and_grad(solve_below_one))(1e4)
        assert (value, slope) == (1.0, 0.0)
    assert calibrate.solve(lambda s: 0 * s, 1.0) <= 1e-37
    assert calibrate.solve(lambda s: 0 * s, 1.0, increasing=True) >= 1e38


def zero_only_at_infinity(noise_multiplier):
    return jnp.where(jnp.isinf(noise_multiplier), 0.0, 1.0)


def test_unreachable_target_gives_infinity():
    bad = np.array([0.5, np.nan, -1.0], np.float32)
    solve = jax.jit(jax.vmap(lambda t: calibrate.solve(zero_only_at_infinity, t)))
    assert np.all(np.asarray(solve(bad)) == np.inf)


@JITTED
def test_epsilon_fn_may_close_over_float32_under_strict_promotion(jitted):
    def solve(s):
        return calibrate.solve(lambda x: s / x + s, 4.0)

    solve = jax.jit(solve) if jitted else solve
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_allclose(solve(jnp.float32(3.0)), 3.0, rtol=3e-7)


def test_nonscalar_target_raises():
    for call in (
        lambda: calibrate.solve(gaussian_epsilon, np.array([1.0, 2.0])),
        lambda: jax.jit(lambda t: calibrate.solve(gaussian_epsilon, t))(np.ones(2)),
    ):
        with pytest.raises(ValueError, match=r"^target_epsilon must be a scalar.*vmap"):
            call()
    with pytest.raises(ValueError, match=r"^epsilon_fn's result must be a scalar"):
        calibrate.solve(lambda s: jnp.stack([1 / s, 1 / s]), 1.0)


@pytest.mark.slow
def test_implicit_derivatives_match_closed_form():
    def sigma(target, sensitivity):
        return calibrate.solve(lambda s: gdp.epsilon(sensitivity / s, 1e-5), target)

    # σ* = s / μ(ε, δ), so its derivatives are known.
    mu, slope = gdp.mu(2.0, 1e-5), jax.grad(gdp.mu)(2.0, 1e-5)
    expected = (-3.0 * slope / mu**2, 1 / mu)
    curvature = jax.hessian(lambda t: 3.0 / gdp.mu(t, 1e-5))(2.0)
    compiled = jax.jit(sigma)
    for f in (sigma, compiled):
        np.testing.assert_allclose(jax.grad(f, (0, 1))(2.0, 3.0), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.hessian(compiled)(2.0, 3.0), curvature, rtol=1e-4)


@pytest.mark.slow
def test_epsilon_derivatives_by_noise_and_decay_match_differences():
    def epsilon(noise_multiplier, decay):
        mu = tree.momentum_mu(
            noise_multiplier,
            num_steps=120,
            decay=decay,
            steps_per_epoch=30,
            order="fixed",
            adjacency=Adjacency.REPLACE,
        )
        return gdp.epsilon(mu, 1e-6)

    def epsilon_at(*arguments):
        return float(epsilon(*arguments))

    h = 1e-5
    with jax.enable_x64(True):
        by_noise = (epsilon_at(8.0 + h, 0.9) - epsilon_at(8.0 - h, 0.9)) / (2 * h)
        by_decay = (epsilon_at(8.0, 0.9 + h) - epsilon_at(8.0, 0.9 - h)) / (2 * h)
    gradient = jax.jit(jax.grad(epsilon, (0, 1)))(8.0, 0.9)
    np.testing.assert_allclose(gradient, (by_noise, by_decay), rtol=1e-5)


def epsilon_above_one(noise_multiplier):
    return 1 + 1 / noise_multiplier


@pytest.mark.matrix
@pytest.mark.parametrize("epsilon", [epsilon_above_one, zero_only_at_infinity])
def test_unreachable_concrete_target_raises(epsilon):
    with pytest.raises(ValueError, match=r"^target_epsilon 0\.5 is not met"):
        calibrate.solve(epsilon, 0.5)


def test_unreachable_traced_target_gives_infinity():
    assert (
        float(jax.jit(lambda t: calibrate.solve(epsilon_above_one, t))(0.5)) == np.inf
    )
    for kwargs in ({"target_epsilon": 0.0}, {"start": -1.0}, {"upper": 0.0}):
        name = next(iter(kwargs))
        with pytest.raises(ValueError, match=f"^{name} must"):
            calibrate.solve(epsilon_above_one, **{"target_epsilon": 9.0, **kwargs})


def test_overflow_delta_equals_binomial_tail():
    for n, q, b in [(1000, 0.01, 25), (50, 0.3, 30), (20_000, 0.001, 60)]:
        with mp.workdps(40):
            tail = mp.fsum(
                mp.binomial(n, k) * mp.mpf(q) ** k * (1 - mp.mpf(q)) ** (n - k)
                for k in range(b + 1, min(n, b + 200) + 1)
            )
        with jax.enable_x64(True):
            extra = truncation.overflow_delta(
                1.5, num_examples=n, sampling_rate=q, max_batch_size=b, num_steps=7
            )
        exact = 7 * (1 + mp.exp(1.5)) * tail
        assert 0 <= float(float(extra) / exact - 1) < 1e-9
        np.testing.assert_allclose(scipy.stats.binom.sf(b, n, q), float(tail))
    always_fits = truncation.overflow_delta(
        1.0, num_examples=5, sampling_rate=0.9, max_batch_size=5, num_steps=3
    )
    assert float(always_fits) == 0


@pytest.mark.matrix
@pytest.mark.parametrize("start", [0.01, 1.7, 2.0, 300.0])
def test_solve_evaluates_no_parameter_twice(start):
    """A start close to the root saves most of the search."""
    evaluated = []

    def epsilon(x):
        evaluated.append(float(x))
        return 3 / x**1.5

    root = calibrate.solve(epsilon, 3 / 1.7**1.5, start=start)
    assert float(root) == pytest.approx(1.7, rel=1e-6)
    assert len(set(evaluated)) == len(evaluated)
    assert len(evaluated) <= (8 if start == 1.7 else 20)


@pytest.mark.parametrize("start", [0.1, 0.9, 10.0])
@pytest.mark.parametrize("slope", [-0.7, -1.2, -3.0])
def test_secants_reach_the_zero_of_a_curved_function(start, slope):
    # The zero of log(e^{1/x²} − 1) − log 2 is at log(3)^{−1/2}; for small x, infinite.
    def excess(x):
        return math.log(math.expm1(x**-2) / 2) if x > 0.05 else math.inf

    points = itertools.islice(secants(excess, start, slope), 12)
    result = [abs(point.log + math.log(math.log(3)) / 2) for point in points]
    assert min(result) < 1e-9
    # From near the zero the method takes few evaluations.
    assert start != 0.9 or sum(off > 1e-6 for off in result) <= 5
