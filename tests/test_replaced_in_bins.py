"""Random bins under REPLACE, with epochs that end early, and with little noise.

Both runs may then be mixtures: P of N(m_π, σ²) and Q of N(m′_π, σ²), with the
contributions of the two examples for the patterns π.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from dpjax import Adjacency
from dpjax._core.float64 import scope
from dpjax._matrices.strategy import Toeplitz
from dpjax.accounting import allocation, correlated, gdp, pld
from dpjax.accounting._numerics.convex_order import spread

SHAPE = np.array([0.6, 0.3])


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def cumulative_shifts(num_steps, n_b):
    """What an example adds to C x, for each position in the epoch, f[n_b, T]."""
    c = np.eye(num_steps)
    for lag, value in enumerate(SHAPE, 1):
        c += value * np.eye(num_steps, k=-lag)
    return np.array([c[:, place::n_b].sum(axis=1) for place in range(n_b)])


def log_ratio(moved, z):
    """Log of the mixture's density to that of N(0, 1), f[samples]."""
    logs = z @ moved.T - np.sum(moved**2, axis=1) / 2
    return scipy.special.logsumexp(logs, axis=1) - np.log(len(moved))


def simulate_delta(moved, other, epsilon, samples=100_000):
    """E_P (1 − e^ε dQ/dP)₊, and its standard error."""
    rng = np.random.default_rng(2)
    z = rng.standard_normal((samples, moved.shape[1]))
    z += moved[rng.integers(len(moved), size=samples)]
    loss = log_ratio(moved, z) - log_ratio(other, z)
    terms = -np.expm1(np.minimum(epsilon - loss, 0.0))
    return terms.mean(), terms.std() / np.sqrt(samples)


def ratios_on_grid(*moved):
    """Masses for two steps, and the ratio of each run to that without the example."""
    z = np.linspace(-8.5, 8.5, 401)
    density = scipy.stats.norm.pdf(z) * (z[1] - z[0])
    both = np.stack([g.ravel() for g in np.meshgrid(z, z, indexing="ij")], axis=1)
    mass = np.outer(density, density).ravel()
    return mass, *(np.exp(log_ratio(m, both)) for m in moved)


def divergences(mass, p, q, epsilons):
    """E (L − e^ε L′)₊."""
    return np.array([mass @ np.maximum(p - np.exp(e) * q, 0.0) for e in epsilons])


def subsampled_epsilon(epsilon, q):
    """Log (1 − q + q e^ε)."""
    return epsilon if q == 1 else np.logaddexp(np.log1p(-q), np.log(q) + epsilon)


@pytest.mark.slow  # a theorem: it calls no code of dpjax
def test_adaptive_gradients_never_exceed_opposite_ones():
    """Two steps, three patterns; the second step depends on the first output."""
    rng = np.random.default_rng(1)
    z = np.linspace(-8, 8, 801)
    density = scipy.stats.norm.pdf(z) * (z[1] - z[0])
    mass, epsilons = np.outer(density, density).ravel(), np.log([1, 1.5, 4])

    def likelihood_ratio(first, second, weights):
        """For first f[π] and second f[π, z₁]."""
        terms = [
            w
            * np.exp(a * z - a * a / 2)[:, None]
            * np.exp(b[:, None] * z[None] - b[:, None] ** 2 / 2)
            for w, a, b in zip(weights, first, second, strict=True)
        ]
        return np.sum(terms, axis=0).ravel()

    def adaptive_contributions(c):
        cuts = np.digitize(z, np.sort(rng.normal(size=4)))
        second = rng.choice([-1, 1, 0.3, -0.6], (3, 5))[:, cuts]
        return c[:, 0] * rng.uniform(-1, 1, 3), c[:, 1:] * second

    for _ in range(3):
        c = rng.uniform(0.2, 1.2, (3, 2)) * (rng.uniform(size=(3, 2)) < 0.8)
        weights = rng.dirichlet([1, 1, 1])
        aligned = c[:, 0], c[:, 1:] * np.ones_like(z)
        opposite = -aligned[0], -aligned[1]
        pair = (
            likelihood_ratio(*aligned, weights),
            likelihood_ratio(*opposite, weights),
        )
        most = divergences(mass, pair[0], pair[1], epsilons)
        for _ in range(4):
            p, q = (
                likelihood_ratio(*adaptive_contributions(c), weights) for _ in range(2)
            )
            # Kinks of the steps, too, are integrated to 1e-3 of the differences.
            assert np.all(divergences(mass, p, q, epsilons) <= most + 2e-4)


