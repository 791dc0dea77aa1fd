"""Find the sites of a flat jaxpr: the equations in which parameters meet examples.

A value is *batch-invariant* when no example enters it; the code calls such values
known. Inside scans a batch-invariant value may still differ between iterations. A
*site* is an equation in which a batch-invariant value that depends on a parameter, the
*operand*, meets a value that depends on the example.

Where a rule covers the equation, a zero, called a *tap*, is added to the equation's
output. The tap's cotangent and the equation's other input determine the gradient of the
operand. Elsewhere the tap is added to the operand itself. Its cotangent is then the
operand's per-example gradient, as the vmap engine would form it.

A value is *live* when its tangent may enter the loss. A loss often computes other
values too: quantities for logging, outputs of a scan that nothing reads, values behind
`stop_gradient`. JAX does not differentiate such values. The engine must not add taps to
them either: the tap's cotangent would be zero, and zero times an infinite derivative is
NaN.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, cast

import jax.extend.core as jex
import jax.numpy as jnp

from dpjax._core.typing import Atom
from dpjax.clipping.bookkeeping.jaxpr.collectives import uses
from dpjax.clipping.bookkeeping.jaxpr.equations import (
    aval,
    is_rematerialised,
    of_equation,
    scan_sizes,
)
from dpjax.clipping.bookkeeping.jaxpr.trace import inline
from dpjax.clipping.bookkeeping.rules import rule_for
from dpjax.clipping.bookkeeping.rules.base import Rule


class Loop(NamedTuple):
    """A scan around a site, and whether all of its iterations share one operand."""

    length: int
    shared: bool


@dataclasses.dataclass(eq=False)
class RuledSite:
    """An equation that a rule covers: the tap is added to the equation's output.

    Attributes:
      eqn: the equation.
      position: the operand's index among the equation's inputs.
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
        """The variable to which the tap is added."""
        return self.eqn.outvars[0]

    def features(self) -> Hashable:
        """A description that is equal for equal sites elsewhere in the loss."""
        return self.position, self.loops, self.rule.name, of_equation(self.eqn)

    @property
    def name(self) -> str:
        """The equation's primitive and rule."""
        return f"{self.eqn.primitive.name} ({self.rule.name})"


@dataclasses.dataclass(eq=False)
class TappedSite:
    """An operand to which the tap is added directly.

    Attributes:
      operand: the operand's variable.
      loops: the scans around it, the outermost first.
      name: the primitive of the equation that takes the operand, or "carry" where the
        operand is an output of the jaxpr.
    """

    operand: jex.Var
    loops: tuple[Loop, ...]
    name: str

    @property
    def tapped(self) -> jex.Var:
        """The variable to which the tap is added."""
        return self.operand

    def features(self) -> Hashable:
        """A description that is equal for equal sites elsewhere in the loss."""
        return self.loops, aval(self.operand)


@dataclasses.dataclass(eq=False)
class KeptSite:
    """An operand that enters a rematerialised block which stays checkpointed.

    The block has sites of its own inside, and computes their norms and sums itself.

    Attributes:
      eqn: the block's equation.
      known: for each of the equation's inputs, whether it is batch-invariant.
      position: the operand's index among the equation's inputs.
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
        """The operand's variable: the tap's cotangent holds the block's result."""
        return self.operand

    def features(self) -> Hashable:
        """A description that is equal for equal sites elsewhere in the loss."""
        block = of_equation(self.eqn)
        return self.position, self.known, self.loops, self.outputs, block

    @property
    def name(self) -> str:
        """The equation's primitive."""
        return self.eqn.primitive.name


Site = RuledSite | TappedSite | KeptSite
# A function that says whether a rematerialised block stays checkpointed.
Kept = Callable[[jex.JaxprEqn], bool]


