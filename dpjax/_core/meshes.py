"""Shardings of arrays over meshes, and code that works for every kind of mesh axis.

JAX's meshes have three kinds of axes. Along *explicit* axes, JAX's default, an array's
type says how the array is sharded. An operation raises an error if the types do not
determine its output's sharding. Along *auto* axes the compiler decides the sharding.
Along *manual* axes (`jax.shard_map`) code sees one device's shard. Along every kind of
axis, `dpjax.clipped_grad` evaluates the loss as `vmap(grad(loss))` does. Along explicit
axes, the compiler decides the shardings of all other computations of `clipped_grad`.

Zeros and noise are sharded like the arrays to which they belong. Inside
`jax.shard_map`, the type of a shard says along which axes the shards' values vary.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType

from dpjax._core.dtypes import at_least_float32
from dpjax._core.keys import stream
from dpjax._core.typing import ArrayLike, DTypeLike, Key, Shaped, Tree

Out = TypeVar("Out")

# An entry of a partition spec: the mesh axes over which one array axis is sharded.
_Entry = str | tuple[str, ...] | None


def leading_axis(arrays: Sequence[Tree]) -> _Entry:
    """The sharding of the first axis of a batch, as an entry of a partition spec.

    The entry is that of the first array whose leading axis is sharded; None if no array
    has a sharded leading axis.
    """
    specs = map(spec_of, arrays)
    return next((s[0] for s in specs if len(s) and s[0] is not None), None)


def spec_of(x: Tree) -> jax.P:
    """The partition spec of an array's type."""
    return jax.typeof(x).sharding.spec


def num_shards(arrays: Sequence[Tree]) -> int:
    """The number of shards along the first axis of a batch; 1 without explicit axes."""
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
    """The type of an array whose last axes are sharded like those of another array.

    Args:
      aval: the type of the other array.
      shape: the result's shape, which is the other array's shape with leading axes
        added or removed.
      dtype: the result's dtype.
      leading: the mesh axes over which the first added axis is sharded. All other added
        axes are not sharded.
    """
    axes, mesh = aval.manual_axis_type, aval.sharding.mesh
    explicit = bool(mesh.explicit_axes)
    # The type may have been made on an explicit mesh, while the code now runs where the
    # compiler decides (`let_compiler_shard`). Types must be on the mesh of the context.
    if explicit and lets_compiler_decide():
        explicit, mesh = False, jax.sharding.get_abstract_mesh()
    if not axes.varying and not explicit:
        return jax.ShapeDtypeStruct(tuple(shape), dtype)
    # The last axes are sharded like those of `aval`, and other axes are not sharded.
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


def sharded_zeros(
    aval: jax.core.ShapedArray,
    shape: Sequence[int],
    *,
    leading: _Entry = None,
    mesh: AbstractMesh | None = None,
) -> jax.Array:
    """Zeros of another array's dtype, whose last axes are sharded like that array's.

    Args:
      aval: the type of the other array.
      shape: the shape of the zeros: the other array's shape, with leading axes added or
        removed.
      leading: the mesh axes over which the first added axis is sharded. All other added
        axes are not sharded.
      mesh: the mesh of the zeros if the other array has no explicit sharding. Then only
        the first axis of the zeros is sharded, over the mesh axes in `leading`. If mesh
        is None, the zeros have JAX's default sharding.
    """
    target = like(aval, shape, aval.dtype, leading=leading)
    sharding = target.sharding
    if sharding is None or not sharding.mesh.explicit_axes:
        sharding = mesh and jax.NamedSharding(mesh, jax.P(leading))
    # If the sharding is None, JAX's default applies, as for any array outside a mesh.
    with enter_mesh(sharding):
        return jnp.zeros(target.shape, target.dtype, out_sharding=sharding)


def enter_mesh(
    sharding: jax.NamedSharding | None,
) -> contextlib.AbstractContextManager[object]:
    """A context manager that sets a sharding's mesh, unless a mesh is already set.

    Without a mesh in the context, JAX 0.12 ignores a requested `out_sharding`.
    """
    if sharding is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh)


