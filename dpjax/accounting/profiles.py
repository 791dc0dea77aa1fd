"""Privacy profiles, ε(δ) and δ(ε), and guarantees with their assumptions.

`of` returns the profile of an event, a description of a mechanism or of a run:

1. `Gaussian` for an event that is equivalent to a Gaussian mechanism;
2. `pld.PLD` for an event with a privacy-loss distribution;
3. `RandomBinsProfile` for a run in which each example picks a random step of an epoch;
4. `Pure` or `FunctionProfile` for an event of which only an ε at δ = 0 or only one pair
   (ε, δ) is known;
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

# Candidates for the share of δ that covers bins that overflow. The first sufficient
# share is used.
LEAST_SHARE = 0.01
_SHARES = (LEAST_SHARE, 0.1, 0.5, 0.9)
# The search for δ has a smallest δ, a width in log δ at which the search ends, and a
# number that stands for an infinite ε.
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
    """A δ >= 1e-30, rounded up, with epsilon_of(δ) <= ε for each ε >= 0, f[*b]."""
    validate.nonnegative("epsilon", epsilon, finite=False)

    def search(target: float) -> float:
        def excess(delta: Any) -> Any:
            found = float(np.asarray(epsilon_of(float(delta))))
            over = np.clip(found, 0, _HUGE) - min(target, _HUGE)
            return np.float32(min(over, 0.0) if found <= target else max(over, 1e-30))

        # ε is not known at the ends. The good end moves only to a δ that meets the
        # target, so that the good end is always a valid bound.
        bad = searches.Point(*map(jnp.float32, (_LEAST_DELTA, min(target, _HUGE) + 1)))
        good = searches.Point(*map(jnp.float32, (1.0, -min(target, _HUGE))))
        width = np.float32(_LOG_WIDTH)
        return float(searches.close(excess, bad, good, width, log=True))

    deltas = np.vectorize(search, otypes=[np.float64])(np.asarray(epsilon, np.float64))
    # The factor is a margin for the cast to float32.
    return jnp.asarray(np.minimum(deltas * rounding.MARGIN, 1.0), default_float())


@float64("up")
def _known64(
    least: jax.Array, given: jax.Array, value: jax.Array, otherwise: jax.Array
) -> jax.Array:
    """The value if `given` is at least `least`, and `otherwise` if not."""
    return jnp.where(given >= least, value, otherwise)


@functools.lru_cache(maxsize=256)  # a search for the capacity repeats a few arguments
def _epsilon_without_overflow(
    event: events.RandomBins, strategy: StrategySpec, delta: float, dtype: np.dtype
) -> float:
    """The ε at δ of a run in which examples pick random steps of an epoch, rounded up.

    The function ignores the capacity of batches. `strategy` takes the place of the
    event's strategy. `dtype` is the default float dtype, and only distinguishes entries
    of the cache.
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

    Batches have a limited capacity. A fraction of δ bounds the effect of batches that
    exceed it. ε is computed at the rest of δ, for batches of unlimited capacity.

    Attributes:
      event: the run.
    """

    event: events.RandomBins

    mu = None  # no GDP parameter is known

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """An ε at which the mechanism is (ε, δ)-DP, for δ in (0, 1), rounded up."""
        delta = np.asarray(delta, np.float64)
        least = float(self._overflow(0.0))
        if least == 0:
            return self._ideal(delta)
        for share in _SHARES:
            # Overflow takes at least its δ at ε = 0, so smaller shares cannot suffice.
            if np.any(least > share * delta):
                continue
            # (ε, (1 − share) δ) holds without overflow; the rest of δ is for overflow.
            ideal = self._ideal((1 - share) * delta)
            if bool(np.all(self._overflow(ideal) <= share * delta)):
                return ideal
        return jnp.full(delta.shape, jnp.inf)

    def is_spared(self, epsilon: float, delta: float) -> bool:
        """Whether the smallest reserved fraction of δ covers full batches at this ε.

        A batch is full if it exceeds the capacity. Suppose that the result is true, and
        that ε is the ε of the run with unlimited capacity at the rest of δ. Then the
        limited capacity does not increase ε.
        """
        return bool(self._overflow(epsilon) <= LEAST_SHARE * delta)

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """A δ at which the mechanism is (ε, δ)-DP, for ε >= 0, found by bisection."""
        return search_delta(self.epsilon, epsilon)

    def _ideal(self, delta: ArrayLike) -> jax.Array:
        """For each δ, the ε of the same run with batches of unlimited capacity."""
        # The event and the strategy are keys of a cache. All capacities therefore use
        # the same event, and both descriptions of independent noise the same strategy:
        # geometric noise with λ = 0, so that the compiled program is the same, too.
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

    def _overflow(self, epsilon: ArrayLike) -> jax.Array:
        """A bound on the increase of δ(ε) by batches that exceed their capacity."""
        e = self.event
        # Without fresh bins every epoch has the same bins, so they are drawn once.
        draws = e.num_steps if e.fresh else min(e.num_steps, e.steps_per_epoch)
        return truncation.overflow_delta(
            epsilon,
            num_examples=e.num_examples,
            sampling_rate=1 / e.steps_per_epoch,
            max_batch_size=e.max_batch_size,
            num_steps=draws,
        )


# Candidates for the share of δ that covers the total variation of a run on a lattice.
# The first sufficient share is used.
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

        Discrete noise adds (1 + e^ε) `total_variation` to δ. The function tries a few
        fractions of δ as upper bounds on this addition. ε is inf if no fraction
        suffices.
        """
        delta = np.asarray(delta, np.float64)
        dtype, best = default_float(), np.full(delta.shape, np.inf)
        # In the scope of float64, the choice of a share does not depend on the caller's
        # jax_enable_x64.
        with scope():
            for share in SHARES_OF_LATTICE:
                found = np.asarray(self.gaussian.epsilon((1 - share) * delta))
                enough = self._added(found) <= share * delta
                best = np.where(enough, np.minimum(best, found), best)
                if np.all(np.isfinite(best)):
                    break
            return cast(jnp.asarray(best), dtype, "up")

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """A δ at which the mechanism is (ε, δ)-DP, for ε >= 0, rounded up."""
        of_gaussian = np.asarray(self.gaussian.delta(epsilon), np.float64)
        # The margin covers the rounding of the sum to float32.
        total = (of_gaussian + self._added(epsilon)) * rounding.MARGIN
        return jnp.asarray(np.minimum(total, 1.0), default_float())

    def _added(self, epsilon: ArrayLike) -> np.ndarray:
        """The increase (1 + e^ε) total_variation of δ by discrete noise, rounded up."""
        # Above 700 the exponential would overflow, and the sum is above 1 long before.
        power = np.exp(np.minimum(np.asarray(epsilon, np.float64), 700.0))
        return (1 + power) * self.total_variation * rounding.MARGIN


