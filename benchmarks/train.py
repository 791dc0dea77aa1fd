"""Train a classifier on real data with and without privacy, and draw the result.

    python benchmarks/train.py [--data FOLDER] [--out FOLDER] [--results FOLDER]

Without --data it takes the 1,797 handwritten digits that scikit-learn ships. With it,
the folder must hold the MNIST test files (t10k, gzipped idx, names with or without a
leading "mnist-"); 8,000 images train and 2,000 test. Three ways of training are
compared at the same (ε, δ) under replacement of one example, with the same network:

  non-private  normalised SGD with momentum, no clipping, no noise
  dp_sgd       independent noise in every step, then momentum; also on full batches
  dp_nsgd      tree-aggregated momentum (Tran and Cutkosky 2022, Algorithm 1)

Batches are the same in every epoch. Learning rates, momentum and epochs were set once,
by hand, for all ε; that choice is not part of the privacy guarantee. Picture and
result go to out/; those of the README are made with `--out docs --results
benchmarks/results`.
"""

import functools
import math
import pathlib
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from _images import load
from _results import Table, parser, print_tables, write

import dpjax
from dpjax import Adjacency, sampling, solvers
from dpjax.accounting import gdp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DELTA = 1e-5
CLIP_NORM = 1.0
HIDDEN = 32


def initial_params(key, num_inputs):
    """A network with one hidden layer."""
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (num_inputs, HIDDEN)) / math.sqrt(num_inputs),
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(second, (HIDDEN, 10)) / math.sqrt(HIDDEN),
        "b2": jnp.zeros(10),
    }


def logits(params, image):
    """The network, on one image or many."""
    return jnp.tanh(image @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss(params, example):
    """Cross-entropy of one example."""
    image, label = example
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, image), label)


@jax.jit
def accuracy(params, data):
    """The share of images whose label the network finds."""
    return jnp.mean(jnp.argmax(logits(params, data[0]), -1) == data[1])


def train(params, data, optimizer, gradient, batch_size, num_epochs):
    """Cyclic batches through an optimizer of clipped (or plain) sums."""
    batches = sampling.cyclic(data[0].shape[0], batch_size)

    def step(data, carry, batch):
        params, state = carry
        examples = jax.tree.map(lambda x: x[batch.indices], data)
        total = gradient(params, examples, batch.mask)
        updates, state = optimizer.update(total, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params, data):
        def epoch(carry, _):
            return jax.lax.scan(functools.partial(step, data), carry, batches)

        carry = params, optimizer.init(params)
        return jax.lax.scan(epoch, carry, length=num_epochs)[0][0]

    return run(params, data)


def train_plain(params, data, settings):
    """Normalised SGD with momentum on the mean gradient."""

    def gradient(params, examples, mask):
        def total(params):
            losses = jax.vmap(loss, (None, 0))(params, examples)
            return jnp.sum(losses, where=mask)

        return jax.grad(total)(params)

    optimizer = optax.chain(
        optax.trace(settings["decay"]),
        optax.normalize_by_update_norm(),
        optax.scale_by_learning_rate(settings["step_length"]),
    )
    batch_size, num_epochs = settings["batch_size"], settings["num_epochs"]
    return train(params, data, optimizer, gradient, batch_size, num_epochs)


def train_dp_sgd(params, data, settings, epsilon, key):
    """Independent noise. An example is in one step an epoch: μ = 2 sqrt(E) / σ."""
    num_epochs = settings["num_epochs"]
    target = float(gdp.mu(epsilon, DELTA))
    noise_multiplier = 2 * math.sqrt(num_epochs) / target * (1 + 1e-6)
    fn = dpjax.clipped_grad(loss, CLIP_NORM)
    optimizer = dpjax.dp_sgd(
        settings["learning_rate"],
        clip_norm=CLIP_NORM,
        noise_multiplier=noise_multiplier,
        expected_batch_size=settings["batch_size"],
        key=key,
        momentum=settings["decay"],
    )

    def gradient(params, examples, mask):
        return fn(params, examples, mask=mask)[0]

    trained = train(
        params, data, optimizer, gradient, settings["batch_size"], num_epochs
    )
    mu = 2 * math.sqrt(num_epochs) / noise_multiplier
    return trained, float(gdp.epsilon(mu, DELTA))


def train_dp_nsgd(params, data, settings, epsilon, key):
    """Tree-aggregated momentum, by the solver."""
    result = solvers.dp_nsgd(
        loss,
        params,
        data,
        epsilon=epsilon,
        delta=DELTA,
        adjacency=Adjacency.REPLACE,
        order="fixed",
        num_epochs=settings["num_epochs"],
        batch_size=settings["batch_size"],
        learning_rate=settings["step_length"],
        decay=settings["decay"],
        clip_norm=CLIP_NORM,
        key=key,
    )
    return result, float(result.guarantee.epsilon(DELTA))


def noise_by_step(result, settings, num_examples, epsilon):
    """Noise norm in the momentum: tree against independent noise, same guarantee."""
    tree = np.asarray(result.curve.noise_norm)
    decay, num_epochs = settings["decay"], settings["num_epochs"]
    size = sum(x.size for x in jax.tree.leaves(result.params))
    sigma = 2 * math.sqrt(num_epochs) / float(gdp.mu(epsilon, DELTA))
    steps = np.arange(1, len(tree) + 1)
    variance = (1 - decay) / (1 + decay) * (1 - decay ** (2 * steps))
    scale = CLIP_NORM * sigma * math.sqrt(size) / settings["batch_size"]
    return steps, tree, scale * np.sqrt(variance)


