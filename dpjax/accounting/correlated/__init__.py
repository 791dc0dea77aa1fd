"""The privacy and the error of noise that a strategy matrix C correlates.

Let z be independent Gaussian noise. Then releasing the sums x with the noise C⁻¹z is
equivalent to releasing C x + z.

1. `_patterns` computes the sensitivity: how far one example can move C x, over all sets
   of steps in which the example may take part. `mu` is the sensitivity divided by the
   standard deviation of z.
2. `epsilon` accounts for amplification if an example's steps are drawn at random. If an
   example picks random steps of an epoch, `_bins` computes the covariances of the
   possible sets of steps. Larger covariances, those of a tree (`_trees`) or of a chain
   (`_chain`), then give a bound.
3. `error` is the size of the noise in the values that an optimizer computes from the
   sums.
"""

from dpjax.accounting.correlated._error import error as error
from dpjax.accounting.correlated._privacy import epsilon as epsilon
from dpjax.accounting.correlated._privacy import mu as mu
