"""Lower bounds on δ(ε) and ε(δ) of composed events, for numbers that are not traced.

The losses of the events are `mechanisms.lower_losses`. Let Y be the sum of these losses
and of the losses of all Gaussian mechanisms, and f(y) = (1 − e^{ε − y})₊, so that δ(ε)
= E f(Y). The inversion adds a Gaussian loss G ~ N(v/2, v) to Y. For any number c, f(Y)
is at least f(Y + G − c) wherever G <= c, because f increases:

    δ(ε) >= E f(Y + G − c) − E[f(Y + G − c); G > c].

The first term is δ(ε + c) of Y + G. The parameters of the inversion are its tilt: a
rate λ, a period L and the variance v. `inversion` computes the first term, but with a
bounded error and with additional terms at ε + c + kL, for k ≠ 0. By Markov's
inequality, a multiple of E e^{λ(Y − ε)} bounds δ(ε) for any rate λ. This inequality
with the rate of the tilt bounds the second term, and with other rates the additional
terms.
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
# The candidates for the ε at which the search starts, divided by the upper bound.
_FRACTIONS = 1 - np.exp2(-np.arange(21.0))
# −log of the second term of the bound over δ: the term is about a thousandth of δ.
_SECOND_TERM = 7.0
# A relative margin for the rounding of a sum of four terms and of bounds on them.
_MARGIN = 1e-9


def _log_gaussian(variance: jax.Array, epsilon: jax.Array) -> jax.Array:
    """A lower bound on log δ(ε) of a Gaussian mechanism with μ² = variance."""
    is_positive = variance > 0
    mu = jnp.sqrt(jnp.where(is_positive, variance, 1.0))
    upper = gaussian.log_delta(mu, epsilon)
    # The error is at least twice the bound that `log_delta` adds.
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    error = 64 + jnp.abs(upper) + 2 * jnp.abs(jnp.log(mu))
    error = 4 * ULP * (error + 4 * (2 + jnp.abs(a)) * (2 + b))
    return jnp.where(is_positive, upper - error, -jnp.inf)


def _one_step(parts: Parts, epsilon: jax.Array) -> jax.Array:
    """A lower bound on δ(ε): the largest δ(ε) of one step.

    The probability of an infinite loss is left out. `parts` has the discrete losses and
    the number of steps of each mechanism.
    """
    largest = jnp.zeros(())
    for losses, count in parts:
        excess = -jnp.expm1(jnp.minimum(epsilon - losses.loss, 0.0))
        step_delta = jnp.sum(jnp.exp(losses.log_mass) * excess)
        step_delta = step_delta * (1 - losses.error - 2 * losses.loss.size * ULP)
        largest = jnp.maximum(largest, jnp.where(count >= 1, step_delta, 0.0))
    return largest


def _other_terms(
    cumulants: Cumulants, chosen_tilt: Tilt, log_mass: jax.Array, epsilon: jax.Array
) -> jax.Array:
    """An upper bound on the sum of terms that the inversion adds to e^{λε} δ(ε).

    Let g(ε) = e^{λε} δ(ε). By Poisson's summation, the terms are g(ε + kL) for all
    integers k except 0. Markov's inequality and δ <= 1 bound their sum. The result is
    this bound divided by e^log_mass.

    Args:
      cumulants: K at several tilts, without the added Gaussian variance. K(λ) is
        log E e^{λY} of the composed loss Y.
      chosen_tilt: the tilt λ, the period L and the added Gaussian variance.
      log_mass: K(λ) with the added variance, f[].
      epsilon: ε, f[].
    """
    rate, period, added = chosen_tilt
    rates = jnp.asarray(TILTS)
    total = cumulants.log_mass + added * (rates * rates + rates) / 2 - log_mass
    total += tilt.log_markov(rates)
    # With rate λ', the terms above ε are a geometric series with ratio e^{−(λ' − λ)L},
    # and so are the terms below ε if λ' < λ. δ <= 1 gives a third series.
    gap = rates - rate
    distance = jnp.where(gap == 0, 1.0, jnp.abs(gap))
    series = -jnp.log(-jnp.expm1(-distance * period))
    above = jnp.where(gap > 0, total - gap * (epsilon + period) + series, jnp.inf)
    below = jnp.where(gap < 0, total - gap * (epsilon - period) + series, jnp.inf)
    trivial = rate * (epsilon - period) - log_mass - jnp.log(-jnp.expm1(-rate * period))
    return jnp.exp(jnp.min(above)) + jnp.exp(jnp.minimum(jnp.min(below), trivial))


def _delta_of(parts: Parts, variance: jax.Array, target: tuple[jax.Array, jax.Array]):
    """A function from ε to a lower bound on δ(ε) of composed losses.

    `parts` has the discrete losses and the number of steps of each mechanism, and
    variance is the variance of a Gaussian loss. Infinite losses do not add to the
    bound. `target` is a pair of an ε and an estimate of log δ(ε). The bound is tight
    near this ε.
    """

    def simple(epsilon: jax.Array) -> jax.Array:
        gaussian_bound = jnp.exp(_log_gaussian(variance, epsilon))
        return jnp.maximum(_one_step(parts, epsilon), gaussian_bound)

    if not parts:
        return simple
    cumulants = tilt.cumulants(parts, variance)
    chosen_tilt = tilt.choose(cumulants, variance, *target)
    wave = inversion.spectrum(parts, variance, chosen_tilt)
    rate, added = chosen_tilt.rate, chosen_tilt.variance
    markov = tilt.log_markov(rate)
    # The second term is e^{K − λ(ε + c)} times the maximum of Markov's inequality and
    # times Φ(−z), with c = v/2 + λv + z√v. z is chosen such that this term is small
    # compared with δ.
    epsilon, log_delta = target
    log_ratio = log_delta - wave.log_mass + rate * epsilon - markov
    z = jnp.sqrt(2 * (_SECOND_TERM + jnp.maximum(-log_ratio, 0.0)))
    shift = added * (0.5 + rate) + z * jnp.sqrt(added)
    second_term = jnp.where(added > 0, jnp.exp(markov) * ndtr(-z), 0.0)

    def lower_bound(epsilon: jax.Array) -> jax.Array:
        shifted = epsilon + shift
        total, error = inversion.invert(wave, shifted)
        atom = _log_gaussian(wave.variance, shifted) + rate * shifted - wave.log_mass
        size = jnp.abs(wave.log_mass) + rate * shifted
        atom = jnp.exp(atom - 16 * ULP * size)
        errors = error / chosen_tilt.period + second_term
        errors += _other_terms(cumulants, chosen_tilt, wave.log_mass, shifted)
        total = total / chosen_tilt.period + atom
        total = total - errors * (1 + _MARGIN) - ULP * 64 * (jnp.abs(total) + atom)
        exponent = wave.log_mass - rate * shifted - wave.scale - ULP * (64 + 8 * size)
        # NaN occurs if losses overflow, and is replaced by the bound 0.
        value = jnp.exp(jnp.log(jnp.maximum(total, SMALL)) + exponent)
        value = jnp.where(total > 0, value, 0.0)
        return jnp.maximum(jnp.where(jnp.isnan(value), 0.0, value), simple(epsilon))

    return lower_bound


def _prepare_bound(
    steps: Sequence[events.Repeated], epsilon: jax.Array, delta: jax.Array
) -> tuple[Parts, Callable[[Parts], Callable[[jax.Array], jax.Array]]]:
    """The discrete losses of composed events, and a lower bound on δ(ε) from them.

    The losses are truncated for a δ of about the size `delta`, and the bound is tight
    near `epsilon`, where δ(ε) is about `delta`. The first result has the losses for
    both orders of the two data sets. The second result is a function: applied to the
    losses for one of the orders, it returns a function that maps ε to the bound. The
    bound includes the probability of an infinite loss. If the events have batches with
    a capacity, a penalty for samples that exceed the capacity is subtracted.
    """
    parts, variance = composition.compose(steps, delta, mechanisms.lower_losses)
    log_finite, distance = jnp.zeros(2)
    for losses, count in parts:
        log_finite += count * jnp.log1p(-losses.inf_mass[0])
    # Each infinite loss is independent of the others, hence 1 − Π (1 − δ_i).
    inf_mass = -jnp.expm1(log_finite) * (1 - _MARGIN)
    # A bound on the total variation distance between the events and these losses.
    for event, count in ((step.event, step.count) for step in steps):
        if isinstance(event, events.TruncatedPoissonGaussian):
            # A step is a step on a Poisson sample unless the sample exceeds the
            # capacity.
            n, b = jnp.asarray(event.num_examples), jnp.asarray(event.max_batch_size)
            overflow = upper_tail(b + 1, n, jnp.asarray(event.sampling_rate))
            distance += count * jnp.where(b < n, overflow * (1 + 1e-7) + SMALL, 0.0)

    def bound(parts: Parts) -> Callable[[jax.Array], jax.Array]:
        finite_bound = _delta_of(parts, variance, (epsilon, jnp.log(delta)))

        def lower_bound(point: jax.Array) -> jax.Array:
            penalty = (1 + jnp.exp(jnp.minimum(point, 700.0))) * distance
            penalty *= 1 + _MARGIN
            return (finite_bound(point) + inf_mass) * (1 - _MARGIN) - penalty

        return lower_bound

    return parts, bound


def _delta(epsilon: jax.Array, steps: Sequence[events.Repeated]) -> jax.Array:
    inside = (epsilon >= 0) & (epsilon < jnp.inf)
    safe = jnp.where(inside, epsilon, 1.0)
    upper = jnp.maximum(composition.bound_delta(safe, steps), composition.SMALLEST)
    parts, bound = _prepare_bound(steps, safe, upper)
    lower = composition.max_over_directions(
        lambda x: jnp.maximum(bound(x)(safe), 0.0), parts
    )
    return jnp.where(inside, jnp.minimum(lower, upper), 0.0)


def _epsilon(delta: jax.Array, steps: Sequence[events.Repeated]) -> jax.Array:
    inside = (delta > 0) & (delta < 1)
    safe_delta = jnp.where(inside, delta, 0.5)
    upper = composition.bound_epsilon(safe_delta, steps)
    upper = jnp.where(upper < jnp.inf, upper, 1e3)
    parts, bound = _prepare_bound(steps, upper, safe_delta)

    def search(parts: Parts) -> jax.Array:
        lower_bound = bound(parts)

        def exceeds(epsilon: jax.Array) -> jax.Array:
            return lower_bound(epsilon) > safe_delta

        # A mechanism with δ(ε) > δ is not (ε, δ)-DP, and 0 is always a lower bound on
        # ε. Far from the tilt's ε the bound on δ may be loose. So the search starts
        # from the largest of several ε that exceeds δ, and ends below the next one.
        candidates = upper * _FRACTIONS
        largest = jnp.max(jnp.where(jax.lax.map(exceeds, candidates), candidates, 0.0))
        above = jnp.min(jnp.where(candidates > largest, candidates, upper))
        return bisect(exceeds, above, largest, _HALVINGS)

    return jnp.where(inside, composition.max_over_directions(search, parts), 0.0)


# Lower bounds on δ(ε) and on ε(δ) of all events composed.
delta64 = composition.compile_bound(_delta, 0.0, "down")
epsilon64 = composition.compile_bound(_epsilon, 0.0, "down")
