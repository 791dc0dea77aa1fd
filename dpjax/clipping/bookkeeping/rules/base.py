"""What a rule is: from an equation to the rows of its gradient."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.extend.core as jex

from dpjax.clipping.bookkeeping.rules.factors import Factors, Size


class Layout(NamedTuple):
    """Which of an operand's axes are groups, left and right, each in row order."""

    groups: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]


class Rule(Protocol):
    """How one family of equations, linear in an operand, makes its gradient.

    All methods are for one example and one iteration; cotangent is the output's, and
    others are the equation's inputs without the operand.
    """

    @property
    def name(self) -> str:
        """What `explain` calls it."""
        ...

    def matches(self, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether the rule knows this equation's gradient by this input."""
        ...

    def size(self, eqn: jex.JaxprEqn, position: int) -> Size:
        """The sizes of its factors."""
        ...

    def layout(self, eqn: jex.JaxprEqn, position: int) -> Layout:
        """The operand's axes."""
        ...

    def canonicalize(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The other inputs and the cotangent that norms and sums are both made of."""
        ...

    def factors(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> Factors:
        """The rows f[g, t, n] and f[g, t, p]."""
        ...

    def gradient(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> jax.Array:
        """The gradient, in the operand's shape."""
        ...
