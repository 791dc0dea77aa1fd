"""Arrays over meshes: types that say how, and code that need not say it.

JAX's meshes have three kinds of axes. Along *explicit* ones, its default, a type says
how an array is sharded, and operations refuse what they cannot decide; along *auto*
ones the compiler decides; along *manual* ones (`jax.shard_map`) code sees one device's
part. A loss runs as `vmap(grad(loss))` would, whatever the axes. What the engines
compute around it is for the compiler to lay out.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from dpjax._core.typing import DTypeLike, Shaped, Tree

Out = TypeVar("Out")

_Entry = str | tuple[str, ...] | None  # of a partition spec


def leading_axis(arrays: Sequence[Tree]) -> _Entry:
    """How the first axis of a batch is sharded: an entry of a partition spec."""
    specs = [jax.typeof(x).sharding.spec for x in arrays]
    return next((s[0] for s in specs if len(s) and s[0] is not None), None)


def num_shards(arrays: Sequence[Tree]) -> int:
    """Into how many parts the first axis of a batch is sharded."""
    mesh, names = explicit_mesh(arrays), leading_axis(arrays)
    if mesh is None or names is None:
        return 1
    names = names if isinstance(names, tuple) else (names,)
    return math.prod(mesh.shape[name] for name in names)


def like(
    aval: jax.core.ShapedArray,
    shape: Sequence[int],
    dtype: DTypeLike,
    *,
    leading: _Entry = None,
) -> jax.ShapeDtypeStruct:
    """Another shape and dtype on the same mesh, and as a variable in its last axes.

    Args:
      aval: the variable's type.
      shape: its shape, with more axes before it or fewer.
      dtype: any.
      leading: how the first of several more axes is sharded.
    """
    axes, mesh = aval.manual_axis_type, aval.sharding.mesh
    explicit = bool(mesh.explicit_axes)
    if explicit and lets_compiler_decide():
        explicit, mesh = False, jax.sharding.get_abstract_mesh()
    if not axes.varying and not explicit:
        return jax.ShapeDtypeStruct(tuple(shape), dtype)
    spec: list[_Entry] = [None] * len(shape)
    if explicit:
        of_aval = tuple(aval.sharding.spec)[-len(shape) :] if shape else ()
        spec[len(shape) - len(of_aval) :] = of_aval
        if len(shape) > aval.ndim:
            spec[0] = leading
    return jax.ShapeDtypeStruct(
        tuple(shape),
        dtype,
        sharding=jax.NamedSharding(mesh, jax.P(*spec)),
        manual_axis_type=axes,
    )


def zeros_like(
    aval: jax.core.ShapedArray,
    shape: Sequence[int],
    *,
    leading: _Entry = None,
    mesh: AbstractMesh | None = None,
) -> jax.Array:
    """Zeros of another shape, sharded as in `like`, or whole on the mesh."""
    wanted = like(aval, shape, aval.dtype, leading=leading)
    sharding = wanted.sharding
    if sharding is None or not sharding.mesh.explicit_axes:
        spec = [leading, *[None] * (len(shape) - 1)]
        sharding = mesh and jax.NamedSharding(mesh, jax.P(*spec))
    with enter_mesh(sharding):
        return jnp.zeros(wanted.shape, wanted.dtype, out_sharding=sharding)


def enter_mesh(
    sharding: jax.NamedSharding | None,
) -> contextlib.AbstractContextManager[object]:
    """The context of a sharding's mesh, where no mesh is in the context.

    Without one, JAX 0.12 makes arrays without the sharding that they are asked to have.
    """
    if sharding is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh)


def example_numbers(size: int, batch: Tree) -> jax.Array:
    """The numbers of a batch's examples, sharded as its arrays' first axes are."""
    arrays = [jnp.asarray(x) for x in jax.tree.leaves(batch)]
    numbers, mesh = jnp.arange(size), explicit_mesh(arrays)
    if mesh is None:
        return numbers
    return jax.reshard(numbers, jax.NamedSharding(mesh, jax.P(leading_axis(arrays))))


def plus(x: jax.Array, more: jax.Array) -> jax.Array:
    """The sum, where x is: a loss may leave some of its axes to the compiler."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or mesh == jax.typeof(more).sharding.mesh:
        return jax.lax.add(x, more)
    with jax.sharding.use_abstract_mesh(mesh):
        return x + jax.reshard(more, jax.typeof(x).sharding.spec)


def varying_axes(of: jax.core.ShapedArray) -> frozenset[str]:
    """The axes of `jax.shard_map` along which a value of this type differs."""
    return of.manual_axis_type.varying


def varying(tree: Shaped, axes: frozenset[str]) -> Shaped:
    """Values that differ along these axes too, if only for the type."""

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying_axes(jax.typeof(x))))
        return jax.lax.pcast(x, missing, to="varying")

    return jax.tree.map(cast, tree)


def compiler_sharded(
    function: Callable[..., Out], arrays: Tree, outputs: object
) -> Callable[..., Out]:
    """The function with all explicit axes left to the compiler.

    Args:
      function: of arrays.
      arrays: a tree with one at least from the mesh.
      outputs: a prefix of the function's outputs, of partition specs.
    """
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return function
    shardings = jax.tree.map(
        lambda spec: jax.NamedSharding(mesh, spec),
        outputs,
        is_leaf=lambda x: isinstance(x, jax.P),
    )
    sharded = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=shardings
    )
    return cast(Callable[..., Out], sharded)  # JAX does not say so


def explicit_mesh(arrays: Tree) -> AbstractMesh | None:
    """The mesh with explicit axes that arrays are on, or None."""
    if not lets_compiler_decide():
        for x in jax.tree.leaves(arrays):
            mesh = jax.typeof(x).sharding.mesh
            if mesh.explicit_axes:
                return mesh
    return None


def lets_compiler_decide() -> bool:
    """Whether the mesh of the context has no explicit axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and not mesh.explicit_axes


def are_concrete(arrays: Sequence[Tree]) -> bool:
    """Whether this process can read all of some arrays now."""
    return not any(
        isinstance(x, jax.core.Tracer)
        or (isinstance(x, jax.Array) and not x.is_fully_addressable)
        for x in arrays
    )
