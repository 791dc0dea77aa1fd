"""Group privacy: the bound for k examples against closed forms and composed curves."""

import math

import jax
import numpy as np
import pytest

from dpjax import Adjacency
from dpjax.accounting import gdp, group, pld
from dpjax.accounting.profiles import Gaussian, Guarantee, Pure


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


class Curve:
    """A profile from a function δ(ε), without any name of its mechanism."""

    def __init__(self, of_epsilon, top=40.0):
        self.of_epsilon, self.top, self.mu = of_epsilon, top, None

    def delta(self, epsilon):
        return self.of_epsilon(float(epsilon))

    def epsilon(self, delta):
        low, high = 0.0, self.top
        if self.delta(low) <= delta:
            return low
        if self.delta(high) > delta:
            return math.inf
        for _ in range(60):
            middle = (low + high) / 2
            if self.delta(middle) <= delta:
                high = middle
            else:
                low = middle
        return high


def gaussian_curve(mu):
    """Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), from the complementary error function."""

    def tail(x):
        return 0.5 * math.erfc(x / math.sqrt(2))

    return Curve(lambda e: tail(e / mu - mu / 2) - math.exp(e) * tail(e / mu + mu / 2))


def laplace_delta(pure_epsilon, epsilon):
    return -math.expm1(min(epsilon - pure_epsilon, 0.0) / 2)


@pytest.mark.parametrize(
    ("mu", "size", "delta"), [(0.3, 2, 1e-5), (1.2, 3, 1e-8), (0.5, 8, 1e-4)]
)
def test_group_of_gaussian_curve_is_that_of_k_times_mu(mu, size, delta):
    exact = float(gdp.epsilon(size * mu, delta))
    assert (
        exact <= float(group.epsilon(gaussian_curve(mu), delta, size)) <= 1.01 * exact
    )
    result = float(group.delta(gaussian_curve(mu), exact, size))
    assert delta * (1 - 1e-6) <= result <= 1.1 * delta
    for named in (Gaussian(mu), Guarantee("", Gaussian(mu), Adjacency.REPLACE, ())):
        np.testing.assert_allclose(group.epsilon(named, delta, size), exact, rtol=1e-9)
        np.testing.assert_allclose(group.delta(named, exact, size), delta, rtol=1e-6)


@pytest.mark.parametrize(("pure_epsilon", "size"), [(0.2, 2), (0.7, 5), (3.0, 3)])
def test_group_of_laplace_curve_is_that_of_a_k_times_larger_shift(pure_epsilon, size):
    curve = Curve(lambda e: laplace_delta(pure_epsilon, e), 10.0)
    for epsilon in (0.0, 0.3 * pure_epsilon, 0.8 * size * pure_epsilon):
        exact = laplace_delta(size * pure_epsilon, epsilon)
        result = float(group.delta(curve, epsilon, size))
        assert exact <= result <= min(1.01 * exact + 1e-3, 1.0)
    # The range of losses is bounded, so that ε ends at k times that of one example.
    result = float(group.epsilon(curve, 1e-9, size))
    exact = size * pure_epsilon + 2 * math.log1p(-1e-9)
    assert exact <= result <= 1.01 * exact
    assert group.epsilon(Pure(pure_epsilon), 1e-12, size) == pytest.approx(
        size * pure_epsilon, rel=1e-9
    )


def hockey_stick(p, q, epsilon):
    return np.sum(np.maximum(p - math.exp(epsilon) * q, 0.0))


def best_rate(p, q, alpha):
    """The best true-positive rate at the rates α: p's mass on the best q's mass α."""
    order = np.argsort(-p / q)
    corners = [np.append(0.0, np.cumsum(x[order])) for x in (q, p)]
    return np.interp(alpha, *corners)


