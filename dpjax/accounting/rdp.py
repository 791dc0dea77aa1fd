"""Rényi differential privacy: curves over orders, their sum, and conversion.

A curve is an array f[*b, k]: the Rényi divergence between the outputs on neighbouring
data sets is at most curve[..., i] at order orders[i], in both directions. Curves of
mechanisms run one after the other add up.

Subsampled curves come from a quadrature whose error is measured, not proven: at most
1e-11 of what it approximates on 200,000 random points, against three times as many
nodes, and 1e-10 is added. All roundings are bounded.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _validate
from dpjax._float64 import SMALL, TINY, ULP, default_float, float64
from dpjax.accounting._rdp import quadrature

ORDERS = 1.0 + np.concatenate(
    [
        np.geomspace(0.01, 0.5, 8, endpoint=False),
        np.geomspace(0.5, 50.0, 76, endpoint=False),
        np.geomspace(50.0, 9999.0, 16),
    ]
)
"""Default orders, from 1.01 to 10,000, densest where ε is usually attained."""

_LEAST_NOISE, _MOST_NOISE = 0.1, 1e60  # where the quadrature holds
_FAR = 1e20  # noise over order beyond which a curve is its first term, to an ulp


def _gaussian(sigma: jax.Array, a: jax.Array) -> jax.Array:
    """The value a / (2σ²) from above, for finite positive arguments."""
    # Not a / σ / σ, which the compiler makes a / σ².
    root = jnp.sqrt(a) / sigma
    return 0.5 * root * root * (1 + 4 * ULP) + SMALL


@float64("up")
def _gaussian64(sigma: jax.Array, a: jax.Array) -> jax.Array:
    is_order = (a > 1) & (a < jnp.inf)
    regular = is_order & (sigma > 0) & (sigma < jnp.inf)
    value = _gaussian(jnp.where(regular, sigma, 1.0), jnp.where(regular, a, 2.0))
    silent = is_order & (sigma == jnp.inf)
    return jnp.where(regular, value, jnp.where(silent, 0.0, jnp.inf))


def _subsampled(
    log_excess_of: Callable[..., jax.Array],
    sigma: jax.Array,
    q: jax.Array,
    a: jax.Array,
) -> jax.Array:
    # Each argument is made regular by itself, so that it keeps its shape.
    inside = (sigma >= _LEAST_NOISE) & (sigma <= _MOST_NOISE)
    below = (sigma > 0) & (sigma < _LEAST_NOISE)
    above = (sigma > _MOST_NOISE) & (sigma < jnp.inf)
    is_rate, is_order = (q >= 0) & (q <= 1), (a > 1) & (a < jnp.inf)
    nothing = (q == 0) | (sigma == jnp.inf)
    # The divergence grows with q, so that a larger one is on the safe side.
    q = jnp.maximum(jnp.where(is_rate & (q > 0), q, 0.5), 1e-60)
    a = jnp.where(is_order, a, 2.0)
    log_excess = log_excess_of(jnp.where(inside, sigma, 1.0), q, a)
    # Below: moments are jointly convex, so that they are at most q parts that of the
    # Gaussian and 1 − q parts one.
    log_moment = (a - 1.0) * _gaussian(jnp.where(below, sigma, 1.0), a)
    log_convex = jnp.log(q) + log_moment + jnp.log(-jnp.expm1(-log_moment))
    log_convex = log_convex + 64 * ULP * (1 + log_moment)
    value = jax.nn.softplus(jnp.where(inside, log_excess, log_convex)) / (a - 1.0)
    # Above: h(y) is at most a (a − 1)/2 y² max(1, 1 + y)^a, and half of that twice for
    # batches of fixed size. Where aσ⁻¹ is small E h is a (a − 1)/2 q²σ⁻² to as much.
    far = jnp.where(above, sigma, 1.0)
    first_term = _gaussian(far, a) * jnp.where(a * _FAR <= far, q * q, 1.0)
    value = jnp.where(above, first_term, value) * (1 + 16 * ULP) + SMALL
    value = jnp.where(inside | below | above, value, jnp.inf)
    value = jnp.where(nothing & (sigma >= 0), 0.0, value)
    return jnp.where(is_rate & is_order, value, jnp.inf)


@float64("up")
def _poisson_gaussian64(sigma: jax.Array, q: jax.Array, a: jax.Array) -> jax.Array:
    return _subsampled(quadrature.poisson, sigma, q, a)


@float64("up")
def _fixed_size_gaussian64(sigma: jax.Array, q: jax.Array, a: jax.Array) -> jax.Array:
    # Under REPLACE one example moves the sum by two clip norms.
    return _subsampled(quadrature.fixed_size, sigma / 2, q, a)


@float64("up")
def _compose64(*curves_and_count: jax.Array) -> jax.Array:
    *curves, count = curves_and_count
    total = sum(curves) * (1 + len(curves) * ULP)
    is_count = (count >= 0) & (count == jnp.floor(count)) & (count < jnp.inf)
    finite = total < jnp.inf  # false for NaN
    value = jnp.where(finite, total, 0.0) * jnp.where(is_count, count, 1.0)
    value = value * (1 + 2 * ULP)
    value = jnp.where(finite | (count == 0), value, jnp.inf)
    return jnp.where(is_count, value, jnp.inf)


def _total_variation(rho: jax.Array) -> jax.Array:
    """An upper bound on the total variation distance, which is δ at ε = 0.

    The divergence of every order above 1 is at least that of Kullback and Leibler, and
    the bounds are Pinsker's and Bretagnolle and Huber's.
    """
    some = rho > 0  # the square root has no derivative at 0
    rho = jnp.where(some, rho, 1.0)
    bound = jnp.minimum(np.sqrt(0.5) * jnp.sqrt(rho), jnp.sqrt(-jnp.expm1(-rho)))
    return jnp.where(some, bound * (1 + 4 * ULP), 0.0)


@float64("up")
def _epsilon64(rho: jax.Array, a: jax.Array, delta: jax.Array) -> jax.Array:
    regular = (rho >= 0) & (rho < jnp.inf) & (a > 1) & (a < jnp.inf)
    regular = regular & (delta > 0) & (delta <= 1)
    rho, a = jnp.where(regular, rho, 1.0), jnp.where(regular, a, 2.0)
    delta = jnp.where(regular, delta, 0.5)
    discount = jnp.log1p(-1.0 / a)
    price = (jnp.log(delta) + jnp.log(a)) / (a - 1.0)
    error = 8 * ULP * (rho - discount + (jnp.log(a) - jnp.log(delta)) / (a - 1.0))
    value = jnp.maximum(rho + discount - price + error, 0.0)
    value = jnp.where(_total_variation(rho) <= delta, 0.0, value)
    return jnp.where(regular, value, jnp.inf)


@float64("up")
def _delta64(rho: jax.Array, a: jax.Array, epsilon: jax.Array) -> jax.Array:
    regular = (rho >= 0) & (rho < jnp.inf) & (a > 1) & (a < jnp.inf)
    regular = regular & (epsilon >= 0)
    least = epsilon == jnp.inf
    rho, a = jnp.where(regular, rho, 1.0), jnp.where(regular, a, 2.0)
    epsilon = jnp.where(regular & ~least, epsilon, 1.0)
    discount = jnp.log1p(-1.0 / a)
    gap = rho - epsilon + discount + 8 * ULP * (rho + epsilon - discount)
    log_delta = (a - 1.0) * gap - jnp.log(a) * (1 - 8 * ULP)
    # What underflows is positive all the same, unless nothing is released.
    value = jnp.maximum(jnp.exp(jnp.minimum(log_delta, 0.0)), TINY)
    value = jnp.minimum(value, _total_variation(rho))
    return jnp.where(regular, jnp.where(least, 0.0, value), 1.0)


def _array(value: jax.typing.ArrayLike) -> jax.Array | np.ndarray:
    """The value as an array, and static if it was."""
    return value if isinstance(value, jax.Array) else np.asarray(value, np.float64)


def _align(
    *scalars: jax.typing.ArrayLike, curves: tuple[jax.typing.ArrayLike, ...]
) -> list[jax.Array | np.ndarray]:
    """Curves and then scalars, which get an axis of orders, all with as many axes."""
    arrays = [_array(x) for x in curves] + [_array(x)[..., None] for x in scalars]
    rank = max(x.ndim for x in arrays)
    return [x.reshape((1,) * (rank - x.ndim) + x.shape) for x in arrays]


def gaussian(
    noise_multiplier: jax.typing.ArrayLike, orders: jax.typing.ArrayLike
) -> jax.Array:
    """The Rényi curve of the Gaussian mechanism, exact.

    Args:
      noise_multiplier: noise standard deviation over sensitivity, f[*b], at least 0.
      orders: f[k], above 1.

    Returns:
      a / (2 noise_multiplier²), f[*b, k], rounded up. A traced argument out of range
      gives inf.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Mironov (2017), Proposition 7.

    Example:
      >>> import numpy as np
      >>> print(gaussian(2.0, np.array([2.0, 16.0])))
      [0.25000003 2.0000002 ]
    """
    _validate.nonnegative("noise_multiplier", noise_multiplier, finite=False)
    _validate.above_one("orders", orders)
    a, sigma = _align(noise_multiplier, curves=(orders,))
    return _gaussian64(sigma, a)


def poisson_gaussian(
    noise_multiplier: jax.typing.ArrayLike,
    sampling_rate: jax.typing.ArrayLike,
    orders: jax.typing.ArrayLike,
) -> jax.Array:
    """The Rényi curve of the Gaussian mechanism on a Poisson sample.

    Every example takes part independently, with the same probability; its contribution
    to the sum is at most one clip norm, and is there or not (ADD_REMOVE, ZERO_OUT).

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], at least 0.
      sampling_rate: probability that an example takes part, f[*b], in [0, 1].
      orders: f[k], above 1, whole numbers or not.

    Returns:
      The curve, f[*b, k], rounded up: for noise multipliers of 0.1 and more it exceeds
      the exact divergence by at most 2e-10 + 1e-14 / (a − 1) of it before the last
      cast. Below 0.1 it is the looser bound that convexity gives. A traced argument out
      of range gives inf.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: the divergence of the sampled from the unsampled distribution, which is the
    greater of the two directions.

    Reference: Mironov, Talwar and Zhang (2019), Theorems 4 and 5.

    Example:
      >>> import numpy as np
      >>> print(poisson_gaussian(1.0, 0.01, np.array([1.5, 2.0, 32.0])))
      [1.2725375e-04 1.7181343e-04 1.1246277e+01]
    """
    _validate.nonnegative("noise_multiplier", noise_multiplier, finite=False)
    _validate.closed_unit("sampling_rate", sampling_rate)
    _validate.above_one("orders", orders)
    a, sigma, q = _align(noise_multiplier, sampling_rate, curves=(orders,))
    return _poisson_gaussian64(sigma, q, a)


def fixed_size_gaussian(
    noise_multiplier: jax.typing.ArrayLike,
    sampling_rate: jax.typing.ArrayLike,
    orders: jax.typing.ArrayLike,
) -> jax.Array:
    """The Rényi curve of the Gaussian mechanism on a batch of fixed size.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], at least 0.
      sampling_rate: batch size over number of examples, f[*b], in [0, 1].
      orders: f[k], above 1, whole numbers or not.

    Returns:
      The curve, f[*b, k], rounded up: for noise multipliers of 0.2 and more within
      2e-10 + 1e-14 / (a − 1) of the exact divergence of the trade-off curve C_q(G_μ),
      μ = 2 / noise_multiplier. A traced argument out of range gives inf.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: REPLACE adjacency; each batch is a uniformly random subset of fixed size,
    drawn without replacement and anew in each step.

    Reference: Dong, Roth and Su (2022), Theorem 9, and Rényi divergences do not grow
    under what maps that curve's pair of distributions to the mechanism's.

    Example:
      >>> import numpy as np
      >>> print(fixed_size_gaussian(4.0, 0.01, np.array([1.5, 2.0, 32.0])))
      [2.9308667e-05 3.9079125e-05 6.3714903e-04]
    """
    _validate.nonnegative("noise_multiplier", noise_multiplier, finite=False)
    _validate.closed_unit("sampling_rate", sampling_rate)
    _validate.above_one("orders", orders)
    a, sigma, q = _align(noise_multiplier, sampling_rate, curves=(orders,))
    return _fixed_size_gaussian64(sigma, q, a)


def compose(
    *curves: jax.typing.ArrayLike, count: jax.typing.ArrayLike = 1
) -> jax.Array:
    """The curve of all the mechanisms run one after the other, count times over.

    Args:
      curves: f[*b, k] each, at the same orders, at least 0.
      count: how often, f[*b], whole numbers from 0 on.

    Returns:
      count times the sum, f[*b, k], rounded up. A traced count that is negative or not
      whole, and a NaN, give inf.

    Raises:
      ValueError: there is no curve, or a static argument is out of range.

    Privacy: adaptive choices included, as long as the curves are fixed beforehand.

    Reference: Mironov (2017), Proposition 1.

    Example:
      >>> step = poisson_gaussian(1.0, 0.01, ORDERS)
      >>> print(f"{epsilon(compose(step, count=1000), ORDERS, 1e-5):.4f}")
      2.1013
    """
    if not curves:
        raise ValueError("curves must not be empty; got ().")
    for curve in curves:
        _validate.nonnegative("curves", curve, finite=False)
    _validate.count("count", count)
    return _compose64(*_align(count, curves=curves))


def _check_conversion(curve: jax.typing.ArrayLike, orders: jax.typing.ArrayLike):
    _validate.nonnegative("curve", curve, finite=False)
    _validate.above_one("orders", orders)


def epsilon(
    curve: jax.typing.ArrayLike,
    orders: jax.typing.ArrayLike,
    delta: jax.typing.ArrayLike,
) -> jax.Array:
    """The least ε >= 0 that the curve proves at δ.

    Args:
      curve: Rényi divergences, f[*b, k].
      orders: f[k], above 1.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      ε, f[*b], rounded up. inf where the curve is inf at all orders, and for a traced
      argument out of range.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Canonne, Kamath and Steinke (2020), Proposition 12, at the best order;
    0 where δ is above the total variation that the curve allows.

    Example:
      >>> print(f"{epsilon(gaussian(1.0, ORDERS), ORDERS, 1e-5):.4f}")
      4.7284
    """
    _check_conversion(curve, orders)
    _validate.open_unit("delta", delta)
    return jnp.min(_epsilon64(*_align(delta, curves=(curve, orders))), axis=-1)


def best_order(
    curve: jax.typing.ArrayLike,
    orders: jax.typing.ArrayLike,
    delta: jax.typing.ArrayLike,
) -> jax.Array:
    """The order from which `epsilon` comes; an end of the range asks for a wider one.

    Args:
      curve: Rényi divergences, f[*b, k].
      orders: f[k], above 1.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      One of the orders, f[*b], the first of them if several are as good.

    Raises:
      ValueError: a static argument is out of range.

    Example:
      >>> print(f"{best_order(gaussian(1.0, ORDERS), ORDERS, 1e-5):.2f}")
      5.43
    """
    _check_conversion(curve, orders)
    _validate.open_unit("delta", delta)
    best = jnp.argmin(_epsilon64(*_align(delta, curves=(curve, orders))), axis=-1)
    return jnp.asarray(orders, default_float())[best]


def delta(
    curve: jax.typing.ArrayLike,
    orders: jax.typing.ArrayLike,
    epsilon: jax.typing.ArrayLike,
) -> jax.Array:
    """The least δ that the curve proves at ε.

    Args:
      curve: Rényi divergences, f[*b, k].
      orders: f[k], above 1.
      epsilon: f[*b], at least 0.

    Returns:
      δ, f[*b], at most 1, rounded up. 1 for a traced argument out of range.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Canonne, Kamath and Steinke (2020), Proposition 12, at the best order;
    at most the total variation that the curve allows.

    Example:
      >>> print(f"{delta(gaussian(1.0, ORDERS), ORDERS, 4.7284):.2e}")
      1.00e-05
    """
    _check_conversion(curve, orders)
    _validate.nonnegative("epsilon", epsilon, finite=False)
    return jnp.min(_delta64(*_align(epsilon, curves=(curve, orders))), axis=-1)
