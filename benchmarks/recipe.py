"""Measure the accuracy of whole private pipelines by one recipe, without a search.

    python benchmarks/recipe.py [--data FOLDER] [--sets NAME ...] [--ways NAME ...]

The pipeline computes features of one example at a time and a private mean of the
features, subtracts the mean, normalizes the features, and trains softmax regression on
full batches. Every step that reads the training data draws from one `dpjax.budget` at
δ = 1e-5 under REPLACE. All numbers come from `dpjax.recipe`, which reads public sizes
only. The script compares this pipeline with the same recipe without a mean, with the
same recipe on raw pixels or scaled columns, with training without clipping and noise,
and with a plan for the same model on raw pixels or scaled columns. The clip norm and
the learning rate of this plan are the best of 16 pairs on a held-out fifth of the
training data. The plan's ε does not count this search.

Images have 4 × 4 cells of 8 orientations. A numeric column is binned by
`features.bins`, with `features.decimal_edges` of its declared range, if all columns
then have at most one feature for every 40 training examples. Otherwise the column's
value is scaled to [−1, 1] by its declared range. Other columns are one-hot. The recipe
and this rule were set on held-out training examples of digits, Bank and Wine;
docs/recipe.md lists the decisions that test examples influenced. Without --data, only
the digits of scikit-learn are used. With --ways, the rows of all other methods in a
result do not change.
"""

import functools
import math
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _erm_data import DATA_SETS
from _erm_data import load as load_scaled
from _erm_data import read as read_rows
from _images import load as load_images
from _results import Table, parser, print_tables, read, write

import dpjax
from dpjax import Adjacency, features, statistics
from dpjax.accounting import gdp

DELTA = 1e-5
REPLACE = Adjacency.REPLACE
EPSILONS = (1.0, 2.0, 4.0, 8.0)
CELLS, ORIENTATIONS = 4, 8
TABLES = {x.name: x for x in DATA_SETS if x.name != "Bike"}  # Bike has no classes
SETS = ("digits", "MNIST", *TABLES)
PIPELINE, NO_MEAN, RAW = "the recipe", "without a mean", "without features"
PLAN, NON_PRIVATE = "plan, raw, searched", "non-private"
ORDER = {way: place for place, way in enumerate((PIPELINE, NO_MEAN, RAW, PLAN))}
EXAMPLES_A_FEATURE = 40
# The settings that the search for the plan tries.
PLAN_STEPS = 60
CLIP_NORMS = 0.03, 0.1, 0.3, 1.0
UNITS = 1.0, 2.0, 4.0, 8.0
# Steps and learning rate without privacy; these are enough steps to converge.
FREE_STEPS, FREE_RATE = 300, 20.0


def of_images(images):
    """Return gradient histograms of square images f[n, h · w]."""
    side = math.isqrt(images.shape[1])

    def of_one(image):
        return features.oriented_gradients(
            image.reshape(side, side), cells=CELLS, orientations=ORIENTATIONS
        )

    return jax.jit(jax.vmap(of_one))(images)


def of_columns(data_set, folder):
    """Return features f[n, d] of all columns; rows are ordered as by `load_scaled`."""
    rows = read_rows(data_set, folder)
    edges = {
        column: features.decimal_edges(*domain)
        for column, domain in data_set.columns.items()
        if not isinstance(domain[0], str)
    }
    size = sum(
        2 * len(edges[column]) + 1 if column in edges else len(domain)
        for column, domain in data_set.columns.items()
    )
    with_bins = 0.8 * len(rows) >= EXAMPLES_A_FEATURE * size

    def of_number(x, low, high, cuts):
        if with_bins:
            return features.bins(x, cuts)
        return 2 * jnp.clip((x - low) / (high - low), 0, 1)[None] - 1

    parts = []
    for column, domain in data_set.columns.items():
        values = [row[column] for row in rows]
        if column in edges:
            coded = jax.jit(
                jax.vmap(
                    functools.partial(
                        of_number, low=domain[0], high=domain[1], cuts=edges[column]
                    )
                )
            )
            parts.append(coded(jnp.array(values, jnp.float32)))
        else:
            places = {category: i for i, category in enumerate(domain)}
            result = np.array([places.get(value, -1) for value in values])
            parts.append(jax.nn.one_hot(result, len(domain)))
    order = np.random.default_rng(0).permutation(len(rows))  # independent of the data
    return jax.jit(jax.vmap(features.join))(*parts)[order]


def load(name, folder):
    """Return features and raw features (norms at most 1), labels, and training size."""
    if name in ("digits", "MNIST"):
        (train, labels), (test, test_labels) = load_images(
            folder if name == "MNIST" else None
        )
        pixels = jnp.concatenate([train, test])
        raw = pixels / math.sqrt(pixels.shape[1])
        labels = jnp.concatenate([labels, test_labels])
        return of_images(pixels), raw, labels, len(train)
    raw, labels = load_scaled(TABLES[name], folder)
    labels = labels - 3 if name == "Wine" else labels > 0  # Wine has qualities 3 to 9
    train = int(0.8 * len(labels))
    result = of_columns(TABLES[name], folder)
    return result, jnp.asarray(raw), jnp.asarray(labels, jnp.int32), train


