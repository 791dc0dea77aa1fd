"""Evaluate a loss with taps added at its sites, and evaluate the sites' operands."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import jax.extend.core as jex

from dpjax._core.meshes import plus
from dpjax._core.typing import Atom
from dpjax.clipping.bookkeeping.analysis.sites import KeptSite, RuledSite, Scope, Site
from dpjax.clipping.bookkeeping.evaluate.segments import passes, stretches
from dpjax.clipping.bookkeeping.jaxpr.equations import (
    bind,
    read,
    scan_sizes,
    select_needed,
)


def operands(scope: Scope, inputs: Sequence[jax.Array | None]) -> list[jax.Array]:
    """The values of the sites' operands, in the order of `scope.all_sites()`.

    An operand in a scan's body may differ between iterations. Its value then holds all
    iterations: it has one leading axis for each scan between whose iterations the
    operand differs, the outermost scan first.

    Args:
      scope: the jaxpr and its sites, from the analysis.
      inputs: for each input of the scope that is batch-invariant its value, with the
        same leading axes; None for the other inputs.
    """
    jaxpr = scope.closed.jaxpr
    # All operands, and the batch-invariant inputs of scans that have sites inside.
    wanted: list[Atom] = []
    for index, eqn in enumerate(jaxpr.eqns):
        wanted += [site.operand for site in scope.sites.get(index, {}).values()]
        if index in scope.scans:
            wanted += [v for v in eqn.invars if scope.steps_of(v) is not None]
    wanted += [site.operand for site in scope.outputs.values()]

    values: dict[jex.Var, jax.Array] = dict(
        zip(jaxpr.constvars, scope.closed.consts, strict=True)
    )
    for var, value in zip(jaxpr.invars, inputs, strict=True):
        if value is not None:
            values[var] = value
    for eqn in select_needed(jaxpr.eqns, wanted):
        out = _in_all_iterations(scope, eqn)(*(read(v, values) for v in eqn.invars))
        values.update(zip(eqn.outvars, out, strict=True))

    found = []
    for index, eqn in enumerate(jaxpr.eqns):
        found += [values[s.operand] for s in scope.sites.get(index, {}).values()]
        if index in scope.scans:
            body = scope.scans[index]
            entering = [v in body.steps for v in body.closed.jaxpr.invars]
            found += operands(
                body,
                [
                    read(v, values) if is_known else None
                    for v, is_known in zip(eqn.invars, entering, strict=True)
                ],
            )
    return [*found, *(values[site.operand] for site in scope.outputs.values())]


def _in_all_iterations(
    scope: Scope, eqn: jex.JaxprEqn
) -> Callable[..., list[jax.Array]]:
    """A batch-invariant equation, mapped over the scans in which its inputs vary."""

    def function(*inputs: jax.Array) -> list[jax.Array]:
        return bind(eqn, inputs)

    # The innermost scan is mapped first, so the outermost scan's axis ends up leading.
    steps = [scope.steps_of(v) or frozenset() for v in eqn.invars]
    for depth in sorted(frozenset().union(*steps), reverse=True):
        function = jax.vmap(function, [0 if depth in s else None for s in steps])
    return function


# The outputs, and by a site's number the values of its equation's inputs except the
# operand.
Ran = tuple[list[jax.Array], dict[int, tuple[jax.Array, ...]]]


class AtBlock(Protocol):
    """A function that evaluates a checkpointed block for one example.

    It takes the block's sites, the values of the block's inputs, and the tap at each
    site. It returns the block's outputs.
    """

    def __call__(
        self,
        sites: Sequence[KeptSite],
        inputs: Sequence[jax.Array],
        taps: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """The block's outputs for one example."""
        ...


def run(
    scope: Scope,
    inputs: Sequence[jax.Array],
    taps: Mapping[int, jax.Array],
    numbers: Mapping[Site, int],
    at_block: AtBlock | None = None,
) -> Ran:
    """Evaluate a scope for one example.

    Under vmap, batch-invariant values stay unmapped. In a scan, a batch-invariant value
    is computed in the iteration that needs it, as in the loss itself.

    Args:
      scope: the jaxpr and its sites, from the analysis.
      inputs: the values of the jaxpr's inputs, in one iteration of the scans around it.
      taps: by a site's number, the array to add at the site.
      numbers: the number of each site.
      at_block: the function that evaluates checkpointed blocks; None without any.

    Returns:
      The outputs, and for each site with a rule, by its number, the values of the
      equation's inputs except the operand.
    """
    jaxpr = scope.closed.jaxpr
    values: dict[jex.Var, jax.Array] = dict(
        zip(jaxpr.constvars, scope.closed.consts, strict=True)
    )
    values.update(zip(jaxpr.invars, inputs, strict=True))
    records: dict[int, tuple[jax.Array, ...]] = {}
    found = stretches(scope)
    for stretch, function in zip(found, passes(found), strict=True):
        body = scope.scans.get(stretch.start)
        if body is not None and body.all_sites():
            (eqn,), (sites,) = stretch.eqns, stretch.sites
            inputs = [read(v, values) for v in eqn.invars]
            # Some inputs of the scan are tapped before it (analysis.sites).
            for position, site in sites.items():
                inputs[position] = plus(inputs[position], taps[numbers[site]])
            out, inner = _scan(eqn, inputs, body, taps, numbers, at_block)
            records.update(inner)
            values.update(zip(eqn.outvars, out, strict=True))
            continue
        if kept := scope.kept(stretch.start):
            (eqn,) = stretch.eqns
            assert at_block is not None
            inputs = [read(v, values) for v in eqn.invars]
            out = at_block(kept, inputs, [taps[numbers[site]] for site in kept])
            values.update(zip(eqn.outvars, out, strict=True))
            continue
        passed = function(
            [values[v] for v in stretch.inputs],
            [taps[numbers[site]] for site in stretch.all_sites],
        )
        ruled = [s for s in stretch.all_sites if isinstance(s, RuledSite)]
        records.update(
            (numbers[site], record)
            for site, record in zip(ruled, passed.records, strict=True)
        )
        values.update(zip(stretch.outs, passed.outs, strict=True))
    outputs = [read(v, values) for v in jaxpr.outvars]
    for i, site in scope.outputs.items():
        outputs[i] = plus(outputs[i], taps[numbers[site]])
    return outputs, records


def _scan(
    eqn: jex.JaxprEqn,
    inputs: Sequence[jax.Array],
    body: Scope,
    taps: Mapping[int, jax.Array],
    numbers: Mapping[Site, int],
    at_block: AtBlock | None,
) -> Ran:
    """Evaluate a scan with taps inside its body, for one example.

    The taps have a leading axis of iterations, over which they are scanned. The scan
    stacks the records of all iterations.
    """
    consts, carry = scan_sizes(eqn)
    here = [numbers[site] for site in body.all_sites()]

    def iteration(
        carried: list[jax.Array],
        scanned: tuple[list[jax.Array], list[jax.Array]],
    ) -> tuple[list[jax.Array], Ran]:
        xs, tap_values = scanned
        tapped = dict(zip(here, tap_values, strict=True))
        entering = [*inputs[:consts], *carried, *xs]
        out, records = run(body, entering, tapped, numbers, at_block)
        return out[:carry], (out[carry:], records)

    last, (ys, records) = jax.lax.scan(
        iteration,
        list(inputs[consts : consts + carry]),
        (list(inputs[consts + carry :]), [taps[number] for number in here]),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*last, *ys], records
