"""What a solver promises about the parameters it returns."""

from typing import NamedTuple, Protocol

import jax

from dpjax.accounting import gdp, pure
from dpjax.adjacency import Adjacency


class Profile(Protocol):
    """ε and δ of a mechanism, each as a function of the other, rounded up."""

    def epsilon(self, delta: jax.typing.ArrayLike) -> jax.Array:
        """An ε for a δ."""
        ...

    def delta(self, epsilon: jax.typing.ArrayLike) -> jax.Array:
        """A δ for an ε."""
        ...


class Pure(NamedTuple):
    """The profile of pure differential privacy.

    Attributes:
      pure_epsilon: the ε that holds at δ = 0, f[].
    """

    pure_epsilon: jax.typing.ArrayLike

    def epsilon(self, delta: jax.typing.ArrayLike) -> jax.Array:
        """The ε for a δ in [0, 1], rounded up."""
        return pure.epsilon(self.pure_epsilon, delta)

    def delta(self, epsilon: jax.typing.ArrayLike) -> jax.Array:
        """The δ for an ε >= 0, rounded up."""
        return pure.delta(self.pure_epsilon, epsilon)


class Guarantee(NamedTuple):
    """A privacy guarantee with everything it rests on.

    Attributes:
      mechanism: what was released, in words.
      mu: the GDP parameter, f[]; inf where none is known and the profile says it all.
      adjacency: which pairs of data sets it compares.
      assumptions: what must hold beyond the code that ran, in words.
      profile: ε(δ) and δ(ε), where they are less than μ gives; None for those of μ.

    Example:
      >>> guarantee = Guarantee("a sum", 0.5, Adjacency.ZERO_OUT, ())
      >>> print(f"{guarantee.epsilon(1e-5):.3f}")
      1.993
      >>> noisy = Guarantee("a sum", pure.mu(1.0), Adjacency.REPLACE, (), Pure(1.0))
      >>> print(noisy.epsilon(0.0), f"{noisy.mu:.3f}")
      1.0 1.232
    """

    mechanism: str
    mu: jax.typing.ArrayLike
    adjacency: Adjacency
    assumptions: tuple[str, ...]
    profile: Profile | None = None

    def epsilon(self, delta: jax.typing.ArrayLike) -> jax.Array:
        """The ε for a δ in (0, 1), rounded up."""
        if self.profile is not None:
            return self.profile.epsilon(delta)
        return gdp.epsilon(self.mu, delta)

    def delta(self, epsilon: jax.typing.ArrayLike) -> jax.Array:
        """The δ for an ε >= 0, rounded up."""
        if self.profile is not None:
            return self.profile.delta(epsilon)
        return gdp.delta(self.mu, epsilon)
