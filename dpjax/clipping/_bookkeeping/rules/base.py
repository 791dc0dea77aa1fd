"""The interface of a rule, which factors an operand's gradient at one equation."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.extend.core as jex

from dpjax._core.typing import Arrays
from dpjax.clipping._bookkeeping.jaxpr.equations import aval
from dpjax.clipping._bookkeeping.rules.factors import Factors, Size


class Layout(NamedTuple):
    """The axes of an operand that are groups, the left side and the right side.

    For each group, a gradient is a matrix with a left and a right side. Each tuple
    lists axes in row-major order of the flattened side.
    """

    groups: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        """All axes: groups, left and right."""
        return self.groups + self.left + self.right


@dataclasses.dataclass(frozen=True, eq=False)
class Rule(abc.ABC):
    """A way to form the gradient of an operand in which an equation is linear.

    Each rule covers one family of equations. All methods are for one example and one
    iteration. `others` holds the values of the equation's other inputs, and `cotangent`
    is the cotangent of the equation's output.

    Attributes:
      eqn: the equation.
      position: the operand's index among the equation's inputs.
      name: the rule's name in the table that `explain` prints.
    """

    eqn: jex.JaxprEqn
    position: int
    name: ClassVar[str]

    @property
    def shape(self) -> tuple[int, ...]:
        """The operand's shape."""
        return aval(self.eqn.invars[self.position]).shape

    @classmethod
    @abc.abstractmethod
    def matches(cls, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether the rule has the gradient with respect to the input at `position`."""

    @property
    @abc.abstractmethod
    def layout(self) -> Layout:
        """The operand's axes that are groups, left and right."""

    @property
    @abc.abstractmethod
    def size(self) -> Size:
        """The sizes of the gradient's factors."""

    def canonicalize(
        self, others: Arrays, cotangent: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The other inputs and the cotangent, in the form that norms and sums use."""
        return tuple(others), cotangent

    @abc.abstractmethod
    def factors(self, others: Arrays, cotangent: jax.Array) -> Factors:
        """The rows f[g, t, n] and f[g, t, p]."""

    @abc.abstractmethod
    def gradient(self, others: Arrays, cotangent: jax.Array) -> jax.Array:
        """The gradient, in the operand's shape."""

    def reorder(self, gradient: jax.Array, axes: Sequence[int]) -> jax.Array:
        """Bring a gradient whose axes are in another order into the operand's shape."""
        # Sorting the axes by their position gives the inverse permutation.
        inverse = sorted(range(len(axes)), key=axes.__getitem__)
        return gradient.reshape([self.shape[i] for i in axes]).transpose(inverse)
