"""Strategies: how the noise of a step is correlated with the noise of those before.

A strategy is a lower-triangular matrix C with ones on its diagonal. The sums x_t are
released with noise C⁻¹z, z being white, which is as private as releasing C x + z. So
privacy depends on C alone (`accounting.correlated.mu`) and what the optimizer sees on
C⁻¹ alone (`accounting.correlated.error`).

1. `independent`, `geometric`, `rational`, `banded`, `banded_inverse` make one.
2. `Toeplitz` is what they make.
3. `optimize` finds the one with the least error in a workload (`dpjax.workloads`), and
   says how far from the best of all it is.
"""

from dpjax._toeplitz import Toeplitz as Toeplitz
from dpjax.strategies._making import banded as banded
from dpjax.strategies._making import banded_inverse as banded_inverse
from dpjax.strategies._making import geometric as geometric
from dpjax.strategies._making import independent as independent
from dpjax.strategies._making import rational as rational
from dpjax.strategies._optimize import Optimized as Optimized
from dpjax.strategies._optimize import optimize as optimize
