"""A workload as data, which both what makes and what measures it read."""

from typing import NamedTuple

import numpy as np

from dpjax._core.typing import ArrayLike


class Workload(NamedTuple):
    """x_t = keep_t x_{t−1} + rates_t h_t, h = N(L) / D(L) g, L the shift by one step.

    Attributes:
      numerator: N without its leading 1, f[k].
      denominator: D without its leading 1, f[m].
      rates: f[T], or f[1] for all steps.
      keep: f[T], or f[1] for all steps: 0 if h is what comes out, 1 if its sums are.
    """

    numerator: ArrayLike
    denominator: ArrayLike
    rates: ArrayLike
    keep: ArrayLike


def check_workload(workload: Workload, num_steps: int) -> Workload:
    """The workload itself, if it is one for so many steps."""
    if not isinstance(workload, Workload) or not all(np.ndim(x) for x in workload):
        raise ValueError(
            f"workload must be one that dpjax.workloads makes; got {workload!r}."
        )
    for name in ("rates", "keep"):
        size = np.shape(getattr(workload, name))[-1]
        if size not in (1, num_steps):
            raise ValueError(
                f"the workload's {name} must be one number, or one for each of "
                f"num_steps, {num_steps}; got {size}."
            )
    return workload
