"""Upper bounds on the δ(ε) and ε(δ) of composed events, with derivatives.

The compiled functions `delta64` and `epsilon64` take ε or δ, and a pytree of events.
The leaves of the pytree are numbers, and the structure of the pytree is static.
`delta_of` and `epsilon_of` take discrete losses in place of events, and therefore also
apply to a mechanism that no event describes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import Direction, float64
from dpjax._core.searches import Point, close, implicit_derivative
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax.accounting import events
from dpjax.accounting._numerics import gaussian
from dpjax.accounting._numerics.pld import inversion, mechanisms, tilt
from dpjax.accounting._numerics.pld.pairs import DiscreteLosses
from dpjax.accounting._numerics.pld.tilt import Parts, Tilt

_TOLERANCE = 2.0**-44  # of ε, relative to its estimate
_EVALUATIONS = 6
_LARGE_GAP = 14.0  # a gap in log δ beyond which the estimate was too far off
_SMALL_GAP = 0.5  # a gap in log δ below which no further estimate is needed
_TRUNCATED = 3e-5  # the fraction of δ that may move to infinite losses
SMALLEST = 1e-30  # the δ below which δ(ε) is no longer tight


def rare_mass(
    delta: jax.Array, all_mechanisms: Sequence[object], count: ArrayLike
) -> jax.Array:
    """The mass that one mechanism may move to an infinite loss in each of its steps.

    The mechanism has `count` steps, and is one of `all_mechanisms`. Together, all steps
    of all mechanisms may move the mass _TRUNCATED · delta.
    """
    return _TRUNCATED * delta / (len(all_mechanisms) * jnp.maximum(count, 1.0))


# From here on, the numbers of events are float64 arrays.
def compose(
    steps: Sequence[events.Repeated],
    delta: jax.Array,
    losses_of: Callable[[Any, jax.Array], DiscreteLosses] = mechanisms.upper_losses,
) -> tuple[Parts, jax.Array]:
    """The discrete losses of all events with their counts, and the Gaussian variance.

    The variance is the sum of μ² over all steps of Gaussian mechanisms. For every other
    event, `losses_of` maps the event, and a mass that may be truncated, to the event's
    losses. This mass is small compared with delta. The losses are therefore precise
    enough for a δ of about the size `delta` or larger.
    """
    variance, parts = jnp.zeros(()), []
    for event, count in ((step.event, step.count) for step in steps):
        if isinstance(event, events.Gaussian):
            # Gaussian mechanisms compose exactly: the squares of their μ add up.
            variance += count * event.mu * event.mu
        else:
            parts.append((losses_of(event, rare_mass(delta, steps, count)), count))
    return parts, variance


def max_over_directions(bound: Callable[..., jax.Array], parts: Parts) -> jax.Array:
    """The larger of the bounds on δ or ε for the two orders of the data sets.

    `parts` has the discrete losses and the number of steps of each mechanism, for both
    orders of the data sets or for one. `bound` computes a bound from the losses for one
    order.
    """
    if not parts:
        return bound([])
    # Symmetric losses have one direction. They are broadcast to two directions if other
    # losses have two.
    directions = max(losses.inf_mass.size for losses, _ in parts)

    def broadcast(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (directions, *jnp.shape(x)[1:]))

    return jnp.max(jax.lax.map(bound, jax.tree.map(broadcast, list(parts))))


def _log_delta(
    parts: Parts, variance: jax.Array, point: Tilt
) -> Callable[[jax.Array], jax.Array]:
    """A function from ε to an upper bound on log δ(ε), for a given tilt.

    `parts` has the discrete losses and the number of steps of each mechanism, for one
    order of the data sets, and variance is μ² of a Gaussian mechanism that is composed
    with these losses. `point` has the parameters of the Fourier inversion.
    """
    wave = inversion.spectrum(parts, variance, point)

    def log_delta_at(epsilon: jax.Array) -> jax.Array:
        union = inversion.union_bound(parts, variance, epsilon)
        return jnp.minimum(jnp.minimum(inversion.log_delta(wave, epsilon), union), 0.0)

    return log_delta_at


class _Candidate(NamedTuple):
    """An upper bound on log δ or ε, and the inversion parameters that gave the bound.

    A search bounds log δ for a given ε, or ε for a given δ. A tilt has the parameters
    of the Fourier inversion, which are chosen for an estimate of log δ or ε.

    Attributes:
      bound: an upper bound on log δ or ε, f[].
      estimate: the estimate of log δ or ε for which the tilt was chosen, f[].
      tilt: the tilt that gives the bound.
      next_estimate: the next estimate to try, f[], or NaN if the search is complete.
    """

    bound: jax.Array
    estimate: jax.Array
    tilt: Tilt
    next_estimate: jax.Array


def _best_candidate(
    evaluate: Callable[[jax.Array], _Candidate], estimate: jax.Array
) -> _Candidate:
    """The candidate with the smallest bound, over a sequence of estimates.

    `evaluate` maps an estimate to its candidate, which has the bound and the next
    estimate. The first estimate is `estimate`. The search ends when the next estimate
    is NaN, or after _EVALUATIONS estimates.
    """
    example = _Candidate(estimate, estimate, Tilt(*[estimate] * 3), estimate)
    structure = jax.tree.structure(example)

    def is_unfinished(state: tuple[jax.Array, ...]) -> jax.Array:
        evaluations, next_estimate, _ = state
        return (evaluations < _EVALUATIONS) & ~jnp.isnan(next_estimate)

    def evaluate_next(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        evaluations, next_estimate, best = state
        candidate = evaluate(next_estimate)
        row = jnp.stack(jax.tree.leaves(candidate))
        best = jnp.where(candidate.bound < best[0], row, best)
        return evaluations + 1, candidate.next_estimate, best

    worst = jnp.full(structure.num_leaves, jnp.inf)
    start = jnp.zeros((), jnp.int32), estimate, worst
    best = jax.lax.while_loop(is_unfinished, evaluate_next, start)[-1]
    return jax.tree.unflatten(structure, list(best))


def _truncate_rare_losses(parts: Parts, log_delta: jax.Array) -> Parts:
    """Move very small masses of positive losses to an infinite loss.

    `parts` has the discrete losses and the number of steps of each mechanism. Over all
    steps, the moved masses add up to a small fraction of e^log_delta. The losses in the
    result give an upper bound on δ, and their finite part has smaller exponential
    moments.
    """
    trimmed = []
    for losses, count in parts:
        allowed_mass = rare_mass(jnp.exp(log_delta), parts, count)
        mass = jnp.where(losses.loss > 0, jnp.exp(losses.log_mass), 1.0)
        # Masses below a level are moved. The level is the largest of 16 candidates,
        # each half of the one before, whose masses add up to at most `allowed_mass`.
        limits = allowed_mass * np.exp2(-np.arange(16.0))[:, None]
        rare = mass[None] < limits
        moved = jnp.sum(jnp.where(rare, mass[None], 0.0), axis=1)
        level = jnp.max(jnp.where(moved <= allowed_mass, limits[:, 0], 0.0))
        rare = mass < jax.lax.stop_gradient(level)
        inf_mass = losses.inf_mass + jnp.sum(jnp.where(rare, mass, 0.0))
        log_mass = jnp.where(rare, -jnp.inf, losses.log_mass)
        trimmed.append((losses._replace(log_mass=log_mass, inf_mass=inf_mass), count))
    return trimmed


def bound_delta(epsilon: jax.Array, steps: Sequence[events.Repeated]) -> jax.Array:
    return delta_of(*compose(steps, jnp.asarray(SMALLEST)), epsilon)


def delta_of(parts: Parts, variance: jax.Array, epsilon: jax.Array) -> jax.Array:
    """An upper bound on δ(ε) of discrete losses composed with a Gaussian mechanism.

    `parts` has the discrete losses and the number of steps of each mechanism. The
    Gaussian mechanism has μ² = variance. The result is 0 for ε = ∞, and 1 for ε < 0 and
    for NaN. If there are discrete losses, the result at finite ε is at least
    `SMALLEST`, a tiny constant below which the bound would not be tight.
    """
    inside = (epsilon >= 0) & (epsilon < jnp.inf)
    safe = jnp.where(inside, epsilon, 1.0)
    if not parts:
        return gaussian.delta_of(jnp.sqrt(variance), epsilon)

    def bound(parts: Parts) -> jax.Array:
        fixed, fixed_var, fixed_eps = jax.lax.stop_gradient((parts, variance, safe))

        def evaluate(estimate: jax.Array) -> _Candidate:
            common = _truncate_rare_losses(fixed, estimate)
            cumulants = tilt.cumulants(common, fixed_var)
            point = tilt.choose(cumulants, fixed_var, fixed_eps, estimate)
            log_value = _log_delta(common, fixed_var, point)(fixed_eps)
            log_value = jnp.maximum(log_value, np.log(SMALLEST))
            # A bound far above the estimate may be loose because the estimate was too
            # low. The next estimate is then half-way between the bound and the
            # estimate.
            middle = (log_value + estimate) / 2
            is_far = log_value - estimate > _LARGE_GAP
            next_estimate = jnp.where(is_far, middle, log_value)
            converged = jnp.abs(log_value - estimate) < _SMALL_GAP
            next_estimate = jnp.where(converged, jnp.nan, next_estimate)
            return _Candidate(log_value, estimate, point, next_estimate)

        cumulants = tilt.cumulants(fixed, fixed_var)
        estimate = tilt.estimate_log_delta(cumulants, fixed_eps)
        best = _best_candidate(evaluate, jnp.maximum(estimate, np.log(SMALLEST)))
        common = _truncate_rare_losses(parts, best.estimate)
        log_delta = _log_delta(common, variance, best.tilt)
        # The result is the bound of the search, with the derivatives of log δ.
        return jnp.exp(implicit_derivative(lambda x: x - log_delta(safe), best.bound))

    # Where no evaluation succeeded, the bound is infinite.
    value = jnp.minimum(max_over_directions(bound, parts), 1.0)
    return jnp.where(inside, value, jnp.where(epsilon == jnp.inf, 0.0, 1.0))


def bound_epsilon(delta: jax.Array, steps: Sequence[events.Repeated]) -> jax.Array:
    safe_delta = jnp.where((delta > 0) & (delta < 1), delta, 0.5)
    return epsilon_of(*compose(steps, jax.lax.stop_gradient(safe_delta)), delta)


def epsilon_of(parts: Parts, variance: jax.Array, delta: jax.Array) -> jax.Array:
    """An upper bound on ε(δ) of discrete losses composed with a Gaussian mechanism.

    `parts` has the discrete losses and the number of steps of each mechanism. The
    Gaussian mechanism has μ² = variance. With at least one part, the result is 0 for
    δ >= 1, and inf for δ <= 0 or NaN. Without parts, the result is that of
    `gaussian.epsilon_of`.
    """
    inside = (delta > 0) & (delta < 1)
    target = jnp.log(jnp.where(inside, delta, 0.5))
    if not parts:
        return gaussian.epsilon_of(jnp.sqrt(variance), delta)

    def bound(parts: Parts) -> jax.Array:
        fixed, fixed_var, goal = jax.lax.stop_gradient((parts, variance, target))
        cumulants = tilt.cumulants(fixed, fixed_var)

        def evaluate(estimate: jax.Array) -> _Candidate:
            point = tilt.choose(cumulants, fixed_var, estimate, goal)
            log_delta = _log_delta(fixed, fixed_var, point)
            epsilon = _smallest_epsilon(
                lambda e: log_delta(e) - goal, estimate + point.period / 4
            )
            # Near the estimate −log δ has about the slope λ, elsewhere perhaps more.
            steepness = jnp.maximum(point.rate, 5 / jnp.maximum(epsilon, 1e-3))
            converged = steepness * jnp.abs(epsilon - estimate) < _SMALL_GAP
            markov = tilt.markov_epsilon(cumulants, goal)
            next_estimate = jnp.where(epsilon < jnp.inf, epsilon, markov)
            # A second evaluation for the same estimate would give the same bound.
            converged |= next_estimate == estimate
            next_estimate = jnp.where(converged, jnp.nan, next_estimate)
            return _Candidate(epsilon, estimate, point, next_estimate)

        best = _best_candidate(evaluate, tilt.estimate_epsilon(cumulants, goal))
        log_delta = _log_delta(parts, variance, best.tilt)
        solvable = (best.bound > 0) & (best.bound < jnp.inf)
        return implicit_derivative(
            lambda e: log_delta(e) - target, best.bound, solvable
        )

    value = max_over_directions(bound, parts)
    return jnp.where(inside, value, jnp.where(delta >= 1, 0.0, jnp.inf))


def _smallest_epsilon(
    excess: Callable[[jax.Array], jax.Array], start: jax.Array
) -> jax.Array:
    """Search for the smallest ε < 3 start at which the function `excess` is at most 0.

    The search starts at ε = start. The result is inf if the search fails. At every
    finite result the excess is at most 0, but the excess at a smaller ε may be at most
    0, too.
    """
    # Nothing is evaluated at the ends of the bracket. Their excesses are guesses of
    # opposite sign, so that the search evaluates at start first, then between 0 and
    # start or between start and 3 start.
    bad = Point(-start, jnp.full_like(start, 30))
    good = Point(3 * start, jnp.full_like(start, -30))
    tolerance = start * _TOLERANCE
    epsilon = close(lambda e: excess(jnp.maximum(e, 0.0)), bad, good, tolerance)
    return jnp.where(epsilon < 3 * start, jnp.maximum(epsilon, 0.0), jnp.inf)


def _flatten_steps(steps: Sequence[events.Repeated]) -> tuple[list[Any], Any]:
    """The leaves and the structure of a pytree of events, without ZERO_OUT.

    ADD_REMOVE replaces the adjacency ZERO_OUT, which has the same losses. After the
    replacement, events of both adjacencies have the same structure and share a compiled
    program.
    """
    replaced = []
    for step in steps:
        event = step.event
        if getattr(event, "adjacency", None) is Adjacency.ZERO_OUT:
            event = dataclasses.replace(event, adjacency=Adjacency.ADD_REMOVE)
        replaced.append(dataclasses.replace(step, event=event))
    return jax.tree.flatten(replaced)


def compile_bound(
    core: Callable[..., jax.Array], worst: float, rounding: Direction = "up"
) -> Callable[[ArrayLike, Sequence[events.Repeated]], jax.Array]:
    """Compile a float64 bound, for arguments of any dtype and value.

    Args:
      core: maps ε and the events to δ, or δ and the events to ε, in float64.
      worst: the result for invalid parameters: 1 for an upper bound on δ, inf for an
        upper bound on ε, and 0 for a lower bound.
      rounding: the direction of the final cast, as for the decorator `float64`.

    Returns:
      A function of ε or δ and of the events. The result is `worst` in three cases: ε or
      δ is negative or NaN; a number of an event is NaN or out of range, or a count of
      steps is not a whole number >= 0; or a mechanism that releases something is not
      `private` (see `mechanisms.Domain`). In all other cases, the result is 0 if no
      event releases anything, `worst` if `core` returns NaN, and otherwise the result
      of `core`.
    """

    @float64(rounding, static=("structure",), one_by_one=True)
    def compiled(argument: jax.Array, *numbers: jax.Array, structure: Any) -> jax.Array:
        all_idle, valid, safe_steps = jnp.array(True), argument >= 0, []
        for step in jax.tree.unflatten(structure, numbers):
            event, count = step.event, step.count
            domain = mechanisms.domain(event)
            idle = domain.silent | (count == 0)
            is_count = (count >= 0) & (count == jnp.floor(count)) & (count < jnp.inf)
            valid &= domain.allowed & is_count
            usable = valid & ~idle & domain.private
            all_idle &= idle
            # The core gets harmless numbers in place of unusable ones, because a NaN in
            # a branch that jnp.where discards would still spoil derivatives.
            event = mechanisms.replace_unless(usable, event)
            safe_steps.append(events.Repeated(event, jnp.where(usable, count, 0.0)))
            valid &= usable | idle
        value = core(argument, safe_steps)
        value = jnp.where(jnp.isnan(value), worst, value)
        return jnp.where(valid, jnp.where(all_idle, 0.0, value), worst)

    def bound(argument: ArrayLike, steps: Sequence[events.Repeated]) -> jax.Array:
        numbers, structure = _flatten_steps(steps)
        return compiled(argument, *numbers, structure=structure)

    return bound


# Upper bounds on δ(ε) and on ε(δ) of all events composed.
delta64 = compile_bound(bound_delta, 1.0)
epsilon64 = compile_bound(bound_epsilon, np.inf)
