"""Rules that factor the gradient at one equation, given its input and cotangent.

A rule gives rows whose outer products add up to the gradient of one of the inputs.
"""

import math

import jax.extend.core as jex

from dpjax.clipping._bookkeeping.jaxpr.equations import aval
from dpjax.clipping._bookkeeping.rules.base import Rule
from dpjax.clipping._bookkeeping.rules.gather import Gather
from dpjax.clipping._bookkeeping.rules.products import Convolution, Dense


def rule_for(eqn: jex.JaxprEqn, position: int) -> Rule | None:
    """The rule for an equation's input at `position`; None if no rule covers it.

    No rule covers an equation with an array of size zero.
    """
    for rule in (Dense, Convolution, Gather):
        if rule.matches(eqn, position):
            sizes = [math.prod(aval(v).shape) for v in (*eqn.invars, *eqn.outvars)]
            return rule(eqn, position) if all(sizes) else None
    return None
