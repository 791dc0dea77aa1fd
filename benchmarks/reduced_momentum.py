"""Time and noise of momentum with reduced sensitivity beside the plain tree.

    python benchmarks/reduced_momentum.py [--times]

Three tables. Times a step of the compiled scan (vectors of 100, medians of 7 runs after
one for compilation, block_until_ready) for 2^8 to 2^14 steps: at a fixed number of
steps per epoch, where direct reconstruction would take time in proportion to the number
of epochs, and with it growing. Then the noise in the momentum beside that of dp_nsgd
at the same privacy, steps and decay, at the parameters of Theorem 9 of Tran and
Cutkosky (2022) and around them: root mean square over coordinates and steps, in units
of the clip norm, batches of one, loss of smoothness L = G = 1 (so no clip is active,
and noise is all the error that privacy adds). Nothing here is random but the noise that
is drawn for the times. With --times only those are taken.
"""

import argparse
import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import Adjacency, reduced_momentum, tree
from dpjax.accounting import gdp
from dpjax.accounting.tree import momentum_mu
from dpjax.reduced_momentum import Terms
from dpjax.solvers import allot_noise

DIMENSION, REPEATS, DELTA = 100, 7, 1e-5


def microseconds(num_steps, steps_per_epoch):
    """The median time of a step."""
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
    jax.block_until_ready(run(state))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run(state))
        times.append(time.perf_counter() - start)
    return statistics.median(times) / num_steps * 1e6


def noise(n, epochs, eta, beta, gamma, epsilon):
    """RMS noise of the plain tree and of reduced sensitivity, over the clip norm."""
    target, steps = float(gdp.mu(epsilon, DELTA)), n * epochs
    shape = {"num_steps": steps, "decay": beta, "steps_per_epoch": n}
    sigma = float(momentum_mu(1.0, order="fixed", adjacency=Adjacency.REPLACE, **shape))
    variance = np.asarray(tree.prefix_variance(np.arange(1, steps + 1), beta))
    plain = (1 - beta) * sigma / target * math.sqrt(variance.mean())

    moved = eta * n
    bounds = Terms(1.0, (1 - gamma) * moved + gamma, moved)
    multipliers = allot_noise(
        target, bounds=bounds, refresh=gamma, adjacency=Adjacency.REPLACE, **shape
    )
    added = reduced_momentum.momentum_variance(steps, n, decay=beta, refresh=gamma)
    each = [
        float(np.mean(v)) * (s * c) ** 2
        for v, s, c in zip(added, multipliers, bounds, strict=True)
        if np.isfinite(s)
    ]
    return plain, (1 - beta) * math.sqrt(sum(each))


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", action="store_true")
    arguments = parser.parse_args()
    print("\n| steps | 16 steps an epoch | 256 steps an epoch | 16 epochs |")
    print("| --- | --- | --- | --- |")
    for exponent in range(8, 15):
        steps = 2**exponent
        cells = [
            f"{microseconds(steps, n):.1f}" if 2 * n <= steps else ""
            for n in (16, 256, steps // 16)
        ]
        print(f"| {steps} | " + " | ".join(cells) + " |", flush=True)

    if arguments.times:
        return
    print("\n| N | d | ε | T / N | α | ηN = γ | dp_nsgd | reduced | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
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
                print(
                    f"| {n} | {d} | {epsilon} | {epochs} | {alpha:.4f} | "
                    f"{eta * n:.3f} | {a:.4f} | {b:.4f} | {b / a:.2f} |",
                    flush=True,
                )

    print("\nε = 1, α = 0.1: ratio of the noise, by epochs and ηN (γ the best of 5)\n")
    moves = (0.003, 0.03, 0.1, 0.3, 1.0)
    print("| N | epochs | " + " | ".join(f"ηN = {m}" for m in moves) + " |")
    print("| --- | --- | " + " | ".join("---" for _ in moves) + " |")
    for n, epochs in [(32, 8), (32, 32), (32, 256), (256, 8), (256, 64)]:
        cells = []
        for moved in moves:
            ratios = []
            for gamma in np.geomspace(3e-3, 0.5, 5):
                a, b = noise(n, epochs, moved / n, 0.9, gamma, 1.0)
                ratios.append(b / a)
            cells.append(f"{min(ratios):.2f}")
        print(f"| {n} | {epochs} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
