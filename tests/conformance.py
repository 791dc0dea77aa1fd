"""Everything public that trains, samples or accounts, by name.

A new transformation, engine, sampler, solver or accountant is one line here, and
`test_conformance` then holds it to what all of them promise. A public function that is
neither in a table nor in `ELSEWHERE` fails a test.
"""

import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax import Adjacency, sampling, solvers, strategies, workloads
from dpjax.accounting import (
    allocation,
    calibrate,
    correlated,
    fdp,
    gdp,
    iteration,
    objective,
    pld,
    pure,
    random_rounds,
    rdp,
    tree,
    truncation,
)
from dpjax.clipping._clipped_grad import ENGINES as NAMES

# Pairs of an engine and a microbatch size.
ENGINES = [(name, size) for name in NAMES for size in (None, 3)]
# The same with an arithmetic.
CLIPPED_SUMS = [
    *((*pair, "real") for pair in ENGINES),
    *((*pair, "discrete") for pair in ENGINES if pair[0] != "ghost"),
]

_MEAN = {"clip_norm": 0.4, "noise_multiplier": 2.5, "expected_batch_size": 8}

# From a key to an optax transformation of a clipped sum.
TRANSFORMATIONS = {
    "add_gaussian_noise": lambda key: dpjax.add_gaussian_noise(1.7, key=key),
    "add_discrete_gaussian_noise": lambda key: dpjax.add_discrete_gaussian_noise(
        1.7, key=key
    ),
    "noisy_mean": lambda key: dpjax.noisy_mean(**_MEAN, key=key),
    "tree_momentum": lambda key: dpjax.tree_momentum(0.8, 1.7, num_steps=9, key=key),
    "tree_momentum, regenerated": lambda key: dpjax.tree_momentum(
        0.8, 1.7, num_steps=9, key=key, buffer="regenerate"
    ),
    "correlated_noise": lambda key: dpjax.correlated_noise(
        strategies.rational([0.2, 0.4], [0.3, 0.9]), 1.7, num_steps=9, key=key
    ),
    "correlated_noise, regenerated": lambda key: dpjax.correlated_noise(
        strategies.geometric(0.8), 1.7, num_steps=9, key=key, buffer="regenerate"
    ),
    "correlated_noise, scaled": lambda key: dpjax.correlated_noise(
        strategies.scaled(strategies.rational([0.2], [0.9]), np.linspace(0.5, 3, 9)),
        1.7,
        num_steps=9,
        key=key,
    ),
    "correlated_noise, tree": lambda key: dpjax.correlated_noise(
        strategies.tree(0.8), 1.7, num_steps=9, key=key
    ),
    "correlated_noise, tree regenerated": lambda key: dpjax.correlated_noise(
        strategies.tree(0.8), 1.7, num_steps=9, key=key, buffer="regenerate"
    ),
    "correlated_noise, discrete": lambda key: dpjax.correlated_noise(
        strategies.rational([0.2, 0.4], [0.3, 0.9]),
        1.7,
        num_steps=9,
        key=key,
        arithmetic="discrete",
    ),
    "correlated_noise, discrete tree": lambda key: dpjax.correlated_noise(
        strategies.tree(0.8), 1.7, num_steps=9, key=key, arithmetic="discrete"
    ),
    "dp_sgd": lambda key: dpjax.dp_sgd(0.1, **_MEAN, key=key, momentum=0.9),
    "dp_adam": lambda key: dpjax.dp_adam(0.1, **_MEAN, key=key),
    "dp_adamw": lambda key: dpjax.dp_adamw(0.1, **_MEAN, key=key),
    "dp_nsgd": lambda key: dpjax.dp_nsgd(0.1, decay=0.8, num_steps=9, **_MEAN, key=key),
    "dp_nsgd, correlated": lambda key: dpjax.dp_nsgd(
        0.1,
        decay=0.8,
        num_steps=9,
        strategy=strategies.rational([0.2], [0.9]),
        **_MEAN,
        key=key,
    ),
}

# One transformation for each way to generate noise. The others share that code.
MECHANISMS = (
    "add_gaussian_noise",
    "add_discrete_gaussian_noise",
    "noisy_mean",
    "tree_momentum",
    "tree_momentum, regenerated",
    "correlated_noise, scaled",
    "correlated_noise, tree regenerated",
    "correlated_noise, discrete",
    "dp_nsgd, correlated",
)

