"""Strategies: how the noise of a step is correlated with the noise of those before.

A strategy is a lower-triangular matrix C. It has ones on its diagonal, unless `scaled`
gave each step noise of another size. The sums x_t are released with noise C⁻¹z, z being
white, which is as private as releasing C x + z. So privacy depends on C alone
(`accounting.correlated.mu`) and what the optimizer sees on C⁻¹ alone
(`accounting.correlated.error`).

1. `independent`, `geometric`, `rational`, `banded`, `banded_inverse` make a `Toeplitz`
   one, the same from step to step; `scaled` one whose noise varies, and `tree` that of
   the binary tree.
2. `optimize` finds the Toeplitz one of a kind with the least error in a workload
   (`dpjax.workloads`), and says how far from the best of all it is.
3. `scheduled` finds how much of that noise each step should have.
4. `amplified` finds what is best where batches are drawn at random.

What a strategy is, training and accounting read from `_matrices`. The
searches go through the accountants, and so nothing of training imports this folder.
"""

from dpjax._matrices.strategy import Scaled as Scaled
from dpjax._matrices.strategy import Tree as Tree
from dpjax._matrices.toeplitz import Toeplitz as Toeplitz
from dpjax.strategies._amplified import Amplified as Amplified
from dpjax.strategies._amplified import amplified as amplified
from dpjax.strategies._making import banded as banded
from dpjax.strategies._making import banded_inverse as banded_inverse
from dpjax.strategies._making import geometric as geometric
from dpjax.strategies._making import independent as independent
from dpjax.strategies._making import rational as rational
from dpjax.strategies._making import scaled as scaled
from dpjax.strategies._making import tree as tree
from dpjax.strategies._optimize import Optimized as Optimized
from dpjax.strategies._optimize import optimize as optimize
from dpjax.strategies._schedule import scheduled as scheduled
