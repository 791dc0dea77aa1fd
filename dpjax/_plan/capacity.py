"""The ε of a run, and the capacity of batches of random size.

The capacity is the maximum number of examples in a batch. If a step draws more
examples than the capacity, some of them do not take part. This event is an overflow.
"""

import bisect
import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import TINY, scope
from dpjax._plan.mechanisms import Mechanism, mechanism_of
from dpjax._plan.parameters import RunParameters
from dpjax.accounting import _estimates, profiles
from dpjax.accounting.events import Composed, RandomBins
from dpjax.accounting.profiles import LEAST_SHARE, SHARES_OF_LATTICE, RandomBinsProfile

# The share of δ that may be spent on batches that exceed their capacity.
SHARE = LEAST_SHARE
# The search for a capacity treats a capacity as too small if the predicted cost of its
# overflow exceeds the allowed cost by this share, well above a prediction's error.
_CLEARLY = 0.02


def cost(run: RunParameters) -> float:
    """Compute the ε of a run at run.delta, in float64, without reading run.epsilon."""
    # The field does not change the cost. With inf for all runs, the cache is hit often.
    return _cost(run.parameters(epsilon=math.inf))


@functools.lru_cache(maxsize=1024)
def _cost(run: RunParameters) -> float:
    with scope():
        return float(
            profiles.of(mechanism_of(run).released_event(run)).epsilon(run.delta)
        )


def check_sizes(mechanism: Mechanism, batch_size: int | None, capacity: Any) -> None:
    """Raise unless the mechanism allows this batch size and this maximum batch size.

    Args:
      mechanism: the way to draw batches.
      batch_size: the expected number of examples in a step; None for no check.
      capacity: the maximum number of examples in a batch; None for no check.
    """
    n = mechanism.num_examples
    if batch_size is not None:
        validate.at_most("batch_size", batch_size, n, "num_examples, ")
    if capacity is None:
        return
    if not mechanism.overflows:
        raise ValueError(
            "max_batch_size must be None with this sampling, because all batches "
            f"have the same size; got {capacity!r}."
        )
    validate.static_int("max_batch_size", capacity, minimum=batch_size or 1)
    validate.at_most("max_batch_size", capacity, n, "num_examples, ")


def smallest_capacity(solved: RunParameters, delta: float, size: int) -> int:
    """Find a small capacity at which the run still costs at most solved.epsilon.

    The capacity is the maximum number of examples in a batch. A batch overflows if a
    step draws more examples. Overflow adds to the privacy cost.

    The ε of `solved` holds without overflow and at less than `delta`, so that the rest
    of `delta` can be spent on overflow. The search considers only capacities that are
    at least three standard deviations above the batch size b. A capacity below b may
    suffice, too, since a step on a few of many examples costs little. But such a step
    also trains little.

    In random bins, every example takes part in one random step of an epoch. Then the
    probability of an overflow determines whether a capacity suffices, and bisection
    finds the smallest sufficient capacity. With other samplings, overflow increases ε
    about in proportion to the probability that all examples but one fill a batch. So
    each evaluation of ε predicts the smallest sufficient capacity. After eight
    evaluations, bisection takes the place of the prediction. The search ends at a
    sufficient capacity if, by the prediction, the next smaller one is clearly not
    sufficient. So if the prediction is wrong, the result may not be the smallest.

    Args:
      solved: the run without overflow. Here max_batch_size is n, the number of examples
        from which a step draws, and delta is less than the argument `delta`.
      delta: the δ at which the run with overflow must cost at most solved.epsilon.
      size: b, the largest expected batch size of any step.

    Returns:
      The capacity, at most n.
    """
    from scipy.special import bdtrc  # so that `import dpjax` does not wait for SciPy

    n = solved.max_batch_size
    # The standard deviation of a binomial batch size. It is at least 1, so that the
    # range below has several capacities.
    deviation = max(math.sqrt(size * (1 - size / n)), 1.0)

    # The capacity is in (low, high]: high suffices, and low is excluded.
    low, high = math.ceil(size + 3 * deviation) - 1, n
    # If no capacity has a finite ε, the choice does not matter: take the smallest.
    if not math.isfinite(solved.epsilon) or high - low <= 1:
        return min(low + 1, n)
    event = mechanism_of(solved).event(solved)
    if isinstance(event, RandomBins):
        # On a lattice, at most this share of δ covers the total variation of the noise.
        spent = SHARES_OF_LATTICE[-1] if solved.arithmetic == "discrete" else 0.0

        def suffices(capacity: int) -> bool:
            profile = RandomBinsProfile(replace(event, max_batch_size=capacity))
            with scope():
                return profile.is_spared(solved.epsilon, delta * (1 - spent))

        return low + 1 + bisect.bisect_left(range(low + 1, high), True, key=suffices)
    assert isinstance(event, Composed)
    about = _estimates.overflow(event, solved.epsilon, delta, SHARE)
    # log P(the other examples fill a batch) for each capacity, in decreasing order,
    # down to P = 1e-300.
    capacities = np.arange(low, min(n, math.ceil(size + 40 * deviation)) + 1)
    full = np.log(np.maximum(bdtrc(capacities - 1, n - 1, size / n), TINY))
    aim, tries = about.log_full, 0
    while high - low > 1:
        # Take the smallest capacity whose log P is at most the aim, strictly inside the
        # bracket, so that the bracket shrinks in every step.
        at = int(capacities[0] + np.searchsorted(-full, -aim))
        capacity = at if tries < 8 else (low + high) // 2
        capacity = min(max(capacity, low + 1), high - 1)
        epsilon = cost(solved.parameters(max_batch_size=capacity, delta=delta))
        low, high = (low, capacity) if epsilon <= solved.epsilon else (capacity, high)
        place, tries = min(capacity - capacities[0], full.size - 1), tries + 1
        # The log of the ratio of the overflow's cost in ε to the cost that it may have.
        over = 1 + (epsilon - solved.epsilon) / about.spare
        excess = min(max(math.log(max(over, TINY)), -3.0), 3.0)
        aim = float(full[place]) - excess
        # The bounds themselves are compared, since their ratio may round to 1.
        if epsilon <= solved.epsilon and full[place - 1] - aim > _CLEARLY:
            return capacity
    return high
