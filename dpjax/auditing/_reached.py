"""The error rates that an attack reached, at many thresholds at once: for plots."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import scoped
from dpjax._core.typing import ArrayLike
from dpjax.auditing._thresholds import band, replace_nan_scores


class Reached(NamedTuple):
    """Error rates of tests at many thresholds, f64[k] each, by descending threshold.

    Attributes:
      false_positive: the observed false-positive rates.
      false_negative: the observed false-negative rates.
      false_positive_bound: upper bounds on the true false-positive rates, which hold at
        all thresholds at once with the stated confidence.
      false_negative_bound: likewise for the true false-negative rates.
    """

    false_positive: np.ndarray
    false_negative: np.ndarray
    false_positive_bound: np.ndarray
    false_negative_bound: np.ndarray


@scoped
def achieved_rates(
    scores_in: ArrayLike, scores_out: ArrayLike, confidence: float
) -> Reached:
    """The error rates of threshold tests on these scores, observed and proven.

    Takes scores f[n] where the example took part, and f[m] where the example did not.
    """
    inside, outside = (jnp.asarray(x, jnp.float64) for x in (scores_in, scores_out))
    thresholds, bounds = band(inside, outside, jnp.asarray(1 - confidence), union=True)
    inside, outside = map(jnp.sort, replace_nan_scores(inside, outside))
    # Scores at or below a threshold, as shares: missed examples and no false alarms.
    missed, quiet = (
        jnp.searchsorted(x, thresholds, side="right") / x.size
        for x in (inside, outside)
    )
    found = 1 - quiet, missed, bounds.false_positive, 1 - bounds.true_positive
    return Reached(*map(np.asarray, found))