def loss(params, examples):
    """Return the mean cross-entropy of softmax regression."""
    x, y = examples
    scores = x @ params
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


def normalised(x, center, intercept):
    """Subtract the center, scale to norm 1, and append the intercept."""
    x = x - center[None]
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), 1e-6)
    return jnp.concatenate([x, jnp.full((len(x), 1), intercept)], axis=1)


def private_scores(x, labels, num_train, epsilon, keys, with_mean):
    """Return a test accuracy for each key, and the budget with what the runs spent."""
    num_features, num_classes = x.shape[1], int(labels.max()) + 1
    numbers = dpjax.recipe(
        epsilon,
        DELTA,
        num_examples=num_train,
        num_features=num_features,
        adjacency=REPLACE,
    )
    account = dpjax.budget(epsilon, DELTA, adjacency=REPLACE, slack=0)
    with_mean = with_mean and numbers.mean_share > 0
    if with_mean:
        z = numbers.mean_noise_multiplier
        terms = {"clip_norm": 1.0, "noise_multiplier": z, "adjacency": REPLACE}
        # The event of the mean depends only on public numbers.
        promised = jax.eval_shape(
            lambda key: statistics.mean(x[:num_train], key=key, **terms), keys[0]
        )
        account = account.draw(promised, name="mean of the features")
    plan = account.plan(
        num_examples=num_train,
        batch_size=numbers.batch_size,
        num_steps=numbers.num_steps,
        clip_norm=numbers.clip_norm,
        sampling="fixed",
    )
    account = account.draw(plan, name="training")
    loss_and_grad = plan.value_and_grad(loss)

    def run(key, x, labels):
        of_mean, of_training = jax.random.split(key)
        center = jnp.zeros(num_features)
        if with_mean:
            center = statistics.mean(x[:num_train], key=of_mean, **terms).value
        rows = normalised(x, center, numbers.intercept)
        data = rows[:num_train], labels[:num_train]
        optimizer = plan.optimizer(numbers.optimizer(), key=of_training)

        # Full batches are the same in every step.
        batch = plan.load(data, 0, of_training)

        def step(carry, _):
            params, state = carry
            _, grads = loss_and_grad(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = jnp.zeros((num_features + 1, num_classes))
        carry = params, optimizer.init(params)
        (params, _), _ = jax.lax.scan(step, carry, length=plan.num_steps)
        return accuracy(params, rows[num_train:], labels[num_train:])

    runs = jax.jit(lambda keys, *data: jax.lax.map(lambda key: run(key, *data), keys))
    return runs(keys, x, labels), account


@functools.cache
def plan_runs(num_examples, num_classes, epsilon):
    """Return a function that runs a plan on full batches, and the plan."""
    plan = dpjax.plan(
        num_examples=num_examples,
        batch_size=num_examples,
        num_steps=PLAN_STEPS,
        epsilon=epsilon,
        delta=DELTA,
        clip_norm=1.0,
        sampling="fixed",
        adjacency=REPLACE,
    )
    loss_and_grad = plan.value_and_grad(loss)

    def run(clip_norm, rate, key, train, test):
        # Features are divided by the clip norm, so that one program serves all of them.
        batch = plan.load((train[0] / clip_norm, train[1]), 0, key)
        rates = optax.linear_schedule(rate * clip_norm**2, 0, PLAN_STEPS)
        optimizer = plan.optimizer(optax.sgd(rates), key=key)

        def step(carry, _):
            params, state = carry
            _, grads = loss_and_grad(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = jnp.zeros((train[0].shape[1], num_classes))
        carry = params, optimizer.init(params)
        (params, _), _ = jax.lax.scan(step, carry, length=PLAN_STEPS)
        return accuracy(params / clip_norm, *test)

    def runs(settings, train, test):
        return jax.lax.map(lambda setting: run(*setting, train, test), settings)

    return jax.jit(runs), plan


def searched_scores(x, labels, num_train, epsilon, keys):
    """Search a plan's settings; return test accuracies, the ε, and the settings."""
    x = jnp.pad(x, ((0, 0), (0, 1)), constant_values=0.3)
    num_classes, cut = int(labels.max()) + 1, int(0.8 * num_train)
    clips, units = (a.ravel() for a in np.meshgrid(CLIP_NORMS, UNITS))

    def rates(clip_norm, unit, size):
        # Noise alone gives a weight the standard deviation `unit`.
        mu = float(gdp.mu(epsilon, DELTA))
        return unit * mu * size * math.sqrt(3) / (2 * clip_norm * PLAN_STEPS)

    def scores(settings, first, last):
        runs, plan = plan_runs(first, num_classes, epsilon)
        parts = slice(0, first), slice(first, last)
        return runs(settings, *((x[p], labels[p]) for p in parts)), plan

    tried = jnp.array(clips), jnp.array(rates(clips, units, cut))
    tried = *tried, jax.random.split(jax.random.key(17), len(clips))
    held_out, _ = scores(tried, cut, num_train)
    best = int(jnp.argmax(held_out))
    count = len(keys)
    chosen = float(clips[best]), float(units[best])
    settings = [jnp.full(count, c) for c in (chosen[0], rates(*chosen, num_train))]
    result, plan = scores((*settings, keys), num_train, len(labels))
    return result, plan.epsilon, chosen


def free_score(x, labels, num_train):
    """Return the test accuracy of gradient descent with momentum, without privacy."""
    num_classes = int(labels.max()) + 1

    @jax.jit
    def run(x, labels):
        rows = normalised(x, x[:num_train].mean(0), 0.3)
        data = rows[:num_train], labels[:num_train]
        # With momentum 0.9, rates up to 7 over the largest eigenvalue are stable.
        rate = jnp.minimum(FREE_RATE, 5 / jnp.linalg.norm(rows.T @ rows / len(rows)))
        optimizer = optax.sgd(rate, momentum=0.9)

        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params, data), state)
            return (optax.apply_updates(params, updates), state), None

        params = jnp.zeros((rows.shape[1], num_classes))
        carry = params, optimizer.init(params)
        (params, _), _ = jax.lax.scan(step, carry, length=FREE_STEPS)
        return accuracy(params, rows[num_train:], labels[num_train:])

    return float(run(x, labels))


