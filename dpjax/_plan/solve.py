"""`dpjax.plan`, which makes a complete plan from the numbers that a user gives.

For batches of random size, the plan also has a capacity, the maximum number of examples
in a batch. A step overflows if it draws more examples than the capacity. Some of these
examples then do not take part.
"""

import bisect
import functools
import itertools
import math
from dataclasses import replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from typing_extensions import TypeAliasType

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.float64 import TINY, cast, default_float, scope
from dpjax._core.searches import secants
from dpjax._core.typing import Arithmetic
from dpjax._matrices.strategy import Strategy, Workload
from dpjax._plan import comparison, parameters
from dpjax._plan.mechanisms import SAMPLINGS, Mechanism, mechanism_of, released_event
from dpjax._plan.parameters import QuantileClip, RunParameters, Schedule
from dpjax._plan.plan import Plan
from dpjax.accounting import _estimates, calibrate, profiles
from dpjax.accounting.events import Composed, RandomBins
from dpjax.accounting.profiles import LEAST_SHARE, SHARES_OF_LATTICE, RandomBinsProfile
from dpjax.noise._discrete import RUN_TOTAL_VARIATION
from dpjax.strategies import _amplified

# The search for the noise ends when ε is below the target by at most _TOLERANCE times
# the target. After _MAX_SECANT_STEPS evaluations of ε, another search replaces this
# search.
_TOLERANCE, _MAX_SECANT_STEPS = 2e-5, 8
# The search for a capacity treats a capacity as too small if the predicted cost of its
# overflow exceeds the allowed cost by this fraction, well above a prediction's error.
_COST_MARGIN = 0.02


Sampling = TypeAliasType(
    "Sampling",
    Literal[
        "poisson",
        "fixed_size",
        "fixed",
        "reshuffled",
        "cyclic_poisson",
        "random_bins",
        "fresh_bins",
    ],
)


