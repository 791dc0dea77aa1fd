"""Lipschitz constants of a gradient step, exact under the assumptions on the loss.

The loss of one example has curvature between a and M (a = −m for a weakly convex loss).
The step is x ↦ x − η (mean gradient), with the step size η. Without clipping its
Lipschitz constant is max(|1 − ηa|, |1 − ηM|).

With clipping, the constant can be larger than this value. Clipping is the proximal map
of a convex function. Let two points differ by d, and their gradients before clipping by
Δ. The difference of the clipped gradients then lies in the ball with diameter [0, Δ].
The difference Δ itself lies in the ball around (M − m)/2 · d of radius (M + m)/2 · ‖d‖.
Let κ = η(M − m)/2 and ρ = η(M + m)/2. The distance ‖d − η (clipped difference)‖ is
largest where an ellipse with foci 0 and 2d touches the second ball, scaled by η. For
‖d‖ = 1 the largest distance is sqrt(1 + ρ²/(κ(2 − κ))), which is above 1 even for
convex losses.

A gradient of the form (scalar function of ⟨w, x⟩) · x has a fixed direction, and its
clipped version is the gradient of another loss of the same form, with curvature between
min(a, 0) and M. Only strong convexity is lost: where a gradient is clipped, the
curvature is 0.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import ULP, float64
from dpjax._core.typing import ArrayLike


def excess(
    step_size: jax.Array, lower: jax.Array, upper: jax.Array, scale: jax.Array
) -> jax.Array:
    """The Lipschitz constant of a gradient step without clipping, minus 1, rounded up.

    The curvature of the loss is between lower and upper. The number lower is a sum of
    terms, and scale is the sum of their absolute values, which bounds the rounding
    error of lower.
    """
    # Bok, Su and Altschuler (2024), Lemma 2.8, https://arxiv.org/abs/2403.00278:
    # max(|1 − η lower|, |1 − η upper|), less 1, so that short steps retain precision.
    slack = 4 * ULP * step_size
    low = -step_size * lower + slack * scale
    high = step_size * upper - 2
    # For a step size of 2/M the product with M may be rounded to slightly above 2. The
    # product must still count as at most 2.
    past = high > 8 * ULP
    high = jnp.where(past, high + slack * upper, jnp.minimum(high + slack * upper, 0.0))
    return jnp.maximum(low, high)


def clipped_excess(
    step_size: jax.Array, weak: jax.Array, upper: jax.Array
) -> jax.Array:
    """The Lipschitz constant of a step along clipped gradients, minus 1, rounded up.

    The curvature of the loss before clipping is between −weak and upper.
    """
    # In place of Kong and Ribero (2024), Proposition 3.4(b),
    # https://arxiv.org/abs/2407.05237, whose L_λ(0, M) = 1 does not hold: the ellipse
    # touches the ball at sqrt(1 + ρ²/(κ(2 − κ))), or else max(1 + ηm, ηM − 1).
    rho, kappa = step_size * (upper + weak) / 2, step_size * (upper - weak) / 2
    inner = kappa * (2 - kappa)
    touches = (inner > 0) & (jnp.abs(1 - kappa) * rho <= inner)
    square = jnp.where(touches, rho, 0.0) ** 2 / jnp.where(touches, inner, 1.0)
    # At the boundary of the two cases both formulas agree, so that rounding errors in
    # `touches` change little. x/(1 + sqrt(1 + x)) is sqrt(1 + x) − 1 without
    # cancellation.
    aside = square * (1 + 16 * ULP) / (1 + jnp.sqrt(1 + square))
    along = jnp.maximum(step_size * weak, step_size * upper - 2)
    along = along + 4 * ULP * step_size * (weak + upper)
    bound = jnp.where(touches, jnp.maximum(aside, along), along)
    return jnp.where(jnp.isfinite(rho), bound, jnp.inf)


@float64("up")
def _step64(step_size, smoothness, weak, strong):
    above = excess(step_size, strong - weak, smoothness, strong + weak)
    c = jnp.maximum((1 + above) * (1 + 2 * ULP), 0.0)
    valid = (step_size >= 0) & (weak >= 0) & (strong >= 0) & (strong <= smoothness)
    return jnp.where(valid & jnp.isfinite(step_size * smoothness), c, jnp.inf)


@float64("up")
def _clipped_step64(step_size, weak, smoothness):
    c = (1 + clipped_excess(step_size, weak, smoothness)) * (1 + 2 * ULP)
    valid = (step_size >= 0) & (weak >= 0) & (smoothness >= 0)
    return jnp.where(valid, c, jnp.inf)


def check_curvature(smoothness, weak_convexity, strong_convexity) -> None:
    """Raise a ValueError if the curvatures of a loss contradict each other."""
    validate.nonnegative("smoothness", smoothness, finite=False)
    validate.nonnegative("weak_convexity", weak_convexity)
    validate.nonnegative("strong_convexity", strong_convexity)
    given = smoothness, weak_convexity, strong_convexity
    M, weak, strong = map(validate.concrete, given)
    if strong is not None and weak is not None and np.any((strong > 0) & (weak > 0)):
        raise ValueError(
            "weak_convexity must be 0 for a strongly convex loss; "
            f"got {weak_convexity!r} and strong_convexity {strong_convexity!r}."
        )
    if strong is not None and M is not None and np.any(strong > M):
        raise ValueError(
            "strong_convexity must be at most smoothness; "
            f"got {strong_convexity!r} and smoothness {smoothness!r}."
        )


def step_lipschitz(
    step_size: ArrayLike,
    *,
    smoothness: ArrayLike,
    weak_convexity: ArrayLike = 0.0,
    strong_convexity: ArrayLike = 0.0,
) -> jax.Array:
    """The Lipschitz constant of a gradient step without clipping.

    Args:
      step_size: η, f[*b], positive.
      smoothness: M, the largest curvature of one example's loss, f[*b], at least 0.
      weak_convexity: m, f[*b], at least 0. The curvature is at least −m.
      strong_convexity: a lower bound on the curvature, f[*b], at least 0.
        weak_convexity or strong_convexity must be 0.

    Returns:
      max(|1 − η (strong − weak)|, |1 − ηM|), f[*b], rounded up. The result is inf for
      traced arguments out of range.

    Raises:
      ValueError: a static argument is out of range or contradicts another.

    Reference: Bok, Su and Altschuler (2024), Lemma 2.8.

    Example:
      >>> print(f"{step_lipschitz(0.1, smoothness=4.0, strong_convexity=1.0):.2f}")
      0.90
    """
    validate.positive("step_size", step_size)
    check_curvature(smoothness, weak_convexity, strong_convexity)
    return _step64(step_size, smoothness, weak_convexity, strong_convexity)


def clipped_step_lipschitz(
    step_size: ArrayLike, *, weak_convexity: ArrayLike, smoothness: ArrayLike
) -> jax.Array:
    """The Lipschitz constant of a step along the mean of clipped gradients.

    The constant is never below 1, and it is above 1 even for convex losses. This
    function is not needed for losses of one linear score, whose gradients have a fixed
    direction: their constant is that of `step_lipschitz` without strong convexity.

    Args:
      step_size: η, f[*b], positive.
      weak_convexity: m, f[*b], at least 0; 0 for a convex loss.
      smoothness: M, the largest curvature of one example's loss, f[*b], at least 0.

    Returns:
      The constant, f[*b], rounded up: sqrt(1 + ρ²/(κ(2 − κ))) with κ = η(M − m)/2 and ρ
      = η(M + m)/2, where |1 − κ|ρ <= κ(2 − κ), and max(1 + ηm, ηM − 1) elsewhere. The
      result is inf for traced arguments out of range.

    Raises:
      ValueError: a static argument is out of range.

    Reference: this module's docstring has the derivation, which replaces Kong and
    Ribero (2024), Proposition 3.4(b).

    Example:
      >>> c = clipped_step_lipschitz(0.5, weak_convexity=0.0, smoothness=1.0)
      >>> print(f"{c:.6f}")
      1.069045
    """
    validate.positive("step_size", step_size)
    check_curvature(smoothness, weak_convexity, 0.0)
    return _clipped_step64(step_size, weak_convexity, smoothness)