# From a key and a number (a step or an epoch) to a batch of some of 400 examples.
SAMPLERS = {
    "cyclic": lambda key, step: sampling.cyclic(400, 8),
    "cyclic_step": lambda key, step: sampling.cyclic_step(400, 8, step=step),
    "reshuffled": lambda key, step: sampling.reshuffled(400, 8, key=key, epoch=step),
    "reshuffled_step": lambda key, step: sampling.reshuffled_step(
        400, 8, key=key, epoch=step, step=2
    ),
    "fixed_size": lambda key, step: sampling.fixed_size(400, 8, key=key, step=step),
    "poisson": lambda key, step: sampling.poisson(
        400, 0.01, max_batch_size=9, key=key, step=step
    ),
    "cyclic_poisson": lambda key, step: sampling.cyclic_poisson(
        400, 0.1, num_groups=8, max_batch_size=9, key=key, step=step
    ),
    "random_bins": lambda key, step: sampling.random_bins(
        400, 40, max_batch_size=30, key=key, epoch=step
    ),
    "random_bins_step": lambda key, step: sampling.random_bins_step(
        400, 40, max_batch_size=30, key=key, epoch=step, step=2
    ),
    "random_allocation_step": lambda key, step: sampling.random_allocation_step(
        400, 40, num_selected=2, max_batch_size=50, key=key, epoch=step, step=2
    ),
}

_X = np.linspace(-0.8, 0.9, 96, dtype=np.float32).reshape(32, 3)
_DATA = (_X, np.sign(_X[:, 0] + 0.1))
_START = np.zeros(3, np.float32)
_LOGISTIC = solvers.losses.logistic(feature_norm=1.0)
_SETTING = {
    **_LOGISTIC.setting,
    "step_size": 1.0,
    "regularization": 0.1,
    "diameter": float("inf"),
    "adjacency": Adjacency.REPLACE,
}
_TARGET = {"epsilon": 5.0, "delta": 1e-3, "adjacency": Adjacency.REPLACE}
_NORMALISED = {"num_epochs": 2, "batch_size": 8, "learning_rate": 0.1, "decay": 0.8}

# From a key to a whole run on tiny data.
SOLVERS = {
    "dp_nsgd": lambda key: solvers.dp_nsgd(
        _LOGISTIC,
        _START,
        _DATA,
        order="reshuffled",
        clip_norm=0.6,
        **_TARGET,
        **_NORMALISED,
        key=key,
    ),
    "noisy_cyclic_gd": lambda key: solvers.noisy_cyclic_gd(
        _LOGISTIC,
        _START,
        _DATA,
        num_epochs=2,
        batch_size=8,
        order="reshuffled",
        noise_multiplier=3.0,
        **_SETTING,
        key=key,
    ),
    "noisy_gd": lambda key: solvers.noisy_gd(
        _LOGISTIC, _START, _DATA, num_steps=4, noise_multiplier=3.0, **_SETTING, key=key
    ),
    "noisy_sgd": lambda key: solvers.noisy_sgd(
        _LOGISTIC,
        _START,
        _DATA,
        num_steps=4,
        batch_size=8,
        noise_multiplier=3.0,
        **_SETTING,
        key=key,
    ),
    "objective_perturbation": lambda key: solvers.objective_perturbation(
        _LOGISTIC, _START, _DATA, **_TARGET, key=key
    ),
    "output_perturbation": lambda key: solvers.output_perturbation(
        _LOGISTIC,
        _START,
        _DATA,
        epsilon=1.0,
        delta=0.0,
        radius=5.0,
        **_SETTING,
        key=key,
    ),
    "random_round_sgd": lambda key: solvers.random_round_sgd(
        _LOGISTIC,
        _START,
        _DATA,
        max_rounds=8,
        batch_size=4,
        step_size=1.0,
        smoothness=0.25,
        clip_norm=1.0,
        adjacency=Adjacency.REPLACE,
        noise_multiplier=3.0,
        key=key,
    ),
    "sensitivity_reduced_nsgd": lambda key: solvers.sensitivity_reduced_nsgd(
        _LOGISTIC,
        _START,
        _DATA,
        refresh=0.2,
        clip_norm=1.0,
        change_clip_norm=0.1,
        drift_clip_norm=0.1,
        **_TARGET,
        **_NORMALISED,
        key=key,
    ),
}

