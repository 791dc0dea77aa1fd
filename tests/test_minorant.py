"""Optimal shifts against a quadratic program, exact arithmetic and closed forms."""

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.accounting.iteration import optimal_shift_mu
from dpjax.accounting.iteration import published as printed

mp.mp.dps = 60


def squared_mu(c, s, tau, number=float):
    """μ² by pooling adjacent blocks one after the other, in any arithmetic."""
    w = [number(1)]
    for c_k in c[:0:-1]:
        w.append(w[-1] * number(float(c_k)))
    blocks = []
    for w_k, s_k, tau_k in zip(w[::-1], s, tau, strict=True):
        d, v = w_k * number(float(s_k)), (w_k * number(float(tau_k))) ** 2
        while blocks and blocks[-1][0] * v >= d * blocks[-1][1]:
            before = blocks.pop()
            d, v = d + before[0], v + before[1]
        blocks.append((d, v))
    return sum(d * d / v if v > 0 else (np.inf if d > 0 else 0) for d, v in blocks)


def squared_mu_of_best_start(c, s, tau, diameter):
    """Minimum of μ² over all starts, tried one after the other."""
    best = squared_mu(c, s, tau)
    for h in range(len(c) - 1):
        quiet = np.where(np.arange(len(c)) <= h, 0.0, tau)
        shifts = np.where(np.arange(len(c)) < h, 0.0, s)
        shifts[h] = diameter
        best = min(best, squared_mu(c, shifts, quiet))
    return best


def solve_quadratic_program(c, s, tau):
    """Min Σ a_k²/τ_k² with z_k = c_k z_{k−1} + s_k − a_k >= 0 and z_T = 0, by SLSQP."""
    steps = len(c)
    carry = np.zeros((steps, steps))  # z = carry (s − a)
    for k in range(steps):
        for i in range(k + 1):
            carry[k, i] = np.prod(c[i + 1 : k + 1])
    z0 = carry @ s
    result = scipy.optimize.minimize(
        lambda a: np.sum((a / tau) ** 2),
        s,
        jac=lambda a: 2 * a / tau**2,
        constraints=[
            {
                "type": "ineq",
                "fun": lambda a: (z0 - carry @ a)[:-1],
                "jac": lambda a: -carry[:-1],
            },
            {
                "type": "eq",
                "fun": lambda a: (z0 - carry @ a)[-1:],
                "jac": lambda a: -carry[-1:],
            },
        ],
        bounds=[(0, None)] * steps,
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return result.fun


numbers = st.lists(st.floats(0, 1), min_size=18, max_size=18).map(np.array)


@settings(max_examples=30, deadline=None)
@given(numbers, st.booleans())
def test_optimal_shift_mu_solves_the_quadratic_program(u, sparse):
    c, s, tau = 0.3 + 1.4 * u[:6], u[6:12] + 0.01, 0.2 + u[12:]
    if sparse:
        s = np.where(np.arange(6) % 2 == 0, s, 0.0)
    with jax.enable_x64(True):
        mu = float(optimal_shift_mu(c, s, tau))
    optimum = solve_quadratic_program(c, s, tau)
    # The solver stops within about 1e-7 of the optimum, on either side.
    assert mu**2 == pytest.approx(optimum, rel=1e-5)


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "centre",
    [0.2, 3.0, *(pytest.param(x, marks=pytest.mark.matrix) for x in (0.97, 1.0, 1.03))],
)
def test_weights_beyond_the_float_range_match_mpmath(centre, x64):
    """mpmath's exponents have no range; c^T is between 1e-700 and 1e480 here."""
    rng = np.random.default_rng(0)
    c = centre * rng.uniform(0.9, 1.1, 1000)
    s, tau = rng.uniform(size=1000), rng.uniform(0.1, 1, 1000)
    for shifts in (s, s * ((rng.uniform(size=1000) < 0.01) | (np.arange(1000) == 0))):
        exact = squared_mu(c, shifts, tau, mp.mpf)
        mu = mp.mpf(float(optimal_shift_mu(c, shifts, tau)))
        # The margin for rounding: 64 ulps for each unit of log w, here up to 1100.
        assert 0 <= mu**2 / exact - 1 <= 2e-11, (centre, mu, exact)


