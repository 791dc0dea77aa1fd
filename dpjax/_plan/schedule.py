"""Noise, clip norm and batch size that vary from step to step, in a few pieces.

A run whose numbers vary is the composition of as many mechanisms as there are values,
and each of them is work for the accountant. So a schedule is rounded to a few levels,
and *that* is what runs: the guarantee is for it, and not for something near it.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import ArrayLike

# Of one schedule. Eight levels over a factor of ten are 33 % apart.
_LEVELS = 8
# A plan holds its pieces, and a step looks through them.
_PIECES = 1024


class Segment(NamedTuple):
    """Steps with the same numbers, which reach to the next piece.

    Attributes:
      start: the first of the steps.
      noise: the noise multiplier, in units of the plan's.
      clip: the clip norm, in units of the plan's.
      batch_size: how many examples a step takes, in expectation.
    """

    start: int
    noise: float
    clip: float
    batch_size: int


class StepValues(NamedTuple):
    """The numbers of one step, as those of a `Segment`."""

    noise: ArrayLike
    clip: ArrayLike
    batch_size: ArrayLike


Factor = Callable[..., ArrayLike]  # of a step's number, as optax's schedules are


def make_segments(
    num_steps: int,
    batch_size: int,
    noise: Factor | None,
    clip: Factor | None,
    batch: Factor | None,
) -> tuple[Segment, ...]:
    """The schedules' values, rounded to levels.

    Raises:
      ValueError: a schedule gives something else than one positive number, or jumps to
        and fro too often.
    """
    noises = _levels("noise_schedule", noise, num_steps)
    clips = _levels("clip_schedule", clip, num_steps)
    sizes = batch_size * _levels("batch_schedule", batch, num_steps)
    rows = np.stack([noises, clips, np.maximum(np.rint(sizes), 1)])
    new = np.any(rows[:, 1:] != rows[:, :-1], axis=0)
    starts = np.concatenate([[0], 1 + np.flatnonzero(new)])
    if starts.size > _PIECES:
        raise ValueError(
            f"schedules must change at most {_PIECES} times, once they are rounded to "
            f"{_LEVELS} levels each; got {starts.size} pieces."
        )
    return tuple(
        Segment(int(start), float(n), float(c), int(b))
        for start, (n, c, b) in zip(starts, rows[:, starts].T, strict=True)
    )


def _levels(name: str, factor: Factor | None, num_steps: int) -> np.ndarray:
    """A schedule's values, rounded up to at most so many, which float32 holds."""
    if factor is None:
        return np.ones(num_steps)
    values = _values(name, factor, num_steps)
    distinct = np.unique(values)
    if distinct.size > _LEVELS:
        ends = math.log(distinct[0]), math.log(distinct[-1])
        distinct = np.exp(np.linspace(*ends, _LEVELS + 1)[1:])
        distinct[-1] = values.max()
        values = distinct[np.searchsorted(distinct, values)]
    return values.astype(np.float32).astype(np.float64)


def _values(name: str, factor: Factor, num_steps: int) -> np.ndarray:
    """What the schedule gives for each step, f64[T]."""
    if not callable(factor):
        raise ValueError(f"{name} must be a function of the step; got {factor!r}.")
    try:
        values = np.asarray(jax.vmap(factor)(jnp.arange(num_steps)), np.float64)
    except TypeError:  # it is for numbers that are known
        rows = [np.asarray(factor(step)) for step in range(num_steps)]
        values = np.array(rows, np.float64)
    good = (values >= 2.0**-20) & (values <= 2.0**20)
    if values.shape != (num_steps,) or not good.all():
        raise ValueError(
            f"{name} must give one number from 2**-20 to 2**20 for each step; got "
            f"{values!r}."
        )
    return values


def groups(schedule: tuple[Segment, ...], num_steps: int) -> Counter[tuple[float, int]]:
    """How many of the first steps have which noise and batch size."""
    counts: Counter[tuple[float, int]] = Counter()
    ends = [*(piece.start for piece in schedule[1:]), num_steps]
    for piece, end in zip(schedule, ends, strict=True):
        length = min(end, num_steps) - piece.start
        if length > 0:
            counts[piece.noise, piece.batch_size] += length
    return counts


def noises(schedule: tuple[Segment, ...], num_steps: int) -> np.ndarray:
    """The noise of each of the first steps, in units of the plan's, f64[T]."""
    starts = [piece.start for piece in schedule]
    held = np.searchsorted(starts, np.arange(num_steps), side="right") - 1
    return np.array([piece.noise for piece in schedule])[held]


def values_at(schedule: tuple[Segment, ...], step: ArrayLike) -> StepValues:
    """The numbers of a step, which may be traced; those of the last piece after it."""
    if len(schedule) == 1:
        return StepValues(*schedule[0][1:])
    starts, noises, clips, sizes = map(jnp.asarray, zip(*schedule, strict=True))
    held = jnp.sum(starts <= jnp.asarray(step)) - 1
    noises, clips = noises.astype(jnp.float32), clips.astype(jnp.float32)
    return StepValues(noises[held], clips[held], sizes[held])
