"""The numbers of a run, as one frozen record that every part of a plan reads."""

import dataclasses
import math
from typing import Any

from dpjax._core.adjacency import Adjacency
from dpjax._matrices.spec import StrategySpec
from dpjax._matrices.strategy import Strategy
from dpjax._plan.quantile import QuantileClip
from dpjax._plan.schedule import Segment, groups

# From the declared type of a field to the Python types that a record may hold for it.
_KINDS: dict[Any, Any] = {int: int, float: int | float, str: str}


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
    arithmetic: str = "real"
    schedule: tuple[Segment, ...] = ()
    quantile: QuantileClip | None = None
    shape: StrategySpec | None = None

    @property
    def strategy(self) -> Strategy | None:
        """The strategy that correlates the noise; None for independent noise."""
        return None if self.shape is None else self.shape.strategy(self.num_steps)

    def parameters(self, **changes: Any) -> "RunParameters":
        """The numbers of a run or a plan, without a comparison, with some changed."""
        fields = dataclasses.fields(RunParameters)
        return RunParameters(
            **{x.name: getattr(self, x.name) for x in fields} | changes
        )

    def constant_runs(self) -> list["RunParameters"]:
        """Runs with constant noise and batch size that compose to this run.

        Steps with the same numbers form one run, wherever they are in the schedule: the
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

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values for JSON. An infinite ε becomes None."""
        fields = dataclasses.fields(RunParameters)
        return {field.name: getattr(self, field.name) for field in fields} | {
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "adjacency": self.adjacency.name,
            "schedule": [list(piece) for piece in self.schedule],
            "quantile": self.quantile and self.quantile._asdict(),
            "shape": self.shape and _lists(self.shape._asdict()),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunParameters":
        """The parameters that `to_dict` wrote, with the same numbers bit for bit.

        Raises:
          ValueError: the values are not a record of a plan.
        """
        try:
            run = _from_dict(values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no plan has this record: {error!r}") from error
        for field in dataclasses.fields(run):
            value, kinds = getattr(run, field.name), _KINDS.get(field.type, object)
            # A bool is an int in Python, but no field is one.
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ValueError(f"no plan has {field.name} {value!r}")
        return run


def _from_dict(values: dict[str, Any]) -> RunParameters:
    """The parameters of a record, without a check of the numbers' types."""
    shape, quantile = values["shape"], values["quantile"]
    made = {
        "epsilon": math.inf if values["epsilon"] is None else values["epsilon"],
        "adjacency": Adjacency[values["adjacency"]],
        "schedule": tuple(Segment(*piece) for piece in values["schedule"]),
        "quantile": quantile and QuantileClip(**quantile),
        "shape": StrategySpec.from_record(shape) if shape else None,
    }
    return RunParameters(**(values | made))


def _lists(values: dict[str, Any]) -> dict[str, Any]:
    return {k: list(x) if isinstance(x, tuple) else x for k, x in values.items()}
