"""Benchmarks: documents are what the results say, and the timer and tables are right.

Nothing is measured here.
"""

import argparse
import importlib
import pathlib
import re
import time

import jax
import numpy as np
import pytest

from dpjax import Adjacency, strategies, workloads
from dpjax.accounting.tree import momentum_mu
from dpjax.noise.tree import prefix_variance

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = [
    "README.md",
    "docs/choosing.md",
    "docs/choosing-a-mechanism.md",
    "docs/correlated.md",
    "docs/auditing.md",
    "docs/amplification.md",
    "docs/howto/augmentation.md",
    "docs/howto/averaging.md",
    "docs/howto/streaming.md",
    "benchmarks/README.md",
]


@pytest.fixture
def helper(monkeypatch):
    """Imports a module of the benchmarks, which are scripts and no package."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_show_the_results(helper, name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "<!-- end -->" in text
    assert helper("report").rendered(text) == text


def test_no_table_of_numbers_is_pasted(helper):
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    measured = text[text.index("## Accuracy") :]
    assert "\n| " in measured
    assert "\n| " not in helper("report").MARKED.sub("", measured)


def test_every_result_is_read_and_names_no_path(helper):
    results = helper("_results")
    paths = sorted(results.FOLDER.glob("*.json"))
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'"[^"]*/[^"]*/[^"]*"', text.replace(" / ", "")), path.name
        result = results.read(path)
        assert result["machine"]
        for table in result["tables"].values():
            assert table.markdown().count("\n") == len(table.rows) + 1


def one_line(name):
    """The text of a page without its line breaks."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def rows(helper, result, table):
    """The rows of a table of results, each from its columns' names."""
    results = helper("_results")
    found = results.read(results.FOLDER / f"{result}.json")["tables"][table]
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def test_sentences_on_convex_problems_have_the_numbers_of_the_results(helper):
    claims = {
        row["output perturbation has"]: row["rows"]
        for row in rows(helper, "erm", "claims")
    }
    lower, total = claims["less loss than noisy SGD"]
    sooner, both = claims["less time than noisy SGD"][0], claims["both"][0]
    text = one_line("benchmarks/README.md")
    said = f"lower loss on {lower} of {total} rows and the lower time on {sooner}"
    assert f"{said}, both on {both}." in text
    factors = {True: [], False: []}
    for row in rows(helper, "erm", "excess"):
        factor = row["noisy SGD"] / row["output perturbation"]
        factors[row["μ"] > 0].append(factor)
    regularised, without = factors[True], factors[False]
    assert min(regularised) > 1
    wins = sum(factor > 1 for factor in without)
    said = f"it wins all {len(regularised)} rows with a regulariser, by factors of"
    assert f"{said} {int(min(regularised))} and more, and {wins} without" in text


def test_sentences_on_digits_by_cyclic_descent_have_the_numbers_of_the_results(helper):
    measured = rows(helper, "mnist_noisy_cgd", "accuracy")
    test = {(row["λ"], row["epochs"], row["run"]): row["test"] for row in measured}
    costs = [
        test[decay, epochs, "clipped"][0] - test[decay, epochs, "bounded"][0]
        for decay, epochs, run in test
        if run == "bounded"
    ]
    said = f"costs {min(costs):.1f} to {max(costs):.1f} points of test accuracy"
    assert said in one_line("benchmarks/README.md")


def test_sentences_on_the_last_iterate_have_the_times_of_the_results(helper):
    times = rows(helper, "iteration.times", "times")
    ms = {row["call"]: row["ms"] for row in times}
    first = [row["first, s"] for row in times]
    shifts = "optimal_shift_mu, T = 1e6, c = 0.9999"
    expected = (
        f"takes {ms[shifts] / 1000:.2f} s, with a diameter "
        f"{ms['the same, with a diameter'] / 1000:.2f} s; all 1,000 places of a cycle "
        "of 1,000 batches and 1,000 epochs take "
        f"{ms['noisy_cyclic_gd_mus, all 1000 offsets']:.1f} ms, with a diameter "
        f"{ms['all offsets, with a diameter']:.0f} ms; ε of such a cycle and its "
        f"derivative take {ms['its ε and derivative by step size']:.1f} ms."
    )
    page = one_line("docs/iteration.md")
    assert expected in page
    assert 8 <= first[0] < first[2] <= 14
    assert max(*first[3:], first[1]) < 2
    for text in (page, one_line("benchmarks/README.md")):
        said = "compiles, takes 8 to 14 s for a million steps and less than 2 s for"
        assert said in text


