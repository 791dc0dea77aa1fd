"""What the page of comparisons says in words is what was measured."""

import json
import pathlib

import pytest

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks/results"
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


def test_convex_problems_beside_diffprivlib():
    better = {
        (row["data"], row["μ"], row["ε"])
        for row in rows("erm", "excess")
        if row["diffprivlib"] is not None
        if row["diffprivlib"] < min(row[name] for name in OURS)
    }
    assert better == {("Bank", 0, 1), ("Bank", 0, 2), ("CreditCard", 0, 2)}
