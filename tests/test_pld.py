"""Privacy-loss distributions against closed forms, quadrature and dp_accounting."""

import functools

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
import reference_pld as reference
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpjax import Adjacency
from dpjax._core.float64 import TINY as LEAST
from dpjax._core.float64 import ULP
from dpjax.accounting import calibrate, gdp, pld
from dpjax.accounting._numerics.pld import pairs

mp.mp.dps = 40


# A program for each kind and each function takes seconds to compile. The default suite
# has both functions of one kind and ε of another; `test_truncation` covers that of the
# third.
KINDS = [
    "poisson",
    pytest.param("replace", marks=pytest.mark.matrix),
    pytest.param("fixed", marks=pytest.mark.matrix),
]


def build(kind, mu, q):
    if kind == "fixed":
        return pld.subsampled_gdp(mu, q)
    adjacency = Adjacency.REPLACE if kind == "replace" else Adjacency.ADD_REMOVE
    return pld.poisson_gaussian(1 / mu, q, adjacency=adjacency)


def directions(kind):
    return ("remove", "add") if kind == "poisson" else (kind,)


@functools.partial(jax.jit, static_argnames="kind")
def _epsilon(kind, mu, q, count, delta):
    return pld.epsilon(pld.compose(build(kind, mu, q), count), delta)


@functools.partial(jax.jit, static_argnames="kind")
def _delta(kind, mu, q, count, epsilon):
    return pld.delta(pld.compose(build(kind, mu, q), count), epsilon)


def compiled_epsilon(kind, *numbers):
    """One compilation per kind: every number is a float."""
    return float(_epsilon(kind, *(float(x) for x in numbers)))


def compiled_delta(kind, *numbers):
    return float(_delta(kind, *(float(x) for x in numbers)))


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("kind", "every"),
    [
        ("poisson", 4),
        pytest.param("poisson", 1, marks=pytest.mark.slow),
        pytest.param("replace", 1, marks=pytest.mark.slow),
        pytest.param("fixed", 1, marks=pytest.mark.slow),
    ],
)
def test_one_step_bounds_are_tight_upper_bounds(kind, every, x64):
    rng = np.random.default_rng(1)
    mu = 10 ** rng.uniform(-3, 0.9, 25)
    q = 10 ** rng.uniform(-6, 0, 25)
    q[:4] = 1.0
    delta = 10 ** rng.uniform(-12, -0.3, 25) * np.minimum(q, 0.5)
    positive = 0
    for m, r, d in list(zip(mu, q, delta, strict=True))[::every]:
        e = compiled_epsilon(kind, m, r, 1, d)
        f = compiled_delta(kind, m, r, 1, e)
        exact = max(reference.single_delta(k, m, r, e) for k in directions(kind))
        assert exact <= d, (m, r, d)
        assert exact <= f <= exact * (1 + mp.mpf("1e-3")), (m, r, e)
        if e > 1e-3:
            positive += 1
            below = [
                reference.single_delta(k, m, r, e - 1e-3) for k in directions(kind)
            ]
            assert max(below) > d, (m, r, d)
    assert positive * every >= 5


CASES = [  # kind, μ, q, count, δ; for the last one dp_accounting reports too little
    ("poisson", 1.0, 0.01, 1_000, 1e-5),
    ("poisson", 0.5, 0.001, 300_000, 1e-12),
    ("poisson", 2.0, 0.02, 2_000, 1e-8),
    ("replace", 1.0, 0.01, 1_000, 1e-5),
    ("replace", 0.4, 0.2, 50, 1e-10),
    ("fixed", 0.7, 0.02, 3_000, 1e-6),
    ("fixed", 1.5, 0.1, 100, 0.01),
    ("poisson", 1 / 1.1, 0.004, 10_000, 1e-12),
]


