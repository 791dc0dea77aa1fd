"""Batches taken in order: the data's own order, or a new random one in every epoch."""

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
