"""The page of comparisons says what was measured, and what is missing is missing."""

import json
import operator
import pathlib
import re

import jax
import pytest

import dpjax

ROOT = pathlib.Path(__file__).parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks/results"
NETWORKS = ("mlp", "cnn", "wide_resnet", "transformer")
OURS = (
    "output perturbation",
    "noisy GD",
    "noisy SGD",
    "RRPSGD",
    "dp_nsgd",
    "reduced NSGD",
)


def rows(file, table):
    """The rows of a table, each from its columns' names."""
    table = json.loads((RESULTS / f"{file}.json").read_text())["tables"][table]
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def contenders(benchmark, network, column):
    """From each contender to what was measured of it."""
    measured = rows(f"{benchmark}.{network}", "contenders")
    return {row[""]: row[column] for row in measured if row[column] is not None}


def best(measured, library):
    return min(x for name, x in measured.items() if name.startswith(library))


@pytest.mark.parametrize("network", NETWORKS)
def test_time_memory_and_compilation_of_clipped_sums(network):
    ms, mb, compiling = (
        contenders("clipping", network, column) for column in ("ms", "MB", "compile, s")
    )
    ours, plain = ms["dpjax bookkeeping"], ms["plain gradient"]
    assert 0.85 < ours / plain < 1.25
    beside_jax_privacy = best(ms, "jax_privacy") / ours
    if network == "transformer":
        assert 0.9 < beside_jax_privacy < 1.1
    else:
        assert beside_jax_privacy > 1.4
    opacus = contenders("opacus_ghost", network, "ms")["Opacus, ghost clipping"]
    assert (opacus < ours) == (network == "cnn")
    single = "jax_privacy, microbatches of 1"
    if network != "mlp":
        assert mb[single] < best(mb, "dpjax")
        assert ms[single] > ours
    assert compiling["dpjax bookkeeping"] > compiling["jax_privacy"]


def test_epsilon_beside_dp_accounting():
    *usual, small = rows("accountants", "epsilon")
    assert small["δ"] == 1e-12
    apart = {
        row["σ"]: row["dpjax pld"] - row["dp-accounting pld"]
        for row in usual
        if abs(row["dpjax pld"] - row["dp-accounting pld"]) >= 1e-3
    }
    assert len(usual) - len(apart) == 5
    assert all(difference < 0 for difference in apart.values())
    assert small["dp-accounting pld"] < small["dpjax pld"]
    excess = max(
        row["dpjax rdp"] / row[f"{peer} rdp"] - 1
        for row in (*usual, small)
        for peer in ("dp-accounting", "opacus")
    )
    assert 0.011 < excess <= 0.012


def test_noise_in_bins_beside_a_simulation():
    ratios = [row["ratio"] for row in rows("amplification", "noise")]
    assert 1.05 < max(ratios) <= 1.06


def test_convex_problems_beside_diffprivlib():
    better = {
        (row["data"], row["μ"], row["ε"])
        for row in rows("erm", "excess")
        if row["diffprivlib"] is not None
        if row["diffprivlib"] < min(row[name] for name in OURS)
    }
    assert better == {("Bank", 0, 1), ("Bank", 0, 2), ("CreditCard", 0, 2)}


# What dpjax would have if a row of the page that says "no" were wrong: a dotted name,
# or a function with an argument that it must refuse.
ABSENT = {
    "a cryptographic generator": [(dpjax.random_key, {"impl": "chacha20"})],
    "a central limit theorem": [
        "accounting.gdp.central_limit_mu",
        "accounting.gdp.poisson_gaussian",
        "accounting.gdp.poisson_mu",
        "accounting.gdp.subsampled_mu",
    ],
    "Laplace, discrete, private selection": [
        "accounting.pld.discrete_gaussian",
        "accounting.pld.discrete_laplace",
        "accounting.pld.laplace",
        "accounting.pld.randomized_response",
        "accounting.selection",
        "add_discrete_gaussian_noise",
        "tune",
    ],
}
# What dpjax has where the page does not say "no".
PRESENT = {
    "noise for a target ε": ["plan"],
    "clip norm that follows a quantile": ["QuantileClip"],
    "correlated noise": ["correlated_noise", "strategies.optimize", "tree_momentum"],
    "users as the unit": ["by_user"],
    "Poisson samples in cycles, balls in bins": [
        "sampling.cyclic_poisson",
        "sampling.random_bins",
        "accounting.correlated.epsilon",
    ],
    "attacks on a trained model": [
        "auditing.train_shadows",
        "auditing.likelihood_ratios",
    ],
    "fixed-size batches under `REPLACE`": [
        "accounting.rdp.fixed_size_gaussian",
        "accounting.pld.subsampled_gdp",
    ],
    "Poisson batches that overflow": ["accounting.truncation.poisson_gaussian"],
    "trees, examples several times": ["accounting.tree.momentum_mu"],
    "the last iterate alone": ["accounting.iteration.noisy_gd_mu"],
    "lower bounds on ε": [
        "auditing.epsilon_lower",
        "accounting.allocation.epsilon_lower",
    ],
}


def cells_of_dpjax(page):
    """From the label of each row of a comparison to the cell of dpjax."""
    found, compares = {}, False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            compares = False
        elif cells[:2] == ["", "dpjax"]:
            compares = True
        elif compares and not set(cells[0]) <= {"-"}:
            found[cells[0]] = cells[1]
    return found


def says_no(cell):
    return re.match(r"no\b", cell) is not None


def exists(name):
    """Whether dpjax has this name; its module must exist."""
    module, _, last = name.rpartition(".")
    return hasattr(operator.attrgetter(module)(dpjax) if module else dpjax, last)


@pytest.fixture(scope="module")
def cells():
    return cells_of_dpjax((DOCS / "comparisons.md").read_text("utf-8"))


def test_each_no_of_the_page_is_tested_and_nothing_else_is(cells):
    assert len(cells) > 25
    assert {label for label, cell in cells.items() if says_no(cell)} == set(ABSENT)


@pytest.mark.parametrize("label", ABSENT)
def test_what_the_page_says_is_missing_is_missing(label):
    for what in ABSENT[label]:
        if isinstance(what, str):
            assert not exists(what), what
        else:
            function, arguments = what
            function()
            with pytest.raises((TypeError, ValueError)):
                function(**arguments)


@pytest.mark.parametrize(
    ("page", "sentence", "name"),
    [
        ("questions.md", "dpjax has no function for it.", "accounting.selection"),
        ("questions.md", "**dpjax does not account for it.**", "tune"),
        ("threat-model.md", "noise here is no discrete", "add_discrete_gaussian_noise"),
    ],
)
def test_what_other_pages_say_is_missing_is_missing(page, sentence, name):
    assert sentence in " ".join((DOCS / page).read_text("utf-8").split())
    assert not exists(name)


def test_what_the_page_says_exists_exists(cells):
    assert set(PRESENT) <= {label for label in cells if not says_no(cells[label])}
    for names in PRESENT.values():
        assert [name for name in names if not exists(name)] == []
    named = {name for cell in cells.values() for name in re.findall("`([^`]+)`", cell)}
    assert named
    assert [name for name in named if not exists(name) and not hasattr(jax, name)] == []