def test_sentences_on_random_bins_have_the_times_of_the_results(helper):
    ms = {
        row["examples"]: row["ms"]
        for row in rows(helper, "overhead", "batches")
        if row["sampler"] == "random_bins_step"
    }
    expected = (
        f"a thousand examples out of a million take {ms[10**6]:.0f} ms on a CPU, and "
        f"{ms[10**9]:.0f} ms out of a billion"
    )
    assert expected in one_line("docs/plan.md")


def test_a_cell_is_shown_by_its_template(helper):
    shown = helper("_results").shown
    assert shown("{:.2f}", 1.005e-1) == "0.10"
    assert shown("{:.2f} ± {:.1f}", [1, 0.25]) == "1.00 ± 0.2"
    assert shown("{:.2f}", None) == ""
    assert shown("{:.2f}", "the same run") == "the same run"


def test_a_result_is_read_as_it_was_written(helper, tmp_path, capsys):
    results = helper("_results")
    arguments = argparse.Namespace(results=tmp_path, data=tmp_path, seeds=3)
    columns = {"δ": "{}", "ms": "{:.1f} ± {:.1f}"}
    rows = [[1e-5, [1 / 3, 2.0]], [None, None]]
    table = results.Table("times", columns, rows)
    results.write("name.part", arguments, [table], times="medians")
    result = results.read(tmp_path / "name.part.json")
    assert result["arguments"] == {"seeds": 3}
    assert {"python", "jax", "jaxlib", "optax"} == set(result["versions"])
    assert result["tables"]["times"].rows == [[1e-5, [0.33333333, 2.0]], [None, None]]
    assert result["tables"]["times"].markdown() == table.markdown()
    assert "[1e-05, [0.33333333, 2.0]]" in (tmp_path / "name.part.json").read_text()
    assert "name.part.json" in capsys.readouterr().out


def test_missing_peers_are_refused(helper):
    require = helper("_results").require
    peers = ["json", "no_such_peer"]
    with pytest.raises(SystemExit, match=r"no_such_peer.*--without-peers"):
        require(peers, without=False)
    assert require(peers, without=True) == ["json"]
    assert require(["json"], without=False) == ["json"]


class Clock:
    """A time that passes only in the functions that are timed."""

    def __init__(self):
        self.now, self.order = 0.0, []

    def takes(self, name, *seconds):
        """A function whose calls take so long, the last for ever."""
        left = list(seconds)

        def fn():
            self.order.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return fn


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_functions_take_turns_and_the_first_call_is_apart(helper, clock):
    timing = helper("_timing")
    functions = {"a": clock.takes("a", 9, 4, 1, 2), "b": clock.takes("b", 5, 3)}
    times = timing.take_turns(functions, rounds=3)
    assert "".join(clock.order) == "ab" * 4
    assert times["a"] == timing.Times(first=9, median=2, least=1, most=4, count=3)
    assert times["b"] == timing.Times(first=5, median=3, least=3, most=3, count=3)


def test_turns_last_as_long_for_fast_functions_and_end_for_slow_ones(helper, clock):
    timing = helper("_timing")
    functions = {"fast": clock.takes("f", 1), "slow": clock.takes("s", 11)}
    times = timing.take_turns(functions, rounds=2, seconds=6)
    assert "".join(clock.order) == "fs" + "fffs" + "fff"
    assert times["fast"].count == 6
    assert times["slow"] == timing.Times(11, 11, 11, 11, count=1)


def test_every_way_of_training_is_tuned_alike(helper):
    ways = helper("_train_methods").WAYS
    sizes = [(way.shapes, way.momenta, way.learning_rates) for way in ways.values()]
    assert len({tuple(map(len, size)) for size in sizes}) == 1
    results = helper("_results")
    chosen, measured = (
        {
            tuple(row[:2])
            for row in results.read(results.FOLDER / name)["tables"][t].rows
        }
        for name, t in (("tuned.json", "settings"), ("train.json", "accuracy"))
    )
    assert chosen == measured
    assert {way for way, _ in chosen} == set(ways)


