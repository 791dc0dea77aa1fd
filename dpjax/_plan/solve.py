"""`dpjax.plan`: from the numbers that a user gives to a complete plan.

The capacity of a batch of random size, how far above its expected size the batch may
go, is chosen here, too.
"""

import functools
import itertools
import math
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
from dpjax._plan import comparison, quantile
from dpjax._plan import shape as shapes
from dpjax._plan.mechanisms import SAMPLINGS, Mechanism, mechanism_of
from dpjax._plan.parameters import RunParameters
from dpjax._plan.plan import Plan
from dpjax._plan.quantile import QuantileClip
from dpjax._plan.schedule import Factor, Segment, make_segments
from dpjax.accounting import _estimates, calibrate, profiles
from dpjax.accounting.events import Composed, RandomBins
from dpjax.accounting.profiles import LEAST_SHARE, SHARES_OF_LATTICE, RandomBinsProfile
from dpjax.noise._discrete import RUN_TOTAL_VARIATION
from dpjax.strategies import _amplified

# The share of δ that may be spent on batches which exceed their capacity.
SHARE = LEAST_SHARE
# The relative distance below the target at which the search for the noise ends,
# and the evaluations that it may take, beyond which another search takes its place.
_NEAR, _LOOKS = 2e-5, 8
_LARGEST = 100.0  # the largest ε for which `_estimates` tells where to begin
# A relative excess of what overflow adds to ε, well above the error of an estimate.
_CLEARLY = 0.02


def cost(run: RunParameters) -> float:
    """The ε of a run at its δ, in float64. The run's own field epsilon is ignored."""
    # The field does not change the cost. One value for all makes cache hits.
    return _cost(run.parameters(epsilon=math.inf))


@functools.lru_cache(maxsize=1024)
def _cost(run: RunParameters) -> float:
    with scope():
        return float(
            profiles.of(mechanism_of(run).released_event(run)).epsilon(run.delta)
        )


def check_sizes(mechanism: Mechanism, batch_size: int | None, room: Any) -> None:
    """Raise for a batch larger than the data set, or than the given capacity."""
    n = mechanism.num_examples
    if batch_size is not None:
        validate.at_most("batch_size", batch_size, n, "num_examples, ")
    if room is None:
        return
    if not mechanism.overflows:
        raise ValueError(
            "max_batch_size must be None with this sampling, whose batches all have "
            f"one size; got {room!r}."
        )
    validate.static_int("max_batch_size", room, minimum=batch_size or 1)
    validate.at_most("max_batch_size", room, n, "num_examples, ")


def smallest_capacity(solved: RunParameters, delta: float, size: int) -> int:
    """The smallest capacity at which overflow does not raise ε above solved.epsilon.

    The run was solved for without overflow at less than δ, and the rest of δ is left
    for overflow. The search starts at three standard deviations above the batch size b.
    A capacity below b may meet the target, too, since a step on a few of many examples
    costs little; but such a step trains little.

    For random bins, the probability of an overflow alone tells whether a capacity
    suffices, and bisection finds it. Elsewhere, what overflow adds to ε is about
    proportional to the probability that the other examples fill a batch, so that each
    evaluation tells where the result is. If eight evaluations are not enough, bisection
    finds it. A capacity that suffices is the result if the next smaller one is clearly
    above.

    Args:
      solved: the run without overflow, with the capacity n of all examples that a step
        draws from, and with its ε at less than δ.
      delta: the whole δ, at which the result must cost at most solved.epsilon.
      size: the largest batch size b of the run.

    Returns:
      The capacity, at most n.
    """
    from scipy.special import bdtrc  # here: `import dpjax` need not wait for SciPy

    n = solved.max_batch_size
    # The standard deviation of a binomial size; at least 1, so that the range below has
    # several capacities.
    deviation = max(math.sqrt(size * (1 - size / n)), 1.0)

    def run_with(capacity: int) -> RunParameters:
        return solved.parameters(max_batch_size=capacity, delta=delta)

    # The capacity is in (low, high]: high is known to suffice, and low is excluded.
    low, high = math.ceil(size + 3 * deviation) - 1, n
    # If no capacity has a finite ε, the smallest one is as good as any.
    if not math.isfinite(solved.epsilon) or high - low <= 1:
        return min(low + 1, n)
    event = mechanism_of(solved).event(solved)
    if isinstance(event, RandomBins):
        while high - low > 1:
            middle = (low + high) // 2
            enough = _is_spared(run_with(middle), solved.epsilon)
            low, high = (low, middle) if enough else (middle, high)
        return high
    assert isinstance(event, Composed)
    about = _estimates.overflow(event, solved.epsilon, delta, SHARE)
    # The log of the probability that the other examples fill a batch, for each
    # capacity; it decreases, and ends at about 1e-300.
    capacities = np.arange(low, min(n, math.ceil(size + 40 * deviation)) + 1)
    full = np.log(np.maximum(bdtrc(capacities - 1, n - 1, size / n), TINY))
    aim, tries = about.log_full, 0
    while high - low > 1:
        # The first capacity that is filled at most as probably as the aim says,
        # strictly inside the bracket, so that the bracket shrinks in every step.
        at = int(capacities[0] + np.searchsorted(-full, -aim))
        capacity = at if tries < 8 else (low + high) // 2
        capacity = min(max(capacity, low + 1), high - 1)
        epsilon = cost(run_with(capacity))
        low, high = (low, capacity) if epsilon <= solved.epsilon else (capacity, high)
        place, tries = min(capacity - capacities[0], full.size - 1), tries + 1
        # The log of what overflow adds to ε over what it may add.
        over = 1 + (epsilon - solved.epsilon) / about.spare
        excess = min(max(math.log(max(over, TINY)), -3.0), 3.0)
        aim = float(full[place]) - excess
        if excess <= 0 and full[place - 1] - aim > _CLEARLY:
            return capacity
    return high


