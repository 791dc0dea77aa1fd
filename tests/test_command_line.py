"""The command line prints the results of the library's functions."""

import functools
import html
import json
import math
import os
import pathlib
import re
import runpy
import shlex
import statistics
import subprocess
import sys

import numpy as np
import pytest

import dpjax
from dpjax import Adjacency
from dpjax.__main__ import _COMMANDS, _SAMPLINGS, main
from dpjax._core.plain import to_plain
from dpjax._plan.mechanisms import SAMPLINGS
from dpjax._plan.parameters import Segment
from dpjax.accounting import gdp

ROOT = pathlib.Path(__file__).parent.parent
RUN = "--num-examples 1000 --batch-size 300 --delta 1e-5 "
FIXED = RUN + "--sampling fixed --adjacency replace "
SETTING = {
    "num_examples": 1000,
    "batch_size": 300,
    "delta": 1e-5,
    "clip_norm": 0.7,
    "sampling": "fixed",
    "adjacency": Adjacency.REPLACE,
}


@pytest.fixture
def run_command(capsys):
    """Function that runs a command, asserts success and returns its output."""

    def run_line(line):
        assert main(shlex.split(line)) == 0
        out, error = capsys.readouterr()
        assert error == ""
        return out

    return run_line


@pytest.fixture
def run_failing_command(capsys):
    """Function that runs a failing command and returns its one-line error message."""

    def run_failing_line(line):
        try:
            code = main(shlex.split(line))
        except SystemExit as exit_:
            code = exit_.code
        out, error = capsys.readouterr()
        assert (code, out) == (2, "")
        assert error.count("\n") == 1
        return error

    return run_failing_line


def test_epsilon_command_matches_composition(run_command):
    result = json.loads(
        run_command(f"epsilon {FIXED} --noise-multiplier 4 --num-epochs 9 --json")
    )
    assert result["num_steps"] == 9 * 4
    assert result["mu"] == pytest.approx(2 * math.sqrt(9) / 4, rel=1e-6)
    assert result["epsilon"] == pytest.approx(float(gdp.epsilon(1.5, 1e-5)), rel=1e-6)
    steps = f"epsilon {FIXED} --noise-multiplier 4 --num-steps 36 --json"
    assert json.loads(run_command(steps)) == result
    plan = dpjax.plan(**SETTING, noise_multiplier=4.0, num_steps=36)
    assert result["epsilon"] == plan.epsilon


def test_epsilon_of_poisson_sampling_matches_dp_accounting(run_command):
    # dp-accounting 0.4.4 gives 1.8282 (benchmarks/README.md).
    result = run_command(
        "epsilon --num-examples 10000 --batch-size 100 --num-steps 1000 --delta 1e-5 "
        "--noise-multiplier 1.0 --sampling poisson --json"
    )
    result = json.loads(result)
    assert result["epsilon"] == pytest.approx(1.8282, abs=1e-3)
    assert result["max_batch_size"] == 10_000
    assert result["adjacency"] == "ADD_REMOVE"
    assert result["mu"] is None


@pytest.fixture
def noise_by_json_table_and_function(run_command):
    """The noise as JSON, as a table, and from `dpjax.plan`."""
    line = f"noise {FIXED} --epsilon 2 --num-steps 36"
    plan = dpjax.plan(**SETTING, epsilon=2.0, num_steps=36)
    return run_command(line + " --json"), run_command(line), plan


def test_printed_noise_multiplier_is_rounded_up(
    run_command, noise_by_json_table_and_function
):
    as_json, table, plan = noise_by_json_table_and_function
    exact = json.loads(as_json)["noise_multiplier"]
    assert exact == plan.noise_multiplier
    name, printed, *_ = table.split()
    assert name == "noise_multiplier"
    printed = float(printed.rstrip(","))
    assert exact <= printed <= exact + 2e-6
    again = f"epsilon {FIXED} --noise-multiplier {printed} --num-steps 36 --json"
    assert json.loads(run_command(again))["epsilon"] <= 2.0


def test_printed_epsilon_is_rounded_up(run_command):
    lines = run_command(
        f"epsilon {FIXED} --noise-multiplier 4 --num-steps 36"
    ).splitlines()
    rows = dict(line.split(maxsplit=1) for line in lines[: lines.index("")])
    epsilon = float(gdp.epsilon(1.5, 1e-5))
    assert epsilon <= float(rows["epsilon"].split()[0]) <= epsilon + 1e-4
    assert rows["sampling"].startswith("fixed: batches of 300 ")
    assert rows["adjacency"] == "replace: one example is replaced by another one"
    assert "0.001 / 0.01 / 0.1" in rows["attacks"]
    assert lines[-1].startswith(
        "The statement holds where each example's gradient is clipped"
    )


