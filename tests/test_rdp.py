"""Rényi curves against mpmath and dp-accounting."""

import functools

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.accounting import calibrate, rdp
from dpjax.accounting._numerics import rdp as numerics

pytestmark = pytest.mark.rounding

ORDERS = rdp.ORDERS
_SIZE = 64  # number of points computed at once


@functools.cache
def _pointwise(name):
    return jax.jit(jax.vmap(getattr(rdp, name)))


def evaluate_at_points(name, sigma, q, orders):
    """An accountant at broadcast points: one program for any number of them.

    The last table is padded with the last point.
    """
    points = np.broadcast_arrays(
        *(np.asarray(x, np.float64) for x in (sigma, q, orders))
    )
    rows = np.stack([x.ravel() for x in points])
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % _SIZE)), "edge")
    result = [
        np.asarray(_pointwise(name)(s, r, a[:, None]))[:, 0]
        for s, r, a in np.split(rows, rows.shape[1] // _SIZE, axis=1)
    ]
    return np.concatenate(result)[: points[0].size].reshape(points[0].shape)


def exact_poisson_rdp(sigma, q, a):
    """The divergence by the trapezoidal rule around every point that can have mass.

    The integrand is analytic for |Im u| < πσ, so that a step h has a relative error of
    about exp(d²/2 − 2πd/h) for any d below that: 1e-19 at d = 3σ or 6.
    """
    with mp.workdps(30):
        sigma, q, a = (mp.mpf(float(x)) for x in (sigma, q, a))
        d = min(3 * sigma, mp.mpf(6))
        h = 2 * mp.pi * d / (45 + d * d / 2)

        def integrand(i):
            u = i * h
            y = q * mp.expm1(u / sigma - 1 / (2 * sigma**2))
            if abs(a * y) < mp.mpf("1e-8"):
                small = 1 + (a - 2) * y / 3 * (
                    1 + (a - 3) * y / 4 * (1 + (a - 4) * y / 5)
                )
                value = a * (a - 1) / 2 * y * y * small
            else:
                value = mp.expm1(a * mp.log1p(y)) - a * y
            return value * mp.exp(-u * u / 2)

        reach = 12 + 6 * mp.sqrt(sigma)  # two merged bumps are as wide as √σ
        places = set()
        peaks = (_find_peak(sigma, q, a, start) for start in (0, a / sigma))
        for centre in (mp.mpf(0), 2 / sigma, *peaks):
            first, last = (int((centre + end) / h) for end in (-reach, reach))
            places.update(range(first, last + 1))
        terms = [integrand(i) for i in places]
        excess = h * mp.fsum(terms) / mp.sqrt(2 * mp.pi)
        return mp.log1p(excess) / (a - 1)


def _find_peak(sigma, q, a, u):
    """A stationary point of a log(1 + y) − u²/2, by fixed-point iteration from u."""
    for _ in range(100):
        odds = q / (1 - q) * mp.exp(u / sigma - 1 / (2 * sigma**2)) if q < 1 else mp.inf
        u = a / sigma / (1 + 1 / odds)
    return u


POINTS = np.array(
    [  # σ, q, order; corners of the promised ranges, then where two bumps compete
        (0.1, 1e-6, 1.01), (0.1, 1e-6, 1e4), (0.1, 1.0, 1.01), (0.1, 0.5, 2.0),
        (0.1, 1.0, 1e4), (1e3, 1e-6, 1.01), (1e3, 1e-6, 1e4), (1e3, 1.0, 1.01),
        (1e3, 1.0, 1e4), (1e3, 0.5, 300.5), (0.1, 0.9, 1.3), (0.15, 1e-3, 1.2),
        (0.33, 1e-6, 1.5), (0.4, 1e-6, 3.0), (0.5859, 1.04e-6, 1.188),
        (0.7622, 2.136e-6, 14.7546), (0.8407, 0.7989, 1.0105), (1.0, 0.01, 2.0),
        (1.0, 0.01, 32.5), (1.0, 0.3, 1.7), (1.372, 0.001505, 25.7175),
        (2.0, 0.02, 64.0), (2.994, 0.0007922, 127.889), (3.0, 1e-6, 250.0),
        (4.764, 4.507e-6, 558.366), (5.0, 0.3, 100.0), (7.13, 0.003631, 571.553),
        (9.845, 3.009e-5, 2017.96), (10.0, 0.12, 400.0), (19.0, 1e-6, 1e4),
        (21.7, 0.1248, 1704.09), (24.0, 1e-6, 1e4), (40.62, 0.0426, 1e4),
        (49.75, 0.1144, 1e4), (50.0, 0.12, 1e4), (70.0, 0.3, 1e4), (0.6, 1e-4, 4.5),
    ]
)  # fmt: skip


def test_reference_matches_closed_forms():
    for sigma, a in [(0.3, 1.5), (4.0, 80.0)]:
        exact = mp.mpf(a) / (2 * mp.mpf(sigma) ** 2)
        assert abs(exact_poisson_rdp(sigma, 1.0, a) / exact - 1) < 1e-15
    for sigma, q in [(0.7, 0.2), (30.0, 1e-5)]:  # order 2
        exact = mp.log1p(mp.mpf(q) ** 2 * mp.expm1(1 / mp.mpf(sigma) ** 2))
        assert abs(exact_poisson_rdp(sigma, q, 2.0) / exact - 1) < 1e-15


def test_poisson_gaussian_is_a_tight_upper_bound(x64):
    ours = evaluate_at_points("poisson_gaussian", *POINTS.T)
    for point, value in zip(POINTS, ours.tolist(), strict=True):
        relative = mp.mpf(value) / exact_poisson_rdp(*point) - 1
        assert 0 <= relative <= 2e-10, (point, float(relative))


def test_gaussian_is_a_tight_upper_bound(x64):
    sigma, a = np.array([0.1, 0.7, 3.0, 1000.0]), np.array([1.01, 2.5, 10_000.0])
    curve = np.asarray(rdp.gaussian(sigma, a))
    assert curve.shape == (4, 3)
    for i, j in np.ndindex(curve.shape):
        exact = mp.mpf(a[j]) / (2 * mp.mpf(sigma[i]) ** 2)
        assert 0 <= mp.mpf(float(curve[i, j])) / exact - 1 <= 1e-14
    sampled = evaluate_at_points("poisson_gaussian", sigma[:, None], 1.0, a)
    np.testing.assert_allclose(sampled, curve, rtol=2e-10, atol=0)


def test_integer_orders_agree_with_dp_accounting(x64):
    orders = np.array([2, 3, 7, 16, 64, 256])
    for sigma, q in [(0.6, 0.3), (1.1, 0.01), (2.7, 0.05), (9.0, 0.6)]:
        theirs = rdp_privacy_accountant._compute_rdp_poisson_subsampled_gaussian(
            q, sigma, orders
        )
        ours = evaluate_at_points("poisson_gaussian", sigma, q, orders)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


def bound_by_order(curve, delta):
    a = ORDERS
    return curve + np.log1p(-1 / a) - np.log(delta * a) / (a - 1)


def brute_force_epsilon(curve, delta):
    return np.min(bound_by_order(curve, delta), axis=-1)


def best_order(curve, delta):
    return ORDERS[np.argmin(bound_by_order(curve, delta), axis=-1)]


def run_epsilon(sigma, q, count, delta):
    curve = rdp.compose(rdp.poisson_gaussian(sigma, q, ORDERS), count=count)
    return rdp.epsilon(curve, ORDERS, delta)


@jax.jit
def convert_curve(curve, count, delta):
    """For count steps: the curve, ε, and δ at that ε."""
    total = rdp.compose(curve, count=count)
    epsilon = rdp.epsilon(total, ORDERS, delta)
    return total, epsilon, rdp.delta(total, ORDERS, epsilon)


def test_epsilon_matches_brute_force_over_orders(x64):
    sigma, q, count = np.meshgrid([0.8, 2.3], [0.003, 0.2], [1, 500], indexing="ij")
    curve = np.asarray(rdp.poisson_gaussian(sigma.ravel(), q.ravel(), ORDERS))
    curve = curve.reshape(*sigma.shape, -1)
    total, epsilon, _ = map(np.asarray, convert_curve(curve, count, 1e-6))
    best = best_order(total, 1e-6)
    np.testing.assert_array_equal(rdp.best_order(total, ORDERS, 1e-6), best)
    np.testing.assert_allclose(total, count[..., None] * curve, rtol=1e-15)
    np.testing.assert_allclose(epsilon, brute_force_epsilon(total, 1e-6), rtol=1e-12)
    of_one = jax.jit(rdp.epsilon)
    for where in np.ndindex(sigma.shape):
        i = int(np.flatnonzero(best[where] == ORDERS)[0])
        alone = of_one(total[where][i : i + 1], ORDERS[i : i + 1], 1e-6)
        assert float(alone) == epsilon[where]


def test_epsilon_is_zero_at_delta_above_total_variation():
    # Total variation of N(0, 1) and N(0.1, 1): 0.0399 <= sqrt(rho / 2) = 0.05025.
    curve = np.asarray(rdp.gaussian(10.0, ORDERS))
    assert float(rdp.epsilon(curve, ORDERS, 0.051)) == 0
    assert float(rdp.epsilon(curve, ORDERS, 0.049)) > 0
    assert 0.0399 < float(rdp.delta(curve, ORDERS, 0.0)) < 0.051


curves = st.tuples(
    st.floats(0.3, 30), st.floats(1e-5, 1), st.integers(1, 10**5), st.floats(-12, -1)
)


def resize_to_eight(x):
    """Resize to the batch shape of the test above, whose program is compiled."""
    return np.resize(np.asarray(x, np.float64), 8)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(curves, st.floats(1.001, 3))
def test_epsilon_is_nonnegative_and_monotone(point, factor):
    sigma, q, count, log_delta = point
    delta = 10.0**log_delta
    with jax.enable_x64(True):
        sigmas = resize_to_eight([sigma, sigma * factor, sigma])
        rates = resize_to_eight([q, q, q / factor])
        result = run_epsilon(sigmas, rates, count, delta)
        start, noisier, rarer = np.asarray(result).tolist()[:3]
        wider = run_epsilon(sigmas, rates, count, min(delta * factor, 0.9))
        looser = np.asarray(wider).tolist()[0]
    # Each value exceeds the exact one by less than 2e-10.
    slack = 1 + 1e-9
    assert 0 <= noisier <= start * slack < np.inf
    assert 0 <= rarer <= start * slack
    assert 0 <= looser <= start * slack


@pytest.mark.matrix
@settings(max_examples=25, deadline=None)
@given(curves)
def test_epsilon_to_delta_round_trip_never_exceeds_delta(point):
    sigma, q, count, log_delta = point
    delta = 10.0**log_delta
    with jax.enable_x64(True):
        curve = rdp.poisson_gaussian(resize_to_eight(sigma), resize_to_eight(q), ORDERS)
        result = convert_curve(np.asarray(curve), float(count), delta)
    total, epsilon, back = map(np.asarray, result)
    order = best_order(total, delta)
    # ε and δ(ε) are rounded up: by 16 ulps of the sum in the exponent.
    slack = 1 + 1e-12 * (1 + order * (1 + epsilon))
    assert np.all(back <= delta * slack)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.floats(0.2, 50))
