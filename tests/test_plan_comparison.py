"""A comparison chooses the plan with the least noise and lists all candidates."""

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


def plan_arguments(**changed):
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
def chosen_plan():
    return dpjax.plan(**plan_arguments())


def brute_force_error(run):
    """Error of x_t = 0.95 x_{t−1} + 0.5 m_t, m_t = 0.9 m_{t−1} + 0.1 g_t, by matrix."""
    steps = np.arange(T)
    gap = steps[:, None] - steps
    momentum = np.where(gap >= 0, 0.1 * 0.9 ** np.maximum(gap, 0), 0.0)
    sums = np.where(gap >= 0, 0.5 * 0.95 ** np.maximum(gap, 0), 0.0)
    c = np.eye(T)
    if run.strategy is not None:
        c = np.asarray(jax.jit(lambda: run.strategy.matrix(T))())
    noise = sums @ momentum @ np.linalg.inv(c)
    # Where an epoch has each example once, eight steps take 300; others take B each.
    batch_sizes = B if run.sampling in ("poisson", "cyclic_poisson") else 300 / 8
    return run.noise_multiplier * np.linalg.norm(noise) / np.sqrt(T) / batch_sizes


def replan_candidates(run):
    """The plan of each row, made again with its mechanism named."""
    plans = []
    for row in run.comparison.candidates:
        if row.plan is None:
            continue
        fixed = {"tree": {"strategy": row.plan.strategy, "workload": None}}
        fixed["independent"] = {"workload": None}
        noise = "independent" if row.noise == "independent" else "correlated"
        named = plan_arguments(
            sampling=row.sampling,
            noise=noise,
            adjacency=run.adjacency,
            **fixed.get(row.noise, {}),
        )
        plans.append(dpjax.plan(**named))
    return plans


@pytest.fixture(scope="module")
def replanned_candidates(chosen_plan):
    return replan_candidates(chosen_plan)


def assert_comparison_is_valid(run, names, again):
    """Properties of any comparison of the named samplings."""
    rows = run.comparison.candidates
    assert {row.sampling for row in rows} == set(names)
    errors = [brute_force_error(row.plan) for row in rows if row.plan]
    np.testing.assert_allclose(errors, [r.error for r in rows if r.plan], rtol=1e-4)
    assert np.argmin(errors) == 0
    assert run == rows[0].plan
    for row in rows:
        if row.plan is None:
            assert (row.error, bool(row.reason)) == (np.inf, True)
            continue
        assert row.plan.epsilon <= EPSILON
    assert again == [row.plan for row in rows if row.plan]


def test_least_noise_is_chosen_and_every_row_is_a_plan(
    chosen_plan, replanned_candidates
):
    assert_comparison_is_valid(
        chosen_plan, ("fixed", "fixed_size"), replanned_candidates
    )
    *kinds, none = [
        (row.sampling, row.noise) for row in chosen_plan.comparison.candidates
    ]
    noises = ("independent", "correlated", "tree")
    assert set(kinds) == {("fixed", noise) for noise in noises}
    assert none == ("fixed_size", "any")  # under ZERO_OUT
    reason = chosen_plan.comparison.candidates[-1].reason
    assert reason.startswith("adjacency must be")
    assert reason in str(chosen_plan.comparison)


@pytest.mark.slow  # groups are planned for twice
def test_random_batches_with_correlated_noise_are_compared(compiled):
    names = ("reshuffled", "cyclic_poisson")  # the page of the choice has bins
    run = dpjax.plan(**plan_arguments(sampling=names, noise="correlated"))
    assert_comparison_is_valid(run, names, replan_candidates(run))


@pytest.mark.slow  # Poisson samples are planned for
def test_samplings_excluded_by_adjacency_are_listed_with_reason():
    refused = (*ORDERS, "fixed_size", "cyclic_poisson")
    changed = {"noise": "independent", "adjacency": Adjacency.ADD_REMOVE}
    run = dpjax.plan(**plan_arguments(sampling=("poisson", *refused), **changed))
    rows = {row.sampling: row for row in run.comparison.candidates if not row.plan}
    assert run.sampling == "poisson"
    assert set(rows) == set(refused)
    for row in rows.values():
        assert row.reason.startswith("adjacency must be")
        assert row.reason in str(run.comparison)


