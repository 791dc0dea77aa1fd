"""Private empirical risk minimisation: excess loss and time of every solver.

    pip install -e '.[erm]'
    python benchmarks/erm.py --data FOLDER [--seeds 3] [--without-peers]

Logistic regression on Bank, Adult and CreditCard, Huber regression on Wine and Bike, as
in Zhang, Zheng, Mou and Wang (2017), Tables 2 and 3: δ = 0.001, replacement of one
example, without a regulariser and with (μ/2)‖w‖². Features as in `_erm_data.py`, which
says what is declared. The paper's loss is read as log(1 + exp(−y⟨w, x⟩)), its Huber
threshold as 1 in the label's own unit, labels as they are in the files.

Excess loss is F(w) − min F on all of the data, in float64; the minimum is found by
Newton's method. It is the mean over seeds. A time is the median over seeds of one call
of the solver with its noise known, after a first call that compiles and calibrates;
methods take turns. diffprivlib and scikit-learn are timed as they are.
Learning rates, epochs and clip norms were set once by hand for all of the data sets and
ε. The steps of output perturbation and noisy GD follow from a guess of the radius, in
which no data went but for Bike's, lowered once (from 1000 to 300) to save time.
"scaled" methods divide features by their root mean squares, a private release that
costs a tenth of μ²; they follow rules in n, d, ε and that release alone.
"""

import itertools
import pathlib
import time
from typing import NamedTuple

import _erm_data
import jax
import matplotlib
import numpy as np
from _erm_methods import METHODS
from _erm_problem import Problem
from _results import OURS, Table, parser, print_tables, write
from _timing import said, take_turns

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EPSILONS = (0.1, 0.5, 1.0, 2.0)
PRIVATE = [name for name in METHODS if name != "scikit-learn"]


class Found(NamedTuple):
    """Mean excess loss and median seconds of a method."""

    excess: float
    seconds: float


def calls(problem, name, epsilon):
    """A method to be called in turn, each time with another key, and what it finds."""
    seeds, found, known = itertools.chain([1000], itertools.count()), [], None

    def call():
        nonlocal known
        key = jax.random.key(next(seeds))
        params, known = METHODS[name](problem, epsilon, key, known=known)
        found.append(params)
        return params

    return call, found


def measure(problem, names, epsilon, seeds):
    """Every method at one ε; the first call compiles and calibrates."""
    methods = {name: calls(problem, name, epsilon) for name in names}
    times = take_turns(
        {name: call for name, (call, _) in methods.items()}, rounds=seeds
    )
    return {
        name: Found(
            float(np.mean([problem.objective(w) - problem.best for w in found[1:]])),
            times[name].median,
        )
        for name, (_, found) in methods.items()
    }


def suited(problem, peers):
    """The methods that there are for a problem.

    diffprivlib has no Huber regression. Scaled features change a regulariser.
    """
    absent = {"diffprivlib"} - (set() if problem.linear else set(peers))
    absent |= {name for name in METHODS if "scaled" in name and problem.mu}
    return [name for name in METHODS if name not in absent]


def draw(path, problems, results):
    """Excess loss against ε, a panel for each problem."""
    figure, axes = plt.subplots(
        2, 5, figsize=(17, 7), layout="constrained", sharex=True
    )
    colors = dict(zip(PRIVATE, plt.get_cmap("tab20").colors, strict=False))
    for problem, axis in zip(problems, axes.T.ravel(), strict=True):
        for name in PRIVATE:
            values = [results[problem, e].get(name) for e in EPSILONS]
            if values[0] is not None:
                axis.plot(
                    EPSILONS,
                    [max(v.excess, 1e-9) for v in values],
                    marker="o",
                    markersize=3,
                    color=colors[name],
                    label=name,
                )
        printed = _printed(problem)
        style = {"color": "0.3", "linewidth": 1}
        axis.plot(
            EPSILONS, [r[0] for r in printed], "--", label="printed: output", **style
        )
        axis.plot(
            EPSILONS,
            [r[1] for r in printed],
            ":",
            label="printed: private SGD",
            **style,
        )
        axis.axhline(
            problem.at_start,
            color="0.8",
            zorder=0,
            label="w = 0",
        )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(f"{problem.data_set.name}, μ = {problem.mu:g}", fontsize=10)
    for axis in axes[1]:
        axis.set_xlabel("ε")
    for axis in axes[:, 0]:
        axis.set_ylabel("excess loss")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=9)
    figure.savefig(path, dpi=110)


def _printed(problem):
    rows = problem.data_set.printed
    return rows[4:] if problem.mu else rows[:4]


