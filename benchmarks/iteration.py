"""Published tables of amplification by iteration, reproduced, and what the bounds cost.

    python benchmarks/iteration.py [--plot docs/iteration.png]

Tables are those of Bok, Su and Altschuler (2024), as "paper / ours / difference"; the
bounds of Kong and Ribero (2024) stand beside composition and beside the minorant. Times
are medians over repetitions, each waited for.
"""

import argparse
import math
import statistics
import time

import jax
import numpy as np

from dpjax import Adjacency
from dpjax.accounting import gdp, iteration
from dpjax.accounting.iteration import printed

INF = float("inf")
REPETITIONS = 11
SMOOTH = {
    "gradient_norm": 1.0,
    "clipped": False,
    "generalised_linear": False,
    "weak_convexity": 0.0,
    "strong_convexity": 0.0,
    "regularization": 0.0,
    "diameter": INF,
    "adjacency": Adjacency.REPLACE,
}


def row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def head(title, *cells):
    print(f"\n{title}\n")
    row(*cells)
    row(*["---"] * len(cells))


def beside(paper, ours, digits):
    """Paper, ours and difference; the number is marked where a digit differs."""
    off = abs(round(float(ours), digits) - paper) > 0.5 * 10**-digits
    mark = " (differs)" if off else ""
    return f"{paper:.{digits}f} / {ours:.{digits}f} / {ours - paper:+.4f}{mark}"


def contracting(lipschitz):
    """A strongly convex loss with that Lipschitz constant of a step."""
    return SMOOTH | {
        "step_size": 1.0,
        "smoothness": 1.0,
        "strong_convexity": 1.0 - lipschitz,
    }


def logistic(regularization):
    """Clipped, regularised logistic regression on images of norm at most 8."""
    return SMOOTH | {
        "step_size": 0.05,
        "gradient_norm": 5.0,
        "clipped": True,
        "generalised_linear": True,
        "smoothness": 16.0,
        "regularization": regularization,
    }


def logistic_mu(epochs, regularization):
    return iteration.noisy_cyclic_gd_bounds(
        3.0,
        num_epochs=epochs,
        batches_per_epoch=40,
        batch_size=1500,
        order="fixed",
        **logistic(regularization),
    )


def rdp_epsilon(mu, delta):
    """ε by way of the Renyi divergences a μ²/2, the best of many orders."""
    a = 1 + np.logspace(-3, 4, 4000)
    loss = np.log1p(-1 / a) - (np.log(delta) + np.log(a)) / (a - 1)
    return max(0.0, float(np.min(a * float(mu) ** 2 / 2 + loss)))


def tables_1_3_4():
    published_mu = {
        50: (4.71, 0.99, 0.99),
        100: (6.67, 1.24, 1.22),
        200: (9.43, 1.59, 1.51),
    }
    published_epsilon = {
        50: (30.51, 4.34, 4.32),
        100: (49.88, 5.60, 5.51),
        200: (83.83, 7.58, 7.09),
    }
    head(
        "Table 3: μ of regularised logistic regression",
        "E",
        "composition",
        "λ = .002",
        "λ = .004",
    )
    for epochs, papers in published_mu.items():
        bounds = [logistic_mu(epochs, x) for x in (0.002, 0.004)]
        ours = [bounds[0].composition, bounds[0].best, bounds[1].best]
        row(
            epochs, *(beside(p, float(o), 2) for p, o in zip(papers, ours, strict=True))
        )
    head(
        "Tables 1 and 4: ε at δ = 1e-5, and what conversion by RDP makes of our μ",
        *("E", "composition", "λ = .002", "λ = .004", "RDP, λ = .002"),
    )
    for epochs, papers in published_epsilon.items():
        bounds = [logistic_mu(epochs, x) for x in (0.002, 0.004)]
        mus = [bounds[0].composition, bounds[0].best, bounds[1].best]
        ours = [float(gdp.epsilon(mu, 1e-5)) for mu in mus]
        cells = [beside(p, o, 2) for p, o in zip(papers, ours, strict=True)]
        row(epochs, *cells, f"{rdp_epsilon(mus[1], 1e-5):.2f}")


def figure_1():
    head(
        "Figure 1: ε at δ = 1e-5, m = 1, M = 10, η = 0.05, L/(nσ) = 0.1",
        *("steps", "composition", "RDP of the exact μ", "exact"),
    )
    for steps in (10, 20, 40, 80, 160):
        bounds = iteration.noisy_gd_bounds(
            20.0,
            num_steps=steps,
            num_examples=100,
            **SMOOTH | {"step_size": 0.05, "smoothness": 10.0, "strong_convexity": 1.0},
        )
        by_rdp = rdp_epsilon(bounds.best, 1e-5)
        exact, composed = (
            float(gdp.epsilon(mu, 1e-5)) for mu in (bounds.best, bounds.composition)
        )
        row(steps, f"{composed:.3f}", f"{by_rdp:.3f}", f"{exact:.3f}")


