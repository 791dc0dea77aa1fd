"""Write the tables of the documents from the results.

    python benchmarks/report.py [--check]

In each of DOCUMENTS, the script replaces the text between a line such as
`<!-- name: table -->` and the next `<!-- end -->`. The new text is one of these:

- for the table `setting`, the versions, and how times were measured
- for a pair in `VIEWS`, a table that this script computes from results
- otherwise, the table of that name in `results/name.json`

With --check the script writes nothing, and fails if a document differs from the
results.
"""

import argparse
import functools
import pathlib
import re
import sys

from _results import FOLDER, Table, read

DOCUMENTS = (
    "README.md",
    "docs/choosing.md",
    "docs/choosing-a-mechanism.md",
    "docs/correlated.md",
    "docs/auditing.md",
    "docs/statistics.md",
    "docs/recipe.md",
    "docs/selection.md",
    "docs/amplification.md",
    "docs/published-runs.md",
    "docs/howto/augmentation.md",
    "docs/howto/averaging.md",
    "docs/howto/regression.md",
    "docs/howto/streaming.md",
    "benchmarks/README.md",
)
MARKED = re.compile(r"<!-- (\S+): (.+?) -->\n.*?<!-- end -->", re.DOTALL)
UNMEASURED = "No result of this command is in the repository yet."
NETWORKS = {
    "mlp": "MLP",
    "cnn": "CNN",
    "wide_resnet": "WRN-16-4",
    "transformer": "transformer",
}

# Methods of `erm` whose columns are in separate results.
ALONE = {
    "erm.Bank-Adult-CreditCard": [
        "objective perturbation",
        "objective perturbation, scaled",
    ],
    "erm.alone.Bank-Adult-CreditCard": [
        "objective perturbation, scaled",
        "plan, whitened",
    ],
}


def load(name):
    """Return the result of a script, or of one of its parts."""
    return read(FOLDER / f"{name}.json")


def accuracy():
    """Return accuracies by method and ε; the non-private row is last, with one cell."""
    table = load("train")["tables"]["accuracy"]
    result = {(way, target): cell for way, target, _, cell, _ in table.rows}
    targets = sorted({target for _, target in result if target})
    rows = []
    ways = dict.fromkeys(way for way, _ in result)
    for way in sorted(ways, key=lambda way: (way, None) in result):
        cells = [result.get((way, target)) for target in targets]
        cells[0] = result.get((way, None), cells[0])
        rows.append([way, *cells])
    headings = (f"ε = {target:g}" for target in targets)
    columns = dict.fromkeys(headings, table.columns["test accuracy"])
    return Table("accuracy", {"training": "{}"} | columns, rows)


def headline():
    """Return the rows of `accuracy` for the README."""
    table = accuracy()
    ways = "recipe, no search, linear", "DP-SGD, Poisson"
    rows = {row[0]: row for row in table.rows}
    return Table(
        "headline", table.columns, [rows[way] for way in (*ways, "non-private")]
    )


def chosen():
    """Return the settings that the search chose; a full batch is shown as "all"."""
    table = load("tuned")["tables"]["settings"]
    rows = [[way, e, batch or "all", *rest] for way, e, batch, *rest in table.rows]
    return Table("chosen", table.columns, rows)


def contenders():
    """Return, for each network, all measured rows by label."""
    result = {}
    for name in NETWORKS:
        rows = load(f"clipping.{name}")["tables"]["contenders"].rows
        rows = rows + load(f"opacus_ghost.{name}")["tables"]["contenders"].rows
        result[name] = {row[0]: row for row in rows}
    return result


def plain(label):
    """Return the label of the plain step with which a row is compared."""
    opacus = label.startswith(("Opacus", "PyTorch"))
    return "PyTorch, plain gradient" if opacus else "plain gradient"


