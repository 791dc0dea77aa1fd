"""Dominating pairs of mechanisms with few losses or with evenly spaced losses.

Let P and Q be a mechanism's output distributions on two neighbouring data sets. The
mechanisms of this module are symmetric: the losses of P against Q and of Q against P
have the same distribution. The functions therefore return the losses for one order.
`laplace_cells`, `discrete_laplace_groups` and `discrete_gaussian_groups` return losses
for lower bounds: the losses of a post-processed mechanism, which releases only the
group of outcomes that contains the outcome (see `pairs`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr

from dpjax._core.float64 import SMALL, ULP
from dpjax.accounting._numerics.pld.pairs import (
    DiscreteLosses,
    log_mass_of,
    tail_quantile,
)

# The error that this number of intervals adds to ε is about 1e-6 of ε.
INTERVALS = 2048
_EVEN_POINTS = np.linspace(0.0, 1.0, INTERVALS + 1)  # outcomes over the sensitivity
# The number of groups of integers in a window. Each group has one integer unless the
# noise is wide.
GROUPS = 4096
# The largest number of integers in a group, for a standard deviation of about 1e7. The
# sums over a group take time, and have a relative rounding error of at most 1e-11.
MAX_GROUP = 2.0**16


def two_losses(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The losses ±ε of randomised response, and an infinite loss with probability δ.

    The event is an `events.EpsilonDelta`, or an `events.Pure`, for which δ is 0. The
    argument tail is not used, since there is no mass to truncate.

    Reference: Kairouz, Oh and Viswanath (2015), Theorem 3.3 and its proof: every (ε,
    δ)-DP mechanism is a post-processing of a mechanism with these losses.
    """
    epsilon, delta = event.epsilon, getattr(event, "delta", jnp.zeros(()))
    # https://arxiv.org/abs/1311.0776: the masses of ε and −ε are
    # (1 − δ) e^ε / (1 + e^ε) and (1 − δ) / (1 + e^ε).
    larger = jnp.log1p(-delta) - jnp.log1p(jnp.exp(-epsilon))
    loss = jnp.stack([epsilon, -epsilon])
    log_mass = jnp.stack([larger, larger - epsilon])
    error = jax.lax.stop_gradient(ULP * (16 + 4 * epsilon))
    return DiscreteLosses(loss[None], log_mass[None], delta[None], error)


