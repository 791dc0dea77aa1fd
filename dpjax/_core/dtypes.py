"""The dtypes of sums, moments and noise."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from dpjax._core.typing import ArrayLike, DTypeLike, Shaped


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """The given float dtype, or float32 if the given dtype is narrower."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)  # JAX promotes no floats of 8 bits or fewer
    return jnp.promote_types(dtype, jnp.float32)


def narrowest_float(dtypes: Iterable[DTypeLike]) -> jnp.dtype:
    """The least precise of the floating dtypes, but at least float32.

    Dtypes that are not floating are ignored. Without a floating dtype, the result is
    float32.
    """
    floats = [at_least_float32(d) for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    return max(floats, key=lambda d: jnp.finfo(d).eps, default=jnp.dtype(jnp.float32))


def cast_like(tree: Shaped, other: object) -> Shaped:
    """Cast each leaf of a tree to the dtype of the other tree's corresponding leaf."""
    return jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), tree, other)


def widen(tree: Shaped) -> Shaped:
    """Cast each leaf of a tree to float32, unless the leaf has a wider float dtype.

    Raises:
      ValueError: a leaf is not a real float. Real noise would leave the imaginary part
        of a complex leaf without noise.
    """

    def widen_leaf(leaf: ArrayLike) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"gradients must be real floating-point arrays; got a leaf of dtype "
                f"{leaf.dtype} and shape {leaf.shape}."
            )
        return leaf.astype(at_least_float32(leaf.dtype))

    return jax.tree.map(widen_leaf, tree)
