"""Plots show the values of the library's functions."""

import functools
import math
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from scipy import stats

import dpjax
from dpjax import Adjacency, plot
from dpjax.accounting import gdp, pld, pure
from dpjax.accounting.events import Gaussian
from dpjax.accounting.profiles import FunctionProfile, Guarantee, Pure, search_delta
from dpjax.noise import tree
from dpjax.plot import _style

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def make_fixed_plan(**changed):
    """A plan that costs next to nothing to account for."""
    given = {
        "num_examples": 1000,
        "batch_size": 100,
        "num_steps": 40,
        "noise_multiplier": 3.0,
        "delta": 1e-5,
        "clip_norm": 0.7,
        "sampling": "fixed",
        "adjacency": Adjacency.REPLACE,
    }
    return dpjax.plan(**{**given, **changed})


def make_fixed_budget():
    return dpjax.budget(
        1.0, 1e-5, adjacency=Adjacency.REPLACE, composition="fixed"
    ).draw(Gaussian(0.1))


def line_data(line):
    return tuple(np.asarray(x, np.float64) for x in line.get_data())


def legend_labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


# --- trade-off curves


def test_gaussian_tradeoff_curves_are_exact():
    ax = plot.tradeoff(0.0, 0.5, make_fixed_plan(), false_positive_rate=0.05)
    for line, mu in zip(
        ax.lines, (0.0, 0.5, make_fixed_plan().guarantee.mu), strict=False
    ):
        rates, missed = line_data(line)
        np.testing.assert_allclose(missed, gdp.tradeoff(mu, rates), atol=1e-6)
        exact = stats.norm.cdf(stats.norm.isf(rates) - mu)
        np.testing.assert_allclose(missed, exact, atol=1e-5)
        (marked,) = line.get_markevery()
        assert rates[marked] == 0.05


def test_legend_states_the_marked_point():
    ax = plot.tradeoff(1.0, labels=["one"], false_positive_rate=0.1)
    power = stats.norm.sf(stats.norm.isf(0.1) - 1.0)
    assert legend_labels(ax) == [
        f"one: {math.ceil(1000 * power) / 1000:.3f}",
        "perfect privacy",
        "no privacy",
    ]
    assert "at 0.1 false positives" in ax.get_legend().get_title().get_text()


def test_pure_tradeoff_curves_are_exact():
    promise = Guarantee("a sum", Pure(1.3), Adjacency.REPLACE, ())
    rates, missed = line_data(plot.tradeoff(promise).lines[0])
    lines = [1 - np.exp(1.3) * rates, np.exp(-1.3) * (1 - rates)]
    np.testing.assert_allclose(missed, np.maximum(*lines), atol=1e-6)
    # The implied μ gives a lower curve.
    assert (missed >= np.asarray(gdp.tradeoff(pure.mu(1.3), rates)) - 1e-6).all()


def make_profile(epsilon_of):
    return FunctionProfile(epsilon_of, functools.partial(search_delta, epsilon_of))


@pytest.fixture
def profile_curve(mu):
    profile = make_profile(jax.jit(lambda delta: gdp.epsilon(mu, delta)))
    promise = Guarantee("a sum", profile, Adjacency.REPLACE, ())
    return line_data(plot.tradeoff(promise).lines[0])


@pytest.mark.diagonal
@pytest.mark.parametrize("mu", [0.01, 1.0, 4.0])
def test_profile_curves_are_tight_lower_bounds(profile_curve, mu):
    rates, missed = profile_curve
    exact = stats.norm.cdf(stats.norm.isf(rates) - mu)
    assert (missed <= exact + 1e-6).all()
    # Less than the line's width, 1.6 of at least 290 points of an axis.
    assert (missed >= exact - 0.0055).all()


RATE, SIGMA = 0.5, 0.8


@pytest.fixture
def poisson_curve(compiled):
    step = pld.poisson_gaussian(SIGMA, RATE, adjacency=Adjacency.ADD_REMOVE)
    return line_data(plot.tradeoff(step).lines[0])