def table_7():
    constants = (0.92, 0.96, 0.98, 0.99, 0.995)
    papers = {
        10: (0.316, 0.308, 0.314, 0.316, 0.316, 0.316),
        100: (1.000, 0.490, 0.688, 0.871, 0.961, 0.990),
        1000: (3.162, 0.490, 0.700, 0.995, 1.411, 1.984),
    }
    head(
        "Table 7: μ of noisy GD, L/(nσ) = 0.1",
        "steps",
        "composition",
        *(f"c = {c}" for c in constants),
    )
    for steps, paper in papers.items():
        bounds = [
            iteration.noisy_gd_bounds(
                20.0, num_steps=steps, num_examples=7, **contracting(c)
            )
            for c in constants
        ]
        ours = [bounds[0].composition, *(b.best for b in bounds)]
        row(steps, *(beside(p, float(o), 3) for p, o in zip(paper, ours, strict=True)))


def stops_growing(mu_of, limit):
    """The number of epochs from which on composition is above the limit."""
    return math.ceil((limit / mu_of) ** 2 * (1 - 1e-6))  # of float32 numbers


def table_8():
    papers = {
        0.25: ((80, 0.280), (160, 0.395), (320, 0.559)),
        0.5: ((40, 0.395), (80, 0.559), (160, 0.791)),
        1.0: ((20, 0.559), (40, 0.791), (80, 1.118)),
    }
    head(
        "Table 8: (t*, μ*) of noisy GD on a set of diameter 1, σ = 8",
        "L/n",
        "η",
        "t*",
        "Theorem 4.3",
        "minorant",
    )
    for ratio, paper in papers.items():
        for eta, (steps, mu) in zip((0.2, 0.1, 0.05), paper, strict=True):
            r = ratio / 8
            theirs = float(printed.diameter_mu(r, 1 / (eta * 8), batches_per_epoch=1))
            ours = iteration.noisy_gd_mu(
                2 / r,
                num_steps=1000,
                num_examples=2 / ratio,
                **SMOOTH | {"step_size": eta, "smoothness": 1.0, "diameter": 1.0},
            )
            stop = stops_growing(r, theirs)
            row(
                ratio,
                eta,
                f"{steps} / {stop} / {stop - steps:+d}",
                beside(mu, theirs, 3),
                f"{ours:.3f}",
            )


def table_9():
    papers = {
        5: (0.447, 0.229, 0.233, 0.235, 0.211, 0.215, 0.217, 0.202, 0.205, 0.208),
        50: (1.414, 0.270, 0.334, 0.410, 0.216, 0.237, 0.275, 0.203, 0.208, 0.219),
        500: (4.472, 0.270, 0.336, 0.439, 0.216, 0.237, 0.276, 0.203, 0.208, 0.219),
    }
    settings = [(period, c) for period in (10, 20, 40) for c in (0.98, 0.99, 0.995)]
    head(
        "Table 9: μ of noisy cyclic GD, L/(bσ) = 0.2",
        "l",
        "c",
        *(f"E = {e}" for e in papers),
    )
    bounds = {
        (period, c, epochs): iteration.noisy_cyclic_gd_bounds(
            10.0,
            num_epochs=epochs,
            batches_per_epoch=period,
            batch_size=3,
            order="fixed",
            **contracting(c),
        )
        for period, c in settings
        for epochs in papers
    }
    composed = [float(bounds[10, 0.98, epochs].composition) for epochs in papers]
    row(
        "any",
        "composition",
        *(beside(p[0], o, 3) for p, o in zip(papers.values(), composed, strict=True)),
    )
    for i, (period, c) in enumerate(settings):
        cells = [
            beside(p[i + 1], float(bounds[period, c, e].best), 3)
            for e, p in papers.items()
        ]
        row(period, c, *cells)


def tables_10_to_12():
    papers = {
        10: (
            (31, 0.534),
            (62, 0.750),
            (123, 1.057),
            (17, 0.764),
            (33, 1.067),
            (65, 1.500),
            (10, 1.106),
            (20, 1.528),
            (40, 2.134),
        ),
        20: (
            (16, 0.382),
            (31, 0.534),
            (62, 0.750),
            (9, 0.553),
            (17, 0.764),
            (33, 1.067),
            (5, 0.816),
            (10, 1.106),
            (20, 1.528),
        ),
        40: (
            (8, 0.276),
            (16, 0.382),
            (31, 0.534),
            (5, 0.408),
            (9, 0.553),
            (17, 0.764),
            (3, 0.624),
            (5, 0.816),
            (10, 1.106),
        ),
    }
    head(
        "Tables 10 to 12: (E*, μ*) of noisy cyclic GD on a set of diameter 1, σ = 3. "
        "E* is corrected: the first E at which composition is no better",
        *("l", "L/b", "η", "E*", "Theorem 4.6", "minorant"),
    )
    for period, paper in papers.items():
        cells = iter(paper)
        for ratio in (0.25, 0.5, 1.0):
            for eta in (0.04, 0.02, 0.01):
                epochs, mu = next(cells)
                r = ratio / 3
                theirs = float(
                    printed.diameter_mu(r, 1 / (eta * 3), batches_per_epoch=period)
                )
                ours = iteration.noisy_cyclic_gd_mu(
                    2 / r,
                    num_epochs=20_000,
                    batches_per_epoch=period,
                    batch_size=2 / ratio,
                    order="fixed",
                    **SMOOTH | {"step_size": eta, "smoothness": 1.0, "diameter": 1.0},
                )
                stop = stops_growing(r, theirs)
                row(
                    period,
                    ratio,
                    eta,
                    f"{epochs} / {stop} / {stop - epochs:+d}",
                    beside(mu, theirs, 3),
                    f"{ours:.3f}",
                )