def plan(
    *,
    num_examples: int,
    batch_size: int | None = None,
    num_steps: int | None = None,
    epsilon: float | None = None,
    delta: float,
    clip_norm: float | QuantileClip,
    noise_multiplier: float | None = None,
    max_batch_size: int | None = None,
    noise_schedule: Schedule | None = None,
    clip_schedule: Schedule | None = None,
    batch_schedule: Schedule | None = None,
    sampling: Sampling | Literal["auto"] | tuple[Sampling, ...] = "poisson",
    noise: Literal["independent", "correlated", "auto"] = "independent",
    workload: Workload | None = None,
    strategy: Strategy | None = None,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    unit: Literal["example", "user"] = "example",
    arithmetic: Arithmetic = "real",
) -> Plan:
    """Plan a private run: compute ε, noise, steps or batch size from the other three.

    Args:
      num_examples: n, the size of the data set; under ADD_REMOVE, the size of the
        larger of two neighbouring data sets. The guarantee assumes that this number is
        public.
      batch_size: b, the expected number of examples in a step; at most n. If None, the
        maximum that the other numbers allow.
      num_steps: T, the number of released steps. If None, the maximum that the other
        numbers allow.
      epsilon: the ε of the whole run at delta, positive. If None, the ε that follows
        from the other numbers.
      delta: δ, strictly between 0 and 1. δ should be well below 1 / n.
      clip_norm: the bound C on the L2 norm of one example's gradient, positive; or a
        `dpjax.QuantileClip`, which adapts C to the norms of the gradients, and needs
        the same noise and sampling as a schedule.
      noise_multiplier: σ, the noise's standard deviation divided by C, positive. If
        None, the minimum at which ε is at most epsilon. For random batches, the search
        for this minimum accepts an ε that is below epsilon by at most 2e-5 of epsilon.
      max_batch_size: the capacity, the maximum number of examples in a batch of random
        size (Poisson samples or bins). The capacity is at least b, or the largest batch
        size of a schedule, and at most n. If a step draws more examples than the
        capacity (overflow), some of the drawn examples do not take part. If the batch
        size is not random, the argument must be None. A comparison of samplings uses
        the argument only for batches of random size.
        If None for batches of random size, `plan` computes the unknown number without
        overflow at 99 % of δ. `plan` then searches for the smallest capacity at which
        overflow costs at most the rest of δ. Let s be the standard deviation of a
        binomial batch size with mean b, but at least 1. (With a batch schedule, b is
        here the largest batch size of the schedule.) The search considers the
        capacities from b + 3 s to a maximum: n, or for cyclic Poisson samples the size
        of the largest group. If b + 3 s exceeds the maximum, the capacity is the
        maximum. For bins, the search finds the smallest of these capacities at which
        overflow costs at most the rest of δ. For Poisson samples, the search may return
        a larger capacity, because the search only predicts the cost of most capacities.
      noise_schedule: a function of a step's number, like an optax schedule. The
        function returns the step's noise multiplier in units of noise_multiplier, from
        2⁻²⁰ to 2²⁰. If a schedule has more than eight distinct values, each value is
        rounded up to the next of eight levels, and the run uses the levels. A plan with
        a schedule needs num_steps, batch_size, "independent" noise, and the sampling
        "poisson", "fixed_size", "fixed" or "reshuffled".
      clip_schedule: a schedule of the clip norm in units of clip_norm, rounded as
        noise_schedule is; None for a `dpjax.QuantileClip`. A clip schedule costs no
        privacy, since the noise is scaled with the clip norm.
      batch_schedule: a schedule of the batch size in units of batch_size, rounded as
        noise_schedule is. Only "poisson" allows a batch schedule.
      sampling: how examples are drawn. "poisson": every example takes part in a step
        independently with probability b / n. "fixed_size": a step draws a random subset
        of size b. "fixed": batches in the data's order. "reshuffled": batches in a new
        random order in each epoch. "random_bins": every example is assigned to one
        random step of an epoch, the same in all epochs. "fresh_bins": every example is
        assigned to a new random step in each epoch. "cyclic_poisson": the examples form
        as many groups as the banded strategy has bands, or one group for independent
        noise. Each step has one group, and each example of this group takes part
        independently with the same probability. "auto" compares all samplings, and a
        tuple compares the samplings in the tuple. With "auto" or a tuple, the plan has
        the sampling that leaves the least noise in the outputs of the workload. If
        noise is "independent", the workload may be None, because the choice is the same
        for all workloads.
      noise: "independent": new noise in every step. "correlated": each step cancels
        some of the noise of earlier steps; for all samplings but "poisson" and
        "fixed_size". Correlated noise needs num_steps, batch_size, and either a
        strategy or a workload. If a workload is given, "cyclic_poisson" and both kinds
        of bins also need epsilon. "auto": the kind of noise that leaves the least noise
        in the outputs of the workload, which must be given. To compare several
        samplings or kinds of noise, `plan` needs num_steps, batch_size and epsilon, and
        accepts no schedule, no strategy and no `dpjax.QuantileClip`.
      workload: the linear map that the optimizer applies to the gradient sums of all
        steps (`dpjax.workloads`). For batches in order ("fixed" or "reshuffled"), the
        plan has the best strategy for the workload that `strategies.optimize` finds
        among the "rational" strategies with one stored vector. If the workload varies
        by step, `strategies.scheduled` also finds a factor of the noise in each step.
        If `plan` compares samplings or kinds of noise, the comparison also includes a
        strategy of `strategies.tree`. For random batches, the plan has the best
        strategy that `strategies.amplified` finds at epsilon.
      strategy: the matrix that correlates the noise (`dpjax.strategies`), instead of a
        workload.
      adjacency: the relation between the two data sets that the guarantee compares, an
        `Adjacency`; under ADD_REMOVE one data set has one example more. "fixed_size"
        allows REPLACE only. "fixed", "reshuffled" and "cyclic_poisson" allow ZERO_OUT
        and REPLACE. "poisson" and both kinds of bins allow all three adjacencies.
      unit: "example", or "user" for data of `dpjax.by_user`. With "user", every
        statement here about an example holds for all examples of one user together.
      arithmetic: "real" for a guarantee in real arithmetic with ideal Gaussian noise,
        which floats only approximate. The bits of a released number may reveal more
        than this guarantee states.
        "discrete" for a guarantee for the bits that are released. Gradients are then
        added in float32 within blocks of at most 128 gradients, and in float64 across
        blocks. The sums are rounded to a lattice, and the noise is discrete Gaussian.
        The plan's noise multiplier is relative to the sensitivity of the rounded sums.
        "correlated" noise then needs
        batches in order ("fixed" or "reshuffled").

    Returns:
      A `Plan`. If the argument epsilon is given, the ε of the plan is at most epsilon.
      If sampling or noise allows several mechanisms, the attribute `comparison` of the
      plan has these mechanisms.

    Raises:
      ValueError: not exactly one of epsilon, num_steps, batch_size and noise_multiplier
        is None; an argument is out of range; the sampling does not allow the adjacency;
        the sampling or the noise does not allow another argument, as described above;
        no number meets the target.

    Privacy: the plan's `guarantee` states the privacy of the run. The guarantee holds
    for the plan's batches, gradient and optimizer together, used once with one key.

    Example:
      >>> run = plan(num_examples=60_000, batch_size=256, num_steps=5_000, epsilon=3.0,
      ...            delta=1e-6, clip_norm=1.0)
      >>> print(f"{run.noise_multiplier:.3f} {run.max_batch_size}")
      0.811 347
    """
    # This line is first, while the arguments are the only local variables.
    arguments = dict(locals())
    if noise == "auto" or sampling == "auto" or isinstance(sampling, tuple):
        return comparison.best_plan(plan, arguments)
    solvable = ("epsilon", "num_steps", "batch_size", "noise_multiplier")
    numbers = {name: arguments[name] for name in solvable}
    unknowns = [name for name, value in numbers.items() if value is None]
    if len(unknowns) != 1:
        raise ValueError(
            "exactly one of epsilon, num_steps, batch_size and noise_multiplier must "
            f"be None, and dpjax.plan computes this number; got {len(unknowns)} that "
            f"are None in {numbers}."
        )
    (unknown,) = unknowns
    n = validate.static_int("num_examples", num_examples, minimum=1)
    # The unknown number has a placeholder, until the solver finds the number.
    num_steps = 1 if num_steps is None else num_steps
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    batch_size = 1 if batch_size is None else batch_size
    batch_size = validate.static_int("batch_size", batch_size, minimum=1)
    if epsilon is not None:
        epsilon = validate.positive_float("epsilon", epsilon)
    noise_multiplier = 1.0 if noise_multiplier is None else noise_multiplier
    noise_multiplier = validate.positive_float("noise_multiplier", noise_multiplier)
    quantile_clip = None
    if isinstance(clip_norm, QuantileClip):
        quantile_clip = parameters.check_quantile_clip(clip_norm)
        if clip_schedule is not None:
            raise ValueError(
                f"clip_schedule must be None for a QuantileClip; got {clip_schedule!r}."
            )
        clip_norm = quantile_clip.initial
    clip_norm = validate.positive_float("clip_norm", clip_norm)
    # Numbers that vary from step to step are float32 in the jitted step.
    varies = quantile_clip or noise_schedule or clip_schedule
    if varies and not parameters.MIN_CLIP_NORM <= clip_norm <= parameters.MAX_CLIP_NORM:
        raise ValueError(
            "clip_norm must be from 2**-60 to 2**60 if the clip norm or the noise "
            f"varies; got {clip_norm!r}."
        )
    delta = validate.positive_float("delta", delta)
    validate.open_unit("delta", delta)
    validate.one_of("sampling", sampling, tuple(SAMPLINGS))
    validate.one_of("noise", noise, ("independent", "correlated"))
    validate.one_of("unit", unit, ("example", "user"))
    validate.one_of("arithmetic", arithmetic, ("real", "discrete"))
    run = RunParameters(
        num_examples=n,
        batch_size=batch_size,
        num_steps=num_steps,
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        max_batch_size=max_batch_size or n,
        epsilon=epsilon or math.inf,
        delta=delta,
        sampling=sampling,
        noise=noise,
        adjacency=adjacency,
        solved_for=unknown,
        unit=unit,
        arithmetic=arithmetic,
        quantile=quantile_clip,
    )
    mechanism = mechanism_of(run)
    if arithmetic == "discrete" and noise == "correlated" and mechanism.order is None:
        raise ValueError(
            "arithmetic must be 'real' for correlated noise with sampling "
            f"{sampling!r}, because no bound is known for correlated noise on a "
            "lattice with random batches."
        )
    # The profile of a lattice needs (1 + e^ε) τ <= δ/2, where τ is the total variation
    # of the noise. At best ε is 0.
    min_delta = 2 * RUN_TOTAL_VARIATION / SHARES_OF_LATTICE[-1]
    if arithmetic == "discrete" and delta < min_delta:
        raise ValueError(
            f"delta must be at least {min_delta:.1e} with arithmetic='discrete', "
            f"because the discrete noise uses a part of δ; got {delta!r}."
        )
    schedules = noise_schedule, clip_schedule, batch_schedule
    scheduled = any(schedule is not None for schedule in schedules)
    if unknown in ("num_steps", "batch_size") and (scheduled or noise == "correlated"):
        raise ValueError(
            "num_steps and batch_size must be given with schedules and with "
            "noise='correlated'; leave out epsilon or noise_multiplier instead."
        )
    if batch_schedule is not None and sampling != "poisson":
        raise ValueError(
            "batch_schedule must be None unless sampling is 'poisson'; got "
            f"{batch_schedule!r}."
        )
    if scheduled:
        segments = parameters.make_segments(run.num_steps, run.batch_size, schedules)
        run = run.parameters(schedule=segments)
    if run.schedule or run.quantile:
        if noise == "correlated":
            raise ValueError(
                "noise must be 'independent' with schedules or a QuantileClip; got "
                "'correlated'. A schedule of correlated noise is a part of the "
                "strategy (dpjax.strategies.scheduled)."
            )
        if not mechanism.supports_schedules:
            raise ValueError(
                "sampling must be 'poisson', 'fixed_size', 'fixed' or 'reshuffled' "
                f"with schedules or a QuantileClip; got {sampling!r}."
            )
    shape, estimate = comparison.resolve_strategy(run, mechanism, workload, strategy)
    run = run.parameters(shape=shape)
    # The mechanism depends on the strategy: cyclic Poisson has a group for each band.
    mechanism = mechanism_of(run)
    _check_sizes(run, mechanism, max_batch_size)

    # If no capacity is given, solve without overflow, at a little less than δ. Then
    # search for a capacity at which overflow costs at most the rest of δ.
    if mechanism.overflows and max_batch_size is None:
        ideal = run.parameters(
            max_batch_size=mechanism.population, delta=(1 - LEAST_SHARE) * delta
        )
        solved = _solve(ideal, estimate)
        capacity = _search_capacity(solved, delta)
    else:
        solved = _solve(run, estimate)
        # If the batch size is not random, every batch has exactly b slots.
        capacity = max_batch_size or solved.batch_size
    if run.quantile:
        # This raises if the noise of the count is too small for the noise of the sum.
        parameters.noise_of(run.quantile, solved.noise_multiplier, solved.batch_size)
    solved = solved.parameters(max_batch_size=capacity, delta=delta)
    final_epsilon = _to_float(_epsilon_of(solved), "up")
    # For an extreme target, the bound on ε may grow with δ, although ε itself does not.
    if unknown != "epsilon" and final_epsilon > run.epsilon:
        raise ValueError(
            "epsilon must be a target that the accountant can meet; at the target "
            f"{run.epsilon!r} it proves only {final_epsilon!r}. Use a smaller epsilon."
        )
    return Plan.of(solved.parameters(epsilon=final_epsilon))


