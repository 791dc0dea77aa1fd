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
    """The Fourier transform of e^{λε} δ(ε), divided by E e^{λY}, without an atom.

    Y is the sum of all losses, K(λ) = log E e^{λY}, and λ is the tilt. The transform of
    the atom is subtracted. The atom is the case that all discrete losses are 0 and only
    Gaussian losses remain. The frequency t_j is in row j // SIDE and column j % SIDE of
    the arrays f[SIDE, SIDE], where SIDE is a constant.

    Attributes:
      tilt: the tilt λ, the period and the added Gaussian variance, f[] each.
      log_mass: K(λ), f[].
      variance: the variance of all Gaussian losses, the added one included, f[].
      discrete: the part of K(λ) that the discrete losses contribute, f[].
      real, imaginary: the two parts of the transform at t_j, f[SIDE, SIDE] each. Values
        at t_j > 0 are doubled, to count the values at −t_j.
      error: two numbers x and y, f[] each. The error of the inverse transform at ε, a
        sum over all frequencies, is at most x + y |ε|.
      scale: a bound on the relative error of e^{K(λ)}, f[].
      lost: the probability of an infinite loss, f[].
    """

    tilt: Tilt
    log_mass: jax.Array
    variance: jax.Array
    discrete: jax.Array
    real: jax.Array
    imaginary: jax.Array
    error: tuple[jax.Array, jax.Array]
    scale: jax.Array
    lost: jax.Array


class _Wave(NamedTuple):
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


