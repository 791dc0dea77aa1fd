"""The choice of a tilt for composed privacy losses, and estimates of δ(ε) and ε(δ).

A tilt has the parameters of the Fourier inversion in `inversion`: a rate λ, a period L
and an added Gaussian variance. A poor choice of a tilt, or a poor estimate, makes
bounds loose but never invalid. In this module only the bound by Markov's inequality
has to be valid.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import SMALL
from dpjax.accounting._numerics.gaussian import LOG_SQRT_2PI
from dpjax.accounting._numerics.pld.pairs import DiscreteLosses

TILTS = 1.5 ** np.arange(-14.0, 66.0)  # the candidates for λ, from 0.003 to 3e11
_GAPS = TILTS[None] - TILTS[:, None]  # λ′ − λ, for λ in rows and λ′ in columns
_NEGLIGIBLE = 14.0  # −log of a relative error in δ that is small enough to be added
_ROUNDING = 2e-11  # about 1 + λ times the relative rounding error outside the atom
SIDE = 80  # the frequencies form a square of SIDE rows and columns
FREQUENCIES = SIDE**2

# The losses of each mechanism in one direction, and its count.
Parts = Sequence[tuple[DiscreteLosses, jax.Array]]


class Tilt(NamedTuple):
    """The parameters of the Fourier inversion of a composed loss Y, f[] each.

    Attributes:
      rate: λ: the inversion uses E e^{(λ + it)Y} at real frequencies t.
      period: L: frequencies are multiples of 2π/L.
      variance: the Gaussian variance that the inversion adds to Y.
    """

    rate: jax.Array
    period: jax.Array
    variance: jax.Array


class Cumulants(NamedTuple):
    """The cumulants of the composed loss Y at each λ in the constant TILTS, f[80] each.

    K(λ) is log E e^{λY}. The tilted loss has the density of Y times e^{λY − K(λ)}.

    Attributes:
      log_mass: K(λ).
      mean: K′(λ), the mean of the tilted loss.
      variance: K″(λ), the variance of the tilted loss.
      log_rounding_scale: the log of e^{K(λ)} Σ E[min(1, (1 + λ)|x|)]. The sum is over
        all steps, and x is the tilted discrete loss of a step. The rounding errors of
        the inversion are proportional to this sum times e^{K(λ)}.
    """

    log_mass: jax.Array
    mean: jax.Array
    variance: jax.Array
    log_rounding_scale: jax.Array


def log_markov(rate: jax.Array) -> jax.Array:
    """The log of the maximum of (1 − e^{−y}) e^{−λy} over y, where λ is the rate.

    This maximum times E[e^{λ(Y−ε)}] is an upper bound on the δ(ε) of a privacy loss Y,
    by Markov's inequality.
    """
    return -rate * jnp.log1p(1 / rate) - jnp.log1p(rate)


def cumulants(parts: Parts, variance: jax.Array) -> Cumulants:
    """The `Cumulants` of discrete losses composed with a Gaussian mechanism.

    `parts` has the discrete losses and the number of steps of each mechanism, for one
    order of the data sets. The Gaussian mechanism has μ² = variance.
    """
    rates = jnp.asarray(TILTS)
    log_mass, mean = variance * (rates * rates + rates) / 2, variance * (rates + 0.5)
    spread, scale = (jnp.full_like(rates, variance), jnp.zeros_like(rates))
    for losses, count in parts:
        # A row for each rate.
        rate, loss, mass = rates[:, None], losses.loss[None], losses.log_mass[None]
        # The tilted masses are computed once for all sums.
        exponent = mass + rate * loss
        max_exponent = jnp.max(exponent, axis=1)
        weight = jnp.exp(exponent - max_exponent[:, None])
        total = jnp.sum(weight, axis=1)
        weight, total = weight / total[:, None], jnp.log(total) + max_exponent
        step_mean = jnp.sum(weight * loss, axis=1)
        deviation = weight * jnp.minimum((1 + rate) * jnp.abs(loss), 1.0)
        square = weight * (loss - step_mean[:, None]) ** 2
        log_mass, mean = log_mass + count * total, mean + count * step_mean
        spread = spread + count * jnp.sum(square, axis=1)
        scale = scale + count * jnp.sum(deviation, axis=1)
    log_rounding_scale = log_mass + jnp.log(jnp.maximum(scale, SMALL))
    return Cumulants(log_mass, mean, spread, log_rounding_scale)


def _log_expectation(cumulants: Cumulants) -> jax.Array:
    """An estimate of log E[e^{−λX} (1 − e^{−X})₊] for a Gaussian X, at each λ in TILTS.

    X has mean zero and the variance of the tilted loss (see `Cumulants`). With Mills'
    ratio R, the expectation is a multiple of a difference of two values of R. The
    estimate replaces R(x) by 1 / (x + 0.8).
    """
    rates, deviation = jnp.asarray(TILTS), jnp.sqrt(cumulants.variance) + SMALL
    product = (rates * deviation + 0.8) * ((1 + rates) * deviation + 0.8)
    return jnp.log(deviation) - jnp.log(product) - LOG_SQRT_2PI


def _minimum(values: jax.Array) -> jax.Array:
    """The minimum of f[80] values, one for each λ in TILTS."""
    # Two axes, because XLA compiles a reduction over one long axis into two programs.
    return jnp.min(values.reshape(8, -1))


def _values_at_minimum(key: jax.Array, *values: jax.Array) -> jax.Array:
    """The entry of each array in `values` at the index where `key` is smallest.

    The arrays are f[80], and the result has one entry for each array in `values`. In a
    tie, this entry is the largest of the entries at the tied indices.
    """
    chosen = jnp.where((key <= _minimum(key))[None], jnp.stack(values), -jnp.inf)
    return jnp.max(chosen.reshape(len(values), 8, -1), axis=(1, 2))


def estimate_epsilon(cumulants: Cumulants, log_delta: jax.Array) -> jax.Array:
    """An estimate of ε(δ), from a quadratic approximation of the log moments of Y.

    Y is the composed privacy loss. `cumulants` has K(λ) = log E e^{λY}, and K′(λ) and
    K″(λ), at each λ in the constant TILTS. The tilted loss has the density of Y
    times e^{λY − K(λ)}. For each λ, the function estimates log δ(m) at the mean m of
    the tilted loss. The approximation is around the λ at which this estimate is closest
    to log_delta. The result is at least 0 and at most `markov_epsilon`.
    """
    log_mass, mean, variance, _ = cumulants
    rates, variance = jnp.asarray(TILTS), variance + SMALL
    excess = log_mass - rates * mean + _log_expectation(cumulants) - log_delta
    # With u the distance of ε from the tilted mean, solve u²/2K″ + λu = excess.
    root = jnp.sqrt(jnp.maximum(rates * rates + 2 * excess / variance, 0.0))
    estimates = mean + 2 * excess / (rates + root)
    (estimate,) = _values_at_minimum(jnp.abs(excess), estimates)
    return jnp.clip(estimate, 0.0, markov_epsilon(cumulants, log_delta))


def markov_epsilon(cumulants: Cumulants, log_delta: jax.Array) -> jax.Array:
    """The smallest bound on ε(δ) that Markov's inequality gives at any λ in TILTS.

    `cumulants` has log E e^{λY} of the composed loss Y at each λ in the constant TILTS.
    The result is an upper bound if no loss is infinite, and is at least 0.
    """
    rates = jnp.asarray(TILTS)
    exponent = cumulants.log_mass + log_markov(rates) - log_delta
    return jnp.maximum(_minimum(exponent / rates), 0.0)


def estimate_log_delta(cumulants: Cumulants, epsilon: jax.Array) -> jax.Array:
    """An estimate of log δ(ε), from a quadratic approximation of the log moments of Y.

    Y is the composed privacy loss. `cumulants` has K(λ) = log E e^{λY}, and K′(λ) and
    K″(λ), at each λ in the constant TILTS. The tilted loss has the density of Y
    times e^{λY − K(λ)}. The approximation is around the λ at which the mean of the
    tilted loss is closest to ε, in standard deviations of the tilted loss. The result
    is at most 0, and at most the bound by Markov's inequality.
    """
    log_mass, mean, variance, _ = cumulants
    rates = jnp.asarray(TILTS)
    penalty = (epsilon - mean) ** 2 / (2 * (variance + SMALL))
    estimate = log_mass - rates * epsilon - penalty + _log_expectation(cumulants)
    markov = _minimum(log_mass + log_markov(rates) - rates * epsilon)
    (estimate,) = _values_at_minimum(penalty, estimate)
    return jnp.minimum(estimate, jnp.minimum(markov, 0.0))


def choose(
    cumulants: Cumulants, variance: jax.Array, epsilon: jax.Array, log_delta: jax.Array
) -> Tilt:
    """Choose the inversion parameters with the smallest estimated error of δ(ε).

    Args:
      cumulants: the log moments of the composed loss, at several rates λ.
      variance: the Gaussian variance that the composed loss already has, f[].
      epsilon: ε, f[].
      log_delta: an estimate of log δ(ε), f[].
    """
    rates, total = jnp.asarray(TILTS), cumulants.log_mass
    # −log of an error that is negligible, relative to e^K.
    negligible = _NEGLIGIBLE + jnp.maximum(total - rates * epsilon - log_delta, 0.0)
    # The terms at ε ± kL of Poisson's summation must be negligible. By Markov's
    # inequality with rate λ′, terms beyond (K(λ′) − K(λ) + negligible) / (λ′ − λ) are
    # negligible, for λ′ on either side of λ. The period is the smallest such distance.
    rise = total[None] - total[:, None] + negligible[:, None]
    distance = rise / np.where(_GAPS == 0, 1.0, np.abs(_GAPS))
    above, below = (
        jnp.min(jnp.where(side > 0, distance, jnp.inf), axis=1)
        for side in (_GAPS, -_GAPS)
    )
    below = jnp.minimum(below, (negligible - total) / rates)
    period = jnp.maximum(above - epsilon, below + epsilon) + 2 / rates
    # The added variance multiplies the last term of the sum by e^{−negligible}, and δ
    # by about e^{cost}. The cost counts at the rate that determines δ: λ, or the
    # rate at which Markov's inequality is tightest (or tight enough).
    added = negligible * 2 * (period / (2 * np.pi * FREQUENCIES)) ** 2
    exponent = total + log_markov(rates) - rates * epsilon
    is_tight = exponent <= jnp.maximum(_minimum(exponent), log_delta)
    steepest = jnp.maximum(rates, _minimum(jnp.where(is_tight, rates, jnp.inf)))
    scale = jnp.exp(cumulants.log_rounding_scale - rates * epsilon - log_delta)
    rounding = _ROUNDING / (1 + rates) * scale
    cost = steepest * (1 + steepest) * added + rounding
    rate, period, added = _values_at_minimum(cost, rates, period, added)
    return Tilt(rate, period, jnp.maximum(added - variance, 0.0))
