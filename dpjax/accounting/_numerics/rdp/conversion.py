"""From a Rényi curve to upper bounds on δ(ε) and ε(δ), one bound for each order."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import TINY, ULP, float64


def _total_variation(rho: jax.Array) -> jax.Array:
    """An upper bound on the total variation distance, which is δ at ε = 0.

    The Rényi divergence of every order above 1 is at least the Kullback-Leibler
    divergence. The bounds are those of Pinsker and of Bretagnolle and Huber.
    """
    # The two bounds are sqrt(ρ/2) and sqrt(1 − e^{−ρ}).
    some = rho > 0  # the square root has no derivative at 0
    rho = jnp.where(some, rho, 1.0)
    bound = jnp.minimum(np.sqrt(0.5) * jnp.sqrt(rho), jnp.sqrt(-jnp.expm1(-rho)))
    return jnp.where(some, bound * (1 + 4 * ULP), 0.0)


@float64("up")
def epsilon64(rho: jax.Array, a: jax.Array, delta: jax.Array) -> jax.Array:
    regular = (rho >= 0) & (rho < jnp.inf) & (a > 1) & (a < jnp.inf)
    regular = regular & (delta > 0) & (delta <= 1)
    rho, a = jnp.where(regular, rho, 1.0), jnp.where(regular, a, 2.0)
    delta = jnp.where(regular, delta, 0.5)
    # Canonne, Kamath and Steinke (2020), Proposition 12,
    # https://arxiv.org/abs/2004.00010:
    # ε = ρ + log(1 − 1/a) − (log δ + log a) / (a − 1).
    discount = jnp.log1p(-1.0 / a)
    price = (jnp.log(delta) + jnp.log(a)) / (a - 1.0)
    error = 8 * ULP * (rho - discount + (jnp.log(a) - jnp.log(delta)) / (a - 1.0))
    value = jnp.maximum(rho + discount - price + error, 0.0)
    # δ(0) is at most the total variation, so ε = 0 holds for every δ above it.
    value = jnp.where(_total_variation(rho) <= delta, 0.0, value)
    return jnp.where(regular, value, jnp.inf)


@float64("up")
def delta64(rho: jax.Array, a: jax.Array, epsilon: jax.Array) -> jax.Array:
    regular = (rho >= 0) & (rho < jnp.inf) & (a > 1) & (a < jnp.inf)
    regular = regular & (epsilon >= 0)
    least = epsilon == jnp.inf
    rho, a = jnp.where(regular, rho, 1.0), jnp.where(regular, a, 2.0)
    epsilon = jnp.where(regular & ~least, epsilon, 1.0)
    # The same proposition, solved for δ:
    # log δ = (a − 1) (ρ − ε + log(1 − 1/a)) − log a.
    discount = jnp.log1p(-1.0 / a)
    gap = rho - epsilon + discount + 8 * ULP * (rho + epsilon - discount)
    log_delta = (a - 1.0) * gap - jnp.log(a) * (1 - 8 * ULP)
    # A δ that underflows is still positive, unless nothing is released.
    value = jnp.maximum(jnp.exp(jnp.minimum(log_delta, 0.0)), TINY)
    value = jnp.minimum(value, _total_variation(rho))
    return jnp.where(regular, jnp.where(least, 0.0, value), 1.0)