def test_composing_n_curves_equals_a_count_of_n(count, sigma):
    with jax.enable_x64(True):
        curve = np.asarray(rdp.gaussian(np.array([sigma]), ORDERS))
        several = np.asarray(rdp.compose(*[curve] * count))
        np.testing.assert_allclose(several, rdp.compose(curve, count=count), rtol=1e-14)
        assert np.all(several >= count * curve * (1 - 1e-15))


@pytest.mark.slow  # a program that searches is large
def test_calibrated_batch_size_is_the_largest():
    examples = 5_000

    @jax.jit
    def epsilon(batch_size):
        return run_epsilon(1.2, batch_size / examples, 2_000, 1e-5)

    @jax.jit
    def largest_batch(target):
        return calibrate.solve(
            epsilon, target, increasing=True, integer=True, upper=examples
        )

    result = float(largest_batch(3.0))
    assert float(epsilon(result)) <= 3.0 < float(epsilon(result + 1))


def exact_epsilon(sigma, q, count, delta, a):
    log_term = mp.log(1 - 1 / mp.mpf(a)) - mp.log(mp.mpf(delta) * mp.mpf(a)) / (a - 1)
    return count * exact_poisson_rdp(sigma, q, a) + log_term


@pytest.mark.slow
def test_float32_derivatives_match_reference():
    sigma, q, count, delta = 1.1, 0.02, 700, 1e-5

    def epsilon(sigma, q):
        return run_epsilon(sigma, q, count, delta)

    curve = rdp.compose(rdp.poisson_gaussian(sigma, q, ORDERS), count=count)
    a = float(best_order(np.asarray(curve), delta))
    h = 2.0**-12
    at = [exact_epsilon(sigma + i * h, q, count, delta, a) for i in (-2, -1, 1, 2)]
    by_sigma = float((8 * (at[2] - at[1]) - (at[3] - at[0])) / (12 * h))
    h = 2.0**-16
    at = [exact_epsilon(sigma, q + i * h, count, delta, a) for i in (-2, -1, 1, 2)]
    by_q = float((8 * (at[2] - at[1]) - (at[3] - at[0])) / (12 * h))

    both = jax.jit(jax.value_and_grad(epsilon, (0, 1)))(sigma, q)
    np.testing.assert_allclose(both[1], (by_sigma, by_q), rtol=1e-5)
    assert both[0].dtype == jnp.float32


