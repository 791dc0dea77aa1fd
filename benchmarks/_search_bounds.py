"""Bound δ(ε) and ε(δ) of the best of K runs from below, by attacks.

An attacker who chooses the score chooses the order of the outputs. This order, together
with the outputs on which the attacker bets, gives a lower bound on δ(ε), as in the
equation of `accounting._selected`. The attack builds an order from the lowest score to
the highest. At each step the likelihood ratios of the outputs so far form an interval,
which grows at either end. A dynamic programme finds the best order of this kind, and
the best bets. On small examples no other order is better.
"""

import math
from typing import NamedTuple

import numpy as np

from dpjax._core.float64 import ULP
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax.accounting import events, selection
from dpjax.accounting._repetitions import Repetitions

_ATOMS = 512
_WIDTH = 9.0  # in standard deviations; all outputs beyond are one atom


class Pair(NamedTuple):
    """Two laws on atoms, where the atoms are in increasing order of likelihood ratio.

    Attributes:
      below_first: the probability under the first law P of the atoms before each atom,
        f64[n + 1].
      below_second: the same probability under the second law Q.
    """

    below_first: np.ndarray
    below_second: np.ndarray


def pairs_of(event: events.Event) -> list[Pair]:
    """Return pairs of laws that the mechanism attains on some neighbouring data sets.

    Outputs are grouped into atoms; this grouping is post-processing.

    Raises:
      ValueError: no pair is known for this event.
    """
    from scipy.special import ndtr

    if isinstance(event, events.EpsilonDelta):
        # Kairouz, Oh and Viswanath (2015), Theorem 3.1: the four outputs of the
        # mechanism from which all (ε, δ)-DP mechanisms are post-processed. An output is
        # divided into atoms by an independent random number.
        power, error = math.exp(_number(event.epsilon)), _number(event.delta)
        likelihood = (1 - error) / (1 + power)
        first = np.cumsum([0.0, 0.0, likelihood, power * likelihood, error])
        second = np.cumsum([0.0, error, power * likelihood, likelihood, 0.0])
        places = np.linspace(0, 4, _ATOMS + 1)
        return [Pair(*(np.interp(places, np.arange(5), x) for x in (first, second)))]
    if isinstance(event, events.PoissonGaussian):
        mu, rate = 1 / _number(event.noise_multiplier), _number(event.sampling_rate)
        low = -mu if event.adjacency is Adjacency.REPLACE else 0.0
    else:
        mu, rate, low = _mu(event), 1.0, 0.0
    inner = np.linspace(low - _WIDTH, mu + _WIDTH, _ATOMS - 1)
    edges = np.concatenate([[-np.inf], inner, [np.inf]])
    # The ratio of the two mixtures grows with the outcome.
    first, second = (
        (1 - rate) * ndtr(edges) + rate * ndtr(edges - mean) for mean in (mu, low)
    )
    swapped = Pair(1 - second[::-1], 1 - first[::-1])
    # With Gaussian noise alone, both directions are the same.
    return [Pair(first, second)] + ([swapped] if rate < 1 else [])


def _number(x: ArrayLike) -> float:
    """Convert a concrete number to a Python float."""
    return float(np.asarray(x))


def _mu(event: events.Event) -> float:
    """Return the GDP parameter of a composition of Gaussian mechanisms."""
    match event:
        case events.Gaussian(mu):
            return _number(mu)
        case events.Repeated(events.Gaussian(mu), count):
            return _number(mu) * _number(count) ** 0.5
        case events.Composed(steps):
            return sum(_mu(step) ** 2 for step in steps) ** 0.5
    raise ValueError(
        "event must be Gaussian, a composition of Gaussian events, one PoissonGaussian "
        f"or EpsilonDelta, since an attack needs its exact laws; got {event!r}."
    )


def generating_function(law: Repetitions, x: np.ndarray) -> np.ndarray:
    """Return the generating function G(x) = E x^K, for x in [0, 1]."""
    if isinstance(law, selection.Fixed):
        return x**law.count
    if isinstance(law, selection.Poisson):
        return np.exp(law.mean * (x - 1))
    # ((1 − (1 − γ) x)^−η − 1) / (γ^−η − 1), and its limit at η = 0.
    log_remainder = np.log1p(-(1 - law.stop) * x)
    if law.shape == 0:
        return log_remainder / math.log(law.stop)
    scale = math.expm1(-law.shape * math.log(law.stop))
    return np.expm1(-law.shape * log_remainder) / scale


def delta_lower(pair: Pair, epsilon: float, repetitions: Repetitions) -> float:
    """Return the δ of the best attack at one ε, rounded down."""
    # Entry [i, j] is G at the probability of the atoms i, …, j − 1.
    first, second = (
        generating_function(repetitions, np.maximum(x - x[:, None], 0.0)) for x in pair
    )
    power, n = np.exp(epsilon), len(first) - 1
    # The best run is in an atom with probability G(v + p) − G(v) under P, and
    # G(u + q) − G(u) under Q. The attacker bets on the atom if the bet increases δ.
    score = first - power * second
    above = np.maximum(score[:, 1:] - score[:, :-1], 0.0)  # the next atom is j
    below = np.maximum(score[:-1] - score[1:], 0.0)  # the next atom is i − 1
    value = np.zeros(1)
    for size in range(n - 1, -1, -1):
        # The intervals of this size start at 0, …, n − size.
        longer, value = value, np.zeros(n - size + 1)
        value[:-1] = np.diagonal(above, size) + longer
        value[1:] = np.maximum(value[1:], np.diagonal(below, size + 1) + longer)
    # The sum over the bets has at most 4 n values of G, each with an error of at most
    # 8 ULP (1 + E[K]). On both data sets, the sampler's distribution of K is within a
    # total variation τ of the law.
    error = 32 * n * ULP * (1 + repetitions.mean) + repetitions.total_variation
    return float(np.max(value) - (1 + power) * error)


def epsilon_lower(event: events.Event, delta: float, repetitions: Repetitions) -> float:
    """Return an ε below which an attack on one of the event's pairs exceeds δ."""
    return max(_epsilon_lower(pair, delta, repetitions) for pair in pairs_of(event))


def _epsilon_lower(pair: Pair, delta: float, repetitions: Repetitions) -> float:
    """Return an ε >= 0 below which the attack exceeds δ.

    The returned ε is within 1e-4 of the largest such ε.
    """

    def succeeds(epsilon: float) -> bool:
        return delta_lower(pair, epsilon, repetitions) > delta

    low, high = 0.0, 1.0
    while succeeds(high) and high < 512:
        low, high = high, 2 * high
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if succeeds(middle) else (low, middle)
    return low
