"""Measure tightness and time of bounds for random allocation and random bins.

    pip install -e '.[bench]'
    python benchmarks/amplification.py [--samples 200000] [--without-peers]

The first table shows lower and upper bounds on ε for random allocation. The second
table shows noise multipliers for correlated noise. The noise multiplier that dpjax's
bound for random bins requires is compared with a Monte Carlo estimate of the least
noise multiplier, and with the noise multiplier for a fixed order. The other tables show
times, and estimate the time that jax_privacy's simulation would take to guarantee the
same noise multiplier. The script takes a few minutes on two cores.
"""

import contextlib
import functools

import jax
import numpy as np
from _results import OURS, Table, parser, print_tables, require, write
from _timing import said, take_turns

from dpjax import Adjacency, strategies
from dpjax.accounting import allocation, calibrate, correlated, gdp

with contextlib.suppress(ImportError):
    from jax_privacy.batch_selection import BallsInBinsSampling
    from jax_privacy.experimental.monte_carlo import (
        delta_calculation,
        sample_generation,
    )

SETTINGS = [  # noise multiplier, steps, epochs, δ
    (1.0, 100, 1, 1e-5),
    (1.0, 1_000, 1, 1e-5),
    (0.6, 1_000, 1, 1e-5),
    (0.3, 50, 1, 1e-5),
    (3.0, 10_000, 1, 1e-8),
    (1.0, 100, 10, 1e-5),
]
BINS = {"num_steps": 1000, "steps_per_epoch": 100, "adjacency": Adjacency.ADD_REMOVE}
CASES = [(decay, epsilon) for decay in (0.0, 0.3, 0.5, 0.7) for epsilon in (1.0, 4.0)]
DELTA, ROUNDS = 1e-5, 7


def brackets():
    """Measure lower and upper bounds on ε for random allocation, and their times."""
    rows = []
    for sigma, steps, epochs, delta in SETTINGS:
        sizes = {"num_steps": steps, "num_epochs": epochs}
        both = {
            "upper": functools.partial(allocation.epsilon, sigma, delta, **sizes),
            "lower": functools.partial(allocation.epsilon_lower, sigma, delta, **sizes),
        }
        times = take_turns(both, rounds=ROUNDS)
        ends = [float(both[name]()) for name in ("lower", "upper")]
        seconds = [times[name].median for name in ("lower", "upper")]
        rows.append([sigma, steps, epochs, delta, *ends, *(1e3 * x for x in seconds)])
    columns = {
        "σ": "{}",
        "steps": "{}",
        "epochs": "{}",
        "δ": "{}",
        "ε, lower": "{:.5f}",
        "ε, upper": "{:.5f}",
        "lower, ms": "{:.0f}",
        "upper, ms": "{:.0f}",
    }
    return Table("brackets", columns, rows)


@functools.cache
def simulation(decay, epsilon, samples):
    """Return a function from a noise multiplier to δ and the standard error of δ.

    δ is that of the cheaper order of the two distributions P and Q. X holds the scores
    of the n_b patterns, and K is the patterns' Gram matrix divided by the variance of
    the noise. Under P the pattern is drawn first, as a unit vector e, and X is N(K e,
    K). For half of the samples, X is instead drawn from N((1 + a) K e, K), where the
    drawn pattern's likelihood ratio alone would decide δ. The importance weights are
    those of the mixture of both normal distributions, and are at most two.
    """
    steps, n_b = BINS["num_steps"], BINS["steps_per_epoch"]
    comb = np.convolve(decay ** np.arange(steps), np.arange(steps) % n_b == 0)[:steps]
    shifts = np.array([np.pad(comb, (p, 0))[:steps] for p in range(n_b)])
    gram = shifts @ shifts.T
    root = np.linalg.cholesky(gram + 1e-10 * np.eye(n_b))
    z = np.random.default_rng(0).standard_normal((samples, n_b)) @ root.T
    own = np.random.default_rng(1).integers(n_b, size=samples)

    def delta(sigma):
        k = gram / sigma**2
        tilt = max((epsilon + np.log(n_b)) / k[0, 0] - 0.5, 0.0)
        more = tilt * (np.arange(samples) % 2)
        x = z / sigma + (1 + more)[:, None] * k[own]
        at = x[np.arange(samples), own]
        size = k[own, own]
        logs = np.log(np.mean(np.exp(x - np.diag(k) / 2), axis=1))
        weights = 2 / (1 + np.exp(tilt * (at - size) - tilt**2 * size / 2))
        terms = weights * -np.expm1(np.minimum(epsilon - logs, 0.0))
        return terms.mean(), terms.std() / np.sqrt(samples)

    return delta