_ORDERS = np.array([1.5, 4.0, 32.0])
_ROUNDS = random_rounds.group(np.full(100, 0.01), groups=4)
_GD = {**_SETTING, "gradient_norm": 1.0, "clipped": False, "smoothness": 0.25}
_CYCLIC = {"num_epochs": 3, "batches_per_epoch": 4, "batch_size": 10}
_MOMENTUM = {
    "num_steps": 12,
    "steps_per_epoch": 4,
    "decay": 0.7,
    "adjacency": Adjacency.ZERO_OUT,
}


def as_scaled_array(x, values):
    return x * jnp.asarray(values, jnp.result_type(float))


def composed_poisson_steps(noise_multiplier):
    step = pld.poisson_gaussian(noise_multiplier, 0.1, adjacency=Adjacency.ADD_REMOVE)
    return pld.compose(step, 7)


# Each accountant as a function of one real number, and the number to evaluate it at.
ACCOUNTANTS = {
    "gdp.tradeoff": (lambda x: gdp.tradeoff(x, 0.3), 1.7),
    "gdp.delta": (lambda x: gdp.delta(x, 0.8), 1.7),
    "gdp.epsilon": (lambda x: gdp.epsilon(x, 1e-6), 1.7),
    "gdp.mu": (lambda x: gdp.mu(x, 1e-6), 1.7),
    "gdp.compose": (lambda x: gdp.compose(as_scaled_array(x, (1, 2, 3))), 1.7),
    "rdp.gaussian": (lambda x: rdp.gaussian(x, _ORDERS), 1.7),
    "rdp.poisson_gaussian": (lambda x: rdp.poisson_gaussian(x, 0.1, _ORDERS), 1.7),
    "rdp.compose": (lambda x: rdp.compose(as_scaled_array(x, _ORDERS), count=3), 0.1),
    "rdp.epsilon": (
        lambda x: rdp.epsilon(as_scaled_array(x, _ORDERS), _ORDERS, 1e-6),
        0.1,
    ),
    "rdp.best_order": (
        lambda x: rdp.best_order(as_scaled_array(x, _ORDERS), _ORDERS, 1e-6),
        0.1,
    ),
    "rdp.delta": (lambda x: rdp.delta(as_scaled_array(x, _ORDERS), _ORDERS, 2.0), 0.1),
    "pld.poisson_gaussian": (
        lambda x: pld.epsilon(composed_poisson_steps(x), 1e-6),
        1.7,
    ),
    "pld.gaussian": (lambda x: pld.epsilon(pld.gaussian(x), 1e-6), 1.7),
    "pld.gaussian_mixture": (
        lambda x: pld.delta(
            pld.gaussian_mixture(
                x, (0.0, 1.0, 2.0), (0.81, 0.18, 0.01), adjacency=Adjacency.ADD_REMOVE
            ),
            0.5,
        ),
        1.7,
    ),
    "pld.laplace": (lambda x: pld.delta(pld.compose(pld.laplace(x), 3), 0.5), 1.7),
    "pld.discrete_laplace": (
        lambda x: pld.delta(pld.compose(pld.discrete_laplace(x, 2), 3), 0.5),
        3.7,
    ),
    "pld.discrete_gaussian": (
        lambda x: pld.delta(pld.compose(pld.discrete_gaussian(x, 2), 3), 0.5),
        3.7,
    ),
    "pld.randomized_response": (
        lambda x: pld.delta(pld.randomized_response(x, 5), 0.5),
        0.3,
    ),
    "pld.pure": (lambda x: pld.delta(pld.compose(pld.pure(x), 3), 0.3), 0.7),
    "pld.epsilon_delta": (
        lambda x: pld.delta(pld.compose(pld.epsilon_delta(0.7, x), 3), 0.3),
        0.02,
    ),
    "pld.subsampled_gdp": (lambda x: pld.delta(pld.subsampled_gdp(x, 0.1), 0.5), 1.7),
    "pld.compose": (lambda x: pld.delta(composed_poisson_steps(x), 0.3), 1.7),
    "pld.convolve": (
        lambda x: pld.delta(
            pld.convolve(composed_poisson_steps(1.7), pld.gaussian(x)), 0.8
        ),
        0.6,
    ),
    "pld.delta": (lambda x: pld.delta(composed_poisson_steps(1.7), x), 0.8),
    "pld.epsilon": (lambda x: pld.epsilon(composed_poisson_steps(1.7), x), 1e-4),
    "pure.delta": (lambda x: pure.delta(x, 0.8), 1.7),
    "pure.epsilon": (lambda x: pure.epsilon(x, 0.1), 1.7),
    "pure.mu": (lambda x: pure.mu(x), 1.7),
    "fdp.tradeoff": (lambda x: fdp.tradeoff(lambda e: gdp.delta(x, e), 0.3), 1.7),
    "fdp.true_positive_rate": (
        lambda x: fdp.true_positive_rate(lambda e: gdp.delta(x, e), 0.01),
        1.7,
    ),
    "fdp.advantage": (lambda x: fdp.advantage(lambda e: gdp.delta(x, e)), 1.7),
    "calibrate.solve": (
        lambda x: calibrate.solve(lambda s: gdp.epsilon(1 / s, 1e-6), x),
        1.7,
    ),
    "tree.momentum_mu": (
        lambda x: tree.momentum_mu(x, order="fixed", **_MOMENTUM),
        1.7,
    ),
    "tree.reduced_momentum_mu": (
        lambda x: tree.reduced_momentum_mu((x, 2.0, 3.0), **_MOMENTUM),
        1.7,
    ),
    "correlated.mu": (
        lambda x: correlated.mu(
            strategies.geometric(0.7),
            x,
            num_steps=12,
            steps_per_epoch=4,
            order="reshuffled",
            adjacency=Adjacency.ZERO_OUT,
        ),
        1.7,
    ),
    "correlated.epsilon": (
        lambda x: correlated.epsilon(
            strategies.geometric(0.7),
            x,
            1e-5,
            num_steps=12,
            steps_per_epoch=4,
            sampling="random_bins",
            adjacency=Adjacency.ZERO_OUT,
        ),
        1.7,
    ),
    "correlated.error": (
        lambda x: correlated.error(
            strategies.geometric(0.7), workloads.momentum_sum(x), 12
        ),
        0.7,
    ),
    "random_rounds.delta": (
        lambda x: random_rounds.delta(x, 1.0, rounds=_ROUNDS, sampling_rate=0.05),
        1.7,
    ),
    "objective.delta": (
        lambda x: objective.delta(
            x, 0.8, curvature=0.3, logistic=True, adjacency=Adjacency.REPLACE
        ),
        1.7,
    ),
    "truncation.poisson_gaussian": (
        lambda x: pld.delta(
            truncation.poisson_gaussian(
                x,
                0.1,
                num_examples=99,
                max_batch_size=15,
                adjacency=Adjacency.ADD_REMOVE,
            ),
            0.3,
        ),
        1.7,
    ),
    "truncation.overflow_delta": (
        lambda x: truncation.overflow_delta(
            x, num_examples=99, sampling_rate=0.1, max_batch_size=40, num_steps=7
        ),
        1.7,
    ),
    "allocation.epsilon": (
        lambda x: allocation.epsilon(x, 1e-5, num_steps=9, num_epochs=2),
        1.7,
    ),
    "allocation.delta": (
        lambda x: allocation.delta(x, 0.8, num_steps=9, num_epochs=2),
        1.7,
    ),
    "iteration.optimal_shift_mu": (
        lambda x: iteration.optimal_shift_mu(
            np.full(5, 0.9),
            np.full(5, 0.3),
            as_scaled_array(x, np.ones(5)),
            diameter=2.0,
        ),
        1.7,
    ),
    "iteration.noisy_gd_mu": (
        lambda x: iteration.noisy_gd_mu(x, num_steps=9, num_examples=50, **_GD),
        1.7,
    ),
    "iteration.noisy_cyclic_gd_mu": (
        lambda x: iteration.noisy_cyclic_gd_mu(x, order="fixed", **_CYCLIC, **_GD),
        1.7,
    ),
    "iteration.noisy_cyclic_gd_mus": (
        lambda x: iteration.noisy_cyclic_gd_mus(x, **_CYCLIC, **_GD),
        1.7,
    ),
    "iteration.last_iterate_rdp": (
        lambda x: iteration.last_iterate_rdp(
            x, _ORDERS, order="fixed", **_CYCLIC, **_GD
        ),
        1.7,
    ),
    "iteration.scheduled_cyclic_gd_mu": (
        lambda x: iteration.scheduled_cyclic_gd_mu(
            x,
            batches_per_epoch=4,
            batch_size=10,
            **{**_GD, "step_size": 1 / np.sqrt(np.arange(1.0, 13.0))},
        ),
        1.7,
    ),
    "iteration.gradient_descent_sensitivity": (
        lambda x: iteration.gradient_descent_sensitivity(
            num_steps=9, num_examples=50, **{**_GD, "gradient_norm": x}
        ),
        1.7,
    ),
    "iteration.langevin_mu": (
        lambda x: iteration.langevin_mu(
            x,
            step_size=0.1,
            num_steps=50,
            smoothness=8.0,
            strong_convexity=4.0,
            diameter=float("inf"),
        ),
        1.7,
    ),
    "iteration.exponential_mechanism_mu": (
        lambda x: iteration.exponential_mechanism_mu(
            x, strong_convexity=0.5, diameter=float("inf")
        ),
        1.7,
    ),
    "iteration.step_lipschitz": (
        lambda x: iteration.step_lipschitz(x, smoothness=4.0, strong_convexity=1.0),
        0.1,
    ),
    "iteration.clipped_step_lipschitz": (
        lambda x: iteration.clipped_step_lipschitz(
            x, weak_convexity=0.2, smoothness=1.0
        ),
        0.3,
    ),
    "iteration.random_assignment_delta": (
        lambda x: iteration.random_assignment_delta(
            as_scaled_array(x, (0.2, 1.0)), 0.8
        ),
        1.7,
    ),
    "iteration.random_assignment_epsilon": (
        lambda x: iteration.random_assignment_epsilon(
            as_scaled_array(x, (0.2, 1.0)), 1e-6
        ),
        1.7,
    ),
    "iteration.noisy_sgd_epsilon": (
        lambda x: iteration.noisy_sgd_epsilon(
            x, 1e-5, num_steps=20, batch_size=5, num_examples=50, **_GD
        ),
        1.7,
    ),
}