def _check_sizes(run: RunParameters, mechanism: Mechanism, capacity: Any) -> None:
    """Raise unless the batch sizes of a run and the capacity are valid.

    A batch size must not be above the number of examples. A capacity must be from the
    largest batch size to the number of examples, and is not allowed if all batches of
    the mechanism have the same size.

    Args:
      run: the numbers of the run.
      mechanism: the way to draw batches.
      capacity: the maximum number of examples in a batch; None if none is given.
    """
    n, size = run.num_examples, max(segment.batch_size for segment in run.segments)
    validate.at_most("batch_size", size, n, "num_examples, ")
    if capacity is None:
        return
    if not mechanism.overflows:
        raise ValueError(
            f"max_batch_size must be None with sampling {run.sampling!r}, because all "
            f"batches have the same size; got {capacity!r}."
        )
    # The capacity must be at least the maximum batch size of a schedule.
    validate.static_int("max_batch_size", capacity, minimum=size)
    validate.at_most("max_batch_size", capacity, n, "num_examples, ")


def _to_float(epsilon: float, direction: Literal["up", "down"]) -> float:
    """Round a number up or down to JAX's default float dtype.

    Accountants return ε in this dtype. The ε of a run is rounded up, so that the
    rounded ε is an upper bound. The target, the ε that the caller requests, is rounded
    down. So the run's ε is at most the target even after the run's ε is rounded up.
    """
    dtype = default_float()
    with scope():
        return float(cast(jnp.asarray(epsilon, jnp.float64), dtype, direction))


