"""Measure for which workload to design noise: accuracies by noise and optimizer.

    python benchmarks/workloads.py --data FOLDER [--seeds 16] [--results FOLDER]

The data are scikit-learn's digits (a network with one hidden layer), MNIST's test
images, Adult and Bank (logistic regression, on 4,000 rows of each; the folder contains
the files). Training uses a fixed order, at δ = 1e-5 under REPLACE. The script compares
rational strategies with two vectors, optimized for each workload of
`_workload_runs.py`, with independent noise and with the tree.

For each noise, the same search chooses the learning rate, the clip norm and the
momentum (`RATES`, `CLIP_NORMS`, `DECAYS`) by the mean accuracy over some seeds on a
held-out fifth of the training data. Then runs on all of the training data are tested.
The search reads private data, and no stated ε counts the search.
"""

import itertools
import pathlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _results import Table, parser, print_tables, write
from _workload_runs import (
    OPTIMIZERS,
    PROBLEMS,
    designs,
    multiplier,
    noise,
    predicted,
    shape_of,
    size_of,
    split,
    trainer,
    workloads_of,
)
from scipy.stats import spearmanr

EPSILONS = (1.0, 4.0)
DECAYS = (0.9, 0.98)
CLIP_NORMS = (0.5, 2.0)
SEARCH_SEEDS = 3
HELD_OUT = 1 / 5
RATES = {
    "SGD": 2.0 ** np.arange(-5, 5),
    "momentum": 2.0 ** np.arange(-5, 7),
    "normalised momentum": 2.0 ** np.arange(-5, 5),
    "Adam": 2.0 ** np.arange(-6, 4),
}
NAMES = ["independent", "tree", *workloads_of(0.9)]


class Run(NamedTuple):
    """The accuracy of one kind of noise, at its best clip norm and learning rate.

    Attributes:
      data, optimizer, epsilon, decay, design: the setting; a design is a kind of noise.
      clip_norm, rate: the chosen clip norm and learning rate.
      held_out: the accuracy by which these two were chosen.
      test: test accuracies by seed, f[seeds].
      errors: for each workload, the root mean square noise in its result at μ = 1.
    """

    data: str
    optimizer: str
    epsilon: float
    decay: float
    design: str
    clip_norm: float
    rate: float
    held_out: float
    test: np.ndarray
    errors: dict[str, float]


def programs(problem, optimizer):
    """Return programs for accuracies, and the shape of a run of the search.

    The programs compute held-out accuracies f[ε, C, η, seed], and test accuracies
    f[ε, seed].
    """
    size = len(problem.data[0]) - round(HELD_OUT * len(problem.data[0]))
    training, held_out = split(problem.data, size)
    one = trainer(problem, optimizer, training, held_out)
    search = jax.vmap(one, (0, 0, None, None, None, None))
    for place in (4, 3, 2):  # η, C, σ
        search = jax.vmap(search, [0 if i == place else None for i in range(6)])
    one = trainer(problem, optimizer, problem.data, problem.test)
    final = jax.vmap(one, (0, 0, None, None, None, None))
    final = jax.vmap(final, (None, None, 0, 0, 0, None))
    return jax.jit(search), jax.jit(final), shape_of(problem, training)


def compare(name, problem, optimizer, num_seeds):
    """Yield a `Run` for each momentum, noise and ε."""
    search, final, short = programs(problem, optimizer)
    shape, size = shape_of(problem, problem.data), size_of(problem)
    key = jax.random.fold_in(jax.random.key(2026), list(PROBLEMS).index(name))
    few, many = (
        jax.random.split(k, n)
        for k, n in zip(jax.random.split(key), (SEARCH_SEEDS, num_seeds), strict=True)
    )
    clips, rates = jnp.asarray(CLIP_NORMS), jnp.asarray(RATES[optimizer])
    draws = jax.jit(jax.vmap(noise, (None, 0, None)), static_argnums=2)
    for decay in DECAYS if optimizer != "SGD" else (0.0,):
        for label, design in designs(decay, shape).items():
            first = designs(decay, short)[label]
            sigmas = jnp.array([multiplier(first, epsilon) for epsilon in EPSILONS])
            z = draws(first.matrix, few, size)
            result = np.asarray(search(few, z, sigmas, clips, rates, decay)).mean(-1)
            best = [np.unravel_index(np.argmax(x), x.shape) for x in result]
            c, r = np.array(best).T
            sigmas = jnp.array([multiplier(design, epsilon) for epsilon in EPSILONS])
            z = draws(design.matrix, many, size)
            test = np.asarray(final(many, z, sigmas, clips[c], rates[r], decay))
            errors = {w: predicted(design, a) for w, a in workloads_of(decay).items()}
            for e, epsilon in enumerate(EPSILONS):
                chosen = CLIP_NORMS[c[e]], float(rates[r[e]]), result[e][best[e]]
                yield Run(
                    name, optimizer, epsilon, decay, label, *chosen, test[e], errors
                )


