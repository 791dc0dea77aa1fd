"""The numbers of a run, in one frozen record that every part of a plan reads."""

import dataclasses
from typing import Any

from dpjax._core.typing import Adjacency, Arithmetic
from dpjax._matrices.spec import StrategySpec
from dpjax._matrices.strategy import Strategy
from dpjax._plan.quantile import QuantileClip
from dpjax._plan.schedule import Segment, groups


@dataclasses.dataclass(frozen=True)
class RunParameters:
    """The numbers of a run; the attributes of `dpjax.Plan` describe each of them."""

    num_examples: int
    batch_size: int
    num_steps: int
    noise_multiplier: float
    clip_norm: float
    max_batch_size: int
    epsilon: float
    delta: float
    sampling: str
    noise: str
    adjacency: Adjacency
    solved_for: str
    unit: str = "example"
    arithmetic: Arithmetic = "real"
    schedule: tuple[Segment, ...] = ()
    quantile: QuantileClip | None = None
    shape: StrategySpec | None = None

    @property
    def strategy(self) -> Strategy | None:
        """The strategy that correlates the noise; None for independent noise."""
        return None if self.shape is None else self.shape.strategy(self.num_steps)

    def parameters(self, **changes: Any) -> "RunParameters":
        """A copy of the numbers of this run or plan, with the given changes."""
        fields = dataclasses.fields(RunParameters)
        return RunParameters(
            **{x.name: getattr(self, x.name) for x in fields} | changes
        )

    def constant_runs(self) -> list["RunParameters"]:
        """Split this run into runs with constant noise and batch size.

        The composition of the returned runs has the privacy cost of this run. Steps
        with the same numbers form one run, wherever they are in the schedule, since the
        composition does not depend on the order of the steps.
        """
        if not self.schedule:
            return [self]
        counts = groups(self.schedule, self.num_steps)
        return [
            self.parameters(
                noise_multiplier=self.noise_multiplier * noise,
                batch_size=size,
                num_steps=count,
                schedule=(),
            )
            for (noise, size), count in sorted(counts.items())
        ]
