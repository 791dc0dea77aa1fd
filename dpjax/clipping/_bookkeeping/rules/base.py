"""The interface of rules, which factor a gradient at one equation into rows."""

import abc
import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.extend.core as jex

from dpjax._core.typing import Arrays
from dpjax.clipping._bookkeeping.jaxpr.equations import aval
from dpjax.clipping._bookkeeping.rules.factors import Factors, Size, outer


class Layout(NamedTuple):
    """Which axes of an operand are groups, the left side and the right side.

    An operand's gradient has one matrix for each group. The flattened left axes are the
    first axis of the matrix, and the flattened right axes are the second. Each tuple
    lists axes in row-major order of the flattened side.
    """

    groups: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Rule(abc.ABC):
    """How to form an input's gradient at an equation that is linear in this input.

    This input is called the operand. Each rule covers one family of equations. All
    methods are for one example, and for one iteration of the scans around the equation.
    `others` holds the values of the equation's other inputs, and `cotangent` is the
    cotangent of the equation's output.

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
        """Whether this rule covers the equation with the input at `position`."""

    @property
    @abc.abstractmethod
    def layout(self) -> Layout:
        """Which axes of the operand are groups, the left side and the right side."""

    @property
    @abc.abstractmethod
    def size(self) -> Size:
        """The sizes of the factors of the operand's gradient."""

    def canonicalize(
        self, others: Arrays, cotangent: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Return the other inputs and the cotangent in the form for norms and sums.

        The other inputs are the values of the equation's inputs except the operand. A
        rule may change these arrays but not the gradient: a gather clamps its indices
        to the table, and sets the cotangents of dropped lookups to 0. Norms and sums
        are both computed from the returned arrays, and so for the same gradient. By
        default nothing is changed.
        """
        return tuple(others), cotangent

    @abc.abstractmethod
    def factors(self, others: Arrays, cotangent: jax.Array) -> Factors:
        """The rows f[g, t, n] and f[g, t, p], whose outer products sum to the gradient.

        The index g runs over the entries of the operand's group axes (`layout.groups`).
        For each g, the sum of the outer products over t is one matrix of the gradient.
        """

    def gradient(self, others: Arrays, cotangent: jax.Array) -> jax.Array:
        """The operand's gradient, in the operand's shape: the product of the factors.

        A rule may compute the same gradient in a cheaper way.
        """
        return self.reorder(outer(self.factors(others, cotangent), self.size.left))

    def reorder(self, gradient: jax.Array) -> jax.Array:
        """Bring a gradient with axes groups, left and right into the operand's shape.

        Each of these axes may be flattened, as it is in the factors.
        """
        axes = self.layout.groups + self.layout.left + self.layout.right
        # Sorting the axes by their position gives the inverse permutation.
        inverse = sorted(range(len(axes)), key=axes.__getitem__)
        return gradient.reshape([self.shape[i] for i in axes]).transpose(inverse)