def _is_spared(run: RunParameters, epsilon: float) -> bool:
    """Whether overflow in random bins takes at most SHARE of δ at this ε."""
    event = mechanism_of(run).event(run)
    assert isinstance(event, RandomBins)
    # On a lattice a share of δ, at most the last one, is for the total variation.
    spent = SHARES_OF_LATTICE[-1] if run.arithmetic == "discrete" else 0.0
    delta = run.delta * (1 - spent)
    with scope():
        return RandomBinsProfile(event).is_spared(epsilon, delta)


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
    noise_schedule: Factor | None = None,
    clip_schedule: Factor | None = None,
    batch_schedule: Factor | None = None,
    sampling: Sampling | Literal["auto"] | tuple[Sampling, ...] = "poisson",
    noise: Literal["independent", "correlated", "auto"] = "independent",
    workload: Workload | None = None,
    strategy: Strategy | None = None,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    unit: Literal["example", "user"] = "example",
    arithmetic: Arithmetic = "real",
) -> Plan:
    """Plan a private run: three of ε, noise, steps and batch size give the fourth.

    Args:
      num_examples: n, the size of the data set (the larger one under ADD_REMOVE). It is
        taken to be public.
      batch_size: b, how many examples a step takes, in expectation; at most n. None for
        the maximum that the other numbers allow.
      num_steps: T, how many steps are released. None for the maximum that the other
        numbers allow.
      epsilon: ε at δ of the whole run, positive. None to compute it from the others.
      delta: δ, strictly between 0 and 1; well below 1 / n.
      clip_norm: the bound C on the L2 norm of one example's gradient, positive; or a
        `dpjax.QuantileClip`, which follows the gradients' norms.
      noise_multiplier: noise standard deviation over C, positive. None for the minimum
        that the other numbers need, for random batches to about 2e-5 of ε.
      max_batch_size: the most examples that a batch of varying size (Poisson samples or
        bins) may hold, from b to n. If None, it is the smallest value that is at least
        three standard deviations above b, or n if that is less (with cyclic Poisson
        samples the largest group), and at which overflow costs at most 1 % of δ.
        The other numbers are solved for without overflow, at the rest of δ.
      noise_schedule: from a step's number to its noise multiplier in units of
        noise_multiplier, like an optax schedule. It is rounded up to at most eight
        levels, and the run uses the rounded values. With a schedule num_steps and
        batch_size must be given.
      clip_schedule: the same for the clip norm. It costs no privacy, since the noise is
        scaled with the clip norm.
      batch_schedule: the same for the batch size, for Poisson batches.
      sampling: "poisson", every example independently with probability b / n;
        "fixed_size", a random subset of size b; "fixed", batches in the data's order;
        "reshuffled", batches in a new random order each epoch; "random_bins", where
        every example is assigned once to a random step of all epochs; "fresh_bins",
        where it is assigned anew in each epoch; "cyclic_poisson", where examples form
        as many groups as a banded strategy has bands, and a step takes each example of
        its group independently. "auto" compares all of them, and a tuple of names
        compares those; the plan has the one that leaves the least noise in the
        workload.
      noise: "independent", fresh in every step; "correlated", where a step cancels some
        of the noise of earlier steps, for all but "poisson" and "fixed_size".
        "correlated" needs num_steps, batch_size, and either a strategy or a workload; a
        workload with cyclic Poisson samples or bins needs epsilon, too. "auto" for the
        noise that leaves the least in the workload. To choose the sampling or the noise
        a plan needs num_steps, batch_size and epsilon.
      workload: the linear map that the optimizer applies to the sums of all steps
        (`dpjax.workloads`). For batches in order, the plan has the best correlation for
        it with one stored vector; for random batches, the best that
        `strategies.amplified` finds at epsilon.
      strategy: the correlation itself (`dpjax.strategies`), in place of a workload.
      adjacency: which data sets the guarantee compares, an `Adjacency`; under
        ADD_REMOVE one data set has one example more.
        "fixed_size" is for REPLACE, "fixed", "reshuffled" and "cyclic_poisson" are for
        ZERO_OUT and REPLACE, and "poisson" and both kinds of bins for all three.
      unit: "example", or "user" for data of `dpjax.by_user`: every statement here about
        an example then holds for all examples of one user together.
      arithmetic: "real" for a guarantee in real arithmetic with ideal Gaussian noise,
        which floats only approximate: the bits of a released number may tell more. With
        "discrete" the guarantee holds for the bits that are released. Sums are then
        made in float64 and rounded to a lattice, the noise is discrete Gaussian, and
        the plan's noise multiplier holds for the rounded sums. Noise that is
        "correlated" then needs batches in order ("fixed" or "reshuffled").

    Returns:
      A `Plan`, whose ε is at most the requested one. The plan has its `comparison` if
      sampling or noise left a choice.

    Raises:
      ValueError: not exactly one of epsilon, num_steps, batch_size and noise_multiplier
        is None; a number is out of range; the sampling does not allow the adjacency; no
        number meets the target.

    Privacy: the plan's `guarantee` states it. The guarantee holds for the batches, the
    gradient and the optimizer of the plan, used once with one key.

    Example:
      >>> run = plan(num_examples=60_000, batch_size=256, num_steps=5_000, epsilon=3.0,
      ...            delta=1e-6, clip_norm=1.0)
      >>> print(f"{run.noise_multiplier:.3f} {run.max_batch_size}")
      0.811 347
    """
    # Taken first, while the local variables are the arguments alone.
    asked = dict(locals())
    if noise == "auto" or sampling == "auto" or isinstance(sampling, tuple):
        return comparison.best_plan(plan, asked)
    given: dict[str, Any] = {
        "epsilon": epsilon,
        "num_steps": num_steps,
        "batch_size": batch_size,
        "noise_multiplier": noise_multiplier,
    }
    unknown = _unknown(given)
    n = validate.static_int("num_examples", num_examples, minimum=1)
    for name in ("num_steps", "batch_size"):
        if given[name] is not None:
            given[name] = validate.static_int(name, given[name], minimum=1)
    for name in ("epsilon", "noise_multiplier"):
        if given[name] is not None:
            given[name] = validate.positive_float(name, given[name])
    clip = clip_norm
    if isinstance(clip, QuantileClip):
        clip = quantile.check_quantile_clip(clip)
        if clip_schedule is not None:
            raise ValueError("clip_schedule must be None where a quantile is followed.")
        clip_norm = clip.initial
    clip_norm = validate.positive_float("clip_norm", clip_norm)
    # Numbers that vary are float32 in the jitted step.
    varies = isinstance(clip, QuantileClip) or noise_schedule or clip_schedule
    if varies and not quantile.LEAST <= clip_norm <= quantile.MOST:
        raise ValueError(
            "clip_norm must be from 2**-60 to 2**60 where it or the noise varies; got "
            f"{clip_norm!r}."
        )
    delta = validate.positive_float("delta", delta)
    validate.open_unit("delta", delta)
    validate.one_of("sampling", sampling, tuple(SAMPLINGS))
    validate.one_of("noise", noise, ("independent", "correlated"))
    validate.one_of("unit", unit, ("example", "user"))
    validate.one_of("arithmetic", arithmetic, ("real", "discrete"))
    # The unknown number has a placeholder here, until it is solved for.
    run = RunParameters(
        num_examples=n,
        batch_size=given["batch_size"] or 1,
        num_steps=given["num_steps"] or 1,
        noise_multiplier=given["noise_multiplier"] or 1.0,
        clip_norm=clip_norm,
        max_batch_size=max_batch_size or n,
        epsilon=given["epsilon"] or math.inf,
        delta=delta,
        sampling=sampling,
        noise=noise,
        adjacency=adjacency,
        solved_for=unknown,
        unit=unit,
        arithmetic=arithmetic,
        quantile=clip if isinstance(clip, QuantileClip) else None,
    )
    mechanism = mechanism_of(run)
    if arithmetic == "discrete" and noise == "correlated" and mechanism.order is None:
        raise ValueError(
            "arithmetic must be 'real' where noise is correlated and batches are "
            f"random: no bound is known for sampling {sampling!r} on a lattice."
        )
    # The profile of a lattice needs (1 + e^ε) τ <= δ/2, at best with ε = 0.
    least = 2 * RUN_TOTAL_VARIATION / SHARES_OF_LATTICE[-1]
    if arithmetic == "discrete" and delta < least:
        raise ValueError(
            f"delta must be at least {least:.1e} with arithmetic='discrete', whose "
            f"random numbers use up a part of δ; got {delta!r}."
        )
    factors = noise_schedule, clip_schedule, batch_schedule
    run = run.parameters(schedule=_schedule(run, mechanism, factors))
    if run.schedule or run.quantile:
        if noise == "correlated":
            raise ValueError(
                "noise must be 'independent' with schedules or a QuantileClip; factors "
                "of correlated noise are the strategy's (dpjax.strategies.scheduled)."
            )
        if not mechanism.supports_schedules:
            raise ValueError(
                "sampling must be 'poisson', 'fixed_size', 'fixed' or 'reshuffled' "
                f"with schedules or a QuantileClip; got {sampling!r}."
            )
    shape, guess = shapes.resolve_strategy(run, mechanism, workload, strategy)
    run = run.parameters(shape=shape)
    # The mechanism depends on the strategy: cyclic Poisson has a group for each band.
    mechanism = mechanism_of(run)
    # A capacity must hold the largest batch of a schedule.
    sizes = [piece.batch_size for piece in run.schedule]
    largest = max(sizes, default=given["batch_size"])
    check_sizes(mechanism, largest, max_batch_size)

    # Without a given capacity, solve as if batches could not overflow, at a little less
    # than δ; then find a capacity whose overflow costs no more than the rest of δ.
    if mechanism.overflows and max_batch_size is None:
        ideal = run.parameters(
            max_batch_size=mechanism.population, delta=(1 - SHARE) * delta
        )
        solved = _solve(ideal, guess)
        most = smallest_capacity(solved, delta, largest or solved.batch_size)
    else:
        solved = _solve(run, guess)
        # Without a random size, every batch has exactly b slots.
        most = max_batch_size or solved.batch_size
    if run.quantile:
        # Raises where the noise of the count is too small for the noise of the sum.
        quantile.noise_of(run.quantile, solved.noise_multiplier, solved.batch_size)
    solved = solved.parameters(max_batch_size=most, delta=delta)
    return Plan.of(solved.parameters(epsilon=_for_callers(cost(solved), "up")))


