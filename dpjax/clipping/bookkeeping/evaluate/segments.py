"""Segments of a loss that repeat, each traced once.

A deep network repeats its blocks, and JAX would batch, differentiate and transpose the
equations of each block separately. The loss is therefore cut at every site with a rule.
Segments that are identical up to variable names (`jaxpr.alike`) share one jitted
function, which JAX batches, differentiates and transposes once. The compiler still
optimises across the calls.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeGuard

import jax
import jax.extend.core as jex

from dpjax._core.meshes import plus
from dpjax._core.typing import Atom
from dpjax.clipping.bookkeeping.analysis.sites import RuledSite, Scope, Site, TappedSite
from dpjax.clipping.bookkeeping.jaxpr.alike import Alike, of_function
from dpjax.clipping.bookkeeping.jaxpr.equations import bind, read


class Stretch(NamedTuple):
    """A segment: some consecutive equations of a scope.

    Attributes:
      start: the index of the first equation.
      eqns: the equations.
      sites: for each equation its sites, by the position of the operand.
      inputs: the variables that the segment reads but does not compute.
      outs: the computed variables that are used after the segment.
    """

    start: int
    eqns: tuple[jex.JaxprEqn, ...]
    sites: tuple[Mapping[int, Site], ...]
    inputs: tuple[jex.Var, ...]
    outs: tuple[jex.Var, ...]

    @property
    def all_sites(self) -> list[Site]:
        """The segment's sites, by equation and then by position."""
        return [site for found in self.sites for site in found.values()]

    def features(self) -> Hashable:
        """The function that the segment computes, and where taps are added."""
        taps = tuple(
            tuple((i, isinstance(site, RuledSite)) for i, site in found.items())
            for found in self.sites
        )
        return taps, of_function(self.inputs, self.eqns, self.outs)


class Passed(NamedTuple):
    """The results of evaluating a segment.

    Attributes:
      outs: the values of the segment's `outs`.
      records: for each of the segment's sites with a rule, in order, the values of the
        equation's inputs except the operand.
    """

    outs: list[jax.Array]
    records: list[tuple[jax.Array, ...]]


def stretches(scope: Scope) -> list[Stretch]:
    """The scope's equations in segments.

    A scan that parameters enter and a checkpointed block are segments of their own,
    because `run` evaluates them in other ways.
    """
    eqns = scope.closed.jaxpr.eqns
    starts = {0}
    for index in range(len(eqns)):
        found = scope.sites.get(index, {}).values()
        if any(isinstance(site, RuledSite) for site in found):
            starts.add(index)
        if index in scope.scans or scope.kept(index):
            starts |= {index, index + 1}
    # The last use of each variable; the scope's outputs are used after all equations.
    last: dict[jex.Var, int] = {}
    for index, eqn in enumerate(eqns):
        last.update((v, index) for v in eqn.invars if _is_variable(v))
    outputs = filter(_is_variable, scope.closed.jaxpr.outvars)
    last.update(dict.fromkeys(outputs, len(eqns)))

    bounds = sorted({*starts, len(eqns)})
    return [
        _stretch(scope, start, stop, last) for start, stop in itertools.pairwise(bounds)
    ]


def _stretch(
    scope: Scope, start: int, stop: int, last: Mapping[jex.Var, int]
) -> Stretch:
    """The segment from index `start` to `stop`.

    `last` gives for each variable the index of the last equation that uses it.
    """
    # Dicts without values are ordered sets: the order of variables is part of a
    # segment's features.
    eqns = tuple(scope.closed.jaxpr.eqns[start:stop])
    made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
    used = dict.fromkeys(v for eqn in eqns for v in eqn.invars if _is_variable(v))
    return Stretch(
        start,
        eqns,
        tuple(scope.sites.get(i, {}) for i in range(start, stop)),
        tuple(v for v in used if v not in made),
        tuple(v for v in made if last.get(v, -1) >= stop),
    )


def _is_variable(atom: Atom) -> TypeGuard[jex.Var]:
    return isinstance(atom, jex.Var)


def passes(
    found: Sequence[Stretch],
) -> list[Callable[[Sequence[jax.Array], Sequence[jax.Array]], Passed]]:
    """For each segment, a function from its inputs and taps to its results.

    Segments that occur several times use a jitted function. A segment that occurs once
    is traced in place.
    """
    alike = [Alike(stretch) for stretch in found]
    counts = collections.Counter(alike)
    return [
        functools.partial(_pass_once if counts[one] > 1 else _pass, one)
        for one in alike
    ]


def _pass(
    alike: Alike[Stretch], inputs: Sequence[jax.Array], taps: Sequence[jax.Array]
) -> Passed:
    stretch, pending = alike.part, iter(taps)
    values = dict(zip(stretch.inputs, inputs, strict=True))
    records = []
    for eqn, sites in zip(stretch.eqns, stretch.sites, strict=True):
        args = [read(v, values) for v in eqn.invars]
        ruled = None
        for position, site in sites.items():
            # A tapped operand gets its tap before the equation; a rule's site gets its
            # tap on the equation's output.
            if isinstance(site, TappedSite):
                args[position] = plus(args[position], next(pending))
            else:
                ruled = position
        out = bind(eqn, args)
        if ruled is not None:
            out[0] = plus(out[0], next(pending))
            records.append(tuple(x for i, x in enumerate(args) if i != ruled))
        values.update(zip(eqn.outvars, out, strict=True))
    return Passed([values[v] for v in stretch.outs], records)


_pass_once = jax.jit(_pass, static_argnums=0)
