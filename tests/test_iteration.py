"""Bounds on last iterates against instances with known or computed privacy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm
from test_minorant import squared_mu, squared_mu_of_best_start

from dpjax import Adjacency
from dpjax.accounting import gdp, iteration

SETTING = {
    "step_size": 0.3,
    "gradient_norm": 2.0,
    "clipped": False,
    "generalised_linear": False,
    "smoothness": 2.0,
    "weak_convexity": 0.0,
    "strong_convexity": 0.0,
    "regularization": 0.0,
    "diameter": np.inf,
    "adjacency": Adjacency.REPLACE,
}
SHAPE = {"num_epochs": 6, "batches_per_epoch": 4, "batch_size": 5.0, "order": "fixed"}


def cyclic_bounds(noise_multiplier=3.0, **changes):
    return iteration.noisy_cyclic_gd_bounds(
        noise_multiplier, **SHAPE | SETTING | changes
    )


def quadratic_mu(curvature, eta, moved, noise):
    """μ of X ↦ (1 − η a) X + moved_k + N(0, noise²) against the same without moves.

    Both last iterates are Gaussian with equal variances, so that μ is the scaled mean.
    """
    c, mean, variance = 1 - eta * curvature, 0.0, 0.0
    for shift in moved:
        mean, variance = c * mean + shift, c * c * variance + noise * noise
    return abs(mean) / np.sqrt(variance)


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_mu_of_strongly_convex_full_batches_is_exact(adjacency, x64):
    """One example's gradient gains a constant of the norm that adjacency allows."""
    if adjacency is Adjacency.ADD_REMOVE:
        curvature = {"regularization": 0.7, "smoothness": 1.3}
    else:
        curvature = {"strong_convexity": 0.7}
    for eta in (0.05, 0.3, 2 / 2.7 - 1e-9):
        for steps, noise_multiplier in ((1, 0.5), (7, 3.0), (60, 0.9)):
            setting = SETTING | curvature | {"step_size": eta, "adjacency": adjacency}
            factor = adjacency.sensitivity_factor
            truth = quadratic_mu(
                0.7,
                eta,
                [eta * factor * 2.0 / 11] * steps,
                eta * noise_multiplier * 2.0 / 11,
            )
            mu = iteration.noisy_gd_mu(
                noise_multiplier, num_steps=steps, num_examples=11, **setting
            )
            assert 0 <= float(mu) / truth - 1 <= 1e-12


def test_cyclic_mus_bound_quadratics_at_every_offset(x64):
    setting = SETTING | {"strong_convexity": 0.7}
    mus = iteration.noisy_cyclic_gd_mus(
        3.0, num_epochs=6, batches_per_epoch=4, batch_size=5.0, **setting
    )
    mus = np.asarray(mus)
    eta, unit = 0.3, 0.3 * 2.0 / 5
    for offset in range(4):
        shifts = [2 * unit * (k % 4 == offset) for k in range(24)]
        truth = quadratic_mu(0.7, eta, shifts, 3.0 * unit)
        assert truth <= mus[offset] <= 1.3 * truth
    assert np.all(np.diff(mus) > 0)
    assert mus[-1] == float(cyclic_bounds(strong_convexity=0.7).best)


def test_vectors_are_not_paired_with_positions():
    changes = {"step_size": np.full(8, 0.3), "noise_multiplier": np.full(8, 3.0)}
    for name, value in changes.items():
        run = SETTING | {"weak_convexity": 0.0, "noise_multiplier": 3.0, name: value}
        with pytest.raises(ValueError, match="must be one number"):
            iteration.noisy_cyclic_gd_mus(
                **run, num_epochs=1, batches_per_epoch=8, batch_size=5.0
            )


