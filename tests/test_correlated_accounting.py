"""Correlated noise: sensitivities against brute force, errors against matrices."""

import functools
import itertools

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy.linalg import toeplitz

from dpjax import Adjacency, strategies, workloads
from dpjax.accounting import correlated, gdp

# Strategies, and the allowed ratio of a reshuffled bound to the brute force.
STRATEGIES = {
    "independent": (strategies.independent(), 1.002),
    "geometric": (strategies.geometric(0.5), 1.002),
    "slow": (strategies.geometric(0.98), 1.002),
    "one pole": (strategies.rational([0.3], [0.9]), 1.002),
    "the other way": (strategies.rational([0.9], [-0.3]), 1.05),
    "two poles": (strategies.rational([0.5, 0.8], [0.7, 0.99]), 1.05),
    "three poles": (strategies.rational([0.2, 0.5, 0.9], [0.4, 0.8, 0.998]), 1.05),
    "banded": (strategies.banded([1.0, 0.6, 0.3, 0.1]), 1.05),
    "signed": (strategies.banded([1.0, -0.6, 0.3, -0.1]), 1.05),
    "inverse": (strategies.banded_inverse([1.0, -0.5, -0.1, -0.05]), 1.05),
    "signed inverse": (strategies.banded_inverse([1.0, 0.5, -0.2, 0.1]), 1.05),
}
SHAPES = [(5, 1), (7, 9), (13, 4), (24, 8), (38, 8)]


def toeplitz_matrix(coefficients):
    return np.tril(toeplitz(np.asarray(coefficients, np.float64)))


def participation_patterns(order, num_steps, n_b):
    if order == "fixed":
        return [range(o, num_steps, n_b) for o in range(min(n_b, num_steps))]
    if order == "reshuffled":
        starts = range(0, num_steps, n_b)
        epochs = [range(s, min(s + n_b, num_steps)) for s in starts]
        return list(itertools.product(*epochs))

    def separated_patterns(start):
        """Patterns to which no further step can be added at the end."""
        for first in range(start, min(start + n_b, num_steps)):
            for others in (
                separated_patterns(first + n_b) if first + n_b < num_steps else [()]
            ):
                yield (first, *others)

    return list(separated_patterns(0))


def subsets_of(patterns, most):
    """All subsets of patterns with `most` steps; entries of |CᵀC| are at least 0."""
    return {s for p in patterns for s in itertools.combinations(p, min(most, len(p)))}


def brute_force_sensitivity(c, order, num_steps, n_b, most=None):
    """max_π Σ |(CᵀC)_st| for a matrix C, or for the coefficients of a Toeplitz one."""
    c = toeplitz_matrix(c) if c.ndim == 1 else np.asarray(c)
    gram = np.abs(c.T @ c)
    groups = {}
    patterns = participation_patterns(order, num_steps, n_b)
    for pattern in patterns if most is None else subsets_of(patterns, most):
        groups.setdefault(len(pattern), []).append(tuple(pattern))
    best = 0.0
    for group in map(np.array, groups.values()):
        pairs = gram[group[:, :, None], group[:, None, :]]
        best = max(best, pairs.sum(axis=(1, 2)).max())
    return np.sqrt(best)


def mu(strategy, noise_multiplier=1.0, *, order="fixed", num_steps, n_b, **kwargs):
    return correlated.mu(
        strategy,
        noise_multiplier,
        num_steps=num_steps,
        steps_per_epoch=n_b,
        order=order,
        adjacency=kwargs.get("adjacency", Adjacency.ZERO_OUT),
        max_participations=kwargs.get("most"),
    )


def stack_strategies(shapes, length):
    """One batched strategy, its coefficients padded with zeros to f[b, length]."""

    def padded_field(field):
        made = [np.asarray(getattr(x, field)) for x in shapes]
        return np.array([np.pad(x, (0, length - x.size)) for x in made])

    return strategies.Toeplitz(padded_field("numerator"), padded_field("denominator"))


@functools.partial(jax.jit, static_argnums=(1, 2))
def map_over_strategies(strategy, method, num_steps):
    """The results of a method for each strategy of a batch, in one program."""
    return jax.vmap(lambda one: getattr(one, method)(num_steps))(strategy)


