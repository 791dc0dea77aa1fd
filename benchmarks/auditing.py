"""Measure the lower bounds on ε from audits, and how audits detect deliberate errors.

    python benchmarks/auditing.py [--part one_run|mechanisms|samplers|solvers|...]

The script measures the bounds for every mechanism, the size of an audit that detects
each deliberate error, and times. The attacks and the deliberate errors are in
`_audits.py` (noise), `_audits_samplers.py` (sampling of examples), `_audits_solvers.py`
and `_audits_events.py` (mechanisms known by their events, and statistics). The tests
use these modules, too.
"""

import statistics
import time

import _audits
import _audits_events
import _audits_samplers
import _audits_solvers
import jax
import jax.numpy as jnp
import numpy as np
from _results import Table, parser, print_tables, write

import dpjax
from dpjax import auditing, sampling, strategies
from dpjax.accounting import gdp

DELTA = 1e-5
CANARIES, EMPTY = 10_000, 90_000
KEYS = 101
EXAMPLES, FEATURES, STEPS = 1000, 10, 100
SIZES = [16, 32, 64, 128, 256, 512, 1024]
# Where scores are not Gaussian, δ is large enough for this number of scores to resolve.
LARGE_DELTA, SAMPLED_CANARIES, PLAN_RUNS = 1e-2, 300_000, 300
RUNS, GAUSSIAN_RUNS, BROKEN_RUNS = 200_000, 10_000, 3 * 2048
EVENT_RUNS = 100_000
MANY = [2**k for k in range(6, 14)]


def logistic(w, example):
    """Return the logistic loss of a linear score."""
    x, y = example
    return jax.nn.softplus(-y * (x @ w))


def data(size, features):
    """Return normal features, with labels given by the sign of the first feature."""
    x = np.random.default_rng(0).standard_normal((size, features)).astype(np.float32)
    return x, np.sign(x[:, 0])


def pipeline(sigma, num_steps=4, size=200, clip_norm=0.7):
    """Return a run of private gradient descent with canaries.

    The run maps a key and a mask of the participating canaries to scores.
    """
    gradient = dpjax.clipped_grad(auditing.plant(logistic, 10.0), clip_norm)
    x, y = data(size, 5)
    x = np.concatenate([x, np.zeros((CANARIES, 5), np.float32)])
    y = np.concatenate([y, np.ones(CANARIES, np.float32)])
    canary = np.concatenate([np.full(size, -1), np.arange(CANARIES)])

    @jax.jit
    def run(key, included):
        optimizer = dpjax.dp_sgd(
            0.1,
            clip_norm=clip_norm,
            noise_multiplier=sigma,
            expected_batch_size=size,
            key=key,
        )
        mask = jnp.concatenate([jnp.ones(size, bool), included])

        def step(carry, _):
            params, state = carry
            total, _ = gradient(params, auditing.Marked((x, y), canary), mask=mask)
            updates, state = optimizer.update(total, state, params)
            return (jax.tree.map(jnp.add, params, updates), state), updates.slots

        params = auditing.Planted(jnp.zeros(5), jnp.zeros(CANARIES + EMPTY))
        start = params, optimizer.init(params)
        observed = jax.lax.scan(step, start, None, length=num_steps)[1]
        return auditing.matched_filter(observed, -jnp.ones((num_steps, 1)))

    return run


