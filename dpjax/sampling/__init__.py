"""Which examples take part in a step: batches of a fixed shape, with a mask.

Pure functions of static sizes, a key and an epoch or step number: under jit, in a scan,
and resumed from any point, the same numbers give the same batches. (Key implementations
whose bits depend on `jax.vmap`, such as "rbg", give others under it.) For many examples
a step takes time in proportion to its batch, and somewhat more for bins.

1. `Batch`: the positions of those that take part, and which places are empty.
2. Once an epoch: `cyclic` in the data's own order, `reshuffled` in a random one (a
   permutation computed place by place), and a single step of either.
   `random_bins`, where every example picks a step at random, and a single step of it.
3. Anew in every step: `fixed_size` without replacement (distinct numbers), `poisson` (a
   binomial count, then that many distinct numbers), `cyclic_poisson` from one group of
   the examples after the other.
"""

from dpjax.sampling._batch import Batch as Batch
from dpjax.sampling._bins import random_bins as random_bins
from dpjax.sampling._bins import random_bins_step as random_bins_step
from dpjax.sampling._draws import cyclic_poisson as cyclic_poisson
from dpjax.sampling._draws import fixed_size as fixed_size
from dpjax.sampling._draws import poisson as poisson
from dpjax.sampling._epochs import cyclic as cyclic
from dpjax.sampling._epochs import cyclic_step as cyclic_step
from dpjax.sampling._epochs import reshuffled as reshuffled
from dpjax.sampling._epochs import reshuffled_step as reshuffled_step
