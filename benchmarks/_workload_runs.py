"""Define the training runs of `workloads.py`: data, models, optimizers and noise.

All batches are drawn in a fixed order, at δ = 1e-5 under replacement of one example.
The noise of all steps is C⁻¹z with z white, computed by a product of matrices. One
compiled program then serves every strategy C. `dpjax.correlated_noise` computes the
same noise step by step.
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
# The decay of the tree for plain SGD: a tree of sums is a tree with decay nearly 1.
NEARLY_ONE = 1 - 2.0**-20


class Problem(NamedTuple):
    """Data and a model.

    Attributes:
      data: features f[n, k] and labels i[n] for training.
      test: features and labels for the test.
      batch_size: the number of examples in a step.
      num_epochs: how often the run sees each example.
      initial: maps a key to initial parameters.
      scores: maps parameters and features f[n, k] to scores f[n, classes].
    """

    data: Any
    test: Any
    batch_size: int
    num_epochs: int
    initial: Callable[..., Any]
    scores: Callable[..., Any]


class Shape(NamedTuple):
    """The number T of steps in a run, and the number n_b of steps in an epoch."""

    num_steps: int
    steps_per_epoch: int


class Design(NamedTuple):
    """A strategy C, C⁻¹ as a matrix f[T, T], and a run's μ at noise multiplier 1."""

    strategy: Any
    matrix: np.ndarray
    mu: float


def linear(params, features):
    """Return the scores of logistic regression."""
    return features @ params["w"] + params["b"]


def zeros(num_features, num_classes, _):
    """Return the initial parameters of logistic regression."""
    return {"w": jnp.zeros((num_features, num_classes)), "b": jnp.zeros(num_classes)}


def split(data, size):
    """Split the data into the first `size` examples and all others."""
    return tuple(tuple(x[part] for x in data) for part in (np.s_[:size], np.s_[size:]))


def digits(_):
    """Return scikit-learn's digits with the network of `train.py`."""
    data, test = _images.load(None)
    initial = functools.partial(
        _train_methods.initial_params, num_inputs=data[0].shape[1]
    )
    return Problem(data, test, 64, 20, initial, _train_methods.logits)


def mnist(folder, size=4000):
    """Return MNIST's test images, averaged over squares of 2 by 2 pixels."""
    (images, labels) = map(jnp.concatenate, zip(*_images.load(folder), strict=True))
    pixels = images.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196)
    initial = functools.partial(zeros, 196, 10)
    return Problem(*split((pixels, labels), size), 128, 10, initial, linear)


def table(data_set, folder, size=4000):
    """Return rows of a data set in the unit ball, alternating between both classes.

    Both classes have equally many rows, since nine in ten clients of Bank are of one
    class.
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
    """Return an optimizer that takes steps of one length along the momentum."""
    return optax.chain(
        optax.ema(decay, debias=False),
        optax.normalize_by_update_norm(),
        optax.scale(-rate),
    )


# Functions of learning rate and momentum.
OPTIMIZERS = {
    "SGD": lambda rate, _: optax.sgd(rate),
    "momentum": _train_methods.averaged,
    "normalised momentum": normalised,
    "Adam": lambda rate, decay: optax.adam(rate, b1=decay),
}


def shape_of(problem, data):
    """Return the shape of a run on this data."""
    steps_per_epoch = -(-len(data[0]) // problem.batch_size)
    return Shape(problem.num_epochs * steps_per_epoch, steps_per_epoch)


def workloads_of(decay):
    """Return workloads by name.

    Without momentum, prefix sums equal the sums; both names are kept.
    """
    of_sums = functools.partial(workloads.momentum_sum, decay)
    return {
        "prefix sums": workloads.prefix_sum(),
        "sums": of_sums(),
        "sums, τ = 100": of_sums(weight_decay=1 / 100),
        "sums, τ = 10": of_sums(weight_decay=1 / 10),
        "momentum": workloads.momentum(decay),
    }


def weights(workload, num_steps):
    """Return the workload as a matrix, f[T, T]."""
    row = _optimize.coefficients(workload, num_steps)
    return toeplitz(row, np.zeros(num_steps))


def predicted(design, workload):
    """Return the root mean square of a workload's noise at μ = 1."""
    error = accounting.correlated.error(design.strategy, workload, len(design.matrix))
    return design.mu * float(error)


def of_strategy(strategy, shape):
    """Return C⁻¹ and the privacy parameter μ of a strategy C."""
    mu = accounting.correlated.mu(
        strategy, 1.0, **shape._asdict(), order="fixed", adjacency=Adjacency.REPLACE
    )
    matrix = np.linalg.inv(np.asarray(strategy.matrix(shape.num_steps)))
    return Design(strategy, matrix, float(mu))


@functools.cache
def designs(decay, shape):
    """Return noise designs by the workload that each is optimized for.

    Without momentum, equal designs are computed only once.
    """
    result = {
        name: strategies.optimize("rational", w, num_vectors=2, **shape._asdict())
        for name, w in workloads_of(decay).items()
        if decay or name.startswith("sums")
    }
    result["independent"] = strategies.independent()
    result["tree"] = strategies.tree(decay or NEARLY_ONE)
    return {name: of_strategy(strategy, shape) for name, strategy in result.items()}


def multiplier(design, epsilon):
    """Return the noise multiplier, to which μ is inversely proportional."""
    return design.mu / float(accounting.gdp.mu(epsilon, DELTA))


def noise(matrix, key, size):
    """Return the noise C⁻¹z, f[T, size]."""
    z = jax.random.normal(jax.random.fold_in(key, 1), (len(matrix), size))
    return jnp.asarray(matrix, jnp.float32) @ z


def size_of(problem):
    """Return the number of parameters."""
    params = jax.eval_shape(problem.initial, jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def trainer(problem, optimizer, data, judged):
    """Return a function that trains, and returns the accuracy on `judged`.

    The function's arguments are a key, C⁻¹z, the noise multiplier σ, the clip norm C,
    the learning rate η and the momentum β. Sums are in units of the clip norm, so that
    a learning rate has the same meaning for all clip norms.
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