def beside_plain(column):
    """Return one measured number for all networks, with its ratio to the plain step."""
    result, table = contenders(), []
    place = {"ms": 1, "MB": 4, "compile, s": 5}[column]
    for label in dict.fromkeys(label for rows in result.values() for label in rows):
        cells = []
        for of_network in result.values():
            row, base = of_network.get(label), of_network[plain(label)]
            available = row is not None and len(row) > place and row[place] is not None
            cells.append([row[place], row[place] / base[place]] if available else None)
        if any(cells):
            table.append([label, *cells])
    columns = {"": "{}"} | dict.fromkeys(NETWORKS.values(), "{:.1f} ({:.1f})")
    return Table(column, columns, table)


def ratios():
    """Return times in multiples of a plain step, for the best microbatch size."""
    labels = {
        'dpjax, `engine="auto"` (book-keeping)': "dpjax bookkeeping$",
        'dpjax, `engine="vmap"`': "dpjax vmap",
        "optax.contrib": "optax.contrib",
        "jax_privacy, best microbatch size": "jax_privacy",
        "Opacus ghost clipping, to PyTorch's plain step": "Opacus",
    }
    rows, columns = [], {"": "{}"}
    for name, title in NETWORKS.items():
        ((_, batch, _),) = load(f"clipping.{name}")["tables"]["network"].rows
        columns[f"{title}, batch {batch}"] = "{:.1f}"
    for title, pattern in labels.items():
        cells = []
        for of_network in contenders().values():
            times = [
                row[1] / of_network[plain(label)][1]
                for label, row in of_network.items()
                if re.match(pattern, label)
            ]
            cells.append(min(times, default=None))
        rows.append([title, *cells])
    return Table("ratios", columns, rows)


def networks():
    """Return the sizes of the networks."""
    rows = []
    for name, title in NETWORKS.items():
        table = load(f"clipping.{name}")["tables"]["network"]
        rows.append([title, *table.rows[0]])
    return Table("networks", {"": "{}"} | table.columns, rows)


def left_noise():
    """Return the noise that mechanisms leave, without the column of seconds."""
    table = load("mechanisms")["tables"]["noise"]
    *columns, _ = table.columns.items()
    return Table("noise", dict(columns), [row[:-1] for row in table.rows])


def of_parts(name, what):
    """Join a table of all parts of a result; return None if no part has this table."""
    paths = sorted(FOLDER.glob(f"{name}.*.json"))
    tables = [t for path in paths if (t := read(path)["tables"].get(what))]
    rows = [row for table in tables for row in table.rows]
    return Table(what, tables[0].columns, rows) if tables else None


def pipelines():
    """Return accuracies of pipelines by data and ε; the last column is non-private."""
    table = of_parts("recipe", "accuracy")
    if table is None:
        return None
    result = {(data, way, e): cell for data, way, e, _, cell, _ in table.rows}
    targets = sorted({e for *_, e in result if e})
    ways = dict.fromkeys((data, way) for data, way, e in result if e)
    rows = []
    for data, way in ways:
        free, _ = result.get((data, "non-private", None), (None, None))
        cells = [result.get((data, way, target)) for target in targets]
        rows.append([data, way, *cells, free if way == "the recipe" else None])
    columns = {"data": "{}", "training": "{}"}
    columns |= dict.fromkeys((f"ε = {x:g}" for x in targets), "{:.3f} ± {:.3f}")
    return Table("accuracy", columns | {"non-private": "{:.3f}"}, rows)


def excess():
    """Return the excess losses of `erm`, with those of the separate results."""
    table = load("erm")["tables"]["excess"]
    columns = dict(table.columns)
    result = {
        tuple(row[:3]): dict(zip(columns, row, strict=True)) for row in table.rows
    }
    for name, methods in ALONE.items():
        if not (FOLDER / f"{name}.json").exists():
            continue
        other = load(name)["tables"]["excess"]
        columns |= {method: other.columns[method] for method in methods}
        for row in other.rows:
            cells = dict(zip(other.columns, row, strict=True))
            result[tuple(row[:3])] |= {method: cells[method] for method in methods}
    rows = [[row.get(name) for name in columns] for row in result.values()]
    return Table("excess", columns, rows)


