"""Runs that stop after a random number of rounds.

Let the number of rounds R be drawn independently of the data. The release of R and of
the iterates w_1, …, w_R is then a mixture over R. The δ(ε) of the mixture is a mean:
δ(ε) = E_R δ_R(ε), where δ_R is the δ(ε) of R composed rounds. This module evaluates
only a few δ_R: the possible values of R are divided into groups, and the largest value
in each group replaces the other values. Since δ_R grows with R, the result is an upper
bound.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpjax._core import validate
from dpjax._core.float64 import SMALL, scope
from dpjax._core.typing import ArrayLike
from dpjax.accounting import calibrate, pld

__all__ = ["delta", "epsilon", "group"]


class Rounds(NamedTuple):
    """The distribution of the number of rounds of a run, divided into groups.

    Attributes:
      largest: the largest number of rounds in each group, f64[g], increasing.
      probability: the probability of each group, f64[g].
    """

    largest: np.ndarray
    probability: np.ndarray


def group(probabilities: np.ndarray, groups: int = 16) -> Rounds:
    """Group the numbers of rounds 1, 2, …, N into groups of about equal probability.

    Args:
      probabilities: the probabilities of 1, 2, …, N rounds, f[N]. Their sum is 1.
      groups: the maximum number of groups.

    Returns:
      `Rounds`: the largest number and the probability of each group. If the sum of the
      given probabilities is slightly less than 1, the probabilities are scaled up.

    Raises:
      ValueError: a probability is negative, or the sum of the probabilities differs
        from 1 by more than 1e-6.

    Example:
      >>> rounds = group(np.full(100, 0.01), groups=4)
      >>> print(rounds.largest, rounds.probability.round(3))
      [ 25.  50.  75. 100.] [0.25 0.25 0.25 0.25]
    """
    probabilities = np.asarray(probabilities, np.float64)
    validate.nonnegative("probabilities", probabilities)
    total = np.sum(probabilities)
    if abs(total - 1) > 1e-6:
        raise ValueError(f"probabilities must add up to 1; got a sum of {total!r}.")
    below = np.cumsum(probabilities) / total
    # With the margin of 1e-9, rounding in the cumulative sum does not move a boundary.
    targets = np.arange(1, groups + 1) / groups - 1e-9
    last = np.unique(np.minimum(np.searchsorted(below, targets), len(below) - 1))
    # The last group ends at the largest number of rounds with positive probability.
    last[-1] = np.max(np.nonzero(probabilities))
    last = np.unique(last)
    starts = np.concatenate([[0], last[:-1] + 1])
    mass = np.add.reduceat(probabilities[: last[-1] + 1], starts)
    # Probabilities are never scaled down: a sum above 1 is an upper bound.
    return Rounds((last + 1).astype(np.float64), mass * max(1.0, 1 / total))


def delta(
    noise_multiplier: ArrayLike,
    epsilon: ArrayLike,
    *,
    rounds: Rounds,
    sampling_rate: float,
) -> jax.Array:
    """An upper bound on the δ of noisy SGD with a random number of fixed-size batches.

    Args:
      noise_multiplier: the standard deviation of the noise on a batch's sum of
        gradients, divided by the bound on the norm of one gradient, f[], positive.
      epsilon: f[], at least 0.
      rounds: the distribution of the number of rounds, from `random_rounds.group`. The
        number must be drawn independently of the data.
      sampling_rate: batch size over number of examples, in [0, 1].

    Returns:
      δ under REPLACE, f[], rounded up. The result is 1 for a traced noise multiplier at
      or below 0, for a traced ε below 0, and for a NaN.

    Raises:
      ValueError: a static argument is out of range, or an argument is not one number.

    Privacy: the release of all iterates and of the number of rounds is (ε, δ)-DP. The
    release of the last iterate and the number of rounds is therefore also (ε, δ)-DP.
    Each batch must be a new uniformly random subset of fixed size.

    Reference: Zhang, Zheng, Mou and Wang (2017), Algorithm 2; the bound of this
    function replaces their Theorem 4. Each round has the trade-off curve C_p(G_μ) of
    Bok, Su and Altschuler (2024), Proposition D.4, where p is the sampling rate, and μ
    is 2 divided by the noise multiplier.

    Example:
      >>> rounds = group(np.full(1000, 0.001), groups=8)
      >>> print(f"{delta(2.0, 1.0, rounds=rounds, sampling_rate=0.01):.1e}")
      3.0e-03
    """
    validate.scalar("noise_multiplier", noise_multiplier)
    validate.positive("noise_multiplier", noise_multiplier)
    validate.scalar("epsilon", epsilon)
    validate.scalar("sampling_rate", sampling_rate)
    validate.closed_unit("sampling_rate", sampling_rate)
    if jnp.result_type(noise_multiplier).itemsize < 4:  # such as bfloat16
        noise_multiplier = jnp.asarray(noise_multiplier, jnp.float32)
    # Zhang, Zheng, Mou and Wang (2017), Algorithm 2, https://arxiv.org/abs/1703.09947:
    # R is drawn first, so that δ(ε) = Σ_R P(R) δ_R(ε).
    mu = 2 / noise_multiplier
    if isinstance(noise_multiplier, jax.Array):
        # A μ of zero would mean that nothing is released, but −2/∞ is zero, and XLA
        # replaces a subnormal 2/σ by zero. The addition changes only a tiny μ.
        mu = jnp.where(noise_multiplier > 0, mu + 1e-37, jnp.nan)
    step = pld.subsampled_gdp(mu, sampling_rate)
    deltas = pld.delta(pld.compose(step, rounds.largest), epsilon)
    # The slack exceeds the rounding errors of the weights and of a sum of a few
    # positive terms, in float32 at worst.
    slack = 1 + 4 * (len(rounds.largest) + 1) * jnp.finfo(deltas.dtype).eps
    total = jnp.sum(deltas * jnp.asarray(rounds.probability, deltas.dtype)) * slack
    # An underflow must not report δ = 0 for a mechanism that releases data.
    minimum = jnp.where(jnp.max(deltas) > 0, jnp.finfo(deltas.dtype).tiny, 0)
    return jnp.clip(total, minimum, 1)


# A search evaluates δ about ten times, by a program of XLA. Its compilation takes the
# time of two evaluations by NumPy, and an evaluation by XLA takes a tenth of NumPy's
# time. All numbers are arguments, so that searches for ε and for the noise multiplier
# share one program.
_compiled_delta = jax.jit(delta)


def _estimate_parameter(
    fixed: float, delta: float, *, rounds: Rounds, sampling_rate: float
) -> float:
    """Estimate ε from the noise multiplier, or the noise multiplier from ε.

    `fixed` is the known number, and the result is the other number. The estimate
    assumes that their product depends only on the other arguments. A search starts at
    the estimate. A bad estimate only slows the search.
    """
    # R rounds at sampling rate q are about μ-GDP with μ = 2 q √R / noise_multiplier,
    # and δ(ε) is about e^{−(ε/μ)²/2}.
    scaled = 2 * sampling_rate * math.sqrt(rounds.largest[-1])
    return min(max(scaled * math.sqrt(-2 * math.log(delta)) / fixed, SMALL), 1 / SMALL)


def epsilon(
    noise_multiplier: float, delta: float, *, rounds: Rounds, sampling_rate: float
) -> jax.Array:
    """The least ε at which `random_rounds.delta` is at most δ, found by a search.

    Args:
      noise_multiplier: the noise multiplier, as for `delta`. `jax.grad` can
        differentiate the result with respect to this number. `jax.jit` and `jax.vmap`
        must not trace this number.
      delta: the target δ, in (0, 1).
      rounds: the distribution of the number of rounds, as for `delta`.
      sampling_rate: batch size over number of examples, as for `delta`.

    Returns:
      The least ε >= 0 whose δ(ε) is at most delta, f[], rounded up.

    Raises:
      ValueError: an argument is out of range, or no ε meets delta, as for a very small
        noise multiplier.

    Example:
      >>> rounds = group(np.full(1000, 0.001), groups=2)
      >>> print(f"{epsilon(2.0, 1e-5, rounds=rounds, sampling_rate=0.01):.2f}")
      2.10
    """
    validate.open_unit("delta", delta)
    validate.positive("noise_multiplier", noise_multiplier)
    validate.closed_unit("sampling_rate", sampling_rate)
    # The numbers are float64, as in `random_round_sgd`, so that one program suffices.
    traced = isinstance(noise_multiplier, Tracer)
    noise = noise_multiplier if traced else np.float64(noise_multiplier)

    terms: Any = {"rounds": rounds, "sampling_rate": sampling_rate}
    delta_of = functools.partial(_compiled_delta, noise, **terms)

    # ε = 0 lies outside the range of `calibrate.solve`, whose parameters are positive.
    with scope():
        zero_meets_target = bool(delta_of(np.float64(0)) <= delta)
        fixed_numbers = map(float, jax.lax.stop_gradient((noise, delta)))
    if zero_meets_target:
        return jnp.zeros(())
    # δ(ε) falls as ε grows, so ε is the parameter of the search and δ the target.
    start = _estimate_parameter(*fixed_numbers, **terms)
    return calibrate.solve(delta_of, delta, start=start)
