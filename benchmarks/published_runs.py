"""Compare the published ε of training runs with the ε that dpjax computes.

    python benchmarks/published_runs.py

The sources of the parameters are linked in docs/published-runs.md. The script trains
nothing, and takes a few seconds.
"""

import math
from typing import NamedTuple

import numpy as np
from _results import Table, parser, print_tables, write

from dpjax import Adjacency
from dpjax.accounting import gdp, pld, rdp

# The orders of the accountants of TensorFlow Privacy and Opacus when the runs appeared.
ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + [*range(12, 64)], float)
POISSON = "Poisson"
SHUFFLED = "shuffled epochs"
BUFFER = "shuffle buffer"
UNKNOWN = "not read"


class Run(NamedTuple):
    """What a source states about a run, and how the run's linked code draws batches.

    Attributes:
      name: the run, with the label of its link.
      noise_multiplier: noise standard deviation over clip norm.
      batch_size: the size of a batch; for Poisson samples, the mean size.
      num_examples: the number of examples in the training set.
      num_steps: the number of steps.
      delta: δ.
      printed: the ε in the source.
      draws: how the code draws batches.
      uses: an upper bound on the L2 norm, over batches, of how many times a batch
        contains one example; None if batches are Poisson samples or the code was not
        read.
      epoch: the number of batches in an epoch, if the code uses 1 / epoch as sampling
        rate; otherwise None.
    """

    name: str
    noise_multiplier: float
    batch_size: int
    num_examples: int
    num_steps: int
    delta: float
    printed: float
    draws: str
    uses: float | None
    epoch: int | None = None


def tf_privacy(noise_multiplier: float, num_epochs: int, printed: float) -> Run:
    """Return a run of the MNIST tutorial: each epoch is one shuffled pass."""
    steps = math.ceil(num_epochs * 60_000 / 256)
    name = f"[TensorFlow Privacy, MNIST][tf], {num_epochs} epochs"
    used = math.sqrt(num_epochs)
    return Run(
        name, noise_multiplier, 256, 60_000, steps, 1e-5, printed, SHUFFLED, used
    )


def opacus(noise_multiplier: float, num_epochs: int, printed: float) -> Run:
    """Return a run of the MNIST example, with 250 batches of 240 in an epoch."""
    name = f"[Opacus, MNIST][opacus], {num_epochs} epochs"
    return Run(
        name,
        noise_multiplier,
        240,
        60_000,
        num_epochs * 250,
        1e-5,
        printed,
        POISSON,
        None,
        250,
    )


def tramer(
    name: str, noise_multiplier: float, batch_size: int, n: int, num_epochs: int
) -> Run:
    """Return a run of an end-to-end network of Tramèr and Boneh (2021)."""
    steps = n // batch_size * num_epochs
    name = f"[Tramèr and Boneh, {name}][tramer]"
    used = math.sqrt(num_epochs)
    return Run(name, noise_multiplier, batch_size, n, steps, 1e-5, 3.0, SHUFFLED, used)


def de(
    name: str,
    noise_multiplier: float,
    batch_size: int,
    n: int,
    num_steps: int,
    delta: float,
    printed: float,
) -> Run:
    """Return a run of De et al. (2022).

    The data set is repeated, and then shuffled in a buffer of at most 10 batches. An
    example leaves the buffer at most as often as the example enters the buffer, but
    several copies of an example may leave the buffer in one batch. The norm of the uses
    of an example is therefore bounded by the number of these uses.
    """
    used = math.ceil((num_steps + 10) * batch_size / n)
    name = f"[De et al., {name}][de]"
    return Run(
        name,
        noise_multiplier,
        batch_size,
        n,
        num_steps,
        delta,
        printed,
        BUFFER,
        float(used),
    )


