"""Search for the best correlation of noise for batches that are drawn at random.

A strategy is the matrix C of correlated noise C⁻¹z, where z is independent Gaussian
noise. A workload is the linear map that an optimizer applies to the gradient sums. The
error is the root mean square of the workload's output if its input is the noise alone.

At the same noise multiplier, correlated noise can have a smaller error than independent
noise. However, random batches amplify privacy less with correlated noise, because the
releases of several steps together reveal in which steps an example takes part. The best
compromise depends on ε. So the search estimates, for each strategy, the noise
multiplier that the target ε requires. The search compares the errors at these noise
multipliers. The exact noise multiplier is computed only for the best strategy, and for
strategies whose estimate does not converge.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.float64 import TINY
from dpjax._core.searches import secants
from dpjax._matrices.strategy import Toeplitz, Workload, check_workload
from dpjax.accounting import _estimates, calibrate
from dpjax.accounting.correlated import epsilon as epsilon_of
from dpjax.accounting.correlated import error, mu
from dpjax.accounting.events import Composed, PoissonGaussian, Repeated
from dpjax.strategies import _making, _optimize

Sampling = Literal["cyclic_poisson", "random_bins", "fresh_bins"]
# The coarse grid has _GRID_SIZE values of λ. The logarithms of the distances 1 − λ are
# evenly spaced, from distance 1 to _MIN_DISTANCE. The second grid is _REFINEMENT times
# finer.
_GRID_SIZE, _MIN_DISTANCE, _REFINEMENT = 6, 0.02, 2
# Strategies are compared once |log ε − log target| is at most about _TOLERANCE. Each
# evaluation of ε runs an accountant. So the secant method gets at most _MAX_EVALUATIONS
# evaluations.
_TOLERANCE, _MAX_EVALUATIONS = 1e-3, 10
_MAX_EPSILON = 100.0  # the largest ε for which `refine` uses estimates of ε
# The ratio of the mean slope of log ε between two evaluations to the slope at one of
# the two is assumed to be in this range.
_MIN_SLOPE, _MAX_SLOPE = 0.7, 1.5


class Amplified(NamedTuple):
    """A strategy for random batches, with the noise multiplier that the strategy needs.

    Attributes:
      strategy: the matrix C. The noise is C⁻¹z, where z is independent Gaussian noise.
        For cyclic Poisson sampling, the number of bands of C is also the number of
        groups of examples.
      noise_multiplier: the standard deviation of z over the clip norm. This number is
        the minimum at which an accountant bounds the run's ε by the requested ε. While
        the search runs, the number is an estimate of this minimum.
      error: the root mean square of the workload's output if the input is the noise
        alone, over all steps, in units of the clip norm.
    """

    strategy: Toeplitz
    noise_multiplier: float
    error: float


class _Goal(NamedTuple):
    """The arguments of `amplified`.

    Attributes:
      workload: the workload in which errors are measured.
      epsilon: the target ε.
      delta: δ.
      run: the other arguments: num_steps, steps_per_epoch, sampling and adjacency.
    """

    workload: Workload
    epsilon: float
    delta: float
    run: dict[str, Any]


class Start(NamedTuple):
    """The first point of a secant search for the noise multiplier σ that gives an ε.

    Attributes:
      noise_multiplier: the first σ at which to compute ε.
      slope: an estimate of the derivative of log ε with respect to log σ.
    """

    noise_multiplier: float
    slope: float


def amplified(
    workload: Workload,
    *,
    num_steps: int,
    steps_per_epoch: int,
    epsilon: float,
    delta: float,
    sampling: Sampling,
    adjacency: Adjacency,
) -> Amplified:
    """Search for the strategy with the least error at a given ε, for random batches.

    The error of a strategy is the root mean square of the noise in the workload's
    output, at the noise multiplier that the strategy needs for ε and δ.

    Args:
      workload: the linear map that the optimizer applies to the gradient sums. Its
        numbers must be concrete, not traced.
      num_steps: the number of steps of the run, static, at least 1.
      steps_per_epoch: n_b, the number of steps per epoch, static, at least 1.
      epsilon: ε of the whole run, positive.
      delta: δ, strictly between 0 and 1.
      sampling: as for `accounting.correlated.epsilon`. For "cyclic_poisson" the search
        compares banded strategies with 1, 2, 4, ... bands. For "random_bins" and
        "fresh_bins" the search compares geometric strategies.
      adjacency: the relation between the data sets that the guarantee compares.

    Returns:
      An `Amplified`: the strategy, its noise multiplier and its error. The search
      compares several strategies, including independent noise. The returned strategy
      has the least error among these strategies, up to a relative difference of about
      1/1000. The choice of the strategies is a heuristic. The noise multiplier is
      proven: at this noise multiplier, an accountant bounds the run's ε by the
      requested ε. For cyclic Poisson sampling and a strategy with p bands, the run must
      divide the examples into p fixed groups. Step t must sample each example of group
      t mod p independently with probability p / n_b.

    Raises:
      ValueError: an argument is out of range, or the workload is invalid for a run of
        num_steps steps.

    Reference: Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153, for
    banded strategies and the choice of their bands.

    Example:
      >>> from dpjax import workloads
      >>> best = amplified(
      ...     workloads.momentum_sum(0.9), num_steps=20, steps_per_epoch=5,
      ...     epsilon=4.0, delta=1e-5, sampling="cyclic_poisson",
      ...     adjacency=Adjacency.ZERO_OUT)
      >>> 1 + best.strategy.numerator.size
      4
    """
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    n_b = validate.static_int("steps_per_epoch", steps_per_epoch, minimum=1)
    validate.one_of("sampling", sampling, get_args(Sampling))
    epsilon = validate.positive_float("epsilon", epsilon)
    validate.open_unit("delta", delta)
    workload = check_workload(workload, num_steps)
    run = {
        "num_steps": num_steps,
        "steps_per_epoch": n_b,
        "sampling": sampling,
        "adjacency": validate.adjacency(adjacency),
    }
    goal = _Goal(workload, epsilon, delta, run)
    best, start = _search(goal)
    return _simplify(_required_noise(goal, best.strategy, start.noise_multiplier))


def estimate(
    workload: Workload, *, epsilon: float, delta: float, **run: Any
) -> tuple[Amplified, Start]:
    """Estimate the result of `amplified`, in less time.

    At the estimated noise multiplier, ε differs from the target by about 0.1 % or less.
    `run` has the other arguments of `amplified`, which are not checked.

    Returns:
      The strategy with estimates of its noise multiplier and of its error, and the
      first point of a search for the exact noise multiplier.
    """
    workload = check_workload(workload, run["num_steps"])
    best, start = _search(_Goal(workload, epsilon, delta, run))
    return _simplify(best), start


def _search(goal: _Goal) -> tuple[Amplified, Start]:
    """Find the strategy with the least error, and estimate its noise multiplier.

    Returns:
      The strategy with estimates of its noise multiplier and of its error, and the
      first point of a search for the exact noise multiplier.
    """
    sampling, num_steps = goal.run["sampling"], goal.run["num_steps"]
    n_b = goal.run["steps_per_epoch"]
    # In random bins, an example takes part in the same step of all epochs.
    repeats = num_steps / n_b if sampling == "random_bins" else 1.0
    start = central_limit(
        goal.epsilon, goal.delta, rate=1 / n_b, num_steps=num_steps, repeats=repeats
    )
    return (_best_bands if sampling == "cyclic_poisson" else _best_decay)(goal, start)


def _simplify(result: Amplified) -> Amplified:
    """Replace the result's strategy by `independent()` if its matrix C is I."""
    is_correlated = any(np.any(x) for x in result.strategy)
    return result if is_correlated else result._replace(strategy=_making.independent())


