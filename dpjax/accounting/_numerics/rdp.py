"""Upper bounds on Rényi curves for arguments of any value, and on δ(ε) and ε(δ).

A Rényi curve is the Rényi divergence of a mechanism as a function of the order a. One
quadrature gives the curve of the Poisson-subsampled Gaussian mechanism at every order,
for noise multipliers σ from 0.1 to 1e60 and orders up to 1e8 σ. For smaller noise
multipliers, convexity gives a bound that is looser than the quadrature. For larger
noise multipliers, the bound is the first term of an expansion for large noise, or the
curve without sampling if the order is large. For orders above 1e8 σ, the bound is also
the curve without sampling. Each order of a curve gives one bound on δ(ε) and one bound
on ε(δ).

**The quadrature.** Let q be the sampling rate and σ the noise multiplier. The two
output distributions are (1 − q) N(0, σ²) + q N(1, σ²) and N(0, σ²). At the outcome σu
with u ~ N(0, 1), their likelihood ratio is 1 + y with y = q (e^z − 1) and z = (u −
1/(2σ)) / σ. Since E y = 0, the moment for the Rényi divergence of order a is

    E (1 + y)^a = 1 + E h(y),    h(y) = (1 + y)^a − 1 − a y >= 0.

A sum of positive numbers approximates E h(y), so that no precision is lost to
cancellation, even where E h(y) is 1e-20. The integrand is h(y) e^{−u²/2} as a function
of u. In the region of small y, most of the integrand's mass is within a few units of
the interval from u = 0 to u = 2/σ. The integrand may have another bump at a u as large
as a/σ. This bump is at least as wide as a unit Gaussian. The integrand is analytic for
|Im u| < πσ. Its branch points are above and below the *crossing*, the real u at which q
e^z = 1 − q.

The nodes are in three windows of u. One window covers small y, and the two others are
on the two sides of the crossing. In all windows, the nodes are denser near the
crossing, on the scale σ. Neither the positions of the nodes nor their number changes
the integral, so only the integrand is differentiated.

The function h is a second difference, and is computed without cancellation.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import SMALL, TINY, ULP, float64
from dpjax._core.searches import bisect
from dpjax.accounting._numerics.gaussian import LOG_SQRT_2PI

_SERIES = [1.0 / math.factorial(k) for k in range(2, 14)]
# Below the first number, rounding removes e^z beside 1. Above the second number,
# rounding removes 1 beside q e^z.
_SMALLEST_Z, _LARGEST_Z = -36.0, 230.0


def _likelihood(
    u: jax.Array, sigma: jax.Array, q: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The numbers z = (u − 1/(2σ)) / σ, y = q (e^z − 1) and log(1 + y).

    u is the outcome divided by σ, the noise multiplier, and q is the sampling rate. At
    the outcome σu, z is the log-likelihood ratio of N(1, σ²) to N(0, σ²), and log(1 +
    y) is the log-likelihood ratio of (1 − q) N(0, σ²) + q N(1, σ²) to N(0, σ²). Above
    z = _LARGEST_Z, the returned y has its value at _LARGEST_Z and is therefore finite.
    The third result still grows with z: z − _LARGEST_Z is added to its value at
    _LARGEST_Z.
    """
    z = (u - 0.5 / sigma) / sigma
    clipped = jnp.clip(z, _SMALLEST_Z, _LARGEST_Z)
    y = q * jnp.expm1(clipped)
    return z, y, jnp.log1p(y) + jnp.maximum(z - clipped, 0.0)


def _second_difference(x: jax.Array) -> jax.Array:
    """The function ψ(x) = (e^x − 1 − x) / x², for |x| < 1/4."""
    total = jnp.full_like(x, _SERIES[-1])
    for coefficient in _SERIES[-2::-1]:
        total = coefficient + x * total
    return total


