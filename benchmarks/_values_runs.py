"""Define the training runs in `values.py`: a few steps of tiny models, fixed keys."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _values_accountants import CONVEX, Call

import dpjax
from dpjax import Adjacency, solvers, strategies, workloads
from dpjax.noise import _reduced_momentum as reduced_momentum

KEY = jax.random.key(7)
STEPS = 4
X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32) / 2
Y = np.where(X[:, 0] > 0.1, 1, -1).astype(np.float32)
SCALE = np.float32(0.5) / np.arange(1, 5, dtype=np.float32)
PARAMS = {"w": X[:3].repeat(4, axis=1)[:, :4], "b": 0 * SCALE, "v": SCALE}
MEAN = {"clip_norm": 0.4, "noise_multiplier": 1.5, "expected_batch_size": 8}
RATIONAL = strategies.rational(np.array([0.2, 0.4]), np.array([0.3, 0.9]))
SCALED = strategies.scaled(strategies.geometric(0.7), np.linspace(0.5, 3, STEPS))


def loss(params, example):
    """Return the logistic loss of a network with one hidden layer on one example."""
    x, y = example
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.log1p(jnp.exp(-y * (hidden @ params["v"])))


def by_transformation(tx, *, engine: Any = "auto", microbatch_size=None):
    """Return the parameters after steps of a chain on clipped sums."""
    gradient = dpjax.clipped_grad(
        loss, MEAN["clip_norm"], engine=engine, microbatch_size=microbatch_size
    )

    @jax.jit
    def step(params, state, first):
        rows = (first + jnp.arange(8)) % 40
        examples = jnp.asarray(X)[rows], jnp.asarray(Y)[rows]
        grads, per_example = gradient(params, examples, mask=rows % 5 > 0)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, per_example.norm

    params, norms = jax.tree.map(jnp.asarray, PARAMS), []
    state = tx.init(params)
    for first in range(0, 8 * STEPS, 8):
        params, state, norm = step(params, state, first)
        norms.append(norm)
    return params, norms


def by_plan(inner=None, *, data=(X, Y), accumulated=None, **changed):
    """Return the parameters after a plan's steps.

    If accumulated, the host loads each batch in parts.
    """
    given: dict[str, Any] = {
        "num_examples": 40,
        "batch_size": 14,
        "num_steps": STEPS,
        "noise_multiplier": 1.5,
        "delta": 1e-3,
        "clip_norm": 0.4,
        "adjacency": Adjacency.ZERO_OUT,
    }
    run = dpjax.plan(**{**given, **changed})
    tx = run.optimizer(inner or optax.sgd(0.5), key=KEY)
    gradient = run.value_and_grad(loss, batched=False)
    if accumulated:
        gradient = dpjax.accumulate(jax.jit(gradient), accumulated)

    def step(params, state, number):
        bound = {"clip_norm": run.clip_norm_of(state)} if run.quantile else {}
        examples = run.load(data, number, KEY)
        value, grads = gradient(params, examples, **bound)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    step = step if accumulated else jax.jit(step)
    params, values = jax.tree.map(jnp.asarray, PARAMS), []
    state = tx.init(params)
    for number in range(STEPS):
        params, state, value = step(params, state, number)
        values.append(value)
    return params, values, run.epsilon


def by_user():
    """Return the result of a plan whose unit is a user with several examples."""
    users = dpjax.by_user((X, Y), np.arange(40) % 16, max_examples=2)
    return by_plan(
        data=users.stacked(), num_examples=len(users), batch_size=5, unit="user"
    )


def by_window():
    """Return sums over a sliding window of steps."""
    ring = reduced_momentum.empty_ring(3, 3, np.float32)
    given = {"window": 3, "decay": jnp.float32(0.8)}
    result = []
    for step in range(1, 8):
        ring = reduced_momentum.push(
            ring, X[step], jnp.float32(1.7), KEY, step=jnp.int32(step), **given
        )
        result.append(reduced_momentum.query(ring, jnp.int32(step), **given))
    return ring, result


def by_reduced_momentum():
    """Return momenta computed from sums of anchor terms, changes and drifts."""
    terms = reduced_momentum.Terms
    state = reduced_momentum.init(8, 2, 3, np.float32)
    keys, result = reduced_momentum.tree_keys(KEY), []
    for step in range(1, 9):
        momentum, state = reduced_momentum.update(
            state,
            jnp.int32(step),
            terms(*jnp.asarray(X[step : step + 3])),
            steps_per_epoch=2,
            decay=jnp.float32(0.8),
            refresh=jnp.float32(0.2),
            stddevs=terms(*map(jnp.float32, (0.5, 0.7, 0.9))),
            keys=keys,
        )
        result.append(momentum)
    return result


LOGISTIC = solvers.losses.logistic(feature_norm=2.0)
SETTING = {**CONVEX, **LOGISTIC.setting, "step_size": 0.5}
EPOCHS = {"num_epochs": 2, "batch_size": 8}
NORMALISED = {**EPOCHS, "learning_rate": 0.1, "decay": 0.8}
NORMALISED |= {"epsilon": 5.0, "delta": 1e-3, "adjacency": Adjacency.REPLACE}
NOISY = {**SETTING, "noise_multiplier": 3.0}
TARGET = {**SETTING, "epsilon": 5.0, "delta": 1e-3}
ROUNDS = {"max_rounds": 8, "batch_size": 4, "smoothness": 1.0, "noise_multiplier": 3.0}
ROUNDS |= {"step_size": 0.5, "clip_norm": 1.0, "adjacency": Adjacency.REPLACE}
REDUCED = {"refresh": 0.2, "clip_norm": 1.0, "change_clip_norm": 0.1}
REDUCED |= {"drift_clip_norm": 0.1}
# Each run's solver and its arguments, by the name of the run.
SOLVERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "tree momentum, solver dp_nsgd": (
        solvers.dp_nsgd,
        {**NORMALISED, "order": "reshuffled", "clip_norm": 0.6},
    ),
    "solver dp_nsgd, strategy": (
        solvers.dp_nsgd,
        {**NORMALISED, "order": "fixed", "clip_norm": 0.6, "strategy": RATIONAL},
    ),
    "solver noisy_gd": (solvers.noisy_gd, {**NOISY, "num_steps": 4}),
    "solver noisy_gd, prox": (
        solvers.noisy_gd,
        {**TARGET, "num_steps": 4, "prox": solvers.prox.l1(0.01)},
    ),
    "solver noisy_cyclic_gd": (
        solvers.noisy_cyclic_gd,
        {**NOISY, **EPOCHS, "order": "reshuffled"},
    ),
    "solver noisy_sgd": (
        solvers.noisy_sgd,
        {**NOISY, "num_steps": 4, "batch_size": 8},
    ),
    "solver output_perturbation": (
        solvers.output_perturbation,
        {**SETTING, "epsilon": 1.0, "delta": 0.0, "radius": 5.0},
    ),
    "solver random_round_sgd": (solvers.random_round_sgd, ROUNDS),
    "solver sensitivity_reduced_nsgd": (
        solvers.sensitivity_reduced_nsgd,
        {**NORMALISED, **REDUCED},
    ),
}


def by_solver(solver, given):
    """Return a solver's parameters, its noise, and the loss of each step."""
    result = solver(LOGISTIC, np.zeros(3, np.float32), (X, Y), **given, key=KEY)
    return result.params, result.noise_multiplier, result.curve.loss