def _required_noise(goal: _Goal, strategy: Toeplitz, start: float) -> Amplified:
    """Compute a strategy's minimum noise multiplier for ε, and the strategy's error.

    The search for the noise multiplier begins at `start`. The error in the workload is
    computed at the minimum noise multiplier.
    """
    sigma = calibrate.solve(
        lambda noise: epsilon_of(strategy, noise, goal.delta, **goal.run),
        goal.epsilon,
        start=start,
    )
    strategy_error = sigma * error(strategy, goal.workload, goal.run["num_steps"])
    return Amplified(strategy, float(sigma), float(strategy_error))


def central_limit(
    epsilon: float, delta: float, *, rate: float, num_steps: int, repeats: float
) -> Start:
    """Estimate the noise multiplier σ for ε and δ, by the central limit theorem.

    The result is the first point of a search for the exact σ. Suppose that a run makes
    k random draws of examples. An example is in each draw with probability q, and then
    moves the sum of the draw by s clip norms. Then the run is about μ-GDP with
    μ² = k q² (e^{s²/σ²} − 1). A μ-GDP run is about (ε, δ)-DP if
    μ² = 2 (√(ε + log 1/δ) − √(log 1/δ))². If an example takes part in the same step of
    r epochs, these r steps are one draw with s² = r. Otherwise r = 1.

    Args:
      epsilon: ε of the run.
      delta: δ of the run.
      rate: q.
      num_steps: k r.
      repeats: r; a number below 1 counts as 1.
    """
    square = max(repeats, 1.0)
    neg_log_delta = -math.log(delta)
    mu = math.sqrt(2) * (math.sqrt(epsilon + neg_log_delta) - math.sqrt(neg_log_delta))
    ratio = mu * mu / (num_steps / square * rate * rate)
    # For extreme targets, the clamp prevents a division by zero and overflow.
    exponent = math.log1p(min(max(ratio, 1e-9), 1e9))  # s²/σ²
    # Measured: log ε falls about 1.3 times as fast as log (e^{s²/σ²} − 1) / 2.
    return Start(math.sqrt(square / exponent), 1.3 * exponent / math.expm1(-exponent))


