"""Proofs that outputs of a jaxpr are zero if all arrays are finite.

If a loss is called on one example at a time, some gradients may be zero for all
examples. For instance, in a batch of one example x, both x − mean(x) and the
log-softmax over the batch are zero.

This module evaluates a jaxpr symbolically, and compiles and runs no program. Each array
is represented by a term, which is a constant or the name of an unknown array. If two
equations apply the same operation to the same terms, their outputs have the same name.
So x − x is recognized as zero. All entries of unknown arrays are assumed to be finite.
If an entry is not finite, the gradient of the example is usually not finite either, and
then contributes nothing to the sum of gradients.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from dpjax._core.interpret import scan_sizes
from dpjax._core.numpy_rules import RULES
from dpjax.clipping._bookkeeping.equations import aval, evaluate


class Term(NamedTuple):
    """The symbolic value of an array: a number times an array with a name.

    Two arrays with the same name have the same entries, but may differ in their axes of
    size one.

    Attributes:
      factor: the number; 1 or −1 if `name` is not None.
      name: the name of the array; None for an array of ones.
    """

    factor: float
    name: int | None = None

    @property
    def is_constant(self) -> bool:
        """Whether the term is a constant: all entries of the array equal `factor`."""
        return self.name is None

    def negative(self) -> "Term":
        """The term of the array with the opposite sign."""
        return self._replace(factor=-self.factor)


ZERO, ONE = Term(0.0), Term(1.0)

# Primitives that call a jaxpr. The equations of this jaxpr are evaluated in place.
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"})
# Primitives that move, repeat or reduce entries. A constant array stays constant. An
# unknown array is unchanged only if no entry moves or is dropped (see `_layout_term`).
_LAYOUTS = frozenset(
    {
        *("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "rev"),
        *("slice", "dynamic_slice", "gather", "reduce_sum", "reduce_max", "reduce_min"),
        *("copy", "stop_gradient", "reshard", "convert_element_type"),
    }
)
# Primitives whose output is zero if one of the first two inputs is zero.
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
# Primitives with f(−x) = −f(x) in each input, so that signs can be moved to the output.
_ODD = _PRODUCTS | {"div", "broadcast_in_dim", "reduce_sum", "transpose", "slice"}


def are_outputs_zero(closed: jex.ClosedJaxpr) -> list[bool]:
    """Tell for each output of a jaxpr whether it is proven to be zero.

    True means that the output is zero for all inputs for which every intermediate array
    is finite. False means only that this module does not prove that the output is zero.
    """
    evaluator = _Evaluator()
    inputs = [evaluator.new() for _ in closed.in_avals]
    return [term == ZERO for term in evaluator.evaluate(closed, inputs)]


class _Evaluator:
    """A symbolic evaluator of jaxprs.

    The evaluator gives a name to each unknown array. A jaxpr and the jaxprs inside its
    equations share one dictionary of names.
    """

    def __init__(self) -> None:
        self._names: dict[Hashable, int] = {}

    def new(self) -> Term:
        """Return the symbolic value of an unknown array, with a new name."""
        return self._named_term(object())  # which equals no other object

    def _named_term(self, operation: Hashable) -> Term:
        return Term(1, self._names.setdefault(operation, len(self._names)))

    def evaluate(self, closed: jex.ClosedJaxpr, inputs: Any) -> list[Term]:
        """Evaluate a jaxpr symbolically, and return the `Term` of each output."""
        apply: Any = self._apply
        return [self._term_of(x) for x in evaluate(closed, inputs, apply)]

    def _term_of(self, value: Any) -> Term:
        """Return the symbolic value of a number or array; return a `Term` unchanged."""
        if isinstance(value, Term):
            return value
        literal = not isinstance(value, jax.Array)
        if literal and np.size(value) == 1 and np.isrealobj(value):
            return Term(np.asarray(value).item())
        # The same array object has the same term in all jaxprs that close over it.
        return self._named_term(("array", id(value)))

    def _apply(self, eqn: jex.JaxprEqn, values: list[Any]) -> list[Term]:
        """Evaluate an equation symbolically, and return the `Term` of each output."""
        name, inputs = eqn.primitive.name, [self._term_of(x) for x in values]
        if name in _CALLS or name.startswith("custom_jvp"):
            body: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            # jit has a ClosedJaxpr. A checkpoint has a Jaxpr without constants.
            if not isinstance(body, jex.ClosedJaxpr):
                body = jex.ClosedJaxpr(body, ())
            return self.evaluate(body, inputs)
        if name == "scan":
            return self._apply_scan(eqn, inputs)
        if name == "cond":
            # The first input selects the branch. If all branches give the same term for
            # an output, the output has this term.
            branches = [self.evaluate(b, inputs[1:]) for b in eqn.params["branches"]]
            cases = zip(*branches, strict=True)
            return [x[0] if len(set(x)) == 1 else self.new() for x in cases]
        if name == "optimization_barrier":
            return inputs
        if len(eqn.outvars) == 1 and (term := _simplify(eqn, inputs)) is not None:
            return [term]
        return self._result_terms(eqn, inputs)

    def _apply_scan(self, eqn: jex.JaxprEqn, inputs: list[Term]) -> list[Term]:
        """Evaluate a scan symbolically, and return the `Term` of each output.

        An output is a constant only if it is the same constant in every iteration. The
        method assumes at first that every constant in the initial carry stays the same
        in all iterations. The method then evaluates an iteration, and drops the
        assumptions that the iteration contradicts, until no assumption is contradicted.
        """
        consts, carry = scan_sizes(eqn.params)
        fixed = inputs[:consts]
        # An unknown carry differs from iteration to iteration, and so does a slice of a
        # scanned input. So the carry needs another name than its initial value, and the
        # slice another name than the whole array.
        varying = [x if x.is_constant else self.new() for x in inputs[consts:]]
        while True:
            outputs = self.evaluate(eqn.params["jaxpr"], [*fixed, *varying])
            carried = enumerate(zip(varying[:carry], outputs[:carry], strict=True))
            changed = [i for i, (x, y) in carried if x.is_constant and x != y]
            if not changed:
                # A carried output is a constant if it is constant in every iteration.
                results = [*varying[:carry], *outputs[carry:]]
                return [x if x.is_constant else self.new() for x in results]
            for i in changed:
                varying[i] = self.new()

    def _result_terms(self, eqn: jex.JaxprEqn, inputs: Sequence[Term]) -> list[Term]:
        """Give names to the outputs of an equation, and return the outputs' terms.

        A name stands for the operation with its parameters and inputs. So if two
        equations apply the same operation to the same inputs, their outputs have the
        same names. But an equation whose parameters are not hashable shares no name
        with another equation.
        """
        name, sign = eqn.primitive.name, 1
        # Integer division has no sign rule: the smallest integer is its own negative.
        dtype = aval(eqn.outvars[0]).dtype
        if name in _ODD and (name != "div" or jnp.issubdtype(dtype, jnp.inexact)):
            # (−x) · y and x · (−y) get one name and the sign −1.
            sign = math.prod(x.factor for x in inputs if not x.is_constant)
            inputs = [x if x.is_constant else x._replace(factor=1) for x in inputs]
        try:
            params: Hashable = tuple(sorted(eqn.params.items()))
            hash(params)
        except TypeError:
            params = id(eqn)  # unhashable parameters: no other equation has this name
        # Names ignore axes of size one, but the result of an operation depends on them.
        types = [(aval(v).shape, aval(v).dtype) for v in eqn.invars]
        typed = list(zip(inputs, types, strict=True))
        if name in {"mul", "add", "add_any"}:
            typed.sort(key=repr)  # x + y and y + x get one name
        operation = (name, params, *typed)
        return [
            self._named_term((*operation, i))._replace(factor=sign)
            for i in range(len(eqn.outvars))
        ]


def _simplify(eqn: jex.JaxprEqn, inputs: Sequence[Term]) -> Term | None:
    """Simplify an equation with one output by algebra, such as x − x = 0 or 1 · x = x.

    Args:
      eqn: the equation.
      inputs: the symbolic values of the equation's inputs.

    Returns:
      The symbolic value of the output; None if no simplification applies.
    """
    name, out = eqn.primitive.name, aval(eqn.outvars[0])
    if name in _LAYOUTS:
        return _layout_term(eqn, inputs)
    values = [x.factor for x in inputs if x.is_constant]
    shapes = [aval(v).shape for v in eqn.invars]
    if inputs and len(values) == len(inputs) and {*shapes} <= {(), out.shape}:
        dtypes = [aval(v).dtype for v in eqn.invars]
        arrays = map(np.asarray, values, dtypes)
        constant = _constant(lambda *xs: RULES[name](eqn.params)(*xs), *arrays)
        if constant is not None:
            return constant
    # 0 · x = 0, since unknown entries are assumed to be finite.
    if name in _PRODUCTS and ZERO in inputs[:2]:
        return ZERO
    if name == "div" and not jnp.issubdtype(out.dtype, jnp.floating):
        return None  # division of integers truncates
    if name == "div" and inputs[0] == ZERO:
        return ZERO
    if len(inputs) == 2:
        # x[:, None] − x[None] is not zero although both inputs have the name of x,
        # since their axes of size one differ. So the shapes must agree.
        pairs = zip(shapes, inputs, strict=True)
        agree = all(shape == out.shape for shape, x in pairs if not x.is_constant)
        return _simplify_pair(name, *inputs) if out.size == 1 or agree else None
    if name == "neg" and not inputs[0].is_constant:
        return inputs[0].negative()
    if name == "is_finite":  # unknown entries are assumed to be finite
        return ONE
    # Positions along an axis of size one are 0.
    if name == "iota" and out.size == 1:
        return ZERO
    if name == "select_n":
        branch, *cases = inputs
        if branch.is_constant:
            return cases[int(branch.factor)]
        return cases[0] if len(set(cases)) == 1 else None
    if name.startswith("scatter-add"):  # the gradient of indexing
        array, indices, updates = inputs
        if updates == ZERO:
            return array
        sizes = aval(eqn.invars[0]).size, aval(eqn.invars[2]).size
        # Adding an update at index 0 of a zero array of size 1 gives the update.
        return updates if array == indices == ZERO and sizes == (1, 1) else None
    return None


def _constant(function: Callable[..., Any], *arrays: np.ndarray) -> Term | None:
    """Apply a function to arrays without axes, and return the result as a constant.

    The result is None if the function raises, or returns a complex number or an array
    with axes.
    """
    try:
        with np.errstate(all="ignore"):
            value = np.asarray(function(*arrays))
    except (ArithmeticError, LookupError, NotImplementedError, TypeError, ValueError):
        return None  # for example, the operation needs an axis
    return Term(value.item()) if not value.shape and np.isrealobj(value) else None


def _simplify_pair(name: str, x: Term, y: Term) -> Term | None:
    """Simplify an operation on two arrays by algebra, such as x − x = 0 or 1 · x = x.

    Args:
      name: the name of the primitive.
      x: the symbolic value of the first array.
      y: the symbolic value of the second array.

    Returns:
      The symbolic value of the result; None if no simplification applies.
    """
    if name == "sub":
        name, y = "add", y.negative()
    if name in {"add", "add_any"}:
        if x == y.negative():
            return ZERO
        return y if x == ZERO else x if y == ZERO else None
    if name == "mul":
        return y if x == ONE else x if y == ONE else None
    if name == "div":
        return ONE if x == y else x if y == ONE else None
    if name in {"max", "min"}:
        neutral = Term(-math.inf if name == "max" else math.inf)
        return y if x in (neutral, y) else x if y == neutral else None
    return None


def _layout_term(eqn: jex.JaxprEqn, inputs: Sequence[Term]) -> Term | None:
    """Simplify an equation that moves, repeats, reduces or converts entries.

    Args:
      eqn: the equation.
      inputs: the symbolic values of the equation's inputs.

    Returns:
      The symbolic value of the output if the output is a constant, or equals the first
      input except for axes of size one. Otherwise the result is None.
    """
    name, x = eqn.primitive.name, inputs[0]
    before, after = aval(eqn.invars[0]), aval(eqn.outvars[0])
    if name == "gather" and inputs[1] != ZERO:
        return None  # an index out of range may give a fill value
    if name == "convert_element_type":
        return _convert_term(before.dtype, after.dtype, x)
    if x.is_constant:
        if name == "reduce_sum":
            # The number of equal entries in each sum.
            count = before.size // max(after.size, 1)
            entry = np.asarray(x.factor, before.dtype)
            return _constant(lambda entry: entry * count, entry)
        return x
    if before.size != after.size:
        return None
    if after.size == 1:
        return x
    # The axes with more than one entry must keep their order and their sizes.
    if name in {"rev", "gather", "transpose"}:
        return None
    same = [n for n in after.shape if n != 1] == [n for n in before.shape if n != 1]
    return x if same else None


def _convert_term(before: np.dtype, after: np.dtype, x: Term) -> Term | None:
    """Simplify the conversion of an array from one dtype to another.

    If x is a constant, the result is the converted constant. The result is None if the
    new dtype is complex, or is an integer dtype that cannot represent the constant. If
    x is unknown, the result is x for a conversion from a float dtype to an equal or
    wider float dtype, and None otherwise.

    Args:
      before: the dtype of the array.
      after: the dtype of the converted array.
      x: the symbolic value of the array.
    """
    if x.is_constant:
        value = _constant(lambda x: x.astype(after), np.asarray(x.factor, before))
        # NumPy and XLA may differ where an integer dtype cannot represent the value.
        return None if jnp.issubdtype(after, jnp.integer) and value != x else value
    # Only a conversion to an equal or wider float dtype leaves all values unchanged.
    floats = all(jnp.issubdtype(d, jnp.floating) for d in (before, after))
    return x if floats and jnp.promote_types(before, after) == after else None
