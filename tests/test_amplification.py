"""Correlated noise amplified by random bins: the theorem, its trees and its bounds."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dpjax import Adjacency, strategies
from dpjax._matrices.strategy import StrategySpec, Toeplitz
from dpjax.accounting import allocation, correlated, events, gdp, pld, profiles
from dpjax.accounting.correlated import _bins, _trees

pytestmark = pytest.mark.optimized  # loops over thousands of rows
SIZES = {"num_steps": 24, "steps_per_epoch": 8}


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def make_epsilon_fn(how, num_steps=24, steps_per_epoch=8):
    """ε for strategies with four coefficients after the leading 1."""

    def epsilon(coefficients, noise, delta):
        return correlated.epsilon(
            Toeplitz(coefficients, jnp.zeros(0)),
            noise,
            delta,
            num_steps=num_steps,
            steps_per_epoch=steps_per_epoch,
            sampling=how,
            adjacency=Adjacency.ZERO_OUT,
        )

    return epsilon


def cumulative_shifts(coefficients, patterns, num_steps):
    """Σ_{s∈π, s<=t} |C_ts| for each pattern, f[k, T], from the dense matrix."""
    c = np.zeros((num_steps, num_steps))
    for lag, value in enumerate([1.0, *coefficients]):
        c += abs(value) * np.eye(num_steps, k=-lag)
    return np.array([c[:, list(p)].sum(axis=1) for p in patterns])


def fixed_bin_patterns(num_steps, n_b):
    return [range(place, num_steps, n_b) for place in range(n_b)]


def fresh_bin_patterns(num_steps, n_b):
    starts = range(0, num_steps, n_b)
    return list(itertools.product(*(range(s, s + n_b) for s in starts)))


def simulate_delta(moved, noise, epsilon, seed, samples):
    """E(L − e^ε)₊ and E(1 − e^ε L)₊ from samples, with their standard errors.

    The former under P, where it is E(1 − e^ε / L)₊: the pattern is drawn first.
    """
    rng = np.random.default_rng(seed)
    moved = moved / noise
    half = np.sum(moved**2, axis=1) / 2
    z = rng.standard_normal((samples, moved.shape[1]))
    rows = []
    for sign in (-1, 1):
        x = z if sign > 0 else z + moved[rng.integers(len(moved), size=samples)]
        logs = scipy.special.logsumexp(x @ moved.T - half, axis=1) - np.log(len(moved))
        terms = -np.expm1(np.minimum(epsilon + sign * logs, 0.0))
        rows.append((terms.mean(), terms.std() / np.sqrt(samples)))
    return rows


def expectation(k, weights, strikes):
    """E(Σ_i w_i exp(X_i − K_ii/2) − strike)₊ for two Gaussians, on an even grid."""
    root = np.linalg.cholesky(k + 1e-12 * np.eye(2))
    z = np.linspace(-9, 9, 1201)
    density = scipy.stats.norm.pdf(z) * (z[1] - z[0])
    x = root @ np.stack([g.ravel() for g in np.meshgrid(z, z, indexing="ij")])
    ratio = weights @ np.exp(x - np.diag(k)[:, None] / 2)
    mass = np.outer(density, density).ravel()
    return np.array([np.sum(mass * np.maximum(ratio - s, 0.0)) for s in strikes])


@pytest.mark.slow  # a theorem: it calls no code of dpjax
def test_larger_covariances_dominate_in_convex_order():
    rng = np.random.default_rng(0)
    strikes = np.array([0.3, 0.8, 1.2, 3.0])
    for _ in range(8):
        a = rng.normal(size=(2, 2)) * rng.uniform(0.2, 1.0)
        k = a @ a.T
        more = np.diag(rng.uniform(0, 0.4, 2))
        more[0, 1] = more[1, 0] = rng.uniform(0, np.sqrt(more[0, 0] * more[1, 1]))
        weights = rng.dirichlet([1, 1])
        below = expectation(k, weights, strikes)
        above = expectation(k + more, weights, strikes)
        assert np.all(below <= above + 1e-6)
        if more.max() > 0.05:
            assert np.any(below < above - 1e-5)


@pytest.mark.slow  # a theorem, likewise
def test_adaptive_gradients_never_exceed_aligned_ones():
    """Two steps, three patterns; the second step depends on the first output."""
    rng = np.random.default_rng(1)
    z = np.linspace(-8, 8, 801)
    density = scipy.stats.norm.pdf(z) * (z[1] - z[0])
    mass = np.outer(density, density)
    strikes = np.array([0.4, 0.9, 1.3, 2.5])

    def divergences(first, second, weights):
        """For first f[π] and second f[π, z₁]."""
        ratio = sum(
            w
            * np.exp(a * z - a * a / 2)[:, None]
            * np.exp(b[:, None] * z[None] - b[:, None] ** 2 / 2)
            for w, a, b in zip(weights, first, second, strict=True)
        )
        return np.array([np.sum(mass * np.maximum(ratio - s, 0)) for s in strikes])

    for _ in range(5):
        c = rng.uniform(0.2, 1.2, (3, 2)) * (rng.uniform(size=(3, 2)) < 0.8)
        weights = rng.dirichlet([1, 1, 1])
        aligned = divergences(c[:, 0], c[:, 1:] * np.ones_like(z), weights)
        for _ in range(5):
            first = c[:, 0] * rng.uniform(-1, 1, 3)
            cuts = np.digitize(z, np.sort(rng.normal(size=4)))
            second = c[:, 1:] * rng.choice([-1, 1, 0.3, 1], (3, 5))[:, cuts]
            # The kinks of the steps, too, are integrated to 1e-3 of the differences.
            assert np.all(divergences(first, second, weights) <= aligned + 2e-4)


@functools.partial(jax.jit, static_argnums=(1, 2))
def covariances_and_trees(strategy, num_steps, n_b):
    """Coefficients, covariances by gap, the trees that bound these, and log E L²."""
    by_gap = _bins.random_bins(strategy, num_steps, n_b).by_gap
    trees = _trees.candidates(by_gap, n_b)
    squares = jax.vmap(lambda tree: _trees.log_square(tree, by_gap, n_b))(trees)
    return strategy.coefficients(num_steps), by_gap, trees, squares


@pytest.mark.parametrize(
    "n_b", [37, *(pytest.param(x, marks=pytest.mark.matrix) for x in (1, 2, 3, 8, 100))]
)
def test_tree_covariances_dominate_exact_covariances(n_b):
    num_steps = 3 * n_b - 1
    for decay in (0.0, 0.5, 0.9):
        result = covariances_and_trees(strategies.geometric(decay), num_steps, n_b)
        coefficients, by_gap, trees, squares = jax.tree.map(np.asarray, result)
        shifts = cumulative_shifts(
            coefficients[1:], fixed_bin_patterns(num_steps, n_b), num_steps
        )
        exact = shifts @ shifts.T
        gaps = np.abs(np.arange(n_b)[:, None] - np.arange(n_b))
        gaps = np.minimum(gaps, n_b - gaps)
        assert np.all(exact <= by_gap[gaps] * (1 + 1e-12))
        assert np.all(by_gap[0] <= np.max(exact) * (1 + 1e-9))
        fits = np.flatnonzero(trees.copies)
        assert fits.size
        for i in fits:
            shared = assert_tree_dominates(exact, by_gap, *(x[i] for x in trees))
            np.testing.assert_allclose(squares[i], np.log(np.mean(np.exp(shared))))


def assert_tree_dominates(exact, by_gap, gap, joins, copies, apart):
    """A tree's covariances are at least the exact ones, for each rotation of it."""
    n_b = len(exact)
    block = np.zeros(1, int)
    shared = by_gap[:1, None]  # K′ within the block
    at = lambda g: by_gap[min(int(g), by_gap.size - 1)]  # noqa: E731
    for g in gap[:joins]:
        block = np.concatenate([block, block + block[-1] + g])
        shared = np.kron(np.eye(2), shared - at(g)) + at(g)
    places = block + (block[-1] + apart) * np.arange(copies)[:, None]
    places = places.ravel() % n_b
    assert len(set(places.tolist())) == places.size
    if copies > 1:
        shared = np.kron(np.eye(copies), shared - at(apart)) + at(apart)
    for turn in range(n_b):
        turned = (places + turn) % n_b
        assert np.all(exact[np.ix_(turned, turned)] <= shared * (1 + 1e-12))
    return shared