@functools.cache
def replacement_losses_fn():
    @jax.jit
    def replacement_losses(noise, num_steps):
        law = spread.allocation_upper_bound(noise, num_steps, jnp.asarray(1e-12))
        return spread.replacement_losses(law, num_steps)

    return replacement_losses


def compute_losses(num_steps, noise):
    with scope():
        result = replacement_losses_fn()(
            jnp.asarray(noise), jnp.asarray(1.0 * num_steps)
        )
    return jax.tree.map(np.asarray, result)


def delta_of_losses(found, epsilon):
    above = np.maximum(-np.expm1(epsilon - found.loss[0]), 0.0)
    return np.sum(np.exp(found.log_mass[0]) * above) + found.inf_mass[0]


@pytest.mark.parametrize("noise", [0.7, pytest.param(1.6, marks=pytest.mark.matrix)])
def test_replacement_losses_bound_exact_delta(noise):
    epsilons = np.array([0.1, 0.7, 2.0, 4.0])
    # Exact for one step, where both ratios are monotone together.
    result = compute_losses(1, noise)
    got = np.array([delta_of_losses(result, e) for e in epsilons])
    exact = np.asarray(gdp.delta(2 / noise, epsilons))
    assert np.all(got >= exact * (1 - 1e-9))
    np.testing.assert_allclose(got, exact, rtol=2e-3)
    # P's masses, and those of Q, are those of a distribution.
    p = np.exp(result.log_mass[0])
    np.testing.assert_allclose(np.sum(p) + result.inf_mass[0], 1.0, rtol=1e-9)
    assert np.sum(p * np.exp(-result.loss[0])) <= 1 + 1e-9
    got = np.array([delta_of_losses(compute_losses(2, noise), e) for e in epsilons])
    shifts = np.eye(2) / noise
    any_other = np.array([[0.3, -0.2], [0.9, 0.1]]) / noise
    mass, p, q, other = ratios_on_grid(shifts, -shifts, any_other)
    assert np.all(got >= divergences(mass, p, q, epsilons))
    assert np.all(got >= divergences(mass, p, other, epsilons))
    assert np.all(got < np.asarray(gdp.delta(2 / noise, epsilons)))
    # The bound is by way of the run without either example, at the best split.
    split = [
        divergences(mass, p, 1, [e]) + np.exp(e) * divergences(mass, 1, q, epsilons - e)
        for e in np.linspace(-1, 4, 41)
    ]
    assert np.all(got <= np.min(split, axis=0) * (1 + 2e-3))


@functools.cache
def compiled_epsilon(how, num_steps, n_b, adjacency=Adjacency.REPLACE):
    @jax.jit
    def epsilon(coefficients, noise, delta):
        return correlated.epsilon(
            Toeplitz(coefficients, jnp.zeros(0)),
            noise,
            delta,
            num_steps=num_steps,
            steps_per_epoch=n_b,
            sampling=how,
            adjacency=adjacency,
        )

    return epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("num_steps", "n_b"), [(2, 2), (3, 2), (24, 8), (3, 12)])
