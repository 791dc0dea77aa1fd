"""The exact privacy of noise that a tree correlates.

A tree releases sums of terms, each node with independent noise. An example that takes
part several times changes several nodes, and several terms in each of them. All these
changes can align, and Gaussian noise composes exactly. Therefore μ² is a sum over
nodes, at the worst position that an example can have.

1. `_momentum`: the left children of one tree, which are the nodes that momentum needs.
2. `_reduced_momentum`: three trees, for momentum whose terms have reduced sensitivity.
   Two of the trees release the nodes of sliding windows. The third is a tree of the
   kind in step 1.
"""

from dpjax.accounting.tree._momentum import fixed_order_totals as fixed_order_totals
from dpjax.accounting.tree._momentum import momentum_mu as momentum_mu
from dpjax.accounting.tree._reduced_momentum import (
    reduced_momentum_mu as reduced_momentum_mu,
)
