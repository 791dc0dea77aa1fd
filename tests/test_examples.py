"""Each example trains, and so does its private version, a few lines longer."""

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
# How many lines are added or changed. Models with dropout need one more, for its key.
ADDED = {"nnx": 8, "linen": 8, "haiku": 8, "keras": 8, "equinox": 7, "optax": 7}
NAMES = tuple(ADDED)
WITH_DROPOUT = tuple(name for name, added in ADDED.items() if added == 8)
PAGES = dict.fromkeys(NAMES, "docs/frameworks.md") | {"keras": "docs/howto/keras.md"}
SIZES = {"batch_size": 128, "num_steps": 3}
# All make and print the same plan, which takes longer than their training.
plan = functools.cache(dpjax.plan)
words = functools.cache(RunGuarantee.__str__)


def example_path(name, suffix=""):
    return ROOT / "examples" / f"digits_{name}{suffix}.py"


def copy_leaves(params):
    return jax.device_get(jax.tree.leaves(params))  # those of nnx would change


def run_example(path, monkeypatch, **sizes):
    """The parameters before and after training, with the same keys in each call."""
    numbers = itertools.count(1)
    return run_example_with_keys(
        lambda _: jax.random.key(next(numbers)), path, monkeypatch, **sizes
    )


def run_example_with_keys(key_of, path, monkeypatch, **sizes):
    """The parameters before and after training; `key_of` maps source lines to keys."""
    if "keras" in path.name and not importlib.util.find_spec("keras"):
        pytest.skip("keras is not installed")
    monkeypatch.setattr(dpjax, "plan", plan)
    monkeypatch.setattr(RunGuarantee, "__str__", words)
    monkeypatch.setattr(
        dpjax, "random_key", lambda: key_of(inspect.stack()[1].code_context[0])
    )
    result = []

    def record_params_at_init(adam):
        def init(params):
            result.append(copy_leaves(params))
            return adam.init(params)

        return optax.GradientTransformation(init, adam.update)

    adam = optax.adam
    monkeypatch.setattr(optax, "adam", lambda rate: record_params_at_init(adam(rate)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with jax.numpy_rank_promotion("allow"):  # JAX's default
        result.append(copy_leaves(module.main(**sizes)))
    monkeypatch.undo()
    return result


def accuracy(printed):
    return float(re.match(r"test accuracy (\d\.\d+)\n", printed)[1])


QUICK = ("nnx",)  # its models have the most state besides parameters


def mark_slow(names):
    return [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in names]


@pytest.mark.whole
@pytest.mark.parametrize("name", mark_slow(NAMES))
def test_plain_and_private_examples_train(name, monkeypatch, capsys):
    before, plain = run_example(example_path(name), monkeypatch, **SIZES)
    assert 0 <= accuracy(capsys.readouterr().out) <= 1
    same, private = run_example(example_path(name, "_private"), monkeypatch, **SIZES)
    printed = capsys.readouterr().out
    assert 0 <= accuracy(printed) <= 1
    for x, other, y, z in zip(before, same, plain, private, strict=True):
        np.testing.assert_array_equal(x, other)
        assert np.isfinite(y).all()
        assert np.isfinite(z).all()
        # A step of adam is at most 5e-3 long, and the first one attains that. With
        # noise every number moves; without it not where an input is always zero.
        assert 2e-3 < np.abs(y - x).max() < 5.1e-3 * 3
        assert 2e-3 < np.abs(z - x).max() < 5.1e-3 * 3
        assert (z != x).all()
    used = plan(num_examples=1347, **SIZES, epsilon=4.0, delta=1e-5, clip_norm=1.0)
    assert plan.cache_info().hits  # it is the one that the script made
    assert printed.partition("\n")[2] == f"{words(used.guarantee)}\n"
    assert 3.9 < used.epsilon <= 4.0


@pytest.mark.whole
@pytest.mark.parametrize("name", mark_slow(WITH_DROPOUT))
def test_private_example_dropout_depends_on_secret_key(name, monkeypatch):
    """With the same noise and batches, another secret key gives other masks."""

    def train_with_dropout_seed(dropout):
        def key_of(line):
            if "plan.optimizer(" in line:
                return jax.random.key(1)
            return jax.random.key(2 if "plan.batches(" in line else dropout)

        return run_example_with_keys(
            key_of, example_path(name, "_private"), monkeypatch, **SIZES
        )

    (start, one), (same, other) = train_with_dropout_seed(3), train_with_dropout_seed(4)
    # The initial parameters do not depend on the data, so their seed may be known.
    for x, y in zip(start, same, strict=True):
        np.testing.assert_array_equal(x, y)
    assert any((x != y).any() for x, y in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_private_example_learns(name, monkeypatch, capsys):
    """The other scripts differ from this one in how they define the model."""
    run_example(example_path(name, "_private"), monkeypatch)
    assert accuracy(capsys.readouterr().out) > 0.8


def diff_hunks(name):
    """The hunks of the diff to the private version, without blank lines."""
    texts = [
        example_path(name, suffix).read_text().splitlines()
        for suffix in ("", "_private")
    ]
    hunks = []
    for line in list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]:
        if line.startswith("@@"):
            hunks.append([])
        elif line[1:].strip():
            hunks[-1].append(line)
    return hunks


@pytest.mark.parametrize("name", NAMES)
def test_private_example_adds_stated_number_of_lines(name):
    lines = list(itertools.chain(*diff_hunks(name)))
    assert sum(line.startswith("+") for line in lines) == ADDED[name]
    # The lines that are removed for good are the script's own choice of a batch.
    assert sum(line.startswith("-") for line in lines) == ADDED[name] - 1


@pytest.mark.parametrize("name", NAMES)
def test_documentation_shows_the_diff(name):
    shown = "\n\n".join(map("\n".join, diff_hunks(name)))
    assert f"```diff\n{shown}\n```" in (ROOT / PAGES[name]).read_text()
