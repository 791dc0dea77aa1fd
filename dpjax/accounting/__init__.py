"""Privacy accountants: pure functions that you can jit, vmap and differentiate.

**Notions of privacy.** The notions in 1 to 3 convert to δ(ε) and ε(δ), and compose.
The functions in 4 and 5 apply to every notion:

1. `gdp`: Gaussian differential privacy with parameter μ, exact for Gaussian noise.
   `pure`: pure differential privacy, which is (ε, δ)-DP with δ = 0.
2. `rdp`: Rényi differential privacy. Rényi curves add up, and are quick to compute.
3. `pld`: nearly exact privacy-loss distributions of subsampled mechanisms, of Laplace
   and discrete noise, of randomised response and of mechanisms with a known ε, and of
   compositions of all of these. Lower bounds show how exact the distributions are.
4. `fdp`: bounds on attacks, from a privacy profile δ(ε). `group`: the ε and δ for a
   group of examples, from the profile for one example.
5. `calibrate`: the parameter that meets a target ε.

**The privacy loss of a run**, expressed in one of these notions:

6. `tree`: momentum that is computed from noisy nodes of binary trees. `correlated`:
   noise that is correlated between steps, and the error that this noise causes in an
   optimizer's steps.
7. `random_rounds`: runs that stop after a random number of rounds. `truncation`:
   Poisson batches that overflow their capacity. `allocation`: examples that take part
   in random steps of each epoch.
8. `iteration`: runs that release only their last iterate. `objective`: the release of
   the minimiser of an objective that has a random linear term.
9. `individual`: the privacy loss of each example, from the norms of the example's own
   gradients. These losses are private data.

**Functions for several mechanisms on the same data:**

10. `composition`: mechanisms fixed beforehand, or chosen from the outputs of earlier
   mechanisms.
11. `selection`: searches, which release only the best of several runs.

`events` describes mechanisms, and `profiles` returns ε(δ) and δ(ε) of a description.
`_numerics` holds the numerics that several accountants share.
"""

from dpjax.accounting import allocation as allocation
from dpjax.accounting import calibrate as calibrate
from dpjax.accounting import composition as composition
from dpjax.accounting import correlated as correlated
from dpjax.accounting import events as events
from dpjax.accounting import fdp as fdp
from dpjax.accounting import gdp as gdp
from dpjax.accounting import group as group
from dpjax.accounting import individual as individual
from dpjax.accounting import iteration as iteration
from dpjax.accounting import objective as objective
from dpjax.accounting import pld as pld
from dpjax.accounting import profiles as profiles
from dpjax.accounting import pure as pure
from dpjax.accounting import random_rounds as random_rounds
from dpjax.accounting import rdp as rdp
from dpjax.accounting import selection as selection
from dpjax.accounting import tree as tree
from dpjax.accounting import truncation as truncation
