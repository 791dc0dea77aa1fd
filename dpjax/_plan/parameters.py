"""The parameters of a run, in one frozen record that every part of a plan reads.

The noise, the clip norm and the batch size may vary from step to step by a schedule, a
function of the step. Schedules divide the run into segments in which the three numbers
are constant. For the accountant, the run is a composition with one mechanism for each
distinct pair of noise and batch size. The accountant's work grows with the number of
these pairs. So each schedule is rounded to a few values. The run itself uses the
rounded values. The guarantee therefore holds for the run.

The clip norm may instead follow a quantile of the norms of the gradients. Each step
then releases a noisy count of the gradients whose norms are at most the clip norm, and
computes the next step's clip norm from the noisy count (`QuantileClip`).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import Adjacency, Arithmetic, ArrayLike, Tree
from dpjax._matrices.strategy import Strategy, StrategySpec

# The maximum number of distinct values (levels) of a schedule. If a schedule varies by
# a factor of ten, the ratio of neighbouring levels is 1.33.
_MAX_LEVELS = 8
# The maximum number of segments of a plan. Each step compares its number with the first
# step of each segment.
_MAX_SEGMENTS = 1024
# The range of clip norms that vary. Within this range, float32 can represent all
# numbers that are computed from the clip norm.
MIN_CLIP_NORM, MAX_CLIP_NORM = 2.0**-60, 2.0**60


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


Schedule = Callable[..., ArrayLike]  # a function of a step's number, as in optax


def make_segments(
    num_steps: int, batch_size: int, schedules: Sequence[Schedule | None]
) -> tuple[Segment, ...]:
    """Round the schedules of a run to a few values, and divide the run into segments.

    A segment is a range of steps in which all rounded values are constant. The result
    has a `Segment` for each segment, in order.

    Args:
      num_steps: T, the number of steps.
      batch_size: the plan's batch size. A step's batch size is the plan's batch size
        times the value of the batch schedule, rounded to an integer, and at least 1.
      schedules: the schedules of the noise multiplier, the clip norm and the batch
        size, in this order; None for a number that is constant.

    Raises:
      ValueError: a schedule does not give one number from 2⁻²⁰ to 2²⁰ for each step, or
        the rounded schedules divide the run into more than `_MAX_SEGMENTS` segments.
    """
    names = "noise_schedule", "clip_schedule", "batch_schedule"
    pairs = zip(names, schedules, strict=True)
    noises, clips, sizes = (_round_schedule(name, f, num_steps) for name, f in pairs)
    # Batch sizes are whole numbers, and at least 1.
    rows = np.stack([noises, clips, np.maximum(np.rint(batch_size * sizes), 1)])
    # A segment starts wherever one of the three numbers changes.
    new = np.any(rows[:, 1:] != rows[:, :-1], axis=0)
    starts = np.concatenate([[0], 1 + np.flatnonzero(new)])
    if starts.size > _MAX_SEGMENTS:
        raise ValueError(
            f"schedules must divide the run into at most {_MAX_SEGMENTS} segments with "
            f"constant values, after rounding to {_MAX_LEVELS} levels each; got "
            f"{starts.size} segments."
        )
    return tuple(
        Segment(int(start), float(n), float(c), int(b))
        for start, (n, c, b) in zip(starts, rows[:, starts].T, strict=True)
    )


def _round_schedule(name: str, schedule: Schedule | None, num_steps: int) -> np.ndarray:
    """The values of a schedule, f64[num_steps], rounded to a few distinct values.

    If there are more than `_MAX_LEVELS` distinct values, each value is rounded up to
    the next of `_MAX_LEVELS` levels. All values are then rounded to float32, so that
    the accountant and the jitted step use the same values.

    Args:
      name: the name of the schedule in error messages.
      schedule: the schedule, a function of a step's number; None for all ones.
      num_steps: the number of steps.
    """
    if schedule is None:
        return np.ones(num_steps)
    values = _schedule_values(name, schedule, num_steps)
    distinct = np.unique(values)
    if distinct.size > _MAX_LEVELS:
        ends = math.log(distinct[0]), math.log(distinct[-1])
        # The levels have equal ratios. The smallest value is no level: values round up.
        distinct = np.exp(np.linspace(*ends, _MAX_LEVELS + 1)[1:])
        # exp(log(x)) may be below x. No level would then be above the largest value.
        distinct[-1] = values.max()
        values = distinct[np.searchsorted(distinct, values)]
    return values.astype(np.float32).astype(np.float64)


def _schedule_values(name: str, schedule: Schedule, num_steps: int) -> np.ndarray:
    """The values of a schedule, f64[num_steps].

    Raises:
      ValueError: the schedule is not a function, or does not give one number from 2⁻²⁰
        to 2²⁰ for each step.
    """
    if not callable(schedule):
        raise ValueError(f"{name} must be a function of the step; got {schedule!r}.")
    try:
        values = np.asarray(jax.vmap(schedule)(jnp.arange(num_steps)), np.float64)
    except TypeError:  # a schedule that cannot be traced gets Python integers
        rows = [np.asarray(schedule(step)) for step in range(num_steps)]
        values = np.array(rows, np.float64)
    in_range = (values >= 2.0**-20) & (values <= 2.0**20)
    if values.shape != (num_steps,) or not in_range.all():
        raise ValueError(
            f"{name} must return one number from 2**-20 to 2**20 for each step; got "
            f"{values!r}."
        )
    return values


class QuantileClip(NamedTuple):
    """Settings to adapt the clip norm so that a given share of gradients is unclipped.

    Every step counts the gradients whose norms are at most the clip norm C, and adds
    noise to the count. The noisy count gives an estimate p of the share of these
    gradients. The step then updates C by C ← C exp(−η (p − quantile)). The sum of
    gradients gets more noise than without the count, by default less than 1 % more.
    With this noise, the sum and the count together have the privacy cost that the plan
    states.

    Attributes:
      initial: the first step's clip norm, from 2⁻⁶⁰ to 2⁶⁰.
      quantile: the target share of gradients whose norms are at most the clip norm, in
        (0, 1).
      learning_rate: η, positive.
      noise_multiplier: σ_b, the standard deviation of the noise on the count; more than
        z / 2, where z is the plan's noise multiplier. If None, max(b / 20, 4 z), where
        b is the plan's batch size.

    Reference: Andrew, Thakkar, McMahan and Ramaswamy (2021), Algorithm 1.
    """

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    noise_multiplier: float | None = None


@dataclasses.dataclass(frozen=True)
class RunParameters:
    """The parameters of a run; the attributes of `dpjax.Plan` describe each of them."""

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
        """A copy of the parameters of this run or plan, with the given changes."""
        fields = dataclasses.fields(RunParameters)
        return RunParameters(
            **{x.name: getattr(self, x.name) for x in fields} | changes
        )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the run; without a schedule, the whole run is one segment."""
        return self.schedule or (Segment(0, 1.0, 1.0, self.batch_size),)

    def constant_runs(self) -> list["RunParameters"]:
        """Split this run into runs with constant noise and batch size.

        The composition of the returned runs has the privacy cost of this run. All steps
        with the same noise and batch size form one returned run, even if other steps
        are between them, since the privacy cost does not depend on the order of steps.
        """
        return [
            self.parameters(
                noise_multiplier=self.noise_multiplier * noise,
                batch_size=size,
                num_steps=count,
                schedule=(),
            )
            for (noise, size), count in sorted(self.count_steps().items())
        ]

    def count_steps(self) -> Counter[tuple[float, int]]:
        """Count the steps of the run for each pair (noise, batch size).

        The noise is the noise multiplier of a step, divided by the run's noise
        multiplier. Steps that differ only in their clip norms are counted together: the
        noise's standard deviation is a multiple of the clip norm, so that the clip norm
        does not change the privacy cost of a step.
        """
        counts: Counter[tuple[float, int]] = Counter()
        for segment, length in zip(self.segments, self._lengths(), strict=True):
            if length:
                counts[segment.noise, segment.batch_size] += length
        return counts

    def _lengths(self) -> list[int]:
        """The number of steps in each segment; 0 for a segment after the last step."""
        starts = [segment.start for segment in self.segments]
        return np.diff(np.minimum([*starts, self.num_steps], self.num_steps)).tolist()

    def noises(self) -> np.ndarray:
        """Each step's noise multiplier, divided by the run's, f64[num_steps]."""
        return np.repeat([segment.noise for segment in self.segments], self._lengths())

    def values_at(self, step: ArrayLike) -> StepValues:
        """Return the noise multiplier, clip norm and batch size of a step.

        The noise multiplier and the clip norm are divided by those of the plan. The
        step's number may be traced. Steps after the end of the run have the values
        of the last segment.
        """
        if len(self.segments) == 1:
            return StepValues(*self.segments[0][1:])
        columns = zip(*self.segments, strict=True)
        starts, noises, clips, sizes = map(jnp.asarray, columns)
        index = jnp.sum(starts <= jnp.asarray(step)) - 1
        noises, clips = noises.astype(jnp.float32), clips.astype(jnp.float32)
        return StepValues(noises[index], clips[index], sizes[index])


