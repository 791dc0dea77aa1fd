"""Benchmarks: documents are what the results say, and the timer and tables are right.

Nothing is measured here.
"""

import argparse
import importlib
import pathlib
import re
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = ["README.md", "benchmarks/README.md"]


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
