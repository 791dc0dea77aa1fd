"""Bounds for the pull-back of gradients from operands to parameter leaves.

An operand is a value that is computed from parameter leaves alone, and that the loss
then combines with a value that depends on the example. A sum of gradients over the
batch can be pulled back from operands to parameter leaves in one step. Each example
then contributes the terms J_k g_k, where g_k is the example's gradient at operand k,
and J_k is the transposed Jacobian of the operand by the leaves. These terms may cancel.
Then the norm of the example's gradient does not bound the rounding errors of the terms,
nor the rounding errors that large terms cause in a partial sum over several examples.
Let |J_k| be the matrix that the computation of J_k gives if all its coefficients are
replaced by their absolute values. The size ‖|J_k||g_k|‖ of a term is at most ‖|J_k|‖
‖g_k‖, with the spectral norm ‖|J_k|‖. So a bound on ‖|J_k|‖ gives bounds on both kinds
of rounding errors.

If the maps J_k only move entries, ‖|J_k|‖ is at most 1. Some other maps have a
linearised program that only multiplies, adds and moves real numbers in float32 or
wider. The operations of this program round by the model in `_core.rounding`, and this
module bounds ‖|J_k|‖ by √(c r). Here c is the maximum column sum of |J_k|. Each leaf
has its own rows of |J_k|, and r is the sum over the leaves of the maximum row sum among
these rows. For all remaining maps, and for maps with more than `MAX_ROWS` operations,
the gradient of each example is pulled back separately.
"""

from typing import NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core.dtypes import at_least_float32, narrowest_float
from dpjax._core.typing import Arrays, Atom
from dpjax.clipping._bookkeeping import equations as eqs
from dpjax.clipping._bookkeeping.analysis.components import Component
from dpjax.clipping._bookkeeping.factors import MAX_ROWS
from dpjax.clipping._bookkeeping.tracing import inline

# Primitives that only multiply, add or move numbers once the map is linear.
_SUPPORTED = frozenset(
    {
        *("add", "add_any", "sub", "neg", "mul", "div", "reduce_sum", "select_n"),
        *("broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "rev"),
        *("concatenate", "convert_element_type", "copy"),
    }
)


class PullBackBounds(NamedTuple):
    """Bounds for the pull-back of gradients from operands to parameter leaves.

    An operand is a value that is computed from these leaves alone, and that the loss
    then combines with a value that depends on the example.

    Attributes:
      norms: for each operand k, an upper bound f[] of ‖|J_k|‖. Here J_k is the
        transposed Jacobian of the operand by the leaves, and |J_k| is computed from the
        absolute values of all coefficients.
      terms: an upper bound of the number of additions and products in the whole
        pull-back, where an operation on arrays counts as the operations for one entry.
        So `terms` also bounds the number of roundings between any entry of an operand
        and any entry of a leaf.
      dtype: the least precise dtype of the pull-back's computation.
    """

    norms: list[jax.Array | float]
    terms: int
    dtype: jnp.dtype


def bound_pull_back(component: Component, inputs: Arrays) -> PullBackBounds | None:
    """Bound the rounding errors of a pull-back of gradients to parameter leaves.

    Args:
      component: the parameter leaves, the operands (values that are computed from the
        leaves alone, and then combined with values that depend on the example), and the
        computation from leaves to operands.
      inputs: the values of the inputs of this computation, the leaves first.

    Returns:
      The bounds; None if this module has no bound for the pull-back.
    """
    if not component.leaves:
        return None
    # With roots the path only moves entries, so that every norm is 1. The terms are as
    # many as the operands, because several operands may add to one entry.
    if component.roots is not None:
        dtype = narrowest_float(x.dtype for x in inputs)
        return PullBackBounds(
            [1.0] * len(component.operands), len(component.operands), dtype
        )
    num_leaves = len(component.leaves)
    # The derivative rule of a custom_vjp need not be linear in the cotangent.
    if eqs.uses(component.path.eqns, "custom_vjp"):
        return None
    inputs, others = inputs[:num_leaves], inputs[num_leaves:]
    _, tangents = jax.linearize(component.forward(others, min_dtype=None), *inputs)
    all_true = [True] * len(inputs)
    linear = inline(jax.make_jaxpr(tangents)(*inputs), all_true, all_true)
    if not all(map(_is_supported, linear.jaxpr.eqns)) or not all(
        at_least_float32(x.dtype) == x.dtype for x in (*inputs, *linear.out_avals)
    ):
        return None
    terms = len(component.operands) + _count_operations(linear.jaxpr)
    if terms > MAX_ROWS:
        return None

    # |J| applied to ones gives the row sums, and its transpose gives the column sums.
    row_sums_of_operands = _absolute(linear, [jnp.ones_like(x) for x in inputs])
    norms = []
    for k, row_sums in enumerate(row_sums_of_operands):
        transpose = jax.linear_transpose(lambda *xs: _absolute(linear, xs)[k], *inputs)
        column_sums = transpose(jnp.ones_like(row_sums))
        maximum_sums = [jnp.max(x, initial=0.0) for x in (row_sums, *column_sums)]
        # The factor 1.05 covers the rounding errors of these sums.
        norms.append(1.05 * jnp.sqrt(maximum_sums[0]) * jnp.sqrt(sum(maximum_sums[1:])))
    jaxpr = linear.jaxpr
    atoms = [*jaxpr.invars, *jaxpr.constvars]
    atoms += [v for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars)]
    return PullBackBounds(
        norms, terms, narrowest_float(eqs.aval(v).dtype for v in atoms)
    )


