"""Random allocation: brackets against quadrature, simulation and the Gaussian."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dpjax import Adjacency
from dpjax.accounting import allocation, gdp, pld
from dpjax.accounting._numerics.convex_order import cells, spread

pytestmark = pytest.mark.optimized  # loops over thousands of rows


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


@functools.cache
def allocation_bound(name, num_steps, num_epochs=1, num_selected=1):
    """One compiled program per function: the number of steps is traced."""
    sizes = {"num_epochs": num_epochs, "num_selected": num_selected}
    fn = getattr(allocation, name)
    return lambda noise, asked: float(fn(noise, asked, num_steps=num_steps, **sizes))


@functools.cache
def delta_lower(num_steps, num_epochs=1, num_selected=1):
    """A lower bound on δ, from the distribution of which `epsilon_lower` has the ε."""
    sizes = num_steps, num_selected, num_epochs
    _, steps, epochs = allocation._single_run(1.0, *sizes)

    @jax.jit
    def bound(noise, epsilon):
        law = cells.allocation_lower_bound(
            noise, jnp.float64(steps), jnp.float64(epochs)
        )
        return cells.delta(law, epsilon, steps * epochs)

    return lambda noise, asked: float(
        bound(allocation._single_run(noise, *sizes)[0], asked)
    )


def expected_excess(factor, rest, strike):
    """E(factor e^{sZ − s²/2} + rest − strike)₊ with s in the pair (factor, s)."""
    weight, s = factor
    gap = np.maximum(strike - rest, 1e-300)
    d = (np.log(weight / gap) + s * s / 2) / s
    value = weight * scipy.stats.norm.cdf(d) - gap * scipy.stats.norm.cdf(d - s)
    return np.where(strike > rest, value, weight + rest - strike)


def exact_delta(noise, num_steps, epsilon):
    """δ(ε) in both orders, one of two or three steps taken, by sums over a fine grid.

    The last variable is integrated in closed form, so that what is summed is smooth but
    for one place: the trapezoidal rule errs by about the square of its step, 1e-6.
    """
    s = 1 / noise
    z = np.linspace(-12.0, 12.0, 4001)
    density = scipy.stats.norm.pdf(z) * (z[1] - z[0])
    ratio = np.exp(s * z - s * s / 2)
    if num_steps == 3:
        keep = slice(None, None, 4)
        pairs = ratio[keep, None] + ratio[None, keep]
        weights = 16 * density[keep, None] * density[None, keep]
    else:
        pairs, weights = ratio, density
    strikes = np.exp([epsilon, -epsilon])
    above, below = (
        np.sum(weights * expected_excess((1 / num_steps, s), pairs / num_steps, k))
        for k in strikes
    )
    # E(1 − e^ε L)₊ = e^ε (E(L − e^{−ε})₊ + e^{−ε} − 1), as E L = 1.
    return above, np.exp(epsilon) * (below + strikes[1] - 1)


@pytest.mark.diagonal
@pytest.mark.parametrize("num_steps", [2, 3])
@pytest.mark.parametrize("noise", [0.6, 1.3, 4.0])
def test_delta_bounds_of_two_and_three_steps_bracket_quadrature(num_steps, noise):
    for epsilon in np.array([0.1, 0.5, 1.5]) / noise:
        above, below = exact_delta(noise, num_steps, epsilon)
        assert above > 1e-6
        assert min(below, above) > 1e-9
        exact = max(above, below)
        upper = allocation_bound("delta", num_steps)(noise, epsilon)
        lower = delta_lower(num_steps)(noise, epsilon)
        assert lower <= exact * (1 + 1e-5), (noise, epsilon)
        assert upper >= exact * (1 - 1e-5), (noise, epsilon)
        # Two of each bound's second-order errors, (Δz)² / 6 with 1024 points.
        assert upper - lower <= 5e-3 * exact + 1e-7, (noise, epsilon)


@functools.cache
def losses_and_masses():
    """Losses of two steps in both orders from above, and their masses from below."""

    @jax.jit
    def losses_and_masses_of(noise):
        v, two, tail = 1 / jnp.square(noise), jnp.asarray(2.0), jnp.asarray(1e-14)
        above = spread.mean(spread.lognormal(v, tail, 512), two, tail)
        below = cells.mean(cells.lognormal(v, tail, 512), two, tail)
        return spread.losses(above, 2.0), below.masses

    return losses_and_masses_of


@pytest.mark.slow
@pytest.mark.parametrize("order", ["remove", "add"])
def test_delta_of_each_direction_is_bracketed(order):
    """Also in the direction with the smaller δ, which the maximum hides."""
    noise, epsilon = 0.8, 0.9
    exact = exact_delta(noise, 2, epsilon)[order == "add"]
    losses, (q, p) = jax.tree.map(np.asarray, losses_and_masses()(noise))
    row = int(order == "add")
    over = -np.expm1(np.minimum(epsilon - losses.loss[row], 0.0))
    upper = np.sum(np.exp(losses.log_mass[row]) * over) + losses.inf_mass[row]
    q, p = (q, p) if order == "remove" else (p, q)
    lower = np.sum(np.maximum(p - np.exp(epsilon) * q, 0.0))
    assert lower <= exact * (1 + 1e-6) <= upper * (1 + 2e-6)
    assert upper - lower <= 1e-2 * exact


@pytest.mark.slow  # they compile for long
def test_epsilon_bounds_bracket_published_values():
    """Brackets of other implementations, some of them by Monte Carlo."""
    for num_steps, low, high in ((100, 0.6206, 0.6220), (1000, 0.13882 - 1e-4, 0.1392)):
        upper = allocation_bound("epsilon", num_steps)(1.0, 1e-5)
        lower = allocation_bound("epsilon_lower", num_steps)(1.0, 1e-5)
        assert low <= lower <= upper <= high
        assert upper - lower <= 1e-3


def mean_of_products(x, k):
    """The mean of the products of all sets of k columns, f[n, t] to f[n]."""
    sums = [np.ones(len(x))] + [np.zeros(len(x))] * k
    for column in x.T:
        sums = [sums[0]] + [sums[j] + column * sums[j - 1] for j in range(1, k + 1)]
    return sums[k] / math.comb(x.shape[1], k)


def simulate_delta(
    noise, num_steps, num_epochs, epsilon, seed, samples=200_000, num_selected=1
):
    """δ(ε) in both orders from samples: means and their standard errors.

    E_P(1 − e^ε / L)₊ and E_Q(1 − e^ε L)₊ are means of numbers in [0, 1].
    """
    rng = np.random.default_rng(seed)
    logs = np.zeros((2, samples))
    for _ in range(num_epochs):
        z = rng.standard_normal((samples, num_steps)) / noise
        q = np.exp(z - 0.5 / noise**2)
        p = q.copy()
        p[:, :num_selected] *= np.exp(1 / noise**2)
        logs += np.log([mean_of_products(x, num_selected) for x in (p, q)])
    terms = [
        -np.expm1(np.minimum(epsilon - logs[0], 0.0)),
        -np.expm1(np.minimum(epsilon + logs[1], 0.0)),
    ]
    return [(t.mean(), t.std() / np.sqrt(samples)) for t in terms]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "num_steps", "num_epochs", "epsilon"),
    [(0.8, 30, 1, 0.5), (1.5, 7, 3, 0.4), (0.5, 50, 2, 3.0)],
)
def test_delta_bounds_bracket_simulation(noise, num_steps, num_epochs, epsilon):
    # Five standard errors: a false alarm in 1e6 for each of twelve comparisons.
    rows = simulate_delta(noise, num_steps, num_epochs, epsilon, seed=num_steps)
    upper = allocation_bound("delta", num_steps, num_epochs)(noise, epsilon)
    lower = delta_lower(num_steps, num_epochs)(noise, epsilon)
    assert all(upper >= mean - 5 * error for mean, error in rows)
    assert any(lower <= mean + 5 * error for mean, error in rows)
    assert lower <= upper <= 1.05 * lower


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("noise", "num_steps", "num_selected", "num_epochs", "epsilon", "factor"),
    [(2.0, 12, 3, 2, 0.5, 1.06), (1.3, 11, 2, 1, 0.5, 1.09), (0.7, 5, 3, 1, 2.0, 1.2)],
)
def test_delta_bounds_of_several_steps_bracket_simulation(
    noise, num_steps, num_selected, num_epochs, epsilon, factor
):
    sizes = num_steps, num_epochs
    rows = simulate_delta(
        noise, *sizes, epsilon, seed=num_steps, num_selected=num_selected
    )
    upper = allocation_bound("delta", *sizes, num_selected)(noise, epsilon)
    lower = delta_lower(*sizes, num_selected)(noise, epsilon)
    assert all(upper >= mean - 5 * error for mean, error in rows)
    assert any(lower <= mean + 5 * error for mean, error in rows)
    largest = max(mean for mean, _ in rows)
    assert upper <= factor * largest
    # Not the bound for known steps, which needs no group.
    assert upper < 0.9 * gdp.delta((num_selected * num_epochs) ** 0.5 / noise, epsilon)


def test_lower_bound_is_zero_where_rounding_may_exceed_the_masses():
    """The bound on relative rounding errors is above 1 for 1e13 copies."""

    @jax.jit
    def delta(count):
        law = cells.lognormal(jnp.asarray(1.0), jnp.asarray(1e-14), 512)
        return cells.delta(law, jnp.asarray(0.0), count)

    assert float(delta(1.0)) > 0.1
    assert float(delta(1e13)) == 0.0


def test_epsilon_of_all_steps_equals_composition_of_gaussians():
    exact = float(gdp.epsilon(math.sqrt(5 * 2) / 3.0, 1e-5))
    upper = allocation_bound("epsilon", 5, 2, num_selected=5)(3.0, 1e-5)
    lower = allocation_bound("epsilon_lower", 5, 2, num_selected=5)(3.0, 1e-5)
    assert exact <= upper <= exact * 1.001
    assert exact * 0.995 <= lower <= exact


def test_groups_of_steps_are_as_large_as_possible():
    def sizes(num_steps, num_selected):
        run = allocation.pld(1.5, num_steps=num_steps, num_selected=num_selected)
        return [(x.count, x.event.num_steps) for x in run.steps]

    assert sizes(100, 1) == [(1, 100)]
    assert sizes(100, 4) == [(4, 25)]
    assert sizes(11, 4) == [(1, 2), (3, 3)]
    assert sizes(7, 7) == [(7, 1)]


@pytest.mark.slow
def test_epsilon_of_one_step_equals_gaussian_mechanism():
    for noise, delta in ((0.7, 1e-5), (3.0, 1e-9), (20.0, 1e-3)):
        exact = float(gdp.epsilon(1 / noise, delta))
        upper = allocation_bound("epsilon", 1)(noise, delta)
        assert exact <= upper <= exact * 1.001 + 1e-9
        assert (
            exact * 0.999 <= allocation_bound("epsilon_lower", 1)(noise, delta) <= exact
        )
    exact = float(gdp.epsilon(2 / 0.9, 1e-5))
    assert exact <= allocation_bound("epsilon", 1, 4)(0.9, 1e-5) <= exact * 1.001
    assert exact * 0.999 <= allocation_bound("epsilon_lower", 1, 4)(0.9, 1e-5) <= exact


@pytest.mark.slow  # one program for each number of steps and epochs
def test_epsilon_bounds_are_close_for_all_sizes():
    rng = np.random.default_rng(3)
    sizes = [(int(10 ** rng.uniform(0, 5)), int(10 ** rng.uniform(0, 1.5)))]
    sizes += [(1, 20), (3, 1), (40, 5), (1000, 2), (70000, 30)]
    for num_steps, num_epochs in sizes:
        upper_bound = allocation_bound("epsilon", num_steps, num_epochs)
        lower_bound = allocation_bound("epsilon_lower", num_steps, num_epochs)
        for _ in range(2):
            noise, delta = 10 ** rng.uniform(-0.4, 0.8), 10 ** rng.uniform(-12, -3)
            case = noise, num_steps, num_epochs, delta
            upper, lower = upper_bound(noise, delta), lower_bound(noise, delta)
            assert lower <= upper, case
            assert upper - lower <= 0.015 * upper + 3e-4, case
            # More noise hides an example better.
            assert upper_bound(2 * noise, delta) <= upper, case
    # So do more steps.
    for num_steps in (3, 40):
        fewer, more = (allocation_bound("epsilon", n) for n in (num_steps, 81))
        for noise in (0.5, 1.0, 4.0):
            assert more(noise, 1e-6) <= fewer(noise, 1e-6) * 1.02 + 1e-3


@pytest.mark.slow  # they compile for long
def test_derivatives_are_close_to_finite_differences():
    for name, relative in (("epsilon", 0.02), ("epsilon_lower", 0.08)):
        fn = functools.partial(getattr(allocation, name), num_steps=100)
        slope = float(jax.grad(lambda s: fn(s, 1e-5))(0.9))
        difference = (float(fn(0.99, 1e-5)) - float(fn(0.81, 1e-5))) / 0.18
        np.testing.assert_allclose(slope, difference, rtol=relative + 0.02)


def allocation_and_gaussian():
    epoch = allocation.pld(1.2, num_steps=50)
    return pld.convolve(pld.compose(epoch, 3), pld.gaussian(0.2))


@pytest.mark.slow
def test_composition_with_gaussian_increases_epsilon():
    alone = allocation_bound("epsilon", 50, 3)(1.2, 1e-6)
    together = float(pld.epsilon(allocation_and_gaussian(), 1e-6))
    assert alone < together < alone + float(gdp.epsilon(0.2, 1e-7))


def test_allocation_pld_composes_with_other_plds():
    epoch, run = allocation.pld(1.2, num_steps=50), allocation_and_gaussian()
    for epsilon in (
        jax.eval_shape(pld.epsilon, run, 1e-6),
        jax.eval_shape(lambda x: allocation.epsilon(x, 1e-6, num_steps=9), 1.2),
        jax.eval_shape(lambda x: allocation.epsilon_lower(x, 1e-6, num_steps=9), 1.2),
    ):
        assert (epsilon.shape, epsilon.dtype) == ((), jnp.float64)
    assert "3 x RandomAllocation(noise_multiplier=1.2, num_steps=50, " in repr(run)
    replaced = pld.poisson_gaussian(1.0, 0.1, adjacency=Adjacency.REPLACE)
    with pytest.raises(ValueError, match="the same adjacency"):
        pld.convolve(epoch, replaced)


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match=r"noise_multiplier must be positive.*0\.0"):
        allocation.epsilon(0.0, 1e-5, num_steps=3)
    with pytest.raises(ValueError, match="num_steps must be at least 1; got 0"):
        allocation.delta(1.0, 1.0, num_steps=0)
    with pytest.raises(ValueError, match="num_epochs must be an integer; got 1.5"):
        allocation.epsilon_lower(1.0, 1e-5, num_steps=3, num_epochs=1.5)
    with pytest.raises(ValueError, match="num_selected must be at most num_steps, 3"):
        allocation.epsilon(1.0, 1e-5, num_steps=3, num_selected=4)
    with pytest.raises(ValueError, match="num_selected must be at least 1; got 0"):
        allocation.delta(1.0, 1.0, num_steps=3, num_selected=0)


@pytest.mark.slow  # they compile for long
def test_invalid_traced_values_give_vacuous_bounds():
    upper = jax.jit(lambda s: allocation.epsilon(s, 1e-5, num_steps=9))
    assert float(upper(np.nan)) == np.inf
    lower = jax.jit(lambda s: allocation.epsilon_lower(s, 1e-5, num_steps=9))
    assert float(lower(np.nan)) == 0