def refine(
    start: Start, event: Callable[[float], Composed], epsilon: float, delta: float
) -> Start:
    """Find a better first point of the secant search for the noise that gives ε.

    The secant search needs bounds on ε. In contrast, this function uses estimates of ε,
    which need less time. The function `event` maps a noise multiplier to the event of a
    run of Poisson-sampled Gaussian steps. If ε is above 100, the result is `start`.
    """
    # The grid of an estimate is too coarse for a very large ε.
    if epsilon > _MAX_EPSILON:
        return start

    def excess(noise: float) -> float:
        estimated = _estimates.epsilon(event(noise), delta, epsilon)
        # The bounds of `pld` are about 6e-6 above the estimates, and a plan's search
        # ends up to 2e-5 below the target.
        return math.log(max(TINY, estimated) / epsilon) + 1.5e-5

    for point in itertools.islice(secants(excess, *start), _MAX_EVALUATIONS):
        start = Start(math.exp(point.log), point.slope)
        if abs(point.excess) < 2e-6:
            break
    return start


class _Evaluation(NamedTuple):
    """The evaluation of the geometric strategy C = 1 / (1 − λL) for one λ.

    L is the shift by one step.

    Attributes:
      x: −log(1 − λ).
      unit_mu: the GDP parameter μ at noise multiplier 1, for an attacker who knows the
        steps in which an example takes part.
      result: the strategy, with estimates of its noise multiplier and of its error.
      start: the estimate of the noise multiplier σ, and the derivative of log ε with
        respect to log σ at this estimate.
    """

    x: float
    unit_mu: float
    result: Amplified
    start: Start


def _estimate_noise(
    goal: _Goal, strategy: Toeplitz, start: Start, limit: float = math.inf
) -> tuple[Amplified, Start]:
    """Estimate the noise multiplier that meets ε, and the error at this noise.

    The noise multiplier σ is an estimate: at this σ, log ε differs from its target by
    about 0.001 or less, unless the search ends early. The secant method solves for
    log σ in few evaluations, since log ε is nearly a linear function of log σ. If the
    method does not converge, `_required_noise` computes the minimum σ instead.

    Args:
      goal: the workload, the target of ε, and the run.
      strategy: the strategy.
      start: the first σ, and the derivative of log ε with respect to log σ at this σ.
      limit: the search ends early if the strategy's error is probably above the limit.

    Returns:
      The strategy with both estimates, and the first point of a search for the noise
      multiplier of a similar strategy.
    """
    # The error is proportional to the noise multiplier.
    ratio = float(error(strategy, goal.workload, goal.run["num_steps"]))

    def excess(noise: float) -> float:
        epsilon = float(epsilon_of(strategy, noise, goal.delta, **goal.run))
        return math.log(max(epsilon, TINY) / goal.epsilon)

    # The relative error of the slope. The first slope comes from a similar strategy.
    # Each later slope comes from a secant, and its error is about the last excess.
    slope_error = 0.3
    for point in itertools.islice(secants(excess, *start), _MAX_EVALUATIONS):
        slope_bound = point.slope * (_MAX_SLOPE if point.excess > 0 else _MIN_SLOPE)
        min_noise = math.exp(point.log - point.excess / slope_bound)
        error_estimate, slope_error = abs(point.excess) * slope_error, abs(point.excess)
        if error_estimate < _TOLERANCE or min_noise * ratio > limit:
            noise = math.exp(point.next)
            return Amplified(strategy, noise, noise * ratio), Start(noise, point.slope)
    result = _required_noise(goal, strategy, start.noise_multiplier)
    return result, Start(result.noise_multiplier, start.slope)