def _integrand(
    y: jax.Array, log_ratio: jax.Array, a: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The function h(y) = (1 + y)^a − 1 − a y, as an exponent and a mantissa.

    The likelihood ratio of a Poisson-sampled step is 1 + y, log_ratio is its log, and a
    is the order of the Rényi divergence. The result is a pair (exponent, mantissa) with
    h = mantissa e^exponent, because h itself may overflow at a large order. The
    relative error of the mantissa is a few dozen ulps, or about 1 / (a − 1) ulps if
    this is larger.
    """
    small = jnp.abs(a * log_ratio) < 0.25
    # With L = log(1 + y) and e^x = 1 + x + x² ψ(x): h = a L² (a ψ(a L) − ψ(L)).
    L = jnp.where(small, log_ratio, 0.0)
    difference = a * _second_difference(a * L) - _second_difference(L)
    small_value = a * L * L * difference
    # Elsewhere h = (1 + y) (e^x − 1) − (a − 1) y with x = (a − 1) L. Where (1 + y)^−a
    # is below one, the mantissa is h times this factor.
    y, L = jnp.where(small, 1.0, y), jnp.where(small, 1.0, log_ratio)
    power = jnp.expm1(-(a - 1.0) * jnp.abs(L))
    linear_term = (a - 1.0) * y / (1.0 + jnp.maximum(y, 0.0))
    rises = -power - linear_term * (1.0 + power)
    falls = (1.0 + y) * power - linear_term
    exponent = jnp.where(small, 0.0, a * jnp.maximum(L, 0.0))
    return exponent, jnp.where(small, small_value, jnp.where(L > 0, rises, falls))


_TAIL = 7.5  # the distance beyond which a unit Gaussian has 1e-13 of its mass
_DROP = _TAIL**2 / 2  # the decrease of a unit Gaussian's log density at that distance
# Gauss-Legendre rules: for the window around small y, and for the other two windows.
_FIRST_RULE = np.polynomial.legendre.leggauss(56)
_RULE = np.polynomial.legendre.leggauss(44)
_Density = tuple[jax.Array, jax.Array, jax.Array]  # σ, q and the order a
_barrier = jax.lax.optimization_barrier
_GRADING = 3.0  # nodes thin out beyond this many σ from the crossing

# The truncation of the windows and the error of the rules together are less than 1e-11
# of E h. This error was measured for σ in [0.1, 1000], q in [1e-6, 1] and orders in
# [1.01, 10,000]: against three times as many nodes on wider windows at 200,000 points,
# and against mpmath. Against mpmath alone, the error was also measured up to σ = 1e60,
# down to q = 1e-12, and at orders up to 1e6.
_QUADRATURE_ERROR = 1e-10


def _log_integrand(
    u: jax.Array, sigma: jax.Array, q: jax.Array, a: jax.Array
) -> jax.Array:
    """The log of the integrand h(y) e^{−u²/2}, with h(y) = (1 + y)^a − 1 − a y.

    1 + y is the likelihood ratio at the outcome σu of a Gaussian mechanism with the
    noise multiplier σ = sigma on a Poisson sample with the rate q. The Rényi order is
    a.
    """
    _, y, log_ratio = _likelihood(u, sigma, q)
    exponent, mantissa = _integrand(y, log_ratio, a)
    return exponent + jnp.log(jnp.maximum(mantissa, SMALL)) - 0.5 * u * u


def _peaks(
    sigma: jax.Array, a: jax.Array, crossing: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The positions u of the maxima of a log(1 + y) − u²/2, on each side of a crossing.

    σ = sigma is the noise multiplier, q is the sampling rate, and a is the Rényi order.
    1 + y is the likelihood ratio at the outcome σu, with y = q (e^z − 1) and z = (u −
    1/(2σ)) / σ. The crossing is the u at which q e^z = 1 − q. At a maximum, u = (a/σ)
    logistic(v) with v = (u − crossing) / σ. The result is the position to the left of
    the crossing, and the position to the right.

    Left of the crossing, (a/σ) logistic(v) is convex in u, and Newton's method ascends
    from 0 to the smallest solution. Right of the crossing, (a/σ) logistic(v) is
    concave, and Newton's method descends from a/σ to the largest solution. If a side
    has no solution, its position is the crossing. If the crossing is negative, the left
    position is 0.
    """

    def newton(u: jax.Array) -> jax.Array:
        probability = jax.nn.sigmoid((u - crossing) / sigma)
        slope = a / sigma**2 * probability * (1.0 - probability) - 1.0
        # The residual falls on the way to a maximum. The bound on the slope of the
        # residual keeps the step finite where the residual is nearly level.
        return u - (a / sigma * probability - u) / jnp.minimum(slope, -1e-3)

    def body(_: jax.Array, peaks: tuple[jax.Array, jax.Array]):
        left, right = map(newton, peaks)
        left = jnp.clip(left, 0.0, jnp.maximum(crossing, 0.0))
        return left, jnp.maximum(right, crossing)

    start = jnp.zeros_like(a * crossing), jnp.maximum(a / sigma, crossing)
    return jax.lax.fori_loop(0, 10, body, start)


def _edge(
    start: jax.Array, limit: jax.Array, floor: jax.Array, density: _Density
) -> jax.Array:
    """The points u between start and limit at which the integrand drops to e^floor.

    The integrand is h(y) e^{−u²/2} for the σ, q and order a in `density`. The first
    axis of `start`, `limit` and the result counts the searches. Each search goes from
    `start` towards `limit`, and ends just beyond the point at which the integrand drops
    to e^floor. If the integrand does not drop to e^floor, the result is `limit`. Each
    search bisects on a scale that is linear near `start` and geometric farther away.
    """
    sign = jnp.sign(limit - start)
    reach = jnp.log1p(jnp.abs(limit - start) / _TAIL)

    def u_at(t: jax.Array) -> jax.Array:
        return start + sign * _TAIL * jnp.expm1(t * reach)

    def is_below(t: jax.Array) -> jax.Array:
        return ~jax.vmap(lambda u: _log_integrand(u, *density) > floor)(u_at(t))

    return u_at(bisect(is_below, jnp.zeros_like(reach), jnp.ones_like(reach), 7))


class _Windows(NamedTuple):
    """The windows of u over which h(y) e^{−u²/2} is integrated.

    σ is the noise multiplier, q is the sampling rate, and a is the Rényi order.
    1 + y is the likelihood ratio at the outcome σu, with y = q (e^z − 1) and
    z = (u − 1/(2σ)) / σ. The function h is h(y) = (1 + y)^a − 1 − a y. The first
    window, which covers small y, begins at −_TAIL.

    Attributes:
      highest: about the log of the integrand's maximum, for scaling, f[*b].
      crossing: the u at which q e^z = 1 − q, near which the nodes are densest, f[*b].
      split: the end of the first window, equal for all orders, f[*b].
      lows, highs: the lower and upper ends of the other two windows, f[2, *b].
    """

    highest: jax.Array
    crossing: jax.Array
    split: jax.Array
    lows: jax.Array
    highs: jax.Array


def _windows(sigma: jax.Array, q: jax.Array, a: jax.Array) -> _Windows:
    """The windows of u outside of which the integrand h(y) e^{−u²/2} is negligible.

    σ = sigma is the noise multiplier, q is the sampling rate, and a is the Rényi order.
    1 + y is the likelihood ratio at the outcome σu, and h(y) = (1 + y)^a − 1 − a y.
    """
    log_odds = jnp.log1p(-jnp.minimum(q, 1 - ULP)) - jnp.log(q)
    crossing = sigma * log_odds + 0.5 / sigma
    bump = jnp.minimum(2.0 / sigma, jnp.maximum(crossing, 0.0))
    split = bump + _TAIL
    limit = jnp.maximum(jnp.maximum(a, 2.0) / sigma + _TAIL, split)
    border = jnp.clip(crossing, split, limit)
    left, right = _peaks(sigma, a, crossing)
    left, right = jnp.clip(left, split, border), jnp.clip(right, border, limit)
    density = sigma, q, a
    highest = _log_integrand(jnp.full_like(sigma, -1.0), *density)
    for u in (bump, left, right):
        highest = jnp.maximum(highest, _log_integrand(u, *density))
    floor = highest - _DROP
    starts = jnp.stack([left, left, right, right])
    limits = jnp.stack(jnp.broadcast_arrays(split, border, border, limit))
    ends = _edge(starts, limits, floor, density)
    return _Windows(highest, crossing, split, ends[::2], ends[1::2])


def _arcsinh_difference(x: jax.Array, y: jax.Array, gap: jax.Array) -> jax.Array:
    """The difference arcsinh(y) − arcsinh(x) for y = x + gap, without cancellation."""
    difference = jnp.arcsinh(y) - jnp.arcsinh(x)
    one_side = x * y > 0
    x, y = jnp.where(one_side, x, 1.0), jnp.where(one_side, y, 1.0)
    across = y * jnp.sqrt(1.0 + x * x) + x * jnp.sqrt(1.0 + y * y)
    return jnp.where(one_side, jnp.arcsinh(gap * (x + y) / across), difference)


def _window_sum(
    low: jax.Array, high: jax.Array, rule: Any, windows: _Windows, density: _Density
) -> jax.Array:
    """The integral of h(y) e^{−u²/2 − highest} over u from low to high, by quadrature.

    `density` has σ, q and the order a, which determine y and h as in `_Windows`.
    `windows` has `highest` and the crossing. The nodes and weights in `rule` are for an
    integral over w, where u = crossing + c sinh(w) for a scale c. The distance of each
    node u from `low` is computed without cancellation. A bound on the rounding error is
    added to each term.
    """
    sigma, q, a = density
    crossing, highest = windows.crossing, windows.highest
    fixed = jax.lax.stop_gradient
    # The scale c of the grading is at least the window's distance to the crossing, so
    # that the nodes of a distant window are spread almost evenly.
    distance = jnp.maximum(jnp.maximum(low - crossing, crossing - high), 0.0)
    c = jnp.sqrt((_GRADING * fixed(sigma)) ** 2 + distance**2)
    first, last = (low - crossing) / c, (high - crossing) / c
    length = _arcsinh_difference(first, last, (high - low) / c)
    # Without the barrier XLA fuses arrays that have no axis of orders into the loop,
    # and computes them again for every order.
    first, half, c, low = fixed(_barrier((jnp.arcsinh(first), 0.5 * length, c, low)))
    begin = jnp.exp(first)

    def body(total: jax.Array, node: tuple[jax.Array, jax.Array]):
        x, weight = node
        # With s = w − first: sinh(w) − sinh(first) = 2 cosh(first + s/2) sinh(s/2).
        growth = jnp.expm1(half * (0.5 + 0.5 * x))
        middle = begin * (1.0 + growth)
        end = middle * (1.0 + growth)
        offset = 0.5 * (middle + 1.0 / middle) * (growth + growth / (1.0 + growth))
        u = fixed(low + c * offset)
        weight = fixed(0.5 * weight * (end + 1.0 / end))
        z, y, log_ratio = _likelihood(u, sigma, q)
        errors = fixed(jnp.minimum(jnp.abs(y), 1.0) * (2.0 + jnp.abs(z)))
        u, weight, y, log_ratio, errors = _barrier((u, weight, y, log_ratio, errors))
        exponent, mantissa = _integrand(y, log_ratio, a)
        term = weight * mantissa * jnp.exp(exponent - 0.5 * u * u - highest)
        # A bound on the rounding error of the term, in units of 8 ULP.
        ulps = 64.0 + 4.0 / (fixed(a) - 1.0) + u * u + fixed(a) * errors
        return total + term * (1.0 + 8 * ULP * ulps), None

    total, _ = jax.lax.scan(body, jnp.zeros_like(highest), rule)
    return total * c * half


def log_excess(sigma: jax.Array, q: jax.Array, a: jax.Array) -> jax.Array:
    """An upper bound on log E h(y) for Poisson sampling, h(y) = (1 + y)^a − 1 − a y.

    1 + y is the likelihood ratio of the two output distributions, and the mean E is
    over outcomes without the differing example. The Rényi divergence of order a is
    log(1 + E h(y)) / (a − 1). The noise multiplier sigma must be in [0.1, 1e60], the
    sampling rate q in [1e-60, 1], and the order a in (1, 1e8 sigma].
    """
    # Windows are not differentiated, since their positions do not change the integral.
    # The derivatives are computed in forward mode (`float64`), which stores no terms of
    # sums.
    fixed = jax.lax.stop_gradient
    windows, density = fixed(_windows(fixed(sigma), fixed(q), fixed(a))), (sigma, q, a)
    start = jnp.full_like(sigma, -_TAIL)
    total = _window_sum(start, windows.split, _FIRST_RULE, windows, density)
    others = jax.vmap(lambda low, high: _window_sum(low, high, _RULE, windows, density))
    total = total + jnp.sum(others(windows.lows, windows.highs), axis=0)
    error = _QUADRATURE_ERROR + 4 * ULP * jnp.abs(windows.highest)
    return windows.highest + jnp.log(total) - LOG_SQRT_2PI + error


# The quadrature holds for noise multipliers from the first number to the second, and if
# order over noise multiplier is at most the third number. The exponents in the
# integrand are about the square of this ratio. From a ratio of about 1e9 on, their
# rounding errors exceed the margin.
_MIN_NOISE, _MAX_NOISE, _MAX_ORDER_RATIO = 0.1, 1e60, 1e8
# Noise multiplier over order, above which a curve equals its first term to an ulp.
_FIRST_TERM_RATIO = 1e20


def _gaussian(sigma: jax.Array, a: jax.Array) -> jax.Array:
    """An upper bound on the Rényi divergence a / (2σ²), for finite positive a and σ."""
    # Mironov (2017), Proposition 7, https://arxiv.org/abs/1702.07476: a / (2σ²).
    # The compiler would rewrite a / σ / σ as a / σ², and σ² may overflow or underflow.
    root = jnp.sqrt(a) / sigma
    return 0.5 * root * root * (1 + 4 * ULP) + SMALL


@float64("up")
def gaussian64(sigma: jax.Array, a: jax.Array) -> jax.Array:
    is_order = (a > 1) & (a < jnp.inf)
    regular = is_order & (sigma > 0) & (sigma < jnp.inf)
    value = _gaussian(jnp.where(regular, sigma, 1.0), jnp.where(regular, a, 2.0))
    # Infinite noise releases nothing; every other irregular argument gives inf.
    silent = is_order & (sigma == jnp.inf)
    return jnp.where(regular, value, jnp.where(silent, 0.0, jnp.inf))


@float64("up")
def poisson_gaussian64(sigma: jax.Array, q: jax.Array, a: jax.Array) -> jax.Array:
    # Mironov, Talwar and Zhang (2019), Theorems 4 and 5,
    # https://arxiv.org/abs/1908.10530: the divergence of the mixture from N(0, σ²) is
    # the larger one, and is log E (1 + y)^a over a − 1.
    # Each argument is made regular separately, so that every argument retains its shape
    # and nothing is broadcast before the quadrature.
    inside = (sigma >= _MIN_NOISE) & (sigma <= _MAX_NOISE)
    below = (sigma > 0) & (sigma < _MIN_NOISE)
    is_large_order = inside & (a > _MAX_ORDER_RATIO * sigma)
    above = ((sigma > _MAX_NOISE) & (sigma < jnp.inf)) | is_large_order
    is_rate, is_order = (q >= 0) & (q <= 1), (a > 1) & (a < jnp.inf)
    is_silent = (q == 0) | (sigma == jnp.inf)
    # The divergence grows with q, so raising a tiny q to 1e-60 gives an upper bound.
    q = jnp.maximum(jnp.where(is_rate & (q > 0), q, 0.5), 1e-60)
    a = jnp.where(is_order, a, 2.0)
    excess = log_excess(jnp.where(inside, sigma, 1.0), q, a)
    # Below the range: moments are jointly convex, so the moment of the mixture is at
    # most q times the moment of the Gaussian mechanism plus 1 − q.
    log_moment = (a - 1.0) * _gaussian(jnp.where(below, sigma, 1.0), a)
    log_convex = jnp.log(q) + log_moment + jnp.log(-jnp.expm1(-log_moment))
    log_convex = log_convex + 64 * ULP * (1 + log_moment)
    value = jax.nn.softplus(jnp.where(inside, excess, log_convex)) / (a - 1.0)
    # Above the range: h(y) is at most a (a − 1)/2 y² max(1, 1 + y)^a. Where aσ⁻¹ is
    # small, E h is a (a − 1)/2 q²σ⁻² up to a relative error of about aσ⁻¹. At other
    # orders, the bound is the divergence without sampling. At large orders, this bound
    # exceeds the divergence by at most a / (a − 1) log (1/q), since (1 + y)^a is at
    # least (q e^z)^a.
    large_sigma = jnp.where(above, sigma, 1.0)
    scale = jnp.where(a * _FIRST_TERM_RATIO <= large_sigma, q * q, 1.0)
    first = _gaussian(large_sigma, a) * scale
    value = jnp.where(above, first, value) * (1 + 16 * ULP) + SMALL
    value = jnp.where(inside | below | above, value, jnp.inf)
    value = jnp.where(is_silent & (sigma >= 0), 0.0, value)
    return jnp.where(is_rate & is_order, value, jnp.inf)


def _total_variation(rho: jax.Array) -> jax.Array:
    """An upper bound on δ(0), the total variation distance of two distributions.

    The argument rho is the Rényi divergence of some order above 1, which is at least
    the Kullback-Leibler divergence. The result is the smaller of Pinsker's bound and
    the bound of Bretagnolle and Huber.
    """
    # The two bounds are sqrt(ρ/2) and sqrt(1 − e^{−ρ}).
    is_positive = rho > 0  # the square root has no derivative at 0
    rho = jnp.where(is_positive, rho, 1.0)
    bound = jnp.minimum(np.sqrt(0.5) * jnp.sqrt(rho), jnp.sqrt(-jnp.expm1(-rho)))
    return jnp.where(is_positive, bound * (1 + 4 * ULP), 0.0)


@float64("up")
def epsilon64(rho: jax.Array, a: jax.Array, delta: jax.Array) -> jax.Array:
    regular = (rho >= 0) & (rho < jnp.inf) & (a > 1) & (a < jnp.inf)
    regular = regular & (delta > 0) & (delta <= 1)
    rho, a = jnp.where(regular, rho, 1.0), jnp.where(regular, a, 2.0)
    delta = jnp.where(regular, delta, 0.5)
    # Canonne, Kamath and Steinke (2020), Proposition 12,
    # https://arxiv.org/abs/2004.00010:
    # ε = ρ + log(1 − 1/a) − (log δ + log a) / (a − 1).
    discount = jnp.log1p(-1.0 / a)
    price = (jnp.log(delta) + jnp.log(a)) / (a - 1.0)
    error = 8 * ULP * (rho - discount + (jnp.log(a) - jnp.log(delta)) / (a - 1.0))
    value = jnp.maximum(rho + discount - price + error, 0.0)
    # δ(0) is at most the total variation, so ε = 0 holds for every δ above it.
    value = jnp.where(_total_variation(rho) <= delta, 0.0, value)
    return jnp.where(regular, value, jnp.inf)


@float64("up")
def delta64(rho: jax.Array, a: jax.Array, epsilon: jax.Array) -> jax.Array:
    regular = (rho >= 0) & (rho < jnp.inf) & (a > 1) & (a < jnp.inf)
    regular = regular & (epsilon >= 0)
    is_infinite = epsilon == jnp.inf
    rho, a = jnp.where(regular, rho, 1.0), jnp.where(regular, a, 2.0)
    epsilon = jnp.where(regular & ~is_infinite, epsilon, 1.0)
    # The same proposition, solved for δ:
    # log δ = (a − 1) (ρ − ε + log(1 − 1/a)) − log a.
    discount = jnp.log1p(-1.0 / a)
    gap = rho - epsilon + discount + 8 * ULP * (rho + epsilon - discount)
    log_delta = (a - 1.0) * gap - jnp.log(a) * (1 - 8 * ULP)
    # The result is positive even if δ underflows, unless nothing is released.
    value = jnp.maximum(jnp.exp(jnp.minimum(log_delta, 0.0)), TINY)
    value = jnp.minimum(value, _total_variation(rho))
    return jnp.where(regular, jnp.where(is_infinite, 0.0, value), 1.0)