@pytest.mark.slow
def test_poisson_curve_is_a_tight_lower_bound(poisson_curve, compiled):
    rate, sigma = RATE, SIGMA
    rates, missed = poisson_curve

    def tail_probabilities(x):  # of N(0, σ²), and of the sample's mixture
        one, other = stats.norm.sf(x, scale=sigma), stats.norm.sf(x, 1, scale=sigma)
        return one, (1 - rate) * one + rate * other

    def output_at_loss(loss):  # the mixture's loss grows with x
        return 0.5 + sigma**2 * np.log((np.exp(loss) - 1 + rate) / rate)

    epsilons = np.linspace(0.0, 20.0, 4001)
    none, some = tail_probabilities(output_at_loss(epsilons))
    deltas = some - np.exp(epsilons) * none
    short = epsilons < -np.log1p(-rate)
    none, some = tail_probabilities(output_at_loss(-epsilons[short]))
    removed = (1 - none) - np.exp(epsilons[short]) * (1 - some)
    deltas[short] = np.maximum(deltas[short], removed)
    alpha = rates[:, None]
    steep = np.max(1 - deltas - np.exp(epsilons) * alpha, axis=1)
    flat = np.max(np.exp(-epsilons) * (1 - deltas - alpha), axis=1)
    exact = np.maximum(np.maximum(steep, flat), 0)
    assert (missed <= exact + 1e-5).all()
    assert (missed >= exact - 0.0055).all()


def test_curve_of_infinite_mu_is_zero():
    assert not line_data(plot.tradeoff(math.inf).lines[0])[1].any()


@pytest.fixture
def infinite_epsilon_curve():
    blank = make_profile(lambda delta: jnp.asarray(np.inf))
    return line_data(
        plot.tradeoff(Guarantee("all", blank, Adjacency.REPLACE, ())).lines[0]
    )


def test_curve_of_infinite_epsilon_is_zero(infinite_epsilon_curve):
    assert not infinite_epsilon_curve[1].any()


def test_legend_covers_no_curve():
    ax = plot.tradeoff(0.02, 0.5, 1.0, 2.0)
    ax.figure.canvas.draw()
    box = ax.get_legend().get_window_extent()
    for line in ax.lines:
        points = ax.transData.transform(np.stack(line_data(line), axis=1))
        assert not any(box.contains(*point) for point in points)


def test_style_distinguishes_lines_without_colour():
    with plt.style.context(plot.style):
        _, ax = plt.subplots()
        lines = [ax.plot([0, 1], [i, i])[0] for i in range(5)]
        assert len({str(line._dash_pattern) for line in lines}) == 5
        assert len({line.get_color() for line in lines}) == 5
        assert not ax.spines["top"].get_visible()
    assert plt.rcParams["axes.spines.top"]


# --- runs


@pytest.mark.diagonal
@pytest.mark.parametrize("delta", [None, 1e-3])
def test_epsilon_by_step_matches_the_guarantee(delta):
    plans = make_fixed_plan(), make_fixed_plan(num_steps=20, noise_multiplier=1.0)
    ax = plot.epsilon_by_step(*plans, delta=delta)
    for line, plan in zip(ax.lines, plans, strict=True):
        steps, costs = line_data(line)
        at = [plan.guarantee.at(int(t)).epsilon(delta or plan.delta) for t in steps]
        assert costs.tolist() == [float(x) for x in at]
        assert steps[0] == 1
        assert steps[-1] == plan.num_steps
        # Between two points the line has the later value, which is at least as large.
        assert line.get_drawstyle() == "steps-pre"
        assert (np.diff(costs) >= 0).all()
    assert ax.get_ylabel() == f"ε at δ = {delta or 1e-5:g}"


