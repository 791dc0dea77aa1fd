"""The privacy and the error of noise that a strategy matrix C correlates.

Releasing the sums x with noise C⁻¹z is equivalent to releasing C x + z.

1. `_patterns`: how far one example can move C x, over all sets of steps in which it may
   take part. `mu` is that sensitivity divided by the noise's standard deviation.
2. `epsilon`: amplification where an example's steps are drawn at random. For balls in
   bins (`_bins`) it uses the covariances of participation patterns (`_covariances`),
   bounded by those of a tree (`_trees`) and of a chain (`_chain`).
3. `error`: the size of the noise C⁻¹z in what an optimizer computes from the sums.
"""

from dpjax.accounting.correlated._epsilon import epsilon as epsilon
from dpjax.accounting.correlated._error import error as error
from dpjax.accounting.correlated._mu import mu as mu
