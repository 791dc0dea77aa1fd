"""The room that a batch of random size needs, beyond what it takes in expectation."""

import functools
import math
from typing import Any

from dpjax._core import validate
from dpjax._core.float64 import TINY, scope
from dpjax._plan.mechanisms import Mechanism, mechanism_of
from dpjax._plan.parameters import RunParameters

# The share of δ that may go to batches which overflow.
SHARE = 0.01


def cost(run: RunParameters) -> float:
    """The ε of a run at its δ, in float64, whatever ε the run states."""
    return _cost(run.parameters(epsilon=math.inf))


@functools.lru_cache(maxsize=1024)
def _cost(run: RunParameters) -> float:
    with scope():
        return float(mechanism_of(run).profile(run).epsilon(run.delta))


def check_sizes(mechanism: Mechanism, batch_size: int | None, room: Any) -> None:
    """Refuse a batch that is too large for the data, or for a given room."""
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
    """The least room, from the largest batch on, at which ε is what was solved for.

    That is without overflow, at less than δ. There may be room enough below b too, as a
    step that takes a few of many examples costs little, but it trains little: three
    standard deviations above b are the least that is looked at.

    What overflow adds to ε falls about as e^{−z²/2} where the room is z standard
    deviations above b. So its logarithm is nearly straight in z², and secants find the
    room in a few steps; halving does if they have not.
    """
    n = solved.max_batch_size
    deviation = max(math.sqrt(size * (1 - size / n)), 1.0)

    def cost_with(room: int) -> float:
        return cost(solved.parameters(max_batch_size=room, delta=delta))

    ideal = cost_with(n)

    def square(room: int) -> float:
        return ((room - size) / deviation) ** 2

    low, high = math.ceil(size + 3 * deviation) - 1, n
    if not math.isfinite(ideal):
        return min(low + 1, n)
    spare = math.log(max(solved.epsilon - ideal, TINY))
    room, slope, last, tries = low + 1, -0.5, None, 0
    while high - low > 1:
        epsilon = cost_with(room)
        low, high = (low, room) if epsilon <= solved.epsilon else (room, high)
        adds = min(max(epsilon - ideal, TINY), 1 / TINY)
        now = square(room), math.log(adds) - spare
        if last is not None and now[1] != last[1]:
            slope = (now[1] - last[1]) / (now[0] - last[0])
        z = math.sqrt(max(now[0] - now[1] / slope, 0.0))
        aim = (
            math.ceil(min(size + z * deviation, n)) if tries < 8 else (low + high) // 2
        )
        room, last, tries = min(max(aim, low + 1), high - 1), now, tries + 1
    return min(high, n)
