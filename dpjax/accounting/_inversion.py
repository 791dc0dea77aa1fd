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

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.accounting import gdp
from dpjax.accounting._pairs import Losses

_ULP = float(np.finfo(np.float64).eps)
FREQUENCIES = 6144
_TILTS = 1.5 ** np.arange(-14.0, 66.0)
# Log of the largest (1 − e^{−y}) e^{−λy} over y: by how much δ is below E[e^{λ(Y−ε)}].
_MARKOV = _TILTS * np.log(_TILTS) - (1 + _TILTS) * np.log1p(_TILTS)
_NEGLIGIBLE = 14.0  # −log of a relative error in δ that may be added on purpose
_ROUNDING = 1e-11  # about the bound on rounding, relative to what is not in the atom


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
    """ĝ on the line without its atom, relative to e^K, and bounds on the errors.

    Frequency t_j is in row j // fine and column j % fine; those but t = 0 count twice.

    Attributes:
      tilt: f[] each.
      log_mass: K(λ).
      variance: of the Gaussian loss in all of it.
      real, imaginary: of ĝ(t_j) e^{−K}, f[blocks, fine].
      error: in all of their sum, f[].
      scale: of e^K, relatively, f[].
      lost: the probability of an infinite loss, f[].
    """

    tilt: Tilt
    log_mass: jax.Array
    variance: jax.Array
    real: jax.Array
    imaginary: jax.Array
    error: jax.Array
    scale: jax.Array
    lost: jax.Array


class Cumulants(NamedTuple):
    """What decides where to integrate, at each of _TILTS.

    Attributes:
      log_mass: K(λ).
      log_touched: log of e^K Σ E[min(1, (1 + λ)|loss|)], to which rounding is relative.
    """

    log_mass: jax.Array
    log_touched: jax.Array


def _log_sum(losses: Losses, rate: jax.Array) -> jax.Array:
    """Log Σ mass e^{λ loss} over the last axis."""
    exponent = losses.log_mass + rate * losses.loss
    top = jax.lax.stop_gradient(jnp.max(exponent, axis=-1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(exponent - top), axis=-1)) + top[..., 0]


def cumulants(parts: Parts, variance: jax.Array) -> Cumulants:
    """K at each of _TILTS, and how much of e^K is not at zero."""
    total, touched = variance * (_TILTS * _TILTS + _TILTS) / 2, jnp.zeros(_TILTS.size)
    for losses, count in parts:

        def one(rate: jax.Array, x: Losses = losses) -> tuple[jax.Array, jax.Array]:
            log_sum = _log_sum(x, rate)
            weight = jnp.exp(x.log_mass + rate * x.loss - log_sum)
            away = jnp.minimum((1 + rate) * jnp.abs(x.loss), 1.0)
            return log_sum, jnp.sum(weight * away)

        log_sum, away = jax.lax.map(one, jnp.asarray(_TILTS))
        total += count * log_sum
        touched += count * away
    return Cumulants(total, total + jnp.log(jnp.maximum(touched, 1e-300)))


def markov_epsilon(cumulants: Cumulants, log_delta: jax.Array) -> jax.Array:
    """An upper bound on ε(δ), by Markov's inequality."""
    exponent = cumulants.log_mass + _MARKOV - log_delta
    return jnp.maximum(jnp.min(exponent / _TILTS), 0.0)


def markov_log_delta(cumulants: Cumulants, epsilon: jax.Array) -> jax.Array:
    """An upper bound on log δ(ε), by Markov's inequality."""
    return jnp.min(cumulants.log_mass + _MARKOV - _TILTS * epsilon)


