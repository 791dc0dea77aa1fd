"""Measure time and noise of momentum with reduced sensitivity against the plain tree.

    python benchmarks/reduced_momentum.py [--only times|noise]

The first table has the time of one step of the compiled scan (vectors of length 100),
for 2^8 to 2^14 steps. In two columns, the number of steps per epoch is fixed; a direct
reconstruction would there take time in proportion to the number of epochs. In the last
column, the number of epochs is fixed. The second and the third table compare the noise
in the momentum with the noise of dp_nsgd at the same privacy, number of steps and
decay: at the parameters of Theorem 9 of Tran and Cutkosky (2022), and near these
parameters. The noise is the root mean square over
coordinates and steps, in units of the clip norm, for batches of one example and a loss
of smoothness L = G = 1. No gradient is clipped in this setting, so that noise is the
only error due to privacy. Only the noise in the time measurements is random. Times and
noise are written into separate results.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from _results import Table, parser, print_tables, write
from _timing import said, take_turns

from dpjax import Adjacency
from dpjax.accounting import gdp
from dpjax.accounting.tree import momentum_mu, reduced_momentum_mu
from dpjax.noise import _reduced_momentum as reduced_momentum
from dpjax.noise import tree
from dpjax.noise._reduced_momentum import Terms
from dpjax.solvers._sensitivity_reduced_nsgd import allot_noise

DIMENSION, ROUNDS, DELTA = 100, 7, 1e-5
MOVES = (0.003, 0.03, 0.1, 0.3, 1.0)


def scan(num_steps, steps_per_epoch):
    """Return a function without arguments that runs all steps."""
    keys = Terms(*jax.random.split(jax.random.key(0), 3))
    sums = Terms(*(jnp.ones(DIMENSION),) * 3)

    def step(state, number):
        momentum, state = reduced_momentum.update(
            state,
            number,
            sums,
            steps_per_epoch=steps_per_epoch,
            decay=jnp.asarray(0.9),
            refresh=jnp.asarray(0.1),
            stddevs=Terms(1.0, 1.0, 1.0),
            keys=keys,
        )
        return state, momentum[0]

    @jax.jit
    def run(state):
        return jax.lax.scan(step, state, jnp.arange(1, num_steps + 1))[1]

    state = reduced_momentum.init(num_steps, steps_per_epoch, DIMENSION)
    return lambda: run(state)


def step_times(largest):
    """Measure the microseconds per step."""
    shapes = {
        2**exponent: (16, 256, 2**exponent // 16) for exponent in range(8, largest + 1)
    }
    times = take_turns(
        {
            (steps, n): scan(steps, n)
            for steps, lengths in shapes.items()
            for n in lengths
            if 2 * n <= steps
        },
        rounds=ROUNDS,
    )
    columns = {"steps": "{}", "16 steps an epoch": "{:.1f}"}
    columns |= {"256 steps an epoch": "{:.1f}", "16 epochs": "{:.1f}"}
    rows = [
        [
            steps,
            *(
                1e6 * times[steps, n].median / steps if (steps, n) in times else None
                for n in lengths
            ),
        ]
        for steps, lengths in shapes.items()
    ]
    return Table("microseconds", columns, rows)


def noise(n, epochs, eta, beta, gamma, epsilon):
    """Return the RMS noise of dp_nsgd and of reduced sensitivity, at clip norm 1."""
    target, steps = float(gdp.mu(epsilon, DELTA)), n * epochs
    shape = {"num_steps": steps, "decay": beta, "steps_per_epoch": n}
    sigma = float(momentum_mu(1.0, order="fixed", adjacency=Adjacency.REPLACE, **shape))
    variance = np.asarray(tree.prefix_variance(np.arange(1, steps + 1), beta))
    plain = (1 - beta) * sigma / target * math.sqrt(variance.mean())

    movement = eta * n
    bounds = Terms(1.0, (1 - gamma) * movement + gamma, movement)
    of_steps = reduced_momentum.momentum_variance(steps, n, decay=beta, refresh=gamma)
    variance = Terms(
        *(float(np.mean(v)) * c**2 for v, c in zip(of_steps, bounds, strict=True))
    )
    mu_of = functools.partial(reduced_momentum_mu, adjacency=Adjacency.REPLACE, **shape)
    multipliers = allot_noise(target, mu_of, variance)
    each = [
        v * s**2 for v, s in zip(variance, multipliers, strict=True) if np.isfinite(s)
    ]
    return plain, (1 - beta) * math.sqrt(sum(each))


def noise_as_published():
    """Compare the noise at the parameters of Theorem 9."""
    rows = []
    for n in (100, 1000):
        for d in (10, 100):
            for epsilon in (0.1, 1.0, 4.0):
                steps = n ** (7 / 3) * epsilon ** (4 / 3) / d ** (2 / 3)
                epochs = max(2, round(steps / n))
                alpha = n**1.25 * epsilon / ((n * epochs) ** 0.75 * math.sqrt(d))
                alpha = min(max(alpha, 1 / n), 1.0)
                eta = 1 / math.sqrt(n * n * epochs)
                gamma = min(eta * n, 0.5)
                a, b = noise(n, epochs, eta, 1 - alpha, gamma, epsilon)
                rows.append([n, d, epsilon, epochs, alpha, eta * n, a, b, b / a])
    columns = {"N": "{}", "d": "{}", "ε": "{}", "T / N": "{}", "α": "{:.4f}"}
    columns |= {"ηN = γ": "{:.3f}", "dp_nsgd": "{:.4f}", "reduced": "{:.4f}"}
    return Table("noise as published", columns | {"ratio": "{:.2f}"}, rows)


def noise_ratios():
    """Compare the noise at ε = 1 and α = 0.1, with the best of 5 values of γ."""
    rows = []
    for n, epochs in [(32, 8), (32, 32), (32, 256), (256, 8), (256, 64)]:
        cells = []
        for movement in MOVES:
            ratios = []
            for gamma in np.geomspace(3e-3, 0.5, 5):
                a, b = noise(n, epochs, movement / n, 0.9, gamma, 1.0)
                ratios.append(b / a)
            cells.append(min(ratios))
        rows.append([n, epochs, *cells])
    columns = {"N": "{}", "epochs": "{}"} | {f"ηN = {m}": "{:.2f}" for m in MOVES}
    return Table("noise ratios", columns, rows)


def main():
    """Measure, print and write the tables."""
    options = parser(__doc__)
    options.add_argument("--only", choices=["times", "noise"])
    options.add_argument("--largest", type=int, default=14, help="log2 of most steps")
    arguments = options.parse_args()
    if arguments.only != "noise":
        times = step_times(arguments.largest)
        print_tables(times)
        write("reduced_momentum.times", arguments, [times], times=said(ROUNDS))
    if arguments.only != "times":
        tables = [noise_as_published(), noise_ratios()]
        print_tables(*tables)
        write("reduced_momentum.noise", arguments, tables)


if __name__ == "__main__":
    main()
