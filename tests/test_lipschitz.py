"""Lipschitz constants of steps against searches over losses that attain them."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.accounting.iteration import clipped_step_lipschitz, step_lipschitz


def clip_rows(g, bound=1.0):
    norm = np.linalg.norm(g, axis=-1, keepdims=True)
    return g * np.minimum(1.0, bound / np.maximum(norm, 1e-300))


def clipped_ratio(A, x, y, eta):
    """The distance after a clipped step on xᵀAx/2 over that before it."""
    d, e = x - y, clip_rows(x @ A) - clip_rows(y @ A)
    return np.linalg.norm(d - eta * e, axis=-1) / np.linalg.norm(d, axis=-1)


def test_two_dimensional_example_attains_clipped_constant():
    """The step is searched around gradients whose norm is just above the clip."""
    eta, A = 0.5, np.diag([1.0, 1e-3])
    constant = float(clipped_step_lipschitz(eta, weak_convexity=0.0, smoothness=1.0))
    assert constant == pytest.approx(1.069045, abs=1e-6)
    # Around gradients g of norm t > 1, difference quotients at nearby points.
    angle = np.linspace(0.0, np.pi, 2001)[:, None]
    best = 0.0
    for direction in np.linspace(0.0, np.pi, 721):
        g = np.stack([np.cos(angle[:, 0]), np.sin(angle[:, 0])], -1) * (1 + 1e-9)
        x = g / np.diag(A)
        y = x + 1e-6 * np.array([np.cos(direction), np.sin(direction)])
        best = max(best, np.max(clipped_ratio(A, x, y, eta)))
    assert best <= constant * (1 + 1e-6)
    assert best >= constant * (1 - 3e-3)


def max_distance(weak, smooth, eta):
    """Max of ‖d − p‖ for p in the ball with diameter [0, u], u in the ball of A d."""
    centre, radius = eta * (smooth - weak) / 2, eta * (smooth + weak) / 2
    t = np.linspace(0, np.pi, 400_001)
    x, y = centre + radius * np.cos(t), radius * np.sin(t)
    return np.max((np.hypot(2 - x, y) + np.hypot(x, y)) / 2)


@pytest.mark.parametrize(
    ("weak", "smooth", "eta"),
    [
        (0.0, 1.0, 0.5),
        (0.0, 1.0, 1.9),
        (0.3, 2.0, 0.4),
        (2.0, 2.0, 0.1),
        (1.0, 0.2, 0.5),
        (0.1, 3.0, 1.5),
        (0.0, 0.0, 1.0),
    ],
)
def test_clipped_constant_solves_its_geometric_problem(weak, smooth, eta, x64):
    constant = clipped_step_lipschitz(eta, weak_convexity=weak, smoothness=smooth)
    expected = max_distance(weak, smooth, eta)
    assert expected <= constant <= expected * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0, 1), st.floats(0.01, 3), st.floats(0.01, 2), st.integers(0, 2**31 - 1)
)
def test_clipped_quadratics_never_exceed_the_constant(weak, smooth, eta, seed):
    rng = np.random.default_rng(seed)
    rotation, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    A = rotation * rng.choice([-weak, smooth, rng.uniform(-weak, smooth)], 3)
    A = A @ rotation.T
    x = rng.normal(size=(2000, 3)) * 10 ** rng.uniform(-1, 1.5, (2000, 1))
    y = x + rng.normal(size=(2000, 3)) * 10 ** rng.uniform(-3, 1, (2000, 1))
    constant = clipped_step_lipschitz(eta, weak_convexity=weak, smoothness=smooth)
    assert np.max(clipped_ratio(A, x, y, eta)) <= constant * (1 + 1e-9)


def test_steps_on_quadratics_attain_the_unclipped_constant(x64):
    for weak, smooth, strong in [(0, 4, 1), (0.7, 3, 0), (0, 2, 0), (0, 2, 2)]:
        for eta in (0.1, 0.4, 0.9, 1.7):
            curvature = np.linspace(strong - weak, smooth, 1001)
            expected = np.max(np.abs(1 - eta * curvature))
            c = step_lipschitz(
                eta,
                smoothness=smooth,
                weak_convexity=weak,
                strong_convexity=strong,
            )
            assert expected <= c <= expected + 1e-14


def test_clipping_removes_contraction_of_strong_convexity(x64):
    """Where clipping is active a step on x²/2 translates: constant 1, not 1/2."""
    x, y, eta = 10.0, 20.0, 0.5
    stepped = [v - eta * np.clip(v, -1.0, 1.0) for v in (x, y)]
    assert abs(stepped[0] - stepped[1]) == abs(x - y)
    unclipped = step_lipschitz(eta, smoothness=1.0, strong_convexity=1.0)
    assert unclipped == pytest.approx(0.5, rel=1e-14)
    clipped = step_lipschitz(eta, smoothness=1.0)
    assert clipped == pytest.approx(1.0, rel=1e-14)
    assert clipped >= 1.0


def test_clipped_linear_score_keeps_the_unclipped_constant():
    """A logistic plus a sine of ⟨w, x⟩, clipped per example, averaged over a batch."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(5, 4))
    features *= 2 / np.linalg.norm(features, axis=1, keepdims=True)

    def gradient(w):
        score = w @ features.T
        slope = 1 / (1 + np.exp(-score)) - 0.3 + 0.2 * np.sin(score)
        return np.mean(clip_rows(slope[..., None] * features, 0.5), axis=-2)

    # The scalar curvature is within (−0.2, 0.25 + 0.2), times ‖x‖² = 4.
    for eta in (0.1, 0.5, 1.0):
        c = step_lipschitz(eta, smoothness=1.8, weak_convexity=0.8)
        w = rng.normal(size=(20000, 4)) * 3
        v = w + rng.normal(size=(20000, 4)) * 10 ** rng.uniform(-3, 1, (20000, 1))
        difference = w - eta * gradient(w) - v + eta * gradient(v)
        ratio = np.linalg.norm(difference, axis=1) / np.linalg.norm(w - v, axis=1)
        assert np.max(ratio) <= c * (1 + 1e-6)