def choose(
    cumulants: Cumulants,
    variance: jax.Array,
    epsilon: tuple[jax.Array, jax.Array],
    log_delta: jax.Array,
    frequencies: int,
) -> Tilt:
    """Where to integrate for ε in an interval, at whose upper end δ(ε) is about δ."""
    low, high = epsilon
    rates, total = jnp.asarray(_TILTS), cumulants.log_mass
    # −log of what is negligible, relative to e^K.
    small = _NEGLIGIBLE + jnp.maximum(total - rates * high - log_delta, 0.0)
    # By Markov's inequality with rate λ', neighbours at distance L are negligible from
    # (K(λ') − K(λ) + small) / (λ' − λ) on, for λ' on either side.
    rise = total[None] - total[:, None] + small[:, None]
    gap = rates[None] - rates[:, None]

    def nearest(gap: jax.Array) -> jax.Array:
        reach = jnp.where(gap > 0, rise / jnp.where(gap > 0, gap, 1.0), jnp.inf)
        return jnp.min(reach, axis=1)

    below = jnp.minimum(nearest(-gap), (small - total) / rates)
    period = jnp.maximum(nearest(gap) - low, below + high) + 2 / rates
    # The Gaussian part multiplies the last term by e^{-small}, and δ by about e^{cost},
    # felt where δ is decided: at λ, or where Markov's inequality is best.
    needed = small * 2 * (period / (2 * np.pi * frequencies)) ** 2
    exponent = total + _MARKOV - rates * high
    saddle = jnp.max(jnp.where(exponent <= jnp.min(exponent), rates, 0.0))
    steepest = jnp.maximum(rates, saddle)
    rounding = _ROUNDING * jnp.exp(cumulants.log_touched - rates * high - log_delta)
    cost = steepest * (1 + steepest) * needed + rounding
    best = cost <= jnp.min(cost)

    def chosen(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(best, x, 0.0))

    damping = jnp.maximum(chosen(needed) - variance, 0.0)
    return Tilt(chosen(rates), chosen(period), damping)