def _is_supported(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name in _SUPPORTED and all(
        eqs.is_real(v) and at_least_float32(eqs.aval(v).dtype) == eqs.aval(v).dtype
        for v in (*eqn.invars, *eqn.outvars)
        if eqs.is_inexact(v)
    )


def _count_operations(linear: jex.Jaxpr) -> int:
    """The number of additions and products in the transpose of a linear map.

    A product of arrays counts as one product. The transpose of a broadcast sums the
    copies of each entry, and counts as the additions for one entry. The operations on
    all paths from inputs to outputs count. So the result bounds the number of
    operations between any entry of an input and any entry of an output.
    """
    uses = [v for eqn in linear.eqns for v in eqn.invars if isinstance(v, jex.Var)]
    # The transpose adds the cotangents of all uses of a variable, with one addition for
    # each use after the first.
    total = len(uses) - len(set(uses))
    for eqn in linear.eqns:
        if eqn.primitive.name in {"mul", "div"}:
            total += 1
        elif eqn.primitive.name == "broadcast_in_dim":
            # The transpose of a broadcast is a sum over the copies of each entry.
            operand, output = eqs.aval(eqn.invars[0]), eqs.aval(eqn.outvars[0])
            total += output.size // max(operand.size, 1) - 1
    return total


def _absolute(linear: jex.ClosedJaxpr, inputs: Arrays) -> list[jax.Array]:
    """Apply a linear map, with each coefficient replaced by its absolute value.

    Args:
      linear: the map's jaxpr.
      inputs: the values to which the map is applied.
    """
    dependent = set(linear.jaxpr.invars)

    def is_coefficient(atom: Atom) -> bool:
        # Coefficients are values that do not depend on the map's inputs. Integers and
        # booleans, such as the predicates of select_n, are not coefficients.
        is_constant = isinstance(atom, jex.Literal) or atom not in dependent
        return is_constant and eqs.is_real(atom)

    def evaluate_absolute(eqn: jex.JaxprEqn, inputs: Arrays) -> list[jax.Array]:
        absolute = [
            jnp.abs(x) if is_coefficient(v) else x
            for v, x in zip(eqn.invars, inputs, strict=True)
        ]
        dependent.update(eqn.outvars)
        # Negation has the coefficient -1, whose absolute value is 1.
        if eqn.primitive.name == "neg":
            return absolute
        if eqn.primitive.name == "sub":
            return [absolute[0] + absolute[1]]
        return eqs.bind(eqn, absolute)

    return eqs.evaluate(linear, inputs, evaluate_absolute)
