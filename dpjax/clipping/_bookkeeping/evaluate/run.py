"""Evaluate a loss with taps added at its sites, and evaluate the sites' operands."""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex

from dpjax._core.interpret import scan_sizes
from dpjax._core.meshes import plus
from dpjax._core.typing import Arrays
from dpjax.clipping._bookkeeping.analysis.sites import KeptSite, Scope, TappedSite
from dpjax.clipping._bookkeeping.jaxpr import equations as eqs

# The outputs, and for each site with a rule, in order, the values of its equation's
# inputs except the operand.
Ran = tuple[list[jax.Array], list[tuple[jax.Array, ...]]]
# A function that evaluates a checkpointed block for one example. It takes the block's
# sites, the values of the block's inputs, and the tap at each site. It returns the
# block's outputs.
AtBlock = Callable[[Sequence[KeptSite], Arrays, Arrays], list[jax.Array]]


def operands(scope: Scope, inputs: Sequence[jax.Array | None]) -> list[jax.Array]:
    """The values of the sites' operands, in the order of `scope.all_sites()`.

    An operand in a scan's body may differ between iterations. Its value then holds all
    iterations: it has one leading axis for each scan in which the operand changes from
    iteration to iteration, the outermost scan first.

    Args:
      scope: the jaxpr and its sites, from the analysis.
      inputs: one entry for each input of the scope: its value, with leading axes as
        above, if the input does not depend on the batch; otherwise None.
    """
    values, values_of_operands = eqs.values_of_inputs(scope.closed, inputs), []
    in_all_iterations = functools.partial(_in_all_iterations, scope)
    for index, eqn in enumerate(scope.closed.jaxpr.eqns):
        # The batch-invariant equations; those that no operand needs are traced in vain.
        if eqn.outvars and all(v in scope.steps for v in eqn.outvars):
            eqs.add_outputs([eqn], values, in_all_iterations)
        values_of_operands += [values[site.operand] for site in scope.sites_at(index)]
        if index in scope.scans:
            body = scope.scans[index]
            pairs = zip(eqn.invars, body.closed.jaxpr.invars, strict=True)
            entering = [
                eqs.read(outer, values) if inner in body.steps else None
                for outer, inner in pairs
            ]
            values_of_operands += operands(body, entering)
    return [
        *values_of_operands,
        *(values[site.operand] for site in scope.outputs.values()),
    ]


def _in_all_iterations(
    scope: Scope, eqn: jex.JaxprEqn, inputs: Arrays
) -> list[jax.Array]:
    """A batch-invariant equation, mapped over the scans in which its inputs vary."""

    def function(*inputs: jax.Array) -> list[jax.Array]:
        return eqs.bind(eqn, inputs)

    # The innermost scan is mapped first, so the outermost scan's axis ends up leading.
    steps = [scope.steps_of(v) or frozenset() for v in eqn.invars]
    for depth in sorted(frozenset().union(*steps), reverse=True):
        function = jax.vmap(function, [0 if depth in s else None for s in steps])
    return function(*inputs)


def run(
    scope: Scope, inputs: Arrays, taps: Arrays, at_block: AtBlock | None = None
) -> Ran:
    """Evaluate a scope for one example.

    Under vmap, batch-invariant values stay unmapped. In a scan, a batch-invariant value
    is computed in the iteration that needs it, as in the loss itself.

    Args:
      scope: the jaxpr and its sites, from the analysis.
      inputs: the values of the jaxpr's inputs, in one iteration of the scans around it.
      taps: the array to add at each site, in the order of `scope.all_sites()`.
      at_block: the function that evaluates checkpointed blocks; None without any.

    Returns:
      The outputs, and for each site with a rule, in order, the values of the equation's
      inputs except the operand.
    """
    values = eqs.values_of_inputs(scope.closed, inputs)
    records: list[tuple[jax.Array, ...]] = []
    # Sites come in the order of the equations, and so take the taps one by one.
    pending = iter(taps)
    for index, eqn in enumerate(scope.closed.jaxpr.eqns):
        args = [eqs.read(v, values) for v in eqn.invars]
        body, ruled = scope.scans.get(index), None
        if kept := scope.block_sites(index):
            assert at_block is not None
            out = at_block(kept, args, list(itertools.islice(pending, len(kept))))
            values.update(zip(eqn.outvars, out, strict=True))
            continue
        for position, site in scope.sites.get(index, {}).items():
            # A tapped operand gets its tap before the equation, or before the scan. A
            # rule's site gets its tap on the equation's output.
            if isinstance(site, TappedSite):
                args[position] = plus(args[position], next(pending))
            else:
                ruled = position
        if body is not None and (inside := body.all_sites()):
            within = list(itertools.islice(pending, len(inside)))
            out, new = _scan(eqn, args, body, within, at_block)
            records += new
        else:
            out = eqs.bind(eqn, args)
        if ruled is not None:
            out[0] = plus(out[0], next(pending))
            records.append(tuple(x for i, x in enumerate(args) if i != ruled))
        values.update(zip(eqn.outvars, out, strict=True))
    outputs = [eqs.read(v, values) for v in scope.closed.jaxpr.outvars]
    for i, tap in zip(scope.outputs, pending, strict=True):
        outputs[i] = plus(outputs[i], tap)
    return outputs, records


def _scan(
    eqn: jex.JaxprEqn,
    inputs: Arrays,
    body: Scope,
    taps: Arrays,
    at_block: AtBlock | None,
) -> Ran:
    """Evaluate a scan with taps inside its body, for one example.

    The taps have a leading axis of iterations, over which they are scanned. The scan
    stacks the records of all iterations.
    """
    consts, carry = scan_sizes(eqn.params)

    def iteration(
        carried: list[jax.Array], scanned: tuple[list[jax.Array], Arrays]
    ) -> tuple[list[jax.Array], Ran]:
        xs, own = scanned
        out, records = run(body, [*inputs[:consts], *carried, *xs], own, at_block)
        return out[:carry], (out[carry:], records)

    last, (ys, records) = jax.lax.scan(
        iteration,
        list(inputs[consts : consts + carry]),
        (list(inputs[consts + carry :]), taps),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*last, *ys], records
