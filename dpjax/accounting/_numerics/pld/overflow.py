"""The dominating pair of a Poisson-sampled step whose batch may overflow.

Two neighbouring data sets differ in one example, the differing example. Let n be the
number of examples, q the sampling rate and b the capacity of a batch. Of the other
examples, D ~ Binomial(n − 1, q) are sampled. The other examples fill the batch with
probability p = P[D >= b], which does not depend on the differing example. If they do
not fill the batch, the step is an ordinary Poisson-sampled step. If they do, the
differing example takes part with probability r = q E[b / (D + 1) | D >= b]. In that
case it displaces another example, so that the sum of gradients moves by at most two
clip norms. docs/accounting.md has the proof.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln

from dpjax._core.float64 import SMALL
from dpjax._core.searches import bisect
from dpjax.accounting._numerics.gaussian import LOG_SQRT_2PI, gauss_rule
from dpjax.accounting._numerics.pld import pairs

_NODES, _WEIGHTS = gauss_rule(16, panels=8)
_VANISHED = 45.0  # the integral stops where the integrand is e^{−45} of its maximum
_HALVINGS = 60
# The relative error of a tail probability above 1e-300. For such a tail the error of
# k log(k / nq) is about 1e-16 times n^(1/2) times 40, and every other factor is known
# to a few units in the last place.
_ERROR = 1e-8


def _stirling(n: jax.Array) -> jax.Array:
    """The log of n! minus Stirling's approximation of it, for n >= 1."""
    # The series in 1/n is precise only for large n; the direct difference would cancel
    # there. Each form gets arguments of its own range, so that both stay finite.
    large = n > 15
    m = jnp.where(large, n, 16.0)
    square = 1 / (m * m)
    series = (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680))) / m
    k = jnp.where(large, 1.0, n)
    direct = gammaln(k + 1) - (k + 0.5) * jnp.log(k) + k - LOG_SQRT_2PI
    return jnp.where(large, series, direct)


def _log_pmf(k: jax.Array, n: jax.Array, rate: jax.Array) -> jax.Array:
    """The log of P[Binomial(n, q) = k] for 1 <= k <= n, where q is the rate.

    Reference: Loader (2000).
    """

    def deviance(x: jax.Array, mean: jax.Array) -> jax.Array:
        # x log(x / mean) + mean − x. Near the mean, log1p avoids the cancellation.
        off = (mean - x) / x
        near = jnp.abs(off) < 0.5
        ratio = jnp.log1p(jnp.where(near, off, 0.0))
        return x * (off - jnp.where(near, ratio, jnp.log(mean / x)))

    rest = n - k
    inner = rest > 0
    rest = jnp.where(inner, rest, 1.0)
    log_pmf = _stirling(n) - _stirling(k) - _stirling(rest)
    log_pmf = log_pmf - deviance(k, n * rate) - deviance(rest, n * (1 - rate))
    log_pmf = log_pmf - jnp.log(2 * np.pi * k * rest / n) / 2
    return jnp.where(inner, log_pmf, n * jnp.log(rate))


