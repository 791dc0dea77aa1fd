"""Define the calls of strategies, plans, audits and solvers in `values.py`."""

import functools
import itertools
from collections.abc import Iterator

import numpy as np
from _values_accountants import (
    ADD,
    CONVEX,
    DELTA,
    EPOCHS,
    REPLACE,
    ROUNDS,
    ZERO,
    Call,
)

import dpjax
from dpjax import (
    Adjacency,
    auditing,
    solvers,
    strategies,
    workloads,
)
from dpjax.accounting import correlated, random_rounds
from dpjax.accounting.profiles import FunctionProfile, Gaussian, Pure
from dpjax.accounting.tree import reduced_momentum_mu
from dpjax.noise import _reduced_momentum as reduced_momentum
from dpjax.solvers import _random_round_sgd, _sensitivity_reduced_nsgd

STRATEGIES = {
    "independent": strategies.independent(),
    "geometric": strategies.geometric(0.7),
    "rational": strategies.rational(np.array([0.2, 0.4]), np.array([0.3, 0.9])),
    "banded": strategies.banded(np.array([1.0, 0.5, 0.25])),
    "banded inverse": strategies.banded_inverse(np.array([1.0, -0.5, -0.1])),
    "scaled": strategies.scaled(strategies.geometric(0.7), np.linspace(0.5, 3, 12)),
    "tree": strategies.tree(0.8),
}
WORKLOADS = {
    "momentum": workloads.momentum(0.9),
    "momentum sum": workloads.momentum_sum(0.9, weight_decay=0.01),
    "prefix sum": workloads.prefix_sum(),
    "nesterov": workloads.nesterov(0.9, learning_rates=np.linspace(1, 0.1, 12)),
    "toeplitz": workloads.toeplitz(np.array([1.0, 0.5, 0.25])),
}


def mechanisms() -> Iterator[Call]:
    """Return all calls except those of plans, in 64-bit arithmetic."""
    yield from of_strategies()
    yield from of_scores()
    yield from of_solvers()


def of_strategies() -> Iterator[Call]:
    """Return strategies' properties, costs and errors, and optimal strategies."""
    for name, strategy in STRATEGIES.items():
        for order, adjacency in itertools.product(
            ("fixed", "reshuffled", "separated"), (ZERO, REPLACE)
        ):
            given = {"order": order, "adjacency": adjacency}
            call = functools.partial(correlated.mu, strategy, 1.7, **EPOCHS, **given)
            yield f"correlated.mu, {name}, {order}, {adjacency.name}", call
        for workload in WORKLOADS:
            call = functools.partial(
                correlated.error, strategy, WORKLOADS[workload], 12
            )
            yield f"correlated.error, {name}, {workload}", call
        if isinstance(strategy, strategies.Toeplitz):
            yield f"coefficients, {name}", functools.partial(coefficients, strategy)
    for where, adjacency in itertools.product(
        ("fixed", "reshuffled", "random_bins", "fresh_bins", "cyclic_poisson"),
        (ZERO, REPLACE),
    ):
        given = {"sampling": where, "adjacency": adjacency}
        call = functools.partial(
            correlated.epsilon, STRATEGIES["banded"], 1.7, DELTA, **EPOCHS, **given
        )
        yield f"correlated.epsilon, {where}, {adjacency.name}", call
    for kind in ("geometric", "rational", "banded", "banded_inverse"):
        yield (
            f"strategies.optimize, {kind}",
            lambda kind=kind: coefficients(
                strategies.optimize(kind, WORKLOADS["momentum sum"], **EPOCHS)
            ),
        )
    yield (
        "strategies.scheduled",
        lambda: (
            strategies.scheduled(
                STRATEGIES["geometric"], WORKLOADS["nesterov"], **EPOCHS
            ).factors
        ),
    )
    for where in ("cyclic_poisson", "random_bins"):
        yield f"strategies.amplified, {where}", lambda where=where: amplified(where)


def amplified(where):
    """Return the strategy's coefficients, its noise multiplier and its error.

    A strategy's own arrays are leaves.
    """
    result = strategies.amplified(
        WORKLOADS["prefix sum"],
        epsilon=2.0,
        delta=DELTA,
        sampling=where,
        adjacency=ZERO,
        **EPOCHS,
    )
    return coefficients(result.strategy), result.noise_multiplier, result.error


def coefficients(strategy):
    """Return the first 8 coefficients of C and of its inverse."""
    return strategy.coefficients(8), strategy.inverse_coefficients(8)


def of_scores() -> Iterator[Call]:
    """Return lower bounds from scores drawn with a fixed seed."""
    draw = np.random.default_rng(3)
    ins, outs = draw.normal(1.5, 1, 200), draw.normal(0, 1, 200)
    scores = np.concatenate([ins, outs])
    member = np.arange(400) < 200
    one_run = {"guess_in": 40, "guess_out": 40, "confidence": 0.95}
    sure = {"confidence": 0.95}
    for name, function in {
        "auroc": lambda: auditing.auroc(ins, outs),
        "best_threshold": lambda: auditing.best_threshold(ins, outs, 0.01, **sure),
        "epsilon_at": lambda: auditing.epsilon_at(
            ins, outs, 0.01, threshold=1.0, **sure
        ),
        "epsilon_lower": lambda: auditing.epsilon_lower(ins, outs, 0.01, **sure),
        "gaussian_mu_lower": lambda: auditing.gaussian_mu_lower(ins, outs, **sure),
        "mu_lower": lambda: auditing.mu_lower(ins, outs, **sure),
        "one_run_epsilon_lower": lambda: auditing.one_run_epsilon_lower(
            scores, member, 0.01, **one_run
        ),
        "one_run_mu_lower": lambda: auditing.one_run_mu_lower(
            scores, member, **one_run
        ),
        "true_positive_rate": lambda: auditing.true_positive_rate(ins, outs, 0.1),
    }.items():
        yield f"auditing.{name}", function