# Strategies whose state is at most one vector are accounted for by separate code, so
# the others are not padded together with them.
OF_ONE = [x for x, (made, _) in STRATEGIES.items() if made.num_vectors <= 1]
OF_MORE = [x for x in STRATEGIES if x not in OF_ONE]


@pytest.mark.diagonal("order")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ["fixed", "reshuffled", "separated"])
@pytest.mark.parametrize("names", [OF_ONE, OF_MORE], ids=["one", "more"])
def test_sensitivity_bounds_hold_for_all_patterns_and_are_close(
    names, order, shape, x64
):
    num_steps, n_b = shape
    stacked = stack_strategies(
        [STRATEGIES[x][0] for x in names], 1 if names is OF_ONE else 3
    )
    bounds = np.asarray(mu(stacked, 2.5, order=order, num_steps=num_steps, n_b=n_b))
    coefficients = np.asarray(map_over_strategies(stacked, "coefficients", num_steps))
    for name, c, bound in zip(names, coefficients, bounds, strict=True):
        slack = STRATEGIES[name][1]
        exact = brute_force_sensitivity(c, order, num_steps, n_b) / 2.5
        assert bound >= exact * (1 - 1e-15), name
        monotone = np.all(np.diff(c) <= 0) and np.all(c >= 0)
        tight = order == "fixed" or (order == "separated" and monotone)
        most = 1 + 1e-9 if tight else slack if monotone else 1.3
        assert bound <= exact * most, name


@pytest.mark.diagonal("order")
@pytest.mark.parametrize(("shape", "most"), [((13, 3), 2), ((11, 2), 4), ((16, 5), 1)])
@pytest.mark.parametrize("order", ["fixed", "reshuffled", "separated"])
@pytest.mark.parametrize("names", [OF_ONE, OF_MORE], ids=["one", "more"])
def test_limited_participation_bounds_hold_for_all_subsets_and_are_close(
    names, order, shape, most, x64
):
    num_steps, n_b = shape
    stacked = stack_strategies(
        [STRATEGIES[x][0] for x in names], 1 if names is OF_ONE else 3
    )
    common = {"order": order, "num_steps": num_steps, "n_b": n_b}
    bounds = np.asarray(mu(stacked, 2.5, most=most, **common))
    assert np.all(bounds < np.asarray(mu(stacked, 2.5, **common)))
    coefficients = np.asarray(map_over_strategies(stacked, "coefficients", num_steps))
    for name, c, bound in zip(names, coefficients, bounds, strict=True):
        exact = brute_force_sensitivity(c, order, num_steps, n_b, most) / 2.5
        assert bound >= exact * (1 - 1e-15), name
        monotone = np.all(np.diff(c) <= 0) and np.all(c >= 0)
        slack = STRATEGIES[name][1] if order == "reshuffled" else 1 + 1e-9
        assert bound <= exact * (slack if monotone else 1.5), name


@pytest.mark.diagonal("order")
@pytest.mark.parametrize("order", ["fixed", "reshuffled", "separated"])
def test_limited_participation_bounds_hold_for_growing_strategies(order, x64):
    num_steps, n_b, most = 13, 3, 3
    stacked = stack_strategies(GROWING, 1)
    bounds = np.asarray(mu(stacked, order=order, num_steps=13, n_b=3, most=most))
    coefficients = np.asarray(map_over_strategies(stacked, "coefficients", num_steps))
    for strategy, c, bound in zip(GROWING, coefficients, bounds, strict=True):
        exact = brute_force_sensitivity(c, order, num_steps, n_b, most)
        assert bound >= exact * (1 - 1e-15), strategy


@pytest.mark.diagonal("order")
@pytest.mark.parametrize("order", ["fixed", "reshuffled", "separated"])
def test_limited_participation_bounds_hold_for_scaled_strategies(order, x64):
    factors = np.stack([np.exp(0.2 * np.arange(13)), FACTORS[:13]])
    toeplitz = strategies.Toeplitz(np.zeros((2, 0)), np.full((2, 1), -0.6))
    stacked = strategies.Scaled(toeplitz, factors)
    bounds = np.asarray(mu(stacked, order=order, num_steps=13, n_b=3, most=3))
    matrices = toeplitz_matrix(0.6 ** np.arange(13)) / factors[:, None]
    exact = [brute_force_sensitivity(c, order, 13, 3, most=3) for c in matrices]
    assert np.all(bounds >= np.array(exact) * (1 - 1e-15))
    # Weights that fall make the first steps the worst, where the bound is close.
    assert bounds[0] <= exact[0] * (1.2 if order == "reshuffled" else 1 + 1e-9)


