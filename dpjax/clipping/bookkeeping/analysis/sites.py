"""Where parameters meet examples: the analysis of a flat jaxpr.

A value is *known* when no example enters it; inside scans it may differ between the
iterations of some of them. A site is an equation in which a known value that depends on
a parameter, the operand, meets a value that depends on the example. Where a rule knows
the equation, a zero is added to its output (a tap); the tap's cotangent and the
equation's other input determine the gradient of the operand. Elsewhere the operand
itself is tapped: the cotangent then *is* its per-example gradient, as the vmap engine
would form it.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, cast

import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core.typing import Atom
from dpjax.clipping.bookkeeping.analysis.liveness import (
    live_outputs,
    live_outputs_of_scan,
    live_variables,
)
from dpjax.clipping.bookkeeping.jaxpr.alike import of_equation
from dpjax.clipping.bookkeeping.jaxpr.collectives import uses
from dpjax.clipping.bookkeeping.jaxpr.equations import (
    aval,
    is_rematerialised,
    scan_sizes,
)
from dpjax.clipping.bookkeeping.jaxpr.trace import inline
from dpjax.clipping.bookkeeping.rules.base import Rule
from dpjax.clipping.bookkeeping.rules.select import rule_for


class Loop(NamedTuple):
    """A scan around a site; shared says that all iterations have one operand."""

    length: int
    shared: bool


@dataclasses.dataclass(eq=False)
class RuledSite:
    """An equation that a rule knows: something is added to its output.

    Attributes:
      eqn: the equation.
      position: which of its inputs the operand is.
      rule: the rule.
      operand: the operand's variable.
      loops: the scans around it, the outermost first.
    """

    eqn: jex.JaxprEqn
    position: int
    rule: Rule
    operand: jex.Var
    loops: tuple[Loop, ...]

    @property
    def tapped(self) -> jex.Var:
        """The variable that something is added to."""
        return self.eqn.outvars[0]

    def features(self) -> Hashable:
        """All that does not depend on where in the loss it is."""
        return self.position, self.loops, self.rule.name, of_equation(self.eqn)

    @property
    def name(self) -> str:
        """The equation's primitive and rule."""
        return f"{self.eqn.primitive.name} ({self.rule.name})"


@dataclasses.dataclass(eq=False)
class TappedSite:
    """An operand that is tapped itself.

    Attributes:
      operand: its variable.
      loops: the scans around it, the outermost first.
      name: the primitive of the equation that takes it, or what else does.
    """

    operand: jex.Var
    loops: tuple[Loop, ...]
    name: str

    @property
    def tapped(self) -> jex.Var:
        """The variable that something is added to."""
        return self.operand

    def features(self) -> Hashable:
        """All that does not depend on where in the loss it is."""
        return self.loops, aval(self.operand)


@dataclasses.dataclass(eq=False)
class KeptSite:
    """An operand that enters a rematerialised block, which is kept as it is.

    What the block's own sites give is accounted for inside.

    Attributes:
      eqn: the block.
      known: which of its inputs no example enters.
      position: which of them the operand is.
      operand: the operand's variable.
      loops: the scans around it, the outermost first.
      outputs: which of the block's outputs are differentiated.
    """

    eqn: jex.JaxprEqn
    known: tuple[bool, ...]
    position: int
    operand: jex.Var
    loops: tuple[Loop, ...]
    outputs: tuple[int, ...]

    @property
    def tapped(self) -> jex.Var:
        """The variable that is accounted for."""
        return self.operand

    def features(self) -> Hashable:
        """All that does not depend on where in the loss it is."""
        block = of_equation(self.eqn)
        return self.position, self.known, self.loops, self.outputs, block

    @property
    def name(self) -> str:
        """The equation's primitive."""
        return self.eqn.primitive.name


Site = RuledSite | TappedSite | KeptSite
# Which rematerialised blocks are kept.
Kept = Callable[[jex.JaxprEqn], bool]