def simulated(delta):
    """Return the least noise multiplier, and its standard error in percent."""
    low, high = 0.5, 40.0
    for _ in range(12):
        middle = np.sqrt(low * high)
        low, high = (low, middle) if delta(middle)[0] <= DELTA else (middle, high)
    # Convert the standard error of δ to a standard error of the noise multiplier.
    slope = np.log(delta(high * 1.01)[0] / delta(high)[0]) / 0.01
    error = delta(high)[1] / delta(high)[0] / abs(slope)
    return [high, 100 * error]


@functools.cache
def bins(sampling):
    return jax.jit(
        lambda decay, sigma: correlated.epsilon(
            strategies.geometric(decay), sigma, DELTA, sampling=sampling, **BINS
        )
    )


@functools.cache
def needed(decay, epsilon):
    """Return the noise multiplier that the bound for random bins requires."""
    return float(calibrate.solve(lambda s: bins("random_bins")(decay, s), epsilon))


def noise(samples):
    """Compare noise multipliers for a target ε, by the method that computes them."""
    rows = []
    for decay, epsilon in CASES:
        ours = needed(decay, epsilon)
        fixed = correlated.mu(
            strategies.geometric(decay), 1.0, order="fixed", **BINS
        ) / gdp.mu(epsilon, DELTA)
        true = simulated(simulation(decay, epsilon, samples))
        rows.append([decay, epsilon, ours, true, ours / true[0], float(fixed)])
    columns = {
        "λ": "{}",
        "ε": "{:g}",
        "random bins": "{:.2f}",
        "Monte Carlo": "{:.2f} ± {:.1f} %",
        "ratio": "{:.2f}",
        "fixed order": "{:.2f}",
    }
    return Table("noise", columns, rows)


def times():
    """Measure the time of one ε, compiled."""
    rows = []
    for steps, n_b in ((1_000, 100), (10_000, 1_000)):
        sizes = {**BINS, "num_steps": steps, "steps_per_epoch": n_b}
        for sampling in ("random_bins", "fresh_bins"):
            of = jax.jit(
                lambda sigma: correlated.epsilon(
                    strategies.geometric(0.5), sigma, DELTA, sampling=sampling, **sizes
                )
            )
            timings = take_turns({"": lambda: of(3.0)}, rounds=ROUNDS)[""]
            rows.append([sampling, steps, n_b, 1e3 * timings.median, timings.first])
    columns = {
        "sampling": "{}",
        "steps": "{}",
        "steps an epoch": "{}",
        "ms": "{:.0f}",
        "first call, s": "{:.0f}",
    }
    return Table("times", columns, rows)


def peers(samples, found):
    """Estimate the time of jax_privacy's simulation at dpjax's noise multiplier.

    The simulation may guarantee DELTA if its estimate of δ is at most the true δ at
    this noise multiplier. jax_privacy computes the number of samples, each in both
    orders of the two distributions. The estimated time is the time of 20 samples,
    scaled to the number of samples.
    """
    rows = []
    for decay, epsilon in CASES:
        sigma = needed(decay, epsilon)
        timings = take_turns(
            {"": lambda d=decay, s=sigma: bins("random_bins")(d, s)}, rounds=ROUNDS
        )[""].median
        row = [decay, epsilon, 1e3 * timings, None, None, None, None]
        true = simulation(decay, epsilon, samples)(sigma)[0]
        if "jax_privacy" in found and true < DELTA:
            steps, n_b = BINS["num_steps"], BINS["steps_per_epoch"]
            column = decay ** np.arange(steps)
            many = delta_calculation.minimum_samples_to_calibrate(true, DELTA)

            def theirs(sigma=sigma, column=column, steps=steps, n_b=n_b):
                way = BallsInBinsSampling(steps, n_b)
                for positive in (True, False) * 10:
                    sample_generation.get_privacy_loss_sample(
                        way, sigma, column, 0, positive
                    )

            each = take_turns({"": theirs}, rounds=ROUNDS)[""].median / 20
            total = 2 * many * each
            row[3:] = [1e3 * each, float(many), total / 3600, total / timings]
        rows.append(row)
    columns = {"λ": "{}", "ε": "{:g}", "dpjax, ms": "{:.0f}"}
    columns |= {"jax_privacy, ms a sample": "{:.2f}", "samples": "{:.1e}"}
    columns |= {"hours": "{:.3g}", "ratio to dpjax": "{:.1e}"}
    return Table("peers", columns, rows)


def main():
    """Measure everything, and print each table when it is complete."""
    options = parser(__doc__)
    options.add_argument("--samples", type=int, default=200_000)
    options.add_argument("--without-peers", action="store_true")
    arguments = options.parse_args()
    result = require(["jax_privacy"], arguments.without_peers)
    tables = []
    for measure in (
        brackets,
        functools.partial(noise, arguments.samples),
        times,
        functools.partial(peers, arguments.samples, result),
    ):
        tables.append(measure())
        print_tables(tables[-1])
    packages = [*OURS, "numpy", *result]
    write("amplification", arguments, tables, packages=packages, times=said(ROUNDS))


if __name__ == "__main__":
    main()
