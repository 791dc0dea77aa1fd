"""Rounding in the direction in which privacy bounds still hold.

**Sums of squares** get upper bounds that hold despite all rounding errors. The model is
that each operation's result is off by a factor 1 + r with |r| at most the unit roundoff
u (2⁻²⁴ in float32). Then the error of a sum of k products is at most
γ_k = k u / (1 − k u) times the sum of the products' absolute values. The bound holds
for every order of summation, with or without fused multiply-adds (Higham, *Accuracy and
Stability of Numerical Algorithms*, section 3.1). The model ignores results that
underflow to zero. In units of the squared clip norm, a sum of up to 10¹⁰ squares loses
less than 1e-27 by underflow. This loss matters only in sums far below 1, and gradients
with such sums need no clipping. CPUs and GPUs follow the model in element-wise
arithmetic, sums, and matrix products at `Precision.HIGHEST`. TPUs do not follow the
model in matrix products, since they compute a product from six products of bfloat16
parts.

To keep k small for arrays of every size, sums are computed in stages of about a
thousand terms. Optimization barriers between the stages prevent XLA from merging them.
(There is also a barrier after each reshape, for speed: on CPUs, a sum with which a
reshape is fused is ten times slower.)

**Noise and momentum decay** are rounded to float32 for training. An accountant may
compute with a noise multiplier of 0.7 and a momentum decay of 0.99. The float32 number
nearest to 0.7 is smaller than 0.7 by 1.2e-8. The float32 number nearest to 0.99 is
larger than 0.99 by 1e-8. Every privacy bound falls with the noise. Every bound grows
with the decay, since its terms are powers of the decay. So training rounds the noise up
and the decay down to float32, and the bound also holds for the rounded numbers.

Python numbers, which are in float64, count as exact. But an array may be the result of
rounding a Python number (as in `optax.inject_hyperparams`), and the exact number may be
on either side. So a value in an array of float32 or less precision is moved to the next
number of that precision, on the safe side. A value in a float64 array of JAX is only
rounded to float32, towards the safe side. Without `jax_enable_x64`, JAX first converts
a float64 array of NumPy to float32.
"""

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import ArrayLike, DTypeLike

# The bound on an example's influence depends on products. So products must not be
# computed at reduced precision (TF32 or bfloat16).
HIGHEST = jax.lax.Precision.HIGHEST

# The approximate number of terms in one stage of a sum.
_STAGE = 1024


def margin(terms: int, dtype: DTypeLike) -> float:
    """An upper bound on γ_k = k u / (1 − k u), for k = terms and the unit roundoff u.

    The bound also holds for a few percent more terms. The dtype determines u.

    Raises:
      ValueError: there are so many terms that k u is above 1/64.
    """
    # u is half of eps. For k u up to 1/64, 1 / (1 − k u) is below 1.02.
    ku = terms * float(jnp.finfo(dtype).eps) / 2
    if ku > 1 / 64:
        raise ValueError(
            f"sums of {terms} terms in {jnp.dtype(dtype).name} are too inexact to "
            "bound a gradient's norm; use a wider dtype."
        )
    return ku * 1.05


def staged_sum(
    x: jax.Array, kept: int = 0, term: Callable[[jax.Array], jax.Array] = lambda x: x
) -> tuple[jax.Array, int]:
    """The sum of term(x) over all but the first `kept` axes, and k for its error bound.

    The function `term` must map 0 to 0, since x may be padded with zeros. The sum is
    computed in stages: the first stage adds the terms in groups, and each further stage
    adds the results of the stage before it. k is the number of terms in a group, summed
    over all stages. Let u be the unit roundoff. Then the rounding errors of the
    additions change the result by at most γ_k = k u / (1 − k u) times the sum of
    |term(x)|.
    """
    terms = 0
    while x.ndim > kept:
        last = x.shape[-1]
        if last > 2 * _STAGE:
            # If the length divides the axis, no copy is needed to pad with zeros.
            lengths = range(_STAGE // 4, 2 * _STAGE + 1)
            length = max((n for n in lengths if last % n == 0), default=_STAGE)
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -last % length)])
            x = jax.lax.optimization_barrier(x.reshape(*x.shape[:-1], -1, length))
        # Short trailing axes are summed together, which saves stages.
        axes = 1
        while x.ndim - axes > kept and math.prod(x.shape[-axes - 1 :]) <= _STAGE:
            axes += 1
        terms += math.prod(x.shape[-axes:])
        x = jnp.sum(term(x), axis=tuple(range(-axes, 0)))
        # The first stage applies `term`. Later stages only add the sums.
        x, term = jax.lax.optimization_barrier(x), lambda x: x
    return term(x), terms


