"""Run an accountant in float64 and return the result in the caller's default dtype.

Accountants need float64, since δ may be as small as 1e-30. But JAX's default is
float32, and a library must not change the global configuration. So the decorator
`float64` opens a float64 scope around one call, and rounds the result towards more
privacy loss. The scope also sets standard dtype promotion, so that a caller's setting
of strict promotion does not apply to the accountant's own code.

Compiled programs replace subnormal numbers, which are below the least normal number of
their dtype, by zero. So a subnormal argument of a compiled program counts as zero. If a
number must be positive, accountants clamp the number to at least `TINY`, the least
normal number of float64.

Outside jit, an accountant runs on the CPU, whatever JAX's default device or the
context's mesh is. NumPy evaluates concrete numbers (`interpret`), and XLA evaluates
large batches and tracers of `jax.vmap`. Accelerators are slow in float64 or lack it,
and starting one takes longer than computing a single number. Inside a compiled program,
an accountant runs on the program's device. For a TPU, lowering the program raises an
error (`platforms.needs_float64`).

JAX traces, transposes and lowers derivatives after the scope has closed, and code that
makes a float64 array then fails. So derivatives are separate functions with their own
scope. A core is the function that the decorator `float64` receives. The core returns
one number for each batch element. Inside the scope, one JVP or VJP of the core, with
tangents or cotangents of ones, computes each partial derivative. JAX's transformations
outside the scope see only the sum Σ_i (partial derivative i · tangent i). Each partial
derivative opens a scope and can itself be differentiated, so that second derivatives
also work. A custom derivative rule inside a core must use `scoped`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from dpjax._core.interpret import without_compiler
from dpjax._core.platforms import host, needs_float64, without_mesh
from dpjax._core.typing import ArrayLike

P = ParamSpec("P")
Out = TypeVar("Out")
Direction = Literal["up", "down", "nearest"]
# A core function of float64 arrays, or its decorated form for callers. Both return one
# number per batch element.
Core = Callable[..., jax.Array]

# Twice the maximum relative rounding error of one operation. Margins are multiples of
# ULP. To first order, the error of k operations on numbers of one sign is k ULP / 2,
# half of a margin of k ULP. Where terms cancel, or a function has a larger error, a
# comment next to the margin explains it.
ULP = float(np.finfo(np.float64).eps)
# The least normal number. A number that must be positive is at least TINY.
TINY = float(np.finfo(np.float64).tiny)
# A replacement for 0 in logarithms and denominators. The products of SMALL with numbers
# above 1e-7 are normal numbers. No relevant δ, rate or probability mass is close to
# SMALL.
SMALL = 1e-300


def default_float() -> np.dtype:
    """The caller's default float dtype: float32 unless `jax_enable_x64` is on."""
    return jax.dtypes.canonicalize_dtype(np.float64)


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """A context manager under which JAX traces and runs accountants in float64.

    Outside a compiled program, the computations run on the CPU, if JAX has a CPU
    backend.
    """
    promotion = jax.numpy_dtype_promotion("standard")
    with jax.enable_x64(True), promotion, jax.default_device(host()), without_mesh():
        yield


def scoped(fn: Callable[P, Out]) -> Callable[P, Out]:
    """Decorate a function, or a custom derivative rule, to run in the float64 scope."""

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Out:
        with scope():
            return fn(*args, **kwargs)

    return wrapper


@without_compiler
@functools.partial(jax.jit, static_argnames=("dtype", "direction"))
def _cast(x: jax.Array, *, dtype: np.dtype, direction: Direction) -> jax.Array:
    if dtype == x.dtype or direction == "nearest":
        return x.astype(dtype)
    # x is in float64 and the dtype is float32. On GPUs, XLA would replace a cast to
    # float32 and back by x itself, but it does not change `reduce_precision`.
    back = jax.lax.reduce_precision(x, 8, 23)
    y, tiny = back.astype(dtype), float(jnp.finfo(dtype).tiny)
    # A compiled program may have replaced a value between 0 and the least normal number
    # by 0. Then y would be rounded in the wrong direction.
    if direction == "up":
        y = jnp.where(back < x, jnp.nextafter(y, jnp.full_like(y, jnp.inf)), y)
        return jnp.where((x > 0) & (x < tiny), tiny, y)
    y = jnp.where(back > x, jnp.nextafter(y, jnp.full_like(y, -jnp.inf)), y)
    return jnp.where((x < 0) & (x > -tiny), -tiny, y)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
@scoped
def cast(x: jax.Array, dtype: np.dtype, direction: Direction) -> jax.Array:
    """The value x, rounded to a dtype in the given direction, with derivative 1."""
    y = _cast(x, dtype=dtype, direction=direction)
    return y if isinstance(y, jax.Array) else jax.device_put(y)


