"""Evaluate a loss with taps: known values once, the rest for one example."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from dpjax.bookkeeping.sites import Level, Scope, Site
from dpjax.bookkeeping.trace import bind


class Known(NamedTuple):
    """The values of a scope that no example enters.

    Attributes:
      values: by variable; those of Level.STEP stacked over the scan's iterations.
      inner: for a scan's index, the values of its body.
    """

    values: dict[jex.Var, Any]
    inner: dict[int, "Known"]


def known(scope: Scope, inputs: Sequence[Any]) -> Known:
    """Evaluate what depends on no example.

    Args:
      scope: from the analysis.
      inputs: the scope's inputs, those of Level.STEP stacked; the others are ignored.
    """
    jaxpr = scope.closed.jaxpr
    values: dict[jex.Var, Any] = dict(
        zip(jaxpr.constvars, scope.closed.consts, strict=True)
    )
    for var, value in zip(jaxpr.invars, inputs, strict=True):
        if scope.level(var) != Level.EXAMPLE:
            values[var] = value
    _evaluate(scope, Level.KNOWN, values)

    stacked = [v for v in jaxpr.invars if scope.level(v) == Level.STEP]
    if stacked:
        once = dict(values)
        steps = [v for v, level in scope.levels.items() if level == Level.STEP]

        def iteration(slices: list[Any]) -> list[Any]:
            current = {**once, **dict(zip(stacked, slices, strict=True))}
            _evaluate(scope, Level.STEP, current)
            return [current[v] for v in steps]

        every = jax.vmap(iteration)([values[v] for v in stacked])
        values.update(zip(steps, every, strict=True))

    inner = {}
    for index, body in scope.scans.items():
        atoms = jaxpr.eqns[index].invars
        levels = [body.level(v) for v in body.closed.jaxpr.invars]
        inner[index] = known(
            body,
            [
                None if level == Level.EXAMPLE else _read(atom, values)
                for atom, level in zip(atoms, levels, strict=True)
            ],
        )
    return Known(values, inner)


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
    steps: Mapping[jex.Var, Any],
) -> tuple[list[Any], dict[int, tuple[Any, ...]]]:
    """Evaluate a scope for one example.

    Args:
      scope: from the analysis.
      found: its known values.
      example: the values of its other inputs.
      taps: by a site's number, what to add there.
      numbers: the number of each site.
      steps: this iteration's slices of the known values of Level.STEP.

    Returns:
      The outputs, and for each site with a rule, by its number, the values of the
      equation's other inputs.
    """
    jaxpr = scope.closed.jaxpr
    values = {**found.values, **steps, **example}
    records: dict[int, tuple[Any, ...]] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        if scope.eqn_level(eqn) != Level.EXAMPLE:
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
    entering = [body.level(v) == Level.EXAMPLE for v in variables]
    fixed = {v: inputs[i] for i, v in enumerate(variables[:consts]) if entering[i]}
    carried = variables[consts : consts + carry]
    scanned = [
        (v, inputs[i])
        for i, v in enumerate(variables)
        if i >= consts + carry and entering[i]
    ]
    steps = [v for v, level in body.levels.items() if level == Level.STEP]
    here = [numbers[site] for site in body.all_sites()]

    def iteration(carry_in: Any, xs: Any) -> tuple[Any, Any]:
        x_values, step_values, tap_values = xs
        example = {
            **fixed,
            **dict(zip(carried, carry_in, strict=True)),
            **dict(zip((v for v, _ in scanned), x_values, strict=True)),
        }
        out, records = run(
            body,
            found,
            example,
            dict(zip(here, tap_values, strict=True)),
            numbers,
            dict(zip(steps, step_values, strict=True)),
        )
        return out[:carry], (out[carry:], records)

    xs = (
        [x for _, x in scanned],
        [found.values[v] for v in steps],
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


def _evaluate(scope: Scope, level: Level, values: dict[jex.Var, Any]) -> None:
    """Add the outputs of the equations of one level to the values."""
    for eqn in scope.closed.jaxpr.eqns:
        if scope.eqn_level(eqn) == level:
            out = bind(eqn, [_read(v, values) for v in eqn.invars])
            values.update(zip(eqn.outvars, out, strict=True))


def _read(atom: Any, values: Mapping[jex.Var, Any]) -> Any:
    return atom.val if isinstance(atom, jex.Literal) else values[atom]