def _small_tail(k: jax.Array, n: jax.Array, rate: jax.Array) -> jax.Array:
    """P[Binomial(n, q) >= k] for k >= (n + 1) q, with a small relative error.

    q is the rate. The probability is k P[Binomial(n, q) = k] times the integral over
    t > 0 of exp(−kt) ((1 − q e⁻ᵗ) / (1 − q))^(n − k). The log of that integrand is
    concave and decreasing.
    """
    odds = rate / (1 - rate)

    def exponent(t: jax.Array) -> jax.Array:
        return (n - k) * jnp.log1p(-odds * jnp.expm1(-t)) - k * t

    def is_negligible(t: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(exponent(t)) < -_VANISHED

    # The upper limit of the integral only truncates it, so it has no derivative. The
    # factor ((1 − q e⁻ᵗ) / (1 − q))^(n − k) is at most (1 − q)^(k − n), hence top.
    top = jax.lax.stop_gradient((_VANISHED - (n - k) * jnp.log1p(-rate)) / k)
    end = bisect(is_negligible, jnp.zeros_like(top), top, _HALVINGS)
    area = end * jnp.sum(_WEIGHTS * jnp.exp(exponent(end * _NODES)))
    return k * area * jnp.exp(_log_pmf(k, n, rate))


def upper_tail(k: jax.Array, n: jax.Array, rate: jax.Array) -> jax.Array:
    """P[Binomial(n, q) >= k], f[], for integers k, n >= 1 and the rate q.

    The relative error is at most the constant _ERROR for probabilities above 1e-300.
    """
    inside = (k <= n) & (rate > 0) & (rate < 1)
    certain = (k <= n) & (rate >= 1)
    k, n, rate = (jnp.where(inside, x, y) for x, y in ((k, 1.0), (n, 2.0), (rate, 0.5)))
    # With X ~ Binomial(n, q), P[X < k] is P[n − X >= n − k + 1], and n − X is
    # Binomial(n, 1 − q). The integral is taken of the smaller of the two tails.
    rare = k >= (n + 1) * rate
    least, share = jnp.where(rare, k, n - k + 1), jnp.where(rare, rate, 1 - rate)
    tail = _small_tail(least, n, share)
    tail = jnp.where(rare, tail, 1 - tail)
    return jnp.where(inside, tail, jnp.where(certain, 1.0, 0.0))


def truncated_poisson(event: Any, tail: jax.Array) -> pairs.DiscreteLosses:
    """The losses of a Poisson-sampled step whose batch may overflow.

    Two neighbouring data sets differ in one example. Whether the other examples fill
    the batch does not depend on this example. The bound may therefore assume that the
    attacker knows whether they fill it.

    Let p be the probability that the differing example is in a batch that overflows. If
    p is at most `tail`, the mass that each step may move to an infinite loss, the bound
    replaces the loss by an infinite loss with probability p. The bound stays valid: a
    full batch without the differing example reveals nothing about it, and a step
    without overflow reveals at least as much. If max_batch_size is at least
    num_examples, p is 0.
    """
    pair = pairs.poisson(event, tail)  # the losses without overflow
    n, b = event.num_examples, event.max_batch_size
    mu, rate = 1 / event.noise_multiplier, event.sampling_rate
    full = upper_tail(b, n - 1, rate)
    # The probability that the example is in a batch that overflows. The margin exceeds
    # the errors of both tails, so that the ratio both / full errs upwards as well.
    both = upper_tail(b + 1, n, rate) * b / n * (1 + 4 * _ERROR)
    # This probability may underflow, but it is zero only if all examples fit.
    both = jnp.where(b < n, jnp.maximum(both, SMALL), 0.0)
    rare = both <= tail
    taken = jnp.clip(both / jnp.maximum(full, SMALL), SMALL, rate)
    # In the rare case the second pair gets no mass; the rate keeps its losses finite.
    moved = pairs.fixed_size(2 * mu, jnp.where(rare, rate, taken), tail)
    usual = jnp.where(rare, 1.0, jnp.maximum(1 - full * (1 - _ERROR), SMALL))
    full = jnp.clip(full * (1 + _ERROR), SMALL, 1.0)
    log_full = jnp.where(rare, -jnp.inf, jnp.log(full))

    def join_columns(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.concatenate([x, jnp.broadcast_to(y, (len(x), y.shape[1]))], axis=1)

    # Each pair has its own relative error. The inversion weights masses by e^{λ loss},
    # which may favour the pair with less mass, so the larger error holds for both.
    error = jnp.maximum(pair.error, jnp.where(rare, 0.0, moved.error))
    return pairs.DiscreteLosses(
        join_columns(pair.loss, moved.loss),
        join_columns(pair.log_mass + jnp.log(usual), moved.log_mass + log_full),
        usual * pair.lost + jnp.where(rare, both, full * moved.lost),
        error,
    )
