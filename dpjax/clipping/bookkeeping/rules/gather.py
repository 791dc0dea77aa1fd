"""The rule for looking up slices of a table, as embeddings do."""

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
    """A lookup of whole slices along one axis: a product with one-hot rows.

    The rule covers gather, the primitive of array indexing, and dynamic_slice where it
    takes one slice.
    """

    name = "gather"

    def matches(self, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether each row takes one index on one axis, and all of the other axes."""
        if eqn.primitive.name not in {"gather", "dynamic_slice"} or position != 0:
            return False
        shape, sizes = aval(eqn.invars[0]).shape, eqn.params["slice_sizes"]
        partial = [i for i, n in enumerate(shape) if sizes[i] != n]
        if len(partial) != 1 or sizes[partial[0]] != 1:
            return False
        if not jnp.issubdtype(aval(eqn.outvars[0]).dtype, jnp.floating):
            return False
        # Positions are held in int32.
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
        """The indexed axis is left, and the other axes are right."""
        shape, sizes = aval(eqn.invars[0]).shape, eqn.params["slice_sizes"]
        (axis,) = (i for i, n in enumerate(shape) if sizes[i] != n)
        return Layout((), (axis,), tuple(i for i in range(len(shape)) if i != axis))

    def size(self, eqn: jex.JaxprEqn, position: int) -> Size:
        """The factors' sizes: the rows are the lookups."""
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
        """The indices clamped to the table, and zero cotangents for dropped lookups.

        A lookup that is out of bounds and not clipped reads no row of the table, and
        the equation's transpose drops it: its cotangent is set to zero. After that,
        norms and sums use the same row for every lookup, however a compiler treats an
        index out of bounds.
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
        # In this mode the loss itself reads the nearest row.
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
        """The indices as one-hot rows, and the cotangent's rows f[1, t, p]."""
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
        """The table's gradient: the cotangent's rows, added up by their index."""
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
    """Clamp index vectors i[..., k] to [0, tops].

    The comparison is in the dtype of the indices. Neither can be converted first: that
    dtype may be too narrow for `tops`, and int32 may be too narrow for the indices.

    Returns:
      The clamped indices in int32, and b[...], whether a vector was within the bounds.
    """
    most = int(jnp.iinfo(index.dtype).max)
    highest = np.array([min(top, most) for top in tops], index.dtype)
    clamped = jax.lax.clamp(
        index.dtype.type(0), index, np.broadcast_to(highest, index.shape)
    )
    return clamped.astype(jnp.int32), jnp.all(clamped == index, axis=-1)
