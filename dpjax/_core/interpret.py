"""Evaluate functions of concrete numbers with NumPy, so that nothing is compiled.

XLA takes seconds to compile an accountant, but NumPy takes a tenth of a second to
evaluate the same operations once. So a function is traced into a jaxpr, as for
`jax.jit`, and NumPy evaluates the jaxpr's equations one after the other. An accountant
is written once, in `jax.numpy`. NumPy and XLA evaluate the same equations. The
functions of NumPy and SciPy differ from those of XLA only in the last bits, within the
rounding errors that the accountants' margins cover. Unlike XLA, NumPy does not replace
subnormal numbers by zero.

XLA compiles the jaxpr instead if `numpy_rules` cannot evaluate one of its operations.
XLA also compiles the jaxpr if NumPy would take longer than `MAX_SECONDS`, because of
long loops or large arrays. The time is estimated from the equations alone, and never
measured, so that equal calls always give equal bits.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.extend.core as jex
import numpy as np
from jax.core import Tracer

from dpjax._core.numpy_rules import RULES, Function, NotEvaluatedError

P = ParamSpec("P")
Out = TypeVar("Out")
# The maximum time of an evaluation without a compiler, by the estimate below. For long
# loops, the estimate exceeds the time. Compiling takes 1 to 20 s, more than a few
# evaluations.
MAX_SECONDS = 3.0
# Estimates of NumPy's time in seconds: for an operation, for each entry of its result,
# and for each multiplication in a product of matrices. The last number is an estimate
# of the iterations of a loop whose end depends on values.
_OPERATION, _ENTRY, _PRODUCT, _TRIPS = 3e-6, 1.5e-9, 2e-10, 2


class Program(NamedTuple):
    """A function of NumPy arrays, and an estimate of the seconds that a call takes."""

    run: Function
    seconds: float


def without_compiler(
    fn: Callable[P, Out], *, max_seconds: float = MAX_SECONDS
) -> Callable[P, Out]:
    """Decorate a function so that NumPy evaluates it if all arguments are concrete.

    Args:
      fn: a function of pytrees of arrays, written in `jax.numpy` and usually jitted.
        Its results are a pytree of arrays. Arrays are positional arguments. Keyword
        arguments are hashable constants.
      max_seconds: the maximum estimated time of an evaluation by NumPy, in seconds.

    Returns:
      A function that calls fn if an argument is traced, if `numpy_rules` cannot
      evaluate an operation of fn, or if NumPy would take too long. Otherwise NumPy
      evaluates fn, and the results are NumPy arrays, or NumPy scalars for the shape ().
    """

    # A function is traced again if the precision differs, as in the float64 scope.
    @functools.lru_cache(maxsize=512)
    def trace(structure: Any, avals: Any, constants: Any, precision: Any) -> Any:
        del precision
        leaves = [jax.ShapeDtypeStruct(*aval) for aval in avals]
        args = jax.tree.unflatten(structure, leaves)
        call: Any = functools.partial(fn, **dict(constants))
        closed, shapes = jax.make_jaxpr(call, return_shape=True)(*args)
        try:
            return evaluator(closed, max_seconds), jax.tree.structure(shapes)
        except NotEvaluatedError:
            return None

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Out:
        leaves, structure = jax.tree.flatten(args)
        if any(isinstance(x, Tracer) for x in leaves):
            return fn(*args, **kwargs)
        leaves = [np.asarray(x) for x in leaves]
        avals = tuple((x.shape, x.dtype) for x in leaves)
        precision = jax.dtypes.canonicalize_dtype(np.float64)
        made = trace(structure, avals, tuple(sorted(kwargs.items())), precision)
        if made is None:
            return _compile(fn, *args, **kwargs)
        evaluate, shape = made
        return jax.tree.unflatten(shape, evaluate(*leaves))

    return wrapper


def _compile(fn: Callable[P, Out], *args: P.args, **kwargs: P.kwargs) -> Out:
    # This is a separate function so that tests notice an operation without a rule.
    return fn(*args, **kwargs)


def evaluator(closed: jex.ClosedJaxpr, max_seconds: float = MAX_SECONDS) -> Function:
    """Make the function of NumPy arrays that a jaxpr describes.

    The function returns a list of arrays. A NumPy scalar may stand for an array of the
    shape ().

    Raises:
      NotEvaluatedError: `numpy_rules` cannot evaluate an operation of the jaxpr, or
        NumPy would take longer than max_seconds.
    """
    _keep_freed_memory()
    run, seconds = _sequence(closed)
    if seconds > max_seconds:
        raise NotEvaluatedError(f"NumPy would take about {seconds:.1f} s")

    def evaluate(*args: np.ndarray) -> list[np.ndarray]:
        # Infinities and NaN are values that the accountants expect and handle.
        with np.errstate(all="ignore"):
            return run(*args)

    return evaluate


@functools.cache
def _keep_freed_memory() -> None:
    """Make the allocator retain the memory of freed arrays, for use by later arrays.

    The allocator of Linux returns the memory of large freed arrays to the system. To
    get memory again, page by page, takes a third of an accountant's time. But after an
    array of n bytes (up to 32 MiB) was freed, the allocator retains up to 2 n bytes of
    free memory. So this function frees such an array, whose pages are never touched.
    """
    np.empty(2**25 - 2**13, np.uint8)


class _Step(NamedTuple):
    """A jaxpr's equation, and the places of its inputs and outputs in a list of values.

    Attributes:
      eqn: the equation.
      inputs: for each input of the equation, the input's index in the list.
      outputs: for each output of the equation, the output's index in the list.
    """

    eqn: jex.JaxprEqn
    inputs: list[int]
    outputs: list[int]


def _sequence(closed: jex.ClosedJaxpr) -> Program:
    """A program that evaluates the equations on which a jaxpr's outputs depend.

    An equation that only calls another jaxpr, such as a `jax.jit`, is replaced by the
    equations of that jaxpr. Loops and branches remain single equations.
    """
    slots, constants, steps = itertools.count(), dict[int, Any](), list[_Step]()

    def constant(value: Any) -> int:
        slot = next(slots)
        constants[slot] = np.asarray(value)
        return slot

    def inline(called: Any, inputs: list[int]) -> list[int]:
        # A checkpoint calls a plain `Jaxpr`, which has no constants.
        jaxpr, consts = getattr(called, "jaxpr", called), getattr(called, "consts", ())
        env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= zip(jaxpr.constvars, map(constant, consts), strict=True)

        def slot(v: Any) -> int:
            if isinstance(v, jex.Literal):
                return constant(np.asarray(v.val, v.aval.dtype))  # pyright: ignore
            return env[v]

        for eqn in jaxpr.eqns:
            ins = [slot(v) for v in eqn.invars]
            if eqn.primitive.name in _CALLS:
                outs = inline(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"], ins)
            elif eqn.primitive.name == "call_hi_primitive":
                # In JAX 0.12, some operations (searchsorted) are defined by others.
                (operation,) = eqn.params.values()
                avals = [v.aval for v in eqn.invars]
                outs = inline(jax.make_jaxpr(operation.expand)(*avals), ins)
            else:
                outs = [next(slots) for _ in eqn.outvars]
                steps.append(_Step(eqn, ins, outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [slot(v) for v in jaxpr.outvars]

    inputs = [next(slots) for _ in closed.in_avals]
    outputs = inline(closed, inputs)
    # Some equations are needed only for derivatives. XLA drops them as well.
    needed, retained, seconds = set(outputs), [], 0.0
    for step in reversed(steps):
        if needed.intersection(step.outputs):
            # No later equation needs these values. NumPy uses their memory again, which
            # is much faster than new memory.
            dead = {*step.inputs, *step.outputs} - needed - constants.keys()
            needed.update(step.inputs)
            run, time = _program(step.eqn)
            several = step.eqn.primitive.multiple_results
            retained.append((run, step.inputs, step.outputs, several, tuple(dead)))
            seconds += time
    retained.reverse()
    start = [constants.get(slot) for slot in range(next(slots))]

    def run_all(*args: np.ndarray) -> list[Any]:
        values = start.copy()
        for slot, x in zip(inputs, args, strict=True):
            values[slot] = x
        for fn, ins, outs, several, dead in retained:
            result = fn(*[values[slot] for slot in ins])
            if several:
                for slot, x in zip(outs, result, strict=True):
                    values[slot] = x
            else:
                values[outs[0]] = result
            for slot in dead:
                values[slot] = None
        return [values[slot] for slot in outputs]

    return Program(run_all, seconds)


def _program(eqn: jex.JaxprEqn) -> Program:
    """A function that evaluates a jaxpr's equation, and an estimate of its time."""
    name = eqn.primitive.name
    if name in _CONTROL:
        return _CONTROL[name](eqn.params)
    if name not in RULES:
        raise NotEvaluatedError(name)
    avals: Any = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    for x in avals:
        # NumPy has no bfloat16 and no typed keys. SciPy's functions of float16 return
        # float32.
        if getattr(x.dtype, "kind", "V") not in "biufc" or x.dtype == np.float16:
            raise NotEvaluatedError(f"{name} of {x.dtype}")
        # NumPy has no maximum of an empty array, and cannot reshape one by −1.
        if 0 in x.shape and name in ("reduce_max", "reduce_min", "dot_general"):
            raise NotEvaluatedError(f"{name} of an empty array")
    if name == "bitcast_convert_type" and avals[0].shape != avals[1].shape:
        raise NotEvaluatedError("bitcast between dtypes of different widths")
    entries = sum(math.prod(x.shape) for x in avals[len(eqn.invars) :])
    seconds = _OPERATION + _ENTRY * entries
    if name == "dot_general":
        (axes, _), _ = eqn.params["dimension_numbers"]
        multiplications = entries * math.prod(avals[0].shape[axis] for axis in axes)
        seconds += _PRODUCT * multiplications
    return Program(RULES[name](eqn.params), seconds)


