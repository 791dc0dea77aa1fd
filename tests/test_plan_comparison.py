"""The plan that is chosen is the one with the least noise, and none is left out."""

import dataclasses
import pickle

import jax
import matplotlib
import numpy as np
import pytest

import dpjax
from dpjax import Adjacency, plot, workloads

matplotlib.use("Agg")
import matplotlib.pyplot as plt

N, B, T, DELTA, EPSILON = 300, 40, 24, 1e-4, 2.0
WORKLOAD = workloads.momentum_sum(0.9, learning_rates=0.5, weight_decay=0.1)
ORDERS = ("fixed", "reshuffled")


def asked(**changed):
    given = {
        "num_examples": N,
        "batch_size": B,
        "num_steps": T,
        "epsilon": EPSILON,
        "delta": DELTA,
        "clip_norm": 0.5,
        "sampling": ("fixed", "fixed_size"),
        "noise": "auto",
        "workload": WORKLOAD,
        "adjacency": Adjacency.ZERO_OUT,
    }
    return {**given, **changed}


@pytest.fixture(scope="module")
def chosen():
    return dpjax.plan(**asked())


def brute_force(run):
    """In x_t = 0.95 x_{t−1} + 0.5 m_t, m_t = 0.9 m_{t−1} + 0.1 g_t, by matrices."""
    steps = np.arange(T)
    gap = steps[:, None] - steps
    momentum = np.where(gap >= 0, 0.1 * 0.9 ** np.maximum(gap, 0), 0.0)
    sums = np.where(gap >= 0, 0.5 * 0.95 ** np.maximum(gap, 0), 0.0)
    c = np.eye(T)
    if run.strategy is not None:
        c = np.asarray(jax.jit(lambda: run.strategy.matrix(T))())
    noise = sums @ momentum @ np.linalg.inv(c)
    # Eight steps take 300 examples where an epoch takes each once; others take b.
    taken = B if run.sampling in ("poisson", "cyclic_poisson") else 300 / 8
    return run.noise_multiplier * np.linalg.norm(noise) / np.sqrt(T) / taken


def planned_again(run):
    """Each row's plan, asked for by its name."""
    plans = []
    for row in run.comparison.candidates:
        if row.plan is None:
            continue
        kept = {"tree": {"strategy": row.plan.strategy, "workload": None}}
        kept["independent"] = {"workload": None}
        noise = "independent" if row.noise == "independent" else "correlated"
        named = asked(
            sampling=row.sampling,
            noise=noise,
            adjacency=run.adjacency,
            **kept.get(row.noise, {}),
        )
        plans.append(dpjax.plan(**named))
    return plans


@pytest.fixture(scope="module")
def chosen_again(chosen):
    return planned_again(chosen)


def check(run, names, again):
    """What holds of any comparison that has the samplings of these names."""
    rows = run.comparison.candidates
    assert {row.sampling for row in rows} == set(names)
    errors = [brute_force(row.plan) for row in rows if row.plan]
    np.testing.assert_allclose(errors, [r.error for r in rows if r.plan], rtol=1e-4)
    assert np.argmin(errors) == 0
    assert run == rows[0].plan
    for row in rows:
        if row.plan is None:
            assert (row.error, bool(row.reason)) == (np.inf, True)
            continue
        assert row.plan.epsilon <= EPSILON
    assert again == [row.plan for row in rows if row.plan]


def test_the_least_is_chosen_and_every_row_is_a_plan_of_its_own(chosen, chosen_again):
    check(chosen, ("fixed", "fixed_size"), chosen_again)
    *kinds, none = [(row.sampling, row.noise) for row in chosen.comparison.candidates]
    noises = ("independent", "correlated", "tree")
    assert set(kinds) == {("fixed", noise) for noise in noises}
    assert none == ("fixed_size", "any")  # under ZERO_OUT
    reason = chosen.comparison.candidates[-1].reason
    assert reason.startswith("adjacency must be")
    assert reason in str(chosen.comparison)


@pytest.mark.slow  # groups are planned for twice
def test_random_batches_for_correlated_noise_are_compared():
    names = ("reshuffled", "cyclic_poisson")  # the page of the choice has bins
    run = dpjax.plan(**asked(sampling=names, noise="correlated"))
    check(run, names, planned_again(run))