def _unknown(given: dict[str, Any]) -> str:
    """The name of the one number that is None, and is solved for."""
    unknown = [name for name, value in given.items() if value is None]
    if len(unknown) != 1:
        raise ValueError(
            "exactly one of epsilon, num_steps, batch_size and noise_multiplier must "
            f"be None, and is solved for; got {given}."
        )
    return unknown[0]


def _schedule(
    run: RunParameters, mechanism: Mechanism, factors: tuple[Factor | None, ...]
) -> tuple[Segment, ...]:
    """The segments of the schedules, or () where no number varies."""
    if all(factor is None for factor in factors):
        return ()
    if run.solved_for in ("num_steps", "batch_size"):
        raise ValueError(
            "num_steps and batch_size must be given with a schedule; what is solved "
            "for is epsilon or noise_multiplier."
        )
    *_, batch = factors
    if batch is not None and not mechanism.draws_any_size:
        raise ValueError(
            "batch_schedule must be None except with sampling='poisson'; got "
            f"{batch!r}."
        )
    return make_segments(run.num_steps, run.batch_size, *factors)


def _for_callers(epsilon: float, direction: Literal["up", "down"]) -> float:
    """ε rounded in a direction to JAX's default float dtype, as accountants return it.

    A cost is rounded up, so that it remains an upper bound. A target is rounded down,
    so that the cost, once it is rounded up, is at most the target.
    """
    dtype = default_float()
    with scope():
        return float(cast(jnp.asarray(epsilon, jnp.float64), dtype, direction))