class Bounded(NamedTuple):
    """The sum and the count of a step, before noise is added to them.

    The function of `Plan.value_and_grad` returns a `Bounded` for a plan with a
    `QuantileClip`. C is the clip norm of the step.

    Attributes:
      total: the sum of the gradients, each clipped to C, divided by C.
      within: the number of valid examples whose gradient norms are at most C, minus
        half of the number of valid examples, f[].
    """

    total: Tree
    within: jax.Array


def check_quantile_clip(clip: QuantileClip) -> QuantileClip:
    """Check a `QuantileClip`, and convert its numbers to Python floats.

    Raises:
      ValueError: a number is not positive, or quantile is not below 1.
    """
    numbers = {
        name: validate.positive_float(name, value)
        for name, value in clip._asdict().items()
        if value is not None
    }
    validate.open_unit("quantile", clip.quantile)
    return clip._replace(**numbers)


def noise_of(
    clip: QuantileClip, noise_multiplier: float, batch_size: int
) -> tuple[float, float]:
    """The noise multipliers (σ, σ_b) of a step's sum and of a step's count.

    Let C be the step's clip norm. The count is the number of gradients whose norms are
    at most C, minus half of the batch's examples. σ is the standard deviation of the
    noise on the sum of clipped gradients, divided by C. σ_b is the standard deviation
    of the noise on the count.

    The sum and the count together are one Gaussian mechanism. Adding one example
    changes the sum by at most C, and the count by 1/2. Let z be the plan's noise
    multiplier. The mechanism costs as much as a sum with noise multiplier z if
    1 / σ² + (1/2)² / σ_b² = 1 / z²
    (Andrew et al. 2021, Theorem 1, https://arxiv.org/abs/1905.03871).

    Args:
      clip: the settings. If clip.noise_multiplier is not None, σ_b is this number.
      noise_multiplier: z.
      batch_size: b, the plan's batch size. If clip.noise_multiplier is None, σ_b is
        max(b / 20, 4 z).

    Raises:
      ValueError: σ_b is at most z / 2, so that no σ is large enough.
    """
    # The paper chooses σ_b = b / 20. With σ_b >= 4 z, σ exceeds z by less than 1 %.
    count_noise = clip.noise_multiplier or max(batch_size / 20, 4 * noise_multiplier)
    # 1 − fraction², rounded down: each of the four roundings errs by at most 2⁻⁵³. So a
    # difference that comes from rounding alone is not above 0.
    fraction = noise_multiplier / (2 * count_noise)
    remainder = (1 - fraction) * (1 + fraction) - 2.0**-51
    if remainder <= 0:
        raise ValueError(
            "QuantileClip's noise_multiplier must be above half of the plan's "
            f"noise_multiplier, {noise_multiplier!r}; got {count_noise!r}."
        )
    # The factor covers the roundings in this line, so that σ is rounded up.
    return noise_multiplier / math.sqrt(remainder) * (1 + 2.0**-50), count_noise