def square_sum(x: jax.Array, kept: int = 0, unit: ArrayLike = 1.0) -> jax.Array:
    """An upper bound on the sum of (x / unit)² over all but the first `kept` axes.

    If each entry of x is a number that was rounded once, the bound also holds for the
    numbers before this rounding.
    """
    # A Python number takes the array's dtype, as in an expression.
    unit = np.asarray(unit, x.dtype) if isinstance(unit, int | float) else unit
    return _square_sum(x, kept, unit)


@functools.partial(jax.jit, static_argnames="kept")  # traced once for equal shapes
def _square_sum(x: jax.Array, kept: int, unit: ArrayLike) -> jax.Array:
    total, terms = staged_sum(x, kept, lambda x: jnp.square(x / unit))
    # 8 more terms cover the rounding errors of the entries, the division, the square
    # and the products here.
    return total * (1 + margin(terms + 8, x.dtype))


def upper_sum(parts: Sequence[jax.Array]) -> jax.Array:
    """An upper bound on the sum of non-negative arrays, elementwise."""
    total = sum(parts, jnp.zeros((), jnp.float32))
    return total * (1 + margin(len(parts) + 2, total.dtype))


# A relative margin of sixteen roundings to float32. A guarantee that passes through an
# accountant and back is rounded at most four times: the noise, μ, ε and δ.
MARGIN = 1 + 1e-6
# Float32 can represent noise in this range, and all draws of this noise. XLA replaces
# 1e-38 by 0.
_LEAST, _MOST = 2.0**-100, 2.0**100


def round_up_float32(name: str, *factors: ArrayLike) -> float | jax.Array:
    """An upper bound on the product of non-negative numbers, f32[]; 0 if a factor is 0.

    A product other than 0 must be from 2**-100 to 2**100. If all factors are Python
    numbers, the result is a Python float that float32 represents exactly. `name` is the
    name of the product in the error message.

    Raises:
      ValueError: the product of Python numbers is neither 0 nor in this range. If a
        factor is an array, the result is NaN instead.
    """
    factors = tuple(map(_convert_integers, factors))
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
    # A traced value cannot raise an error. So a product out of range becomes NaN.
    held = (product >= _LEAST) & (product <= _MOST)
    nothing = functools.reduce(jnp.logical_or, [x == 0 for x in arrays])
    return jnp.where(nothing, 0.0, jnp.where(held, product, jnp.nan))


def round_down_float32(x: ArrayLike) -> float | jax.Array:
    """A non-negative number rounded down to float32, f32[].

    A Python number becomes the largest float32 that does not exceed it. An array of
    float32 or less precision becomes the next smaller number of its precision, since it
    may already have been rounded up. A number in a float64 array of JAX becomes the
    largest float32 that does not exceed it. Without `jax_enable_x64`, JAX first
    converts a float64 array of NumPy to float32. Zero stays zero.
    """
    if isinstance(x, int | float):
        return _round_exact(Fraction(x), 0.0)
    x = jnp.asarray(x)
    return jnp.where(x == 0, 0.0, _round_array(x, 0.0))


def _convert_integers(x: ArrayLike) -> ArrayLike:
    """Convert a NumPy integer to an int, and a NumPy array of integers to float64.

    Without `jax_enable_x64`, JAX would keep only 32 bits of each integer. An array
    without axes becomes an int. Other values are returned unchanged.
    """
    if isinstance(x, np.generic | np.ndarray) and np.issubdtype(x.dtype, np.integer):
        return x.astype(np.float64) if x.ndim else x.item()
    return x


def _round_exact(exact: Fraction, towards: float) -> float:
    # The nearest float32, or its neighbour if the nearest is on the wrong side.
    nearest = np.float32(float(exact))
    off = Fraction(float(nearest)) - exact
    beyond = off < 0 if towards > 0 else off > 0
    return float(np.nextafter(nearest, np.float32(towards)) if beyond else nearest)


def _round_array(x: jax.Array, towards: float) -> jax.Array:
    if x.dtype == jnp.float64:
        # The comparison in float64 is exact, since every float32 is a float64. On GPUs,
        # XLA would replace a cast to float32 and back by x itself, but it does not
        # change `reduce_precision`.
        wide = jax.lax.reduce_precision(x, 8, 23)
        nearest = wide.astype(jnp.float32)
        beyond = wide < x if towards > 0 else wide > x
        return jnp.where(beyond, _next(nearest, towards), nearest)
    # A narrower array may have been rounded from a number on either side, by less than
    # the distance to the next number of its precision.
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    return _next(x, towards).astype(jnp.float32)


def _next(x: jax.Array, towards: float) -> jax.Array:
    return jnp.nextafter(x, jnp.full_like(x, towards))
