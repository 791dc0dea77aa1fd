"""Measure the error of noise that is optimized for an optimizer, and the times.

    python benchmarks/correlated.py [--part error|schedule|optimize|step]
                                    [--without-peers]

In the table of errors, an error is μ times the root mean square of the noise in a
workload, in a fixed order, divided by a lower bound for all strategies. The strategies
of jax_privacy need the extra `bench`. jax_privacy optimizes dense strategies for the
workload, and all its other strategies for prefix sums.
"""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
from _results import OURS, Table, parser, print_tables, require, write
from _timing import said, steps_in_turn
from scipy.linalg import toeplitz

import dpjax
from dpjax import Adjacency, strategies, workloads
from dpjax.accounting import correlated
from dpjax.accounting.tree import momentum_mu
from dpjax.noise import tree
from dpjax.strategies import _optimize

KEY = jax.random.key(0)
ROUNDS = 21
NUM_STEPS = 2000  # the number of steps for which the timed noise is made
# Steps per epoch, number of epochs, and decay of the momentum.
SETTINGS = [(100, 10, 0.9), (23, 20, 0.95), (100, 10, 0.99), (1000, 8, 0.999)]
WORKLOADS = {"momentum": workloads.momentum, "its sums": workloads.momentum_sum}
# The search of jax_privacy for a dense strategy takes minutes for at most DENSE steps,
# and hours for more steps.
DENSE, DENSE_ITERATIONS = 500, 500
# Steps, steps per epoch, and the kind and number of vectors of the strategy.
SEARCHES = [
    (2000, 200, "banded", 31),
    (2000, 200, "rational", 1),
    (100_000, 1000, "geometric", 1),
    (100_000, 1000, "rational", 1),
    (100_000, 1000, "rational", 3),
]


def ours(workload, **asked):
    """Return dpjax's strategies by name."""
    return {
        "independent": strategies.independent(),
        "geometric, no vector": strategies.optimize("geometric", workload, **asked),
        **{
            f"rational, {k} vector{'s' * (k > 1)}": strategies.optimize(
                "rational", workload, num_vectors=k, **asked
            )
            for k in (1, 2, 3)
        },
    }


def peers(workload, *, num_steps, steps_per_epoch):
    """Yield jax_privacy's strategies by name: coefficients f[T] or matrices f[T, T]."""
    from jax_privacy.matrix_factorization import buffered_toeplitz, dense
    from jax_privacy.matrix_factorization import toeplitz as banded

    bands, epochs = min(steps_per_epoch, 32), num_steps // steps_per_epoch
    with jax.enable_x64(True):
        c = np.asarray(banded.optimize_banded_toeplitz(num_steps, bands))
        yield f"jax_privacy, {bands} bands", np.pad(c, (0, num_steps - bands))
        blt = buffered_toeplitz.optimize(
            n=num_steps,
            min_sep=steps_per_epoch,
            max_participations=epochs,
            error="mean",
            max_buffers=3,
        )
        yield "jax_privacy, BLT", np.asarray(blt.toeplitz_coefs(num_steps))
        if num_steps <= DENSE:
            a = toeplitz(
                _optimize.coefficients(workload, num_steps), np.zeros(num_steps)
            )
            # The search for a dense strategy ends at a gradient of 1e-3. The factor of
            # 100 keeps the numbers from being too small for this limit.
            c = dense.optimize(
                num_steps,
                epochs=epochs,
                A=jnp.asarray(100 * a),
                max_optimizer_steps=DENSE_ITERATIONS,
            )
            yield "jax_privacy, dense", np.asarray(c)


def of_theirs(c, workload, *, num_steps, steps_per_epoch):
    """Return μ times the error of coefficients (all c >= 0) or of a matrix."""
    a = _optimize.coefficients(workload, num_steps)
    if c.ndim == 2:
        gram = np.abs(c.T @ c)
        places = (slice(o, None, steps_per_epoch) for o in range(steps_per_epoch))
        worst = max(gram[place, place].sum() for place in places)
        error = np.linalg.norm(toeplitz(a, np.zeros(num_steps)) @ np.linalg.inv(c))
        return np.sqrt(worst / num_steps) * error
    rows = np.pad(c, (0, -num_steps % steps_per_epoch)).reshape(-1, steps_per_epoch)
    shifts = rows.cumsum(axis=0).ravel()[:num_steps]
    w = np.convolve(a, _optimize.ratio(np.ones(1), c, num_steps))[:num_steps]
    outputs = np.arange(num_steps, 0, -1) / num_steps
    return np.linalg.norm(shifts) * np.sqrt(w**2 @ outputs)


def of_ours(strategy, workload, **asked):
    """Return μ times the error of one of dpjax's strategies, by the accountant."""
    order = {"order": "fixed", "adjacency": Adjacency.ZERO_OUT}
    mu = correlated.mu(strategy, 1.0, **asked, **order)
    return mu * correlated.error(strategy, workload, asked["num_steps"])


def of_tree(decay, **asked):
    """Return μ times the error of the tree, in the momentum with the tree's decay."""
    order = {"order": "fixed", "adjacency": Adjacency.ZERO_OUT}
    mu = momentum_mu(1.0, decay=decay, **asked, **order)
    variance = tree.prefix_variance(np.arange(1, asked["num_steps"] + 1), decay)
    return mu * (1 - decay) * np.sqrt(np.mean(variance))


