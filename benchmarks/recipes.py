"""Measure accuracy with several views of each example, and with averaged parameters.

    python benchmarks/recipes.py [--seeds 16] [--results FOLDER]

A network with one hidden layer is trained on scikit-learn's digits by SGD on Poisson
batches, at ε = 4 and δ = 1e-5 under ADD_REMOVE. There are two variants:

  with views     an example's loss is the mean over K shifted images of the example, so
                 that its gradient is the mean over the views and is clipped once
  with averages  the tested parameters are an average over many steps

Accuracies are measured on unchanged images, and on images that are shifted at random
like the views. For each accuracy, the same search chooses the learning rate from six
rates. The search trains on four fifths of the training images, in batches that are
four fifths as large, so that noise and steps are those of the final run. The search
evaluates each rate on the last fifth. No other setting is tuned. The search reads
private images but no test images, and the stated ε do not count the search.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _images import load
from _results import Table, parser, print_tables, write
from _train_methods import CLIP_NORM, DELTA, accuracy, logits, start
from _workload_runs import split
from choice import part_of
from tune import HELD_OUT, QUICKLY

import dpjax

EPSILON, BATCH_SIZE, NUM_STEPS = 4.0, 256, 240
RATES = (0.12, 0.25, 0.5, 1.0, 2.0, 4.0)
VIEWS = (0, 1, 4, 16)  # 0: only the unchanged image
LARGEST_SHIFT = 1.0  # in pixels
DECAYS = (0.9, 0.98)
PARAMETERS = (
    "of the last step",
    *(f"moving average, decay {decay}" for decay in DECAYS),
    "mean of the last half of the steps",
)
SEARCH_SEEDS = 4


def shifted(key, image):
    """Shift an image at random by at most a pixel, with linear interpolation."""
    move = jax.random.uniform(key, (2,), minval=-LARGEST_SHIFT, maxval=LARGEST_SHIFT)
    at = jnp.arange(8)
    down, right = jnp.maximum(0, 1 - jnp.abs(at[:, None] - at - move[:, None, None]))
    return (down @ image.reshape(8, 8) @ right.T).reshape(-1)


def loss(params, batch, key, num_views):
    """Return the mean cross-entropy over the views of the batch's only example."""
    (image,), (label,) = batch
    images = image[None]
    if num_views:
        keys = jax.random.split(key, num_views)
        images = jax.vmap(shifted, (0, None))(keys, image)
    scores = logits(params, images)
    labels = jnp.full(len(images), label)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def trainer(plan, num_views, data, judged):
    """Return a function from a key and a learning rate to accuracies f[parameters, 2].

    The accuracies are those on unchanged images and on shifted images.
    """
    loss_and_grad = plan.value_and_grad(functools.partial(loss, num_views=num_views))
    images, labels = judged
    keys = jax.random.split(jax.random.key(2029), len(images))
    both = judged, (jax.vmap(shifted)(keys, images), labels)  # unchanged, shifted
    moving = [optax.ema(decay) for decay in DECAYS]
    first_of_tail = plan.num_steps // 2

    def run(key, rate):
        params, key = start(key, data)
        keys = dict(zip(("run", "views"), jax.random.split(key), strict=True))
        optimizer = plan.optimizer(optax.sgd(rate), key=keys["run"])

        def step(carry, number):
            params, state, averages, tail = carry
            batch = plan.load(data, number, keys["run"])
            of_step = jax.random.fold_in(keys["views"], number)
            _, grads = loss_and_grad(params, batch, of_step)
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            pairs = zip(moving, averages, strict=True)
            result = [ema.update(params, average) for ema, (_, average) in pairs]
            weight = 1 / jnp.maximum(number - first_of_tail + 1, 1)
            tail = optax.incremental_update(params, tail, weight)
            return (params, state, result, tail), None

        averages = [(params, ema.init(params)) for ema in moving]
        carry = params, optimizer.init(params), averages, params
        (params, _, averages, tail), _ = jax.lax.scan(
            step, carry, jnp.arange(plan.num_steps)
        )
        every = params, *(average for average, _ in averages), tail
        return jnp.array([[accuracy(one, images) for images in both] for one in every])

    return run


def measured(data, test, num_views, num_seeds):
    """Return held-out accuracies f[rate, parameters, 2], and test accuracies.

    The test accuracies f[seed, parameters, 2] are those at the chosen learning rates.
    """
    plan = dpjax.plan(
        num_examples=len(data[0]),
        batch_size=BATCH_SIZE,
        num_steps=NUM_STEPS,
        epsilon=EPSILON,
        delta=DELTA,
        clip_norm=CLIP_NORM,
    )
    training, held_out = split(data, len(data[0]) - round(HELD_OUT * len(data[0])))
    few, many = jax.random.split(jax.random.key(2028))
    few = jax.random.split(few, SEARCH_SEEDS)
    many = jax.random.split(many, num_seeds)

    search = trainer(part_of(plan, len(training[0])), num_views, training, held_out)
    search = jax.vmap(jax.vmap(search, (0, None)), (None, 0))
    search = jax.jit(search, compiler_options=QUICKLY)
    scores = np.asarray(search(few, jnp.asarray(RATES))).mean(1)

    final = jax.vmap(trainer(plan, num_views, data, test), (0, None))
    final = jax.jit(final, compiler_options=QUICKLY)
    chosen = scores.argmax(0)
    by_rate = {rate: np.asarray(final(many, RATES[rate])) for rate in set(chosen.flat)}
    tested = np.empty((num_seeds, *chosen.shape))
    for place, rate in np.ndenumerate(chosen):
        tested[:, *place] = by_rate[rate][:, *place]
    return scores, tested


def cells(scores, tested):
    """Return the chosen learning rate, its held-out accuracy, and the test accuracy."""
    best = scores.argmax()
    spread = [float(tested.mean()), float(tested.std(ddof=1))]
    return [RATES[best], float(scores[best]), spread]


def main():
    """Search, train and test, and print and write the tables."""
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=16)
    arguments = options.parse_args()
    data, test = load(None)
    views = []
    for num_views in VIEWS:
        scores, tested = measured(data, test, num_views, arguments.seeds)
        as_it_is, shifts = (cells(scores[:, 0, i], tested[:, 0, i]) for i in range(2))
        views.append([num_views or "none", *as_it_is, *shifts])
        print(views[-1], flush=True)
        if not num_views:
            columns = zip(PARAMETERS, scores[..., 0].T, tested[..., 0].T, strict=True)
            averages = [[name, *cells(*column)] for name, *column in columns]
            by_rate = [
                [rate, *of_rate]
                for rate, of_rate in zip(RATES, scores[..., 0], strict=True)
            ]
    rate, held_out, tested = "{:g}", "{:.3f}", "{:.3f} ± {:.3f}"
    of_views = {"views of an example": "{}", "learning rate": rate}
    of_views |= {"held-out accuracy": held_out, "test accuracy": tested}
    of_views |= {"learning rate, moved images": rate, "held-out, moved": held_out}
    of_views |= {"test accuracy, moved": tested}
    of_averages = {"parameters": "{}", "learning rate": rate}
    of_averages |= {"held-out accuracy": held_out, "test accuracy": tested}
    of_rates = {"learning rate": rate} | dict.fromkeys(PARAMETERS, held_out)
    tables = [
        Table("views", of_views, views),
        Table("averages", of_averages, averages),
        Table("rates", of_rates, by_rate),
    ]
    print_tables(*tables)
    write("recipes", arguments, tables)


if __name__ == "__main__":
    main()
