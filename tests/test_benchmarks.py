"""Benchmarks: documents show the results, and the timer and tables are correct.

Nothing is measured here, but the script for accelerators is rehearsed.
"""

import argparse
import importlib
import pathlib
import re
import subprocess
import sys
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
]


@pytest.fixture
def import_benchmark(monkeypatch):
    """Function that imports a module of the benchmarks, which are not a package."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_show_the_results(import_benchmark, name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "<!-- end -->" in text
    assert import_benchmark("report").rendered(text) == text


def test_benchmark_page_has_no_hand_written_tables(import_benchmark):
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    measured = text[text.index("## Accuracy") :]
    assert "\n| " in measured
    assert "\n| " not in import_benchmark("report").MARKED.sub("", measured)


def test_every_result_loads_and_contains_no_path(import_benchmark):
    results = import_benchmark("_results")
    paths = sorted(results.FOLDER.glob("*.json"))
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'"[^"]*/[^"]*/[^"]*"', text.replace(" / ", "")), path.name
        result = results.read(path)
        assert result["machine"]
        for table in result["tables"].values():
            assert table.markdown().count("\n") == len(table.rows) + 1


def read_as_one_line(name):
    """The text of a page without its line breaks."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def table_rows(helper, result, table):
    """The rows of a table of results, as dicts keyed by column name."""
    results = helper("_results")
    actual = results.read(results.FOLDER / f"{result}.json")["tables"][table]
    return [dict(zip(actual.columns, row, strict=True)) for row in actual.rows]


def test_convex_problem_sentences_match_the_results(import_benchmark):
    claims = {
        row["output perturbation has"]: row["rows"]
        for row in table_rows(import_benchmark, "erm", "claims")
    }
    lower, total = claims["less loss than noisy SGD"]
    sooner, both = claims["less time than noisy SGD"][0], claims["both"][0]
    text = read_as_one_line("benchmarks/README.md")
    sentence = f"lower loss on {lower} of {total} rows, the lower time on {sooner} rows"
    assert f"{sentence}, and both on {both} rows." in text
    factors = {True: [], False: []}
    for row in table_rows(import_benchmark, "erm", "excess"):
        factor = row["noisy SGD"] / row["output perturbation"]
        factors[row["μ"] > 0].append(factor)
    regularised, without = factors[True], factors[False]
    assert min(regularised) > 1
    wins = sum(factor > 1 for factor in without)
    sentence = f"it wins all {len(regularised)} rows with a regulariser, by factors of"
    assert f"{sentence} {int(min(regularised))} and more, and {wins} without" in text


def test_digits_by_cyclic_descent_sentences_match_the_results(import_benchmark):
    measured = table_rows(import_benchmark, "mnist_noisy_cgd", "accuracy")
    test = {(row["λ"], row["epochs"], row["run"]): row["test"] for row in measured}
    costs = [
        test[decay, epochs, "clipped"][0] - test[decay, epochs, "bounded"][0]
        for decay, epochs, run in test
        if run == "bounded"
    ]
    sentence = f"costs {min(costs):.1f} to {max(costs):.1f} points of test accuracy"
    assert sentence in read_as_one_line("benchmarks/README.md")


def test_last_iterate_sentences_match_the_times(import_benchmark):
    times = table_rows(import_benchmark, "iteration.times", "times")
    ms = {row["call"]: row["ms"] for row in times}
    first = [row["first, s"] for row in times]
    shifts = "optimal_shift_mu, T = 1e6, c = 0.9999"
    expected = (
        f"takes {ms[shifts] / 1000:.2f} s without a diameter and "
        f"{ms['the same, with a diameter'] / 1000:.2f} s with a diameter. For 1,000 "
        "epochs of 1,000 batches, `noisy_cyclic_gd_mus` takes "
        f"{ms['noisy_cyclic_gd_mus, all 1000 offsets']:.1f} ms without a diameter and "
        f"{ms['all offsets, with a diameter']:.0f} ms with a diameter to compute the μ "
        "of an example at each of the 1,000 positions of the cycle. For the same run "
        "without a diameter, the derivative of ε by the step size takes "
        f"{ms['derivative of its ε by step size']:.1f} ms."
    )
    page = read_as_one_line("docs/iteration.md")
    assert expected in page
    assert max(first) < 1.5
    for text in (page, read_as_one_line("benchmarks/README.md")):
        assert re.search(r"compiles[^.]*, takes less than 1\.5 s", text)


def test_random_bins_sentences_match_the_times(import_benchmark):
    ms = {
        row["examples"]: row["ms"]
        for row in table_rows(import_benchmark, "overhead", "batches")
        if row["sampler"] == "random_bins_step"
    }
    expected = (
        f"To draw a thousand examples out of a million takes {ms[10**6]:.0f} ms on a "
        f"CPU, and out of a billion {ms[10**9]:.0f} ms"
    )
    assert expected in read_as_one_line("docs/plan.md")


