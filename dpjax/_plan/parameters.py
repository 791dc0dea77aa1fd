"""The numbers of a run, in one frozen record that every part of a plan reads.

Noise, clip norm and batch size may vary from step to step by a schedule, a function of
the step. The schedule divides the run into segments, in which these numbers are
constant. For the accountant, the run is a composition with one mechanism for each
distinct value. The accountant's work grows with the number of distinct values, so that
a schedule is rounded to a few values. The run itself uses the rounded values. The
guarantee therefore holds for the run.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import Adjacency, Arithmetic, ArrayLike
from dpjax._matrices.strategy import Strategy, StrategySpec
from dpjax._plan.quantile import QuantileClip

# The maximum number of distinct values of a schedule. If a schedule varies by a factor
# of ten, the ratio of neighbouring levels is 1.33.
_LEVELS = 8
# The maximum number of segments of a plan. Each step looks up its segment among them.
_PIECES = 1024


class Segment(NamedTuple):
    """Consecutive steps of a run with the same noise, clip norm and batch size.

    A segment ends where the next segment starts, or at the end of the run.

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
    num_steps: int, batch_size: int, factors: Sequence[Factor | None]
) -> tuple[Segment, ...]:
    """Round the schedules of a run to a few values, and divide the run into segments.

    Args:
      num_steps: T, the number of steps.
      batch_size: the plan's batch size. A step's batch size is the plan's batch size
        times the value of the batch schedule, rounded to an integer.
      factors: the schedules of the noise multiplier, the clip norm and the batch size,
        in this order; None for a number that is constant.

    Raises:
      ValueError: a schedule does not give one number from 2⁻²⁰ to 2²⁰ for each step, or
        the rounded schedules divide the run into more than `_PIECES` segments.
    """
    names = "noise_schedule", "clip_schedule", "batch_schedule"
    pairs = zip(names, factors, strict=True)
    noises, clips, sizes = (_levels(name, f, num_steps) for name, f in pairs)
    # Batch sizes are whole numbers, and at least 1.
    rows = np.stack([noises, clips, np.maximum(np.rint(batch_size * sizes), 1)])
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
    """The values of a schedule, f64[num_steps], rounded up to a few distinct values.

    There are at most `_LEVELS` distinct values. All of them are float32 numbers, so
    that the accountant and the jitted step use the same values.

    Args:
      name: the name of the schedule in error messages.
      factor: the schedule, a function of a step's number; None for all ones.
      num_steps: the number of steps.
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
    """The schedule's values, f64[num_steps]. Raises if a value is out of range."""
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

    The noise is the noise multiplier of a step, divided by the plan's noise multiplier.
    Steps that differ in their clip norms alone are counted together. The reason is that
    the noise's standard deviation is a multiple of the clip norm. So the clip norm does
    not change the privacy cost of a step.
    """
    counts: Counter[tuple[float, int]] = Counter()
    ends = [*(piece.start for piece in schedule[1:]), num_steps]
    for piece, end in zip(schedule, ends, strict=True):
        length = min(end, num_steps) - piece.start
        if length > 0:
            counts[piece.noise, piece.batch_size] += length
    return counts


@dataclasses.dataclass(frozen=True)
class RunParameters:
    """The numbers of a run; the attributes of `dpjax.Plan` describe each of them."""

    num_examples: int
    batch_size: int
    num_steps: int
    noise_multiplier: float
    clip_norm: float
    max_batch_size: int
    epsilon: float
    delta: float
    sampling: str
    noise: str
    adjacency: Adjacency
    solved_for: str
    unit: str = "example"
    arithmetic: Arithmetic = "real"
    schedule: tuple[Segment, ...] = ()
    quantile: QuantileClip | None = None
    shape: StrategySpec | None = None

    @property
    def strategy(self) -> Strategy | None:
        """The matrix that correlates the noise of steps; None for independent noise."""
        return None if self.shape is None else self.shape.strategy(self.num_steps)

    def parameters(self, **changes: Any) -> "RunParameters":
        """A copy of the numbers of this run or plan, with the given changes."""
        fields = dataclasses.fields(RunParameters)
        return RunParameters(
            **{x.name: getattr(self, x.name) for x in fields} | changes
        )

    def constant_runs(self) -> list["RunParameters"]:
        """Split this run into runs with constant noise and batch size.

        The composition of the returned runs has the privacy cost of this run. Steps
        with the same numbers form one run, wherever they are in the schedule, since the
        composition does not depend on the order of the steps.
        """
        if not self.schedule:
            return [self]
        counts = groups(self.schedule, self.num_steps)
        return [
            self.parameters(
                noise_multiplier=self.noise_multiplier * noise,
                batch_size=size,
                num_steps=count,
                schedule=(),
            )
            for (noise, size), count in sorted(counts.items())
        ]

    def noises(self) -> np.ndarray:
        """Each step's noise multiplier over the plan's noise multiplier, f64[T].

        The run must have a schedule, and T is num_steps.
        """
        starts = [piece.start for piece in self.schedule]
        held = np.searchsorted(starts, np.arange(self.num_steps), side="right") - 1
        return np.array([piece.noise for piece in self.schedule])[held]

    def values_at(self, step: ArrayLike) -> StepValues:
        """Return the noise, clip norm and batch size of a step.

        The step's number may be traced. Steps after the end of the run have the values
        of the last step.
        """
        if not self.schedule:
            return StepValues(1.0, 1.0, self.batch_size)
        if len(self.schedule) == 1:
            return StepValues(*self.schedule[0][1:])
        columns = zip(*self.schedule, strict=True)
        starts, noises, clips, sizes = map(jnp.asarray, columns)
        held = jnp.sum(starts <= jnp.asarray(step)) - 1
        noises, clips = noises.astype(jnp.float32), clips.astype(jnp.float32)
        return StepValues(noises[held], clips[held], sizes[held])
