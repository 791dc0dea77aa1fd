"""Compare published tables of amplification by iteration with dpjax's `accounting`.

The tables of Bok, Su and Altschuler (2024) are compared as "paper / dpjax /
difference". The bounds of Kong and Ribero (2024) are compared with composition and with
the minorant.
"""

import math

from _iteration_settings import SMOOTH, contracting, logistic_mu, rdp_epsilon
from _results import Table

from dpjax.accounting import gdp, iteration
from dpjax.accounting.iteration import published as printed


def beside(paper, ours, digits):
    """Return both values, their difference, and a mark if the digits differ."""
    off = abs(round(float(ours), digits) - paper) > 0.5 * 10**-digits
    return [paper, ours, ours - paper, " (differs)" if off else ""]


def pair(digits):
    """Return the template of a cell that compares a paper's value with dpjax's."""
    return f"{{:.{digits}f}} / {{:.{digits}f}} / {{:+.4f}}{{}}"


def tables_1_3_4():
    """Compare μ and ε of logistic regression, and ε from dpjax's μ by way of RDP."""
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
    mus, epsilons = [], []
    for epochs, papers in published_mu.items():
        bounds = [logistic_mu(epochs, x) for x in (0.002, 0.004)]
        ours = [bounds[0].composition, bounds[0].best, bounds[1].best]
        mus.append(
            [
                epochs,
                *(beside(*x, 2) for x in zip(papers, map(float, ours), strict=True)),
            ]
        )
        papers = published_epsilon[epochs]
        cells = [
            beside(p, float(gdp.epsilon(mu, 1e-5)), 2)
            for p, mu in zip(papers, ours, strict=True)
        ]
        epsilons.append([epochs, *cells, rdp_epsilon(ours[1], 1e-5)])
    columns = {"E": "{}"} | dict.fromkeys(
        ("composition", "λ = .002", "λ = .004"), pair(2)
    )
    return [
        Table("table 3", columns, mus),
        Table("tables 1 and 4", columns | {"RDP, λ = .002": "{:.2f}"}, epsilons),
    ]


def figure_1():
    """Compare ε at δ = 1e-5, m = 1, M = 10, η = 0.05, L/(nσ) = 0.1."""
    rows = []
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
        rows.append([steps, composed, by_rdp, exact])
    names = ("composition", "RDP of the exact μ", "exact")
    return Table("figure 1", {"steps": "{}"} | dict.fromkeys(names, "{:.3f}"), rows)


def table_7():
    """Compare μ of noisy GD at L/(nσ) = 0.1."""
    constants = (0.92, 0.96, 0.98, 0.99, 0.995)
    papers = {
        10: (0.316, 0.308, 0.314, 0.316, 0.316, 0.316),
        100: (1.000, 0.490, 0.688, 0.871, 0.961, 0.990),
        1000: (3.162, 0.490, 0.700, 0.995, 1.411, 1.984),
    }
    rows = []
    for steps, paper in papers.items():
        bounds = [
            iteration.noisy_gd_bounds(
                20.0, num_steps=steps, num_examples=7, **contracting(c)
            )
            for c in constants
        ]
        ours = [bounds[0].composition, *(b.best for b in bounds)]
        pairs = zip(paper, map(float, ours), strict=True)
        rows.append([steps, *(beside(p, o, 3) for p, o in pairs)])
    names = ("composition", *(f"c = {c}" for c in constants))
    return Table("table 7", {"steps": "{}"} | dict.fromkeys(names, pair(3)), rows)


def stops_growing(mu_of, limit):
    """Return the number of epochs from which on composition exceeds the limit."""
    return math.ceil((limit / mu_of) ** 2 * (1 - 1e-6))  # tolerance for float32


