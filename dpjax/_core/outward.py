"""Round noise and decay for training so that the accountants' bounds still hold.

Accountants compute with a noise of 0.7 and a decay of 0.99, but training uses float32.
The float32 number nearest to 0.7 is 1.2e-8 less, and the one nearest to 0.99 is 1e-8
more. Every bound falls with the noise and grows with the decay (a bound's terms are
powers of the decay). So training rounds the noise up and the decay down to float32, and
the bound holds for the rounded numbers.

Python numbers, which are in float64, are taken as exact. An array may be a Python
number that was rounded (`optax.inject_hyperparams` does that). So an array's value
moves by one unit of its precision; a float64 array's only if float32 does not hold it.
"""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import ArrayLike

# A relative margin of sixteen roundings to float32. A guarantee that passes through an
# accountant and back is rounded at most four times: the noise, μ, ε and δ.
MARGIN = 1 + 1e-6
# Float32 holds a noise in this range, and all draws of that noise. XLA flushes 1e-38
# to 0.
_LEAST, _MOST = 2.0**-100, 2.0**100


def round_up_float32(name: str, *factors: ArrayLike) -> float | jax.Array:
    """An upper bound on the product of non-negative numbers, f32[]; 0 if a factor is 0.

    Raises:
      ValueError: the product of Python numbers is not 0 and not from 2**-100 to 2**100.
        Where a factor is an array, the result is NaN instead.
    """
    # Fractions hold the product of Python numbers exactly, so that it is rounded once.
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
    # A traced value cannot raise an error, so a product out of range becomes NaN.
    held = (product >= _LEAST) & (product <= _MOST)
    nothing = functools.reduce(jnp.logical_or, [x == 0 for x in arrays])
    return jnp.where(nothing, 0.0, jnp.where(held, product, jnp.nan))


def round_down_float32(x: ArrayLike) -> float | jax.Array:
    """A lower bound on a non-negative number, f32[]."""
    if isinstance(x, int | float):
        return _round_exact(Fraction(x), 0.0)
    x = jnp.asarray(x)
    return jnp.where(x == 0, 0.0, _round_array(x, 0.0))


def _round_exact(exact: Fraction, towards: float) -> float:
    # The nearest float32, or its neighbour where the nearest is on the wrong side.
    near = np.float32(float(exact))
    off = Fraction(float(near)) - exact
    beyond = off < 0 if towards > 0 else off > 0
    return float(np.nextafter(near, np.float32(towards)) if beyond else near)


def _round_array(x: jax.Array, towards: float) -> jax.Array:
    if x.dtype == jnp.float64:
        # The comparison in float64 is exact, since every float32 is a float64.
        near = x.astype(jnp.float32)
        wide = near.astype(x.dtype)
        beyond = wide < x if towards > 0 else wide > x
        return jnp.where(beyond, _next(near, towards), near)
    # A narrower array may have been rounded from a number on either side, by less than
    # the distance to the next number of its own precision.
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    return _next(x, towards).astype(jnp.float32)


def _next(x: jax.Array, towards: float) -> jax.Array:
    return jnp.nextafter(x, jnp.full_like(x, towards))
