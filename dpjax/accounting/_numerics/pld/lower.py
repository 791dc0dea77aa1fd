"""Lower bounds on δ(ε) and ε(δ) of composed events, for numbers that are not traced.

The losses of the events are `mechanisms.lower_losses`. Let Y be the sum of these losses
and of the losses of all Gaussian mechanisms, and f(y) = (1 − e^{ε − y})₊, so that δ(ε)
= E f(Y). The inversion adds a Gaussian loss G ~ N(v/2, v) to Y. For any number c, f(Y)
is at least f(Y + G − c) wherever G <= c, because f increases:

    δ(ε) >= E f(Y + G − c) − E[f(Y + G − c); G > c].

The first term is δ(ε + c) of Y + G. `inversion` computes the first term, but with a
bounded error and with additional terms at ε + c + kL, for k ≠ 0 and the period L.
Markov's inequality with the tilt λ bounds the second term. Markov's inequality with
other tilts bounds the additional terms.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr

from dpjax._core.float64 import SMALL, ULP
from dpjax._core.searches import bisect
from dpjax.accounting import events
from dpjax.accounting._numerics import gaussian
from dpjax.accounting._numerics.pld import composition, inversion, mechanisms, tilt
from dpjax.accounting._numerics.pld.pairs import upper_tail
from dpjax.accounting._numerics.pld.tilt import TILTS, Cumulants, Parts, Tilt

_HALVINGS = 40
# The ε at which the search for a lower bound starts, divided by the upper bound.
_FRACTIONS = 1 - np.exp2(-np.arange(21.0))
# −log of the second term of the bound, relative to δ: about a thousandth.
_SMALL = 7.0
# A relative margin for the rounding of a sum of four terms and of bounds on them.
_MARGIN = 1e-9


def _log_gaussian(variance: jax.Array, epsilon: jax.Array) -> jax.Array:
    """A lower bound on log δ(ε) of a Gaussian mechanism with μ² = variance."""
    some = variance > 0
    mu = jnp.sqrt(jnp.where(some, variance, 1.0))
    upper = gaussian.log_delta(mu, epsilon)
    # The error is at least twice the bound that `log_delta` adds.
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    error = 64 + jnp.abs(upper) + 2 * jnp.abs(jnp.log(mu))
    error = 4 * ULP * (error + 4 * (2 + jnp.abs(a)) * (2 + b))
    return jnp.where(some, upper - error, -jnp.inf)


def _one_step(parts: Parts, epsilon: jax.Array) -> jax.Array:
    """A lower bound on δ(ε): the largest δ(ε) of a single step.

    `parts` has the discrete losses and the number of steps of each mechanism.
    """
    largest = jnp.zeros(())
    for losses, count in parts:
        over = -jnp.expm1(jnp.minimum(epsilon - losses.loss, 0.0))
        one = jnp.sum(jnp.exp(losses.log_mass) * over)
        one = one * (1 - losses.error - 2 * losses.loss.size * ULP)
        largest = jnp.maximum(largest, jnp.where(count >= 1, one, 0.0))
    return largest


def _other_terms(
    cumulants: Cumulants, where: Tilt, log_mass: jax.Array, at: jax.Array
) -> jax.Array:
    """A bound on the terms that the inversion adds to g(ε) = e^{λε} δ(ε).

    By Poisson's summation, these terms are g(ε + kL) for all integers k except 0.
    Markov's inequality bounds these terms. The result is divided by e^{K(λ)}.

    Args:
      cumulants: K at several tilts, without the Gaussian variance that `where` adds.
        K(λ) is log E e^{λY} of the composed loss Y.
      where: the tilt λ, the period L and the added Gaussian variance.
      log_mass: K(λ) with the added variance, f[].
      at: ε, f[].
    """
    rate, period, added = where
    rates = jnp.asarray(TILTS)
    total = cumulants.log_mass + added * (rates * rates + rates) / 2 - log_mass
    total += tilt.log_markov(rates)
    # With rate λ', the terms above ε are a geometric series with ratio e^{−(λ' − λ)L},
    # and so are the terms below ε if λ' < λ. δ <= 1 gives a third series.
    gap = rates - rate
    apart = jnp.where(gap == 0, 1.0, jnp.abs(gap))
    series = -jnp.log(-jnp.expm1(-apart * period))
    above = jnp.where(gap > 0, total - gap * (at + period) + series, jnp.inf)
    below = jnp.where(gap < 0, total - gap * (at - period) + series, jnp.inf)
    certain = rate * (at - period) - log_mass - jnp.log(-jnp.expm1(-rate * period))
    return jnp.exp(jnp.min(above)) + jnp.exp(jnp.minimum(jnp.min(below), certain))


def _delta_of(parts: Parts, variance: jax.Array, about: tuple[jax.Array, jax.Array]):
    """A function from ε to a lower bound on δ(ε) of composed losses.

    `parts` has the discrete losses and the number of steps of each mechanism, and
    variance is the variance of a Gaussian loss. `about` is a pair of an ε and an
    estimate of log δ(ε). The bound is tight near this ε.
    """

    def simple(epsilon: jax.Array) -> jax.Array:
        gauss = jnp.exp(_log_gaussian(variance, epsilon))
        return jnp.maximum(_one_step(parts, epsilon), gauss)

    if not parts:
        return simple
    cumulants = tilt.cumulants(parts, variance)
    where = tilt.choose(cumulants, variance, *about)
    wave = inversion.spectrum(parts, variance, where)
    rate, added = where.rate, where.variance
    markov = tilt.log_markov(rate)
    # The second term is e^{K − λ(ε + c)} times the maximum of Markov's inequality and
    # times Φ(−z), with c = v/2 + λv + z√v. z is chosen such that this term is small
    # compared with δ.
    epsilon, log_delta = about
    room = log_delta - wave.log_mass + rate * epsilon - markov
    z = jnp.sqrt(2 * (_SMALL + jnp.maximum(-room, 0.0)))
    shift = added * (0.5 + rate) + z * jnp.sqrt(added)
    beyond = jnp.where(added > 0, jnp.exp(markov) * ndtr(-z), 0.0)

    def of(epsilon: jax.Array) -> jax.Array:
        at = epsilon + shift
        total, error = inversion.sum_waves(wave, at)
        atom = _log_gaussian(wave.variance, at) + rate * at - wave.log_mass
        size = jnp.abs(wave.log_mass) + rate * at
        atom = jnp.exp(atom - 16 * ULP * size)
        less = error / where.period + beyond
        less += _other_terms(cumulants, where, wave.log_mass, at)
        total = total / where.period + atom
        total = total - less * (1 + _MARGIN) - ULP * 64 * (jnp.abs(total) + atom)
        exponent = wave.log_mass - rate * at - wave.scale - ULP * (64 + 8 * size)
        # NaN occurs if losses overflow, and is replaced by the bound 0.
        found = jnp.exp(jnp.log(jnp.maximum(total, SMALL)) + exponent)
        found = jnp.where(total > 0, found, 0.0)
        return jnp.maximum(jnp.where(jnp.isnan(found), 0.0, found), simple(epsilon))

    return of


def _compose(
    steps: Sequence[events.Repeated], epsilon: jax.Array, delta: jax.Array
) -> tuple[Parts, Callable[[Parts], Callable[[jax.Array], jax.Array]]]:
    """The discrete losses of composed events, and the lower bound on δ(ε) from them.

    The losses are truncated for a δ of about the size `delta`, and the bound is tight
    near `epsilon`, where δ(ε) is about `delta`. The second result maps the discrete
    losses for one order of the data sets to a function from ε to the bound.
    """
    parts, variance = composition.compose(steps, delta, mechanisms.lower_losses)
    finite, distance = jnp.zeros(2)
    for losses, count in parts:
        finite += count * jnp.log1p(-losses.lost[0])
    # Each infinite loss is independent of the others, hence 1 − Π (1 − δ_i).
    lost = -jnp.expm1(finite) * (1 - _MARGIN)
    # A bound on the total variation distance between the events and these losses.
    for event, count in ((step.event, step.count) for step in steps):
        if isinstance(event, events.TruncatedPoissonGaussian):
            # A step is a step on a Poisson sample unless the sample exceeds the
            # capacity.
            n, b = jnp.asarray(event.num_examples), jnp.asarray(event.max_batch_size)
            many = upper_tail(b + 1, n, jnp.asarray(event.sampling_rate))
            distance += count * jnp.where(b < n, many * (1 + 1e-7) + SMALL, 0.0)

    def bound(parts: Parts) -> Callable[[jax.Array], jax.Array]:
        of_finite_losses = _delta_of(parts, variance, (epsilon, jnp.log(delta)))

        def of(at: jax.Array) -> jax.Array:
            far = (1 + jnp.exp(jnp.minimum(at, 700.0))) * distance * (1 + _MARGIN)
            return (of_finite_losses(at) + lost) * (1 - _MARGIN) - far

        return of

    return parts, bound


def _delta(epsilon: jax.Array, steps: Sequence[events.Repeated]) -> jax.Array:
    inside = (epsilon >= 0) & (epsilon < jnp.inf)
    at = jnp.where(inside, epsilon, 1.0)
    upper = jnp.maximum(composition.bound_delta(at, steps), composition.SMALLEST)
    parts, bound = _compose(steps, at, upper)
    found = composition.worst_direction(lambda x: jnp.maximum(bound(x)(at), 0.0), parts)
    return jnp.where(inside, jnp.minimum(found, upper), 0.0)


def _epsilon(delta: jax.Array, steps: Sequence[events.Repeated]) -> jax.Array:
    inside = (delta > 0) & (delta < 1)
    asked = jnp.where(inside, delta, 0.5)
    upper = composition.bound_epsilon(asked, steps)
    upper = jnp.where(upper < jnp.inf, upper, 1e3)
    parts, bound = _compose(steps, upper, asked)

    def search(parts: Parts) -> jax.Array:
        of = bound(parts)

        def exceeds(epsilon: jax.Array) -> jax.Array:
            return of(epsilon) > asked

        # A mechanism with δ(ε) > δ is not (ε, δ)-DP, and 0 is always a lower bound on
        # ε. Far from the tilt's ε the bound on δ may be loose. So the search starts
        # from the largest of several ε that exceeds δ, and ends below the next one.
        tried = upper * _FRACTIONS
        reached = jnp.max(jnp.where(jax.lax.map(exceeds, tried), tried, 0.0))
        above = jnp.min(jnp.where(tried > reached, tried, upper))
        return bisect(exceeds, above, reached, _HALVINGS)

    return jnp.where(inside, composition.worst_direction(search, parts), 0.0)


# Lower bounds on δ(ε) and on ε(δ) of all events composed.
delta64 = composition.for_callers(_delta, 0.0, "down")
epsilon64 = composition.for_callers(_epsilon, 0.0, "down")