def count_within_clip_norm(
    norms: jax.Array, mask: jax.Array, clip_norm: ArrayLike
) -> jax.Array:
    """The centered count of gradients whose norms are at most the clip norm, f32[].

    An example adds 1/2 to the count if the norm of its gradient is at most clip_norm,
    and −1/2 otherwise. So adding one example changes the count by only 1/2. Padding
    adds 0.
    """
    # A comparison with NaN is False. So a NaN norm counts as clipped.
    half = jnp.where(norms <= clip_norm, jnp.float32(0.5), jnp.float32(-0.5))
    return jnp.sum(jnp.where(mask, half, jnp.float32(0.0)))


def next_clip_norm(
    clip: QuantileClip, clip_norm: jax.Array, count: jax.Array, batch_size: ArrayLike
) -> jax.Array:
    """The next step's clip norm, f32[], from this step's clip norm and noisy count.

    The result is at least 2⁻⁶⁰ and at most 2⁶⁰.

    Args:
      clip: the settings, of which the function uses quantile and learning_rate.
      clip_norm: this step's clip norm, f32[].
      count: the noisy centered count of `count_within_clip_norm`, f[].
      batch_size: b, the expected batch size.
    """
    # Andrew et al. (2021), Algorithm 1: C ← C exp(−η (b̃ − γ)). Adding 1/2 undoes the
    # centering of the count.
    fraction = count / jnp.asarray(batch_size, count.dtype) + 0.5
    next_norm = clip_norm * jnp.exp(-clip.learning_rate * (fraction - clip.quantile))
    return jnp.clip(next_norm, MIN_CLIP_NORM, MAX_CLIP_NORM).astype(jnp.float32)
