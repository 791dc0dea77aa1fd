"""Proximal steps and projections for the descent solvers.

A prox is a function of the parameters and of the step size η,

    prox_{ηh}(x) = argmin_u h(u) + ‖u − x‖² / (2η),

for a convex h that depends on no data. It never moves two points apart, so it costs no
privacy. Any function with that property may take its place.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.typing import Tree

Prox = Callable[..., Tree]  # of parameters and the step size, as for `LossFn`


def none(params: Tree, step_size: jax.Array) -> Tree:
    """No prox at all: h = 0."""
    del step_size
    return params


def _leafwise(fn: Callable[[jax.Array, jax.Array], jax.Array]) -> Prox:
    return lambda params, step_size: jax.tree.map(lambda x: fn(x, step_size), params)


def l1(weight: float) -> Prox:
    """The prox of weight · ‖x‖₁: soft thresholding.

    Args:
      weight: at least 0.

    Returns:
      A prox, which sets every coordinate within weight · η of zero to zero.

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
      weight: at least 0.

    Returns:
      A prox, which divides by 1 + weight · η.

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
      l1_weight: at least 0.
      l2_weight: at least 0.

    Returns:
      A prox: soft thresholding, then shrinking.

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
        inside = jnp.clip(x, -step_size * l1_weight, step_size * l1_weight)
        return (x - inside) / (1 + step_size * l2_weight)

    return _leafwise(shrink)


def projection(project: Callable[..., Tree]) -> Prox:
    """The prox of the indicator of a convex set: a projection, whatever the step.

    Args:
      project: maps parameters to the nearest ones in a convex set, as the functions of
        `optax.projections` do. If the set is bounded, tell the solver its diameter.

    Returns:
      A prox.

    Example:
      >>> import optax
      >>> ball = projection(
      ...     lambda x: optax.projections.projection_l2_ball(x, scale=2.0))
      >>> print(ball(jnp.array([3.0, 4.0]), 0.5))
      [1.2 1.6]
    """
    return lambda params, step_size: project(params)