@dataclasses.dataclass(eq=False)
class Scope:
    """A jaxpr (the loss's or a scan body's) and what the analysis says of it.

    Attributes:
      depth: how many scans are around it.
      steps: for every known variable, the scans (by depth, the outermost 0) between
        whose iterations it differs.
      sites: for an equation's index, its sites by position.
      scans: for an equation's index, the scope of the scan's body.
      outputs: sites at outputs that must be an example's.
    """

    closed: jex.ClosedJaxpr
    depth: int
    steps: dict[jex.Var, frozenset[int]]
    sites: dict[int, dict[int, Site]] = dataclasses.field(default_factory=dict)
    scans: dict[int, "Scope"] = dataclasses.field(default_factory=dict)
    outputs: dict[int, Site] = dataclasses.field(default_factory=dict)

    def steps_of(self, *atoms: Atom) -> frozenset[int] | None:
        """The scans between whose iterations any of them differs; None: not known."""
        found: frozenset[int] = frozenset()
        for atom in atoms:
            if not isinstance(atom, jex.Literal):
                if atom not in self.steps:
                    return None
                found |= self.steps[atom]
        return found

    def kept(self, index: int) -> list[KeptSite]:
        """The sites of a block that is kept, if an equation is one."""
        found = self.sites.get(index, {}).values()
        return [site for site in found if isinstance(site, KeptSite)]

    def all_sites(self) -> list[Site]:
        """The sites of this scope and of those within, in a fixed order."""
        found: list[Site] = []
        for index in range(len(self.closed.jaxpr.eqns)):
            found.extend(self.sites.get(index, {}).values())
            if index in self.scans:
                found.extend(self.scans[index].all_sites())
        return [*found, *self.outputs.values()]


def analyse(
    closed: jex.ClosedJaxpr,
    steps: Sequence[frozenset[int] | None],
    differentiable: Sequence[bool],
    *,
    lengths: tuple[int, ...] = (),
    outputs: Sequence[int] = (0,),
    kept: Kept = lambda eqn: False,
) -> tuple[Scope, dict[Site, frozenset[int]]]:
    """Find the sites of a flat jaxpr.

    Args:
      closed: the jaxpr.
      steps: for each input the scans between whose iterations it differs, or None where
        an example enters it.
      differentiable: whether each input depends on a parameter, by a derivative.
      lengths: of the scans around the jaxpr, the outermost first.
      outputs: which outputs are differentiated; they must depend on the example, as the
        loss must. Where nothing differentiated depends on an equation, it has no site.
      kept: which rematerialised blocks in scans are kept; others are none by now.

    Returns:
      The scope, and for each site, those within scans too, the differentiable inputs
      that its operand depends on.
    """
    jaxpr = closed.jaxpr
    live = live_variables(jaxpr, outputs)
    scope = Scope(closed, len(lengths), dict.fromkeys(jaxpr.constvars, frozenset()))
    sources: dict[jex.Var, frozenset[int]] = {}
    origins: dict[Site, frozenset[int]] = {}
    for i, var in enumerate(jaxpr.invars):
        if (around := steps[i]) is not None:
            scope.steps[var] = around
            sources[var] = frozenset({i} if differentiable[i] else ())

    def depends(atom: Atom) -> frozenset[int]:
        nothing: frozenset[int] = frozenset()
        return nothing if isinstance(atom, jex.Literal) else sources.get(atom, nothing)

    def loops(operand: jex.Var) -> tuple[Loop, ...]:
        return tuple(
            Loop(length, shared=depth not in scope.steps[operand])
            for depth, length in enumerate(lengths)
        )

    def site(eqn: jex.JaxprEqn, position: int, rule: Rule | None) -> Site:
        operand = cast(jex.Var, eqn.invars[position])
        if is_rematerialised(eqn):
            known = tuple(scope.steps_of(v) is not None for v in eqn.invars)
            differentiated = live_outputs(eqn, live)
            return KeptSite(
                eqn, known, position, operand, loops(operand), differentiated
            )
        if rule is None:
            return TappedSite(operand, loops(operand), eqn.primitive.name)
        return RuledSite(eqn, position, rule, operand, loops(operand))

    def is_applied_in_each_iteration(eqn: jex.JaxprEqn, around: frozenset[int]) -> bool:
        """Whether a custom derivative stands in a scan in which its input is fixed.

        A custom derivative need not be linear in the cotangent. JAX applies it in each
        iteration; here it must not be applied once to the sum of all cotangents.
        """
        fixed = len(around) < len(lengths) and any(map(depends, eqn.invars))
        return fixed and uses([eqn], "custom_vjp")

    for index, eqn in enumerate(jaxpr.eqns):
        around = scope.steps_of(*eqn.invars)
        if around is not None and not is_applied_in_each_iteration(eqn, around):
            through = eqn.primitive.name != "stop_gradient"
            reached = frozenset().union(*map(depends, eqn.invars))
            for var in eqn.outvars:
                scope.steps[var] = around
                sources[var] = reached if through and _is_inexact(var) else frozenset()
            continue
        operands = [i for i, v in enumerate(eqn.invars) if depends(v)]
        if not operands or live.isdisjoint(eqn.outvars):
            continue
        lifted = set(operands)
        if eqn.primitive.name == "scan":
            scope.scans[index], lifted, within = _analyse_scan(
                scope, eqn, operands, lengths, live_outputs_of_scan(eqn, live), kept
            )
            for inner, entered in within.items():
                origins[inner] = frozenset().union(
                    *(depends(eqn.invars[i]) for i in entered)
                )
        rule = rule_for(eqn, operands[0]) if len(operands) == 1 else None
        found = {i: site(eqn, i, rule) for i in operands if i in lifted}
        origins.update((one, depends(one.operand)) for one in found.values())
        scope.sites[index] = found

    for i in outputs:
        operand = jaxpr.outvars[i]
        if isinstance(operand, jex.Var) and (reached := depends(operand)):
            scope.outputs[i] = TappedSite(operand, loops(operand), "carry")
            origins[scope.outputs[i]] = reached
    return scope, origins


