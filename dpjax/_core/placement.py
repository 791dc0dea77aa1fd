"""Where zeros and noise lie: on a mesh, as the arrays that they are for.

A mesh has axes of three kinds. On Explicit axes the type of an array says how it is
cut, on Auto axes the compiler decides, and along Manual ones (inside `jax.shard_map`)
each device sees its own piece, whose type says along which axes pieces differ.
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
    """Zeros of the shape (*leading, *x.shape), cut into pieces as x is."""
    shape = (*leading, *jnp.shape(x))
    zeros = jnp.broadcast_to(jnp.zeros_like(x, dtype), shape)
    if not _has_auto_axes(x):
        return zeros
    return _cut_alike(zeros, jnp.broadcast_to(x.astype(dtype), shape))


def shard_like(state: Shaped, params: Tree) -> Shaped:
    """An optimizer's state, its leaves cut as the parameters they belong to.

    A leaf belongs to the parameter whose path its own ends with, if the shapes agree.
    """
    places = dict(jax.tree_util.tree_flatten_with_path(params)[0])

    def lying(path: tuple[Any, ...], x: ArrayLike) -> ArrayLike:
        ends = (path[i:] for i in range(len(path) + 1))
        p = next((places[end] for end in ends if end in places), None)
        if not _has_auto_axes(p) or jnp.shape(x) != jnp.shape(p):
            return x
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        return _cut_alike(jnp.asarray(x), p.astype(jnp.result_type(x)))

    return jax.tree_util.tree_map_with_path(lying, state)


def _cut_alike(x: jax.Array, other: jax.Array) -> jax.Array:
    """The same x, cut as the other is where the compiler decides.

    Nothing but the compiler knows how that is cut: a constant x would lie anywhere. It
    cuts what it chooses from alike, and only then sees that there is no choice.
    """
    return jnp.where(False, other, x)


def _has_auto_axes(x: ArrayLike | None) -> TypeGuard[Tracer]:
    """Whether x is traced, and the compiler decides how it is cut along some axis."""
    if not isinstance(x, Tracer):
        return False
    mesh = jax.typeof(x).sharding.mesh
    return mesh.empty or AxisType.Auto in mesh.axis_types


def normal_like(key: Key, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Standard normals f[*x.shape] that lie where x lies; no two pieces share any.

    What is the same on all devices gets the same noise there.
    """
    kind, sharding = jax.typeof(x), None
    if isinstance(x, Tracer):
        if AxisType.Explicit in kind.sharding.mesh.axis_types:
            sharding = kind.sharding
    elif len(x.sharding.device_set) > 1:
        draw = jax.jit(
            jax.random.normal, static_argnums=(1, 2), out_shardings=x.sharding
        )
        return draw(key, x.shape, dtype)
    key = _fold_in_shard(key, varying_axes(kind))
    with enter_mesh(sharding):
        return jax.random.normal(key, x.shape, dtype, out_sharding=sharding)


def _fold_in_shard(key: Key, axes: frozenset[str]) -> Key:
    """The key of this device's piece, for what differs along these Manual axes."""
    mesh = jax.sharding.get_abstract_mesh()
    for axis in mesh.manual_axes:
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