def of(event: events.Event) -> Profile:
    """The privacy profile of an event.

    Args:
      event: the event, which describes a mechanism or a whole run.

    Returns:
      The `Profile`, whose bounds come from the accountant for this type of event.

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
        return LatticeProfile(of(event.event), event.total_variation)
    if isinstance(event, events.Selection):
        return Selected(of(event.event), event.repetitions)
    if isinstance(event, events.EpsilonDelta):
        known, lost = event.epsilon, event.delta
        # The known ε holds for every δ that is not below the known δ, and the known δ
        # holds for every ε that is not below the known ε.
        return FunctionProfile(
            lambda delta: _known64(lost, delta, known, jnp.inf),
            lambda epsilon: _known64(known, epsilon, lost, 1.0),
        )
    if isinstance(event, events.Pure):
        return Pure(event.epsilon)
    if isinstance(event, events.Composed):
        return pld.PLD(event.steps)
    if isinstance(event, events.Repeated):
        return pld.PLD((event,))
    return pld.of(event)


# The number of pairs (ε, δ) from which a trade-off curve is computed, if no exact form
# is known.
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
    # `fdp.tradeoff` asks for δ at these ε alone, and the δ at these ε are known.
    powers = fdp.tradeoff(lambda _: jnp.asarray(deltas), rates, epsilons=epsilons)
    return np.asarray(powers, np.float64)


def _proven_pairs(profile: Profile) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (ε, δ) that a privacy profile proves, as two arrays f64[k].

    The function computes ε for one δ at a time, so that all pairs share one compiled
    program.
    """
    if isinstance(profile, Pure):
        return np.array([float(np.asarray(profile.pure_epsilon))]), np.zeros(1)
    most = float(profile.delta(0.0))
    if most == 0.0:
        return np.zeros(1), np.zeros(1)
    # The values of δ are those of a Gaussian mechanism with the same δ(0), at equally
    # spaced ε: then the pairs cover the range in which the curve bends.
    mu = float(gdp.mu(0.0, min(most, 1 - 1e-6)))
    steps = mu * np.linspace(0.0, mu / 2 + 4, _PAIRS)[1:]
    deltas = np.asarray(gdp.delta(mu, steps), np.float64)
    epsilons = np.array([float(profile.epsilon(float(delta))) for delta in deltas])
    known = np.isfinite(epsilons)
    return np.append(epsilons[known], 0.0), np.append(deltas[known], most)


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
        """The GDP parameter of the release, f[], or None if no parameter is known."""
        return self.profile.mu

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """An ε at which the mechanism is (ε, δ)-DP, for δ in (0, 1), rounded up."""
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
