"""Find the minimum noise that meets a target (ε, δ).

The noise multiplier is a concrete number before training begins, also under `jax.vmap`
over keys. Calibration depends on no key. Solvers therefore calibrate under the context
manager `now`, in which JAX evaluates operations at once.

`choose_num_steps` chooses the number of steps of gradient descent. More steps reduce
the optimisation error, but need more noise.
"""

from collections.abc import Callable
from typing import Unpack

import jax
import jax.core
import numpy as np

from dpjax._core import rounding, validate
from dpjax.accounting import calibrate, gdp, iteration
from dpjax.solvers import _checks, _precision

# jax.ensure_compile_time_eval does not suffice: under it, jax.vmap still maps functions
# that have custom derivatives.
now = jax.core.eval_context


def solve_noise(
    loss_of: Callable[[jax.Array], jax.Array],
    goal: float,
    target: _checks.Target,
    start: float = 1.0,
) -> float:
    """Find the minimum noise multiplier for which ε (or δ) is at most `goal`.

    `loss_of` maps a noise multiplier to the ε (or δ) of the run. The search begins at
    the noise multiplier `start`. An error message states `target`, the (ε, δ) that the
    caller of the solver asked for.
    """
    try:
        with now():
            noise = float(calibrate.solve(loss_of, goal, start=start))
        # The margin covers the roundings to float32 in the accountant and after it.
        return _precision.round_up(noise * rounding.MARGIN)
    except ValueError as error:
        raise ValueError(
            "epsilon must be attainable with some noise; got epsilon "
            f"{target.epsilon!r} at delta {target.delta!r}: {error}"
        ) from error


def calibrate_one_draw(epsilon: float, delta: float) -> float:
    """Return the minimum ratio scale / sensitivity for which added noise is (ε, δ)-DP.

    For δ > 0, the noise is Gaussian, and its scale is its standard deviation. For
    δ = 0, the noise z has a density proportional to exp(−‖z‖ / scale). The caller must
    add a margin for rounding errors.
    """
    # At δ = 0 the density is ∝ exp(−ε‖z‖/Δ). A distance Δ changes the logarithm of the
    # density by at most ε.
    return 1 / epsilon if delta == 0 else 1 / float(gdp.mu(epsilon, delta))


# The maximum number of steps that the search considers.
_MOST_STEPS = 1_000_000


def choose_num_steps(
    epsilon: float,
    delta: float,
    *,
    radius: float,
    dimension: int,
    num_examples: int,
    **setting: Unpack[iteration.Setting],
) -> int:
    """Choose a number of steps T for which a bound on the excess loss is small.

    The function considers about 2000 numbers of steps, and returns the smallest one for
    which the bound is within 1 % of its minimum. The bound is the sum of two terms. For
    step size η, a β-smooth and μ-strongly convex objective, and the radius D, the
    optimisation error is (β/2) e^{−2ημβT/(μ+β)} D² if μ > 0, and 2D²/(ηT) if μ = 0. The
    second term is (β/2) E‖z‖², where z is the noise that `output_perturbation` adds
    after T steps. The choice depends on no data.

    Args:
      epsilon: the target ε, positive.
      delta: the target δ, in [0, 1).
      radius: D, a guess of the distance from the initial to the best parameters.
      dimension: d, the number of parameters.
      num_examples: n, the number of examples.
      **setting: the assumptions of the guarantee, as for `output_perturbation`.

    Returns:
      T, at least 1 and at most a million.

    Reference: Zhang, Zheng, Mou and Wang (2017). The proofs of Theorems 2 and 3 bound
    the excess loss by these two terms. The T of these theorems grows at the same rate.

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
    validate.positive("radius", radius)
    # Candidates have geometric spacing, since T needs only a relative precision.
    steps = np.unique(np.geomspace(1, _MOST_STEPS, 2000).astype(np.int64))
    sensitivity = iteration.gradient_descent_sensitivity(
        num_steps=steps, num_examples=num_examples, **setting
    )
    scale = np.float64(sensitivity) * calibrate_one_draw(epsilon, delta)
    # E‖z‖² is d scale² for Gaussian noise. For δ = 0, E‖z‖² is E Gamma(d)² scale²,
    # which equals d(d + 1) scale².
    copies = dimension * (dimension + 1) if delta == 0 else dimension
    lam, eta = np.max(setting["regularization"]), np.max(setting["step_size"])
    mu = lam + np.max(setting["strong_convexity"])
    beta = lam + np.max(setting["smoothness"])
    # The excess loss after T steps is from Zhang et al. (2017), proofs of Theorem 2
    # (μ > 0) and Theorem 3, https://arxiv.org/abs/1703.09947. Smoothness converts a
    # distance to a loss.
    if mu > 0:
        decrease = np.exp(-2 * eta * mu * beta * steps / (mu + beta))
        left = beta / 2 * radius**2 * decrease
    else:
        left = 2 * radius**2 / (eta * steps)
    bound = left + beta / 2 * copies * scale**2
    return int(steps[np.argmax(bound <= 1.01 * np.min(bound))])
