"""Train a classifier on real data with and without privacy, and draw the result.

    python benchmarks/train.py [--data FOLDER] [--out FOLDER] [--results FOLDER]

Without --data, the script uses the 1,797 handwritten digits of scikit-learn. With
--data, the folder must contain the MNIST test files (t10k, gzipped idx, names with or
without a leading "mnist-"); 8,000 images train and 2,000 test. The same network is
trained at the same (ε, δ) under REPLACE by these methods:

  DP-SGD, Poisson        every example in each step with the same probability
  DP-Adam, Poisson       the same, with Adam on the noisy gradients
  DP-SGD, fixed batches  the same batches in every epoch
  DP-SGD, full batch     all examples in each step
  dp_nsgd (tree)         tree-aggregated momentum on fixed batches (Tran and Cutkosky
                         2022, Algorithm 1)
  momentum, geometric noise
                         SGD with momentum on fixed batches, with the geometric
                         strategy that is best for the momentum's sums and stores
                         no noise
  non-private            SGD on shuffled batches, no clipping, no noise

The script compares the network with another model:

  recipe                 softmax regression on gradient histograms minus a private mean,
                         with the numbers of `dpjax.recipe`: there is no search, and ε
                         covers everything that reads the training images

The file of --tuned has the batch sizes, epochs, momenta and learning rates. `tune.py`
chose these settings by the same search for each method, on training images only. The
privacy guarantee does not cover this choice. By default the script writes the picture
and the result to out/. The README shows those of
`--out docs --results benchmarks/results`.
"""

import math
import pathlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from _images import load
from _results import FOLDER, Table, parser, print_tables, read, write
from _train_methods import (
    CLIP_NORM,
    DELTA,
    FIXED,
    FULL,
    NON_PRIVATE,
    NSGD,
    POISSON_SGD,
    WAYS,
    Shape,
    accuracy,
    design,
    designed,
    lengths,
    plan_of,
    planned,
    sizes,
    solved,
    start,
)
from _workload_runs import Shape as Lengths
from _workload_runs import multiplier, of_strategy, weights
from recipe import of_images, private_scores

from dpjax import plot, strategies, workloads
from dpjax.accounting import gdp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SUMS = "sums of momenta"
RECIPE = "recipe, no search, linear"
WORKLOADS = {"momentum": workloads.momentum, SUMS: workloads.momentum_sum}


class Run(NamedTuple):
    """The result of one method of training at one ε; target is None without privacy."""

    way: str
    target: float | None
    spent: float | None
    accuracy: float
    spread: float
    seconds: float


class Noise(NamedTuple):
    """The noise of each step, for four kinds of noise in the same setting."""

    tree: np.ndarray
    geometric: np.ndarray
    fixed: np.ndarray
    poisson: np.ndarray


def settings(path, epsilons):
    """Return the chosen rows (method, ε, shape, momentum, learning rate)."""
    rows = read(path)["tables"]["settings"].rows
    result = {
        (way, target): (way, target, Shape(batch, epochs), momentum, rate)
        for way, target, batch, epochs, momentum, rate, _ in rows
    }
    tuned = sorted({target for _, target in result if target})
    if missing := set(epsilons or tuned) - set(tuned):
        raise SystemExit(f"--epsilons must be in {path}, {tuned}; got {missing}.")
    targets = (None, *(epsilons or tuned))
    return [result[w, e] for e in targets for w in WAYS if (w, e) in result]


def trained(setting, data, keys):
    """Return the trained parameters for each key, and the spent ε."""
    name, target, shape, momentum, rate = setting
    way = WAYS[name]
    if way.runner is solved:
        results = [solved(data, shape, target, key, momentum, rate) for key in keys]
        spent = float(results[0].guarantee.epsilon(DELTA))
        return [result.params for result in results], spent
    if way.runner is designed:
        way = way._replace(momenta=(momentum,))
    run, noise = way.runner(way, data, shape, target)
    spent = None
    if way.runner is designed:
        _, mu = design(momentum, *lengths(data, shape))
        spent = float(gdp.epsilon(mu / noise, DELTA))
    if way.runner is planned:
        plan = plan_of(way.sampling, len(data[0]), *sizes(data, shape), target)
        spent = plan.epsilon
    run = jax.jit(run)
    return [run(key, noise, momentum, rate) for key in keys], spent


def measure(setting, data, test, num_seeds):
    """Measure one method of training at one ε."""
    start = time.perf_counter()
    keys = [jax.random.key(seed) for seed in range(num_seeds)]
    result, spent = trained(setting, data, keys)
    scores = [float(accuracy(params, test)) for params in result]
    spread = float(np.std(scores, ddof=1)) if num_seeds > 1 else 0.0
    seconds = (time.perf_counter() - start) / num_seeds
    return Run(*setting[:2], spent, float(np.mean(scores)), spread, seconds)


def by_recipe(target, data, test, num_seeds):
    """Measure the recipe at one ε: softmax regression on gradient histograms."""
    start = time.perf_counter()
    images, labels = (jnp.concatenate(pair) for pair in zip(data, test, strict=True))
    keys = jnp.stack([jax.random.key(seed) for seed in range(num_seeds)])
    scores, account = private_scores(
        of_images(images), labels, len(data[0]), target, keys, with_mean=True
    )
    spread = float(scores.std(ddof=1)) if num_seeds > 1 else 0.0
    seconds = (time.perf_counter() - start) / num_seeds
    spent = account.epsilon_if_fixed
    return Run(RECIPE, target, spent, float(scores.mean()), spread, seconds)


