"""dpjax's accountants beside dp-accounting, Opacus and prv-accountant, in one run.

    pip install -e '.[bench]' && python benchmarks/accountants.py [--points 1000]

Prints Markdown tables: ε of the Poisson-subsampled Gaussian by every accountant, and
times. Times are medians over repetitions, each waited for, after one warm-up, but for
what takes the peers longest: one calibration, and one pass over the grid. Compiling
has a row of its own. The peers run one point at a time: that is their interface.
"""

import argparse
import importlib.metadata
import platform
import statistics
import time
import warnings

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
from opacus.accountants.analysis import rdp as opacus_rdp
from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

from dpjax import Adjacency
from dpjax.accounting import calibrate, pld, rdp

SETTINGS = [  # noise multiplier, sampling rate, steps, δ
    (1.0, 0.01, 1_000, 1e-5),
    (0.6, 0.01, 1_000, 1e-5),
    (2.0, 0.05, 2_000, 1e-6),
    (0.8, 1e-3, 100_000, 1e-7),
    (5.0, 0.5, 200, 1e-5),
    (1.0, 1e-4, 10_000, 1e-8),
    (1.1, 0.004, 10_000, 1e-12),
]


def seconds(fn, repetitions):
    """The median time that fn() takes, warm."""
    jax.block_until_ready(fn())
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        jax.block_until_ready(fn())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def event(sigma, q, steps):
    step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    return dp_accounting.SelfComposedDpEvent(step, steps)


def our_rdp(sigma, q, steps, delta):
    curve = rdp.compose(rdp.poisson_gaussian(sigma, q, rdp.ORDERS), count=steps)
    return rdp.epsilon(curve, rdp.ORDERS, delta)


def our_pld(sigma, q, steps, delta):
    step = pld.poisson_gaussian(sigma, q, adjacency=Adjacency.ADD_REMOVE)
    return pld.epsilon(pld.compose(step, steps), delta)


def google_rdp(sigma, q, steps, delta):
    accountant = rdp_privacy_accountant.RdpAccountant()
    return accountant.compose(event(sigma, q, steps)).get_epsilon(delta)


def google_pld(sigma, q, steps, delta):
    accountant = pld_privacy_accountant.PLDAccountant()
    return accountant.compose(event(sigma, q, steps)).get_epsilon(delta)


def their_opacus(sigma, q, steps, delta):
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    curve = opacus_rdp.compute_rdp(
        q=q, noise_multiplier=sigma, steps=steps, orders=orders
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return opacus_rdp.get_privacy_spent(orders=orders, rdp=curve, delta=delta)[0]


def their_prv(sigma, q, steps, delta):
    accountant = PRVAccountant(
        prvs=PoissonSubsampledGaussianMechanism(
            sampling_probability=q, noise_multiplier=sigma
        ),
        max_self_compositions=steps,
        eps_error=0.01,
        delta_error=delta / 1000,
    )
    return accountant.compute_epsilon(delta=delta, num_self_compositions=steps)


def attempt(fn, *args):
    try:
        return fn(*args)
    except Exception as error:
        return f"{type(error).__name__}"


def show(value):
    return value if isinstance(value, str) else f"{float(value):.4f}"


def accuracy():
    print("\nε by Rényi curves, and by privacy-loss distributions")
    print("(prv-accountant: its lower and upper bound)\n")
    columns = "dpjax rdp | dp-accounting rdp | opacus rdp | dpjax pld | "
    columns += "dp-accounting pld | prv-accountant"
    print(f"| σ | q | steps | δ | {columns} |\n" + "| --- " * 10 + "|")
    for setting in SETTINGS:
        prv = attempt(their_prv, *setting)
        bounds = prv if isinstance(prv, str) else f"{prv[0]:.4f} to {prv[2]:.4f}"
        cells = [
            show(attempt(fn, *setting))
            for fn in (our_rdp, google_rdp, their_opacus, our_pld, google_pld)
        ]
        print(
            "| " + " | ".join([*map(str, setting), *cells, bounds]) + " |", flush=True
        )


def grid_speed(points):
    rng = np.random.default_rng(0)
    sigma, q = 10 ** rng.uniform(-0.3, 1, points), 10 ** rng.uniform(-4, -0.5, points)
    steps = np.round(10 ** rng.uniform(1, 5, points))
    grid = jnp.asarray(sigma), jnp.asarray(q), jnp.asarray(steps)
    compiled = jax.jit(lambda s, q, t: our_rdp(s, q, t, 1e-5))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*grid))
    first = time.perf_counter() - start
    ours = seconds(lambda: compiled(*grid), 11)
    print(f"\nRényi ε of {points:,} points (σ, q, steps)\n")
    print("| accountant | orders | seconds | times dpjax |\n" + "| --- " * 4 + "|")
    print(f"| dpjax, first call, compiling | {rdp.ORDERS.size} | {first:.2f} | |")
    print(f"| dpjax | {rdp.ORDERS.size} | {ours:.3f} | 1 |", flush=True)

    def same_orders(sigma, q, steps, delta):
        accountant = rdp_privacy_accountant.RdpAccountant(orders=rdp.ORDERS)
        return accountant.compose(event(sigma, q, steps)).get_epsilon(delta)

    default = len(rdp_privacy_accountant.RdpAccountant()._orders)
    for name, orders, fn in [
        ("dp-accounting, its orders", default, google_rdp),
        ("dp-accounting, our orders", rdp.ORDERS.size, same_orders),
        ("opacus, its orders", 151, their_opacus),
    ]:
        start, done = time.perf_counter(), 0
        for s, r, t in zip(sigma, q, steps, strict=True):
            fn(float(s), float(r), int(t), 1e-5)
            done += 1
            if time.perf_counter() - start > 60:
                break
        total = (time.perf_counter() - start) * points / done
        part = "" if done == points else f" (from {done})"
        print(
            f"| {name} | {orders} | {total:.1f}{part} | {total / ours:.0f} |",
            flush=True,
        )