@pytest.fixture
def plan_by_json_table_and_function(run_command, given, solved):
    """The plan as JSON, as a table, and from `dpjax.plan`."""
    rest = "--num-examples 1000 --delta 1e-5 --sampling fixed --adjacency replace"
    line = f"plan {given} {rest} --clip-norm 0.7"
    numbers = {"batch_size": 300, "num_steps": 36, "noise_multiplier": 9.0}
    numbers |= {"epsilon": 2.0, "noise_multiplier": 4.0 if solved == "epsilon" else 9.0}
    plan = dpjax.plan(**{**SETTING, **numbers, solved: None})
    return run_command(line + " --json"), run_command(line), plan


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("given", "solved"),
    [
        ("--batch-size 300 --num-steps 36 --epsilon 2", "noise_multiplier"),
        ("--batch-size 300 --noise-multiplier 9 --epsilon 2", "num_steps"),
        ("--num-steps 36 --noise-multiplier 9 --epsilon 2", "batch_size"),
        ("--batch-size 300 --num-epochs 9 --noise-multiplier 4", "epsilon"),
    ],
)
def test_plan_command_prints_the_plan_guarantee(
    plan_by_json_table_and_function, given, solved
):
    as_json, table, plan = plan_by_json_table_and_function
    assert as_json == plan.guarantee.to_json() + "\n"
    assert table.split()[0] == solved


# --- report


def two_level_schedule(step):
    return np.where(np.asarray(step) < 7, 2.0, 0.3)


KINDS = {
    "fixed": {},
    "users": {"unit": "user"},
    "varying": {
        "noise_schedule": two_level_schedule,
        "clip_schedule": lambda t: 1.0 / (1 + np.asarray(t)),
    },
    "unvaried": {"noise_schedule": lambda t: 1.0},
    "quantile": {"clip_norm": dpjax.QuantileClip(0.1)},
    "counted": {
        "clip_norm": dpjax.QuantileClip(0.1, noise_multiplier=3.0),
        "noise_schedule": two_level_schedule,
    },
    "nothing": {"noise_multiplier": 1e-200},
}


@functools.cache
def make_plan(kind):
    """A plan whose record is of this kind."""
    fixed = {**SETTING, "num_steps": 36, "noise_multiplier": 4.0}
    return dpjax.plan(**fixed | KINDS[kind])


@pytest.fixture
def write_record(tmp_path):
    """Function that writes a changed record and returns the command to report it.

    Changes of "plan" are changes of its fields.
    """

    def write(guarantee, **changed):
        path = tmp_path / "guarantee.json"
        record = json.loads(guarantee.to_json())
        of_plan = record["plan"] | changed.pop("plan", {})
        record |= {"plan": of_plan} | changed
        path.write_text(json.dumps(record), "utf-8")
        return f"report {shlex.quote(str(path))}"

    return write


@pytest.fixture
def report_text(run_command, write_record, kind, steps):
    return run_command(write_record(make_plan(kind).guarantee.at(steps)))


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", ["fixed", "users", "varying", "unvaried", "nothing"])
@pytest.mark.parametrize("steps", [36, 9])
def test_report_equals_the_guarantee_statement(report_text, kind, steps):
    assert report_text.startswith(str(make_plan(kind).guarantee.at(steps)))
    assert "computed again" in report_text


@pytest.mark.parametrize(
    "kind", ["quantile", pytest.param("counted", marks=pytest.mark.matrix)]
)
def test_quantile_clip_norm_is_reported(run_command, write_record, kind):
    guarantee = make_plan(kind).guarantee
    result = run_command(write_record(guarantee) + " --json")
    epsilon = float(guarantee.epsilon(1e-5))
    assert json.loads(result)["epsilon"] == pytest.approx(epsilon, rel=1e-6)
    assert "follows a noisy count" in json.loads(result)["statement"]
    follows = guarantee.record()["clip_norm_follows"]
    line = write_record(guarantee, clip_norm_follows=follows)
    assert run_command(line + " --json") == result


POISSON = {
    "num_examples": 1000,
    "batch_size": 100,
    "num_steps": 100,
    "max_batch_size": 180,
    "noise_multiplier": 1.5,
    "delta": 1e-5,
    "clip_norm": 1.0,
}


@pytest.mark.slow
def test_poisson_run_is_reported(run_command, write_record):
    plan = dpjax.plan(**POISSON)
    assert run_command(write_record(plan.guarantee)).startswith(str(plan.guarantee))


