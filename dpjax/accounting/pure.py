"""Pure differential privacy: (ε, 0)-DP converted to other δ and to Gaussian DP.

Of all ε-DP mechanisms, randomised response has the outputs that are easiest to tell
apart. Its trade-off curve has one kink, at (1/(1 + e^ε), 1/(1 + e^ε)). The Gaussian
trade-off curve through this kink is nowhere above the curve of randomised response,
because the Gaussian curve is convex.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erfinv, ndtri

from dpjax._core import validate
from dpjax._core.float64 import TINY, ULP, float64
from dpjax._core.typing import ArrayLike


@float64("up")
def _delta64(pure: jax.Array, epsilon: jax.Array) -> jax.Array:
    # Kairouz, Oh and Viswanath (2015), Theorem 3.1, https://arxiv.org/abs/1311.0776:
    # randomised response has δ(ε) = (e^p − e^ε) / (1 + e^p). Numerator and denominator
    # are divided by e^p, which may overflow.
    gap = jnp.minimum(epsilon - pure, 0.0) - 4 * ULP * pure
    # The margins on gap and on the quotient exceed their rounding errors.
    delta = -jnp.expm1(gap) / (1 + jnp.exp(-pure)) * (1 + 8 * ULP)
    delta = jnp.where(epsilon >= pure, 0.0, jnp.clip(delta, TINY, 1.0))
    return jnp.where((pure >= 0) & (epsilon >= 0), delta, 1.0)


@float64("up")
def _epsilon64(pure: jax.Array, delta: jax.Array) -> jax.Array:
    # The same theorem, solved for ε: ε = p + log(1 − δ (1 + e^{−p})).
    scaled_delta = delta * (1 + jnp.exp(-pure)) * (1 - 8 * ULP)
    inside = scaled_delta < 1
    gain = jnp.log1p(-jnp.where(inside, scaled_delta, 0.0)) * (1 - 8 * ULP)
    epsilon = jnp.where(inside, jnp.maximum(pure + gain + 4 * ULP * pure, 0.0), 0.0)
    epsilon = jnp.where(delta > 0, epsilon, pure)
    return jnp.where((pure >= 0) & (delta >= 0), epsilon, jnp.inf)


@float64("up")
def _mu64(pure: jax.Array) -> jax.Array:
    # 2 Φ⁻¹(e^ε/(1 + e^ε)) = √8 erf⁻¹(tanh(ε/2)). For ε >= 1 tanh nears its limit, and
    # the quantile comes from the other tail. For ε >= 700 that tail is about to
    # underflow. The bound Φ(−x) <= e^{−x²/2} / 2 then gives x²/2 <= ε for the quantile
    # −x, hence μ = 2x <= √8 √ε.
    regular = (pure > 0) & (pure < jnp.inf)
    small, moderate = pure < 1.0, pure < 700.0
    low = np.sqrt(8) * erfinv(jnp.tanh(jnp.where(regular & small, pure, 1.0) / 2))
    kink = -2 * ndtri(jax.nn.sigmoid(-jnp.where(regular & moderate, pure, 1.0)))
    high = np.sqrt(8) * jnp.sqrt(jnp.where(regular, pure, 1.0))
    mu = jnp.where(small, low, jnp.where(moderate, kink, high)) * (1 + 256 * ULP)
    return jnp.where(regular, jnp.maximum(mu, TINY), jnp.where(pure == 0, 0.0, jnp.inf))


def delta(pure_epsilon: ArrayLike, epsilon: ArrayLike) -> jax.Array:
    """The least δ for which every pure_epsilon-DP mechanism is (ε, δ)-DP.

    Args:
      pure_epsilon: the ε of pure differential privacy, f[*b], at least 0.
      epsilon: f[*b], at least 0.

    Returns:
      The maximum of 0 and (e^p − e^ε) / (1 + e^p), with p = pure_epsilon, f[*b],
      rounded up. The result is 1 for a traced argument below 0 and for a NaN.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Kairouz, Oh and Viswanath (2015), Theorem 3.1 (randomised response).

    Example:
      >>> print(f"{delta(1.0, 0.5):.4f} {delta(1.0, 1.0):.4f}")
      0.2876 0.0000
    """
    validate.nonnegative("pure_epsilon", pure_epsilon, finite=False)
    validate.nonnegative("epsilon", epsilon, finite=False)
    return _delta64(pure_epsilon, epsilon)


def epsilon(pure_epsilon: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The least ε >= 0 for which every pure_epsilon-DP mechanism is (ε, δ)-DP.

    Args:
      pure_epsilon: the ε of pure differential privacy, f[*b], at least 0.
      delta: f[*b], in [0, 1].

    Returns:
      ε, f[*b], rounded up. At δ = 0, ε is pure_epsilon. The result is inf for a traced
      argument below 0 and for a NaN.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Kairouz, Oh and Viswanath (2015), Theorem 3.1, solved for ε.

    Example:
      >>> print(f"{epsilon(1.0, 0.1):.4f}")
      0.8529
    """
    validate.nonnegative("pure_epsilon", pure_epsilon, finite=False)
    validate.closed_unit("delta", delta)
    return _epsilon64(pure_epsilon, delta)


def mu(pure_epsilon: ArrayLike) -> jax.Array:
    """The least μ for which every pure_epsilon-DP mechanism is μ-GDP.

    Args:
      pure_epsilon: the ε of pure differential privacy, f[*b], at least 0.

    Returns:
      2 Φ⁻¹(e^p / (1 + e^p)), with p = pure_epsilon, f[*b], rounded up. For p >= 700,
      the result is sqrt(8 p), which is less than 0.5 % larger. The result is inf for a
      traced pure_epsilon below 0 and for a NaN.

    Raises:
      ValueError: a static argument is out of range.

    Example:
      >>> print(f"{mu(1.0):.4f}")
      1.2320
    """
    validate.nonnegative("pure_epsilon", pure_epsilon, finite=False)
    return _mu64(pure_epsilon)
