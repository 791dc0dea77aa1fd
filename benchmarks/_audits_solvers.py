"""Define attacks on the last iterates of solvers, over thousands of runs.

The two neighbouring data sets are a hard case for privacy. One example's gradient has
the largest possible norm, is equal in all steps, and has the opposite sign on the
neighbouring data set. Losses are linear, except for objective perturbation, so that the
last iterate is a known function of the gradients and of the noise.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import _audits
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.special import gammaln, logsumexp

import dpjax
from dpjax import Adjacency, auditing, sampling, solvers
from dpjax.noise import _correlated
from dpjax.noise import _reduced_momentum as reduced_momentum
from dpjax.solvers import _descent, _objective_perturbation, _output_perturbation

CLIP_NORM, SIGMA, DELTA, DECAY = 0.7, 1.6, 1e-2, 0.8
KNOWN = {
    "gradient_norm": CLIP_NORM,
    "clipped": True,
    "generalised_linear": True,
    "smoothness": 0.25,
    "weak_convexity": 0.0,
    "strong_convexity": 0.0,
    "diameter": float("inf"),
    "adjacency": Adjacency.REPLACE,
    "step_size": 1.0,
}
EPOCHS = {"epsilon": 3.0, "delta": DELTA, "adjacency": Adjacency.REPLACE}
EPOCHS |= {"decay": DECAY, "clip_norm": CLIP_NORM}


class Solver(NamedTuple):
    """A solver with its settings, and two neighbouring data sets.

    Attributes:
      run: maps a loss, data and a key to a `Result`.
      data: a data set with the example, whose gradient is along the first axis.
      neighbour: the data set with another example in its place.
      parts: the patches that introduce the deliberate error.
      score: maps a result to a number.
      gaussian: whether scores are Gaussian with one variance.
      delta: the δ at which ε is computed.
      broken: a description of the deliberate error.
    """

    run: Callable[..., solvers.Result]
    data: np.ndarray
    neighbour: np.ndarray
    parts: tuple[tuple[Any, str, Callable[..., Any]], ...]
    score: Callable[[solvers.Result], jax.Array] = lambda result: -result.params[0]
    gaussian: bool = True
    delta: float = DELTA
    broken: str = "noise halved"


def _data(size: int, place: int, others: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return two data sets in one dimension that differ in the example at `place`.

    The example is the clip norm in the first data set, and minus the clip norm in the
    second. All other examples equal `others`.
    """
    without = np.full((size, 1), others, np.float32)
    without[place] = -CLIP_NORM
    inside = without.copy()
    inside[place] = CLIP_NORM
    return inside, without


def _half(whole: Callable[..., Any], *args: Any, **options: Any) -> Any:
    noise = whole(*args, **options)
    return jax.tree.map(lambda x: x * jnp.asarray(0.5, x.dtype), noise)


def _halved(module: Any, name: str) -> tuple[Any, str, Callable[..., Any]]:
    return module, name, functools.partial(_half, getattr(module, name))


def _always_first(num_examples: int, batch_size: int, **_: Any) -> sampling.Batch:
    """Return a batch that is not random and always contains the first example."""
    return sampling.Batch(jnp.arange(batch_size), jnp.ones(batch_size, bool))


NOISE = _halved(_descent, "gaussian_like")
NOT_RANDOM = (sampling, "fixed_size", _always_first)


def _noisy(solver: Callable[..., Any], regularization: float, **options: Any) -> Any:
    def run(loss: Any, data: np.ndarray, key: jax.Array) -> solvers.Result:
        return solver(
            loss,
            np.zeros(1, np.float32),
            data,
            **KNOWN,
            regularization=regularization,
            noise_multiplier=SIGMA,
            key=key,
            **options,
        )

    return run


def _perturbed(epsilon: float, delta: float) -> Callable[..., solvers.Result]:
    def run(loss: Any, data: np.ndarray, key: jax.Array) -> solvers.Result:
        return solvers.output_perturbation(
            loss,
            np.zeros(1, np.float32),
            data,
            **KNOWN,
            regularization=0.1,
            epsilon=epsilon,
            delta=delta,
            num_steps=4,
            key=key,
        )

    return run