@pytest.mark.slow
def test_poisson_run_with_growing_batches_is_reported(
    run_command, write_record, compiled
):
    plan = dpjax.plan(**POISSON, batch_schedule=lambda t: 0.5 if t < 50 else 1.0)
    assert run_command(write_record(plan.guarantee)).startswith(str(plan.guarantee))


def test_correlated_noise_is_reported(run_command, tmp_path):
    path = tmp_path / "guarantee.json"
    tree = dpjax.plan(
        **SETTING,
        noise_multiplier=3.0,
        num_steps=24,
        noise="correlated",
        strategy=dpjax.strategies.tree(0.9),
    )
    path.write_text(tree.guarantee.at(9).to_json())
    assert str(tree.guarantee.at(9)).rpartition("\n")[0] in run_command(
        f"report {path}"
    )
    record = json.loads(path.read_text())
    record["plan"]["shape"]["numerator"] = [None]
    path.write_text(json.dumps(record))
    assert main(["report", str(path)]) == 2


@pytest.mark.slow  # a strategy and its noise are searched for
@pytest.mark.parametrize("noise", ["correlated", "auto"])
def test_correlated_noise_is_planned_compared_and_reported(
    run_command, tmp_path, noise
):
    line = f"plan {FIXED} --clip-norm 0.7 --epsilon 2 --num-steps 24 --momentum 0.9 "
    run = dpjax.plan(
        **SETTING,
        epsilon=2.0,
        num_steps=24,
        noise=noise,
        workload=dpjax.workloads.momentum_sum(0.9),
    )
    result = run_command(f"{line} --noise {noise}")
    assert str(run.shape) in result
    assert (str(run.comparison) in result) is (noise == "auto")
    assert "noise that is correlated as stated" in result
    path = tmp_path / "guarantee.json"
    path.write_text(run_command(f"{line} --noise {noise} --json"))
    assert run_command(f"report {path}").startswith(
        str(run.guarantee).rpartition("\n")[0]
    )


