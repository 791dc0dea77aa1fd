"""Langevin bounds against Gaussian distributions and densities on an interval."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.accounting import gdp, iteration

INF = np.inf


def chain_mu(lipschitz, eta, curvature, steps):
    """μ of X ↦ (1 − ηm)X + ηL + N(0, 2η) against the same without ηL."""
    mean, variance = 0.0, 0.0
    for _ in range(steps):
        mean = (1 - eta * curvature) * mean + eta * lipschitz
        variance = (1 - eta * curvature) ** 2 * variance + 2 * eta
    return mean / np.sqrt(variance)


@pytest.mark.parametrize("steps", [1, 9, 400, INF])
def test_mu_of_quadratic_potentials_is_exact(steps, x64):
    for curvature, eta in [(2.0, 0.1), (0.5, 0.3), (1e-3, 0.05)]:
        mu = iteration.langevin_mu(
            1.7,
            step_size=eta,
            num_steps=steps,
            smoothness=3.0,
            strong_convexity=curvature,
            diameter=INF,
        )
        if steps == INF:
            truth = 1.7 * np.sqrt((2 - eta * curvature) / (2 * curvature))
        else:
            truth = chain_mu(1.7, eta, curvature, steps)
        assert 0 <= mu / truth - 1 <= 1e-11


@pytest.mark.slow
def test_bounded_langevin_mu_equals_optimal_shift_mu(x64):
    for eta, curvature, diameter in [
        (0.1, 0.0, 0.5),
        (0.2, 0.7, 1.0),
        (0.05, 0.1, 0.3),
    ]:
        for steps in (1, 2, 30, 200):
            mu = iteration.langevin_mu(
                1.3,
                step_size=eta,
                num_steps=steps,
                smoothness=2.0,
                strong_convexity=curvature,
                diameter=diameter,
            )
            schedule = iteration.optimal_shift_mu(
                1 - eta * curvature,
                np.full(steps, eta * 1.3),
                np.sqrt(2 * eta),
                diameter=diameter,
            )
            assert mu == pytest.approx(float(schedule), rel=1e-11)


def test_small_steps_converge_to_exponential_mechanism(x64):
    for curvature, diameter in [(0.0, 0.5), (2.0, INF), (1.0, 0.4), (3.0, 2.0)]:
        limit = iteration.exponential_mechanism_mu(
            1.5, strong_convexity=curvature, diameter=diameter
        )
        mu = iteration.langevin_mu(
            1.5,
            step_size=1e-6,
            num_steps=INF,
            smoothness=4.0,
            strong_convexity=curvature,
            diameter=diameter,
        )
        assert mu == pytest.approx(float(limit), rel=1e-5)


def test_stationary_mu_is_at_most_published_bounds(x64):
    """Each potential is G-Lipschitz, so that their difference is 2G-Lipschitz."""
    G, D = 0.8, 1.7
    ours = iteration.exponential_mechanism_mu(2 * G, strong_convexity=0.0, diameter=D)
    assert ours == pytest.approx(2 * np.sqrt(G * D), rel=1e-12)
    for eta in (0.01, 0.1, 0.7):
        ours = iteration.langevin_mu(
            2 * G,
            step_size=eta,
            num_steps=INF,
            smoothness=2.0,
            strong_convexity=0.0,
            diameter=D,
        )
        assert ours <= np.sqrt(4 * G * D + 2 * eta * G * G)


@pytest.mark.parametrize(
    ("lipschitz", "curvature", "diameter"),
    [(1.0, 0.0, 1.0), (3.0, 0.0, 2.0), (1.0, 2.0, 0.4), (2.0, 1.0, 8.0)],
)
def test_exponential_mechanism_mu_bounds_tilted_densities(
    lipschitz, curvature, diameter, x64
):
    """F = m x²/2 on an interval against F + Lx, by quadrature."""
    x = (np.arange(200_000) + 0.5) / 200_000 * diameter - diameter / 2
    # Several centres: for some of them the tilt is close to the worst case.
    mu = iteration.exponential_mechanism_mu(
        lipschitz, strong_convexity=curvature, diameter=diameter
    )
    centres = (-diameter / 2, 0.0, lipschitz / 2 / max(curvature, 1e-9))
    for centre in centres:
        p = np.exp(-curvature * (x - centre) ** 2 / 2)
        q = p * np.exp(-lipschitz * (x + diameter / 2))
        p, q = p / np.sum(p), q / np.sum(q)
        for epsilon in (0.0, 0.2, 1.0):
            truth = max(
                np.sum(np.maximum(a - np.exp(epsilon) * b, 0))
                for a, b in ((p, q), (q, p))
            )
            assert truth <= gdp.delta(mu, epsilon) * (1 + 1e-9)


@pytest.mark.matrix
def test_derivatives_match_finite_differences(x64):
    def fn(eta, m, D):
        return iteration.langevin_mu(
            1.3,
            step_size=eta,
            num_steps=50,
            smoothness=2.0,
            strong_convexity=m,
            diameter=D,
        )

    at = np.array([0.1, 0.2, 0.7])
    slopes = jax.jit(jax.grad(fn, (0, 1, 2)))(*at)
    for i, slope in enumerate(slopes):
        h = 1e-6 * (np.arange(3) == i)
        difference = float(fn(*(at + h))) - float(fn(*(at - h)))
        assert slope == pytest.approx(difference / 2e-6, rel=1e-6, abs=1e-8)


def test_float32_derivative_at_zero_convexity_matches_closed_form():
    def fn(m):
        return iteration.exponential_mechanism_mu(2.0, strong_convexity=m, diameter=0.5)

    # sqrt(2LD − mD²) has the derivative −D²/(2μ).
    assert jax.jit(jax.grad(fn))(0.0) == pytest.approx(-0.125 / np.sqrt(2.0), rel=1e-6)
    assert jax.vmap(fn)(jnp.array([0.0, 8.0])).shape == (2,)


def test_values_at_limits_are_exact():
    common = {"smoothness": 1.0, "strong_convexity": 0.0}
    endless = iteration.langevin_mu(
        1.0, step_size=0.1, num_steps=INF, diameter=INF, **common
    )
    assert endless == INF
    assert iteration.langevin_mu(
        0.0, step_size=0.1, num_steps=INF, diameter=INF, **common
    ) == pytest.approx(0.0, abs=1e-6)
    mechanism = iteration.exponential_mechanism_mu
    assert mechanism(1.0, strong_convexity=0.0, diameter=INF) == INF
    assert mechanism(0.0, strong_convexity=0.0, diameter=INF) == 0
    traced = jax.jit(lambda D: mechanism(1.0, strong_convexity=0.0, diameter=D))
    assert traced(-1.0) == INF
    assert traced(np.nan) == INF


def test_mu_of_the_smallest_steps_is_not_zero(x64):
    @jax.jit
    def mu(step_size):
        return iteration.langevin_mu(
            1e154,
            step_size=step_size,
            num_steps=1,
            smoothness=0.0,
            strong_convexity=0.0,
            diameter=INF,
        )

    # L sqrt(η/2), although η/2 is below the least normal float64.
    assert mu(3e-308) == pytest.approx(np.sqrt(1.5), rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"step_size": 1.1}, "step_size"),
        ({"num_steps": 2.5}, "num_steps"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": np.nan}, "num_steps"),
        ({"diameter": 0.0}, "diameter"),
        ({"strong_convexity": 3.0}, "strong_convexity"),
        ({"smoothness": -1.0}, "smoothness"),
    ],
)
def test_invalid_arguments_raise(changes, name):
    arguments = {
        "step_size": 0.1,
        "num_steps": 10,
        "smoothness": 2.0,
        "strong_convexity": 0.0,
        "diameter": 1.0,
    }
    with pytest.raises(ValueError, match=f"^{name} must"):
        iteration.langevin_mu(1.0, **arguments | changes)
