"""Batches that are drawn anew in every step."""

from dpjax import sampling
from dpjax._core.adjacency import Adjacency
from dpjax._plan.mechanisms.base import Mechanism
from dpjax.accounting import events


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

        return events.Composed(
            tuple(
                events.Repeated(step(part), part.num_steps)
                for part in run.constant_runs()
            )
        )

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
        return events.Composed(
            tuple(
                events.Repeated(
                    events.FixedSizeGaussian(
                        self.adjacency.sensitivity_factor / part.noise_multiplier,
                        part.batch_size / self.num_examples,
                    ),
                    part.num_steps,
                )
                for part in run.constant_runs()
            )
        )

    def describe(self, batch_size, max_batch_size):
        """The size of the subset, and how it is drawn."""
        return (
            f"each step takes a uniformly random subset of {batch_size} of the "
            f"{self.num_examples} examples, drawn anew without replacement"
        )