@pytest.mark.slow
def test_epsilon_curve_is_exact_at_or_above_every_step():
    plan = make_fixed_plan(num_steps=450)
    every = line_data(plot.epsilon_by_step(make_fixed_plan(num_steps=40)).lines[0])[0]
    assert every.tolist() == list(range(1, 41))
    steps, costs = line_data(plot.epsilon_by_step(plan).lines[0])
    skipped = sorted(set(range(1, 451)) - set(steps.astype(int)))
    assert skipped
    for t in skipped[::5]:  # at t the line has the value of the next computed step
        assert plan.guarantee.at(t).epsilon(1e-5) <= costs[np.searchsorted(steps, t)]


@pytest.mark.slow
def test_epsilon_curve_without_mu_marks_the_steps_that_it_knows():
    plan = make_fixed_plan(sampling="poisson", num_steps=40)
    ax = plot.epsilon_by_step(plan)
    (line,) = ax.lines
    steps, costs = line_data(line)
    assert 1 < len(steps) <= 30
    for t, cost in list(zip(steps, costs, strict=True))[::10]:
        assert cost == float(plan.guarantee.at(int(t)).epsilon(1e-5))
    assert line.get_markevery() is None
    assert "at the markers" in ax.get_xlabel()
    assert line.get_drawstyle() == "default"


@pytest.mark.slow
def test_epsilon_curve_of_a_long_run_has_few_points():
    steps, _ = line_data(
        plot.epsilon_by_step(make_fixed_plan(num_steps=100_000)).lines[0]
    )
    assert 300 < len(steps) <= 400
    assert steps[-1] == 100_000


def test_compare_shows_the_numbers_of_plans():
    plans = (
        make_fixed_plan(),
        make_fixed_plan(noise_multiplier=6.0, delta=1e-4),
        make_fixed_plan(num_steps=20),
    )
    ax = plot.compare(plans, labels=["a", "b", "c"])
    widths = [[bar.get_width() for bar in panel.patches] for panel in ax.child_axes]
    signals = [math.sqrt(t) * 100 / s for t, s in ((40, 3), (40, 6), (20, 3))]
    assert widths[0] == [3.0, 6.0, 3.0]
    assert widths[1] == [plan.epsilon for plan in plans]
    np.testing.assert_allclose(widths[2], signals, rtol=1e-12)
    first, second, _ = ax.child_axes
    assert [t.get_text() for t in first.get_yticklabels()] == ["a", "b", "c"]
    assert second.get_title("left") == "ε at the δ of each plan"


def test_comparison_of_updates_without_noise():
    run = make_fixed_plan(
        noise_multiplier=None,
        epsilon=2.0,
        noise="auto",
        workload=dpjax.workloads.prefix_sum(learning_rates=0.0),
    )
    widths = [bar.get_width() for bar in plot.comparison(run).patches]
    assert widths[:2] == [0.0, 0.0]


def test_signal_to_noise_of_varying_noise():
    halved = make_fixed_plan(noise_schedule=lambda step: jnp.where(step < 10, 2.0, 1.0))
    signal = plot.compare([halved]).child_axes[2].patches[0].get_width()
    steps = [100 / (3.0 * (2.0 if t < 10 else 1.0)) for t in range(40)]
    assert signal == pytest.approx(math.hypot(*steps), rel=1e-12)


def test_signal_to_noise_with_a_noisy_count():
    counted = make_fixed_plan(clip_norm=dpjax.QuantileClip(0.7, noise_multiplier=2.0))
    sigma = (3.0**-2 - (2 * 2.0) ** -2) ** -0.5
    noise, _, signal = plot.compare([counted]).child_axes
    assert noise.patches[0].get_width() == pytest.approx(sigma)
    assert signal.patches[0].get_width() == pytest.approx(math.sqrt(40) * 100 / sigma)


# --- noise


def tree_matrix(num_steps, decay):
    result = np.zeros((num_steps, num_steps))
    for t in range(1, num_steps + 1):
        for _, z in tree.compose(1, t):
            result[t - 1, z - 1] = decay ** (t - z)
    return result


def toeplitz_matrix(coefficients):
    n = len(coefficients)
    return sum(c * np.eye(n, k=-j) for j, c in enumerate(coefficients))