def test_mu_of_one_epoch_of_weakly_convex_loss_is_exact(x64):
    """A concave quadratic expands; each example is used once."""
    setting = SETTING | {"weak_convexity": 0.5}
    mus = iteration.noisy_cyclic_gd_mus(
        3.0, num_epochs=1, batches_per_epoch=8, batch_size=5.0, **setting
    )
    mus = np.asarray(mus)
    eta, unit = 0.3, 0.3 * 2.0 / 5
    for offset in range(8):
        shifts = [2 * unit * (k == offset) for k in range(8)]
        truth = quadratic_mu(-0.5, eta, shifts[offset:], 3.0 * unit)
        assert 0 <= mus[offset] / truth - 1 <= 1e-12


def test_clipped_linear_losses_attain_composition(x64):
    """Gradients of clipped linear losses are constant, so that nothing contracts."""
    for generalised_linear in (True, False):
        bounds = iteration.noisy_gd_bounds(
            3.0,
            num_steps=50,
            num_examples=5,
            **SETTING | {"clipped": True, "generalised_linear": generalised_linear},
        )
        truth = quadratic_mu(0.0, 0.3, [2.0] * 50, 3.0)
        assert 0 <= float(bounds.best) / truth - 1 <= 1e-12


def projected_distribution(drift, noise, diameter, steps, cells=400):
    """Distribution after steps x ↦ Π(x + drift + N(0, noise²)) from a midpoint.

    A transition matrix between cell centres, with the ends as atoms.
    """
    width = diameter / cells
    x = np.concatenate([[0.0], (np.arange(cells) + 0.5) * width, [diameter]])
    edges = np.arange(cells + 1) * width
    cdf = norm.cdf((edges - x[:, None] - drift) / noise)
    inner = np.diff(cdf, axis=1)
    transition = np.column_stack([cdf[:, 0], inner, 1 - cdf[:, -1]])
    law = np.zeros(cells + 2)
    law[cells // 2] = 1.0
    for _ in range(steps):
        law = law @ transition
    return law


@pytest.mark.parametrize("diameter", [0.5, 2.0])
def test_diameter_bound_holds_for_projected_drift(diameter, x64):
    """f = 0 against f′ = −x on an interval: δ(ε) from the exact distributions."""
    noise, steps = 0.6, 200
    p = projected_distribution(0.1, noise, diameter, steps)
    q = projected_distribution(0.0, noise, diameter, steps)
    # Units: η = 0.1, one example, C = 1, ZERO_OUT.
    setting = SETTING | {
        "step_size": 0.1,
        "gradient_norm": 1.0,
        "diameter": diameter,
        "adjacency": Adjacency.ZERO_OUT,
    }
    bounds = iteration.noisy_gd_bounds(6.0, num_steps=steps, num_examples=1, **setting)
    assert bounds.winner == "diameter"
    best = float(bounds.best)
    for epsilon in (0.0, 0.1, 0.3, 0.6):
        truth = max(
            np.sum(np.maximum(a - np.exp(epsilon) * b, 0)) for a, b in ((p, q), (q, p))
        )
        assert truth <= float(gdp.delta(best, epsilon))
    # At ε = 0 the bound is no more than four times the truth.
    truth = np.sum(np.abs(p - q)) / 2
    assert float(gdp.delta(best, 0.0)) <= 4 * truth


@pytest.mark.diagonal
@pytest.mark.parametrize("diameter", [0.05, 1.0, np.inf])
@pytest.mark.parametrize("convexity", ["strong", "convex", "weak"])
def test_cyclic_bounds_equal_optimal_shift_mu(convexity, diameter, x64):
    changes = {
        "strong": {"strong_convexity": 0.4},
        "convex": {},
        "weak": {"weak_convexity": 0.2},
    }[convexity]
    c = {"strong": 1 - 0.3 * 0.4, "convex": 1.0, "weak": 1 + 0.3 * 0.2}[convexity]
    unit = 0.3 * 2.0 / 5
    shifts = 2 * unit * (np.arange(24) % 4 == 3)
    best = float(cyclic_bounds(diameter=diameter, **changes).best)
    schedule = iteration.optimal_shift_mu(
        c, shifts, 3 * unit * np.ones(24), diameter=diameter
    )
    assert best == pytest.approx(float(schedule), rel=1e-12)


@pytest.mark.diagonal("c")
@pytest.mark.parametrize("epochs", [2, 3, 4])
@pytest.mark.parametrize("c", [0.7, 1.0, 1.15])
def test_reshuffled_bounds_cover_every_batch_placement(c, epochs, x64):
    eta, steps = 0.3, 3 * epochs
    unit = eta * 2.0 / 5
    changes = {
        "strong_convexity": max(1 - c, 0) / eta,
        "weak_convexity": max(c - 1, 0) / eta,
    }
    bounds = iteration.noisy_cyclic_gd_bounds(
        3.0,
        num_epochs=epochs,
        batches_per_epoch=3,
        batch_size=5.0,
        order="reshuffled",
        **SETTING | changes | {"diameter": 0.06},
    )
    free, bounded = 0.0, 0.0
    for places in itertools.product(range(3), repeat=epochs):
        s = np.zeros(steps)
        s[[3 * e + p for e, p in enumerate(places)]] = 2.0
        schedule = np.full(steps, c), s, np.full(steps, 3.0)
        free = max(free, np.sqrt(squared_mu(*schedule)))
        bounded = max(
            bounded, np.sqrt(squared_mu_of_best_start(*schedule, 0.06 / unit))
        )
    contraction, best = float(bounds.contraction), float(bounds.best)
    assert contraction >= free * (1 - 1e-12)
    assert best >= bounded * (1 - 1e-12)
    if c <= 1:
        assert contraction == pytest.approx(free, rel=1e-12)
        assert best == pytest.approx(bounded, rel=1e-12)
    else:
        assert contraction <= 1.1 * free


def test_clipping_costs_more_without_a_linear_score():
    linear = cyclic_bounds(clipped=True, generalised_linear=True, regularization=0.1)
    free = cyclic_bounds(clipped=True, generalised_linear=False, regularization=0.1)
    unclipped = cyclic_bounds(regularization=0.1)
    assert [float(x) for x in linear] == [float(x) for x in unclipped]
    best = min(float(x) for x in free)
    assert best > min(float(x) for x in linear)
    assert float(free.composition) == float(linear.composition)
    # The regulariser multiplies: (1 − ηλ) times the constant of a step of η/(1 − ηλ).
    pull = 1 - 0.3 * 0.1
    c = pull * float(
        iteration.clipped_step_lipschitz(0.3 / pull, weak_convexity=0.0, smoothness=2.0)
    )
    assert c > 1
    schedule = iteration.optimal_shift_mu(
        c, 2.0 * (np.arange(24) % 4 == 3), 3 * np.ones(24)
    )
    np.testing.assert_allclose(best, schedule, rtol=1e-6)


def test_contraction_at_the_longest_step_matches_closed_form(x64):
    at_most = cyclic_bounds(step_size=2 / 2.9, smoothness=2.9)
    assert at_most.contraction == pytest.approx(2 / 3 * np.sqrt(1 + 5 / 4), rel=1e-12)
    beyond = cyclic_bounds(step_size=1.0, weak_convexity=0.1)
    assert beyond.contraction > at_most.contraction


def test_winner_names_the_smallest_bound():
    assert cyclic_bounds(smoothness=np.inf).winner == "composition"
    assert cyclic_bounds(strong_convexity=1.0).winner == "contraction"
    assert cyclic_bounds(diameter=0.01).winner == "diameter"
    bounds = cyclic_bounds(strong_convexity=1.0, diameter=0.01)
    assert bounds.best == min(bounds)


def test_last_iterate_rdp_equals_gaussian_rdp():
    mu = cyclic_bounds(weak_convexity=0.3).best
    orders = np.array([1.5, 2.0, 32.0])
    rdp = iteration.last_iterate_rdp(
        3.0, orders, **SHAPE | SETTING | {"weak_convexity": 0.3}
    )
    np.testing.assert_allclose(rdp, orders * float(mu) ** 2 / 2, rtol=1e-6)
    with pytest.raises(ValueError, match="^orders must"):
        iteration.last_iterate_rdp(3.0, 1.0, **SHAPE | SETTING)


@pytest.mark.slow
def test_random_assignment_delta_is_the_mean_delta(x64):
    mus = np.linspace(0.1, 1.3, 40)
    for epsilon in (0.0, 0.5, 3.0):
        mean = np.mean(gdp.delta(mus, epsilon))
        result = iteration.random_assignment_delta(mus, epsilon)
        assert 0 <= result / mean - 1 <= 1e-13
    epsilon = iteration.random_assignment_epsilon(mus, 1e-5)
    assert iteration.random_assignment_delta(mus, epsilon) <= 1e-5
    assert iteration.random_assignment_delta(mus, epsilon * (1 - 1e-9)) > 1e-5
    assert epsilon < gdp.epsilon(1.3, 1e-5)
    same = iteration.random_assignment_epsilon(np.full(3, 0.8), 1e-6)
    assert same == pytest.approx(float(gdp.epsilon(0.8, 1e-6)), rel=1e-10)
    slope = jax.grad(iteration.random_assignment_epsilon)(jnp.full(3, 0.8), 1e-6)
    np.testing.assert_allclose(slope, jax.grad(gdp.epsilon)(0.8, 1e-6) / 3, rtol=1e-8)
    assert iteration.random_assignment_epsilon(np.zeros(3), 1e-6) == 0
    assert iteration.random_assignment_epsilon(np.array([0.1, np.inf]), 1e-6) == np.inf


@pytest.mark.slow
@pytest.mark.parametrize("at", ["contraction", "diameter", "expansion"])
def test_derivatives_of_epsilon_match_finite_differences(at, x64):
    changes = {
        "contraction": {"strong_convexity": 0.5},
        "diameter": {"diameter": 0.3},
        "expansion": {"clipped": True},
    }[at]
    shape = {
        "num_epochs": 6,
        "batches_per_epoch": 4,
        "batch_size": 5.0,
        "order": "fixed",
    }

    @jax.jit
    def epsilon(noise, eta, added):
        setting = SETTING | changes | {"step_size": eta, "regularization": added}
        return gdp.epsilon(
            iteration.noisy_cyclic_gd_mu(noise, **shape, **setting), 1e-5
        )

    point = np.array([3.0, 0.3, 0.05])
    slopes = jax.jit(jax.grad(epsilon, (0, 1, 2)))(*point)
    for i, slope in enumerate(slopes):
        h = 1e-6 * (np.arange(3) == i)
        difference = float(epsilon(*(point + h))) - float(epsilon(*(point - h)))
        assert slope == pytest.approx(difference / 2e-6, rel=1e-6, abs=1e-7)


@pytest.mark.matrix
def test_float32_derivatives_at_contraction_one_are_finite():
    """c = 1 exactly, where closed forms divide zero by zero."""

    def mu(added):
        return iteration.noisy_gd_mu(
            3.0,
            num_steps=40,
            num_examples=5,
            **SETTING | {"regularization": added},
        )

    def exact_mu(added):  # d/dc of (Σ c^i)²/Σ c^{2i}, by differences on one side
        c = 1 - 0.3 * added
        powers = c ** np.arange(40)
        return 2 / 3 * np.sum(powers) / np.sqrt(np.sum(powers**2))

    h = 1e-6
    expected = (-3 * exact_mu(0) + 4 * exact_mu(h) - exact_mu(2 * h)) / (2 * h)

    @jax.jit
    def derivatives(x):
        return mu(x), jax.grad(mu)(x), jax.hessian(mu)(x)

    value, first, second = map(float, derivatives(0.0))
    assert value == pytest.approx(exact_mu(0.0), rel=1e-6)
    # c = 1 is where composition is attained, so the first derivative vanishes.
    assert first == pytest.approx(expected, abs=1e-3)
    curve = (
        2 * exact_mu(0) - 5 * exact_mu(1e-3) + 4 * exact_mu(2e-3) - exact_mu(3e-3)
    ) / 1e-6
    assert second == pytest.approx(curve, rel=5e-2)
    two = jax.ShapeDtypeStruct((2,), np.float32)
    assert jax.eval_shape(jax.vmap(jax.grad(mu)), two).shape == (2,)

    def cyclic_mu(added):
        return cyclic_bounds(regularization=added, diameter=0.3).best

    # A one-sided difference to the right of 0, where the loss is strongly convex.
    ahead = (float(cyclic_mu(2e-3)) - float(cyclic_mu(1e-3))) / 1e-3
    slope = float(jax.jit(jax.grad(cyclic_mu))(0.0))
    assert slope == pytest.approx(ahead, rel=1e-2)


def test_invalid_traced_values_give_infinity():
    def traced_best(**changes):
        names = list(changes)
        return jax.jit(
            lambda *x: cyclic_bounds(**dict(zip(names, x, strict=True))).best
        )(*changes.values())

    assert float(traced_best(noise_multiplier=0.0)) == np.inf
    assert float(traced_best(step_size=-1.0)) == np.inf
    assert float(traced_best(diameter=np.nan)) == np.inf
    assert float(traced_best(smoothness=-1.0)) == np.inf
    # For a step beyond 2/M only composition holds.
    assert float(traced_best(step_size=1.2)) == float(cyclic_bounds().composition)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["weak_convexity", "regularization"])