@cast.defjvp
@scoped
def _cast_jvp(
    dtype: np.dtype,
    direction: Direction,
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return cast(x, dtype, direction), dx.astype(dtype)


def float64(
    rounding: Direction,
    *,
    static: tuple[str, ...] = (),
    vectors: tuple[int, ...] = (),
    elementwise: bool = False,
    one_by_one: bool = False,
    compiled: bool = True,
) -> Callable[[Core], Core]:
    """Decorate a function of float64 arrays so that callers need not use float64.

    In this module, the function before decoration is called a core.

    Args:
      rounding: the direction of the final cast: "up" for a quantity that grows with
        privacy loss.
      static: names of keyword arguments that are not arrays.
      vectors: the positions of arguments that are vectors. The last axis of such an
        argument is the axis of the vector, and all other axes are batch axes. Every
        axis of any other argument is a batch axis. The core treats batch elements
        independently. The core's result has only the batch axes.
      elementwise: whether the core is written for one evaluation, with scalar arguments
        except for its vectors. If so, the decorator maps the core over the batch axes.
        If `elementwise` and `one_by_one` are both false, the core broadcasts the batch
        axes itself.
      one_by_one: whether to call the core in a loop over the batch elements. The core
        must be written for one evaluation, with scalar arguments only. Use this loop if
        batch elements differ in the trip counts of loops or in the positions of dynamic
        slices, since `jax.vmap` is then slower.
      compiled: whether to compile the core as one program. If compiling the core takes
        long, the core should instead consist of a few compiled functions, which several
        calls can share.

    Returns:
      A decorator. Positional arguments of the decorated function may be Python numbers
      (converted directly to float64), NumPy or JAX arrays of any real dtype, or
      tracers. An argument may also be a named tuple of such values; the core then
      receives a named tuple of the same type. The decorated function returns an array
      of the caller's default float dtype.
    """

    def decorate(core: Core) -> Core:
        @functools.cache
        def lift(structure: Any) -> Core:
            flat, at = _flat(core, structure, vectors)
            flat = _map_over_batch(flat, at) if elementwise else flat
            flat = _loop_over_batch(flat) if one_by_one else flat
            return _lift(flat, rounding, static, at, compiled)

        @functools.wraps(core)
        def wrapper(
            *args: ArrayLike | tuple[ArrayLike, ...], **kwargs: object
        ) -> jax.Array:
            # Named tuples have no common base class. Only they have `_fields`.
            leaves, structure = jax.tree.flatten(
                args, is_leaf=lambda x: x is not args and not hasattr(x, "_fields")
            )
            return lift(structure)(*leaves, **kwargs)

        return wrapper

    return decorate


def _flat(
    core: Core, structure: Any, vectors: tuple[int, ...]
) -> tuple[Core, tuple[int, ...]]:
    """Wrap a function `core` of arrays and named tuples as a function of arrays only.

    `structure` is the tree structure of the arguments of core: arrays and named tuples
    of arrays. The wrapper takes the fields of a named tuple as separate arguments.
    `vectors` has the positions of arguments that are vectors, or named tuples of
    vectors. Return the wrapper and the positions of its own vectors.
    """
    sizes = [argument.num_leaves for argument in structure.children()]
    starts = np.cumsum([0, *sizes]).tolist()

    @functools.wraps(core)
    def flat(*leaves: jax.Array, **kwargs: object) -> jax.Array:
        return core(*structure.unflatten(leaves), **kwargs)

    return flat, tuple(i for v in vectors for i in range(starts[v], starts[v + 1]))


def _map_over_batch(core: Core, vectors: tuple[int, ...]) -> Core:
    """Wrap a function of one batch element as a function of a batch.

    The wrapper broadcasts the batch axes of its arguments. The arguments at the
    positions in `vectors` are vectors, which may differ in length.
    """

    @functools.wraps(core)
    def evaluate_batch(*args: jax.Array, **kwargs: object) -> jax.Array:
        # Each vector's axis has a separate name, so that the lengths may differ.
        axes = [f"(k{i})" if i in vectors else "()" for i in range(len(args))]
        scalar_core = functools.partial(core, **kwargs)
        # Arguments of lower rank get leading axes of size 1 here. Otherwise a caller's
        # setting of jax_numpy_rank_promotion might refuse them.
        ranks = [x.ndim - (i in vectors) for i, x in enumerate(args)]
        args = tuple(
            x.reshape((1,) * (max(ranks) - rank) + x.shape)
            for x, rank in zip(args, ranks, strict=True)
        )
        return jnp.vectorize(scalar_core, signature=f"{','.join(axes)}->()")(*args)

    return evaluate_batch


def _loop_over_batch(scalar: Core) -> Core:
    """Wrap a function of scalars as a loop over the elements of broadcast arrays."""

    @functools.wraps(scalar)
    def evaluate_batch(*args: jax.Array, **kwargs: object) -> jax.Array:
        scalar_core = functools.partial(scalar, **kwargs)
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in args))
        if shape == ():
            return scalar_core(*args)
        flat = [jnp.broadcast_to(x, shape).ravel() for x in args]
        return jax.lax.map(lambda xs: scalar_core(*xs), flat).reshape(shape)

    return evaluate_batch