def test_epsilon_bounds_hold_in_simulations(num_steps, n_b):
    """Four contributions each, at six standard errors: a false alarm in 1e7.

    Two steps are integrated instead. Three steps of twelve end an epoch early.
    """
    shifts = cumulative_shifts(num_steps, n_b)
    of = compiled_epsilon("random_bins", num_steps, n_b)
    mean = reported = epsilon = 0.0
    delta, share = 1.0, min(1.0, num_steps / n_b)
    for noise, delta in [(0.8, 0.03), (1.7, 0.01), (4.0, 0.003)]:
        epsilon = float(of(SHAPE, noise, delta))
        nothing, turned = 0 * shifts, np.roll(shifts, 1, axis=0)
        for one, other in [(shifts, nothing), (nothing, shifts), (shifts, turned)]:
            mean, error = simulate_delta(one / noise, other / noise, epsilon)
            assert mean - 6 * error <= delta
        mean, error = simulate_delta(shifts / noise, -shifts / noise, epsilon)
        if num_steps == 2:
            mass, p, q = ratios_on_grid(shifts / noise, -shifts / noise)
            mean, error = divergences(mass, p, q, [epsilon])[0], 0.0
        assert mean - 6 * error <= delta
        # It is at most that of known steps, in a share of an epoch.
        mu = 2 * np.max(np.linalg.norm(shifts, axis=1)) / noise
        reported = subsampled_epsilon(float(gdp.epsilon(mu, delta / share)), share)
        assert epsilon <= reported * (1 + 1e-9)
    # With much noise it is close to the simulation.
    assert mean > 0.05 * delta
    assert epsilon < 0.9 * reported
    if n_b == 12:  # an example takes part with probability 1/4, so that δ is below 0.3
        assert of(SHAPE, 1e-3, 0.3) == 0
    # With little noise it is close to that of known steps.
    mu = 2 * np.max(np.linalg.norm(shifts, axis=1)) / 0.02
    reported = subsampled_epsilon(float(gdp.epsilon(mu, 1e-5 / share)), share)
    np.testing.assert_allclose(of(SHAPE, 0.02, 1e-5), reported, rtol=0.05)


@pytest.mark.slow
def test_fresh_bins_epsilon_is_at_most_that_of_known_steps():
    strategy = Toeplitz(jnp.asarray(SHAPE), jnp.zeros(0))
    sizes = {"num_steps": 12, "steps_per_epoch": 4, "adjacency": Adjacency.REPLACE}
    got = reported = 0.0
    for noise in (0.02, 0.3, 4.0):
        got = float(compiled_epsilon("fresh_bins", 12, 4)(SHAPE, noise, 1e-5))
        mu = correlated.mu(strategy, noise, order="reshuffled", **sizes)
        reported = float(gdp.epsilon(mu, 1e-5))
        assert got <= reported * (1 + 1e-9)
        if noise < 0.1:
            assert got > 0.9 * reported


@pytest.mark.slow
def test_allocation_epsilon_under_replace_holds_in_simulation():
    replaced = functools.partial(
        allocation.epsilon, num_steps=10, adjacency=Adjacency.REPLACE
    )
    for noise, delta in [(0.8, 0.01), (2.0, 0.001)]:
        epsilon = float(replaced(noise, delta))
        shifts = np.eye(10) / noise
        mean, error = simulate_delta(shifts, -shifts, epsilon)
        assert 0.1 * delta < mean - 6 * error <= delta
        less = float(allocation.epsilon(noise, delta, num_steps=10))
        assert less < epsilon
        at = allocation.delta(noise, epsilon, num_steps=10, adjacency=Adjacency.REPLACE)
        np.testing.assert_allclose(float(at), delta, rtol=0.03)
    # With little noise it is close to that of known steps.
    known = float(gdp.epsilon(2 / 0.01, 1e-5))
    assert known * 0.9 < float(replaced(0.01, 1e-5)) <= known * (1 + 1e-9)
    both = allocation.pld(1.0, num_steps=10, adjacency=Adjacency.REPLACE)
    with pytest.raises(ValueError, match="a and b must be for the same adjacency"):
        pld.convolve(both, allocation.pld(1.0, num_steps=10))
    assert "RandomAllocation" in repr(both)


@pytest.mark.slow
def test_epsilon_falls_with_delta_where_trees_need_almost_none():
    # At δ = 0.305 several trees are private with ε = 0 on the grid that compares them.
    def at(delta):
        return correlated.epsilon(
            Toeplitz(np.zeros(0), np.zeros(1)),
            1.7,
            delta,
            num_steps=12,
            steps_per_epoch=4,
            sampling="random_bins",
            adjacency=Adjacency.REPLACE,
        )

    assert at(0.305) < at(0.3) < at(0.25)