def _turns(angle: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The real and imaginary parts of e^{ikα} − 1 for k = 0, ..., count − 1.

    α is the angle. A recursion in k computes the parts, and accumulates rounding
    errors.
    """
    # cos α − 1 as −2 sin²(α/2), which does not cancel for small α.
    half = jnp.sin(angle / 2)
    x, y = -2 * half * half, jnp.sin(angle)

    def turn(point: tuple[jax.Array, jax.Array], _: None):
        a, b = point
        return (a + x + (a * x - b * y), b + y + (a * y + b * x)), point

    start = jnp.zeros_like(angle), jnp.zeros_like(angle)
    return jax.lax.scan(turn, start, length=count)[1]


def _wave(losses: DiscreteLosses, rate: jax.Array, step: jax.Array) -> _Wave:
    """The characteristic function φ of a step's privacy loss Y, tilted by λ = rate.

    φ(t) is E[e^{(λ + it)Y}] / E[e^{λY}], at the frequencies t = 0, step, 2 step, … in a
    square array. Every frequency is the first frequency of its row plus an offset
    within the row. By the addition theorems of sine and cosine, φ − 1 at all
    frequencies is therefore a matrix product plus two weighted sums. The factors of the
    product and the terms of the sums depend on a row or on an offset alone.
    """
    # Weights of the tilted losses. All sums are of e^{itY} − 1, which is small for a
    # loss near zero, so that an atom at zero costs no digits.
    exponent = losses.log_mass + rate * losses.loss
    total = logsumexp(exponent)
    weight = jnp.exp(exponent - total)
    units = step * np.array([1.0, SIDE])
    turns = _turns(jnp.outer(units, losses.loss), SIDE)
    (near_cos, far_cos), (near_sin, far_sin) = (jnp.unstack(x, axis=1) for x in turns)
    near = weight[None] * jnp.concatenate([near_cos, near_sin])
    far = jnp.concatenate([far_cos, far_sin])
    product = jnp.einsum("am,bm->ab", far, near, precision="highest")
    (cc, cs), (sc, ss) = (jnp.split(rows, 2, 1) for rows in jnp.split(product, 2))
    near_real, near_imaginary = jnp.split(jnp.sum(near, axis=1), 2)
    far_real, far_imaginary = (x[:, None] for x in jnp.split(far @ weight, 2))
    real = cc - ss + far_real + near_real[None]
    imaginary = sc + cs + far_imaginary + near_imaginary[None]
    # log |φ| comes from |φ|² − 1 where φ is near 1, and from |φ|² elsewhere. The floor
    # of 1e-280 keeps the logarithm finite where φ rounds to zero.
    squared = 2 * real + real * real + imaginary * imaginary  # |φ|² − 1
    long = squared > -0.5
    direct = jnp.maximum((1 + real) ** 2 + imaginary**2, 1e-280)
    log_square = jnp.log1p(jnp.where(long, squared, 0.0))
    log_square = jnp.where(long, log_square, jnp.log(jnp.where(long, 1.0, direct)))
    # |e^{itY} − 1| is at most min(|tY|, 2), and `reach` is the weighted sum of these
    # bounds. Rounding errors of φ − 1 are relative to `reach`.
    frequencies = (units[:, None] * np.arange(float(SIDE))[None]).ravel()
    reach = jnp.minimum(jnp.outer(frequencies, jnp.abs(losses.loss)), 2.0) @ weight
    touched = 2 * (reach[None, :SIDE] + reach[SIDE:, None])
    frequency = rate + frequencies[None, :SIDE] + frequencies[SIDE:, None]
    angles = frequency * jnp.sum(weight * jnp.abs(losses.loss))
    relative = losses.error + ULP * (4 * losses.loss.size + 1024)
    error = touched * relative + 8 * ULP * angles
    # Where φ has rounded to zero its angle is undefined. Another argument of arctan2
    # avoids a derivative that is NaN.
    nothing = (real == -1) & (imaginary == 0)
    angle = jnp.arctan2(imaginary, jnp.where(nothing, 1.0, 1 + real))
    return _Wave(total, log_square / 2, angle, error)


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
    grow, turn, log_upper, relative = (jnp.zeros(index.shape) for _ in range(4))
    lost, scale = jnp.zeros(()), jnp.zeros(())
    for losses, count in parts:
        wave = _wave(losses, rate, step)
        discrete += count * wave.log_sum
        grow += count * wave.log_abs
        turn += count * wave.angle
        # The error of a product of powers: each factor is off by at most its error.
        upper = jnp.exp(wave.log_abs) + wave.error
        log_upper += count * jnp.log(upper)
        relative += count * wave.error / upper
        lost += count * losses.lost
        scale += count * (losses.error + 2 * losses.loss.size * ULP)
    # e^{grow + i turn} minus the atom's share. That share is e^{−K}, where K is here
    # the part of K(λ) that the discrete losses contribute.
    half = jnp.sin(turn / 2)
    others = -jnp.expm1(-discrete)
    real = jnp.expm1(grow) * jnp.cos(turn) - 2 * half * half + others
    imaginary = jnp.exp(grow) * jnp.sin(turn)
    error = jnp.exp(log_upper) * (relative + 8 * ULP * (jnp.abs(grow) + jnp.abs(turn)))
    # Multiply by the Gaussian loss's transform, divide by s (s + 1), and double the
    # values at t > 0 to count the values at −t.
    phase = variance * frequency * (2 * rate + 1) / 2
    log_divisor = jnp.log(rate * rate + frequency**2)
    log_divisor += jnp.log((rate + 1) ** 2 + frequency**2)
    log_size = -variance * frequency * frequency / 2 - log_divisor / 2
    angle = phase - jnp.arctan2(frequency, rate) - jnp.arctan2(frequency, rate + 1)
    size = jnp.exp(log_size) * np.where(index == 0, 1.0, 2.0)
    cos, sin = size * jnp.cos(angle), size * jnp.sin(angle)
    parts_of = jnp.abs(real) + jnp.abs(imaginary) + jnp.abs(others)
    error += ULP * (64 + 4 * jnp.abs(phase)) * parts_of
    # The truncated tail is at most Σ_{j ≥ J} 2 e^{−μ²t²/2} / t², where
    # Σ_{j ≥ J} j⁻² <= 1 / (J − 1). The factor 4 counts the atom's tail as well.
    last = step * FREQUENCIES
    tail = 4 * jnp.exp(-variance * last**2 / 2) / (step**2 * (FREQUENCIES - 1))
    real, imaginary = real * cos - imaginary * sin, real * sin + imaginary * cos
    # The rounding errors of the sum itself, and below the rounding errors of the angles
    # tε. Bounds on errors are not differentiated.
    terms = jax.lax.stop_gradient(jnp.abs(real) + jnp.abs(imaginary))
    rounding = 4 * SIDE * ULP * jnp.sum(terms)
    total_error = jnp.sum(size * error) + tail + rounding
    errors = total_error, 8 * ULP * jnp.sum(terms * frequency)
    log_mass = gaussian + discrete
    return Spectrum(
        tilt, log_mass, variance, discrete, real, imaginary, errors, scale, lost
    )


def _atom(wave: Spectrum, epsilon: jax.Array) -> jax.Array:
    """An upper bound on the part of Σ_k g(ε + kL) e^{−K(λ)} that a `Spectrum` omits.

    The omitted part, an atom, is the case that all discrete losses are 0 and only the
    Gaussian loss remains. Here g(ε) is e^{λε} δ(ε), where δ(ε) belongs to the Gaussian
    loss alone. But K(λ) = log E e^{λY} belongs to the sum Y of all losses. λ is the
    rate of the tilt, and L is its period.
    """
    rate, period = wave.tilt.rate, wave.tilt.period
    deviation = jnp.sqrt(wave.variance)
    at = epsilon + period * np.arange(3.0)
    log_delta = gaussian.log_delta(deviation, at)
    size = rate * at + jnp.abs(wave.log_mass) + jnp.abs(log_delta)
    here, first, second = rate * at - wave.log_mass + log_delta + 8 * ULP * size
    # δ is log-concave, so the ratio of successive terms decreases: a geometric series
    # bounds the terms above ε.
    falls = second < first
    ratio = jnp.where(falls, jnp.exp(jnp.where(falls, second - first, 0.0)), 0.0)
    above = jnp.where(falls, jnp.exp(first) / (1 - ratio), jnp.inf)
    # Two bounds on the terms below ε. First, δ is at most 1. Second, g is unimodal, so
    # a sum of its values is at most its maximum, which Markov's inequality bounds, plus
    # the integral of g divided by L.
    geometric = jnp.exp(rate * (epsilon - period) - wave.log_mass)
    geometric = geometric * (1 + 64 * ULP) / -jnp.expm1(-rate * period)
    largest = jnp.exp(tilts.log_markov(rate)) + 1 / (period * rate * (rate + 1))
    unimodal = jnp.exp(-wave.discrete) * largest * (1 + 64 * ULP)
    return jnp.exp(here) + above + jnp.minimum(geometric, unimodal)


def sum_waves(wave: Spectrum, epsilon: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The discrete inverse Fourier transform of a `Spectrum` at ε, times the period.

    The result divided by the period approximates e^{λε} δ(ε) / E e^{λY}, where Y is the
    sum of all losses and λ is the tilt. The case that all discrete losses are 0, which
    a `Spectrum` omits, is not included (`_atom` bounds this case).

    Returns:
      The real part of the transform, f[], and a bound on its error, f[].
    """
    period = wave.tilt.period
    # The addition theorem gives cos and sin of t_j ε from 2 side values, not side².
    near = 2 * np.pi / period * epsilon * np.arange(float(SIDE))[None]
    far = 2 * np.pi / period * epsilon * np.arange(0.0, FREQUENCIES, SIDE)[:, None]
    cos = jnp.cos(far) * jnp.cos(near) - jnp.sin(far) * jnp.sin(near)
    sin = jnp.sin(far) * jnp.cos(near) + jnp.cos(far) * jnp.sin(near)
    error, by_epsilon = wave.error
    error = error + by_epsilon * jax.lax.stop_gradient(jnp.abs(epsilon))
    return jnp.sum(wave.real * cos + wave.imaginary * sin), error


def log_delta(wave: Spectrum, epsilon: jax.Array) -> jax.Array:
    """An upper bound on log δ(ε) from a `Spectrum`.

    The bound is never larger than the bound by Markov's inequality at the same tilt.
    """
    rate, period = wave.tilt.rate, wave.tilt.period
    total, error = sum_waves(wave, epsilon)
    total = (total + error) / period + _atom(wave, epsilon)
    total = jnp.log(jnp.maximum(total, SMALL))
    exponent = wave.log_mass - rate * epsilon + wave.scale
    scale = ULP * (64 + 4 * (jnp.abs(wave.log_mass) + rate * jnp.abs(epsilon)))
    return jnp.logaddexp(
        jnp.minimum(total, tilts.log_markov(rate)) + exponent + scale,
        jnp.log(jnp.maximum(wave.lost, SMALL)),
    )


def union_bound(parts: Parts, variance: jax.Array, epsilon: jax.Array) -> jax.Array:
    """The log of a bound on δ(ε) without inversion, or inf if variance > 0.

    `parts` has the discrete losses and the number of steps of each mechanism, and
    variance is the variance of a Gaussian loss. Mechanism i has T_i steps, and δ_i is
    the δ of one of its steps. The first bound is Σ_i T_i δ_i(ε / Σ_i T_i). This bound
    is exact for a single step, and nearly exact at ε = 0 for many steps whose privacy
    loss is seldom positive. For such steps the bound by Fourier inversion is loose,
    because inversion adds a Gaussian mechanism.

    The largest possible sum of losses gives a second bound. The function returns the
    log of the smaller bound.
    """
    steps = sum((count for _, count in parts), jnp.zeros(()))
    share = epsilon / jnp.maximum(steps, 1.0)
    total, top, lost = jnp.zeros(()), jnp.zeros(()), jnp.zeros(())
    for losses, count in parts:
        over = -jnp.expm1(jnp.minimum(share - losses.loss, 0.0))
        one = jnp.sum(jnp.exp(losses.log_mass) * over) + losses.lost
        total += count * one * (1 + losses.error + 2 * losses.loss.size * ULP)
        top += count * jnp.max(losses.loss)
        lost += count * losses.lost
    # The mass above ε has a loss of at most `top`, and (1 − e^{ε − x})₊ grows with x.
    # The margin exceeds the rounding errors of the losses and of their sum.
    over = -jnp.expm1(jnp.minimum(epsilon - top * (1 + 64 * ULP), 0.0))
    total = jnp.minimum(total, over * (1 + 16 * ULP) + lost * (1 + 64 * ULP))
    total = jnp.where(variance > 0, jnp.inf, jnp.maximum(total, SMALL))
    return jnp.log(total)
