"""The rule for dot_general: dense layers, einsum, attention projections."""

import math
from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax.clipping.bookkeeping.jaxpr.equations import aval
from dpjax.clipping.bookkeeping.rules.base import Layout
from dpjax.clipping.bookkeeping.rules.factors import Factors, Size, outer


class Dense:
    """A product of arrays, in every layout.

    The operand's contracted axes are left, and its free axes are right. Its batch axes
    are groups: each group has a matrix, an input and an output of its own.
    """

    name = "dense"

    def matches(self, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether the equation is a product of real arrays."""
        return eqn.primitive.name == "dot_general" and all(
            jnp.issubdtype(aval(v).dtype, jnp.floating)
            for v in (*eqn.invars, *eqn.outvars)
        )

    def layout(self, eqn: jex.JaxprEqn, position: int) -> Layout:
        """The operand's batch axes, contracted axes and free axes."""
        contracted, batch = eqn.params["dimension_numbers"]
        rank = aval(eqn.invars[position]).ndim
        free = _free(rank, contracted[position], batch[position])
        return Layout(tuple(batch[position]), tuple(contracted[position]), free)

    def size(self, eqn: jex.JaxprEqn, position: int) -> Size:
        """The factors' sizes: the rows are the positions on the other's free axes."""
        shape = aval(eqn.invars[position]).shape
        groups, left, right = (
            math.prod(shape[i] for i in axes) for axes in self.layout(eqn, position)
        )
        rows = aval(eqn.invars[1 - position]).size // (groups * left)
        return Size(groups, rows, left, right)

    def canonicalize(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Return the inputs unchanged: a dense product needs no canonical form."""
        return tuple(others), cotangent

    def factors(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> Factors:
        """The other input's rows f[g, t, n] and the cotangent's rows f[g, t, p]."""
        (x,) = others
        size = self.size(eqn, position)
        contracted, batch = eqn.params["dimension_numbers"]
        other = 1 - position
        free = _free(x.ndim, contracted[other], batch[other])
        left = x.transpose(*batch[other], *free, *contracted[other])
        # The output's axes: batch, then the free ones of the first and second input.
        groups = len(batch[0])
        # The operand's free axes must come last in the cotangent, as its right side.
        if position == 0:
            mine = cotangent.ndim - groups - len(free)
            cotangent = jnp.moveaxis(
                cotangent, range(groups, groups + mine), range(-mine, 0)
            )
        return Factors(
            left.reshape(size.groups, size.rows, size.left),
            cotangent.reshape(size.groups, size.rows, size.right),
        )

    def gradient(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> jax.Array:
        """The product of the factors, with its axes in the operand's order."""
        factors = self.factors(eqn, position, others, cotangent)
        axes = [i for part in self.layout(eqn, position) for i in part]
        shape = aval(eqn.invars[position]).shape
        product = outer(factors, self.size(eqn, position).left)
        inverse = sorted(range(len(axes)), key=axes.__getitem__)
        return product.reshape([shape[i] for i in axes]).transpose(inverse)


def _free(
    rank: int, contracted: Sequence[int], batch: Sequence[int]
) -> tuple[int, ...]:
    return tuple(i for i in range(rank) if i not in contracted and i not in batch)