def _analyse_scan(
    outer: Scope,
    eqn: jex.JaxprEqn,
    operands: Sequence[int],
    lengths: tuple[int, ...],
    outputs: Sequence[int],
    kept: Kept,
) -> tuple[Scope, set[int], dict[Site, frozenset[int]]]:
    """The scope of a scan's body, the operands that are tapped before it, and origins.

    `outputs` are the body's outputs that are differentiated.
    A scan's constants stay parameters inside where rules take all their uses, and its
    scanned inputs do. What enters the carry is an example's from there on. A constant
    without a rule is tapped outside, where its cotangent is summed over the
    iterations already.
    """
    consts, carry = scan_sizes(eqn)
    carried = range(consts, consts + carry)
    known = [
        outer.steps_of(v) is not None and i not in carried
        for i, v in enumerate(eqn.invars)
    ]
    parametric = [on and i in operands for i, on in enumerate(known)]
    body = inline(eqn.params["jaxpr"], known, parametric, kept)
    depth = len(lengths)
    outside = {i for i in operands if i in carried}
    while True:
        steps: list[frozenset[int] | None] = [None] * len(eqn.invars)
        for i, atom in enumerate(eqn.invars):
            around = outer.steps_of(atom)
            entering = i in outside or i in carried
            if around is not None and not entering:
                steps[i] = around if i < consts else around | {depth}
        scope, origins = analyse(
            body,
            steps,
            [i in operands and i not in outside for i in range(len(steps))],
            lengths=(*lengths, eqn.params["length"]),
            outputs=outputs,
            kept=kept,
        )
        unruled = {
            source
            for site, reached in origins.items()
            if isinstance(site, TappedSite) and site.loops[depth].shared
            for source in reached
        }
        if not unruled:
            return scope, outside, origins
        outside |= unruled


def _is_inexact(var: jex.Var) -> bool:
    return jnp.issubdtype(aval(var).dtype, jnp.inexact)
