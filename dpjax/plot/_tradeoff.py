"""Plots of the error rates that guarantees allow, and that a single attack achieves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import scoped
from dpjax._core.typing import ArrayLike
from dpjax._plan.guarantee import RunGuarantee, up
from dpjax._plan.plan import Plan
from dpjax.accounting.profiles import Gaussian, Profile, Pure, tradeoff_curve
from dpjax.auditing._scores import band, check_attack, replace_nan_scores
from dpjax.plot._style import GREY, axes, finish, names, strokes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# False-positive rates, closest together at both ends, where trade-off curves bend most.
_RATES = np.sin(np.linspace(0.0, np.pi / 2, 201)) ** 2


def tradeoff(
    *guarantees: Any,
    labels: Sequence[str] | None = None,
    false_positive_rate: float = 0.01,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the error rates that guarantees allow an attack to achieve.

    An attack tries to tell two neighbouring data sets apart.

    Args:
      *guarantees: the guarantees that bound the attack. Each guarantee is a
        `dpjax.Plan`, a plan's guarantee, a solver's guarantee, an `accounting.pld.PLD`,
        or a number at least 0 for the μ of GDP.
      labels: a name for each guarantee.
      false_positive_rate: the false-positive rate at which the plot marks the curves,
        in (0, 1).
      ax: the matplotlib Axes to draw on; None for the Axes of a new figure.

    Returns:
      The Axes, which show the minimum false-negative rate against the false-positive
      rate, for each guarantee, for perfect privacy and for no privacy. For each
      guarantee, the legend gives the maximum true-positive rate at the marked
      false-positive rate, rounded up.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: no guarantee is given, or an argument is not a guarantee; the number
        of labels is not the number of guarantees; or false_positive_rate is out of
        range.

    Privacy: no attack has error rates below the curve of a guarantee. The curves of
    Gaussian mechanisms and of pure differential privacy are exact. Every other curve is
    the best lower bound from ε at two dozen values of δ. This lower bound is proven,
    and differs from the exact curve by less than a line's width.

    Reference: Dong, Roth and Su (2022), Proposition 3, for the bound from values of ε.

    Example:
      >>> ax = tradeoff(0.5, 1.0, labels=["little", "more"])
      >>> [text.get_text() for text in ax.get_legend().get_texts()][:2]
      ['little: 0.034', 'more: 0.093']
    """
    if not guarantees:
        raise ValueError("guarantees must contain at least one guarantee; got none.")
    lines = guarantee_lines(guarantees, labels, false_positive_rate)
    return draw_curves(axes(ax, (5.2, 5.0)), lines, false_positive_rate)


class Line(NamedTuple):
    """A line of error rates in a plot.

    Attributes:
      false_positive: the false-positive rate at each point, f64[k].
      false_negative: the false-negative rate at each point, f64[k].
      label: the line's entry in the legend.
      marked: the index of the point that has a marker.
    """

    false_positive: np.ndarray
    false_negative: np.ndarray
    label: str
    marked: int


def guarantee_lines(
    guarantees: Sequence[Any], labels: Sequence[str] | None, false_positive_rate: float
) -> list[Line]:
    """Compute the trade-off curves of the given guarantees, as lines of a plot.

    Each line has a marker at the given false-positive rate. The line's label consists
    of the guarantee's name and the maximum true-positive rate at the marker, rounded
    up.
    """
    validate.scalar("false_positive_rate", false_positive_rate)
    validate.open_unit("false_positive_rate", false_positive_rate)
    guarantees = [x.guarantee if isinstance(x, Plan) else x for x in guarantees]
    profiles = [_profile(guarantee) for guarantee in guarantees]
    legend = names(labels, list(map(_name, guarantees, profiles)))
    # The rates include the marked rate, so that its marker is on the curve.
    rates = np.union1d(_RATES, [false_positive_rate])
    marked = int(np.searchsorted(rates, false_positive_rate))
    lines = []
    for profile, name in zip(profiles, legend, strict=True):
        false_negative = tradeoff_curve(profile, rates)
        # The label is rounded up, since it is an upper bound for every attack.
        power = up(1.0 - false_negative[marked])
        lines.append(Line(rates, false_negative, f"{name}: {power}", marked))
    return lines


