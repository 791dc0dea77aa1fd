"""Discrete pairs of distributions that are easier to tell apart than a mechanism's.

Cut the line of outcomes z into intervals. Within one, the likelihood ratio of P and Q
lies between its values at the two ends, so moving all mass to the ends, such that P and
Q keep theirs, only helps an attacker: whatever happened within the interval can be
simulated from what happens at its ends (Doroshenko et al. 2022 do this in the loss;
here the ends are even in z). That adds h²/6 to the variance of a loss that is spread
over an interval of length h: relatively (Δz)²/6, for any noise and sampling rate.

All mechanisms here are mixtures of two unit Gaussians, with loss

    x(z) = N(μz − μ²/2) [ − N(−μz − μ²/2) ],   N(v) = log(1 − q + q e^v).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf, ndtr, ndtri

from dpjax._core.float64 import SMALL, ULP

INTERVALS = 4096
# e^{2v} is far from overflow up to here.
_DIRECT = 40.0
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_NODES, _WEIGHTS = (_NODES[:, None] + 1) / 2, _WEIGHTS[:, None] / 2


class DiscreteLosses(NamedTuple):
    """Privacy losses of one mechanism, in one direction or two.

    Attributes:
      loss: f[d, m].
      log_mass: log of the first distribution's mass on each, f[d, m].
      lost: its mass on an infinite loss, f[d].
      error: a bound on the relative rounding error of each mass, f[].
    """

    loss: jax.Array
    log_mass: jax.Array
    lost: jax.Array
    error: jax.Array


def log_mixture(v: jax.Array, rate: jax.Array) -> jax.Array:
    """N(v), to rounding for rates and v of all sizes."""
    # log(1 + q (e^v − 1)) is precise unless its argument is near 0. There, and where
    # e^v or a derivative could overflow, log((1 − q) + q e^v) is taken by logaddexp:
    # its sum is far from 1 unless q is tiny, and then the larger term is precise. Each
    # form gets only its own v, because a clip has half a derivative at its ends.
    direct = (v > -1) & (v <= _DIRECT)
    near = jnp.log1p(rate * jnp.expm1(jnp.where(direct, v, 1.0)))
    mixed = rate < 1
    first = jnp.where(mixed, jnp.log1p(-jnp.where(mixed, rate, 0.5)), -jnp.inf)
    far = jnp.logaddexp(first, jnp.log(rate) + v)
    return jnp.where(direct, near, far)


def _phi(z: jax.Array) -> jax.Array:
    return jnp.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)


def _positive(rate: jax.Array) -> jax.Array:
    """The rate, with what rounds to nothing rounded up."""
    return rate + jax.lax.stop_gradient(jnp.maximum(rate, SMALL) - rate)


def _split(
    mu: jax.Array, rate: jax.Array, start: jax.Array, stop: jax.Array, *, count, mirror
):
    """Losses at count + 1 even points, the mass that P gets there, and the error.

    mirror says whether Q is P reflected, or the single Gaussian N(0, 1).
    """
    width = (stop - start) / count
    ends = start + width * np.arange(count + 1.0)

    def component(v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """N(v) at the ends, and N′(v), the second component's share, at lower ends."""
        log_ratio = log_mixture(v, rate)
        return log_ratio, jnp.exp(jnp.log(rate) + v - log_ratio)[None, :-1]

    loss, share = component(mu * ends - mu * mu / 2)
    back = jnp.zeros_like(share)
    if mirror:
        away, back = component(-mu * ends - mu * mu / 2)
        loss = loss - away

    def climb(step: jax.Array) -> jax.Array:
        """How much the loss grows when μz grows by a step from an interval's start."""
        grown = jnp.log1p(share * jnp.expm1(step))
        return grown - jnp.log1p(back * jnp.expm1(-step)) if mirror else grown

    # Doroshenko et al. (2022), https://arxiv.org/abs/2207.04380: of mass at x in
    # [a, b], the share (e^{−a} − e^{−x}) / (e^{−a} − e^{−b}) goes to the upper end, so
    # that Q's mass, P's times e^{−x}, stays as well. Here from x − a and b − a.
    inner, whole = climb(mu * width * _NODES), climb(jnp.reshape(mu * width, (1, 1)))
    moves = whole > 0
    up = jnp.expm1(-inner) / jnp.expm1(-jnp.where(moves, whole, 1.0))
    up = jnp.where(moves, jnp.minimum(up, 1.0), 1.0)
    at = ends[None, :-1] + width * _NODES
    mass = width * _WEIGHTS * ((1 - rate) * _phi(at) + rate * _phi(at - mu))
    zero = jnp.zeros(1)
    masses = jnp.concatenate([zero, jnp.sum(mass * up, axis=0)]) + jnp.concatenate(
        [jnp.sum(mass * (1 - up), axis=0), zero]
    )
    # Gauss's rule errs by 1.7e-23 (Δz)^16 f^(16), with f^(16) / f about the power 16
    # of the distance from a mean or of μ.
    sharp = width * (jnp.abs(mu) + jnp.maximum(jnp.abs(start), jnp.abs(stop)))
    error = 64 * ULP + 1e-21 * sharp**16
    return loss, masses, jax.lax.stop_gradient(error)


