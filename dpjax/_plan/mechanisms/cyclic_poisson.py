"""Poisson samples from one group of the examples after the other."""

import numpy as np

from dpjax import sampling
from dpjax._plan.mechanisms.base import Mechanism
from dpjax.accounting import events


class CyclicPoisson(Mechanism):
    """One group of the examples after the other, each with the same probability."""

    supports_correlation = True
    supports_schedules = False
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

    def check_strategy(self, shape, batch_size):
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

    def event(self, run):
        """Poisson-sampled steps of a column's norm, at every p-th step.

        As `accounting.correlated.epsilon`, with groups that overflow.
        """
        bands = () if self.shape is None else self.shape.numerator
        norm = np.linalg.norm([1.0, *bands]) * (1 + 2.0**-40)
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
        """Groups, the rate, the room, and what becomes of the rest."""
        return (
            f"example i is in group i mod {self.groups}, step t takes each example of "
            f"group t mod {self.groups} independently with probability "
            f"{self.groups} * {batch_size}/{self.num_examples}; of more than "
            f"{max_batch_size} in one step a uniformly random subset of that size is "
            "kept, which is accounted for"
        )
