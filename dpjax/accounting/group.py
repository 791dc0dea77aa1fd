"""Group privacy: the guarantee for several examples, from the guarantee for one.

Let an attack on one example have the false-positive rate α. By the profile δ(ε), the
attack's true-positive rate is at most h(α) = min_ε (δ(ε) + e^ε α). Consider two data
sets that differ in k examples, and a sequence of data sets from the first to the second
in which each step changes one example. If an attack answers "positive" at the rate α on
the first data set of the sequence, the rate is at most h(α) on the second data set, at
most h(h(α)) on the third data set, and so on. So the curve h(…h(α)…), which is h
composed k times, bounds the true-positive rate for the group. For any ε_1, …, ε_k, this
curve is nowhere above a line with the slope e^{Σ ε_i}. The value of the line at α = 0
bounds the δ of the group:

    δ_k(Σ_i ε_i) <= Σ_i e^{ε_{i+1} + … + ε_k} δ(ε_i).

Equal ε_i = ε give the simple bound δ_k(kε) <= δ(ε) Σ_{i<k} e^{iε}. The best ε_i give
the curve itself. The best ε_i are the logarithms of the slopes of h at the rates α,
h(α), h(h(α)), …, a sequence called a path. This module evaluates δ(ε) at about a
hundred points, and follows the paths from many α. The line of each path is a valid
bound.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import ULP, cast, default_float, float64, scope
from dpjax._core.typing import ArrayLike
from dpjax.accounting.profiles import Gaussian, Guarantee, Profile, Pure

# δ(ε) is evaluated at some points over the whole range, and then, in a few rounds, in
# the middle between each point that the best paths use and its neighbours. The grid
# increases ε in proportion to the square of the distances between points: by less than
# 0.3 % for GDP, if ε is below 30 and k is at most 8.
_COARSE_POINTS, _ROUNDS, _POINTS_PER_ROUND = 17, 4, 24
# The number of paths. If two paths use the same lines, all paths between these paths
# also use these lines.
_PATHS = 2048
# The largest ε_i is at most about 1.3¹⁶ = 66 times the first value for the largest ε_i.
_GROWTH, _TRIES = 1.3, 16
# A logarithm of a sum of k <= 1e4 terms, of at most 1e4 in size, has an error of far
# less than 1e-9.
_MARGIN = 1e-9


class _Lines(NamedTuple):
    """Lines e^log_delta + e^epsilon α above an attack's true-positive rate.

    The attack distinguishes two data sets that differ in a group of k examples. α is
    the attack's false-positive rate, and each line is a bound for every α. A line
    composes k lines, one for each example, with the slopes e^{ε_1}, …, e^{ε_k}.

    Attributes:
      epsilon: the logarithm of each line's slope, Σ ε_i, f[n].
      log_delta: the logarithm of each line's value at α = 0, f[n].
      path_epsilons: |ε_1|, …, |ε_k| for each line, f[n, k].
    """

    epsilon: np.ndarray
    log_delta: np.ndarray
    path_epsilons: np.ndarray


@float64("up")
def _times64(mu: jax.Array, size: jax.Array) -> jax.Array:
    return mu * size * (1 + 2 * ULP)


def _lines(table: dict[float, float], size: int, lowest: float) -> _Lines:
    """The `_Lines` for a group of examples, from values of δ(ε) for one example.

    Args:
      table: δ for each ε >= 0 at which the profile was evaluated.
      size: k, the number of examples.
      lowest: the logarithm of the least positive false-positive rate for which the
        function chooses a line. The function also chooses a line for the rate 0.
    """
    epsilons = np.array(sorted(table))
    deltas = np.array([table[x] for x in epsilons])
    with np.errstate(divide="ignore", over="ignore"):
        # The line of slope e^{−ε}: the profile also holds for the two data sets in the
        # other order, so that 1 − α <= δ + e^ε (1 − h(α)).
        mirrored = -np.expm1(-epsilons) + np.exp(-epsilons) * deltas
        slopes = np.concatenate([epsilons, -epsilons, [-np.inf]])
        logs = np.log(np.concatenate([deltas, mirrored, [1.0]]) * (1 + 4 * ULP))
        alpha = np.append(np.linspace(lowest, 0.0, _PATHS), -np.inf)
        total, log_delta = np.zeros(alpha.size), np.full(alpha.size, -np.inf)
        path_epsilons = np.zeros((size, alpha.size))
        for row in path_epsilons:
            options = np.logaddexp(logs, slopes + alpha[:, None])
            best = np.argmin(options, axis=1)
            # log of δ(ε_i) + e^{ε_i} D, for the intercept D of the path so far.
            log_delta = np.logaddexp(logs[best], slopes[best] + log_delta)
            total = total + slopes[best]
            alpha = np.minimum(np.take_along_axis(options, best[:, None], 1)[:, 0], 0.0)
            row[:] = np.abs(slopes[best])
    # A rate is at most 1, so that the constant 1 is also a line above the rate.
    total, log_delta = np.append(-np.inf, total), np.append(0.0, log_delta)
    path_epsilons = np.concatenate([np.zeros((size, 1)), path_epsilons], axis=1)
    order = np.lexsort((log_delta, total))
    lines = _Lines(total[order], log_delta[order], path_epsilons.T[order])
    # A line is useful only if every line with a smaller slope has a larger intercept.
    running_minimum = np.minimum.accumulate(lines.log_delta)
    useful = np.append(True, lines.log_delta[1:] < running_minimum[:-1])
    return _Lines(*(x[useful] for x in lines))


def _delta_at(lines: _Lines, epsilon: float) -> tuple[float, slice]:
    """The least δ that the lines prove at ε, and the indices of the lines that give δ.

    The indices are a slice.
    """
    i = int(np.searchsorted(lines.epsilon, epsilon, side="right"))
    low = math.exp(min(lines.log_delta[i - 1], 0.0))
    if i == len(lines.epsilon):
        return low, slice(i - 1, i)
    # e^ε = (1 − w) e^{ε_1} + w e^{ε_2}. The mean of the lines of the slopes e^{ε_1} and
    # e^{ε_2}, with the same weights, has the slope e^ε, and is also a valid line.
    high = math.exp(min(lines.log_delta[i], 0.0))
    gap = lines.epsilon[i] - lines.epsilon[i - 1]
    weight = math.exp(epsilon - lines.epsilon[i])
    weight *= math.expm1(lines.epsilon[i - 1] - epsilon) / math.expm1(-gap)
    return (1 - weight) * low + weight * high, slice(i - 1, i + 1)


def _epsilon_at(lines: _Lines, delta: float) -> tuple[float, slice]:
    """The least ε that the lines prove at δ, and the indices of the lines that give ε.

    The indices are a slice.
    """
    sufficient = lines.log_delta <= math.log(delta)
    if not np.any(sufficient):
        return math.inf, slice(len(sufficient) - 1, len(sufficient))
    i = int(np.argmax(sufficient))  # not 0, the index of the constant line 1
    low, high = np.exp(np.minimum(lines.log_delta[i - 1 : i + 1], 0.0))
    weight = (low - delta) / (low - high)
    before = math.exp(lines.epsilon[i - 1] - lines.epsilon[i])
    mean = lines.epsilon[i] + math.log(weight + (1 - weight) * before)
    return max(mean, 0.0), slice(i - 1, i + 1)


def _refine(
    profile: Profile,
    size: int,
    top: float,
    bound_of: Callable[[_Lines], tuple[float, slice]],
    lowest: float,
) -> float:
    """The bound that `bound_of` computes from a group's `_Lines`, on a fine grid of ε.

    In each round, the function adds points to the grid, next to the values of ε that
    the bound uses, and evaluates δ(ε) for one example at the added points. The added
    points are between 0 and `top`. `lowest` is the argument of `_lines`.
    """
    table = {}

    def add(points: np.ndarray) -> None:
        for x in points.tolist():
            if x not in table:
                table[x] = min(float(profile.delta(x)), 1.0)

    # A profile may prove only one pair (ε, δ), or prove no smaller δ above some ε. The
    # table contains this ε.
    deltas = (0.5, 1e-6, max(math.exp(lowest), 1e-100))
    corner_epsilons = [float(profile.epsilon(x)) for x in deltas]
    add(np.array([x for x in corner_epsilons if x <= top]))
    add(np.linspace(0.0, top, _COARSE_POINTS))
    for _ in range(_ROUNDS):
        lines = _lines(table, size, lowest)
        points = np.array(sorted(table))
        # The widest of the intervals next to a point that a best path uses.
        adjacent = np.isin(points, lines.path_epsilons[bound_of(lines)[1]])
        gaps = np.where(adjacent[1:] | adjacent[:-1], np.diff(points), 0.0)
        widest = np.argsort(gaps)[-_POINTS_PER_ROUND:]
        widest = widest[gaps[widest] > 0]
        add((points[widest] + points[widest + 1]) / 2)
    return bound_of(_lines(table, size, lowest))[0]


def epsilon(profile: Profile, delta: ArrayLike, size: int) -> jax.Array:
    """An upper bound on the ε for a group of examples.

    Args:
      profile: the `profiles.Profile` for one example, such as a `pld.PLD`, a
        `Guarantee` or the result of `profiles.of`.
      delta: f[], strictly between 0 and 1.
      size: k, the number of examples in the group, at least 1.

    Returns:
      ε, f[], rounded up. For `profiles.Gaussian`, the group's GDP parameter is kμ, and
      ε is exact. For `profiles.Pure`, the result is the least ε for which every
      (k pure_epsilon)-DP mechanism is (ε, δ)-DP. For k > 1, the profile
      `pld.pure(pure_epsilon)` usually gives a smaller ε. For other profiles and k > 1,
      δ(ε) is evaluated at about a hundred points. ε is inf if these points prove no
      finite ε, for instance for large groups with little noise.

    Raises:
      ValueError: an argument is out of range.

    Privacy: the bound holds for any k examples, under the adjacency of the profile. The
    profile must hold for two neighbouring data sets in both orders, as all profiles of
    dpjax do. The bound uses only the profile. A bound that also uses the mechanism, for
    instance Poisson sampling, may therefore be tighter.

    Reference: Dong, Roth and Su (2022), section 2.5, https://arxiv.org/abs/1905.02383.

    Example:
      >>> from dpjax.accounting import pld
      >>> from dpjax.accounting.profiles import Gaussian
      >>> print(f"{epsilon(Gaussian(0.5), 1e-5, 4):.3f}")
      9.997
      >>> print(f"{epsilon(pld.gaussian(0.5), 1e-5, 4):.1f}")
      10.0
    """
    profile, size = _check_arguments(profile, size)
    validate.open_unit("delta", delta)
    if size == 1:
        return profile.epsilon(delta)
    target, dtype = float(np.asarray(delta)) * (1 - _MARGIN), default_float()
    with scope():
        top = size * max(float(profile.epsilon(target / size)), 1e-6)
        if not math.isfinite(top):
            return cast(jnp.asarray(jnp.inf), dtype, "up")
        for _ in range(_TRIES):
            # The simple bound with equal ε_i, δ Σ_{i<k} e^{iε}, meets the target.
            epsilon_of_example = top / size
            ratio = float(profile.delta(epsilon_of_example)) / target
            log_sum = float(np.logaddexp.reduce(epsilon_of_example * np.arange(size)))
            if ratio <= 0 or math.log(ratio) + log_sum <= 0:
                break
            top *= _GROWTH
        lowest = math.log(target) - top - 10
        bound = _refine(profile, size, top, lambda x: _epsilon_at(x, target), lowest)
        return cast(jnp.asarray(bound * (1 + _MARGIN) + _MARGIN), dtype, "up")


def _check_arguments(profile: Profile, size: int) -> tuple[Profile, int]:
    """Check the arguments, and return a profile and the size of a group.

    The function replaces a `Guarantee` by its profile. For a `Gaussian` or a `Pure`
    profile, the function returns a profile of the whole group and the size 1.
    """
    if isinstance(profile, Guarantee):
        profile = profile.profile
    size = validate.static_int("size", size, minimum=1)
    if isinstance(profile, Gaussian):
        return Gaussian(_times64(profile.mu, size)), 1
    if isinstance(profile, Pure):
        return Pure(_times64(profile.pure_epsilon, size)), 1
    return profile, size


def delta(profile: Profile, epsilon: ArrayLike, size: int) -> jax.Array:
    """An upper bound on the δ for a group of examples.

    Args:
      profile: as for the function `group.epsilon`.
      epsilon: f[], at least 0, finite.
      size: k, the number of examples in the group, at least 1.

    Returns:
      δ, f[], rounded up, at most 1.

    Raises:
      ValueError: an argument is out of range.

    Privacy: the conditions are those of `group.epsilon`.

    Reference: Dong, Roth and Su (2022), section 2.5, https://arxiv.org/abs/1905.02383.

    Example:
      >>> from dpjax.accounting.profiles import Gaussian
      >>> print(f"{delta(Gaussian(0.5), 1.0, 2):.4f}")
      0.1269
    """
    profile, size = _check_arguments(profile, size)
    validate.nonnegative("epsilon", epsilon)
    if size == 1:
        return profile.delta(epsilon)
    target, dtype = float(np.asarray(epsilon)) * (1 - _MARGIN), default_float()
    with scope():
        # A path may use an ε_i above ε, and later slopes below 1.
        sampled = float(profile.epsilon(1e-6))
        top = max(target, size * sampled if math.isfinite(sampled) else 0.0, 1e-6)
        lowest = -top - 100.0
        bound = _refine(profile, size, top, lambda x: _delta_at(x, target), lowest)
        return cast(jnp.asarray(min(bound * (1 + _MARGIN), 1.0)), dtype, "up")