def draw_curves(
    ax: "Axes",
    lines: Sequence[Line],
    false_positive_rate: float,
    title: str = "true-positive rate at most,",
) -> "Axes":
    """Draw the given lines, the lines of perfect and of no privacy, and a legend.

    A vertical line marks the false-positive rate. The legend's title is `title`, then
    this rate.
    """
    for number, (rates, false_negative, label, marked) in enumerate(lines):
        style = {**strokes(number), "label": label, "markevery": [marked]}
        ax.plot(rates, false_negative, **style)
    ax.plot([0, 1], [1, 0], ":", color=GREY, linewidth=1, label="perfect privacy")
    no_privacy = {"color": GREY, "linewidth": 3, "alpha": 0.5, "label": "no privacy"}
    ax.plot([0, 0, 1], [1, 0, 0], **no_privacy)
    ax.axvline(false_positive_rate, color=GREY, linewidth=0.6, zorder=0)
    ax.set_xlim(-0.01, 1)
    ax.set_ylim(-0.01, 1)
    ax.set_aspect("equal")
    title = f"{title}\nat {false_positive_rate:g} false positives"
    ax.legend(loc="upper right", title=title, frameon=False, fontsize="small")
    return finish(ax, "false-positive rate", "false-negative rate, at least")


def _profile(guarantee: Any) -> Profile:
    """Return the privacy profile of a guarantee, a PLD, or a number μ of GDP.

    Raises:
      ValueError: the argument is not a guarantee, a PLD, or a number at least 0.
    """
    profile = getattr(guarantee, "profile", guarantee)
    if all(callable(getattr(profile, name, None)) for name in ("epsilon", "delta")):
        return profile
    try:
        validate.scalar("a guarantee", guarantee)
    except ValueError:
        raise ValueError(
            "guarantees must be plans, guarantees, PLDs, or numbers for the μ of GDP; "
            f"got {guarantee!r}."
        ) from None
    validate.nonnegative("the μ of a guarantee", guarantee, finite=False)
    return Gaussian(float(guarantee))


def _name(guarantee: Any, profile: Profile) -> str:
    """The default legend entry of a guarantee that has the given privacy profile."""
    if isinstance(guarantee, RunGuarantee):
        delta = guarantee.plan.delta
        return f"ε = {up(float(guarantee.epsilon(delta)), 2)}, δ = {delta:g}"
    if isinstance(profile, Gaussian):
        return f"{up(float(np.asarray(profile.mu)), 2)}-GDP"
    if isinstance(profile, Pure):
        return f"ε = {up(float(np.asarray(profile.pure_epsilon)), 2)}, δ = 0"
    return type(guarantee).__name__


@scoped
def achieved_lines(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    confidence: float,
    false_positive_rate: float,
) -> tuple[Line, Line]:
    """Compute the observed and proven error rates of an attack on one example.

    The attack compares the score of a run with a threshold.

    Args:
      scores_in: the scores of runs with the example's participation, f[n].
      scores_out: the scores of runs without the example's participation, f[m].
      confidence: the confidence of the proven rates.
      false_positive_rate: a false-positive rate, in (0, 1). Each line is a step
        function, with a marker at the last corner up to this rate.

    Returns:
      The line of the observed rates, and the line of upper bounds on the true rates.
      With the given confidence, the upper bounds hold at all thresholds simultaneously.
    """
    inside, outside = (jnp.asarray(x, jnp.float64) for x in (scores_in, scores_out))
    thresholds, bounds = band(inside, outside, jnp.asarray(1 - confidence), union=True)
    inside, outside = map(jnp.sort, replace_nan_scores(inside, outside))
    # The share of scores at or below a threshold is the false-negative rate for runs
    # with the example, and the true-negative rate for runs without the example.
    false_negative, true_negative = (
        jnp.searchsorted(x, thresholds, side="right") / x.size
        for x in (inside, outside)
    )
    name = "the attack reached"
    observed = _line(1 - true_negative, false_negative, name, false_positive_rate)
    false_positive, true_positive = bounds
    name = f"proven, {100 * confidence:g} %"
    return observed, _line(false_positive, 1 - true_positive, name, false_positive_rate)


