"""An upper bound on δ(ε) of composed privacy losses, by Fourier inversion.

Let Y be the sum of all losses, and K its cumulant generating function, the log of E
e^{sY} at s. For every tilt λ > 0 the function g and its Fourier transform ĝ are

    g(ε) = e^{λε} δ(ε) = e^{λε} E[(1 − e^{ε−Y})₊],   ĝ(t) = e^{K(s)} / (s(s + 1)),

with s = λ + it at the frequency t. The trapezoidal rule with step 2π/L for the inverse
transform yields the sum Σ_k g(ε + kL) over all integers k, instead of g(ε) (Poisson's
summation). Every term of that sum is positive, so the rule errs upwards only. K is a
sum over mechanisms, so a million steps cost as much as one step.

The sum over frequencies t is truncated at the largest frequency t_J. The terms beyond
t_J are small if the losses have enough Gaussian noise. If the losses have too little
Gaussian noise, an additional Gaussian mechanism with a small μ is composed with them.
This composition can only lose privacy. Bounds on the truncated terms and on rounding
errors are added to the sum.

The tilt λ is near the saddle point, where e^{K(λ) − λε} is nearly δ(ε). All errors are
then relative to δ and not to 1. If an example seldom takes part in a run, no λ has this
property, because Y is nearly always 0. The distribution of the discrete losses is
therefore split into an atom (a mass of one at 0) and the difference from this atom. The
code transforms the difference alone. The difference is computed from φ − 1, with φ the
characteristic function, and never from φ, so that errors are relative to the mass
outside the atom. The atom composed with the Gaussian losses is a Gaussian mechanism.
The sum over k for this mechanism has a bound in closed form.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from dpjax._core.float64 import SMALL, ULP
from dpjax.accounting._numerics import gaussian
from dpjax.accounting._numerics.pld import tilt as tilts
from dpjax.accounting._numerics.pld.pairs import DiscreteLosses
from dpjax.accounting._numerics.pld.tilt import FREQUENCIES, SIDE, Parts, Tilt


class Spectrum(NamedTuple):
    """The Fourier transform of a part of e^{λε} δ(ε), divided by E e^{λY}.

    Y is the sum of all losses, K(λ) = log E e^{λY}, and λ is the rate of the tilt. A
    mass of one at 0, here called the atom, is subtracted from the distribution of the
    sum of the discrete losses. The transform is that of the part of δ that the rest of
    this distribution contributes. The atom's part of δ depends only on the Gaussian
    losses, and `_bound_atom` bounds this part. The frequency t_j is in row j // SIDE
    and column j % SIDE of the arrays f[SIDE, SIDE], where SIDE is a constant.

    Attributes:
      tilt: the tilt λ, the period and the added Gaussian variance, f[] each.
      log_mass: K(λ), f[].
      variance: the variance of all Gaussian losses, the added one included, f[].
      discrete: the part of K(λ) that the discrete losses contribute, f[].
      real, imaginary: the two parts of the transform at t_j, f[SIDE, SIDE] each. Values
        at t_j > 0 are doubled, to count the values at −t_j.
      error: two numbers x and y, f[] each. `invert` returns the real part of the
        inverse transform at ε, times the period, with an error of at most x + y |ε|.
      scale: a bound on the relative error of e^{K(λ)}, f[].
      inf_mass: an upper bound on the probability of an infinite loss, f[].
    """

    tilt: Tilt
    log_mass: jax.Array
    variance: jax.Array
    discrete: jax.Array
    real: jax.Array
    imaginary: jax.Array
    error: tuple[jax.Array, jax.Array]
    scale: jax.Array
    inf_mass: jax.Array


class _Factor(NamedTuple):
    """The tilted characteristic function φ of one mechanism, at all frequencies t_j.

    φ(t) is E[e^{(λ + it)Y}] / E[e^{λY}], with Y the loss of one step and λ the tilt.
    The frequency t_j is in row j // SIDE and column j % SIDE, where SIDE is a constant.

    Attributes:
      log_sum: log E[e^{λY}], f[].
      log_abs: log |φ(t_j)|, f[SIDE, SIDE].
      angle: arg φ(t_j), f[SIDE, SIDE].
      error: a bound on the error of φ(t_j), f[SIDE, SIDE].
    """

    log_sum: jax.Array
    log_abs: jax.Array
    angle: jax.Array
    error: jax.Array


def _powers_minus_one(angle: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The real and imaginary parts of e^{ikα} − 1 for k = 0, ..., count − 1.

    α is the angle, f[*b], and each result is f[count, *b]. A recursion in k computes
    the results, so that their rounding errors grow with k.
    """
    # cos α − 1 as −2 sin²(α/2), which does not cancel for small α.
    half = jnp.sin(angle / 2)
    x, y = -2 * half * half, jnp.sin(angle)

    def multiply(point: tuple[jax.Array, jax.Array], _: None):
        a, b = point
        return (a + x + (a * x - b * y), b + y + (a * y + b * x)), point

    start = jnp.zeros_like(angle), jnp.zeros_like(angle)
    return jax.lax.scan(multiply, start, length=count)[1]


