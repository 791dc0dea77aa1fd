"""Gaussian differential privacy: trade-off curves, δ(ε), ε(δ) and composition.

A mechanism is μ-GDP if telling its outputs on neighbouring data sets apart is at
least as hard as telling N(0, 1) from N(μ, 1) in one draw. With a = ε/μ − μ/2,
b = ε/μ + μ/2 and Mills' ratio R(x) = Φ(−x)/φ(x), the identity e^ε φ(b) = φ(a) turns

    δ(ε) = Φ(−a) − e^ε Φ(−b) = φ(a) (R(a) − R(b))

into a form without cancellation, because R(a) − R(b) is the integral of the positive
function e^{−at−t²/2} (1 − e^{−μt}) over t > 0. Everything here evaluates that.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr, ndtri

from dpjax import _validate
from dpjax._float64 import TINY, float64, scoped

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)
_NODES, _WEIGHTS = (_NODES + 1) / 2, _WEIGHTS / 2
_LOG_SQRT_2PI = 0.5 * np.log(2 * np.pi)
_ULP = np.finfo(np.float64).eps
_MAX_NEWTON_STEPS = 100


def _mills(a: jax.Array, mu: jax.Array | None = None) -> jax.Array:
    """R(a), or (R(a) − R(a + μ)) / μ given μ, for a >= −1: one quadrature."""
    # The integrand has fallen to e^{-40} at the upper end of the interval.
    length = 80.0 / (a + jnp.sqrt(a * a + 80.0))
    t = length * _NODES
    integrand = jnp.exp(-a * t - 0.5 * t * t)
    if mu is not None:
        mu = jnp.maximum(mu, 1e-290)  # its limit, but for what underflows
        integrand = integrand * (-jnp.expm1(-mu * t) / mu)
    return length * jnp.sum(_WEIGHTS * integrand)


def _log_mills_difference(a: jax.Array, mu: jax.Array) -> jax.Array:
    """Log (R(a) − R(a + μ)); the factor 1 − e^{−μt} is too sharp for nodes if μ >= 1.

    It is divided by a small μ, so that nothing underflows where a is not huge.
    """
    small = mu < 1.0
    below = jnp.where(small, mu, 1.0)
    difference = jnp.where(small, _mills(a, below), _mills(a) - _mills(a + mu))
    return jnp.log(jnp.maximum(difference, TINY)) + jnp.log(below)


def _log_phi(x: jax.Array) -> jax.Array:
    return -0.5 * x * x - _LOG_SQRT_2PI


def _ends(mu: jax.Array, epsilon: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers a and b, whose squares are finite where δ is not 1."""
    steps = jnp.minimum(epsilon / mu, 1e154)
    return steps - mu / 2, steps + mu / 2


def _log_delta(mu: jax.Array, epsilon: jax.Array) -> jax.Array:
    """Log δ(ε) for 0 < μ < ∞ and finite ε >= 0, with its rounding error added."""
    a, b = _ends(mu, epsilon)
    in_tail = a >= -1.0
    a_tail = jnp.maximum(a, -1.0)
    log_difference = _log_mills_difference(a_tail, mu)
    # a is off by b ulps, and log δ has a slope of |a| + 2 at most there.
    error = 16.0 + jnp.abs(log_difference) + 2 * jnp.abs(jnp.log(jnp.minimum(mu, 1.0)))
    error = _ULP * error + _ULP * (2.0 + jnp.abs(a_tail)) * (2.0 + b)
    tail = _log_phi(a_tail) + log_difference + error
    a_body = jnp.minimum(a, -1.0)
    b_body = jnp.where(in_tail, 1.0, b)
    phi = jnp.exp(_log_phi(a_body))
    body = jnp.log(ndtr(-a_body) - phi * _mills(b_body)) + _ULP * (16 + 2 * phi * b)
    return jnp.minimum(jnp.where(in_tail, tail, body), 0.0)


@jax.custom_jvp
@scoped
def _delta(mu: jax.Array, epsilon: jax.Array) -> jax.Array:
    regular = (mu > 0) & (mu < jnp.inf) & (epsilon >= 0) & (epsilon < jnp.inf)
    log_delta = _log_delta(
        jnp.where(regular, mu, 1.0), jnp.where(regular, epsilon, 1.0)
    )
    # μ = 0 and ε = ∞ leak nothing; μ = ∞, ε < 0 and NaN promise nothing. Whatever else
    # leaks something.
    corner = jnp.where((mu == 0) | (epsilon == jnp.inf), 0.0, 1.0)
    return jnp.where(regular, jnp.maximum(jnp.exp(log_delta), TINY), corner)


