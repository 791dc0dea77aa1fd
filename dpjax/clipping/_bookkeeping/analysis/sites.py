"""Find the sites of a loss: the equations that combine parameters with the example.

A value is *batch-invariant* when it depends on no example; the code calls such values
invariant. Inside scans a batch-invariant value may still differ between iterations. A
*site* is an equation with two kinds of input: the *operand*, a batch-invariant value
that depends on a parameter, and a value that depends on the example.

At a site, an array of zeros, called a *tap*, is added to a value of the loss, and the
loss is differentiated with respect to the tap. If a rule (`rules`) gives the operand's
gradient as a sum of outer products, then the tap is added to the equation's output. The
tap's cotangent and the equation's other inputs determine the gradient of the operand.
Without a rule, the tap is added to the operand itself. The tap's cotangent is then the
operand's per-example gradient, as in the vmap engine.

A value is *live* if its tangent may enter the loss. A loss often computes values that
are not live: quantities for logging, unused outputs of a scan, values that enter the
loss only through `stop_gradient`. JAX does not differentiate such values. The engine
must not add taps to such values, because the tap's cotangent would be zero, and zero
times an infinite derivative is NaN.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.extend.core as jex

from dpjax._core.interpret import scan_sizes
from dpjax._core.typing import Arrays, Atom
from dpjax.clipping._bookkeeping import equations as eqs
from dpjax.clipping._bookkeeping.factors import Size
from dpjax.clipping._bookkeeping.rules import Rule, rule_for
from dpjax.clipping._bookkeeping.tracing import inline


class Loop(NamedTuple):
    """A scan around a site, an equation that combines parameters with the example.

    Attributes:
      length: the number of iterations of the scan.
      shared: whether the equation's operand, which is its input computed from
        parameters alone, is the same in all iterations.
    """

    length: int
    shared: bool


@dataclasses.dataclass(eq=False)
class Site:
    """A use of an operand, which is a value computed from parameters alone.

    A site is either an equation that combines the operand with a value that depends on
    the example, or a differentiated output of a jaxpr (`Scope.outputs`). A tap, an
    array of zeros, is added to the operand, and the loss is differentiated by the tap.
    The tap's cotangent is the operand's per-example gradient. For the subclasses
    `RuledSite` and `BlockSite`, the gradient is computed in other ways.

    Attributes:
      operand: the operand's variable.
      position: the operand's index among the equation's inputs, or among the jaxpr's
        outputs if the operand is an output.
      loops: the scans around the equation, the outermost first.
      name: the primitive of the equation, followed by the name of the site's `Rule`, if
        the site has a rule; "output" if the operand is an output of the jaxpr.
    """

    operand: jex.Var
    position: int
    loops: tuple[Loop, ...]
    name: str

    @property
    def has_operand_tap(self) -> bool:
        """Whether the tap is added to the operand itself.

        The operand is the value computed from parameters alone. The tap is an array of
        zeros. If the tap is added to the operand, the tap's cotangent is the operand's
        per-example gradient.
        """
        return not isinstance(self, RuledSite | BlockSite)

    def description(self) -> Hashable:
        """A hashable description of the operand's type and of the scans around it."""
        return self.loops, eqs.aval(self.operand)


@dataclasses.dataclass(eq=False)
class RuledSite(Site):
    """A site with a rule that gives the gradient as a sum of outer products.

    A site is an equation that combines an operand, which is computed from parameters
    alone, with the example. A tap, an array of zeros, is added to the equation's
    output. The tap's cotangent is the cotangent of the output.

    Attributes:
      rule: the rule for the operand. `rule.eqn` is the equation.
    """

    rule: Rule

    @property
    def size(self) -> Size:
        """The number and sizes of the rows whose outer products sum to the gradient.

        The gradient is that of one example, with the rows of all iterations of the
        scans around the equation. If a scan's iterations share one operand, the number
        of iterations multiplies the number of rows. Otherwise the number of iterations
        multiplies the number of groups of rows.
        """
        size = self.rule.size
        shared = math.prod(loop.length for loop in self.loops if loop.shared)
        separate = math.prod(loop.length for loop in self.loops if not loop.shared)
        return size._replace(groups=size.groups * separate, rows=size.rows * shared)

    def description(self) -> Hashable:
        """A hashable description of the equation, its rule and the scans around it."""
        rule = self.rule
        return self.position, self.loops, rule.name, eqs.describe_equation(rule.eqn)


