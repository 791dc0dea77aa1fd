"""Reproduce published tables of amplification by iteration, and time the bounds.

    python benchmarks/iteration.py [--only tables|times] [--plot docs/iteration.png]

`_iteration_tables.py` describes the tables.
"""

import pathlib

import jax
import numpy as np
from _iteration_settings import INF, logistic, logistic_mu, rdp_epsilon
from _iteration_tables import (
    figure_1,
    kong_ribero,
    table_7,
    table_8,
    table_9,
    tables_1_3_4,
    tables_10_to_12,
)
from _results import Table, parser, print_tables, write
from _timing import said, take_turns

from dpjax.accounting import gdp, iteration

ROUNDS = 11


def timings():
    """Measure the times of the bounds."""
    steps = 1_000_000
    rng = np.random.default_rng(0)
    contractive = np.full(steps, 0.9999)
    uneven = rng.uniform(0.9, 1.1, steps)
    sizes, noise = rng.uniform(size=steps), np.full(steps, 5.0)

    def schedule(lipschitz, sensitivity, diameter=INF):
        return lambda: iteration.optimal_shift_mu(
            lipschitz, sensitivity, noise, diameter=diameter
        )

    regression = logistic(0.002)
    shape = {"num_epochs": 1000, "batches_per_epoch": 1000, "batch_size": 60}
    bounded = regression | {"diameter": 10.0}
    gradient = jax.jit(
        jax.grad(
            lambda eta: gdp.epsilon(
                iteration.noisy_cyclic_gd_mu(
                    3.0, **shape, order="fixed", **regression | {"step_size": eta}
                ),
                1e-5,
            )
        )
    )
    cases = {
        "optimal_shift_mu, T = 1e6, c = 0.9999": schedule(contractive, np.ones(steps)),
        "the same, random c in (0.9, 1.1)": schedule(uneven, sizes),
        "the same, with a diameter": schedule(contractive, np.ones(steps), 10.0),
        "noisy_cyclic_gd_mu, l = E = 1000": lambda: iteration.noisy_cyclic_gd_mu(
            3.0, **shape, order="fixed", **regression
        ),
        "derivative of its ε by step size": lambda: gradient(0.05),
        "noisy_cyclic_gd_mus, all 1000 offsets": lambda: iteration.noisy_cyclic_gd_mus(
            3.0, **shape, **regression
        ),
        "all offsets, with a diameter": lambda: iteration.noisy_cyclic_gd_mus(
            3.0, **shape, **bounded
        ),
    }
    columns = {
        "call": "{}",
        "ms": "{:.1f}",
        "maximum, ms": "{:.1f}",
        "first, s": "{:.1f}",
    }
    rows = [
        [name, 1e3 * times.median, 1e3 * times.most, times.first]
        for name, times in take_turns(cases, rounds=ROUNDS).items()
    ]
    return Table("times", columns, rows)


def plot(path):
    """Plot ε against epochs: composition, conversion by RDP, and dpjax's bound."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from dpjax.plot import style

    plt.style.use(style)
    epochs = np.unique(np.logspace(0, 3, 25).astype(int))
    bounds = [logistic_mu(int(e), 0.002) for e in epochs]
    composed = [float(gdp.epsilon(b.composition, 1e-5)) for b in bounds]
    exact = [float(gdp.epsilon(b.best, 1e-5)) for b in bounds]
    by_rdp = [rdp_epsilon(b.best, 1e-5) for b in bounds]
    figure, axes = plt.subplots()
    axes.loglog(epochs, composed, label="all iterates, by composition")
    axes.loglog(epochs, by_rdp, label="last iterate, converted by RDP")
    axes.loglog(epochs, exact, label="last iterate, this library")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("epochs")
    axes.set_ylabel("ε at δ = 1e-5")
    axes.set_title(
        "Last iterate of clipped, regularised logistic regression\n"
        "40 batches an epoch, noise multiplier 3, REPLACE",
        fontsize=10,
    )
    axes.legend()
    figure.savefig(path)
    print(f"\nwrote {path}")


def main():
    """Make the tables and the picture, then the times, as two separate results."""
    options = parser(__doc__)
    options.add_argument("--plot", type=pathlib.Path, default="docs/iteration.png")
    options.add_argument("--only", choices=["tables", "times"])
    arguments = options.parse_args()
    if arguments.only != "times":
        tables = [*tables_1_3_4(), figure_1(), table_7(), table_8(), table_9()]
        tables += [tables_10_to_12(), kong_ribero()]
        print_tables(*tables)
        plot(arguments.plot)
        write("iteration.tables", arguments, tables)
    if arguments.only != "tables":
        times = timings()
        print_tables(times)
        write("iteration.times", arguments, [times], times=said(ROUNDS))


if __name__ == "__main__":
    main()
