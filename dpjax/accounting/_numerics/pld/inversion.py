"""δ(ε) of composed privacy losses, by Fourier inversion, from above.

With K the cumulant generating function of the sum Y of all losses, each λ > 0 has

    g(ε) = e^{λε} δ(ε) = e^{λε} E[(1 − e^{ε−Y})₊],   ĝ(t) = e^{K(s)} / (s(s + 1)),

s = λ + it. The trapezoidal rule with step 2π/L for the inverse transform gives not g(ε)
but Σ_k g(ε + kL) (Poisson's summation), and every term of that is positive: it errs
upwards only. K is a sum over mechanisms, so a million steps cost what one does. The sum
over t ends at t_J because a Gaussian mechanism with little μ is composed with the
others where they have none, which can only lose privacy and makes ĝ vanish beyond t_J.
What is left are bounds on that tail and on rounding, which are added.

λ is near the saddle point, where e^{K(λ) − λε} is nearly δ(ε), so that all errors are
relative to δ and not to one. Where a run seldom touches an example no λ does that, as
nearly all of Y is one atom at 0. What is transformed is therefore the difference from
such an atom (with the Gaussian mechanism's loss), from φ − 1 and never from φ, so that
errors are relative to what is not in the atom, whose own sum over k is known.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import SMALL, ULP
from dpjax.accounting._numerics import gaussian
from dpjax.accounting._numerics.pld.pairs import DiscreteLosses
from dpjax.accounting._numerics.pld.tilt import (
    FREQUENCIES,
    SIDE,
    Parts,
    Tilt,
    log_markov,
    log_sum,
)


class Spectrum(NamedTuple):
    """ĝ on the line without its atom, relative to e^K, and bounds on the errors.

    Frequency t_j is in row j // side and column j % side.

    Attributes:
      tilt: f[] each.
      log_mass: K(λ).
      variance: of the Gaussian loss in all of it.
      discrete: K(λ) of all but that.
      real, imaginary: of ĝ(t_j) e^{−K}, f[side, side], those but t = 0 twice.
      error: in all of their sum, f[], and what |ε| adds.
      scale: of e^K, relatively, f[].
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
    """Of one mechanism: log E[e^{λY}], and log |φ|, arg φ and the error of φ at t_j.

    φ(t) is E[e^{(λ + it)Y}] relative to E[e^{λY}].
    """

    log_sum: jax.Array
    log_abs: jax.Array
    angle: jax.Array
    error: jax.Array


