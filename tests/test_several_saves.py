"""A run saved by several processes resumes bit for bit on any number of them."""

import shutil

import jax
import pytest
from several_saves import run_processes, train

from dpjax import checkpoint, ledger


@pytest.mark.slow
def test_runs_saved_by_several_processes_resume_bit_for_bit(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    key = jax.random.key(5)
    _, run = train(one, key)  # never interrupted, by this process
    expected = checkpoint.digest(run.params)
    assert checkpoint.steps(one / "run") == (0, 2, 4, 6)

    # One of two is killed in the middle of a save, and then the other.
    run_processes(2, two, dies_at=4)
    assert any("tmp" in x.name for x in (two / "run/4.unfinished").iterdir())
    assert checkpoint.steps(two / "run") == (0, 2)
    alone = shutil.copytree(two, tmp_path / "alone")
    run_processes(2, two)
    assert {(two / f"2-{i}").read_text() for i in range(2)} == {expected}
    assert checkpoint.steps(two / "run") == (0, 2, 4, 6)

    # One process resumes the run of two, and four that of one.
    _, run = train(alone, key)
    assert checkpoint.digest(run.params) == expected
    four = tmp_path / "four"
    for step in (0, 2, 4):
        shutil.copytree(one / f"run/{step}", four / f"run/{step}")
    run_processes(4, four)
    assert {(four / f"4-{i}").read_text() for i in range(4)} == {expected}

    for folder in (one, two, alone, four):
        entries = ledger.read(folder / "ledger").entries
        assert [x.stop for x in entries] == ([4, 6] if folder == four else [2, 4, 6])
        assert entries[-1].released == expected
