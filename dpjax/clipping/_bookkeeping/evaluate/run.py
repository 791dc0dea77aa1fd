"""Run a loss forward and backward once, and record activations and cotangents.

A site is an equation that combines a value computed from parameters alone, the operand,
with a value that depends on the example. Each site has a tap, an array of zeros. At a
site with a rule (`RuledSite`), the tap is added to the equation's output. At a
checkpointed block (`BlockSite`), the tap is an additional argument of the block, and
the block's custom derivative returns norms or sums as the tap's cotangent. At any other
site, the tap is added to the operand. The cotangent of a tap that is added to a value
is the cotangent of this value. The recorded arrays are the cotangents of all taps and,
at sites with a rule, the inputs of the equation except the operand.

**Segments that repeat** are traced once. A deep network repeats its blocks, and JAX
would batch, differentiate and transpose the equations of each block separately. So the
loss is cut into segments, which begin at the sites with a rule (`RuledSite`). Segments
that differ only in variable names (`equations.Comparable`) share one jitted function,
which JAX batches, differentiates and transposes once. The compiler still optimises
across the calls.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core.dtypes import at_least_float32
from dpjax._core.interpret import scan_sizes
from dpjax._core.meshes import (
    explicit_mesh,
    leading_axis,
    plus,
    sharded_zeros,
    varying_axes,
)
from dpjax._core.typing import ArrayLike, Arrays
from dpjax.clipping._bookkeeping import equations as eqs
from dpjax.clipping._bookkeeping.analysis.plan import Plan
from dpjax.clipping._bookkeeping.analysis.sites import BlockSite, RuledSite, Scope, Site

# The outputs; and for each site with a rule, in order, the values of its equation's
# inputs except the operand.
RunResult = tuple[list[jax.Array], list[tuple[jax.Array, ...]]]
# A function that evaluates a checkpointed block for one example. It takes the block's
# sites, the values of the block's inputs, and the tap at each site. It returns the
# block's outputs.
BlockEvaluator = Callable[[Sequence[BlockSite], Arrays, Arrays], list[jax.Array]]


class Request(NamedTuple):
    """The request to compute a checkpointed block's norms or sums in its backward pass.

    If `scales` is empty, the block computes upper bounds of ‖gradient / C‖² for each
    example, where C is the clip norm. Otherwise the block computes the sums of scaled
    gradients, which have the shapes of the block's parameters.

    Attributes:
      clip_norms: for each group of leaves that are clipped together, the clip norm C.
      scales: for each group, the clipping factors f[b], or f[] for one example; empty
        for norms.
      finite: a list with one array, bool[b], or bool[] for one example, which says
        whether the gradients are finite; empty for norms.
    """

    clip_norms: Sequence[ArrayLike]
    scales: Arrays = ()
    finite: Arrays = ()


class BlockEvaluation(NamedTuple):
    """How to evaluate the checkpointed blocks of a loss.

    Attributes:
      request: whether the blocks compute norms or sums for the batch.
      outputs: a function that returns the outputs of a block for one example. Its
        arguments are the `Request` for the example, the block's sites, the values of
        the block's inputs, and the tap at each site, an array of zeros. None if no
        block stays checkpointed.
    """

    request: Request
    outputs: Callable[..., list[jax.Array]] | None


NO_BLOCKS = BlockEvaluation(Request(()), None)


class Segment(NamedTuple):
    """Consecutive equations of a loss's jaxpr or of a scan's body.

    Attributes:
      start: the index of the first equation in the jaxpr.
      eqns: the equations of the segment.
      sites: for each equation, its sites: one for each operand that the equation
        combines with the example. An operand is an input computed from parameters
        alone.
      inputs: the variables that the segment reads but does not compute.
      outs: the variables that the segment computes, if a later equation reads them or
        the jaxpr returns them.
    """

    start: int
    eqns: tuple[jex.JaxprEqn, ...]
    sites: list[list[Site]]
    inputs: tuple[jex.Var, ...]
    outs: tuple[jex.Var, ...]

    def description(self) -> Hashable:
        """A description, equal only for segments that compute the same function.

        Segments with equal descriptions also add taps to the same values. (A tap is an
        array of zeros, and its cotangent is the cotangent of that value.) The
        description has no hash if a parameter of an equation has no hash.
        """
        taps = tuple(
            tuple((site.position, isinstance(site, RuledSite)) for site in sites)
            for sites in self.sites
        )
        return taps, eqs.describe_function(self.inputs, self.eqns, self.outs)


def segments(scope: Scope) -> list[Segment]:
    """Cut the equations of a loss, or of a scan's body, into segments.

    Each equation with a `RuledSite` begins a segment. A scan in `Scope.scans` is a
    segment by itself, and so is a checkpointed block, because `run` does not evaluate
    these scans and blocks like other equations.
    """
    eqns = scope.closed.jaxpr.eqns
    starts = {0}
    for index, sites in enumerate(scope.sites):
        if any(isinstance(site, RuledSite) for site in sites):
            starts.add(index)
        if index in scope.scans or scope.block_sites(index):
            starts |= {index, index + 1}
    # The last use of each variable; the scope's outputs are used after all equations.
    last_use: dict[jex.Var, int] = {}
    uses = [*(eqn.invars for eqn in eqns), scope.closed.jaxpr.outvars]
    for index, atoms in enumerate(uses):
        last_use.update((v, index) for v in atoms if isinstance(v, jex.Var))
    parts = []
    for start, stop in itertools.pairwise(sorted({*starts, len(eqns)})):
        chunk = tuple(eqns[start:stop])
        # Dicts without values are ordered sets. The order matters, since it is part of
        # a segment's description.
        computed = dict.fromkeys(v for eqn in chunk for v in eqn.outvars)
        read = (v for eqn in chunk for v in eqn.invars if isinstance(v, jex.Var))
        inputs = tuple(v for v in dict.fromkeys(read) if v not in computed)
        outs = tuple(v for v in computed if last_use.get(v, -1) >= stop)
        parts.append(Segment(start, chunk, scope.sites[start:stop], inputs, outs))
    return parts


def _run_segment(
    comparable: eqs.Comparable[Segment], inputs: Arrays, taps: Arrays
) -> RunResult:
    segment, unused = comparable.part, iter(taps)
    values = dict(zip(segment.inputs, inputs, strict=True))
    records = []
    for eqn, sites in zip(segment.eqns, segment.sites, strict=True):
        args = [eqs.read(v, values) for v in eqn.invars]
        ruled_position = None
        for site in sites:
            # At a site with a rule, the tap is added to the equation's output. At other
            # sites it is added to the operand, before the equation.
            if site.has_operand_tap:
                args[site.position] = plus(args[site.position], next(unused))
            else:
                ruled_position = site.position
        out = eqs.bind(eqn, args)
        if ruled_position is not None:
            out[0] = plus(out[0], next(unused))
            records.append(tuple(x for i, x in enumerate(args) if i != ruled_position))
        values.update(zip(eqn.outvars, out, strict=True))
    return [values[v] for v in segment.outs], records


_run_jitted = jax.jit(_run_segment, static_argnums=0)


def run(
    scope: Scope, inputs: Arrays, taps: Arrays, at_block: BlockEvaluator | None = None
) -> RunResult:
    """Evaluate a loss, or a scan's body, for one example, with taps at its sites.

    A site is an equation that combines a value computed from parameters alone, the
    operand, with the example. A tap is an array of zeros for one site. The module's
    docstring says to which value a tap is added. Under vmap, values that depend on no
    example stay unmapped. Values in a scan's body are computed in each iteration, as in
    the loss itself.

    Args:
      scope: the jaxpr and its sites, from the analysis.
      inputs: the values of the jaxpr's inputs, in one iteration of the scans around it.
      taps: the tap of each site, in the order of `scope.all_sites()`.
      at_block: the function that evaluates checkpointed blocks; None if there are no
        such blocks.

    Returns:
      The outputs of the jaxpr. For each `RuledSite`, in order, the values of the
      equation's inputs except the operand.
    """
    values = eqs.values_of_inputs(scope.closed, inputs)
    records: list[tuple[jax.Array, ...]] = []
    # Segments have the order of their sites. So the taps of each segment come next.
    unused = iter(taps)
    parts = [eqs.Comparable(segment) for segment in segments(scope)]
    counts = collections.Counter(parts)
    for comparable in parts:
        segment = comparable.part
        tapped = list(itertools.islice(unused, sum(map(len, segment.sites))))
        body = scope.scans.get(segment.start)
        block_sites = scope.block_sites(segment.start)
        body_sites = body.all_sites() if body is not None else []
        if not body_sites and not block_sites:
            # A segment that occurs only once is traced in place.
            function = _run_jitted if counts[comparable] > 1 else _run_segment
            out, new = function(comparable, [values[v] for v in segment.inputs], tapped)
            values.update(zip(segment.outs, out, strict=True))
            records += new
            continue
        (eqn,), (sites,) = segment.eqns, segment.sites
        args = [eqs.read(v, values) for v in eqn.invars]
        if body is None:
            assert at_block is not None
            out = at_block(block_sites, args, tapped)
        else:
            # Some inputs of the scan are tapped before the scan (analysis.sites).
            for site, tap in zip(sites, tapped, strict=True):
                args[site.position] = plus(args[site.position], tap)
            body_taps = list(itertools.islice(unused, len(body_sites)))
            out, new = _scan(eqn, args, body, body_taps, at_block)
            records += new
        values.update(zip(eqn.outvars, out, strict=True))
    outputs = [eqs.read(v, values) for v in scope.closed.jaxpr.outvars]
    for site, tap in zip(scope.outputs, unused, strict=True):
        outputs[site.position] = plus(outputs[site.position], tap)
    return outputs, records


def _scan(
    eqn: jex.JaxprEqn,
    inputs: Arrays,
    body: Scope,
    taps: Arrays,
    at_block: BlockEvaluator | None,
) -> RunResult:
    """Evaluate a scan whose body has sites, for one example.

    A site is an equation that combines a value computed from parameters alone, the
    operand, with the example. A tap is an array of zeros for one site. The module's
    docstring says to which value a tap is added.

    Args:
      eqn: the scan's equation.
      inputs: the values of the scan's inputs.
      body: the scan's body and its sites.
      taps: the tap of each site in the body, with a leading axis of iterations.
      at_block: the function that evaluates the checkpointed blocks in the body, as for
        `run`.

    Returns:
      The outputs of the scan. For each `RuledSite`, in order, the values of all inputs
      of its equation except the operand, stacked over the iterations.
    """
    consts, carry = scan_sizes(eqn.params)

    def iteration(
        carried: list[jax.Array], scanned: tuple[list[jax.Array], Arrays]
    ) -> tuple[list[jax.Array], RunResult]:
        xs, body_taps = scanned
        out, records = run(body, [*inputs[:consts], *carried, *xs], body_taps, at_block)
        return out[:carry], (out[carry:], records)

    final_carry, (ys, records) = jax.lax.scan(
        iteration,
        list(inputs[consts : consts + carry]),
        (list(inputs[consts + carry :]), taps),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*final_carry, *ys], records


class Records(NamedTuple):
    """The arrays that are recorded for the norms and sums of a batch's gradients.

    A site is an equation that combines a value computed from parameters alone, the
    operand, with the example. The sites are those of a whole loss, of a checkpointed
    block, or of one component. A component is a set of parameter leaves, with all
    operands that are computed from these leaves.

    Attributes:
      records: for each site, the values of the equation's inputs except the operand,
        with a leading batch axis; empty if the site is not a `RuledSite`.
      cotangents: for each site, the cotangent of the tap, an array of zeros (see the
        module's docstring). The cotangent has a leading batch axis, unless it is a sum
        that a checkpointed block returns.
      inputs: the values from which the operands are computed, the parameter leaves
        first. These values depend on no example.
    """

    records: Sequence[tuple[jax.Array, ...]]
    cotangents: Arrays
    inputs: Arrays


def record_sites(
    plan: Plan, leaves: Arrays, examples: Arrays, at_blocks: BlockEvaluation = NO_BLOCKS
) -> tuple[list[jax.Array], Records]:
    """Run a loss forward and backward on a batch, and record inputs and cotangents.

    A site is an equation that combines a value computed from parameters alone, the
    operand, with the example. Each site has a tap, an array of zeros. The module's
    docstring says to which value a tap is added. The derivative with respect to the tap
    is the cotangent at the site; at a checkpointed block, it is the block's norms or
    sums.

    Args:
      plan: the analysis of the loss.
      leaves: the parameters' leaves.
      examples: the leaves of the batch arguments, with a leading batch axis.
      at_blocks: how checkpointed blocks are evaluated, if the plan has any.

    Returns:
      A list of the loss f[b] and the leaves of aux, f[b, ...]; and the `Records`.
    """
    axes = varying_axes(plan.scope.closed.out_avals[0])
    taps, forward = run_with_taps(plan, leaves, examples, axes, at_blocks)

    def loss_first(taps: Arrays) -> tuple[jax.Array, RunResult]:
        outputs, records = forward(taps, examples)
        return outputs[0], (outputs, records)

    loss, vjp, (outputs, records) = jax.vjp(loss_first, taps, has_aux=True)
    # One example's loss depends only on its own taps. So a cotangent of ones gives the
    # cotangents of all examples in one backward pass.
    (cotangents,) = vjp(jnp.ones_like(loss))
    return outputs, Records(records, cotangents, leaves)


def run_with_taps(
    plan: Plan,
    invariants: Arrays,
    examples: Arrays,
    axes: frozenset[str],
    at_blocks: BlockEvaluation,
) -> tuple[list[jax.Array], Callable[..., RunResult]]:
    """Make taps, and a function that runs a batch with these taps.

    A site is an equation that combines a parameter with the example. For each site, a
    tap is an array of zeros. The module's docstring says to which value the function
    adds a tap. The function takes the taps and the examples, and returns the loss's
    outputs f[b, ...] and `Records.records`.

    Args:
      plan: the analysis of the loss.
      invariants: the inputs that depend on no example, the parameter leaves first.
      examples: the leaves of the batch arguments, with a leading batch axis.
      axes: the mesh axes along which the taps vary.
      at_blocks: how checkpointed blocks are evaluated, if the plan has any.
    """
    batch = examples[0].shape[0]
    leading, mesh = leading_axis(examples), explicit_mesh((invariants, examples))

    @functools.cache  # Many taps have the same type. They share one array of zeros.
    def zeros(tap_type: jax.core.ShapedArray, *lengths: int) -> jax.Array:
        shape = (batch, *lengths, *tap_type.shape)
        return sharded_zeros(tap_type, shape, leading=leading, mesh=mesh)

    request, outputs_of = at_blocks
    sums = bool(request.scales)
    in_sum = [sums and isinstance(site, BlockSite) for site in plan.sites]
    taps = []
    for site, summed in zip(plan.sites, in_sum, strict=True):
        tapped_value = (
            site.rule.eqn.outvars[0] if isinstance(site, RuledSite) else site.operand
        )
        tap_type = eqs.aval(tapped_value)
        lengths = [loop.length for loop in site.loops]
        if isinstance(site, BlockSite):
            # The tap's cotangent is the block's result. So the tap has the type of the
            # result: one number per example, or a sum with the operand's shape.
            dtype = at_least_float32(tap_type.dtype)
            scalar = jax.core.ShapedArray((), dtype)
            tap_type = tap_type.update(dtype=dtype) if summed else scalar
        if summed:
            taps.append(sharded_zeros(tap_type, (*lengths, *tap_type.shape), mesh=mesh))
        else:
            taps.append(zeros(tap_type, *lengths))
    # In `jax.shard_map` the taps must vary over the devices. For a value that devices
    # share, the derivative would be a sum over the devices.
    taps = jax.lax.pcast(taps, tuple(sorted(axes)), to="varying")

    def forward(taps: Arrays, examples: Arrays) -> RunResult:
        def run_example(
            example: Arrays, own_taps: Arrays, request: Request
        ) -> RunResult:
            unused = iter(own_taps)
            # Taps for sums have no batch axis. They are closed over, and not passed to
            # vmap, so that they may be sharded along the same mesh axes as examples.
            all_taps = [
                tap if summed else next(unused)
                for tap, summed in zip(taps, in_sum, strict=True)
            ]
            inputs = [*invariants, *example]
            at_block = outputs_of and functools.partial(outputs_of, request)
            outputs, records = run(plan.scope, inputs, all_taps, at_block)
            remaining_records = iter(records)
            ruled = [isinstance(site, RuledSite) for site in plan.sites]
            return outputs, [next(remaining_records) if on else () for on in ruled]

        own_taps = [tap for tap, summed in zip(taps, in_sum, strict=True) if not summed]
        # Only the clip norms have no batch axis.
        axes = 0, 0, Request._make([None, 0, 0])
        batched = jax.vmap(run_example, in_axes=axes, axis_size=batch)
        return batched(list(examples), own_taps, request)

    return taps, forward
