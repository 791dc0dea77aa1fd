"""Gaussian DP against mpmath at 60 digits."""

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.accounting import gdp

pytestmark = pytest.mark.rounding

mp.mp.dps = 60


def exact_delta(mu, epsilon):
    mu, epsilon = mp.mpf(mu), mp.mpf(epsilon)
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    return mp.ncdf(-a) - mp.exp(epsilon) * mp.ncdf(-b)


def exact_slopes(mu, epsilon):
    mu, epsilon = mp.mpf(mu), mp.mpf(epsilon)
    by_epsilon = -mp.exp(epsilon) * mp.ncdf(-epsilon / mu - mu / 2)
    return mp.npdf(epsilon / mu - mu / 2), by_epsilon


@pytest.fixture(scope="module")
def mu_delta_grid():
    rng = np.random.default_rng(0)
    mu = 10 ** rng.uniform(-3, np.log10(50), 150)
    delta = 10 ** rng.uniform(-30, np.log10(0.9), 150)
    return mu, delta


def test_epsilon_is_a_tight_upper_bound(mu_delta_grid, x64):
    mu, delta = mu_delta_grid
    epsilon = np.asarray(gdp.epsilon(mu, delta))
    assert np.sum(epsilon > 0) > 100
    for m, d, e in zip(mu, delta, epsilon.tolist(), strict=True):
        gap = mp.mpf(d) - exact_delta(m, e)
        assert gap >= 0, (m, d, e)
        if e > 0:  # to first order the root is at e minus this
            error = gap / -exact_slopes(m, e)[1]
            assert error <= mp.mpf("1e-12") * max(e, m), (m, d, e)


def test_delta_is_a_tight_upper_bound(mu_delta_grid, x64):
    mu, target = mu_delta_grid
    epsilon = np.maximum(np.asarray(gdp.epsilon(mu, target)), 1e-3)
    delta = np.asarray(gdp.delta(mu, epsilon))
    for m, e, d in zip(mu, epsilon, delta.tolist(), strict=True):
        relative = mp.mpf(float(d)) / exact_delta(m, e) - 1
        assert 0 <= relative <= mp.mpf("1e-12"), (m, e, d)


def test_mu_is_a_tight_lower_bound(mu_delta_grid, x64):
    mu, delta = mu_delta_grid
    epsilon = np.asarray(gdp.epsilon(mu, delta))
    result = np.asarray(gdp.mu(epsilon, delta))
    for m, e, d in zip(result.tolist(), epsilon, delta, strict=True):
        gap = mp.mpf(d) - exact_delta(m, e)
        assert gap >= 0, (m, e, d)
        assert gap / exact_slopes(m, e)[0] <= mp.mpf("1e-12") * max(m, 1), (m, e, d)


@settings(max_examples=30, deadline=None)
@given(
    st.floats(1e-3, 50),
    st.floats(-30, -0.05).map(lambda x: 10.0**x),
)
def test_epsilon_to_delta_round_trip_never_exceeds_delta(mu, delta):
    with jax.enable_x64(True):
        epsilon = float(gdp.epsilon(mu, delta))
        assert float(gdp.delta(mu, epsilon)) <= delta
        assert float(gdp.delta(float(gdp.mu(epsilon, delta)), epsilon)) <= delta


def test_float32_epsilon_is_rounded_up(mu_delta_grid):
    mu, delta = (np.asarray(x, np.float32) for x in mu_delta_grid)
    narrow = gdp.epsilon(mu, delta)
    assert narrow.dtype == jnp.float32
    with jax.enable_x64(True):
        wide = gdp.epsilon(mu, delta)
    assert np.all(np.asarray(narrow, np.float64) >= np.asarray(wide))
    np.testing.assert_allclose(narrow, wide, rtol=1.3e-7)


def test_gradients_match_implicit_derivatives():
    mu, delta = 1.7, 1e-6
    epsilon = float(gdp.epsilon(mu, delta))
    by_mu, by_epsilon = (float(x) for x in exact_slopes(mu, epsilon))
    value = jax.jit(jax.grad(gdp.epsilon, (0, 1)))(mu, delta)
    np.testing.assert_allclose(value, (-by_mu / by_epsilon, 1 / by_epsilon), rtol=1e-5)
    value = jax.jit(jax.grad(gdp.delta, (0, 1)))(mu, epsilon)
    np.testing.assert_allclose(value, (by_mu, by_epsilon), rtol=1e-5)
    value = jax.jit(jax.grad(gdp.mu))(epsilon, delta)
    np.testing.assert_allclose(value, -by_epsilon / by_mu, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.jit,
    ],
)
def test_float32_second_derivatives_match_reference(transform):
    epsilon = transform(gdp.epsilon)

    def exact_slope(mu):
        e = mp.findroot(
            lambda e: mp.log(exact_delta(mu, e)) - mp.log(mp.mpf(1e-5)),
            (5.0, 7.0),
            tol=1e-40,
        )
        by_mu, by_epsilon = exact_slopes(mu, e)
        return -by_mu / by_epsilon

    central = (exact_slope(1.3 + 1e-6) - exact_slope(1.3 - 1e-6)) / mp.mpf(2e-6)
    for hessian in (jax.hessian(epsilon), jax.jit(jax.hessian(epsilon))):
        np.testing.assert_allclose(hessian(1.3, 1e-5), float(central), rtol=1e-4)
    assert jax.vmap(jax.hessian(epsilon), (0, None))(jnp.ones(3), 1e-5).shape == (3,)


