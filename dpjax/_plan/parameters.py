"""The numbers of a run: one frozen record, which every part of a plan reads."""

import dataclasses
import math
from typing import Any

from dpjax._core.adjacency import Adjacency
from dpjax._matrices.spec import StrategySpec
from dpjax._matrices.strategy import Strategy
from dpjax._plan.quantile import QuantileClip
from dpjax._plan.schedule import Segment, groups

# Which Python types are accepted for a field that is declared with a type.
_KINDS: dict[Any, Any] = {int: int, float: int | float, str: str}


@dataclasses.dataclass(frozen=True)
class RunParameters:
    """What a run draws, clips, adds and promises; `dpjax.Plan` says what each is."""

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
    schedule: tuple[Segment, ...] = ()
    quantile: QuantileClip | None = None
    shape: StrategySpec | None = None

    @property
    def strategy(self) -> Strategy | None:
        """What correlates the noise, as `dpjax.strategies` made it; None if none."""
        return None if self.shape is None else self.shape.strategy(self.num_steps)

    def parameters(self, **changes: Any) -> "RunParameters":
        """These numbers alone, without what a plan holds besides, and some changed."""
        fields = dataclasses.fields(RunParameters)
        return RunParameters(
            **{x.name: getattr(self, x.name) for x in fields} | changes
        )

    def constant_runs(self) -> list["RunParameters"]:
        """The runs, one after the other, in which noise and batch size are constant."""
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
        """All fields as plain values, which JSON holds; an ε without bound is None."""
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
          ValueError: no plan has these values.
        """
        try:
            run = _from_dict(values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no plan has this record: {error!r}") from error
        for field in dataclasses.fields(run):
            value, kinds = getattr(run, field.name), _KINDS.get(field.type, object)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ValueError(f"no plan has {field.name} {value!r}")
        return run


def _from_dict(values: dict[str, Any]) -> RunParameters:
    """The parameters, whatever the types of the numbers."""
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
