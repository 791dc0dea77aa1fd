"""Upper bounds on Rényi curves for arguments of any value, and on δ(ε) and ε(δ).

The quadrature is precise for noise multipliers in a certain range. For smaller noise
multipliers, convexity gives a bound that is looser than the quadrature. For larger
noise multipliers, the first term of an expansion gives the curve.

Each order of a curve gives one bound on δ(ε) and one on ε(δ).
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import SMALL, TINY, ULP, float64
from dpjax.accounting._numerics import rdp_quadrature

_LEAST_NOISE, _MOST_NOISE = 0.1, 1e60  # where the quadrature holds
# Noise multiplier over order, above which a curve equals its first term to an ulp.
_FAR = 1e20


def _gaussian(sigma: jax.Array, a: jax.Array) -> jax.Array:
    """An upper bound on a / (2σ²), for finite positive arguments."""
    # Mironov (2017), Proposition 7, https://arxiv.org/abs/1702.07476: a / (2σ²).
    # The compiler would rewrite a / σ / σ as a / σ², and σ² may overflow or underflow.
    root = jnp.sqrt(a) / sigma
    return 0.5 * root * root * (1 + 4 * ULP) + SMALL


@float64("up")
def gaussian64(sigma: jax.Array, a: jax.Array) -> jax.Array:
    is_order = (a > 1) & (a < jnp.inf)
    regular = is_order & (sigma > 0) & (sigma < jnp.inf)
    value = _gaussian(jnp.where(regular, sigma, 1.0), jnp.where(regular, a, 2.0))
    # Infinite noise releases nothing; every other irregular argument gives inf.
    silent = is_order & (sigma == jnp.inf)
    return jnp.where(regular, value, jnp.where(silent, 0.0, jnp.inf))


@float64("up")
def poisson_gaussian64(sigma: jax.Array, q: jax.Array, a: jax.Array) -> jax.Array:
    # Mironov, Talwar and Zhang (2019), Theorems 4 and 5,
    # https://arxiv.org/abs/1908.10530: the divergence of the mixture from N(0, σ²) is
    # the larger one, and is log E (1 + y)^a over a − 1.
    # Each argument is made regular separately, so that every argument retains its shape
    # and nothing is broadcast before the quadrature.
    inside = (sigma >= _LEAST_NOISE) & (sigma <= _MOST_NOISE)
    below = (sigma > 0) & (sigma < _LEAST_NOISE)
    above = (sigma > _MOST_NOISE) & (sigma < jnp.inf)
    is_rate, is_order = (q >= 0) & (q <= 1), (a > 1) & (a < jnp.inf)
    nothing = (q == 0) | (sigma == jnp.inf)
    # The divergence grows with q, so raising a tiny q to 1e-60 gives an upper bound.
    q = jnp.maximum(jnp.where(is_rate & (q > 0), q, 0.5), 1e-60)
    a = jnp.where(is_order, a, 2.0)
    log_excess = rdp_quadrature.log_excess(jnp.where(inside, sigma, 1.0), q, a)
    # Below the range: moments are jointly convex, so the moment of the mixture is at
    # most q times the moment of the Gaussian mechanism plus 1 − q.
    log_moment = (a - 1.0) * _gaussian(jnp.where(below, sigma, 1.0), a)
    log_convex = jnp.log(q) + log_moment + jnp.log(-jnp.expm1(-log_moment))
    log_convex = log_convex + 64 * ULP * (1 + log_moment)
    value = jax.nn.softplus(jnp.where(inside, log_excess, log_convex)) / (a - 1.0)
    # Above the range: h(y) is at most a (a − 1)/2 y² max(1, 1 + y)^a. Where aσ⁻¹ is
    # small, E h is a (a − 1)/2 q²σ⁻² up to a relative error of about aσ⁻¹.
    far = jnp.where(above, sigma, 1.0)
    first_term = _gaussian(far, a) * jnp.where(a * _FAR <= far, q * q, 1.0)
    value = jnp.where(above, first_term, value) * (1 + 16 * ULP) + SMALL
    value = jnp.where(inside | below | above, value, jnp.inf)
    value = jnp.where(nothing & (sigma >= 0), 0.0, value)
    return jnp.where(is_rate & is_order, value, jnp.inf)


def _total_variation(rho: jax.Array) -> jax.Array:
    """An upper bound on the total variation distance, which is δ at ε = 0.

    The Rényi divergence of every order above 1 is at least the Kullback-Leibler
    divergence. The result is the smaller of Pinsker's bound and the bound of
    Bretagnolle and Huber.
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
    # The result is positive even if δ underflows, unless nothing is released.
    value = jnp.maximum(jnp.exp(jnp.minimum(log_delta, 0.0)), TINY)
    value = jnp.minimum(value, _total_variation(rho))
    return jnp.where(regular, jnp.where(least, 0.0, value), 1.0)
