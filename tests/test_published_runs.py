"""The values of published runs: dp-accounting agrees, and the page has every link."""

import importlib
import pathlib
import re

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

from dpjax import Adjacency

ROOT = pathlib.Path(__file__).parents[1]
RELATIONS = {
    Adjacency.ADD_REMOVE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    Adjacency.REPLACE: dp_accounting.NeighboringRelation.REPLACE_ONE,
}


@pytest.fixture
def published(monkeypatch):
    """The benchmark's module; the benchmarks are not a package."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("published_runs")


def rows_of(name):
    """The written rows by run."""
    results = importlib.import_module("_results")
    table = results.read(results.FOLDER / "published_runs.json")["tables"][name]
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    ["[TensorFlow Privacy, MNIST][tf], 60 epochs", "[Sander et al., CIFAR-10][tan]"],
)
def test_two_runs_agree_with_dp_accounting_and_the_results(published, name):
    (run,) = [run for run in published.RUNS if run.name == name]
    row = rows_of("epsilons")[name]
    step = dp_accounting.PoissonSampledDpEvent(
        run.batch_size / run.num_examples,
        dp_accounting.GaussianDpEvent(run.noise_multiplier),
    )
    for adjacency, relation in RELATIONS.items():
        ours = published.poisson_epsilon(run, adjacency)
        theirs = PLDAccountant(relation).compose(step, run.num_steps)
        # Both are upper bounds; docs/accounting.md claims ε within 1e-3 of exact, and
        # dp-accounting's grid of losses has about the same error.
        assert ours == pytest.approx(theirs.get_epsilon(run.delta), abs=2e-3)
        assert row[f"{adjacency.name}, Poisson"] == published.raised(ours, 3)


def test_bounds_of_known_batches_match_direct_formula(published):
    (run,) = [r for r in published.RUNS if r.name.startswith("[De et al., ImageNet")]
    # 71,589 steps and a buffer of 10 batches of 16,384, from 1,271,167 examples.
    assert run.uses == 923
    (run,) = [
        r for r in published.RUNS if r.name.startswith("[Tramèr and Boneh, MNIST")
    ]
    row = rows_of("epsilons")[run.name]
    # Balle and Wang (2018), Theorem 8, at the root of the sum of 40 squares over σ; a
    # value is raised to the next tenth.
    for adjacency, shift in (("ZERO_OUT", 1), ("REPLACE", 2)):
        mu = shift * 40**0.5 / 1.23
        epsilon = row[f"{adjacency}, the code's batches"]
        below, at = (
            norm.cdf(mu / 2 - e / mu) - np.exp(e + norm.logcdf(-mu / 2 - e / mu))
            for e in (epsilon - 0.1, epsilon)
        )
        assert at <= 1e-5 < below


def test_every_run_has_a_link_and_both_tables(published):
    page = (ROOT / "docs/published-runs.md").read_text(encoding="utf-8")
    names = [run.name for run in published.RUNS]
    assert len(set(names)) == len(names)
    for name in names:
        assert page.count(f"| {name} |") == 2
        for label in re.findall(r"\]\[([\w-]+)\]", name):
            assert re.search(rf"^\[{label}\]: https://", page, re.MULTILINE)
