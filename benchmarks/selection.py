"""Measure how tight the ε of `dpjax.tune` is, and what a search on digits finds.

    python benchmarks/selection.py [--part attack|digits]

The attack on a search is in `_searches.py`. The tests use the same attack.
"""

import functools
import math

import _search_bounds
import _searches
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _results import OURS, Table, parser, print_tables, write
from dp_accounting import dp_event, rdp
from sklearn.datasets import load_digits

import dpjax
from dpjax import Adjacency, auditing, statistics
from dpjax.accounting import events, gdp, selection

LAW = selection.Geometric(10.0)
SEARCHES = 500_000
# Pairs (μ of one run, δ).
ATTACKED = (0.5, 1e-2), (1.0, 1e-2), (1.0, 5e-2)
DELTA, SEEDS, STEPS = 1e-5, 10, 50
TRAIN, HELD_OUT = 1200, 300
RATES = np.geomspace(0.1, 30, 8).astype(np.float32)


def attack():
    """Prove lower bounds on ε by counting, for searches with the worst known score."""
    rows = []
    for mu, delta in ATTACKED:
        run = events.Gaussian(mu)
        reported = float(selection.epsilon(run, delta, repetitions=LAW))
        known = _search_bounds.epsilon_lower(run, delta, LAW)
        best = _searches.best_attack(mu, 0.95 * known, LAW)
        scores = _searches.of_searches(
            best, LAW, mu, num=SEARCHES, key=jax.random.key(3)
        )
        result = auditing.epsilon_at(*scores, delta, threshold=0.5, confidence=0.99)
        alone = float(gdp.epsilon(mu, delta))
        rows.append(
            [mu, delta, alone, reported, known, float(result), float(result) / reported]
        )
        print(*rows[-1], flush=True)
    columns = {"μ of one run": "{:g}", "δ": "{:g}", "ε of one run": "{:.2f}"}
    columns |= {"ε reported": "{:.2f}", "ε of the attack, exact": "{:.2f}"}
    columns |= {"ε at least, by counting": "{:.2f}", "ratio": "{:.2f}"}
    return Table("attack", columns, rows)


def published(mu):
    """Return dp-accounting's ε of a search, by Papernot and Steinke (2022)."""
    run = dp_event.GaussianDpEvent(1 / mu)
    event = dp_event.RepeatAndSelectDpEvent(run, LAW.mean, shape=1)
    return rdp.RdpAccountant().compose(event).get_epsilon(DELTA)


@functools.cache
def digits():
    """Return training, held-out and test examples: features in [0, 1], and classes."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = (x[order] / 16).astype(np.float32), y[order]
    ends = [TRAIN, TRAIN + HELD_OUT]
    return list(zip(np.split(x, ends), np.split(y, ends), strict=True))


def loss(w, example):
    """Return the cross-entropy of a linear model with an offset."""
    x, y = example
    logits = x @ w[:-1] + w[-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def searches():
    """Measure the best of K runs, chosen by noisy held-out accuracies, and its ε."""
    account = dpjax.budget(1.0, DELTA, adjacency=Adjacency.ZERO_OUT, slack=0.0)
    plan = account.plan(
        share=0.8,
        num_examples=TRAIN,
        batch_size=TRAIN,
        num_steps=STEPS,
        clip_norm=1.0,
        sampling="fixed",
    )
    left = account.draw(plan).left.mu
    train, held_out, test = digits()
    gradient = dpjax.clipped_grad(loss, 1.0)

    @jax.jit
    def fit(rate, key):
        tx = dpjax.dp_sgd(
            rate,
            clip_norm=1.0,
            noise_multiplier=plan.noise_multiplier,
            expected_batch_size=TRAIN,
            momentum=0.9,
            key=key,
        )

        def step(carry, _):
            w, state = carry
            updates, state = tx.update(gradient(w, train)[0], state, w)
            return (w + updates, state), None

        w = jnp.zeros((65, 10))
        return jax.lax.scan(step, (w, tx.init(w)), None, length=STEPS)[0][0]

    def accuracy(w, part):
        x, y = part
        return jnp.argmax(x @ w[:-1] + w[-1], axis=1), y

    @jax.jit
    def score(w, key):
        return statistics.accuracy(
            *accuracy(w, held_out),
            noise_multiplier=1.001 / left,
            key=key,
            adjacency=Adjacency.ZERO_OUT,
        ).value

    def tested(w):
        predicted, y = accuracy(w, test)
        return float(np.mean(predicted == y))

    mus = float(plan.guarantee.mu), left
    event = events.Composed(tuple(events.Repeated(events.Gaussian(x)) for x in mus))
    keys = jax.random.split(jax.random.key(0), SEEDS)
    options = {"repetitions": LAW, "event": event, "delta": DELTA}
    result = [dpjax.tune(RATES, fit, score, **options, key=key) for key in keys]
    total, mu = result[0].epsilon, math.hypot(*mus)
    best = [tested(x.output) for x in result]
    print(*zip([float(x.setting) for x in result], best, strict=True), flush=True)
    rows = [[f"the best of K runs, ε = {total:.3f}", *summary(best)]]
    for rate in RATES:
        runs = [tested(fit(rate, key)) for key in keys]
        rows.append([f"one run with the rate {rate:.2g}", *summary(runs)])
        print(*rows[-1], flush=True)
    columns = {"": "{}", "test accuracy": "{:.3f} ± {:.3f}"}
    columns |= {"median": "{:.3f}", "lowest": "{:.3f}"}
    costs = [[float(gdp.epsilon(mu, DELTA)), total, published(mu)]]
    heads = ("one run", "the search", "Papernot and Steinke (2022)")
    return (
        Table("digits", columns, rows),
        Table("costs", dict.fromkeys(heads, "{:.3f}"), costs),
    )


def summary(numbers):
    """Return a cell of mean and standard deviation, the median, and the minimum."""
    return [
        [float(np.mean(numbers)), float(np.std(numbers))],
        float(np.median(numbers)),
        min(numbers),
    ]


PARTS = {"attack": lambda: (attack(),), "digits": searches}


def main():
    """Run one measurement or both, and print and write the tables."""
    options = parser(__doc__)
    options.add_argument("--part", choices=PARTS)
    arguments = options.parse_args()
    for part in [arguments.part] if arguments.part else PARTS:
        tables = PARTS[part]()
        print_tables(*tables)
        write(
            f"selection.{part}",
            arguments,
            tables,
            packages=(*OURS, "dp_accounting", "scikit_learn"),
        )


if __name__ == "__main__":
    main()