def test_limits_of_participation_are_checked():
    usual = {"num_steps": 12, "n_b": 4}
    geometric = strategies.geometric(0.5)
    assert mu(geometric, **usual, most=3) == mu(geometric, **usual)
    for most in (0, 1.5, True):
        with pytest.raises(ValueError, match="max_participations"):
            mu(geometric, **usual, most=most)
    with pytest.raises(ValueError, match="max_participations"):
        mu(strategies.tree(0.9), **usual, most=2)


# Column factors, constant in each epoch or arbitrary.
FACTORS = np.exp(np.random.default_rng(5).normal(size=38))
SCALED = {
    "independent": strategies.independent(),
    "geometric": strategies.geometric(0.6),
    "two poles": strategies.rational([0.5, 0.8], [0.7, 0.99]),
    "signed": strategies.banded([1.0, -0.6, 0.3, -0.1]),
}


@pytest.mark.diagonal("order")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ["fixed", "reshuffled", "separated"])
@pytest.mark.parametrize(
    "names", [("independent", "geometric"), ("two poles", "signed")]
)
def test_scaled_strategy_bounds_hold_for_all_patterns(names, order, shape, x64):
    num_steps, n_b = shape
    factors = FACTORS[:num_steps]
    by_epoch = np.repeat(factors, n_b)[:num_steps]
    made = [
        strategies.scaled(SCALED[name], columns)
        for name in names
        for columns in (factors, by_epoch)
    ]
    shapes = stack_strategies(
        [x.strategy for x in made], 1 if "geometric" in names else 3
    )
    stacked = strategies.Scaled(shapes, np.array([x.factors for x in made]))
    matrices = np.asarray(map_over_strategies(stacked, "matrix", num_steps))
    bounds = np.asarray(mu(stacked, 2.5, order=order, num_steps=num_steps, n_b=n_b))
    slacks = [1e-9, 0.1] * len(names)
    for c, bound, slack in zip(matrices, bounds, slacks, strict=True):
        exact = brute_force_sensitivity(c, order, num_steps, n_b) / 2.5
        assert bound >= exact * (1 - 1e-15)
        tight = order == "fixed" or (order == "reshuffled" and slack == 0.1)
        assert not tight or bound <= exact * (1 + slack)


@pytest.mark.diagonal("order")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("order", "slack"), [("fixed", 1e-12), ("reshuffled", 0.1)])
def test_tree_bounds_hold_for_all_patterns(order, slack, shape, x64):
    num_steps, n_b = shape
    decays = [strategies.tree(x).decay for x in (0.0, 0.75, 0.984375)]
    stacked = strategies.Tree(np.array(decays))
    matrices = np.asarray(map_over_strategies(stacked, "matrix", num_steps))
    bounds = np.asarray(mu(stacked, 2.5, order=order, num_steps=num_steps, n_b=n_b))
    for c, bound in zip(matrices, bounds, strict=True):
        exact = brute_force_sensitivity(c, order, num_steps, n_b) / 2.5
        assert exact * (1 - 1e-15) <= bound <= exact * (1 + slack)
    with pytest.raises(ValueError, match="order"):
        mu(strategies.tree(0.75), order="separated", num_steps=num_steps, n_b=n_b)


def test_mu_of_independent_noise_equals_composition(x64):
    composed = gdp.compose(np.full(10, 1 / 0.7))
    for order in ("fixed", "reshuffled", "separated"):
        value = mu(strategies.independent(), 0.7, order=order, num_steps=95, n_b=10)
        np.testing.assert_allclose(value, composed, rtol=1e-9)


def test_mu_doubles_under_replace_adjacency(x64):
    options = {"num_steps": 50, "n_b": 7}
    one = mu(strategies.geometric(0.6), 3.0, **options)
    two = mu(strategies.geometric(0.6), 3.0, adjacency=Adjacency.REPLACE, **options)
    np.testing.assert_allclose(two, 2 * float(one), rtol=1e-12)