# Public functions in none of these tables; each has tests of its own.
ELSEWHERE = {
    "dpjax": {
        "accumulate",
        "budget",
        "by_user",
        "clip_and_sum",
        "clipped_grad",
        "explain",
        "metrics",
        "plan",
        "random_key",
        "recipe",
        "tune",
    },
    "dpjax.sampling": {"bound_contributions_of_fixed_graph"},
    "dpjax.auditing": {
        "auroc",
        "best_threshold",
        "bootstrap_quantiles",
        "check",
        "epsilon_at",
        "epsilon_lower",
        "gaussian_mu_lower",
        "likelihood_ratios",
        "linear_scores",
        "log_odds",
        "matched_filter",
        "mixture_scores",
        "mu_lower",
        "one_run_epsilon_lower",
        "one_run_mu_lower",
        "plant",
        "released",
        "train_many",
        "train_shadows",
        "true_positive_rate",
        "white_by_strategy",
    },
    "dpjax.solvers": {
        "choose_num_steps",
        "choose_regularization",
    },
    "dpjax.accounting": {
        "pld.of",
        "pld.delta_lower",  # of known numbers, without derivatives
        "pld.epsilon_lower",
        "allocation.epsilon_lower",  # derivatives of lower bounds are a few percent off
        "allocation.pld",  # the others are made of it
        "iteration.noisy_gd_bounds",  # the μ's are the minimum of these
        "iteration.noisy_cyclic_gd_bounds",
        "iteration.noisy_sgd_bounds",
        "random_rounds.group",
        "random_rounds.epsilon",  # it calibrates, outside jit
        "objective.epsilon",  # so does this one
    },
}
