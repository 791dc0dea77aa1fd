"""The integrands of the Rényi quadrature, computed without cancellation.

For Poisson batches the integrand is h(y) = (1 + y)^a − 1 − a y, a second difference.

For batches of fixed size (C_q(G_μ), μ = 1/σ) the losses below zero are the mirror image
of those above zero, with the masses of N(0, 1). The rest of the mass is at a loss of
zero. With L = log(1 + y) the moment is then 1 + E[h(y); u > 1/(2σ)] for

    h = e^{aL} + e^{(1−a)L} − e^L − 1 = e^{aL} (1 − e^{−aL}) (1 − e^{−(a−1)L}).
"""

import math

import jax
import jax.numpy as jnp

_SERIES = [1.0 / math.factorial(k) for k in range(2, 14)]
# Below the first, e^z is rounded away next to 1; above the second, 1 next to q e^z.
_SMALLEST_Z, _LARGEST_Z = -36.0, 230.0


def likelihood(
    u: jax.Array, sigma: jax.Array, q: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The numbers z = (u − 1/(2σ)) / σ, y = q (e^z − 1) and log(1 + y)."""
    z = (u - 0.5 / sigma) / sigma
    clipped = jnp.clip(z, _SMALLEST_Z, _LARGEST_Z)
    y = q * jnp.expm1(clipped)
    return z, y, jnp.log1p(y) + jnp.maximum(z - clipped, 0.0)


def _second_difference(x: jax.Array) -> jax.Array:
    """(e^x − 1 − x) / x² for |x| < 1/4."""
    total = jnp.full_like(x, _SERIES[-1])
    for coefficient in _SERIES[-2::-1]:
        total = coefficient + x * total
    return total


def poisson(
    y: jax.Array, log_ratio: jax.Array, a: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The integrand h(y) of a Poisson batch, precise to a few dozen ulps.

    The result is a pair (exponent, mantissa) with h = mantissa e^exponent, because h
    itself may overflow at a large order.
    """
    small = jnp.abs(a * log_ratio) < 0.25
    # With L = log(1 + y) and e^x = 1 + x + x² ψ(x): h = a L² (a ψ(a L) − ψ(L)).
    L = jnp.where(small, log_ratio, 0.0)
    difference = a * _second_difference(a * L) - _second_difference(L)
    near = a * L * L * difference
    # Elsewhere h = (1 + y) (e^x − 1) − (a − 1) y with x = (a − 1) L. Where (1 + y)^−a
    # is below one, the mantissa is h times this factor.
    y, L = jnp.where(small, 1.0, y), jnp.where(small, 1.0, log_ratio)
    power = jnp.expm1(-(a - 1.0) * jnp.abs(L))
    share = (a - 1.0) * y / (1.0 + jnp.maximum(y, 0.0))
    rises = -power - share * (1.0 + power)
    falls = (1.0 + y) * power - share
    exponent = jnp.where(small, 0.0, a * jnp.maximum(L, 0.0))
    return exponent, jnp.where(small, near, jnp.where(L > 0, rises, falls))


def fixed_size(
    _: jax.Array, log_ratio: jax.Array, a: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The integrand h of a batch of fixed size, as (exponent, mantissa)."""
    return a * log_ratio, jnp.expm1(-a * log_ratio) * jnp.expm1((1 - a) * log_ratio)