@_delta.defjvp
@scoped
def _delta_jvp(primals, tangents):
    (mu, epsilon), (dmu, depsilon) = primals, tangents
    by_mu, by_epsilon = _slopes(mu, epsilon)
    return _delta(mu, epsilon), by_mu * dmu + by_epsilon * depsilon


def _slopes(mu: jax.Array, epsilon: jax.Array) -> tuple[jax.Array, jax.Array]:
    """∂δ/∂μ = φ(a) and ∂δ/∂ε = −e^ε Φ(−b) = −φ(a) R(b)."""
    regular = (mu > 0) & (mu < jnp.inf) & (epsilon >= 0) & (epsilon < jnp.inf)
    mu_, epsilon_ = jnp.where(regular, mu, 1.0), jnp.where(regular, epsilon, 1.0)
    a, b = _ends(mu_, epsilon_)
    phi = jnp.exp(_log_phi(a))
    by_epsilon = -phi * _mills(b)
    return jnp.where(regular, phi, 0.0), jnp.where(regular, by_epsilon, 0.0)


def _newton(log_value, start: jax.Array) -> jax.Array:
    """Newton's method for a zero of a concave function, from its good side.

    A tangent of a concave function lies above it, so the iterates approach the zero
    from the side on which the function is negative, and never cross it.
    """

    def cond(state):
        steps, x, previous = state
        return (steps < _MAX_NEWTON_STEPS) & (jnp.abs(x - previous) > 2 * _ULP * x)

    def body(state):
        steps, x, _ = state
        value, slope = jax.jvp(log_value, (x,), (jnp.ones_like(x),))
        moved = x - value / slope
        return steps + 1, jnp.where(jnp.isfinite(moved) & (moved >= 0), moved, x), x

    _, x, _ = jax.lax.while_loop(cond, body, (0, start, jnp.full_like(start, jnp.inf)))
    return x


def _nudge(holds, x: jax.Array, direction: float) -> jax.Array:
    """Move x by a few ulps, doubling, until holds(x)."""

    def cond(state):
        x, bump = state
        return ~holds(x) & jnp.isfinite(bump)

    def body(state):
        x, bump = state
        return jnp.maximum(x + direction * bump, 0.0), 2 * bump

    bump = 2 * _ULP * x + TINY
    return jax.lax.while_loop(cond, body, (x, bump))[0]


@jax.custom_jvp
@scoped
def _epsilon(mu: jax.Array, delta: jax.Array) -> jax.Array:
    regular = (mu > 0) & (mu < jnp.inf) & (delta > 0) & (delta < 1)
    mu_, delta_ = jnp.where(regular, mu, 1.0), jnp.where(regular, delta, 0.5)
    log_target = jnp.log(delta_)
    # δ(ε) <= Φ(−a), so the ε at which Φ(−a) = δ is on the good side. δ(ε) is
    # log-concave in ε: it integrates (1 − e^{ε−x})₊ against a Gaussian.
    start = jnp.maximum(mu_ * (mu_ / 2 - ndtri(delta_)), 0.0)
    start = jnp.minimum(start, jnp.finfo(jnp.float64).max)
    root = _newton(lambda e: _log_delta(mu_, e) - log_target, start)
    root = jnp.where(_delta(mu_, jnp.zeros_like(mu_)) <= delta_, 0.0, root)
    root = _nudge(lambda e: _delta(mu_, e) <= delta_, root, 1.0)
    free = (mu == 0) | (delta >= 1)
    return jnp.where(regular, root, jnp.where(free, 0.0, jnp.inf))


@_epsilon.defjvp
@scoped
def _epsilon_jvp(primals, tangents):
    (mu, delta), (dmu, ddelta) = primals, tangents
    epsilon = _epsilon(mu, delta)
    by_mu, by_epsilon = _slopes(mu, epsilon)
    on_curve = (epsilon > 0) & (epsilon < jnp.inf) & (by_epsilon < 0)
    slope = jnp.where(on_curve, by_epsilon, -1.0)
    depsilon = (ddelta - by_mu * dmu) / slope
    return epsilon, jnp.where(on_curve, depsilon, 0.0)