def tail_quantile(tail: jax.Array) -> jax.Array:
    """How far from its mean a unit Gaussian has less than tail beyond, at least 1."""
    return jax.lax.stop_gradient(jnp.maximum(-ndtri(jnp.minimum(tail, 0.5)), 1.0))


def _ends(mu: jax.Array, rate: jax.Array, tail: jax.Array) -> jax.Array:
    """Where N(0, 1), and then (1 − q) N(0, 1) + q N(μ, 1), have about the tail beyond.

    The first is below, the second above.
    """
    mu, rate = jax.lax.stop_gradient((mu, rate))
    idle, touched = tail_quantile(tail / jnp.stack([jnp.ones_like(rate), rate]))
    return jnp.stack([-idle, jnp.maximum(idle, mu + touched)])


def _beyond(mu: jax.Array, rate: jax.Array, start: jax.Array, stop: jax.Array):
    """The mass beyond the stop of (1 − q) N(0, 1) + q N(μ, 1), and before the start.

    Then those of N(0, 1). One call: special functions are slow to compile.
    """
    masses = ndtr(jnp.stack([-stop, mu - stop, start, start - mu]))
    mixed = (1 - rate) * masses[::2] + rate * masses[1::2]
    return mixed[0], mixed[1], masses[0], masses[2]


def _only_at(index: int, value: jax.Array, rest: float, count: int) -> jax.Array:
    """The value at one of count places, and the rest elsewhere."""
    return jnp.where(jnp.arange(count) == index, value, rest)


def _log(mass: jax.Array) -> jax.Array:
    return jnp.log(jnp.maximum(mass, SMALL))


def poisson(mu: jax.Array, rate: jax.Array, tail: jax.Array) -> DiscreteLosses:
    """(1 − q) N(0, 1) + q N(μ, 1) against N(0, 1), and the other way round."""
    rate = _positive(rate)
    start, stop = _ends(mu, rate, tail)
    loss, mass, error = _split(mu, rate, start, stop, count=INTERVALS, mirror=False)
    # What is beyond the ends: an infinite loss, or no less than it is.
    # Zhu, Dong and Wang (2022), Theorem 11, https://arxiv.org/abs/2106.08567: the
    # pair is (1 − q) N(0, 1) + q N(μ, 1) and N(0, 1), asked for in both orders.
    above, below, idle_above, idle_below = _beyond(mu, rate, start, stop)
    removed = _log(mass + _only_at(0, below, 0.0, loss.size))
    last = _only_at(INTERVALS, _log(idle_above), -jnp.inf, loss.size)
    return DiscreteLosses(
        jnp.stack([loss, -loss]),
        jnp.stack([removed, jnp.logaddexp(_log(mass) - loss, last)]),
        jnp.stack([above, idle_below]),
        error,
    )


def poisson_replace(mu: jax.Array, rate: jax.Array, tail: jax.Array) -> DiscreteLosses:
    """(1 − q) N(0, 1) + q N(μ, 1) against (1 − q) N(0, 1) + q N(−μ, 1)."""
    rate = _positive(rate)
    _, stop = _ends(mu, rate, tail)
    loss, mass, error = _split(mu, rate, -stop, stop, count=INTERVALS, mirror=True)
    above, below, _, _ = _beyond(mu, rate, -stop, stop)
    mass = mass + _only_at(0, below, 0.0, loss.size)
    return DiscreteLosses(loss[None], _log(mass)[None], above[None], error)


def fixed_size(mu: jax.Array, rate: jax.Array, tail: jax.Array) -> DiscreteLosses:
    """The pair whose trade-off curve is C_q(G_μ), which is its own mirror image.

    Above zero its losses are those of `poisson`; below, their mirror image with the
    masses that Q has; the rest of the mass is on zero.

    Reference: Bok, Su and Altschuler (2024), Proposition D.4.
    """
    rate = _positive(rate)
    half, (_, stop) = INTERVALS // 2, _ends(mu, rate, tail)
    loss, mass, error = _split(mu, rate, mu / 2, stop, count=half, mirror=False)
    above, _, idle_above, _ = _beyond(mu, rate, -stop, stop)
    # Bok, Su and Altschuler (2024), Proposition D.4, https://arxiv.org/abs/2403.00278:
    # the mixture's losses x above zero; below, their mirror image, masses times e^{−x}.
    last = _only_at(half, _log(idle_above), -jnp.inf, loss.size)
    mirrored = jnp.logaddexp(_log(mass) - loss, last)
    at_zero = (1 - rate) * erf(mu / np.sqrt(8))
    mass = mass + _only_at(0, at_zero, 0.0, loss.size)
    return DiscreteLosses(
        jnp.concatenate([loss, -loss])[None],
        jnp.concatenate([_log(mass), mirrored])[None],
        above[None],
        error,
    )