@pytest.mark.parametrize("seed", range(3))
def test_group_bounds_hold_for_chains_of_distributions(seed):
    """And they are close to the composed trade-off curve, with no closed form."""
    rng = np.random.default_rng(seed)
    chain = rng.dirichlet(np.full(6, 3.0), 4)
    size = len(chain) - 1
    pairs = [(chain[i], chain[i + 1]) for i in range(size)]
    pairs += [(q, p) for p, q in pairs]
    curve = Curve(lambda e: max(hockey_stick(p, q, e) for p, q in pairs))
    alpha = np.concatenate([[0.0], np.geomspace(1e-9, 1, 2001)])
    rate = alpha
    for _ in range(size):
        # The curve of the profile is the least concave one above the curves of pairs.
        slopes = np.linspace(-12.0, 12.0, 1201)[:, None]
        deltas = np.max([best_rate(*pair, alpha) for pair in pairs], axis=0)
        heights = np.max(deltas - np.exp(slopes) * alpha, axis=1, keepdims=True)
        rate = np.min(
            [h + np.exp(s) * rate for h, s in zip(heights, slopes, strict=True)], axis=0
        )
    for epsilon in (0.1, 1.0, 3.0):
        truth = max(
            hockey_stick(*ends, epsilon) for ends in (chain[[0, -1]], chain[[-1, 0]])
        )
        composed = np.max(rate - math.exp(epsilon) * alpha)
        result = float(group.delta(curve, epsilon, size))
        assert truth <= result
        # A hundredth: neighbouring slopes of the brute force differ by 0.02.
        assert 0.99 * composed <= result <= 1.02 * composed + 1e-6
        again = float(group.epsilon(curve, max(result, 1e-9), size))
        assert again <= epsilon * 1.01 + 0.01


def test_epsilon_of_one_point_is_the_simple_bound():
    """Of (ε₀, δ₀) alone no more follows than (kε₀, δ₀ Σ e^{iε₀})."""
    curve = Curve(lambda e: 1e-9 if e >= 0.5 else 1.0, 10.0)
    simple = 1e-9 * (1 + math.exp(0.5) + math.exp(1.0))
    assert 1.5 <= float(group.epsilon(curve, simple * (1 + 1e-6), 3)) <= 1.5001
    assert simple <= float(group.delta(curve, 1.5001, 3)) <= simple * 1.001
    assert float(group.epsilon(curve, 1e-9, 3)) == math.inf


def test_group_of_one_is_the_profile_and_float32_is_rounded_up():
    curve = gaussian_curve(0.5)
    assert group.epsilon(curve, 1e-5, 1) == curve.epsilon(1e-5)
    wide = float(group.epsilon(curve, 1e-5, 2))
    with jax.enable_x64(False):
        narrow = group.epsilon(curve, 1e-5, 2)
    assert narrow.dtype == np.float32
    assert wide <= float(narrow) <= wide * (1 + 1e-6)


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="size must be at least 1; got 0"):
        group.epsilon(Gaussian(1.0), 1e-5, 0)
    with pytest.raises(ValueError, match="delta must be"):
        group.epsilon(Gaussian(1.0), 0.0, 2)
    with pytest.raises(ValueError, match="epsilon must be non-negative"):
        group.delta(Gaussian(1.0), -1.0, 2)


@pytest.mark.slow
def test_group_of_sampled_steps_lies_between_one_example_and_the_simple_bound():
    step = pld.poisson_gaussian(1.0, 0.01, adjacency=Adjacency.ADD_REMOVE)
    run = pld.compose(step, 1000)
    result = float(group.epsilon(run, 1e-5, 2))
    one = float(pld.epsilon(run, 1e-5))
    split = float(pld.epsilon(run, 1e-5 / (1 + math.exp(result / 2))))
    assert one < result <= 2 * split * 1.001
    full = pld.subsampled_gdp(0.7, 1.0)
    exact = float(gdp.epsilon(1.4, 1e-6))
    assert exact <= float(group.epsilon(full, 1e-6, 2)) <= 1.01 * exact
