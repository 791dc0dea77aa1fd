"""Compare accuracies of the mechanism that a plan chooses with all other mechanisms.

    python benchmarks/choice.py --data FOLDER [--only digits] [--results FOLDER]

The data sets are scikit-learn's digits (a network with one hidden layer) and 4,000 of
MNIST's test images (logistic regression). FOLDER holds the files of MNIST. The privacy
guarantee has δ = 1e-5 under ADD_REMOVE, for which Poisson samples and random bins are
allowed. The methods are SGD with momentum on Poisson samples with independent noise,
SGD with momentum in random bins with the noise that is best for its parameters, SGD
with the mechanism of these two that `dpjax.plan` chooses, and Adam on Poisson samples.

The same search chooses the learning rate for each method at each ε. The search would
also choose among several batch sizes and numbers of epochs, but `SHAPES` has only one
of each for each data set. The search trains on four fifths of the training data, in
batches that are four fifths as large, so that noise and steps equal those of the run.
The search computes the accuracy on the last fifth. Then runs on all of the training
data are tested. A plan chooses only by sizes. The search reads private data, and no ε
in the results includes the privacy cost of the search.
"""

import dataclasses
import functools
import itertools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _results import Table, parser, print_tables, write
from _train_methods import adam, averaged
from _workload_runs import PROBLEMS, split
from tune import HELD_OUT, QUICKLY

import dpjax
from dpjax import workloads

DELTA, CLIP_NORM = 1e-5, 1.0
EPSILONS = (1.0, 2.0, 4.0, 8.0)
# Batch size and number of epochs. Four fifths of a batch are a whole number.
SHAPES = {"digits": ((65, 20),), "MNIST": ((200, 15),)}
MOMENTUM = 0.9
SEARCH_SEEDS = 2
FADING = 1 / 100
CHOICE = "the plan's choice"


class Method(NamedTuple):
    """A method of training, and the learning rates that the search tries."""

    sampling: str
    inner: Any = averaged
    rates: tuple[float, ...] = (0.12, 0.25, 0.5, 1.0, 2.0, 4.0)


METHODS = {
    "SGD, Poisson": Method("poisson"),
    "SGD, random bins": Method("random_bins"),
    "Adam, Poisson": Method("poisson", adam, (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)),
}
OF_SAMPLING = {
    "poisson": "SGD, Poisson",
    "random_bins": "SGD, random bins",
}


class Setting(NamedTuple):
    """The setting that a search chose, and its accuracy on the held-out data."""

    shape: tuple[int, int]
    rate: float
    held_out: float


@functools.cache
def compared(num_examples, shape, epsilon):
    """Return the plan chosen at a setting, with the plan's candidates."""
    size, epochs = shape
    return dpjax.plan(
        num_examples=num_examples,
        batch_size=size,
        num_steps=epochs * -(-num_examples // size),
        epsilon=epsilon,
        delta=DELTA,
        clip_norm=CLIP_NORM,
        sampling=("poisson", "random_bins"),
        noise="auto",
        workload=workloads.momentum_sum(MOMENTUM, weight_decay=FADING),
    )


def plan_of(sampling, *setting):
    """Return the plan of one sampling, with the noise that is best for the sampling."""
    rows = compared(*setting).comparison.candidates
    return next(one.plan for one in rows if one.sampling == sampling)


def decay_of(plan):
    """Return the decay λ of geometric noise; 0 for independent noise."""
    denominator = plan.shape.denominator if plan.shape else ()
    return -denominator[0] if denominator else 0.0


def geometric_noise(stddev, decay, key):
    """Add noise stddev (z_t − λ z_{t−1}), where a search may vary λ."""

    def update(updates, step, params=None):
        def z(step):
            of_step = jax.random.fold_in(key, step)
            return optax.tree.random_like(of_step, updates, jax.random.normal)

        factor = jnp.where(step > 0, decay, 0.0)
        noisy = jax.tree.map(
            lambda g, now, last: g + stddev * (now - factor * last),
            updates,
            z(step),
            z(jnp.maximum(step - 1, 0)),
        )
        return noisy, step + 1

    return optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)


def trainer(problem, data, judged, plan, optimizer_of):
    """Return a function that trains, and returns the accuracy on `judged`.

    The function's arguments are a key and the further arguments of `optimizer_of`.
    """

    def loss(params, examples):
        features, labels = examples
        scores = problem.scores(params, features)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    loss_and_grad = plan.value_and_grad(loss)

    def run(key, *numbers):
        initial, key = jax.random.split(key)
        optimizer = optimizer_of(key, *numbers)

        def step(carry, number):
            params, state = carry
            _, grads = loss_and_grad(params, plan.load(data, number, key))
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = problem.initial(initial)
        carry = params, optimizer.init(params)
        (params, _), _ = jax.lax.scan(step, carry, jnp.arange(plan.num_steps))
        scores = problem.scores(params, judged[0])
        return jnp.mean(jnp.argmax(scores, -1) == judged[1])

    return run


def part_of(plan, num_examples):
    """Return a plan on a part of the data, with equal noise, rate and steps."""
    size = plan.batch_size * num_examples // plan.num_examples
    part = dataclasses.replace(plan, num_examples=num_examples, batch_size=size)
    steps = [x.mechanism.steps_per_epoch(x.batch_size) for x in (part, plan)]
    assert steps[0] == steps[1]
    return part