def _factor(losses: DiscreteLosses, rate: jax.Array, step: jax.Array) -> _Factor:
    """The characteristic function φ of a step's privacy loss Y, tilted by λ = rate.

    φ(t) is E[e^{(λ + it)Y}] / E[e^{λY}]. The frequencies t = 0, h, 2h, … are in a
    square array, where h is the argument `step`. Every frequency is r + c, the first
    frequency r of a row plus an offset c within the row. With x = e^{irY} − 1 and
    y = e^{icY} − 1, e^{i(r + c)Y} − 1 is xy + x + y. The mean of xy over the losses is
    a matrix product, for all r and c.
    """
    # Weights of the tilted losses. All sums are of e^{itY} − 1, which is small for a
    # loss near zero, so that an atom at zero costs no digits.
    exponent = losses.log_mass + rate * losses.loss
    total = logsumexp(exponent)
    weight = jnp.exp(exponent - total)
    units = step * np.array([1.0, SIDE])
    powers = _powers_minus_one(jnp.outer(units, losses.loss), SIDE)
    (cos_c, cos_r), (sin_c, sin_r) = (jnp.unstack(x, axis=1) for x in powers)
    columns = weight[None] * jnp.concatenate([cos_c, sin_c])
    row_powers = jnp.concatenate([cos_r, sin_r])
    product = jnp.einsum("am,bm->ab", row_powers, columns, precision="highest")
    (cc, cs), (sc, ss) = (jnp.split(rows, 2, 1) for rows in jnp.split(product, 2))
    column_real, column_imaginary = jnp.split(jnp.sum(columns, axis=1), 2)
    row_real, row_imaginary = (x[:, None] for x in jnp.split(row_powers @ weight, 2))
    real = cc - ss + row_real + column_real[None]
    imaginary = sc + cs + row_imaginary + column_imaginary[None]
    # log |φ| comes from |φ|² − 1 where φ is near 1, and from |φ|² elsewhere. The floor
    # of 1e-280 keeps the logarithm finite where φ rounds to zero.
    squared = 2 * real + real * real + imaginary * imaginary  # |φ|² − 1
    near_one = squared > -0.5
    direct = jnp.maximum((1 + real) ** 2 + imaginary**2, 1e-280)
    log_square = jnp.log1p(jnp.where(near_one, squared, 0.0))
    log_direct = jnp.log(jnp.where(near_one, 1.0, direct))
    log_square = jnp.where(near_one, log_square, log_direct)
    # |e^{itY} − 1| is at most min(|tY|, 2), and `deviations` are the weighted sums of
    # these bounds. Rounding errors of φ − 1 are relative to these sums.
    frequencies = (units[:, None] * np.arange(float(SIDE))[None]).ravel()
    deviations = jnp.minimum(jnp.outer(frequencies, jnp.abs(losses.loss)), 2.0) @ weight
    deviation_bound = 2 * (deviations[None, :SIDE] + deviations[SIDE:, None])
    frequency = rate + frequencies[None, :SIDE] + frequencies[SIDE:, None]
    angles = frequency * jnp.sum(weight * jnp.abs(losses.loss))
    relative = losses.error + ULP * (4 * losses.loss.size + 1024)
    error = deviation_bound * relative + 8 * ULP * angles
    # Where φ has rounded to zero its angle is undefined. Another argument of arctan2
    # avoids a derivative that is NaN.
    is_zero = (real == -1) & (imaginary == 0)
    angle = jnp.arctan2(imaginary, jnp.where(is_zero, 1.0, 1 + real))
    return _Factor(total, log_square / 2, angle, error)


