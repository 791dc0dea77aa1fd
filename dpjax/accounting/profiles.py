"""Profiles of privacy, ε(δ) and δ(ε), and guarantees with their assumptions."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.outward import MARGIN
from dpjax._core.typing import ArrayLike
from dpjax.accounting import gdp, pure, random_rounds


class Profile(Protocol):
    """ε and δ of a mechanism, each as a function of the other, rounded up."""

    @property
    def mu(self) -> ArrayLike | None:
        """The GDP parameter, f[]; None where none is known."""
        ...

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """An ε for a δ."""
        ...

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """A δ for an ε."""
        ...


class Gaussian(NamedTuple):
    """The profile of Gaussian differential privacy.

    Attributes:
      mu: the GDP parameter, f[]; inf without any privacy.
    """

    mu: ArrayLike

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """The ε for a δ in (0, 1), rounded up."""
        return gdp.epsilon(self.mu, delta)

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """The δ for an ε >= 0, rounded up."""
        return gdp.delta(self.mu, epsilon)


class Pure(NamedTuple):
    """The profile of pure differential privacy.

    Attributes:
      pure_epsilon: the ε that holds at δ = 0, f[].
    """

    pure_epsilon: ArrayLike

    @property
    def mu(self) -> jax.Array:
        """The GDP parameter that it implies, f[]; the profile promises more."""
        return pure.mu(self.pure_epsilon)

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """The ε for a δ in [0, 1], rounded up."""
        return pure.epsilon(self.pure_epsilon, delta)

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """The δ for an ε >= 0, rounded up."""
        return pure.delta(self.pure_epsilon, epsilon)


class EpsilonProfile(NamedTuple):
    """The profile of a mechanism known by ε as a function of δ.

    Attributes:
      of_delta: the function, rounded up.
    """

    of_delta: Callable[[ArrayLike], jax.Array]

    @property
    def mu(self) -> None:
        """No GDP parameter is known."""

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """The ε for a δ in (0, 1), rounded up."""
        return self.of_delta(delta)

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """A δ for an ε >= 0, within 0.1 % of the least, searched down to 1e-30."""
        validate.nonnegative("epsilon", epsilon, finite=False)
        # Every δ asked for and met is a bound: bisection keeps one as its upper end.
        low, high = np.log(1e-30), 0.0
        if self.of_delta(float(np.exp(low))) <= epsilon:
            return jnp.asarray(np.exp(low))
        while high - low > 1e-3:
            middle = (low + high) / 2
            meets = bool(self.of_delta(float(np.exp(middle))) <= epsilon)
            low, high = (low, middle) if meets else (middle, high)
        return jnp.minimum(jnp.asarray(np.exp(high) * MARGIN), 1.0)


class RoundsProfile(NamedTuple):
    """The profile of a run with a random number of rounds.

    Attributes:
      noise_multiplier: as for `accounting.random_rounds.delta`.
      rounds: the distribution of the number of rounds.
      sampling_rate: batch size over number of examples.
    """

    noise_multiplier: float
    rounds: random_rounds.Rounds
    sampling_rate: float

    @property
    def mu(self) -> None:
        """No GDP parameter is known."""

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """The ε for a δ in (0, 1), rounded up."""
        return random_rounds.epsilon(
            self.noise_multiplier,
            float(np.asarray(delta)),
            rounds=self.rounds,
            sampling_rate=self.sampling_rate,
        )

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """The δ for an ε >= 0, rounded up."""
        return random_rounds.delta(
            self.noise_multiplier,
            epsilon,
            rounds=self.rounds,
            sampling_rate=self.sampling_rate,
        )


class Guarantee(NamedTuple):
    """A privacy guarantee with everything it rests on.

    Attributes:
      mechanism: what was released, in words.
      profile: ε(δ) and δ(ε): a `Gaussian`, or one that says more than any μ.
      adjacency: which pairs of data sets it compares.
      assumptions: what must hold beyond the code that ran, in words.

    Example:
      >>> guarantee = Guarantee("a sum", Gaussian(0.5), Adjacency.ZERO_OUT, ())
      >>> print(f"{guarantee.epsilon(1e-5):.3f}")
      1.993
      >>> noisy = Guarantee("a sum", Pure(1.0), Adjacency.REPLACE, ())
      >>> print(noisy.epsilon(0.0), f"{noisy.mu:.3f}")
      1.0 1.232
    """

    mechanism: str
    profile: Profile
    adjacency: Adjacency
    assumptions: tuple[str, ...]

    @property
    def mu(self) -> ArrayLike | None:
        """The GDP parameter, f[]; None where none is known."""
        return self.profile.mu

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """The ε for a δ in (0, 1), rounded up."""
        return self.profile.epsilon(delta)

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """The δ for an ε >= 0, rounded up."""
        return self.profile.delta(epsilon)