# Strategies, and the allowed relative excess that rounding of their series causes.
ROUNDED = {
    "one pole": (strategies.geometric(0.98), 1e-11),
    "three poles": (strategies.rational([0.2, 0.5, 0.9], [0.4, 0.8, 0.998]), 1e-8),
    "inverse": (strategies.banded_inverse([1.0, -0.5, -0.1, -0.05]), 1e-10),
    "equal poles": (strategies.rational([0.0] * 8, [0.7] * 8), 1e-4),
    "opposite": (strategies.rational([-0.9] * 6, [0.8] * 6), 1e-4),
    "near poles": (strategies.rational([0.95, 0.93], [0.98, 0.97]), 1e-6),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ROUNDED)
def test_mu_is_rounded_up(name, x64):
    """Compared with the recursion in 60 digits."""
    strategy, slack = ROUNDED[name]
    num_steps, n_b = 300, 30
    n, d = ([0, *map(mpmath.mpf, map(float, x))] for x in strategy)
    with mpmath.workdps(60):
        c = []
        for t in range(num_steps):
            now = mpmath.mpf(t == 0) + (n[t] if 0 < t < len(n) else 0)
            c.append(now - sum(d[k] * c[t - k] for k in range(1, min(len(d), t + 1))))
        shifts = [sum(c[i - e] for e in range(0, i + 1, n_b)) for i in range(num_steps)]
        exact = mpmath.sqrt(sum(x * x for x in shifts)) / 3
        value = mpmath.mpf(float(mu(strategy, 3.0, num_steps=num_steps, n_b=n_b)))
        assert exact <= value <= exact * (1 + slack)


GROWING = [
    strategies.Toeplitz(np.array([n]), np.array([d]))
    for n in (0.0, -2.904, 0.5)
    for d in (2.887, -1.5, 1.5477, -1.0)
]


@pytest.mark.diagonal("order")
@pytest.mark.parametrize("shape", [(9, 3), (7, 3), (10, 4), (5, 5)])
@pytest.mark.parametrize("order", ["fixed", "reshuffled", "separated"])
def test_bounds_hold_for_growing_strategies(order, shape, x64):
    """Coefficients grow, so the first step of an epoch is the worst."""
    num_steps, n_b = shape
    stacked = stack_strategies(GROWING, 1)
    bounds = np.asarray(mu(stacked, order=order, num_steps=num_steps, n_b=n_b))
    coefficients = np.asarray(map_over_strategies(stacked, "coefficients", num_steps))
    for strategy, c, bound in zip(GROWING, coefficients, bounds, strict=True):
        assert bound >= brute_force_sensitivity(c, order, num_steps, n_b) * (
            1 - 1e-15
        ), strategy


def test_float32_mu_is_rounded_up():
    strategy, _ = STRATEGIES["three poles"]
    with jax.enable_x64(True):
        wide = mu(strategy, 3.0, num_steps=300, n_b=30)
    narrow = mu(strategy, 3.0, num_steps=300, n_b=30)
    assert narrow.dtype == jnp.float32
    assert float(wide) <= float(narrow) <= float(wide) * (1 + 2e-7)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "order",
    [
        "fixed",
        pytest.param("reshuffled", marks=pytest.mark.slow),
        pytest.param("separated", marks=pytest.mark.slow),
    ],
)
def test_derivatives_by_all_coefficients_match_differences(order, x64):
    num_steps, n_b = 29, 6
    workload = workloads.momentum_sum(0.8)

    def mu_plus_product(decay, zeros, poles, noise_multiplier):
        strategy = strategies.rational(zeros, poles)
        first = mu(
            strategies.geometric(decay),
            noise_multiplier,
            order=order,
            num_steps=num_steps,
            n_b=n_b,
        )
        second = mu(strategy, 1.0, order=order, num_steps=num_steps, n_b=n_b)
        return first + second * correlated.error(strategy, workload, num_steps)

    # Traced numbers are not rounded to float32.
    at = [np.array(x) for x in (0.7, [0.3, 0.6], [0.5, 0.9], 2.0)]
    slopes = jax.jit(jax.grad(mu_plus_product, argnums=(0, 1, 2, 3)))(*at)
    mu_plus_product = jax.jit(mu_plus_product)
    for i, slope in enumerate(slopes):
        for j in np.ndindex(slope.shape):
            step = 1e-5 * np.eye(1, max(slope.size, 1), sum(j)).reshape(slope.shape)
            up, down = ([*at[:i], at[i] + s, *at[i + 1 :]] for s in (step, -step))
            centred = (
                float(mu_plus_product(*up)) - float(mu_plus_product(*down))
            ) / 2e-5
            np.testing.assert_allclose(np.asarray(slope)[j], centred, rtol=2e-4)


