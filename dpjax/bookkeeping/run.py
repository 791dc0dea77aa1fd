"""Evaluate a loss with taps: known values once, the rest for one example."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from dpjax.bookkeeping.sites import Scope, Site
from dpjax.bookkeeping.trace import bind


class Known(NamedTuple):
    """The values of a scope that no example enters.

    Attributes:
      values: by variable, with a leading axis for each scan, the outermost first,
        between whose iterations it differs.
      inner: for a scan's index, the values of its body.
    """

    values: dict[jex.Var, Any]
    inner: dict[int, "Known"]


def known(scope: Scope, inputs: Sequence[Any]) -> Known:
    """Evaluate what depends on no example, every equation in all iterations at once.

    Args:
      scope: from the analysis.
      inputs: the scope's inputs, the known ones as in `Known`; the others are ignored.
    """
    jaxpr = scope.closed.jaxpr
    values: dict[jex.Var, Any] = dict(
        zip(jaxpr.constvars, scope.closed.consts, strict=True)
    )
    for var, value in zip(jaxpr.invars, inputs, strict=True):
        if var in scope.steps:
            values[var] = value
    for eqn in jaxpr.eqns:
        if scope.steps_of(*eqn.invars) is not None:
            out = _in_all_iterations(scope, eqn)(
                *(_read(v, values) for v in eqn.invars)
            )
            values.update(zip(eqn.outvars, out, strict=True))

    inner = {}
    for index, body in scope.scans.items():
        atoms = jaxpr.eqns[index].invars
        entered = [v in body.steps for v in body.closed.jaxpr.invars]
        inner[index] = known(
            body,
            [
                _read(atom, values) if is_known else None
                for atom, is_known in zip(atoms, entered, strict=True)
            ],
        )
    return Known(values, inner)


def _in_all_iterations(scope: Scope, eqn: jex.JaxprEqn) -> Callable[..., list[Any]]:
    """A known equation, mapped over the scans between whose iterations it differs."""

    def function(*inputs: Any) -> list[Any]:
        return bind(eqn, inputs)

    steps = [scope.steps_of(v) or frozenset() for v in eqn.invars]
    for depth in sorted(frozenset().union(*steps), reverse=True):
        function = jax.vmap(function, [0 if depth in s else None for s in steps])
    return function


def operands(scope: Scope, found: Known) -> list[Any]:
    """The values of the sites' operands, in the order of `scope.all_sites()`."""
    out = []
    for index in range(len(scope.closed.jaxpr.eqns)):
        for site in scope.sites.get(index, {}).values():
            out.append(found.values[site.operand])
        if index in scope.scans:
            out.extend(operands(scope.scans[index], found.inner[index]))
    out.extend(found.values[site.operand] for site in scope.outputs.values())
    return out


def run(
    scope: Scope,
    found: Known,
    example: Mapping[jex.Var, Any],
    taps: Mapping[int, Any],
    numbers: Mapping[Site, int],
) -> tuple[list[Any], dict[int, tuple[Any, ...]]]:
    """Evaluate a scope for one example.

    Args:
      scope: from the analysis.
      found: its known values, in this iteration of the scans around it.
      example: the values of its other inputs.
      taps: by a site's number, what to add there.
      numbers: the number of each site.

    Returns:
      The outputs, and for each site with a rule, by its number, the values of the
      equation's other inputs.
    """
    jaxpr = scope.closed.jaxpr
    values = {**found.values, **example}
    records: dict[int, tuple[Any, ...]] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        if scope.steps_of(*eqn.invars) is not None:
            continue
        inputs = [_read(v, values) for v in eqn.invars]
        ruled = None
        for position, site in scope.sites.get(index, {}).items():
            if site.rule is None:
                inputs[position] = inputs[position] + taps[numbers[site]]
            else:
                ruled = site
        body = scope.scans.get(index)
        if body is not None and body.all_sites():
            out, inner = _scan(eqn, inputs, body, found.inner[index], taps, numbers)
            records.update(inner)
        else:
            out = bind(eqn, inputs)
        if ruled is not None:
            out[0] = out[0] + taps[numbers[ruled]]
            records[numbers[ruled]] = tuple(
                x for i, x in enumerate(inputs) if i != ruled.position
            )
        values.update(zip(eqn.outvars, out, strict=True))
    outputs = [_read(v, values) for v in jaxpr.outvars]
    for i, site in scope.outputs.items():
        outputs[i] = outputs[i] + taps[numbers[site]]
    return outputs, records


def _scan(
    eqn: jex.JaxprEqn,
    inputs: Sequence[Any],
    body: Scope,
    found: Known,
    taps: Mapping[int, Any],
    numbers: Mapping[Site, int],
) -> tuple[list[Any], dict[int, tuple[Any, ...]]]:
    """A scan with taps inside: they are scanned over, and the records stacked."""
    consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
    variables = body.closed.jaxpr.invars
    entering = [v not in body.steps for v in variables]
    fixed = {v: inputs[i] for i, v in enumerate(variables[:consts]) if entering[i]}
    carried = variables[consts : consts + carry]
    scanned = [
        (v, inputs[i])
        for i, v in enumerate(variables)
        if i >= consts + carry and entering[i]
    ]
    depth = body.depth - 1
    here = [numbers[site] for site in body.all_sites()]

    def iteration(carry_in: Any, xs: Any) -> tuple[Any, Any]:
        x_values, differing, tap_values = xs
        example = {
            **fixed,
            **dict(zip(carried, carry_in, strict=True)),
            **dict(zip((v for v, _ in scanned), x_values, strict=True)),
        }
        out, records = run(
            body,
            _replaced(body, found, depth, iter(differing)),
            example,
            dict(zip(here, tap_values, strict=True)),
            numbers,
        )
        return out[:carry], (out[carry:], records)

    xs = (
        [x for _, x in scanned],
        _differing(body, found, depth),
        [taps[number] for number in here],
    )
    last, (ys, records) = jax.lax.scan(
        iteration,
        list(inputs[consts : consts + carry]),
        xs,
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*last, *ys], records


def _differing(scope: Scope, found: Known, depth: int) -> list[Any]:
    """The known values, those within scans too, that differ between its iterations."""
    values = [x for v, x in found.values.items() if depth in scope.steps[v]]
    for index, body in scope.scans.items():
        values += _differing(body, found.inner[index], depth)
    return values


def _replaced(scope: Scope, found: Known, depth: int, by: Iterator[Any]) -> Known:
    """The known values with those of `_differing` replaced, in its order."""
    values = {
        v: next(by) if depth in scope.steps[v] else x for v, x in found.values.items()
    }
    inner = {
        index: _replaced(body, found.inner[index], depth, by)
        for index, body in scope.scans.items()
    }
    return Known(values, inner)


def _read(atom: Any, values: Mapping[jex.Var, Any]) -> Any:
    return atom.val if isinstance(atom, jex.Literal) else values[atom]
