"""Define a small network, and the methods of training that scripts compare.

The scripts are `tune.py` and `train.py`. `dpjax.plan` constructs the methods with
independent noise, and the solver `dp_nsgd` the momentum with an aggregation tree.
`correlated_noise` adds the noise that is optimized for the sums of a momentum. All
private methods have δ = 1e-5 under replacement of one example.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import dpjax
from dpjax import Adjacency, accounting, sampling, solvers, strategies, workloads

DELTA = 1e-5
CLIP_NORM = 1.0
HIDDEN = 32


class Shape(NamedTuple):
    """The sizes that a program is compiled for; batch size None means all examples."""

    batch_size: int | None
    num_epochs: int


class Way(NamedTuple):
    """A method of training, and the settings that a search tries for the method.

    Attributes:
      runner: `runner(way, data, shape, epsilon)` returns a function and the noise
        multiplier. The function `run(key, noise_multiplier, momentum, learning_rate)`
        returns parameters.
      shapes: the shapes that a search tries.
      momenta: the momenta that a search tries; for Adam, the momentum is that of the
        first moment.
      learning_rates: the learning rates that a search tries; for `dp_nsgd` a learning
        rate is the length of a step.
      sampling: as for `dpjax.plan`.
      inner: maps learning rate and momentum to the optimizer.
      arithmetic: as for `dpjax.plan`.
    """

    runner: Callable[..., Any]
    shapes: tuple[Shape, ...]
    momenta: tuple[float, ...]
    learning_rates: tuple[float, ...]
    sampling: Any = None
    inner: Callable[..., optax.GradientTransformation] = optax.sgd
    arithmetic: str = "real"


def initial_params(key, num_inputs):
    """Return initial parameters of a network with one hidden layer."""
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (num_inputs, HIDDEN)) / math.sqrt(num_inputs),
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(second, (HIDDEN, 10)) / math.sqrt(HIDDEN),
        "b2": jnp.zeros(10),
    }


def logits(params, images):
    """Apply the network to one image or many."""
    return jnp.tanh(images @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss(params, examples):
    """Return the mean cross-entropy of a batch or of one example."""
    images, labels = examples
    scores = logits(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


@jax.jit
def accuracy(params, data):
    """Return the share of images that the network classifies correctly."""
    return jnp.mean(jnp.argmax(logits(params, data[0]), -1) == data[1])


def start(key, data):
    """Return the initial parameters of a seed, and the key of its run."""
    params_key, key = jax.random.split(key)
    return initial_params(params_key, data[0].shape[1]), key


def sizes(data, shape):
    """Return the number of examples in a step, and the number of steps."""
    size = min(shape.batch_size or len(data[0]), len(data[0]))
    return size, shape.num_epochs * -(-len(data[0]) // size)


def lengths(data, shape):
    """Return the number of steps, and the number of steps in an epoch."""
    _, num_steps = sizes(data, shape)
    return num_steps, num_steps // shape.num_epochs


@functools.cache
def plan_of(sampling, num_examples, size, steps, epsilon, arithmetic="real"):
    """Return the plan of a run."""
    return dpjax.plan(
        num_examples=num_examples,
        batch_size=size,
        num_steps=steps,
        epsilon=epsilon,
        delta=DELTA,
        clip_norm=CLIP_NORM,
        sampling=sampling,
        adjacency=Adjacency.REPLACE,
        arithmetic=arithmetic,
    )


def planned(way, data, shape, epsilon):
    """Train with independent noise, by a plan."""
    options = len(data[0]), *sizes(data, shape), epsilon, way.arithmetic
    plan = plan_of(way.sampling, *options)
    loss_and_grad = plan.value_and_grad(loss)

    def run(key, noise_multiplier, momentum, learning_rate):
        params, key = start(key, data)
        # A search varies the noise multiplier and compiles once. A final run uses the
        # plan's own noise multiplier.
        noisy = dataclasses.replace(plan, noise_multiplier=noise_multiplier)
        optimizer = noisy.optimizer(way.inner(learning_rate, momentum), key=key)

        def step(carry, number):
            params, state = carry
            _, grads = loss_and_grad(params, plan.load(data, number, key))
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = params, optimizer.init(params)
        return jax.lax.scan(step, carry, jnp.arange(plan.num_steps))[0][0]

    return run, plan.noise_multiplier


@functools.cache
def design(decay, num_steps, steps_per_epoch):
    """Return the best geometric noise for the sums of a momentum, and its μ.

    μ is that of noise multiplier 1.
    """
    options = {"num_steps": num_steps, "steps_per_epoch": steps_per_epoch}
    strategy = strategies.optimize(
        "geometric", workloads.momentum_sum(decay), **options
    )
    cost = {"order": "fixed", "adjacency": Adjacency.REPLACE}
    return strategy, float(accounting.correlated.mu(strategy, 1.0, **options, **cost))


def designed(way, data, shape, epsilon):
    """Train on fixed batches, with noise optimized for the method's only momentum."""
    (decay,), (size, _) = way.momenta, sizes(data, shape)
    num_steps, each = lengths(data, shape)
    strategy, mu = design(decay, num_steps, each)
    gradient = dpjax.clipped_grad(loss, CLIP_NORM)

    def run(key, noise_multiplier, momentum, learning_rate):
        params, key = start(key, data)
        optimizer = optax.chain(
            dpjax.correlated_noise(
                strategy,
                noise_multiplier * CLIP_NORM,
                num_steps=num_steps,
                key=key,
                buffer="regenerate",
            ),
            optax.scale(1 / size),
            way.inner(learning_rate, momentum),
        )

        def step(carry, number):
            params, state = carry
            batch = sampling.cyclic_step(len(data[0]), size, step=number % each)
            examples = jax.tree.map(lambda x: x[batch.indices], data)
            total, _ = gradient(params, examples, mask=batch.mask)
            updates, state = optimizer.update(total, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = params, optimizer.init(params)
        return jax.lax.scan(step, carry, jnp.arange(num_steps))[0][0]

    # μ is proportional to the inverse of the noise multiplier.
    return run, mu / float(accounting.gdp.mu(epsilon, DELTA))


def plain(way, data, shape, _):
    """Train without clipping or noise, on batches reshuffled in every epoch."""
    num_examples, (size, num_steps) = len(data[0]), sizes(data, shape)
    each = num_steps // shape.num_epochs

    def run(key, _, momentum, learning_rate):
        params, key = start(key, data)
        optimizer = way.inner(learning_rate, momentum)

        def step(carry, number):
            params, state = carry
            batch = sampling.reshuffled_step(
                num_examples, size, key=key, epoch=number // each, step=number % each
            )
            examples = jax.tree.map(lambda x: x[batch.indices], data)

            def mean(params):
                losses = jax.vmap(loss, (None, 0))(params, examples)
                return jnp.mean(losses, where=batch.mask)

            updates, state = optimizer.update(jax.grad(mean)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = params, optimizer.init(params)
        return jax.lax.scan(step, carry, jnp.arange(num_steps))[0][0]

    return run, 0.0


def solved(data, shape, epsilon, key, momentum, learning_rate):
    """Run the solver of tree-aggregated momentum; return its `Result`."""
    params, key = start(key, data)
    return solvers.dp_nsgd(
        loss,
        params,
        data,
        epsilon=epsilon,
        delta=DELTA,
        adjacency=Adjacency.REPLACE,
        order="fixed",
        num_epochs=shape.num_epochs,
        batch_size=sizes(data, shape)[0],
        learning_rate=learning_rate,
        decay=momentum,
        clip_norm=CLIP_NORM,
        key=key,
    )


def adam(learning_rate, momentum):
    """Return Adam, with optax's default for its second moment."""
    return optax.adam(learning_rate, b1=momentum)


def averaged(learning_rate, momentum):
    """Return SGD along an average of past gradients that weights recent ones most."""
    return optax.chain(optax.ema(momentum, debias=False), optax.scale(-learning_rate))


BATCHES = tuple(Shape(size, epochs) for size in (64, 256, 512) for epochs in (20, 60))
FULL_BATCHES = tuple(Shape(None, epochs) for epochs in (5, 10, 20, 40, 80, 160))
RATES = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0)
ADAM_RATES = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
LENGTHS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
NON_PRIVATE, NSGD = "non-private", "dp_nsgd (tree)"
POISSON_SGD, POISSON_ADAM = "DP-SGD, Poisson", "DP-Adam, Poisson"
FIXED, FULL = "DP-SGD, fixed batches", "DP-SGD, full batch"
GEOMETRIC = "momentum, geometric noise"
# Each method has the same number of settings.
WAYS = {
    NON_PRIVATE: Way(plain, BATCHES, (0.0, 0.9), RATES),
    POISSON_SGD: Way(planned, BATCHES, (0.0, 0.9), RATES, "poisson"),
    POISSON_ADAM: Way(planned, BATCHES, (0.0, 0.9), ADAM_RATES, "poisson", adam),
    FIXED: Way(planned, BATCHES, (0.0, 0.9), RATES, "fixed"),
    FULL: Way(planned, FULL_BATCHES, (0.0, 0.9), RATES, "fixed"),
    NSGD: Way(solved, BATCHES, (0.9, 0.98), LENGTHS),
    GEOMETRIC: Way(designed, BATCHES, (0.9, 0.98), RATES, inner=averaged),
}
