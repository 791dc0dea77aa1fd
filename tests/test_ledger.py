"""Releases are recorded durably, and the ledger totals their privacy cost."""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import optimize, stats
from scipy.special import ndtr

import dpjax
from dpjax import Adjacency, checkpoint, ledger, strategies
from dpjax.accounting import gdp, pld, truncation
from dpjax.checkpoint import _disk
from dpjax.ledger import _chain

FIXED = {
    "num_examples": 60,
    "batch_size": 20,
    "num_steps": 6,
    "delta": 1e-4,
    "clip_norm": 0.7,
    "sampling": "fixed",
    "adjacency": Adjacency.ZERO_OUT,
}
KEY, OTHER = (
    jax.random.wrap_key_data(np.array([0, seed], np.uint32)) for seed in (5, 6)
)


@pytest.fixture(scope="module")
def plan():
    return dpjax.plan(**FIXED, noise_multiplier=2.5)


@pytest.fixture(scope="module")
def runs_by_step(plan):
    """A run after each of its steps, with the fields that a ledger reads."""
    params = np.repeat(np.arange(7, dtype=np.float32)[:, None] / 3, 2, axis=1)
    state = jax.jit(plan.optimizer(optax.identity(), key=KEY).init)(params[0])
    return [checkpoint.Run(KEY, t, jnp.asarray(params[t]), state) for t in range(7)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def three_line_ledger(path, plan, runs_by_step):
    """A ledger of three lines."""
    run = runs_by_step[0]
    for t in (2, 4, 5):
        run = ledger.release(
            path, plan, runs_by_step[t]._replace(released=run.released)
        )
    return path


def continue_from(run, before):
    """A run that continued from the release of another one."""
    return run._replace(released=checkpoint.digest(before.params))


# --- the chain


def test_each_line_contains_the_hash_of_the_previous_line(three_line_ledger):
    """Recomputed from the file alone."""
    before = "0" * 64
    for text in three_line_ledger.read_bytes().splitlines():
        line = json.loads(text)
        claimed = line.pop("hash")
        plain = json.dumps(line, sort_keys=True, separators=(",", ":"))
        assert hashlib.sha256(plain.encode()).hexdigest() == claimed
        assert line["previous"] == before
        before = claimed
    assert ledger.read(three_line_ledger).head == before
    assert three_line_ledger.stat().st_mode & 0o077 == 0


def test_changed_removed_or_moved_lines_raise(three_line_ledger):
    lines = three_line_ledger.read_bytes().splitlines(keepends=True)
    bad = [
        [lines[0], lines[2]],
        [lines[1], lines[2]],
        [lines[0], lines[2], lines[1]],
        [lines[0], lines[1], lines[1], lines[2]],
        [lines[0], b"\n", lines[1], lines[2]],
        [lines[0], lines[1].replace(b'"stop":4', b'"stop":3'), lines[2]],
        [lines[0], lines[1].replace(b":", b": ", 1), lines[2]],
        [*lines[:2], lines[2].replace(b'"repeated":false', b'"repeated":true')],
        [b"{}\n"],
        [b"nonsense\n"],
    ]
    for content in bad:
        three_line_ledger.write_bytes(b"".join(content))
        with pytest.raises(ValueError, match="line . of"):
            ledger.read(three_line_ledger)
    three_line_ledger.write_bytes(b"".join(lines))
    assert len(ledger.read(three_line_ledger).entries) == 3


def test_any_flipped_bit_raises(three_line_ledger):
    content = bytearray(three_line_ledger.read_bytes())
    for place in np.random.default_rng(0).integers(len(content), size=100):
        for bit in (1, 32):
            content[place] ^= bit
            three_line_ledger.write_bytes(content)
            with pytest.raises(ValueError, match=str(three_line_ledger)):
                ledger.read(three_line_ledger)
            content[place] ^= bit


def test_truncation_raises_within_a_line_or_with_a_known_head(three_line_ledger):
    """Missing last lines are only detected with a head that was kept elsewhere."""
    content, head = three_line_ledger.read_bytes(), ledger.read(three_line_ledger).head
    ends = [i + 1 for i, x in enumerate(content) if x == ord("\n")]
    for size in range(1, len(content), 7):
        if size not in ends:
            three_line_ledger.write_bytes(content[:size])
            with pytest.raises(ValueError, match="ends within line"):
                ledger.read(three_line_ledger)
    for number, size in enumerate(ends[:2], 1):
        three_line_ledger.write_bytes(content[:size])
        assert len(ledger.read(three_line_ledger).entries) == number
        with pytest.raises(ValueError, match="head must be"):
            ledger.read(three_line_ledger, head=head)
    three_line_ledger.write_bytes(content)
    earlier = json.loads(content.splitlines()[0])["hash"]
    assert ledger.read(three_line_ledger, head=earlier).head == head
    three_line_ledger.unlink()
    with pytest.raises(ValueError, match="head must be"):
        ledger.read(three_line_ledger, head=head)


# --- writes


class Killed(BaseException):
    """Stands for SIGKILL: no program catches it."""


def die_at_call(real, count, calls):
    """The function, but the process ends at the given call."""

    def counted_call(*args, **named):
        calls[0] += 1
        if calls[0] == count:
            raise Killed
        return real(*args, **named)

    return counted_call


def test_interrupted_release_is_recorded_or_never_returned(
    path, plan, runs_by_step, tmp_path, monkeypatch
):
    """The process ends before each call that writes to disk, or within a write."""
    ledger.release(path, plan, runs_by_step[2])
    second, counted, count = continue_from(runs_by_step[4], runs_by_step[2]), [], 0
    ended = False
    while not ended:
        count += 1
        here = shutil.copytree(tmp_path, tmp_path / str(count), ignore=_ignore_folders)
        file, calls = here / path.name, [0]
        with monkeypatch.context() as changed:
            for place, name in (
                (os, "fsync"),
                (os, "replace"),
                (os, "dup"),
                (_disk, "sync"),
                (_chain.pathlib.Path, "unlink"),
            ):
                changed.setattr(
                    place, name, die_at_call(getattr(place, name), count, calls)
                )
            try:
                ledger.release(file, plan, second)
                ended = True
            except Killed:
                pass
        counted.append(len(ledger.read(file).entries))
        ledger.release(file, plan, second)  # once more
        assert len(ledger.read(file).entries) == 2
        ledger.release(file, plan, continue_from(runs_by_step[5], runs_by_step[4]))
        assert [x.stop for x in ledger.read(file).entries] == [2, 4, 5]
        assert [x.name for x in here.iterdir()] == [path.name]
    assert counted[0] == 1
    assert counted[-1] == 2
    assert counted == sorted(counted)
    assert len(counted) > 6


def _ignore_folders(folder, names):
    return [x for x in names if os.path.isdir(os.path.join(folder, x))]


def test_partially_written_line_is_completed(three_line_ledger, plan, runs_by_step):
    """Completed from the pending file, at every length of the partial line."""
    content = three_line_ledger.read_bytes()
    whole = content[: content.rstrip(b"\n").rfind(b"\n") + 1]
    line = content[len(whole) :]
    for size in range(0, len(line) + 1, 31):
        three_line_ledger.write_bytes(whole + line[:size])
        _chain._next(three_line_ledger).write_bytes(line)
        assert len(ledger.read(three_line_ledger).entries) == 3
        ledger.release(
            three_line_ledger, plan, continue_from(runs_by_step[6], runs_by_step[5])
        )
        assert [x.stop for x in ledger.read(three_line_ledger).entries] == [2, 4, 5, 6]


@pytest.fixture
def four_lines(path):
    """The bytes of each of four lines."""
    for i in range(4):
        ledger.other(path, str(i), epsilon=1.0, delta=0.0, adjacency=Adjacency.REPLACE)
    return path.read_bytes().splitlines(keepends=True)


def count_entries_or_none(path):
    """Number of entries of a ledger; None where an error names the file."""
    try:
        return len(ledger.read(path).entries)
    except ValueError as error:
        return None if str(path) in str(error) else str(error)


def test_truncated_ledger_is_recovered_after_a_crash_or_raises(path, four_lines):
    """All lengths of a ledger of three lines, each with any pending line or none.

    A crash leaves the first k - 1 lines and a part of line k, with line k in the
    pending file, or all of line k.
    """
    content = b"".join(four_lines[:3])
    ends = {sum(map(len, four_lines[:k])): k for k in range(5)}
    for begun in (None, 1, 2, 3, 4):
        if begun is None:
            expected = ends
        else:
            _chain._next(path).write_bytes(four_lines[begun - 1])
            start = sum(map(len, four_lines[: begun - 1]))
            stop = start + len(four_lines[begun - 1])
            expected = dict.fromkeys(range(start, stop + 1), begun)
        for size in range(len(content) + 1):
            path.write_bytes(content[:size])
            assert count_entries_or_none(path) == expected.get(size), (begun, size)


def test_damaged_pending_line_raises(path, four_lines):
    """Every truncation of it, even to nothing, and other damage; nothing is written.

    The ledger has three lines, or ends within its third line, or before it.
    """
    third = four_lines[2]
    damaged = [third[:size] for size in range(len(third))]
    damaged += [third + third, third + four_lines[3], third + b"{", b"\n" + third]
    damaged += [third.replace(b'"what":"2"', b'"what":"3"'), third[:-1] + b"\r\n"]
    contents = (
        b"".join(four_lines[:3]),
        b"".join(four_lines[:2]) + third[:9],
        b"".join(four_lines[:2]),
    )
    for content in contents:
        path.write_bytes(content)
        for begun in damaged:
            _chain._next(path).write_bytes(begun)
            assert count_entries_or_none(path) is None, (content, begun)
        with pytest.raises(ValueError, match=str(path)):
            ledger.other(path, "4", epsilon=1.0, delta=0.0, adjacency=Adjacency.REPLACE)
        assert path.read_bytes() == content
        assert _chain._next(path).read_bytes() == begun


def test_zeroed_partial_lines_are_recovered_and_other_bytes_raise(path, four_lines):
    """Zeros after a loss of power count as unwritten; other bytes raise."""
    two, third = b"".join(four_lines[:2]), four_lines[2]
    _chain._next(path).write_bytes(third)
    for torn, expected in (
        (third[:5] + b"\0" * 7, 3),
        (b"\0" * len(third), 3),
        (b"\0" * (len(third) + 1), None),
        (b"\0" + third[1:5], None),
        (third[:5] + b"x", None),
        (third + third[:5], None),
        (third + b"\0", None),
    ):
        path.write_bytes(two + torn)
        assert count_entries_or_none(path) == expected, torn
    path.write_bytes(two + third[:5] + b"\0" * 7)
    ledger.other(path, "4", epsilon=1.0, delta=0.0, adjacency=Adjacency.REPLACE)
    assert path.read_bytes().startswith(two + third)
    assert count_entries_or_none(path) == 4
    # An unfinished copy of the pending file is ignored.
    path.with_name(f"{path.name}.next.new").write_bytes(third[:5])
    assert count_entries_or_none(path) == 4
    path.write_bytes(b"".join(four_lines).replace(b"\n", b"\r\n"))
    assert count_entries_or_none(path) is None


def test_pending_line_without_a_ledger_raises(path, four_lines):
    _chain._next(path).write_bytes(four_lines[0])
    path.unlink()
    with pytest.raises(
        ValueError, match="is missing, but .* shows that a line was begun"
    ):
        ledger.read(path)
    with pytest.raises(
        ValueError, match="is missing, but .* shows that a line was begun"
    ):
        ledger.other(path, "4", epsilon=1.0, delta=0.0, adjacency=Adjacency.REPLACE)
    assert not path.exists()


def test_full_disk_leaves_the_ledger_unchanged(
    three_line_ledger, plan, runs_by_step, monkeypatch
):
    def raise_full_disk(*_):
        raise OSError(28, "No space left on device")

    before = three_line_ledger.read_bytes()
    with monkeypatch.context() as changed:
        changed.setattr(_disk.os, "fsync", raise_full_disk)
        with pytest.raises(OSError, match="No space"):
            ledger.release(
                three_line_ledger, plan, continue_from(runs_by_step[6], runs_by_step[5])
            )
    assert three_line_ledger.read_bytes() == before
    assert len(ledger.read(three_line_ledger).entries) == 3


# --- repeated releases


def test_repeating_a_release_adds_no_line(three_line_ledger, plan, runs_by_step):
    """A killed run that resumes releases the same parameters again."""
    for t in (2, 4, 5):
        result = ledger.release(three_line_ledger, plan, runs_by_step[t])
        assert result.released == checkpoint.digest(runs_by_step[t].params)
    assert len(ledger.read(three_line_ledger).entries) == 3
    again = runs_by_step[0]
    for t in (2, 4, 5, 6):
        again = ledger.release(
            three_line_ledger, plan, runs_by_step[t]._replace(released=again.released)
        )
    assert [x.start for x in ledger.read(three_line_ledger).entries] == [0, 2, 4, 5]


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "case", ["bits", "earlier", "between", "beyond", "anew", "plan", "steps"]
)
def test_diverged_run_raises_and_counts_as_infinite(
    three_line_ledger, plan, runs_by_step, case
):
    """If it is released all the same, ε is infinite: one noise hid two sums."""
    tiny = np.array([1e-7, 0], np.float32)
    changed = jnp.asarray(np.asarray(runs_by_step[4].params) + tiny)
    other = {
        "bits": continue_from(
            runs_by_step[4]._replace(params=changed), runs_by_step[2]
        ),
        "earlier": continue_from(
            runs_by_step[2]._replace(params=changed), runs_by_step[5]
        ),
        "between": continue_from(runs_by_step[3], runs_by_step[2]),
        # Resumed from step 4, and released next beyond the latest release.
        "beyond": continue_from(runs_by_step[6], runs_by_step[4]),
        "anew": runs_by_step[6],
        "plan": continue_from(runs_by_step[6], runs_by_step[5]),
        "steps": continue_from(runs_by_step[6], runs_by_step[5]),
    }[case]
    given = plan
    if case == "plan":
        given = dpjax.plan(**FIXED, noise_multiplier=2.6)
    if case == "steps":
        given = dpjax.plan(**{**FIXED, "num_steps": 9}, noise_multiplier=2.5)
    before = three_line_ledger.read_bytes()
    with pytest.raises(ValueError, match="run must not be released"):
        ledger.release(three_line_ledger, given, other)
    assert three_line_ledger.read_bytes() == before
    ledger.release(three_line_ledger, given, other, repeated=True)
    result = ledger.read(three_line_ledger)
    assert result.entries[-1].repeated
    assert result.epsilon(0.5) == math.inf
    assert "used before" in str(result)