def test_log_mixture_is_accurate_for_all_rates_and_ratios(x64):
    """log(1 − q + q e^v) to rounding, also where q e^v is small and e^v is not."""
    rates = [1e-300, 1e-100, 1e-30, 1e-17, 1e-10, 1e-3, 0.5, 1 - 1e-9, 1 - 2**-53, 1.0]
    ratios = [-1e5, -700.0, -40.0, -1.0, -0.999, -1e-9, 1e-9, 0.5, 5.0, 16.0, 36.0]
    ratios += [37.0, 38.0, 39.9, 40.0, 40.1, 100.0, 690.0, 700.0, 720.0, 1e5]
    q, v = map(np.ravel, np.meshgrid(rates, ratios))
    result = np.asarray(jax.jit(pairs.log_mixture)(v, q))
    for rate, ratio, ours in zip(q, v, result, strict=True):
        with mp.workdps(700):
            rate, ratio = mp.mpf(float(rate)), mp.mpf(float(ratio))
            mixture = 1 - rate + rate * mp.exp(ratio)
            exact = mp.log(mixture)
            # A rounding of v, or of log q beside a large v, is this many roundings of
            # the logarithm.
            size = max(abs(ratio), -mp.log(rate)) if abs(ratio) >= 1 else abs(ratio)
            change = abs(rate * mp.exp(ratio) / mixture * size / exact)
            error = (
                abs(mp.mpf(float(ours)) - exact) - LEAST
            )  # below which numbers are zero
        assert error <= 8 * ULP * (1 + change) * abs(exact), (rate, ratio)


def exact_delta(kind, mu, q, count, epsilon):
    parts = ([(k, mu, q, count)] for k in directions(kind))
    return max(reference.composed_delta(x, epsilon) for x in parts)


def mark_others_as_matrix(default, cases):
    return [
        x if x in default else pytest.param(x, marks=pytest.mark.matrix) for x in cases
    ]


@pytest.mark.parametrize("case", mark_others_as_matrix(CASES[:1], CASES))
def test_composed_epsilon_and_delta_are_tight_upper_bounds(case, x64):
    *run, delta = case
    epsilon = compiled_epsilon(*case)
    exact, below = (exact_delta(*run, e) for e in (epsilon, epsilon - 1e-3))
    assert exact <= delta < below  # ε is within a thousandth
    result = compiled_delta(*run, epsilon)
    assert exact <= result <= exact * (1 + 2e-3)


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("mu", "q", "count", "delta", "top"),
    [
        (1.41, 1.43e-5, 577, 1.63e-11, 2.0),
        (1.0, 1e-4, 100, 1e-7, 0.1),
        (3.0, 3e-6, 50, 2e-8, 8.0),
        (2.0, 1e-3, 60, 3e-6, 9.0),
    ],
)
def test_epsilon_at_tiny_sampling_rates_is_tight(mu, q, count, delta, top, x64):
    epsilon = compiled_epsilon("poisson", mu, q, count, delta)
    for at, least in [(epsilon, False), (epsilon - 1e-3, True)]:
        coarse, fine = (
            reference.convolved_delta(mu, q, count, at, top, points)
            for points in (4_000, 8_000)
        )
        # The error falls to a quarter; the limit below allows for twice as much.
        exact, error = fine - (coarse - fine) / 3, (coarse - fine) / 3
        assert abs(error) < 0.01 * exact
        assert exact - error > delta if least else exact - error <= delta


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "kind", mark_others_as_matrix(("poisson", "fixed"), ("poisson", "replace", "fixed"))
)
def test_epsilon_without_sampling_equals_gaussian_mechanism(kind, x64):
    for mu, count, delta in [(0.1, 100, 1e-5), (3.0, 1, 1e-9), (0.01, 90_000, 0.2)]:
        distance = 2 * mu if kind == "replace" else mu
        exact = float(gdp.epsilon(distance * np.sqrt(count), delta))
        epsilon = compiled_epsilon(kind, mu, 1.0, count, delta)
        assert exact <= epsilon <= exact + 1e-3
    composed = pld.epsilon(pld.compose(pld.gaussian(0.3), 25), 1e-6)
    assert float(composed) == float(gdp.epsilon(1.5, 1e-6))