def one_point():
    print("\nOne ε by privacy-loss distributions, and its derivative (median ms)\n")
    print(
        "| σ | q | steps | δ | dpjax | dpjax, dε/dσ | dp-accounting | prv-accountant |"
    )
    print("| --- " * 8 + "|")
    value = jax.jit(our_pld)
    slope = jax.jit(jax.grad(our_pld))
    for setting in SETTINGS:
        numbers = tuple(float(x) for x in setting)
        cells = [
            f"{1e3 * seconds(lambda f=f, n=numbers: f(*n), 21):.1f}"
            for f in (value, slope)
        ]
        for fn in (google_pld, their_prv):
            failed = attempt(fn, *setting)
            cells.append(
                failed
                if isinstance(failed, str)
                else f"{1e3 * seconds(lambda f=fn, s=setting: f(*s), 3):.0f}"
            )
        print("| " + " | ".join([*map(str, setting), *cells]) + " |", flush=True)


def calibration():
    print("\nThe noise multiplier for ε = 2 by privacy-loss distributions (median s)\n")
    print(
        "| q | steps | δ | dpjax | σ | dp-accounting | σ | times |\n"
        + "| --- " * 8
        + "|"
    )
    compiled = jax.jit(our_pld)
    for _, q, steps, delta in SETTINGS[1:5]:

        def ours(q=q, steps=steps, delta=delta):
            return calibrate.solve(
                lambda s: compiled(s, float(q), float(steps), float(delta)), 2.0
            )

        def theirs(q=q, steps=steps, delta=delta):
            return dp_accounting.calibrate_dp_mechanism(
                pld_privacy_accountant.PLDAccountant,
                lambda s: event(s, q, steps),
                2.0,
                delta,
                dp_accounting.LowerEndpointAndGuess(0.3, 2.0),
                tol=1e-6,
            )

        our_time, their_time = seconds(ours, 5), seconds(theirs, 1)
        print(
            f"| {q} | {steps} | {delta} | {our_time:.2f} | {float(ours()):.5f} | "
            f"{their_time:.1f} | {theirs():.5f} | {their_time / our_time:.0f} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=1000)
    arguments = parser.parse_args()
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("jax", "dp-accounting", "opacus", "prv-accountant", "numpy")
    )
    print(f"{versions}; Python {platform.python_version()}, {platform.machine()}")
    accuracy()
    grid_speed(arguments.points)
    one_point()
    calibration()


if __name__ == "__main__":
    main()
