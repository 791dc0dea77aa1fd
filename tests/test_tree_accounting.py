"""Tree accounting against brute force over all nodes, and published values."""

import functools
import itertools

import jax
import numpy as np
import pytest

from dpjax import Adjacency
from dpjax.accounting import tree as accounting
from dpjax.noise import tree

mu_of = functools.partial(accounting.momentum_mu, adjacency=Adjacency.ZERO_OUT)


def released_nodes(num_steps):
    """Every node that the cover of some prefix uses."""
    return {node for t in range(1, num_steps + 1) for node in tree.compose(1, t)}


def squared_mu(participations, num_steps, decay):
    return sum(
        sum(decay ** (z - p) for p in participations if y <= p <= z) ** 2
        for y, z in released_nodes(num_steps)
    )


def brute_force_fixed(num_steps, n_b, decay):
    return max(
        squared_mu(range(p, num_steps + 1, n_b), num_steps, decay)
        for p in range(1, n_b + 1)
    )


def brute_force_reshuffled(num_steps, n_b, decay):
    epochs = [
        range(start, min(start + n_b, num_steps + 1))
        for start in range(1, num_steps + 1, n_b)
    ]
    return max(squared_mu(p, num_steps, decay) for p in itertools.product(*epochs))


SHAPES = [(1, 1), (1, 5), (7, 3), (8, 4), (10, 3), (13, 5), (16, 2), (12, 1), (5, 8)]
# Each shape compiles a program: the default suite has these, even and odd, of several
# epochs and of less than one.
FEW = [(13, 5), (16, 2), (5, 8)]


def mark_others_as_matrix(shapes):
    return [
        x if x in FEW else pytest.param(*x, marks=pytest.mark.matrix) for x in shapes
    ]


DECAYS = np.array([0.0, 0.5, 0.9, 0.999, 1 - 1e-9])


@pytest.mark.parametrize(
    ("num_steps", "n_b"), mark_others_as_matrix([*SHAPES, (100, 7), (64, 16), (37, 37)])
)
def test_mu_of_fixed_order_is_exact(num_steps, n_b, x64):
    mu = mu_of(
        2.5, num_steps=num_steps, decay=DECAYS, steps_per_epoch=n_b, order="fixed"
    )
    brute = np.sqrt([brute_force_fixed(num_steps, n_b, beta) for beta in DECAYS]) / 2.5
    np.testing.assert_allclose(mu, brute, rtol=1e-12)
    assert np.all(np.asarray(mu) >= brute * (1 - 1e-15))


@pytest.mark.parametrize(("num_steps", "n_b"), mark_others_as_matrix(SHAPES))
def test_mu_of_reshuffled_order_is_a_tight_upper_bound(num_steps, n_b, x64):
    mu = mu_of(
        0.5, num_steps=num_steps, decay=DECAYS, steps_per_epoch=n_b, order="reshuffled"
    )
    mu = np.asarray(mu)
    brute = np.sqrt([brute_force_reshuffled(num_steps, n_b, b) for b in DECAYS]) / 0.5
    assert np.all(mu >= brute * (1 - 1e-15))
    assert np.all(mu <= brute * 1.1)  # it is not vacuous: at most 10 % above here
    if num_steps <= n_b or n_b == 1:
        np.testing.assert_allclose(mu, brute, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("num_steps", "n_b"), [(24, 4), (30, 5), (33, 8)])
def test_mu_of_reshuffled_order_bounds_larger_trees(num_steps, n_b, x64):
    for beta in (0.3, 0.95):
        mu = mu_of(
            1.5,
            num_steps=num_steps,
            decay=beta,
            steps_per_epoch=n_b,
            order="reshuffled",
        )
        brute = np.sqrt(brute_force_reshuffled(num_steps, n_b, beta)) / 1.5
        assert brute * (1 - 1e-15) <= mu <= 1.1 * brute


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("n_b", "epochs", "decay", "square"),
    [
        (100, 10, 0.9, 25.02),
        (100, 10, 0.99, 46.42),
        (100, 10, 0.999, 84.98),
        (32, 32, 0.9, 83.65),
        (32, 32, 0.99, 207.36),
        (1000, 8, 0.9, 20.75),
        (1000, 8, 0.999, 56.50),
    ],
)
def test_mu_matches_published_values(n_b, epochs, decay, square):
    kwargs = {"num_steps": n_b * epochs, "decay": decay, "steps_per_epoch": n_b}
    mu = float(mu_of(3.0, order="fixed", **kwargs))
    np.testing.assert_allclose((3 * mu) ** 2, square, atol=0.005)
    assert float(mu_of(3.0, order="reshuffled", **kwargs)) >= mu


def test_mu_doubles_under_replace_adjacency():
    kwargs = {
        "num_steps": 50, "decay": 0.8, "steps_per_epoch": 10, "order": "fixed",
    }  # fmt: skip
    mu = {
        a: float(accounting.momentum_mu(1.5, adjacency=a, **kwargs)) for a in Adjacency
    }
    np.testing.assert_allclose(
        mu[Adjacency.REPLACE], 2 * mu[Adjacency.ZERO_OUT], rtol=2e-7
    )
    assert mu[Adjacency.ADD_REMOVE] == mu[Adjacency.ZERO_OUT]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["fixed", "reshuffled"])
def test_derivatives_match_finite_differences(order):
    def mu(noise_multiplier, decay):
        return mu_of(
            noise_multiplier,
            num_steps=90,
            decay=decay,
            steps_per_epoch=20,
            order=order,
        )

    with jax.enable_x64(True):
        h = 1e-5
        by_noise = (mu(1.7 + h, 0.93) - mu(1.7 - h, 0.93)) / (2 * h)
        by_decay = (mu(1.7, 0.93 + h) - mu(1.7, 0.93 - h)) / (2 * h)
        second = (mu(1.7, 0.93 + h) - 2 * mu(1.7, 0.93) + mu(1.7, 0.93 - h)) / h**2
    for transform in (lambda f: f, jax.jit):
        f = transform(mu)
        gradient = jax.jit(jax.grad(f, (0, 1)))(1.7, 0.93)
        np.testing.assert_allclose(gradient, (by_noise, by_decay), rtol=1e-5)
        np.testing.assert_allclose(jax.hessian(f, 1)(1.7, 0.93), second, rtol=1e-3)
    assert np.isfinite(jax.grad(mu, 1)(1.7, 0.0))


def test_limits_are_exact_and_invalid_arguments_raise():
    kwargs = {"num_steps": 8, "steps_per_epoch": 4, "order": "fixed"}
    assert float(mu_of(0.0, decay=0.5, **kwargs)) == np.inf
    assert float(mu_of(np.inf, decay=0.5, **kwargs)) == 0
    traced = jax.jit(lambda b: mu_of(1.0, decay=b, **kwargs))
    assert float(traced(1.5)) == np.inf
    for name, bad in [
        ("noise_multiplier", {"noise_multiplier": -1.0}),
        ("decay", {"decay": 1.0}),
        ("decay", {"decay": -0.1}),
        ("num_steps", {"num_steps": 0}),
        ("num_steps", {"num_steps": 8.0}),
        ("steps_per_epoch", {"steps_per_epoch": 0}),
        ("order", {"order": "poisson"}),
        ("adjacency", {"adjacency": "zero_out"}),
    ]:
        arguments = {
            "noise_multiplier": 1.0, "decay": 0.5, "adjacency": Adjacency.ZERO_OUT,
            **kwargs, **bad,
        }  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name} must"):
            accounting.momentum_mu(arguments.pop("noise_multiplier"), **arguments)
