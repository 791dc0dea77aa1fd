"""conv_general_dilated: stride, padding, dilation, feature groups."""

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
    """The kernel is the operand: a dense layer on the patches of the input.

    Feature groups are groups; a row is an output pixel; left are the kernel's input
    features and offsets, right its output features.
    """

    name = "convolution"

    def matches(self, eqn: jex.JaxprEqn, position: int) -> bool:
        """A real kernel; batch groups are vmaps of what is not one example."""
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
        """Without feature groups the axes are the kernel's own."""
        out, inside, *window = eqn.params["dimension_numbers"].rhs_spec
        return Layout((), (*window, inside), (out,))

    def size(self, eqn: jex.JaxprEqn, position: int) -> Size:
        """Rows are the output's pixels, of all its images."""
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
        """They are as they were."""
        return tuple(others), cotangent

    def factors(
        self,
        eqn: jex.JaxprEqn,
        position: int,
        others: Sequence[jax.Array],
        cotangent: jax.Array,
    ) -> Factors:
        """The patches and the cotangent's pixels."""
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
        """One product for each offset in the window, one after the other.

        So the patches are never stored together.
        """
        spec = eqn.params["dimension_numbers"].rhs_spec
        shape = aval(eqn.invars[1]).shape
        read, pixels = _reader(eqn, others[0]), _pixels(eqn, cotangent)

        def product(start: jax.Array) -> jax.Array:
            return jnp.einsum("gtc,gtp->gcp", read(start), pixels, precision=HIGHEST)

        products = jax.lax.map(product, _starts(eqn))
        # Now f[offset, g, c, p], and the output features are (g, p).
        features = products.transpose(1, 3, 2, 0)
        ordered = features.reshape([shape[i] for i in spec])
        return ordered.transpose(sorted(range(len(spec)), key=spec.__getitem__))


def _pixels(eqn: jex.JaxprEqn, cotangent: jax.Array) -> jax.Array:
    """The output's cotangent as f[g, pixels, features of a group]."""
    batch, feature, *space = eqn.params["dimension_numbers"].out_spec
    groups = eqn.params["feature_group_count"]
    last = cotangent.transpose(batch, *space, feature)
    return jnp.moveaxis(last.reshape(-1, groups, last.shape[-1] // groups), 1, 0)


def _starts(eqn: jex.JaxprEqn) -> np.ndarray:
    """For each offset in the window, where in the padded input its reading begins."""
    spec = eqn.params["dimension_numbers"].rhs_spec
    window = [range(aval(eqn.invars[1]).shape[i]) for i in spec[2:]]
    offsets = np.array(list(itertools.product(*window)), np.int32)
    return offsets * np.array(eqn.params["rhs_dilation"], np.int32)


def _reader(eqn: jex.JaxprEqn, x: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """From such a start, what the output's pixels read: f[g, pixels, features]."""
    params = eqn.params
    spec = params["dimension_numbers"]
    groups = params["feature_group_count"]
    batch, feature, *space = spec.lhs_spec
    x = x.transpose(batch, *space, feature)
    low_high = params["padding"]
    zero = jnp.zeros((), x.dtype)
    interior = [dilation - 1 for dilation in params["lhs_dilation"]]
    edges = [(lo, hi, mid) for (lo, hi), mid in zip(low_high, interior, strict=True)]
    x = jax.lax.pad(x, zero, [(0, 0, 0), *edges, (0, 0, 0)])

    out = [aval(eqn.outvars[0]).shape[i] for i in spec.out_spec[2:]]
    strides = params["window_strides"]
    spans = [(n - 1) * stride + 1 for n, stride in zip(out, strides, strict=True)]

    def read(start: jax.Array) -> jax.Array:
        begin = (np.int32(0), *start, np.int32(0))  # of one dtype, in x64 too
        found = jax.lax.dynamic_slice(x, begin, (x.shape[0], *spans, x.shape[-1]))
        found = found[(slice(None), *(slice(None, None, s) for s in strides))]
        rows = found.reshape(-1, groups, x.shape[-1] // groups)
        return jnp.moveaxis(rows, 1, 0)

    return read