# A few steps with a bounded loss in one direction, at δ near its tail.
TINY = [  # kind, μ, q, count, δ
    ("poisson", 1 / 0.7, 0.4, 4, 1e-15),
    ("poisson", 1 / 0.7, 0.9, 2, 1e-15),
    ("poisson", 1.0, 0.1, 2, 1e-18),
    ("poisson", 1.0, 0.01, 10, 1e-22),
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "mu", "q", "delta"),
    [
        ("poisson", 1 / 0.7, 0.9, 1e-15),
        ("poisson", 1.0, 0.1, 1e-18),
        ("poisson", 1.0, 0.1, 1e-100),
        ("fixed", 1.0, 0.1, 1e-100),
    ],
)
def test_epsilon_of_two_steps_at_tiny_delta_is_tight(kind, mu, q, delta, x64):
    epsilon = compiled_epsilon(kind, mu, q, 2, delta)
    above, below = (
        max(reference.two_step_delta(k, mu, q, e) for k in directions(kind))
        for e in (epsilon, epsilon - 1e-3)
    )
    assert above <= delta < below


@pytest.mark.slow
def test_epsilon_is_finite_at_any_delta(x64):
    for kind, mu, q, count, delta in TINY:
        epsilon = compiled_epsilon(kind, mu, q, count, delta)
        above, below = (
            compiled_delta(kind, mu, q, count, e) for e in (epsilon, epsilon - 1e-3)
        )
        assert above <= delta * (1 + 1e-3)
        assert delta < below
    rng = np.random.default_rng(0)
    for kind in ("poisson", "replace", "fixed"):
        for _ in range(12):
            mu, q = 10 ** rng.uniform(-2, 0.6), 10 ** rng.uniform(-4, 0)
            count = np.round(10 ** rng.uniform(0, rng.choice([1.3, 5])))
            deltas = 10.0 ** -np.array([15, 40, 100])
            result = [compiled_epsilon(kind, mu, q, count, d) for d in deltas]
            assert 0 <= result[0] <= result[1] <= result[2] < np.inf, (mu, q, count)


def test_tiny_gaussian_mu_hardly_increases_delta(x64):
    # The other direction's δ is far smaller, and the loss has no exact atom.
    both = pld.convolve(build("poisson", 0.684, 0.0115), pld.gaussian(2.58e-5))
    alone = compiled_delta("poisson", 0.684, 0.0115, 1, 2.77)
    assert alone <= float(pld.delta(both, 2.77)) <= 1.01 * alone


@pytest.mark.slow
def test_composition_of_different_mechanisms_is_tight(x64):
    parts = [("remove", 1.0, 0.02, 400), ("remove", 0.5, 0.1, 100)]
    both = pld.convolve(
        pld.compose(build("poisson", 1.0, 0.02), 400),
        pld.convolve(pld.gaussian(0.6), pld.compose(build("poisson", 0.5, 0.1), 100)),
    )
    epsilon = float(pld.epsilon(both, 1e-6))
    add = [("add", *rest) for _, *rest in parts]
    above, below = (
        max(reference.composed_delta(x, e, variance=0.36) for x in (parts, add))
        for e in (epsilon, epsilon - 1e-3)
    )
    assert above <= 1e-6 < below
    mixed = pld.convolve(build("fixed", 1.0, 0.2), pld.compose(pld.gaussian(0.2), 9))
    swapped = pld.PLD(mixed.steps[::-1])
    assert pld.epsilon(mixed, 1e-6) == pld.epsilon(swapped, 1e-6)
    assert pld.epsilon(mixed, 1e-6) < gdp.epsilon(np.sqrt(1.36), 1e-6)


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("sigma", "q", "count", "delta"),
    [(0.428, 3.1e-4, 481, 6.7e-5), (1.4, 0.36, 56, 1.7e-7), (2.3, 0.04, 567, 3e-7)],
)
def test_epsilon_agrees_with_dp_accounting(sigma, q, count, delta, x64):
    bounds = [
        privacy_loss_distribution.from_gaussian_mechanism(
            sigma,
            sampling_prob=q,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=1e-3,
            use_connect_dots=pessimistic,
        )
        .self_compose(count)
        .get_epsilon_for_delta(delta)
        for pessimistic in (False, True)
    ]
    epsilon = compiled_epsilon("poisson", 1 / sigma, q, count, delta)
    assert bounds[0] <= epsilon <= bounds[1] + 1e-3