def example_numbers(size: int, batch: Tree) -> jax.Array:
    """The indices i[size] of a batch's examples, sharded like the batch's axis 0."""
    arrays = [jnp.asarray(x) for x in jax.tree.leaves(batch)]
    # On explicit axes the types of operands must agree. So the indices are resharded.
    numbers, mesh = jnp.arange(size), explicit_mesh(arrays)
    if mesh is None:
        return numbers
    return jax.reshard(numbers, jax.NamedSharding(mesh, jax.P(leading_axis(arrays))))


def plus(x: jax.Array, more: jax.Array) -> jax.Array:
    """The sum of two arrays, with the sharding of x on the mesh of x.

    The types of x and `more` may name the same devices with different axis types. For
    example, the loss computes x inside `jax.sharding.auto_axes`, where the compiler
    chooses the sharding along some mesh axes, and `more` comes from outside.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or mesh == jax.typeof(more).sharding.mesh:
        return jax.lax.add(x, more)
    # The two types name different meshes, which an addition would refuse.
    with jax.sharding.use_abstract_mesh(mesh):
        return x + jax.reshard(more, spec_of(x))


def varying_axes(of: Any) -> frozenset[str]:
    """The manual axes of `jax.shard_map` along which a value of the type `of` varies.

    `of` is a type as `jax.typeof` returns it.
    """
    return of.manual_axis_type.varying


def add_varying_axes(tree: Shaped, axes: frozenset[str]) -> Shaped:
    """Mark the values of a tree as varying along manual axes of `jax.shard_map`."""

    def cast(x: jax.Array) -> jax.Array:
        # pcast accepts only axes along which x does not vary yet.
        missing = tuple(sorted(axes - varying_axes(jax.typeof(x))))
        return jax.lax.pcast(x, missing, to="varying")

    return jax.tree.map(cast, tree)


def let_compiler_shard(
    function: Callable[..., Out], arrays: Tree, outputs: object
) -> Callable[..., Out]:
    """Wrap a function so that the compiler decides shardings along all explicit axes.

    The explicit axes are those of the mesh `explicit_mesh(arrays)`. If `explicit_mesh`
    returns None, the result is the given function.

    Args:
      function: a function of arrays.
      arrays: a tree of arrays, such as the function's arguments.
      outputs: partition specs on the mesh, in a tree that is a prefix of the function's
        outputs.
    """
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return function
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), outputs)
    sharded = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=shardings
    )
    return cast(Callable[..., Out], sharded)  # JAX's annotations lose the result's type


def explicit_mesh(arrays: Tree) -> AbstractMesh | None:
    """The first mesh with explicit axes among the arrays' types.

    The result is None if no array has a mesh with explicit axes, or if the context has
    a mesh without explicit axes (`lets_compiler_decide`).
    """
    if not lets_compiler_decide():
        for x in jax.tree.leaves(arrays):
            mesh = jax.typeof(x).sharding.mesh
            if mesh.explicit_axes:
                return mesh
    return None


def lets_compiler_decide() -> bool:
    """Whether the context has a mesh, and this mesh has no explicit axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and not mesh.explicit_axes


def are_concrete(arrays: Sequence[Tree]) -> bool:
    """Whether this process can read the values of all these arrays now.

    The process cannot read an array that is traced, or that has shards on devices of
    other processes.
    """
    return not any(
        isinstance(x, jax.core.Tracer)
        or (isinstance(x, jax.Array) and not x.is_fully_addressable)
        for x in arrays
    )


def zeros_like(
    x: jax.Array, dtype: DTypeLike, leading: Sequence[int] = ()
) -> jax.Array:
    """Zeros of the shape (*leading, *x.shape), sharded like x."""
    shape = (*leading, *jnp.shape(x))
    zeros = jnp.broadcast_to(jnp.zeros_like(x, dtype), shape)
    if not _has_auto_axes(x):
        return zeros
    return _copy_sharding(zeros, jnp.broadcast_to(x.astype(dtype), shape))


def wide_zeros_like(tree: Tree, leading: Sequence[int] = ()) -> Tree:
    """Replace each leaf x by zeros of shape (*leading, *x.shape), sharded like x.

    The zeros have the leaf's float dtype, or float32 if that dtype is narrower.
    """
    return jax.tree.map(
        lambda x: zeros_like(x, at_least_float32(jnp.result_type(x)), leading), tree
    )