@jax.custom_jvp
@scoped
def _mu(epsilon: jax.Array, delta: jax.Array) -> jax.Array:
    regular = (epsilon >= 0) & (epsilon < jnp.inf) & (delta > 0) & (delta < 1)
    epsilon_, delta_ = jnp.where(regular, epsilon, 1.0), jnp.where(regular, delta, 0.5)
    log_target = jnp.log(delta_)
    # Φ(μ/2 − ε/μ) = δ is a quadratic in μ whose root is on the good side, except
    # that at ε = 0 it may vanish; there δ = erf(μ/√8) is solved in closed form.
    # δ is log-concave in μ: its derivative φ(ε/μ − μ/2) is.
    z = ndtri(delta_)
    root = jnp.hypot(z, jnp.sqrt(2.0) * jnp.sqrt(epsilon_))
    divisor = root - jnp.minimum(z, 0.0)
    left = 2 * (epsilon_ / jnp.where(divisor > 0, divisor, 1.0))
    start = jnp.where(z > 0, z + root, left)
    at_zero = jnp.sqrt(8.0) * jax.scipy.special.erfinv(delta_)
    start = jnp.maximum(start, at_zero * (1 - 64 * _ULP))
    found = _newton(lambda m: _log_delta(m, epsilon_) - log_target, start)
    found = _nudge(lambda m: _delta(m, epsilon_) <= delta_, found, -1.0)
    anything = (epsilon == jnp.inf) | (delta >= 1)
    return jnp.where(regular, found, jnp.where(anything, jnp.inf, 0.0))


@_mu.defjvp
@scoped
def _mu_jvp(primals, tangents):
    (epsilon, delta), (depsilon, ddelta) = primals, tangents
    mu = _mu(epsilon, delta)
    by_mu, by_epsilon = _slopes(mu, epsilon)
    inside = by_mu > 0
    dmu = (ddelta - by_epsilon * depsilon) / jnp.where(inside, by_mu, 1.0)
    return mu, jnp.where(inside, dmu, 0.0)


@jax.custom_jvp
@scoped
def _tradeoff(mu: jax.Array, alpha: jax.Array) -> jax.Array:
    inside = (alpha > 0) & (alpha < 1) & (mu >= 0)
    z = ndtri(jnp.where(inside, alpha, 0.5))
    far = -z - mu - 8 * _ULP * (jnp.abs(z) + mu)
    beta = ndtr(far) * (1 - _ULP * (64 + 4 * jnp.minimum(far * far, 1e6)))
    nothing = (alpha <= 0) & (mu >= 0) & (mu < jnp.inf)
    return jnp.where(inside, beta, jnp.where(nothing, 1.0, 0.0))


@_tradeoff.defjvp
@scoped
def _tradeoff_jvp(primals, tangents):
    (mu, alpha), (dmu, dalpha) = primals, tangents
    inside = (alpha > 0) & (alpha < 1) & (mu >= 0) & (mu < jnp.inf)
    mu_, z = jnp.where(inside, mu, 1.0), ndtri(jnp.where(inside, alpha, 0.5))
    # −φ(z + μ), and −φ(z + μ) / φ(z) with the squares cancelled
    by_mu = -jnp.exp(_log_phi(z + mu_))
    by_alpha = -jnp.exp(-mu_ * (z + mu_ / 2))
    slope = jnp.where(inside, by_mu, 0.0) * dmu + jnp.where(inside, by_alpha, 0.0) * (
        dalpha
    )
    return _tradeoff(mu, alpha), slope


def _elementwise(core):
    return functools.wraps(core)(jnp.vectorize(core, signature="(),()->()"))


_delta64 = float64("up")(_elementwise(_delta))
_epsilon64 = float64("up")(_elementwise(_epsilon))
_mu64 = float64("down")(_elementwise(_mu))
_tradeoff64 = float64("down")(_elementwise(_tradeoff))


