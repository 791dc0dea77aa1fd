"""From an equation's input and output cotangent to the rows of its gradient."""

import math

import jax.extend.core as jex

from dpjax.clipping._bookkeeping.jaxpr.equations import aval
from dpjax.clipping._bookkeeping.rules.base import Rule
from dpjax.clipping._bookkeeping.rules.gather import Gather
from dpjax.clipping._bookkeeping.rules.products import Convolution, Dense


def rule_for(eqn: jex.JaxprEqn, position: int) -> Rule | None:
    """The first rule that covers the equation, or None.

    There is no rule for an equation with an array of size zero.
    """
    for rule in (Dense, Convolution, Gather):
        if rule.matches(eqn, position):
            sizes = [math.prod(aval(v).shape) for v in (*eqn.invars, *eqn.outvars)]
            return rule(eqn, position) if all(sizes) else None
    return None
