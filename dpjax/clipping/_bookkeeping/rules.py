"""Rules that give the gradient at one equation as a sum of outer products of rows.

A rule is for an equation that is linear in one of its inputs, the operand. There are
three rules. `Dense` is for dot_general, the operation of dense layers, einsum and
attention projections. `Convolution` is for convolutions as functions of their kernel,
with any stride, padding, dilation and feature groups. `Gather` is for lookups of slices
of a table, such as embeddings. `Rule` is the interface of all rules, and `rule_for`
chooses the rule for an equation.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from dpjax._core.rounding import HIGHEST
from dpjax._core.typing import Arrays
from dpjax.clipping._bookkeeping.equations import aval, is_real
from dpjax.clipping._bookkeeping.factors import Factors, OneHot, Size


class Layout(NamedTuple):
    """How the axes of an array correspond to the axes of its gradient's matrices.

    The array is an input of an equation that is linear in this input. The array's
    gradient at the equation has one matrix for each group.

    Attributes:
      groups: the axes of the groups: each index along these axes has its own matrix.
      left: the axes that are flattened, in this order, to the first axis of a matrix.
      right: the axes that are flattened, in this order, to the second axis of a matrix.
    """

    groups: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Rule(abc.ABC):
    """How to form an input's gradient at an equation that is linear in this input.

    This input is called the operand. Each subclass is for one family of equations. All
    methods are for one example, and for one iteration of each scan around the equation.
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
        """The shape of the operand, the input whose gradient this rule forms."""
        return aval(self.eqn.invars[self.position]).shape

    @classmethod
    @abc.abstractmethod
    def matches(cls, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether this rule is for the gradient of the input at `position`."""

    @property
    @abc.abstractmethod
    def layout(self) -> Layout:
        """How the operand's axes correspond to the axes of the gradient's matrices."""

    @property
    def size(self) -> Size:
        """The number and sizes of the rows whose outer products sum to the gradient.

        The gradient has one matrix for each group, which is a sum of outer products of
        a left row and a right row. The right rows of all groups together have as many
        entries as the equation's output.
        """
        groups, left, right = (
            math.prod(self.shape[i] for i in axes) for axes in self.layout
        )
        rows = aval(self.eqn.outvars[0]).size // (groups * right)
        return Size(groups, rows, left, right)

    def canonicalize(
        self, others: Arrays, cotangent: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Change the equation's other inputs and the cotangent, but not the gradient.

        By default nothing is changed. The rule of a lookup clamps indices to the table,
        and sets the cotangents of dropped lookups to 0. Norms and sums are both
        computed from the returned arrays, so that norms and sums are those of the same
        gradients.
        """
        return tuple(others), cotangent

    @abc.abstractmethod
    def factors(self, others: Arrays, cotangent: jax.Array) -> Factors:
        """The rows f[g, t, n] and f[g, t, p], whose outer products sum to the gradient.

        The gradient has one matrix f[n, p] for each group g (`layout`). The matrix is
        the sum of the outer products over t.
        """

    def gradient(self, others: Arrays, cotangent: jax.Array) -> jax.Array:
        """The gradient of the operand, in the operand's shape.

        By default the gradient is the sum of the outer products of the rows from
        `factors`. The left rows must then be an array and no `OneHot`. A subclass may
        compute the same gradient in a cheaper way.
        """
        left, right = self.factors(others, cotangent)
        assert not isinstance(left, OneHot)
        product = jnp.einsum("...tn,...tp->...np", left, right, precision=HIGHEST)
        return self.reorder(product)

    def reorder(self, gradient: jax.Array) -> jax.Array:
        """Bring a gradient f[g, n, p] into the shape of the operand.

        The axes g, n and p are the groups, the left axes and the right axes of
        `layout`. Each of g, n and p may also be several axes that are not flattened.
        """
        axes = self.layout.groups + self.layout.left + self.layout.right
        # Sorting the axes by their position gives the inverse permutation.
        inverse = sorted(range(len(axes)), key=axes.__getitem__)
        return gradient.reshape([self.shape[i] for i in axes]).transpose(inverse)


class Dense(Rule):
    """The rule for dot_general, the product of two arrays, with any order of axes.

    The operand is the input whose gradient the rule forms. Each index of the operand's
    batch axes is a group, and the gradient has one matrix for each group. In this
    matrix, the operand's contracted axes are flattened to the first axis (left). The
    operand's free axes, which are neither batch nor contracted axes, are flattened to
    the second axis (right).
    """

    name = "dense"

    @classmethod
    def matches(cls, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether the equation is a dot_general of real arrays."""
        arrays = (*eqn.invars, *eqn.outvars)
        return eqn.primitive.name == "dot_general" and is_real(*arrays)

    @property
    def layout(self) -> Layout:
        """The operand's batch axes as groups, contracted axes left, free axes right.

        `Layout` explains groups, left axes and right axes.
        """
        return self._axes(self.position)

    def factors(self, others: Arrays, cotangent: jax.Array) -> Factors:
        """The other array as rows f[g, t, n], and the cotangent as rows f[g, t, p].

        The index g runs over batch axes, t over the free axes of the other array, n
        over contracted axes, and p over the free axes of the operand. Free axes are
        neither contracted nor batch axes.
        """
        (x,) = others
        size = self.size
        batch, contracted, free = self._axes(1 - self.position)
        left = x.transpose(*batch, *free, *contracted)
        # The output's axes are the batch axes, then the free axes of the first input,
        # and then the free axes of the second input.
        groups = len(batch)
        # In the cotangent, the operand's free axes must come last, as the right axes.
        if self.position == 0:
            num_free = cotangent.ndim - groups - len(free)
            cotangent = jnp.moveaxis(
                cotangent, range(groups, groups + num_free), range(-num_free, 0)
            )
        return Factors(
            left.reshape(size.groups, size.rows, size.left),
            cotangent.reshape(size.groups, size.rows, size.right),
        )

    def _axes(self, position: int) -> Layout:
        """The batch, contracted and free axes of the input at `position`.

        Free axes are neither contracted nor batch axes.
        """
        contracted, batch = (
            tuple(axes_of_inputs[position])
            for axes_of_inputs in self.eqn.params["dimension_numbers"]
        )
        axes = range(aval(self.eqn.invars[position]).ndim)
        free = tuple(i for i in axes if i not in contracted and i not in batch)
        return Layout(batch, contracted, free)


class Convolution(Rule):
    """The rule for a convolution's kernel, as a dense layer on patches of the image.

    Each feature group has its own matrix of the gradient. This matrix is a sum of outer
    products, one for each output pixel. The left row is the patch of the input from
    which the pixel is computed. The right row is the pixel's cotangent. So the first
    axis of a matrix (left) has the kernel's offsets and input features, and the second
    axis (right) has the output features.
    """

    name = "convolution"

    @classmethod
    def matches(cls, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether the input at `position` is the kernel of a real-valued convolution.

        Convolutions with batch groups are excluded. JAX makes batch groups when it
        differentiates a grouped convolution by its kernel. So batch groups occur in
        losses that contain such a gradient.
        """
        return (
            eqn.primitive.name == "conv_general_dilated"
            and position == 1
            and eqn.params["batch_group_count"] == 1
            and is_real(*eqn.invars, *eqn.outvars)
        )

    @property
    def layout(self) -> Layout:
        """How the kernel's axes correspond to the axes of the gradient's matrices.

        `Layout` explains left axes and right axes. Feature groups have no axis of their
        own in the kernel.
        """
        out_features, in_features, *window = self._spec.rhs_spec
        return Layout((), (*window, in_features), (out_features,))

    @property
    def size(self) -> Size:
        """The number and sizes of the rows whose outer products sum to the gradient.

        Each term is the outer product of a left row and a right row. Each feature group
        has one term for each pixel of each output image. A right row has the output
        features of one group, because the groups follow one another on the kernel's
        axis of output features.
        """
        size = super().size
        return size._replace(groups=self._groups, right=size.right // self._groups)

    def factors(self, others: Arrays, cotangent: jax.Array) -> Factors:
        """The input's patches f[g, t, n], and the cotangent's pixels f[g, t, p].

        Here g are the feature groups, t the output pixels, n the entries of a patch,
        and p the output features of a group.
        """
        read = self._make_reader(others[0])
        windows = [read(start) for start in self._window_starts()]
        return Factors(jnp.concatenate(windows, axis=-1), self._pixels(cotangent))

    def gradient(self, others: Arrays, cotangent: jax.Array) -> jax.Array:
        """The kernel's gradient, by one matrix product for each offset in its window.

        A product multiplies the input's pixels at one offset by the cotangent's pixels.
        The products are computed one after the other, so that the patches for all
        offsets are never stored together.
        """
        read, pixels = self._make_reader(others[0]), self._pixels(cotangent)

        def product(start: jax.Array) -> jax.Array:
            return jnp.einsum("gtc,gtp->gcp", read(start), pixels, precision=HIGHEST)

        products = jax.lax.map(product, self._window_starts())
        # The products are f[offset, g, c, p]. A kernel's output features are (g, p). If
        # the kernel's last axes are those of the products, XLA moves whole blocks of
        # memory in a single transposition.
        out_features, in_features, *window = self._spec.rhs_spec
        sizes = [self.shape[i] for i in window]
        products = products.reshape(*sizes, *products.shape[1:])
        axes = {axis: (i,) for i, axis in enumerate(window)}
        g, c, p = range(len(window), len(window) + 3)
        axes |= {in_features: (c,), out_features: (g, p)}
        order = [i for axis in range(len(self.shape)) for i in axes[axis]]
        return products.transpose(order).reshape(self.shape)

    @property
    def _spec(self) -> jax.lax.ConvDimensionNumbers:
        return self.eqn.params["dimension_numbers"]

    @property
    def _groups(self) -> int:
        return self.eqn.params["feature_group_count"]

    def _split_groups(self, pixels: jax.Array) -> jax.Array:
        """Split the features of pixels f[..., features] into g feature groups.

        The result is f[g, pixels, features of a group].
        """
        rows = pixels.reshape(-1, self._groups, pixels.shape[-1] // self._groups)
        return jnp.moveaxis(rows, 1, 0)

    def _pixels(self, cotangent: jax.Array) -> jax.Array:
        """The cotangent of the output as rows f[g, pixels, output features of a group].

        Here g are the feature groups.
        """
        batch, feature, *space = self._spec.out_spec
        return self._split_groups(cotangent.transpose(batch, *space, feature))

    def _window_starts(self) -> np.ndarray:
        """The positions i[offset, spatial axis] that the first output pixel reads.

        For each offset in the kernel's window, the result has one position in the
        padded input.
        """
        window = [range(self.shape[i]) for i in self._spec.rhs_spec[2:]]
        offsets = np.array(list(itertools.product(*window)), np.int32)
        return offsets * np.array(self.eqn.params["rhs_dilation"], np.int32)

    def _make_reader(self, x: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """Make a function that reads the inputs of all output pixels at one offset.

        The argument of the function is a row of `_window_starts`, which gives the
        kernel offset. The result is f[g, pixels, input features of a group], where g
        are the feature groups.
        """
        params = self.eqn.params
        batch, feature, *space = self._spec.lhs_spec
        x = x.transpose(batch, *space, feature)
        # lax.pad also accepts negative padding and inserts the zeros of input dilation.
        edges = [
            (low, high, dilation - 1)
            for (low, high), dilation in zip(
                params["padding"], params["lhs_dilation"], strict=True
            )
        ]
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
        out = [aval(self.eqn.outvars[0]).shape[i] for i in self._spec.out_spec[2:]]
        strides = params["window_strides"]
        spans = [(n - 1) * stride + 1 for n, stride in zip(out, strides, strict=True)]

        def read(start: jax.Array) -> jax.Array:
            # dynamic_slice needs indices of one dtype; Python's 0 is int64 under x64.
            begin = (np.int32(0), *start, np.int32(0))
            window = jax.lax.dynamic_slice(x, begin, (x.shape[0], *spans, x.shape[-1]))
            steps = (slice(None), *(slice(None, None, s) for s in strides))
            return self._split_groups(window[steps])

        return read


# The modes of lookups that the rule for lookups covers.
_COVERED_MODES = {
    GatherScatterMode.CLIP,
    GatherScatterMode.FILL_OR_DROP,
    GatherScatterMode.PROMISE_IN_BOUNDS,
}


class Gather(Rule):
    """The rule for the gradient of the table in which a lookup reads.

    A lookup reads the whole slice at one index of one axis, and is the product of a
    one-hot row and the table. The rule is for gather, which is the primitive of array
    indexing, and for dynamic_slice, which is a single lookup.
    """

    name = "gather"

    @classmethod
    def matches(cls, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether the input at `position` is a table from which whole slices are read.

        Each lookup reads one index of one axis of the table, and all indices of the
        other axes. The result is False for a gather with batch axes or with a mode that
        is not in `_COVERED_MODES`, and for a table with an axis too long for int32.
        """
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
            eqn.params["mode"] in _COVERED_MODES
            and not numbers.operand_batching_dims
            and partial[0] in numbers.start_index_map
        )

    @property
    def layout(self) -> Layout:
        """The indexed axis of the table as left axis, all other axes as right axes.

        The left axis is the first axis of the gradient's matrix. The right axes are
        flattened to the second axis.
        """
        sizes = self.eqn.params["slice_sizes"]
        axes = range(len(self.shape))
        (axis,) = (i for i in axes if sizes[i] != self.shape[i])
        return Layout((), (axis,), tuple(i for i in axes if i != axis))

    @property
    def size(self) -> Size:
        """The number and sizes of the rows whose outer products sum to the gradient.

        Each lookup gives one row. The left rows are unit vectors.
        """
        return super().size._replace(one_hot=True)

    def canonicalize(
        self, others: Arrays, cotangent: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Clamp the indices to the table, and set cotangents of dropped lookups to 0.

        In a gather's mode "fill", a lookup out of bounds reads no row of the table, and
        the equation's transpose drops the lookup. If the mode promises indices in
        bounds, the result of a lookup out of bounds is undefined. In both modes, the
        cotangent of a lookup out of bounds is set to zero. Norms and sums then use the
        same row for every lookup, even if compilers treat such lookups in different
        ways.
        """
        params = self.eqn.params
        limits = [n - m for n, m in zip(self.shape, params["slice_sizes"], strict=True)]
        if self.eqn.primitive.name == "dynamic_slice":
            index, _ = _clamp_indices(jnp.stack(others), limits)
            return tuple(index), cotangent
        numbers, (index,) = params["dimension_numbers"], others
        limits = [limits[i] for i in numbers.start_index_map]
        index, in_bounds = _clamp_indices(index, limits)
        # In the mode "clip", the loss itself reads the nearest row.
        if params["mode"] == GatherScatterMode.CLIP:
            return (index,), cotangent
        in_bounds = jnp.expand_dims(in_bounds, numbers.offset_dims)
        return (index,), jnp.where(in_bounds, cotangent, jnp.zeros_like(cotangent))

    def factors(self, others: Arrays, cotangent: jax.Array) -> Factors:
        """The indices as one-hot rows, and the cotangent as rows f[1, t, p].

        Each of the t lookups has one row of length p.
        """
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
        """The table's gradient: the cotangent's rows, added at their indices."""
        (one_hot, right) = self.factors(others, cotangent)
        assert isinstance(one_hot, OneHot)
        table = jnp.zeros((self.size.left, self.size.right), right.dtype)
        return self.reorder(table.at[one_hot.position[0]].add(right[0]))


def _clamp_indices(
    index: jax.Array, limits: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Clamp entry j of each index vector, i[..., k], to the range 0 to limits[j].

    The comparison is in the dtype of the indices, since int32 may be too narrow for the
    indices. An entry of `limits` above this dtype's maximum is replaced by the maximum.

    Returns:
      The clamped indices in int32, and whether each vector was in bounds, bool[...].
    """
    dtype_max = int(jnp.iinfo(index.dtype).max)
    clipped_limits = np.array([min(limit, dtype_max) for limit in limits], index.dtype)
    clamped = jax.lax.clamp(
        index.dtype.type(0), index, np.broadcast_to(clipped_limits, index.shape)
    )
    return clamped.astype(jnp.int32), jnp.all(clamped == index, axis=-1)


def rule_for(eqn: jex.JaxprEqn, position: int) -> Rule | None:
    """The rule for the gradient of an equation's input; None if there is no such rule.

    `position` is the index of the input. There is no rule for an equation with an array
    of size zero.
    """
    for rule in (Dense, Convolution, Gather):
        if rule.matches(eqn, position):
            sizes = [math.prod(aval(v).shape) for v in (*eqn.invars, *eqn.outvars)]
            return rule(eqn, position) if all(sizes) else None
    return None
