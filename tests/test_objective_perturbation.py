"""Objective perturbation: its δ against exact densities, and its minimum."""

import functools
import math

import jax
import numpy as np
import pytest
import scipy.stats

from dpjax import Adjacency, solvers
from dpjax.accounting import objective
from dpjax.solvers import losses

KEY = jax.random.wrap_key_data(np.array([0, 5], np.uint32))


def logistic(score, label):
    """The slope and the curvature of a logistic loss along its score."""
    p = 1 / (1 + np.exp(np.clip(label * score, -500, 500)))
    return -label * p, p * (1 - p)


def huber(score, label):
    """The same of a Huber loss of threshold 1."""
    return np.clip(score - label, -1, 1), 1.0 * (np.abs(score - label) < 1)


def log_density(theta, examples, kind, ridge, sigma):
    """The log density f[...] of the exact minimum at θ f[..., d]."""
    noise = -ridge * theta
    hessian = (
        ridge * np.ones(theta.shape[:-1])[..., None, None] * np.eye(theta.shape[-1])
    )
    for x, label, *copies in examples:
        slope, curvature = np.array(kind(theta @ x, label)) * (copies or [1])[0]
        noise = noise - slope[..., None] * x
        hessian = hessian + curvature[..., None, None] * np.outer(x, x)
    normal = -np.sum(noise**2, -1) / (2 * sigma**2)
    normal -= theta.shape[-1] * math.log(sigma * math.sqrt(2 * math.pi))
    return normal + np.log(np.linalg.det(hessian))


def exact_deltas(grid, one, other, epsilons, **of):
    """δ(ε) of two data sets in both directions, by sums over a grid of θ."""
    points, area = grid
    p, q = (np.exp(log_density(points, d, **of)) * area for d in (one, other))
    np.testing.assert_allclose([p.sum(), q.sum()], 1, atol=3e-4)
    return np.array(
        [
            max(np.maximum(p - math.exp(e) * q, 0).sum() for p, q in ((p, q), (q, p)))
            for e in epsilons
        ]
    )


def line(half, count=200_001):
    points = np.linspace(-half, half, count)
    return points[:, None], points[1] - points[0]


EPSILONS = np.array([0.3, 0.6, 1.0, 1.5, 2.5])


@pytest.mark.diagonal("kind")
@pytest.mark.parametrize("kind", [logistic, huber])
@pytest.mark.parametrize("adjacency", [Adjacency.ADD_REMOVE, Adjacency.REPLACE])
def test_delta_bounds_exact_densities_in_one_dimension(kind, adjacency):
    replaced, largest = adjacency is Adjacency.REPLACE, 0.0
    for scale, sigma, ridge, pull in [
        (1.0, 1.5, 2.0, 0.0),
        (1.0, 3.0, 0.6, 2.0),
        (2.5, 6.0, 4.0, -5.0),
        (0.4, 0.5, 0.3, 0.2),
    ]:
        x = np.array([scale])
        # Labels of Huber losses that are far away move the scores of the others.
        common = [(x, 1.0), (x, -1.0)] + ([(x, pull)] if kind is huber else [])
        smoothness = scale**2 * (0.25 if kind is logistic else 1.0)
        grid = line((4 * scale + 9 * sigma) / ridge)
        bound = objective.delta(
            sigma / scale,
            EPSILONS,
            curvature=smoothness / ridge,
            logistic=kind is logistic,
            adjacency=adjacency,
        )
        for label, other in [(1.0, -1.0), (pull, 1.0), (9.0, -9.0)]:
            if kind is logistic and abs(label) != 1:
                continue
            second = [(0.7 * x, other)] if replaced else []
            exact = exact_deltas(
                grid,
                [*common, (x, label)],
                [*common, *second],
                EPSILONS,
                kind=kind,
                ridge=ridge,
                sigma=sigma,
            )
            # The error of the sum over the grid; a Huber loss has a density that jumps.
            slack = 1e-6 if kind is logistic else 3e-4
            assert np.all(exact <= np.asarray(bound) + slack)
            largest = max(largest, *(exact / np.asarray(bound))[exact > 1e-5])
    assert largest > (0.05 if replaced else 0.2)  # the bound is not vacuous