def test_report_plots_at_or_above_the_true_positive_rates(
    run_command, write_record, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # it is not needed
    text = run_command(write_record(make_plan("fixed").guarantee))
    rows = [row[5:] for row in text.splitlines() if re.match(r"(...) \|", row)]
    (width,) = (line.count("-") for line in text.splitlines() if line[4:6] == "+-")
    normal, mu = statistics.NormalDist(), make_plan("fixed").guarantee.mu
    for column in range(1, width - 1):
        top = next(i for i, row in enumerate(rows) if row[column : column + 1] == "*")
        rate = normal.cdf(normal.inv_cdf(column / (width - 1)) + mu)
        unit = 1 / (len(rows) - 1)
        assert 0 <= 1 - top * unit - rate < unit + 1e-6


def test_report_page_has_all_parts_and_loads_nothing(run_command, write_record):
    guarantee = make_plan("fixed").guarantee
    versions = {"dpjax": "<script>", "jax": "0.9"}
    page = run_command(write_record(guarantee, versions=versions) + " --html")
    assert not re.search(r"<script|<link|src=|href=|url\(|@import", page)
    assert page.count("&lt;script&gt;") == 1
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    *lines, _ = str(guarantee).splitlines()
    assert all(line in text for line in lines)
    assert guarantee.citations() in text
    for steps in (9, 18, 27, 36):
        cost = math.ceil(1000 * float(guarantee.at(steps).epsilon(1e-5))) / 1000
        assert f"<tr><td>{steps}</td><td>{steps / 36:.0%}</td><td>{cost:.3f}<" in page
    points = re.search(r'points="([^"]+)"', page)[1].split()
    normal = statistics.NormalDist()
    for x, y in [map(float, point.split(",")) for point in points][1:-1]:
        rate, missed = (x - 60) / 300, (310 - y) / 300
        if 0.01 < rate < 0.99:
            # A tenth of a pixel of each coordinate, where the slope is at most 20.
            expected = normal.cdf(normal.inv_cdf(1 - rate) - guarantee.mu)
            assert abs(missed - expected) < 21 * 0.05 / 300


def test_report_shows_the_versions_of_the_record(run_command, write_record):
    versions = {"dpjax": "0.0.7", "jax": "0.9"}
    result = run_command(write_record(make_plan("fixed").guarantee, versions=versions))
    assert "\ndpjax 0.0.7, jax 0.9.\n" in result


def test_report_recomputes_an_epsilon_that_is_too_large(run_command, write_record):
    guarantee = make_plan("fixed").guarantee
    assert run_command(write_record(guarantee, epsilon=1000.0)).startswith(
        str(guarantee)
    )


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"epsilon": 5.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"epsilon": "small"}, "epsilon"),
        ({"delta": 1e-6}, "delta"),
        ({"mu": 1.4}, "mu"),
        ({"event": {"type": "Gaussian", "mu": 1.4}}, "event"),
        ({"event": {"type": "Gaussian", "mu": math.nan}}, "event"),
        ({"event": {"type": "EpsilonDelta", "epsilon": 9.0, "delta": 0.1}}, "event"),
        ({"event": None}, "event"),
        ({"plan": {"noise_multiplier": 3.9}}, "event"),
        ({"plan": {"num_steps": 37}, "num_steps": 37}, "event"),
        ({"plan": {"batch_size": 334}}, "event"),
        ({"plan": {"delta": 1e-6}}, "epsilon"),
        pytest.param(
            {"plan": {"sampling": "fixed_size"}}, "event", marks=pytest.mark.matrix
        ),
        ({"attack_true_positive_rate_at_most": {"0.01": 0.02}}, "0.01"),
        ({"attack_true_positive_rate_at_most": {"0.5": 0.5}}, "0.5"),
        ({"attack_true_positive_rate_at_most": None}, "attack_true_positive_rate"),
        ({"plan": {"noise": "none at all"}}, "noise"),
        ({"plan": {"adjacency": "add_remove"}}, "adjacency"),
        ({"plan": {"adjacency": "ADD_REMOVE"}}, "adjacency"),
        ({"plan": {"sampling": "magic"}}, "sampling"),
        ({"plan": {"unit": "pixel"}}, "unit"),
        ({"plan": {"num_steps": 36.5}}, "num_steps"),
        ({"plan": {"num_steps": True}}, "num_steps"),
        ({"plan": {"num_steps": 0}}, "num_steps"),
        ({"plan": {"batch_size": 0}}, "batch_size"),
        ({"plan": {"noise_multiplier": -4.0}}, "noise_multiplier"),
        ({"plan": {"schedule": [{"start": 3}]}}, "schedule"),
        ({"plan": {"color": "red"}}, "plan"),
        ({"num_steps": 36.5}, "num_steps"),
        ({"num_steps": 37}, "num_steps"),
        ({"num_steps": 0}, "num_steps"),
        ({"versions": {"dpjax": "1"}}, "jax"),
        ({"versions": []}, "versions"),
    ],
)
def test_changed_record_fails(run_failing_command, write_record, changed, name):
    error = run_failing_command(write_record(make_plan("fixed").guarantee, **changed))
    assert name in error


@pytest.fixture
def schedule_error(run_failing_command, write_record, pieces):
    schedule = to_plain([Segment(*piece) for piece in pieces])
    return run_failing_command(
        write_record(make_plan("fixed").guarantee, plan={"schedule": schedule})
    )


@pytest.mark.parametrize(
    "pieces",
    [
        [(1, 2.0, 1.0, 300)],
        [(0, 2.0, 1.0, 300), (0, 1.0, 1.0, 300)],
        [(0, 2.0, 1.0, 300), (9, 1.0, 1.0, 300), (5, 2.0, 1.0, 300)],
        [(0, 1.0, 1.0, 300), (5, 1.0, 1.0, 300)],
        [(0, 2.0, 1.0, 300), (5, 2.0, 1.0, 300)],
        [(0, 2.0, 1.0, 200)],
        [(0, 1.0 + 2.0**-40, 1.0, 300)],
        [(0, -2.0, 1.0, 300)],
    ],
)
def test_invalid_schedule_in_record_fails(schedule_error, pieces):
    assert "schedule" in schedule_error


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_other_noise_for_quantile_clipping_than_planned_fails(
    run_failing_command, write_record, factor
):
    guarantee = make_plan("quantile").guarantee
    follows = guarantee.record()["clip_norm_follows"]
    follows["noise_multiplier_of_gradients"] *= factor
    error = run_failing_command(write_record(guarantee, clip_norm_follows=follows))
    assert "noise_multiplier_of_gradients" in error


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", "must contain JSON", "\xff\xfe"])
def test_file_without_a_record_fails(run_failing_command, tmp_path, text):
    path = tmp_path / "other.json"
    path.write_bytes(text.encode("latin-1"))
    assert "other.json" in run_failing_command(f"report {shlex.quote(str(path))}")
    assert "nowhere.json" in run_failing_command("report nowhere.json")


