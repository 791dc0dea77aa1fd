"""Where zeros and noise lie: on a mesh, as the arrays that they are for.

A mesh has axes of three kinds. On Explicit axes the type of an array says how it is
cut, on Auto axes the compiler decides, and along Manual ones (inside `jax.shard_map`)
each device sees its own piece, whose type says along which axes pieces differ.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType

from dpjax._keys import stream
from dpjax._meshes import varying_axes
from dpjax._typing import DTypeLike, Key


def zeros_like(
    x: jax.Array, dtype: DTypeLike, leading: Sequence[int] = ()
) -> jax.Array:
    """Zeros of the shape (*leading, *x.shape), cut into pieces as x is."""
    shape = (*leading, *jnp.shape(x))
    zeros = jnp.broadcast_to(jnp.zeros_like(x, dtype), shape)
    if isinstance(x, Tracer) and _is_auto(jax.typeof(x).sharding.mesh):
        # Here nothing but the compiler knows how x is cut: zeros would lie anywhere. It
        # cuts what it chooses from alike, and only then sees that there is no choice.
        zeros = jnp.where(False, jnp.broadcast_to(x.astype(dtype), shape), zeros)
    return zeros


def _is_auto(mesh: AbstractMesh) -> bool:
    return all(kind == AxisType.Auto for kind in mesh.axis_types)


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
    key = _of_piece(key, varying_axes(kind))
    return jax.random.normal(key, x.shape, dtype, out_sharding=sharding)


def _of_piece(key: Key, axes: frozenset[str]) -> Key:
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