def one_run():
    """Measure lower bounds on ε by one run, relative to the true ε.

    The table shows medians, and how often the ratio is at least 0.9.
    """
    rows = []
    for epsilon in (1.0, 4.0, 8.0):
        mu = float(gdp.mu(epsilon, DELTA))
        run = pipeline(sigma=2.0 / mu)  # four steps
        result = {name: [] for name in ("95", "99", "any", "of coins", "epsilon")}
        seconds = []
        for key in jax.random.split(jax.random.key(0), KEYS):
            start = time.perf_counter()
            scores = run(key, jnp.ones(CANARIES, bool))
            pair = scores[:CANARIES], scores[CANARIES:]
            result["95"].append(auditing.gaussian_mu_lower(*pair, confidence=0.95))
            jax.block_until_ready(result["95"][-1])
            seconds.append(time.perf_counter() - start)
            result["99"].append(auditing.gaussian_mu_lower(*pair, confidence=0.99))
            result["any"].append(auditing.mu_lower(*pair, confidence=0.95))
            coins = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, (CANARIES,))
            scores = run(key, coins)[:CANARIES]
            at = {"guess_in": 250, "guess_out": 250, "confidence": 0.95}
            result["of coins"].append(auditing.one_run_mu_lower(scores, coins, **at))
            result["epsilon"].append(
                auditing.one_run_epsilon_lower(scores, coins, DELTA, **at)
            )
        ratios = {
            name: [_audits.epsilon(m, DELTA) / epsilon for m in mus]
            for name, mus in result.items()
            if name != "epsilon"
        }
        ratios["epsilon"] = [float(e) / epsilon for e in result["epsilon"]]
        met = np.mean([x >= 0.9 for x in ratios["95"]])
        rows.append(
            [
                epsilon,
                statistics.median(ratios["95"]),
                100 * met,
                *(statistics.median(ratios[n]) for n in list(ratios)[1:]),
                seconds[0],
                statistics.median(seconds),
            ]
        )
        print(*rows[-1], flush=True)
    columns = {
        "ε": "{:g}",
        "Gaussian, 95 %": "{:.2f}",
        "runs with 0.9 or more, %": "{:.0f}",
    }
    columns |= {"Gaussian, 99 %": "{:.2f}", "any scores, 95 %": "{:.2f}"}
    columns |= {"coins, f-DP, 95 %": "{:.2f}", "coins, ε, 95 %": "{:.2f}"}
    columns |= {"first run, s": "{:.0f}", "further runs, s": "{:.1f}"}
    return Table("one_run", columns, rows)


def mechanisms():
    """Measure the lower bound on ε for each mechanism by one run with canaries."""
    rows = []
    for name, mechanism in _audits.MECHANISMS.items():
        scores = _audits.white_box(
            mechanism, 1.5, num_in=CANARIES, num_out=EMPTY, key=jax.random.key(1)
        )
        bound = auditing.gaussian_mu_lower if mechanism.white else auditing.mu_lower
        result = _audits.epsilon(bound(*scores, confidence=0.99), DELTA)
        reported = _audits.epsilon(1.5, DELTA)
        what = "all updates, " + ("matched filter" if mechanism.white else "their sum")
        rows.append(
            [name, what, f"{CANARIES:,} canaries", reported, result, result / reported]
        )
        print(*rows[-1], flush=True)
    columns = {
        "mechanism": "{}",
        "input of the attack": "{}",
        "size of the audit": "{}",
    }
    columns |= {
        "ε reported": "{:.2f}",
        "lower bound on ε": "{:.2f}",
        "bound / reported ε": "{:.2f}",
    }
    return Table("mechanisms", columns, rows)


def proven(scores, delta):
    """Return a lower bound on ε with confidence 99 %.

    One half of the scores chooses the threshold for the other half.
    """
    half = len(scores.inside) // 2
    first, second = (
        jax.tree.map(lambda x, c=c: x[c], scores)
        for c in (slice(None, half), slice(half, None))
    )
    threshold = auditing.best_threshold(*first, delta, confidence=0.99)
    result = auditing.epsilon_at(*second, delta, threshold=threshold, confidence=0.99)
    return float(result)


def samplers():
    """Measure bounds on ε from all outputs, for canaries drawn by samplers."""
    rows = []
    for name, sampled in _audits_samplers.SAMPLED.items():
        scores = _audits_samplers.of_sampled(
            sampled, num=SAMPLED_CANARIES, key=jax.random.key(4)
        )
        reported = float(sampled.reported(LARGE_DELTA))
        exact = "yes" if sampled.tight else "no, an upper bound"
        of = f"{SAMPLED_CANARIES:,} canaries"
        rows.append([name, exact, of, reported, proven(scores, LARGE_DELTA)])
        print(*rows[-1], flush=True)
    scores = _audits_samplers.of_plan(num_runs=PLAN_RUNS, key=jax.random.key(5))
    reported = float(_audits_samplers.whole_plan().guarantee.epsilon(LARGE_DELTA))
    of = f"{len(scores.inside):,} canaries in {PLAN_RUNS} runs"
    rows.append(["dpjax.plan", "yes", of, reported, proven(scores, LARGE_DELTA)])
    rows = [[*row, row[-1] / row[-2]] for row in rows]
    columns = {"sampler": "{}", "is ε exact": "{}", "size of the audit": "{}"}
    columns |= {
        "ε reported": "{:.2f}",
        "lower bound on ε": "{:.2f}",
        "bound / reported ε": "{:.2f}",
    }
    return Table("samplers", columns, rows)


