"""A way to draw the examples of a run, with what that costs and what it is called.

One class holds the draw, the event for accountants and the words for a paper, so that
no plan can account for one way of sampling and run another.
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
from dpjax.accounting import events, profiles
from dpjax.accounting.profiles import Profile


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A way of sampling from a data set of one size, for one adjacency.

    Attributes:
      num_examples: the size of the data set; of the larger one under ADD_REMOVE.
      adjacency: which data sets the guarantee compares.
      shape: how noise is correlated from step to step; None where it is not.
    """

    num_examples: int
    adjacency: Adjacency
    shape: StrategySpec | None = None

    order: ClassVar[Literal["fixed", "reshuffled"] | None] = None
    supports_correlation: ClassVar[bool] = False
    supports_schedules: ClassVar[bool] = True
    overflows: ClassVar[bool] = False
    draws_any_size: ClassVar[bool] = False
    adjacencies: ClassVar[tuple[Adjacency, ...]] = (
        Adjacency.ZERO_OUT,
        Adjacency.REPLACE,
    )
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
        self,
        batch_size: int,
        max_batch_size: int,
        step: ArrayLike,
        key: jax.Array,
    ) -> sampling.Batch:
        """The examples of a step."""
        raise NotImplementedError

    def event(self, run: RunParameters) -> events.Event:
        """What runs, as accountants read it."""
        raise NotImplementedError

    def profile(self, run: RunParameters) -> Profile:
        """What the run costs, from above."""
        return profiles.of(self.event(run))

    def describe(self, batch_size: str, max_batch_size: int) -> str:
        """How examples are drawn, so many at a time."""
        raise NotImplementedError

    @property
    def population(self) -> int:
        """Of how many examples a step can take."""
        return self.num_examples

    def check_strategy(self, shape: StrategySpec, batch_size: int) -> None:
        """Raise where noise of this shape is not accounted for."""

    def steps_per_epoch(self, batch_size: int) -> int:
        """Steps in which every example takes part once."""
        return -(-self.num_examples // batch_size)

    def expected_batch_size(self, batch_size: int) -> float:
        """How many examples a step takes, in expectation: fewer than b by epochs."""
        return float(batch_size)