@pytest.mark.slow  # Poisson samples are planned for
def test_what_the_adjacency_excludes_stays_with_its_reason():
    refused = (*ORDERS, "fixed_size", "cyclic_poisson")
    changed = {"noise": "independent", "adjacency": Adjacency.ADD_REMOVE}
    run = dpjax.plan(**asked(sampling=("poisson", *refused), **changed))
    rows = {row.sampling: row for row in run.comparison.candidates if not row.plan}
    assert run.sampling == "poisson"
    assert set(rows) == set(refused)
    for row in rows.values():
        assert row.reason.startswith("adjacency must be")
        assert row.reason in str(run.comparison)


@pytest.mark.slow  # Poisson samples are planned for once more
def test_a_choice_of_sampling_alone_needs_no_workload():
    asked_for = asked(sampling=("poisson", "fixed"), noise="independent", workload=None)
    run = dpjax.plan(**asked_for)
    rows = run.comparison.candidates
    assert {row.noise for row in rows} == {"independent"}
    taken = {"poisson": B}
    scales = [r.plan.noise_multiplier / taken.get(r.sampling, 37.5) for r in rows]
    np.testing.assert_allclose([r.error for r in rows], scales, rtol=1e-6)
    assert scales == sorted(scales)


@pytest.mark.slow  # noise is scheduled for a workload that varies
def test_what_cannot_be_compared_stays_too():
    """A tree in a workload that varies, and correlated noise on Poisson samples."""
    falling = workloads.momentum_sum(0.9, learning_rates=np.linspace(1, 0.1, T))
    names = "poisson", "fixed"
    run = dpjax.plan(**asked(sampling=names, noise="correlated", workload=falling))
    reasons = {(r.sampling, r.noise): r.reason for r in run.comparison.candidates}
    assert "sampling" in reasons["poisson", "correlated"]
    assert "tree" in reasons["fixed", "tree"]
    assert reasons["fixed", "correlated"] == ""
    with pytest.raises(ValueError, match="no mechanism.*sampling must not be"):
        dpjax.plan(**asked(sampling=("poisson",), noise="correlated"))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"num_steps": None}, "num_steps"),
        ({"batch_size": None}, "batch_size"),
        ({"epsilon": None, "noise_multiplier": 1.0}, "epsilon"),
        ({"noise_multiplier": 1.0}, "noise_multiplier"),
        ({"workload": None}, "workload"),
        ({"strategy": dpjax.strategies.geometric(0.5)}, "strategy"),
        ({"noise_schedule": lambda step: 1.0}, "noise_schedule"),
        ({"clip_norm": dpjax.QuantileClip(0.5)}, "clip_norm"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"max_batch_size": 39}, "max_batch_size"),
        ({"sampling": ("poisson", "sorted")}, "sampling"),
        ({"sampling": ("fixed", "fixed")}, "sampling"),
        ({"sampling": ()}, "sampling"),
        ({"noise": "white"}, "noise"),
        ({"adjacency": "replace"}, "adjacency"),
    ],
)
def test_what_is_no_comparison(changed, match):
    with pytest.raises(ValueError, match=match):
        dpjax.plan(**asked(**changed))


@pytest.mark.slow  # Poisson samples are planned for once more
def test_a_room_is_for_those_that_overflow():
    run = dpjax.plan(**asked(sampling=("poisson", "fixed"), max_batch_size=100))
    rows = run.comparison.candidates
    rooms = {row.sampling: row.plan.max_batch_size for row in rows}
    assert rooms == {"poisson": 100, "fixed": B}


def test_a_chosen_plan_is_a_plan(chosen):
    """It equals the one that is named, and survives pickling with its comparison."""
    named = dataclasses.replace(chosen, comparison=None)
    assert chosen == named
    assert hash(chosen) == hash(named)
    again = pickle.loads(pickle.dumps(chosen))
    assert again == chosen
    assert str(again.comparison) == str(chosen.comparison)
    assert chosen.guarantee.to_json() == named.guarantee.to_json()


def test_it_prints_as_a_table(chosen):
    head, *lines = str(chosen.comparison).splitlines()
    assert head.startswith("noise left  sampling ")
    assert len(lines) == 4
    assert lines[0].startswith("1.000")
    assert f"{chosen.noise_multiplier:.3f}" in lines[0]
    assert "the data in one order" in str(chosen.comparison)


def test_it_is_drawn_as_it_is(chosen):
    ax = plot.comparison(chosen)
    rows = chosen.comparison.candidates
    widths = [bar.get_width() for bar in ax.patches]
    ratios = [row.error / rows[0].error if row.plan else 0.0 for row in rows]
    np.testing.assert_allclose(widths, ratios)
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert labels == [f"{row.sampling}, {row.strategy}" for row in rows]
    plt.close("all")
    with pytest.raises(ValueError, match="choice"):
        plot.comparison(rows[0].plan)
