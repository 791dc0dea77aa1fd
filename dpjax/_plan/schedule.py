"""Noise, clip norm and batch size that vary from step to step, as a few segments.

A run whose numbers vary is a composition with one mechanism for each distinct value.
The accountant's work grows with the number of distinct values. So a schedule is rounded
to a few levels. The run itself uses the rounded values, so that the guarantee holds for
the numbers that run.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import ArrayLike

# The maximum number of distinct values of a schedule. If a schedule varies by a factor
# of ten, the ratio of neighbouring levels is 1.33.
_LEVELS = 8
# The maximum number of segments of a plan. Each step looks up its segment among them.
_PIECES = 1024


class Segment(NamedTuple):
    """Consecutive steps with the same numbers, up to the start of the next segment.

    Attributes:
      start: the first step of the segment.
      noise: the noise multiplier divided by the plan's noise multiplier.
      clip: the clip norm divided by the plan's clip norm.
      batch_size: the expected number of examples in a step.
    """

    start: int
    noise: float
    clip: float
    batch_size: int


class StepValues(NamedTuple):
    """The numbers of one step, with the meanings and units of a `Segment`."""

    noise: ArrayLike
    clip: ArrayLike
    batch_size: ArrayLike


Factor = Callable[..., ArrayLike]  # a function of a step's number, as in optax


def make_segments(
    num_steps: int,
    batch_size: int,
    noise: Factor | None,
    clip: Factor | None,
    batch: Factor | None,
) -> tuple[Segment, ...]:
    """The segments of a run whose schedules are rounded to a few levels.

    Args:
      num_steps: T, the number of steps.
      batch_size: b, which the values of the batch schedule multiply.
      noise: the schedule of the noise multiplier; None for constant noise.
      clip: the schedule of the clip norm; None for a constant one.
      batch: the schedule of the batch size; None for a constant one.

    Raises:
      ValueError: a schedule does not give one number from 2⁻²⁰ to 2²⁰ for each step, or
        the rounded schedules change too often.
    """
    noises = _levels("noise_schedule", noise, num_steps)
    clips = _levels("clip_schedule", clip, num_steps)
    sizes = batch_size * _levels("batch_schedule", batch, num_steps)
    # Batch sizes are whole numbers, and at least 1.
    rows = np.stack([noises, clips, np.maximum(np.rint(sizes), 1)])
    # A segment starts wherever one of the three numbers changes.
    new = np.any(rows[:, 1:] != rows[:, :-1], axis=0)
    starts = np.concatenate([[0], 1 + np.flatnonzero(new)])
    if starts.size > _PIECES:
        raise ValueError(
            f"schedules must divide the run into at most {_PIECES} segments with "
            f"constant values, after rounding to {_LEVELS} levels each; got "
            f"{starts.size} segments."
        )
    return tuple(
        Segment(int(start), float(n), float(c), int(b))
        for start, (n, c, b) in zip(starts, rows[:, starts].T, strict=True)
    )


def _levels(name: str, factor: Factor | None, num_steps: int) -> np.ndarray:
    """A schedule's values, f64[T], rounded up to at most _LEVELS levels.

    All values are float32 numbers, so that the accountant and the jitted step use the
    same values.
    """
    if factor is None:
        return np.ones(num_steps)
    values = _values(name, factor, num_steps)
    distinct = np.unique(values)
    if distinct.size > _LEVELS:
        ends = math.log(distinct[0]), math.log(distinct[-1])
        # The levels have equal ratios. The smallest value is no level: values round up.
        distinct = np.exp(np.linspace(*ends, _LEVELS + 1)[1:])
        # exp(log(x)) may be below x. The largest value would then have no level.
        distinct[-1] = values.max()
        values = distinct[np.searchsorted(distinct, values)]
    return values.astype(np.float32).astype(np.float64)


def _values(name: str, factor: Factor, num_steps: int) -> np.ndarray:
    """The schedule's value at each step, f64[T]. Raises if a value is out of range."""
    if not callable(factor):
        raise ValueError(f"{name} must be a function of the step; got {factor!r}.")
    try:
        values = np.asarray(jax.vmap(factor)(jnp.arange(num_steps)), np.float64)
    except TypeError:  # a schedule that cannot be traced gets Python integers
        rows = [np.asarray(factor(step)) for step in range(num_steps)]
        values = np.array(rows, np.float64)
    good = (values >= 2.0**-20) & (values <= 2.0**20)
    if values.shape != (num_steps,) or not good.all():
        raise ValueError(
            f"{name} must return one number from 2**-20 to 2**20 for each step; got "
            f"{values!r}."
        )
    return values


def groups(schedule: tuple[Segment, ...], num_steps: int) -> Counter[tuple[float, int]]:
    """Count, for each pair (noise, batch size), the steps among the first num_steps.

    As in a `Segment`, the noise is the noise multiplier of a step, divided by the
    plan's noise multiplier. Steps that differ in their clip norms alone are counted
    together. The reason is that the noise's standard deviation is a multiple of the
    clip norm. So the clip norm does not change the privacy cost of a step.
    """
    counts: Counter[tuple[float, int]] = Counter()
    ends = [*(piece.start for piece in schedule[1:]), num_steps]
    for piece, end in zip(schedule, ends, strict=True):
        length = min(end, num_steps) - piece.start
        if length > 0:
            counts[piece.noise, piece.batch_size] += length
    return counts


def noises(schedule: tuple[Segment, ...], num_steps: int) -> np.ndarray:
    """The noise multiplier of each step, divided by the plan's, f64[num_steps]."""
    starts = [piece.start for piece in schedule]
    held = np.searchsorted(starts, np.arange(num_steps), side="right") - 1
    return np.array([piece.noise for piece in schedule])[held]


def values_at(schedule: tuple[Segment, ...], step: ArrayLike) -> StepValues:
    """Return the noise, clip norm and batch size of a step, which may be traced.

    Steps after the end of the run have the numbers of the last segment.
    """
    if len(schedule) == 1:
        return StepValues(*schedule[0][1:])
    starts, noises, clips, sizes = map(jnp.asarray, zip(*schedule, strict=True))
    held = jnp.sum(starts <= jnp.asarray(step)) - 1
    noises, clips = noises.astype(jnp.float32), clips.astype(jnp.float32)
    return StepValues(noises[held], clips[held], sizes[held])