def random_setting(rng):
    coefficients = rng.uniform(-0.3, 1.0) ** np.arange(1, 5) * rng.choice([1, -1, 1, 1])
    if rng.uniform() < 0.3:
        coefficients = rng.uniform(-0.6, 0.9, 4)
    return coefficients, 10 ** rng.uniform(-0.1, 0.7), 10 ** rng.uniform(-2.5, -1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["random_bins", "fresh_bins"])
def test_epsilon_bounds_hold_in_simulations(how, compiled):
    """34 settings, both orders: at six standard errors a false alarm in 1e6 in all."""
    rng = np.random.default_rng(4)
    sizes = (24, 8) if how == "random_bins" else (12, 4)
    patterns = (fixed_bin_patterns if how == "random_bins" else fresh_bin_patterns)(
        *sizes
    )
    tight = []
    for seed in range(24 if how == "random_bins" else 10):
        coefficients, noise, delta = random_setting(rng)
        epsilon = float(make_epsilon_fn(how, *sizes)(coefficients, noise, delta))
        shifts = cumulative_shifts(coefficients, patterns, sizes[0])
        rows = simulate_delta(shifts, noise, epsilon, seed, 40_000)
        case = coefficients, noise, delta, epsilon, rows
        assert all(mean - 6 * error <= delta for mean, error in rows), case
        tight.append(max(mean for mean, _ in rows) / delta)
    # The bounds are not vacuous: half of them are within this factor of the true δ.
    assert np.median(tight) > (0.1 if how == "random_bins" else 0.01)


