"""Compare dpjax's accountants with dp-accounting, Opacus and prv-accountant.

    pip install -e '.[bench]'
    python benchmarks/accountants.py [--points 1000] [--without-peers]

The script computes ε of the Poisson-subsampled Gaussian by every accountant, and
measures times, in one run. The other libraries compute one point at a time, because
their interface takes one point. Each of the other libraries runs over the grid once. A
library that would take more than a minute is timed on the grid's first points. The
script takes a few minutes on two cores.
"""

import contextlib
import functools
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from _results import OURS, Table, parser, print_tables, require, write
from _timing import compiled, said, take_turns

from dpjax import Adjacency
from dpjax.accounting import calibrate, pld, rdp

with contextlib.suppress(ImportError):
    import dp_accounting
    from dp_accounting.pld import pld_privacy_accountant
    from dp_accounting.rdp import rdp_privacy_accountant
with contextlib.suppress(ImportError):
    from opacus.accountants.analysis import rdp as opacus_rdp
with contextlib.suppress(ImportError):
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

SETTINGS = [  # noise multiplier, sampling rate, steps, δ
    (1.0, 0.01, 1_000, 1e-5),
    (0.6, 0.01, 1_000, 1e-5),
    (2.0, 0.05, 2_000, 1e-6),
    (0.8, 1e-3, 100_000, 1e-7),
    (5.0, 0.5, 200, 1e-5),
    (1.0, 1e-4, 10_000, 1e-8),
    (1.1, 0.004, 10_000, 1e-12),
]
SETTING = {"σ": "{}", "q": "{}", "steps": "{}", "δ": "{}"}
PEERS = ["dp_accounting", "opacus", "prv_accountant"]
ROUNDS, PATIENCE = 5, 60.0


def event(sigma, q, steps):
    step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    return dp_accounting.SelfComposedDpEvent(step, steps)


def our_rdp(sigma, q, steps, delta):
    curve = rdp.compose(rdp.poisson_gaussian(sigma, q, rdp.ORDERS), count=steps)
    return rdp.epsilon(curve, rdp.ORDERS, delta)


def our_pld(sigma, q, steps, delta):
    step = pld.poisson_gaussian(sigma, q, adjacency=Adjacency.ADD_REMOVE)
    return pld.epsilon(pld.compose(step, steps), delta)


def google_rdp(sigma, q, steps, delta, orders=None):
    accountant = rdp_privacy_accountant.RdpAccountant(orders=orders)
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
    """Return prv-accountant's lower and upper bound."""
    accountant = PRVAccountant(
        prvs=PoissonSubsampledGaussianMechanism(
            sampling_probability=q, noise_multiplier=sigma
        ),
        max_self_compositions=steps,
        eps_error=0.01,
        delta_error=delta / 1000,
    )
    low, _, high = accountant.compute_epsilon(delta=delta, num_self_compositions=steps)
    return [low, high]


EPSILONS = {  # by accountant: function, required module, template of ε
    "dpjax rdp": (our_rdp, None, "{:.4f}"),
    "dp-accounting rdp": (google_rdp, "dp_accounting", "{:.4f}"),
    "opacus rdp": (their_opacus, "opacus", "{:.4f}"),
    "dpjax pld": (our_pld, None, "{:.4f}"),
    "dp-accounting pld": (google_pld, "dp_accounting", "{:.4f}"),
    "prv-accountant": (their_prv, "prv_accountant", "{:.4f} to {:.4f}"),
}


def attempt(name, setting, found):
    """Return an accountant's ε.

    Returns None if the accountant is not installed, and the name of the error if the
    accountant fails.
    """
    fn, module, _ = EPSILONS[name]
    if module not in found:
        return None
    try:
        return fn(*setting)
    except Exception as error:
        return type(error).__name__


def accuracy(found):
    """Compare ε by Rényi curves and by privacy-loss distributions."""
    columns = SETTING | {name: template for name, (_, _, template) in EPSILONS.items()}
    rows = [
        [*setting, *(attempt(name, setting, found) for name in EPSILONS)]
        for setting in SETTINGS
    ]
    return Table("epsilon", columns, rows)