@pytest.mark.slow  # a theorem: it calls no code of dpjax
def test_opposite_contributions_are_worst_under_replace():
    # Hockey-stick divergences in the plane, on a grid that is fine for unit Gaussians.
    x = np.linspace(-9, 9, 361)
    plane = np.stack(np.meshgrid(x, x), axis=-1)
    rng = np.random.default_rng(0)

    def density(g, q):
        def phi(at):
            return norm.pdf(plane[..., 0] - at[0]) * norm.pdf(plane[..., 1] - at[1])

        return (1 - q) * phi((0.0, 0.0)) + q * phi(g)

    for _ in range(25):
        mu, q, epsilon = rng.uniform(0.3, 2.5), rng.uniform(0.01, 1), rng.uniform(0, 2)
        g, h = (
            mu * np.sqrt(rng.uniform(0, 1)) * np.array([np.cos(a), np.sin(a)])
            for a in rng.uniform(0, 2 * np.pi, 2)
        )
        excess = density(g, q) - np.exp(epsilon) * density(h, q)
        value = np.sum(np.maximum(excess, 0)) * (x[1] - x[0]) ** 2
        assert value <= float(reference.single_delta("replace", mu, q, epsilon)) + 1e-5


@pytest.mark.slow  # derivatives are programs of their own
@pytest.mark.parametrize(
    ("case", "compiled"), [(CASES[0], True), (CASES[3], True), (CASES[5], False)]
)
def test_epsilon_derivatives_match_reference(case, compiled):
    kind, mu, q, count, delta = case
    with jax.enable_x64(True):
        start = compiled_epsilon(*case)

    def log_delta(mu, epsilon):
        parts = [(directions(kind)[0], mu, q, count)]
        return np.log(reference.composed_delta(parts, epsilon))

    def slopes(epsilon, h=1e-4):
        by_mu = log_delta(mu * (1 + h), epsilon) - log_delta(mu * (1 - h), epsilon)
        by_epsilon = log_delta(mu, epsilon + h) - log_delta(mu, epsilon - h)
        return by_mu / (2 * h * mu), by_epsilon / (2 * h)

    epsilon = start - (log_delta(mu, start) - np.log(delta)) / slopes(start)[1]
    by_mu, by_epsilon = slopes(epsilon)
    gradient = jax.grad(
        lambda m: pld.epsilon(pld.compose(build(kind, m, q), count), delta)
    )
    slope = (jax.jit(gradient) if compiled else gradient)(mu)
    np.testing.assert_allclose(slope, -by_mu / by_epsilon, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", [Adjacency.ADD_REMOVE, Adjacency.REPLACE])
def test_derivative_at_a_sampling_rate_of_one_is_that_from_below(adjacency, x64):
    """The derivative of δ is that of P minus e^ε times Q, where P exceeds e^ε Q."""
    mu, epsilon = 0.8, 1.0

    def delta(rate, nu):
        step = pld.poisson_gaussian(1 / mu, rate, adjacency=adjacency)
        return pld.delta(pld.convolve(step, pld.gaussian(nu)), epsilon)

    # P changes from N(μ, 1) towards N(0, 1), and under REPLACE Q from N(−μ, 1).
    for nu in (0.0, 0.6):
        total = np.hypot(mu, nu)
        z = epsilon / total + total / 2
        expected = norm.sf(z - total) - norm.sf(z - nu * nu / total)
        if adjacency is Adjacency.REPLACE:
            total = np.hypot(2 * mu, nu)
            z = epsilon / total + total / 2
            middle = (2 * mu * mu + nu * nu) / total
            expected = norm.sf(z - total) - norm.sf(z - middle)
            from_q = norm.sf(z) - norm.sf(z - 2 * mu * mu / total)
            expected -= np.exp(epsilon) * from_q
        slope = jax.grad(delta)(1.0, nu)
        np.testing.assert_allclose(slope, expected, rtol=5e-3)  # of a grid


def epsilon_of_noise(sigma):
    step = pld.poisson_gaussian(sigma, 0.02, adjacency=Adjacency.ADD_REMOVE)
    return pld.epsilon(pld.compose(step, 500), 1e-6)


@pytest.mark.slow
def test_float32_second_derivatives_match_differences():
    h, slope = 1e-3, jax.jit(jax.grad(epsilon_of_noise))
    with jax.enable_x64(True):
        central = (slope(1.2 + h) - slope(1.2 - h)) / (2 * h)
    for hessian in (
        jax.hessian(epsilon_of_noise),
        jax.jit(jax.hessian(epsilon_of_noise)),
    ):
        np.testing.assert_allclose(hessian(1.2), central, rtol=1e-4)


@pytest.mark.slow
def test_batched_epsilons_equal_single_values():
    sigmas = jnp.array([0.7, 5.0])
    each = [epsilon_of_noise(s) for s in sigmas]
    np.testing.assert_allclose(jax.vmap(epsilon_of_noise)(sigmas), each, rtol=1e-6)
    np.testing.assert_allclose(epsilon_of_noise(sigmas), each, rtol=1e-6)
    assert epsilon_of_noise(sigmas).dtype == jnp.float32


def test_a_pld_is_a_pytree():
    run = pld.compose(
        pld.poisson_gaussian(0.8, 0.01, adjacency=Adjacency.ZERO_OUT), 300
    )
    assert jax.tree.leaves(run) == [0.8, 0.01, 300]
    epsilon = jax.eval_shape(pld.epsilon, run, 1e-5)
    assert (epsilon.shape, epsilon.dtype) == ((), jnp.float32)
    # The same by value, for Gaussians alone, whose program is small.
    run = pld.compose(pld.gaussian(0.3), 25)
    whole = pld.epsilon(run, 1e-5)
    np.testing.assert_allclose(jax.jit(pld.epsilon)(run, 1e-5), whole, rtol=1e-6)


@pytest.mark.slow
def test_sampled_pld_passes_through_jit():
    run = pld.compose(
        pld.poisson_gaussian(0.8, 0.01, adjacency=Adjacency.ZERO_OUT), 300
    )
    whole = pld.epsilon(run, 1e-5)
    np.testing.assert_allclose(jax.jit(pld.epsilon)(run, 1e-5), whole, rtol=1e-6)


@pytest.mark.slow
def test_calibrated_num_steps_is_the_largest():
    with jax.enable_x64(True):

        def epsilon(count):
            return _epsilon("poisson", 1.0, 0.01, count, 1e-5)

        most = calibrate.solve(epsilon, 1.5, increasing=True, integer=True, start=64.0)
        assert epsilon(most) <= 1.5 < epsilon(most + 1)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["noise", "rate"])
