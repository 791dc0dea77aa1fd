"""The privacy profile of the best of K runs, from the profile of one run.

A search runs a mechanism K times, with K drawn independently of the data, and releases
the run with the best score. The score is part of the mechanism's output, and ties are
resolved at random. Let P and Q be the distributions of one run's output on neighbouring
data sets, with the likelihood ratio r = dP/dQ. Let G(x) = E[x^K] be the generating
function of K. Let v(y) and u(y) be the probabilities, under P and Q, that a run scores
below the output y. The output of the best run is y with density G′(v(y)) dP, or
G′(u(y)) dQ, since all other K − 1 runs must score below y. So

    δ(ε) = ∫ [r G′(v) − e^ε G′(u)]₊ dQ,    for any ε >= 0.

If K = 0, the output has the same distribution on both data sets and adds nothing to δ.
The outputs that score below y form an event. The pair (u, v) therefore belongs to the
region R of the pairs (Q(S), P(S)) for all events S. At each r, the integrand is at most
its maximum over R:

    δ(ε) <= ∫ φ(r) dQ,    φ(r) = max over (u, v) in R of [r G′(v) − e^ε G′(u)]₊.    (1)

Let h(t) = ∫ [r − t]₊ dQ be the hockey-stick divergences of one run. Then h(e^ε) is the
δ(ε) of one run. The function h determines the region R, and also ∫ f(r) dQ for every
convex function f. If an upper bound replaces h, R grows, and the bound (1) also grows.
An upper bound on h therefore suffices. φ is convex. The code bounds φ from above by a
convex, piecewise linear function. This function is a sum of terms w_j [r − e^ε s_j]₊,
with kinks at r = e^ε s_j and positive weights w_j. So (1) becomes

    δ(ε) <= Σ_j w_j h(e^ε s_j).                                                     (2)

The bound (1) is never above the Rényi bounds of Papernot and Steinke (2022) nor above
the profile bounds of Koskela, Redberg and Wang (2024): docs/selection.md has the proof.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpjax._core import validate
from dpjax._core.float64 import ULP, cast, default_float, scope
from dpjax._core.typing import ArrayLike
from dpjax.accounting import pld
from dpjax.accounting._repetitions import Fixed, Repetitions

# The number of evaluations of one run's profile. Linear interpolation of h between the
# evaluated points increases ε by about 0.1 %.
_POINTS = 64
# The number of cells on the boundary of R. On each cell, G′ changes by a factor of
# about e^0.001.
_CELLS = 1 << 14
# Values for the probability that r is infinite, divided by δ / E[K]. The first value at
# which ε is finite is used.
_TAILS = (1e-4, 1e-2, 0.1, 0.5, 0.9)
_LEAST = 1e-30  # the least δ of one run at which its profile is evaluated
# A bound on the relative errors of a few thousand operations in float64.
_SLACK = 2.0**-36
_LARGEST = 700.0  # an ε above which e^ε overflows
_STEP = 2.0**-24  # the step of a difference quotient, relative to the number


class Profile(Protocol):
    """A mechanism's privacy profile: upper bounds ε(δ) on ε and δ(ε) on δ."""

    @property
    def mu(self) -> ArrayLike | None:
        """The mechanism's GDP parameter, f[], or None if no parameter is known."""
        ...

    def epsilon(self, delta: ArrayLike, /) -> jax.Array:
        """An ε at which the mechanism is (ε, δ)-DP, for a given δ."""
        ...

    def delta(self, epsilon: ArrayLike, /) -> jax.Array:
        """A δ at which the mechanism is (ε, δ)-DP, for a given ε."""
        ...


class Curve(NamedTuple):
    """A piecewise linear upper bound on h(t) = ∫ [r − t]₊ dQ for one run.

    P and Q are the distributions of one run's output on neighbouring data sets. r is
    the likelihood ratio dP/dQ.

    Attributes:
      ratio: the points t, f64[n], increasing from 0.
      value: the bound at each point, f64[n], decreasing. The bound is constant after
        the last point.
    """

    ratio: np.ndarray
    value: np.ndarray

    def at(self, t: np.ndarray) -> np.ndarray:
        """The bound on h(t) = ∫ [r − t]₊ dQ for each t, f64[m], by interpolation.

        The relative rounding error is small even where the bound falls steeply.
        """
        t = np.minimum(t, self.ratio[-1])
        i = np.clip(np.searchsorted(self.ratio, t) - 1, 0, len(self.ratio) - 2)
        x, y = self.ratio, self.value
        left, right = x[i + 1] - t, t - x[i]
        return (left * y[i] + right * y[i + 1]) / (x[i + 1] - x[i])

    def max_probability(self, u: np.ndarray) -> np.ndarray:
        """An upper bound on P(S) over all events S with Q(S) = u, for each u, f64[m].

        P and Q are the distributions of one run's output on neighbouring data sets.
        """
        # An event with probabilities (u, v) has v − t u <= h(t), for every t >= 0.
        bounds = self.value[:, None] + self.ratio[:, None] * u
        return np.minimum(np.min(bounds, axis=0) * (1 + 4 * ULP), 1.0)


