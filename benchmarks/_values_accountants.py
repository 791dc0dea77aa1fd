"""Define the calls of accountants in `values.py`, by name, at fixed arguments."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import Adjacency, strategies, workloads
from dpjax.accounting import (
    allocation,
    calibrate,
    correlated,
    fdp,
    gdp,
    iteration,
    pld,
    pure,
    random_rounds,
    rdp,
    tree,
    truncation,
)

Call = tuple[str, Callable[[], Any]]

INF = float("inf")
ADD, ZERO, REPLACE = Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT, Adjacency.REPLACE
ORDERS = np.array([1.5, 4.0, 32.0])
ROUNDS = random_rounds.group(np.full(100, 0.01), groups=4)
DELTA = 1e-5
EPOCHS: dict[str, Any] = {"num_steps": 12, "steps_per_epoch": 4}
CYCLE = {"num_epochs": 3, "batches_per_epoch": 4, "batch_size": 10}
CONVEX = {
    "step_size": 1.0,
    "gradient_norm": 1.0,
    "clipped": False,
    "generalised_linear": True,
    "smoothness": 0.25,
    "weak_convexity": 0.0,
    "strong_convexity": 0.0,
    "regularization": 0.1,
    "diameter": INF,
    "adjacency": REPLACE,
}
SETTINGS = {
    "regularised": CONVEX,
    "bounded": {**CONVEX, "regularization": 0.0, "diameter": 0.5},
    "strongly convex": {**CONVEX, "strong_convexity": 0.2, "adjacency": ZERO},
    "clipped": {**CONVEX, "clipped": True, "smoothness": 1.0, "step_size": 0.5},
    "not convex": {**CONVEX, "weak_convexity": 0.2, "diameter": 2.0},
}


def composed(noise_multiplier, count=7, adjacency=ADD):
    step = pld.poisson_gaussian(noise_multiplier, 0.1, adjacency=adjacency)
    return pld.compose(step, count)


def truncated(noise_multiplier, adjacency, room=15):
    sizes = {"num_examples": 99, "max_batch_size": room}
    return truncation.poisson_gaussian(
        noise_multiplier, 0.1, **sizes, adjacency=adjacency
    )


def times(x, values):
    return x * jnp.asarray(values, jnp.result_type(float))


# For each accountant, a function of one number, and the numbers that are the function's
# arguments; in the tuples below, None means the usual numbers.
OF_NUMBER: dict[str, tuple[Callable[[Any], Any], tuple[float, ...]]] = {
    name: (function, points or (0.9, 1.7))
    for name, function, points in (
        ("gdp.tradeoff", lambda x: gdp.tradeoff(x, 0.3), None),
        ("gdp.delta", lambda x: gdp.delta(x, 0.8), None),
        ("gdp.epsilon", lambda x: gdp.epsilon(x, 1e-6), None),
        ("gdp.mu", lambda x: gdp.mu(x, 1e-6), None),
        ("gdp.compose", lambda x: gdp.compose(times(x, (1, 2, 3))), None),
        ("rdp.gaussian", lambda x: rdp.gaussian(x, ORDERS), None),
        ("rdp.poisson_gaussian", lambda x: rdp.poisson_gaussian(x, 0.1, ORDERS), None),
        ("rdp.compose", lambda x: rdp.compose(times(x, ORDERS), count=3), None),
        ("rdp.epsilon", lambda x: rdp.epsilon(times(x, ORDERS), ORDERS, 1e-6), None),
        ("rdp.delta", lambda x: rdp.delta(times(x, ORDERS), ORDERS, 2.0), (0.1, 0.3)),
        ("rdp.best_order", lambda x: rdp.best_order(x * ORDERS, ORDERS, 1e-6), None),
        ("pld.poisson_gaussian", lambda x: pld.epsilon(composed(x), 1e-6), None),
        ("pld.gaussian", lambda x: pld.epsilon(pld.gaussian(x), 1e-6), None),
        ("pld.subsampled", lambda x: pld.delta(pld.subsampled_gdp(x, 0.1), 0.5), None),
        ("pld.delta", lambda x: pld.delta(composed(1.7), x), None),
        ("pld.epsilon", lambda x: pld.epsilon(composed(1.7), x), (1e-7, 1e-4)),
        ("pld.compose", lambda x: pld.delta(composed(1.7, x), 0.8), (5.0, 900.0)),
        (
            "pld.convolve",
            lambda x: pld.delta(pld.convolve(composed(1.7), pld.gaussian(x)), 0.8),
            None,
        ),
        ("pure.delta", lambda x: pure.delta(x, 0.8), None),
        ("pure.epsilon", lambda x: pure.epsilon(x, 0.1), None),
        ("pure.mu", pure.mu, None),
        ("fdp.tradeoff", lambda x: fdp.tradeoff(lambda e: gdp.delta(x, e), 0.3), None),
        (
            "fdp.true_positive_rate",
            lambda x: fdp.true_positive_rate(lambda e: gdp.delta(x, e), 0.01),
            None,
        ),
        ("fdp.advantage", lambda x: fdp.advantage(lambda e: gdp.delta(x, e)), None),
        (
            "calibrate.solve",
            lambda x: calibrate.solve(lambda s: gdp.epsilon(1 / s, 1e-6), x),
            None,
        ),
        (
            "tree.momentum_mu",
            lambda x: tree.momentum_mu(
                x, **EPOCHS, decay=0.7, order="fixed", adjacency=ZERO
            ),
            None,
        ),
        (
            "tree.reduced_momentum_mu",
            lambda x: tree.reduced_momentum_mu(
                (x, 2.0, 3.0), **EPOCHS, decay=0.7, adjacency=ZERO
            ),
            None,
        ),
        (
            "correlated.error",
            lambda x: correlated.error(
                strategies.geometric(0.7), workloads.momentum_sum(x), 12
            ),
            (0.3, 0.7),
        ),
        (
            "random_rounds.delta",
            lambda x: random_rounds.delta(x, 1.0, rounds=ROUNDS, sampling_rate=0.05),
            None,
        ),
        (
            "truncation.overflow_delta",
            lambda x: truncation.overflow_delta(
                x, num_examples=99, sampling_rate=0.1, max_batch_size=40, num_steps=7
            ),
            None,
        ),
        (
            "allocation.epsilon",
            lambda x: allocation.epsilon(x, DELTA, num_steps=9, num_epochs=2),
            None,
        ),
        (
            "allocation.delta",
            lambda x: allocation.delta(x, 0.8, num_steps=9, num_epochs=2),
            None,
        ),
        (
            "iteration.optimal_shift_mu",
            lambda x: iteration.optimal_shift_mu(
                np.full(5, 0.9), np.full(5, 0.3), times(x, np.ones(5)), diameter=2.0
            ),
            None,
        ),
        (
            "iteration.langevin_mu",
            lambda x: iteration.langevin_mu(
                x,
                step_size=0.1,
                num_steps=50,
                smoothness=8.0,
                strong_convexity=4.0,
                diameter=INF,
            ),
            None,
        ),
        (
            "iteration.exponential_mechanism_mu",
            lambda x: iteration.exponential_mechanism_mu(
                x, strong_convexity=0.5, diameter=INF
            ),
            None,
        ),
        (
            "iteration.step_lipschitz",
            lambda x: iteration.step_lipschitz(x, smoothness=4.0, strong_convexity=1.0),
            (0.1, 0.4),
        ),
        (
            "iteration.clipped_step_lipschitz",
            lambda x: iteration.clipped_step_lipschitz(
                x, weak_convexity=0.2, smoothness=1.0
            ),
            (0.3, 0.9),
        ),
        (
            "iteration.random_assignment_delta",
            lambda x: iteration.random_assignment_delta(times(x, (0.2, 1.0)), 0.8),
            None,
        ),
        (
            "iteration.random_assignment_epsilon",
            lambda x: iteration.random_assignment_epsilon(times(x, (0.2, 1.0)), 1e-6),
            None,
        ),
    )
}
# Functions of a noise multiplier and of all assumptions about a loss and its steps.
OF_SETTING: dict[str, Callable[..., Any]] = {
    "noisy_gd_mu": functools.partial(
        iteration.noisy_gd_mu, num_steps=9, num_examples=50
    ),
    "noisy_gd_bounds": functools.partial(
        iteration.noisy_gd_bounds, num_steps=9, num_examples=50
    ),
    "noisy_cyclic_gd_mu": functools.partial(
        iteration.noisy_cyclic_gd_mu, order="fixed", **CYCLE
    ),
    "noisy_cyclic_gd_bounds": functools.partial(
        iteration.noisy_cyclic_gd_bounds, order="reshuffled", **CYCLE
    ),
    "noisy_cyclic_gd_mus": functools.partial(iteration.noisy_cyclic_gd_mus, **CYCLE),
    "last_iterate_rdp": lambda x, **setting: iteration.last_iterate_rdp(
        x, ORDERS, order="fixed", **CYCLE, **setting
    ),
    "gradient_descent_sensitivity": lambda x, **setting: (
        iteration.gradient_descent_sensitivity(
            num_steps=9, num_examples=50, **{**setting, "gradient_norm": x}
        )
    ),
    "noisy_sgd_epsilon": lambda x, **setting: iteration.noisy_sgd_epsilon(
        x, DELTA, num_steps=20, batch_size=5, num_examples=50, **setting
    ),
    "noisy_sgd_bounds": lambda x, **setting: iteration.noisy_sgd_bounds(
        x, DELTA, num_steps=20, batch_size=5, num_examples=50, **setting
    ),
    "scheduled_cyclic_gd_mu": lambda x, **setting: iteration.scheduled_cyclic_gd_mu(
        x,
        batches_per_epoch=4,
        batch_size=10,
        **{**setting, "step_size": setting["step_size"] / np.sqrt(np.arange(1.0, 13))},
    ),
}

# The slowest derivatives; other accountants of the same kind are differentiated.
NOT_DIFFERENTIATED = {"pld.compose", "pld.convolve", "pld.gaussian", "allocation.delta"}
NOT_DIFFERENTIATED |= {"noisy_sgd_epsilon"}


def accountants() -> Iterator[Call]:
    """Return calls of accountants in 64-bit arithmetic."""
    for name, (function, points) in OF_NUMBER.items():
        for x in points:
            yield f"{name}, {x}", functools.partial(function, x)
        if name not in NOT_DIFFERENTIATED:
            yield f"{name}, derivative", functools.partial(slope, function, points[-1])
    for (name, function), setting in itertools.product(OF_SETTING.items(), SETTINGS):
        # `noisy_sgd_epsilon` takes long to compile, and is the least of
        # `noisy_sgd_bounds`.
        if name != "noisy_sgd_epsilon" or setting in ("regularised", "clipped"):
            call = functools.partial(function, 1.7, **SETTINGS[setting])
            yield f"iteration.{name}, {setting}", call
    for name, function in OF_SETTING.items():
        if name not in NOT_DIFFERENTIATED:
            given = functools.partial(function, **CONVEX)
            yield f"iteration.{name}, derivative", functools.partial(slope, given, 1.7)
    yield from of_adjacency()


def in_float32() -> Iterator[Call]:
    """Return calls of accountants by callers that compute in 32-bit arithmetic."""
    for name, (function, points) in OF_NUMBER.items():
        yield f"{name}, float32", functools.partial(function, points[0])


def slope(function, x):
    """Return the derivative of the sum of a function's results."""

    def total(x):
        return sum(jnp.sum(y) for y in jax.tree.leaves(function(x)))

    return jax.grad(total)(x)


