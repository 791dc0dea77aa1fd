"""The least noise that meets a target.

The noise multiplier is a concrete number before training begins, also under `jax.vmap`
over keys: `now` evaluates the calibration at once, since it does not depend on a key.
"""

from collections.abc import Callable

import jax
import jax.core

from dpjax._core.outward import MARGIN
from dpjax.accounting import calibrate, gdp
from dpjax.solvers import _numbers
from dpjax.solvers._checks import Target

# jax.ensure_compile_time_eval would not do: under it jax.vmap still maps functions with
# custom derivatives.
now = jax.core.eval_context


def solve_noise(
    loss_of: Callable[[jax.Array], jax.Array], goal: float, target: Target
) -> float:
    """The least noise multiplier whose ε (or δ) is at most the goal.

    `loss_of` maps a noise multiplier to the privacy loss that it leaves.
    """
    try:
        with now():
            found = float(calibrate.solve(loss_of, goal))
        # The margin covers the roundings to float32 in the accountant and after it.
        return _numbers.up(found * MARGIN)
    except ValueError as error:
        raise ValueError(
            f"epsilon {target.epsilon!r} at delta {target.delta!r} must be one that "
            f"some noise reaches: {error}"
        ) from error


def calibrate_one_draw(epsilon: float, delta: float) -> float:
    """The least ratio of noise scale to sensitivity for one draw, before any margin."""
    # At δ = 0 density ∝ exp(−ε‖z‖/Δ): a distance Δ moves its logarithm by ε at most.
    return 1 / epsilon if delta == 0 else 1 / float(gdp.mu(epsilon, delta))
