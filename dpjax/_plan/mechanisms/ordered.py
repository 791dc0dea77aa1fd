"""Batches in an order: the data's own, or a new one in every epoch."""

import math

import jax.numpy as jnp
import numpy as np

from dpjax import sampling
from dpjax._plan import schedule as schedules
from dpjax._plan.mechanisms.base import Mechanism
from dpjax.accounting import events


class Cyclic(Mechanism):
    """Batches in the data's own order, the same in every epoch."""

    order = "fixed"
    supports_correlation = True
    reason = "one example fewer moves all later ones to other batches"

    def expected_batch_size(self, batch_size):
        """All examples, over the steps of an epoch."""
        return self.num_examples / self.steps_per_epoch(batch_size)

    def draw(self, batch_size, max_batch_size, step, key):
        """As `sampling.cyclic_step`."""
        steps = self.steps_per_epoch(batch_size)
        return sampling.cyclic_step(
            self.num_examples, batch_size, step=jnp.asarray(step) % steps
        )

    def event(self, run):
        """Composition of the steps that an example takes part in, one an epoch.

        With correlated noise, as `accounting.correlated.mu`.
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
            # Steps that are not taken have noise without end.
            padded = np.pad(
                noises, (0, times * epoch - num_steps), constant_values=np.inf
            )
            times = self._times(padded.reshape(times, epoch) ** -2.0)
        factor = self.adjacency.sensitivity_factor
        return events.Gaussian(factor * math.sqrt(times) / run.noise_multiplier)

    def _times(self, costs: np.ndarray) -> float:
        """How many steps at the plan's noise an example's cost as much as, from above.

        An example is in the same column of costs f64[epochs, epoch] in every epoch.
        """
        return float(np.max(np.sum(costs, axis=0))) * (1 + 2.0**-40)

    def describe(self, batch_size, max_batch_size):
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

    def describe(self, batch_size, max_batch_size):
        """The order."""
        return (
            f"batches of {batch_size} are taken in a random order, another one in "
            "every epoch, which nothing in the guarantee relies on"
        )