@float64("up", vectors=(0,))
def _compose64(mus: jax.Array) -> jax.Array:
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(mus)), axis=-1, keepdims=True)
    regular = (largest > 0) & (largest < jnp.inf)
    scaled = jnp.where(regular, mus, 1.0) / jnp.where(regular, largest, 1.0)
    squares = jnp.where(regular[..., 0], jnp.sum(scaled * scaled, axis=-1), 1.0)
    total = largest[..., 0] * jnp.sqrt(squares) * (1 + (4 + mus.shape[-1]) * _ULP)
    return jnp.where(regular[..., 0], total, largest[..., 0])


def tradeoff(mu: jax.typing.ArrayLike, alpha: jax.typing.ArrayLike) -> jax.Array:
    """The least false-negative rate of any attack on a μ-GDP mechanism.

    G_μ(α) = Φ(Φ⁻¹(1 − α) − μ).

    Args:
      mu: the GDP parameter, f[*b], at least 0.
      alpha: the attack's false-positive rate, f[*b], in [0, 1].

    Returns:
      The false-negative rate, f[*b], rounded down.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Dong, Roth and Su (2022), Definition 6; Bok, Su and Altschuler (2024),
    appendix A.3.

    Example:
      >>> print(f"{tradeoff(1.0, 0.05):.4f}")
      0.7405
    """
    _validate.nonnegative("mu", mu, finite=False)
    _validate.closed_unit("alpha", alpha)
    return _tradeoff64(mu, alpha)


def delta(mu: jax.typing.ArrayLike, epsilon: jax.typing.ArrayLike) -> jax.Array:
    """The least δ for which every μ-GDP mechanism is (ε, δ)-DP.

    Args:
      mu: the GDP parameter, f[*b], at least 0.
      epsilon: f[*b], at least 0.

    Returns:
      δ, f[*b], rounded up. A traced ε below 0, or a NaN, gives 1.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Balle and Wang (2018), Theorem 8.

    Example:
      >>> print(f"{delta(1.0, 1.0):.4f}")
      0.1269
    """
    _validate.nonnegative("mu", mu, finite=False)
    _validate.nonnegative("epsilon", epsilon, finite=False)
    return _delta64(mu, epsilon)


def epsilon(mu: jax.typing.ArrayLike, delta: jax.typing.ArrayLike) -> jax.Array:
    """The least ε >= 0 for which every μ-GDP mechanism is (ε, δ)-DP.

    Args:
      mu: the GDP parameter, f[*b], at least 0.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      ε, f[*b], rounded up: `delta(mu, epsilon(mu, d)) <= d` before the last cast. A
      traced δ at or below 0, or a NaN, gives inf.

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
    _validate.nonnegative("mu", mu, finite=False)
    _validate.open_unit("delta", delta)
    return _epsilon64(mu, delta)


def mu(epsilon: jax.typing.ArrayLike, delta: jax.typing.ArrayLike) -> jax.Array:
    """The largest μ for which every μ-GDP mechanism is (ε, δ)-DP.

    Args:
      epsilon: f[*b], at least 0.
      delta: f[*b], strictly between 0 and 1.

    Returns:
      μ, f[*b], rounded down. A traced argument out of range gives 0 (no mechanism).

    Raises:
      ValueError: a static argument is out of range.

    Reference: Balle and Wang (2018), Algorithm 1, by Newton's method on log δ.

    Example:
      >>> print(f"{mu(1.0, 1e-5):.4f}")
      0.2681
    """
    _validate.nonnegative("epsilon", epsilon, finite=False)
    _validate.open_unit("delta", delta)
    return _mu64(epsilon, delta)


def compose(mus: jax.typing.ArrayLike) -> jax.Array:
    """The GDP parameter of mechanisms run one after the other, adaptively or not.

    Args:
      mus: the GDP parameters, f[*b, k]: k mechanisms on the same data.

    Returns:
      sqrt(Σ μ_i²) over the last axis, f[*b], rounded up.

    Raises:
      ValueError: a static parameter is negative, or there is no last axis.

    Reference: Dong, Roth and Su (2022), Corollary 2.

    Example:
      >>> import numpy as np
      >>> print(f"{compose(np.array([3.0, 4.0])):.4f}")
      5.0000
    """
    if jnp.ndim(mus) == 0 or jnp.shape(mus)[-1] == 0:
        raise ValueError(f"mus must have a non-empty last axis; got {mus!r}.")
    _validate.nonnegative("mus", mus, finite=False)
    return _compose64(mus)