def _while(params: Mapping[str, Any]) -> Program:
    cond, before = _sequence(params["cond_jaxpr"])
    body, inside = _sequence(params["body_jaxpr"])
    first, second = params["cond_nconsts"], params["body_nconsts"]

    def loop(*args: np.ndarray) -> Sequence[np.ndarray]:
        for_cond, args = args[:first], args[first:]
        for_body, state = args[:second], args[second:]
        # A batch of loops runs until all loops have ended. The state of a loop that has
        # ended does not change.
        while (goes_on := cond(*for_cond, *state)[0]).any():
            after = body(*for_body, *state)
            if goes_on.ndim:
                after = [
                    np.where(_pad_axes(goes_on, np.ndim(x)), y, x)
                    for x, y in zip(state, after, strict=True)
                ]
            state = after
        return state

    return Program(loop, _TRIPS * (before + inside))


def _pad_axes(x: np.ndarray, ndim: int) -> np.ndarray:
    """The array x, with axes of length 1 added at the end to make `ndim` axes."""
    return x.reshape(*x.shape, *[1] * (ndim - x.ndim))


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried arrays of `jax.lax.scan`.

    `params` has the parameters of the scan's equation in a jaxpr.
    """
    if "ft_in" in params:  # JAX 0.11 and later.
        consts, carried, _ = params["ft_in"].unpack()
        return len(list(consts)), len(list(carried))
    return params["num_consts"], params["num_carry"]


def _scan(params: Mapping[str, Any]) -> Program:
    (body, seconds), length = _sequence(params["jaxpr"]), params["length"]
    first, carried = scan_sizes(params)
    order = range(length)[:: -1 if params["reverse"] else 1]
    made = params["jaxpr"].out_avals[carried:]

    def loop(*args: np.ndarray) -> Sequence[np.ndarray]:
        consts, state, rows = args[:first], args[first:], args[first + carried :]
        state = state[:carried]
        stacks = [np.empty((length, *aval.shape), aval.dtype) for aval in made]
        for i in order:
            out = body(*consts, *state, *[x[i] for x in rows])
            state = out[:carried]
            for stack, y in zip(stacks, out[carried:], strict=True):
                stack[i] = y
        return [*state, *stacks]

    return Program(loop, length * seconds)


def _cond(params: Mapping[str, Any]) -> Program:
    branches = [_sequence(branch) for branch in params["branches"]]
    last = len(branches) - 1

    def choose(i: np.ndarray, *args: np.ndarray) -> Sequence[np.ndarray]:
        return branches[min(max(int(i), 0), last)].run(*args)

    return Program(choose, max(branch.seconds for branch in branches))


# Operations that call a jaxpr.
_CALLS = "jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call"
# The rules of loops and branches, by the operation's name.
_CONTROL: dict[str, Callable[[Mapping[str, Any]], Program]] = {
    "while": _while,
    "scan": _scan,
    "cond": _cond,
}
