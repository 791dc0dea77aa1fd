"""Does the mechanism that a plan chooses train best? Accuracies beside every other.

    python benchmarks/choice.py --data FOLDER [--only digits] [--results FOLDER]

scikit-learn's digits (a network with one hidden layer) and 4,000 of MNIST's test images
(logistic regression; the folder holds the files), at δ = 1e-5 under ADD_REMOVE, where
Poisson samples and random bins are allowed. Trained are SGD with momentum on Poisson
samples with independent noise, in random bins with what noise is best for its
parameters, and with what `dpjax.plan` chooses of the two; and Adam on Poisson samples.

The learning rate is chosen for each at each ε by the same search (and so would several
batch sizes and numbers of epochs be, of which `SHAPES` has one for each data set): on
four fifths of the training data, in batches that are four fifths as large, so that
noise and steps are those of the run, it is scored on the last fifth. Then runs on all
of it are tested. A plan chooses by sizes alone. The search reads private data, and no
ε here counts that.
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
# Batch size and epochs. Four fifths of a batch are a whole number.
SHAPES = {"digits": ((65, 20),), "MNIST": ((200, 15),)}
MOMENTUM = 0.9
SEARCH_SEEDS = 2
FADING = 1 / 100
CHOICE = "the plan's choice"


class Method(NamedTuple):
    """How to train, and the learning rates that are tried."""

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
    """What a search chose, and its accuracy on what was held out."""

    shape: tuple[int, int]
    rate: float
    held_out: float


@functools.cache
def compared(num_examples, shape, epsilon):
    """The plan that is chosen at a setting, with what it was chosen from."""
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
    """The plan of one sampling, with the noise that is best for it."""
    rows = compared(*setting).comparison.candidates
    return next(one.plan for one in rows if one.sampling == sampling)


def decay_of(plan):
    """λ of geometric noise, 0 of independent."""
    denominator = plan.shape.denominator if plan.shape else ()
    return -denominator[0] if denominator else 0.0


def geometric_noise(stddev, decay, key):
    """Noise stddev (z_t − λ z_{t−1}), for a λ that a search changes."""

    def update(updates, step, params=None):
        def z(step):
            of_step = jax.random.fold_in(key, step)
            return optax.tree.random_like(of_step, updates, jax.random.normal)

        kept = jnp.where(step > 0, decay, 0.0)
        noisy = jax.tree.map(
            lambda g, now, last: g + stddev * (now - kept * last),
            updates,
            z(step),
            z(jnp.maximum(step - 1, 0)),
        )
        return noisy, step + 1

    return optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)


def trainer(problem, data, judged, plan, optimizer_of):
    """The accuracy of a run: of a key, and what `optimizer_of` takes beside one."""

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
    """The same noise, rate and steps on a part of the data."""
    size = plan.batch_size * num_examples // plan.num_examples
    part = dataclasses.replace(plan, num_examples=num_examples, batch_size=size)
    steps = [x.mechanism.steps_per_epoch(x.batch_size) for x in (part, plan)]
    assert steps[0] == steps[1]
    return part


def searched(problem, method, shapes, keys):
    """Accuracies f[shape, ε, rate] on what is held out, mean over seeds."""
    n = len(problem.data[0])
    kept, held_out = split(problem.data, n - round(HELD_OUT * n))
    found = []
    for shape in shapes:
        plans = [plan_of(method.sampling, n, shape, epsilon) for epsilon in EPSILONS]
        # One program for all of them, with room for the largest batch of any.
        roomy = max(plans, key=lambda plan: plan.max_batch_size)
        roomy = part_of(roomy, len(kept[0]))

        def optimizer_of(key, sigma, decay, rate, size=roomy.batch_size, of=method):
            return optax.chain(
                geometric_noise(sigma * CLIP_NORM, decay, jax.random.fold_in(key, 1)),
                optax.scale(1 / size),
                of.inner(rate, MOMENTUM),
            )

        one = trainer(problem, kept, held_out, roomy, optimizer_of)
        many = jax.vmap(one, (0, None, None, None))
        many = jax.vmap(many, (None, None, None, 0))
        many = jax.jit(many, compiler_options=QUICKLY)
        rates = jnp.asarray(method.rates)
        rows = [many(keys, p.noise_multiplier, decay_of(p), rates) for p in plans]
        found.append(np.mean(rows, axis=-1))
    return np.stack(found)


def best(method, shapes, found):
    """For one ε: the setting of the largest accuracy f[shape, rate]."""
    s, r = np.unravel_index(np.argmax(found), found.shape)
    return Setting(shapes[s], method.rates[r], float(found[s, r]))


def chosen_only(found, n, shapes):
    """Accuracies of what the plan chooses at each setting."""
    out = np.empty_like(found["SGD, Poisson"])
    for (s, shape), (e, epsilon) in itertools.product(
        enumerate(shapes), enumerate(EPSILONS)
    ):
        out[s, e] = found[OF_SAMPLING[compared(n, shape, epsilon).sampling]][s, e]
    return out


def tested(problem, plan, method, rate, keys, done):
    """Accuracies by seed, f[seeds], of a plan; what ran already is not run again."""
    asked = plan, method, rate
    if asked not in done:

        def optimizer_of(key):
            return plan.optimizer(method.inner(rate, MOMENTUM), key=key)

        run = trainer(problem, problem.data, problem.test, plan, optimizer_of)
        run = jax.jit(jax.vmap(run), compiler_options=QUICKLY)
        done[asked] = np.asarray(run(keys), np.float64)
    return done[asked]


def compare(name, problem, num_seeds):
    """Rows: ε, method, setting, what the plan is, accuracies."""
    key = jax.random.fold_in(jax.random.key(2027), list(PROBLEMS).index(name))
    few, many = (
        jax.random.split(k, n)
        for k, n in zip(jax.random.split(key), (SEARCH_SEEDS, num_seeds), strict=True)
    )
    shapes, found = SHAPES[name], {}
    for label, method in METHODS.items():
        start = time.perf_counter()
        found[label] = searched(problem, method, shapes, few)
        print(f"{name}, {label}: {time.perf_counter() - start:.0f} s", flush=True)
    n = len(problem.data[0])
    found[CHOICE] = chosen_only(found, n, shapes)
    done = {}
    for e, epsilon in enumerate(EPSILONS):
        for label, scores in found.items():
            method = METHODS.get(label, METHODS["SGD, Poisson"])
            setting = best(method, shapes, scores[:, e])
            plan = compared(n, setting.shape, epsilon)
            if label != CHOICE:
                plan = plan_of(method.sampling, n, setting.shape, epsilon)
            scores = tested(problem, plan, method, setting.rate, many, done)
            yield name, epsilon, label, setting, plan, scores


def mean_and_error(values):
    """A mean and its standard error."""
    return [float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5)]


def as_tables(runs):
    """Accuracies, how far the choice is from the others, and the settings."""
    cells = {(name, e, label): scores for name, e, label, _, _, scores in runs}
    names = [CHOICE, *METHODS]
    accuracy, against, settings = [], [], []
    for name, e in dict.fromkeys(run[:2] for run in runs):
        each = {label: cells[name, e, label] for label in names}
        accuracy.append([name, e, *map(mean_and_error, each.values())])
        # The same seeds for all.
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
    """Search, train, compare."""
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