def searched(problem, method, shapes, keys):
    """Return accuracies f[shape, ε, rate] on held-out data, averaged over seeds."""
    n = len(problem.data[0])
    training, held_out = split(problem.data, n - round(HELD_OUT * n))
    result = []
    for shape in shapes:
        plans = [plan_of(method.sampling, n, shape, epsilon) for epsilon in EPSILONS]
        # One program serves all plans, with room for the largest batch of any plan.
        roomy = max(plans, key=lambda plan: plan.max_batch_size)
        roomy = part_of(roomy, len(training[0]))

        def optimizer_of(key, sigma, decay, rate, size=roomy.batch_size, of=method):
            return optax.chain(
                geometric_noise(sigma * CLIP_NORM, decay, jax.random.fold_in(key, 1)),
                optax.scale(1 / size),
                of.inner(rate, MOMENTUM),
            )

        one = trainer(problem, training, held_out, roomy, optimizer_of)
        many = jax.vmap(one, (0, None, None, None))
        many = jax.vmap(many, (None, None, None, 0))
        many = jax.jit(many, compiler_options=QUICKLY)
        rates = jnp.asarray(method.rates)
        rows = [many(keys, p.noise_multiplier, decay_of(p), rates) for p in plans]
        result.append(np.mean(rows, axis=-1))
    return np.stack(result)


def best(method, shapes, found):
    """Return the setting of the largest accuracy f[shape, rate], for one ε."""
    s, r = np.unravel_index(np.argmax(found), found.shape)
    return Setting(shapes[s], method.rates[r], float(found[s, r]))


def chosen_only(found, n, shapes):
    """Return the accuracies of the plan's choice at each setting."""
    out = np.empty_like(found["SGD, Poisson"])
    for (s, shape), (e, epsilon) in itertools.product(
        enumerate(shapes), enumerate(EPSILONS)
    ):
        out[s, e] = found[OF_SAMPLING[compared(n, shape, epsilon).sampling]][s, e]
    return out


def tested(problem, plan, method, rate, keys, done):
    """Return a plan's accuracies by seed, f[seeds].

    Accuracies that are in `done` are not computed again.
    """
    options = plan, method, rate
    if options not in done:

        def optimizer_of(key):
            return plan.optimizer(method.inner(rate, MOMENTUM), key=key)

        run = trainer(problem, problem.data, problem.test, plan, optimizer_of)
        run = jax.jit(jax.vmap(run), compiler_options=QUICKLY)
        done[options] = np.asarray(run(keys), np.float64)
    return done[options]


def compare(name, problem, num_seeds):
    """Yield rows of data set, ε, method, setting, plan and accuracies."""
    key = jax.random.fold_in(jax.random.key(2027), list(PROBLEMS).index(name))
    few, many = (
        jax.random.split(k, n)
        for k, n in zip(jax.random.split(key), (SEARCH_SEEDS, num_seeds), strict=True)
    )
    shapes, result = SHAPES[name], {}
    for label, method in METHODS.items():
        start = time.perf_counter()
        result[label] = searched(problem, method, shapes, few)
        print(f"{name}, {label}: {time.perf_counter() - start:.0f} s", flush=True)
    n = len(problem.data[0])
    result[CHOICE] = chosen_only(result, n, shapes)
    done = {}
    for e, epsilon in enumerate(EPSILONS):
        for label, scores in result.items():
            method = METHODS.get(label, METHODS["SGD, Poisson"])
            setting = best(method, shapes, scores[:, e])
            plan = compared(n, setting.shape, epsilon)
            if label != CHOICE:
                plan = plan_of(method.sampling, n, setting.shape, epsilon)
            scores = tested(problem, plan, method, setting.rate, many, done)
            yield name, epsilon, label, setting, plan, scores


def mean_and_error(values):
    """Return a mean and its standard error."""
    return [float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5)]


def as_tables(runs):
    """Return three tables of the runs.

    The tables show accuracies, differences between the choice and the other methods,
    and settings.
    """
    cells = {(name, e, label): scores for name, e, label, _, _, scores in runs}
    names = [CHOICE, *METHODS]
    accuracy, against, settings = [], [], []
    for name, e in dict.fromkeys(run[:2] for run in runs):
        each = {label: cells[name, e, label] for label in names}
        accuracy.append([name, e, *map(mean_and_error, each.values())])
        # All methods have the same seeds.
        gains = [100 * (each[CHOICE] - each[label]) for label in METHODS]
        against.append([name, e, *map(mean_and_error, gains)])
    for name, e, label, setting, plan, _ in runs:
        batch, epochs = setting.shape
        words = f"{plan.sampling}, λ = {decay_of(plan):.2f}"
        settings.append([name, e, label, batch, epochs, *setting[1:], words])
    columns = {"data": "{}", "ε": "{:g}"}
    of_settings = dict.fromkeys(("training", "batch", "epochs"), "{}")
    of_settings |= {"learning rate": "{:g}"}
    of_settings |= {"held-out accuracy": "{:.3f}", "mechanism": "{}"}
    return [
        Table("accuracy", columns | dict.fromkeys(names, "{:.3f} ± {:.3f}"), accuracy),
        Table("against", columns | dict.fromkeys(METHODS, "{:+.1f} ± {:.1f}"), against),
        Table("settings", columns | of_settings, settings),
    ]


def main():
    """Search, train and compare."""
    options = parser(__doc__)
    options.add_argument("--data", type=pathlib.Path, required=True)
    options.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    options.add_argument("--seeds", type=int, default=8)
    arguments = options.parse_args()
    for name in arguments.only:
        problem = PROBLEMS[name](arguments.data)
        tables = as_tables(list(compare(name, problem, arguments.seeds)))
        print_tables(*tables)
        write(f"choice.{name.lower()}", arguments, tables)


if __name__ == "__main__":
    main()