def grid_speed(points, found):
    """Measure Rényi ε of many points (σ, q, steps).

    The points are noise multipliers σ, sampling rates q, and numbers of steps. Seconds
    are those of all points together.
    """
    rng = np.random.default_rng(0)
    sigma, q = 10 ** rng.uniform(-0.3, 1, points), 10 ** rng.uniform(-4, -0.5, points)
    steps = np.round(10 ** rng.uniform(1, 5, points))
    grid = jnp.asarray(sigma), jnp.asarray(q), jnp.asarray(steps)
    program, build = compiled(lambda s, q, t: our_rdp(s, q, t, 1e-5), *grid)
    ours = take_turns({"dpjax": lambda: program(*grid)}, rounds=11)["dpjax"].median
    rows = [
        ["dpjax, compiling", rdp.ORDERS.size, points, build, None],
        ["dpjax", rdp.ORDERS.size, points, ours, 1],
    ]
    same_orders = functools.partial(google_rdp, orders=rdp.ORDERS)
    for name, module, orders, fn in [
        ("dp-accounting, its orders", "dp_accounting", 156, google_rdp),
        ("dp-accounting, our orders", "dp_accounting", rdp.ORDERS.size, same_orders),
        ("opacus, its orders", "opacus", 151, their_opacus),
    ]:
        if module not in found:
            rows.append([name, orders, None, None, None])
            continue
        start, done = time.perf_counter(), 0
        for s, r, t in zip(sigma, q, steps, strict=True):
            fn(float(s), float(r), int(t), 1e-5)
            done += 1
            if time.perf_counter() - start > PATIENCE:
                break
        total = (time.perf_counter() - start) * points / done
        rows.append([name, orders, done, total, total / ours])
    columns = {"accountant": "{}", "orders": "{}", "points timed": "{:,}"}
    columns |= {"seconds": "{:.3g}", "ratio to dpjax": "{:.0f}"}
    return Table("grid", columns, rows)


def one_point(found, seconds):
    """Measure one ε by privacy-loss distributions, and its derivative."""
    value, slope = jax.jit(our_pld), jax.jit(jax.grad(our_pld))
    names = ["dpjax", "dpjax, dε/dσ", "dp-accounting", "prv-accountant"]
    rows = []
    for setting in SETTINGS:
        numbers = tuple(float(x) for x in setting)
        functions = {
            "dpjax": lambda n=numbers: value(*n),
            "dpjax, dε/dσ": lambda n=numbers: slope(*n),
        }
        for name, peer in [
            ("dp-accounting", "dp-accounting pld"),
            ("prv-accountant", "prv-accountant"),
        ]:
            if not isinstance(attempt(peer, setting, found), str | None):
                functions[name] = functools.partial(EPSILONS[peer][0], *setting)
        times = take_turns(functions, rounds=ROUNDS, seconds=seconds)
        medians = [1e3 * times[n].median if n in times else None for n in names]
        rows.append([*setting, *medians])
    digits = ["{:.1f}", "{:.1f}", "{:.0f}", "{:.0f}"]
    return Table("one point", SETTING | dict(zip(names, digits, strict=True)), rows)


def calibration(found, seconds):
    """Measure the noise multiplier for ε = 2 by privacy-loss distributions."""
    columns = {"q": "{}", "steps": "{}", "δ": "{}", "dpjax, s": "{:.2f}"}
    columns |= {"dpjax, σ": "{:.5f}", "dp-accounting, s": "{:.1f}"}
    columns |= {"dp-accounting, σ": "{:.5f}", "ratio of times": "{:.0f}"}
    program = jax.jit(our_pld)
    rows = []
    for _, q, steps, delta in SETTINGS[1:5]:

        def ours(q=q, steps=steps, delta=delta):
            return calibrate.solve(
                lambda s: program(s, float(q), float(steps), float(delta)), 2.0
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

        functions = {"ours": ours}
        if "dp_accounting" in found:
            functions["theirs"] = theirs
        times = take_turns(functions, rounds=ROUNDS, seconds=seconds)
        row = [q, steps, delta, times["ours"].median, ours(), None, None, None]
        if "theirs" in times:
            took = times["theirs"].median
            row[5:] = [took, theirs(), took / times["ours"].median]
        rows.append(row)
    return Table("calibration", columns, rows)


def main():
    """Measure everything, and print each table when it is complete."""
    options = parser(__doc__)
    options.add_argument("--points", type=int, default=1000)
    options.add_argument("--seconds", type=float, default=3.0, help="for each function")
    options.add_argument("--without-peers", action="store_true")
    arguments = options.parse_args()
    peers = require(PEERS, arguments.without_peers)
    result = [None, *peers]  # dpjax's accountants need no module
    tables = []
    for measure in (
        functools.partial(accuracy, result),
        functools.partial(grid_speed, arguments.points, result),
        functools.partial(one_point, result, arguments.seconds),
        functools.partial(calibration, result, arguments.seconds),
    ):
        tables.append(measure())
        print_tables(tables[-1])
    write(
        "accountants",
        arguments,
        tables,
        packages=[*OURS, "numpy", *peers],
        times=said(ROUNDS, arguments.seconds),
    )


if __name__ == "__main__":
    main()