def solvers():
    """Measure bounds on ε from the last iterate, on a hard case for each solver."""
    rows = []
    for name, solver in _audits_solvers.SOLVERS.items():
        runs = GAUSSIAN_RUNS if solver.gaussian else RUNS
        scores = _audits_solvers.of_solver(name, num_runs=runs, key=jax.random.key(3))
        reported, delta = _audits_solvers.reported(name), solver.delta
        if solver.gaussian:
            mu = auditing.gaussian_mu_lower(*scores, confidence=0.99)
            result = _audits.epsilon(mu, delta)
        else:
            result = proven(scores, delta)
        rows.append(
            [name, f"{2 * runs:,} runs", delta, reported, result, result / reported]
        )
        print(*rows[-1], flush=True)
    columns = {
        "solver": "{}",
        "size of the audit": "{}",
        "δ": "{:g}",
        "ε reported": "{:.2f}",
    }
    columns |= {"lower bound on ε": "{:.2f}", "bound / reported ε": "{:.2f}"}
    return Table("solvers", columns, rows)


def events():
    """Measure bounds on ε for the mechanism of each event.

    Each mechanism is audited with its noise and with half of its noise.
    """
    rows = []
    for name, mechanism in _audits_events.all_mechanisms().items():
        result, of_twin = (
            _audits_events.proven(
                name,
                _audits_events.of_event(
                    name, num=EVENT_RUNS, key=jax.random.key(9), broken=broken
                ),
                confidence=0.99,
            )
            for broken in (False, True)
        )
        reported = _audits_events.reported(name)
        rows.append(
            [name, mechanism.delta, reported, result, result / reported, of_twin]
        )
        print(*rows[-1], flush=True)
    columns = {"mechanism": "{}", "δ": "{:g}", "ε reported": "{:.2f}"}
    columns |= {"lower bound on ε": "{:.2f}", "bound / reported ε": "{:.2f}"}
    return Table(
        "events", columns | {"lower bound on ε with half of the noise": "{:.2f}"}, rows
    )


def needed(scores, said, delta):
    """Return, as text, the number of scores from which on a bound exceeds `said`.

    `said` is the reported ε, and the bound has confidence 99 %. The number counts the
    scores on both sides, and is the median of three audits.
    """
    result, size = [], len(scores.inside) // 3
    sizes = [n for n in MANY if n <= size]
    for k in range(3):
        some = [x[k * size : (k + 1) * size] for x in scores]
        bounds = [
            auditing.epsilon_lower(*(x[:n] for x in some), delta, confidence=0.99)
            for n in sizes
        ]
        result.append(
            next(
                (n for i, n in enumerate(sizes) if all(b > said for b in bounds[i:])),
                np.inf,
            )
        )
    many = 2 * statistics.median(result)
    return f"{many:,.0f}" if many < np.inf else f"more than {2 * max(sizes):,}"


def broken_at_random():
    """Measure the sizes of audits that detect errors in samplers and solvers."""
    rows = []
    for name, (claimed, _, _) in _audits_samplers.BROKEN.items():
        scores = _audits_samplers.of_broken(
            name, num=3 * max(MANY), key=jax.random.key(7)
        )
        reported = float(_audits_samplers.SAMPLED[claimed].reported(LARGE_DELTA))
        many = f"{needed(scores, reported, LARGE_DELTA)} canaries"
        rows.append([name, "`epsilon_lower`", many])
        print(*rows[-1], flush=True)
    scores = _audits_samplers.of_plan(
        num_runs=250, key=jax.random.key(6), in_order=True
    )
    reported = float(_audits_samplers.whole_plan().guarantee.epsilon(LARGE_DELTA))
    name = "a plan claims Poisson samples, and the loop reads the data in order"
    many = f"{needed(scores, reported, LARGE_DELTA)} canaries"
    rows.append([name, "`epsilon_lower`", many])
    print(*rows[-1], flush=True)
    for name, solver in _audits_solvers.SOLVERS.items():
        scores = _audits_solvers.of_solver(
            name, num_runs=BROKEN_RUNS, key=jax.random.key(8), broken=True
        )
        many = f"{needed(scores, _audits_solvers.reported(name), solver.delta)} runs"
        rows.append([f"{name}: {solver.broken}", "`epsilon_lower`", many])
        print(*rows[-1], flush=True)
    columns = dict.fromkeys(("mistake", "detected by", "size of the audit"), "{}")
    return Table("broken_at_random", columns, rows)


