"""Compare parts of a loss up to the names of variables, so that JAX traces each once.

A deep network repeats its layers, so the same equations occur with other variables. The
engine's functions of a site or a component are jitted, with the site or component as a
static argument. JAX traces and lowers such a function once for all static arguments
that compare equal, and `Alike` defines that comparison.
"""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import jax.extend.core as jex
import numpy as np

from dpjax._core.typing import Atom


class HasFeatures(Protocol):
    """A part of a loss that can be compared with other parts."""

    def features(self) -> Hashable:
        """A description without variables, equal for parts that compute the same.

        The description has no hash where a parameter of an equation has none. The part
        then equals only itself.
        """
        ...


PartT = TypeVar("PartT", bound=HasFeatures)


@dataclasses.dataclass(frozen=True, eq=False)
class Alike(Generic[PartT]):
    """A part of a loss that equals other parts with the same features."""

    part: PartT

    @functools.cached_property
    def _hashed(self) -> tuple[int, Hashable]:
        """The hash of the features, and the features."""
        try:
            features = self.part.features()
            return hash(features), features
        except TypeError:  # A parameter of an equation has no hash.
            return id(self.part), id(self.part)

    def __eq__(self, other: object) -> bool:
        """Whether the other part has the same features."""
        if self is other:
            return True
        return isinstance(other, Alike) and self._hashed == other._hashed

    def __hash__(self) -> int:
        """The hash of the features."""
        return self._hashed[0]


def of_equation(eqn: jex.JaxprEqn) -> Hashable:
    """A description of an equation without its variables: primitive, types, parameters.

    The description includes the equation's context, such as the mesh that it runs on.
    """
    types = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    params = [(name, _told_apart(x)) for name, x in sorted(eqn.params.items())]
    return (eqn.primitive, eqn.ctx, *types, *params)


def _told_apart(param: object) -> Hashable:
    """A value that is equal for two parameters only if they are the same.

    Python's own comparison is too coarse: 0.0 equals −0.0, and 1 equals True.
    """
    if isinstance(param, tuple):
        return type(param), tuple(map(_told_apart, param))
    if isinstance(param, float | complex | np.generic):
        return type(param), np.asarray(param).tobytes()
    return type(param), param


def of_function(
    inputs: Sequence[jex.Var], eqns: Sequence[jex.JaxprEqn], outs: Sequence[Atom]
) -> Hashable:
    """A description of the function that equations compute, without its variables.

    Args:
      inputs: the variables that enter.
      eqns: the equations, in order.
      outs: the outputs, variables or literals.
    """
    # Variables are numbered in the order in which they appear.
    names = {v: i for i, v in enumerate(inputs)}

    def name(atom: Atom) -> Hashable:
        if isinstance(atom, jex.Literal):
            # Compare bytes, because 0.0 == −0.0 and NaN != NaN.
            return atom.aval, np.asarray(atom.val).tobytes()
        return names[atom]

    lines = []
    for eqn in eqns:
        lines.append((of_equation(eqn), *map(name, eqn.invars)))
        for v in eqn.outvars:
            names[v] = len(names)
    return tuple(v.aval for v in inputs), tuple(lines), tuple(map(name, outs))
