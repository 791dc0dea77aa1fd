"""Read, evaluate and compare the equations of a jaxpr.

**Comparison.** A deep network repeats its layers, so that the same equations occur
with different variables. The engine jits functions whose static argument is a part of
the loss, such as an equation. JAX traces and lowers such a function once for all static
arguments that compare equal. `Comparable` compares parts without the names of
variables, so that JAX traces repeated parts only once.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar, cast

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._core.meshes import lets_compiler_decide
from dpjax._core.typing import ArrayLike, Arrays, Atom

EquationEvaluator: TypeAlias = Callable[[jex.JaxprEqn, Arrays], Arrays]

# The primitives of rematerialised blocks. A block that does not stay checkpointed is
# inlined: the values at its sites are recorded, and are not computed again.
_REMATERIALISED = frozenset({"remat", "remat2", "checkpoint"})
# The equation parameters that fix the sharding of the output along explicit axes.
_SHARDING_PARAMS = ("sharding", "out_sharding")


def bind(eqn: jex.JaxprEqn, values: Arrays, **changed: object) -> list[jax.Array]:
    """Evaluate one equation, with some of its parameters changed; return the outputs.

    An equation may fix shardings along explicit mesh axes. `bind` drops these shardings
    inside `let_compiler_shard`, where the compiler chooses shardings.

    Args:
      eqn: the equation.
      values: the values of the equation's inputs.
      **changed: the parameters to change, with their new values.
    """
    if eqn.primitive.name.startswith("custom_"):
        # A user's derivative rule may call methods that NumPy arrays do not have.
        values = as_arrays(values)
    context = contextlib.nullcontext()
    if lets_compiler_decide() and eqn.ctx.cur_abstract_mesh.explicit_axes:
        if eqn.primitive.name == "reshard":
            return list(values)
        changed |= {name: None for name in _SHARDING_PARAMS if name in eqn.params}
        context = jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    functions, params = params if isinstance(params, tuple) else ((), params)
    with eqn.ctx.manager, context:
        out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def aval(atom: Atom | jax.Array) -> jax.core.ShapedArray:
    """The shape, dtype and sharding of a variable, literal or array."""
    return cast(jax.core.ShapedArray, atom.aval)


def is_real(*arrays: Atom | jax.Array) -> bool:
    """Whether all arguments are arrays of real floating-point numbers."""
    return all(jnp.issubdtype(aval(x).dtype, jnp.floating) for x in arrays)


def is_inexact(*arrays: Atom | jax.Array) -> bool:
    """Whether all arguments are floating-point or complex, so may have cotangents."""
    return all(jnp.issubdtype(aval(x).dtype, jnp.inexact) for x in arrays)


def as_arrays(values: Sequence[ArrayLike]) -> list[jax.Array]:
    """Convert values, such as NumPy arrays or Python numbers, to JAX arrays."""
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in values]


def evaluate(
    closed: jex.ClosedJaxpr, inputs: Arrays, evaluate_equation: EquationEvaluator = bind
) -> list[jax.Array]:
    """Evaluate a jaxpr for the given inputs, and return the values of its outputs.

    `evaluate_equation` evaluates one equation, given the values of its inputs.
    """
    values = values_of_inputs(closed, inputs)
    for eqn in closed.jaxpr.eqns:
        out = evaluate_equation(eqn, [read(v, values) for v in eqn.invars])
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(v, values) for v in closed.jaxpr.outvars]


def values_of_inputs(
    closed: jex.ClosedJaxpr, inputs: Sequence[jax.Array | None]
) -> dict[jex.Var, jax.Array]:
    """A dict from a jaxpr's constants and inputs to their values.

    The dict omits an input if its value is None.
    """
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    pairs = zip(closed.jaxpr.invars, inputs, strict=True)
    return values | {v: x for v, x in pairs if x is not None}


def read(atom: Atom, values: Mapping[jex.Var, jax.Array]) -> jax.Array:
    """The value of a variable or a literal. A literal is a NumPy or Python number."""
    return atom.val if isinstance(atom, jex.Literal) else values[atom]


def is_rematerialised(eqn: jex.JaxprEqn) -> bool:
    """Whether the equation is a block of `jax.checkpoint`."""
    return eqn.primitive.name in _REMATERIALISED


def uses(eqns: Sequence[jex.JaxprEqn], primitive: str) -> bool:
    """Whether the equations, or the jaxprs inside them, use a primitive.

    Args:
      eqns: the equations.
      primitive: the beginning of the primitive's name.
    """
    return any(
        eqn.primitive.name.startswith(primitive)
        or any(uses(inner.eqns, primitive) for inner in inner_jaxprs(eqn))
        for eqn in eqns
    )


def inner_jaxprs(eqn: jex.JaxprEqn) -> Iterator[jex.Jaxpr]:
    """The jaxprs in an equation's parameters, such as bodies of scans and branches.

    A primitive of `jax.experimental.hijax` has a function in place of a jaxpr. The
    function is traced.
    """
    if eqn.primitive.name == "call_hi_primitive":
        body = functools.partial(eqn.primitive.to_lojax, **eqn.params)
        yield jax.make_jaxpr(body)(*(v.aval for v in eqn.invars)).jaxpr
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, jex.ClosedJaxpr):
                yield inner.jaxpr
            elif isinstance(inner, jex.Jaxpr):
                yield inner


class Describable(Protocol):
    """A part of a loss, such as an equation, with a description for `Comparable`."""

    def description(self) -> Hashable:
        """A description, equal only for parts that compute the same function.

        The description does not depend on the names of variables. If a parameter of an
        equation has no hash, the description has no hash either, and `Comparable`
        treats the part as equal to itself only.
        """
        ...


PartT = TypeVar("PartT", bound=Describable)


@dataclasses.dataclass(frozen=True, eq=False)
class Comparable(Generic[PartT]):
    """A wrapper of a part of a loss, for comparison with other parts.

    Wrappers are equal only if their parts compute the same function. They are equal if
    they wrap the same part, or if the descriptions of their parts, from `description`,
    are equal and have hashes.
    """

    part: PartT

    @functools.cached_property
    def _description(self) -> Hashable:
        """The part's description; the part's id if the description has no hash."""
        try:
            description = self.part.description()
            hash(description)
        except TypeError:  # A parameter of an equation has no hash.
            return id(self.part)
        return description

    def __eq__(self, other: object) -> bool:
        """Whether `other` wraps the same part, or a part with an equal description."""
        return isinstance(other, Comparable) and self._description == other._description

    def __hash__(self) -> int:
        """The hash of the part's description, or of the part's id."""
        return hash(self._description)


def describe_equation(eqn: jex.JaxprEqn) -> Hashable:
    """Describe an equation, but not its variables' names or its literals' values.

    The description has the equation's primitive, its parameters, the types of its
    inputs and outputs, and its context, such as its mesh.
    """
    types = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    params = [(name, _identify_parameter(x)) for name, x in sorted(eqn.params.items())]
    return (eqn.primitive, eqn.ctx, *types, *params)


def _identify_parameter(param: object) -> Hashable:
    """A value that is equal only for parameters with the same type and the same value.

    In Python, 0.0 equals −0.0, and 1 equals True. The results for these pairs differ,
    also inside tuples. But numbers inside other objects are compared as in Python.
    """
    if isinstance(param, tuple):
        return type(param), tuple(map(_identify_parameter, param))
    if isinstance(param, float | complex | np.generic):
        return type(param), np.asarray(param).tobytes()
    return type(param), param


def describe_function(
    inputs: Sequence[jex.Var], eqns: Sequence[jex.JaxprEqn], outs: Sequence[Atom]
) -> Hashable:
    """A description of the function that equations compute.

    The description does not depend on the names of variables.

    Args:
      inputs: the input variables.
      eqns: the equations, in order.
      outs: the outputs, which are variables or literals.
    """
    # Variables are numbered in order of appearance.
    names = {v: i for i, v in enumerate(inputs)}

    def name(atom: Atom) -> Hashable:
        if isinstance(atom, jex.Literal):
            # Compare bytes, because 0.0 == −0.0 and NaN != NaN.
            return atom.aval, np.asarray(atom.val).tobytes()
        return names[atom]

    lines = []
    for eqn in eqns:
        lines.append((describe_equation(eqn), *map(name, eqn.invars)))
        for v in eqn.outvars:
            names[v] = len(names)
    return tuple(v.aval for v in inputs), tuple(lines), tuple(map(name, outs))
