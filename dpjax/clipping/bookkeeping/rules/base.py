"""The interface of a rule, which factors an operand's gradient at one equation."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.extend.core as jex

from dpjax.clipping.bookkeeping.rules.factors import Factors, Size


class Layout(NamedTuple):
    """Which of an operand's axes are groups, left and right.

    A gradient is, for each group, a matrix with a left and a right side. Each tuple
    lists its axes in row-major order of the flattened side.
    """

    groups: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]


class Rule(Protocol):
    """How to form the gradient of an operand in which an equation is linear.

    Each rule covers one family of equations. All methods are for one example and one
    iteration. `position` is the operand's index among the equation's inputs, `others`
    holds the values of the other inputs, and `cotangent` is that of the output.
    """

    @property
    def name(self) -> str:
        """The rule's name in the table that `explain` prints."""
        ...

    def matches(self, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether the rule covers this equation's gradient by this input."""
        ...

    def size(self, eqn: jex.JaxprEqn, position: int) -> Size:
        """The sizes of the gradient's factors."""
        ...

    def layout(self, eqn: jex.JaxprEqn, position: int) -> Layout:
        """Which of the operand's axes are groups, left and right."""
        ...

    def canonicalize(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The other inputs and the cotangent, in the form that norms and sums use."""
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
