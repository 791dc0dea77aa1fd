"""Where to integrate for δ(ε) and ε(δ) of composed losses, and about what they are.

Nothing here has to be right but Markov's inequality: a poor choice makes bounds loose,
never too small.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import SMALL
from dpjax.accounting._numerics.gaussian import LOG_SQRT_2PI
from dpjax.accounting._numerics.pld.pairs import DiscreteLosses

_TILTS = 1.5 ** np.arange(-14.0, 66.0)
_GAPS = _TILTS[None] - _TILTS[:, None]
_NEGLIGIBLE = 14.0  # −log of a relative error in δ that may be added on purpose
_ROUNDING = 2e-11  # about (1 + λ) times the bound on rounding, where not in the atom
SIDE = 80  # of the square in which frequencies are
FREQUENCIES = SIDE**2

Parts = Sequence[
    tuple[DiscreteLosses, jax.Array]
]  # mechanisms in one direction, and counts


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


class Cumulants(NamedTuple):
    """What decides where to integrate, at each of _TILTS.

    Attributes:
      log_mass: K(λ).
      mean: K′(λ), the mean of what is tilted.
      variance: K″(λ), its variance.
      log_touched: log of e^K Σ E[min(1, (1 + λ)|loss|)], to which rounding is relative.
    """

    log_mass: jax.Array
    mean: jax.Array
    variance: jax.Array
    log_touched: jax.Array


def log_sum(losses: DiscreteLosses, rate: jax.Array) -> jax.Array:
    """Log Σ mass e^{λ loss} over the last axis."""
    exponent = losses.log_mass + rate * losses.loss
    top = jax.lax.stop_gradient(jnp.max(exponent, axis=-1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(exponent - top), axis=-1)) + top[..., 0]


def log_markov(rate: jax.Array) -> jax.Array:
    """Log of the largest (1 − e^{−y}) e^{−λy} over y, from which E[e^{λ(Y−ε)}] is δ."""
    return -rate * jnp.log1p(1 / rate) - jnp.log1p(rate)


def cumulants(parts: Parts, variance: jax.Array) -> Cumulants:
    """K at each of _TILTS, its derivatives, and how much of e^K is not at zero."""
    rates = jnp.asarray(_TILTS)
    log_mass, mean = variance * (rates * rates + rates) / 2, variance * (rates + 0.5)
    spread, touched = jnp.full_like(rates, variance), jnp.zeros_like(rates)
    for losses, count in parts:

        def one(rate: jax.Array, x: DiscreteLosses = losses) -> jax.Array:
            total = log_sum(x, rate)
            weight = jnp.exp(x.log_mass + rate * x.loss - total)
            middle = jnp.sum(weight * x.loss)
            away = jnp.sum(weight * jnp.minimum((1 + rate) * jnp.abs(x.loss), 1.0))
            square = jnp.sum(weight * (x.loss - middle) ** 2)
            return jnp.stack([total, middle, square, away])

        each = count * jax.lax.map(one, rates)
        log_mass, mean = log_mass + each[:, 0], mean + each[:, 1]
        spread, touched = spread + each[:, 2], touched + each[:, 3]
    log_touched = log_mass + jnp.log(jnp.maximum(touched, SMALL))
    return Cumulants(log_mass, mean, spread, log_touched)


def _log_share(cumulants: Cumulants) -> jax.Array:
    """Log of about E[e^{−λX} (1 − e^{−X})₊], were X Gaussian with mean zero.

    That is a difference of two of Mills' ratios, each about 1 / (x + 0.8).
    """
    rates, deviation = jnp.asarray(_TILTS), jnp.sqrt(cumulants.variance) + SMALL
    share = (rates * deviation + 0.8) * ((1 + rates) * deviation + 0.8)
    return jnp.log(deviation) - jnp.log(share) - LOG_SQRT_2PI


def _minimum(values: jax.Array) -> jax.Array:
    """The least at any rate: two axes, as XLA makes two programs of a long one."""
    return jnp.min(values.reshape(8, -1))


def _values_at_minimum(key: jax.Array, *values: jax.Array) -> jax.Array:
    """The values where the key is least, the largest of them if it is in two places."""
    best = (key <= _minimum(key))[None]
    chosen = jnp.where(best, jnp.stack(values), -jnp.inf)
    return jnp.max(chosen.reshape(len(values), 8, -1), axis=(1, 2))


def estimate_epsilon(cumulants: Cumulants, log_delta: jax.Array) -> jax.Array:
    """About ε(δ), by the parabola of K at the rate that suits best."""
    log_mass, mean, variance, _ = cumulants
    rates, variance = jnp.asarray(_TILTS), variance + SMALL
    excess = log_mass - rates * mean + _log_share(cumulants) - log_delta
    # Of u²/2K″ + λu = excess, with u the distance from the mean.
    root = jnp.sqrt(jnp.maximum(rates * rates + 2 * excess / variance, 0.0))
    (about,) = _values_at_minimum(jnp.abs(excess), mean + 2 * excess / (rates + root))
    return jnp.clip(about, 0.0, markov_epsilon(cumulants, log_delta))


def markov_epsilon(cumulants: Cumulants, log_delta: jax.Array) -> jax.Array:
    """ε(δ) by Markov's inequality, where no loss is infinite."""
    rates = jnp.asarray(_TILTS)
    exponent = cumulants.log_mass + log_markov(rates) - log_delta
    return jnp.maximum(_minimum(exponent / rates), 0.0)


