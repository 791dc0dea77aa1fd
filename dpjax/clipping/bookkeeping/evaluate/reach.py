"""How large the terms are of which a pull-back makes a gradient.

A sum over the batch that is pulled back from operands to leaves has for each example
the terms J_k g_k, g_k its gradient at operand k and J_k the transposed Jacobian. Where
they cancel, the example's gradient says little of what they round, or of what they
push out of the sum on the way. With |J| of absolute values, taken over all paths,
‖|J||g|‖ ≤ ‖|J|‖ ‖g‖ bounds both. Here is a bound of ‖|J|‖, the root of the largest row
sum times the largest column sum, for maps whose primitives are known to do no more than
multiply, add and move real numbers of float32 at least: these round by the model in
`_core.rounding`. Through any other, each example's gradient is pulled back on its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core.dtypes import at_least_float32, narrowest_float
from dpjax._core.typing import Atom
from dpjax.clipping.bookkeeping.analysis.components import Component
from dpjax.clipping.bookkeeping.jaxpr.collectives import uses
from dpjax.clipping.bookkeeping.jaxpr.equations import aval, bind
from dpjax.clipping.bookkeeping.jaxpr.trace import inline
from dpjax.clipping.bookkeeping.rules.factors import MOST_ROWS

_KNOWN = frozenset(
    {
        *("add", "add_any", "sub", "neg", "mul", "div", "reduce_sum", "select_n"),
        *("broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "rev"),
        *("concatenate", "convert_element_type", "copy"),
    }
)


class Reach(NamedTuple):
    """What a pull-back does to absolute values.

    Attributes:
      norms: for each operand, how much it enlarges their norm at most, f[].
      terms: of the sums that it takes, and its products.
      dtype: the least precise dtype of its computation.
    """

    norms: list[jax.Array | float]
    terms: int
    dtype: jnp.dtype


def reach(component: Component, inputs: Sequence[jax.Array]) -> Reach | None:
    """The reach of its path's `pull_back`, or None where its rounding is not known."""
    if not component.leaves:
        return None
    if component.roots is not None:
        dtype = narrowest_float(x.dtype for x in inputs)
        return Reach([1.0] * len(component.operands), len(component.operands), dtype)
    path, count = component.path, len(component.leaves)
    if uses(path.eqns, "custom_vjp"):  # whose derivatives need not be linear
        return None
    inputs, others = inputs[:count], inputs[count:]
    _, tangents = jax.linearize(path.forward(others, widen_casts=False), *inputs)
    everywhere = [True] * len(inputs)
    linear = inline(jax.make_jaxpr(tangents)(*inputs), everywhere, everywhere)
    if not all(map(_is_known, linear.jaxpr.eqns)) or not all(
        at_least_float32(x.dtype) == x.dtype for x in (*inputs, *linear.out_avals)
    ):
        return None
    terms = len(component.operands) + _terms(linear.jaxpr)
    if terms > MOST_ROWS:
        return None

    by_column = _absolute(linear, [jnp.ones_like(x) for x in inputs])
    norms = []
    for k, row_sums in enumerate(by_column):
        transpose = jax.linear_transpose(lambda *xs: _absolute(linear, xs)[k], *inputs)
        column_sums = transpose(jnp.ones_like(row_sums))
        largest = [jnp.max(x, initial=0.0) for x in (row_sums, *column_sums)]
        # A few percent for what these sums round.
        norms.append(1.05 * jnp.sqrt(largest[0]) * jnp.sqrt(sum(largest[1:])))
    jaxpr = linear.jaxpr
    atoms = [*jaxpr.invars, *jaxpr.constvars]
    atoms += [v for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars)]
    return Reach(norms, terms, narrowest_float(aval(v).dtype for v in atoms))


def _is_known(eqn: jex.JaxprEqn) -> bool:
    dtypes = [aval(v).dtype for v in (*eqn.invars, *eqn.outvars)]
    return eqn.primitive.name in _KNOWN and all(
        jnp.issubdtype(d, jnp.floating) and at_least_float32(d) == d
        for d in dtypes
        if jnp.issubdtype(d, jnp.inexact)
    )


def _terms(linear: jex.Jaxpr) -> int:
    """Of the transposed map's sums, and its products, all paths together."""
    uses = [v for eqn in linear.eqns for v in eqn.invars if isinstance(v, jex.Var)]
    # What is used several times has its uses' cotangents added.
    total = len(uses) - len(set(uses))
    for eqn in linear.eqns:
        if eqn.primitive.name in {"mul", "div"}:
            total += 1
        elif eqn.primitive.name == "broadcast_in_dim":
            total += aval(eqn.outvars[0]).size // max(aval(eqn.invars[0]).size, 1) - 1
    return total


def _absolute(linear: jex.ClosedJaxpr, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """A linear map with all its coefficients' absolute values."""
    jaxpr = linear.jaxpr
    values = dict(zip(jaxpr.constvars, linear.consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))
    linear_in = set(jaxpr.invars)

    def read(atom: Atom) -> jax.Array:
        value = atom.val if isinstance(atom, jex.Literal) else values[atom]
        known = isinstance(atom, jex.Literal) or atom not in linear_in
        real = known and jnp.issubdtype(aval(atom).dtype, jnp.floating)
        return jnp.abs(value) if real else value

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        if eqn.primitive.name == "neg":
            out = inputs
        elif eqn.primitive.name == "sub":
            out = [inputs[0] + inputs[1]]
        else:
            out = bind(eqn, inputs)
        values.update(zip(eqn.outvars, out, strict=True))
        linear_in.update(eqn.outvars)
    return [read(v) for v in jaxpr.outvars]
