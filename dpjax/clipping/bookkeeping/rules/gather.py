"""Rows of a table: embeddings."""

import math
from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from dpjax.clipping.bookkeeping.jaxpr.equations import aval
from dpjax.clipping.bookkeeping.rules.base import Layout
from dpjax.clipping.bookkeeping.rules.factors import Factors, OneHot, Size

_MODES = {
    GatherScatterMode.CLIP,
    GatherScatterMode.FILL_OR_DROP,
    GatherScatterMode.PROMISE_IN_BOUNDS,
}


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
        if max(shape) > np.iinfo(np.int32).max:
            return False
        if eqn.primitive.name == "dynamic_slice":
            return True
        numbers = eqn.params["dimension_numbers"]
        return (
            eqn.params["mode"] in _MODES
            and not numbers.operand_batching_dims
            and partial[0] in numbers.start_index_map
        )

    def layout(self, eqn: jex.JaxprEqn, position: int) -> Layout:
        """The indexed axis is left."""
        shape, sizes = aval(eqn.invars[0]).shape, eqn.params["slice_sizes"]
        (axis,) = (i for i, n in enumerate(shape) if sizes[i] != n)
        return Layout((), (axis,), tuple(i for i in range(len(shape)) if i != axis))

    def size(self, eqn: jex.JaxprEqn, position: int) -> Size:
        """Rows are the looked-up positions."""
        _, (axis,), right_axes = self.layout(eqn, position)
        shape = aval(eqn.invars[0]).shape
        right = math.prod(shape[i] for i in right_axes)
        rows = aval(eqn.outvars[0]).size // right
        return Size(1, rows, shape[axis], right, one_hot=True)

    def canonicalize(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Indices within the table; what read no row of it has no cotangent.

        So norms and sums put it in one row, whatever a compiler makes of an index that
        is out of bounds. The equation's transpose drops those that are not clipped.
        """
        shape, sizes = aval(eqn.invars[0]).shape, eqn.params["slice_sizes"]
        if eqn.primitive.name == "dynamic_slice":
            index = jnp.stack(others)
            index, _ = _clamp_indices(
                index, [n - m for n, m in zip(shape, sizes, strict=True)]
            )
            return tuple(index), cotangent
        numbers, (index,) = eqn.params["dimension_numbers"], others
        index, inside = _clamp_indices(
            index, [shape[i] - sizes[i] for i in numbers.start_index_map]
        )
        if eqn.params["mode"] == GatherScatterMode.CLIP:
            return (index,), cotangent
        inside = jnp.expand_dims(inside, numbers.offset_dims)
        return (index,), jnp.where(inside, cotangent, jnp.zeros_like(cotangent))

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
            index, right = others[axis], cotangent
        else:
            numbers = eqn.params["dimension_numbers"]
            index = others[0][..., numbers.start_index_map.index(axis)]
            offset = numbers.offset_dims
            rows = [i for i in range(cotangent.ndim) if i not in offset]
            right = cotangent.transpose(*rows, *offset)
        return Factors(
            OneHot(index.reshape(1, size.rows)),
            right.reshape(1, size.rows, size.right),
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
        table = table.at[one_hot.position[0]].add(right[0])
        (_, (axis,), right_axes) = self.layout(eqn, position)
        table = table.reshape(size.left, *(shape[i] for i in right_axes))
        return jnp.moveaxis(table, 0, axis)


def _clamp_indices(
    index: jax.Array, tops: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Index vectors i[..., k] within 0 and tops, in int32, and whether they were so.

    They are compared in their own dtype, which need not hold the tops, as int32 need
    not hold them.
    """
    most = int(jnp.iinfo(index.dtype).max)
    highest = np.array([min(top, most) for top in tops], index.dtype)
    clamped = jax.lax.clamp(
        index.dtype.type(0), index, np.broadcast_to(highest, index.shape)
    )
    return clamped.astype(jnp.int32), jnp.all(clamped == index, axis=-1)