def test_delta_bounds_exact_densities_of_opposite_features():
    # The other examples push θ along the second axis, so that both of two examples
    # with opposite first features have large gradients.
    sigma, ridge, slant = 1.5, 1.0, 0.5
    a, b = (np.array([s * math.sqrt(1 - slant**2), slant]) for s in (1, -1))
    common = [(np.array([0.0, 1.0]), -1.0, 600)]
    axes = [np.linspace(-11, 11, 201), np.linspace(-14, 0, 351)]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    area = math.prod(x[1] - x[0] for x in axes)
    given = {"kind": logistic, "ridge": ridge, "sigma": sigma}
    exact = exact_deltas(
        (points, area), [*common, (a, 1.0)], [*common, (b, 1.0)], EPSILONS, **given
    )
    bound = objective.delta(
        sigma,
        EPSILONS,
        curvature=0.25 / ridge,
        logistic=True,
        adjacency=Adjacency.REPLACE,
    )
    assert np.all(exact <= np.asarray(bound) + 1e-6)
    # One example alone could not do this: opposite gradients add up.
    assert exact[2] > 1.5 * gaussian_delta(1 / sigma, EPSILONS[2])
    assert exact[2] > 0.2 * bound[2]


def gaussian_delta(mu, epsilon):
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    return scipy.stats.norm.sf(a) - np.exp(epsilon) * scipy.stats.norm.sf(b)


def test_delta_without_curvature_is_the_sum_over_corners():
    of = {"curvature": 0.0, "other_mu": 0.3}
    one, two = np.hypot(1 / 1.7, 0.3), np.hypot(2 / 1.7, 0.3)
    e = EPSILONS
    rest = gaussian_delta(0.3, e)
    expected = {
        (True, Adjacency.ZERO_OUT): gaussian_delta(one, e) + rest,
        (False, Adjacency.ADD_REMOVE): 2 * gaussian_delta(one, e),
        (True, Adjacency.REPLACE): gaussian_delta(two, e)
        + 2 * gaussian_delta(one, e)
        + rest,
    }
    for (kind, adjacency), value in expected.items():
        result = objective.delta(1.7, e, logistic=kind, adjacency=adjacency, **of)
        np.testing.assert_allclose(result, np.minimum(value, 1), rtol=1e-5)
        assert np.all(result >= np.minimum(value, 1) * (1 - 1e-12))
    # Between corners of norms in all proportions, the bound is the largest sum.
    result = objective.delta(1.7, e, logistic=False, adjacency=Adjacency.REPLACE, **of)
    share = np.linspace(0, 1, 101)[:, None]
    squares = (2 / 1.7) ** 2 * np.array([share, 1 - share])
    sums = 2 * gaussian_delta(np.sqrt(squares + 0.3**2), e).sum(0)
    assert np.all(np.asarray(result) >= np.minimum(sums.max(0), 1) * (1 - 1e-9))


def test_infinite_traced_curvature_gives_a_delta_of_one():
    @jax.jit
    def delta(curvature, epsilon):
        return objective.delta(
            2.0,
            epsilon,
            curvature=curvature,
            logistic=True,
            adjacency=Adjacency.REPLACE,
        )

    assert [float(delta(math.inf, e)) for e in (1.0, math.inf)] == [1.0, 1.0]


def test_delta_is_below_the_published_bound():
    # Redberg et al. for an example that leaves or enters, where ε exceeds the costs.
    for noise, curvature in [(2.0, 0.2), (5.0, 0.05), (1.0, 0.5)]:
        left = EPSILONS + np.log1p(-curvature)
        published = 2 * gaussian_delta(1 / noise, left)
        regime = left > 1 / (2 * noise**2)
        for kind in (True, False):
            result = objective.delta(
                noise,
                EPSILONS,
                curvature=curvature,
                logistic=kind,
                adjacency=Adjacency.ADD_REMOVE,
            )
            assert np.all((np.asarray(result) <= published * (1 + 1e-6))[regime])


