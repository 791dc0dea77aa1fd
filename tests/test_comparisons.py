"""The page of comparisons matches the measurements and the names that dpjax has."""

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


def table_rows(file, table):
    """The rows of a table, as dicts keyed by column name."""
    table = json.loads((RESULTS / f"{file}.json").read_text())["tables"][table]
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def measurements_by_contender(benchmark, network, column):
    """One measured column, by contender."""
    measured = table_rows(f"{benchmark}.{network}", "contenders")
    return {row[""]: row[column] for row in measured if row[column] is not None}


def minimum_of(measured, library):
    return min(x for name, x in measured.items() if name.startswith(library))


@pytest.mark.parametrize("network", NETWORKS)
def test_claims_on_clipped_sum_costs_match_the_results(network):
    ms, mb, compiling = (
        measurements_by_contender("clipping", network, column)
        for column in ("ms", "MB", "compile, s")
    )
    ours, plain = ms["dpjax bookkeeping"], ms["plain gradient"]
    assert 0.85 < ours / plain < 1.25
    beside_jax_privacy = minimum_of(ms, "jax_privacy") / ours
    if network == "transformer":
        assert 0.9 < beside_jax_privacy < 1.1
    else:
        assert beside_jax_privacy > 1.4
    opacus = measurements_by_contender("opacus_ghost", network, "ms")[
        "Opacus, ghost clipping"
    ]
    assert (opacus < ours) == (network == "cnn")
    single = "jax_privacy, microbatches of 1"
    if network != "mlp":
        assert mb[single] < minimum_of(mb, "dpjax")
        assert ms[single] > ours
    assert compiling["dpjax bookkeeping"] > compiling["jax_privacy"]


def test_claims_on_epsilon_against_dp_accounting_match_the_results():
    *usual, small = table_rows("accountants", "epsilon")
    assert small["δ"] == 1e-12
    differences = {
        row["σ"]: row["dpjax pld"] - row["dp-accounting pld"]
        for row in usual
        if abs(row["dpjax pld"] - row["dp-accounting pld"]) >= 1e-3
    }
    assert len(usual) - len(differences) == 5
    assert all(difference < 0 for difference in differences.values())
    assert small["dp-accounting pld"] < small["dpjax pld"]
    excess = max(
        row["dpjax rdp"] / row[f"{peer} rdp"] - 1
        for row in (*usual, small)
        for peer in ("dp-accounting", "opacus")
    )
    assert 0.011 < excess <= 0.012


def test_claim_on_random_bin_noise_matches_the_results():
    ratios = [row["ratio"] for row in table_rows("amplification", "noise")]
    assert 1.05 < max(ratios) <= 1.06


def test_claims_against_diffprivlib_match_the_results():
    better = {
        (row["data"], row["μ"], row["ε"])
        for row in table_rows("erm", "excess")
        if row["diffprivlib"] is not None
        if row["diffprivlib"] < min(row[name] for name in OURS)
    }
    assert better == {("Bank", 0, 1), ("Bank", 0, 2), ("CreditCard", 0, 2)}


# Names that dpjax would have if a "no" on the page were wrong: a dotted name, or a
# function with an argument for which it must raise.
ABSENT = {
    "ε by a central limit theorem": [
        "accounting.gdp.central_limit_mu",
        "accounting.gdp.poisson_gaussian",
        "accounting.gdp.poisson_mu",
        "accounting.gdp.subsampled_mu",
    ],
}
# Names that dpjax has where the page does not say "no".
PRESENT = {
    "the noise for a target ε": ["plan"],
    "clip norm that follows a quantile of the gradient norms": ["QuantileClip"],
    "correlated noise": ["correlated_noise", "strategies.optimize", "tree_momentum"],
    "users as the unit of privacy": ["by_user"],
    "cyclic Poisson sampling, balls in bins": [
        "sampling.cyclic_poisson",
        "sampling.random_bins",
        "accounting.correlated.epsilon",
    ],
    "private selection": ["accounting.selection", "tune"],
    "one budget for adaptively chosen mechanisms": ["budget"],
    "attacks on a trained model": [
        "auditing.train_shadows",
        "auditing.likelihood_ratios",
    ],
    "fixed-size batches under `REPLACE`": [
        "accounting.pld.subsampled_gdp",
    ],
    "Poisson batches that overflow": ["accounting.truncation.poisson_gaussian"],
    "Laplace and discrete noise, randomised response": [
        "accounting.pld.discrete_gaussian",
        "accounting.pld.discrete_laplace",
        "accounting.pld.laplace",
        "accounting.pld.randomized_response",
    ],
    "tree noise, where an example takes part several times": [
        "accounting.tree.momentum_mu"
    ],
    "the last iterate alone": ["accounting.iteration.noisy_gd_mu"],
    "lower bounds on ε": [
        "auditing.epsilon_lower",
        "accounting.allocation.epsilon_lower",
        "accounting.pld.epsilon_lower",
    ],
}


def dpjax_cells(page):
    """The cell of dpjax in each comparison table, by the label of its row."""
    result, compares = {}, False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            compares = False
        elif cells[:2] == ["", "dpjax"]:
            compares = True
        elif compares and not set(cells[0]) <= {"-"}:
            result[cells[0]] = cells[1]
    return result


def is_no(cell):
    return re.match(r"no\b", cell) is not None


def name_exists(name):
    """Whether dpjax has this name; its module must exist."""
    module, _, last = name.rpartition(".")
    return hasattr(operator.attrgetter(module)(dpjax) if module else dpjax, last)


@pytest.fixture(scope="module")
def page_cells():
    return dpjax_cells((DOCS / "comparisons.md").read_text("utf-8"))


def test_every_no_on_the_page_is_in_the_table_of_absent_names(page_cells):
    assert len(page_cells) > 25
    assert {label for label, cell in page_cells.items() if is_no(cell)} == set(ABSENT)


@pytest.mark.parametrize("label", ABSENT)
def test_features_marked_no_are_absent(label):
    for what in ABSENT[label]:
        if isinstance(what, str):
            assert not name_exists(what), what
        else:
            function, arguments = what
            function()
            with pytest.raises((TypeError, ValueError)):
                function(**arguments)


def test_features_named_on_the_page_exist(page_cells):
    assert set(PRESENT) <= {
        label for label in page_cells if not is_no(page_cells[label])
    }
    for names in PRESENT.values():
        assert [name for name in names if not name_exists(name)] == []
    named = {
        name for cell in page_cells.values() for name in re.findall("`([^`]+)`", cell)
    }
    assert named
    assert [
        name for name in named if not name_exists(name) and not hasattr(jax, name)
    ] == []