def of_solvers() -> Iterator[Call]:
    """Return what solvers compute before they train, and their guarantees."""
    rounds = {"rounds": ROUNDS, "sampling_rate": 0.05}
    profiles = {
        "Gaussian": Gaussian(1.7),
        "Pure": Pure(0.9),
        "RoundsProfile": FunctionProfile(
            functools.partial(random_rounds.epsilon, 3.0, **rounds),
            functools.partial(random_rounds.delta, 3.0, **rounds),
        ),
    }
    for name, profile in profiles.items():
        for delta in (1e-3, 0.1):
            call = functools.partial(profile.epsilon, delta)
            yield f"solvers.{name}.epsilon, {delta}", call
        yield f"solvers.{name}.delta", functools.partial(profile.delta, 0.8)
    of_steps = reduced_momentum.momentum_variance(**EPOCHS, decay=0.9, refresh=0.1)
    bounds = reduced_momentum.Terms(1.0, 0.1, 0.05)
    variance = reduced_momentum.Terms(
        *(float(np.mean(v)) * c**2 for v, c in zip(of_steps, bounds, strict=True))
    )
    for adjacency in (ZERO, REPLACE):
        mu_of = functools.partial(
            reduced_momentum_mu, **EPOCHS, decay=0.9, adjacency=adjacency
        )
        yield (
            f"_sensitivity_reduced_nsgd.allot_noise, {adjacency.name}",
            functools.partial(
                _sensitivity_reduced_nsgd.allot_noise, 1.0, mu_of, variance
            ),
        )
    for epsilon in (1.0, 4.0):
        sizes = {"radius": 2.0, "dimension": 10, "num_examples": 1000}
        yield (
            f"solvers.choose_num_steps, {epsilon}",
            functools.partial(
                solvers.choose_num_steps, epsilon, 0.001, **sizes, **CONVEX
            ),
        )
    yield (
        "solvers.round_probabilities",
        functools.partial(_random_round_sgd.round_probabilities, np.full(9, 0.5), 1.0),
    )


# Samplings of a plan, each with a noise strategy and the allowed adjacencies.
MECHANISMS = (
    ("poisson", None, tuple(Adjacency)),
    ("fixed_size", None, (REPLACE,)),
    ("fixed", None, (ZERO, REPLACE)),
    ("reshuffled", None, (ZERO, REPLACE)),
    ("random_bins", None, tuple(Adjacency)),
    ("fresh_bins", None, tuple(Adjacency)),
    ("fixed", "rational", (ZERO, REPLACE)),
    ("fixed", "tree", (ZERO, REPLACE)),
    ("reshuffled", "geometric", (ZERO, REPLACE)),
    ("cyclic_poisson", "banded", (ZERO, REPLACE)),
    ("random_bins", "geometric", tuple(Adjacency)),
    ("fresh_bins", "geometric", tuple(Adjacency)),
)
NUMBERS = {"num_steps": 12, "batch_size": 100, "noise_multiplier": 1.7}


def plans() -> Iterator[Call]:
    """Return plans, each of which omits one of four numbers."""
    for where, strategy, adjacencies in MECHANISMS:
        unknowns = ["epsilon", "noise_multiplier"]
        if where == "poisson":
            unknowns += ["num_steps", "batch_size"]
        for adjacency, unknown in itertools.product(adjacencies, unknowns):
            if "bins" in where and (adjacency, unknown) == (ZERO, "noise_multiplier"):
                continue  # slow, and repeats the call with ADD_REMOVE
            names = f"{where}, {strategy}, {adjacency.name}, {unknown}"
            yield (
                f"dpjax.plan, {names}",
                functools.partial(planned, where, strategy, adjacency, unknown),
            )
    for unknown in ("num_steps", "batch_size"):
        for where, adjacency in (("fixed", ZERO), ("fixed_size", REPLACE)):
            yield (
                f"dpjax.plan, {where}, {unknown}, ε = 6",
                functools.partial(
                    planned, where, None, adjacency, unknown, epsilon=6.0
                ),
            )
    yield (
        "dpjax.plan, fixed, refused",
        functools.partial(planned, "fixed", None, ADD, "epsilon"),
    )
    yield (
        "dpjax.plan, fixed, workload",
        functools.partial(
            planned, "fixed", None, ZERO, "noise_multiplier", WORKLOADS["momentum sum"]
        ),
    )


def planned(where, strategy, adjacency, unknown, workload=None, epsilon=2.0):
    """Return the numbers of a plan and its guarantee."""
    run = dpjax.plan(
        num_examples=400,
        delta=DELTA,
        clip_norm=1.0,
        sampling=where,
        noise="correlated" if strategy or workload else "independent",
        strategy=STRATEGIES[strategy] if strategy else None,
        workload=workload,
        adjacency=adjacency,
        **{**NUMBERS, "epsilon": epsilon, unknown: None},
    )
    numbers = run.noise_multiplier, run.num_steps, run.batch_size, run.max_batch_size
    promise = run.guarantee
    return *numbers, run.epsilon, promise.epsilon(1e-3), promise.delta(0.5)
