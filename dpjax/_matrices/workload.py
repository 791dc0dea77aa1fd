"""A workload as data, which both its constructors and the measures of error use."""

from typing import NamedTuple

import numpy as np

from dpjax._core.typing import ArrayLike


class Workload(NamedTuple):
    """x_t = keep_t x_{t−1} + rates_t h_t, h = N(L) / D(L) g, L the shift by one step.

    g_t is the gradient sum of step t, and x_t the output of the workload.

    Attributes:
      numerator: N without its leading 1, f[k].
      denominator: D without its leading 1, f[m].
      rates: f[T], or f[1] for all steps.
      keep: f[T], or f[1] for all steps. With 0 the output is rates_t h_t itself; with 1
        the output is the running sum.
    """

    numerator: ArrayLike
    denominator: ArrayLike
    rates: ArrayLike
    keep: ArrayLike


def check_workload(workload: Workload, num_steps: int) -> Workload:
    """The workload itself, or an error if it is not one for num_steps steps."""
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