def test_tree_noise_plot_matches_prefix_variance():
    steps, result = line_data(plot.noise(1.7 * tree_matrix(50, 0.8)).lines[0])
    expected_line = 1.7 * np.sqrt(tree.prefix_variance(np.arange(1, 51), 0.8))
    np.testing.assert_allclose(result, expected_line, rtol=1e-5)
    assert steps.tolist() == list(range(1, 51))


def test_coefficients_plot_like_their_toeplitz_matrix():
    shape = np.array([0.5, -0.3, 2.0, 0.0, 0.7, 0.1, -1.1])
    for picture in (plot.noise, plot.spectrum):
        ax = picture(shape, toeplitz_matrix(shape))
        one, other = (line_data(line) for line in ax.lines)
        np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("count", [9, 10])
def test_spectrum_equals_the_expected_periodogram(count):
    shape = 1.3 * tree_matrix(count, 0.9)
    covariance = shape @ shape.T
    frequencies, result = line_data(plot.spectrum(shape).lines[0])
    np.testing.assert_allclose(frequencies, np.arange(1, count // 2 + 1) / count)
    for f, power in zip(frequencies, result, strict=True):
        wave = np.exp(-2j * np.pi * f * np.arange(count))
        expected = (wave @ covariance @ wave.conj()).real / count
        assert power == pytest.approx(expected, rel=1e-12)


def test_mean_power_equals_mean_variance():
    from dpjax.plot import _runs

    for shape in (tree_matrix(12, 0.5), 0.3 * 0.9 ** np.arange(13)):
        variances = _runs.deviations(shape) ** 2
        assert _runs.power(shape).mean() == pytest.approx(variances.mean())


# --- all of them


ATTACK = np.random.default_rng(0).standard_normal((2, 3000))


@pytest.fixture
def attack_plot():
    inside, outside = ATTACK
    return plot.attack(inside + 1, outside, 1.0, confidence=0.99, labels=["promised"])


def test_attack_curves_are_near_and_above_the_true_curve(attack_plot):
    """For a 1-GDP mechanism: measured rates near its curve, proven ones above it."""
    inside, outside = ATTACK
    ax = attack_plot
    _, observed, proven = (line_data(line) for line in ax.lines[:3])
    truth = np.asarray(gdp.tradeoff(1.0, observed[0]))
    np.testing.assert_allclose(observed[1][1:-1], truth[1:-1], atol=0.08)
    assert (proven[1] >= np.asarray(gdp.tradeoff(1.0, proven[0])) - 1e-6).all()
    assert (np.diff(proven[1]) <= 0).all()
    # Rates at single thresholds, one by one.
    for t in (0.0, 1.0, 2.0):
        alarms, missed = np.mean(outside > t), np.mean(inside + 1 <= t)
        place = np.searchsorted(observed[0], alarms, side="right") - 1
        assert abs(observed[1][place] - missed) < 0.03
    label = legend_labels(ax)[2]
    assert label.startswith("proven, 99 %: 0.0")


@pytest.fixture
def attack_plots():
    inside, outside = np.random.default_rng(1).standard_normal((2, 3000))
    return (
        plot.attack(inside + 2, outside, 1.0, confidence=0.99),
        plot.attack(inside, outside, confidence=0.9),
    )


def test_proven_curve_of_broken_promise_is_below_it(attack_plots):
    ax, without = attack_plots
    promised, _, proven = (line_data(line) for line in ax.lines[:3])
    assert (proven[1] < np.interp(proven[0], *promised) - 0.1).any()
    assert len(without.lines) == 5


def test_lines_are_distinguishable_without_colour():
    styles = [_style.strokes(number) for number in range(35)]
    assert len({(str(s["linestyle"]), s["marker"]) for s in styles}) == 35
    for style in styles:
        red, green, blue = to_rgb(style["color"])
        assert 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.5


class AxesResults(NamedTuple):
    """Axes returned when drawing on given axes, and then without."""

    given: plt.Axes
    handed_back: plt.Axes
    figures: int
    other: plt.Axes


@pytest.fixture
def axes_results(draw):
    _, given = plt.subplots()
    return AxesResults(given, draw(given), len(plt.get_fignums()), draw(None))


@pytest.mark.parametrize(
    "draw",
    [
        lambda ax: plot.tradeoff(1.0, ax=ax),
        lambda ax: plot.attack(*ATTACK, 1.0, confidence=0.9, ax=ax),
        lambda ax: plot.epsilon_by_step(make_fixed_plan(), ax=ax),
        lambda ax: plot.compare([make_fixed_plan()], ax=ax),
        lambda ax: plot.noise(np.ones(3), ax=ax),
        lambda ax: plot.spectrum(np.ones(3), ax=ax),
    ],
)
def test_given_axes_are_used_and_returned(axes_results):
    assert axes_results.handed_back is axes_results.given
    assert axes_results.figures == 1
    assert axes_results.other is not axes_results.given


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (plot.tradeoff, "guarantees"),
        (lambda: plot.tradeoff("1.0"), "guarantees"),
        (lambda: plot.tradeoff(-1.0), "guarantee"),
        (lambda: plot.tradeoff(1.0, labels=[]), "labels"),
        (lambda: plot.tradeoff(1.0, labels="a"), "labels"),
        (lambda: plot.tradeoff(1.0, false_positive_rate=1.0), "false_positive_rate"),
        (lambda: plot.attack(np.ones(9), np.ones(0), confidence=0.9), "scores_out"),
        (lambda: plot.attack(np.ones(9), np.ones(9), confidence=0.4), "confidence"),
        (lambda: plot.attack(np.ones((9, 1)), np.ones(9), confidence=0.9), "scores_in"),
        (plot.epsilon_by_step, "plans"),
        (lambda: plot.epsilon_by_step(1.0), "plans"),
        (lambda: plot.epsilon_by_step(make_fixed_plan(), delta=2.0), "delta"),
        (lambda: plot.compare([]), "plans"),
        (lambda: plot.budget(make_fixed_budget()), "composition"),
        (plot.noise, "shapes"),
        (lambda: plot.noise(np.ones((2, 2, 2))), "shapes"),
        (lambda: plot.noise([1.0, math.nan]), "shapes"),
        (lambda: plot.spectrum([1.0]), "shapes"),
    ],
)
def test_invalid_arguments_raise(draw, name):
    with pytest.raises(ValueError, match=name):
        draw()
    assert plt.get_fignums() == []


