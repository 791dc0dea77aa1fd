"""Rows of a table: embeddings."""

import math
from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from dpjax.bookkeeping.factors import Factors, OneHot, Size
from dpjax.bookkeeping.trace import aval


class Gather:
    """Whole slices along one axis: a product with one-hot rows."""

    name = "gather"

    def matches(self, eqn: jex.JaxprEqn, position: int) -> bool:
        """One index a row, a collapsed axis, everything else whole."""
        if eqn.primitive.name != "gather" or position != 0:
            return False
        numbers, shape = eqn.params["dimension_numbers"], aval(eqn.invars[0]).shape
        if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
            return False
        (axis,) = numbers.start_index_map
        whole = tuple(1 if i == axis else n for i, n in enumerate(shape))
        return (
            tuple(numbers.collapsed_slice_dims) == (axis,)
            and tuple(eqn.params["slice_sizes"]) == whole
            and jnp.issubdtype(aval(eqn.outvars[0]).dtype, jnp.floating)
        )

    def layout(
        self, eqn: jex.JaxprEqn, position: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The indexed axis is left."""
        (axis,) = eqn.params["dimension_numbers"].start_index_map
        rank = aval(eqn.invars[0]).ndim
        return (), (axis,), tuple(i for i in range(rank) if i != axis)

    def size(self, eqn: jex.JaxprEqn, position: int) -> Size:
        """Rows are the looked-up positions."""
        _, (axis,), right_axes = self.layout(eqn, position)
        shape = aval(eqn.invars[0]).shape
        right = math.prod(shape[i] for i in right_axes)
        rows = math.prod(aval(eqn.invars[1]).shape[:-1])
        return Size(1, rows, shape[axis], right, 1 + right)

    def factors(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> Factors:
        """The indices and the cotangent's rows."""
        size = self.size(eqn, position)
        index = others[0][..., 0].reshape(1, size.rows).astype(jnp.int32)
        offset = eqn.params["dimension_numbers"].offset_dims
        rows = [i for i in range(cotangent.ndim) if i not in offset]
        right = cotangent.transpose(*rows, *offset).reshape(1, size.rows, size.right)
        if eqn.params["mode"] == GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, size.left - 1)
        inside = (index >= 0) & (index < size.left)
        # What lies outside reads no parameter.
        return Factors(
            OneHot(jnp.where(inside, index, -1)),
            jnp.where(inside[..., None], right, 0.0),
        )

    def gradient(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> jax.Array:
        """The rows added up in a table."""
        (one_hot, right) = self.factors(eqn, position, others, cotangent)
        assert isinstance(one_hot, OneHot)
        assert not isinstance(right, OneHot)
        size, shape = self.size(eqn, position), aval(eqn.invars[0]).shape
        table = jnp.zeros((size.left, size.right), right.dtype)
        # A negative index would count from the end.
        index = jnp.where(one_hot.position < 0, size.left, one_hot.position)
        table = table.at[index[0]].add(right[0], mode="drop")
        (_, (axis,), right_axes) = self.layout(eqn, position)
        table = table.reshape(size.left, *(shape[i] for i in right_axes))
        return jnp.moveaxis(table, 0, axis)