def table_8():
    """Compare (t*, μ*) of noisy GD on a set of diameter 1, with σ = 8."""
    papers = {
        0.25: ((80, 0.280), (160, 0.395), (320, 0.559)),
        0.5: ((40, 0.395), (80, 0.559), (160, 0.791)),
        1.0: ((20, 0.559), (40, 0.791), (80, 1.118)),
    }
    rows = []
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
            count = [steps, stop, stop - steps]
            rows.append([ratio, eta, count, beside(mu, theirs, 3), ours])
    columns = {"L/n": "{}", "η": "{}", "t*": "{} / {} / {:+d}"}
    columns |= {"Theorem 4.3": pair(3), "minorant": "{:.3f}"}
    return Table("table 8", columns, rows)


def table_9():
    """Compare μ of noisy cyclic GD at L/(bσ) = 0.2."""
    papers = {
        5: (0.447, 0.229, 0.233, 0.235, 0.211, 0.215, 0.217, 0.202, 0.205, 0.208),
        50: (1.414, 0.270, 0.334, 0.410, 0.216, 0.237, 0.275, 0.203, 0.208, 0.219),
        500: (4.472, 0.270, 0.336, 0.439, 0.216, 0.237, 0.276, 0.203, 0.208, 0.219),
    }
    settings = [(period, c) for period in (10, 20, 40) for c in (0.98, 0.99, 0.995)]
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
    pairs = zip(papers.values(), composed, strict=True)
    rows = [["any", "composition", *(beside(p[0], o, 3) for p, o in pairs)]]
    for i, (period, c) in enumerate(settings):
        cells = [
            beside(p[i + 1], float(bounds[period, c, e].best), 3)
            for e, p in papers.items()
        ]
        rows.append([period, c, *cells])
    columns = {"l": "{}", "c": "{}"}
    columns |= dict.fromkeys((f"E = {e}" for e in papers), pair(3))
    return Table("table 9", columns, rows)


def tables_10_to_12():
    """Compare (E*, μ*) of noisy cyclic GD on a set of diameter 1, with σ = 3.

    E* is corrected: E* is the first number E of epochs at which composition is no
    better.
    """
    papers = {  # E* and μ*
        10: (
            (31, 62, 123, 17, 33, 65, 10, 20, 40),
            (0.534, 0.750, 1.057, 0.764, 1.067, 1.500, 1.106, 1.528, 2.134),
        ),
        20: (
            (16, 31, 62, 9, 17, 33, 5, 10, 20),
            (0.382, 0.534, 0.750, 0.553, 0.764, 1.067, 0.816, 1.106, 1.528),
        ),
        40: (
            (8, 16, 31, 5, 9, 17, 3, 5, 10),
            (0.276, 0.382, 0.534, 0.408, 0.553, 0.764, 0.624, 0.816, 1.106),
        ),
    }
    rows = []
    for period, paper in papers.items():
        cells = zip(*paper, strict=True)
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
                count = [epochs, stop, stop - epochs]
                rows.append([period, ratio, eta, count, beside(mu, theirs, 3), ours])
    columns = {"l": "{}", "L/b": "{}", "η": "{}", "E*": "{} / {} / {:+d}"}
    columns |= {"Theorem 4.6": pair(3), "minorant": "{:.3f}"}
    return Table("tables 10 to 12", columns, rows)


def kong_ribero():
    """Compare RDP of order 2 of clipped cyclic descent on weakly convex losses.

    The setting is C/b = 1, M = 1, noise multiplier 2, η = 1/(2(M + m)) and E = 20. The
    published Theorem 4.5 uses a false constant of the step.
    """
    order, noise, epochs, rows = 2.0, 2.0, 20, []
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
            rows.append(
                [
                    weak,
                    period,
                    theirs,
                    true,
                    order * bounds.composition**2 / 2,
                    8 * order * period * epochs / noise**2,
                    4 * order / noise**2 * epochs * theta,
                    order * fixed**2 / 2,
                    ours,
                ]
            )
    columns = {"m": "{}", "l": "{}", "published constant": "{:.4f}"}
    columns |= {"true constant": "{:.4f}", "composition": "{:.2f}"}
    columns |= {"Theorem 4.3": "{:.0f}", "Theorem 4.5": "{:.3f}"}
    columns |= {"with the true constant": "{:.2f}", "minorant": "{:.2f}"}
    return Table("Kong and Ribero", columns, rows)