@pytest.mark.slow
def test_epsilon_bound_holds_in_one_simulation():
    """One case of the slow test; it would catch a squared δ or halved noise."""
    coefficients, noise, delta = 0.5 ** np.arange(1, 5), 2.3, 0.01
    epsilon = float(make_epsilon_fn("random_bins")(coefficients, noise, delta))
    shifts = cumulative_shifts(coefficients, fixed_bin_patterns(24, 8), 24)
    rows = simulate_delta(shifts, noise, epsilon, 0, 100_000)
    # A false alarm in 1e6 at five standard errors.
    assert all(mean - 5 * error <= delta for mean, error in rows)
    assert max(mean for mean, _ in rows) > 0.2 * delta
    unamplified = correlated.mu(
        strategies.banded([1.0, *coefficients]),
        noise,
        order="fixed",
        adjacency=Adjacency.ZERO_OUT,
        **SIZES,
    )
    assert epsilon < 0.8 * float(gdp.epsilon(unamplified, delta))


@pytest.mark.slow  # a program for each of the two accounts
def test_independent_noise_equals_random_allocation():
    nothing = np.zeros(4)
    # Fixed bins: one of eight steps in all three epochs, as once with √3 times less
    # noise. Fresh bins: three epochs of allocation.
    for noise in (0.9, 2.0):
        once = float(allocation.epsilon(noise / np.sqrt(3), 1e-5, num_steps=8))
        got = float(make_epsilon_fn("random_bins")(nothing, noise, 1e-5))
        np.testing.assert_allclose(got, once, rtol=3e-3)
        anew = allocation.epsilon(noise, 1e-5, num_steps=8, num_epochs=3)
        got = float(make_epsilon_fn("fresh_bins")(nothing, noise, 1e-5))
        np.testing.assert_allclose(got, float(anew), rtol=3e-3)