def _epsilon_of(run: RunParameters) -> float:
    """Compute the ε of a run at run.delta, in float64, without reading run.epsilon."""
    # run.epsilon does not change the cost. It is set to inf, so that runs that differ
    # only in run.epsilon share one entry of the cache.
    return _cached_epsilon(run.parameters(epsilon=math.inf))


@functools.lru_cache(maxsize=1024)
def _cached_epsilon(run: RunParameters) -> float:
    with scope():
        return float(profiles.of(released_event(run)).epsilon(run.delta))


def _solve(run: RunParameters, estimate: _amplified.Start | None) -> RunParameters:
    """Compute the number that the caller of `dpjax.plan` has left out.

    Args:
      run: the run, in which run.solved_for names the number. The run has a placeholder
        for this number. Unless ε is this number, run.epsilon is the target.
      estimate: an estimate of the noise multiplier, at which the search for the noise
        multiplier starts; None for no estimate.

    Returns:
      The run with the computed number, and with its own ε as epsilon.
    """
    unknown = run.solved_for
    if unknown == "epsilon":
        return run.parameters(epsilon=_epsilon_of(run))
    # Steps and batch size are integers, and ε grows with them. ε falls with the noise.
    is_integer = unknown != "noise_multiplier"
    # Unless batches are in order, each evaluation of ε is slow.
    if not is_integer and mechanism_of(run).order is None:
        result = _search_noise(run, estimate or _estimate_noise(run))
        if result is not None:
            return result
    start = 1.0 if is_integer else (estimate or _estimate_noise(run)).noise_multiplier
    value = calibrate.solve(
        lambda x: jnp.asarray(_epsilon_of(run.parameters(**{unknown: float(x)}))),
        _to_float(run.epsilon, "down"),
        increasing=is_integer,
        integer=is_integer,
        start=start,
        upper=run.max_batch_size if unknown == "batch_size" else float("inf"),
    )
    # The solver stops within a tolerance of the target, at a smaller ε. Compute this ε.
    solved = run.parameters(**{unknown: int(value) if is_integer else float(value)})
    return solved.parameters(epsilon=_epsilon_of(solved))