def test_table_cell_is_formatted_by_its_template(import_benchmark):
    shown = import_benchmark("_results").shown
    assert shown("{:.2f}", 1.005e-1) == "0.10"
    assert shown("{:.2f} ± {:.1f}", [1, 0.25]) == "1.00 ± 0.2"
    assert shown("{:.2f}", None) == ""
    assert shown("{:.2f}", "the same run") == "the same run"


def test_result_round_trips_through_file(import_benchmark, tmp_path, capsys):
    results = import_benchmark("_results")
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


def test_missing_peer_libraries_raise(import_benchmark):
    require = import_benchmark("_results").require
    peers = ["json", "no_such_peer"]
    with pytest.raises(SystemExit, match=r"no_such_peer.*--without-peers"):
        require(peers, without=False)
    assert require(peers, without=True) == ["json"]
    assert require(["json"], without=False) == ["json"]


class Clock:
    """A fake clock that advances only inside the timed functions."""

    def __init__(self):
        self.now, self.order = 0.0, []

    def timed_function(self, name, *seconds):
        """A function whose calls take these times in turn, the last one repeated."""
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


def test_timed_functions_alternate_and_first_calls_are_separate(
    import_benchmark, clock
):
    timing = import_benchmark("_timing")
    functions = {
        "a": clock.timed_function("a", 9, 4, 1, 2),
        "b": clock.timed_function("b", 5, 3),
    }
    times = timing.take_turns(functions, rounds=3)
    assert "".join(clock.order) == "ab" * 4
    assert times["a"] == timing.Times(first=9, median=2, least=1, most=4, count=3)
    assert times["b"] == timing.Times(first=5, median=3, least=3, most=3, count=3)


def test_timing_rounds_repeat_fast_functions_and_stop_slow_ones(
    import_benchmark, clock
):
    timing = import_benchmark("_timing")
    functions = {
        "fast": clock.timed_function("f", 1),
        "slow": clock.timed_function("s", 11),
    }
    times = timing.take_turns(functions, rounds=2, seconds=6)
    assert "".join(clock.order) == "fs" + "fffs" + "fff"
    assert times["fast"].count == 6
    assert times["slow"] == timing.Times(11, 11, 11, 11, count=1)


def test_compiled_function_takes_the_memory_of_donated_arguments(import_benchmark):
    x = np.ones(5, np.float32)
    for donated, aliased in (((), 0), ((0,), x.nbytes)):
        program, seconds = import_benchmark("_timing").compiled(
            lambda x, y: x + y, x, x, donated=donated
        )
        assert program.memory_analysis().alias_size_in_bytes == aliased
        assert seconds > 0


def test_every_training_method_is_tuned_over_equally_many_settings(import_benchmark):
    ways = import_benchmark("_train_methods").WAYS
    sizes = [(way.shapes, way.momenta, way.learning_rates) for way in ways.values()]
    assert len({tuple(map(len, size)) for size in sizes}) == 1
    results = import_benchmark("_results")
    chosen, measured = (
        {
            tuple(row[:2])
            for row in results.read(results.FOLDER / name)["tables"][t].rows
        }
        for name, t in (("tuned.json", "settings"), ("train.json", "accuracy"))
    )
    recipe = import_benchmark("train").RECIPE  # chosen by no search
    assert chosen == {row for row in measured if row[0] != recipe}
    assert {way for way, _ in chosen} == set(ways)


def test_best_setting_has_the_best_mean_over_seeds(import_benchmark):
    way = import_benchmark("_train_methods").WAYS["DP-SGD, Poisson"]
    shape = len(way.shapes), len(way.momenta), len(way.learning_rates), 2
    result = np.zeros(shape)
    result[3, 1, 2] = 0.5, 0.7
    result[4, 0, 1] = 0.8, 0.3
    *setting, (mean, spread) = import_benchmark("tune").best(way, result)
    assert setting == [*way.shapes[3], way.momenta[1], way.learning_rates[2]]
    assert mean == pytest.approx(0.6)
    assert spread == pytest.approx(0.2 / 2**0.5)


def test_grid_search_covers_all_combinations_in_order(import_benchmark):
    def score(key, noise, momentum, rate):
        return jax.random.uniform(key) + 10 * noise + 100 * momentum + 1000 * rate

    keys = jax.random.split(jax.random.key(0), 2)
    axes = [0.0, 1.0], [2.0, 3.0, 4.0], [5.0, 6.0]
    result = import_benchmark("tune").over_all(score, keys, *axes)
    assert result.shape == (2, 3, 2, 2)
    for place in np.ndindex(result.shape):
        *numbers, seed = place
        values = [axis[i] for axis, i in zip(axes, numbers, strict=True)]
        np.testing.assert_allclose(result[place], score(keys[seed], *values), rtol=1e-6)


def test_epsilon_without_tuning_raises(import_benchmark):
    train, results = import_benchmark("train"), import_benchmark("_results")
    path = results.FOLDER / "tuned.json"
    assert [row[1] for row in train.settings(path, [2.0])] == [None] + 6 * [2.0]
    with pytest.raises(SystemExit, match=r"--epsilons.*3\.0"):
        train.settings(path, [2.0, 3.0])


