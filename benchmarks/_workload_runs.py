"""What `workloads.py` trains: data, models, optimizers, and noise as a matrix.

Everything is drawn in a fixed order, at δ = 1e-5 where one example is replaced. The
noise of all steps is C⁻¹z with z white, by a product of matrices, which
`dpjax.correlated_noise` makes step by step: one compiled program then serves every C.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import _erm_data
import _images
import _train_methods
import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.linalg import toeplitz

import dpjax
from dpjax import Adjacency, accounting, sampling, strategies, workloads
from dpjax.strategies import _optimize

DELTA = 1e-5
# Of a run of plain SGD, for which a tree of sums is one whose decay is nearly 1.
NEARLY_ONE = 1 - 2.0**-20


class Problem(NamedTuple):
    """Data and a model.

    Attributes:
      data: features f[n, k] and labels i[n] to train on.
      test: the same, to test on.
      batch_size: examples in a step.
      num_epochs: how often each is seen.
      initial: parameters from a key.
      scores: of features f[n, k], f[n, classes].
    """

    data: Any
    test: Any
    batch_size: int
    num_epochs: int
    initial: Callable[..., Any]
    scores: Callable[..., Any]


class Shape(NamedTuple):
    """Of a run: T, and n_b."""

    num_steps: int
    steps_per_epoch: int


class Design(NamedTuple):
    """A strategy C, C⁻¹ as a matrix f[T, T], and a run's μ at noise multiplier 1."""

    strategy: Any
    matrix: np.ndarray
    mu: float


def linear(params, features):
    """Logistic regression."""
    return features @ params["w"] + params["b"]


def zeros(num_features, num_classes, _):
    """Where it starts."""
    return {"w": jnp.zeros((num_features, num_classes)), "b": jnp.zeros(num_classes)}


def split(data, size):
    """The first examples, and all others."""
    return tuple(tuple(x[part] for x in data) for part in (np.s_[:size], np.s_[size:]))


def digits(_):
    """scikit-learn's digits, and the network of `train.py`."""
    data, test = _images.load(None)
    initial = functools.partial(
        _train_methods.initial_params, num_inputs=data[0].shape[1]
    )
    return Problem(data, test, 64, 20, initial, _train_methods.logits)


def mnist(folder, size=4000):
    """MNIST's test images, as means of 2 by 2 pixels."""
    (images, labels) = map(jnp.concatenate, zip(*_images.load(folder), strict=True))
    pixels = images.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196)
    initial = functools.partial(zeros, 196, 10)
    return Problem(*split((pixels, labels), size), 128, 10, initial, linear)


def table(data_set, folder, size=4000):
    """Rows of a data set in the unit ball, by turns of one class and of the other.

    As many as there are of both, since nine in ten clients of Bank are of one class.
    """
    features, labels = _erm_data.load(data_set, folder)
    classes = [np.flatnonzero(labels == label) for label in (-1, 1)]
    rows = np.stack([x[: min(map(len, classes))] for x in classes], axis=1).ravel()
    both = jnp.asarray(features[rows]), jnp.asarray(labels[rows] > 0, jnp.int32)
    initial = functools.partial(zeros, features.shape[1], 2)
    return Problem(*split(both, size), 128, 10, initial, linear)


PROBLEMS = {
    "digits": digits,
    "MNIST": mnist,
    "Adult": functools.partial(table, _erm_data.ADULT),
    "Bank": functools.partial(table, _erm_data.BANK),
}


def normalised(rate, decay):
    """Steps of one length along the momentum."""
    return optax.chain(
        optax.ema(decay, debias=False),
        optax.normalize_by_update_norm(),
        optax.scale(-rate),
    )


# Of learning rate and momentum.
OPTIMIZERS = {
    "SGD": lambda rate, _: optax.sgd(rate),
    "momentum": _train_methods.averaged,
    "normalised momentum": normalised,
    "Adam": lambda rate, decay: optax.adam(rate, b1=decay),
}


