"""What runs is no better for an attacker than what was accounted for.

Accountants see a noise of 0.7 and a decay of 0.99; of the float32 numbers nearest to
them one is 1.2e-8 less, the other 1e-8 more. Every bound falls with the noise and grows
with the decay (its terms are powers of it). So what runs is rounded to float32 with the
noise up and the decay down, and the bound holds for it.

Numbers of Python, which are in float64, are taken as exact. An array may be such a
number rounded (`optax.inject_hyperparams` does that), and moves by one unit of its
precision; in float64 only if float32 does not hold it.
"""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import ArrayLike

# Sixteen roundings to float32: those of a guarantee on its way through an accountant
# and back are at most four, of the noise, of μ, of ε and of δ.
MARGIN = 1 + 1e-6
# Float32 holds a noise in this range and all its draws. XLA makes 0 of 1e-38.
_LEAST, _MOST = 2.0**-100, 2.0**100


def round_up_float32(name: str, *factors: ArrayLike) -> float | jax.Array:
    """At least the product of numbers from 0 up, f32[]; 0 if one of them is.

    Raises:
      ValueError: the product is beyond float32. Where it is traced, it is NaN.
    """
    numbers = [x for x in factors if isinstance(x, int | float)]
    if len(numbers) == len(factors):
        exact = math.prod(map(Fraction, numbers), start=Fraction(1))
        if exact and not _LEAST <= exact <= _MOST:
            raise ValueError(
                f"{name} must be 0 or from 2**-100 to 2**100; got {float(exact)!r}."
            )
        return _round_exact(exact, np.inf)
    arrays = [jnp.asarray(x) for x in factors]
    moved = [_round_array(x, jnp.inf) for x in arrays]
    product = functools.reduce(lambda x, y: _next(x * y, jnp.inf), moved)
    held = (product >= _LEAST) & (product <= _MOST)
    nothing = functools.reduce(jnp.logical_or, [x == 0 for x in arrays])
    return jnp.where(nothing, 0.0, jnp.where(held, product, jnp.nan))


def round_down_float32(x: ArrayLike) -> float | jax.Array:
    """At most a number from 0 up, f32[]."""
    if isinstance(x, int | float):
        return _round_exact(Fraction(x), 0.0)
    x = jnp.asarray(x)
    return jnp.where(x == 0, 0.0, _round_array(x, 0.0))


def _round_exact(exact: Fraction, towards: float) -> float:
    near = np.float32(float(exact))
    off = Fraction(float(near)) - exact
    beyond = off < 0 if towards > 0 else off > 0
    return float(np.nextafter(near, np.float32(towards)) if beyond else near)


def _round_array(x: jax.Array, towards: float) -> jax.Array:
    if x.dtype == jnp.float64:
        near = x.astype(jnp.float32)
        wide = near.astype(x.dtype)
        beyond = wide < x if towards > 0 else wide > x
        return jnp.where(beyond, _next(near, towards), near)
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    return _next(x, towards).astype(jnp.float32)


def _next(x: jax.Array, towards: float) -> jax.Array:
    return jnp.nextafter(x, jnp.full_like(x, towards))
