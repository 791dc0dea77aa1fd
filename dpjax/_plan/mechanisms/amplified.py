"""Random batches for noise that is correlated from step to step.

In cyclic Poisson sampling, each step samples from one of several fixed groups of the
examples, one group after another. In random bins (balls in bins), every example is
assigned to a random step of the epoch.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import sampling
from dpjax._core.adjacency import Adjacency
from dpjax._plan.mechanisms.base import Mechanism
from dpjax.accounting import events


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
            epoch=self._assignment_index(step // bins),
            step=step % bins,
        )

    def check_strategy(self, shape, batch_size):
        """Raise unless the strategy C is a Toeplitz matrix."""
        if shape.factors or shape.tree_decay is not None:
            raise ValueError(
                f"strategy must be a Toeplitz strategy in random bins; got C {shape}."
            )

    def _assignment_index(self, epoch: jax.Array) -> jax.Array:
        """The index of the random assignment of examples to steps in an epoch.

        The index is 0 for every epoch, so that all epochs have the same assignment.
        """
        return epoch * 0

    _fresh = False

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
            self._fresh,
            self.adjacency,
        )

    def describe(self, batch_size, max_batch_size):
        """The number of bins, the capacity, and what overflow does."""
        anew = "anew in every epoch" if self._fresh else "the same in every epoch"
        bins = self.steps_per_epoch(int(batch_size))
        return (
            f"every example picks one of the {bins} steps of an epoch, uniformly at "
            f"random and independently of others, {anew}; of more than "
            f"{max_batch_size} in one step so many are kept, which is accounted for"
        )


class FreshBins(RandomBins):
    """Every example is assigned anew, at random, to one step of each epoch."""

    _fresh = True

    def _assignment_index(self, epoch):
        """The number of the epoch: every epoch has another random assignment."""
        return epoch
