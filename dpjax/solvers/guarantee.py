"""What a solver promises about the parameters it returns."""

from typing import NamedTuple

import jax

from dpjax.accounting import gdp
from dpjax.adjacency import Adjacency


class Guarantee(NamedTuple):
    """A Gaussian-DP guarantee with everything it rests on.

    Attributes:
      mechanism: what was released, in words.
      mu: the GDP parameter, f[].
      adjacency: which pairs of data sets it compares.
      assumptions: what must hold beyond the code that ran, in words.

    Example:
      >>> guarantee = Guarantee("a sum", 0.5, Adjacency.ZERO_OUT, ())
      >>> print(f"{guarantee.epsilon(1e-5):.3f}")
      1.993
    """

    mechanism: str
    mu: jax.Array
    adjacency: Adjacency
    assumptions: tuple[str, ...]

    def epsilon(self, delta: jax.typing.ArrayLike) -> jax.Array:
        """The ε for a δ in (0, 1), rounded up."""
        return gdp.epsilon(self.mu, delta)

    def delta(self, epsilon: jax.typing.ArrayLike) -> jax.Array:
        """The δ for an ε >= 0, rounded up."""
        return gdp.delta(self.mu, epsilon)