def accuracy(params, x, labels):
    """Return the share of labels that the model predicts."""
    return jnp.mean(jnp.argmax(x @ params, axis=1) == labels)


def measured(name, folder, keys, ways):
    """Return the rows of a data set, and the settings that the searches chose."""
    result, raw, labels, num_train = load(name, folder)
    inputs = {PIPELINE: (result, True), NO_MEAN: (result, False), RAW: (raw, True)}
    rows, choices = [], []
    for way in ways:
        for epsilon in EPSILONS:
            begun = time.perf_counter()
            if way == PLAN:
                scores, spent, chosen = searched_scores(
                    raw, labels, num_train, epsilon, keys
                )
                choices.append([name, epsilon, *chosen])
            else:
                x, with_mean = inputs[way]
                scores, account = private_scores(
                    x, labels, num_train, epsilon, keys, with_mean
                )
                spent = account.epsilon_if_fixed
            cell = [float(scores.mean()), float(scores.std(ddof=1))]
            seconds = time.perf_counter() - begun
            rows.append([name, way, epsilon, spent, cell, seconds])
            print(rows[-1], flush=True)
    free = free_score(result, labels, num_train)
    largest = float(jnp.bincount(labels[num_train:]).max()) / (len(labels) - num_train)
    rows.append([name, NON_PRIVATE, None, None, [free, 0.0], None])
    rows.append([name, "always the largest class", None, None, [largest, 0.0], None])
    return rows, choices


def merged(path, tables):
    """Add to the tables the rows of the written result that were not measured now."""
    if not path.exists():
        return tables
    before = read(path)["tables"]
    results = []
    for table in tables:
        retained = before[table.name].rows if table.name in before else []
        if table.name == "accuracy":
            new = {row[1] for row in table.rows}
            rows = [row for row in retained if row[1] not in new] + table.rows
            rows.sort(key=lambda row: ORDER.get(row[1], len(ORDER)))
        else:
            rows = table.rows or retained
        results.append(table._replace(rows=rows))
    return results


def main():
    """Train, and print and write the tables."""
    options = parser(__doc__)
    options.add_argument("--data", type=pathlib.Path, help="folder of the data sets")
    options.add_argument("--sets", nargs="+", choices=SETS)
    options.add_argument("--ways", nargs="+", choices=ORDER, default=list(ORDER))
    options.add_argument("--seeds", type=int, default=8)
    arguments = options.parse_args()
    names = arguments.sets or (SETS if arguments.data else SETS[:1])
    keys = jax.random.split(jax.random.key(2031), arguments.seeds)
    columns = {"data": "{}", "training": "{}", "target ε": "{:g}"}
    columns |= {"ε spent": "{:.4f}", "test accuracy": "{:.3f} ± {:.3f}"}
    columns |= {"seconds": "{:.1f}"}
    for name in names:
        rows, choices = measured(name, arguments.data, keys, arguments.ways)
        chosen = {"data": "{}", "target ε": "{:g}", "clip norm": "{:g}"}
        chosen |= {"noise of a weight": "{:g}"}
        tables = [Table("accuracy", columns, rows), Table("chosen", chosen, choices)]
        result = f"recipe.{name.lower()}"
        tables = merged(arguments.results / f"{result}.json", tables)
        print_tables(*tables)
        write(result, arguments, tables)


if __name__ == "__main__":
    main()