def mean_and_error(values):
    """Return the mean and its standard error."""
    return [float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5)]


def best_decays(runs):
    """Return, of runs that differ only in momentum, the best on held-out data."""
    result = {}
    for run in sorted(runs, key=lambda run: run.held_out):
        result[run.data, run.optimizer, run.epsilon, run.design] = run
    return result


def accuracies(runs):
    """Return accuracies by data, optimizer, ε and noise: mean and standard error."""
    best, rows = best_decays(runs), []
    for cell in dict.fromkeys(run[:3] for run in runs):
        result = [best.get((*cell, design)) for design in NAMES]
        rows.append([*cell, *(run and mean_and_error(run.test) for run in result)])
    columns = dict.fromkeys(("data", "optimizer", "ε"), "{}") | {"ε": "{:g}"}
    columns |= dict.fromkeys(NAMES, "{:.3f} ± {:.3f}")
    return Table("accuracy", columns, rows)


def differences(runs):
    """Return points of accuracy above noise for sums, as means over data sets and ε."""
    best, rows = best_decays(runs), []
    for optimizer in OPTIMIZERS:
        cells = [key[:3] for key in best if key[1::2] == (optimizer, "sums")]
        row = [optimizer]
        for design in NAMES:
            pairs = [(best.get((*c, design)), best[*c, "sums"]) for c in cells]
            if design == "sums" or not all(run for run, _ in pairs):
                row.append(None)
                continue
            # All designs use the same random numbers, so seeds are compared in pairs.
            gains = np.mean([run.test - other.test for run, other in pairs], axis=0)
            row.append(mean_and_error(100 * gains))
        rows.append(row)
    columns = {"optimizer": "{}"} | dict.fromkeys(NAMES, "{:+.1f} ± {:.1f}")
    return Table("differences", columns, rows)


def rankings(runs):
    """Return how well each workload's error ranks the accuracies: Spearman's ρ.

    The entries are means over ε and momenta, and then the mean and the standard error
    over data sets. ρ is 1 if a smaller error always goes with a higher accuracy.
    """
    rows, predictors = [], list(workloads_of(0.9))
    for optimizer in OPTIMIZERS:
        row = [optimizer]
        for workload in predictors:
            by_data = {}
            for cell, result in cells(runs, optimizer):
                errors = [run.errors[workload] for run in result]
                rho = spearmanr(np.negative(errors), [r.test.mean() for r in result])
                by_data.setdefault(cell[0], []).append(rho.statistic)
            row.append(mean_and_error([np.mean(x) for x in by_data.values()]))
        rows.append(row)
    columns = {"optimizer": "{}"} | dict.fromkeys(predictors, "{:.2f} ± {:.2f}")
    return Table("ranking", columns, rows)


def cells(runs, optimizer):
    """Return groups of runs that differ only in their noise."""
    result = {}
    for run in runs:
        if run.optimizer == optimizer:
            result.setdefault((run.data, run.epsilon, run.decay), []).append(run)
    return result.items()


def settings(runs):
    """Return the chosen settings, and the accuracies and errors."""
    rows = [[*run[:8], mean_and_error(run.test), *run.errors.values()] for run in runs]
    columns = dict.fromkeys(("data", "optimizer", "ε", "momentum", "noise for"), "{}")
    columns |= {"clip norm": "{:g}", "learning rate": "{:g}"}
    columns |= {"held-out accuracy": "{:.3f}", "test accuracy": "{:.3f} ± {:.3f}"}
    columns |= {f"error in {name}": "{:.3g}" for name in workloads_of(0.9)}
    return Table("settings", columns, rows)


def main():
    """Search and train, and report the results."""
    options = parser(__doc__)
    options.add_argument("--data", type=pathlib.Path, required=True)
    options.add_argument("--seeds", type=int, default=16)
    arguments = options.parse_args()
    runs = []
    for name, optimizer in itertools.product(PROBLEMS, OPTIMIZERS):
        start, problem = time.perf_counter(), PROBLEMS[name](arguments.data)
        runs += compare(name, problem, optimizer, arguments.seeds)
        seconds = time.perf_counter() - start
        print(f"{name}, {optimizer}: {seconds:.0f} s", flush=True)
    report(runs, arguments)


def report(runs, arguments):
    """Print and write the tables."""
    tables = [accuracies(runs), differences(runs), rankings(runs)]
    print_tables(*tables)
    write("workloads", arguments, [*tables, settings(runs)])


if __name__ == "__main__":
    main()