def of_adjacency() -> Iterator[Call]:
    """Return privacy-loss distributions, trees and allocations by adjacency."""
    for adjacency in Adjacency:
        distributions = {
            "composed": functools.partial(composed, 1.7, adjacency=adjacency),
            "truncated": functools.partial(truncated, 1.7, adjacency),
            "truncated more": functools.partial(truncated, 1.7, adjacency, 12),
            "convolved": lambda adjacency=adjacency: pld.convolve(
                composed(1.7, adjacency=adjacency), truncated(1.7, adjacency)
            ),
            "allocated": functools.partial(
                allocation.pld, 1.7, num_steps=9, adjacency=adjacency
            ),
        }
        for name, make in distributions.items():
            full = f"pld, {name}, {adjacency.name}"
            yield f"{full}, epsilon", lambda make=make: pld.epsilon(make(), DELTA)
            yield f"{full}, delta", lambda make=make: pld.delta(make(), 0.5)
        for order in ("fixed", "reshuffled"):
            momentum = {"decay": 0.7, "order": order, "adjacency": adjacency}
            call = functools.partial(tree.momentum_mu, 1.7, **EPOCHS, **momentum)
            yield f"tree.momentum_mu, {order}, {adjacency.name}", call
        call = functools.partial(
            allocation.epsilon, 1.7, DELTA, num_steps=9, adjacency=adjacency
        )
        yield f"allocation.epsilon, {adjacency.name}", call
    yield (
        "pld.convolve, two adjacencies",
        lambda: pld.convolve(composed(1.7), composed(1.7, adjacency=REPLACE)),
    )
    for x in (0.9, 1.7):
        lower = functools.partial(allocation.epsilon_lower, x, DELTA, num_steps=9)
        yield f"allocation.epsilon_lower, {x}", lower
    yield "random_rounds.group", lambda: random_rounds.group(np.full(50, 0.02), 8)
    yield (
        "random_rounds.epsilon",
        lambda: random_rounds.epsilon(3.0, 1e-3, rounds=ROUNDS, sampling_rate=0.05),
    )