def convex():
    """Return the excess losses of some methods without a regulariser."""
    table = excess()
    shown = ["data", "ε", "published", "output perturbation", "noisy GD"]
    shown += ["objective perturbation", "objective perturbation, scaled"]
    shown += ["plan, whitened", "diffprivlib"]
    shown = [name for name in shown if name in table.columns]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    retained = [
        [row[name] for name in shown]
        for row in rows
        if row["μ"] == 0 and row["objective perturbation, scaled"] is not None
    ]
    return Table("convex", {name: table.columns[name] for name in shown}, retained)


def by_target(name):
    """Return the accuracies of a result by method and ε."""
    table = load(name)["tables"]["accuracy"]
    result = {(way, target): cell for way, target, _, cell in table.rows}
    targets = sorted({target for _, target in result})
    rows = [
        [way, *(result.get((way, target)) for target in targets)]
        for way in dict.fromkeys(way for way, _ in result)
    ]
    columns = dict.fromkeys((f"ε = {x:g}" for x in targets), "{:.3f} ± {:.3f}")
    return Table("accuracy", {"training": "{}"} | columns, rows)


VIEWS = {
    ("erm", "convex"): convex,
    ("erm", "excess"): excess,
    ("handcrafted", "accuracy"): functools.partial(by_target, "handcrafted"),
    ("recipe", "accuracy"): pipelines,
    ("mechanisms", "noise"): left_noise,
    ("train", "accuracy"): accuracy,
    ("train", "headline"): headline,
    ("tuned", "settings"): chosen,
    ("clipping", "ratios"): ratios,
    ("clipping", "networks"): networks,
    ("clipping", "milliseconds"): functools.partial(beside_plain, "ms"),
    ("clipping", "megabytes"): functools.partial(beside_plain, "MB"),
    ("clipping", "compilation"): functools.partial(beside_plain, "compile, s"),
    **{
        ("gpu", what): functools.partial(of_parts, "gpu", what)
        for what in ("networks", "steps", "noise", "accountants")
    },
}


def setting(name):
    """Return versions, machine and timing; parts of a result share a line if equal."""
    parts = sorted(FOLDER.glob(f"{name}.json")) or sorted(FOLDER.glob(f"{name}.*.json"))
    actual = {}
    for part in parts:
        result = read(part)
        versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items() if v)
        where = f"{result['device']}, {result['machine']}; {result['date']}."
        line = " ".join(
            filter(None, [versions and versions + ";", where, result["times"]])
        )
        actual.setdefault(line, []).append(part.name.split(".")[1])
    if not actual:
        return UNMEASURED
    if len(actual) == 1:
        return next(iter(actual))
    return "\n".join(f"- {', '.join(names)}: {line}" for line, names in actual.items())


def shown(name, what):
    """Return the text for a marker."""
    if what == "setting":
        return setting(name)
    if (name, what) in VIEWS:
        view = VIEWS[name, what]()
        return UNMEASURED if view is None else view.markdown()
    return load(name)["tables"][what].markdown()


def rendered(document):
    """Return a document with the text of each marker written again."""

    def fill(match):
        name, what = match.groups()
        return f"<!-- {name}: {what} -->\n\n{shown(name, what)}\n\n<!-- end -->"

    return MARKED.sub(fill, document)


def main():
    """Write the documents, or check that they agree with the results."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--check", action="store_true")
    check = options.parse_args().check
    differ = []
    for name in DOCUMENTS:
        path = pathlib.Path(__file__).parents[1] / name
        before = path.read_text(encoding="utf-8")
        after = rendered(before)
        if before != after:
            differ.append(name)
            if not check:
                path.write_text(after, encoding="utf-8")
    if check and differ:
        sys.exit(f"{', '.join(differ)}: run python benchmarks/report.py")


if __name__ == "__main__":
    main()