def runs() -> Iterator[Call]:
    """Return all runs.

    The names of runs with the noise of `tree_momentum` begin with "tree momentum".
    """
    for engine in ("auto", "bookkeeping", "ghost", "vmap"):
        for size in (None, 3):
            yield (
                f"engine {engine}, microbatches of {size}",
                functools.partial(
                    by_transformation,
                    dpjax.dp_sgd(0.5, **MEAN, key=KEY, momentum=0.9),
                    engine=engine,
                    microbatch_size=size,
                ),
            )
    nsgd = functools.partial(
        dpjax.dp_nsgd, 0.1, decay=0.8, num_steps=STEPS, **MEAN, key=KEY
    )
    momentum = functools.partial(
        dpjax.tree_momentum, 0.8, 0.7, num_steps=STEPS, key=KEY
    )
    added = functools.partial(
        dpjax.correlated_noise, stddev=0.7, num_steps=STEPS, key=KEY
    )
    decayed = strategies.geometric(0.8)
    for name, tx in {
        "dp_adam": dpjax.dp_adam(0.1, **MEAN, key=KEY),
        "dp_adamw": dpjax.dp_adamw(0.1, **MEAN, key=KEY),
        "tree momentum, dp_nsgd": nsgd(),
        "dp_nsgd, strategy": nsgd(strategy=RATIONAL),
        "tree momentum, stored": momentum(),
        "tree momentum, regenerated": momentum(buffer="regenerate"),
        "add_gaussian_noise": dpjax.add_gaussian_noise(0.7, key=KEY),
        "correlated_noise, rational": added(RATIONAL),
        "correlated_noise, scaled": added(SCALED),
        "correlated_noise, regenerated": added(decayed, buffer="regenerate"),
        "correlated_noise, tree": added(strategies.tree(0.8)),
    }.items():
        yield name, functools.partial(by_transformation, tx)
    for where in ("poisson", "fixed", "reshuffled", "random_bins", "fresh_bins"):
        yield f"plan, {where}", functools.partial(by_plan, sampling=where)
    shaped = functools.partial(by_plan, noise="correlated")
    swapped = {"adjacency": Adjacency.REPLACE}
    halved = optax.piecewise_constant_schedule(1.0, {2: 0.5})
    clip = dpjax.QuantileClip(0.4, quantile=0.6, noise_multiplier=2.0)
    sums = workloads.momentum_sum(0.9)
    banded, turns = strategies.banded(np.array([1.0, 0.5])), "cyclic_poisson"
    bins, tree = "random_bins", strategies.tree(0.8)
    yield from {
        "plan, fixed_size": lambda: by_plan(sampling="fixed_size", **swapped),
        "plan, cyclic_poisson": lambda: shaped(sampling=turns, strategy=banded),
        "plan, fixed, workload": lambda: shaped(sampling="fixed", workload=sums),
        "plan, fixed, tree": lambda: shaped(sampling="fixed", strategy=tree),
        "plan, bins, geometric": lambda: shaped(sampling=bins, strategy=decayed),
        "plan, quantile": lambda: by_plan(clip_norm=clip),
        "plan, users": by_user,
        "plan, accumulated": lambda: by_plan(accumulated=4),
        "plan, noise schedule": lambda: by_plan(noise_schedule=halved),
        "plan, clip schedule": lambda: by_plan(clip_schedule=halved),
        "plan, batch schedule": lambda: by_plan(batch_schedule=halved),
        "plan, Adam": lambda: by_plan(optax.adam(0.1)),
        "plan, clipped momentum": lambda: by_plan(
            optax.chain(optax.clip(0.5), optax.sgd(0.5, momentum=0.9))
        ),
        "window": by_window,
        "reduced momentum": by_reduced_momentum,
    }.items()
    for name, (solver, given) in SOLVERS.items():
        yield name, functools.partial(by_solver, solver, given)
