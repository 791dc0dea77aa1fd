"""Which outputs of a jaxpr are zero whatever its inputs, read off its equations.

A loss that is called on one example at a time may train less than its author believes:
in a batch of one, x − mean(x) is zero, and so is the log-softmax over the batch. Here
arrays are evaluated as terms. Equal computations of equal terms have equal names, so
that x − x is recognized as zero. Unknown entries are taken to be finite: an example
with others contributes nothing, as its gradient is not finite. Nothing is compiled or
run.
"""

import itertools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import Atom
from dpjax.clipping.bookkeeping.jaxpr.equations import aval, scan_sizes


class Constant(NamedTuple):
    """An array whose entries all have this value."""

    value: float


class Unknown(NamedTuple):
    """An unknown array. Equal names mean equal entries, up to sign and unit axes."""

    name: int
    sign: int = 1


Term = Constant | Unknown
ZERO = Constant(0.0)

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"})
# A constant array stays constant; another stays the same if no entry moves or goes.
_LAYOUTS = frozenset(
    {
        *("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "rev"),
        *("slice", "dynamic_slice", "gather", "reduce_sum", "reduce_max", "reduce_min"),
        *("reduce_prod", "copy", "stop_gradient", "reshard", "convert_element_type"),
    }
)
# If one of the first two inputs is zero, so is the output.
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
# f(−x) = −f(x) in each input.
_ODD = _PRODUCTS | {"div", "broadcast_in_dim", "reduce_sum", "transpose", "slice"}
# Floats have another result than integers, or bits than booleans.
_INEXACT = frozenset({"div", "exp", "pow", "integer_pow", "rsqrt", "sqrt", "tanh"})
_LOGICAL = frozenset({"and", "not", "or"})
_OF_CONSTANTS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "add": operator.add,
    "add_any": operator.add,
    "and": lambda x, y: bool(x) and bool(y),
    "div": operator.truediv,
    "exp": math.exp,
    "expm1": math.expm1,
    "is_finite": math.isfinite,
    "log": math.log,
    "log1p": math.log1p,
    "max": max,
    "min": min,
    "mul": operator.mul,
    "neg": operator.neg,
    "not": operator.not_,
    "or": lambda x, y: bool(x) or bool(y),
    "pow": operator.pow,
    "sign": np.sign,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sqrt": math.sqrt,
    "square": lambda x: x * x,
    "sub": operator.sub,
    "tanh": math.tanh,
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


def are_outputs_zero(closed: jex.ClosedJaxpr) -> list[bool]:
    """Whether each output is zero whatever the inputs; False if not recognized."""
    terms = _Terms()
    inputs = [terms.new() for _ in closed.in_avals]
    return [term == ZERO for term in terms.evaluate(closed, inputs)]


class _Terms:
    """The terms of one jaxpr and of the jaxprs that it calls."""

    def __init__(self) -> None:
        self._names: dict[Hashable, int] = {}
        self._unique = itertools.count()

    def new(self) -> Unknown:
        """An array of which nothing is known."""
        return self._named(("new", next(self._unique)))

    def _named(self, made: Hashable) -> Unknown:
        return Unknown(self._names.setdefault(made, len(self._names)))

    def evaluate(self, closed: jex.ClosedJaxpr, inputs: Sequence[Term]) -> list[Term]:
        """The terms of a jaxpr's outputs."""
        jaxpr = closed.jaxpr
        terms: dict[jex.Var, Term] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            terms[var] = self._named(("constant", id(const)))

        def read(atom: Atom) -> Term:
            return self._literal(atom) if isinstance(atom, jex.Literal) else terms[atom]

        for eqn in jaxpr.eqns:
            outputs = self._apply(eqn, [read(v) for v in eqn.invars])
            terms.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _literal(self, literal: jex.Literal) -> Term:
        value = np.asarray(literal.val)
        if value.size == 1 and np.isrealobj(value):
            return Constant(float(value.item()))
        return self._named(("literal", id(literal.val)))

    def _apply(self, eqn: jex.JaxprEqn, inputs: list[Term]) -> list[Term]:
        """The terms of an equation's outputs."""
        name = eqn.primitive.name
        if name in _CALLS or name.startswith("custom_jvp"):
            body: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if not isinstance(body, jex.ClosedJaxpr):
                body = jex.ClosedJaxpr(body, ())
            return self.evaluate(body, inputs)
        if name == "scan":
            return self._apply_scan(eqn, inputs)
        if name == "cond":
            branches = [self.evaluate(b, inputs[1:]) for b in eqn.params["branches"]]
            cases = zip(*branches, strict=True)
            return [x[0] if len(set(x)) == 1 else self.new() for x in cases]
        if name == "optimization_barrier":
            return inputs
        if len(eqn.outvars) == 1 and (term := _simplify(eqn, inputs)) is not None:
            return [term]
        return self._computed(eqn, inputs)

    def _apply_scan(self, eqn: jex.JaxprEqn, inputs: list[Term]) -> list[Term]:
        """The terms of a scan's outputs; constant only if so in every iteration."""
        consts, carry = scan_sizes(eqn)
        fixed = inputs[:consts]
        varying = [
            x if isinstance(x, Constant) else self.new() for x in inputs[consts:]
        ]
        while True:
            outputs = self.evaluate(eqn.params["jaxpr"], [*fixed, *varying])
            changed = [
                i
                for i in range(carry)
                if isinstance(varying[i], Constant) and varying[i] != outputs[i]
            ]
            if not changed:
                # A carried array is known if it is the same constant at every step.
                known = [*varying[:carry], *outputs[carry:]]
                return [x if isinstance(x, Constant) else self.new() for x in known]
            for i in changed:
                varying[i] = self.new()

    def _computed(self, eqn: jex.JaxprEqn, inputs: Sequence[Term]) -> list[Term]:
        """One name for all equations that apply one operation to the same terms."""
        name, sign = eqn.primitive.name, 1
        if name in _ODD:
            sign = math.prod(x.sign for x in inputs if isinstance(x, Unknown))
            inputs = [
                x._replace(sign=1) if isinstance(x, Unknown) else x for x in inputs
            ]
        try:
            params: Hashable = tuple(sorted(eqn.params.items()))
            hash(params)
        except TypeError:
            params = id(eqn)
        types = [(aval(v).shape, aval(v).dtype) for v in eqn.invars]
        typed = list(zip(inputs, types, strict=True))
        if name in {"mul", "add", "add_any"}:
            typed.sort(key=repr)
        made = (name, params, tuple(typed))
        return [
            self._named((*made, i))._replace(sign=sign) for i in range(len(eqn.outvars))
        ]


def _simplify(eqn: jex.JaxprEqn, inputs: Sequence[Term]) -> Term | None:
    """The term of an equation's one output, or None where it needs a name."""
    name, dtype = eqn.primitive.name, aval(eqn.outvars[0]).dtype
    if name in _LAYOUTS:
        return _lay_out(eqn, inputs)
    if name in _PRODUCTS and ZERO in inputs[:2]:
        return ZERO
    if name in _INEXACT and not jnp.issubdtype(dtype, jnp.floating):
        return None
    if name in _LOGICAL and dtype != jnp.bool_:
        return None
    if name == "div" and inputs[0] == ZERO:
        return ZERO
    values = [x.value for x in inputs if isinstance(x, Constant)]
    if len(values) == len(inputs) and (name in _OF_CONSTANTS or name in _COMPARISONS):
        return _constant(dtype, (_OF_CONSTANTS | _COMPARISONS)[name], *values)
    if len(inputs) == 2:
        # x[:, None] − x[None] is no zero: its inputs differ in their axes of size one.
        shapes = [
            aval(v).shape
            for v, x in zip(eqn.invars, inputs, strict=True)
            if isinstance(x, Unknown)
        ]
        out = aval(eqn.outvars[0])
        if out.size == 1 or all(shape == out.shape for shape in shapes):
            return _simplify_pair(name, *inputs)
        return None
    if name == "neg" and isinstance(inputs[0], Unknown):
        return inputs[0]._replace(sign=-inputs[0].sign)
    if name == "is_finite":
        return Constant(1.0)
    if name == "integer_pow" and values:
        return _constant(dtype, operator.pow, values[0], eqn.params["y"])
    if name == "iota" and aval(eqn.outvars[0]).size == 1:
        return ZERO
    if name == "select_n":
        which, *cases = inputs
        if isinstance(which, Constant):
            return cases[int(which.value)]
        return cases[0] if len(set(cases)) == 1 else None
    if name == "concatenate" and len(set(inputs)) == 1 and values:
        return inputs[0]
    if name.startswith("scatter-add"):
        array, indices, updates = inputs
        if updates == ZERO:
            return array
        sizes = aval(eqn.invars[0]).size, aval(eqn.invars[2]).size
        alone = array == indices == ZERO and sizes == (1, 1)
        return updates if alone else None
    return None


def _constant(
    dtype: np.dtype, function: Callable[..., Any], *values: float
) -> Constant | None:
    """A function of numbers, or None where the dtype has another result or none."""
    try:
        value = float(function(*values))
    except (ArithmeticError, TypeError, ValueError):
        return None
    if not jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.bool_:
        # Integers wrap, and those beyond 2⁵³ are no floats of Python.
        if not (jnp.issubdtype(dtype, jnp.integer) and value.is_integer()):
            return None
        limits = jnp.iinfo(dtype)
        if not max(limits.min, -(2**53)) <= value <= min(limits.max, 2**53):
            return None
    return Constant(value)


def _simplify_pair(name: str, x: Term, y: Term) -> Term | None:
    """The term of a function of two arrays, at least one of them unknown."""
    negative = (
        y._replace(sign=-y.sign) if isinstance(y, Unknown) else Constant(-y.value)
    )
    if name == "sub":
        name, y, negative = "add", negative, y
    if name in {"add", "add_any"}:
        if x == negative:
            return ZERO
        return y if x == ZERO else x if y == ZERO else None
    if name == "mul":
        return y if x == Constant(1.0) else x if y == Constant(1.0) else None
    if name == "div":
        return Constant(1.0) if x == y else x if y == Constant(1.0) else None
    if name in {"max", "min"}:
        neutral = Constant(-math.inf if name == "max" else math.inf)
        return y if x in (neutral, y) else x if y == neutral else None
    if name in _COMPARISONS and x == y:
        return Constant(float(_COMPARISONS[name](0, 0)))
    if name in {"pad", "dynamic_update_slice"} and x == y == ZERO:
        return ZERO
    return None


def _lay_out(eqn: jex.JaxprEqn, inputs: Sequence[Term]) -> Term | None:
    """The term of entries that are moved, repeated, or reduced along some axes."""
    name, x = eqn.primitive.name, inputs[0]
    before, after = aval(eqn.invars[0]), aval(eqn.outvars[0])
    if name == "gather" and inputs[1] != ZERO:
        return None  # an index out of range may take a value from nowhere
    if name == "convert_element_type":
        return _convert(before.dtype, after.dtype, x)
    if isinstance(x, Constant):
        count = before.size // max(after.size, 1)
        if name == "reduce_sum":
            return _constant(after.dtype, operator.mul, x.value, count)
        if name == "reduce_prod":
            return _constant(after.dtype, operator.pow, x.value, count)
        return x
    if before.size != after.size:
        return None
    if after.size == 1:
        return x
    long = [i for i, n in enumerate(before.shape) if n != 1]
    if name == "transpose":
        order = [i for i in eqn.params["permutation"] if i in long]
        return x if order == long else None
    if name in {"rev", "gather"}:
        return None
    same = [n for n in after.shape if n != 1] == [before.shape[i] for i in long]
    return x if same else None


def _convert(before: np.dtype, after: np.dtype, x: Term) -> Term | None:
    """The term of an array in another dtype, if it has the same values there."""
    if isinstance(x, Constant):
        return _constant(
            after, lambda: bool(x.value) if after == jnp.bool_ else x.value
        )
    floats = all(jnp.issubdtype(d, jnp.floating) for d in (before, after))
    return x if floats and jnp.promote_types(before, after) == after else None
