"""Each example trains, and a few lines away from it the private one does."""

import difflib
import functools
import importlib.util
import inspect
import itertools
import pathlib
import re

import jax
import numpy as np
import optax
import pytest

import dpjax
from dpjax._plan.guarantee import RunGuarantee

ROOT = pathlib.Path(__file__).parent.parent
# The lines that are added or changed. Where a model has dropout, one is its key.
ADDED = {"nnx": 8, "linen": 8, "haiku": 8, "keras": 8, "equinox": 7, "optax": 7}
NAMES = tuple(ADDED)
WITH_DROPOUT = tuple(name for name, added in ADDED.items() if added == 8)
PAGES = dict.fromkeys(NAMES, "docs/frameworks.md") | {"keras": "docs/howto/keras.md"}
SIZES = {"batch_size": 128, "num_steps": 3}
# All ask for the same plan, which takes longer than their training, and print it.
plan = functools.cache(dpjax.plan)
words = functools.cache(RunGuarantee.__str__)


def path(name, suffix=""):
    return ROOT / "examples" / f"digits_{name}{suffix}.py"


def copied(params):
    return jax.device_get(jax.tree.leaves(params))  # those of nnx would change


def run(path, monkeypatch, **sizes):
    """The parameters before and after, with the same keys in each call."""
    numbers = itertools.count(1)
    return run_with(lambda _: jax.random.key(next(numbers)), path, monkeypatch, **sizes)


def run_with(key_of, path, monkeypatch, **sizes):
    """The parameters before and after, with keys from `key_of` the line that asks."""
    if "keras" in path.name and not importlib.util.find_spec("keras"):
        pytest.skip("keras is not installed")
    monkeypatch.setattr(dpjax, "plan", plan)
    monkeypatch.setattr(RunGuarantee, "__str__", words)
    monkeypatch.setattr(
        dpjax, "random_key", lambda: key_of(inspect.stack()[1].code_context[0])
    )
    found = []

    def watched(adam):
        def init(params):
            found.append(copied(params))
            return adam.init(params)

        return optax.GradientTransformation(init, adam.update)

    adam = optax.adam
    monkeypatch.setattr(optax, "adam", lambda rate: watched(adam(rate)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with jax.numpy_rank_promotion("allow"):  # as it is for users
        found.append(copied(module.main(**sizes)))
    monkeypatch.undo()
    return found


def accuracy(printed):
    return float(re.match(r"test accuracy (\d\.\d+)\n", printed)[1])


QUICK = ("nnx",)  # whose models hold most beside parameters


def marked(names):
    return [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in names]


@pytest.mark.whole
@pytest.mark.parametrize("name", marked(NAMES))
def test_both_train(name, monkeypatch, capsys):
    before, plain = run(path(name), monkeypatch, **SIZES)
    assert 0 <= accuracy(capsys.readouterr().out) <= 1
    same, private = run(path(name, "_private"), monkeypatch, **SIZES)
    printed = capsys.readouterr().out
    assert 0 <= accuracy(printed) <= 1
    for x, other, y, z in zip(before, same, plain, private, strict=True):
        np.testing.assert_array_equal(x, other)
        assert np.isfinite(y).all()
        assert np.isfinite(z).all()
        # A step of adam goes 5e-3 at most, and the first one does, whichever way. With
        # noise every number moves, without it not where an input is always zero.
        assert 2e-3 < np.abs(y - x).max() < 5.1e-3 * 3
        assert 2e-3 < np.abs(z - x).max() < 5.1e-3 * 3
        assert (z != x).all()
    used = plan(num_examples=1347, **SIZES, epsilon=4.0, delta=1e-5, clip_norm=1.0)
    assert plan.cache_info().hits  # it is the one that the script made
    assert printed.partition("\n")[2] == f"{words(used.guarantee)}\n"
    assert 3.9 < used.epsilon <= 4.0


@pytest.mark.whole
@pytest.mark.parametrize("name", marked(WITH_DROPOUT))
def test_a_private_example_has_secret_dropout_keys(name, monkeypatch):
    """Noise and batches stay as they are; another secret key gives other masks."""

    def parameters(dropout):
        def key_of(line):
            if "plan.optimizer(" in line:
                return jax.random.key(1)
            return jax.random.key(2 if "plan.batches(" in line else dropout)

        return run_with(key_of, path(name, "_private"), monkeypatch, **SIZES)

    (start, one), (same, other) = parameters(3), parameters(4)
    # The initial parameters do not depend on the data, so their seed may be known.
    for x, y in zip(start, same, strict=True):
        np.testing.assert_array_equal(x, y)
    assert any((x != y).any() for x, y in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_private_one_learns(name, monkeypatch, capsys):
    run(path(name, "_private"), monkeypatch)
    assert accuracy(capsys.readouterr().out) > 0.8


def difference(name):
    """The hunks between the two, without what is blank."""
    texts = [path(name, suffix).read_text().splitlines() for suffix in ("", "_private")]
    hunks = []
    for line in list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]:
        if line.startswith("@@"):
            hunks.append([])
        elif line[1:].strip():
            hunks[-1].append(line)
    return hunks


@pytest.mark.parametrize("name", NAMES)
def test_seven_lines_are_added_or_changed_and_one_for_dropout(name):
    lines = list(itertools.chain(*difference(name)))
    assert sum(line.startswith("+") for line in lines) == ADDED[name]
    # The lines that are removed for good are the script's own choice of a batch.
    assert sum(line.startswith("-") for line in lines) == ADDED[name] - 1


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_shows_the_difference(name):
    shown = "\n\n".join(map("\n".join, difference(name)))
    assert f"```diff\n{shown}\n```" in (ROOT / PAGES[name]).read_text()
