"""Where parameters meet examples: the analysis of a flat jaxpr.

A value is *known* when no example enters it. A site is an equation in which a known
value that depends on a parameter, the operand, meets a value that depends on the
example. Where a rule knows the equation, a zero is added to its output (a tap); the
tap's cotangent and the equation's other input determine the gradient of the operand.
Elsewhere the operand itself is tapped: the cotangent then *is* its per-example
gradient, as the vmap engine would form it.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from dpjax.bookkeeping.rules import Rule, rule_for
from dpjax.bookkeeping.trace import aval, inline


class Level(enum.IntEnum):
    """What a value depends on."""

    KNOWN = 0  # no example
    STEP = 1  # no example, but the iteration of the innermost scan
    EXAMPLE = 2


class Loop(NamedTuple):
    """A scan around a site; shared says that all iterations have one operand."""

    length: int
    shared: bool


@dataclasses.dataclass(eq=False)
class Site:
    """One operand of one equation.

    Attributes:
      eqn: the equation, or None where a value is carried into a loop as it is.
      position: which of the equation's inputs the operand is.
      rule: the rule for the equation, or None: then the operand itself is tapped.
      operand: the variable or the value's variable in its jaxpr.
      loops: the scans around it, the outermost first.
    """

    eqn: jex.JaxprEqn | None
    position: int
    rule: Rule | None
    operand: jex.Var
    loops: tuple[Loop, ...]

    @property
    def tap(self) -> jax.ShapeDtypeStruct:
        """What is added, for one example and all iterations."""
        tapped = self.operand
        if self.rule is not None:
            assert self.eqn is not None
            tapped = self.eqn.outvars[0]
        lengths = tuple(loop.length for loop in self.loops)
        return jax.ShapeDtypeStruct(lengths + aval(tapped).shape, aval(tapped).dtype)

    @property
    def name(self) -> str:
        """The equation's primitive."""
        return "carry" if self.eqn is None else self.eqn.primitive.name


@dataclasses.dataclass(eq=False)
class Scope:
    """A jaxpr (the loss's or a scan body's) and what the analysis says of it.

    Attributes:
      levels: the level of every variable that is not EXAMPLE.
      sites: for an equation's index, its sites by position.
      scans: for an equation's index, the scope of the scan's body.
      outputs: sites at outputs that must be an example's.
    """

    closed: jex.ClosedJaxpr
    levels: dict[jex.Var, Level]
    sites: dict[int, dict[int, Site]] = dataclasses.field(default_factory=dict)
    scans: dict[int, "Scope"] = dataclasses.field(default_factory=dict)
    outputs: dict[int, Site] = dataclasses.field(default_factory=dict)

    def level(self, atom: Any) -> Level:
        """The level of a variable or literal."""
        if isinstance(atom, jex.Literal):
            return Level.KNOWN
        return self.levels.get(atom, Level.EXAMPLE)

    def eqn_level(self, eqn: jex.JaxprEqn) -> Level:
        """The level of an equation's outputs."""
        return max((self.level(v) for v in eqn.invars), default=Level.KNOWN)

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
    levels: Sequence[Level],
    differentiable: Sequence[bool],
    *,
    loops: tuple[Loop, ...] = (),
    outputs: Sequence[int] = (0,),
) -> tuple[Scope, dict[jex.Var, frozenset[int]]]:
    """Find the sites of a flat jaxpr.

    Args:
      closed: the jaxpr.
      levels: the level of each input.
      differentiable: whether each input depends on a parameter, by a derivative.
      loops: the scans around the jaxpr, shared for a known operand.
      outputs: which outputs must depend on the example, as the loss must.

    Returns:
      The scope, and for each known variable the differentiable inputs it depends on.
    """
    jaxpr = closed.jaxpr
    scope = Scope(closed, dict.fromkeys(jaxpr.constvars, Level.KNOWN))
    sources: dict[jex.Var, frozenset[int]] = {}
    for i, var in enumerate(jaxpr.invars):
        if levels[i] != Level.EXAMPLE:
            scope.levels[var] = levels[i]
            sources[var] = frozenset({i} if differentiable[i] else ())

    def depends(atom: Any) -> frozenset[int]:
        return (
            frozenset()
            if isinstance(atom, jex.Literal)
            else sources.get(atom, frozenset())
        )

    def site(eqn: Any, position: int, rule: Rule | None, operand: jex.Var) -> Site:
        inner = loops
        if loops and scope.level(operand) == Level.STEP:
            inner = (*loops[:-1], loops[-1]._replace(shared=False))
        return Site(eqn, position, rule, operand, inner)

    for index, eqn in enumerate(jaxpr.eqns):
        level = scope.eqn_level(eqn)
        if level != Level.EXAMPLE:
            through = eqn.primitive.name != "stop_gradient"
            reached = frozenset().union(*map(depends, eqn.invars))
            for var in eqn.outvars:
                scope.levels[var] = level
                sources[var] = reached if through and _is_inexact(var) else frozenset()
            continue
        operands = [i for i, v in enumerate(eqn.invars) if depends(v)]
        if not operands or not any(map(_is_inexact, eqn.outvars)):
            continue
        lifted = set(operands)
        if eqn.primitive.name == "scan":
            scope.scans[index], lifted = _analyse_scan(scope, eqn, operands, loops)
        found = {}
        for i in operands:
            rule = rule_for(eqn, i) if len(operands) == 1 else None
            if i in lifted:
                found[i] = site(eqn, i, rule, eqn.invars[i])
        scope.sites[index] = found

    for i in outputs:
        if depends(jaxpr.outvars[i]):
            scope.outputs[i] = site(None, 0, None, jaxpr.outvars[i])
    return scope, sources


def _analyse_scan(
    outer: Scope, eqn: jex.JaxprEqn, operands: Sequence[int], loops: tuple[Loop, ...]
) -> tuple[Scope, set[int]]:
    """The scope of a scan's body, and which of the operands are tapped before it.

    A scan's constants stay parameters inside where rules take all their uses, and its
    scanned inputs do. What enters the carry is an example's from there on. A constant
    without a rule is tapped outside, where its cotangent is summed over the
    iterations already.
    """
    body = inline(eqn.params["jaxpr"])
    consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
    outside = {i for i in operands if consts <= i < consts + carry}
    # One loop at a time: what depends on an outer iteration is tapped there.
    outside |= {i for i in operands if outer.level(eqn.invars[i]) == Level.STEP}
    while True:
        levels = [Level.EXAMPLE] * len(eqn.invars)
        for i, atom in enumerate(eqn.invars):
            if outer.level(atom) == Level.KNOWN and i not in outside:
                if i < consts:
                    levels[i] = Level.KNOWN
                elif i >= consts + carry:
                    levels[i] = Level.STEP
        scope, sources = analyse(
            body,
            levels,
            [i in operands and i not in outside for i in range(len(levels))],
            loops=(*loops, Loop(eqn.params["length"], shared=True)),
            outputs=range(len(body.jaxpr.outvars)),
        )
        unruled = {
            source
            for site in scope.all_sites()
            if site.rule is None and site.loops[-1].shared
            for source in sources.get(site.operand, ())
        }
        if not unruled:
            return scope, outside
        outside |= unruled


def _is_inexact(var: jex.Var) -> bool:
    return jnp.issubdtype(aval(var).dtype, jnp.inexact)
