"""How many steps of gradient descent are worth their noise."""

from typing import Any, Unpack

import numpy as np

from dpjax import _validate
from dpjax.accounting import gdp, iteration

_MOST_STEPS = 1_000_000


def exact_scale(epsilon: float, delta: float, sensitivity: Any) -> Any:
    """The scale of the noise that is needed, and no more."""
    if delta == 0:
        return np.asarray(sensitivity) / epsilon
    return np.asarray(sensitivity) / float(gdp.mu(epsilon, delta))


def choose_num_steps(
    epsilon: float,
    delta: float,
    *,
    radius: float,
    dimension: int,
    num_examples: int,
    **setting: Unpack[iteration.Setting],
) -> int:
    """The least T with the theorems' bound on the excess loss within 1 % of its best.

    That bound is optimisation error plus noise: (β/2) e^{−2ημβT/(μ+β)} D² if the
    objective is μ-strongly convex, 2D²/(ηT) if it is convex, plus (β/2) E‖z‖², for the
    noise that will be added. It depends on no data.

    Args:
      epsilon: positive.
      delta: in [0, 1).
      radius: D, a guess of the distance from the initial parameters to the best.
      dimension: d, the number of parameters.
      num_examples: n.
      **setting: as for `output_perturbation`.

    Returns:
      T, at least 1 and at most a million.

    Reference: Zhang, Zheng, Mou and Wang (2017), Theorems 2 and 3, whose T has the same
    growth; their proofs have these two terms.

    Example:
      >>> from dpjax import Adjacency
      >>> setting = dict(
      ...     step_size=1.0, gradient_norm=1.0, clipped=False, generalised_linear=True,
      ...     smoothness=0.25, weak_convexity=0.0, strong_convexity=0.0,
      ...     regularization=0.1, diameter=float("inf"), adjacency=Adjacency.REPLACE)
      >>> choose_num_steps(
      ...     1.0, 0.001, radius=2.0, dimension=10, num_examples=1000, **setting)
      60
    """
    _validate.positive("radius", radius)
    steps = np.unique(np.geomspace(1, _MOST_STEPS, 2000).astype(np.int64))
    sensitivity = iteration.gradient_descent_sensitivity(
        num_steps=steps, num_examples=num_examples, **setting
    )
    scale = exact_scale(epsilon, delta, np.asarray(sensitivity, np.float64))
    copies = dimension * (dimension + 1) if delta == 0 else dimension
    lam, eta = float(np.max(setting["regularization"])), np.max(setting["step_size"])
    mu = lam + float(np.max(setting["strong_convexity"]))
    beta = lam + float(np.max(setting["smoothness"]))
    if mu > 0:
        decrease = np.exp(-2 * eta * mu * beta * steps / (mu + beta))
        left = beta / 2 * radius**2 * decrease
    else:
        left = 2 * radius**2 / (eta * steps)
    bound = left + beta / 2 * copies * scale**2
    return int(steps[np.argmax(bound <= 1.01 * np.min(bound))])