def test_clipped_softmax_regression_is_not_a_contraction():
    """Three classes and one example with ‖x‖ = 1, so that a step acts on the logits."""
    rng = np.random.default_rng(0)
    eta, bound = 2.0, 1.0
    z = rng.normal(size=(20000, 3)) * 3
    u = z + 1e-5 * rng.normal(size=z.shape)

    def clipped_step(z):
        p = np.exp(z - np.max(z, axis=1, keepdims=True))
        p /= np.sum(p, axis=1, keepdims=True)
        return z - eta * clip_rows(p - np.array([1.0, 0, 0]), bound)

    ratio = np.linalg.norm(clipped_step(z) - clipped_step(u), axis=1) / np.linalg.norm(
        z - u, axis=1
    )
    worst = np.max(ratio)
    assert worst > 1.01
    # The curvature of this loss is at most 1/2.
    assert worst <= clipped_step_lipschitz(eta, weak_convexity=0.0, smoothness=0.5)


def test_derivatives_match_finite_differences(x64):
    def clipped(eta, weak, smooth):
        return clipped_step_lipschitz(eta, weak_convexity=weak, smoothness=smooth)

    def unclipped(eta, strong, smooth):
        return step_lipschitz(eta, smoothness=smooth, strong_convexity=strong)

    for fn, at in [
        (clipped, (0.4, 0.2, 1.3)),
        (clipped, (0.1, 3.0, 1.0)),
        (unclipped, (0.1, 0.5, 3.0)),
    ]:
        slopes = jax.jit(jax.grad(fn, (0, 1, 2)))(*at)
        for i, slope in enumerate(slopes):
            h = 1e-6 * (np.arange(3) == i)
            difference = float(fn(*(at + h))) - float(fn(*(at - h)))
            assert slope == pytest.approx(difference / 2e-6, abs=1e-8)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: step_lipschitz(0.0, smoothness=1.0), "step_size"),
        (lambda: step_lipschitz(0.1, smoothness=-1.0), "smoothness"),
        (
            lambda: step_lipschitz(0.1, smoothness=1.0, strong_convexity=2.0),
            "strong_convexity",
        ),
        (
            lambda: step_lipschitz(
                0.1, smoothness=1.0, strong_convexity=0.5, weak_convexity=0.1
            ),
            "weak_convexity",
        ),
        (
            lambda: clipped_step_lipschitz(0.1, weak_convexity=-1.0, smoothness=1.0),
            "weak_convexity",
        ),
    ],
)
def test_invalid_arguments_raise(call, name):
    with pytest.raises(ValueError, match=f"^{name} must"):
        call()


def test_unknown_or_invalid_values_give_infinity():
    assert step_lipschitz(0.1, smoothness=np.inf) == np.inf
    assert clipped_step_lipschitz(0.1, weak_convexity=0.0, smoothness=np.inf) == np.inf
    traced = jax.jit(lambda eta: step_lipschitz(eta, smoothness=1.0))
    assert traced(-1.0) == np.inf
    assert traced(np.nan) == np.inf