def draw(path, table, curves, name):
    """Accuracy against ε, and noise against step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for label, color in COLORS.items():
        rows = [row for row in table if row[0] == label]
        if label == "non-private":
            left.axhline(rows[0][3], color=color, label=label)
            continue
        left.errorbar(
            [row[1] for row in rows],
            [row[3] for row in rows],
            yerr=[row[4] for row in rows],
            color=color,
            marker="o",
            capsize=3,
            label=label,
        )
    left.set_xscale("log", base=2)
    left.set_xticks(sorted({row[1] for row in table if row[1] < math.inf}))
    left.xaxis.set_major_formatter("{x:g}")
    left.set_xlabel("ε, at δ = 1e-5, one example replaced")
    left.set_ylabel("test accuracy")
    left.set_title(f"Privacy against accuracy, {name}")
    left.legend(loc="lower right")

    steps, tree, independent = curves
    right.plot(steps, independent, color=COLORS[SGD], label="independent noise")
    right.plot(steps, tree, color=COLORS[NSGD], label="tree noise", linewidth=0.8)
    right.set_yscale("log")
    right.set_xlabel("step")
    right.set_ylabel("noise norm (RMS, units of a mean gradient)")
    right.set_title("Noise in the momentum, same batches, same ε")
    right.legend()
    figure.savefig(path, dpi=130)


NON_PRIVATE, SGD, FULL = "non-private", "dp_sgd", "dp_sgd, full batch"
NSGD = "dp_nsgd (tree)"
COLORS = {NON_PRIVATE: "0.5", SGD: "tab:orange", FULL: "tab:red", NSGD: "tab:blue"}
# Same batches and epochs for three of them; full-batch dp_sgd, the strongest way of
# using independent noise here, has epochs and rate of its own.
MINIBATCH = {"num_epochs": 20, "decay": 0.98, "step_length": 0.2}
SGD_SETTINGS = {"num_epochs": 20, "decay": 0.9, "learning_rate": 0.01}
FULL_BATCH = {"num_epochs": 60, "decay": 0.9, "learning_rate": 0.2}
STEPS_PER_EPOCH = 23


def as_tables(table, curves):
    """Accuracies, and the noise in the last momentum at the same ε."""
    columns = {"training": "{}", "target ε": "{:g}", "ε spent": "{:.3f}"}
    columns |= {"test accuracy": "{:.3f} ± {:.3f}", "seconds a run": "{:.1f}"}
    rows = [
        [way, *(None if math.isinf(e) else e for e in (target, spent)), scores, seconds]
        for way, target, spent, *scores, seconds in table
    ]
    _, tree, independent = curves
    noise = {"tree noise, last momentum": "{:.2f}", "independent noise": "{:.2f}"}
    return [
        Table("accuracy", columns, rows),
        Table("noise", noise, [[tree[-1], independent[-1]]]),
    ]


def main():
    """Train, print the table, draw the picture."""
    options = parser(__doc__, folder=pathlib.Path("out"))
    options.add_argument("--data", type=pathlib.Path, help="folder with MNIST files")
    options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    options.add_argument("--epsilons", type=float, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--seeds", type=int, default=3)
    arguments = options.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    data, test = load(arguments.data)
    num_examples = data[0].shape[0]
    batch_size = -(-num_examples // STEPS_PER_EPOCH)
    settings = {
        NON_PRIVATE: {**MINIBATCH, "batch_size": batch_size},
        SGD: {**SGD_SETTINGS, "batch_size": batch_size},
        FULL: {**FULL_BATCH, "batch_size": num_examples},
        NSGD: {**MINIBATCH, "batch_size": batch_size},
    }
    runs = [(NON_PRIVATE, math.inf)]
    runs += [
        (way, epsilon) for epsilon in arguments.epsilons for way in (SGD, FULL, NSGD)
    ]
    table, curves = [], None
    for number, (way, epsilon) in enumerate(runs, 1):
        start, scores, spent = time.perf_counter(), [], math.inf
        for seed in range(arguments.seeds):
            params_key, key = jax.random.split(jax.random.key(seed))
            params = initial_params(params_key, data[0].shape[1])
            if way == NON_PRIVATE:
                trained = train_plain(params, data, settings[way])
            elif way == NSGD:
                result, spent = train_dp_nsgd(params, data, settings[way], epsilon, key)
                trained = result.params
                curves = noise_by_step(result, settings[way], num_examples, epsilon)
            else:
                trained, spent = train_dp_sgd(params, data, settings[way], epsilon, key)
            scores.append(float(accuracy(trained, test)))
        seconds = (time.perf_counter() - start) / arguments.seeds
        spread = float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0
        table.append((way, epsilon, spent, float(np.mean(scores)), spread, seconds))
        print(
            f"[{number:2}/{len(runs)}] {way:20} target ε {epsilon:4g}: test accuracy "
            f"{table[-1][3]:.3f} after {seconds:.1f} s a run, compilation included",
            flush=True,
        )

    name = "MNIST (8,000 images)" if arguments.data else "handwritten digits"
    print(
        f"\n{name}: {num_examples} examples to train on, {test[0].shape[0]} to test, "
        f"{arguments.seeds} seeds, δ = {DELTA:g}, REPLACE, clip norm {CLIP_NORM}\n"
        f"{STEPS_PER_EPOCH} batches of {batch_size}, the same in every epoch\n"
    )
    tables = as_tables(table, curves)
    print_tables(*tables)
    write("train.mnist" if arguments.data else "train", arguments, tables)
    path = arguments.out / "train.png"
    draw(path, table, curves, name)
    print(f"Picture: {path}")


if __name__ == "__main__":
    main()
