"""Privacy profiles, ε(δ) and δ(ε), and guarantees with their assumptions.

`of` returns the profile of an event, a description of a mechanism or of a run:

1. `Gaussian` for a `Gaussian` or a `CorrelatedGaussian` event;
2. `Pure` for a `Pure` event, and `FunctionProfile` for an `EpsilonDelta` event;
3. `pld.PLD` for any other mechanism with a privacy-loss distribution, and for
   repetitions and compositions;
4. `RandomBinsProfile` for a run in which each example picks a random step of an epoch;
5. `LatticeProfile` for a run with discrete noise on rounded sums;
6. `Selected` for the best of several runs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import rounding, searches, validate
from dpjax._core.float64 import cast, default_float, float64, scope
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax._matrices.strategy import StrategySpec
from dpjax.accounting import correlated, events, fdp, gdp, pld, pure, truncation
from dpjax.accounting._selected import Profile as Profile
from dpjax.accounting._selected import Selected

__all__ = ["Gaussian", "Guarantee", "Profile", "Pure", "of"]

# Candidates for the fraction of δ that covers batches that exceed their capacity. The
# code uses the first sufficient fraction.
LEAST_SHARE = 0.01
_SHARES = (LEAST_SHARE, 0.1, 0.5, 0.9)
# For the search for δ: the smallest δ, the width in log δ at which the search ends, and
# a number in place of an infinite ε.
_LEAST_DELTA, _LOG_WIDTH, _HUGE = 1e-30, 6e-5, 1e6


class Gaussian(NamedTuple):
    """The privacy profile of μ-Gaussian differential privacy.

    Attributes:
      mu: the GDP parameter, f[]; inf if there is no privacy.
    """

    mu: ArrayLike

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """An ε at which the mechanism is (ε, δ)-DP, for δ in (0, 1), rounded up."""
        return gdp.epsilon(self.mu, delta)

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """A δ at which the mechanism is (ε, δ)-DP, for ε >= 0, rounded up."""
        return gdp.delta(self.mu, epsilon)


class Pure(NamedTuple):
    """The privacy profile of pure differential privacy.

    Attributes:
      pure_epsilon: the ε that holds at δ = 0, f[].
    """

    pure_epsilon: ArrayLike

    @property
    def mu(self) -> jax.Array:
        """A GDP parameter that pure DP implies, f[]. The profile is a tighter bound."""
        return pure.mu(self.pure_epsilon)

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """An ε at which the mechanism is (ε, δ)-DP, for δ in [0, 1], rounded up."""
        return pure.epsilon(self.pure_epsilon, delta)

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """A δ at which the mechanism is (ε, δ)-DP, for ε >= 0, rounded up."""
        return pure.delta(self.pure_epsilon, epsilon)


@dataclasses.dataclass(frozen=True)
class FunctionProfile:
    """The privacy profile of a mechanism without a known GDP parameter.

    Attributes:
      epsilon: ε as a function of δ, rounded up.
      delta: δ as a function of ε, rounded up.
    """

    epsilon: Callable[[ArrayLike], jax.Array]
    delta: Callable[[ArrayLike], jax.Array]

    mu = None  # no GDP parameter is known


def search_delta(
    epsilon_of: Callable[[float], ArrayLike], epsilon: ArrayLike
) -> jax.Array:
    """The least δ from 1e-30 to 1 with epsilon_of(δ) <= ε, for each ε >= 0, f[*b].

    The result is rounded up. The result is 1 if no smaller δ meets the condition.
    """
    validate.nonnegative("epsilon", epsilon, finite=False)

    def search(target: float) -> float:
        def excess(delta: Any) -> Any:
            value = float(np.asarray(epsilon_of(float(delta))))
            gap = np.clip(value, 0, _HUGE) - min(target, _HUGE)
            return np.float32(min(gap, 0.0) if value <= target else max(gap, 1e-30))

        # The search does not evaluate ε at the first two points. `good` moves only to a
        # δ that meets the target, and is therefore always a valid bound.
        bad = searches.Point(*map(jnp.float32, (_LEAST_DELTA, min(target, _HUGE) + 1)))
        good = searches.Point(*map(jnp.float32, (1.0, -min(target, _HUGE))))
        width = np.float32(_LOG_WIDTH)
        return float(searches.close(excess, bad, good, width, log=True))

    deltas = np.vectorize(search, otypes=[np.float64])(np.asarray(epsilon, np.float64))
    # The factor is a margin for the cast to float32.
    return jnp.asarray(np.minimum(deltas * rounding.MARGIN, 1.0), default_float())


@float64("up")
def _from_threshold(
    threshold: jax.Array, argument: jax.Array, value: jax.Array, otherwise: jax.Array
) -> jax.Array:
    """`value` if `argument` is at least `threshold`, and otherwise `otherwise`.

    The result is also `otherwise` if `threshold` or `value` is negative or NaN, or if
    `value` exceeds `otherwise`.
    """
    known = (argument >= threshold) & (jnp.minimum(threshold, value) >= 0)
    return jnp.where(known, jnp.minimum(value, otherwise), otherwise)


@functools.lru_cache(maxsize=256)  # a search for the capacity repeats a few arguments
def _epsilon_without_overflow(
    event: events.RandomBins, strategy: StrategySpec, delta: float, dtype: np.dtype
) -> float:
    """The ε at δ of a run in which examples pick random steps of an epoch, rounded up.

    The function ignores the capacity of batches. `strategy` takes the place of the
    event's strategy. `dtype`, the default float dtype, is only a key of the cache.
    """
    value = correlated.epsilon(
        strategy.strategy(event.num_steps),
        event.noise_multiplier,
        delta,
        num_steps=event.num_steps,
        steps_per_epoch=event.steps_per_epoch,
        sampling="fresh_bins" if event.fresh else "random_bins",
        adjacency=event.adjacency,
    )
    return float(value)


class RandomBinsProfile(NamedTuple):
    """The profile of a run in which each example picks a random step of an epoch.

    A fraction of δ is reserved for the batches that exceed their capacity. The profile
    computes ε at the rest of δ, for batches of unlimited capacity. ε is inf if no tried
    fraction suffices for all given δ.

    Attributes:
      event: the run.
    """

    event: events.RandomBins

    mu = None  # no GDP parameter is known

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """An ε at which the mechanism is (ε, δ)-DP, for δ in (0, 1), rounded up."""
        delta = np.asarray(delta, np.float64)
        min_overflow_delta = float(self._overflow_delta(0.0))
        if min_overflow_delta == 0:
            return self._unlimited_epsilon(delta)
        for share in _SHARES:
            # Overflow increases δ by at least `min_overflow_delta`, so that smaller
            # shares do not suffice.
            if np.any(min_overflow_delta > share * delta):
                continue
            # (ε, (1 − share) δ) holds without overflow; the rest of δ is for overflow.
            unlimited_epsilon = self._unlimited_epsilon((1 - share) * delta)
            if bool(np.all(self._overflow_delta(unlimited_epsilon) <= share * delta)):
                return unlimited_epsilon
        return jnp.full(delta.shape, jnp.inf)

    def covers_overflow(self, epsilon: float, delta: float) -> bool:
        """Whether a bound on the δ(ε) added by overflow is at most LEAST_SHARE · δ.

        Overflow means that batches exceed their capacity. If the result is true, and
        the run with unlimited capacity is (ε, (1 − LEAST_SHARE) δ)-DP, then the run
        with limited capacity is (ε, δ)-DP.
        """
        return bool(self._overflow_delta(epsilon) <= LEAST_SHARE * delta)

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """A δ at which the mechanism is (ε, δ)-DP, for ε >= 0, rounded up."""
        return search_delta(self.epsilon, epsilon)

    def _unlimited_epsilon(self, delta: ArrayLike) -> jax.Array:
        """The ε of the same run with batches of unlimited capacity, for each δ."""
        # The event and the strategy are keys of a cache. All capacities therefore share
        # one event. Both descriptions of independent noise share one strategy, the
        # geometric noise with λ = 0, and therefore one compiled program.
        strategy = self.event.strategy or StrategySpec()
        if strategy == StrategySpec():
            strategy = StrategySpec(denominator=(0.0,))
        event = dataclasses.replace(
            self.event, strategy=None, num_examples=0, max_batch_size=0
        )
        epsilons = [
            _epsilon_without_overflow(event, strategy, x, default_float())
            for x in np.ravel(delta).tolist()
        ]
        return jnp.asarray(epsilons).reshape(np.shape(delta))

    def _overflow_delta(self, epsilon: ArrayLike) -> jax.Array:
        """A bound on the increase of δ(ε) by batches that exceed their capacity."""
        e = self.event
        # Without fresh bins, all epochs have the same batches, which are drawn once.
        draws = e.num_steps if e.fresh else min(e.num_steps, e.steps_per_epoch)
        return truncation.overflow_delta(
            epsilon,
            num_examples=e.num_examples,
            sampling_rate=1 / e.steps_per_epoch,
            max_batch_size=e.max_batch_size,
            num_steps=draws,
        )


# Candidates for the fraction of δ that covers the total variation of a run on a
# lattice. The code uses the first sufficient fraction.
SHARES_OF_LATTICE = (2.0**-10, 2.0**-4, 0.5)


class LatticeProfile(NamedTuple):
    """The profile of a run with discrete noise, from the profile with Gaussian noise.

    On each of two neighbouring data sets, the outputs of the run are within a total
    variation distance τ of a post-processing of the run with Gaussian noise. If that
    run is (ε, δ)-DP, the run with discrete noise is (ε, δ + (1 + e^ε) τ)-DP.

    Attributes:
      gaussian: the profile of the run with Gaussian noise.
      total_variation: τ.
    """

    gaussian: Profile
    total_variation: float

    mu = None  # no GDP parameter is known

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """An ε at which the mechanism is (ε, δ)-DP, for δ in (0, 1), rounded up.

        Discrete noise adds (1 + e^ε) `total_variation` to δ. The function reserves a
        fraction of δ for this increase. ε is inf if no tried fraction suffices.
        """
        delta = np.asarray(delta, np.float64)
        dtype, best = default_float(), np.full(delta.shape, np.inf)
        # In the scope of float64, the choice of a share does not depend on the caller's
        # jax_enable_x64.
        with scope():
            for share in SHARES_OF_LATTICE:
                gaussians = np.asarray(self.gaussian.epsilon((1 - share) * delta))
                sufficient = self._delta_increase(gaussians) <= share * delta
                best = np.where(sufficient, np.minimum(best, gaussians), best)
                if np.all(np.isfinite(best)):
                    break
            return cast(jnp.asarray(best), dtype, "up")

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """A δ at which the mechanism is (ε, δ)-DP, for ε >= 0, rounded up."""
        gaussian_delta = np.asarray(self.gaussian.delta(epsilon), np.float64)
        # The margin covers the rounding of the sum to float32.
        total = (gaussian_delta + self._delta_increase(epsilon)) * rounding.MARGIN
        return jnp.asarray(np.minimum(total, 1.0), default_float())

    def _delta_increase(self, epsilon: ArrayLike) -> np.ndarray:
        """The increase of δ by discrete noise, (1 + e^ε) τ, rounded up.

        τ is the attribute `total_variation`.
        """
        # For ε above about 709, e^ε overflows. The increase exceeds 1 at a smaller ε.
        power = np.exp(np.minimum(np.asarray(epsilon, np.float64), 700.0))
        return (1 + power) * self.total_variation * rounding.MARGIN


def of(event: events.Event) -> Profile:
    """The privacy profile of an event.

    Args:
      event: the event, which describes a mechanism or a whole run.

    Returns:
      The `Profile`, whose bounds come from the accountant for this type of event.

    Raises:
      ValueError: the total variation of an `OnLattice` event is negative or not finite;
        the order or a number of a `CorrelatedGaussian` event is invalid.

    Example:
      >>> from dpjax.accounting import events
      >>> print(f"{of(events.Gaussian(1.0)).epsilon(1e-5):.4f}")
      4.3772
    """
    if isinstance(event, events.Gaussian):
        return Gaussian(event.mu)
    if isinstance(event, events.CorrelatedGaussian):
        mu = correlated.mu(
            event.strategy.strategy(event.num_steps),
            event.noise_multiplier,
            num_steps=event.num_steps,
            steps_per_epoch=event.steps_per_epoch,
            order=event.order,
            adjacency=event.adjacency,
        )
        return Gaussian(mu)
    if isinstance(event, events.RandomBins):
        return RandomBinsProfile(event)
    if isinstance(event, events.OnLattice):
        validate.nonnegative("total_variation", event.total_variation)
        return LatticeProfile(of(event.event), event.total_variation)
    if isinstance(event, events.Selection):
        return Selected(of(event.event), event.repetitions)
    if isinstance(event, events.EpsilonDelta):
        known_epsilon, known_delta = event.epsilon, event.delta
        # The known ε holds for every δ at or above the known δ, and the known δ holds
        # for every ε at or above the known ε.
        return FunctionProfile(
            lambda delta: _from_threshold(known_delta, delta, known_epsilon, jnp.inf),
            lambda epsilon: _from_threshold(known_epsilon, epsilon, known_delta, 1.0),
        )
    if isinstance(event, events.Pure):
        return Pure(event.epsilon)
    if isinstance(event, events.Composed):
        return pld.PLD(event.steps)
    return pld.PLD((event,)) if isinstance(event, events.Repeated) else pld.of(event)


# The number of pairs (ε, δ) from which a trade-off curve is computed, if its exact form
# is not known.
_PAIRS = 24


def tradeoff_curve(profile: Profile, rates: np.ndarray) -> np.ndarray:
    """Lower bounds on an attack's false-negative rates, f64[k], for a plot.

    The argument `rates` has the attack's false-positive rates, f64[k].
    """
    if isinstance(profile, Gaussian):
        return np.asarray(gdp.tradeoff(profile.mu, rates), np.float64)
    epsilons, deltas = _proven_pairs(profile)
    # If no ε is finite, the only bound is that rates are at least 0.
    if not epsilons.size:
        return np.zeros_like(rates)
    # `fdp.tradeoff` evaluates the profile only at `epsilons`, where δ is `deltas`.
    misses = fdp.tradeoff(lambda _: jnp.asarray(deltas), rates, epsilons=epsilons)
    return np.asarray(misses, np.float64)


def _proven_pairs(profile: Profile) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (ε, δ) that a privacy profile proves, as two arrays f64[k]."""
    if isinstance(profile, Pure):
        return np.array([float(np.asarray(profile.pure_epsilon))]), np.zeros(1)
    total_variation = float(profile.delta(0.0))
    if total_variation == 0.0:
        return np.zeros(1), np.zeros(1)
    # The values of δ are those of a Gaussian mechanism with the same δ(0), at equally
    # spaced ε. The pairs then cover the range in which the curve bends.
    mu = float(gdp.mu(0.0, min(total_variation, 1 - 1e-6)))
    steps = mu * np.linspace(0.0, mu / 2 + 4, _PAIRS)[1:]
    deltas = np.asarray(gdp.delta(mu, steps), np.float64)
    # Scalar calls let all pairs share one compiled program.
    epsilons = np.array([float(profile.epsilon(float(delta))) for delta in deltas])
    finite = np.isfinite(epsilons)
    return np.append(epsilons[finite], 0.0), np.append(deltas[finite], total_variation)