@pytest.fixture
def tree_design(import_benchmark):
    """The tree's shape and decay, its noise in the momentum, the predicted error."""
    runs = import_benchmark("_workload_runs")
    shape, decay = runs.Shape(num_steps=37, steps_per_epoch=8), 0.9
    workload = workloads.momentum(decay)
    design = runs.of_strategy(strategies.tree(decay), shape)
    noise = runs.weights(workload, shape.num_steps) @ design.matrix
    return shape, decay, noise, runs.predicted(design, workload)


def test_workload_noise_of_a_tree_matches_its_closed_form(tree_design):
    shape, decay, noise, predicted = tree_design
    variance = jax.jit(prefix_variance)(np.arange(1, 38), decay)
    known = (1 - decay) ** 2 * np.asarray(variance)
    np.testing.assert_allclose((noise**2).sum(1), known, rtol=1e-5)  # in float32
    spent = momentum_mu(
        1.0, **shape._asdict(), decay=decay, order="fixed", adjacency=Adjacency.REPLACE
    )
    whole = spent * np.sqrt(np.mean(known))
    assert predicted == pytest.approx(float(whole), rel=1e-5)


def test_perfectly_ranking_workload_has_rank_correlation_one(import_benchmark):
    module = import_benchmark("workloads")

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


@pytest.fixture
def run_gpu(import_benchmark, monkeypatch):
    """Function that calls the script for accelerators with arguments."""

    def run(*given):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, given)])
        with jax.numpy_rank_promotion("allow"):
            import_benchmark("gpu").main()

    return run


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["mlp"], "JAX found no accelerator"),
        (["mlp", "resnet"], "unknown: resnet"),
        (["mlp", "--small", "--rounds", "9"], "--rounds must be at least 10, not 9"),
    ],
)
@pytest.mark.skipif(
    jax.default_backend() != "cpu",
    reason="the script runs here: this machine has an accelerator",
)
def test_script_for_accelerators_refuses(run_gpu, capsys, given, message):
    with pytest.raises(SystemExit, match="2"):
        run_gpu(*given)
    assert message in capsys.readouterr().err


def test_failing_part_leaves_the_others(run_gpu, import_benchmark, monkeypatch):
    called = []

    def run(command):
        called.append(command[2:])
        return argparse.Namespace(returncode=-9 if command[2] == "cnn" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match="failed: cnn"):
        run_gpu("--small", "--results", "folder")
    given = ["--results", "folder", "--rounds", "20", "--small"]
    assert called == [[part, *given] for part in import_benchmark("gpu").PARTS]
    called.clear()
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda c: argparse.Namespace(returncode=called.append(c) or 2),
    )
    with pytest.raises(SystemExit, match="2"):
        run_gpu()
    assert len(called) == 1


@pytest.mark.parametrize(
    ("part", "table", "count"),
    [
        pytest.param("mlp", "steps", 2, marks=pytest.mark.matrix),
        pytest.param("cnn", "steps", 2, marks=pytest.mark.slow),
        pytest.param("wide_resnet", "steps", 2, marks=pytest.mark.slow),
        pytest.param("gpt2_256", "steps", 2, marks=pytest.mark.slow),
        pytest.param("lora_1024", "steps", 2, marks=pytest.mark.slow),
        pytest.param("noise_6", "noise", 7, marks=pytest.mark.matrix),
        pytest.param("accountants", "accountants", 3, marks=pytest.mark.slow),
    ],
)
def test_rehearsal_on_cpu_writes_a_result(
    run_gpu, import_benchmark, tmp_path, monkeypatch, part, table, count
):
    run_gpu(part, "--small", "--rounds", 10, "--results", tmp_path)
    results, report = import_benchmark("_results"), import_benchmark("report")
    result = results.read(tmp_path / f"gpu.{part}.json")
    assert result["arguments"]["small"] is True
    assert len(result["tables"]["device"].rows) == 1
    actual = result["tables"][table]
    rows = [dict(zip(actual.columns, row, strict=True)) for row in actual.rows]
    assert len(rows) == count
    for row in rows:
        assert 0 < row["least"] <= row["ms"] <= row["most"]
        assert row["calls"] == 10
    if table == "steps":
        plain, private = rows
        assert plain["throughput over plain"] == 1
        ratio = plain["ms"] / private["ms"]
        assert private["throughput over plain"] == pytest.approx(ratio, rel=1e-6)
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    assert report.shown("gpu", table) == actual.markdown()
    assert report.shown("gpu", "setting").startswith("python ")


def test_page_says_when_a_result_is_missing(import_benchmark, tmp_path, monkeypatch):
    report = import_benchmark("report")
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    for what in ("setting", "steps", "noise", "accountants"):
        assert report.shown("gpu", what) == report.UNMEASURED