def test_mu_of_batched_strategies_equals_single_values(x64):
    decays = np.array([0.0, 0.5, 0.875, 1 - 2.0**-10])  # exact in float32
    options = {"num_steps": 40, "n_b": 8, "order": "reshuffled"}
    batch = jax.jit(jax.vmap(strategies.geometric))(decays)
    noises = np.array([0.5, 1.0, 2.0, 4.0])
    pairs = zip(decays, noises, strict=True)
    each = [float(mu(strategies.geometric(d), s, **options)) for d, s in pairs]
    np.testing.assert_allclose(mu(batch, noises, **options), each, rtol=1e-9)


def test_invalid_arguments_raise():
    usual = {"num_steps": 10, "n_b": 5}
    geometric = strategies.geometric(0.5)
    for changed in ({"num_steps": 0}, {"n_b": 0}, {"order": "poisson"}):
        with pytest.raises(ValueError, match=r"num_steps|steps_per_epoch|order"):
            mu(geometric, **{**usual, **changed})
    with pytest.raises(ValueError, match="noise_multiplier"):
        mu(geometric, -1.0, **usual)
    with pytest.raises(ValueError, match="num_steps"):
        mu(strategies.banded(np.eye(1, 12)[0]), **usual)
    for nothing in (None, [0.5], strategies.Toeplitz(0.5, 0.5)):
        with pytest.raises(ValueError, match="strategy"):
            mu(nothing, **usual)
        with pytest.raises(ValueError, match="strategy"):
            correlated.error(nothing, workloads.prefix_sum(), 10)
    with pytest.raises(ValueError, match="real"):
        mu(strategies.Toeplitz(np.array([0.5j]), np.zeros(0)), **usual)
    with pytest.raises(ValueError, match="workload"):
        correlated.error(geometric, None, 10)
    assert float(mu(geometric, 0.0, **usual)) == np.inf
    traced = jax.jit(lambda s: mu(geometric, s, **usual))
    assert float(traced(-1.0)) == float(traced(np.nan)) == np.inf
    assert float(mu(geometric, np.inf, **usual)) == 0
    scaled = strategies.scaled(geometric, np.ones(9))
    for use in (mu, lambda x, **_: correlated.error(x, workloads.prefix_sum(), 10)):
        with pytest.raises(ValueError, match="factor"):
            use(scaled, **usual)
    growing = strategies.banded_inverse([1.0, -1e30])
    assert float(mu(growing, 1.0, **usual)) == np.inf


# --- errors

RATES = np.random.default_rng(0).uniform(0.1, 1.0, 37)


def momentum_matrix(decay, num_steps=37):
    return (1 - decay) * toeplitz_matrix(decay ** np.arange(num_steps))


def decayed_matrix(decay, rates, weight_decay):
    rows, now = [], np.zeros(37)
    for row, rate in zip(momentum_matrix(decay), rates, strict=True):
        now = (1 - weight_decay * rate) * now + rate * row
        rows.append(now)
    return np.array(rows)