class Guarantee(NamedTuple):
    """A privacy guarantee with its adjacency and all of its assumptions.

    Attributes:
      mechanism: a description of the released output, in words.
      profile: the privacy profile of the output, with the functions ε(δ) and δ(ε).
      adjacency: the relation between the data sets that the guarantee compares.
      assumptions: conditions of the guarantee that the code does not ensure, in words.

    Example:
      >>> guarantee = Guarantee("a sum", Gaussian(0.5), Adjacency.ZERO_OUT, ())
      >>> print(f"{guarantee.epsilon(1e-5):.3f}")
      1.993
      >>> noisy = Guarantee("a sum", Pure(1.0), Adjacency.REPLACE, ())
      >>> print(noisy.epsilon(0.0), f"{noisy.mu:.3f}")
      1.0 1.232
      >>> print(noisy)
      (guarantee.epsilon(δ), δ)-differential privacy under REPLACE for a sum.
      Assumptions: none.
    """

    mechanism: str
    profile: Profile
    adjacency: Adjacency
    assumptions: tuple[str, ...]

    @property
    def mu(self) -> ArrayLike | None:
        """A GDP parameter of the mechanism, f[], or None if no parameter is known."""
        return self.profile.mu

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """An ε at which the mechanism is (ε, δ)-DP, rounded up.

        δ must be in (0, 1), or in [0, 1] if the profile is `Pure`.
        """
        return self.profile.epsilon(delta)

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """A δ at which the mechanism is (ε, δ)-DP, for ε >= 0, rounded up."""
        return self.profile.delta(epsilon)

    def __str__(self) -> str:
        """The guarantee in words, with the symbol δ in place of a number."""
        return (
            "(guarantee.epsilon(δ), δ)-differential privacy under "
            f"{self.adjacency.name} for {self.mechanism}.\n"
            f"Assumptions: {'; '.join(self.assumptions) or 'none'}."
        )