def _search_noise(run: RunParameters, start: _amplified.Start) -> RunParameters | None:
    """Search for the noise multiplier of a given ε, by the secant method.

    Args:
      run: the run, in which run.epsilon is the target.
      start: an estimate of the noise multiplier σ, and an estimate of the derivative of
        log ε with respect to log σ.

    Returns:
      The run with a noise multiplier at which ε is at most the target, and below the
      target by at most `_TOLERANCE` times the target. None if `_MAX_SECANT_STEPS`
      evaluations of ε do not give such a noise multiplier.
    """
    target = _to_float(run.epsilon, "down")
    candidate = run

    def excess(noise: float) -> float:
        # The excess is 0 in the middle of the accepted range of ε.
        nonlocal candidate
        candidate = run.parameters(noise_multiplier=_to_float(noise, "up"))
        candidate = candidate.parameters(epsilon=_epsilon_of(candidate))
        ratio = max(candidate.epsilon, TINY) / max(target, TINY)
        return math.log(ratio) + _TOLERANCE / 2

    for point in itertools.islice(secants(excess, *start), _MAX_SECANT_STEPS):
        # ε itself is also compared, since the logarithm is rounded.
        if abs(point.excess) <= _TOLERANCE / 2 and candidate.epsilon <= target:
            return candidate
    return None


def _estimate_noise(run: RunParameters) -> _amplified.Start:
    """Estimate the noise multiplier σ at which the ε of a run is run.epsilon.

    The result also has an estimate of the derivative of log ε with respect to log σ.
    """
    mechanism = mechanism_of(run)
    epochs = run.num_steps / mechanism.steps_per_epoch(run.batch_size)
    start = _amplified.central_limit(
        run.epsilon,
        run.delta,
        rate=run.batch_size / run.num_examples,
        num_steps=run.num_steps,
        # In random bins, an example takes part in the same step of all epochs.
        repeats=epochs if run.sampling == "random_bins" else 1.0,
    )
    if not isinstance(mechanism.event(run), Composed):
        return start

    def event(noise: float) -> Any:
        return mechanism.event(run.parameters(noise_multiplier=noise))

    return _amplified.refine(start, event, run.epsilon, run.delta)