WORKLOADS = {
    "momentum": (workloads.momentum(0.9), momentum_matrix(0.9)),
    "sums": (
        workloads.momentum_sum(0.9),
        toeplitz_matrix(np.ones(37)) @ momentum_matrix(0.9),
    ),
    "prefix": (workloads.prefix_sum(), toeplitz_matrix(np.ones(37))),
    "nesterov": (
        workloads.nesterov(0.8),
        toeplitz_matrix(np.ones(37)) @ (0.8 * momentum_matrix(0.8) + 0.2 * np.eye(37)),
    ),
    "filter": (
        workloads.toeplitz([2.0, 1.0, 0.5]),
        toeplitz_matrix([2, 1, 0.5] + [0] * 34),
    ),
    "schedule": (
        workloads.momentum(0.9, learning_rates=RATES),
        RATES[:, None] * momentum_matrix(0.9),
    ),
    "weight decay": (
        workloads.momentum_sum(0.9, learning_rates=0.5, weight_decay=0.2),
        decayed_matrix(0.9, np.full(37, 0.5), 0.2),
    ),
    "both": (
        workloads.momentum_sum(0.9, learning_rates=RATES, weight_decay=0.2),
        decayed_matrix(0.9, RATES, 0.2),
    ),
}


# Varying learning rates are handled by separate code.
VARYING = {x: any(np.size(y) > 1 for y in w[2:]) for x, (w, _) in WORKLOADS.items()}
BY_NAME = pytest.mark.parametrize(("name", "varying"), VARYING.items())


@pytest.mark.diagonal("varying")
@BY_NAME
def test_error_of_toeplitz_strategies_matches_dense_matrices(name, varying, x64):
    workload, dense = WORKLOADS[name]
    made = [STRATEGIES[x][0] for x in ("slow", "two poles", "signed")]
    errors = correlated.error(stack_strategies(made, 3), workload, 37)
    coefficients = map_over_strategies(stack_strategies(made, 3), "coefficients", 37)
    for c, got in zip(np.asarray(coefficients), np.asarray(errors), strict=True):
        want = np.linalg.norm(dense @ np.linalg.inv(toeplitz_matrix(c))) / np.sqrt(37)
        np.testing.assert_allclose(got, want, rtol=1e-9)


@pytest.mark.diagonal("varying")
@BY_NAME
def test_error_of_scaled_and_tree_strategies_matches_dense_matrices(name, varying, x64):
    workload, dense = WORKLOADS[name]
    factors = np.array(
        [strategies.scaled(x, FACTORS[:37]).factors for x in SCALED.values()]
    )
    made = [strategies.Scaled(stack_strategies(SCALED.values(), 3), factors)]
    if varying:
        with pytest.raises(ValueError, match="workload"):
            correlated.error(strategies.tree(0.875), workload, 37)
    else:
        decays = [strategies.tree(x).decay for x in (0.0, 0.875)]
        made.append(strategies.Tree(np.array(decays)))
    for batch in made:
        inverses = np.linalg.inv(map_over_strategies(batch, "matrix", 37))
        want = np.linalg.norm(dense @ inverses, axis=(1, 2)) / np.sqrt(37)
        got = correlated.error(batch, workload, 37)
        np.testing.assert_allclose(got, want, rtol=1e-9)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: workloads.momentum(1.0), "decay"),
        (lambda: workloads.momentum([0.5, 0.9]), "decay"),
        (lambda: workloads.momentum(0.5 + 0j), "decay"),
        (lambda: workloads.nesterov(np.nan), "decay"),
        (lambda: workloads.momentum(0.5, learning_rates=[[1.0]]), "learning_rates"),
        (lambda: workloads.prefix_sum(learning_rates=1j), "learning_rates"),
        (lambda: workloads.prefix_sum(learning_rates=-1.0), "learning_rates"),
        (lambda: workloads.prefix_sum(learning_rates=np.nan), "learning_rates"),
        (lambda: workloads.prefix_sum(learning_rates=None), "learning_rates"),
        (lambda: workloads.prefix_sum(weight_decay=1.5), "weight_decay"),
        (lambda: workloads.prefix_sum(weight_decay=[0.1, 0.2]), "weight_decay"),
        (lambda: workloads.toeplitz([1.0, np.nan]), "coefficients"),
        (lambda: workloads.toeplitz([0.0, 1.0]), "coefficients"),
        (lambda: workloads.toeplitz(1.0), "coefficients"),
        (lambda: workloads.toeplitz([1, 1j]), "coefficients"),
        (lambda: workloads.toeplitz("ab"), "coefficients"),
    ],
)
def test_invalid_workload_raises(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_schedule_of_another_length_raises():
    workload = workloads.momentum(0.9, learning_rates=RATES)
    with pytest.raises(ValueError, match="num_steps"):
        correlated.error(strategies.independent(), workload, 36)
