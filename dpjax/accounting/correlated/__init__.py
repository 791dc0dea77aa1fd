"""Noise that a strategy C correlates: what it costs in privacy, and in error.

Releasing sums x with noise C⁻¹z is releasing C x + z.

1. `_patterns`: how far one example moves C x, at the worst of the steps that it may
   take part in. `mu` is that over the noise.
2. `epsilon`: what is gained where an example's steps are drawn at random. In bins
   (`_bins`) by the covariances of its patterns (`_covariances`), on trees of them
   (`_trees`) and on a chain (`_chain`).
3. `error`: how large C⁻¹z is in what an optimizer makes of the sums.
"""

from dpjax.accounting.correlated._epsilon import epsilon as epsilon
from dpjax.accounting.correlated._error import error as error
from dpjax.accounting.correlated._mu import mu as mu