RUNS = [
    tf_privacy(1.3, 15, 1.19),
    tf_privacy(1.1, 60, 3.01),
    tf_privacy(0.7, 45, 7.10),
    opacus(1.3, 15, 1.16),
    opacus(1.1, 60, 2.91),
    opacus(0.7, 45, 6.86),
    Run(
        "[Opacus, CIFAR-10 tutorial][opacus-cifar]",
        0.39066894531249996,
        512,
        50_000,
        20 * 98,
        1e-5,
        47.21,
        POISSON,
        None,
        98,
    ),
    Run(
        "[Opacus, names][opacus-names], the command's batch",
        1.0,
        64,
        16_059,
        50 * 251,
        8e-5,
        11.83,
        POISSON,
        None,
        251,
    ),
    Run(
        "[Opacus, names][opacus-names], the [tutorial][opacus-lstm]'s batch",
        1.0,
        800,
        16_059,
        50 * 20,
        8e-5,
        11.83,
        POISSON,
        None,
    ),
    Run(
        "[Bu et al., MNIST][bu], 20 epochs",
        1.3,
        256,
        60_000,
        math.ceil(20 * 60_000 / 256),
        1e-5,
        1.34,
        UNKNOWN,
        None,
    ),
    Run(
        "[Bu et al., MNIST][bu], 70 epochs",
        0.7,
        256,
        60_000,
        math.ceil(70 * 60_000 / 256),
        1e-5,
        8.68,
        UNKNOWN,
        None,
    ),
    tramer("MNIST", 1.23, 512, 60_000, 40),
    tramer("Fashion-MNIST", 2.15, 2048, 60_000, 40),
    tramer("CIFAR-10", 1.54, 1024, 50_000, 30),
    de("CIFAR-10", 10.0, 4096, 50_000, 875, 1e-5, 1.0),
    de("CIFAR-100, fine-tuned", 21.1, 16_384, 50_000, 250, 1e-5, 1.0),
    de("ImageNet", 2.5, 16_384, 1_271_167, 71_589, 8e-7, 8.0),
    Run(
        "[Sander et al., CIFAR-10][tan]",
        3.0,
        4096,
        50_000,
        2500,
        1e-5,
        8.0,
        POISSON,
        None,
    ),
    Run(
        "[Sander et al., ImageNet][tan]",
        2.5,
        32_768,
        1_281_167,
        18_000,
        8e-7,
        8.0,
        POISSON,
        None,
    ),
]


def sampling_rate(run: Run) -> float:
    """Return q, the probability that an example is in a batch."""
    return 1 / run.epoch if run.epoch else run.batch_size / run.num_examples


def poisson_epsilon(run: Run, adjacency: Adjacency) -> float:
    """Return ε for Poisson samples, by privacy-loss distributions."""
    step = pld.poisson_gaussian(
        run.noise_multiplier, sampling_rate(run), adjacency=adjacency
    )
    return float(pld.epsilon(pld.compose(step, run.num_steps), run.delta))


def renyi_epsilons(run: Run) -> list[float]:
    """Return ε for Poisson samples by Rényi curves, converted as in 2017 and 2020."""
    step = rdp.poisson_gaussian(run.noise_multiplier, sampling_rate(run), ORDERS)
    curve = np.asarray(rdp.compose(step, count=run.num_steps), float)
    # Mironov (2017), Proposition 3: https://arxiv.org/abs/1702.07476
    first = np.min(curve - math.log(run.delta) / (ORDERS - 1))
    return [float(first), float(rdp.epsilon(curve, ORDERS, run.delta))]


def unamplified_epsilon(run: Run, adjacency: Adjacency) -> float | None:
    """Return ε if an attacker knows each example's batches; None if `uses` is None."""
    if run.uses is None:
        return None
    # Removing an example moves a clipped sum by one clip norm, replacing it by two.
    moves = 2 if adjacency is Adjacency.REPLACE else 1
    return float(gdp.epsilon(moves * run.uses / run.noise_multiplier, run.delta))


def raised(epsilon: float | None, digits: int) -> float | None:
    """Round ε up to this number of digits after the point; None stays None."""
    return epsilon if epsilon is None else math.ceil(10**digits * epsilon) / 10**digits


def parameters() -> Table:
    """Return the parameters that the sources state."""
    columns = {
        "run": "{}",
        "σ": "{:.4g}",
        "batch": "{:,}",
        "examples": "{:,}",
        "steps": "{:,}",
        "δ": "{:g}",
        "batches in the code": "{}",
    }
    rows = [[*run[:6], run.draws] for run in RUNS]
    return Table("parameters", columns, rows)


def epsilons() -> Table:
    """Return ε as published, for Poisson samples, and for the batches of the code."""
    columns = {
        "run": "{}",
        "published": "{:.2f}",
        "Rényi, 2017 and 2020": "{:.2f}, {:.2f}",
        "ADD_REMOVE, Poisson": "{:.3f}",
        "REPLACE, Poisson": "{:.3f}",
        "ZERO_OUT, the code's batches": "{:,.1f}",
        "REPLACE, the code's batches": "{:,.1f}",
    }
    rows = [
        [
            run.name,
            run.printed,
            renyi_epsilons(run),
            raised(poisson_epsilon(run, Adjacency.ADD_REMOVE), 3),
            raised(poisson_epsilon(run, Adjacency.REPLACE), 3),
            raised(unamplified_epsilon(run, Adjacency.ZERO_OUT), 1),
            raised(unamplified_epsilon(run, Adjacency.REPLACE), 1),
        ]
        for run in RUNS
    ]
    return Table("epsilons", columns, rows)


def main() -> None:
    """Compute, print and write the tables."""
    arguments = parser(__doc__ or "").parse_args()
    tables = [parameters(), epsilons()]
    print_tables(*tables)
    write("published_runs", arguments, tables)


if __name__ == "__main__":
    main()