def test_calibrated_noise_and_rate_meet_the_target(of, x64):
    def epsilon(x):
        mu, q = (1 / x, 0.01) if of == "noise" else (1.0, x)
        return _epsilon("poisson", mu, q, 1000.0, 1e-5)

    growing = of == "rate"
    result = calibrate.solve(
        epsilon, 1.5, increasing=growing, upper=1.0 if growing else np.inf
    )
    assert epsilon(result) <= 1.5
    np.testing.assert_allclose(epsilon(result), 1.5, rtol=1e-9)


@pytest.mark.slow
def test_calibrated_noise_has_the_implicit_derivative(compiled):
    sigma = calibrate.solve(epsilon_of_noise, 1.5)
    slope = jax.grad(lambda target: calibrate.solve(epsilon_of_noise, target))(1.5)
    np.testing.assert_allclose(slope, 1 / jax.grad(epsilon_of_noise)(sigma), rtol=1e-4)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.floats(0.05, 5),
    st.floats(-5, 0).map(lambda x: 10.0**x),
    st.integers(1, 1000),
    st.floats(-11, -1).map(lambda x: 10.0**x),
)
def test_epsilon_is_monotone_and_inverts_delta(mu, q, count, delta):
    with jax.enable_x64(True):
        epsilon = compiled_epsilon("poisson", mu, q, count, delta)
        assert 0 <= epsilon < np.inf
        back = compiled_delta("poisson", mu, q, count, epsilon)
        assert 0 <= back <= 1
        slack = 1e-3 + 2e-5 * epsilon
        if 0 < back < 1:
            around = compiled_epsilon("poisson", mu, q, count, back)
            assert abs(around - epsilon) <= slack
        assert compiled_epsilon("poisson", mu, q, count, delta / 2) >= epsilon - slack
        assert compiled_epsilon("poisson", mu * 1.1, q, count, delta) >= epsilon - slack
        assert compiled_epsilon("poisson", mu, q, count + 1, delta) >= epsilon - slack


