"""The rule for dot_general: dense layers, einsum, attention projections."""

import math
from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax.clipping.bookkeeping.jaxpr.equations import aval, is_real
from dpjax.clipping.bookkeeping.rules.base import Layout, Rule
from dpjax.clipping.bookkeeping.rules.factors import Factors, Size, outer


class Dense(Rule):
    """A product of arrays, in every layout.

    The operand's contracted axes are left, and its free axes are right. Its batch axes
    are groups: each group has a matrix, an input and an output of its own.
    """

    name = "dense"

    @classmethod
    def matches(cls, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether the equation is a product of real arrays."""
        arrays = (*eqn.invars, *eqn.outvars)
        return eqn.primitive.name == "dot_general" and is_real(*arrays)

    @property
    def layout(self) -> Layout:
        """The operand's batch axes, contracted axes and free axes."""
        contracted, free, batch = self._axes(self.position)
        return Layout(batch, contracted, free)

    @property
    def size(self) -> Size:
        """The factors' sizes: the rows are the positions on the other's free axes."""
        groups, left, right = (
            math.prod(self.shape[i] for i in axes) for axes in self.layout
        )
        rows = aval(self.eqn.invars[1 - self.position]).size // (groups * left)
        return Size(groups, rows, left, right)

    def factors(self, others: Sequence[jax.Array], cotangent: jax.Array) -> Factors:
        """The other input's rows f[g, t, n] and the cotangent's rows f[g, t, p]."""
        (x,) = others
        size = self.size
        contracted, free, batch = self._axes(1 - self.position)
        left = x.transpose(*batch, *free, *contracted)
        # The output's axes: batch, then the free ones of the first and second input.
        groups = len(batch)
        # The operand's free axes must come last in the cotangent, as its right side.
        if self.position == 0:
            mine = cotangent.ndim - groups - len(free)
            cotangent = jnp.moveaxis(
                cotangent, range(groups, groups + mine), range(-mine, 0)
            )
        return Factors(
            left.reshape(size.groups, size.rows, size.left),
            cotangent.reshape(size.groups, size.rows, size.right),
        )

    def gradient(self, others: Sequence[jax.Array], cotangent: jax.Array) -> jax.Array:
        """The product of the factors, with its axes in the operand's order."""
        product = outer(self.factors(others, cotangent), self.size.left)
        return self.reorder(product, self.layout.axes)

    def _axes(self, position: int) -> tuple[tuple[int, ...], ...]:
        """The contracted, free and batch axes of an input."""
        axes = range(aval(self.eqn.invars[position]).ndim)
        contracted, batch = (
            tuple(both[position]) for both in self.eqn.params["dimension_numbers"]
        )
        free = tuple(i for i in axes if i not in contracted and i not in batch)
        return contracted, free, batch
