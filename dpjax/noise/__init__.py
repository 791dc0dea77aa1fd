"""From the clipped sum to private updates: transformations of optax.

The entries are `dpjax.add_gaussian_noise`, `dpjax.noisy_mean`,
`dpjax.correlated_noise`, `dpjax.tree_momentum` and the optimizers `dpjax.dp_sgd`,
`dpjax.dp_adam`, `dpjax.dp_adamw` and `dpjax.dp_nsgd`.

1. `_gaussian`: independent noise. `_correlated`: noise of any strategy.
2. `tree`: the noise of a binary tree, and `_momentum`, which averages sums under it.
3. `windows`: the noise of sums over sliding windows, and `reduced_momentum`, which
   takes differences of gradients under it.
4. `_limit`: the refusal of further steps. `_private_mean` and `_optimizers`: chains
   that divide by the expected batch size.
"""

from dpjax.noise import reduced_momentum as reduced_momentum
from dpjax.noise import tree as tree
from dpjax.noise import windows as windows
from dpjax.noise._correlated import CorrelatedNoiseState as CorrelatedNoiseState
from dpjax.noise._gaussian import AddGaussianNoiseState as AddGaussianNoiseState
from dpjax.noise._gaussian import gamma_norm_like as gamma_norm_like
from dpjax.noise._gaussian import gaussian_like as gaussian_like
from dpjax.noise._gaussian import stddev_of_sum as stddev_of_sum
from dpjax.noise._momentum import TreeMomentumState as TreeMomentumState