def _estimate_banded(
    goal: _Goal, strategy: Toeplitz, start: Start, limit: float = math.inf
) -> tuple[Amplified, Start]:
    """Estimate the noise multiplier and the error of a banded strategy.

    The sampling is cyclic Poisson sampling. `refine` first improves the start of the
    search in `_estimate_noise`, which saves evaluations of ε.
    """
    n_b, adjacency = goal.run["steps_per_epoch"], goal.run["adjacency"]
    bands = 1 + np.size(strategy.numerator)
    norm = float(np.linalg.norm(np.append(1.0, strategy.numerator)))

    def event(noise: float) -> Composed:
        # As in `accounting.correlated.epsilon`.
        step = PoissonGaussian(noise / norm, min(1.0, bands / n_b), adjacency)
        return Composed((Repeated(step, -(-goal.run["num_steps"] // bands)),))

    start = refine(start, event, goal.epsilon, goal.delta)
    return _estimate_noise(goal, strategy, start, limit)


def _best_bands(goal: _Goal, start: Start) -> tuple[Amplified, Start]:
    """The strategy with the least error among banded strategies of 1, 2, 4, ... bands.

    The search stops once two consecutive numbers of bands do not lower the error.

    Args:
      goal: the workload, the target of ε, and the run.
      start: the first point of the first secant search for a noise multiplier.

    Returns:
      The strategy with estimates of its noise multiplier and of its error, and the
      first point of a search for the noise multiplier of a similar strategy.
    """
    num_steps = goal.run["num_steps"]
    best, start = _estimate_banded(goal, _making.independent(), start)
    num_worse, bands = 0, 2
    while num_worse < 2 and bands <= min(goal.run["steps_per_epoch"], num_steps):
        # If an example takes part in two steps that are at least as far apart as the
        # number of bands, the steps affect different rows of C x. So the sensitivity
        # per step is the norm of a column of C, as if every example took part once.
        # Hence steps_per_epoch is num_steps.
        strategy = _optimize.optimize(
            "banded",
            goal.workload,
            num_steps=num_steps,
            steps_per_epoch=num_steps,
            num_vectors=bands - 1,
        )
        new, new_start = _estimate_banded(goal, Toeplitz(*strategy), start, best.error)
        num_worse = 0 if new.error < best.error else num_worse + 1
        best, start = (new, new_start) if new.error < best.error else (best, start)
        bands *= 2
    return best, start


def _best_decay(goal: _Goal, start: Start) -> tuple[Amplified, Start]:
    """The geometric strategy C = 1 / (1 − λL) with the least error, for λ on a grid.

    L is the shift by one step. A second, finer grid surrounds the best λ of the first
    grid. The search on the first grid stops once two consecutive values of λ do not
    lower the error.

    Args:
      goal: the workload, the target of ε, and the run.
      start: the first point of the first secant search for a noise multiplier.

    Returns:
      The strategy with estimates of its noise multiplier and of its error, and the
      first point of a search for the noise multiplier of a similar strategy.
    """
    run = {name: x for name, x in goal.run.items() if name != "sampling"}
    order = "fixed" if goal.run["sampling"] == "random_bins" else "reshuffled"
    evaluations: list[_Evaluation] = []

    def best() -> _Evaluation:
        return min(evaluations, key=lambda e: e.result.error)

    def evaluate(x: float) -> None:
        # The strategy with λ = 0 has the same array shapes as all others, so that one
        # compiled program evaluates all of them.
        strategy = _making.geometric(-np.expm1(-x))
        unit_mu = float(mu(strategy, 1.0, order=order, **run))
        first, limit = start, math.inf
        if evaluations:
            # The noise per unit of μ, as estimated from the two nearest results.
            nearest, *more = sorted(evaluations, key=lambda e: abs(e.x - x))
            log = math.log(nearest.start.noise_multiplier / nearest.unit_mu)
            for second in more[:1]:
                rise = math.log(second.start.noise_multiplier / second.unit_mu) - log
                log += rise * (x - nearest.x) / (second.x - nearest.x)
            first = nearest.start._replace(noise_multiplier=math.exp(log) * unit_mu)
            limit = best().result.error
        evaluations.append(
            _Evaluation(x, unit_mu, *_estimate_noise(goal, strategy, first, limit))
        )

    step = -np.log(_MIN_DISTANCE) / (_GRID_SIZE - 1)
    for k in range(_GRID_SIZE):
        evaluate(k * step)
        if best().x < evaluations[-2:][0].x:  # neither of the last two is the best
            break
    best_x = best().x
    for x in best_x + step * np.arange(1 - _REFINEMENT, _REFINEMENT) / _REFINEMENT:
        if x >= 0 and x != best_x:
            evaluate(x)
    return best().result, best().start