@jax.jit  # JAX traces the second of two equal calls faster
def spectrum(parts: Parts, variance: jax.Array, tilt: Tilt) -> Spectrum:
    """The `Spectrum` of composed mechanisms, for one order of the data sets.

    `parts` has the discrete losses and the number of steps of each mechanism. These
    losses are composed with a Gaussian loss, whose variance is `variance` plus the
    variance that the tilt adds.
    """
    # Sums of the logs and angles of all characteristic functions, with their errors.
    rate, step = tilt.rate, 2 * np.pi / tilt.period
    index = np.arange(float(FREQUENCIES)).reshape(SIDE, SIDE)
    frequency = step * index
    variance = variance + tilt.variance
    gaussian, discrete = variance * (rate * rate + rate) / 2, jnp.zeros(())
    sum_log, sum_angle, log_upper, relative = (jnp.zeros(index.shape) for _ in range(4))
    inf_mass, scale = jnp.zeros(()), jnp.zeros(())
    for losses, count in parts:
        factor = _factor(losses, rate, step)
        discrete += count * factor.log_sum
        sum_log += count * factor.log_abs
        sum_angle += count * factor.angle
        # The error of a product of powers: each factor is off by at most its error.
        upper = jnp.exp(factor.log_abs) + factor.error
        log_upper += count * jnp.log(upper)
        relative += count * factor.error / upper
        inf_mass += count * losses.inf_mass
        scale += count * (losses.error + 2 * losses.loss.size * ULP)
    # e^{sum_log + i sum_angle} minus the atom's transform. The atom has the mass 1, and
    # its transform is e^{−discrete}, because all transforms are divided by e^discrete.
    half = jnp.sin(sum_angle / 2)
    others = -jnp.expm1(-discrete)
    real = jnp.expm1(sum_log) * jnp.cos(sum_angle) - 2 * half * half + others
    imaginary = jnp.exp(sum_log) * jnp.sin(sum_angle)
    relative += 8 * ULP * (jnp.abs(sum_log) + jnp.abs(sum_angle))
    error = jnp.exp(log_upper) * relative
    # Multiply by the Gaussian loss's transform, divide by s (s + 1), and double the
    # values at t > 0 to count the values at −t.
    phase = variance * frequency * (2 * rate + 1) / 2
    log_divisor = jnp.log(rate * rate + frequency**2)
    log_divisor += jnp.log((rate + 1) ** 2 + frequency**2)
    log_size = -variance * frequency * frequency / 2 - log_divisor / 2
    angle = phase - jnp.arctan2(frequency, rate) - jnp.arctan2(frequency, rate + 1)
    size = jnp.exp(log_size) * np.where(index == 0, 1.0, 2.0)
    cos, sin = size * jnp.cos(angle), size * jnp.sin(angle)
    magnitude = jnp.abs(real) + jnp.abs(imaginary) + jnp.abs(others)
    error += ULP * (64 + 4 * jnp.abs(phase)) * magnitude
    # The truncated tail is at most Σ_{j ≥ J} 2 e^{−μ²t²/2} / t², where
    # Σ_{j ≥ J} j⁻² <= 1 / (J − 1). The factor 4 counts the atom's tail as well.
    cutoff = step * FREQUENCIES
    tail = 4 * jnp.exp(-variance * cutoff**2 / 2) / (step**2 * (FREQUENCIES - 1))
    real, imaginary = real * cos - imaginary * sin, real * sin + imaginary * cos
    # `rounding` bounds the rounding errors of the sum. The second entry of `errors`
    # bounds the rounding errors of the angles tε. The bounds are not differentiated.
    terms = jax.lax.stop_gradient(jnp.abs(real) + jnp.abs(imaginary))
    rounding = 4 * SIDE * ULP * jnp.sum(terms)
    total_error = jnp.sum(size * error) + tail + rounding
    errors = total_error, 8 * ULP * jnp.sum(terms * frequency)
    log_mass = gaussian + discrete
    terms = discrete, real, imaginary, errors, scale, inf_mass
    return Spectrum(tilt, log_mass, variance, *terms)


def _bound_atom(transform: Spectrum, epsilon: jax.Array) -> jax.Array:
    """An upper bound on the atom's sum Σ_k g(ε + kL) e^{−K(λ)}, over all integers k.

    The atom is a mass of one at 0. A `Spectrum` subtracts the atom from the
    distribution of the sum of the discrete losses. Here g(ε) = e^{λε} δ(ε), with the
    δ(ε) of the Gaussian loss alone, and K(λ) = log E e^{λY} for the sum Y of all
    losses. λ and L are the `rate` and the `period` of `Tilt`.
    """
    rate, period = transform.tilt.rate, transform.tilt.period
    deviation = jnp.sqrt(transform.variance)
    points = epsilon + period * np.arange(3.0)
    log_delta = gaussian.log_delta(deviation, points)
    size = rate * points + jnp.abs(transform.log_mass) + jnp.abs(log_delta)
    log_terms = rate * points - transform.log_mass + log_delta + 8 * ULP * size
    central, first, second = log_terms
    # δ is log-concave, so the ratio of successive terms decreases: a geometric series
    # bounds the terms above ε.
    falling = second < first
    ratio = jnp.where(falling, jnp.exp(jnp.where(falling, second - first, 0.0)), 0.0)
    above = jnp.where(falling, jnp.exp(first) / (1 - ratio), jnp.inf)
    # Two bounds on the terms below ε. First, δ is at most 1. Second, g is unimodal, so
    # a sum of its values is at most its maximum, which Markov's inequality bounds, plus
    # the integral of g divided by L.
    geometric = jnp.exp(rate * (epsilon - period) - transform.log_mass)
    geometric = geometric * (1 + 64 * ULP) / -jnp.expm1(-rate * period)
    largest = jnp.exp(tilts.log_markov(rate)) + 1 / (period * rate * (rate + 1))
    unimodal = jnp.exp(-transform.discrete) * largest * (1 + 64 * ULP)
    return jnp.exp(central) + above + jnp.minimum(geometric, unimodal)


