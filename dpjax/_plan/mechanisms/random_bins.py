"""Every example picks a step of the epoch at random."""

import jax
import jax.numpy as jnp

from dpjax import sampling
from dpjax._core.adjacency import Adjacency
from dpjax._plan.mechanisms.base import Mechanism
from dpjax.accounting import events


class RandomBins(Mechanism):
    """Every example picks one step of the epoch for itself, and keeps it."""

    supports_correlation = True
    supports_schedules = False
    overflows = True
    adjacencies = tuple(Adjacency)

    def expected_batch_size(self, batch_size):
        """All examples, over the steps of an epoch."""
        return self.num_examples / self.steps_per_epoch(batch_size)

    def draw(self, batch_size, max_batch_size, step, key):
        """As `sampling.random_bins_step`."""
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
        """All but Toeplitz matrices."""
        if shape.factors or shape.tree_decay is not None:
            raise ValueError(
                f"strategy must be a Toeplitz strategy in random bins; got C {shape}."
            )

    def _drawing(self, epoch: jax.Array) -> jax.Array:
        """The number of the drawing that an epoch goes by."""
        return epoch * 0

    _fresh = False

    def event(self, run):
        """As `accounting.correlated.epsilon`, and `truncation.overflow_delta`."""
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
        """The bins, the room, and what becomes of the rest."""
        anew = "anew in every epoch" if self._fresh else "the same in every epoch"
        bins = self.steps_per_epoch(int(batch_size))
        return (
            f"every example picks one of the {bins} steps of an epoch, uniformly at "
            f"random and independently of others, {anew}; of more than "
            f"{max_batch_size} in one step so many are kept, which is accounted for"
        )


class FreshBins(RandomBins):
    """Every example picks one step of each epoch for itself."""

    _fresh = True

    def _drawing(self, epoch):
        """Every epoch has its own."""
        return epoch