@pytest.mark.slow  # Poisson samples are planned for once more
def test_choosing_sampling_alone_needs_no_workload():
    asked_for = plan_arguments(
        sampling=("poisson", "fixed"), noise="independent", workload=None
    )
    run = dpjax.plan(**asked_for)
    rows = run.comparison.candidates
    assert {row.noise for row in rows} == {"independent"}
    batch_sizes = {"poisson": B}
    scales = [r.plan.noise_multiplier / batch_sizes.get(r.sampling, 37.5) for r in rows]
    np.testing.assert_allclose([r.error for r in rows], scales, rtol=1e-6)
    assert scales == sorted(scales)


@pytest.mark.slow  # noise is scheduled for a workload that varies
def test_infeasible_mechanisms_are_listed_with_reason():
    """A tree with varying learning rates, and correlated noise on Poisson samples."""
    falling = workloads.momentum_sum(0.9, learning_rates=np.linspace(1, 0.1, T))
    names = "poisson", "fixed"
    run = dpjax.plan(
        **plan_arguments(sampling=names, noise="correlated", workload=falling)
    )
    reasons = {(r.sampling, r.noise): r.reason for r in run.comparison.candidates}
    assert "sampling" in reasons["poisson", "correlated"]
    assert "tree" in reasons["fixed", "tree"]
    assert reasons["fixed", "correlated"] == ""
    message = "none of the compared mechanisms.*sampling must not be"
    with pytest.raises(ValueError, match=message):
        dpjax.plan(**plan_arguments(sampling=("poisson",), noise="correlated"))


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
def test_invalid_comparison_arguments_raise(changed, match):
    with pytest.raises(ValueError, match=match):
        dpjax.plan(**plan_arguments(**changed))


@pytest.mark.slow  # Poisson samples are planned for once more
def test_capacity_applies_only_to_poisson_sampling():
    run = dpjax.plan(
        **plan_arguments(sampling=("poisson", "fixed"), max_batch_size=100)
    )
    rows = run.comparison.candidates
    rooms = {row.sampling: row.plan.max_batch_size for row in rows}
    assert rooms == {"poisson": 100, "fixed": B}


def test_chosen_plan_equals_the_named_plan(chosen_plan):
    """It ignores its comparison in equality, and keeps it when pickled."""
    named = dataclasses.replace(chosen_plan, comparison=None)
    assert chosen_plan == named
    assert hash(chosen_plan) == hash(named)
    again = pickle.loads(pickle.dumps(chosen_plan))
    assert again == chosen_plan
    assert str(again.comparison) == str(chosen_plan.comparison)
    assert chosen_plan.guarantee.to_json() == named.guarantee.to_json()


def test_comparison_prints_as_a_table(chosen_plan):
    head, *lines = str(chosen_plan.comparison).splitlines()
    assert head.startswith("noise left  sampling ")
    assert len(lines) == 4
    assert lines[0].startswith("1.000")
    assert f"{chosen_plan.noise_multiplier:.3f}" in lines[0]
    assert "the data in one order" in str(chosen_plan.comparison)


def test_comparison_of_mechanisms_without_any_noise_prints():
    sizes = {"num_examples": 100, "batch_size": 10, "num_steps": 5, "clip_norm": 1.0}
    run = dpjax.plan(
        **sizes,
        epsilon=5.0,
        delta=1e-5,
        sampling=("fixed", "reshuffled"),
        adjacency=Adjacency.REPLACE,
        workload=workloads.prefix_sum(learning_rates=0.0),
    )
    assert "0.000" in repr(run.comparison)


def test_plot_shows_the_comparison(chosen_plan):
    ax = plot.comparison(chosen_plan)
    rows = chosen_plan.comparison.candidates
    widths = [bar.get_width() for bar in ax.patches]
    ratios = [row.error / rows[0].error if row.plan else 0.0 for row in rows]
    np.testing.assert_allclose(widths, ratios)
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert labels == [f"{row.sampling}, {row.strategy}" for row in rows]
    plt.close("all")
    with pytest.raises(ValueError, match="compared mechanisms"):
        plot.comparison(rows[0].plan)
