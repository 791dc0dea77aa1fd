"""Calibration against closed forms and exhaustive search."""

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
import scipy.stats

from dpjax import Adjacency
from dpjax.accounting import calibrate, gdp, tree, truncation


@pytest.mark.parametrize("target", [1e-6, 0.01, 2.0, 300.0])
@pytest.mark.parametrize("sensitivity", [0.02, 7.0, 4000.0])
def test_smallest_noise_multiplier(target, sensitivity, x64):
    def epsilon(noise_multiplier):
        return gdp.epsilon(sensitivity / noise_multiplier, 1e-5)

    found = calibrate.solve(epsilon, target)
    assert epsilon(found) <= target
    assert epsilon(found * (1 - 1e-9)) > target
    np.testing.assert_allclose(found, sensitivity / gdp.mu(target, 1e-5), rtol=1e-10)


def test_float32_rounds_to_the_safe_side():
    targets = np.linspace(0.5, 9.5, 40)
    found = jax.jit(
        jax.vmap(lambda t: calibrate.solve(lambda s: gdp.epsilon(3 / s, 1e-6), t))
    )(jnp.asarray(targets))
    with jax.enable_x64(True):
        reached = gdp.epsilon(3 / np.asarray(found, np.float64), 1e-6)
        assert np.all(reached <= np.asarray(targets, np.float32))
        assert np.all(reached >= targets * (1 - 1e-6))


@pytest.mark.slow
def test_largest_number_of_steps_is_the_exhaustive_one():
    def epsilon(steps):
        return gdp.epsilon(0.2 * jnp.sqrt(steps), 1e-5)

    grid = np.arange(1, 400)
    best = grid[np.asarray(epsilon(grid)) <= 3.0].max()
    assert calibrate.solve(epsilon, 3.0, increasing=True, integer=True) == best
    traced = jax.jit(
        lambda t: calibrate.solve(epsilon, t, increasing=True, integer=True)
    )
    assert traced(3.0) == best


def test_upper_stops_the_search():
    def epsilon(rate):
        return gdp.epsilon(rate, 1e-5)

    assert calibrate.solve(epsilon, 1e4, increasing=True, upper=1.0) == 1.0
    below = calibrate.solve(epsilon, 1.0, increasing=True, upper=1.0)
    np.testing.assert_allclose(below, gdp.mu(1.0, 1e-5), rtol=1e-6)


def gaussian(noise_multiplier):
    return gdp.epsilon(1 / noise_multiplier, 1e-5)


def rate(q):
    return gdp.epsilon(q, 1e-5)


@pytest.mark.parametrize("kwargs", [{}, {"integer": True}, {"start": 1e6}])
def test_the_last_parameter_that_makes_sense_is_not_a_root(kwargs):
    # ε is 0.345 at 10, and 0.1 from 27 on.
    for upper in (10.0, 10.7):
        with pytest.raises(ValueError, match=rf"^target_epsilon 0\.1 .* {upper}"):
            calibrate.solve(gaussian, 0.1, upper=upper, **kwargs)
    with pytest.raises(ValueError, match=r"^target_epsilon 0\.1 is not met"):
        calibrate.solve(rate, 0.1, increasing=True, integer=True, upper=10.0)


@pytest.mark.parametrize(
    "epsilon",
    [
        lambda s: jnp.where(s < 30, jnp.inf, 1 / s),
        lambda s: jnp.where(s < 30, jnp.nan, 1 / s),
        lambda s: jnp.where(s < 30, 1.0, 2.0**-7),
        lambda s: jnp.ceil(100 / s) / 300,
        lambda s: 1 / s + 0.01 * jnp.sin(300 * s) ** 2,
        lambda s: 1e-3 / s**3,
    ],
    ids=["infinite", "nan", "plateaus", "stairs", "ripples", "steep"],
)
@pytest.mark.parametrize("integer", [False, True])
def test_what_is_returned_meets_the_target_as_it_is(epsilon, integer):
    upper, targets = 33.3, [2.0**-4, 2.0**-7]
    kwargs = {"integer": integer, "upper": upper, "start": 7.3}
    asked = np.append(np.linspace(29.0, 33.3, 501), 2.0 ** np.arange(-20, 6))
    asked = np.floor(asked) if integer else asked
    asked = asked[asked > 0]
    for wide in (False, True):
        with jax.enable_x64(wide):
            solve = jax.vmap(lambda t: calibrate.solve(epsilon, t, **kwargs))
            together = np.asarray(jax.jit(solve)(jnp.asarray(targets)), np.float64)
            narrow = np.asarray(jnp.asarray(targets), np.float64)
        for target, goal, traced in zip(targets, narrow, together, strict=True):
            with jax.enable_x64(True):  # what an evaluation may be off by is 4 ulps
                possible = np.any(np.asarray(epsilon(asked)) <= goal * (1 - 1e-15))
            with jax.enable_x64(wide):
                try:
                    eager = float(calibrate.solve(epsilon, target, **kwargs))
                except ValueError:
                    assert traced == np.inf
                    assert not possible
                    continue
            for value in (eager, traced):
                assert 0 < value <= upper
                assert not integer or value == np.floor(value)
                with jax.enable_x64(True):
                    assert epsilon(jnp.asarray(value)) <= goal * (1 + 1e-15)


