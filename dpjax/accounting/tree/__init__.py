"""The exact privacy of noise that a tree correlates.

A tree releases sums of terms, each node with noise of its own. An example that takes
part several times moves several nodes, and each of them by several terms. All of that
can align and Gaussian noise composes exactly, so μ² is a sum over nodes, at the place
of the worst example.

1. `_momentum`: the left children of one tree, which is what momentum needs.
2. `_reduced_momentum`: three trees, for momentum whose terms are bounded by less. Two
   of them release the nodes of sliding windows; the third is one of step 1.
"""

from dpjax.accounting.tree._momentum import fixed_order_totals as fixed_order_totals
from dpjax.accounting.tree._momentum import momentum_mu as momentum_mu
from dpjax.accounting.tree._reduced_momentum import (
    reduced_momentum_mu as reduced_momentum_mu,
)
