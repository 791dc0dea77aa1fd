"""Evaluate a loss with taps, and its operands without."""

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

    Those of a scan's body are those of all its iterations, with a leading axis for
    each scan, the outermost first, between whose iterations they differ.

    Args:
      scope: from the analysis.
      inputs: the scope's inputs, the known ones with such axes; None for the others.
    """
    jaxpr = scope.closed.jaxpr
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
    """A known equation, mapped over the scans between whose iterations it differs."""

    def function(*inputs: jax.Array) -> list[jax.Array]:
        return bind(eqn, inputs)

    steps = [scope.steps_of(v) or frozenset() for v in eqn.invars]
    for depth in sorted(frozenset().union(*steps), reverse=True):
        function = jax.vmap(function, [0 if depth in s else None for s in steps])
    return function


# The outputs and, by a site's number, the other inputs of its equation.
Ran = tuple[list[jax.Array], dict[int, tuple[jax.Array, ...]]]


class AtBlock(Protocol):
    """The outputs of a kept block for one example.

    Its sites, the values of its inputs, and what is tapped at each site.
    """

    def __call__(
        self,
        sites: Sequence[KeptSite],
        inputs: Sequence[jax.Array],
        taps: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """The outputs."""
        ...


def run(
    scope: Scope,
    inputs: Sequence[jax.Array],
    taps: Mapping[int, jax.Array],
    numbers: Mapping[Site, int],
    at_block: AtBlock | None = None,
) -> Ran:
    """Evaluate a scope for one example.

    What no example enters is the same for all of them and is not mapped over; in a
    scan it is computed in the iteration that needs it, as in the loss itself.

    Args:
      scope: from the analysis.
      inputs: of its jaxpr, in this iteration of the scans around it.
      taps: by a site's number, what to add there.
      numbers: the number of each site.
      at_block: what to do at blocks that are kept, where there are some.

    Returns:
      The outputs, and for each site with a rule, by its number, the values of the
      equation's other inputs.
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
    """A scan with taps inside: they are scanned over, and the records stacked."""
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
