"""The rules for dot_general, and for convolutions as functions of their kernel.

dot_general is the operation of dense layers, einsum and attention projections. The rule
for convolutions covers any stride, padding, dilation and feature groups.
"""

import itertools
import math
from collections.abc import Callable

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import Arrays
from dpjax.clipping._bookkeeping.jaxpr.equations import aval, is_real
from dpjax.clipping._bookkeeping.rules.base import Layout, Rule
from dpjax.clipping._bookkeeping.rules.factors import HIGHEST, Factors, Size, outer


class Dense(Rule):
    """The rule for dot_general, which multiplies two arrays, for every layout of axes.

    The operand's contracted axes are left, and its free axes are right. The operand's
    batch axes are groups: each group has its own matrix, input and output. Free axes
    are neither contracted nor batch axes.
    """

    name = "dense"

    @classmethod
    def matches(cls, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether the equation is a dot_general of real arrays."""
        arrays = (*eqn.invars, *eqn.outvars)
        return eqn.primitive.name == "dot_general" and is_real(*arrays)

    @property
    def layout(self) -> Layout:
        """The operand's batch axes as groups, contracted axes left, free axes right."""
        contracted, free, batch = self._axes(self.position)
        return Layout(batch, contracted, free)

    @property
    def size(self) -> Size:
        """The sizes of the factors; the rows run over the other input's free axes."""
        groups, left, right = (
            math.prod(self.shape[i] for i in axes) for axes in self.layout
        )
        rows = aval(self.eqn.invars[1 - self.position]).size // (groups * left)
        return Size(groups, rows, left, right)

    def factors(self, others: Arrays, cotangent: jax.Array) -> Factors:
        """The other input's rows f[g, t, n] and the cotangent's rows f[g, t, p]."""
        (x,) = others
        size = self.size
        contracted, free, batch = self._axes(1 - self.position)
        left = x.transpose(*batch, *free, *contracted)
        # The output's axes: batch, then the free ones of the first and second input.
        groups = len(batch)
        # In the cotangent, the operand's free axes must come last, as the right side.
        if self.position == 0:
            mine = cotangent.ndim - groups - len(free)
            cotangent = jnp.moveaxis(
                cotangent, range(groups, groups + mine), range(-mine, 0)
            )
        return Factors(
            left.reshape(size.groups, size.rows, size.left),
            cotangent.reshape(size.groups, size.rows, size.right),
        )

    def gradient(self, others: Arrays, cotangent: jax.Array) -> jax.Array:
        """The operand's gradient, which is the product of the factors."""
        product = outer(self.factors(others, cotangent), self.size.left)
        return self.reorder(product, self.layout.axes)

    def _axes(self, position: int) -> tuple[tuple[int, ...], ...]:
        """The contracted, free and batch axes of the input at `position`."""
        axes = range(aval(self.eqn.invars[position]).ndim)
        contracted, batch = (
            tuple(both[position]) for both in self.eqn.params["dimension_numbers"]
        )
        free = tuple(i for i in axes if i not in contracted and i not in batch)
        return contracted, free, batch


class Convolution(Rule):
    """A convolution as a function of its kernel: a dense layer on the input's patches.

    The kernel is the operand. Feature groups are groups, and each output pixel is a
    row. The left side is the kernel's offsets and input features, and the right side is
    its output features.
    """

    name = "convolution"

    @classmethod
    def matches(cls, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether the operand is a real kernel of a convolution without batch groups.

        JAX makes batch groups when it differentiates a grouped convolution by its
        kernel. So batch groups occur in losses that contain such a gradient.
        """
        return (
            eqn.primitive.name == "conv_general_dilated"
            and position == 1
            and eqn.params["batch_group_count"] == 1
            and is_real(*eqn.invars, *eqn.outvars)
        )

    @property
    def layout(self) -> Layout:
        """Offsets and input features of the kernel are left, and output features right.

        Feature groups have no axis of their own in the kernel.
        """
        out, inside, *window = self._spec.rhs_spec
        return Layout((), (*window, inside), (out,))

    @property
    def size(self) -> Size:
        """The sizes of the factors; the rows are the pixels of all output images."""
        features = self.shape[self._spec.rhs_spec[0]]
        out = aval(self.eqn.outvars[0]).shape
        rows = math.prod(out) // out[self._spec.out_spec[1]]
        left = math.prod(self.shape) // features
        return Size(self._groups, rows, left, features // self._groups)

    def factors(self, others: Arrays, cotangent: jax.Array) -> Factors:
        """The input's patches f[g, t, n] and the cotangent's pixels f[g, t, p]."""
        read = self._reader(others[0])
        patches = jnp.concatenate([read(start) for start in self._starts()], axis=-1)
        return Factors(patches, self._pixels(cotangent))

    def gradient(self, others: Arrays, cotangent: jax.Array) -> jax.Array:
        """The kernel's gradient, computed by one product for each offset in the window.

        The products are computed one after the other, so that the patches for all
        offsets are never stored together.
        """
        read, pixels = self._reader(others[0]), self._pixels(cotangent)

        def product(start: jax.Array) -> jax.Array:
            return jnp.einsum("gtc,gtp->gcp", read(start), pixels, precision=HIGHEST)

        products = jax.lax.map(product, self._starts())
        # The products are f[offset, g, c, p]. A kernel's output features are (g, p).
        # With a single transposition, XLA moves whole blocks if the kernel's last axes
        # are those of the products.
        out, inside, *window = self._spec.rhs_spec
        sizes = [self.shape[i] for i in window]
        products = products.reshape(*sizes, *products.shape[1:])
        axes = {axis: (i,) for i, axis in enumerate(window)}
        g, c, p = range(len(window), len(window) + 3)
        axes |= {inside: (c,), out: (g, p)}
        order = [i for axis in range(len(self.shape)) for i in axes[axis]]
        return products.transpose(order).reshape(self.shape)

    @property
    def _spec(self) -> jax.lax.ConvDimensionNumbers:
        return self.eqn.params["dimension_numbers"]

    @property
    def _groups(self) -> int:
        return self.eqn.params["feature_group_count"]

    def _split(self, pixels: jax.Array) -> jax.Array:
        """Reshape pixels f[..., features] to f[g, pixels, features of a group]."""
        rows = pixels.reshape(-1, self._groups, pixels.shape[-1] // self._groups)
        return jnp.moveaxis(rows, 1, 0)

    def _pixels(self, cotangent: jax.Array) -> jax.Array:
        """The output's cotangent as rows f[g, pixels, output features of a group]."""
        batch, feature, *space = self._spec.out_spec
        return self._split(cotangent.transpose(batch, *space, feature))

    def _starts(self) -> np.ndarray:
        """For each offset in the window, the first position that it reads in the input.

        Positions are in the padded input. The result is i[offset, spatial axis].
        """
        window = [range(self.shape[i]) for i in self._spec.rhs_spec[2:]]
        offsets = np.array(list(itertools.product(*window)), np.int32)
        return offsets * np.array(self.eqn.params["rhs_dilation"], np.int32)

    def _reader(self, x: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """A function that gives the input values that output pixels read at an offset.

        The function maps a row of `_starts` to f[g, pixels, input features of a group].
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
            return self._split(window[steps])

        return read