def noise_by_step(setting, workload, decay, data):
    """Return the RMS norm of the noise in a workload at each step, for four noises.

    The batch size, the number of epochs and ε are those of `setting`.
    """
    _, target, shape, _, _ = setting
    batch_size, num_steps = sizes(data, shape)
    run = Lengths(*lengths(data, shape))
    params, _ = start(jax.random.key(0), data)
    size = sum(x.size for x in jax.tree.leaves(params))
    scale = CLIP_NORM * math.sqrt(size) / batch_size
    matrix = weights(workload, num_steps)

    def norms(made):
        return scale * np.linalg.norm(matrix @ made.matrix, axis=1)

    best, _ = design(decay, *run)
    tree, geometric, independent = (
        of_strategy(strategy, run)
        for strategy in (strategies.tree(decay), best, strategies.independent())
    )
    poisson = plan_of("poisson", len(data[0]), batch_size, num_steps, target)
    return Noise(
        *(norms(x) * multiplier(x, target) for x in (tree, geometric, independent)),
        norms(independent) * poisson.noise_multiplier,
    )


# Seven lines would be hard to read. These are the best methods and well-known ones.
DRAWN = (RECIPE, POISSON_SGD, FULL, NSGD, FIXED)


def draw_accuracy(path, runs, name):
    """Plot accuracy against ε; points are shifted, so that bars do not overlap."""
    plt.style.use(plot.style)
    figure, axis = plt.subplots(figsize=(5.4, 4.2))
    for number, (way, marker) in enumerate(zip(DRAWN, "*osD^", strict=True)):
        rows = [run for run in runs if run.way == way]
        axis.errorbar(
            [run.target * 2 ** (0.04 * (number - 2)) for run in rows],
            [run.accuracy for run in rows],
            yerr=[run.spread for run in rows],
            capsize=3,
            marker=marker,
            label=way,
        )
    for run in runs:
        if run.way == NON_PRIVATE:
            axis.axhline(run.accuracy, color="#6e6e6e", ls=":", label=NON_PRIVATE)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({run.target for run in runs if run.target}))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_ylim(top=1.01)
    axis.set_xlabel(f"ε, at δ = {DELTA}, one example replaced")
    axis.set_ylabel("test accuracy")
    axis.set_title(f"What does privacy cost? {name}")
    axis.legend(loc="lower right", fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def as_tables(runs, noise):
    """Return the tables of accuracies, and of the RMS noise over all steps."""
    columns = {"training": "{}", "target ε": "{:g}", "ε spent": "{:.3f}"}
    columns |= {"test accuracy": "{:.3f} ± {:.3f}", "seconds a run": "{:.1f}"}
    rows = [[r.way, r.target, r.spent, [r.accuracy, r.spread], r.seconds] for r in runs]
    norms = [
        [name, decay, *(np.sqrt(np.mean(values**2)) for values in of_decay)]
        for (name, decay), of_decay in noise.items()
    ]
    headings = ("tree", "geometric for sums")
    headings += ("independent, fixed batches", "independent, Poisson batches")
    of_noise = {"noise in": "{}", "decay": "{:g}"} | dict.fromkeys(headings, "{:.3g}")
    return [
        Table("accuracy", columns, rows),
        Table("noise", of_noise, norms),
    ]


def noises(setting, data):
    """Return the noise by workload (momenta or their sums) and decay."""
    return {
        (name, decay): noise_by_step(setting, workload(decay), decay, data)
        for name, workload in WORKLOADS.items()
        for decay in WAYS[NSGD].momenta
    }


def main():
    """Train, print and write the tables, and draw the picture."""
    options = parser(__doc__, folder=pathlib.Path("out"))
    options.add_argument("--data", type=pathlib.Path, help="folder with MNIST files")
    options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    options.add_argument("--tuned", type=pathlib.Path, default=FOLDER / "tuned.json")
    options.add_argument("--epsilons", type=float, nargs="+", help="default: all tuned")
    options.add_argument("--seeds", type=int, default=8)
    arguments = options.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    chosen = settings(arguments.tuned, arguments.epsilons)
    data, test = load(arguments.data)
    runs = []
    for number, setting in enumerate(chosen, 1):
        run = measure(setting, data, test, arguments.seeds)
        runs.append(run)
        at = f"ε = {run.target:g}" if run.target else ""
        print(
            f"[{number:2}/{len(chosen)}] {run.way:22} {at:8} test accuracy "
            f"{run.accuracy:.3f} after {run.seconds:.1f} s a run, compiling included",
            flush=True,
        )
    for target in sorted({run.target for run in runs if run.target}):
        run = by_recipe(target, data, test, arguments.seeds)
        runs.append(run)
        print(f"{run.way} ε = {target:g} test accuracy {run.accuracy:.3f}", flush=True)
    of_tree = [setting for setting in chosen if setting[0] == NSGD]
    noise = noises(of_tree[-1], data)  # the setting at the largest ε

    name = "MNIST (8,000 images)" if arguments.data else "handwritten digits"
    print(
        f"\n{name}: {len(data[0])} examples to train on, {len(test[0])} to test, "
        f"{arguments.seeds} seeds, δ = {DELTA:g}, REPLACE, clip norm {CLIP_NORM}\n"
    )
    tables = as_tables(runs, noise)
    print_tables(*tables)
    write("train.mnist" if arguments.data else "train", arguments, tables)
    path = arguments.out / "train.png"
    draw_accuracy(path, runs, name)
    print(f"Picture: {path}")


if __name__ == "__main__":
    main()