# Noise multipliers needed at δ = 1e-5 by Monte Carlo, to about 1 %, with 100 steps per
# epoch and 10 epochs, and the largest excess of the noise that the bound requires.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("decay", "target", "simulated", "excess"),
    [
        (0.3, 1.0, 2.94, 1.05),
        (0.3, 4.0, 1.88, 1.03),
        (0.5, 1.0, 3.42, 1.06),
        (0.5, 4.0, 2.08, 1.04),
        (0.7, 1.0, 4.81, 1.09),
        (0.7, 4.0, 2.59, 1.05),
    ],
)
def test_epsilon_bound_is_close_to_simulated_noise(
    decay, target, simulated, excess, compiled
):
    def epsilon(noise):
        return correlated.epsilon(
            strategies.geometric(decay),
            noise,
            1e-5,
            num_steps=1000,
            steps_per_epoch=100,
            sampling="random_bins",
            adjacency=Adjacency.ADD_REMOVE,
        )

    assert epsilon(excess * simulated) <= target
    assert epsilon(0.98 * simulated) > target


@pytest.mark.slow
def test_runs_of_all_sizes_share_one_compiled_program(compiled):
    def epsilon(how, *sizes):
        return float(make_epsilon_fn(how, *sizes)(np.full(4, 0.1), 2.0, 1e-5))

    assert 0 < epsilon("random_bins") < 10
    programs = _bins._epsilon._cache_size()
    assert programs > 0
    for how, sizes in itertools.product(
        ["random_bins", "fresh_bins"], [(24, 8), (9, 3), (5, 1), (5, 7)]
    ):
        assert 0 < epsilon(how, *sizes) < 10
    assert _bins._epsilon._cache_size() == programs


@pytest.mark.slow
def test_varying_noise_costs_the_cheaper_of_minimum_noise_and_known_steps():
    sizes = {**SIZES, "adjacency": Adjacency.ZERO_OUT}
    shape = strategies.banded([1.0, 0.5, 0.25, 0.0, 0.0])
    of_least = float(make_epsilon_fn("random_bins")(shape.numerator, 2.0, 1e-5))
    # Slightly more noise at half of the steps; and so much more noise that the bound
    # for known steps is the smaller one.
    for factors, hidden in (
        ([0.5] * 12 + [0.6] * 12, True),
        ([0.5] + [2.0] * 23, False),
    ):
        varied = strategies.scaled(shape, np.asarray(factors))
        got = correlated.epsilon(varied, 4.0, 1e-5, sampling="random_bins", **sizes)
        known = float(correlated.epsilon(varied, 4.0, 1e-5, sampling="fixed", **sizes))
        assert (of_least < known) == hidden
        np.testing.assert_allclose(float(got), min(of_least, known), rtol=1e-6)


@pytest.mark.slow
def test_cyclic_poisson_equals_poisson_sampling_of_blocks():
    sizes = {"num_steps": 30, "steps_per_epoch": 10, "sampling": "cyclic_poisson"}
    for adjacency in Adjacency:
        got = correlated.epsilon(
            strategies.banded([1.0, 0.75, -0.5]),
            1.6,
            1e-5,
            adjacency=adjacency,
            **sizes,
        )
        # ‖(1, 3/4, −1/2)‖² = 29/16, three bands, ten blocks.
        step = pld.poisson_gaussian(1.6 / np.sqrt(29 / 16), 0.3, adjacency=adjacency)
        expected = float(pld.epsilon(pld.compose(step, 10), 1e-5))
        assert expected <= got <= expected * (1 + 1e-9)
    plain = correlated.epsilon(
        strategies.independent(), 1.6, 1e-5, adjacency=Adjacency.ZERO_OUT, **sizes
    )
    step = pld.poisson_gaussian(1.6, 0.1, adjacency=Adjacency.ZERO_OUT)
    expected = float(pld.epsilon(pld.compose(step, 30), 1e-5))
    np.testing.assert_allclose(float(plain), expected, rtol=1e-9)