def test_delta_is_the_dual_of_the_tradeoff(x64):
    # δ(ε) is the largest 1 − e^ε α − G(α) over false-positive rates α.
    for mu, epsilon in [(0.3, 0.2), (1.4, 1.0), (3.0, 0.5)]:
        alpha = np.concatenate([np.logspace(-12, -3, 4000), np.linspace(1e-3, 1, 4000)])
        beta = np.asarray(gdp.tradeoff(mu, alpha))
        dual = np.max(1 - np.exp(epsilon) * alpha - beta)
        np.testing.assert_allclose(gdp.delta(mu, epsilon), dual, atol=1e-6)


def test_compose_returns_root_of_sum_of_squares():
    mus = np.array([[0.5, 1.5, 2.0], [0.0, 0.0, 0.0], [np.inf, 1.0, 1.0]])
    np.testing.assert_allclose(
        gdp.compose(mus), [np.sqrt(0.25 + 2.25 + 4), 0, np.inf], rtol=2e-7
    )
    np.testing.assert_allclose(
        jax.jit(jax.grad(gdp.compose))(np.array([3.0, 4.0])), [0.6, 0.8], rtol=1e-6
    )
    assert np.isfinite(float(gdp.compose(np.array([1e30, 1e30]))))


def test_compose_accepts_lists():
    np.testing.assert_allclose(gdp.compose([3.0, 4.0]), 5.0, rtol=1e-6)


def test_mu_at_zero_epsilon_matches_closed_form(x64):
    # δ = 2Φ(μ/2) − 1 there, whose derivatives by μ and ε are φ(μ/2) and −Φ(−μ/2).
    exact = 2 * mp.sqrt(2) * mp.erfinv(mp.mpf("0.5"))
    assert 0 <= 1 - float(gdp.mu(0.0, 0.5)) / float(exact) <= 1e-14
    slope = mp.ncdf(-exact / 2) / mp.npdf(exact / 2)
    np.testing.assert_allclose(jax.grad(gdp.mu)(0.0, 0.5), float(slope), rtol=1e-12)
    for delta in (1e-280, 1e-20, 1e-10):  # δ is μ / √(2π)
        result = float(gdp.mu(0.0, delta)) / delta
        assert 0 <= 1 - result / np.sqrt(2 * np.pi) <= 1e-11


def test_underflowing_delta_is_positive():
    for wide in (True, False):
        with jax.enable_x64(wide):
            for mu, epsilon in [(0.1, 3.75), (1.0, 100.0), (1e-300, 1e300)]:
                least = jnp.finfo(jnp.float64 if wide else jnp.float32).tiny
                assert float(gdp.delta(mu, epsilon)) == least
    with jax.enable_x64(True):  # and where it does not, it is exact
        assert (
            0 <= mp.mpf(float(gdp.delta(0.1, 3.7))) / exact_delta(0.1, 3.7) - 1 < 1e-12
        )


JIT_EPSILON, JIT_DELTA, JIT_MU = map(jax.jit, (gdp.epsilon, gdp.delta, gdp.mu))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda: gdp.epsilon(0.0, 1e-5), 0),
        (lambda: gdp.epsilon(np.inf, 1e-5), np.inf),
        (lambda: gdp.epsilon(1e-12, 1e-5), 0),
        (lambda: gdp.delta(0.0, 0.0), 0),
        (lambda: gdp.delta(np.inf, 3.0), 1),
        (lambda: gdp.delta(1.0, np.inf), 0),
        (lambda: gdp.mu(np.inf, 1e-5), np.inf),
        (lambda: JIT_EPSILON(1.0, 0.0), np.inf),
        (lambda: JIT_EPSILON(np.nan, 0.1), np.inf),
        (lambda: JIT_EPSILON(np.nan, 1.0), np.inf),
        (lambda: JIT_EPSILON(0.0, np.nan), np.inf),
        (lambda: JIT_DELTA(np.nan, np.inf), 1),
        (lambda: JIT_DELTA(0.0, np.nan), 1),
        (lambda: JIT_DELTA(0.0, -1.0), 1),
        (lambda: JIT_EPSILON(1.0, 1.0), 0),
        (lambda: JIT_DELTA(1.0, -1.0), 1),
        (lambda: JIT_MU(-1.0, 0.1), 0),
        (lambda: gdp.tradeoff(2.0, 0.0), 1),
        (lambda: gdp.tradeoff(2.0, 1.0), 0),
    ],
)
def test_values_at_limits_are_exact(value, expected):
    assert float(value()) == expected


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: gdp.epsilon(1.0, 0.0), "delta"),
        (lambda: gdp.epsilon(1.0, 1.0), "delta"),
        (lambda: gdp.epsilon(-1.0, 0.1), "mu"),
        (lambda: gdp.epsilon(np.nan, 0.1), "mu"),
        (lambda: gdp.delta(1.0, -0.1), "epsilon"),
        (lambda: gdp.mu(1.0, 2.0), "delta"),
        (lambda: gdp.tradeoff(1.0, 1.5), "alpha"),
        (lambda: gdp.compose(np.array([1.0, -2.0])), "mus"),
        (lambda: gdp.compose(1.0), "mus"),
    ],
)
def test_invalid_arguments_raise(call, name):
    with pytest.raises(ValueError, match=f"^{name} must"):
        call()