def broken():
    """Measure the numbers of canaries or calls that detect deliberate errors."""
    rows = []
    for name, twin in _audits.TWINS.items():
        keys = jax.random.split(jax.random.key(2), 5)
        needed = [_audits.canaries_needed(twin, 1.0, SIZES, key) for key in keys]
        many = f"{2 * statistics.median(needed):.0f} canaries in one run"
        rows.append([name, "`gaussian_mu_lower`", many])
        print(*rows[-1], flush=True)
    for name in _audits.CHECKED:
        report, calls = _audits.checked(name)
        if not report.passed:
            rows.append([name, f"`check`: {report.worst.change}", f"{calls} calls"])
            print(*rows[-1], flush=True)
    return Table(
        "broken",
        dict.fromkeys(("mistake", "detected by", "size of the audit"), "{}"),
        rows,
    )


def trainings():
    """Measure the time of a thousand trainings, half of them on a neighbour."""
    x, y = data(EXAMPLES, FEATURES)
    x[0] = 3 * np.eye(FEATURES)[1]
    gradient = dpjax.clipped_grad(logistic, 1.0, engine="vmap")
    noise = {"noise_multiplier": 2.0, "clip_norm": 1.0, "expected_batch_size": 100}
    chains = {
        "dp_sgd": lambda key: dpjax.dp_sgd(0.5, **noise, key=key),
        "tree_momentum": lambda key: dpjax.tree_momentum(
            0.9, 2.0, num_steps=STEPS, key=key
        ),
        "correlated_noise": lambda key: dpjax.correlated_noise(
            strategies.geometric(0.8), 2.0, num_steps=STEPS, key=key
        ),
    }

    def run(make, there, key):
        tx = make(key)

        def step(carry, t):
            w, state = carry
            batch = sampling.cyclic_step(EXAMPLES, 100, step=t % 10)
            examples = x[batch.indices], y[batch.indices]
            total, _ = gradient(w, examples, mask=there[batch.indices])
            updates, state = tx.update(total, state, w)
            return (w + 0.005 * updates, state), updates

        w = jnp.zeros(FEATURES)
        return jax.lax.scan(step, (w, tx.init(w)), jnp.arange(STEPS))

    x, y = jnp.asarray(x), jnp.asarray(y)
    everyone, others = jnp.ones(EXAMPLES, bool), jnp.arange(EXAMPLES) > 0
    rows = []
    for name, make in chains.items():
        for sees in ("the last iterate", "all updates"):
            start = time.perf_counter()

            def released(there, key, make=make, sees=sees):
                (last, _), updates = run(make, there, key)
                return last if sees == "the last iterate" else updates

            outputs = auditing.train_many(
                released, everyone, others, num_runs=500, key=jax.random.key(0)
            )
            jax.block_until_ready(outputs)
            rows.append([name, sees, time.perf_counter() - start])
            print(*rows[-1], flush=True)
    columns = {"mechanism": "{}", "output of a run": "{}", "seconds": "{:.1f}"}
    return Table("trainings", columns, rows)


PARTS = (
    one_run,
    mechanisms,
    samplers,
    solvers,
    events,
    broken,
    broken_at_random,
    trainings,
)


def main():
    """Run one measurement, or all measurements."""
    options = parser(__doc__)
    parts = {x.__name__: x for x in PARTS}
    options.add_argument("--part", choices=parts)
    arguments = options.parse_args()
    for part in [arguments.part] if arguments.part else parts:
        table = parts[part]()
        print_tables(table)
        times = "seconds with compilation" if part == "trainings" else None
        write(f"auditing.{part}", arguments, [table], times=times)


if __name__ == "__main__":
    main()