def test_infinite_traced_curvature_gives_infinity(name):
    @jax.jit
    def bounds(value):
        setting = SETTING | {name: value}
        return (
            iteration.scheduled_cyclic_gd_mu(
                np.full(2, 3.0), batches_per_epoch=1, batch_size=5.0, **setting
            ),
            iteration.gradient_descent_sensitivity(
                num_steps=2, num_examples=5.0, **setting
            ),
            iteration.noisy_gd_mu(3.0, num_steps=2, num_examples=5.0, **setting),
        )

    assert [float(bound) for bound in bounds(np.inf)] == [np.inf] * 3


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"step_size": 1.01}, "step_size"),
        ({"step_size": 0.9, "regularization": 0.3}, "step_size"),
        ({"step_size": 0.0}, "step_size"),
        ({"diameter": 0.0}, "diameter"),
        ({"diameter": -2.0}, "diameter"),
        ({"diameter": np.nan}, "diameter"),
        ({"clipped": True, "strong_convexity": 0.1}, "strong_convexity"),
        (
            {"adjacency": Adjacency.ADD_REMOVE, "strong_convexity": 0.1},
            "strong_convexity",
        ),
        ({"strong_convexity": 3.0}, "strong_convexity"),
        ({"strong_convexity": 0.1, "weak_convexity": 0.1}, "weak_convexity"),
        ({"clipped": "yes"}, "clipped"),
        ({"generalised_linear": 1}, "generalised_linear"),
        ({"adjacency": "replace"}, "adjacency"),
        ({"num_epochs": 2.5}, "num_epochs"),
        ({"num_epochs": 0}, "num_epochs"),
        ({"batches_per_epoch": 0}, "batches_per_epoch"),
        ({"batch_size": 0}, "batch_size"),
        ({"gradient_norm": np.inf}, "gradient_norm"),
        ({"regularization": -0.1}, "regularization"),
        ({"order": "shuffled"}, "order"),
        (
            {"clipped": True, "smoothness": np.inf, "regularization": 4.0},
            "regularization",
        ),
    ],
)
def test_invalid_assumptions_raise(changes, name):
    arguments = SHAPE | SETTING | changes
    for call in (iteration.noisy_cyclic_gd_mu, iteration.noisy_cyclic_gd_bounds):
        with pytest.raises(ValueError, match=f"^{name} must"):
            call(3.0, **arguments)


def test_every_assumption_is_required():
    for name in SETTING:
        arguments = SHAPE | SETTING
        del arguments[name]
        with pytest.raises(TypeError, match=name):
            iteration.noisy_cyclic_gd_mu(3.0, **arguments)
