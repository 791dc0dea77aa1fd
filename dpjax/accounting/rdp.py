"""Rényi differential privacy: curves over orders, their sum, and conversion.

A curve is an array f[*b, k]: the Rényi divergence between the outputs on neighbouring
data sets is at most curve[..., i] at order orders[i], in both directions. The curve of
a composition of mechanisms is the sum of their curves.

Curves with Poisson sampling are integrals that the code computes by quadrature. The
error of the quadrature is measured, not proven. At 200,000 random points (noise
multiplier, sampling rate, order), the relative difference from a quadrature with three
times as many nodes is at most 1e-11. The code adds a margin of 1e-10. The curves are
rounded up, with bounds on all rounding errors.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import ULP, default_float, float64
from dpjax._core.typing import ArrayLike
from dpjax.accounting._numerics import rdp as numerics

ORDERS = 1.0 + np.concatenate(
    [
        np.geomspace(0.01, 0.5, 8, endpoint=False),
        np.geomspace(0.5, 50.0, 76, endpoint=False),
        np.geomspace(50.0, 9999.0, 16),
    ]
)
"""Default orders, from 1.01 to 10,000, densest where ε is usually attained."""


@float64("up")
def _compose64(*curves_and_count: jax.Array) -> jax.Array:
    *curves, count = curves_and_count
    # Mironov (2017), Proposition 1, https://arxiv.org/abs/1702.07476: the curve of a
    # composition is the sum of the curves.
    total = sum(curves) * (1 + len(curves) * ULP)
    is_count = (count >= 0) & (count == jnp.floor(count)) & (count < jnp.inf)
    finite = total < jnp.inf  # false for NaN
    # At count 0, no mechanism runs, and ∞ · 0 would be NaN without `jnp.where`.
    value = jnp.where(finite, total, 0.0) * jnp.where(is_count, count, 1.0)
    value = value * (1 + 2 * ULP)
    value = jnp.where(finite | (count == 0), value, jnp.inf)
    return jnp.where(is_count, value, jnp.inf)


def _as_array(value: ArrayLike) -> jax.Array | np.ndarray:
    """Return a JAX array unchanged, and any other value as a NumPy array."""
    return value if isinstance(value, jax.Array) else np.asarray(value, np.float64)


def _align_axes(
    *scalars: ArrayLike, curves: tuple[ArrayLike, ...]
) -> list[jax.Array | np.ndarray]:
    """Return the curves and then the scalars as arrays of one rank.

    Each scalar gets a last axis, for the orders.

    Raises:
      ValueError: the curves differ in length. Without this check, a curve of one order
        would be broadcast to all orders.
    """
    arrays = [_as_array(x) for x in curves]
    lengths = sorted({x.shape[-1:] or (1,) for x in arrays})
    if len(lengths) > 1:
        raise ValueError(f"curves and orders must have one length; got {lengths}.")
    arrays += [_as_array(x)[..., None] for x in scalars]
    rank = max(x.ndim for x in arrays)
    return [x.reshape((1,) * (rank - x.ndim) + x.shape) for x in arrays]


def gaussian(noise_multiplier: ArrayLike, orders: ArrayLike) -> jax.Array:
    """The exact Rényi curve of the Gaussian mechanism.

    Args:
      noise_multiplier: noise standard deviation over sensitivity, f[*b], at least 0.
      orders: f[k], above 1.

    Returns:
      a / (2 noise_multiplier²) for each order a, f[*b, k], rounded up. The result is
      inf for a traced argument out of range.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Mironov (2017), Proposition 7.

    Example:
      >>> import numpy as np
      >>> print(gaussian(2.0, np.array([2.0, 16.0])))
      [0.25000003 2.0000002 ]
    """
    validate.nonnegative("noise_multiplier", noise_multiplier, finite=False)
    validate.above_one("orders", orders)
    a, sigma = _align_axes(noise_multiplier, curves=(orders,))
    return numerics.gaussian64(sigma, a)


def poisson_gaussian(
    noise_multiplier: ArrayLike, sampling_rate: ArrayLike, orders: ArrayLike
) -> jax.Array:
    """The Rényi curve of the Gaussian mechanism on a Poisson sample.

    Every example takes part independently, with the same probability. One example
    contributes to the sum in only one of the two data sets (ADD_REMOVE, ZERO_OUT), and
    by at most one clip norm.

    Args:
      noise_multiplier: noise standard deviation over clip norm, f[*b], at least 0.
      sampling_rate: probability that an example takes part, f[*b], in [0, 1].
      orders: f[k], above 1, whole numbers or not.

    Returns:
      The curve, f[*b, k], rounded up. For noise multipliers σ from 0.1 to 1e60 and
      orders a up to 1e8 σ, the curve exceeds the exact divergence by a relative error
      of at most 2e-10 + 1e-14 / (a − 1) before the cast to the dtype of the result. For
      σ < 0.1, the curve is a looser bound that follows from convexity. For σ >= 0.1 and
      orders above 1e8 σ, the curve is the curve without sampling, which is a bound. For
      finite σ above 1e60, the curve is a looser bound, too. The result is inf for a
      traced argument out of range.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: the curve is the divergence of the output distribution with the example
    from the distribution without the example. The divergence in the other direction is
    at most as large.

    Reference: Mironov, Talwar and Zhang (2019), Theorems 4 and 5.

    Example:
      >>> import numpy as np
      >>> print(poisson_gaussian(1.0, 0.01, np.array([1.5, 2.0, 32.0])))
      [1.2725375e-04 1.7181343e-04 1.1246277e+01]
    """
    validate.nonnegative("noise_multiplier", noise_multiplier, finite=False)
    validate.closed_unit("sampling_rate", sampling_rate)
    validate.above_one("orders", orders)
    a, sigma, q = _align_axes(noise_multiplier, sampling_rate, curves=(orders,))
    return numerics.poisson_gaussian64(sigma, q, a)


def compose(*curves: ArrayLike, count: ArrayLike = 1) -> jax.Array:
    """The Rényi curve of a composition in which each mechanism runs count times.

    Args:
      curves: the curve of each mechanism, f[*b, k], at least 0. All curves have the
        same orders.
      count: the number of repetitions, f[*b], whole numbers, at least 0.

    Returns:
      count times the sum of the curves, f[*b, k], rounded up. A traced count that is
      not whole is rounded up to the next whole number, and derivatives with respect to
      the count are the derivatives at this whole number. The result is inf for a traced
      count that is negative, infinite or NaN. For a positive count, a NaN in a curve
      also gives inf at its order. A traced negative number in a curve is not detected.

    Raises:
      ValueError: there is no curve, the curves differ in length, or a static argument
        is out of range.

    Privacy: a mechanism may depend on the outputs of earlier mechanisms, as long as all
    curves are fixed beforehand.

    Reference: Mironov (2017), Proposition 1.

    Example:
      >>> step = poisson_gaussian(1.0, 0.01, ORDERS)
      >>> print(f"{epsilon(compose(step, count=1000), ORDERS, 1e-5):.4f}")
      2.1013
    """
    if not curves:
        raise ValueError("curves must not be empty; got ().")
    for curve in curves:
        validate.nonnegative("curves", curve, finite=False)
    return _compose64(*_align_axes(validate.whole_count("count", count), curves=curves))


def _check_conversion(curve: ArrayLike, orders: ArrayLike):
    validate.nonnegative("curve", curve, finite=False)
    validate.above_one("orders", orders)


def _epsilon_by_order(
    curve: ArrayLike, orders: ArrayLike, delta: ArrayLike
) -> jax.Array:
    """The ε that each order of a Rényi curve proves at δ, f[*b, k]."""
    _check_conversion(curve, orders)
    validate.open_unit("delta", delta)
    return numerics.epsilon64(*_align_axes(delta, curves=(curve, orders)))


def epsilon(curve: ArrayLike, orders: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The least ε >= 0 at which the curve proves (ε, δ)-DP.

    Args:
      curve: Rényi divergences, f[*b, k].
      orders: f[k], above 1.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      ε, f[*b], rounded up. ε is inf where the curve is inf at all orders, and for a
      traced δ outside of (0, 1]. Otherwise, ε is 0 where δ is at least the bound on
      the total variation that follows from the curve. An order proves no finite ε if a
      traced order, or a traced value of the curve at this order, is out of range.

    Raises:
      ValueError: a static argument is out of range, or the curve and the orders differ
        in length.

    Reference: Canonne, Kamath and Steinke (2020), Proposition 12, at the best order.

    Example:
      >>> print(f"{epsilon(gaussian(1.0, ORDERS), ORDERS, 1e-5):.4f}")
      4.7284
    """
    return jnp.min(_epsilon_by_order(curve, orders, delta), axis=-1)