def randomized_response(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The losses of randomised response, an `events.RandomizedResponse`.

    With probability p, the answer is uniform over k buckets. With probability 1 − p,
    the answer is the true one. On each data set, the true answer therefore has the
    probability 1 − p + p/k. An answer that is true on neither data set has the
    probability p/k on both data sets. The argument tail is not used.
    """
    parameter, buckets = event.noise_parameter, event.num_buckets
    other_mass = parameter / buckets
    loss = jnp.log1p((1 - parameter) / other_mass)
    true_mass = jnp.maximum(1 - parameter + other_mass, SMALL)
    mass = jnp.stack([true_mass, other_mass, (buckets - 2) * other_mass])
    log_mass = jnp.log(jnp.maximum(mass, SMALL))
    losses = jnp.stack([loss, -loss, jnp.zeros(())])
    return DiscreteLosses(
        losses[None], log_mass[None], jnp.zeros(1), jnp.asarray(32 * ULP)
    )


def laplace(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The losses of continuous Laplace noise, an `events.Laplace`.

    The result has evenly spaced outcomes from 0 to the sensitivity, to which the mass
    of all other outcomes moves. The argument tail is not used, since all losses are
    finite.
    """
    return _laplace(1 / event.scale, _EVEN_POINTS)


def discrete_laplace(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The losses of discrete Laplace noise on an integer, an `events.DiscreteLaplace`.

    The result has the integers from 0 to the sensitivity, or INTERVALS + 1 of these
    integers if the sensitivity exceeds the constant `INTERVALS`. The mass of all other
    integers moves to the integers of the result. The argument tail is not used, since
    all losses are finite.
    """
    sensitivity = max(event.sensitivity, 1)
    return _laplace(sensitivity / event.scale, _integer_points(sensitivity))


def _laplace(epsilon: jax.Array, points: np.ndarray) -> DiscreteLosses:
    """The losses of Laplace noise, with the mass of other outcomes moved to `points`.

    Args:
      epsilon: ε, the sensitivity over the scale of the noise.
      points: outcomes divided by the sensitivity, increasing from 0 to 1. The loss at a
        point p is ε (1 − 2p).
    """
    # The pair of Lap(0, 1) and Lap(ε, 1) has δ(x) = 1 − e^{(x − ε)/2} for x in [−ε, ε].
    # The mass of the outcomes from y to y + h moves to y and to y + h, such that the
    # mass of both distributions stays the same (`pairs`). Each of the two ends gets the
    # mass e^{−y} tanh(h/2) / 2. Beyond 0 and ε the steps h are infinite.
    steps = jnp.tanh(epsilon * np.diff(points) / 2)
    one = jnp.ones(1)
    masses = jnp.concatenate([one, steps]) + jnp.concatenate([steps, one])
    log_mass = jnp.log(jnp.maximum(masses / 2, SMALL)) - epsilon * points
    error = jax.lax.stop_gradient(ULP * (32 + 4 * epsilon))
    loss = epsilon * (1 - 2 * points)
    return DiscreteLosses(loss[None], log_mass[None], jnp.zeros(1), error)


def _integer_points(sensitivity: int) -> np.ndarray:
    """The `points` of `_laplace` for discrete noise: i / sensitivity for integers i.

    The integers go from 0 to the sensitivity. If the sensitivity exceeds the constant
    `INTERVALS`, the result has only INTERVALS + 1 of these integers, about evenly
    spaced. Each integer from 0 to the sensitivity is an outcome with a privacy loss. At
    every ε that equals one of these losses, discrete and continuous Laplace noise have
    the same δ(ε). Between the losses of neighbouring integers, the δ(ε) of discrete
    Laplace noise is linear in e^ε. If the result has all integers, the losses from
    `_laplace` are therefore exact.
    """
    count = min(sensitivity, INTERVALS)
    # The integers are of Python's type, because the product of two of them may exceed
    # 64 bits.
    chosen = [i * sensitivity // count for i in range(count + 1)]
    return np.array(chosen, np.float64) / sensitivity


def laplace_cells(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The losses of Laplace noise, if only an outcome's interval is released.

    The intervals have equal widths between 0 and the sensitivity. The outcomes below 0
    are one more interval, and the outcomes above the sensitivity are another.
    """
    epsilon, points = 1 / jnp.asarray(event.scale), _EVEN_POINTS
    # The outcomes from y to y + h have the mass e^{−y} (1 − e^{−h}) / 2, and the loss
    # at their middle. The outcomes beyond 0 and ε have the losses ±ε.
    mass = -jnp.expm1(-epsilon * np.diff(points)) / 2
    log_mass = log_mass_of(mass) - epsilon * points[:-1]
    loss = epsilon * np.concatenate([1 - points[:-1] - points[1:], [1.0, -1.0]])
    outer_log_mass = np.log(0.5) - epsilon * np.array([0.0, 1.0])
    log_mass = jnp.concatenate([log_mass, outer_log_mass])
    error = ULP * (32 + 4 * epsilon)
    return DiscreteLosses(loss[None], log_mass[None], jnp.zeros(1), error)


def discrete_laplace_groups(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The losses of discrete Laplace noise, if only an outcome's group is released.

    The integers between 0 and the sensitivity k are divided into groups of consecutive
    integers. The integers up to 0 are one more group, and the integers from k on are
    another.
    """
    k = max(event.sensitivity, 1)
    ratio = jnp.exp(-1 / jnp.asarray(event.scale))
    edges = np.round(_integer_points(k) * k)
    first, last = edges[:-1] + 1, edges[1:]
    last[-1] -= 1  # the integers from k on are one outcome
    # The integers from a to c have the mass (r^a − r^{c + 1}) / (1 + r), r = e^{−1/b},
    # and the loss (k − a − c) / b.
    size = np.maximum(last - first + 1, 0)
    mass = -jnp.expm1(-size / event.scale)
    log_mass = log_mass_of(mass) - first / event.scale
    # Beyond 0 and k the geometric series add up to 1 / (1 + r) and r^k / (1 + r).
    loss = jnp.concatenate([k - first - last, np.array([k, -k])]) / event.scale
    log_mass = jnp.concatenate([log_mass, np.array([0.0, -k]) / event.scale])
    log_mass = log_mass - jnp.log1p(ratio)
    error = ULP * (32 + 4 * k / jnp.asarray(event.scale))
    return DiscreteLosses(loss[None], log_mass[None], jnp.zeros(1), error)


class _Groups(NamedTuple):
    """Groups of consecutive integers z, and sums of e^{−z²/2σ²} over each group.

    The groups cover the integers from −reach to reach, and σ is the noise's `stddev`.
    The privacy loss decreases from one integer to the next.

    Attributes:
      reach: the largest integer in the groups, f[].
      size: the number of integers in a group, or NaN if it exceeds MAX_GROUP, f[].
      start: the first integer of each group, f[GROUPS].
      mass: the sum of the weights e^{−z²/2σ²} over each group, f[GROUPS].
      upper_part: the part of `mass` that moves to the loss at the start of the group,
        f[GROUPS]. The rest moves to the loss at the start of the next group.
      mass_difference: the sum of weight · (e^{−x} − 1) over each group, f[GROUPS].
        Here x is the loss at an integer minus the loss at the start of the next group.
      error: a bound on the relative rounding error of each sum, f[].
    """

    reach: jax.Array
    size: jax.Array
    start: jax.Array
    mass: jax.Array
    upper_part: jax.Array
    mass_difference: jax.Array
    error: jax.Array


def _groups(stddev: jax.Array, slope: jax.Array, tail: jax.Array) -> _Groups:
    """Divide the integers around 0 into GROUPS groups, and sum weights in each group.

    The weights are those of the noise, e^{−z²/2σ²}; `_Groups` describes the sums. The
    privacy loss decreases by `slope` from one integer to the next. At each end, the
    groups leave out integers on which the discrete Gaussian noise has at most the mass
    `tail`. The last groups may be empty.
    """
    reach = jnp.ceil(jax.lax.stop_gradient(stddev) * tail_quantile(tail)) + 1
    size = jnp.maximum(jnp.ceil((2 * reach + 1) / GROUPS), 1.0)
    start = size * np.arange(float(GROUPS)) - reach
    size = jnp.where(size <= MAX_GROUP, size, jnp.nan)

    def add_integers(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Add the terms of each group's next integer to the sums over the group."""
        j, mass, upper_part, mass_difference = state
        z = start + j
        weight = jnp.where(z <= reach, jnp.exp(-0.5 * (z / stddev) ** 2), 0.0)
        # The fraction of the mass that moves to the larger loss, which is at the start
        # of the group (`pairs`).
        decrease = jnp.expm1(-(size - j) * slope)
        fraction = jnp.minimum(decrease / jnp.expm1(-size * slope), 1.0)
        upper_part = upper_part + weight * fraction
        mass_difference = mass_difference + weight * decrease
        return j + 1, mass + weight, upper_part, mass_difference

    zero = jnp.zeros(GROUPS)
    _, mass, upper_part, mass_difference = jax.lax.while_loop(
        lambda state: state[0] < size, add_integers, (jnp.zeros(()), zero, zero, zero)
    )
    error = jax.lax.stop_gradient(ULP * (64 + 4 * size + 4 * (reach / stddev) ** 2))
    return _Groups(reach, size, start, mass, upper_part, mass_difference, error)


def discrete_gaussian(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The losses of discrete Gaussian noise on an integer (`events.DiscreteGaussian`).

    The probability of an integer z is proportional to e^{−z²/2σ²}, where σ is the
    event's `stddev`. With the event's sensitivity k, the loss at z is (k² − 2kz) / 2σ².
    The mass of a group of integers moves to the start of the group and to the start of
    the next group (see `_Groups`). At each end, outcomes with a total probability of at
    most `tail` are truncated. The truncated outcomes below get an infinite loss. The
    truncated outcomes above get the smallest loss.
    """
    stddev, sensitivity = event.stddev, max(event.sensitivity, 1)
    slope = sensitivity / (stddev * stddev)
    groups = _groups(stddev, slope, tail)
    reach, start, zero = groups.reach, groups.start, jnp.zeros(1)
    # The sum over the window, in place of the sum over all integers, only makes masses
    # larger.
    mass = jnp.concatenate([groups.upper_part, zero])
    mass = mass + jnp.concatenate([zero, groups.mass - groups.upper_part])
    # Canonne, Kamath and Steinke (2020), https://arxiv.org/abs/2004.00010, Proposition
    # 25: P[X ≥ m] ≤ P[N(0, σ²) ≥ m − 1]. Below the window the loss becomes infinite,
    # above the window it becomes the smallest loss.
    outside = ndtr(-reach / stddev)
    outcome = jnp.minimum(jnp.append(start, start[-1] + groups.size), reach)
    loss = slope * (sensitivity / 2 - outcome)
    is_last = jax.lax.stop_gradient(outcome == reach)
    mass = mass / jnp.sum(groups.mass) + outside * is_last
    log_mass = log_mass_of(mass)
    return DiscreteLosses(loss[None], log_mass[None], outside[None], groups.error)


def discrete_gaussian_groups(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The losses of a post-processed discrete Gaussian mechanism, for lower bounds.

    The mechanism releases an integer. The post-processing releases only the group of
    consecutive integers that contains this integer. Integers far from 0, with at most
    the mass `tail` at each end, are left out, which makes δ(ε) smaller.
    """
    stddev, sensitivity = event.stddev, max(event.sensitivity, 1)
    slope = sensitivity / (stddev * stddev)
    groups = _groups(stddev, slope, tail)
    is_positive = groups.mass > 0
    total = jnp.where(is_positive, groups.mass, 1.0)
    # The weights outside of the window would make the sum larger, by twice `outside`.
    norm = jnp.sum(groups.mass) / (1 - 2 * ndtr(-groups.reach / stddev))
    end = groups.start + groups.size
    loss = slope * (sensitivity / 2 - end) - jnp.log1p(groups.mass_difference / total)
    log_mass = jnp.where(is_positive, jnp.log(total / norm), -jnp.inf)
    loss = jnp.where(is_positive, loss, 0.0)
    return DiscreteLosses(loss[None], log_mass[None], jnp.zeros(1), groups.error)
