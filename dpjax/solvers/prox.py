"""Proximal steps and projections for the descent solvers.

A prox is a function of the parameters and of the step size η,

    prox_{ηh}(x) = argmin_u h(u) + ‖u − x‖² / (2η),

for a convex h that depends on no data. A prox never increases the distance between two
points, so that it costs no privacy. A solver also accepts any other function of the
parameters and of η that depends on no data and never increases the distance between two
points.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.typing import Tree

# A function of the parameters and the step size. The `...` is explained at `LossFn`.
Prox = Callable[..., Tree]


def none(params: Tree, step_size: jax.Array) -> Tree:
    """Return the parameters unchanged; this function is the prox of h = 0."""
    del step_size
    return params


def l1(weight: float) -> Prox:
    """The prox of weight · ‖x‖₁: soft thresholding.

    Args:
      weight: the factor of ‖x‖₁, at least 0.

    Returns:
      A prox that moves each coordinate towards zero by weight · η, but not past zero,
      for the step size η.

    Raises:
      ValueError: the weight is negative or not finite.

    Example:
      >>> print(l1(2.0)(jnp.array([3.0, -0.5, -1.5]), 0.5))
      [ 2.   0.  -0.5]
    """
    return elastic_net(weight, 0.0)


def l2(weight: float) -> Prox:
    """The prox of (weight / 2) ‖x‖₂²: shrinking.

    Args:
      weight: the factor of ‖x‖₂² / 2, at least 0.

    Returns:
      A prox that divides each coordinate by 1 + weight · η, for the step size η.

    Raises:
      ValueError: the weight is negative or not finite.

    Example:
      >>> print(l2(2.0)(jnp.array([3.0, -0.5]), 0.5))
      [ 1.5  -0.25]
    """
    return elastic_net(0.0, weight)


def elastic_net(l1_weight: float, l2_weight: float) -> Prox:
    """The prox of l1_weight · ‖x‖₁ + (l2_weight / 2) ‖x‖₂².

    Args:
      l1_weight: the factor of ‖x‖₁, at least 0.
      l2_weight: the factor of ‖x‖₂² / 2, at least 0.

    Returns:
      A prox that applies `l1(l1_weight)`, and then divides by 1 + l2_weight · η, for
      the step size η.

    Raises:
      ValueError: a weight is negative or not finite.

    Example:
      >>> print(elastic_net(2.0, 2.0)(jnp.array([3.0, -0.5]), 0.5))
      [1. 0.]
    """
    validate.nonnegative("l1_weight", l1_weight)
    validate.nonnegative("l2_weight", l2_weight)

    def shrink(x: jax.Array, step_size: jax.Array) -> jax.Array:
        step_size = jnp.asarray(step_size, x.dtype)
        # x minus its clipped value is x soft-thresholded.
        clipped = jnp.clip(x, -step_size * l1_weight, step_size * l1_weight)
        return (x - clipped) / (1 + step_size * l2_weight)

    def prox(params: Tree, step_size: jax.Array) -> Tree:
        return jax.tree.map(lambda x: shrink(x, step_size), params)

    return prox


def projection(project: Callable[..., Tree]) -> Prox:
    """The projection onto a convex set, the prox of the set's indicator function.

    Args:
      project: a function from parameters to the nearest point of a convex set, such as
        those in `optax.projections`. If the set is bounded, pass its diameter to the
        solver as `diameter`.

    Returns:
      A prox that applies the projection and ignores the step size.

    Example:
      >>> import optax
      >>> ball = projection(
      ...     lambda x: optax.projections.projection_l2_ball(x, scale=2.0))
      >>> print(ball(jnp.array([3.0, 4.0]), 0.5))
      [1.2 1.6]
    """
    return lambda params, step_size: project(params)