@pytest.mark.slow
def test_convolved_runs_equal_composed_counts(x64):
    step = build("replace", 0.8, 0.05)
    twice = pld.convolve(pld.compose(step, 20), pld.compose(step, 20))
    once = pld.compose(step, 40)
    np.testing.assert_allclose(
        pld.epsilon(twice, 1e-6), pld.epsilon(once, 1e-6), rtol=1e-6
    )
    assert pld.epsilon(pld.compose(once, 3), 1e-6) == pld.epsilon(
        pld.compose(step, 120), 1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_values_at_limits_are_as_documented(kind, x64):
    inf = np.inf
    for mu, q, count, delta, expected in [
        (1.0, 0.0, 5, 1e-5, 0.0),
        (1.0, 0.1, 0, 1e-5, 0.0),
        (1e-9, 0.3, 10, 1e-5, 0.0),
        (1.0, 0.1, 5, 0.999999, 0.0),
        (1.0, 0.1, -1, 1e-5, inf),
        (1.0, 0.1, -2.5, 1e-5, inf),
        (1.0, 0.1, np.nan, 1e-5, inf),
        (1.0, 0.1, inf, 1e-5, inf),
        (1.0, 1.1, 5, 1e-5, inf),
        (1.0, -0.1, 5, 1e-5, inf),
        (np.nan, 0.1, 5, 1e-5, inf),
        (1.0, 0.1, 5, 0.0, inf),
        (1.0, 0.1, 5, np.nan, inf),
        (1.0, 0.1, 5, 1.0, 0.0),
    ]:
        result = compiled_epsilon(kind, mu, q, count, delta)
        assert result == expected, (mu, q, count, delta)
    assert compiled_delta(kind, 1.0, 0.1, 5, -1.0) == 1
    assert compiled_delta(kind, 1.0, 0.1, -5, 1.0) == 1
    assert compiled_delta(kind, 1.0, 0.1, 5, inf) == 0
    assert compiled_delta(kind, 1.0, 0.0, 5, 0.0) == 0
    assert 0 < compiled_epsilon(kind, 100.0, 1e-3, 10, 1e-5) < inf
    for count in (1e6, 1e8):
        assert 0 < compiled_epsilon(kind, 0.01, 1e-3, count, 1e-5) < 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_batched_traced_counts_round_up(dtype, x64):
    """At all positions of a batch."""
    counts = np.linspace(100, 4700, 20, dtype=dtype)
    counts[:3] = 1e-7, 2**24 - 1, np.nextafter(dtype(4700), dtype(np.inf))
    many = jax.jit(jax.vmap(lambda n: _epsilon("fixed", 0.1, 0.01, n, 1e-5)))
    np.testing.assert_array_equal(many(counts), many(np.ceil(counts)))
    assert np.isfinite(many(counts)).all()


@pytest.mark.slow  # products of counts are in the test below
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_traced_counts_round_up_to_whole_numbers(dtype, x64):
    def composed_epsilon(count):
        both = pld.compose(pld.compose(pld.gaussian(0.1), count), 2)
        return pld.epsilon(both, 1e-5)

    # The closed form at 2 x 3 runs and its derivative, also at 2.5.
    def exact_epsilon(count):
        return gdp.epsilon(0.1 * jnp.sqrt(2 * count), 1e-5)

    expected, by_count = jax.jit(jax.value_and_grad(exact_epsilon))(3.0)
    value_and_slope = jax.jit(jax.value_and_grad(composed_epsilon))
    for count in (2.5, 3.0):
        value, slope = value_and_slope(dtype(count))
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        np.testing.assert_allclose(slope, by_count, rtol=1e-6)
    for count in (-0.5, -2.0, np.nan, np.inf):
        assert float(value_and_slope(dtype(count))[0]) == np.inf
    # A sampled step: a little more than a whole number is the next one.
    for count in (1e-7, 2.5, np.nextafter(4700, np.inf)):
        up = compiled_epsilon("fixed", 0.1, 0.01, np.ceil(count), 1e-5)
        assert compiled_epsilon("fixed", 0.1, 0.01, count, 1e-5) == up < np.inf


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: pld.gaussian(-1.0), "mu"),
        (lambda: pld.subsampled_gdp(np.nan, 0.5), "mu"),
        (lambda: pld.subsampled_gdp(1.0, 1.5), "sampling_rate"),
        (lambda: build("poisson", np.inf, 0.5), "noise_multiplier"),
        (lambda: build("replace", 1.0, -0.5), "sampling_rate"),
        (lambda: pld.poisson_gaussian(1.0, 0.1, adjacency="replace"), "adjacency"),
        (lambda: pld.compose(pld.gaussian(1.0), 2.5), "count"),
        (lambda: pld.compose(pld.gaussian(1.0), -2), "count"),
        (lambda: pld.epsilon(pld.gaussian(1.0), 0.0), "delta"),
        (lambda: pld.delta(pld.gaussian(1.0), -0.1), "epsilon"),
        (lambda: pld.epsilon(1.0, 0.1), "pld"),
        (
            lambda: pld.convolve(build("poisson", 1.0, 0.1), build("fixed", 1.0, 0.1)),
            "a and b",
        ),
    ],
)
def test_invalid_arguments_raise(call, name):
    with pytest.raises(ValueError, match=f"^{name} must"):
        call()