def _solve(run: RunParameters, guess: _amplified.Start | None) -> RunParameters:
    """The run with the unknown number solved for, and with ε as its numbers cost.

    Args:
      run: the run, with a placeholder for the unknown number. Unless ε is the unknown,
        its epsilon is the target.
      guess: where the search for the noise multiplier begins, or None.
    """
    unknown = run.solved_for
    if unknown == "epsilon":
        return run.parameters(epsilon=cost(run))
    # Steps and batch size are whole numbers, and ε grows with them; ε falls with noise.
    whole = unknown != "noise_multiplier"
    # Without an order of the data, each evaluation of ε takes long.
    if not whole and mechanism_of(run).order is None:
        found = _search_noise(run, guess or _guess(run))
        if found is not None:
            return found
    value = calibrate.solve(
        lambda x: jnp.asarray(cost(run.parameters(**{unknown: float(x)}))),
        _for_callers(run.epsilon, "down"),
        increasing=whole,
        integer=whole,
        start=1.0 if whole else (guess or _guess(run)).noise_multiplier,
        upper=run.max_batch_size if unknown == "batch_size" else float("inf"),
    )
    # The solver stops at a tolerance, and on the safe side: compute ε at its result.
    solved = run.parameters(**{unknown: int(value) if whole else float(value)})
    return solved.parameters(epsilon=cost(solved))


