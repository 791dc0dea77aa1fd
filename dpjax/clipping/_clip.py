"""Clip one gradient, or sum a batch of clipped gradients."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core import validate
from dpjax._core.dtypes import widen
from dpjax._core.meshes import leading_axis, let_compiler_shard, spec_of
from dpjax._core.platforms import on_platform
from dpjax._core.rounding import HIGHEST, square_sum, upper_sum
from dpjax._core.typing import ArrayLike, Arrays, Shaped, Tree

# Clipping scales a gradient to norm C (1 − 2⁻²⁰). The slack 2⁻²⁰ is sixteen roundings
# of float32, and covers the root, the quotient and the product. The squares already
# include the rounding of sums, since they are upper bounds.
_SLACK = 2.0**-20

# The number of clipped gradients in a block. If the rounding of the sum must be
# bounded, gradients are added in float32 within blocks, and the sums of blocks in
# float64. The error of a block of k gradients is at most γ_k k C, about 0.1 % of C.
BLOCK = 128

# On CPUs, gradients of at least this many entries are summed by a product.
_MIN_PRODUCT_ENTRIES = 2**14


def loss_scope(x64: bool | None) -> contextlib.AbstractContextManager[object]:
    """The context in which a loss is evaluated and differentiated.

    Sums in float64 are computed with `jax_enable_x64` on. But in this context,
    `jax_enable_x64` has the caller's own setting `x64`, since a custom derivative may
    make arrays of the default dtype. If sums are not in float64, `x64` is None, and the
    context changes nothing.
    """
    return contextlib.nullcontext() if x64 is None else jax.enable_x64(x64)


class Scales(NamedTuple):
    """The clipping factors of one gradient, or of the b gradients of a batch.

    Attributes:
      finite: whether each gradient has a finite norm, bool[] or bool[b]; False for all
        gradients if a clip norm is above 2¹⁰⁰.
      factors: for each group of leaves that are clipped together, the factors f[] or
        f[b], from 0 to 1. A factor is zero if `finite` is False, or if the mask
        excludes the example.
      norm: the norm of each gradient over all groups, before clipping, f[] or f[b].
    """

    finite: jax.Array
    factors: list[jax.Array]
    norm: jax.Array


class PerExample(NamedTuple):
    """Results for each example of a batch. They are not private: do not release them.

    Attributes:
      loss: the loss of each example, f[b].
      norm: the gradient's L2 norm before clipping, f[b], rounded up (docs/clipping.md).
        In float32, the norm may omit entries below about 1e-19 times the clip norm.
      aux: the loss function's second result, with a leading axis b; () without has_aux.
    """

    loss: jax.Array
    norm: jax.Array
    aux: Any


# The result of an engine: for each parameter leaf, the sum f[...] of clipped gradients;
# and the results for each example, in which aux is a list of leaves.
Summed = tuple[list[jax.Array], PerExample]


class Inputs(NamedTuple):
    """The arrays from which an engine computes the sum of clipped gradients.

    Attributes:
      leaves: the parameters' leaves.
      examples: the leaves of the batch arguments, with a leading axis b.
      mask: bool[b], False for examples that contribute zero to the sum.
    """

    leaves: Arrays
    examples: Arrays
    mask: jax.Array

    def let_compiler_shard(
        self, function: Callable[..., tuple[list[jax.Array], jax.Array]]
    ) -> Callable[..., tuple[list[jax.Array], jax.Array]]:
        """Let the compiler choose the shardings inside a function, on explicit meshes.

        Args:
          function: a function that returns sums, one for each parameter leaf, and norms
            f[b].

        Returns:
          The same function, whose sums are sharded like the leaves, and whose norms are
          sharded like the batch.
        """
        shardings = [spec_of(x) for x in self.leaves]
        outputs = shardings, jax.P(leading_axis(self.examples))
        return let_compiler_shard(function, (self.leaves, self.examples), outputs)


def clip(
    gradient: Shaped, clip_norm: ArrayLike, mask: ArrayLike = True
) -> tuple[Shaped, jax.Array]:
    """Scale down one gradient so that its L2 norm over all leaves is bounded.

    Args:
      gradient: a pytree of real arrays of any floating dtypes.
      clip_norm: the bound C, f[], positive, in the units of the gradient.
      mask: bool[]. If it is False, the bounded gradient is zero.

    Returns:
      The bounded gradient, with leaves in float32 or wider, and the norm f[] before
      clipping, rounded up. The bounded gradient is zero if the gradient has a NaN or an
      infinity, if its norm overflows (beyond 1e19 C in float32), or if C is above
      2¹⁰⁰. The norm may omit entries below about 1e-19 C in float32.

    Raises:
      ValueError: clip_norm is not one positive number, or a leaf is not a real
        floating-point array.

    Privacy: the result's L2 norm is at most C for every input, including rounding.

    Example:
      >>> import jax.numpy as jnp
      >>> bounded, norm = clip({"w": jnp.array([3.0, 4.0])}, 1.0)
      >>> print(norm.round(3), bounded["w"].round(3))
      5.0 [0.6 0.8]
    """
    validate.positive("clip_norm", clip_norm)
    leaves, treedef = jax.tree.flatten(widen(gradient))
    squares = group_squares(leaves, [0] * len(leaves), [clip_norm])
    finite, (scale,), norm = clip_scales(squares, [clip_norm], mask)
    return treedef.unflatten([apply_scales(x, scale, finite) for x in leaves]), norm


def group_squares(
    leaves: Arrays,
    groups: Sequence[int],
    clip_norms: Sequence[ArrayLike],
    num_batch_axes: int = 0,
) -> list[jax.Array]:
    """For each group of leaves, an upper bound of ‖gradient / C‖² over the group.

    The leaves of a group are clipped together, to the group's bound C.

    Args:
      leaves: the leaves of the gradient, or of a batch of gradients.
      groups: for each leaf, the number of its group.
      clip_norms: for each group, its bound C.
      num_batch_axes: the number of leading axes that are not summed over: 0 for one
        gradient, or 1 for a batch.
    """
    squares: list[list[jax.Array]] = [[] for _ in clip_norms]
    for x, group in zip(leaves, groups, strict=True):
        # The unit C prevents underflow for a small C, and overflow for a large C.
        squares[group].append(square_sum(x, num_batch_axes, unit=clip_norms[group]))
    return [upper_sum(parts) for parts in squares]


def widen_bound(bound: ArrayLike) -> ArrayLike:
    """A clip norm as a float, or as an array of at least float32.

    JAX refuses Python integers beyond 32 bits. A narrow float would round the quotients
    of the clip norm.
    """
    if isinstance(bound, int | np.integer):
        return float(bound)
    wide = jnp.result_type(bound) in (jnp.float32, jnp.float64)
    return bound if wide else jnp.asarray(bound, jnp.float32)


def clip_scales(
    squares: Arrays, clip_norms: Sequence[ArrayLike], mask: ArrayLike
) -> Scales:
    """The clipping factors of gradients, from upper bounds of their squared norms.

    Args:
      squares: for each group of leaves that are clipped together, an upper bound of
        ‖gradient / C‖², f[] or f[b].
      clip_norms: for each group, its bound C. If a bound is above 2¹⁰⁰, all factors
        are zero.
      mask: bool[] or bool[b]; where it is False, the factors are zero.

    Raises:
      ValueError: a clip norm is not one number.
    """
    for bound in clip_norms:  # an array would be broadcast, and count an example twice
        validate.scalar("clip_norm", bound)
    clip_norms = [widen_bound(bound) for bound in clip_norms]
    # XLA replaces the reciprocal of a number above 2¹²⁶ by 0.
    # If any entry is NaN or infinite, so is the sum of the squares. XLA would copy a
    # long sum into each of the many computations that use `finite`, but does not copy a
    # root.
    roots = [jnp.sqrt(square) for square in squares]
    finite = jnp.isfinite(roots[0] if len(roots) == 1 else jnp.sqrt(sum(squares)))
    finite &= jnp.all(jnp.asarray(clip_norms) <= 2.0**100)
    # A root of zero gives an infinite quotient, and so a factor of 1.
    scales = [
        jnp.where(finite & mask, jnp.minimum(1.0, (1.0 - _SLACK) / root), 0.0)
        for root in roots
    ]
    # The largest bound as unit prevents overflow and underflow of the squares. With one
    # bound, the sum and the root are exact. The sum is not 0, since ∞ · 0 would be NaN.
    unit = jnp.max(jnp.asarray(clip_norms, roots[0].dtype))
    norms = [r * (c / unit + 1e-37) for r, c in zip(roots, clip_norms, strict=True)]
    norm = jnp.linalg.norm(jnp.stack(norms), axis=0) if len(norms) > 1 else norms[0]
    return Scales(finite, scales, norm * unit)


def apply_scales(x: jax.Array, scale: jax.Array, finite: jax.Array) -> jax.Array:
    """Multiply one leaf of each gradient by the gradient's clipping factor.

    Args:
      x: one leaf of a gradient, f[...], or of a batch of gradients, f[b, ...].
      scale: the clipping factor of each gradient, f[] or f[b].
      finite: whether each gradient is finite in all its leaves, bool[] or bool[b]. The
        result is zero for a gradient that is not finite.
    """
    # A factor of zero does not suffice, since NaN · 0 is NaN.
    return zero_if_not_finite(x * _broadcast_scales(scale, x).astype(x.dtype), finite)


def zero_if_not_finite(x: jax.Array, finite: jax.Array) -> jax.Array:
    """The array x, with zeros for the gradients that are not finite."""
    return jnp.where(_broadcast_scales(finite, x), x, 0.0)


def sum_with_scales(x: jax.Array, scale: jax.Array, finite: jax.Array) -> jax.Array:
    """The sum over the batch of the gradients times their clipping factors.

    Args:
      x: one leaf of each gradient, f[b, ...].
      scale: the clipping factors, f[b].
      finite: whether each gradient is finite in all its leaves, bool[b]. A gradient
        that is not finite contributes zero.

    Returns:
      The sum, f[...].
    """
    return jnp.sum(apply_scales(x, scale, finite), axis=0)


def sum_clipped(
    groups: Sequence[int],
    gradients: Arrays,
    clip_norms: Sequence[ArrayLike],
    mask: ArrayLike,
    *,
    wide: bool = False,
) -> tuple[list[jax.Array], jax.Array]:
    """The sum f[...] of clipped gradients for each leaf, and the gradients' norms f[b].

    Args:
      groups: for each leaf, the number of its group. The leaves of a group are clipped
        together.
      gradients: the leaves of a batch of gradients, f[b, ...].
      clip_norms: for each group, its bound C.
      mask: bool[] or bool[b]; where it is False, a gradient contributes zero.
      wide: whether the sums are in float64.
    """
    squares = group_squares(gradients, groups, clip_norms, num_batch_axes=1)
    # A group without leaves has the scalar 0 instead of a square for each example.
    batch = jnp.broadcast_shapes(jnp.shape(mask), *(x.shape for x in squares))
    squares = [jnp.broadcast_to(x, batch) for x in squares]
    finite, scales, norm = clip_scales(squares, clip_norms, mask)
    return [
        sum_in_memory(x, scales[group], finite, wide=wide)
        for x, group in zip(gradients, groups, strict=True)
    ], norm


@functools.partial(jax.jit, static_argnames="wide")
def sum_in_memory(
    x: jax.Array, scale: jax.Array, finite: jax.Array, *, wide: bool = False
) -> jax.Array:
    """The sum of gradients times clipping factors, for gradients already in memory.

    The arguments are those of `sum_with_scales`, which computes the same sum. On CPUs,
    large gradients are summed by a product with a vector of ones, which is faster than
    XLA's sum. If `wide` is True, the result is in float64 (`_sum_of_blocks`).
    """
    if wide:
        return _sum_of_blocks(apply_scales(x, scale, finite))
    # A product takes longer to compile than a sum. So small gradients are summed.
    if math.prod(x.shape[1:]) < _MIN_PRODUCT_ENTRIES:
        return sum_with_scales(x, scale, finite)

    def product(x: jax.Array, scale: jax.Array, finite: jax.Array) -> jax.Array:
        return _product_with_ones(apply_scales(x, scale, finite))

    return on_platform("cpu", product, sum_with_scales, x, scale, finite)


def _product_with_ones(x: jax.Array) -> jax.Array:
    """The sum over the leading axis of x, as a product with a vector of ones.

    On CPUs, in JAX 0.10, XLA's own sum of a large array takes several times longer than
    this product.
    """
    return jnp.tensordot(jnp.ones(x.shape[:1], x.dtype), x, axes=1, precision=HIGHEST)


def _sum_of_blocks(x: jax.Array) -> jax.Array:
    """The sum over the leading axis of x, f64[...].

    Blocks of up to `BLOCK` entries along this axis are summed in float32. The sums of
    the blocks are added in float64.
    """
    sum_directly = functools.partial(jnp.sum, axis=0)

    def block_sum(block: jax.Array) -> jax.Array:
        total = on_platform("cpu", _product_with_ones, sum_directly, block)
        return total.astype(jnp.float64)

    if x.shape[0] <= BLOCK:
        return block_sum(x)
    # The last block is shorter, so that no gradient is copied for padding.
    whole_size = x.shape[0] - x.shape[0] % BLOCK
    blocks = x[:whole_size].reshape(-1, BLOCK, *x.shape[1:])
    total = block_sum(blocks[0])
    if whole_size < x.shape[0]:
        total = block_sum(x[whole_size:]) + total
    return jax.lax.scan(lambda s, b: (s + block_sum(b), None), total, blocks[1:])[0]


def _broadcast_scales(per_example: jax.Array, x: jax.Array) -> jax.Array:
    return per_example.reshape(per_example.shape + (1,) * (x.ndim - per_example.ndim))


def clip_and_sum(clip_norm: ArrayLike) -> optax.GradientTransformation:
    """Make an optax transformation from per-example gradients to their clipped sum.

    This transformation is for users who already have per-example gradients.
    `clipped_grad` computes the same sum from a loss.

    Args:
      clip_norm: the bound C on the L2 norm of each example's gradient over all leaves,
        positive.

    Returns:
      An optax transformation without state. The incoming updates have shape f[b, ...],
      with the same b for every leaf. The outgoing updates have shape f[...] and are in
      float32 or wider. An example whose gradient is not finite contributes zero. With
      a clip_norm above 2¹⁰⁰, every example contributes zero.

    Raises:
      ValueError: clip_norm is not one positive number. When updates are transformed:
        the updates have no leaves; their leading axes differ, are missing or are empty;
        a leaf is not a real floating-point array.

    Privacy: one example moves the sum by at most C (2C under `Adjacency.REPLACE`).

    Example:
      >>> import jax.numpy as jnp
      >>> tx = clip_and_sum(1.0)
      >>> per_example = jnp.array([[3.0, 4.0], [0.0, 0.5], [jnp.nan, 0.0]])
      >>> total, _ = tx.update(per_example, tx.init(None))
      >>> print([f"{x:.3f}" for x in total])
      ['0.600', '1.300']
    """
    validate.scalar("clip_norm", clip_norm)
    validate.positive("clip_norm", clip_norm)

    def sum_updates(updates: Tree, _: Tree | None) -> Tree:
        batch_size("updates", updates)
        leaves, treedef = jax.tree.flatten(widen(updates))
        total, _ = sum_clipped([0] * len(leaves), leaves, [clip_norm], True)
        return treedef.unflatten(total)

    return optax.stateless(sum_updates)


def check_mask(mask: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """The mask as a boolean array of the given shape, all True if the mask is None.

    Raises:
      ValueError: the mask has another shape or dtype.
    """
    mask = jnp.ones(shape, bool) if mask is None else jnp.asarray(mask)
    if mask.shape != shape or mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask must be a boolean array of shape {shape}; got shape {mask.shape} "
            f"and dtype {mask.dtype}."
        )
    return mask


def batch_size(name: str, batched: Tree) -> int:
    """The size of the leading axis that all leaves of a batch share.

    Raises:
      ValueError: there are no leaves, or the leading axes differ, are missing or are
        empty. The message begins with `name`.
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batched)]
    if not shapes or not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            f"{name} must have one leading batch axis that all leaves share; got "
            f"leaves of shapes {shapes}."
        )
    size = shapes[0][0]
    if size == 0:
        raise ValueError(f"{name} must not be an empty batch; got shapes {shapes}.")
    return size