def excess_table(problems, results):
    """Excess loss beside what is printed."""
    rows = []
    for problem in problems:
        for epsilon, printed in zip(EPSILONS, _printed(problem), strict=True):
            found = results[problem, epsilon]
            row = [problem.data_set.name, problem.mu, epsilon, *printed[:2]]
            row += [problem.at_start]
            rows.append(
                [*row, *(found[m].excess if m in found else None for m in METHODS)]
            )
    names = ["μ", "ε", "printed", "printed SGD"]
    columns = {"data": "{}"} | dict.fromkeys(names, "{:g}") | {"w = 0": "{:.3g}"}
    return Table("excess", columns | dict.fromkeys(METHODS, "{:.3g}"), rows)


def seconds_table(problems, results):
    """The range of times over ε."""
    rows = []
    for problem in problems:
        row = [problem.data_set.name, problem.mu]
        for name in METHODS:
            found = [results[problem, e].get(name) for e in EPSILONS]
            times = [f.seconds for f in found if f]
            row.append([min(times), max(times)] if times else None)
        rows.append(row)
    columns = {"data": "{}", "μ": "{:g}"}
    columns |= dict.fromkeys(METHODS, "{:.2g} to {:.2g}")
    columns["scikit-learn"] = "{0:.2g}"  # one time for all ε
    return Table("seconds", columns, rows)


def claims_table(problems, results):
    """In how many rows what the paper claims of output perturbation is so."""
    at_most = telling = loss = sooner = both = 0
    for problem in problems:
        for epsilon, printed in zip(EPSILONS, _printed(problem), strict=True):
            found = results[problem, epsilon]
            ours, sgd = found["output perturbation"], found["noisy SGD"]
            at_most += ours.excess <= printed[0]
            telling += ours.excess <= printed[0] <= problem.at_start
            loss += ours.excess < sgd.excess
            sooner += ours.seconds < sgd.seconds
            both += ours.excess < sgd.excess and ours.seconds < sgd.seconds
    total = len(problems) * len(EPSILONS)
    counts = {
        "at most the printed excess": at_most,
        "the same, and the printed one at most that of w = 0 here": telling,
        "less loss than noisy SGD": loss,
        "less time than noisy SGD": sooner,
        "both": both,
    }
    rows = [[claim, [int(count), total]] for claim, count in counts.items()]
    columns = {"output perturbation has": "{}", "rows": "{} of {}"}
    return Table("claims", columns, rows)


def main():
    """Run everything, print the tables, draw the picture."""
    options = parser(__doc__)
    options.add_argument("--data", type=pathlib.Path, required=True)
    options.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    options.add_argument("--seeds", type=int, default=3)
    sets = {data_set.name: data_set for data_set in _erm_data.DATA_SETS}
    options.add_argument("--only", nargs="+", choices=sets, default=list(sets))
    options.add_argument("--without-peers", action="store_true")
    arguments = options.parse_args()
    peers = []
    try:
        import diffprivlib as peer
    except ImportError as error:  # also where it does not suit scikit-learn
        if not arguments.without_peers:
            raise SystemExit(f"diffprivlib: {error}; or use --without-peers") from error
    else:
        peers = [peer.__name__]

    results, problems = {}, []
    for name, data_set in sets.items():
        if name not in arguments.only:
            continue
        for mu in (0.0, data_set.strong):
            start = time.perf_counter()
            problem = Problem(data_set, mu, arguments.data)
            problems.append(problem)
            for epsilon in EPSILONS:
                names = suited(problem, peers)
                first = results.get((problem, EPSILONS[0]))
                if first:  # what is not private does not depend on ε
                    names.remove("scikit-learn")
                results[problem, epsilon] = measure(
                    problem, names, epsilon, arguments.seeds
                )
                if first:
                    results[problem, epsilon]["scikit-learn"] = first["scikit-learn"]
            print(
                f"{name}, {problem.n} x {problem.d}, μ = {mu:g}: "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )
    tables = [
        table(problems, results)
        for table in (excess_table, claims_table, seconds_table)
    ]
    print_tables(*tables)
    complete = len(problems) == 2 * len(sets)
    if complete:
        arguments.out.mkdir(parents=True, exist_ok=True)
        draw(arguments.out / "erm.png", problems, results)
    write(
        "erm" if complete else f"erm.{'-'.join(arguments.only)}",
        arguments,
        tables,
        packages=[*OURS, "scikit-learn", *peers],
        times=said(arguments.seeds),
    )


if __name__ == "__main__":
    main()
