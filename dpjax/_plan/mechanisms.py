"""How a run draws its examples, and what that costs in privacy.

1. `Mechanism` is the interface of a way of sampling: its draw, its privacy cost and its
   description. One class holds the draw, the event for accountants and the description
   for a paper, so that no plan can account for one way of sampling and run another.
2. `Poisson` and `FixedSize`: batches that are drawn anew in every step.
3. `Cyclic` and `Reshuffled`: batches taken in order, which is the data's own order or a
   new random one in every epoch.
4. `CyclicPoisson`, `RandomBins` and `FreshBins`: random batches for noise that is
   correlated from step to step. An attacker who does not know in which steps an example
   took part learns less about the example. In cyclic Poisson sampling, each step
   samples from one of several fixed groups of the examples, one group after another. In
   random bins (balls in bins), every example is assigned to a random step of the epoch.
5. `SAMPLINGS`: the class for each value of the argument `sampling` of `dpjax.plan`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import sampling
from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.typing import ArrayLike
from dpjax._matrices.spec import StrategySpec
from dpjax._plan import schedule as schedules
from dpjax._plan.parameters import RunParameters
from dpjax.accounting import events
from dpjax.noise._discrete import RUN_TOTAL_VARIATION


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A way of sampling from a data set of one size, for one adjacency.

    Attributes:
      num_examples: the size of the data set; under ADD_REMOVE, the size of the larger
        one of two neighbouring data sets.
      adjacency: which data sets the guarantee compares.
      shape: the strategy C that correlates the noise from step to step; None for
        independent noise.
    """

    num_examples: int
    adjacency: Adjacency
    shape: StrategySpec | None = None

    # The order of the data where it is deterministic, or uniformly random but not used
    # for amplification; None for random batches.
    order: ClassVar[Literal["fixed", "reshuffled"] | None] = None
    supports_correlation: ClassVar[bool] = False
    supports_schedules: ClassVar[bool] = True
    # Whether the batch size is random, so that a batch may exceed max_batch_size.
    overflows: ClassVar[bool] = False
    # Whether the batch size may vary from step to step, by a batch_schedule.
    draws_any_size: ClassVar[bool] = False
    adjacencies: ClassVar[tuple[Adjacency, ...]] = (
        Adjacency.ZERO_OUT,
        Adjacency.REPLACE,
    )
    # For the error message: why the other adjacencies are not allowed.
    reason: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Refuse an adjacency that the sampling does not allow."""
        validate.adjacency(self.adjacency)
        if self.adjacency not in self.adjacencies:
            names = " or ".join(a.name for a in self.adjacencies)
            raise ValueError(
                f"adjacency must be {names} with this sampling; got "
                f"{self.adjacency!r}: {self.reason}."
            )

    def draw(
        self, batch_size: int, max_batch_size: int, step: ArrayLike, key: jax.Array
    ) -> sampling.Batch:
        """The positions of a step's examples, and the mask of the valid ones."""
        raise NotImplementedError

    def event(self, run: RunParameters) -> events.Event:
        """The privacy event of the run, the input of the accountants."""
        raise NotImplementedError

    def released_event(self, run: RunParameters) -> events.Event:
        """The privacy event of the run in the arithmetic that it is computed in."""
        event = self.event(run)
        if run.arithmetic == "real":
            return event
        return events.OnLattice(event, RUN_TOTAL_VARIATION)

    def describe(self, batch_size: str, max_batch_size: int) -> str:
        """A description for a paper of how batches of the given sizes are drawn."""
        raise NotImplementedError

    @property
    def population(self) -> int:
        """The number of examples from which one step draws."""
        return self.num_examples

    def check_strategy(self, shape: StrategySpec, batch_size: int) -> None:
        """Raise for a strategy that the accountant of this sampling does not cover."""

    def steps_per_epoch(self, batch_size: int) -> int:
        """The number of steps per epoch, n / b rounded up."""
        return -(-self.num_examples // batch_size)

    def expected_batch_size(self, batch_size: int) -> float:
        """The expected number of examples in a step.

        It is b here, and n over the steps per epoch, at most b, where every example
        takes part once per epoch.
        """
        return float(batch_size)


def _compose(
    run: RunParameters, step: Callable[[RunParameters], events.Step]
) -> events.Composed:
    """The composition of all steps; `step` is the event of one step of a part."""
    parts = run.constant_runs()
    return events.Composed(
        tuple(events.Repeated(step(part), part.num_steps) for part in parts)
    )


class Poisson(Mechanism):
    """Every example takes part with the same probability, in each step anew."""

    overflows = True
    draws_any_size = True
    adjacencies = tuple(Adjacency)

    def draw(self, batch_size, max_batch_size, step, key):
        """The batch of a step, by `sampling.poisson`."""
        return sampling.poisson(
            self.num_examples,
            batch_size / self.num_examples,
            max_batch_size=max_batch_size,
            key=key,
            step=step,
        )

    def event(self, run):
        """The composition of steps as in `accounting.truncation.poisson_gaussian`."""

        def step(part):
            noise, rate = part.noise_multiplier, part.batch_size / self.num_examples
            # A capacity of all examples never overflows.
            if part.max_batch_size >= self.num_examples:
                return events.PoissonGaussian(noise, rate, self.adjacency)
            return events.TruncatedPoissonGaussian(
                noise, rate, self.num_examples, part.max_batch_size, self.adjacency
            )

        return _compose(run, step)

    def describe(self, batch_size, max_batch_size):
        """The sampling rate, the capacity, and what overflow does."""
        return (
            "every example takes part in each step independently with probability "
            f"{batch_size}/{self.num_examples}; of more than {max_batch_size} in one "
            "step a uniformly random subset of that size is kept, which is accounted "
            "for"
        )


class FixedSize(Mechanism):
    """A uniformly random subset of fixed size, in each step anew."""

    adjacencies = (Adjacency.REPLACE,)
    reason = "with one example fewer, subsets of fixed size are drawn from others"

    def draw(self, batch_size, max_batch_size, step, key):
        """The batch of a step, by `sampling.fixed_size`."""
        return sampling.fixed_size(self.num_examples, batch_size, key=key, step=step)

    def event(self, run):
        """The composition of steps as in `accounting.pld.subsampled_gdp`."""

        def step(part):
            mu = self.adjacency.sensitivity_factor / part.noise_multiplier
            return events.FixedSizeGaussian(mu, part.batch_size / self.num_examples)

        return _compose(run, step)

    def describe(self, batch_size, max_batch_size):
        """The size of the subset, and how it is drawn."""
        return (
            f"each step takes a uniformly random subset of {batch_size} of the "
            f"{self.num_examples} examples, drawn anew without replacement"
        )


class Cyclic(Mechanism):
    """Batches in the data's own order, the same in every epoch."""

    order = "fixed"
    supports_correlation = True
    reason = "one example fewer moves all later ones to other batches"

    def expected_batch_size(self, batch_size):
        """The mean batch size of an epoch: n over the number of its steps."""
        return self.num_examples / self.steps_per_epoch(batch_size)

    def draw(self, batch_size, max_batch_size, step, key):
        """The batch of a step, by `sampling.cyclic_step`."""
        steps = self.steps_per_epoch(batch_size)
        return sampling.cyclic_step(
            self.num_examples, batch_size, step=jnp.asarray(step) % steps
        )

    def event(self, run):
        """The Gaussian mechanism composed of the steps that one example takes part in.

        An example takes part in one step per epoch. With correlated noise, the event
        is that of `accounting.correlated.mu`.
        """
        num_steps = int(run.num_steps)
        epoch = self.steps_per_epoch(int(run.batch_size))
        if self.shape is not None and self.order is not None:
            return events.CorrelatedGaussian(
                run.noise_multiplier,
                self.shape,
                num_steps,
                epoch,
                self.order,
                self.adjacency,
            )
        times = -(-num_steps // epoch)
        if run.schedule:
            noises = schedules.noises(run.schedule, num_steps)
            # The last epoch may be incomplete. Its missing steps get infinite noise,
            # and so cost nothing.
            padded = np.pad(
                noises, (0, times * epoch - num_steps), constant_values=np.inf
            )
            # A step with noise multiplier r σ costs as much as r⁻² steps with σ.
            times = self._times(padded.reshape(times, epoch) ** -2.0)
        # k Gaussian steps of sensitivity s are one Gaussian mechanism, μ = s √k / σ.
        factor = self.adjacency.sensitivity_factor
        return events.Gaussian(factor * math.sqrt(times) / run.noise_multiplier)

    def _times(self, costs: np.ndarray) -> float:
        """An upper bound on the privacy cost of the steps with one given example.

        The unit is the cost of one step with the plan's noise multiplier. In every
        epoch, an example takes part in the same step: its steps are one column.

        Args:
          costs: the cost of each step in this unit, f64[epochs, steps per epoch].
        """
        # The factor covers the rounding of the sum.
        return float(np.max(np.sum(costs, axis=0))) * (1 + 2.0**-40)

    def describe(self, batch_size, max_batch_size):
        """The batch size and the order of the data."""
        return (
            f"batches of {batch_size} are taken in the order of the data, which does "
            "not depend on the examples, the same in every epoch"
        )


class Reshuffled(Cyclic):
    """Batches in a random order, another one in every epoch."""

    order = "reshuffled"

    def draw(self, batch_size, max_batch_size, step, key):
        """The batch of a step, by `sampling.reshuffled_step`."""
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
        """As in `Cyclic`, for an example in the most costly step of every epoch."""
        return float(np.sum(np.max(costs, axis=1))) * (1 + 2.0**-40)

    def describe(self, batch_size, max_batch_size):
        """The batch size and the order of the data."""
        return (
            f"batches of {batch_size} are taken in a random order, another one in "
            "every epoch, which nothing in the guarantee relies on"
        )


class CyclicPoisson(Mechanism):
    """Each step takes the examples of one group, each with the same probability."""

    supports_correlation = True
    supports_schedules = False
    overflows = True
    reason = "one example fewer moves all later ones to other groups"

    @property
    def groups(self) -> int:
        """The number of groups p, which is the number of bands of the strategy C.

        The steps of one example are then at least p apart, and the columns of C for
        these steps have no nonzero row in common.
        """
        return 1 if self.shape is None else 1 + len(self.shape.numerator)

    @property
    def population(self) -> int:
        """The number of examples in the largest group."""
        return -(-self.num_examples // self.groups)

    def check_strategy(self, shape, batch_size):
        """Raise unless the strategy is banded and a group can fill a batch."""
        if shape.denominator or shape.factors or shape.tree_decay is not None:
            raise ValueError(
                "strategy must be a banded one with sampling='cyclic_poisson'; got C "
                f"{shape}."
            )
        bands = 1 + len(shape.numerator)
        if bands * batch_size > self.num_examples:
            raise ValueError(
                f"batch_size must be at most num_examples over the {bands} bands, "
                f"{self.num_examples // bands}; got {batch_size!r}."
            )

    def rate(self, batch_size: int) -> float:
        """The probability with which a step takes each example of its group."""
        return min(1.0, self.groups * batch_size / self.num_examples)

    def draw(self, batch_size, max_batch_size, step, key):
        """The batch of a step, by `sampling.cyclic_poisson`."""
        return sampling.cyclic_poisson(
            self.num_examples,
            self.rate(batch_size),
            num_groups=self.groups,
            max_batch_size=max_batch_size,
            key=key,
            step=step,
        )

    def event(self, run):
        """The composition of ⌈T / p⌉ truncated Poisson-sampled Gaussian mechanisms.

        Each of them has the L2 norm of a column of C as its sensitivity. This is the
        accounting of `accounting.correlated.epsilon`, and batches may overflow.
        """
        bands = () if self.shape is None else self.shape.numerator
        # The factor covers the rounding of the norm: the sensitivity is rounded up.
        norm = float(np.linalg.norm([1.0, *bands])) * (1 + 2.0**-40)
        # A group is drawn from at most ⌈T / p⌉ times.
        steps = -(-int(run.num_steps) // self.groups)
        step = events.TruncatedPoissonGaussian(
            run.noise_multiplier / norm,
            self.rate(int(run.batch_size)),
            self.population,
            run.max_batch_size,
            self.adjacency,
        )
        return events.Composed((events.Repeated(step, steps),))

    def describe(self, batch_size, max_batch_size):
        """The groups, the sampling rate, the capacity, and what overflow does."""
        return (
            f"example i is in group i mod {self.groups}, step t takes each example of "
            f"group t mod {self.groups} independently with probability "
            f"{self.groups} * {batch_size}/{self.num_examples}; of more than "
            f"{max_batch_size} in one step a uniformly random subset of that size is "
            "kept, which is accounted for"
        )


class RandomBins(Mechanism):
    """Every example is assigned once, at random, to one step of all epochs."""

    fresh: ClassVar[bool] = False  # whether the assignment is anew in each epoch
    supports_correlation = True
    supports_schedules = False
    overflows = True
    adjacencies = tuple(Adjacency)

    def expected_batch_size(self, batch_size):
        """The expected batch size: n over the number of steps per epoch."""
        return self.num_examples / self.steps_per_epoch(batch_size)

    def draw(self, batch_size, max_batch_size, step, key):
        """The batch of a step, by `sampling.random_bins_step`."""
        bins = self.steps_per_epoch(batch_size)
        step = jnp.asarray(step)
        return sampling.random_bins_step(
            self.num_examples,
            bins,
            max_batch_size=max_batch_size,
            key=key,
            # The same number in every epoch gives the same assignment in every epoch.
            epoch=step // bins if self.fresh else step * 0,
            step=step % bins,
        )

    def check_strategy(self, shape, batch_size):
        """Raise unless the strategy C is a Toeplitz matrix."""
        if shape.factors or shape.tree_decay is not None:
            raise ValueError(
                f"strategy must be a Toeplitz strategy in random bins; got C {shape}."
            )

    def event(self, run):
        """The event of the whole run.

        Its cost is that of `accounting.correlated.epsilon`, and the overflow of a batch
        adds `truncation.overflow_delta`.
        """
        return events.RandomBins(
            float(run.noise_multiplier),
            self.shape,
            int(run.num_steps),
            self.steps_per_epoch(int(run.batch_size)),
            self.num_examples,
            int(run.max_batch_size),
            self.fresh,
            self.adjacency,
        )

    def describe(self, batch_size, max_batch_size):
        """The number of bins, the capacity, and what overflow does."""
        anew = "anew in every epoch" if self.fresh else "the same in every epoch"
        bins = self.steps_per_epoch(int(batch_size))
        return (
            f"every example picks one of the {bins} steps of an epoch, uniformly at "
            f"random and independently of others, {anew}; of more than "
            f"{max_batch_size} in one step so many are kept, which is accounted for"
        )


class FreshBins(RandomBins):
    """Every example is assigned anew, at random, to one step of each epoch."""

    fresh = True


SAMPLINGS: dict[str, type[Mechanism]] = {
    "poisson": Poisson,
    "fixed_size": FixedSize,
    "fixed": Cyclic,
    "reshuffled": Reshuffled,
    "cyclic_poisson": CyclicPoisson,
    "random_bins": RandomBins,
    "fresh_bins": FreshBins,
}


def mechanism_of(run: RunParameters) -> Mechanism:
    """The mechanism of a run: how it draws examples, and what that costs in privacy."""
    return SAMPLINGS[run.sampling](run.num_examples, run.adjacency, run.shape)