def _widen(x: jax.Array) -> jax.Array:
    """Convert a traced argument to float64; a subnormal float32 or bfloat16 becomes 0.

    Otherwise one program could treat the same number as 0 and as positive: XLA's
    conversion from float32 replaces a subnormal number by 0, but a comparison with 0
    may use the number before the conversion.
    """
    wide = jnp.asarray(x, jnp.float64)
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return wide
    subnormal = jnp.abs(wide) < float(jnp.finfo(x.dtype).tiny)
    # The difference has the derivative 1, also at 0.
    return wide - jax.lax.stop_gradient(jnp.where(subnormal, wide, 0.0))


def _lift(
    core: Core,
    rounding: Direction,
    static: tuple[str, ...],
    vectors: tuple[int, ...],
    compiled: bool,
) -> Core:
    # The core as a function for callers in any dtype: cast, run, and round the result.
    jitted = jax.jit(core, static_argnames=static) if compiled else core
    evaluate = without_compiler(jitted)

    @functools.cache
    def partial(position: int) -> Core:
        """The partial derivative of `core` with respect to the argument at a position.

        The result is a function of the same arguments, which opens the float64 scope.
        The derivative has the shape that the argument has after all arguments were
        broadcast to one batch.
        """

        def derivative(*args: jax.Array, **kwargs: object) -> jax.Array:
            args = broadcast_batch(args, vectors)
            x, before, after = args[position], args[:position], args[position + 1 :]

            def by(x: jax.Array) -> jax.Array:
                return core(*before, x, *after, **kwargs)

            # Batch elements are independent. So one JVP or VJP with ones gives the
            # partial derivatives for all batch elements.
            if position not in vectors:
                return jax.jvp(by, (x,), (jnp.ones_like(x),))[1]
            out, pull_back = jax.vjp(by, x)
            return pull_back(jnp.ones_like(out))[0]

        # A derivative by a vector is itself a vector, which `_lift` does not support.
        # So partial derivatives of a core with vectors are only scoped and compiled.
        if vectors:
            return scoped(without_compiler(jax.jit(derivative, static_argnames=static)))
        return _lift(derivative, "nearest", static, vectors, True)

    @functools.wraps(core)
    def wrapper(*args: ArrayLike, **kwargs: object) -> jax.Array:
        dtype = default_float()
        # An argument that is not a JAX array is a constant. A constant is not an input
        # of the custom derivative, since JAX would round the constant to the caller's
        # dtype.
        indices = [i for i, x in enumerate(args) if isinstance(x, jax.Array)]

        def merge(arrays: Sequence[jax.Array]) -> list[Any]:
            merged = list(args)
            for i, x in zip(indices, arrays, strict=True):
                merged[i] = x
            # NumPy converts integers of any size, and its arrays are on no device.
            return [
                needs_float64(_widen(x))
                if isinstance(x, Tracer)
                else np.asarray(x).astype(np.float64)
                for x in merged
            ]

        @jax.custom_jvp
        @scoped
        def call(*arrays: jax.Array) -> jax.Array:
            return cast(evaluate(*merge(arrays), **kwargs), dtype, rounding)

        def call_jvp(
            primals: Sequence[jax.Array], tangents: Sequence[jax.Array | SymbolicZero]
        ) -> tuple[jax.Array, jax.Array]:
            out = call(*primals)
            total = jnp.zeros_like(out)
            with scope():
                # NumPy arrays are constants also for the decorated partial derivative,
                # and so for second derivatives.
                inputs = merge(primals)
            for index, primal, tangent in zip(indices, primals, tangents, strict=True):
                # No derivative is compiled for an argument with a zero tangent.
                floating = jnp.issubdtype(jnp.result_type(primal), jnp.floating)
                if isinstance(tangent, SymbolicZero) or not floating:
                    continue
                with scope():
                    slope = partial(index)(*inputs, **kwargs).astype(dtype)
                    if tangent.dtype != dtype:
                        tangent = jnp.asarray(tangent, dtype)
                product = slope * jnp.broadcast_to(tangent, slope.shape)
                total += jnp.sum(product, axis=-1) if index in vectors else product
            return out, total

        call.defjvp(call_jvp, symbolic_zeros=True)
        return call(*(args[i] for i in indices))

    return wrapper


def broadcast_batch(
    args: Sequence[jax.Array], vectors: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    """The arguments, with their batch axes broadcast against each other.

    All axes of an argument are batch axes, except the last axis of each argument whose
    position is in `vectors`.
    """
    cores = [x.shape[-1:] if i in vectors else () for i, x in enumerate(args)]
    shapes = [x.shape[: x.ndim - len(c)] for x, c in zip(args, cores, strict=True)]
    batch = jnp.broadcast_shapes(*shapes)
    return tuple(
        jnp.broadcast_to(x, (*batch, *core))
        for x, core in zip(args, cores, strict=True)
    )