def invert(transform: Spectrum, epsilon: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The discrete inverse Fourier transform of a `Spectrum` at ε, times the period.

    Let Y be the sum of all losses, λ the rate of the tilt, and
    x = e^{λε} δ(ε) / E e^{λY}. The result divided by the period approximates x without
    the atom's part of x (see `Spectrum`).

    Returns:
      The real part of the transform, f[], and a bound on its error, f[].
    """
    period = transform.tilt.period
    # The addition theorem gives cos and sin of t_j ε from 2 SIDE values, not SIDE².
    columns = 2 * np.pi / period * epsilon * np.arange(float(SIDE))[None]
    rows = 2 * np.pi / period * epsilon * np.arange(0.0, FREQUENCIES, SIDE)[:, None]
    cos = jnp.cos(rows) * jnp.cos(columns) - jnp.sin(rows) * jnp.sin(columns)
    sin = jnp.sin(rows) * jnp.cos(columns) + jnp.cos(rows) * jnp.sin(columns)
    error, by_epsilon = transform.error
    error = error + by_epsilon * jax.lax.stop_gradient(jnp.abs(epsilon))
    return jnp.sum(transform.real * cos + transform.imaginary * sin), error


def log_delta(transform: Spectrum, epsilon: jax.Array) -> jax.Array:
    """An upper bound on log δ(ε) from a `Spectrum`.

    Except for margins for rounding, the bound is at most log(m + p). Here m is Markov's
    bound on the δ(ε) of the finite losses at the same tilt, and p is
    `transform.inf_mass`.
    """
    rate, period = transform.tilt.rate, transform.tilt.period
    total, error = invert(transform, epsilon)
    total = (total + error) / period + _bound_atom(transform, epsilon)
    total = jnp.log(jnp.maximum(total, SMALL))
    exponent = transform.log_mass - rate * epsilon + transform.scale
    scale = ULP * (64 + 4 * (jnp.abs(transform.log_mass) + rate * jnp.abs(epsilon)))
    return jnp.logaddexp(
        jnp.minimum(total, tilts.log_markov(rate)) + exponent + scale,
        jnp.log(jnp.maximum(transform.inf_mass, SMALL)),
    )


def union_bound(parts: Parts, variance: jax.Array, epsilon: jax.Array) -> jax.Array:
    """The log of the smaller of two upper bounds on δ(ε) that need no inversion.

    `parts` has the discrete losses and the number of steps of each mechanism. The
    result is inf if variance, the variance of a Gaussian loss, is positive. Mechanism i
    has T_i steps, and each of the steps has δ(ε) = δ_i(ε). The first bound is
    Σ_i T_i δ_i(ε / Σ_i T_i). Let x be the largest possible sum of the finite losses.
    The second bound is (1 − e^{ε − x})₊ plus a bound on the probability of an infinite
    loss.
    """
    # The first bound is exact for a single step, and nearly exact at ε = 0 for steps
    # whose loss is seldom positive. For many such steps the inversion is loose, because
    # it adds a Gaussian mechanism.
    steps = sum((count for _, count in parts), jnp.zeros(()))
    epsilon_per_step = epsilon / jnp.maximum(steps, 1.0)
    total, largest_loss, inf_mass = jnp.zeros(()), jnp.zeros(()), jnp.zeros(())
    for losses, count in parts:
        excess = -jnp.expm1(jnp.minimum(epsilon_per_step - losses.loss, 0.0))
        step_delta = jnp.sum(jnp.exp(losses.log_mass) * excess) + losses.inf_mass
        total += count * step_delta * (1 + losses.error + 2 * losses.loss.size * ULP)
        largest_loss += count * jnp.max(losses.loss)
        inf_mass += count * losses.inf_mass
    # Losses above ε are at most `largest_loss`, and (1 − e^{ε − x})₊ grows with x.
    # The margin exceeds the rounding errors of the losses and of their sum.
    excess = -jnp.expm1(jnp.minimum(epsilon - largest_loss * (1 + 64 * ULP), 0.0))
    total = jnp.minimum(total, excess * (1 + 16 * ULP) + inf_mass * (1 + 64 * ULP))
    return jnp.log(jnp.where(variance > 0, jnp.inf, jnp.maximum(total, SMALL)))