def test_upper_is_kept_in_every_dtype():
    # 0.1 is between two numbers of float32, and so is the root.
    def epsilon(noise_multiplier):
        return 0.1 / noise_multiplier - 1e-10

    assert float(np.float32(0.1)) > 0.1
    with pytest.raises(ValueError, match="not met"):
        calibrate.solve(epsilon, 1.0 - 1e-10, upper=0.1)
    found = calibrate.solve(lambda q: q, 0.5, increasing=True, upper=0.1)
    assert float(found) == np.nextafter(np.float32(0.1), np.float32(0))
    with jax.enable_x64(True):
        assert calibrate.solve(lambda q: q, 0.5, increasing=True, upper=0.1) == 0.1
        assert calibrate.solve(epsilon, 1.0 - 1e-10, upper=0.1) <= 0.1


@pytest.mark.slow
def test_an_end_is_no_root_to_differentiate():
    def both(target):
        return calibrate.solve(rate, target, increasing=True, upper=1.0)

    for transform in (lambda f: f, jax.jit):
        value, slope = transform(jax.value_and_grad(both))(1e4)
        assert (value, slope) == (1.0, 0.0)
    assert calibrate.solve(lambda s: 0 * s, 1.0) <= 1e-37
    assert calibrate.solve(lambda s: 0 * s, 1.0, increasing=True) >= 1e38


def test_only_noise_without_end_is_not_an_answer():
    def epsilon(noise_multiplier):
        return jnp.where(jnp.isinf(noise_multiplier), 0.0, 1.0)

    with pytest.raises(ValueError, match=r"^target_epsilon 0\.5 is not met"):
        calibrate.solve(epsilon, 0.5)
    bad = jnp.array([0.5, jnp.nan, -1.0])
    solve = jax.jit(jax.vmap(lambda t: calibrate.solve(epsilon, t)))
    assert np.all(np.asarray(solve(bad)) == np.inf)


def test_a_strict_caller_may_close_over_float32():
    with jax.numpy_dtype_promotion("strict"):
        for transform in (lambda f: f, jax.jit):
            found = transform(
                lambda s: calibrate.solve(lambda x: gdp.epsilon(s / x, 1e-5), 2.0)
            )(jnp.float32(3.0))
            np.testing.assert_allclose(found, 3.0 / gdp.mu(2.0, 1e-5), rtol=3e-7)


def test_one_target_at_a_time():
    for call in (
        lambda: calibrate.solve(gaussian, np.array([1.0, 2.0])),
        lambda: jax.jit(lambda t: calibrate.solve(gaussian, t))(jnp.ones(2)),
    ):
        with pytest.raises(ValueError, match=r"^target_epsilon must be a scalar.*vmap"):
            call()
    with pytest.raises(ValueError, match=r"^epsilon_fn's result must be a scalar"):
        calibrate.solve(lambda s: jnp.stack([1 / s, 1 / s]), 1.0)


@pytest.mark.slow
def test_implicit_derivatives():
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


def test_epsilon_of_a_run_differentiates_by_noise_and_decay():
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

    h = 1e-5
    with jax.enable_x64(True):
        by_noise = (epsilon(8.0 + h, 0.9) - epsilon(8.0 - h, 0.9)) / (2 * h)
        by_decay = (epsilon(8.0, 0.9 + h) - epsilon(8.0, 0.9 - h)) / (2 * h)
    gradient = jax.jit(jax.grad(epsilon, (0, 1)))(8.0, 0.9)
    np.testing.assert_allclose(gradient, (by_noise, by_decay), rtol=1e-5)


def test_what_cannot_be_met_is_refused():
    def floor(noise_multiplier):
        return gdp.epsilon(1 + 1 / noise_multiplier, 1e-5)

    with pytest.raises(ValueError, match=r"^target_epsilon 0\.5 is not met"):
        calibrate.solve(floor, 0.5)
    assert jax.jit(lambda t: calibrate.solve(floor, t))(0.5) == np.inf
    for kwargs in ({"target_epsilon": 0.0}, {"start": -1.0}, {"upper": 0.0}):
        name = next(iter(kwargs))
        with pytest.raises(ValueError, match=f"^{name} must"):
            calibrate.solve(floor, **{"target_epsilon": 9.0, **kwargs})


def test_overflow_is_the_binomial_tail():
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
    assert always_fits == 0


@pytest.mark.parametrize("start", [0.01, 1.7, 2.0, 300.0])
def test_no_parameter_is_asked_for_twice(start):
    """And a start that is nearly right saves most of the search."""
    asked = []

    def epsilon(x):
        asked.append(float(x))
        return 3 / x**1.5

    root = calibrate.solve(epsilon, 3 / 1.7**1.5, start=start)
    assert float(root) == pytest.approx(1.7, rel=1e-6)
    assert len(set(asked)) == len(asked)
    assert len(asked) <= (8 if start == 1.7 else 20)
