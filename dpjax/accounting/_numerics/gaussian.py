"""The trade-off curve, δ(ε) and ε(δ) of μ-GDP, that is, of N(0, 1) against N(μ, 1).

With a = ε/μ − μ/2, b = ε/μ + μ/2 and Mills' ratio R(x) = Φ(−x)/φ(x), the identity
e^ε φ(b) = φ(a) turns

    δ(ε) = Φ(−a) − e^ε Φ(−b) = φ(a) (R(a) − R(b))

into a form without cancellation, because R(a) − R(b) is the integral of the positive
function e^{−at−t²/2} (1 − e^{−μt}) over t > 0. All functions of δ and ε in this module
evaluate that form for a >= −1. For a < −1, the functions evaluate Φ(−a) − φ(a) R(b),
where the second term is less than a fifth of the first term.

The caller must enable float64. The derivatives of `delta_of` and `tradeoff` are closed
forms. The derivatives of `epsilon_of` and `mu_of` come from the implicit function
theorem.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr, ndtri

from dpjax._core.float64 import TINY, ULP, scoped
from dpjax._core.searches import implicit_derivative, newton, nudge
from dpjax._core.typing import ArrayLike

LOG_SQRT_2PI = 0.5 * np.log(2 * np.pi)


def gauss_rule(count: int, panels: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """The nodes and weights of a composite Gauss-Legendre rule on [0, 1].

    The rule has `count` nodes in each of `panels` intervals of equal width.
    """
    nodes, weights = np.polynomial.legendre.leggauss(count)
    nodes = np.ravel((nodes + 1) / 2 + np.arange(panels)[:, None]) / panels
    return nodes, np.tile(weights / 2 / panels, panels)


_NODES, _WEIGHTS = gauss_rule(64)  # for Mills' ratio


def mills(a: jax.Array, mu: ArrayLike | None = None) -> jax.Array:
    """Mills' ratio R(a) = Φ(−a) / φ(a), for a >= −1, f[*b].

    If μ is given, the result is (R(a) − R(a + μ)) / μ, computed by the same quadrature.
    """
    # R(a) = ∫ e^{−at−t²/2} dt by Gauss's rule. The integrand is entire, and decreases
    # to e^{−40} at the upper end of the interval.
    a = jnp.expand_dims(a, -1)
    length = 80.0 / (a + jnp.sqrt(a * a + 80.0))
    axes = tuple(range(a.ndim - 1))
    t = length * np.expand_dims(_NODES, axes)
    integrand = jnp.exp(-a * t - 0.5 * t * t)
    if mu is not None:
        # The floor on μ gives the limit μ → 0 without 0 / 0.
        mu = jnp.broadcast_to(jnp.maximum(mu, 1e-290), a.shape[:-1])[..., None]
        integrand = integrand * (-jnp.expm1(-mu * t) / mu)
    return length[..., 0] * jnp.sum(integrand * np.expand_dims(_WEIGHTS, axes), -1)


def _log_mills_difference(a: jax.Array, mu: jax.Array) -> jax.Array:
    """The log of R(a) − R(a + μ), where R is Mills' ratio.

    For μ < 1, one quadrature gives the difference divided by μ, a quotient that
    underflows only if a is huge. For μ >= 1, the integrand of this quadrature is too
    steep, and the function subtracts two values of R.
    """
    small = mu < 1.0
    small_mu = jnp.where(small, mu, 1.0)
    difference = jnp.where(small, mills(a, small_mu), mills(a) - mills(a + mu))
    return jnp.log(jnp.maximum(difference, TINY)) + jnp.log(small_mu)


def log_phi(x: jax.Array) -> jax.Array:
    """The log of the standard normal density φ(x)."""
    return -0.5 * x * x - LOG_SQRT_2PI


def _ends(mu: jax.Array, epsilon: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers a = ε/μ − μ/2 and b = ε/μ + μ/2, with δ(ε) = Φ(−a) − e^ε Φ(−b).

    ε/μ is capped, so that the square of a is finite unless δ(ε) is 1.
    """
    # The cap of 1e154 keeps the squares below the overflow threshold.
    steps = jnp.minimum(epsilon / mu, 1e154)
    return steps - mu / 2, steps + mu / 2