def _objective(_: Any, data: np.ndarray, key: jax.Array) -> solvers.Result:
    """Minimise Huber losses of features 1 with labels far from all scores.

    The gradients then have the size of the data. An example of 0 has a feature of 0,
    and no gradient.
    """
    return solvers.objective_perturbation(
        solvers.losses.huber(CLIP_NORM, feature_norm=1.0),
        np.zeros(1, np.float32),
        (np.sign(np.abs(data)), -1e3 * data[:, 0]),
        epsilon=3.0,
        delta=DELTA,
        adjacency=Adjacency.REPLACE,
        regularization=10.0,
        key=key,
    )


# --- a random number of rounds, which the solver also releases

ROUNDS, SIZE = 3, 4


def _random_rounds(loss: Any, data: np.ndarray, key: jax.Array) -> solvers.Result:
    return solvers.random_round_sgd(
        loss,
        np.zeros(1, np.float32),
        data,
        noise_multiplier=SIGMA,
        adjacency=Adjacency.REPLACE,
        max_rounds=ROUNDS,
        batch_size=1,
        step_size=1.0,
        smoothness=0.25,
        clip_norm=CLIP_NORM,
        key=key,
    )


def _by_rounds(result: solvers.Result) -> jax.Array:
    """Score a run by a log-likelihood ratio for the number of draws of the example.

    The ratio compares a binomial number k of draws in R rounds with no draw. In units
    of the clip norm the sum of all steps is N(−R + 2k, σ²R), with k ~ Bin(R, 1/n),
    where n is the number of examples and σ the noise multiplier.
    """
    rounds = jnp.asarray(result.num_steps, jnp.float32)
    shifted = -result.params[0] / CLIP_NORM + rounds
    k = jnp.arange(ROUNDS + 1.0)
    choose = (
        gammaln(rounds + 1) - gammaln(k + 1) - gammaln(jnp.maximum(rounds - k, 0) + 1)
    )
    log_rate = choose + k * np.log(1 / SIZE) + (rounds - k) * np.log(1 - 1 / SIZE)
    ratio = (2 * k * shifted - (2 * k) ** 2 / 2) / (SIGMA**2 * rounds)
    return logsumexp(jnp.where(k <= rounds, log_rate + ratio, -jnp.inf))


# --- normalised steps: the other examples' gradients are along the second axis, so that
# the angle of a step reveals the momentum's component along the first axis. The attack
# uses the step sizes as its weights.

OTHERS = 64


def _normalised_data() -> tuple[np.ndarray, np.ndarray]:
    with_other = np.zeros((2 * OTHERS, 2), np.float32)
    with_other[:, 1] = CLIP_NORM
    with_other[0] = [-CLIP_NORM, 0]
    inside = with_other.copy()
    inside[0] = [CLIP_NORM, 0]
    return inside, with_other


def _dp_nsgd(loss: Any, data: np.ndarray, key: jax.Array) -> solvers.Result:
    return solvers.dp_nsgd(
        loss,
        np.zeros(2, np.float32),
        data,
        **EPOCHS,
        order="fixed",
        num_epochs=2,
        batch_size=OTHERS,
        learning_rate=_tree_weights(),
        key=key,
    )


@functools.cache
def _tree_weights() -> optax.Schedule:
    """Return step sizes whose last iterate is a matched filter of all steps."""
    silent = dpjax.tree_momentum(DECAY, 0.0, num_steps=4, key=jax.random.key(0))
    alone = jnp.array([[1.0], [0.0], [1.0], [0.0]])
    white = _audits.white_by_tree(DECAY)
    nodes, back = jax.vjp(white, auditing.released(silent, alone))
    weights = back(nodes)[0] * auditing.released(silent, OTHERS - alone)
    weights = np.asarray(weights[:, 0])
    return lambda step: jnp.asarray(weights)[step]


def _reduced(loss: Any, data: np.ndarray, key: jax.Array) -> solvers.Result:
    return _reduced_by(_reduced_weights(), loss, data, key)


def _reduced_by(
    rate: optax.ScalarOrSchedule, loss: Any, data: np.ndarray, key: jax.Array
) -> solvers.Result:
    return solvers.sensitivity_reduced_nsgd(
        loss,
        np.zeros(2, np.float32),
        data,
        **EPOCHS,
        num_epochs=2,
        batch_size=2 * OTHERS,
        learning_rate=rate,
        refresh=1.0,  # the changes of constant gradients are zero
        change_clip_norm=CLIP_NORM,
        drift_clip_norm=1e-4 * CLIP_NORM,  # no drift at one step per epoch
        key=key,
    )