def _turns(angle: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Real and imaginary part of e^{ikα} − 1 for k < count, to count roundings."""
    half = jnp.sin(angle / 2)
    x, y = -2 * half * half, jnp.sin(angle)

    def turn(point: tuple[jax.Array, jax.Array], _: None):
        a, b = point
        return (a + x + (a * x - b * y), b + y + (a * y + b * x)), point

    start = jnp.zeros_like(angle), jnp.zeros_like(angle)
    return jax.lax.scan(turn, start, length=count)[1]


def _fine(frequencies: int) -> int:
    """How many frequencies are in a row, t = τ (i + fine k) with i < fine."""
    return 2 ** (frequencies.bit_length() // 2)


def _wave(losses: Losses, rate: jax.Array, step: jax.Array, frequencies: int):
    """Log E[e^{λY}], then log |φ|, arg φ, and the error of φ, for one mechanism.

    φ(t_j) is E[e^{(λ + it_j)Y}] relative to E[e^{λY}]. By the addition theorem φ − 1 is
    one product of matrices and two of a matrix and a vector.
    """
    log_sum = _log_sum(losses, rate)
    weight = jnp.exp(losses.log_mass + rate * losses.loss - log_sum)
    fine = _fine(frequencies)
    blocks = frequencies // fine
    tables = []
    for unit, count in (step, fine), (step * fine, blocks):
        cos, sin = _turns(unit * losses.loss, count)
        reach = jnp.minimum(
            jnp.outer(unit * np.arange(count), jnp.abs(losses.loss)), 2.0
        )
        tables.append((cos, sin, reach @ weight))
    (near_cos, near_sin, near), (cos, sin, far) = tables
    product = jnp.einsum(
        "am,bm->ab",
        jnp.concatenate([cos, sin]),
        weight[None] * jnp.concatenate([near_cos, near_sin]),
        precision="highest",
    )
    (cc, cs), (sc, ss) = (jnp.split(rows, 2, 1) for rows in jnp.split(product, 2))
    real = cc - ss + (cos @ weight)[:, None] + (near_cos @ weight)[None]
    imaginary = sc + cs + (sin @ weight)[:, None] + (near_sin @ weight)[None]
    squared = 2 * real + real * real + imaginary * imaginary  # |φ|² − 1
    long = squared > -0.5
    direct = jnp.maximum((1 + real) ** 2 + imaginary**2, 1e-280)
    log_abs = jnp.where(
        long,
        jnp.log1p(jnp.where(long, squared, 0.0)),
        jnp.log(jnp.where(long, 1.0, direct)),
    )
    # Each sum over losses of |e^{itY} − 1| is at most this.
    touched = 2 * (near[None] + far[:, None])
    frequency = rate + step * np.arange(frequencies).reshape(blocks, fine)
    angles = frequency * jnp.sum(weight * jnp.abs(losses.loss))
    relative = losses.error + _ULP * (4 * losses.loss.size + 1024)
    error = touched * relative + 8 * _ULP * angles
    return log_sum, log_abs / 2, jnp.arctan2(imaginary, 1 + real), error


def spectrum(
    parts: Parts, variance: jax.Array, tilt: Tilt, frequencies: int
) -> Spectrum:
    """ĝ for mechanisms in one direction, each with a count, and a Gaussian variance."""
    rate, step = tilt.rate, 2 * np.pi / tilt.period
    index = np.arange(frequencies).reshape(-1, _fine(frequencies))
    frequency = step * index
    variance = variance + tilt.variance
    gaussian, discrete = variance * (rate * rate + rate) / 2, jnp.zeros(())
    grow, turn, log_upper, relative = (jnp.zeros(index.shape) for _ in range(4))
    lost, scale = jnp.zeros(()), jnp.zeros(())
    for losses, count in parts:
        log_sum, log_abs, angle, error = _wave(losses, rate, step, frequencies)
        discrete += count * log_sum
        grow += count * log_abs
        turn += count * angle
        # A product of powers, each factor off by at most its error.
        upper = jnp.exp(log_abs) + error
        log_upper += count * jnp.log(upper)
        relative += count * error / upper
        lost += count * losses.lost
        scale += count * (losses.error + 2 * losses.loss.size * _ULP)
    # e^{grow + i turn} less the atom's share, which is e^{−K} without the Gaussian's K.
    half = jnp.sin(turn / 2)
    others = -jnp.expm1(-discrete)
    real = jnp.expm1(grow) * jnp.cos(turn) - 2 * half * half + others
    imaginary = jnp.exp(grow) * jnp.sin(turn)
    error = jnp.exp(log_upper) * (relative + 8 * _ULP * (jnp.abs(grow) + jnp.abs(turn)))
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
    error += _ULP * (64 + 4 * jnp.abs(phase)) * parts_of
    # Σ_{j ≥ J} 2 e^{−μ²t²/2} / t², with Σ_{j ≥ J} j⁻² <= 1 / (J − 1), and the atom's.
    last = step * frequencies
    tail = 4 * jnp.exp(-variance * last**2 / 2) / (step**2 * (frequencies - 1))
    return Spectrum(
        tilt,
        gaussian + discrete,
        variance,
        real * cos - imaginary * sin,
        real * sin + imaginary * cos,
        jnp.sum(size * error) + tail,
        scale,
        lost,
    )


def _atom(wave: Spectrum, epsilon: jax.Array) -> jax.Array:
    """Σ_k g(ε + kL) e^{−K} for the Gaussian loss alone, from above."""
    rate, period = wave.tilt.rate, wave.tilt.period
    deviation = jnp.sqrt(wave.variance)

    def log_term(k: int) -> jax.Array:
        at = epsilon + k * period
        log_delta = gdp._log_delta(deviation, at)
        size = rate * at + jnp.abs(wave.log_mass) + jnp.abs(log_delta)
        return rate * at - wave.log_mass + log_delta + 8 * _ULP * size

    here, first, second = (log_term(k) for k in (0, 1, 2))
    # δ is log-concave, so that terms fall faster and faster; and it is at most 1.
    falls = second < first
    ratio = jnp.where(falls, jnp.exp(jnp.where(falls, second - first, 0.0)), 0.0)
    above = jnp.where(falls, jnp.exp(first) / (1 - ratio), jnp.inf)
    first = jnp.exp(rate * (epsilon - period) - wave.log_mass)
    below = first * (1 + 64 * _ULP) / -jnp.expm1(-rate * period)
    return jnp.exp(here) + above + below


def log_delta(wave: Spectrum, epsilon: jax.Array) -> jax.Array:
    """Log of an upper bound on δ(ε)."""
    rate, period = wave.tilt.rate, wave.tilt.period
    blocks, fine = wave.real.shape
    angle = 2 * np.pi / period * epsilon
    near, far = angle * np.arange(fine), angle * fine * np.arange(blocks)
    cos, sin = jnp.cos(near), jnp.sin(near)
    rows = wave.real @ cos + wave.imaginary @ sin
    across = wave.imaginary @ cos - wave.real @ sin
    total = rows @ jnp.cos(far) + across @ jnp.sin(far)
    # Of the angles, and of the sum.
    size = jnp.abs(wave.real) + jnp.abs(wave.imaginary)
    angles = jax.lax.stop_gradient(near[None] + far[:, None])
    rounding = _ULP * jnp.sum(size * (2 * (fine + blocks) + 8 * angles))
    exponent = wave.log_mass - rate * epsilon
    scale = _ULP * (16 + 4 * (jnp.abs(wave.log_mass) + rate * jnp.abs(epsilon)))
    total = (total + wave.error + rounding) / period + _atom(wave, epsilon)
    return jnp.logaddexp(
        jnp.log(jnp.maximum(total, 1e-300)) + exponent + scale + wave.scale,
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
