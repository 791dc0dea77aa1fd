"""Optax transformations that turn clipped sums into private updates.

The transformations are `dpjax.add_gaussian_noise`, `dpjax.add_discrete_gaussian_noise`,
`dpjax.noisy_mean`, `dpjax.correlated_noise` and `dpjax.tree_momentum`. The optimizers
are `dpjax.dp_sgd`, `dpjax.dp_adam`, `dpjax.dp_adamw` and `dpjax.dp_nsgd`.

1. `_gaussian` adds independent noise, and refuses steps beyond the number of accounted
   steps. `_discrete` adds independent noise on a lattice (the multiples of a spacing).
   The guarantee of this noise also holds in floating point. `_correlated` adds noise
   that is correlated across steps by a matrix, called the strategy. The correlated
   noise may also be on a lattice. `_correlated` also computes a momentum with the noise
   of tree aggregation.
2. `tree` splits steps into dyadic intervals, each with noise of its own, and computes
   the variance of the noise of tree aggregation.
3. `_reduced_momentum` computes private sums over sliding windows. From private sums of
   the changes of gradients, `_reduced_momentum` computes a private momentum.
4. `_optimizers` chains noise, division by the expected batch size and an optimizer.
"""

from dpjax.noise import tree as tree
from dpjax.noise._correlated import lattice_roundings as lattice_roundings
from dpjax.noise._discrete import lattice_spacing as lattice_spacing
