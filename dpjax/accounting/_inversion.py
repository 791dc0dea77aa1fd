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
relative to δ and not to one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.accounting._pairs import Losses

_ULP = float(np.finfo(np.float64).eps)
FREQUENCIES = 4096
_TILTS = 1.5 ** np.arange(-14.0, 66.0)
# Log of the largest (1 − e^{−y}) e^{−λy} over y: by how much δ is below E[e^{λ(Y−ε)}].
_MARKOV = _TILTS * np.log(_TILTS) - (1 + _TILTS) * np.log1p(_TILTS)
_NEGLIGIBLE = 14.0  # −log of a relative error in δ that may be added on purpose


Parts = Sequence[tuple[Losses, jax.Array]]  # mechanisms in one direction, and counts


class Tilt(NamedTuple):
    """Where to integrate.

    Attributes:
      rate: λ.
      period: L.
      variance: the Gaussian variance to add.
    """

    rate: jax.Array
    period: jax.Array
    variance: jax.Array


class Spectrum(NamedTuple):
    """ĝ on the line, relative to e^K, and bounds on the errors.

    Attributes:
      tilt: f[] each.
      log_mass: K(λ).
      magnitude, phase: of ĝ(t_j) e^{−K}, f[frequencies].
      error: in all of their sum, f[].
      lost: the probability of an infinite loss, f[].
    """

    tilt: Tilt
    log_mass: jax.Array
    magnitude: jax.Array
    phase: jax.Array
    error: jax.Array
    lost: jax.Array


def _log_sum(losses: Losses, rate: jax.Array) -> jax.Array:
    """Log Σ mass e^{λ loss} over the last axis."""
    exponent = losses.log_mass + rate * losses.loss
    top = jax.lax.stop_gradient(jnp.max(exponent, axis=-1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(exponent - top), axis=-1)) + top[..., 0]


def cumulants(parts: Parts, variance: jax.Array) -> jax.Array:
    """K at each of _TILTS."""
    total = variance * (_TILTS * _TILTS + _TILTS) / 2
    for losses, count in parts:
        total += count * jax.lax.map(
            lambda rate, x=losses: _log_sum(x, rate), jnp.asarray(_TILTS)
        )
    return total


def markov_epsilon(cumulants: jax.Array, log_delta: jax.Array) -> jax.Array:
    """An upper bound on ε(δ), by Markov's inequality."""
    return jnp.maximum(jnp.min((cumulants + _MARKOV - log_delta) / _TILTS), 0.0)


def markov_log_delta(cumulants: jax.Array, epsilon: jax.Array) -> jax.Array:
    """An upper bound on log δ(ε), by Markov's inequality."""
    return jnp.min(cumulants + _MARKOV - _TILTS * epsilon)


def choose(
    cumulants: jax.Array,
    variance: jax.Array,
    epsilon: tuple[jax.Array, jax.Array],
    log_delta: jax.Array,
    precision: jax.Array,
    frequencies: int,
) -> Tilt:
    """Where to integrate for ε in an interval, at whose upper end δ(ε) is about δ.

    precision is how many nats above δ rounding errors have room for e^K.
    """
    low, high = epsilon
    rates = jnp.asarray(_TILTS)
    excess = jnp.maximum(cumulants - rates * high - log_delta, 0.0)
    small = _NEGLIGIBLE + excess  # −log of what is negligible, relative to e^K
    # By Markov's inequality with rate λ', neighbours at distance L are negligible from
    # (K(λ') − K(λ) + small) / (λ' − λ) on, for λ' on either side.
    rise = cumulants[None] - cumulants[:, None] + small[:, None]
    gap = rates[None] - rates[:, None]

    def nearest(gap: jax.Array) -> jax.Array:
        reach = jnp.where(gap > 0, rise / jnp.where(gap > 0, gap, 1.0), jnp.inf)
        return jnp.min(reach, axis=1)

    below = jnp.minimum(nearest(-gap), (small - cumulants) / rates)
    period = jnp.maximum(nearest(gap) - low, below + high) + 2 / rates
    # The Gaussian part multiplies the last term by e^{-small}, and δ by about e^{cost}.
    needed = small * 2 * (period / (2 * np.pi * frequencies)) ** 2
    cost = rates * (1 + rates) * needed
    cost = jnp.where(excess <= jnp.min(excess) + precision, cost, jnp.inf)
    best = cost <= jnp.min(cost)

    def chosen(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(best, x, 0.0))

    damping = jnp.maximum(chosen(needed) - variance, 0.0)
    return Tilt(chosen(rates), chosen(period), damping)


