"""Gaussian differential privacy: trade-off curves, δ(ε), ε(δ) and composition.

A mechanism is μ-GDP if its outputs on neighbouring data sets are at least as hard to
distinguish as a single draw of N(0, 1) from a single draw of N(μ, 1).
`_numerics.gaussian` computes the trade-off curve, δ(ε) and ε(δ) of this pair.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import ULP, float64
from dpjax._core.typing import ArrayLike
from dpjax.accounting._numerics import gaussian

_delta64 = float64("up", elementwise=True)(gaussian.delta_of)
_epsilon64 = float64("up", elementwise=True)(gaussian.epsilon_of)
_mu64 = float64("down", elementwise=True)(gaussian.mu_of)
_tradeoff64 = float64("down", elementwise=True)(gaussian.tradeoff)


@float64("up", vectors=(0,))
def _compose64(mus: jax.Array) -> jax.Array:
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(mus)), axis=-1, keepdims=True)
    regular = (largest > 0) & (largest < jnp.inf)
    # Dong, Roth and Su (2022), Corollary 2, https://arxiv.org/abs/1905.02383:
    # sqrt(Σ μ²). All μ are divided by the largest μ first, so that no square overflows
    # or underflows. The result does not depend on this scale, so the scale needs no
    # derivative.
    scaled = jnp.where(regular, mus, 1.0) / jnp.where(regular, largest, 1.0)
    squares = jnp.where(regular[..., 0], jnp.sum(scaled * scaled, axis=-1), 1.0)
    total = largest[..., 0] * jnp.sqrt(squares) * (1 + (4 + mus.shape[-1]) * ULP)
    return jnp.where(regular[..., 0], total, largest[..., 0])


def tradeoff(mu: ArrayLike, alpha: ArrayLike) -> jax.Array:
    """A lower bound on the false-negative rate of any attack on a μ-GDP mechanism.

    The bound is G_μ(α) = Φ(Φ⁻¹(1 − α) − μ), where Φ is the distribution function of
    N(0, 1).

    Args:
      mu: the GDP parameter, f[*b], at least 0.
      alpha: the attack's false-positive rate, f[*b], in [0, 1].

    Returns:
      The bound, f[*b], rounded down. The result is 0 for a traced μ below 0 and for a
      NaN. A traced α below 0 has the effect of 0, and a traced α above 1 the effect of
      1.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Dong, Roth and Su (2022), Definition 6; Bok, Su and Altschuler (2024),
    appendix A.3.

    Example:
      >>> print(f"{tradeoff(1.0, 0.05):.4f}")
      0.7405
    """
    validate.nonnegative("mu", mu, finite=False)
    validate.closed_unit("alpha", alpha)
    return _tradeoff64(mu, alpha)


def delta(mu: ArrayLike, epsilon: ArrayLike) -> jax.Array:
    """The least δ for which every μ-GDP mechanism is (ε, δ)-DP.

    Args:
      mu: the GDP parameter, f[*b], at least 0.
      epsilon: f[*b], at least 0.

    Returns:
      δ, f[*b], rounded up. The result is 1 for a traced μ or ε below 0, and for a NaN.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Balle and Wang (2018), Theorem 8.

    Example:
      >>> print(f"{delta(1.0, 1.0):.4f}")
      0.1269
    """
    validate.nonnegative("mu", mu, finite=False)
    validate.nonnegative("epsilon", epsilon, finite=False)
    return _delta64(mu, epsilon)


def epsilon(mu: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The least ε >= 0 for which every μ-GDP mechanism is (ε, δ)-DP.

    Args:
      mu: the GDP parameter, f[*b], at least 0.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      ε, f[*b], rounded up, so that `delta(mu, epsilon(mu, d)) <= d` before the cast to
      the dtype of the result. The result is inf for a traced μ below 0, for a traced δ
      at or below 0 (0 if μ = δ = 0), and for a NaN.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Balle and Wang (2018), Theorem 8, solved for ε.

    Example:
      >>> print(f"{epsilon(1.0, 1e-5):.4f}")
      4.3772
      >>> import jax
      >>> print(f"{jax.grad(epsilon)(1.0, 1e-5):.3f}")  # what a little more μ costs
      5.068
    """
    validate.nonnegative("mu", mu, finite=False)
    validate.open_unit("delta", delta)
    return _epsilon64(mu, delta)


def mu(epsilon: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The largest μ for which every μ-GDP mechanism is (ε, δ)-DP.

    Args:
      epsilon: f[*b], at least 0.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      μ, f[*b], rounded down. The result is inf for ε = inf and for a traced δ of 1 or
      more. Otherwise, the result is 0 for a traced ε below 0, for a traced δ at or
      below 0, and for a NaN.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Balle and Wang (2018), Algorithm 1, by Newton's method on log δ.

    Example:
      >>> print(f"{mu(1.0, 1e-5):.4f}")
      0.2681
    """
    validate.nonnegative("epsilon", epsilon, finite=False)
    validate.open_unit("delta", delta)
    return _mu64(epsilon, delta)


def compose(mus: ArrayLike) -> jax.Array:
    """The GDP parameter of a composition of mechanisms, adaptive or not.

    Args:
      mus: the GDP parameters of k mechanisms on the same data, f[*b, k]. A mechanism
        may depend on the outputs of earlier mechanisms, but its parameter must not.

    Returns:
      sqrt(Σ μ_i²) over the last axis, f[*b], rounded up. A traced negative parameter
      has the effect of its absolute value. A traced NaN gives NaN.

    Raises:
      ValueError: a static parameter is negative, or mus has no axis or an empty last
        axis.

    Reference: Dong, Roth and Su (2022), Corollary 2.

    Example:
      >>> import numpy as np
      >>> print(f"{compose(np.array([3.0, 4.0])):.4f}")
      5.0000
    """
    if np.ndim(mus) == 0 or np.shape(mus)[-1] == 0:
        raise ValueError(f"mus must have a non-empty last axis; got {mus!r}.")
    validate.nonnegative("mus", mus, finite=False)
    return _compose64(mus)