def shard_like(state: Shaped, params: Tree) -> Shaped:
    """Shard the leaves of an optimizer's state like the parameters.

    The path of a leaf such as a momentum ends with the path of a parameter. If a
    floating-point leaf also has the shape of this parameter, the leaf gets the
    parameter's sharding. A leaf changes only if its parameter is traced and the
    compiler chooses the parameter's sharding.
    """
    by_path = dict(jax.tree_util.tree_flatten_with_path(params)[0])

    def shard_leaf(path: tuple[Any, ...], x: ArrayLike) -> ArrayLike:
        # The longest suffix of the path that is a parameter's path; it may be empty.
        ends = (path[i:] for i in range(len(path) + 1))
        p = next((by_path[end] for end in ends if end in by_path), None)
        if not _has_auto_axes(p) or jnp.shape(x) != jnp.shape(p):
            return x
        # Counters and keys cannot be selected from a floating-point parameter.
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        return _copy_sharding(jnp.asarray(x), p.astype(jnp.result_type(x)))

    return jax.tree_util.tree_map_with_path(shard_leaf, state)


def _copy_sharding(x: jax.Array, other: jax.Array) -> jax.Array:
    """The values of x, with the sharding that the compiler chooses for another array.

    The compiler has not yet chosen this sharding when the function is traced. So the
    result is a select between both arrays, with a constant condition. The compiler
    gives the operands of a select the same sharding, and removes the select only later.
    """
    return jnp.where(False, other, x)


def _has_auto_axes(x: ArrayLike | None) -> TypeGuard[Tracer]:
    """Whether x is traced and the compiler decides its sharding along some axis."""
    if not isinstance(x, Tracer):
        return False
    mesh = jax.typeof(x).sharding.mesh
    return mesh.empty or AxisType.Auto in mesh.axis_types


def normal_like(key: Key, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Standard normal noise f[*x.shape], sharded like x; no two shards share noise.

    If x is replicated over devices, all of these devices get the same noise.
    """
    return draw_like(jax.random.normal, key, x, dtype)


def draw_like(
    draw: Callable[..., jax.Array], key: Key, x: jax.Array, setting: Any
) -> jax.Array:
    """Random numbers with the shape and sharding of x; no two shards share numbers.

    Args:
      draw: a function of a key, a shape and the setting, with the keyword
        `out_sharding`. Pass the same function object in every call, since it may be
        compiled.
      key: a typed key.
      x: an array. If x is replicated over devices, so are the numbers. Along auto axes
        inside jit, the compiler chooses the sharding of the numbers.
      setting: the third argument of `draw`, which is hashable, such as a dtype.
    """
    kind, sharding = jax.typeof(x), None
    if isinstance(x, Tracer):
        if AxisType.Explicit in kind.sharding.mesh.axis_types:
            sharding = kind.sharding
    elif len(x.sharding.device_set) > 1:
        # Outside jit, a compiled draw lets each device draw its own shard.
        compiled = jax.jit(draw, static_argnums=(1, 2), out_shardings=x.sharding)
        return compiled(key, x.shape, setting)
    key = _fold_in_shard(key, varying_axes(kind))
    with enter_mesh(sharding):
        return draw(key, x.shape, setting, out_sharding=sharding)


def _fold_in_shard(key: Key, axes: frozenset[str]) -> Key:
    """The key for this device's shard of a value that varies along manual axes.

    `axes` has the manual axes of `jax.shard_map` along which the value varies. Without
    such axes, the result is the given key.

    Raises:
      ValueError: JAX does not record along which manual axes a value varies (in a
        `jax.shard_map` with check_vma=False, or in `jax.pmap`), so that shards with
        different values could get the same noise.
    """
    mesh = jax.sharding.get_abstract_mesh()
    for axis in mesh.manual_axes:
        # An axis index varies along its axis. If the type of the index does not say so,
        # types do not record varying axes at all, and shards could share noise
        # unnoticed.
        concrete = axis in varying_axes(jax.typeof(jax.lax.axis_index(axis)))
        if not concrete and mesh.shape[axis] > 1:
            raise ValueError(
                "check_vma must be True for a jax.shard_map in which noise is drawn "
                f"(axis {axis!r}). With check_vma=False, or in jax.pmap, JAX does not "
                "record whether the shards of a value differ, and different shards "
                "would get the same noise."
            )
    if not axes:
        return key
    return jax.random.fold_in(
        stream(key, "piece"), jax.lax.axis_index(tuple(sorted(axes)))
    )
