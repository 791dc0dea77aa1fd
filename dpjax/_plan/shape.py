"""How the noise of a plan is correlated: as asked for, or best for a workload."""

from typing import Any, Literal

import numpy as np

from dpjax import strategies
from dpjax._plan.mechanisms import Mechanism
from dpjax._shape import Shape, shape_of
from dpjax._strategy import Strategy
from dpjax._workload import Workload


def asked(
    mechanism: Mechanism,
    noise: str,
    given: dict[str, Any],
    workload: Workload | None,
    strategy: Strategy | None,
) -> Shape | None:
    """What was asked for, or the best for a workload; None for independent noise."""
    if noise == "independent":
        if workload is not None or strategy is not None:
            raise ValueError(
                "workload and strategy are for noise='correlated'; got "
                f"{workload!r} and {strategy!r}."
            )
        return None
    if not mechanism.correlates:
        raise ValueError(
            "sampling must not be 'poisson' or 'fixed_size' with noise='correlated', "
            "whose cost is not known for these."
        )
    steps, size = given["num_steps"], given["batch_size"]
    if steps is None or size is None:
        raise ValueError(
            "num_steps and batch_size must be given with noise='correlated'; what is "
            "solved for is epsilon or noise_multiplier."
        )
    if strategy is None and workload is not None:
        if mechanism.order is None:
            raise ValueError(
                "strategy must be given with this sampling: which is best for a "
                "workload depends on how it is amplified."
            )
        epoch = mechanism.steps_per_epoch(size)
        strategy = _best(workload, steps, epoch, mechanism.order)
    elif strategy is None or workload is not None:
        raise ValueError(
            "either workload or strategy must be given with noise='correlated'; got "
            f"{workload!r} and {strategy!r}."
        )
    shape = shape_of(strategy, steps)
    mechanism.refuse(shape, size)
    return shape


def _best(
    workload: Workload,
    num_steps: int,
    steps_per_epoch: int,
    order: Literal["fixed", "reshuffled"],
) -> Strategy:
    """The strategy with one vector that is best for a workload."""
    given = {"num_steps": num_steps, "steps_per_epoch": steps_per_epoch}
    found = strategies.optimize("rational", workload, **given, order=order)
    if all(np.size(x) == 1 for x in workload[2:]):
        return found
    return strategies.scheduled(found, workload, **given, order=order)