def lower_hull(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The vertices of the lower convex hull of the points (x, y), sorted by x."""
    order = np.lexsort((y, x))
    # Of several points with the same x, only the lowest may be a vertex.
    x, first = np.unique(x[order], return_index=True)
    y = y[order][first]
    xs, ys, vertices = x.tolist(), y.tolist(), []
    for i in range(len(xs)):
        while len(vertices) > 1:
            a, b = vertices[-2:]
            dx, dy = xs[b] - xs[a], ys[b] - ys[a]
            cross = dy * (xs[i] - xs[a]) - (ys[i] - ys[a]) * dx
            if cross < 0:
                break
            vertices.pop()
        vertices.append(i)
    return x[vertices], y[vertices]


def curve_of(profile: Profile, tail: float) -> Curve:
    """The `Curve` of one run, from the privacy profile of one run.

    The function evaluates ε at values of δ from δ(0) down to `tail`, or down to 1e-30
    if `tail` is below 1e-30.
    """
    total = float(profile.delta(0.0))  # the total variation of P and Q
    # For large ε, δ(ε) is about e^{−x²} with x proportional to ε.
    x = np.sqrt(-np.log(np.clip([total, tail], _LEAST, 1.0)))
    deltas = np.exp(-np.square(np.linspace(x[0], np.max(x), _POINTS)[1:]))
    epsilons = np.array([float(profile.epsilon(x)) for x in deltas])
    usable = epsilons <= _LARGEST
    # The curve also contains both ends of the range of ε. At the largest ε, the profile
    # may prove a smaller δ.
    end = np.max(epsilons[usable], initial=0.0)
    epsilons = np.append(epsilons[usable], [0.0, end])
    deltas = np.append(deltas[usable], [total, float(profile.delta(end))])
    # h(e^ε) = δ(ε). The profile also holds with P and Q exchanged. The complement of an
    # event then gives h(e^−ε) <= 1 − e^−ε (1 − δ(ε)). At 0, h is 1.
    large, small = np.exp(epsilons) * (1 + 4 * ULP), np.exp(-epsilons) * (1 - 4 * ULP)
    ratio = np.concatenate([[0.0], small, large])
    value = np.concatenate([[1.0], 1 - small * (1 - deltas) + 4 * ULP, deltas])
    # h is convex, so that the lower hull of points above h is also above h.
    ratio, value = lower_hull(ratio, value)
    return Curve(ratio, np.minimum.accumulate(value))


def profile_of_all_runs(profile: Profile, repetitions: Repetitions) -> Profile | None:
    """The privacy profile of a search that releases all of its runs.

    The result is None if the number of runs is random, or if a run has neither a GDP
    parameter nor a PLD.
    """
    if not isinstance(repetitions, Fixed):
        return None
    if profile.mu is not None:
        profile = pld.gaussian(profile.mu)
    if not isinstance(profile, pld.PLD):
        return None
    return pld.compose(profile, repetitions.count)


def _evaluate_each(fn: Callable[[float], float], x: ArrayLike) -> jax.Array:
    """Compute fn for each number of x, in float64, and round the results up."""
    dtype = default_float()
    with scope():
        values = np.vectorize(fn, otypes=[np.float64])(np.asarray(x, np.float64))
        return cast(jnp.asarray(values), dtype, "up")


def bound_of(curve: Curve, repetitions: Repetitions) -> Callable[[float], float]:
    """An upper bound on the δ of the best of K runs, as a function of ε.

    The bound is (2) in the docstring of this module, with the upper bound `curve` on
    the function h of one run. `repetitions` is the distribution of K. The bound
    includes the rounding errors in draws of K.
    """
    slope = repetitions.derivative
    small = np.geomspace(1e-15, 0.1, 512)
    even = np.linspace(0, 1, 1025)
    u = np.unique(np.concatenate([[0.0], small**3, small, 1 - small, even]))
    # Between two of the further points u, G′ grows by about the same factor along the
    # boundary of R.
    floor = np.exp(-60.0) * repetitions.mean
    level = np.log(np.maximum(slope(u), floor))
    level += np.log(np.maximum(slope(curve.max_probability(u)), floor))
    levels = np.linspace(level[0], level[-1], _CELLS)
    u = np.unique(np.append(u, np.interp(levels, level, u)))
    # G′ grows. On a cell from u_k to u_{k+1} the bracket of (1) is therefore at most
    # r G′(v_{k+1}) − e^ε G′(u_k), which is a line in r. The maximum of the lines of all
    # cells, and of a first line 0, bounds φ(r).
    slopes = np.append(0.0, slope(curve.max_probability(u[1:])))
    offsets = np.append(0.0, slope(u[:-1]))
    slopes, offsets = lower_hull(slopes, offsets)
    # The maximum of the lines is Σ_j w_j [r − e^ε s_j]₊, where the kinks s_j are the
    # slopes of the hull. Each difference of floats has one relative rounding error.
    weights = np.diff(slopes)
    kinks = np.diff(offsets) / weights
    # A relative error of 4 ULP in the argument x of G′ changes log G′(x) by
    # 4 ULP x G″(x) / G′(x).
    slack = 1 + _SLACK + 64 * ULP * repetitions.steepness

    def bound(epsilon: float) -> float:
        power = np.exp(min(epsilon, _LARGEST))
        total = np.sum(weights * curve.at(power / slack * kinks)) * slack
        # On both data sets, the draws of K are within a total variation τ of their
        # distribution.
        return float(total + (1 + power) * repetitions.total_variation)

    return bound


def least_epsilon(bound: Callable[[float], float], delta: float) -> float:
    """The least ε with bound(ε) <= delta, rounded up; inf if no such ε is found."""
    low, high = 0.0, 1.0
    while bound(high) > delta and high < _LARGEST:
        low, high = high, 2 * high
    if bound(high) > delta:
        return np.inf
    # The upper end always has a bound of at most δ.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if bound(middle) <= delta else (middle, high)
    return 0.0 if bound(0.0) <= delta else high


class Selected(NamedTuple):
    """The privacy profile of the best of K runs of a mechanism.

    Attributes:
      profile: the profile of one run.
      repetitions: the distribution of K.
    """

    profile: Profile
    repetitions: Repetitions

    mu = None  # no GDP parameter is known

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """An ε at which the best run is (ε, δ)-DP, for each δ in (0, 1), f[*b].

        JAX can compute first derivatives with respect to the numbers of `profile`. δ
        must not be traced.
        """
        validate.open_unit("delta", delta)
        leaves, structure = jax.tree.flatten(self)
        positions = [i for i, x in enumerate(leaves) if isinstance(x, Tracer)]
        if not positions:
            return _evaluate_each(self._epsilon, delta)

        def epsilons_at(*numbers: Any) -> jax.Array:
            traced = dict(zip(positions, numbers, strict=True))
            selected = structure.unflatten(
                traced.get(i, x) for i, x in enumerate(leaves)
            )
            return _evaluate_each(selected._epsilon, delta)

        @jax.custom_jvp
        def differentiable_epsilon(*numbers: jax.Array) -> jax.Array:
            if any(isinstance(x, Tracer) for x in numbers):
                raise ValueError(
                    "mechanism must have numbers that jax.jit and jax.vmap do not "
                    "trace, and that jax.grad differentiates at most once; got "
                    f"{numbers!r}."
                )
            return epsilons_at(*numbers)

        @differentiable_epsilon.defjvp
        def jvp(numbers: Any, tangents: Any) -> Any:
            value, tangent_out = differentiable_epsilon(*numbers), 0.0
            for i, tangent in enumerate(tangents):
                # The step goes towards 0, since a rate must not exceed 1. At 0 the step
                # goes upwards.
                step = _STEP * float(numbers[i]) or -_STEP
                with scope():
                    shifted = float(numbers[i]) - step
                    at_shifted = epsilons_at(*numbers[:i], shifted, *numbers[i + 1 :])
                    slope = (epsilons_at(*numbers) - at_shifted) / step
                tangent_out += jnp.asarray(slope, value.dtype) * tangent
            return value, tangent_out

        return differentiable_epsilon(*(leaves[i] for i in positions))

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """A δ at which the best run is (ε, δ)-DP, for each ε >= 0, f[*b].

        JAX must trace neither ε nor the numbers of `profile`.
        """
        validate.nonnegative("epsilon", epsilon, finite=False)
        return _evaluate_each(self._delta, epsilon)

    def _epsilon(self, delta: float) -> float:
        all_runs = profile_of_all_runs(self.profile, self.repetitions)
        composed = np.inf if all_runs is None else float(all_runs.epsilon(delta))
        best_run_epsilon = np.inf
        for share in _TAILS:
            tail = share * delta / max(1.0, self.repetitions.mean)
            bound = bound_of(curve_of(self.profile, tail), self.repetitions)
            best_run_epsilon = least_epsilon(bound, delta)
            if best_run_epsilon < np.inf:
                break
        return min(composed, best_run_epsilon)

    def _delta(self, epsilon: float) -> float:
        epsilon = min(epsilon, _LARGEST)
        all_runs = profile_of_all_runs(self.profile, self.repetitions)
        composed_delta = 1.0 if all_runs is None else float(all_runs.delta(epsilon))
        # The result is about E[K] times the δ of one run at this ε, or more.
        tail = float(self.profile.delta(epsilon)) * _TAILS[0]
        curve = curve_of(self.profile, tail)
        return min(composed_delta, bound_of(curve, self.repetitions)(epsilon))