def _multiples(angle: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Cos and sin of 0, 1, …, count − 1 times the angle, off by count roundings."""
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def turn(point: tuple[jax.Array, jax.Array], _: None):
        x, y = point
        return (x * cos - y * sin, x * sin + y * cos), point

    start = jnp.ones_like(angle), jnp.zeros_like(angle)
    return jax.lax.scan(turn, start, length=count)[1]


def _wave(losses: Losses, rate: jax.Array, step: jax.Array, frequencies: int):
    """Log E[e^{λY}], and log |φ|, arg φ, and the error of φ, for one mechanism.

    φ(t_j) is E[e^{(λ + it_j)Y}] relative to E[e^{λY}], by the addition theorem as one
    product of matrices.
    """
    log_sum = _log_sum(losses, rate)
    weight = jnp.exp(losses.log_mass + rate * losses.loss - log_sum)
    fine = 2 ** (frequencies.bit_length() // 2)  # t = τ (i + fine k), i < fine
    blocks = frequencies // fine
    near_cos, near_sin = _multiples(step * losses.loss, fine)
    cos, sin = _multiples(step * fine * losses.loss, blocks)
    cc, sc, cs, ss = (
        jnp.einsum("am,bm->ab", x, y, precision="highest").ravel()
        for y in (weight[None] * near_cos, weight[None] * near_sin)
        for x in (cos, sin)
    )
    real, imaginary = cc - ss, sc + cs
    squared = jnp.maximum(real * real + imaginary * imaginary, 1e-280)
    spread = jnp.sum(weight * jnp.abs(losses.loss))
    frequency = rate + step * np.arange(frequencies)
    error = losses.error + _ULP * (2 * losses.loss.size + 2048 + 8 * frequency * spread)
    return log_sum, jnp.log(squared) / 2, jnp.arctan2(imaginary, real), error


def spectrum(
    parts: Parts, variance: jax.Array, tilt: Tilt, frequencies: int
) -> Spectrum:
    """ĝ for mechanisms in one direction, each with a count, and a Gaussian variance."""
    rate, step = tilt.rate, 2 * np.pi / tilt.period
    frequency = step * np.arange(frequencies)
    variance = variance + tilt.variance
    log_mass = variance * (rate * rate + rate) / 2
    log_magnitude = -variance * frequency * frequency / 2
    phase = variance * frequency * (2 * rate + 1) / 2
    log_upper, relative = log_magnitude, _ULP * (16 + 4 * jnp.abs(phase))
    lost = jnp.zeros(())
    for losses, count in parts:
        log_sum, log_abs, angle, error = _wave(losses, rate, step, frequencies)
        log_mass += count * log_sum
        log_magnitude += count * log_abs
        phase += count * angle
        # A product of powers, each factor off by at most its error.
        upper = jnp.exp(log_abs) + error
        log_upper += count * jnp.log(upper)
        relative += count * error / upper
        lost += count * losses.lost
    # 1 / (s (s + 1))
    log_denominator = (
        jnp.log(rate * rate + frequency**2) + jnp.log((rate + 1) ** 2 + frequency**2)
    ) / 2
    phase -= jnp.arctan2(frequency, rate) + jnp.arctan2(frequency, rate + 1)
    magnitude = jnp.exp(log_magnitude - log_denominator)
    sides = jnp.where(np.arange(frequencies) == 0, 1.0, 2.0)
    rounding = jnp.sum(sides * jnp.exp(log_upper - log_denominator) * relative)
    # Σ_{j ≥ J} 2 e^{−μ²t²/2} / t², with Σ_{j ≥ J} j⁻² <= 1 / (J − 1).
    last = step * frequencies
    tail = 2 * jnp.exp(-variance * last**2 / 2) / (step**2 * (frequencies - 1))
    return Spectrum(tilt, log_mass, sides * magnitude, phase, rounding + tail, lost)


def log_delta(wave: Spectrum, epsilon: jax.Array) -> jax.Array:
    """Log of an upper bound on δ(ε)."""
    rate, period = wave.tilt.rate, wave.tilt.period
    size = wave.phase.size
    frequency = 2 * np.pi / period * np.arange(size)
    total = jnp.sum(wave.magnitude * jnp.cos(wave.phase - frequency * epsilon))
    exponent = wave.log_mass - rate * epsilon
    # Of the phases, of the exponent, and of the sum itself.
    angle = jax.lax.stop_gradient(jnp.abs(wave.phase) + frequency * jnp.abs(epsilon))
    rounding = _ULP * jnp.sum(wave.magnitude * (size + 4 * angle))
    scale = _ULP * (16 + 4 * (jnp.abs(wave.log_mass) + rate * jnp.abs(epsilon)))
    total = (total + wave.error + rounding) / period * (1 + scale)
    return jnp.logaddexp(
        jnp.log(jnp.maximum(total, 1e-300)) + exponent,
        jnp.log(jnp.maximum(wave.lost, 1e-300)),
    )


def log_delta_apart(parts: Parts, variance: jax.Array, epsilon: jax.Array) -> jax.Array:
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
        total += count * one * (1 + losses.error + 2 * losses.loss.size * _ULP)
    total = jnp.where(variance > 0, jnp.inf, jnp.maximum(total, 1e-300))
    return jnp.log(total)
