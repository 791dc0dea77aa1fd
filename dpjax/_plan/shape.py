"""The correlation of a plan's noise: the caller's strategy, or the best one found."""

from typing import Any

import numpy as np

from dpjax import strategies
from dpjax._matrices.spec import StrategySpec, spec_of
from dpjax._matrices.strategy import Strategy, Workload
from dpjax._plan.mechanisms import Mechanism
from dpjax._plan.parameters import RunParameters
from dpjax.strategies import _amplified


def resolve_strategy(
    run: RunParameters,
    mechanism: Mechanism,
    workload: Workload | None,
    strategy: Strategy | None,
) -> tuple[StrategySpec | None, _amplified.Start | None]:
    """Return the caller's strategy, or find the best strategy for the workload.

    Returns:
      strategy: the numbers of the strategy; None for independent noise.
      start: where to start the search for the noise multiplier. None unless the search
        for the strategy found correlated noise and estimated its noise multiplier.

    Raises:
      ValueError: workload and strategy do not fit the noise or the sampling.
    """
    if run.noise == "independent":
        if workload is not None or strategy is not None:
            raise ValueError(
                "workload and strategy must be None unless noise is 'correlated'; "
                f"got {workload!r} and {strategy!r}."
            )
        return None, None
    if not mechanism.supports_correlation:
        raise ValueError(
            "sampling must not be 'poisson' or 'fixed_size' with noise='correlated', "
            "because no bound on the privacy cost is known for these samplings."
        )
    if run.solved_for in ("num_steps", "batch_size"):
        raise ValueError(
            "num_steps and batch_size must be given with noise='correlated'; leave "
            "out epsilon or noise_multiplier instead."
        )
    about = None
    if strategy is None and workload is not None:
        strategy, about = _best(run, mechanism, workload)
    elif strategy is None or workload is not None:
        raise ValueError(
            "either workload or strategy must be given with noise='correlated'; got "
            f"{workload!r} and {strategy!r}."
        )
    shape = spec_of(strategy, run.num_steps)
    mechanism.check_strategy(shape, run.batch_size)
    return shape, about


def _best(
    run: RunParameters, mechanism: Mechanism, workload: Workload
) -> tuple[Strategy, _amplified.Start | None]:
    """Find the best strategy for a workload, and estimate its noise multiplier.

    For batches in order, the strategy is the best with one stored vector, and the
    estimate is None. For random batches, the strategy is the best that
    `strategies.amplified` finds, and the estimate is None for independent noise.
    """
    sizes: dict[str, Any] = {
        "num_steps": run.num_steps,
        "steps_per_epoch": mechanism.steps_per_epoch(run.batch_size),
    }
    if mechanism.order is None:
        if run.solved_for == "epsilon":
            raise ValueError(
                "epsilon or strategy must be given with this sampling, because the "
                "best strategy for a workload depends on epsilon."
            )
        best, about = _amplified.estimate(
            workload,
            **sizes,
            epsilon=run.epsilon,
            delta=run.delta,
            sampling=run.sampling,  # pyright: ignore
            adjacency=run.adjacency,
        )
        # If the best strategy is independent noise, there is no start, as if the caller
        # had named independent noise. A comparison of both then computes no ε twice.
        return best.strategy, about if any(map(np.any, best.strategy)) else None
    sizes["order"] = mechanism.order
    optimized = strategies.optimize("rational", workload, **sizes)
    # If the workload's rates or sums vary by step, the strategy's factors also do.
    if all(np.size(x) == 1 for x in workload[2:]):
        return optimized, None
    return strategies.scheduled(optimized, workload, **sizes), None