def best_order(curve: ArrayLike, orders: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The order of the curve at which the bound on ε is smallest.

    `epsilon` returns the bound at this order. If the order is the smallest or the
    largest of `orders`, a wider range of orders may give a smaller ε.

    Args:
      curve: Rényi divergences, f[*b, k].
      orders: f[k], above 1.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      One of the orders, f[*b]. If several orders have the smallest bound, the result is
      the first of these orders.

    Raises:
      ValueError: a static argument is out of range, or the curve and the orders differ
        in length.

    Example:
      >>> print(f"{best_order(gaussian(1.0, ORDERS), ORDERS, 1e-5):.2f}")
      5.43
    """
    best = jnp.argmin(_epsilon_by_order(curve, orders, delta), axis=-1)
    # The result is one of the given orders, so the cast needs no rounding direction.
    return jnp.asarray(orders, default_float())[best]


def delta(curve: ArrayLike, orders: ArrayLike, epsilon: ArrayLike) -> jax.Array:
    """The least δ at which the curve proves (ε, δ)-DP.

    Args:
      curve: Rényi divergences, f[*b, k].
      orders: f[k], above 1.
      epsilon: f[*b], at least 0.

    Returns:
      δ, f[*b], rounded up, at most the bound on the total variation that follows from
      the curve. An order proves only δ = 1 if the order, the value of the curve at this
      order, or epsilon is traced and out of range.

    Raises:
      ValueError: a static argument is out of range, or the curve and the orders differ
        in length.

    Reference: Canonne, Kamath and Steinke (2020), Proposition 12, at the best order.

    Example:
      >>> print(f"{delta(gaussian(1.0, ORDERS), ORDERS, 4.7284):.2e}")
      1.00e-05
    """
    _check_conversion(curve, orders)
    validate.nonnegative("epsilon", epsilon, finite=False)
    by_order = numerics.delta64(*_align_axes(epsilon, curves=(curve, orders)))
    return jnp.min(by_order, axis=-1)
