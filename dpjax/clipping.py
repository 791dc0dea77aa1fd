"""From one gradient to a bounded one, and from a batch of them to their sum."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from dpjax import _validate
from dpjax._dtypes import widen
from dpjax._rounding import square_sum, upper_sum

# Clipping aims this far under the bound: sixteen roundings of float32, for the root,
# the quotient and the product. What sums round is in the squares already.
_SLACK = 2.0**-20


def clip(
    gradient: Any, clip_norm: jax.typing.ArrayLike, keep: jax.typing.ArrayLike = True
) -> tuple[Any, jax.Array]:
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
    _validate.positive("clip_norm", clip_norm)
    leaves, treedef = jax.tree.flatten(widen(gradient))
    bounded, norm = clip_groups(leaves, [0] * len(leaves), [clip_norm], keep)
    return treedef.unflatten(bounded), norm


def clip_groups(
    leaves: Sequence[jax.Array],
    groups: Sequence[int],
    clip_norms: Sequence[jax.typing.ArrayLike],
    keep: jax.typing.ArrayLike,
) -> tuple[list[jax.Array], jax.Array]:
    """Bound each group of a gradient's leaves by its own clip norm; see `clip`."""
    squares: list[list[jax.Array]] = [[] for _ in clip_norms]
    for x, group in zip(leaves, groups, strict=True):
        # In units of C neither a small C underflows nor a large one overflows.
        squares[group].append(square_sum(x / clip_norms[group]))
    totals = [upper_sum(parts) for parts in squares]
    usable, scales, norm = clip_scales(totals, clip_norms, keep)

    def bound(x: jax.Array, scale: jax.Array) -> jax.Array:
        # Not x · 0: that would let a NaN through.
        return jnp.where(usable, x * scale.astype(x.dtype), jnp.zeros_like(x))

    bounded = [bound(x, scales[g]) for x, g in zip(leaves, groups, strict=True)]
    return bounded, norm


def clip_scales(
    squares: Sequence[jax.Array],
    clip_norms: Sequence[jax.typing.ArrayLike],
    keep: jax.typing.ArrayLike,
) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """From an upper bound of each group's ‖gradient / C‖²: what clipping does.

    Returns:
      Whether the gradient counts, each group's factor, and the norm of all groups.
    """
    usable = jnp.asarray(keep)
    for square in squares:
        usable &= jnp.isfinite(square)
    roots = [jnp.sqrt(square) for square in squares]
    scales = [
        jnp.where(usable, jnp.minimum(1.0, (1.0 - _SLACK) / root), 0.0)
        for root in roots
    ]
    norms = [root * c for root, c in zip(roots, clip_norms, strict=True)]
    if len(norms) == 1:
        return usable, scales, norms[0]
    return usable, scales, jnp.linalg.norm(jnp.stack(norms), axis=0)


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
    _validate.positive("clip_norm", clip_norm)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        batch_size("updates", updates)
        bounded, _ = jax.vmap(lambda gradient: clip(gradient, clip_norm))(updates)
        return sum_examples(bounded), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def sum_examples(bounded: Any) -> Any:
    """The sum over the leading axis of every leaf."""
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), bounded)


def batch_size(name: str, batched: chex.ArrayTree) -> int:
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
