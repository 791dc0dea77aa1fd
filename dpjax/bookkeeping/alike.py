"""Sites that are alike: what is traced for one serves the others.

A deep network repeats its layers, so that equations repeat with other variables. What
the engine makes of a site's records and cotangent is jitted, with the site as static
argument: JAX traces it once for all that compare equal here, and lowers it once.
"""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

from dpjax.bookkeeping.sites import Site
from dpjax.bookkeeping.trace import aval


@dataclasses.dataclass(frozen=True, eq=False)
class Alike:
    """A site, equal to others that differ in their variables at most."""

    site: Site

    @functools.cached_property
    def _features(self) -> Hashable:
        site, eqn = self.site, self.site.eqn
        features: Any = (site.position, site.loops, aval(site.operand))
        if eqn is None:
            return features
        rule = None if site.rule is None else site.rule.name
        types = [aval(v) for v in (*eqn.invars, *eqn.outvars)]
        params = sorted(eqn.params.items())
        features = (*features, rule, eqn.primitive, eqn.ctx, *types, *params)
        try:
            hash(features)
        except TypeError:  # a parameter that has no hash: the site is like no other
            return id(site)
        return features

    def __eq__(self, other: object) -> bool:
        """Whether all but variables agree."""
        return isinstance(other, Alike) and self._features == other._features

    def __hash__(self) -> int:
        """Of what is compared."""
        return hash(self._features)