@settings(max_examples=20, deadline=None)
@given(numbers, st.floats(-1.5, 1))
def test_bounded_mu_equals_the_best_of_all_starts(u, size):
    c, s, tau = 0.5 + u[:6], u[6:12] * (u[:6] > 0.3) + 1e-3, 0.2 + u[12:]
    diameter = 10**size
    with jax.enable_x64(True):
        mu = float(optimal_shift_mu(c, s, tau, diameter=diameter))
    assert mu**2 == pytest.approx(
        squared_mu_of_best_start(c, s, tau, diameter), rel=1e-11
    )


def last_batch_schedule(period, epochs):
    """1 at the last batch of each epoch, else 0."""
    return (np.arange(period * epochs) % period == period - 1).astype(float)


@pytest.mark.slow
@pytest.mark.parametrize(("period", "epochs"), [(1, 40), (8, 5)])
def test_optimal_shift_mu_is_at_most_the_closed_forms(period, epochs, x64):
    """In 4,000 random settings, with equality where the closed form is exact."""
    rng = np.random.default_rng(period)
    n = 4_000
    c = np.concatenate(
        [rng.uniform(0.01, 1, n // 2), 1 - 10 ** rng.uniform(-9, 0, n // 4)]
    )
    c = np.concatenate([c, 1 + 10 ** rng.uniform(-6, 0.3, n - len(c))])
    r = 10 ** rng.uniform(-2, 1, n)
    diameter = r * 10 ** rng.uniform(-1, np.log10(epochs), n)
    steps = period * epochs
    uses = r[:, None] * last_batch_schedule(period, epochs)
    lipschitz = np.broadcast_to(c[:, None], (n, steps))
    noise = np.ones(steps)
    free = np.asarray(optimal_shift_mu(lipschitz, uses, noise))
    bounded = np.asarray(optimal_shift_mu(lipschitz, uses, noise, diameter=diameter))
    shape = {"num_epochs": float(epochs), "batches_per_epoch": float(period)}
    contracting = c <= 1
    contraction = np.asarray(printed.contraction_mu(r, np.minimum(c, 1), **shape))
    expansion = np.asarray(printed.expansion_mu(r, c, **shape))
    constrained = np.asarray(
        printed.diameter_mu(r, diameter, batches_per_epoch=float(period))
    )
    slack = 1 + 1e-12
    assert np.all(free <= r * np.sqrt(epochs) * slack)
    assert np.all(free <= expansion * slack)
    # NumPy may evaluate one of the two calls, and XLA the other.
    assert np.all(bounded <= free * slack)
    np.testing.assert_allclose(free[contracting], contraction[contracting], rtol=1e-12)
    np.testing.assert_allclose(free[~contracting], expansion[~contracting], rtol=1e-12)
    applies = contracting & (diameter / r <= epochs)
    assert np.sum(applies) > n // 2
    assert np.all((bounded <= constrained * slack)[applies])
    last_step = c * diameter + r
    assert np.all(bounded <= last_step * slack)


def test_common_scale_of_shifts_and_noise_cancels(x64):
    rng = np.random.default_rng(0)
    c, s, tau = rng.uniform(0.5, 1.5, (3, 6))
    mu = optimal_shift_mu(c, s, tau, diameter=2.0)
    for scale in (1e-200, 3e-5, 1e200):
        scaled = optimal_shift_mu(c, s * scale, tau * scale, diameter=2.0 * scale)
        np.testing.assert_allclose(scaled, mu, rtol=1e-13)
    doubled = optimal_shift_mu(c, 2 * s, tau, diameter=4.0)
    np.testing.assert_allclose(doubled, 2 * mu, rtol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("diameter", [np.inf, 2.0])
def test_derivatives_match_finite_differences(diameter, x64):
    rng = np.random.default_rng(1)
    at = [
        jnp.asarray(x)
        for x in (rng.uniform(0.7, 1.2, 6), rng.uniform(size=6), rng.uniform(1, 2, 6))
    ]

    def fn(c, s, tau):
        return optimal_shift_mu(c, s, tau, diameter=diameter)

    slopes = jax.jit(jax.grad(fn, (0, 1, 2)))(*at)
    h = 1e-5 * np.eye(6)
    for i, slope in enumerate(slopes):
        up, down = (
            fn(
                *(
                    x + sign * h if i == j else np.broadcast_to(x, (6, 6))
                    for j, x in enumerate(map(np.asarray, at))
                )
            )
            for sign in (1, -1)
        )
        np.testing.assert_allclose(slope, (up - down) / 2e-5, atol=1e-8)


@pytest.mark.slow
def test_float32_derivatives_match_closed_form():
    c, s, tau = jnp.full(6, 0.9), jnp.ones(6), jnp.full(6, 2.0)

    def fn(size):
        return optimal_shift_mu(1 - size * (1 - c), size * s, size * tau)

    # Shifts and noise scale alike, so that the scale matters by c alone.
    def exact(size):
        power = (1 - 0.1 * size) ** 6
        ratio = (1 - power) / (1 + power) * (2 - 0.1 * size) / (0.1 * size)
        return np.sqrt(ratio) / 2

    h = 1e-3
    first = (exact(1 + h) - exact(1 - h)) / (2 * h)
    second = (exact(1 + h) - 2 * exact(1.0) + exact(1 - h)) / h**2
    assert fn(1.0) == pytest.approx(exact(1.0), rel=1e-6)
    assert jax.grad(fn)(1.0) == pytest.approx(first, rel=1e-4)
    assert jax.jit(jax.hessian(fn))(1.0) == pytest.approx(second, rel=1e-2)
    assert jax.vmap(jax.grad(fn))(jnp.array([0.5, 1.0])).shape == (2,)


ones = np.ones(6)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda: optimal_shift_mu(ones, 0 * ones, ones), 0),
        (lambda: optimal_shift_mu(ones, 0 * ones, 0 * ones), 0),
        (lambda: optimal_shift_mu(ones, ones, 0 * ones), np.inf),
        (lambda: optimal_shift_mu(ones, ones, ones * (np.arange(6) < 5)), np.inf),
        (lambda: optimal_shift_mu(0.0, ones, ones), 1),
        (lambda: optimal_shift_mu(1.0, np.eye(6)[5], ones), 1),
        (lambda: jax.jit(optimal_shift_mu)(-ones, ones, ones), np.inf),
        (lambda: jax.jit(optimal_shift_mu)(ones, np.nan * ones, ones), np.inf),
        (lambda: jax.jit(optimal_shift_mu)(ones, ones, np.inf * ones), np.inf),
    ],
)
def test_values_at_limits_are_exact(value, expected):
    np.testing.assert_allclose(value(), expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimal_shift_mu(ones, np.ones(5), ones), "same length"),
        (lambda: optimal_shift_mu(1.0, 1.0, 1.0), "same length"),
        (lambda: optimal_shift_mu(1.0, np.ones(0), 1.0), "same length"),
        (lambda: optimal_shift_mu(-ones, ones, ones), "^lipschitz must"),
        (lambda: optimal_shift_mu(ones, -ones, ones), "^sensitivity must"),
        (lambda: optimal_shift_mu(ones, ones, np.nan), "^stddev must"),
        (lambda: optimal_shift_mu(ones, ones, ones, diameter=0.0), "^diameter must"),
        (lambda: optimal_shift_mu(ones, ones, ones, diameter=-1.0), "^diameter must"),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_a_million_steps_match_closed_form(x64):
    steps = 1_000_000
    noise = np.ones(steps)
    expected = printed.contraction_mu(
        1.0, 0.9999, num_epochs=float(steps), batches_per_epoch=1.0
    )
    mu = optimal_shift_mu(0.9999, np.ones(steps), noise)
    assert 0 <= mu / expected - 1 <= 1e-8
    bounded = optimal_shift_mu(1.0, np.ones(steps), noise, diameter=100.0)
    # 4Δr at the best restart; the grid of restarts costs a little.
    assert 20.0 <= bounded <= 20.1
