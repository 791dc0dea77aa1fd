"""Which values of a jaxpr the loss is differentiated through.

A value is *live* when its tangent may enter the loss. A loss often computes more than
that: quantities for logging, outputs of a scan that nothing reads, values behind
`stop_gradient`. JAX does not differentiate those, and they must not be tapped: a tap's
cotangent would be zero, and zero times an infinite derivative is NaN.
"""

from collections.abc import Iterable, Sequence

import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core.typing import Atom
from dpjax.clipping.bookkeeping.jaxpr.equations import aval, scan_sizes

# Primitives whose derivative is zero wherever it exists: JAX gives their outputs no
# tangent, although their dtype could carry one.
_FLAT = frozenset({"stop_gradient", "floor", "ceil", "round", "sign"})


def live_variables(jaxpr: jex.Jaxpr, outputs: Iterable[int]) -> set[jex.Var]:
    """The variables whose tangents may enter some outputs of a jaxpr.

    Every output of an equation other than a scan is taken to depend on all inputs.

    Args:
      jaxpr: the jaxpr.
      outputs: the indices of the outputs that are differentiated.
    """
    live: set[jex.Var] = set()
    _add_real(live, [jaxpr.outvars[i] for i in outputs])
    for eqn in reversed(jaxpr.eqns):
        if live.isdisjoint(eqn.outvars) or eqn.primitive.name in _FLAT:
            continue
        inputs: Sequence[Atom] = eqn.invars
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            within = live_variables(body, live_outputs_of_scan(eqn, live))
            pairs = zip(eqn.invars, body.invars, strict=True)
            inputs = [outer for outer, inner in pairs if inner in within]
        _add_real(live, inputs)
    return live


def live_outputs(eqn: jex.JaxprEqn, live: set[jex.Var]) -> tuple[int, ...]:
    """The indices of an equation's live outputs."""
    return tuple(i for i, var in enumerate(eqn.outvars) if var in live)


def live_outputs_of_scan(eqn: jex.JaxprEqn, live: set[jex.Var]) -> tuple[int, ...]:
    """The indices of the live outputs of a scan's body.

    They are the scan's own live outputs, and the carried values that a later iteration
    needs for these.
    """
    consts, carry = scan_sizes(eqn)
    body = eqn.params["jaxpr"].jaxpr
    outputs = set(live_outputs(eqn, live))
    while True:
        within = live_variables(body, outputs)
        carried = {i for i in range(carry) if body.invars[consts + i] in within}
        if carried <= outputs:
            return tuple(sorted(outputs))
        outputs |= carried


def _add_real(live: set[jex.Var], atoms: Iterable[Atom]) -> None:
    """Add the variables that can have a tangent."""
    live.update(
        v
        for v in atoms
        if isinstance(v, jex.Var) and jnp.issubdtype(aval(v).dtype, jnp.inexact)
    )
