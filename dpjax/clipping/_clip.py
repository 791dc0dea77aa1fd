"""From one gradient to a bounded one, and from a batch of them to their sum."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax._core import validate
from dpjax._core.dtypes import widen
from dpjax._core.platforms import on_platform
from dpjax._core.rounding import HIGHEST, square_sum, upper_sum
from dpjax._core.typing import Shaped, Tree

# Clipping aims this far under the bound: sixteen roundings of float32, for the root,
# the quotient and the product. What sums round is in the squares already.
_SLACK = 2.0**-20


class Scales(NamedTuple):
    """What clipping does to a gradient, or to a batch of them.

    Attributes:
      finite: whether it is finite, b[...].
      factors: each group's factor, f[...]: zero if it is not, or not to be kept.
      norm: of all groups, f[...].
    """

    finite: jax.Array
    factors: list[jax.Array]
    norm: jax.Array


class Summed(NamedTuple):
    """The sum of clipped gradients and what each example gave.

    Attributes:
      grads: for each leaf, f[...].
      loss: f[b].
      norm: f[b].
      aux: its leaves, with a leading axis b.
    """

    grads: list[jax.Array]
    loss: jax.Array
    norm: jax.Array
    aux: list[jax.Array]


def clip(
    gradient: Shaped, clip_norm: jax.typing.ArrayLike, keep: jax.typing.ArrayLike = True
) -> tuple[Shaped, jax.Array]:
    """Bound one gradient's L2 norm over all its leaves.

    Args:
      gradient: a pytree of real arrays of any floating dtypes, taken as one vector.
      clip_norm: the bound C, f[], positive, in the units of the gradient.
      keep: bool[]; a gradient that is not kept contributes zero.

    Returns:
      The bounded gradient, its leaves in float32 at least, and the norm f[] before
      clipping, rounded up. A gradient with a NaN or an infinity, or so large that its
      norm overflows (beyond 1e19 C in float32), becomes zero.

    Raises:
      ValueError: clip_norm is not positive, or a leaf is not real.

    Privacy: the result's L2 norm is at most C, rounding included, whatever goes in.

    Example:
      >>> import jax.numpy as jnp
      >>> bounded, norm = clip({"w": jnp.array([3.0, 4.0])}, 1.0)
      >>> print(norm.round(3), bounded["w"].round(3))
      5.0 [0.6 0.8]
    """
    validate.positive("clip_norm", clip_norm)
    leaves, treedef = jax.tree.flatten(widen(gradient))
    squares = group_squares(leaves, [0] * len(leaves), [clip_norm])
    finite, (scale,), norm = clip_scales(squares, [clip_norm], keep)
    bounded = [apply_scales(x, scale, finite) for x in leaves]
    return treedef.unflatten(bounded), norm


def group_squares(
    leaves: Sequence[jax.Array],
    groups: Sequence[int],
    clip_norms: Sequence[jax.typing.ArrayLike],
    kept: int = 0,
) -> list[jax.Array]:
    """For each group of leaves at least ‖gradient / C‖²; the first axes are kept."""
    squares: list[list[jax.Array]] = [[] for _ in clip_norms]
    for x, group in zip(leaves, groups, strict=True):
        # In units of C neither a small C underflows nor a large one overflows.
        squares[group].append(square_sum(x, kept, unit=clip_norms[group]))
    return [upper_sum(parts) for parts in squares]


def clip_scales(
    squares: Sequence[jax.Array],
    clip_norms: Sequence[jax.typing.ArrayLike],
    keep: jax.typing.ArrayLike,
) -> Scales:
    """From an upper bound of each group's ‖gradient / C‖²: what clipping does."""
    finite = jnp.isfinite(sum(squares))
    roots = [jnp.sqrt(square) for square in squares]
    scales = [
        jnp.where(finite & keep, jnp.minimum(1.0, (1.0 - _SLACK) / root), 0.0)
        for root in roots
    ]
    norms = [root * c for root, c in zip(roots, clip_norms, strict=True)]
    if len(norms) == 1:
        return Scales(finite, scales, norms[0])
    return Scales(finite, scales, jnp.linalg.norm(jnp.stack(norms), axis=0))


def apply_scales(x: jax.Array, scale: jax.Array, finite: jax.Array) -> jax.Array:
    """Gradients f[...] or f[b, ...] times their scales; zero where not finite."""
    # Not x · 0: that would let a NaN through.
    return zero_if_not_finite(x * _broadcast_scales(scale, x).astype(x.dtype), finite)


def zero_if_not_finite(x: jax.Array, finite: jax.Array) -> jax.Array:
    """The same but zero where not finite."""
    return jnp.where(_broadcast_scales(finite, x), x, 0.0)


def sum_with_scales(x: jax.Array, scale: jax.Array, finite: jax.Array) -> jax.Array:
    """The sum of gradients f[b, ...] by their scales f[b]."""
    return jnp.sum(apply_scales(x, scale, finite), axis=0)


@jax.jit
def sum_in_memory(x: jax.Array, scale: jax.Array, finite: jax.Array) -> jax.Array:
    """`sum_with_scales` of gradients that are in memory."""

    def product(x: jax.Array, scale: jax.Array, finite: jax.Array) -> jax.Array:
        # XLA on CPUs takes several times longer for a sum over a leading axis.
        ones = jnp.ones(scale.shape, x.dtype)
        return jnp.tensordot(
            ones, apply_scales(x, scale, finite), axes=1, precision=HIGHEST
        )

    return on_platform("cpu", product, sum_with_scales, x, scale, finite)


def _broadcast_scales(per_example: jax.Array, x: jax.Array) -> jax.Array:
    return per_example.reshape(per_example.shape + (1,) * (x.ndim - per_example.ndim))


def clip_and_sum(clip_norm: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Turn per-example gradients into the sum of their clipped versions.

    For users who have per-example gradients already; `clipped_grad` makes the sum
    from a loss.

    Args:
      clip_norm: the bound C on each example's L2 norm over all leaves, positive.

    Returns:
      An optax transformation. Updates have shape f[b, ...] going in, with the same b
      on every leaf, and f[...], in float32 at least, coming out. It has no state.

    Raises:
      ValueError: clip_norm is not positive; the leading axes of the updates disagree
        or are empty; a leaf is not real.

    Privacy: one example moves the sum by at most C (2C under `Adjacency.REPLACE`).

    Example:
      >>> import jax.numpy as jnp
      >>> tx = clip_and_sum(1.0)
      >>> per_example = jnp.array([[3.0, 4.0], [0.0, 0.5], [jnp.nan, 0.0]])
      >>> total, _ = tx.update(per_example, tx.init(None))
      >>> print([f"{x:.3f}" for x in total])
      ['0.600', '1.300']
    """
    validate.positive("clip_norm", clip_norm)

    def update(
        updates: Tree, state: Tree, params: Tree | None = None
    ) -> tuple[Tree, Tree]:
        del params
        batch_size("updates", updates)
        leaves, treedef = jax.tree.flatten(widen(updates))
        squares = group_squares(leaves, [0] * len(leaves), [clip_norm], kept=1)
        finite, (scale,), _ = clip_scales(squares, [clip_norm], True)
        total = [sum_in_memory(x, scale, finite) for x in leaves]
        return treedef.unflatten(total), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def batch_size(name: str, batched: Tree) -> int:
    """The common leading axis of the leaves, or an error naming the argument."""
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