def errors(with_peers):
    """Compute the error of all strategies over the lower bound, in both workloads."""
    rows = []
    for (n_b, epochs, decay), name in itertools.product(SETTINGS, WORKLOADS):
        workload = WORKLOADS[name](decay)
        options = {"num_steps": n_b * epochs, "steps_per_epoch": n_b}
        result = {
            label: of_ours(strategy, workload, **options)
            for label, strategy in ours(workload, **options).items()
        }
        if name == "momentum":
            result["tree"] = of_tree(decay, **options)
        for label, c in peers(workload, **options) if with_peers else ():
            result[label] = of_theirs(c, workload, **options)
        bound = _optimize.lower_bound(workload, n_b * epochs, n_b)
        for label, product in result.items():
            rows.append([name, n_b, epochs, decay, label, product / bound])
            print(*rows[-1], flush=True)
    columns = dict.fromkeys(("workload", "steps an epoch", "epochs", "decay"), "{}")
    columns |= {"strategy": "{}", "error / lower bound": "{:.3f}"}
    return Table("error", columns, rows)


def schedules():
    """Compare equal noise in all steps with the best factor of the noise in each step.

    The compared number is μ times the error.
    """
    num_steps, n_b = 1000, 100
    options = {"num_steps": num_steps, "steps_per_epoch": n_b}
    steps = np.arange(num_steps)
    rates = {
        "constant": np.ones(num_steps),
        "cosine": (1 + np.cos(np.pi * steps / num_steps)) / 2,
        "linear": 1 - steps / num_steps,
        "1 / √t": 1 / np.sqrt(1 + steps),
    }
    rows = []
    for (falls, rate), name in itertools.product(rates.items(), WORKLOADS):
        workload = WORKLOADS[name](0.9, learning_rates=rate)
        shapes = {"independent": strategies.independent()} | {
            label: strategies.optimize(kind, workload, **options)
            for label, kind in (
                ("geometric, no vector", "geometric"),
                ("rational, 1 vector", "rational"),
            )
        }
        for label, shape in shapes.items():
            scaled = strategies.scheduled(shape, workload, **options)
            same, varying = (of_ours(x, workload, **options) for x in (shape, scaled))
            rows.append([name, falls, label, float(same), float(varying / same)])
            print(*rows[-1], flush=True)
    columns = dict.fromkeys(("workload", "learning rate", "strategy"), "{}")
    columns |= {"μ × error": "{:.3g}", "error with a schedule": "{:.3f} times"}
    return Table("schedules", columns, rows)


def searches(with_peers):
    """Time two searches for sums of momentum; the first search also compiles."""
    rows = []
    for num_steps, n_b, kind, vectors in SEARCHES:
        timings = []
        for decay in (0.9, 0.95):
            start = time.perf_counter()
            strategies.optimize(
                kind,
                workloads.momentum_sum(decay),
                num_steps=num_steps,
                steps_per_epoch=n_b,
                num_vectors=vectors,
            )
            timings.append(time.perf_counter() - start)
        rows.append([f"dpjax, {kind}", vectors, num_steps, *timings])
        print(*rows[-1], flush=True)
    if with_peers:
        from jax_privacy.matrix_factorization import toeplitz as banded

        timings = []
        for _ in range(2):
            start = time.perf_counter()
            jax.block_until_ready(banded.optimize_banded_toeplitz(2000, 32))
            timings.append(time.perf_counter() - start)
        rows.append(["jax_privacy, banded", 31, 2000, *timings])
    columns = {"strategy": "{}", "vectors": "{}", "steps": "{}"}
    columns |= {"first search, s": "{:.1f}", "later search, s": "{:.1f}"}
    return Table("searches", columns, rows)


def step_time(size):
    """Time a step of each noise against independent noise; the state is donated."""
    gradient = jnp.ones(size)
    given = {"num_steps": NUM_STEPS, "key": KEY}
    geometric, one = strategies.geometric(0.9), strategies.rational([0.5], [0.95])
    candidates = {
        "add_gaussian_noise": dpjax.add_gaussian_noise(1.3, key=KEY),
        "geometric, stored": dpjax.correlated_noise(geometric, 1.3, **given),
        "geometric, regenerated": dpjax.correlated_noise(
            geometric, 1.3, buffer="regenerate", **given
        ),
        "rational, 1 vector": dpjax.correlated_noise(one, 1.3, **given),
        "tree_momentum, stored": dpjax.tree_momentum(0.9, 1.3, **given),
    }
    states = {name: tx.init(gradient) for name, tx in candidates.items()}
    return steps_in_turn(candidates, states, size, ROUNDS)


def main():
    """Run one measurement, or all measurements."""
    options = parser(__doc__)
    options.add_argument("--part", choices=("error", "schedule", "optimize", "step"))
    options.add_argument("--size", type=int, default=10_000_000)
    options.add_argument("--without-peers", action="store_true")
    arguments = options.parse_args()
    result = require(["jax_privacy"], arguments.without_peers)
    parts = {
        "error": lambda: errors(bool(result)),
        "schedule": schedules,
        "optimize": lambda: searches(bool(result)),
        "step": lambda: step_time(arguments.size),
    }
    packages = [*OURS, *(p for p in result)]
    for part in [arguments.part] if arguments.part else parts:
        table = parts[part]()
        print_tables(table)
        times = said(ROUNDS) if part == "step" else None
        write(f"correlated.{part}", arguments, [table], packages=packages, times=times)


if __name__ == "__main__":
    main()
