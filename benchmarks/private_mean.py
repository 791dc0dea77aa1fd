"""Measure how much a private mean of the features improves a linear model.

    python benchmarks/private_mean.py [--results FOLDER]

The data are scikit-learn's digits, with pixels scaled by their declared range.
`dpjax.plan` trains softmax regression on full batches, with independent noise, at
δ = 1e-5 under REPLACE. One run spends all of ε on training. The other run spends 10 %
of μ² on the mean of the features, subtracts the mean, and spends the rest of μ² on
training. Both runs have the same ε in total.

This comparison searched for no settings. The 80 steps and the learning rate 1 are the
settings that `tune.py` found for a network on full batches at ε = 1. Both runs use
these settings at every ε. Rows are clipped to half of the largest norm that pixels in
[0, 1] allow.
"""

import math

import jax
import jax.numpy as jnp
import optax
from _images import load
from _results import Table, parser, print_tables, write

import dpjax
from dpjax import Adjacency, statistics
from dpjax.accounting import gdp

DELTA, CLIP_NORM, STEPS, RATE = 1e-5, 1.0, 80, 1.0
SHARE = 0.1  # the share of μ² for the mean
REPLACE = Adjacency.REPLACE


def logits(params, images):
    """Return the scores of the linear model."""
    return images @ params["w"] + params["b"]


def loss(params, examples):
    """Return the mean cross-entropy."""
    images, labels = examples
    scores = logits(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def trained_plan(num_examples, mu):
    """Return a plan on full batches that spends μ."""
    return dpjax.plan(
        num_examples=num_examples,
        batch_size=num_examples,
        num_steps=STEPS,
        epsilon=float(gdp.epsilon(mu, DELTA)),
        delta=DELTA,
        clip_norm=CLIP_NORM,
        sampling="fixed",
        adjacency=REPLACE,
    )


def scores(data, held_out, mu, share, keys):
    """Return a test accuracy for each key; the mean gets `share` of μ²."""
    images, labels = data
    num_examples, size = images.shape
    plan = trained_plan(num_examples, mu * math.sqrt(1 - share))
    loss_and_grad = plan.value_and_grad(loss)

    def run(key):
        center = jnp.zeros(size)
        if share:
            # The mean with noise multiplier z has μ = 2 / z under REPLACE.
            center = statistics.mean(
                images,
                clip_norm=math.sqrt(size) / 2,
                noise_multiplier=2 / (mu * math.sqrt(share)),
                key=key,
                adjacency=REPLACE,
            ).value
        centered = images - center[None], labels
        optimizer = plan.optimizer(optax.sgd(RATE), key=key)
        params = {"w": jnp.zeros((size, 10)), "b": jnp.zeros(10)}

        def step(carry, number):
            params, state = carry
            _, grads = loss_and_grad(params, plan.load(centered, number, key))
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = params, optimizer.init(params)
        params = jax.lax.scan(step, carry, jnp.arange(STEPS))[0][0]
        result = jnp.argmax(logits(params, held_out[0] - center[None]), -1)
        return jnp.mean(result == held_out[1])

    return jax.jit(jax.vmap(run))(keys)


def main():
    """Train, and print and write the table."""
    options = parser(__doc__)
    options.add_argument("--epsilons", type=float, nargs="+", default=[1, 2, 4])
    options.add_argument("--seeds", type=int, default=8)
    arguments = options.parse_args()
    data, held_out = load(None)
    keys = jax.random.split(jax.random.key(2026), arguments.seeds)
    rows = []
    for epsilon in arguments.epsilons:
        mu = float(gdp.mu(epsilon, DELTA))
        cells = []
        for share in (0.0, SHARE):
            result = scores(data, held_out, mu, share, keys)
            cells.append([float(result.mean()), float(result.std(ddof=1))])
        rows.append([epsilon, *cells])
        print(rows[-1], flush=True)
    columns = {"ε": "{:g}"} | dict.fromkeys(
        ["without a mean", "with 10 % of μ² for a mean"], "{:.3f} ± {:.3f}"
    )
    tables = [Table("accuracy", columns, rows)]
    print_tables(*tables)
    write("private_mean", arguments, tables)


if __name__ == "__main__":
    main()
