"""Compare the noise that mechanisms leave, by optimizer, epochs, batches and ε.

    python benchmarks/mechanisms.py [--results FOLDER]

In each setting a plan compares seven mechanisms under ZERO_OUT, at δ = 1e-6 on 60,000
examples. Poisson samples and bins have the same ε under ADD_REMOVE, which the other
mechanisms do not allow. The compared number is the root mean square of the noise in the
parameters, computed by a formula; nothing is trained. The script takes some minutes.
"""

import itertools
import time

from _results import Table, parser, print_tables, write

import dpjax
from dpjax import Adjacency, workloads

NUM_EXAMPLES, DELTA = 60_000, 1e-6
DECAYS = {"SGD": 0.0, "momentum 0.9": 0.9}
# Number of epochs, and steps per epoch.
LENGTHS = ((5, 20), (50, 20), (5, 200))
EPSILONS = (1.0, 8.0)
# The workload's weight decay: it models a loss that pulls the parameters back to its
# minimum.
FADING = 1 / 100
COLUMNS = {
    "Poisson, independent": ("poisson", "independent"),
    "random bins, independent": ("random_bins", "independent"),
    "random bins, shaped": ("random_bins", "correlated"),
    "cyclic Poisson, bands": ("cyclic_poisson", "correlated"),
    "fixed, shaped": ("fixed", "correlated"),
    "fixed, tree": ("fixed", "tree"),
    "fixed, independent": ("fixed", "independent"),
}
SAMPLINGS = tuple(dict.fromkeys(sampling for sampling, _ in COLUMNS.values()))


def compared(decay, epochs, steps, epsilon):
    """Return the candidates at a setting, by sampling and noise."""
    run = dpjax.plan(
        num_examples=NUM_EXAMPLES,
        batch_size=NUM_EXAMPLES // steps,
        num_steps=epochs * steps,
        epsilon=epsilon,
        delta=DELTA,
        clip_norm=1.0,
        sampling=SAMPLINGS,
        noise="auto",
        workload=workloads.momentum_sum(decay, weight_decay=FADING),
        adjacency=Adjacency.ZERO_OUT,
    )
    return {(one.sampling, one.noise): one for one in run.comparison.candidates}


def main():
    """Compare the mechanisms, print and write the tables."""
    options = parser(__doc__)
    options.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    arguments = options.parse_args()
    rows, strategies = [], []
    settings = itertools.product(LENGTHS, DECAYS, arguments.epsilons)
    for (epochs, steps), optimizer, epsilon in settings:
        start = time.perf_counter()
        result = compared(DECAYS[optimizer], epochs, steps, epsilon)
        seconds = time.perf_counter() - start
        print(optimizer, epochs, steps, epsilon, f"{seconds:.0f} s", flush=True)
        setting = [optimizer, epochs, steps, epsilon]
        baseline = result["poisson", "independent"].error
        each = [result[key] for key in COLUMNS.values()]
        ratios = [one.error / baseline if one.plan else None for one in each]
        rows.append([*setting, *ratios, seconds])
        strategies.append([*setting, *(one.strategy for one in each)])
    columns = {"optimizer": "{}", "epochs": "{}", "steps an epoch": "{}", "ε": "{:g}"}
    tables = [
        Table(
            "noise",
            columns | dict.fromkeys(COLUMNS, "{:.2f}") | {"seconds": "{:.0f}"},
            rows,
        ),
        Table("strategies", columns | dict.fromkeys(COLUMNS, "{}"), strategies),
    ]
    print_tables(*tables)
    write("mechanisms", arguments, tables)


if __name__ == "__main__":
    main()