@pytest.mark.parametrize("order", ["fixed", "reshuffled", "separated"])
def test_epsilon_without_amplification_follows_from_mu(order):
    common = {**SIZES, "adjacency": Adjacency.REPLACE}
    strategy = strategies.geometric(0.6)
    got = correlated.epsilon(strategy, 3.0, 1e-6, sampling=order, **common)
    mu = correlated.mu(strategy, 3.0, order=order, **common)
    assert float(got) == float(gdp.epsilon(mu, 1e-6))


@functools.cache  # two tests share the program
def epsilon_and_slope_fn():
    """A jitted function for ε of random bins and its derivative by noise."""
    return jax.jit(jax.value_and_grad(make_epsilon_fn("random_bins"), argnums=1))


@pytest.mark.slow
def test_derivative_by_noise_matches_finite_differences():
    coefficients = 0.4 ** np.arange(1, 5)
    (low, _), (_, slope), (high, _) = (
        epsilon_and_slope_fn()(coefficients, noise, 1e-4) for noise in (1.4, 1.5, 1.6)
    )
    np.testing.assert_allclose(slope, (high - low) / 0.2, rtol=0.03)


def test_invalid_arguments_raise():
    def epsilon(strategy=strategies.geometric(0.5), noise=1.0, **changes):  # noqa: B008
        common = {
            **SIZES,
            "sampling": "random_bins",
            "adjacency": Adjacency.ZERO_OUT,
            **changes,
        }
        return correlated.epsilon(strategy, noise, 1e-5, **common)

    with pytest.raises(ValueError, match="strategy must not be a tree"):
        epsilon(strategies.tree(0.9))
    with pytest.raises(ValueError, match="strategy must be banded"):
        epsilon(sampling="cyclic_poisson")
    with pytest.raises(ValueError, match=r"sampling must be one of .*'poisson'"):
        epsilon(sampling="poisson")
    with pytest.raises(ValueError, match=r"noise_multiplier must be positive.*-1\.0"):
        epsilon(noise=-1.0)
    for how in ("random_bins", "fresh_bins"):
        promised = jax.eval_shape(make_epsilon_fn(how), np.zeros(4), np.nan, 1e-5)
        assert (promised.shape, promised.dtype) == ((), jnp.float64)


@pytest.mark.slow
def test_invalid_traced_values_give_infinity():
    assert epsilon_and_slope_fn()(np.zeros(4), np.nan, 1e-5)[0] == jnp.inf

    @jax.jit  # the run contains an example with a probability of 1/10, below delta
    def epsilon(noise_multiplier):
        return correlated.epsilon(
            strategies.geometric(0.5),
            noise_multiplier,
            0.5,
            num_steps=1,
            steps_per_epoch=10,
            sampling="random_bins",
            adjacency=Adjacency.ZERO_OUT,
        )

    values = [float(epsilon(noise)) for noise in (np.nan, -1.0, 0.0, 1.0)]
    assert values == [np.inf, np.inf, np.inf, 0.0]


def test_profile_of_bins_counts_the_whole_strategy():
    def epsilon_of(noise, spec):
        run = events.RandomBins(noise, spec, 9, 5, 50, 50, False, Adjacency.ZERO_OUT)
        return float(profiles.of(run).epsilon(1e-5))

    # Half of the noise in one step counts like half of the noise in every step.
    factors = (1.0,) * 8 + (0.5,)
    quieter = epsilon_of(4.0, StrategySpec(factors=factors))
    np.testing.assert_allclose(quieter, epsilon_of(2.0, None), rtol=1e-6)
    with pytest.raises(ValueError, match="strategy must not be a tree"):
        epsilon_of(4.0, StrategySpec(tree_decay=0.9))