@jax.jit  # JAX traces each of the many calls faster
def log_delta(mu: jax.Array, epsilon: jax.Array) -> jax.Array:
    """An upper bound on log δ(ε) under μ-GDP, for 0 < μ < ∞ and finite ε >= 0.

    The function adds a bound on its own rounding error to log δ(ε).
    """
    # Balle and Wang (2018), Theorem 8, https://arxiv.org/abs/1805.06530:
    # δ(ε) = Φ(−a) − e^ε Φ(−b). The code evaluates δ(ε) as φ(a) (R(a) − R(b)) for
    # a >= −1 and as Φ(−a) − φ(a) R(b) for a < −1. Each form gets values of a from its
    # own range.
    a, b = _ends(mu, epsilon)
    in_tail = a >= -1.0
    a_tail = jnp.maximum(a, -1.0)
    log_difference = _log_mills_difference(a_tail, mu)
    # The error of a is b ulps, and log δ has a slope of at most |a| + 2 there.
    error = 16.0 + jnp.abs(log_difference) + 2 * jnp.abs(jnp.log(jnp.minimum(mu, 1.0)))
    error = ULP * error + ULP * (2.0 + jnp.abs(a_tail)) * (2.0 + b)
    tail = log_phi(a_tail) + log_difference + error
    a_body = jnp.minimum(a, -1.0)
    b_body = jnp.where(in_tail, 1.0, b)
    phi = jnp.exp(log_phi(a_body))
    body = jnp.log(ndtr(-a_body) - phi * mills(b_body)) + ULP * (16 + 2 * phi * b)
    return jnp.minimum(jnp.where(in_tail, tail, body), 0.0)


@jax.custom_jvp
@scoped
def delta_of(mu: jax.Array, epsilon: jax.Array) -> jax.Array:
    """An upper bound on δ(ε) under μ-GDP.

    The result is 0 for μ = 0 or ε = ∞, if the other argument is at least 0. For all
    other arguments outside of 0 < μ < ∞ and 0 <= ε < ∞, and for NaN, the result is 1.
    """
    regular = (mu > 0) & (mu < jnp.inf) & (epsilon >= 0) & (epsilon < jnp.inf)
    mu_, epsilon_ = jnp.where(regular, mu, 1.0), jnp.where(regular, epsilon, 1.0)
    value = jnp.maximum(jnp.exp(log_delta(mu_, epsilon_)), TINY)
    # μ = 0 or ε = ∞ gives δ = 0, unless the other argument is negative or NaN. μ = ∞, a
    # negative number or a NaN gives no guarantee, so δ = 1. All other arguments give a
    # positive δ, at least TINY.
    free = ((mu == 0) & (epsilon >= 0)) | ((epsilon == jnp.inf) & (mu >= 0))
    return jnp.where(regular, value, jnp.where(free, 0.0, 1.0))


@delta_of.defjvp
@scoped
def _delta_jvp(primals, tangents):
    (mu, epsilon), (dmu, depsilon) = primals, tangents
    regular = (mu > 0) & (mu < jnp.inf) & (epsilon >= 0) & (epsilon < jnp.inf)
    mu_, epsilon_ = jnp.where(regular, mu, 1.0), jnp.where(regular, epsilon, 1.0)
    a, b = _ends(mu_, epsilon_)
    # The derivatives are φ(a) by μ, and −e^ε Φ(−b) = −φ(a) R(b) by ε, with Mills' ratio
    # R. Both are 0 unless 0 < μ < ∞ and 0 <= ε < ∞.
    by_mu = jnp.exp(log_phi(a))
    by_epsilon = -by_mu * mills(b)
    by_mu, by_epsilon = (jnp.where(regular, x, 0.0) for x in (by_mu, by_epsilon))
    return delta_of(mu, epsilon), by_mu * dmu + by_epsilon * depsilon


def epsilon_of(mu: jax.Array, delta: jax.Array) -> jax.Array:
    """An upper bound on ε(δ) under μ-GDP.

    The result is 0 for δ >= 1 or μ = 0, if the other argument is at least 0. For all
    other arguments outside of 0 < μ < ∞ and 0 < δ < 1, and for NaN, the result is inf.
    """
    regular = (mu > 0) & (mu < jnp.inf) & (delta > 0) & (delta < 1)
    mu_, delta_ = jnp.where(regular, mu, 1.0), jnp.where(regular, delta, 0.5)
    mu_, delta_ = jax.lax.stop_gradient((mu_, delta_))  # the search has no derivative
    log_target = jnp.log(delta_)
    # δ(ε) <= Φ(−a), so the ε at which Φ(−a) = δ meets the target. δ(ε) is log-concave
    # in ε, because it is the integral of (1 − e^{ε−x})₊ against a Gaussian. Newton's
    # method therefore approaches the root from the side where the target is met.
    start = jnp.maximum(mu_ * (mu_ / 2 - ndtri(delta_)), 0.0)
    start = jnp.minimum(start, jnp.finfo(jnp.float64).max)
    root = newton(lambda e: log_delta(mu_, e) - log_target, start)
    root = jnp.where(delta_of(mu_, jnp.zeros_like(mu_)) <= delta_, 0.0, root)
    # Rounding may leave the last iterate on the wrong side by a few ulps.
    root = nudge(lambda e: delta_of(mu_, e) <= delta_, root, 1.0)
    free = ((delta >= 1) & (mu >= 0)) | ((mu == 0) & (delta >= 0))
    root = jnp.where(regular, root, jnp.where(free, 0.0, jnp.inf))
    met = (root > 0) & (root < jnp.inf)
    return implicit_derivative(lambda e: delta_of(mu, e) - delta, root, met)