@pytest.mark.slow
def test_float32_second_derivative_matches_reference():
    sigma, q, count, delta = 1.1, 0.02, 700, 1e-5

    def epsilon(sigma):
        return run_epsilon(sigma, q, count, delta)

    curve = rdp.compose(rdp.poisson_gaussian(sigma, q, ORDERS), count=count)
    a = float(best_order(np.asarray(curve), delta))
    h = 2.0**-12
    at = [exact_epsilon(sigma + i * h, q, count, delta, a) for i in (-2, -1, 0, 1, 2)]
    by_sigma = float((8 * (at[3] - at[1]) - (at[4] - at[0])) / (12 * h))
    twice = float((16 * (at[3] + at[1]) - (at[4] + at[0]) - 30 * at[2]) / (12 * h * h))
    np.testing.assert_allclose(jax.grad(epsilon)(sigma), by_sigma, rtol=1e-5)
    for hessian in (jax.hessian(epsilon), jax.jit(jax.hessian(epsilon))):
        np.testing.assert_allclose(hessian(sigma), twice, rtol=1e-5)


@pytest.mark.slow
def test_quadrature_is_converged(x64, monkeypatch):
    rng = np.random.default_rng(7)
    n = 50_000
    sigma, q = 10 ** rng.uniform(-1, 3, n), 10 ** rng.uniform(-6, 0, n)
    a = 1 + 10 ** rng.uniform(-2, 4, n)
    # Half of the orders around σ², where the bumps separate, and some at little noise.
    near = sigma[::2] ** 2 * 10 ** rng.uniform(-1, 2, n // 2)
    a[::2] = np.clip(near, 1.01, 1e4)
    sigma[: n // 5] = 10 ** rng.uniform(-1, 0.3, n // 5)
    coarse = jax.jit(lambda *x: numerics.log_excess(*x))(sigma, q, a)
    legendre = np.polynomial.legendre.leggauss
    monkeypatch.setattr(numerics, "_FIRST_RULE", legendre(168))
    monkeypatch.setattr(numerics, "_RULE", legendre(132))
    monkeypatch.setattr(numerics, "_TAIL", 8.5)
    monkeypatch.setattr(numerics, "_DROP", 8.5**2 / 2)
    fine = jax.jit(lambda *x: numerics.log_excess(*x))(sigma, q, a)
    ratio = jnp.logaddexp(0.0, coarse) / jnp.logaddexp(0.0, fine)
    np.testing.assert_allclose(ratio, 1, rtol=0, atol=1e-11)


def test_large_noise_gives_the_leading_term(x64):
    """No cancellation: a q²/(2σ²), and relatively less than a σ⁻¹ more."""
    sigma = np.array([1e7, 1e9, 1e12, 1e17, 1e30, 1e59, 2e60, 1e100, 1e300])
    q = np.array([1e-12, 1e-3, 0.5, 0.999, 1.0])[:, None]
    orders = np.array([1 + 1e-6, 1.5, 2.0, 32.0, 1e4, 1e6])
    first = orders / 2 * (q * q / sigma / sigma)[..., None]
    result = evaluate_at_points(
        "poisson_gaussian", sigma[:, None], q[..., None], orders
    )
    ratio = result / np.maximum(first, 1e-300)
    far = np.broadcast_to(orders <= 1e-11 * sigma[:, None], ratio.shape)
    normal = first > 1e-290
    near_one = 1e-14 / (orders - 1)
    assert np.all((ratio >= 1)[far])
    assert np.all((ratio <= 1 + 2e-10 + near_one)[far & normal])
    assert np.all(np.abs(ratio - 1)[normal] <= 0.3)


@pytest.mark.slow
def test_vmapped_derivatives_at_rates_zero_and_one_are_exact():
    def epsilon(sigma, q):
        return run_epsilon(sigma, q, 3, 1e-5)

    sigma, q = jnp.array([1.3, 1.3, 1.3]), jnp.array([0.0, 1.0, 1.0 - 1e-6])
    by_sigma, by_q = jax.jit(jax.vmap(jax.grad(epsilon, (0, 1))))(sigma, q)
    full = jax.grad(
        lambda s: rdp.epsilon(
            rdp.compose(rdp.gaussian(s, ORDERS), count=3), ORDERS, 1e-5
        )
    )(1.3)
    np.testing.assert_allclose(by_sigma, [0, full, full], rtol=1e-4)
    assert by_q[0] == 0
    np.testing.assert_allclose(by_q[1], by_q[2], rtol=1e-4)


def test_curves_at_extreme_values_are_within_limits(x64):
    near = np.array([1.0 + 1e-9, 1.0001, 2.0, 1e6])  # rounding grows as 1 / (a − 1)
    sigma = np.array([1e-6, 0.05, 0.1, 1.0, 1e4, 1e150])[:, None, None]
    q = np.array([0.0, 1e-300, 1e-9, 0.5, 1.0])[:, None]
    curves = evaluate_at_points("poisson_gaussian", sigma, q, near)
    limits = np.asarray(rdp.gaussian(sigma[..., 0], near))
    assert np.all((curves >= 0) & (curves <= limits * (1 + 1e-5) + 1e-250))
    assert np.all((curves > 0) | (q == 0))
    assert np.all(evaluate_at_points("poisson_gaussian", 0.0, 0.1, near) == np.inf)
    assert np.all(evaluate_at_points("poisson_gaussian", np.inf, 0.1, near) == 0)


def test_curves_at_large_orders_are_near_the_curve_without_sampling(x64):
    """(1 + y)^a is at least (q e^z)^a, and sampling never increases the divergence."""
    sigma, q = np.array([0.1, 1.0, 10.0])[:, None, None], np.array([1e-6, 0.5, 1.0])
    orders = np.array([1e7, 326269416.73938084, 1e9, 1e12, 1e20, 1e36])
    curves = evaluate_at_points("poisson_gaussian", sigma, q[:, None], orders)
    limit = orders / (2 * sigma**2)
    assert np.all(curves <= limit * (1 + 1e-6))
    lowest = limit + orders / (orders - 1) * np.log(q)[:, None]
    assert np.all(curves >= lowest * (1 - 1e-6))


def test_conversions_at_limits_are_exact(x64):
    curve, two = np.asarray(rdp.gaussian(1.0, ORDERS)), np.array([2.0, 3.0])
    _, at_most, *_ = convert_curve(curve, 1.0, 1 - 1e-12)
    assert 0 <= float(at_most) < 1e-9
    epsilon, delta = jax.jit(rdp.epsilon), jax.jit(rdp.delta)
    assert float(epsilon(np.array([np.inf, np.inf]), two, 0.1)) == np.inf
    assert float(epsilon(np.zeros(2), two, 1e-30)) == 0
    assert float(delta(np.zeros(2), two, 0.0)) <= 1e-149
    assert float(delta(np.ones(2), two, np.inf)) == 0
    assert float(delta(np.array([np.inf, np.inf]), two, 1.0)) == 1
    nothing = rdp.compose(np.array([np.inf, 2.0]), count=0)
    np.testing.assert_array_equal(nothing, 0)


def test_invalid_traced_values_give_infinity():
    two, nan = np.array([2.0], np.float32), np.nan
    poisson, gaussian, epsilon, compose, delta = (
        jax.jit(getattr(rdp, x))
        for x in ("poisson_gaussian", "gaussian", "epsilon", "compose", "delta")
    )
    for bad in [(1.0, 1.5, two), (1.0, -0.5, two), (-1.0, 0.5, two), (1.0, nan, two)]:
        assert np.asarray(poisson(*bad)) == np.inf
    for order in (1.0, 0.5, nan, np.inf):
        bad = np.array([order], np.float32)
        assert np.asarray(poisson(1.0, 0.5, bad)) == np.inf
        assert np.asarray(gaussian(1.0, bad)) == np.inf
        assert float(epsilon(two, bad, 0.1)) == np.inf
    for bad in (0.0, -1.0, nan, 1.5):
        assert float(epsilon(two, two, bad)) == np.inf
    for count in (-1.0, -0.5, nan, np.inf):
        assert np.asarray(compose(two, count=count)) == np.inf
    # A traced count is rounded up to a whole number, with the derivative there.
    several = jax.jit(jax.value_and_grad(lambda n: rdp.compose(two, count=n)[0]))
    for count in (1.5, 2.0):
        np.testing.assert_allclose(several(count), (4.0, 2.0), rtol=1e-6)
    assert float(delta(two, two, -1.0)) == 1
    assert float(epsilon(np.array([nan], np.float32), two, 0.1)) == np.inf


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: rdp.gaussian(-1.0, ORDERS), "noise_multiplier"),
        (lambda: rdp.gaussian(1.0, np.array([1.0, 2.0])), "orders"),
        (lambda: rdp.poisson_gaussian(1.0, 1.5, ORDERS), "sampling_rate"),
        (lambda: rdp.poisson_gaussian(np.nan, 0.5, ORDERS), "noise_multiplier"),
        (lambda: rdp.poisson_gaussian(1.0, 0.5, np.array([0.5])), "orders"),
        (lambda: rdp.compose(), "curves"),
        (lambda: rdp.compose(np.array([-1.0])), "curves"),
        (lambda: rdp.compose(np.array([1.0]), count=1.5), "count"),
        (lambda: rdp.compose(np.array([1.0]), count=-1), "count"),
        (lambda: rdp.epsilon(np.ones(2), np.array([2.0, 3.0]), 0.0), "delta"),
        (lambda: rdp.epsilon(np.ones(2), np.array([1.0, 3.0]), 0.1), "orders"),
        (lambda: rdp.delta(np.ones(2), np.array([2.0, 3.0]), -0.1), "epsilon"),
        # A curve of one order is no curve at all orders, and no order has all bounds.
        (lambda: rdp.epsilon(np.ones(1), ORDERS, 0.1), "curves and orders"),
        (lambda: rdp.delta(np.ones(9), ORDERS[:1], 0.1), "curves and orders"),
        (lambda: rdp.delta(np.ones(1), ORDERS, 0.1), "curves and orders"),
        (lambda: rdp.best_order(np.ones(1), ORDERS, 0.1), "curves and orders"),
        (lambda: rdp.compose(np.ones(1), np.ones(2)), "curves and orders"),
    ],
)
def test_invalid_arguments_raise(call, name):
    with pytest.raises(ValueError, match=f"^{name} must"):
        call()


def test_one_order_may_be_a_scalar():
    curve = rdp.gaussian(1.0, 2.0)
    expected = rdp.epsilon(curve, np.array([2.0]), 1e-5)
    assert rdp.epsilon(curve, 2.0, 1e-5) == expected