def kong_ribero():
    """Weakly convex, clipped: their bound as printed, and what is true."""
    head(
        "RDP of order 2 of clipped cyclic descent on weakly convex losses, C/b = 1, "
        "M = 1, noise multiplier 2, η = 1/(2(M + m)), E = 20. The printed Theorem 4.5 "
        "uses a constant of the step that is false",
        *(
            "m",
            "l",
            "their constant",
            "true constant",
            "composition",
            "Theorem 4.3",
            "Theorem 4.5",
            "with the true constant",
            "minorant",
        ),
    )
    order, noise, epochs = 2.0, 2.0, 20
    for weak in (0.0, 0.01, 0.1, 1.0):
        for period in (10, 100):
            eta = 1 / (2 * (1 + weak))
            theirs = math.sqrt(1 + 2 * eta * weak * (1 + weak / (1 + weak)))
            true = float(
                iteration.clipped_step_lipschitz(
                    eta, weak_convexity=weak, smoothness=1.0
                )
            )
            theta = theirs ** (2 * (period - 1)) / sum(
                theirs ** (2 * i) for i in range(period)
            )
            setting = SMOOTH | {
                "step_size": eta,
                "clipped": True,
                "smoothness": 1.0,
                "weak_convexity": weak,
            }
            shape = {
                "num_epochs": epochs,
                "batches_per_epoch": period,
                "batch_size": 1,
                "order": "fixed",
            }
            bounds = iteration.noisy_cyclic_gd_bounds(noise, **shape, **setting)
            ours = iteration.last_iterate_rdp(noise, order, **shape, **setting)
            fixed = printed.expansion_mu(
                2 / noise, true, num_epochs=epochs, batches_per_epoch=period
            )
            row(
                weak,
                period,
                f"{theirs:.4f}",
                f"{true:.4f}",
                f"{order * bounds.composition**2 / 2:.2f}",
                f"{8 * order * period * epochs / noise**2:.0f}",
                f"{4 * order / noise**2 * epochs * theta:.3f}",
                f"{order * fixed**2 / 2:.2f}",
                f"{ours:.2f}",
            )


def seconds(fn):
    """The median and the largest of the times that fn() takes, warm, and the first."""
    start = time.perf_counter()
    jax.block_until_ready(fn())
    first, times = time.perf_counter() - start, []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        jax.block_until_ready(fn())
        times.append(time.perf_counter() - start)
    return statistics.median(times), max(times), first


def timings():
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
        "its ε and derivative by step size": lambda: gradient(0.05),
        "noisy_cyclic_gd_mus, all 1000 offsets": lambda: iteration.noisy_cyclic_gd_mus(
            3.0, **shape, **regression
        ),
        "all offsets, with a diameter": lambda: iteration.noisy_cyclic_gd_mus(
            3.0, **shape, **bounded
        ),
    }
    head(
        f"Times in ms (median of {REPETITIONS})",
        "call",
        "median",
        "most",
        "first call, s",
    )
    for name, fn in cases.items():
        median, most, first = seconds(fn)
        row(name, f"{1e3 * median:.1f}", f"{1e3 * most:.1f}", f"{first:.1f}")


def plot(path):
    """ε against epochs: composition, RDP, minorant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    epochs = np.unique(np.logspace(0, 3, 25).astype(int))
    bounds = [logistic_mu(int(e), 0.002) for e in epochs]
    composed = [float(gdp.epsilon(b.composition, 1e-5)) for b in bounds]
    exact = [float(gdp.epsilon(b.best, 1e-5)) for b in bounds]
    by_rdp = [rdp_epsilon(b.best, 1e-5) for b in bounds]
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    axes.loglog(epochs, composed, color="0.45", linestyle="--", label="composition")
    axes.loglog(
        epochs,
        by_rdp,
        color="tab:orange",
        linestyle="-.",
        label="minorant, converted by RDP",
    )
    axes.loglog(epochs, exact, color="tab:blue", label="minorant")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("epochs")
    axes.set_ylabel("ε at δ = 1e-5")
    axes.set_title(
        "Last iterate of clipped, regularised logistic regression\n"
        "40 batches an epoch, noise multiplier 3, REPLACE",
        fontsize=10,
    )
    axes.grid(which="major", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    print(f"\nwrote {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", default="docs/iteration.png")
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    tables_1_3_4()
    figure_1()
    table_7()
    table_8()
    table_9()
    tables_10_to_12()
    kong_ribero()
    plot(options.plot)
    if not options.no_times:
        timings()
