"""The interface of a way of sampling: its draw, its privacy cost and its description.

One class holds the draw, the event for accountants and the description for a paper, so
that no plan can account for one way of sampling and run another.
"""

import dataclasses
from typing import ClassVar, Literal

import jax

from dpjax import sampling
from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.typing import ArrayLike
from dpjax._matrices.spec import StrategySpec
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
