"""Bounds on attacks from δ(ε): trade-off curve, true-positive rate, advantage.

Each point (ε, δ(ε)) of a privacy profile bounds every attack that tells two
neighbouring data sets apart. The functions of this module have a profile as an
argument, for instance `lambda e: gdp.delta(mu, e)`,
`lambda e: rdp.delta(curve, orders, e)` or `lambda e: pld.delta(p, e)`. The bounds
hold for any choice of points, and more points make the bounds tighter.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import ULP, float64
from dpjax._core.typing import ArrayLike

EPSILONS = np.concatenate([[0.0], np.geomspace(1e-3, 100.0, 127)])
"""The values of ε at which a profile is evaluated by default."""

Profile = Callable[[ArrayLike], jax.Array]


@float64("down", vectors=(1, 2), elementwise=True)
def _tradeoff64(alpha: jax.Array, epsilons: jax.Array, deltas: jax.Array) -> jax.Array:
    # e^ε may overflow, so e^ε α is computed as e^(ε + log α). At α = 0 this product is
    # 0. The exponent is capped at 1, because 1 − δ − e is negative already.
    positive = alpha > 0
    log_alpha = jnp.log(jnp.where(positive, alpha, 1.0))
    # Wasserman and Zhou (2010), Theorem 2.4, https://arxiv.org/abs/0811.2501, and Dong,
    # Roth and Su (2022), Proposition 3, https://arxiv.org/abs/1905.02383: the best of
    # 1 − δ − e^ε α and e^{−ε} (1 − δ − α).
    exponent = epsilons + log_alpha + 2 * ULP * (4 + epsilons - log_alpha)
    steep = 1 - deltas - jnp.where(positive, jnp.exp(jnp.minimum(exponent, 1.0)), 0.0)
    flat = jnp.exp(-epsilons) * (1 - deltas - alpha) * (1 - 4 * ULP)
    bounds = jnp.maximum(steep, flat)
    # A NaN becomes 0, which is always a valid lower bound. The margin of 4 ULP covers
    # the rounding of steep.
    best = jnp.max(jnp.where(jnp.isnan(bounds), 0.0, bounds)) - 4 * ULP
    return jnp.where((alpha >= 0) & (alpha <= 1), jnp.maximum(best, 0.0), 0.0)


def tradeoff(
    delta_fn: Profile, alpha: ArrayLike, *, epsilons: ArrayLike = EPSILONS
) -> jax.Array:
    """A lower bound on the false-negative rate of any attack, from a privacy profile.

    Args:
      delta_fn: δ as a function of ε, f[k] to f[k], valid for both orders of two
        neighbouring data sets.
      alpha: the attack's false-positive rate, f[*b], in [0, 1].
      epsilons: the values of ε at which δ is evaluated, f[k], at least 0, finite.

    Returns:
      The largest value over `epsilons` of max(0, 1 − δ − e^ε α, e^{−ε} (1 − δ − α)),
      with δ = delta_fn(ε), f[*b], rounded down. The result is 0 for a traced rate that
      is NaN or out of range. A value of ε at which δ is NaN has no effect.

    Raises:
      ValueError: a static argument is out of range, or epsilons is not a vector.

    Reference: Wasserman and Zhou (2010), Theorem 2.4; Dong, Roth and Su (2022),
    Proposition 3, for profiles.

    Example:
      >>> from dpjax.accounting import gdp
      >>> print(f"{tradeoff(lambda e: gdp.delta(1.0, e), 0.05):.3f}")
      0.740
    """
    validate.closed_unit("alpha", alpha)
    validate.nonnegative("epsilons", epsilons)
    if jnp.ndim(epsilons) != 1:
        raise ValueError(f"epsilons must have one axis; got {epsilons!r}.")
    return _tradeoff64(alpha, epsilons, delta_fn(epsilons))


def true_positive_rate(
    delta_fn: Profile, false_positive_rate: ArrayLike, *, epsilons: ArrayLike = EPSILONS
) -> jax.Array:
    """An upper bound on the true-positive rate of any attack, from a privacy profile.

    Args:
      delta_fn: δ as a function of ε, f[k] to f[k], valid for both orders of two
        neighbouring data sets.
      false_positive_rate: the attack's false-positive rate, f[*b], in [0, 1].
      epsilons: the values of ε at which δ is evaluated, f[k], at least 0, finite.

    Returns:
      One minus the result of `tradeoff` at the false-positive rate, f[*b], rounded up.
      The result is 1 for a traced rate that is NaN or out of range.

    Raises:
      ValueError: a static argument is out of range, or epsilons is not a vector.

    Reference: see `tradeoff`.

    Example:
      >>> from dpjax.accounting import gdp
      >>> print(f"{true_positive_rate(lambda e: gdp.delta(1.0, e), 0.001):.3f}")
      0.018
    """
    validate.closed_unit("false_positive_rate", false_positive_rate)
    return _complement64(tradeoff(delta_fn, false_positive_rate, epsilons=epsilons))


@float64("up")
def _complement64(x: jax.Array) -> jax.Array:
    return 1 - x


def advantage(delta_fn: Profile) -> jax.Array:
    """An upper bound on an attack's true-positive rate minus its false-positive rate.

    Args:
      delta_fn: δ as a function of ε, valid for both orders of two neighbouring data
        sets.

    Returns:
      δ(0), the result of delta_fn for the scalar 0. δ(0) is an upper bound on the total
      variation distance between the output distributions on two neighbouring data sets.

    Reference: Dong, Roth and Su (2022), Proposition 3, at ε = 0.

    Example:
      >>> from dpjax.accounting import gdp
      >>> print(f"{advantage(lambda e: gdp.delta(1.0, e)):.3f}")
      0.383
    """
    return delta_fn(0.0)