def _search_capacity(solved: RunParameters, delta: float) -> int:
    """Search for the smallest capacity at which the run costs at most solved.epsilon.

    The capacity is the maximum number of examples in a batch. A batch overflows if a
    step draws more examples than the capacity. Overflow adds to the privacy cost.
    Without overflow, the run costs solved.epsilon at solved.delta, which is less than
    `delta`. The rest of `delta` can be spent on overflow. A capacity suffices if the
    run with overflow costs at most solved.epsilon at `delta`.

    Let n be the number of examples from which a step draws, b the largest `batch_size`
    of the run's segments, and s = √(b (1 − b / n)), but at least 1. The search
    considers the capacities from b + 3 s to n, or only n if b + 3 s exceeds n.

    For bins, bisection finds the smallest of these capacities at which overflow adds at
    most a fixed share of `delta`. This capacity suffices.

    For Poisson samples, let P(c) be the probability that a step draws at least c of
    n − 1 examples. The increase of ε by overflow at capacity c is about proportional to
    P(c). So each evaluation of ε predicts the smallest capacity that suffices. After
    eight evaluations, the search bisects instead. The search ends at a capacity that
    suffices if the next smaller capacity is predicted to cost clearly too much. If the
    prediction is wrong, a smaller capacity may suffice.

    Args:
      solved: the run without overflow, with max_batch_size n, and with a delta less
        than the argument `delta`.
      delta: the δ at which the run with overflow must cost at most solved.epsilon.

    Returns:
      The capacity, at most n. If solved.epsilon is infinite, the smallest capacity that
      the search considers.
    """
    from scipy.special import bdtrc  # so that `import dpjax` does not wait for SciPy

    n = solved.max_batch_size
    mean_size = max(segment.batch_size for segment in solved.segments)
    # The standard deviation of a binomial batch size. It is at least 1, so that the
    # range below has several capacities.
    deviation = max(math.sqrt(mean_size * (1 - mean_size / n)), 1.0)

    # The result is in (low, high]: high suffices, and low is not a possible result.
    low, high = math.ceil(mean_size + 3 * deviation) - 1, n
    # If no capacity has a finite ε, the choice does not matter: return the smallest.
    if not math.isfinite(solved.epsilon) or high - low <= 1:
        return min(low + 1, n)
    event = mechanism_of(solved).event(solved)
    if isinstance(event, RandomBins):
        # On a lattice, at most this fraction of δ covers the noise's total variation.
        fraction = SHARES_OF_LATTICE[-1] if solved.arithmetic == "discrete" else 0.0

        def suffices(capacity: int) -> bool:
            profile = RandomBinsProfile(replace(event, max_batch_size=capacity))
            with scope():
                return profile.covers_overflow(solved.epsilon, delta * (1 - fraction))

        return low + 1 + bisect.bisect_left(range(low + 1, high), True, key=suffices)
    assert isinstance(event, Composed)
    estimate = _estimates.overflow(event, solved.epsilon, delta, LEAST_SHARE)
    # log P(the other examples fill a batch) for each capacity, in decreasing order,
    # down to P = 1e-300.
    capacities = np.arange(low, min(n, math.ceil(mean_size + 40 * deviation)) + 1)
    log_full = np.log(np.maximum(bdtrc(capacities - 1, n - 1, mean_size / n), TINY))
    target, tries = estimate.log_probability, 0
    while high - low > 1:
        # Try the smallest capacity whose log P is at most the target, strictly inside
        # the bracket, so that the bracket shrinks in every step.
        predicted = int(capacities[0] + np.searchsorted(-log_full, -target))
        capacity = predicted if tries < 8 else (low + high) // 2
        capacity = min(max(capacity, low + 1), high - 1)
        epsilon = _epsilon_of(solved.parameters(max_batch_size=capacity, delta=delta))
        low, high = (low, capacity) if epsilon <= solved.epsilon else (capacity, high)
        index, tries = min(capacity - capacities[0], log_full.size - 1), tries + 1
        # The log of the increase of ε by overflow, divided by the allowed increase.
        increase = 1 + (epsilon - solved.epsilon) / estimate.epsilon_gap
        excess = min(max(math.log(max(increase, TINY)), -3.0), 3.0)
        target = float(log_full[index]) - excess
        # The values of ε themselves are compared, since their ratio may round to 1.
        if epsilon <= solved.epsilon and log_full[index - 1] - target > _COST_MARGIN:
            return capacity
    return high
