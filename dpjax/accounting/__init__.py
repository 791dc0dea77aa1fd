"""Privacy accountants: pure, jitted, vmappable and differentiable functions.

**What a guarantee is.** Each currency turns into δ(ε) and ε(δ), and composes:

1. `gdp`: μ, exact for Gaussian noise. `pure`: ε alone.
2. `rdp`: Rényi curves, which add up and are cheap.
3. `pld`: privacy-loss distributions, nearly exact, of subsampled and mixed mechanisms.
4. `fdp`: what a profile δ(ε) says about attacks.
5. `calibrate`: from a target back to the parameter that meets it.

**What a run costs**, in one of these:

6. `tree`: noise that a tree correlates. `correlated`: noise of any strategy, and what
   it leaves in an optimizer's steps.
7. `random_rounds`: runs that stop after a random number of rounds. `truncation`:
   Poisson batches that overflow their shape. `allocation`: examples that take part once
   an epoch, at random.
8. `iteration`: runs that release their last iterate alone.

`profiles` turns any of these into ε(δ) and δ(ε), and `_numerics` holds what all of them
compute with.
"""

from dpjax.accounting import allocation as allocation
from dpjax.accounting import calibrate as calibrate
from dpjax.accounting import correlated as correlated
from dpjax.accounting import events as events
from dpjax.accounting import fdp as fdp
from dpjax.accounting import gdp as gdp
from dpjax.accounting import iteration as iteration
from dpjax.accounting import pld as pld
from dpjax.accounting import profiles as profiles
from dpjax.accounting import pure as pure
from dpjax.accounting import random_rounds as random_rounds
from dpjax.accounting import rdp as rdp
from dpjax.accounting import tree as tree
from dpjax.accounting import truncation as truncation
