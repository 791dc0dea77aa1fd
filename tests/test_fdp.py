"""Trade-off curves against the closed form for Gaussians and likelihood-ratio tests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from dpjax import Adjacency
from dpjax.accounting import fdp, gdp, pld, rdp

ALPHA = np.array([0.0, 1e-6, 1e-3, 0.05, 0.3, 0.7, 0.99, 1.0])


@pytest.mark.parametrize("mu", [0.05, 0.8, 4.0])
def test_tradeoff_of_gaussian_profile_is_a_tight_lower_bound(mu, x64):
    exact = np.asarray(gdp.tradeoff(mu, ALPHA))
    curve = np.asarray(fdp.tradeoff(lambda e: gdp.delta(mu, e), ALPHA))
    assert np.all(curve <= exact)
    np.testing.assert_allclose(curve, exact, atol=2e-3)
    fine = np.geomspace(1e-3, 100, 4000)
    finer = np.asarray(fdp.tradeoff(lambda e: gdp.delta(mu, e), ALPHA, epsilons=fine))
    assert np.all(finer <= exact)
    np.testing.assert_allclose(finer, exact, atol=1e-5 + 1e-3 * (mu < 0.1))


@pytest.mark.slow
def test_tradeoff_bounds_are_ordered_rdp_pld_gdp(x64):
    mu, epsilons = 0.7, np.geomspace(0.01, 20, 40)
    curve = rdp.gaussian(1 / mu, rdp.ORDERS)
    profiles = [
        lambda e: rdp.delta(curve, rdp.ORDERS, e),
        lambda e: pld.delta(pld.subsampled_gdp(mu, 1.0), e),
        lambda e: gdp.delta(mu, e),
    ]
    by_rdp, by_pld, by_gdp = (
        np.asarray(fdp.tradeoff(f, ALPHA, epsilons=epsilons)) for f in profiles
    )
    assert np.all(by_rdp <= by_pld)
    assert np.all(by_pld <= by_gdp)
    np.testing.assert_allclose(by_pld, by_gdp, atol=1e-4)
    assert by_gdp[3] - by_rdp[3] < 0.3


@pytest.mark.slow
def test_likelihood_ratio_tests_stay_below_the_bound(x64):
    # One Poisson-sampled step, q = 0.2, μ = 1.5: tests z > t in either direction.
    mu, q, t = 1.5, 0.2, np.linspace(-3, 4, 15)
    step = pld.poisson_gaussian(1 / mu, q, adjacency=Adjacency.ADD_REMOVE)
    drawn, plain = (1 - q) * norm.sf(t) + q * norm.sf(t - mu), norm.sf(t)
    for fpr, tpr in [(plain, drawn), (1 - drawn, 1 - plain)]:
        misses = fdp.tradeoff(
            lambda e: pld.delta(step, e), fpr, epsilons=np.linspace(0, 4, 31)
        )
        assert np.all(tpr <= 1 - np.asarray(misses))
    best = np.max(drawn - plain)
    assert best <= float(pld.delta(step, 0.0)) <= best * 1.05


def test_float32_derivatives_match_gaussian_tradeoff():
    def beta(mu):
        return fdp.tradeoff(lambda e: gdp.delta(mu, e), 0.05)

    exact = jax.jit(jax.grad(lambda mu: gdp.tradeoff(mu, 0.05)))(1.0)
    np.testing.assert_allclose(jax.jit(jax.grad(beta))(1.0), exact, rtol=0.05)
    assert jax.eval_shape(beta, 1.0).dtype == jnp.float32


def test_invalid_arguments_raise():
    for call, name in [
        (lambda: fdp.tradeoff(lambda e: gdp.delta(1.0, e), 1.5), "alpha"),
        (lambda: fdp.tradeoff(lambda e: e, 0.1, epsilons=np.array([-1.0])), "epsilons"),
        (lambda: fdp.tradeoff(lambda e: e, 0.1, epsilons=1.0), "epsilons"),
    ]:
        with pytest.raises(ValueError, match=f"^{name} must"):
            call()
    traced = jax.jit(lambda a: fdp.tradeoff(lambda e: gdp.delta(1.0, e), a))
    assert float(traced(2.0)) == 0
    assert float(traced(np.nan)) == 0
