"""The ways in which a run draws its examples, and the privacy cost of each way.

1. `Mechanism` is the interface of a way of sampling. The same class draws the batches,
   describes the run to privacy accountants, and describes the sampling for a paper. So
   the sampling that a plan accounts for is the sampling that the plan runs.
2. `Poisson` and `FixedSize`: batches that are drawn anew in every step.
3. `Cyclic` and `Reshuffled`: batches in order, which is the data's own order or a new
   random order in every epoch.
4. `CyclicPoisson`, `RandomBins` and `FreshBins`: random batches that allow correlated
   noise. An attacker who does not know in which steps an example took part learns less
   about the example. In cyclic Poisson sampling, the examples form several fixed
   groups, and the steps sample from one group after another. In bins, every example is
   assigned to a random step of an epoch: once in `RandomBins`, and anew in every epoch
   in `FreshBins`.
5. `SAMPLINGS`: the class for each value of the argument `sampling` of `dpjax.plan`.
"""

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import sampling
from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.typing import ArrayLike
from dpjax._matrices.strategy import StrategySpec
from dpjax._plan.parameters import RunParameters
from dpjax.accounting import events
from dpjax.noise._discrete import RUN_TOTAL_VARIATION


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A way to draw batches from a data set, with its privacy event.

    A privacy event describes a run such that accountants can compute ε.

    Attributes:
      num_examples: the size of the data set; under ADD_REMOVE, the size of the larger
        of two neighbouring data sets.
      adjacency: the relation between the data sets that the guarantee compares.
      shape: the numbers of the matrix C of the correlated noise C⁻¹z, where z is
        independent over steps; None for independent noise.
    """

    num_examples: int
    adjacency: Adjacency
    shape: StrategySpec | None = None

    # For batches in order: the data's own order, or a random order that gives no
    # amplification. None for random batches.
    order: ClassVar[Literal["fixed", "reshuffled"] | None] = None
    supports_correlation: ClassVar[bool] = False
    supports_schedules: ClassVar[bool] = True
    # Whether the batch size is random, so that a batch may exceed max_batch_size.
    overflows: ClassVar[bool] = False
    adjacencies: ClassVar[tuple[Adjacency, ...]] = (
        Adjacency.ZERO_OUT,
        Adjacency.REPLACE,
    )
    # The part of the error message that explains why other adjacencies are not allowed.
    reason: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Refuse an adjacency that the sampling does not allow."""
        validate.adjacency(self.adjacency)
        if self.adjacency not in self.adjacencies:
            names = " or ".join(a.name for a in self.adjacencies)
            raise ValueError(
                f"adjacency must be {names} with sampling "
                f"{next(x for x, kind in SAMPLINGS.items() if kind is type(self))!r}, "
                f"because {self.reason}; got {self.adjacency!r}."
            )

    def draw(
        self, batch_size: int, max_batch_size: int, step: ArrayLike, key: jax.Array
    ) -> sampling.Batch:
        """Draw a step's batch: positions of examples, and a mask, False for padding."""
        raise NotImplementedError

    def event(self, run: RunParameters) -> events.Event:
        """The privacy event of the run, from which accountants compute ε.

        Unless a subclass returns another event, the result is the composition of the
        events of all steps. A schedule may vary the noise multiplier and the batch
        size. So the run is divided into parts in which both numbers are constant.
        """
        parts = run.constant_runs()
        steps = [events.Repeated(self.step_event(x), x.num_steps) for x in parts]
        return events.Composed(tuple(steps))

    def step_event(self, part: RunParameters) -> events.Step:
        """The privacy event of one step of a part of a run.

        In this part, the noise multiplier and the batch size are constant.
        """
        raise NotImplementedError

    def describe(self, batch_size: str, max_batch_size: int) -> str:
        """Describe, in words for a paper, how batches of the given sizes are drawn."""
        raise NotImplementedError

    @property
    def population(self) -> int:
        """The number of examples from which one step draws its batch."""
        return self.num_examples

    def check_strategy(self, shape: StrategySpec, batch_size: int) -> None:
        """Raise if the sampling supports correlated noise, but not this strategy.

        Args:
          shape: the numbers of the matrix that correlates the noise of steps.
          batch_size: the expected number of examples in a step.
        """

    def steps_per_epoch(self, batch_size: int) -> int:
        """The number of steps per epoch: num_examples / batch_size, rounded up."""
        return -(-self.num_examples // batch_size)

    def expected_batch_size(self, batch_size: int) -> float:
        """The expected number of examples in a step.

        If every example takes part once per epoch, the result is num_examples divided
        by the number of steps per epoch, which may be below batch_size. Otherwise the
        result is batch_size.
        """
        return float(batch_size)


class Poisson(Mechanism):
    """In each step, every example takes part independently, with equal probability."""

    overflows = True
    adjacencies = tuple(Adjacency)

    def draw(self, batch_size, max_batch_size, step, key):
        """Draw the batch of a step by `sampling.poisson`."""
        return sampling.poisson(
            self.num_examples,
            batch_size / self.num_examples,
            max_batch_size=max_batch_size,
            key=key,
            step=step,
        )

    def step_event(self, part):
        """Return a Poisson-sampled Gaussian step.

        If the maximum batch size is below the number of examples, the event includes
        the maximum batch size.
        """
        noise, rate = part.noise_multiplier, part.batch_size / self.num_examples
        # A batch never overflows if its capacity is the number of all examples.
        if part.max_batch_size >= self.num_examples:
            return events.PoissonGaussian(noise, rate, self.adjacency)
        return events.TruncatedPoissonGaussian(
            noise, rate, self.num_examples, part.max_batch_size, self.adjacency
        )

    def describe(self, batch_size, max_batch_size):
        """Describe Poisson sampling: the sampling rate and the maximum batch size."""
        return (
            "every example takes part in each step independently with probability "
            f"{batch_size}/{self.num_examples}; if more than {max_batch_size} take "
            "part in one step, a uniformly random subset of that size is used, and "
            "the guarantee accounts for this"
        )


class FixedSize(Mechanism):
    """Each step draws a new uniformly random subset of fixed size."""

    adjacencies = (Adjacency.REPLACE,)
    reason = (
        "the amplification of batches of fixed size is proven for the replacement of "
        "one example"
    )

    def draw(self, batch_size, max_batch_size, step, key):
        """Draw the batch of a step by `sampling.fixed_size`."""
        return sampling.fixed_size(self.num_examples, batch_size, key=key, step=step)

    def step_event(self, part):
        """Return a Gaussian step on a uniformly random subset of fixed size."""
        mu = self.adjacency.sensitivity_factor / part.noise_multiplier
        return events.FixedSizeGaussian(mu, part.batch_size / self.num_examples)

    def describe(self, batch_size, max_batch_size):
        """Describe how a step draws a subset of fixed size."""
        return (
            f"each step uses a uniformly random subset of {batch_size} of the "
            f"{self.num_examples} examples, drawn independently in every step and "
            "without replacement"
        )


class Cyclic(Mechanism):
    """Batches in the data's own order, the same in every epoch."""

    order = "fixed"
    supports_correlation = True
    reason = "the removal of one example would move all later examples to other batches"

    def expected_batch_size(self, batch_size):
        """The mean size: num_examples divided by the number of steps per epoch."""
        return self.num_examples / self.steps_per_epoch(batch_size)

    def draw(self, batch_size, max_batch_size, step, key):
        """Draw the batch of a step by `sampling.cyclic_step`."""
        steps = self.steps_per_epoch(batch_size)
        return sampling.cyclic_step(
            self.num_examples, batch_size, step=jnp.asarray(step) % steps
        )

    def event(self, run):
        """Return the event of a Gaussian mechanism.

        An example takes part in one step per epoch. For independent noise, the
        composition of these steps is one Gaussian mechanism, and the event is a
        `Gaussian`. For correlated noise, the event is a `CorrelatedGaussian`, whose μ
        `accounting.correlated.mu` computes.
        """
        num_steps = int(run.num_steps)
        epoch = self.steps_per_epoch(int(run.batch_size))
        sigma = run.noise_multiplier
        if self.shape is not None and self.order is not None:
            return events.CorrelatedGaussian(
                sigma, self.shape, num_steps, epoch, self.order, self.adjacency
            )
        times = -(-num_steps // epoch)
        if run.schedule:
            # A step with noise multiplier r σ costs as much as r⁻² steps with noise
            # multiplier σ. The last epoch may be incomplete. Its missing steps cost 0.
            costs = np.zeros(times * epoch)
            costs[:num_steps] = run.noises() ** -2.0
            by_epoch = costs.reshape(times, epoch)
            # An example takes part in the same step of every epoch, or, if the order is
            # random, at most in the most expensive step of every epoch.
            fixed = self.order == "fixed"
            total = by_epoch.sum(0).max() if fixed else by_epoch.max(1).sum()
            times = float(total) * (1 + 2.0**-40)  # covers the rounding of the sum
        # k Gaussian steps of sensitivity s are one Gaussian mechanism: μ = s √k / σ.
        factor = self.adjacency.sensitivity_factor
        return events.Gaussian(factor * math.sqrt(times) / sigma)

    def describe(self, batch_size, max_batch_size):
        """Describe batches in the data's own order, with their size."""
        return (
            f"batches of {batch_size} are taken in the order of the data, which does "
            "not depend on the examples and is the same in every epoch"
        )


class Reshuffled(Cyclic):
    """Batches of the data in a random order, which is new in every epoch."""

    order = "reshuffled"

    def draw(self, batch_size, max_batch_size, step, key):
        """Draw the batch of a step by `sampling.reshuffled_step`."""
        epoch, place = divmod(jnp.asarray(step), self.steps_per_epoch(batch_size))
        return sampling.reshuffled_step(
            self.num_examples, batch_size, key=key, epoch=epoch, step=place
        )

    def describe(self, batch_size, max_batch_size):
        """Describe batches in a random order, with their size."""
        return (
            f"batches of {batch_size} are taken in a random order, which is new in "
            "every epoch, but the guarantee does not rely on the randomness of the "
            "order"
        )


class CyclicPoisson(Mechanism):
    """Steps that sample from fixed groups of examples, one group after another.

    In each step, every example of the step's group takes part independently, with equal
    probability.
    """

    supports_correlation = True
    supports_schedules = False
    overflows = True
    reason = "the removal of one example would move all later examples to other groups"

    @property
    def groups(self) -> int:
        """The number p of groups of examples, which is the number of bands of C.

        C is the banded matrix that correlates the noise. Step t releases the vector
        s_t + (C⁻¹z)_t, where s_t is the sum of clipped gradients, and z is independent
        Gaussian noise. With p groups, the steps in which one example takes part are at
        least p apart. So no two columns of C for these steps have a nonzero entry in
        the same row.
        """
        return 1 if self.shape is None else 1 + len(self.shape.numerator)

    @property
    def population(self) -> int:
        """The number of examples in the largest group."""
        return -(-self.num_examples // self.groups)

    def check_strategy(self, shape, batch_size):
        """Raise unless C is banded, and each group has at least batch_size examples.

        Args:
          shape: the numbers of the matrix C that correlates the noise of steps. C must
            be banded. The examples form one group for each band.
          batch_size: the expected number of examples in a step. This number must be at
            most the number of examples divided by the number of groups.
        """
        if shape.denominator or shape.factors or shape.tree_decay is not None:
            raise ValueError(
                "strategy must be banded with sampling='cyclic_poisson'; got C "
                f"{shape}."
            )
        bands = 1 + len(shape.numerator)
        if bands * batch_size > self.num_examples:
            raise ValueError(
                "batch_size must be at most num_examples divided by the number of "
                f"bands, {bands}, which is {self.num_examples // bands}; got "
                f"{batch_size!r}."
            )

    def rate(self, batch_size: int) -> float:
        """The probability that an example of a step's group takes part in the step."""
        return min(1.0, self.groups * batch_size / self.num_examples)

    def draw(self, batch_size, max_batch_size, step, key):
        """Draw the batch of a step by `sampling.cyclic_poisson`."""
        return sampling.cyclic_poisson(
            self.num_examples,
            self.rate(batch_size),
            num_groups=self.groups,
            max_batch_size=max_batch_size,
            key=key,
            step=step,
        )

    def event(self, run):
        """Compose the privacy events of the steps that sample from the same group.

        With p groups, at most ⌈T / p⌉ of the run's T steps sample from one group. Each
        of these steps is a Poisson-sampled Gaussian mechanism with a maximum batch
        size. Let C be the matrix that correlates the noise. The sensitivity of a step
        is multiplied by the largest L2 norm of a column of C.
        `accounting.correlated.epsilon` computes the ε of the same composition without a
        maximum batch size.
        """
        bands = () if self.shape is None else self.shape.numerator
        # The factor covers the rounding of the norm: the sensitivity is rounded up.
        norm = float(np.linalg.norm([1.0, *bands])) * (1 + 2.0**-40)
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
        """Describe cyclic Poisson sampling: groups, probability, maximum batch size."""
        return (
            f"example i is in group i mod {self.groups}, and step t uses each example "
            f"of group t mod {self.groups} independently with probability "
            f"{self.groups} * {batch_size}/{self.num_examples}; if more than "
            f"{max_batch_size} take part in one step, a uniformly random subset of "
            "that size is used, and the guarantee accounts for this"
        )


class RandomBins(Mechanism):
    """Every example is assigned to one random step, which is the same in all epochs."""

    fresh: ClassVar[bool] = False  # whether every epoch makes a new assignment
    supports_correlation = True
    supports_schedules = False
    overflows = True
    adjacencies = tuple(Adjacency)

    def expected_batch_size(self, batch_size):
        """The expected size: num_examples divided by the number of steps per epoch."""
        return self.num_examples / self.steps_per_epoch(batch_size)

    def draw(self, batch_size, max_batch_size, step, key):
        """Draw the batch of a step by `sampling.random_bins_step`."""
        bins = self.steps_per_epoch(batch_size)
        step = jnp.asarray(step)
        return sampling.random_bins_step(
            self.num_examples,
            bins,
            max_batch_size=max_batch_size,
            key=key,
            # With the same number for every epoch, all epochs get the same assignment.
            epoch=step // bins if self.fresh else step * 0,
            step=step % bins,
        )

    def check_strategy(self, shape, batch_size):
        """Raise unless the matrix that correlates the noise is a Toeplitz matrix."""
        if shape.factors or shape.tree_decay is not None:
            raise ValueError(
                "strategy must be a Toeplitz strategy with sampling 'random_bins' or "
                f"'fresh_bins'; got C {shape}."
            )

    def event(self, run):
        """Return the privacy event of the whole run.

        Without a maximum batch size, `accounting.correlated.epsilon` computes ε at a
        given δ. The maximum batch size adds `truncation.overflow_delta` to δ.
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
        """Describe the random assignment of examples to the steps of an epoch."""
        anew = "anew in every epoch" if self.fresh else "the same in every epoch"
        bins = self.steps_per_epoch(int(batch_size))
        return (
            f"every example takes part in one of the {bins} steps of an epoch, chosen "
            f"uniformly at random and independently of others, {anew}; if more than "
            f"{max_batch_size} are assigned to one step, only {max_batch_size} of "
            "them are used, and the guarantee accounts for this"
        )


class FreshBins(RandomBins):
    """In each epoch, every example is assigned to a new random step."""

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
    """Return the mechanism that draws a run's examples and gives the run's event."""
    return SAMPLINGS[run.sampling](run.num_examples, run.adjacency, run.shape)


def released_event(run: RunParameters) -> events.Event:
    """Return the privacy event of a run's released values, from which ε is computed.

    If the run has arithmetic="real", the result is the event of the run's mechanism. If
    the run has arithmetic="discrete", the result also includes a bound on the total
    variation between the noise that the run draws and exact discrete Gaussian noise.
    """
    event = mechanism_of(run).event(run)
    if run.arithmetic == "real":
        return event
    return events.OnLattice(event, RUN_TOTAL_VARIATION)
