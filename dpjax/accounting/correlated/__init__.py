"""The privacy and the error of noise that a strategy matrix C correlates.

Let x be the sums of clipped gradients, with one row for each step, and let z be
independent Gaussian noise. Releasing x + C⁻¹z is equivalent to releasing C x + z.

1. `_patterns` computes the sensitivity: the maximum distance by which one example moves
   C x, over all sets of steps in which the example may take part. `mu` is the
   sensitivity divided by the standard deviation of z.
2. `epsilon` computes ε, with amplification if the steps of an example are drawn at
   random. A pattern is a set of steps in which an example may take part. Under each
   pattern, a vector bounds how far the example changes each row of C x. If an example
   picks random steps of an epoch, `_bins` bounds the covariance of two patterns, which
   is the inner product of their vectors. `_bins` then bounds ε with larger covariances:
   the covariances of a tree (`_trees`) or of a Gaussian chain (`_chain`).
3. `error` computes the root mean square of the noise in the values that an optimizer
   computes from the sums.
"""

from dpjax.accounting.correlated._error import error as error
from dpjax.accounting.correlated._privacy import epsilon as epsilon
from dpjax.accounting.correlated._privacy import mu as mu
