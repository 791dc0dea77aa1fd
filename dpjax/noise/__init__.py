"""Optax transformations that turn clipped sums into private updates.

The public functions are `dpjax.add_gaussian_noise`,
`dpjax.add_discrete_gaussian_noise`, `dpjax.noisy_mean`, `dpjax.correlated_noise`,
`dpjax.tree_momentum` and the optimizers `dpjax.dp_sgd`, `dpjax.dp_adam`,
`dpjax.dp_adamw` and `dpjax.dp_nsgd`.

1. `_gaussian`: independent noise, and the step limit, which refuses steps beyond the
   accounted ones. `_discrete`: independent noise on a lattice, whose guarantee holds
   for bits. `_correlated`: noise that a strategy (a matrix) correlates across steps,
   and a momentum of the sums with the noise of tree aggregation. `_correlated_lattice`:
   correlated noise on a lattice.
2. `tree`: the noise of tree aggregation.
3. `_windows`: private sums over sliding windows. `_reduced_momentum`: a momentum that
   such sums give from differences of gradients.
4. `_optimizers`: optimizers that divide by the expected batch size.
"""

from dpjax.noise import tree as tree
from dpjax.noise._correlated_lattice import lattice_roundings as lattice_roundings
from dpjax.noise._discrete import lattice_spacing as lattice_spacing
