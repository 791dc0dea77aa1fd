"""Evaluate a loss with taps added at its sites, and evaluate the sites' operands.

A tap is an array of zeros that is added to a value to get the value's cotangent.

**Segments that repeat** are traced once. A deep network repeats its blocks, and JAX
would batch, differentiate and transpose the equations of each block separately. So the
loss is cut into segments at every site with a rule. Segments that differ only in
variable names (`jaxpr.equations.Alike`) share one jitted function, which JAX batches,
differentiates and transposes once. The compiler still optimises across the calls.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex

from dpjax._core.interpret import scan_sizes
from dpjax._core.meshes import plus
from dpjax._core.typing import Arrays
from dpjax.clipping._bookkeeping.analysis.sites import (
    KeptSite,
    RuledSite,
    Scope,
    Site,
    TappedSite,
)
from dpjax.clipping._bookkeeping.jaxpr import equations as eqs
from dpjax.clipping._bookkeeping.jaxpr.equations import Alike

# The outputs; and for each site with a rule, in order, the values of its equation's
# inputs except the operand.
Ran = tuple[list[jax.Array], list[tuple[jax.Array, ...]]]
# A function that evaluates a checkpointed block for one example. It takes the block's
# sites, the values of the block's inputs, and the tap at each site. It returns the
# block's outputs.
AtBlock = Callable[[Sequence[KeptSite], Arrays, Arrays], list[jax.Array]]


class Stretch(NamedTuple):
    """A segment: consecutive equations of a loss's jaxpr or of a scan's body.

    Attributes:
      start: the index of the first equation in the jaxpr.
      eqns: the equations of the segment.
      sites: for each equation, its sites.
      inputs: the variables that the segment reads but does not compute.
      outs: the variables that the segment computes and later equations read.
    """

    start: int
    eqns: tuple[jex.JaxprEqn, ...]
    sites: list[list[Site]]
    inputs: tuple[jex.Var, ...]
    outs: tuple[jex.Var, ...]

    def features(self) -> Hashable:
        """A hashable description, equal for segments with equal functions and taps."""
        taps = tuple(
            tuple((site.position, isinstance(site, RuledSite)) for site in sites)
            for sites in self.sites
        )
        return taps, eqs.of_function(self.inputs, self.eqns, self.outs)


def stretches(scope: Scope) -> list[Stretch]:
    """Cut the equations of a loss, or of a scan's body, into segments.

    A scan that parameters enter is a segment by itself, and so is a checkpointed block,
    because `run` evaluates both in other ways.
    """
    eqns = scope.closed.jaxpr.eqns
    starts = {0}
    for index, sites in enumerate(scope.sites):
        if any(isinstance(site, RuledSite) for site in sites):
            starts.add(index)
        if index in scope.scans or scope.block_sites(index):
            starts |= {index, index + 1}
    # The last use of each variable; the scope's outputs are used after all equations.
    last: dict[jex.Var, int] = {}
    uses = [*(eqn.invars for eqn in eqns), scope.closed.jaxpr.outvars]
    for index, atoms in enumerate(uses):
        last.update((v, index) for v in atoms if isinstance(v, jex.Var))
    parts = []
    for start, stop in itertools.pairwise(sorted({*starts, len(eqns)})):
        own = tuple(eqns[start:stop])
        # Dicts without values are ordered sets. The order matters, since it is part of
        # a segment's features.
        made = dict.fromkeys(v for eqn in own for v in eqn.outvars)
        entering = (v for eqn in own for v in eqn.invars if isinstance(v, jex.Var))
        inputs = tuple(v for v in dict.fromkeys(entering) if v not in made)
        outs = tuple(v for v in made if last.get(v, -1) >= stop)
        parts.append(Stretch(start, own, scope.sites[start:stop], inputs, outs))
    return parts


def _pass(alike: Alike[Stretch], inputs: Arrays, taps: Arrays) -> Ran:
    stretch, pending = alike.part, iter(taps)
    values = dict(zip(stretch.inputs, inputs, strict=True))
    records = []
    for eqn, sites in zip(stretch.eqns, stretch.sites, strict=True):
        args = [eqs.read(v, values) for v in eqn.invars]
        ruled = None
        for site in sites:
            # At a tapped operand, the tap is added before the equation. At a site with
            # a rule, the tap is added to the equation's output.
            if isinstance(site, TappedSite):
                args[site.position] = plus(args[site.position], next(pending))
            else:
                ruled = site.position
        out = eqs.bind(eqn, args)
        if ruled is not None:
            out[0] = plus(out[0], next(pending))
            records.append(tuple(x for i, x in enumerate(args) if i != ruled))
        values.update(zip(eqn.outvars, out, strict=True))
    return [values[v] for v in stretch.outs], records


_pass_once = jax.jit(_pass, static_argnums=0)


def operands(scope: Scope, inputs: Sequence[jax.Array | None]) -> list[jax.Array]:
    """The values of all operands, in the order of their sites in `scope.all_sites()`.

    An operand is a value that depends on a parameter but on no example, and meets the
    example at a site. An operand in a scan's body may differ between iterations. Its
    value then holds all iterations, and has one leading axis for each scan in which the
    operand changes from iteration to iteration, the outermost scan first.

    Args:
      scope: the jaxpr and its sites, from the analysis.
      inputs: one entry for each input of the scope. If the input does not depend on the
        batch, the entry is its value, with leading axes as above; otherwise None.
    """
    values, values_of_operands = eqs.values_of_inputs(scope.closed, inputs), []
    in_all_iterations = functools.partial(_in_all_iterations, scope)
    for index, eqn in enumerate(scope.closed.jaxpr.eqns):
        # All batch-invariant equations are traced, even if no operand needs them.
        if eqn.outvars and all(v in scope.steps for v in eqn.outvars):
            eqs.add_outputs([eqn], values, in_all_iterations)
        values_of_operands += [values[site.operand] for site in scope.sites[index]]
        if index in scope.scans:
            body = scope.scans[index]
            pairs = zip(eqn.invars, body.closed.jaxpr.invars, strict=True)
            entering = [
                eqs.read(outer, values) if inner in body.steps else None
                for outer, inner in pairs
            ]
            values_of_operands += operands(body, entering)
    return [*values_of_operands, *(values[site.operand] for site in scope.outputs)]


def _in_all_iterations(
    scope: Scope, eqn: jex.JaxprEqn, inputs: Arrays
) -> list[jax.Array]:
    """Evaluate an equation that no example enters, for all iterations of outer scans.

    Each input has one leading axis for each scan in which it changes from iteration to
    iteration. The outputs have one for each scan in which an input changes.
    """

    def function(*inputs: jax.Array) -> list[jax.Array]:
        return eqs.bind(eqn, inputs)

    # The innermost scan is mapped first, so that the outermost scan's axis is leading.
    steps = [scope.steps_of(v) or frozenset() for v in eqn.invars]
    for depth in sorted(frozenset().union(*steps), reverse=True):
        function = jax.vmap(function, [0 if depth in s else None for s in steps])
    return function(*inputs)


def run(
    scope: Scope, inputs: Arrays, taps: Arrays, at_block: AtBlock | None = None
) -> Ran:
    """Evaluate a loss, or a scan's body, for one example, with taps at its sites.

    A site is an equation at which a value computed from parameters alone, the operand,
    meets the example. A tap is an array of zeros that is added there. Under vmap,
    batch-invariant values stay unmapped. In a scan, a batch-invariant value is computed
    in the iteration that needs it, as in the loss itself.

    Args:
      scope: the jaxpr and its sites, from the analysis.
      inputs: the values of the jaxpr's inputs, in one iteration of the scans around it.
      taps: the array to add at each site, in the order of `scope.all_sites()`.
      at_block: the function that evaluates checkpointed blocks; None if there are no
        such blocks.

    Returns:
      The outputs of the jaxpr. For each site with a rule, in order, the values of the
      equation's inputs except the operand.
    """
    values = eqs.values_of_inputs(scope.closed, inputs)
    records: list[tuple[jax.Array, ...]] = []
    # Segments are in the order of their sites. So they take the taps one by one.
    pending, parts = iter(taps), [Alike(stretch) for stretch in stretches(scope)]
    counts = collections.Counter(parts)
    for alike in parts:
        stretch = alike.part
        own = list(itertools.islice(pending, sum(map(len, stretch.sites))))
        body, kept = scope.scans.get(stretch.start), scope.block_sites(stretch.start)
        inside = body.all_sites() if body is not None else []
        if not inside and not kept:
            # A segment that occurs only once is traced in place.
            function = _pass_once if counts[alike] > 1 else _pass
            out, new = function(alike, [values[v] for v in stretch.inputs], own)
            values.update(zip(stretch.outs, out, strict=True))
            records += new
            continue
        (eqn,), (sites,) = stretch.eqns, stretch.sites
        args = [eqs.read(v, values) for v in eqn.invars]
        if body is None:
            assert at_block is not None
            out = at_block(kept, args, own)
        else:
            # Some inputs of the scan are tapped before the scan (analysis.sites).
            for site, tap in zip(sites, own, strict=True):
                args[site.position] = plus(args[site.position], tap)
            within = list(itertools.islice(pending, len(inside)))
            out, new = _scan(eqn, args, body, within, at_block)
            records += new
        values.update(zip(eqn.outvars, out, strict=True))
    outputs = [eqs.read(v, values) for v in scope.closed.jaxpr.outvars]
    for site, tap in zip(scope.outputs, pending, strict=True):
        outputs[site.position] = plus(outputs[site.position], tap)
    return outputs, records


def _scan(
    eqn: jex.JaxprEqn,
    inputs: Arrays,
    body: Scope,
    taps: Arrays,
    at_block: AtBlock | None,
) -> Ran:
    """Evaluate a scan whose body has sites, for one example.

    A site is an equation at which a value computed from parameters alone, the operand,
    meets the example. An array of zeros, the tap, is added there, so that
    differentiation gives the cotangent at the site.

    Args:
      eqn: the scan equation.
      inputs: the values of the scan's inputs.
      body: the scan's body and its sites.
      taps: the tap of each site in the body, with a leading axis of iterations.
      at_block: the function that evaluates the checkpointed blocks in the body, as for
        `run`.

    Returns:
      The outputs of the scan. For each site with a rule, in order, the values of the
      site's equation's inputs except the operand, stacked over the iterations.
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