def test_the_best_setting_is_that_of_the_best_mean(helper):
    way = helper("_train_methods").WAYS["DP-SGD, Poisson"]
    shape = len(way.shapes), len(way.momenta), len(way.learning_rates), 2
    found = np.zeros(shape)
    found[3, 1, 2] = 0.5, 0.7
    found[4, 0, 1] = 0.8, 0.3
    *setting, (mean, spread) = helper("tune").best(way, found)
    assert setting == [*way.shapes[3], way.momenta[1], way.learning_rates[2]]
    assert mean == pytest.approx(0.6)
    assert spread == pytest.approx(0.2 / 2**0.5)


def test_a_search_tries_all_combinations_in_order(helper):
    def score(key, noise, momentum, rate):
        return jax.random.uniform(key) + 10 * noise + 100 * momentum + 1000 * rate

    keys = jax.random.split(jax.random.key(0), 2)
    axes = [0.0, 1.0], [2.0, 3.0, 4.0], [5.0, 6.0]
    found = helper("tune").over_all(score, keys, *axes)
    assert found.shape == (2, 3, 2, 2)
    for place in np.ndindex(found.shape):
        *numbers, seed = place
        values = [axis[i] for axis, i in zip(axes, numbers, strict=True)]
        np.testing.assert_allclose(found[place], score(keys[seed], *values), rtol=1e-6)


def test_an_epsilon_that_was_not_tuned_is_refused(helper):
    train, results = helper("train"), helper("_results")
    path = results.FOLDER / "tuned.json"
    assert [row[1] for row in train.settings(path, [2.0])] == [None] + 6 * [2.0]
    with pytest.raises(SystemExit, match=r"--epsilons.*3\.0"):
        train.settings(path, [2.0, 3.0])


@pytest.fixture
def tree_design(helper):
    """The tree's design, its noise in the momentum, and what is predicted of it."""
    runs = helper("_workload_runs")
    shape, decay = runs.Shape(num_steps=37, steps_per_epoch=8), 0.9
    workload = workloads.momentum(decay)
    design = runs.of_strategy(strategies.tree(decay), shape)
    noise = runs.weights(workload, shape.num_steps) @ design.matrix
    return shape, decay, noise, runs.predicted(design, workload)


def test_the_noise_in_a_workload_is_what_the_tree_says_of_its_own(tree_design):
    shape, decay, noise, predicted = tree_design
    variance = jax.jit(prefix_variance)(np.arange(1, 38), decay)
    known = (1 - decay) ** 2 * np.asarray(variance)
    np.testing.assert_allclose((noise**2).sum(1), known, rtol=1e-5)  # in float32
    spent = momentum_mu(
        1.0, **shape._asdict(), decay=decay, order="fixed", adjacency=Adjacency.REPLACE
    )
    whole = spent * np.sqrt(np.mean(known))
    assert predicted == pytest.approx(float(whole), rel=1e-5)


def test_what_ranks_accuracies_as_they_are_has_a_correlation_of_one(helper):
    module = helper("workloads")

    def run(data, optimizer, decay, design, points, held_out):
        errors = dict.fromkeys(module.workloads_of(decay), 0.0)
        for place, name in enumerate(errors):
            errors[name] = (-1) ** place * points  # each other one is wrong
        test = 0.5 - points / 100 + np.array([0.0, 0.01, 0.02])
        numbers = 1.0, 0.25, held_out
        return module.Run(data, optimizer, 1.0, decay, design, *numbers, test, errors)

    runs = [
        run(data, optimizer, decay, design, points + worse, 0.5 - worse)
        for data in ("one", "other")
        for optimizer in module.OPTIMIZERS
        for decay, worse in ((0.98, 5), (0.9, 0))
        for points, design in enumerate(("sums", "tree", "independent"))
    ]
    for row in module.rankings(runs).rows:
        assert row[1:] == [[(-1) ** place, 0.0] for place in range(5)]
    for row in module.differences(runs).rows:
        assert dict(zip(module.NAMES, row[1:], strict=True)) == {
            **dict.fromkeys(module.NAMES),
            "tree": pytest.approx([-1, 0]),
            "independent": pytest.approx([-2, 0]),
        }
    best = module.accuracies(runs).rows[0]
    assert best[3 + module.NAMES.index("sums")] == pytest.approx([0.51, 0.01 / 3**0.5])