# --- mistakes, help, the process


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("", "command"),
        ("privacy", "privacy"),
        (f"epsilon {FIXED} --num-steps 3", "--noise-multiplier"),
        (f"epsilon {FIXED} --noise-multiplier 1", "--num-steps"),
        (f"epsilon {RUN} --noise-multiplier 1 --num-steps 3", "--sampling"),
        (f"epsilon {FIXED} --noise-multiplier x --num-steps 3", "--noise-multiplier"),
        (f"epsilon {FIXED} --noise-multiplier 0 --num-steps 3", "noise_multiplier"),
        (f"epsilon {FIXED} --noise-multiplier 1 --num-steps 0", "num_steps"),
        (f"epsilon {FIXED} --noise-multiplier 1 --num-epochs 0", "--num-epochs"),
        (f"epsilon {FIXED} --noise 1 --num-steps 3", "--noise"),
        (
            f"epsilon {FIXED} --noise-multiplier 1 --num-steps 3 --num-epochs 3",
            "--num-epochs",
        ),
        (
            f"epsilon {FIXED} --noise-multiplier 1 --num-steps 3 --max-batch-size 400",
            "max_batch_size",
        ),
        (
            f"epsilon {RUN} --sampling fixed --noise-multiplier 1 --num-steps 3",
            "adjacency must be zero_out or replace with sampling 'fixed', because the ",
        ),
        (f"noise {FIXED} --epsilon -1 --num-steps 3", "epsilon"),
        (
            f"plan {FIXED} --clip-norm 1 --epsilon 1 --num-steps 3 --noise auto",
            "--momentum",
        ),
        (
            f"plan {FIXED} --clip-norm 1 --epsilon 1 --num-steps 3 --momentum 0.5",
            "--momentum",
        ),
        (f"plan {FIXED} --clip-norm 1 --epsilon 1", "--noise-multiplier, --num-steps"),
        (
            f"plan {FIXED} --clip-norm 1 --epsilon 1 --num-steps 3 "
            "--noise-multiplier 2",
            "left out: none",
        ),
        (
            "plan --num-examples 9 --delta 0.1 --sampling fixed --adjacency replace "
            "--clip-norm 1 --epsilon 1 --num-epochs 3 --noise-multiplier 2",
            "--batch-size",
        ),
    ],
)
def test_invalid_option_prints_one_line_naming_it(run_failing_command, line, name):
    assert name in run_failing_command(line)


@pytest.mark.parametrize("command", ["epsilon", "noise", "plan", "report"])
def test_help_has_an_example(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"example:\n  python -m dpjax {command} " in out


@pytest.mark.slow
@pytest.mark.parametrize("command", ["epsilon", "noise", "plan"])
def test_help_examples_run(run_command, command):
    *_, example = _COMMANDS[command]
    assert run_command(f"{command} {' '.join(example)}")


@pytest.mark.whole
def test_page_shows_the_printed_output(
    run_command, write_record, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/command-line.md").read_text("utf-8")
    *shown, last = (part.split("```")[0] for part in page.split("```console\n")[1:])
    assert len(shown) == 2
    for block in shown:
        command, printed = block.split("\n", 1)
        assert run_command(command.removeprefix("$ python -m dpjax ")) == printed
    record, report = (
        line.removeprefix("$ python -m dpjax ") for line in last.splitlines()
    )
    line, file = record.split(" > ")
    (tmp_path / file).write_text(run_command(line), "utf-8")
    assert run_command(report).startswith(
        "(5.551, 1e-06)-differential privacy (1.1181-GDP)"
    )


def test_package_main_module_runs_the_command(capsys, monkeypatch):
    line = f"epsilon {FIXED} --noise-multiplier 4 --num-steps 36 --json"
    monkeypatch.setattr(sys, "argv", ["dpjax", *shlex.split(line)])
    # A new process has not imported the module yet.
    monkeypatch.delitem(sys.modules, "dpjax.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("dpjax", run_name="__main__")
    assert not ended.value.code
    result = json.loads(capsys.readouterr().out)
    assert result["epsilon"] == make_plan("fixed").epsilon


@pytest.mark.whole
def test_command_runs_with_python_m():
    line = f"-m dpjax epsilon {FIXED} --noise-multiplier 4 --num-steps 36 --json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, *shlex.split(line)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    epsilon = dpjax.plan(**SETTING, noise_multiplier=4.0, num_steps=36).epsilon
    assert json.loads(result.stdout)["epsilon"] == epsilon
    assert result.stderr == ""


def test_every_sampling_is_a_command_line_option():
    assert tuple(SAMPLINGS) == _SAMPLINGS