def shape_of(problem, data):
    """How long a run on this data is."""
    steps_per_epoch = -(-len(data[0]) // problem.batch_size)
    return Shape(problem.num_epochs * steps_per_epoch, steps_per_epoch)


def workloads_of(decay):
    """Workloads by name. Without momentum prefix sums are the sums, all the same."""
    of_sums = functools.partial(workloads.momentum_sum, decay)
    return {
        "prefix sums": workloads.prefix_sum(),
        "sums": of_sums(),
        "sums, τ = 100": of_sums(weight_decay=1 / 100),
        "sums, τ = 10": of_sums(weight_decay=1 / 10),
        "momentum": workloads.momentum(decay),
    }


def weights(workload, num_steps):
    """The workload as a matrix, f[T, T]."""
    row = _optimize.coefficients(workload, num_steps)
    return toeplitz(row, np.zeros(num_steps))


def predicted(design, workload):
    """The root mean square of the noise in a workload at μ = 1."""
    error = accounting.correlated.error(design.strategy, workload, len(design.matrix))
    return design.mu * float(error)


def of_strategy(strategy, shape):
    """C⁻¹, and the privacy of C."""
    mu = accounting.correlated.mu(
        strategy, 1.0, **shape._asdict(), order="fixed", adjacency=Adjacency.REPLACE
    )
    matrix = np.linalg.inv(np.asarray(strategy.matrix(shape.num_steps)))
    return Design(strategy, matrix, float(mu))


@functools.cache
def designs(decay, shape):
    """Noise by what it is designed for; without momentum, each kind once."""
    found = {
        name: strategies.optimize("rational", w, num_vectors=2, **shape._asdict())
        for name, w in workloads_of(decay).items()
        if decay or name.startswith("sums")
    }
    found["independent"] = strategies.independent()
    found["tree"] = strategies.tree(decay or NEARLY_ONE)
    return {name: of_strategy(strategy, shape) for name, strategy in found.items()}


def multiplier(design, epsilon):
    """The noise multiplier: μ is proportional to its inverse."""
    return design.mu / float(accounting.gdp.mu(epsilon, DELTA))


def noise(matrix, key, size):
    """C⁻¹z, f[T, size]."""
    z = jax.random.normal(jax.random.fold_in(key, 1), (len(matrix), size))
    return jnp.asarray(matrix, jnp.float32) @ z


def size_of(problem):
    """How many parameters there are."""
    params = jax.eval_shape(problem.initial, jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def trainer(problem, optimizer, data, judged):
    """The accuracy on what is judged of a run: of a key, C⁻¹z, σ, C, η and β.

    Sums are taken in units of the clip norm, so that a learning rate means the same
    whatever it is.
    """
    shape = shape_of(problem, data)

    def loss(params, example):
        features, label = example
        scores = problem.scores(params, features)
        return optax.softmax_cross_entropy_with_integer_labels(scores, label)

    def run(key, noise, noise_multiplier, clip_norm, rate, decay):
        params = problem.initial(key)
        inner = OPTIMIZERS[optimizer](rate, decay)
        gradient = dpjax.clipped_grad(loss, clip_norm)
        unravel = jax.flatten_util.ravel_pytree(params)[1]

        def step(carry, now):
            params, state = carry
            number, z = now
            batch = sampling.cyclic_step(
                len(data[0]), problem.batch_size, step=number % shape.steps_per_epoch
            )
            examples = jax.tree.map(lambda x: x[batch.indices], data)
            total, _ = gradient(params, examples, mask=batch.mask)
            mean = jax.tree.map(
                lambda g, z: (
                    (g / clip_norm + noise_multiplier * z) / problem.batch_size
                ),
                total,
                unravel(z),
            )
            updates, state = inner.update(mean, state, params)
            return (optax.apply_updates(params, updates), state), None

        steps = jnp.arange(shape.num_steps), noise
        (params, _), _ = jax.lax.scan(step, (params, inner.init(params)), steps)
        scores = problem.scores(params, judged[0])
        return jnp.mean(jnp.argmax(scores, -1) == judged[1])

    return run
