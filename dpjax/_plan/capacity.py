"""The capacity of a batch of random size: how far above its expected size it may go."""

import functools
import math
from typing import Any

from dpjax._core import validate
from dpjax._core.float64 import TINY, scope
from dpjax._plan.mechanisms import Mechanism, mechanism_of
from dpjax._plan.parameters import RunParameters

# The share of δ that may be spent on batches which exceed their capacity.
SHARE = 0.01


def cost(run: RunParameters) -> float:
    """The ε of a run at its δ, in float64. The run's own field epsilon is ignored."""
    # The field does not change the cost. One value for all makes cache hits.
    return _cost(run.parameters(epsilon=math.inf))


@functools.lru_cache(maxsize=1024)
def _cost(run: RunParameters) -> float:
    with scope():
        return float(mechanism_of(run).profile(run).epsilon(run.delta))


def check_sizes(mechanism: Mechanism, batch_size: int | None, room: Any) -> None:
    """Raise for a batch larger than the data set, or than the given capacity."""
    n = mechanism.num_examples
    if batch_size is not None and batch_size > n:
        raise ValueError(
            f"batch_size must be at most num_examples, {n}; got {batch_size!r}."
        )
    if room is None:
        return
    if not mechanism.overflows:
        raise ValueError(
            "max_batch_size must be None with this sampling, whose batches all have "
            f"one size; got {room!r}."
        )
    if validate.static_int("max_batch_size", room, minimum=batch_size or 1) > n:
        raise ValueError(
            f"max_batch_size must be at most num_examples, {n}; got {room!r}."
        )


def smallest_capacity(solved: RunParameters, delta: float, size: int) -> int:
    """The smallest capacity at which overflow does not raise ε above solved.epsilon.

    The run was solved for without overflow at less than δ, and the rest of δ is left
    for overflow. The search starts at three standard deviations above the batch size b.
    A capacity below b may meet the target, too, since a step on a few of many examples
    costs little; but such a step trains little.

    What overflow adds to ε falls about as e^{−z²/2}, with the capacity z standard
    deviations above b. So its logarithm is nearly linear in z², and the secant method
    finds the capacity in a few steps. If eight steps are not enough, bisection does.

    Args:
      solved: the run without overflow, with the capacity n of all examples that a step
        draws from, and with its ε at less than δ.
      delta: the whole δ, at which the result must cost at most solved.epsilon.
      size: the largest batch size b of the run.

    Returns:
      The capacity, at most n.
    """
    n = solved.max_batch_size
    # The standard deviation of a binomial size; at least 1, as it divides below.
    deviation = max(math.sqrt(size * (1 - size / n)), 1.0)

    def cost_with(room: int) -> float:
        return cost(solved.parameters(max_batch_size=room, delta=delta))

    ideal = cost_with(n)

    def square(room: int) -> float:
        return ((room - size) / deviation) ** 2

    # The capacity is in (low, high]: high is known to suffice, and low is excluded.
    low, high = math.ceil(size + 3 * deviation) - 1, n
    # If no capacity has a finite ε, the smallest one is as good as any.
    if not math.isfinite(ideal):
        return min(low + 1, n)
    # TINY in place of 0 or less, and 1 / TINY in place of inf, keep logarithms finite.
    spare = math.log(max(solved.epsilon - ideal, TINY))
    # −1/2 is the slope of −z²/2 in z².
    room, slope, last, tries = low + 1, -0.5, None, 0
    while high - low > 1:
        epsilon = cost_with(room)
        low, high = (low, room) if epsilon <= solved.epsilon else (room, high)
        adds = min(max(epsilon - ideal, TINY), 1 / TINY)
        now = square(room), math.log(adds) - spare
        if last is not None and now[1] != last[1]:
            slope = (now[1] - last[1]) / (now[0] - last[0])
        # The z at which the secant through the last two points is 0.
        z = math.sqrt(max(now[0] - now[1] / slope, 0.0))
        aim = (
            math.ceil(min(size + z * deviation, n)) if tries < 8 else (low + high) // 2
        )
        # Strictly inside the bracket, so that the bracket shrinks in every step.
        room, last, tries = min(max(aim, low + 1), high - 1), now, tries + 1
    return min(high, n)
