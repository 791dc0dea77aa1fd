"""Samplers, which choose the examples of each step and give batches of fixed shape.

Every sampler is a pure function of its arguments: static numbers and, for most
samplers, a key and the number of an epoch, a step or both. The same arguments give the
same batches under jit, in a scan, and in a run resumed from any step. (Keys of JAX's
random generators "rbg" and "unsafe_rbg" give other batches under `jax.vmap`.) For a
large data set, the time to sample one step is nearly proportional to the batch size,
except in `random_allocation_step`, where the time is proportional to the number of
examples.

If more than `max_batch_size` examples are drawn for a batch, only `max_batch_size` of
these examples take part. Items 2 and 3 describe the batches that do not overflow.

1. `Batch`: the indices of the examples that take part, and a mask that is False for
   padding.
2. Samplers in which every example takes part a fixed number of times per epoch: k times
   in `random_allocation_step`, and once in the other samplers. `cyclic` uses the data's
   own order. `reshuffled` uses a random order. In `random_bins` every example picks a
   step at random. `cyclic_step`, `reshuffled_step` and `random_bins_step` compute the
   batch of a single step.
3. Samplers that draw a new batch in every step. `fixed_size` draws a given number of
   examples without replacement. In `poisson` every example takes part with the same
   probability, independently of all others. `cyclic_poisson` does the same for one
   group of the examples, which changes from step to step.
4. `bound_contributions_of_fixed_graph` selects examples before a run, such that no
   owner owns more than a given number of the selected examples.
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