def attack(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *guarantees: Any,
    confidence: float,
    labels: Sequence[str] | None = None,
    false_positive_rate: float = 0.01,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the error rates that an attack achieved, and rates that guarantees allow.

    Args:
      scores_in: the attack's scores with the example's participation, f[n]. Larger
        scores are evidence of participation.
      scores_out: the scores without the example's participation, f[m].
      *guarantees: the guarantees that bound the attack, as for `tradeoff`.
      confidence: the probability with which the proven rates hold, in (0.5, 1).
      labels: a name for each guarantee.
      false_positive_rate: the false-positive rate at which the plot marks the lines, in
        (0, 1).
      ax: the matplotlib Axes to draw on; None for the Axes of a new figure.

    Returns:
      The Axes of `tradeoff`, with two more lines. Each of the two lines shows error
      rates of the attack that guesses participation if the score is above a threshold,
      as the threshold varies. One line shows the observed error rates, which are
      estimates. The other line shows proven upper bounds on the error rates. The area
      between the two lines is the uncertainty. If the proven line is anywhere below the
      line of a guarantee, the attack refutes this guarantee with the given confidence.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: an argument is out of range; scores_in or scores_out is empty or not a
        vector; an argument is not a guarantee; or the number of labels is not the
        number of guarantees.

    Privacy: under the assumptions of `auditing.epsilon_lower` on the scores, the proven
    line bounds the mechanism's privacy loss from below with the given confidence.

    Example:
      >>> import numpy as np
      >>> noise = np.random.default_rng(0).standard_normal((2, 2000))
      >>> ax = attack(noise[0] + 0.8, noise[1], 1.0, confidence=0.95)
      >>> [text.get_text() for text in ax.get_legend().get_texts()][:3]
      ['1.00-GDP: 0.093', 'the attack reached: 0.049', 'proven, 95 %: 0.014']
    """
    check_attack(confidence, scores_in=scores_in, scores_out=scores_out)
    validate.scalar("confidence", confidence)
    if np.ndim(scores_in) != 1 or np.ndim(scores_out) != 1:
        raise ValueError(
            "scores_in and scores_out must be vectors; got shapes "
            f"{np.shape(scores_in)} and {np.shape(scores_out)}."
        )
    lines = guarantee_lines(guarantees, labels, false_positive_rate)
    observed, proven = achieved_lines(
        scores_in, scores_out, confidence, false_positive_rate
    )
    ax = axes(ax, (5.2, 5.0))
    draw_curves(
        ax, [*lines, observed, proven], false_positive_rate, "true-positive rate,"
    )
    # `rates` has the corners of both step functions, which are constant in between.
    rates = np.union1d(observed.false_positive, proven.false_positive)
    low, high = (_step_function(line, rates) for line in (observed, proven))
    fill_style = {"step": "post", "color": GREY, "alpha": 0.2, "linewidth": 0}
    ax.fill_between(rates, low, high, **fill_style)
    return finish(ax, "false-positive rate", "false-negative rate")


def _line(
    false_positive: ArrayLike, false_negative: ArrayLike, name: str, rate: float
) -> Line:
    """Make a line of the least false-negative rate against the false-positive rate.

    Args:
      false_positive: the false-positive rate of the test at each threshold, f[k].
      false_negative: the false-negative rate of the test at each threshold, f[k].
      name: the name for the legend.
      rate: a false-positive rate, for the marker and the label.

    Returns:
      A `Line` through the corners of a step function from (0, 1) to (1, 0). The marker
      is at the last corner whose false-positive rate is at most `rate`. The label has
      the name, and the true-positive rate at the marker, rounded down.
    """
    false_positive = np.asarray(false_positive)
    false_negative = np.asarray(false_negative)
    order = np.argsort(false_positive, kind="stable")
    false_positive = np.concatenate([[0.0], false_positive[order], [1.0]])
    false_negative = np.concatenate([[1.0], false_negative[order], [0.0]])
    false_negative = np.minimum.accumulate(false_negative)
    # x and y are the corners of the step function, which steps down at each rate.
    x, y = np.repeat(false_positive, 2)[1:], np.repeat(false_negative, 2)[:-1]
    marked = int(np.searchsorted(x, rate, side="right")) - 1
    # Round the true-positive rate down, so that no label overstates the attack.
    power = np.floor((1 - y[marked]) * 1000) / 1000
    return Line(x, y, f"{name}: {power:.3f}", marked)


def _step_function(line: Line, rates: np.ndarray) -> np.ndarray:
    """The false-negative rates of a step function at given false-positive rates."""
    indices = np.searchsorted(line.false_positive, rates, side="right") - 1
    return line.false_negative[indices]