@dataclasses.dataclass(eq=False)
class BlockSite(Site):
    """An operand that enters a `jax.checkpoint` block which is not inlined.

    An operand is a value computed from parameters alone. The engine evaluates the block
    as a function with a custom derivative. For each operand, this function has an
    additional argument, an array of zeros called a tap. The derivative computes the
    block's gradient norms or clipped sums, and returns these norms or sums as the
    cotangents of the taps.

    Attributes:
      eqn: the block's equation.
      invariant: for each of the equation's inputs, whether it depends on no example.
      outputs: the indices of the block's outputs that are differentiated.
    """

    eqn: jex.JaxprEqn
    invariant: tuple[bool, ...]
    outputs: tuple[int, ...]

    def description(self) -> Hashable:
        """A hashable description of the block's equation and of its use in the loss."""
        block = eqs.describe_equation(self.eqn)
        return self.position, self.invariant, self.loops, self.outputs, block


Sources = Mapping[jex.Var, frozenset[int]]
# A function that says whether a rematerialised block stays checkpointed.
StaysCheckpointed = Callable[[jex.JaxprEqn], bool]


@dataclasses.dataclass(eq=False)
class Scope:
    """The jaxpr of a loss or of a scan's body, with its sites.

    A site is one use of an operand, which is a value computed from parameters alone. In
    most sites, an equation combines the operand with a value that depends on the
    example, and an equation has one site for each of its operands.

    Attributes:
      closed: the jaxpr.
      varying_scans: for every variable that is treated as independent of the example,
        the scans in which the variable changes from iteration to iteration. A scan is
        given by its depth; the outermost scan has depth 0.
      sites: for each equation, its sites in the order of the operands among the inputs.
      scans: for each differentiated scan that an operand enters, the scope of the body,
        which may have no sites. The key is the index of the scan's equation.
      outputs: one site for each differentiated output of the jaxpr that is computed
        from parameters alone. An array of zeros for each example, the tap, is added to
        this output. So the derivatives by the taps are separate for each example.
    """

    closed: jex.ClosedJaxpr
    varying_scans: dict[jex.Var, frozenset[int]]
    sites: list[list[Site]]
    scans: dict[int, "Scope"] = dataclasses.field(default_factory=dict)
    outputs: list[Site] = dataclasses.field(default_factory=list)

    def varying_scans_of(self, *atoms: Atom) -> frozenset[int] | None:
        """The scans in which at least one of the atoms changes between iterations.

        Atoms are variables and literals. A scan is given by its depth. The result is
        None if an atom depends on an example.
        """
        variables = [v for v in atoms if isinstance(v, jex.Var)]
        if not all(v in self.varying_scans for v in variables):
            return None
        return frozenset().union(*(self.varying_scans[v] for v in variables))

    def block_sites(self, index: int) -> list[BlockSite]:
        """The sites of the checkpointed block at the equation with the given index.

        Each site is one input of the block that is computed from parameters alone. The
        list is empty if the equation is not a block that stays checkpointed.
        """
        return [site for site in self.sites[index] if isinstance(site, BlockSite)]

    def all_sites(self) -> list[Site]:
        """All sites of the jaxpr, including the sites in the bodies of scans.

        The argument `taps` of `evaluate.run` has an array of zeros for each site, in
        the same order.
        """
        sites: list[Site] = []
        for index, eqn_sites in enumerate(self.sites):
            sites += eqn_sites
            if index in self.scans:
                sites += self.scans[index].all_sites()
        return [*sites, *self.outputs]