def estimate_log_delta(cumulants: Cumulants, epsilon: jax.Array) -> jax.Array:
    """About log δ(ε), by the parabola of K at the rate that suits best."""
    log_mass, mean, variance, _ = cumulants
    rates = jnp.asarray(_TILTS)
    far = (epsilon - mean) ** 2 / (2 * (variance + SMALL))
    about = log_mass - rates * epsilon - far + _log_share(cumulants)
    markov = _minimum(log_mass + log_markov(rates) - rates * epsilon)
    (about,) = _values_at_minimum(far, about)
    return jnp.minimum(about, jnp.minimum(markov, 0.0))


def choose(
    cumulants: Cumulants,
    variance: jax.Array,
    epsilon: jax.Array,
    log_delta: jax.Array,
) -> Tilt:
    """Where to integrate for an ε at which δ(ε) is about δ."""
    rates, total = jnp.asarray(_TILTS), cumulants.log_mass
    # −log of what is negligible, relative to e^K.
    small = _NEGLIGIBLE + jnp.maximum(total - rates * epsilon - log_delta, 0.0)
    # By Markov's inequality with rate λ', neighbours at distance L are negligible from
    # (K(λ') − K(λ) + small) / (λ' − λ) on, for λ' on either side.
    rise = total[None] - total[:, None] + small[:, None]
    reach = rise / np.where(_GAPS == 0, 1.0, np.abs(_GAPS))
    above, below = (
        jnp.min(jnp.where(side > 0, reach, jnp.inf), axis=1) for side in (_GAPS, -_GAPS)
    )
    below = jnp.minimum(below, (small - total) / rates)
    period = jnp.maximum(above - epsilon, below + epsilon) + 2 / rates
    # The Gaussian part multiplies the last term by e^{-small}, and δ by about e^{cost},
    # felt where δ is decided: at λ, or where Markov's inequality is best (or enough).
    needed = small * 2 * (period / (2 * np.pi * FREQUENCIES)) ** 2
    exponent = total + log_markov(rates) - rates * epsilon
    enough = exponent <= jnp.maximum(_minimum(exponent), log_delta)
    steepest = jnp.maximum(rates, _minimum(jnp.where(enough, rates, jnp.inf)))
    touched = jnp.exp(cumulants.log_touched - rates * epsilon - log_delta)
    rounding = _ROUNDING / (1 + rates) * touched
    cost = steepest * (1 + steepest) * needed + rounding
    rate, period, needed = _values_at_minimum(cost, rates, period, needed)
    return Tilt(rate, period, jnp.maximum(needed - variance, 0.0))
