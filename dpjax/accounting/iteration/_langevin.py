"""Langevin Monte Carlo and the exponential mechanism, as cases of noisy descent.

A step of Langevin Monte Carlo is X ↦ Π(X − η∇F(X) + N(0, 2ηI)), with a potential F for
one data set and F′ for a neighbouring data set. Runs with F and F′ are runs of noisy
gradient descent on two data sets of one example. Let L be the Lipschitz constant of
F − F′, D the diameter of the set onto which Π projects, and c the Lipschitz constant of
a step without noise. In units of the noise's standard deviation, one step moves the
runs apart by r = L sqrt(η/2), and the diameter is Δ = D/sqrt(2η). A bound on μ² that
uses only the last n steps is

    (c^n Δ + r(1 − c^n)/(1 − c))² (1 − c²)/(1 − c^{2n}).

The exponential mechanism releases one sample from the density proportional to e^{−F} on
the set. This is the stationary distribution of Langevin Monte Carlo in the limit of
small η.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import TINY, ULP, float64
from dpjax._core.typing import ArrayLike
from dpjax.accounting.iteration._periodic import geometric
from dpjax.accounting.iteration._setting import check_curvature, excess

_LONG = 2.0**40  # a finite number of steps, large enough for a restart


def _finish(mu: jax.Array, lipschitz: jax.Array, valid: jax.Array) -> jax.Array:
    """Return mu rounded up, or inf where `valid` is false; 0 only if lipschitz is 0."""
    mu = jnp.maximum(mu * (1 + 256 * ULP), jnp.where(lipschitz > 0, TINY, 0.0))
    return jnp.where(valid, mu, jnp.inf)


@float64("up", elementwise=True)
def _langevin64(lipschitz, step_size, smoothness, strong, diameter, num_steps):
    valid = (lipschitz >= 0) & (step_size > 0) & (strong >= 0) & (diameter > 0)
    valid = valid & (lipschitz < jnp.inf) & (step_size < jnp.inf)
    valid = valid & (step_size * smoothness <= 2 * (1 + 4 * ULP))
    valid = valid & (strong <= smoothness) & (num_steps >= 1)
    bounded = valid & (diameter < jnp.inf) & (num_steps > 1)
    replacements = (step_size, 1.0), (strong, 0.0), (smoothness, 1.0), (num_steps, 1.0)
    eta, m, M, steps = (jnp.where(valid, x, other) for x, other in replacements)
    y = jnp.log1p(jnp.maximum(excess(eta, m, M, m), -1 + ULP))
    y = jnp.where(y <= 0, y * (1 - 4 * ULP), 0.0)
    # sqrt(η/2), without the quotient η/2, which may underflow
    r = jnp.where(valid, lipschitz, 0.0) * (jnp.sqrt(2 * eta) / 2)
    start = jnp.where(bounded, diameter, 1.0) / jnp.sqrt(2 * eta)

    # Bok, Su and Altschuler (2024), Proposition 5.1, https://arxiv.org/abs/2403.00278:
    # LMC is noisy descent on one example, so that the bounds of `noisy_gd_mu` hold.
    def mu_of_last(start: jax.Array, n: jax.Array) -> jax.Array:
        rise = jnp.exp(n * y) * start + r * geometric(y, n)
        return rise / jnp.sqrt(geometric(2 * y, n))

    contracts = y < 0
    # Corollary 5.2: r sqrt((1 + c)/(1 − c)), which is sqrt((2 − ηm)/2) L/sqrt(m).
    stationary = (1 + jnp.exp(y)) / jnp.where(contracts, -jnp.expm1(y), 1.0)
    stationary = jnp.where(contracts | (r == 0), r * jnp.sqrt(stationary), jnp.inf)
    is_finite = steps < jnp.inf
    mu_of_all = mu_of_last(jnp.zeros_like(r), jnp.where(is_finite, steps, 1.0))
    mu_of_all = jnp.where(is_finite, mu_of_all, stationary)

    # The best real n: with x = c^n, (A + (Δ − A)x)²/(1 − x²) is least at x = 1 − Δ/A,
    # where A = r/(1 − c). The best whole n is the real n rounded down or up. Any n
    # gives a bound, so that n needs no derivative.
    fixed_y, fixed_r, fixed_start = jax.lax.stop_gradient((y, r, start))
    safe_y = jnp.where(contracts, fixed_y, -1.0)
    ratio = jnp.minimum(-jnp.expm1(safe_y) * fixed_start / fixed_r, 1.0)
    best = jnp.where(contracts, jnp.log1p(-ratio) / safe_y, fixed_start / fixed_r)
    max_n = jnp.minimum(jnp.maximum(steps - 1, 1.0), _LONG)
    floor_n = jnp.clip(jnp.floor(best), 1.0, max_n)
    ceil_n = jnp.minimum(floor_n + 1, max_n)
    restarted = jnp.minimum(mu_of_last(start, floor_n), mu_of_last(start, ceil_n))
    mu = jnp.where(bounded, jnp.minimum(mu_of_all, restarted), mu_of_all)
    return _finish(mu, lipschitz, valid)


@float64("up", elementwise=True)
def _exponential64(lipschitz, strong, diameter):
    valid = (lipschitz >= 0) & (strong >= 0) & (diameter > 0)
    valid = valid & (lipschitz < jnp.inf) & (strong < jnp.inf)
    L = jnp.where(valid, lipschitz, 1.0)
    m = jnp.where(valid, strong, 1.0)
    # Bok, Su and Altschuler (2024), Corollaries 5.2 and 5.4,
    # https://arxiv.org/abs/2403.00278: L/sqrt(m), and 2 sqrt(GD) = sqrt(2LD) for m = 0.
    helps = m * diameter < L
    D = jnp.where(helps, diameter, 1.0)
    bounded = jnp.sqrt(D) * jnp.sqrt(jnp.where(helps, 2 * L - m * D, 1.0))
    unbounded = jnp.where(m > 0, L / jnp.sqrt(jnp.where(m > 0, m, 1.0)), jnp.inf)
    unbounded = jnp.where(L == 0, 0.0, unbounded)
    return _finish(jnp.where(helps, bounded, unbounded), lipschitz, valid)


def langevin_mu(
    lipschitz: ArrayLike,
    *,
    step_size: ArrayLike,
    num_steps: float,
    smoothness: ArrayLike,
    strong_convexity: ArrayLike,
    diameter: ArrayLike,
) -> jax.Array:
    """The GDP parameter of the last iterate of Langevin Monte Carlo.

    Args:
      lipschitz: L, f[*b], at least 0. Over all neighbouring data sets with potentials F
        and F′, L is the largest Lipschitz constant of F − F′ (at most 2G if each
        potential is G-Lipschitz).
      step_size: η, f[*b], positive, at most 2 / smoothness. A step adds noise of
        variance 2η.
      num_steps: T, static, a whole number, at least 1, or inf for the stationary
        distribution.
      smoothness: M, the largest curvature of each potential, f[*b].
      strong_convexity: m, the least curvature of each potential, f[*b]; 0 for convex
        potentials.
      diameter: D, the diameter of the convex set onto which iterates are projected,
        f[*b], positive; inf without such a set.

    Returns:
      μ, f[*b], rounded up. Without a diameter, μ is L sqrt(η/2) sqrt((1 − c^T)(1 + c) /
      ((1 + c^T)(1 − c))), where c is the Lipschitz constant of a step without noise. At
      c = 1, μ is the limit of this formula. If η is at most 2 / (M + m), the value of
      the formula is exact for some potentials. With a diameter, two runs are at most D
      apart before the last n steps, so that each n < T gives another bound. μ is then
      the minimum of the formula and of the bounds for all n. μ is inf for traced
      arguments out of range, and for the stationary distribution without a diameter if
      c = 1 and L > 0.

    Raises:
      ValueError: a static argument is out of range, or num_steps is traced. A step_size
        above 2 / smoothness is out of range, because a step without noise can then
        increase distances.

    Reference: Bok, Su and Altschuler (2024), Proposition 5.1, Corollaries 5.2 and 5.4.

    Example:
      >>> mu = langevin_mu(
      ...     1.0, step_size=0.1, num_steps=float("inf"), smoothness=8.0,
      ...     strong_convexity=4.0, diameter=float("inf"))
      >>> print(f"{mu:.4f}")  # sqrt((2 - 0.4)/2) / sqrt(4)
      0.4472
    """
    validate.nonnegative("lipschitz", lipschitz)
    validate.positive("step_size", step_size)
    check_curvature(smoothness, 0.0, strong_convexity)
    validate.diameter(diameter)
    steps = validate.concrete(num_steps)
    if steps is None or steps.ndim or not steps == np.floor(steps) >= 1:
        raise ValueError(
            f"num_steps must be a positive integer or inf; got {num_steps!r}."
        )
    eta, M = validate.concrete(step_size), validate.concrete(smoothness)
    if eta is not None and M is not None and np.any(eta * M > 2 * (1 + 4 * ULP)):
        raise ValueError(
            "step_size must be at most 2 / smoothness, because a larger step can "
            f"increase distances; got {step_size!r} and smoothness {smoothness!r}."
        )
    return _langevin64(
        lipschitz, step_size, smoothness, strong_convexity, diameter, float(num_steps)
    )


def exponential_mechanism_mu(
    lipschitz: ArrayLike, *, strong_convexity: ArrayLike, diameter: ArrayLike
) -> jax.Array:
    """The GDP parameter of one sample from a density proportional to e^{−F} on a set.

    Args:
      lipschitz: L, f[*b], at least 0. Over all neighbouring data sets with potentials F
        and F′, L is the largest Lipschitz constant of F − F′ (at most 2G if each
        potential is G-Lipschitz).
      strong_convexity: m, the least curvature of each potential, f[*b]; 0 for convex
        potentials. All potentials are smooth.
      diameter: D, the diameter of the convex set, f[*b], positive; inf for the whole
        space. The set must have an interior.

    Returns:
      μ, f[*b], rounded up: L / sqrt(m) where mD >= L, and otherwise sqrt(2LD − mD²). μ
      is inf where m = 0, D = inf and L > 0, and for traced arguments out of range.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Bok, Su and Altschuler (2024), Corollary 5.2 for D = inf and Corollary
    5.4 for m = 0. If m > 0 and D is finite, μ is the limit of `langevin_mu` for the
    stationary distribution as step_size tends to 0.

    Example:
      >>> mu = exponential_mechanism_mu(2.0, strong_convexity=0.0, diameter=0.5)
      >>> print(f"{mu:.4f}")  # 2 sqrt(G D) for G = 1
      1.4142
    """
    validate.nonnegative("lipschitz", lipschitz)
    validate.nonnegative("strong_convexity", strong_convexity)
    validate.diameter(diameter)
    return _exponential64(lipschitz, strong_convexity, diameter)