@dataclasses.dataclass(eq=False)
class Scope:
    """The jaxpr of a loss or of a scan's body, with its sites.

    Attributes:
      closed: the jaxpr.
      depth: the number of scans around the jaxpr.
      steps: for every batch-invariant variable, the scans between whose iterations it
        differs. Scans are given by depth, and the outermost scan has depth 0.
      sites: for an equation's index, its sites by the operand's position.
      scans: for the index of a scan that parameters enter, the scope of its body.
      outputs: for the index of an output that must depend on the example but is
        batch-invariant, its site.
    """

    closed: jex.ClosedJaxpr
    depth: int
    steps: dict[jex.Var, frozenset[int]]
    sites: dict[int, dict[int, Site]] = dataclasses.field(default_factory=dict)
    scans: dict[int, "Scope"] = dataclasses.field(default_factory=dict)
    outputs: dict[int, Site] = dataclasses.field(default_factory=dict)

    def steps_of(self, *atoms: Atom) -> frozenset[int] | None:
        """The scans between whose iterations any of the atoms differs.

        The result is None where an example enters one of the atoms.
        """
        found: frozenset[int] = frozenset()
        for atom in atoms:
            if not isinstance(atom, jex.Literal):
                if atom not in self.steps:
                    return None
                found |= self.steps[atom]
        return found

    def kept(self, index: int) -> list[KeptSite]:
        """The sites of the checkpointed block at an index; none for other equations."""
        found = self.sites.get(index, {}).values()
        return [site for site in found if isinstance(site, KeptSite)]

    def all_sites(self) -> list[Site]:
        """The sites of this scope and of the scans inside it, in a fixed order."""
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
      differentiable: for each input, whether it depends on a parameter through a
        derivative.
      lengths: the lengths of the scans around the jaxpr, the outermost first.
      outputs: which outputs are differentiated; they must depend on the example, as the
        loss must. An equation has no site where no differentiated output depends on it.
      kept: which rematerialised blocks inside scans stay checkpointed. Blocks outside
        scans that do not have been inlined before.

    Returns:
      The scope, and for each site, including sites in scans, the indices of the
      differentiable inputs that its operand depends on.
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
        """Whether a custom_vjp has the same input in all iterations of some scan.

        A custom derivative need not be linear in the cotangent. JAX applies it in each
        iteration. The engine must therefore not apply it once, to the sum of the
        cotangents of all iterations.
        """
        fixed = len(around) < len(lengths) and any(map(depends, eqn.invars))
        return fixed and uses([eqn], "custom_vjp")

    for index, eqn in enumerate(jaxpr.eqns):
        around = scope.steps_of(*eqn.invars)
        if around is not None and not is_applied_in_each_iteration(eqn, around):
            # The outputs stay batch-invariant. They depend on parameters unless the
            # equation stops the derivative.
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
        # Rules need an equation linear in its operand. Where a parameter enters twice,
        # as in a product of two functions of it, the operands are tapped themselves.
        rule = rule_for(eqn, operands[0]) if len(operands) == 1 else None
        found = {i: site(eqn, i, rule) for i in operands if i in lifted}
        origins.update((one, depends(one.operand)) for one in found.values())
        scope.sites[index] = found

    # A differentiated output that no example enters is tapped too, so that its
    # derivative is taken for each example, as the vmap engine does.
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
    """Find the sites in a scan's body, and the operands to tap before the scan.

    A constant of the scan remains an operand inside the body if rules cover all of its
    uses there. Otherwise the constant is tapped before the scan, where its cotangent is
    already summed over the iterations. Scanned inputs remain operands inside the body.
    A value that enters the carry is tapped before the scan, and inside it counts as
    dependent on the example.

    Args:
      outer: the scope around the scan.
      eqn: the scan's equation.
      operands: the indices of the equation's inputs that are operands.
      lengths: the lengths of the scans around this scan, the outermost first.
      outputs: the indices of the body's outputs that are differentiated.
      kept: which rematerialised blocks in the body stay checkpointed.

    Returns:
      The scope of the body, the operands to tap before the scan, and for each site in
      the body the differentiable inputs that its operand depends on.
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
    # An operand that is moved outside can turn other equations into sites without a
    # rule, so the analysis repeats until no constant is left without rules.
    while True:
        steps: list[frozenset[int] | None] = [None] * len(eqn.invars)
        for i, atom in enumerate(eqn.invars):
            around = outer.steps_of(atom)
            entering = i in outside or i in carried
            if around is not None and not entering:
                # Scanned inputs differ between iterations of this scan.
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


# Primitives whose derivative is zero wherever it exists: JAX gives their outputs no
# tangent, although their dtype could carry one.
_FLAT = frozenset({"stop_gradient", "floor", "ceil", "round", "sign"})


def live_variables(jaxpr: jex.Jaxpr, outputs: Iterable[int]) -> set[jex.Var]:
    """The variables whose tangents may enter some outputs of a jaxpr.

    For an equation other than a scan, every output counts as depending on all inputs.

    Args:
      jaxpr: the jaxpr.
      outputs: the indices of the outputs that are differentiated.
    """
    live: set[jex.Var] = set()
    _add_real(live, [jaxpr.outvars[i] for i in outputs])
    for eqn in reversed(jaxpr.eqns):
        if live.isdisjoint(eqn.outvars) or eqn.primitive.name in _FLAT:
            continue
        inputs: Sequence[Atom] = eqn.invars
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            within = live_variables(body, live_outputs_of_scan(eqn, live))
            pairs = zip(eqn.invars, body.invars, strict=True)
            inputs = [outer for outer, inner in pairs if inner in within]
        _add_real(live, inputs)
    return live


def live_outputs(eqn: jex.JaxprEqn, live: set[jex.Var]) -> tuple[int, ...]:
    """The indices of an equation's live outputs."""
    return tuple(i for i, var in enumerate(eqn.outvars) if var in live)


def live_outputs_of_scan(eqn: jex.JaxprEqn, live: set[jex.Var]) -> tuple[int, ...]:
    """The indices of the live outputs of a scan's body.

    The live outputs are those of the scan itself, and the carried values that a later
    iteration needs for them.
    """
    consts, carry = scan_sizes(eqn)
    body = eqn.params["jaxpr"].jaxpr
    outputs = set(live_outputs(eqn, live))
    # A carried value may become live only through another one, hence a fixed point.
    while True:
        within = live_variables(body, outputs)
        carried = {i for i in range(carry) if body.invars[consts + i] in within}
        if carried <= outputs:
            return tuple(sorted(outputs))
        outputs |= carried


def _add_real(live: set[jex.Var], atoms: Iterable[Atom]) -> None:
    """Add to `live` those atoms that are variables of a dtype with tangents."""
    live.update(
        v
        for v in atoms
        if isinstance(v, jex.Var) and jnp.issubdtype(aval(v).dtype, jnp.inexact)
    )
