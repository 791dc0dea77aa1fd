"""The rule for convolutions, with any stride, padding, dilation and feature groups."""

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax.clipping.bookkeeping.jaxpr.equations import aval
from dpjax.clipping.bookkeeping.rules.base import Layout
from dpjax.clipping.bookkeeping.rules.factors import HIGHEST, Factors, Size


class Convolution:
    """A convolution by its kernel: a dense layer on the patches of the input.

    The kernel is the operand. Feature groups are groups, and each output pixel is a
    row. The left side is the kernel's offsets and input features, and the right side is
    its output features.
    """

    name = "convolution"

    def matches(self, eqn: jex.JaxprEqn, position: int) -> bool:
        """Whether the operand is a real kernel, in a convolution without batch groups.

        Batch groups come from a vmap over something other than one example.
        """
        return (
            eqn.primitive.name == "conv_general_dilated"
            and position == 1
            and eqn.params["batch_group_count"] == 1
            and all(
                jnp.issubdtype(aval(v).dtype, jnp.floating)
                for v in (*eqn.invars, *eqn.outvars)
            )
        )

    def layout(self, eqn: jex.JaxprEqn, position: int) -> Layout:
        """The kernel's offsets and input features are left, its output features right.

        Feature groups have no axis of their own in the kernel.
        """
        out, inside, *window = eqn.params["dimension_numbers"].rhs_spec
        return Layout((), (*window, inside), (out,))

    def size(self, eqn: jex.JaxprEqn, position: int) -> Size:
        """The factors' sizes: the rows are the output's pixels, of all its images."""
        spec = eqn.params["dimension_numbers"]
        groups = eqn.params["feature_group_count"]
        kernel, out = aval(eqn.invars[1]).shape, aval(eqn.outvars[0]).shape
        right = kernel[spec.rhs_spec[0]] // groups
        left = math.prod(kernel) // kernel[spec.rhs_spec[0]]
        rows = math.prod(out) // out[spec.out_spec[1]]
        return Size(groups, rows, left, right)

    def canonicalize(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Return the inputs unchanged: a convolution needs no canonical form."""
        return tuple(others), cotangent

    def factors(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> Factors:
        """The input's patches f[g, t, n] and the cotangent's pixels f[g, t, p]."""
        read = _reader(eqn, others[0])
        patches = jnp.concatenate([read(start) for start in _starts(eqn)], axis=-1)
        return Factors(patches, _pixels(eqn, cotangent))

    def gradient(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> jax.Array:
        """The kernel's gradient, by one product for each offset in the window.

        The products are computed one after the other, so the patches for all offsets
        are never stored together.
        """
        spec = eqn.params["dimension_numbers"].rhs_spec
        shape = aval(eqn.invars[1]).shape
        read, pixels = _reader(eqn, others[0]), _pixels(eqn, cotangent)

        def product(start: jax.Array) -> jax.Array:
            return jnp.einsum("gtc,gtp->gcp", read(start), pixels, precision=HIGHEST)

        products = jax.lax.map(product, _starts(eqn))
        # The products are f[offset, g, c, p]. A kernel's output features are (g, p).
        features = products.transpose(1, 3, 2, 0)
        ordered = features.reshape([shape[i] for i in spec])
        # Sorting the axes by their place in spec gives the inverse permutation.
        return ordered.transpose(sorted(range(len(spec)), key=spec.__getitem__))


def _pixels(eqn: jex.JaxprEqn, cotangent: jax.Array) -> jax.Array:
    """The output's cotangent as f[g, pixels, output features of a group]."""
    batch, feature, *space = eqn.params["dimension_numbers"].out_spec
    groups = eqn.params["feature_group_count"]
    last = cotangent.transpose(batch, *space, feature)
    return jnp.moveaxis(last.reshape(-1, groups, last.shape[-1] // groups), 1, 0)


def _starts(eqn: jex.JaxprEqn) -> np.ndarray:
    """For each offset in the window, the first position read in the padded input.

    The result is i[offset, spatial axis].
    """
    spec = eqn.params["dimension_numbers"].rhs_spec
    window = [range(aval(eqn.invars[1]).shape[i]) for i in spec[2:]]
    offsets = np.array(list(itertools.product(*window)), np.int32)
    return offsets * np.array(eqn.params["rhs_dilation"], np.int32)


def _reader(eqn: jex.JaxprEqn, x: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """A function from a start of `_starts` to the values that the output's pixels read.

    The function returns f[g, pixels, input features of a group].
    """
    params = eqn.params
    spec = params["dimension_numbers"]
    groups = params["feature_group_count"]
    batch, feature, *space = spec.lhs_spec
    x = x.transpose(batch, *space, feature)
    low_high = params["padding"]
    zero = jnp.zeros((), x.dtype)
    # lax.pad also accepts negative padding and inserts the zeros of input dilation.
    interior = [dilation - 1 for dilation in params["lhs_dilation"]]
    edges = [(lo, hi, mid) for (lo, hi), mid in zip(low_high, interior, strict=True)]
    x = jax.lax.pad(x, zero, [(0, 0, 0), *edges, (0, 0, 0)])

    out = [aval(eqn.outvars[0]).shape[i] for i in spec.out_spec[2:]]
    strides = params["window_strides"]
    spans = [(n - 1) * stride + 1 for n, stride in zip(out, strides, strict=True)]

    def read(start: jax.Array) -> jax.Array:
        # dynamic_slice needs indices of one dtype; Python's 0 is int64 under x64.
        begin = (np.int32(0), *start, np.int32(0))
        found = jax.lax.dynamic_slice(x, begin, (x.shape[0], *spans, x.shape[-1]))
        found = found[(slice(None), *(slice(None, None, s) for s in strides))]
        rows = found.reshape(-1, groups, x.shape[-1] // groups)
        return jnp.moveaxis(rows, 1, 0)

    return read
