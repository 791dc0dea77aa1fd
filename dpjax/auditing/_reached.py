"""The error rates that an attack reached, at many thresholds at once: for pictures."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import scoped
from dpjax._core.typing import ArrayLike
from dpjax.auditing._thresholds import band, replace_nan_scores


class Reached(NamedTuple):
    """The error rates of tests at many thresholds, f64[k] each, from few alarms on.

    Attributes:
      false_positive: on the scores at hand.
      false_negative: likewise.
      false_positive_bound: what the true one does not exceed, of all thresholds at
        once, with the stated confidence.
      false_negative_bound: likewise.
    """

    false_positive: np.ndarray
    false_negative: np.ndarray
    false_positive_bound: np.ndarray
    false_negative_bound: np.ndarray


@scoped
def achieved_rates(
    scores_in: ArrayLike, scores_out: ArrayLike, confidence: float
) -> Reached:
    """What tests by these scores reach, seen and proven: for pictures."""
    inside, outside = (jnp.asarray(x, jnp.float64) for x in (scores_in, scores_out))
    thresholds, bounds = band(inside, outside, jnp.asarray(1 - confidence), union=True)
    inside, outside = map(jnp.sort, replace_nan_scores(inside, outside))
    missed, quiet = (
        jnp.searchsorted(x, thresholds, side="right") / x.size
        for x in (inside, outside)
    )
    found = 1 - quiet, missed, bounds.false_positive, 1 - bounds.true_positive
    return Reached(*map(np.asarray, found))
