"""Optax transformations from clipped sums to private updates.

The public functions are `dpjax.add_gaussian_noise`,
`dpjax.add_discrete_gaussian_noise`, `dpjax.noisy_mean`, `dpjax.correlated_noise`,
`dpjax.tree_momentum` and the optimizers `dpjax.dp_sgd`, `dpjax.dp_adam`,
`dpjax.dp_adamw` and `dpjax.dp_nsgd`.

1. `_gaussian`: independent noise, and the step limit, after which further steps are
   refused. `_discrete`: independent noise on a lattice, whose guarantee holds for bits.
   `_correlated`: noise that is correlated across steps by any strategy, and a momentum
   of the sums with the noise of tree aggregation. `_correlated_lattice`: the former on
   a lattice.
2. `tree`: the noise of tree aggregation.
3. `windows`: private sums over sliding windows. `reduced_momentum`: a momentum of
   differences of gradients, computed from such sums.
4. `_optimizers`: chains that divide by the expected batch size.
"""

from dpjax.noise import reduced_momentum as reduced_momentum
from dpjax.noise import tree as tree
from dpjax.noise import windows as windows
from dpjax.noise._correlated_lattice import lattice_roundings as lattice_roundings
from dpjax.noise._discrete import lattice_spacing as lattice_spacing