def _turns(angle: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Real and imaginary part of e^{ikα} − 1 for k < count, to count roundings."""
    half = jnp.sin(angle / 2)
    x, y = -2 * half * half, jnp.sin(angle)

    def turn(point: tuple[jax.Array, jax.Array], _: None):
        a, b = point
        return (a + x + (a * x - b * y), b + y + (a * y + b * x)), point

    start = jnp.zeros_like(angle), jnp.zeros_like(angle)
    return jax.lax.scan(turn, start, length=count)[1]


def _wave(losses: DiscreteLosses, rate: jax.Array, step: jax.Array) -> _Wave:
    """The characteristic function of one mechanism.

    By the addition theorem φ − 1 is one product of matrices, for the differences of
    frequencies within a row and between rows, and products of each with a vector.
    """
    # Weights of the tilted losses. All sums are of e^{itY} − 1, which is small for what
    # is near zero, so that an atom there costs no digits.
    total = log_sum(losses, rate)
    weight = jnp.exp(losses.log_mass + rate * losses.loss - total)
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
    # log |φ| from |φ|² − 1 where φ is near 1, directly where it is not.
    squared = 2 * real + real * real + imaginary * imaginary  # |φ|² − 1
    long = squared > -0.5
    direct = jnp.maximum((1 + real) ** 2 + imaginary**2, 1e-280)
    log_abs = jnp.where(
        long,
        jnp.log1p(jnp.where(long, squared, 0.0)),
        jnp.log(jnp.where(long, 1.0, direct)),
    )
    # Each sum over losses of |e^{itY} − 1| is at most this.
    frequencies = (units[:, None] * np.arange(float(SIDE))[None]).ravel()
    reach = jnp.minimum(jnp.outer(frequencies, jnp.abs(losses.loss)), 2.0) @ weight
    touched = 2 * (reach[None, :SIDE] + reach[SIDE:, None])
    frequency = rate + frequencies[None, :SIDE] + frequencies[SIDE:, None]
    angles = frequency * jnp.sum(weight * jnp.abs(losses.loss))
    relative = losses.error + ULP * (4 * losses.loss.size + 1024)
    error = touched * relative + 8 * ULP * angles
    # What has rounded to zero has no angle, and must not have a derivative of one.
    nothing = (real == -1) & (imaginary == 0)
    angle = jnp.arctan2(imaginary, jnp.where(nothing, 1.0, 1 + real))
    return _Wave(total, log_abs / 2, angle, error)


def spectrum(parts: Parts, variance: jax.Array, tilt: Tilt) -> Spectrum:
    """ĝ for mechanisms in one direction, each with a count, and a Gaussian variance."""
    # Logs and angles of all characteristic functions at once, and how far each is off.
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
        # A product of powers, each factor off by at most its error.
        upper = jnp.exp(wave.log_abs) + wave.error
        log_upper += count * jnp.log(upper)
        relative += count * wave.error / upper
        lost += count * losses.lost
        scale += count * (losses.error + 2 * losses.loss.size * ULP)
    # e^{grow + i turn} less the atom's share, which is e^{−K} without the Gaussian's K.
    half = jnp.sin(turn / 2)
    others = -jnp.expm1(-discrete)
    real = jnp.expm1(grow) * jnp.cos(turn) - 2 * half * half + others
    imaginary = jnp.exp(grow) * jnp.sin(turn)
    error = jnp.exp(log_upper) * (relative + 8 * ULP * (jnp.abs(grow) + jnp.abs(turn)))
    # times the Gaussian's, over s (s + 1), and twice for what is also at −t
    phase = variance * frequency * (2 * rate + 1) / 2
    log_size = (
        -variance * frequency * frequency / 2
        - (
            jnp.log(rate * rate + frequency**2)
            + jnp.log((rate + 1) ** 2 + frequency**2)
        )
        / 2
    )
    angle = phase - jnp.arctan2(frequency, rate) - jnp.arctan2(frequency, rate + 1)
    size = jnp.exp(log_size) * np.where(index == 0, 1.0, 2.0)
    cos, sin = size * jnp.cos(angle), size * jnp.sin(angle)
    parts_of = jnp.abs(real) + jnp.abs(imaginary) + jnp.abs(others)
    error += ULP * (64 + 4 * jnp.abs(phase)) * parts_of
    # Σ_{j ≥ J} 2 e^{−μ²t²/2} / t², with Σ_{j ≥ J} j⁻² <= 1 / (J − 1), and the atom's.
    last = step * FREQUENCIES
    tail = 4 * jnp.exp(-variance * last**2 / 2) / (step**2 * (FREQUENCIES - 1))
    real, imaginary = real * cos - imaginary * sin, real * sin + imaginary * cos
    # Of the sum itself, and of its angles tε.
    terms = jax.lax.stop_gradient(jnp.abs(real) + jnp.abs(imaginary))
    rounding = 4 * SIDE * ULP * jnp.sum(terms)
    return Spectrum(
        tilt,
        gaussian + discrete,
        variance,
        discrete,
        real,
        imaginary,
        (
            jnp.sum(size * error) + tail + rounding,
            8 * ULP * jnp.sum(terms * frequency),
        ),
        scale,
        lost,
    )


def _atom(wave: Spectrum, epsilon: jax.Array) -> jax.Array:
    """Σ_k g(ε + kL) e^{−K} for the Gaussian loss alone, from above."""
    rate, period = wave.tilt.rate, wave.tilt.period
    deviation = jnp.sqrt(wave.variance)
    at = epsilon + period * np.arange(3.0)
    log_delta = gaussian.log_delta(deviation, at)
    size = rate * at + jnp.abs(wave.log_mass) + jnp.abs(log_delta)
    here, first, second = rate * at - wave.log_mass + log_delta + 8 * ULP * size
    # δ is log-concave, so that terms fall faster and faster.
    falls = second < first
    ratio = jnp.where(falls, jnp.exp(jnp.where(falls, second - first, 0.0)), 0.0)
    above = jnp.where(falls, jnp.exp(first) / (1 - ratio), jnp.inf)
    # Below ε, δ is at most 1; and as g is unimodal, a sum of its values is at most the
    # largest, which Markov's inequality bounds, and their integral over L.
    geometric = jnp.exp(rate * (epsilon - period) - wave.log_mass)
    geometric = geometric * (1 + 64 * ULP) / -jnp.expm1(-rate * period)
    largest = jnp.exp(log_markov(rate)) + 1 / (period * rate * (rate + 1))
    unimodal = jnp.exp(-wave.discrete) * largest * (1 + 64 * ULP)
    return jnp.exp(here) + above + jnp.minimum(geometric, unimodal)


def log_delta(wave: Spectrum, epsilon: jax.Array) -> jax.Array:
    """Log of an upper bound on δ(ε), never above what Markov's inequality says."""
    rate, period = wave.tilt.rate, wave.tilt.period
    # cos and sin of t_j ε by the addition theorem: 2 side values instead of side².
    near = 2 * np.pi / period * epsilon * np.arange(float(SIDE))[None]
    far = 2 * np.pi / period * epsilon * np.arange(0.0, FREQUENCIES, SIDE)[:, None]
    cos = jnp.cos(far) * jnp.cos(near) - jnp.sin(far) * jnp.sin(near)
    sin = jnp.sin(far) * jnp.cos(near) + jnp.cos(far) * jnp.sin(near)
    total = jnp.sum(wave.real * cos + wave.imaginary * sin)
    error, by_epsilon = wave.error
    total = total + error + by_epsilon * jax.lax.stop_gradient(jnp.abs(epsilon))
    total = total / period + _atom(wave, epsilon)
    total = jnp.log(jnp.maximum(total, SMALL))
    exponent = wave.log_mass - rate * epsilon + wave.scale
    scale = ULP * (64 + 4 * (jnp.abs(wave.log_mass) + rate * jnp.abs(epsilon)))
    return jnp.logaddexp(
        jnp.minimum(total, log_markov(rate)) + exponent + scale,
        jnp.log(jnp.maximum(wave.lost, SMALL)),
    )


def union_bound(parts: Parts, variance: jax.Array, epsilon: jax.Array) -> jax.Array:
    """Log of Σ_i T_i δ_i(ε / Σ_i T_i): each step on its own, where none is Gaussian.

    Exact for one step, and not far off at ε = 0 for many that seldom lose anything,
    which is where the Gaussian part of a spectrum is felt most.
    """
    steps = sum((count for _, count in parts), jnp.zeros(()))
    share = epsilon / jnp.maximum(steps, 1.0)
    total = jnp.zeros(())
    for losses, count in parts:
        over = -jnp.expm1(jnp.minimum(share - losses.loss, 0.0))
        one = jnp.sum(jnp.exp(losses.log_mass) * over) + losses.lost
        total += count * one * (1 + losses.error + 2 * losses.loss.size * ULP)
    total = jnp.where(variance > 0, jnp.inf, jnp.maximum(total, SMALL))
    return jnp.log(total)
