"""Zeros and noise that are sharded on a mesh as the arrays they belong to.

A mesh has axes of three kinds. Along Explicit axes the type of an array says how the
array is sharded. Along Auto axes the compiler decides the sharding. Along Manual axes
(inside `jax.shard_map`) each device sees its own shard, and the shard's type says along
which axes the shards' values vary.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType

from dpjax._core.keys import stream
from dpjax._core.meshes import enter_mesh, varying_axes
from dpjax._core.typing import ArrayLike, DTypeLike, Key, Shaped, Tree


def zeros_like(
    x: jax.Array, dtype: DTypeLike, leading: Sequence[int] = ()
) -> jax.Array:
    """Zeros of the shape (*leading, *x.shape), sharded as x is."""
    shape = (*leading, *jnp.shape(x))
    zeros = jnp.broadcast_to(jnp.zeros_like(x, dtype), shape)
    if not _has_auto_axes(x):
        return zeros
    return _cut_alike(zeros, jnp.broadcast_to(x.astype(dtype), shape))


def shard_like(state: Shaped, params: Tree) -> Shaped:
    """An optimizer's state, with its leaves sharded as the parameters they belong to.

    A leaf of the state belongs to the parameter whose path is the end of the leaf's
    path, if the shapes of leaf and parameter agree.
    """
    places = dict(jax.tree_util.tree_flatten_with_path(params)[0])

    def lying(path: tuple[Any, ...], x: ArrayLike) -> ArrayLike:
        # The longest end that is a parameter's path; a lone parameter's path is empty.
        ends = (path[i:] for i in range(len(path) + 1))
        p = next((places[end] for end in ends if end in places), None)
        if not _has_auto_axes(p) or jnp.shape(x) != jnp.shape(p):
            return x
        # Counters and keys cannot be selected from a floating-point parameter.
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        return _cut_alike(jnp.asarray(x), p.astype(jnp.result_type(x)))

    return jax.tree_util.tree_map_with_path(lying, state)


def _cut_alike(x: jax.Array, other: jax.Array) -> jax.Array:
    """The values of x, sharded by the compiler as the other array.

    Only the compiler knows how the other array is sharded, and it could put a constant
    x anywhere. A select gives its operands the same sharding. The compiler propagates
    shardings first, and only then removes the select, whose condition is constant.
    """
    return jnp.where(False, other, x)


def _has_auto_axes(x: ArrayLike | None) -> TypeGuard[Tracer]:
    """Whether x is traced and the compiler decides its sharding along some axis."""
    if not isinstance(x, Tracer):
        return False
    mesh = jax.typeof(x).sharding.mesh
    return mesh.empty or AxisType.Auto in mesh.axis_types


def normal_like(key: Key, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Standard normal noise f[*x.shape], sharded as x; no two shards share their noise.

    A value that is replicated over devices gets the same noise on all of them.
    """
    kind, sharding = jax.typeof(x), None
    if isinstance(x, Tracer):
        if AxisType.Explicit in kind.sharding.mesh.axis_types:
            sharding = kind.sharding
    elif len(x.sharding.device_set) > 1:
        # Outside of jit a compiled draw lets each device draw its own shard.
        draw = jax.jit(
            jax.random.normal, static_argnums=(1, 2), out_shardings=x.sharding
        )
        return draw(key, x.shape, dtype)
    key = _fold_in_shard(key, varying_axes(kind))
    with enter_mesh(sharding):
        return jax.random.normal(key, x.shape, dtype, out_sharding=sharding)


def _fold_in_shard(key: Key, axes: frozenset[str]) -> Key:
    """The key of this device's shard, for a value that varies along these Manual axes.

    The key is unchanged where the value varies along none.
    """
    mesh = jax.sharding.get_abstract_mesh()
    for axis in mesh.manual_axes:
        # An axis index varies along its axis. Where its type does not say so, types do
        # not record varying axes at all, and shards could share noise unnoticed.
        known = axis in varying_axes(jax.typeof(jax.lax.axis_index(axis)))
        if not known and mesh.shape[axis] > 1:
            raise ValueError(
                f"check_vma must be True where noise is drawn inside jax.shard_map "
                f"(axis {axis!r}): with False, or in jax.pmap, no type says whether "
                "the pieces of a value differ, and they would share their noise."
            )
    if not axes:
        return key
    return jax.random.fold_in(
        stream(key, "piece"), jax.lax.axis_index(tuple(sorted(axes)))
    )
