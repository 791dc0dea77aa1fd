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
    """Whole slices along one axis: a product with one-hot rows.

    It covers gather, as indexing makes it, and dynamic_slice of one slice.
    """

    name = "gather"

    def matches(self, eqn: jex.JaxprEqn, position: int) -> bool:
        """One index a row, everything else whole."""
        if eqn.primitive.name not in {"gather", "dynamic_slice"} or position != 0:
            return False
        shape, sizes = aval(eqn.invars[0]).shape, eqn.params["slice_sizes"]
        partial = [i for i, n in enumerate(shape) if sizes[i] != n]
        if len(partial) != 1 or sizes[partial[0]] != 1:
            return False
        if not jnp.issubdtype(aval(eqn.outvars[0]).dtype, jnp.floating):
            return False
        if eqn.primitive.name == "dynamic_slice":
            return True
        numbers = eqn.params["dimension_numbers"]
        # An index along a whole axis is clamped to zero, unless it may fall outside.
        clamped = eqn.params["mode"] != GatherScatterMode.FILL_OR_DROP
        return (
            not numbers.operand_batching_dims
            and partial[0] in numbers.start_index_map
            and (len(numbers.start_index_map) == 1 or clamped)
        )

    def layout(
        self, eqn: jex.JaxprEqn, position: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The indexed axis is left."""
        shape, sizes = aval(eqn.invars[0]).shape, eqn.params["slice_sizes"]
        (axis,) = (i for i, n in enumerate(shape) if sizes[i] != n)
        return (), (axis,), tuple(i for i in range(len(shape)) if i != axis)

    def size(self, eqn: jex.JaxprEqn, position: int) -> Size:
        """Rows are the looked-up positions."""
        _, (axis,), right_axes = self.layout(eqn, position)
        shape = aval(eqn.invars[0]).shape
        right = math.prod(shape[i] for i in right_axes)
        rows = aval(eqn.outvars[0]).size // right if right else 0
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
        _, (axis,), _ = self.layout(eqn, position)
        if eqn.primitive.name == "dynamic_slice":
            index, mode = others[axis], GatherScatterMode.CLIP
            right = cotangent
        else:
            numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
            index = others[0][..., numbers.start_index_map.index(axis)]
            offset = numbers.offset_dims
            rows = [i for i in range(cotangent.ndim) if i not in offset]
            right = cotangent.transpose(*rows, *offset)
        index = index.reshape(1, size.rows).astype(jnp.int32)
        right = right.reshape(1, size.rows, size.right)
        if mode == GatherScatterMode.CLIP:
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
