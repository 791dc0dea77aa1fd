"""Run an accountant in float64 and hand back the caller's default dtype.

Accountants need float64 (δ reaches 1e-30), notebooks run in float32, and global
configuration is not ours to change. The decorator `float64` opens a float64 scope
around one jitted call and rounds what comes out towards more privacy loss. The scope
promotes dtypes as usual, too: a strict caller has no say in what is not its code.

Processors flush numbers below the least normal one, `TINY`, to zero in what is compiled
here. So arguments below it count as zero, and what has to be positive is at least TINY.

Called by itself an accountant runs on the CPU, whatever JAX's default device is or the
context's mesh: accelerators are slow in float64 or do not have it, and one number is
not worth their start. Within a program it runs where that runs, but not on a TPU
(`_platforms.needs_float64`).

JAX traces, transposes and lowers derivatives long after that scope has closed, and
what then makes a float64 array fails. So the derivative is a function of its own:
for a core with one number out per batch element, a partial derivative comes from one
push-forward or pull-back of ones inside the scope, and only Σ_i (partial_i · tangent_i)
is left for the caller's transformations. Partials are decorated the same way, so second
derivatives work alike. The rule for custom derivatives inside a core: `scoped`.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, ParamSpec, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from dpjax._core.platforms import host, needs_float64, without_mesh
from dpjax._core.typing import ArrayLike

P = ParamSpec("P")
Out = TypeVar("Out")
Direction = Literal["up", "down", "nearest"]
# A core of float64 arrays, or what callers get of it, with one number out.
Core = Callable[..., jax.Array]

# Twice the most that one operation rounds by, relatively. Margins are multiples of it:
# k operations on numbers of one sign err by k ULP / 2 to first order, half of a margin
# of k ULP. Where numbers cancel or a function errs by more, that stands beside it.
ULP = float(np.finfo(np.float64).eps)
# The least normal number: what is positive, however small, is at least that.
TINY = float(np.finfo(np.float64).tiny)
# What stands for nothing inside a computation, in a logarithm or below a line. Products
# with anything above 1e-7 stay normal, and no δ, rate or mass that matters is near it.
SMALL = 1e-300


def default_float() -> np.dtype:
    """The float dtype of the caller's configuration: float32 unless x64 is on."""
    return jax.dtypes.canonicalize_dtype(np.float64)


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """The configuration in which accountants are traced and run."""
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


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
@scoped
@functools.partial(jax.jit, static_argnums=(1, 2))
def cast(x: jax.Array, dtype: np.dtype, direction: Direction) -> jax.Array:
    """The value in dtype, rounded in the given direction, with derivative one."""
    y = x.astype(dtype)
    if dtype == x.dtype or direction == "nearest":
        return y
    back, least = y.astype(x.dtype), float(jnp.finfo(dtype).tiny)
    # What lies between 0 and the least normal number may have become 0.
    if direction == "up":
        y = jnp.where(back < x, jnp.nextafter(y, jnp.full_like(y, jnp.inf)), y)
        return jnp.where((x > 0) & (x < least), least, y)
    y = jnp.where(back > x, jnp.nextafter(y, jnp.full_like(y, -jnp.inf)), y)
    return jnp.where((x < 0) & (x > -least), -least, y)


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
    compiled: bool = True,
) -> Callable[[Core], Core]:
    """Decorate a core function of float64 arrays into one for any caller.

    Args:
      rounding: the direction of the final cast, "up" for a quantity that grows
        with privacy loss.
      static: names of keyword arguments that are not arrays.
      vectors: the positions of arguments whose last axis belongs to one evaluation.
        All other axes are batch axes, over which the core works element by element
        and broadcasts; its result has the batch axes alone.
      elementwise: whether the core is written for one evaluation only, scalars but for
        its vectors, and is to be mapped over batch axes.
      compiled: whether to compile the core as one program. One that takes long to
        compile is better made of a few compiled functions, of which several calls then
        share some.

    Returns:
      A decorator. Positional arguments of the result may be Python numbers (taken
      exactly), NumPy or JAX arrays of any real dtype, or tracers; or records, named
      tuples of these, and the core gets such a record.
    """

    def decorate(core: Core) -> Core:
        @functools.cache
        def lifted(records: tuple[type | None, ...]) -> Core:
            flat, at = _flat(core, records, vectors)
            flat = _map_over_batch(flat, at) if elementwise else flat
            return _lift(flat, rounding, static, at, compiled)

        @functools.wraps(core)
        def wrapper(
            *args: ArrayLike | tuple[ArrayLike, ...], **kwargs: object
        ) -> jax.Array:
            records = tuple(type(x) if _is_record(x) else None for x in args)
            leaves = [leaf for x in args for leaf in (x if _is_record(x) else (x,))]
            return lifted(records)(*leaves, **kwargs)

        return wrapper

    return decorate


def _is_record(x: object) -> TypeGuard[tuple[ArrayLike, ...]]:
    return isinstance(x, tuple) and hasattr(x, "_fields")