def test_reusing_a_key_for_another_run_raises(path, plan, runs_by_step):
    """Even with other parameters: both runs draw the same noise."""
    ledger.release(path, plan, runs_by_step[6])
    second = runs_by_step[6]._replace(params=np.ones(5, np.float32))
    with pytest.raises(ValueError, match="already released 6 steps"):
        ledger.release(path, plan, second)
    ledger.release(path, plan, second._replace(key=OTHER))
    names = {ledger.run_name(key) for key in (KEY, OTHER)}
    assert {x.run for x in ledger.read(path).entries} == names
    assert ledger.run_name(jax.random.key(5, impl="rbg")) not in names


@pytest.mark.matrix
def test_rbg_and_unsafe_rbg_keys_with_equal_data_name_one_run(path, plan, runs_by_step):
    """They draw the same batches and noise, so that a second release raises."""
    data = np.array([0, 5, 0, 5], np.uint32)
    keys = [jax.random.wrap_key_data(data, impl=x) for x in ("rbg", "unsafe_rbg")]

    def noise_and_batch(key):
        optimizer = plan.optimizer(optax.identity(), key=key)
        w = {"a": np.zeros(5, np.float32), "b": np.zeros((2, 3), np.float32)}
        updates, _ = optimizer.update(w, optimizer.init(w))
        return updates, plan.batch(1, key)

    drawn = [jax.tree.leaves(jax.jit(noise_and_batch)(key)) for key in keys]
    for one, other in zip(*drawn, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.std(drawn[0][0]) > 0

    first, second = (runs_by_step[6]._replace(key=key) for key in keys)
    ledger.release(path, plan, first)
    with pytest.raises(ValueError, match="already released 6 steps"):
        ledger.release(path, plan, second._replace(params=np.ones(2, np.float32)))
    ledger.release(path, plan, second)  # the same parameters: the same release
    assert len(ledger.read(path).entries) == 1
    other_data = jax.random.wrap_key_data(data + 1, impl="unsafe_rbg")
    assert ledger.run_name(other_data) != ledger.run_name(keys[0])


def test_repeated_flag_is_ignored_for_first_release(path, plan, runs_by_step):
    ledger.release(path, plan, runs_by_step[6], repeated=True)
    assert not ledger.read(path).entries[0].repeated


# --- privacy cost


def test_runs_without_sampling_compose_exactly(path, plan, runs_by_step):
    """The total μ is the root of the sum of squares, and ε follows from it."""
    second = dpjax.plan(**{**FIXED, "num_steps": 3}, noise_multiplier=0.9)
    ledger.release(path, plan, runs_by_step[2])
    ledger.release(path, second, runs_by_step[3]._replace(key=OTHER))
    mus = np.array([np.sqrt(2) / 2.5, 1 / 0.9])  # 6 steps are 2 epochs, 3 are one
    expected = float(gdp.epsilon(np.sqrt(np.sum(mus**2)), 1e-4))
    assert ledger.read(path).epsilon(1e-4) == pytest.approx(expected, rel=1e-5)


def test_unfinished_run_costs_its_whole_plan(path, plan, runs_by_step):
    """Stopping where the results look good would use them."""
    ledger.release(path, plan, runs_by_step[2])
    whole = float(gdp.epsilon(np.sqrt(2) / 2.5, 1e-4))
    assert ledger.read(path).epsilon(1e-4) == pytest.approx(whole, rel=1e-5)
    ledger.end(path, KEY, "the machine was taken away")
    once = float(gdp.epsilon(1 / 2.5, 1e-4))
    assert ledger.read(path).epsilon(1e-4) == pytest.approx(once, rel=1e-5)
    ledger.release(
        path, plan, continue_from(runs_by_step[4], runs_by_step[2])
    )  # the ended run continues all the same
    assert ledger.read(path).epsilon(1e-4) == pytest.approx(whole, rel=1e-5)
    released, ended, _ = ledger.read(path).entries
    assert released.event == plan.guarantee.event
    assert ended.event == released.so_far == plan.guarantee.at(2).event
    with pytest.raises(ValueError, match="key must be the key of a run"):
        ledger.end(path, OTHER, "why")
    with pytest.raises(ValueError, match="why must be a non-empty text"):
        ledger.end(path, KEY, " ")


@pytest.mark.slow
def test_sampled_runs_compose_by_privacy_loss_distributions(path, runs_by_step):
    """The total equals that of privacy-loss distributions convolved in the test."""
    given = {**FIXED, "sampling": "poisson", "adjacency": Adjacency.ADD_REMOVE}
    first = dpjax.plan(**given, noise_multiplier=2.5)
    second = dpjax.plan(**{**given, "num_steps": 9}, noise_multiplier=1.9)
    ledger.release(path, first, runs_by_step[2])
    ledger.release(path, second, runs_by_step[5]._replace(key=OTHER))

    def run_pld(run):
        step = truncation.poisson_gaussian(
            run.noise_multiplier,
            20 / 60,
            num_examples=60,
            max_batch_size=run.max_batch_size,
            adjacency=Adjacency.ADD_REMOVE,
        )
        return pld.compose(step, run.num_steps)

    expected = float(pld.epsilon(pld.convolve(run_pld(first), run_pld(second)), 1e-4))
    result = ledger.read(path).epsilon(1e-4)
    assert result == pytest.approx(expected, rel=1e-5)
    assert max(first.epsilon, second.epsilon) < result < first.epsilon + second.epsilon


def adaptive_choice_delta(epsilon, *branches):
    """δ(ε) of a Gaussian mechanism, μ = 1/4, and then the worst branch for its output.

    Given the first output y the privacy loss is y / 4 - 1 / 32 so far, and the second
    mechanism adds its δ at what is left of ε. A branch is the probability q with which
    the example takes part, and its noise multiplier: (1 - q) N(0, σ²) + q N(1, σ²)
    against N(0, σ²).
    """
    y = np.linspace(-10, 10, 100_001)
    left = np.exp(epsilon - (y / 4 - 1 / 32))
    deltas = []
    for q, sigma in branches:
        # The outputs at which the likelihood ratio 1 - q + q exp(x/σ² - 1/2σ²) is more
        # than exp of what is left: all of them, or those above a threshold.
        exceeded = np.maximum(left - 1 + q, 1e-300) / q
        x = sigma**2 * np.log(exceeded) + 0.5
        x = np.where(left > 1 - q, x, -np.inf)
        more = (1 - q) * ndtr(-x / sigma) + q * ndtr((1 - x) / sigma)
        deltas.append(more - left * ndtr(-x / sigma))
    density = np.exp(-((y - 1 / 4) ** 2) / 2) / np.sqrt(2 * np.pi)
    return float(np.sum(density * np.max(deltas, axis=0)) * (y[1] - y[0]))


@pytest.mark.slow  # by privacy-loss distributions
def test_total_does_not_bound_an_adaptive_choice_of_plan(plan):
    """Two plans each keep the total below 1.1251; the choice by an output does not.

    The first run is a full batch at σ = 4, the second a full batch at σ = 6.08 or one
    Poisson step of rate 1e-5 at σ = 0.1.
    """
    n, capacity, delta = 100_000, 4, 1.05e-5
    full = dataclasses.replace(
        plan, num_examples=n, batch_size=n, num_steps=1, max_batch_size=n
    )
    rare = dataclasses.replace(
        full, batch_size=1, max_batch_size=capacity, sampling="poisson"
    )
    plans = {
        "first": dataclasses.replace(full, noise_multiplier=4.0),
        "full": dataclasses.replace(full, noise_multiplier=6.08),
        "rare": dataclasses.replace(rare, noise_multiplier=0.1),
    }

    def total_epsilon(second):
        entries = tuple(
            ledger.Release(
                run=name,
                plan=name,
                event=plans[name].guarantee.event,
                so_far=plans[name].guarantee.event,
                start=0,
                stop=1,
                epsilon=1.0,
                delta=delta,
                adjacency=Adjacency.ZERO_OUT,
                unit="example",
                released="",
                repeated=False,
                time="",
            )
            for name in ("first", second)
        )
        return ledger.Ledger(entries, "").epsilon(delta)

    # Of more than `room` examples in a batch, `room` random ones take part.
    others = np.arange(60)
    probability = np.minimum(1, capacity / (others + 1)) @ stats.binom.pmf(
        others, n - 1, 1 / n
    )
    branches = {"full": (1.0, 6.08), "rare": (probability / n, 0.1)}
    for name, branch in branches.items():
        exact = optimize.brentq(
            lambda e, b=branch: adaptive_choice_delta(e, b) - delta, 0.5, 2
        )
        assert exact <= total_epsilon(name) == pytest.approx(exact, rel=1e-4)
    bound = max(total_epsilon(name) for name in branches)
    assert bound == pytest.approx(1.1251, abs=1e-4)
    assert adaptive_choice_delta(bound, *branches.values()) > 1.9 * delta

    stated = "fixed before any output was seen"
    docs = pathlib.Path(dpjax.__file__).parents[1] / "docs"
    pages = [docs / name for name in ("howto/resume.md", "threat-model.md")]
    texts = [ledger.__doc__, ledger.Ledger.epsilon.__doc__]
    for text in texts + [page.read_text() for page in pages]:
        assert stated in " ".join(text.split())


def test_other_releases_add_their_epsilons(path):
    """Each at the δ that it states."""
    setting = {"adjacency": Adjacency.ADD_REMOVE}
    ledger.other(path, "a histogram", epsilon=0.5, delta=0.0, **setting)
    ledger.other(path, "a mean", epsilon=0.25, delta=1e-6, **setting)
    result = ledger.read(path)
    assert result.epsilon(1e-6) == pytest.approx(0.75, rel=1e-15)
    assert result.epsilon(1e-6) >= 0.75
    assert result.epsilon(9.9e-7) == math.inf  # the second one has more δ than that
    assert "a histogram: (0.5, 0)" in str(result)


@pytest.mark.slow
def test_runs_without_a_pld_add_up_at_equal_parts_of_delta(path, plan, runs_by_step):
    """Basic composition: (Σ ε, Σ δ), at equal parts of the remaining δ."""
    bins = dpjax.plan(
        **{**FIXED, "sampling": "random_bins"},
        noise_multiplier=3.0,
        strategy=strategies.geometric(0.4),
        noise="correlated",
    )
    ledger.release(path, plan, runs_by_step[2])
    ledger.release(path, bins, runs_by_step[3]._replace(key=OTHER))
    ledger.other(
        path, "a count", epsilon=0.125, delta=2e-5, adjacency=Adjacency.ZERO_OUT
    )
    part = (1e-4 - 2e-5) / 2
    parts = [float(run.guarantee.epsilon(part)) for run in (plan, bins)]
    result = ledger.read(path).epsilon(1e-4)
    assert result == pytest.approx(sum(parts) + 0.125, rel=1e-5)


def test_other_adjacency_or_unit_raises(path, plan, runs_by_step):
    ledger.release(path, plan, runs_by_step[2])
    with pytest.raises(ValueError, match="adjacency and unit must be"):
        ledger.other(path, "x", epsilon=1.0, delta=0.0, adjacency=Adjacency.REPLACE)
    with pytest.raises(ValueError, match="adjacency and unit must be"):
        ledger.other(
            path,
            "x",
            epsilon=1.0,
            delta=0.0,
            adjacency=Adjacency.ZERO_OUT,
            unit="user",
        )


def test_other_release_of_an_unknown_unit_raises(path):
    release = {"epsilon": 1.0, "delta": 0.0, "adjacency": Adjacency.REPLACE}
    with pytest.raises(ValueError, match="unit must be"):
        ledger.other(path, "x", **release, unit="household")
    assert not path.exists()


def test_invalid_arguments_raise(path, plan, runs_by_step):
    with pytest.raises(ValueError, match=r"run\.step must be at least 1"):
        ledger.release(path, plan, runs_by_step[0])
    with pytest.raises(ValueError, match=r"run\.step must be at most"):
        ledger.release(path, plan, runs_by_step[6]._replace(step=7))
    with pytest.raises(ValueError, match="delta"):
        ledger.read(path).epsilon(0.0)
    with pytest.raises(ValueError, match="epsilon"):
        ledger.other(path, "x", epsilon=-1.0, delta=0.0, adjacency=plan.adjacency)
    assert not path.exists()
    assert ledger.read(path).entries == ()


def test_line_in_another_format_raises(path):
    """Its hash is right, but it is no entry."""
    _chain.append(path, lambda lines: {"what": "release"})
    with pytest.raises(ValueError, match=f"a line of {path} must be of type Release"):
        ledger.read(path)


def test_plan_with_infinite_epsilon_is_recorded(path, runs_by_step):
    noiseless = dpjax.plan(**FIXED, noise_multiplier=1e-3)
    noiseless = dataclasses.replace(noiseless, epsilon=math.inf)
    ledger.release(path, noiseless, runs_by_step[2])
    assert ledger.read(path).entries[0].epsilon == math.inf
