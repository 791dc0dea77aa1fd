"""How a run draws its examples, and what that costs in privacy.

One class a way of sampling, so that no plan can account for one and run another. Those
for noise that is correlated, and amplified by sampling, are in `amplified`.
"""

import dataclasses
import math
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import sampling
from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.typing import ArrayLike
from dpjax._matrices.spec import Shape
from dpjax._plan import schedule as schedules
from dpjax.accounting import events, profiles
from dpjax.accounting.profiles import Profile


class Numbers(NamedTuple):
    """What the cost of a run depends on, f[] each.

    Attributes:
      noise_multiplier: noise standard deviation over clip norm.
      batch_size: how many examples a step takes, in expectation.
      num_steps: how many steps are released.
      max_batch_size: how many examples a step has room for.
      schedule: what varies from step to step, or () if nothing does.
    """

    noise_multiplier: ArrayLike
    batch_size: ArrayLike
    num_steps: ArrayLike
    max_batch_size: ArrayLike
    schedule: tuple[schedules.Piece, ...] = ()

    def runs(self) -> list["Numbers"]:
        """As many runs, one after the other, in which nothing varies."""
        if not self.schedule:
            return [self]
        counts = schedules.groups(self.schedule, int(np.asarray(self.num_steps)))
        return [
            Numbers(self.noise_multiplier * noise, size, count, self.max_batch_size)
            for (noise, size), count in sorted(counts.items())
        ]


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A way of sampling from a data set of one size, for one adjacency.

    Attributes:
      num_examples: the size of the data set; of the larger one under ADD_REMOVE.
      adjacency: which data sets the guarantee compares.
      shape: how noise is correlated from step to step; None where it is not.
    """

    num_examples: int
    adjacency: Adjacency
    shape: Shape | None = None

    order: ClassVar[Literal["fixed", "reshuffled"] | None] = None
    correlates: ClassVar[bool] = False
    varies: ClassVar[bool] = True
    overflows: ClassVar[bool] = False
    draws_any_size: ClassVar[bool] = False
    covers: ClassVar[tuple[Adjacency, ...]] = (Adjacency.ZERO_OUT, Adjacency.REPLACE)
    reason: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Refuse an adjacency that the sampling does not allow."""
        validate.adjacency(self.adjacency)
        if self.adjacency not in self.covers:
            names = " or ".join(a.name for a in self.covers)
            raise ValueError(
                f"adjacency must be {names} with this sampling; got "
                f"{self.adjacency!r}: {self.reason}."
            )

    def draw(
        self,
        batch_size: int,
        max_batch_size: int,
        step: ArrayLike,
        key: jax.Array,
    ) -> sampling.Batch:
        """The examples of a step."""
        raise NotImplementedError

    def event(self, numbers: Numbers) -> events.Event:
        """What runs, as accountants read it."""
        raise NotImplementedError

    def profile(self, numbers: Numbers) -> Profile:
        """What the run costs, from above."""
        return profiles.of(self.event(numbers))

    def words(self, batch_size: str, max_batch_size: int) -> str:
        """How examples are drawn, so many at a time."""
        raise NotImplementedError

    @property
    def population(self) -> int:
        """Of how many examples a step can take."""
        return self.num_examples

    def refuse(self, shape: Shape, batch_size: int) -> None:
        """Raise where noise of this shape is not accounted for."""

    def steps_per_epoch(self, batch_size: int) -> int:
        """Steps in which every example takes part once."""
        return -(-self.num_examples // batch_size)

    def taken(self, batch_size: int) -> float:
        """How many examples a step takes, in expectation: fewer than b by epochs."""
        return float(batch_size)


class Poisson(Mechanism):
    """Every example takes part with the same probability, in each step anew."""

    overflows = True
    draws_any_size = True
    covers = tuple(Adjacency)

    def draw(self, batch_size, max_batch_size, step, key):
        """As `sampling.poisson`."""
        return sampling.poisson(
            self.num_examples,
            batch_size / self.num_examples,
            max_batch_size=max_batch_size,
            key=key,
            step=step,
        )

    def event(self, numbers):
        """As `accounting.truncation.poisson_gaussian`, composed."""
        return events.Composed(
            tuple(
                events.Repeated(
                    events.TruncatedPoissonGaussian(
                        run.noise_multiplier,
                        run.batch_size / self.num_examples,
                        self.num_examples,
                        run.max_batch_size,
                        self.adjacency,
                    ),
                    run.num_steps,
                )
                for run in numbers.runs()
            )
        )

    def words(self, batch_size, max_batch_size):
        """The rate, the room, and what becomes of the rest."""
        return (
            "every example takes part in each step independently with probability "
            f"{batch_size}/{self.num_examples}; of more than {max_batch_size} in one "
            "step a uniformly random subset of that size is kept, which is accounted "
            "for"
        )


class FixedSize(Mechanism):
    """A uniformly random subset of fixed size, in each step anew."""

    covers = (Adjacency.REPLACE,)
    reason = "with one example fewer, subsets of fixed size are drawn from others"

    def draw(self, batch_size, max_batch_size, step, key):
        """As `sampling.fixed_size`."""
        return sampling.fixed_size(self.num_examples, batch_size, key=key, step=step)

    def event(self, numbers):
        """As `accounting.pld.subsampled_gdp`, composed."""
        return events.Composed(
            tuple(
                events.Repeated(
                    events.FixedSizeGaussian(
                        self.adjacency.sensitivity_factor / run.noise_multiplier,
                        run.batch_size / self.num_examples,
                    ),
                    run.num_steps,
                )
                for run in numbers.runs()
            )
        )

    def words(self, batch_size, max_batch_size):
        """The size."""
        return (
            f"each step takes a uniformly random subset of {batch_size} of the "
            f"{self.num_examples} examples, drawn anew without replacement"
        )


class Cyclic(Mechanism):
    """Batches in the data's own order, the same in every epoch."""

    order = "fixed"
    correlates = True
    reason = "one example fewer moves all later ones to other batches"

    def taken(self, batch_size):
        """All examples, over the steps of an epoch."""
        return self.num_examples / self.steps_per_epoch(batch_size)

    def draw(self, batch_size, max_batch_size, step, key):
        """As `sampling.cyclic_step`."""
        steps = self.steps_per_epoch(batch_size)
        return sampling.cyclic_step(
            self.num_examples, batch_size, step=jnp.asarray(step) % steps
        )

    def event(self, numbers):
        """Composition of the steps that an example takes part in, one an epoch.

        With correlated noise, as `accounting.correlated.mu`.
        """
        # Whole numbers, which floats of 32 bits do not hold.
        size, num_steps = (
            int(np.asarray(x)) for x in (numbers.batch_size, numbers.num_steps)
        )
        epoch = self.steps_per_epoch(size)
        if self.shape is not None and self.order is not None:
            return events.CorrelatedGaussian(
                numbers.noise_multiplier,
                self.shape,
                num_steps,
                epoch,
                self.order,
                self.adjacency,
            )
        times = -(-num_steps // epoch)
        if numbers.schedule:
            noises = schedules.noises(numbers.schedule, num_steps)
            # Steps that are not taken have noise without end.
            padded = np.pad(
                noises, (0, times * epoch - num_steps), constant_values=np.inf
            )
            times = self._times(padded.reshape(times, epoch) ** -2.0)
        factor = self.adjacency.sensitivity_factor
        return events.Gaussian(factor * math.sqrt(times) / numbers.noise_multiplier)

    def _times(self, costs: np.ndarray) -> float:
        """How many steps at the plan's noise an example's cost as much as, from above.

        An example is in the same column of costs f64[epochs, epoch] in every epoch.
        """
        return float(np.max(np.sum(costs, axis=0))) * (1 + 2.0**-40)

    def words(self, batch_size, max_batch_size):
        """The order."""
        return (
            f"batches of {batch_size} are taken in the order of the data, which does "
            "not depend on the examples, the same in every epoch"
        )


class Reshuffled(Cyclic):
    """Batches in a random order, another one in every epoch."""

    order = "reshuffled"

    def draw(self, batch_size, max_batch_size, step, key):
        """As `sampling.reshuffled_step`."""
        steps = self.steps_per_epoch(batch_size)
        step = jnp.asarray(step)
        return sampling.reshuffled_step(
            self.num_examples,
            batch_size,
            key=key,
            epoch=step // steps,
            step=step % steps,
        )

    def _times(self, costs):
        """An example may be wherever it costs most, in every epoch."""
        return float(np.sum(np.max(costs, axis=1))) * (1 + 2.0**-40)

    def words(self, batch_size, max_batch_size):
        """The order."""
        return (
            f"batches of {batch_size} are taken in a random order, another one in "
            "every epoch, which nothing in the guarantee relies on"
        )