def _search_noise(run: RunParameters, start: _amplified.Start) -> RunParameters | None:
    """The run whose ε is at most _NEAR below the target; None if none is found soon.

    Args:
      run: the run, whose epsilon is the target.
      start: an estimate of the noise multiplier, and of the slope of log ε there.
    """
    target = _for_callers(run.epsilon, "down")
    found = run

    def excess(noise: float) -> float:
        # The search aims at the middle of the range of results.
        nonlocal found
        found = run.parameters(noise_multiplier=_for_callers(noise, "up"))
        found = found.parameters(epsilon=cost(found))
        return math.log(max(found.epsilon, TINY) / target) + _NEAR / 2

    for seen in itertools.islice(secants(excess, *start), _LOOKS):
        # The logarithm may hide a last digit.
        if abs(seen.excess) <= _NEAR / 2 and found.epsilon <= target:
            return found
    return None


def _guess(run: RunParameters) -> _amplified.Start:
    """A noise multiplier with which the solver begins, and the slope of log ε there."""
    mechanism = mechanism_of(run)
    epochs = run.num_steps / mechanism.steps_per_epoch(run.batch_size)
    # In random bins, all epochs share one draw of a step.
    square = max(epochs, 1.0) if run.sampling == "random_bins" else 1.0
    start = _amplified.central_limit(
        run.epsilon,
        run.delta,
        rate=run.batch_size / run.num_examples,
        draws=run.num_steps / square,
        square=square,
    )
    # The grid of an estimate is too coarse for a very large ε.
    if not isinstance(mechanism.event(run), Composed) or run.epsilon > _LARGEST:
        return start

    def excess(noise: float) -> float:
        event = mechanism.event(run.parameters(noise_multiplier=noise))
        assert isinstance(event, Composed)
        found = _estimates.epsilon(event, run.delta, run.epsilon)
        # The bounds of `pld` are about 6e-6 above, and the search has a range.
        return math.log(max(TINY, found) / run.epsilon) + 0.75 * _NEAR

    for seen in itertools.islice(secants(excess, *start), _LOOKS):
        start = _amplified.Start(math.exp(seen.log), seen.slope)
        if abs(seen.excess) < _NEAR / 10:
            break
    return start