@pytest.mark.whole
def test_matplotlib_is_imported_lazily():
    program = """
import sys
import dpjax
assert not {"matplotlib", "dpjax.plot"} & set(sys.modules)
from dpjax import plot
assert dpjax.plot is plot and "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None
try:
    plot.tradeoff(1.0)
except ImportError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "'.[plot]'" in result.stdout


@pytest.mark.slow
def test_programs_on_the_page_draw_the_committed_figures(
    tmp_path, monkeypatch, compiled
):
    page, variables = (ROOT / "docs/plots.md").read_text("utf-8"), {}
    (tmp_path / "docs/plots").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    # No figure is committed of ε by step, whose points other tests check.
    monkeypatch.setattr("dpjax.plot._runs._POINTS", 6)
    # Rank promotion is as users have it; the style of the page ends with it.
    with jax.numpy_rank_promotion("allow"), plt.rc_context():
        for program in page.split("```python\n")[1:]:
            exec(compile(program.split("```")[0], "plots.md", "exec"), variables)
    committed = sorted((ROOT / "docs/plots").glob("*.png"))
    names = {"budget.png", "tradeoff.png", "spectrum.png"}
    assert {path.name for path in committed} == names
    for path in committed:
        assert f"](plots/{path.name})" in page
        one, other = (plt.imread(p) for p in (path, f"docs/plots/{path.name}"))
        assert one.shape == other.shape
        # A curve that moves by a tenth of its μ changes more than that.
        assert np.abs(one - other).mean() < 0.002
