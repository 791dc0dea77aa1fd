"""Samplers of the examples that take part in a step, as batches of fixed shape.

Every sampler is a pure function of static sizes, a key and an epoch or step number. The
same arguments give the same batches under jit, in a scan, and in a run resumed from any
step. (Key implementations whose bits depend on `jax.vmap`, such as "rbg", give other
batches under `jax.vmap`.) For a large data set, the time of a step is proportional to
its batch size. For random assignment to bins, the time is proportional to the
size of the data set.

1. `Batch`: the indices of the examples that take part, and a mask that is False for
   padding.
2. Samplers in which every example takes part once per epoch. `cyclic` uses the data's
   own order. `reshuffled` uses a random order: a permutation that is evaluated only at
   the positions that a batch needs. In `random_bins` every example picks a step at
   random. `cyclic_step`, `reshuffled_step` and `random_bins_step` give a single step.
   `random_allocation_step` is for examples that take part k times per epoch.
3. Samplers that draw a new batch in every step. `fixed_size` draws distinct numbers
   (without replacement). `poisson` draws a binomial count, and then this many distinct
   numbers. `cyclic_poisson` samples from one group of the examples after another.
4. `bound_contributions_of_fixed_graph`: before a run, a selection of the examples in
   which no owner owns more than a given number of examples.
"""

from dpjax.sampling._bins import random_allocation_step as random_allocation_step
from dpjax.sampling._bins import random_bins as random_bins
from dpjax.sampling._bins import random_bins_step as random_bins_step
from dpjax.sampling._owners import (
    bound_contributions_of_fixed_graph as bound_contributions_of_fixed_graph,
)
from dpjax.sampling._samplers import Batch as Batch
from dpjax.sampling._samplers import cyclic as cyclic
from dpjax.sampling._samplers import cyclic_poisson as cyclic_poisson
from dpjax.sampling._samplers import cyclic_step as cyclic_step
from dpjax.sampling._samplers import fixed_size as fixed_size
from dpjax.sampling._samplers import poisson as poisson
from dpjax.sampling._samplers import reshuffled as reshuffled
from dpjax.sampling._samplers import reshuffled_step as reshuffled_step