def _flat(
    core: Core, records: tuple[type | None, ...], vectors: tuple[int, ...]
) -> tuple[Core, tuple[int, ...]]:
    """The core as a function of its records' fields, and where its vectors are then."""
    sizes = [len(record._fields) if record else 1 for record in records]
    starts = np.cumsum([0, *sizes]).tolist()

    @functools.wraps(core)
    def flat(*leaves: jax.Array, **kwargs: object) -> jax.Array:
        parts = [leaves[i:j] for i, j in itertools.pairwise(starts)]
        return core(
            *(
                record(*part) if record else part[0]
                for record, part in zip(records, parts, strict=True)
            ),
            **kwargs,
        )

    return flat, tuple(i for v in vectors for i in range(starts[v], starts[v + 1]))


def _map_over_batch(core: Core, vectors: tuple[int, ...]) -> Core:
    """A core for one evaluation, on batches. Vectors may differ in length."""

    @functools.wraps(core)
    def mapped(*args: jax.Array, **kwargs: object) -> jax.Array:
        axes = [f"(k{i})" if i in vectors else "()" for i in range(len(args))]
        one = functools.partial(core, **kwargs)
        # What has fewer axes is computed once for all, whatever the caller thinks of
        # implicit ranks.
        ranks = [x.ndim - (i in vectors) for i, x in enumerate(args)]
        args = tuple(
            x.reshape((1,) * (max(ranks) - rank) + x.shape)
            for x, rank in zip(args, ranks, strict=True)
        )
        return jnp.vectorize(one, signature=f"{','.join(axes)}->()")(*args)

    return mapped


def _lift(
    core: Core,
    rounding: Direction,
    static: tuple[str, ...],
    vectors: tuple[int, ...],
    compiled: bool = True,
) -> Core:
    jitted = jax.jit(core, static_argnames=static) if compiled else core

    @functools.cache
    def partial(position: int) -> Core:
        """The lifted partial derivative by one argument, in that argument's shape."""

        def derivative(*args: jax.Array, **kwargs: object) -> jax.Array:
            args = broadcast_batch(args, vectors)
            x, before, after = args[position], args[:position], args[position + 1 :]

            def by(x: jax.Array) -> jax.Array:
                return core(*before, x, *after, **kwargs)

            if position not in vectors:
                return jax.jvp(by, (x,), (jnp.ones_like(x),))[1]
            out, pull_back = jax.vjp(by, x)
            return pull_back(jnp.ones_like(out))[0]

        if vectors:
            return scoped(jax.jit(derivative, static_argnames=static))
        return _lift(derivative, "nearest", static, vectors)

    @functools.wraps(core)
    def wrapper(*args: ArrayLike, **kwargs: object) -> jax.Array:
        dtype = default_float()
        # What is not a JAX array is a constant, and stays as precise as it is.
        places = [i for i, x in enumerate(args) if isinstance(x, jax.Array)]

        def fill(arrays: Sequence[jax.Array]) -> list[ArrayLike]:
            filled = list(args)
            for i, x in zip(places, arrays, strict=True):
                filled[i] = x
            return filled

        def merge(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            # NumPy takes integers of any size, and what it holds is on no device yet.
            return [
                needs_float64(
                    jnp.asarray(x, jnp.float64)
                    if isinstance(x, Tracer)
                    else jnp.asarray(np.asarray(x).astype(np.float64))
                )
                for x in fill(arrays)
            ]

        @jax.custom_jvp
        @scoped
        def call(*arrays: jax.Array) -> jax.Array:
            return cast(jitted(*merge(arrays), **kwargs), dtype, rounding)

        def call_jvp(
            primals: Sequence[jax.Array], tangents: Sequence[jax.Array | SymbolicZero]
        ) -> tuple[jax.Array, jax.Array]:
            out = call(*primals)
            total = jnp.zeros_like(out)
            with scope():
                inputs = merge(primals)
                if not vectors:  # a constant is one for second derivatives too
                    inputs = fill([inputs[place] for place in places])
            for place, primal, tangent in zip(places, primals, tangents, strict=True):
                # What is not differentiated by has no derivative compiled either.
                floating = jnp.issubdtype(jnp.result_type(primal), jnp.floating)
                if isinstance(tangent, SymbolicZero) or not floating:
                    continue
                with scope():
                    slope = partial(place)(*inputs, **kwargs).astype(dtype)
                    if tangent.dtype != dtype:
                        tangent = jnp.asarray(tangent, dtype)
                product = slope * jnp.broadcast_to(tangent, slope.shape)
                total += jnp.sum(product, axis=-1) if place in vectors else product
            return out, total

        call.defjvp(call_jvp, symbolic_zeros=True)
        return call(*(args[i] for i in places))

    return wrapper


def broadcast_batch(
    args: Sequence[jax.Array], vectors: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    """The arguments with their batch axes broadcast against each other."""
    cores = [x.shape[-1:] if i in vectors else () for i, x in enumerate(args)]
    shapes = [x.shape[: x.ndim - len(c)] for x, c in zip(args, cores, strict=True)]
    batch = jnp.broadcast_shapes(*shapes)
    return tuple(
        jnp.broadcast_to(x, (*batch, *core))
        for x, core in zip(args, cores, strict=True)
    )
