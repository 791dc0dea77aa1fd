"""Lower bounds on δ and ε of random allocation: one random step in each epoch."""

import jax
import jax.numpy as jnp

from dpjax._core.float64 import float64
from dpjax._core.searches import bisect, implicit_derivative
from dpjax.accounting._numerics.convex_order import cells

_POINTS = 1024
_BISECTIONS = 50
# The mass that the distribution of the likelihood ratio may leave outside its grid at
# each end. In the lower bound this mass is merged into the end cells, not lost.
_TAIL = 1e-12


def _law(noise_multiplier: jax.Array, num_steps: jax.Array, num_epochs: jax.Array):
    """A lower bound in convex order on the likelihood ratio of all epochs.

    The result is a pair: whether the noise multiplier is positive and finite, and the
    distribution of the ratio.
    """
    known = (noise_multiplier > 0) & (noise_multiplier < jnp.inf)
    variance = 1 / jnp.where(known, noise_multiplier, 1.0) ** 2
    tail = jnp.asarray(_TAIL)
    one = cells.mean(cells.lognormal(variance, tail, _POINTS), num_steps, tail)
    return known, cells.product(one, num_epochs, tail)


def _delta_lower(
    noise_multiplier: jax.Array,
    epsilon: jax.Array,
    num_steps: jax.Array,
    num_epochs: jax.Array,
) -> jax.Array:
    known, law = _law(noise_multiplier, num_steps, num_epochs)
    value = cells.delta(law, epsilon, num_steps * num_epochs)
    return jnp.where(known & (epsilon >= 0), value, 0.0)


def _epsilon_lower(
    noise_multiplier: jax.Array,
    delta: jax.Array,
    num_steps: jax.Array,
    num_epochs: jax.Array,
) -> jax.Array:
    known, law = _law(noise_multiplier, num_steps, num_epochs)
    known &= (delta > 0) & (delta < 1)
    target = jnp.log(jnp.where(known, delta, 0.5))

    def excess(epsilon: jax.Array) -> jax.Array:
        return cells.log_delta(law, epsilon, num_steps * num_epochs) - target

    # At the end that bisect returns, δ(ε) is above δ, so that ε(δ) is not below it.
    zero, top = jnp.zeros_like(target), cells.largest_epsilon(law)
    solution = bisect(lambda e: excess(e) > 0, top, zero, _BISECTIONS)
    solution = jnp.where(excess(zero) > 0, solution, 0.0)
    return implicit_derivative(
        excess, jnp.where(known, solution, 0.0), known & (solution > 0)
    )


delta_lower64 = float64("down", one_by_one=True)(_delta_lower)
epsilon_lower64 = float64("down", one_by_one=True)(_epsilon_lower)
