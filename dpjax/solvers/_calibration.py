"""The least noise that meets a target.

Noise is a number before anything is trained, also where a run is mapped over keys: what
does not depend on a key is then computed all the same, by `now`.
"""

from collections.abc import Callable

import jax
import jax.core

from dpjax._core.outward import MARGIN
from dpjax.accounting import calibrate, gdp
from dpjax.solvers import _numbers
from dpjax.solvers._checks import Target

# Not jax.ensure_compile_time_eval, under which jax.vmap maps custom derivatives anyway.
now = jax.core.eval_context


def solve_noise(
    loss_of: Callable[[jax.Array], jax.Array], goal: float, target: Target
) -> float:
    """The least noise multiplier whose ε (or δ) is at most the goal."""
    try:
        with now():
            found = float(calibrate.solve(loss_of, goal))
        return _numbers.up(found * MARGIN)
    except ValueError as error:
        raise ValueError(
            f"epsilon {target.epsilon!r} at delta {target.delta!r} must be one that "
            f"some noise reaches: {error}"
        ) from error


def calibrate_one_draw(epsilon: float, delta: float) -> float:
    """The least scale of noise over sensitivity, of one draw and before any margin."""
    # At δ = 0 density ∝ exp(−ε‖z‖/Δ): a distance Δ moves its logarithm by ε at most.
    return 1 / epsilon if delta == 0 else 1 / float(gdp.mu(epsilon, delta))