def test_products_of_counts_never_overflow_or_round_down():
    step, few, many = pld.gaussian(1e-3), 50_000, 90_000
    # Gaussian steps add up to μ² = T 1e-6, in Python's integers.
    exact = float(gdp.epsilon(1e-3 * (few * many) ** 0.5, 1e-5))

    def composed_epsilon(first, second):
        return pld.epsilon(pld.compose(pld.compose(step, first), second), 1e-5)

    types = [int, np.int32, np.float32, jnp.int32, jnp.float32]
    result = [float(composed_epsilon(t(few), t(many))) for t in types]
    result.append(float(jax.jit(composed_epsilon)(np.int32(few), np.int32(many))))
    # Four roundings of float32 in T, which is within ε's root, and one of the answer.
    assert all(exact * (1 - 1e-7) <= x <= exact * (1 + 8e-7) for x in result), result


@pytest.mark.matrix
def test_products_with_a_negative_count_give_vacuous_bounds():
    @jax.jit
    def bounds(first, second):
        run = pld.compose(pld.compose(pld.gaussian(1.0), first), second)
        return pld.epsilon(run, 1e-5), pld.delta(run, 1.0)

    pairs = [(-1.0, -1.0), (0.0, -1.0), (-1.0, 0.0), (-2.5, -2.0)]
    pairs.append((jnp.int32(-2), jnp.int32(-3)))
    for first, second in pairs:
        assert [float(x) for x in bounds(first, second)] == [np.inf, 1.0]
    assert float(bounds(2.0, 0.0)[0]) == 0


def test_traced_arguments_out_of_range_give_vacuous_bounds_without_a_release():
    """The δ of outputs that no one's data enter is above 0 for a negative ε."""
    silent = pld.gaussian(0.0)
    bounds = jax.jit(lambda x: (pld.delta(silent, x), pld.epsilon(silent, x)))
    assert [float(x) for x in bounds(-0.5)] == [1.0, np.inf]
    assert [float(x) for x in bounds(0.5)] == [0.0, 0.0]