@functools.cache
def _reduced_weights() -> optax.Schedule:
    """Return step sizes for two steps of `sensitivity_reduced_nsgd`.

    The last iterate is then P₁ / s₁² + P₂ / s₂². P₁ = m₁ and P₂ = m₂ − βm₁ are the
    windows that the momenta m₁ and m₂ of the two steps consist of, β is the decay, and
    s₁ and s₂ are the noise multipliers of the windows.
    """
    result = _reduced_by(1.0, linear, _normalised_data()[0], jax.random.key(0))
    first, second = (float(x) ** -2 for x in result.noise_multiplier[:2])
    # Up to a factor, the norms of the two momenta are 1 and 1 + β.
    weights = np.array([first - DECAY * second, second * (1 + DECAY)], np.float32)
    return lambda step: jnp.asarray(weights)[step]


SOLVERS = {
    "solvers.noisy_gd": Solver(
        _noisy(solvers.noisy_gd, 0.3, num_steps=4), *_data(4, 0), parts=(NOISE,)
    ),
    "solvers.noisy_cyclic_gd": Solver(
        _noisy(solvers.noisy_cyclic_gd, 0.8, order="fixed", num_epochs=2, batch_size=2),
        *_data(4, 3),
        parts=(NOISE,),
    ),
    "solvers.noisy_sgd": Solver(
        _noisy(solvers.noisy_sgd, 0.9, num_steps=2, batch_size=1),
        *_data(SIZE, 0, others=-CLIP_NORM),
        parts=(NOT_RANDOM,),
        broken="the same batch in all steps",
        gaussian=False,
    ),
    "solvers.output_perturbation": Solver(
        _perturbed(3.0, DELTA),
        *_data(4, 0),
        parts=(_halved(_output_perturbation, "gaussian_like"),),
    ),
    "solvers.output_perturbation, δ = 0": Solver(
        _perturbed(1.5, 0.0),
        *_data(4, 0),
        parts=(_halved(_output_perturbation, "gamma_norm_like"),),
        gaussian=False,
        delta=0.0,
    ),
    "solvers.objective_perturbation": Solver(
        _objective,
        *_data(4, 0),
        parts=(_halved(_objective_perturbation, "gaussian_like"),),
    ),
    "solvers.random_round_sgd": Solver(
        _random_rounds,
        *_data(SIZE, 0, others=-CLIP_NORM),
        score=_by_rounds,
        parts=(NOT_RANDOM,),
        broken="the same batch in all steps",
        gaussian=False,
    ),
    "solvers.dp_nsgd": Solver(
        _dp_nsgd,
        *_normalised_data(),
        parts=(_halved(_correlated, "gaussian_like"),),
        gaussian=False,
    ),
    "solvers.sensitivity_reduced_nsgd": Solver(
        _reduced,
        *_normalised_data(),
        parts=(
            _halved(reduced_momentum, "node_noise"),
            _halved(reduced_momentum, "gaussian_like"),
        ),
        gaussian=False,
    ),
}


def linear(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return a loss whose gradient is the example."""
    return jnp.vdot(w, x)


def of_solver(
    name: str, *, num_runs: int, key: jax.Array, broken: bool = False
) -> auditing.Outputs:
    """Score runs on both data sets; the whole solver runs under `jax.vmap`."""
    solver = SOLVERS[name]

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return linear(w, x)  # a new function, so that JAX compiles again

    with contextlib.ExitStack() as patched:
        for part in solver.parts if broken else ():
            patched.enter_context(mock.patch.object(*part))
        return auditing.train_many(
            lambda data, key: solver.score(solver.run(loss, data, key)),
            solver.data,
            solver.neighbour,
            num_runs=num_runs,
            key=key,
        )


def reported(name: str) -> float:
    """Return the ε that a solver reports for its run."""
    solver = SOLVERS[name]
    result = solver.run(linear, solver.data, jax.random.key(0))
    return float(result.guarantee.epsilon(solver.delta))