def analyse(
    closed: jex.ClosedJaxpr,
    varying_scans: Sequence[frozenset[int] | None],
    differentiable: Sequence[bool],
    *,
    lengths: tuple[int, ...] = (),
    outputs: Sequence[int],
    retained: StaysCheckpointed,
) -> tuple[Scope, dict[Site, frozenset[int]]]:
    """Find the sites of a jaxpr.

    A site is an equation that combines an operand, which is a value computed from
    parameters alone, with a value that depends on the example.

    Args:
      closed: the jaxpr, in which calls that parameters enter are inlined.
      varying_scans: for each input, the scans in which it changes from iteration to
        iteration, or None if it depends on an example.
      differentiable: for each input, whether it has a derivative by a parameter and
        depends on no example.
      lengths: the lengths of the scans around the jaxpr, the outermost first.
      outputs: the indices of the outputs that are differentiated. An equation on which
        none of these outputs depends has no site. A differentiated output that is
        computed from parameters alone is itself a site.
      retained: a function that says whether a rematerialised block inside a scan stays
        checkpointed. Outside scans, the blocks that do not stay checkpointed are
        already inlined.

    Returns:
      The jaxpr with its sites, and a map from each site, including sites in scans, to
      the indices of the differentiable inputs on which the site's operand depends.
    """
    jaxpr = closed.jaxpr
    live = live_variables(jaxpr, outputs)
    around_constants = dict.fromkeys(jaxpr.constvars, frozenset())
    scope = Scope(closed, around_constants, [[] for _ in jaxpr.eqns])
    sources: dict[jex.Var, frozenset[int]] = {}
    origins: dict[Site, frozenset[int]] = {}
    for i, var in enumerate(jaxpr.invars):
        if (varying := varying_scans[i]) is not None:
            scope.varying_scans[var] = varying
            sources[var] = frozenset({i} if differentiable[i] else ())

    def depends(*atoms: Atom) -> frozenset[int]:
        return sources_of(atoms, sources)

    def loops(operand: jex.Var) -> tuple[Loop, ...]:
        return tuple(
            Loop(length, shared=depth not in scope.varying_scans[operand])
            for depth, length in enumerate(lengths)
        )

    def site(eqn: jex.JaxprEqn, position: int, rule: Rule | None) -> Site:
        operand, name = cast(jex.Var, eqn.invars[position]), eqn.primitive.name
        where = operand, position, loops(operand)
        if eqs.is_rematerialised(eqn):
            invariant = tuple(scope.varying_scans_of(v) is not None for v in eqn.invars)
            return BlockSite(*where, name, eqn, invariant, live_outputs(eqn, live))
        if rule is None:
            return Site(*where, name)
        return RuledSite(*where, f"{name} ({rule.name})", rule)

    def is_in_each_iteration(eqn: jex.JaxprEqn, varying: frozenset[int]) -> bool:
        """Whether the equation has a custom_vjp that must be applied in each iteration.

        The result is True if the equation uses custom_vjp, and its inputs depend on a
        parameter and are the same in all iterations of a scan around the equation. A
        custom derivative need not be linear in the cotangent, and JAX applies the
        derivative in each iteration. So the engine must not apply the derivative once,
        to the sum of the cotangents of all iterations.
        """
        fixed = len(varying) < len(lengths) and bool(depends(*eqn.invars))
        return fixed and eqs.uses([eqn], "custom_vjp")

    for index, eqn in enumerate(jaxpr.eqns):
        varying = scope.varying_scans_of(*eqn.invars)
        if varying is not None and not is_in_each_iteration(eqn, varying):
            # The outputs are batch-invariant. They have derivatives by the same inputs,
            # unless the equation stops the derivative.
            has_derivative = eqn.primitive.name != "stop_gradient"
            dependencies = depends(*eqn.invars) if has_derivative else frozenset()
            for var in eqn.outvars:
                scope.varying_scans[var] = varying
                sources[var] = dependencies if eqs.is_inexact(var) else frozenset()
            continue
        operands = [i for i, v in enumerate(eqn.invars) if depends(v)]
        if not operands or live.isdisjoint(eqn.outvars):
            continue
        tapped: Iterable[int] = operands
        if eqn.primitive.name == "scan":
            scope.scans[index], tapped, of_body = _analyse_scan(
                scope, eqn, operands, lengths, live_outputs_of_scan(eqn, live), retained
            )
            for inner, body_inputs in of_body.items():
                origins[inner] = depends(*(eqn.invars[i] for i in body_inputs))
        # Rules need an equation that is linear in its operand. If an equation has two
        # operands, as in a product of two functions of a parameter, both are tapped.
        rule = rule_for(eqn, operands[0]) if len(operands) == 1 else None
        scope.sites[index] = [site(eqn, i, rule) for i in sorted(tapped)]
        origins.update((one, depends(one.operand)) for one in scope.sites[index])

    # A differentiated output that no example enters also gets a tap. So its derivative
    # is computed for each example, as in the vmap engine.
    for i in outputs:
        operand = jaxpr.outvars[i]
        if isinstance(operand, jex.Var) and (dependencies := depends(operand)):
            scope.outputs.append(Site(operand, i, loops(operand), "output"))
            origins[scope.outputs[-1]] = dependencies
    return scope, origins


