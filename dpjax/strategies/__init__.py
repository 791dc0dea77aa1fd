"""Strategies: how the noise of a step is correlated with the noise of earlier steps.

A strategy is a lower-triangular matrix C. Its diagonal is 1, unless `scaled` multiplied
the noise of each step by a factor. Let x_t be the gradient sums. A run releases
x + C⁻¹z, where z is independent Gaussian noise. This release is as private as the
release of C x + z, because each of the two can be computed from the other. So privacy
depends on C alone (`accounting.correlated.mu`), and the optimizer's noise depends on
C⁻¹ alone (`accounting.correlated.error`).

1. `independent`, `geometric`, `rational`, `banded` and `banded_inverse` make a
   `Toeplitz` strategy. `scaled` multiplies the noise of a Toeplitz strategy by a factor
   in each step. `tree` makes the strategy of the binary tree mechanism.
2. A workload is the linear map that an optimizer applies to the gradient sums
   (`dpjax.workloads`). The error is the root mean square of the workload's output if
   its input is the noise alone. `optimize` searches for the Toeplitz strategy of a
   given kind with the least error at the same privacy. `optimize` also bounds the ratio
   of this error to the least error of any strategy.
3. `scheduled` searches for the best factor for the noise of each step.
4. `amplified` searches for the best strategy for batches that are drawn at random.

The data types of strategies are in the package `_matrices`, which training and
accounting import. Training must not import the accountants, and the searches in this
package call the accountants. So training must not import this package.
"""

from dpjax._matrices.strategy import Scaled as Scaled
from dpjax._matrices.strategy import Toeplitz as Toeplitz
from dpjax._matrices.strategy import Tree as Tree
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
from dpjax.strategies._optimize import scheduled as scheduled
