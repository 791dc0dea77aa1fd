"""Balls in bins: every example is assigned to a random step of the epoch."""

import jax
import jax.numpy as jnp

from dpjax import sampling
from dpjax._core.adjacency import Adjacency
from dpjax._plan.mechanisms.base import Mechanism
from dpjax.accounting import events


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
            epoch=self._drawing(step // bins),
            step=step % bins,
        )

    def check_strategy(self, shape, batch_size):
        """Raise unless the strategy C is a Toeplitz matrix."""
        if shape.factors or shape.tree_decay is not None:
            raise ValueError(
                f"strategy must be a Toeplitz strategy in random bins; got C {shape}."
            )

    def _drawing(self, epoch: jax.Array) -> jax.Array:
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

    def _drawing(self, epoch):
        """The number of the epoch: every epoch has another random assignment."""
        return epoch