def mu_of(epsilon: jax.Array, delta: jax.Array) -> jax.Array:
    """A lower bound on the largest μ for which μ-GDP implies (ε, δ)-DP.

    The result is inf if ε = ∞ or δ >= 1, even if the other argument is NaN. For all
    other arguments outside of 0 <= ε < ∞ and 0 < δ < 1, also NaN, the result is 0.
    """
    regular = (epsilon >= 0) & (epsilon < jnp.inf) & (delta > 0) & (delta < 1)
    epsilon_, delta_ = jnp.where(regular, epsilon, 1.0), jnp.where(regular, delta, 0.5)
    epsilon_, delta_ = jax.lax.stop_gradient((epsilon_, delta_))
    log_target = jnp.log(delta_)
    # Φ(μ/2 − ε/μ) = δ is a quadratic equation in μ, and its root meets the target. At
    # ε = 0 that root may vanish, and δ = erf(μ/√8) is solved in closed form instead. δ
    # is log-concave in μ, because the derivative φ(ε/μ − μ/2) of δ is log-concave.
    z = ndtri(delta_)
    root = jnp.hypot(z, jnp.sqrt(2.0) * jnp.sqrt(epsilon_))
    divisor = root - jnp.minimum(z, 0.0)
    lower_root = 2 * (epsilon_ / jnp.where(divisor > 0, divisor, 1.0))
    start = jnp.where(z > 0, z + root, lower_root)
    at_zero = jnp.sqrt(8.0) * jax.scipy.special.erfinv(delta_)
    start = jnp.maximum(start, at_zero * (1 - 64 * ULP))
    mu = newton(lambda m: log_delta(m, epsilon_) - log_target, start)
    mu = nudge(lambda m: delta_of(m, epsilon_) <= delta_, mu, -1.0)
    unlimited = (epsilon == jnp.inf) | (delta >= 1)
    mu = jnp.where(regular, mu, jnp.where(unlimited, jnp.inf, 0.0))
    smooth = (mu > 0) & (mu < jnp.inf)
    return implicit_derivative(lambda m: delta_of(m, epsilon) - delta, mu, smooth)


@jax.custom_jvp
@scoped
def tradeoff(mu: jax.Array, alpha: jax.Array) -> jax.Array:
    """A lower bound on the trade-off curve G_μ(α) = Φ(Φ⁻¹(1 − α) − μ).

    The result is 1 for α <= 0 and finite μ >= 0. For all other arguments outside of 0 <
    α < 1 and μ >= 0, and for NaN, the result is 0.
    """
    inside = (alpha > 0) & (alpha < 1) & (mu >= 0)
    # Φ⁻¹(1 − α) is computed as −Φ⁻¹(α), which is precise for small α.
    z = ndtri(jnp.where(inside, alpha, 0.5))
    # Dong, Roth and Su (2022), Definition 6, https://arxiv.org/abs/1905.02383:
    # G_μ(α) = Φ(Φ⁻¹(1 − α) − μ). In the tail, an error in the argument z of Φ becomes
    # |z| times as large in the log of Φ.
    argument = -z - mu - 8 * ULP * (jnp.abs(z) + mu)
    beta = ndtr(argument) * (1 - ULP * (64 + 4 * jnp.minimum(argument * argument, 1e6)))
    is_one = (alpha <= 0) & (mu >= 0) & (mu < jnp.inf)
    return jnp.where(inside, beta, jnp.where(is_one, 1.0, 0.0))


@tradeoff.defjvp
@scoped
def _tradeoff_jvp(primals, tangents):
    (mu, alpha), (dmu, dalpha) = primals, tangents
    inside = (alpha > 0) & (alpha < 1) & (mu >= 0) & (mu < jnp.inf)
    mu_, z = jnp.where(inside, mu, 1.0), ndtri(jnp.where(inside, alpha, 0.5))
    # The derivatives are −φ(z + μ) by μ, and −φ(z + μ) / φ(z) by α. The squares z² in
    # the second exponent cancel, so that large |z| causes no overflow.
    by_mu = -jnp.exp(log_phi(z + mu_))
    by_alpha = -jnp.exp(-mu_ * (z + mu_ / 2))
    by_mu, by_alpha = (jnp.where(inside, x, 0.0) for x in (by_mu, by_alpha))
    return tradeoff(mu, alpha), by_mu * dmu + by_alpha * dalpha
