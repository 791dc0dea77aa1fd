"""The rule for looking up slices of a table, as embeddings do."""

import math
from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from dpjax._core.typing import Arrays
from dpjax.clipping._bookkeeping.jaxpr.equations import aval, is_real
from dpjax.clipping._bookkeeping.rules.base import Layout, Rule
from dpjax.clipping._bookkeeping.rules.factors import Factors, OneHot, Size

_MODES = {
    GatherScatterMode.CLIP,
    GatherScatterMode.FILL_OR_DROP,
    GatherScatterMode.PROMISE_IN_BOUNDS,
}


class Gather(Rule):
    """A lookup of whole slices along one axis, which is a product with one-hot rows.

    The rule covers gather, which is the primitive of array indexing, and dynamic_slice
    if it takes one slice.
    """

    name = "gather"

    @classmethod
    def matches(cls, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether a lookup takes one index on one axis, and all of the other axes."""
        if eqn.primitive.name not in {"gather", "dynamic_slice"} or position != 0:
            return False
        shape, sizes = aval(eqn.invars[0]).shape, eqn.params["slice_sizes"]
        partial = [i for i, n in enumerate(shape) if sizes[i] != n]
        if len(partial) != 1 or sizes[partial[0]] != 1:
            return False
        # Positions are stored in int32.
        if not is_real(eqn.outvars[0]) or max(shape) > np.iinfo(np.int32).max:
            return False
        if eqn.primitive.name == "dynamic_slice":
            return True
        numbers = eqn.params["dimension_numbers"]
        return (
            eqn.params["mode"] in _MODES
            and not numbers.operand_batching_dims
            and partial[0] in numbers.start_index_map
        )

    @property
    def layout(self) -> Layout:
        """The indexed axis of the table is left, and its other axes are right."""
        sizes = self.eqn.params["slice_sizes"]
        axes = range(len(self.shape))
        (axis,) = (i for i in axes if sizes[i] != self.shape[i])
        return Layout((), (axis,), tuple(i for i in axes if i != axis))

    @property
    def size(self) -> Size:
        """The sizes of the factors of the table's gradient; each lookup is a row."""
        left = self.shape[self.layout.left[0]]
        right = math.prod(self.shape) // left
        rows = aval(self.eqn.outvars[0]).size // right
        return Size(1, rows, left, right, one_hot=True)

    def canonicalize(
        self, others: Arrays, cotangent: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Clamp the indices to the table, and set cotangents of dropped lookups to 0.

        In a mode other than "clip", a lookup that is out of bounds reads no row of the
        table, and the equation's transpose drops the lookup. So its cotangent is set to
        zero. Then norms and sums use the same row for every lookup, however a compiler
        treats an index out of bounds.
        """
        params = self.eqn.params
        tops = [n - m for n, m in zip(self.shape, params["slice_sizes"], strict=True)]
        if self.eqn.primitive.name == "dynamic_slice":
            index, _ = _clamp_indices(jnp.stack(others), tops)
            return tuple(index), cotangent
        numbers, (index,) = params["dimension_numbers"], others
        tops = [tops[i] for i in numbers.start_index_map]
        index, inside = _clamp_indices(index, tops)
        # In the mode "clip", the loss itself reads the nearest row.
        if params["mode"] == GatherScatterMode.CLIP:
            return (index,), cotangent
        inside = jnp.expand_dims(inside, numbers.offset_dims)
        return (index,), jnp.where(inside, cotangent, jnp.zeros_like(cotangent))

    def factors(self, others: Arrays, cotangent: jax.Array) -> Factors:
        """The indices as one-hot rows, and the rows f[1, t, p] of the cotangent."""
        size, (axis,) = self.size, self.layout.left
        if self.eqn.primitive.name == "dynamic_slice":
            index, right = others[axis], cotangent
        else:
            numbers = self.eqn.params["dimension_numbers"]
            index = others[0][..., numbers.start_index_map.index(axis)]
            offset = numbers.offset_dims
            rows = [i for i in range(cotangent.ndim) if i not in offset]
            right = cotangent.transpose(*rows, *offset)
        return Factors(
            OneHot(index.reshape(1, size.rows)), right.reshape(1, size.rows, size.right)
        )

    def gradient(self, others: Arrays, cotangent: jax.Array) -> jax.Array:
        """The table's gradient: each row of the cotangent is added at its index."""
        (one_hot, right) = self.factors(others, cotangent)
        assert isinstance(one_hot, OneHot)
        table = jnp.zeros((self.size.left, self.size.right), right.dtype)
        table = table.at[one_hot.position[0]].add(right[0])
        return self.reorder(table, self.layout.axes)


def _clamp_indices(
    index: jax.Array, tops: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Clamp index vectors i[..., k]: entry j of each vector is clamped to [0, tops[j]].

    The comparison is in the dtype of the indices, since int32 may be too narrow for the
    indices. That dtype may in turn be too narrow for `tops`, which are limited to its
    maximum.

    Returns:
      The clamped indices in int32, and whether each vector was in bounds, bool[...].
    """
    most = int(jnp.iinfo(index.dtype).max)
    highest = np.array([min(top, most) for top in tops], index.dtype)
    clamped = jax.lax.clamp(
        index.dtype.type(0), index, np.broadcast_to(highest, index.shape)
    )
    return clamped.astype(jnp.int32), jnp.all(clamped == index, axis=-1)
