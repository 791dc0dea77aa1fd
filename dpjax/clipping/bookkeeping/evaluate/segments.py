"""Stretches of a loss that repeat.

A deep network repeats its blocks, and JAX would batch, differentiate and transpose the
equations of each anew. From one site with a rule to the next, blocks are alike (in
`alike`): such a stretch is a jitted function, for which JAX does all this once. The
compiler sees through its calls.
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
    """Some consecutive equations of a scope.

    Attributes:
      start: the index of the first.
      eqns: the equations.
      sites: of each equation, by position.
      inputs: the variables that enter.
      outs: those of its results that are used elsewhere.
    """

    start: int
    eqns: tuple[jex.JaxprEqn, ...]
    sites: tuple[Mapping[int, Site], ...]
    inputs: tuple[jex.Var, ...]
    outs: tuple[jex.Var, ...]

    @property
    def all_sites(self) -> list[Site]:
        """The sites, in a fixed order."""
        return [site for found in self.sites for site in found.values()]

    def features(self) -> Hashable:
        """What it computes, and where something is added."""
        taps = tuple(
            tuple((i, isinstance(site, RuledSite)) for i, site in found.items())
            for found in self.sites
        )
        return taps, of_function(self.inputs, self.eqns, self.outs)


class Passed(NamedTuple):
    """What a stretch leaves.

    Attributes:
      outs: the values of its results.
      records: for each of its sites with a rule, in order, the values of the equation's
        other inputs.
    """

    outs: list[jax.Array]
    records: list[tuple[jax.Array, ...]]


def stretches(scope: Scope) -> list[Stretch]:
    """The scope's equations in stretches; scans and kept blocks are alone."""
    eqns = scope.closed.jaxpr.eqns
    starts = {0}
    for index in range(len(eqns)):
        found = scope.sites.get(index, {}).values()
        if any(isinstance(site, RuledSite) for site in found):
            starts.add(index)
        if index in scope.scans or scope.kept(index):
            starts |= {index, index + 1}
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
    """The equations between two indices; last is where variables are last used."""
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
    """For each stretch, from its inputs and what is added at its sites, what it leaves.

    What does not repeat is traced as it is.
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