@pytest.fixture(scope="module")
def wide_run():
    """A run on data with as many features as a test of its noise needs."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 800)) / 20
    y = np.sign(rng.normal(size=60))
    loss, ridge = losses.logistic(feature_norm=1.5), 0.02 * 60
    result = solvers.objective_perturbation(
        loss,
        np.zeros(800, np.float32),
        (x, y),
        epsilon=1.3,
        delta=1e-4,
        adjacency=Adjacency.REPLACE,
        regularization=0.02,
        prior_mu=0.1,
        key=KEY,
    )
    return result, x, y, ridge


def test_minimum_solves_the_objective_with_noise_of_the_stated_scale(wide_run):
    result, x, y, ridge = wide_run
    w = np.asarray(result.params, np.float64)
    slopes, _ = logistic(x @ w, y)
    # At the minimum this is the negative linear term.
    linear = slopes @ x + ridge * w
    stddev = result.scale
    np.testing.assert_allclose(stddev, 1.5 * result.noise_multiplier, rtol=1e-6)
    # Five standard deviations of each estimate, for 800 draws.
    np.testing.assert_allclose(np.std(linear), stddev, rtol=5 / math.sqrt(1600))
    assert abs(np.mean(linear)) < 5 * stddev / math.sqrt(800)


def test_guarantee_meets_its_target(wide_run):
    guarantee = wide_run[0].guarantee
    assert guarantee.adjacency is Adjacency.REPLACE
    assert guarantee.mu is None
    assert 0.99 * 1.3 < float(guarantee.epsilon(1e-4)) <= 1.3
    assert float(guarantee.delta(1.3)) <= 1e-4
    assert guarantee.profile.delta.keywords["other_mu"] >= 0.1


@pytest.mark.slow
def test_results_have_the_density_of_the_proof():
    x, y = np.array([[0.9], [-0.5], [0.7]]), np.array([1.0, 1.0, -1.0])
    train = functools.partial(
        solvers.objective_perturbation,
        losses.logistic(feature_norm=1.0),
        np.zeros(1, np.float32),
        epsilon=2.0,
        delta=1e-2,
        adjacency=Adjacency.ZERO_OUT,
    )
    scales = []

    @jax.jit
    @jax.vmap
    def draw(key):
        result = train((x, y), key=key)
        scales.append(result.scale)
        return result.params[0]

    draws, scale = np.asarray(draw(jax.random.split(KEY, 2000))), scales[0]
    ridge = 3 * solvers.choose_regularization(2.0, smoothness=0.25, num_examples=3)
    points, _ = line((3 + 9 * scale) / ridge)
    examples = list(zip(x, y, strict=True))
    density = np.exp(log_density(points, examples, logistic, ridge, scale))
    below = np.cumsum(density) / np.sum(density)
    test = scipy.stats.kstest(draws, lambda t: np.interp(t, points[:, 0], below))
    assert test.pvalue > 1e-3  # one false alarm in 1,000, with a fixed key


def test_nonfinite_examples_contribute_zero():
    x, y = np.array([[0.5], [math.nan], [-0.2]]), np.array([0.5, 1.0, 0.1])
    train = functools.partial(
        solvers.objective_perturbation,
        losses.huber(1.0, feature_norm=1.0),
        np.zeros(1),
        epsilon=1.0,
        delta=1e-3,
        adjacency=Adjacency.ZERO_OUT,
        key=KEY,
    )
    result = train((x, y))
    assert int(result.curve.left_out) == 1
    assert np.all(np.isfinite(result.params))
    x[1], y[1] = 0.0, 0.0
    np.testing.assert_allclose(result.params, train((x, y)).params, rtol=1e-6)


def test_invalid_arguments_raise():
    data = np.ones((4, 2)), np.ones(4)
    good = {"epsilon": 1.0, "delta": 1e-3, "adjacency": Adjacency.REPLACE, "key": KEY}
    loss = losses.logistic(feature_norm=1.0)
    for change, name in [
        ({"adjacency": Adjacency.ADD_REMOVE}, "adjacency"),
        ({"regularization": 1e-6}, "regularization"),
        ({"regularization": 0.0}, "regularization"),
        ({"delta": 0.0}, "delta"),
        ({"loss": losses.softmax(3, feature_norm=1.0)}, "loss"),
        ({"params": np.zeros(3)}, "params"),
        ({"prior_mu": 5.0}, "prior_mu"),
    ]:
        given = {"loss": loss, "params": np.zeros(2), "data": data, **good, **change}
        with pytest.raises(ValueError, match=name):
            solvers.objective_perturbation(**given)
    with pytest.raises(ValueError, match="curvature"):
        objective.delta(
            1.0, 1.0, curvature=-1.0, logistic=True, adjacency=good["adjacency"]
        )
