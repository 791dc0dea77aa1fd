"""Find the values of a jaxpr through which the loss is differentiated.

A value is *live* when its tangent may enter the loss. A loss often computes other
values too: quantities for logging, outputs of a scan that nothing reads, values behind
`stop_gradient`. JAX does not differentiate such values. The engine must not add taps to
them either: the tap's cotangent would be zero, and zero times an infinite derivative is
NaN.
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

    For an equation other than a scan, every output counts as depending on all inputs.

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

    The live outputs are those of the scan itself, and the carried values that a later
    iteration needs for them.
    """
    consts, carry = scan_sizes(eqn)
    body = eqn.params["jaxpr"].jaxpr
    outputs = set(live_outputs(eqn, live))
    # A carried value may become live only through another one, hence a fixed point.
    while True:
        within = live_variables(body, outputs)
        carried = {i for i in range(carry) if body.invars[consts + i] in within}
        if carried <= outputs:
            return tuple(sorted(outputs))
        outputs |= carried


def _add_real(live: set[jex.Var], atoms: Iterable[Atom]) -> None:
    """Add to `live` those atoms that are variables of a dtype with tangents."""
    live.update(
        v
        for v in atoms
        if isinstance(v, jex.Var) and jnp.issubdtype(aval(v).dtype, jnp.inexact)
    )
