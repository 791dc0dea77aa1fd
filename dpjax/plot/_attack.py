"""What was promised, and what an attack reached."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike
from dpjax.auditing._reached import achieved_rates
from dpjax.auditing._thresholds import check_confidence, check_scores
from dpjax.plot._style import GREY, axes, finish
from dpjax.plot._tradeoff import Line, framed, promised

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def attack(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *guarantees: Any,
    confidence: float,
    labels: Sequence[str] | None = None,
    false_positive_rate: float = 0.01,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the error rates that an attack reached beside those that were promised.

    Args:
      scores_in: the attack's scores where the example took part, f[n]; larger ones
        speak for it.
      scores_out: those where it did not, f[m].
      *guarantees: what bounds the attack, as for `tradeoff`.
      confidence: of the proven rates, in (0.5, 1).
      labels: a name for each guarantee.
      false_positive_rate: where true-positive rates are marked, in (0, 1).
      ax: the matplotlib Axes to draw on; None for those of a new figure.

    Returns:
      The Axes of `tradeoff`, and besides the rates of all tests "the score is above a
      threshold": as they were on these scores, an estimate, and as they are proven to
      be. Between the two is what chance may have done. Where the proven line is below
      a promised one, the promise is refuted.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: an argument is out of range, or there are no scores.

    Privacy: what is proven bounds the mechanism from below, with the confidence and if
    the scores are independent, as for `auditing.epsilon_lower`.

    Example:
      >>> import numpy as np
      >>> noise = np.random.default_rng(0).standard_normal((2, 2000))
      >>> ax = attack(noise[0] + 0.8, noise[1], 1.0, confidence=0.95)
      >>> [text.get_text() for text in ax.get_legend().get_texts()][:3]
      ['1.00-GDP: 0.093', 'the attack reached: 0.049', 'proven, 95 %: 0.014']
    """
    check_scores(scores_in=scores_in, scores_out=scores_out)
    validate.scalar("confidence", confidence)
    check_confidence(confidence)
    if np.ndim(scores_in) != 1 or np.ndim(scores_out) != 1:
        raise ValueError(
            "scores_in and scores_out must be f[n] and f[m]; got shapes "
            f"{np.shape(scores_in)} and {np.shape(scores_out)}."
        )
    validate.scalar("false_positive_rate", false_positive_rate)
    validate.open_unit("false_positive_rate", false_positive_rate)
    lines = promised(guarantees, labels, false_positive_rate)
    rates = achieved_rates(scores_in, scores_out, confidence)
    seen = _line(
        rates.false_positive,
        rates.false_negative,
        "the attack reached",
        false_positive_rate,
    )
    proven = _line(
        rates.false_positive_bound,
        rates.false_negative_bound,
        f"proven, {100 * confidence:g} %",
        false_positive_rate,
    )
    ax = framed(
        axes(ax, (5.2, 5.0)),
        [*lines, seen, proven],
        false_positive_rate,
        "true-positive rate,",
    )
    between = np.union1d(seen.false_positive, proven.false_positive)
    ax.fill_between(
        between,
        _step_function(seen, between),
        _step_function(proven, between),
        step="post",
        color=GREY,
        alpha=0.2,
        linewidth=0,
    )
    return finish(ax, "false-positive rate", "false-negative rate")


def _line(
    false_positive: np.ndarray, false_negative: np.ndarray, name: str, rate: float
) -> Line:
    """A staircase: what a test reaches with no more false alarms than each rate."""
    order = np.argsort(false_positive, kind="stable")
    rates = np.concatenate([[0.0], false_positive[order], [1.0]])
    missed = np.concatenate([[1.0], false_negative[order], [0.0]])
    missed = np.minimum.accumulate(missed)
    # Corners of the stairs, from the left: down at each rate.
    x, y = np.repeat(rates, 2)[1:], np.repeat(missed, 2)[:-1]
    marked = int(np.searchsorted(x, rate, side="right")) - 1
    # Towards less success: an attack is not better than it was.
    power = np.floor((1 - y[marked]) * 1000) / 1000
    return Line(x, y, f"{name}: {power:.3f}", marked)


def _step_function(line: Line, rates: np.ndarray) -> np.ndarray:
    """The staircase at the rates."""
    places = np.searchsorted(line.false_positive, rates, side="right") - 1
    return line.false_negative[places]
