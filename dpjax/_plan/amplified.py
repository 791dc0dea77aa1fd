"""Batches drawn at random for noise that is correlated from step to step.

Who does not know in which steps an example took part learns less of it. For independent
noise `mechanisms.Poisson` is such a way; here are those that a correlation allows.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import sampling
from dpjax._core.adjacency import Adjacency
from dpjax._plan.mechanisms import (
    Cyclic,
    FixedSize,
    Mechanism,
    Poisson,
    Reshuffled,
)
from dpjax.accounting import events


class CyclicPoisson(Mechanism):
    """One group of the examples after the other, each with the same probability."""

    correlates = True
    varies = False
    overflows = True
    reason = "one example fewer moves all later ones to other groups"

    @property
    def groups(self) -> int:
        """As many as C has bands: then no two steps of an example share a row of it."""
        return 1 if self.shape is None else 1 + len(self.shape.numerator)

    @property
    def population(self) -> int:
        """Those of a group."""
        return -(-self.num_examples // self.groups)

    def refuse(self, shape, batch_size):
        """All but bands, and groups that are too small for the batch."""
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
        """The probability within a group."""
        return min(1.0, self.groups * batch_size / self.num_examples)

    def draw(self, batch_size, max_batch_size, step, key):
        """As `sampling.cyclic_poisson`."""
        return sampling.cyclic_poisson(
            self.num_examples,
            self.rate(batch_size),
            num_groups=self.groups,
            max_batch_size=max_batch_size,
            key=key,
            step=step,
        )

    def event(self, numbers):
        """Poisson-sampled steps of a column's norm, at every p-th step.

        As `accounting.correlated.epsilon`, with groups that overflow.
        """
        bands = () if self.shape is None else self.shape.numerator
        norm = np.linalg.norm([1.0, *bands]) * (1 + 2.0**-40)
        steps = -(-int(np.asarray(numbers.num_steps)) // self.groups)
        step = events.TruncatedPoissonGaussian(
            numbers.noise_multiplier / norm,
            self.rate(int(np.asarray(numbers.batch_size))),
            self.population,
            numbers.max_batch_size,
            self.adjacency,
        )
        return events.Composed((events.Repeated(step, steps),))

    def words(self, batch_size, max_batch_size):
        """Groups, the rate, the room, and what becomes of the rest."""
        return (
            f"example i is in group i mod {self.groups}, step t takes each example of "
            f"group t mod {self.groups} independently with probability "
            f"{self.groups} * {batch_size}/{self.num_examples}; of more than "
            f"{max_batch_size} in one step a uniformly random subset of that size is "
            "kept, which is accounted for"
        )


class RandomBins(Mechanism):
    """Every example picks one step of the epoch for itself, and keeps it."""

    correlates = True
    varies = False
    overflows = True
    covers = tuple(Adjacency)

    def taken(self, batch_size):
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

    def refuse(self, shape, batch_size):
        """All but Toeplitz matrices."""
        if shape.factors or shape.tree_decay is not None:
            raise ValueError(
                f"strategy must be a Toeplitz strategy in random bins; got C {shape}."
            )

    def _drawing(self, epoch: jax.Array) -> jax.Array:
        """The number of the drawing that an epoch goes by."""
        return epoch * 0

    _fresh = False

    def event(self, numbers):
        """As `accounting.correlated.epsilon`, and `truncation.overflow_delta`."""
        steps, size, capacity = (
            int(np.asarray(x))
            for x in (numbers.num_steps, numbers.batch_size, numbers.max_batch_size)
        )
        return events.RandomBins(
            float(np.asarray(numbers.noise_multiplier)),
            self.shape,
            steps,
            self.steps_per_epoch(size),
            self.num_examples,
            capacity,
            self._fresh,
            self.adjacency,
        )

    def words(self, batch_size, max_batch_size):
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


SAMPLINGS: dict[str, type[Mechanism]] = {
    "poisson": Poisson,
    "fixed_size": FixedSize,
    "fixed": Cyclic,
    "reshuffled": Reshuffled,
    "cyclic_poisson": CyclicPoisson,
    "random_bins": RandomBins,
    "fresh_bins": FreshBins,
}