def _analyse_scan(
    outer: Scope,
    eqn: jex.JaxprEqn,
    operands: Sequence[int],
    lengths: tuple[int, ...],
    outputs: Sequence[int],
    retained: StaysCheckpointed,
) -> tuple[Scope, set[int], dict[Site, frozenset[int]]]:
    """Find the sites in a scan's body, and the scan's inputs to tap before the scan.

    A site is an equation that combines an operand, which depends on a parameter but on
    no example, with the example. An operand is tapped if an array of zeros is added to
    it. The cotangent of the zeros is then the operand's per-example gradient. The
    scan's inputs are of three types:

    - From a constant of the scan, the body may compute an operand that is the same in
      all iterations. If this operand would be tapped in the body, the constant is
      tapped before the scan instead. The tap's cotangent is then the sum over the
      iterations. Otherwise the sites of the constant are in the body.
    - The sites of a scanned input are in the body, because each iteration uses another
      slice.
    - An operand that is the initial value of a carry is tapped before the scan. In the
      body, the carried value is treated as dependent on the example, since the carry of
      later iterations usually depends on the example.

    Args:
      outer: the jaxpr around the scan, and its sites.
      eqn: the scan's equation.
      operands: the indices of the equation's inputs that are operands.
      lengths: the lengths of the scans around this scan, the outermost first.
      outputs: the indices of the body's outputs that are differentiated.
      retained: a function that says whether a rematerialised block in the body stays
        checkpointed.

    Returns:
      The body with its sites. The indices of the equation's inputs to tap before the
      scan. For each site in the body, the indices of the body's inputs on which the
      site's operand depends.
    """
    consts, carry = scan_sizes(eqn.params)
    carried = range(consts, consts + carry)
    varying_scans_of_inputs = [
        None if i in carried else outer.varying_scans_of(v)
        for i, v in enumerate(eqn.invars)
    ]
    invariant = [varying is not None for varying in varying_scans_of_inputs]
    parametric = [on and i in operands for i, on in enumerate(invariant)]
    body = inline(eqn.params["jaxpr"], invariant, parametric, retained)
    depth = len(lengths)
    tapped_before = {i for i in operands if i in carried}
    # If a constant is tapped before the scan, other equations can become sites without
    # a rule. So the analysis is repeated until no further constant must be tapped.
    while True:
        # Scanned inputs differ between iterations of this scan.
        varying_scans = [
            None
            if varying is None or i in tapped_before
            else varying.union([] if i < consts else [depth])
            for i, varying in enumerate(varying_scans_of_inputs)
        ]
        inputs = range(len(varying_scans))
        scope, origins = analyse(
            body,
            varying_scans,
            [i in operands and i not in tapped_before for i in inputs],
            lengths=(*lengths, eqn.params["length"]),
            outputs=outputs,
            retained=retained,
        )
        unruled = {
            source
            for site, dependencies in origins.items()
            if site.has_operand_tap and site.loops[depth].shared
            for source in dependencies
        }
        if not unruled:
            return scope, tapped_before, origins
        tapped_before |= unruled


def operands(scope: Scope, inputs: Sequence[jax.Array | None]) -> list[jax.Array]:
    """The values of the operands of all sites, in the order of `scope.all_sites()`.

    An operand is a value that is computed from parameters alone. The value of an
    operand in a scan's body has one leading axis for each scan in which the operand
    changes from iteration to iteration, the outermost scan first.

    Args:
      scope: the jaxpr and its sites, from the analysis.
      inputs: for each input of the jaxpr, its value, with one leading axis for each
        scan around the jaxpr in which the input changes; None if the input depends on
        the example.
    """
    values, values_of_operands = eqs.values_of_inputs(scope.closed, inputs), []
    for index, eqn in enumerate(scope.closed.jaxpr.eqns):
        # All batch-invariant equations are traced, even if no operand needs them.
        if eqn.outvars and all(v in scope.varying_scans for v in eqn.outvars):
            args = [eqs.read(v, values) for v in eqn.invars]
            out = _evaluate_in_all_iterations(scope, eqn, args)
            values.update(zip(eqn.outvars, out, strict=True))
        values_of_operands += [values[site.operand] for site in scope.sites[index]]
        if index in scope.scans:
            body = scope.scans[index]
            pairs = zip(eqn.invars, body.closed.jaxpr.invars, strict=True)
            body_inputs = [
                eqs.read(outer, values) if inner in body.varying_scans else None
                for outer, inner in pairs
            ]
            values_of_operands += operands(body, body_inputs)
    return [*values_of_operands, *(values[site.operand] for site in scope.outputs)]


