"""Closed forms from papers, for comparison with the bounds of this package.

For the same run, and except for rounding, the μ of `iteration.noisy_gd_mu` and the μ of
`iteration.noisy_cyclic_gd_mu` with order="fixed" are never larger than these closed
forms. Unlike this module, both functions check the assumptions. The symbol r is
L/(bσ): the sensitivity L of a sum of gradients, divided by the batch size b and by the
standard deviation σ of the noise on the mean gradient. The symbol c is the Lipschitz
constant of a step. Values are rounded to nearest, since no guarantee depends on these
values.
"""

import jax
import jax.numpy as jnp

from dpjax._core.float64 import float64
from dpjax._core.typing import ArrayLike


def _ratio(c: jax.Array, count: jax.Array) -> jax.Array:
    """(1 − c^k)/(1 + c^k) for k = count, computed as tanh(−k log(c)/2)."""
    return jnp.tanh(-count * jnp.log(c) / 2)


@float64("nearest")
def _contraction64(r, c, epochs, period):
    # Bok, Su and Altschuler (2024), Theorem 4.2 for full batches and Theorem 4.5 for
    # cyclic batches, https://arxiv.org/abs/2403.00278, and the limits at c = 1.
    at_limit = c >= 1
    safe_c = jnp.where(at_limit, 0.5, c)
    full = _ratio(safe_c, epochs) / _ratio(safe_c, jnp.ones_like(safe_c))
    y = jnp.log(safe_c)
    run = jnp.expm1(period * y)
    earlier = -jnp.exp((2 * period - 2) * y) * jnp.expm1(2 * y) / (run * run)
    cyclic = 1 + earlier * _ratio(safe_c, period * (epochs - 1))
    limit = 1 + (epochs - 1) / period
    square = jnp.where(at_limit, limit, jnp.where(period == 1, full, cyclic))
    return jnp.where(c <= 1, r * jnp.sqrt(square), jnp.inf)


@float64("nearest")
def _diameter64(r, diameter, period):
    # Bok, Su and Altschuler (2024), Theorems 4.3 and 4.6.
    # The factor corrects a quotient that rounding raised slightly above an integer.
    num_steps = jnp.ceil(diameter / r * (1 - 1e-14))
    last_use_square = jnp.where(period == 1, 0.0, r * r)
    return jnp.sqrt(last_use_square + (3 * r * diameter + r * r * num_steps) / period)


@float64("nearest")
def _expansion64(r, c, epochs, period):
    # Kong and Ribero (2024), Proposition 2.2(a), https://arxiv.org/abs/2407.05237: a
    # use that is l steps before the next one costs r² θ(l) = r² / Σ_{i<l} c^{−2i}.
    y = -2 * jnp.log(c)
    safe_y = jnp.where(y == 0, 1.0, y)
    powers = jnp.where(y == 0, period, jnp.expm1(period * safe_y) / jnp.expm1(safe_y))
    return r * jnp.sqrt((epochs - 1) / powers + 1)


def contraction_mu(
    sensitivity: ArrayLike,
    lipschitz: ArrayLike,
    *,
    num_epochs: ArrayLike,
    batches_per_epoch: ArrayLike,
) -> jax.Array:
    """The published μ of contractive steps, for full batches or a cycle of batches.

    For a cycle of batches, μ is the μ of an example in the epoch's last batch.

    Args:
      sensitivity: r, the distance by which one example moves the result of a step,
        divided by the standard deviation of the step's noise, f[*b].
      lipschitz: c, the Lipschitz constant of a step, f[*b], in (0, 1]; a larger value
        gives inf.
      num_epochs: E, f[*b]. For full batches, E is the number of steps.
      batches_per_epoch: l, f[*b], 1 for full batches.

    Returns:
      μ, f[*b]: r sqrt((1 − c^E)(1 + c) / ((1 + c^E)(1 − c))) for l = 1, and otherwise
      r sqrt(1 + c^{2l−2} (1 − c²) (1 − c^{l(E−1)}) / ((1 − c^l)² (1 + c^{l(E−1)}))).
      At c = 1, μ is the limit of the formula.

    Reference: Bok, Su and Altschuler (2024), Theorems 4.2 and 4.5.

    Example:
      >>> mu = contraction_mu(0.1, 0.98, num_epochs=1000, batches_per_epoch=1)
      >>> print(f"{mu:.3f}")
      0.995
    """
    return _contraction64(sensitivity, lipschitz, num_epochs, batches_per_epoch)


def diameter_mu(
    sensitivity: ArrayLike, diameter: ArrayLike, *, batches_per_epoch: ArrayLike
) -> jax.Array:
    """The published μ of noisy gradient descent for convex losses on a bounded set.

    The μ holds for any number of epochs that is at least Δ/r.

    Args:
      sensitivity: r, the distance by which one example moves the result of a step,
        divided by the standard deviation of the step's noise, f[*b], positive.
      diameter: Δ = D/(ησ), f[*b], for a set of diameter D, the step size η and the
        noise standard deviation σ on the mean gradient.
      batches_per_epoch: l, f[*b], 1 for full batches.

    Returns:
      μ, f[*b]: sqrt(3rΔ + r²⌈Δ/r⌉) for l = 1, and otherwise
      sqrt(r² + (3rΔ + r²⌈Δ/r⌉)/l).

    Reference: Bok, Su and Altschuler (2024), Theorems 4.3 and 4.6.

    Example:
      >>> print(f"{diameter_mu(0.5 / 8, 1 / (0.1 * 8), batches_per_epoch=1):.3f}")
      0.559
    """
    return _diameter64(sensitivity, diameter, batches_per_epoch)


def expansion_mu(
    sensitivity: ArrayLike,
    lipschitz: ArrayLike,
    *,
    num_epochs: ArrayLike,
    batches_per_epoch: ArrayLike,
) -> jax.Array:
    """The published μ of a cycle of batches, for an example in the last batch.

    One step of each epoch uses the example. The noise of a whole epoch hides each use
    except the last use, which only the noise of the last step hides.

    Args:
      sensitivity: r, the distance by which one example moves the result of a step,
        divided by the standard deviation of the step's noise, f[*b].
      lipschitz: c, the Lipschitz constant of a step, f[*b], positive. For c >= 1 and
        without a bounded set, shifted interpolation gives no smaller μ.
      num_epochs: E, f[*b].
      batches_per_epoch: l, f[*b].

    Returns:
      r sqrt((E − 1)/Σ_{i<l} c^{−2i} + 1), f[*b], where i starts at 0.

    Reference: Kong and Ribero (2024), Proposition 2.2(a). The paper's θ(l) is
    1/Σ_{i<l} c^{−2i}: a use that is l steps before the next use costs r² θ(l), and the
    last use costs r² θ(1) = r².

    Example:
      >>> print(f"{expansion_mu(0.5, 1.01, num_epochs=101, batches_per_epoch=50):.3f}")
      1.016
    """
    return _expansion64(sensitivity, lipschitz, num_epochs, batches_per_epoch)
