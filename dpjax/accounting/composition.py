"""The privacy cost of several mechanisms, fixed beforehand or not, on the same data.

Mechanisms whose numbers are all fixed before any output is seen compose by their
privacy-loss distributions (`epsilon`). If the numbers of a mechanism depend on earlier
outputs, this composition is not valid. A *filter* is then valid: the privacy parameters
of the mechanisms add up, and their total must stay within a limit that is fixed
beforehand. The squares of GDP parameters add up in this way (Smith and Thakurta 2022;
Koskela, Tobaben and Honkela 2023). `gaussian_bound` returns, for any mechanism, a GDP
parameter that holds except with a small probability.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax._core import rounding, validate
from dpjax._core.float64 import TINY, scoped
from dpjax.accounting import _repetitions, events, gdp, pld, profiles, pure
from dpjax.accounting.events import Event

__all__ = ["GaussianBound", "epsilon", "gaussian_bound"]

# The number of points at which a profile may be evaluated, the number of grid steps
# from a point to the next point, and the distance of the points that are evaluated
# first. μ is an upper bound for any values of these numbers. With the values here, μ is
# too large by at most about 0.3 %.
_POINTS, _FINE, _SKIP = 32, 32, 4


def add_up(numbers: Iterable[float]) -> float:
    """The sum of non-negative numbers, rounded up."""
    total = 0.0
    for number in numbers:
        # The first addition, to zero, is exact and needs no rounding.
        total = number if total == 0 else math.nextafter(total + number, math.inf)
    return total


def check_event(event: Event) -> None:
    """Raise a ValueError unless an event has only valid, concrete, scalar numbers.

    The sum of the weights of a mixture is not checked, because ε is infinite if the sum
    is not 1. The constructor of an event does not check numbers, since JAX may trace
    the numbers. A negative number would reduce the total cost.
    """
    parts: tuple[Any, ...] = ()
    part_type: Any = Event
    match event:
        case events.Composed(steps):
            parts, part_type = steps, events.Repeated
        case events.Repeated(one):
            parts, part_type = (one,), events.Step
        case events.OnLattice(one) | events.Selection(one):
            parts = (one,)
    if not isinstance(event, Event) or not all(isinstance(x, part_type) for x in parts):
        raise ValueError(f"event must be an event of accounting.events; got {event!r}.")
    for part in parts:
        check_event(part)
    type_name = type(event).__name__
    for path, number in jax.tree.leaves_with_path(event):
        name = f"{jax.tree_util.keystr(path)} of {type_name}"
        validate.scalar(name, number)
        validate.concrete_numbers(name, number)
        validate.nonnegative(name, number, finite=False)
    for name in ("delta", "total_variation"):
        validate.half_open_unit(f"{name} of {type_name}", getattr(event, name, 0.0))
    for name in ("sampling_rate", "noise_parameter"):
        validate.closed_unit(f"{name} of {type_name}", getattr(event, name, 1.0))
    for name in ("num_steps", "num_examples", "max_batch_size", "num_buckets"):
        count = validate.whole_count(f"{name} of {type_name}", getattr(event, name, 1))
        validate.positive(f"{name} of {type_name}", count)
    for name in ("count", "sensitivity"):  # may be 0
        validate.whole_count(f"{name} of {type_name}", getattr(event, name, 0))
    if isinstance(event, events.Selection):
        _repetitions.check(event.repetitions)


def epsilon(composed: Sequence[Event], delta: float) -> float:
    """The ε of mechanisms whose numbers are all fixed before any output is seen.

    All mechanisms run on the same data.

    Args:
      composed: the event of each mechanism, all under one adjacency.
      delta: δ, in (0, 1).

    Returns:
      ε, rounded up, the sum of the ε of groups of events. Each `EpsilonDelta` event is
      a group, with its own δ. All other events that have a privacy-loss distribution or
      a GDP parameter, and the `OnLattice` versions of these events, form one group,
      which is composed by privacy-loss distributions. Each remaining event is a group.
      The code subtracts the total δ of the `EpsilonDelta` events from `delta`. The
      other groups get equal parts of the difference. ε is infinite if the total exceeds
      `delta`, or if nothing is left for the other groups. ε is also infinite if the
      weights of a mixture do not add up to 1.

    Raises:
      ValueError: delta is out of range, or an event has a number that is out of range,
        traced or not a scalar.

    Privacy: a mechanism may use the outputs of earlier mechanisms, but the numbers in
    the mechanism's event must not depend on these outputs.

    Reference: Dwork and Roth (2014), Theorem 3.16, for the addition of costs.

    Example:
      >>> from dpjax.accounting.events import Gaussian, PoissonGaussian, Repeated
      >>> from dpjax import Adjacency
      >>> step = PoissonGaussian(1.0, 0.01, Adjacency.ADD_REMOVE)
      >>> print(f"{epsilon([Gaussian(0.1), Repeated(step, 1000)], 1e-5):.3f}")
      1.870
    """
    validate.open_unit("delta", delta)
    delta = float(delta)
    for event in composed:
        check_event(event)
    pairs = [x for x in composed if isinstance(x, events.EpsilonDelta)]
    # Dwork and Roth (2014), Theorem 3.16, https://doi.org/10.1561/0400000042:
    # (Σ ε_i, Σ δ_i) over groups i of events. δ_i is the δ of an `EpsilonDelta` event,
    # and an equal part of the remaining δ for each other group.
    total = add_up(float(np.asarray(x.epsilon)) for x in pairs)
    # The rest of δ is rounded down, and so is each part of the rest below, since all δs
    # together must not exceed delta.
    used_delta = add_up(float(np.asarray(x.delta)) for x in pairs)
    remaining_delta = math.nextafter(delta - used_delta, -math.inf)
    groups = _groups(x for x in composed if not isinstance(x, events.EpsilonDelta))
    if not groups:
        return total if used_delta <= delta else math.inf
    delta_of_group = math.nextafter(remaining_delta / len(groups), -math.inf)
    if delta_of_group <= 0:
        return math.inf
    return add_up([total, *(float(group.epsilon(delta_of_group)) for group in groups)])


def _groups(composed: Iterable[Event]) -> list[profiles.Profile]:
    """The privacy profiles whose ε add up, one for each group of events.

    All events with a privacy-loss distribution or a GDP parameter are composed into one
    profile. Each remaining event has its own profile.
    """
    plds, other_profiles, total_variation = [], [], 0.0
    for event_profile in map(profiles.of, composed):
        on_lattice = isinstance(event_profile, profiles.LatticeProfile)
        profile = event_profile.gaussian if on_lattice else event_profile
        if isinstance(profile, pld.PLD):
            plds.append(profile)
        elif isinstance(profile, profiles.Pure):
            plds.append(pld.pure(float(np.asarray(profile.pure_epsilon))))
        elif profile.mu is not None:
            # A μ-GDP event composes like one Gaussian mechanism of that μ.
            plds.append(pld.gaussian(float(np.asarray(profile.mu))))
        else:
            other_profiles.append(event_profile)
            continue
        # Distances in total variation of the runs on lattices add up.
        if on_lattice:
            total_variation += event_profile.total_variation
    # The PLD of a composition is the list of all steps.
    composed_profile = pld.PLD(tuple(step for part in plds for step in part.steps))
    if total_variation:
        composed_profile = profiles.LatticeProfile(composed_profile, total_variation)
    return [*([composed_profile] if plds else []), *other_profiles]


class GaussianBound(NamedTuple):
    """Three numbers that bound the privacy loss of a mechanism.

    Over several mechanisms, mu², slack and total_variation add up. The numbers say that
    a second mechanism with these properties exists:

    1. On each data set, the distributions of the outputs of both mechanisms are within
       a total variation distance of `total_variation`.
    2. With probability 1 − `slack`, the second mechanism post-processes the output of a
       Gaussian mechanism with the GDP parameter `mu`.
    3. With probability `slack`, independently of the data, the second mechanism reveals
       the data.

    Let mechanisms with such numbers run, as long as Σ mu² <= μ², Σ slack <= s and
    Σ total_variation <= τ. Earlier outputs may determine the numbers of later
    mechanisms. Then all mechanisms together are (ε, δ_μ(ε) + s + (1 + e^ε) τ)-DP for
    every ε >= 0, where δ_μ is the profile of μ-GDP.

    Proof: replace each mechanism by its second mechanism. This replacement changes the
    distribution of all outputs by at most τ in total variation. Then change the second
    mechanisms, so that they reveal nothing in the case of property 3. Given the earlier
    outputs, the probability of this case does not depend on the data. The probability
    that this case occurs in at least one mechanism is at most s. The result is a
    sequence of GDP mechanisms whose Σ mu² never exceeds μ². Such a sequence is μ-GDP.

    Attributes:
      mu: the GDP parameter, f[].
      slack: the probability of revealing the data, in [0, 1].
      total_variation: the distance in total variation, at least 0.

    Reference: Smith and Thakurta (2022), https://arxiv.org/abs/2210.17520, and Koskela,
    Tobaben and Honkela (2023), https://arxiv.org/abs/2209.15596, for Σ mu².
    """

    mu: float
    slack: float
    total_variation: float


@scoped
def gaussian_bound(event: Event, slack: float) -> GaussianBound:
    """A GDP parameter that holds for a mechanism except with a small probability.

    Args:
      event: the mechanism.
      slack: the probability of the exception for a mechanism without a GDP parameter,
        in [0, 1).

    Returns:
      The `GaussianBound`. The slack of the result is 0 for a mechanism with a GDP
      parameter, δ for an `EpsilonDelta` event, and the argument `slack` for any other
      mechanism. For such other mechanisms, mu is rounded up, mostly by less than 0.5 %,
      and is infinite if slack is 0. The total_variation of the result is the
      total_variation of an `OnLattice` event, and 0 for any other event. mu is also
      infinite if the weights of a mixture do not add up to 1.

    Raises:
      ValueError: slack is out of range, or the event has a number that is out of range,
        traced or not a scalar.

    Reference: Dong, Roth and Su (2022), Proposition 2.12. If a mechanism's privacy
    profile is at most the profile of a pair of distributions, then the mechanism's
    outputs on two neighbouring data sets are a post-processing of the pair.

    Example:
      >>> from dpjax import Adjacency
      >>> step = events.PoissonGaussian(1.0, 0.01, Adjacency.ADD_REMOVE)
      >>> print(f"{gaussian_bound(events.Repeated(step, 1000), 1e-6).mu:.2f}")
      0.46
    """
    check_event(event)
    validate.scalar("slack", slack)
    validate.half_open_unit("slack", slack)
    slack = float(slack)
    if isinstance(event, events.OnLattice):
        inner = gaussian_bound(event.event, slack)
        total_variation = inner.total_variation + float(event.total_variation)
        return inner._replace(total_variation=total_variation)
    if isinstance(event, events.EpsilonDelta):
        mu = float(pure.mu(event.epsilon))
        return GaussianBound(mu, float(np.asarray(event.delta)), 0.0)
    profile = profiles.of(event)
    if profile.mu is not None:
        return GaussianBound(float(np.asarray(profile.mu)), 0.0, 0.0)
    mu = _search_mu(profile, slack) if slack else math.inf
    return GaussianBound(mu, slack, 0.0)


def _search_mu(profile: profiles.Profile, slack: float) -> float:
    """The smallest μ with δ(ε) <= slack + (1 − slack) δ_μ(ε) for ε >= 0, rounded up.

    δ is the given profile, and δ_μ is the profile of μ-GDP. The search evaluates ε(δ)
    at points of a geometric grid of δ. Each interval between evaluated points needs a
    certain μ. The search adds points of the grid in the interval that needs the largest
    μ, until no point of the grid is left in this interval.
    """
    top = min(float(profile.delta(0.0)), 1.0)
    if top <= slack:
        return 0.0
    deltas, epsilons = np.geomspace(min(top, 0.5), slack, _POINTS), dict[int, float]()
    indices = {*range(0, _POINTS, _SKIP), _POINTS - 1}
    while True:
        for i in indices - epsilons.keys():
            epsilons[i] = float(np.asarray(profile.epsilon(float(deltas[i]))))
        # The last value is repeated, so that the arrays have the same length each time.
        evaluated = np.pad(sorted(indices), (0, _POINTS - len(indices)), mode="edge")
        profile_epsilons = np.array([epsilons[i] for i in evaluated.tolist()])
        mus = _mu_by_interval(top, deltas[evaluated], profile_epsilons, slack)
        worst = int(np.argmax(mus))
        between = range(evaluated[worst - 1] + 1, evaluated[worst]) if worst else ()
        if not between or mus[worst] == math.inf:
            return float(mus[worst]) * rounding.MARGIN
        indices.update(between)


def _mu_by_interval(
    top: float, deltas: np.ndarray, profile_epsilons: np.ndarray, slack: float
) -> np.ndarray:
    """A μ with δ(ε) <= slack + (1 − slack) δ_μ(ε), for each interval of ε.

    δ_μ is the profile of μ-GDP. δ(ε) is the supremum over events S of P(S) − e^ε Q(S),
    for the output distributions P and Q on neighbouring data sets. So δ(ε) is convex in
    e^ε. Between two values of ε, δ(ε) is therefore at most the chord, the straight line
    in e^ε through both points. The chord and δ_μ decrease in ε. The function compares
    the chord at each point of a finer grid with δ_μ at the next point of that grid. For
    ε above the last value of ε, δ(ε) is at most slack.

    Args:
      top: an upper bound on δ(0).
      deltas: values of δ in decreasing order, f[n]; the last value is slack.
      profile_epsilons: ε(δ) for each value in `deltas`, f[n].
      slack: the number in the inequality above.

    Returns:
      The μ of the interval that ends at each ε, f[n]. The first interval begins at 0.
    """
    if not np.all(np.isfinite(profile_epsilons)):
        return np.full(profile_epsilons.size, np.inf)
    # Kairouz, Oh and Viswanath (2015), Theorem 3.1: (ε, δ)-DP bounds δ(0) as well.
    advantage = np.tanh(profile_epsilons / 2)  # (e^ε − 1) / (e^ε + 1)
    top = min(top, float(np.min(deltas + (1 - deltas) * advantage)) * rounding.MARGIN)
    profile_epsilons = np.where(deltas < top, profile_epsilons, 0.0)
    deltas = np.append(top, np.minimum(deltas, top))
    # Rounding may make an ε negative, or smaller than the ε before it.
    epsilons = np.maximum.accumulate(np.append(0.0, profile_epsilons))
    start, stop = epsilons[:-1, None], epsilons[1:, None]
    fraction = np.linspace(0.0, 1.0, _FINE + 1)
    # (e^ε − e^start) / (e^stop − e^start) for equal steps in ε, without overflow.
    width = np.maximum(stop - start, TINY)
    part = (
        np.exp(-width * (1 - fraction)) * np.expm1(-width * fraction) / np.expm1(-width)
    )
    chord = deltas[:-1, None] + (deltas[1:] - deltas[:-1])[:, None] * part
    required = np.maximum(chord[:, :-1] - slack, 0.0) / (1 - slack) * rounding.MARGIN
    fine = start + (stop - start) * fraction[1:]
    solvable = (required > 0) & (required < 1) & (fine > 0)
    mus = gdp.mu(np.where(solvable, fine, 1.0), np.where(solvable, required, 1e-3))
    mus = np.max(np.where(solvable, np.asarray(mus), 0.0), axis=1)
    # gdp.mu rounds down by far less than the caller's margin.
    return np.where(np.any(required >= 1, axis=1), np.inf, mus)
