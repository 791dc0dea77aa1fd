"""Random bins bounded by a chain: its covariances and its likelihood ratio."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from dpjax import Adjacency, strategies
from dpjax.accounting import correlated
from dpjax.accounting._numerics.convex_order import spread
from dpjax.accounting._numerics.pld.composition import epsilon_of
from dpjax.accounting.correlated import _bins, _chain, _trees

pytestmark = pytest.mark.optimized  # loops over thousands of rows


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


@functools.cache
def chain_delta_fn():
    """A function for δ(ε) of a chain in both orders, with all arguments traced."""

    @jax.jit
    def delta(places, variance, decay, epsilon):
        chain = _chain.Chain(places, jnp.zeros(()), variance, decay)
        states = _chain._states(chain, jnp.asarray(1e-9))
        limits = _chain._limits(chain, states, epsilon, 1)
        losses = _chain._losses(chain, states, limits)
        over = -jnp.expm1(jnp.minimum(epsilon - losses.loss, 0.0))
        return jnp.sum(jnp.exp(losses.log_mass) * over, axis=1) + losses.inf_mass

    return lambda *numbers: np.asarray(delta(*map(jnp.float64, numbers)))


@functools.cache
def best_chain_fn(n_b):
    @jax.jit
    def best_chain(strategy):
        by_gap = _bins.random_bins(strategy, 3 * n_b - 1, n_b).by_gap
        return _chain.best(by_gap, n_b)

    return best_chain


@pytest.mark.diagonal
@pytest.mark.parametrize("n_b", [2, 37])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_chain_covariances_dominate_exact_covariances(n_b, decay):
    num_steps = 3 * n_b - 1
    strategy = strategies.geometric(decay)
    c = np.abs(np.asarray(strategy.coefficients(num_steps)))
    shifts = np.zeros((n_b, num_steps))
    for place in range(n_b):
        for step in range(place, num_steps, n_b):
            shifts[place, step:] += c[: num_steps - step]
    exact = shifts @ shifts.T
    chain = best_chain_fn(n_b)(strategy)
    places = np.arange(int(chain.size))
    distance = np.abs(places[:, None] - places)
    above = float(chain.shared) + float(chain.variance) * float(chain.decay) ** distance
    for turn in range(n_b):
        turned = (places + turn) % n_b
        assert np.all(exact[np.ix_(turned, turned)] <= above * (1 + 1e-12))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variance", "decay", "epsilon"),
    [(0.7, 0.6, 0.5), (0.3, 0.9, 0.2), (2.0, 0.1, 1.5)],
)
def test_delta_of_two_states_is_a_tight_upper_bound(variance, decay, epsilon):
    z = np.linspace(-9, 9, 2401)
    weight = scipy.stats.norm.pdf(z) * (z[1] - z[0])
    root = np.sqrt(1 - decay**2)
    first = np.exp(np.sqrt(variance) * z - variance / 2)[:, None]
    other = np.sqrt(variance) * (decay * z[:, None] + root * z)
    ratio = (first + np.exp(other - variance / 2)) / 2
    mass = np.outer(weight, weight)
    exact = [
        np.sum(mass * np.maximum(ratio - np.exp(epsilon), 0.0)),
        np.sum(mass * np.maximum(1 - np.exp(epsilon) * ratio, 0.0)),
    ]
    bound = chain_delta_fn()(2, variance, decay, epsilon)
    # The reference is a sum over even points, 1e-5 off at its kink.
    assert np.all(bound >= np.multiply(exact, 1 - 1e-5))
    # States are a quarter of a standard deviation apart, and rounding to them adds a
    # sixth of the square, 1 % of the variance for each of two positions, or twice.
    assert np.all(bound <= np.multiply(exact, 1.1))


def simulate_delta(places, variance, decay, epsilon, samples, seed):
    """E(L − e^ε)₊, under P, and E(1 − e^ε L)₊, and their standard errors."""
    rng = np.random.default_rng(seed)
    distance = np.abs(np.subtract.outer(np.arange(places), np.arange(places)))
    k = variance * decay**distance
    z = rng.standard_normal((samples, places)) @ np.linalg.cholesky(k).T
    rows = []
    for sign in (-1, 1):
        x = z if sign > 0 else z + k[rng.integers(places, size=samples)]
        logs = scipy.special.logsumexp(x - variance / 2, axis=1) - np.log(places)
        terms = -np.expm1(np.minimum(epsilon + sign * logs, 0.0))
        rows.append((terms.mean(), terms.std() / np.sqrt(samples)))
    return np.array(rows).T


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "variance", "decay", "epsilon"),
    [
        (30, 1.0, 0.5, 0.5),
        (100, 0.8, 0.8, 0.7),
        (10, 3.0, 0.3, 1.0),
        (60, 0.1, 0.9, 0.1),
    ],
)
def test_chain_delta_bounds_hold_in_simulations(places, variance, decay, epsilon):
    """A false alarm in 1e8 at six standard errors."""
    mean, error = simulate_delta(places, variance, decay, epsilon, 200_000, 0)
    bound = chain_delta_fn()(places, variance, decay, epsilon)
    assert np.all(bound >= mean - 6 * error)
    # The bound is tight: the states add a few percent to variances.
    assert np.all(bound <= 1.2 * mean + 6 * error)


@pytest.mark.slow
def test_derivatives_are_finite_where_chains_give_the_best_bound():
    """Characteristic functions that round to zero here must not make slopes NaN."""

    @jax.jit
    @jax.value_and_grad  # one program for values and slopes
    def epsilon_and_slope(noise):
        return correlated.epsilon(
            strategies.geometric(0.5),
            noise,
            1e-5,
            num_steps=1000,
            steps_per_epoch=100,
            sampling="fresh_bins",
            adjacency=Adjacency.ADD_REMOVE,
        )

    (low, _), (_, slope), (high, _) = map(epsilon_and_slope, (3.26, 3.43, 3.6))
    np.testing.assert_allclose(slope, (high - low) / 0.34, rtol=0.05)


@functools.cache
def epsilon_fn(n_b):
    """A function for ε of one epoch with and without the test for the chain's use."""

    @jax.jit
    def epsilon(strategy, noise_multiplier):
        by_gap = _bins.random_bins(strategy, n_b, n_b).by_gap / noise_multiplier**2
        delta, tail, one = jnp.asarray(1e-5), jnp.asarray(1e-10), jnp.ones(())
        tree = _trees.best(by_gap, n_b, delta, one)
        law, variance = _trees.ratio(tree, by_gap, n_b, tail, spread.POINTS)
        chain, square = _chain.best(by_gap, n_b), _trees.log_square(tree, by_gap, n_b)

        def of(square):
            of_tree = epsilon_of([(spread.losses(law, 2 * n_b), one)], variance, delta)
            return _chain.smaller_epsilon(
                of_tree, square, chain, 0.0 * one, delta, tail, one
            )

        # With −inf the chain is never tried, and with inf it always is.
        return jax.lax.map(of, jnp.stack([-jnp.inf * one, square, jnp.inf * one]))

    return epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_b", "decay", "noise_multiplier", "tried"),
    [
        (20, 0.0, 0.8, False),
        (20, 0.93, 3.0, False),
        (20, 0.5, 1.2, True),
        (60, 0.7, 2.0, True),
    ],
)
def test_chain_is_left_out_only_where_it_is_no_better(
    n_b, decay, noise_multiplier, tried
):
    strategy = strategies.geometric(decay)
    tree, value, both = map(float, epsilon_fn(n_b)(strategy, noise_multiplier))
    assert value == both
    assert (both < tree) == tried
