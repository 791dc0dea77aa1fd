"""What is alike: what is traced for one serves the others.

A deep network repeats its layers, so that equations repeat with other variables. What
the engine makes of a site or a component is jitted, with that as static argument: JAX
traces it once for all that compare equal here, and lowers it once.
"""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import jax.extend.core as jex
import numpy as np

from dpjax._core.typing import Atom


class HasFeatures(Protocol):
    """A part of a loss."""

    def features(self) -> Hashable:
        """All of it but its variables; no hash where it is like no other."""
        ...


PartT = TypeVar("PartT", bound=HasFeatures)


@dataclasses.dataclass(frozen=True, eq=False)
class Alike(Generic[PartT]):
    """A part of a loss, equal to others that differ in their variables at most."""

    part: PartT

    @functools.cached_property
    def _hashed(self) -> tuple[int, Hashable]:
        """The features, after their hash."""
        try:
            features = self.part.features()
            return hash(features), features
        except TypeError:  # something has no hash
            return id(self.part), id(self.part)

    def __eq__(self, other: object) -> bool:
        """Whether all but variables agree."""
        if self is other:
            return True
        return isinstance(other, Alike) and self._hashed == other._hashed

    def __hash__(self) -> int:
        """Of what is compared."""
        return self._hashed[0]


def of_equation(eqn: jex.JaxprEqn) -> Hashable:
    """An equation's features."""
    types = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    params = [(name, _told_apart(x)) for name, x in sorted(eqn.params.items())]
    return (eqn.primitive, eqn.ctx, *types, *params)


def _told_apart(param: object) -> Hashable:
    """What is equal only where the parameters are the same.

    To Python 0.0 is −0.0, and 1 is True.
    """
    if isinstance(param, tuple):
        return type(param), tuple(map(_told_apart, param))
    if isinstance(param, float | complex | np.generic):
        return type(param), np.asarray(param).tobytes()
    return type(param), param


def of_function(
    inputs: Sequence[jex.Var], eqns: Sequence[jex.JaxprEqn], outs: Sequence[Atom]
) -> Hashable:
    """The features of the function that equations compute."""
    names = {v: i for i, v in enumerate(inputs)}

    def name(atom: Atom) -> Hashable:
        if isinstance(atom, jex.Literal):
            # As bytes: zeros differ in their signs.
            return atom.aval, np.asarray(atom.val).tobytes()
        return names[atom]

    lines = []
    for eqn in eqns:
        lines.append((of_equation(eqn), *map(name, eqn.invars)))
        for v in eqn.outvars:
            names[v] = len(names)
    return tuple(v.aval for v in inputs), tuple(lines), tuple(map(name, outs))