def _evaluate_in_all_iterations(
    scope: Scope, eqn: jex.JaxprEqn, inputs: Arrays
) -> list[jax.Array]:
    """Evaluate an equation that no example enters, for all iterations of its scans.

    Each input has one leading axis for each scan around the equation in which this
    input changes from iteration to iteration. Each output has one leading axis for each
    scan in which at least one input changes.
    """

    def function(*inputs: jax.Array) -> list[jax.Array]:
        return eqs.bind(eqn, inputs)

    # The innermost scan is mapped first, so that the outermost scan's axis is leading.
    varying_scans = [scope.varying_scans_of(v) or frozenset() for v in eqn.invars]
    for depth in sorted(frozenset().union(*varying_scans), reverse=True):
        function = jax.vmap(
            function, [0 if depth in s else None for s in varying_scans]
        )
    return function(*inputs)


def sources_of(atoms: Iterable[Atom], sources: Sources) -> frozenset[int]:
    """The differentiable inputs of a jaxpr on which any of the given atoms depends.

    Args:
      atoms: variables and literals of the jaxpr; literals depend on no input.
      sources: for each variable that depends on no example, the indices of the
        differentiable inputs on which the variable depends.

    Returns:
      The indices of the inputs.
    """
    variables = (v for v in atoms if isinstance(v, jex.Var))
    return frozenset().union(*(sources.get(v, ()) for v in variables))


# Primitives whose derivative is zero wherever it exists. JAX gives their outputs no
# tangent, although the dtype of the outputs could have a tangent.
_ZERO_DERIVATIVE = frozenset({"stop_gradient", "floor", "ceil", "round", "sign"})


def live_variables(jaxpr: jex.Jaxpr, outputs: Iterable[int]) -> set[jex.Var]:
    """The variables whose tangents may enter the given outputs of a jaxpr.

    The outputs of an equation are assumed to depend on all of its inputs, with two
    exceptions: scans, whose bodies are searched, and primitives with derivative zero.

    Args:
      jaxpr: the jaxpr.
      outputs: the indices of the outputs that are differentiated.
    """
    live: set[jex.Var] = set()
    _add_inexact(live, [jaxpr.outvars[i] for i in outputs])
    for eqn in reversed(jaxpr.eqns):
        if live.isdisjoint(eqn.outvars) or eqn.primitive.name in _ZERO_DERIVATIVE:
            continue
        inputs: Sequence[Atom] = eqn.invars
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            live_in_body = live_variables(body, live_outputs_of_scan(eqn, live))
            pairs = zip(eqn.invars, body.invars, strict=True)
            inputs = [outer for outer, inner in pairs if inner in live_in_body]
        _add_inexact(live, inputs)
    return live


def live_outputs(eqn: jex.JaxprEqn, live: set[jex.Var]) -> tuple[int, ...]:
    """The indices of an equation's outputs that are in `live`.

    `live` holds the variables whose tangents may enter the loss.
    """
    return tuple(i for i, var in enumerate(eqn.outvars) if var in live)


def live_outputs_of_scan(eqn: jex.JaxprEqn, live: set[jex.Var]) -> tuple[int, ...]:
    """The indices of the outputs of a scan's body whose tangents may enter the loss.

    An output's tangent may enter the loss after the scan, or as a carried value in a
    later iteration. `live` holds the variables outside of the scan whose tangents may
    enter the loss.
    """
    consts, carry = scan_sizes(eqn.params)
    body = eqn.params["jaxpr"].jaxpr
    outputs = set(live_outputs(eqn, live))
    # A carried value may enter the loss only through another carried value. So iterate
    # to a fixed point.
    while True:
        live_in_body = live_variables(body, outputs)
        carried = {i for i in range(carry) if body.invars[consts + i] in live_in_body}
        if carried <= outputs:
            return tuple(sorted(outputs))
        outputs |= carried


def _add_inexact(live: set[jex.Var], atoms: Iterable[Atom]) -> None:
    """Add to `live` those variables of `atoms` whose dtype has tangents."""
    live.update(v for v in atoms if isinstance(v, jex.Var) and eqs.is_inexact(v))
