"""Upper bounds on the privacy-loss distributions of mechanisms and compositions.

A PLD in this package is a list of events with their counts, not a grid of losses.
Composition therefore takes no time, and every call of `delta` or `epsilon` makes a grid
of its own (`_numerics.pld.composition`). A call has two stages. The first stage makes,
for each mechanism, a pair of discrete distributions that dominates the mechanism
(`pairs` and `atoms` in `_numerics.pld`). The second stage inverts the characteristic
function of the composed pairs (`_numerics.pld.inversion`). Each stage gives an upper
bound.
"""

from dpjax.accounting.pld._distribution import PLD as PLD
from dpjax.accounting.pld._distribution import compose as compose
from dpjax.accounting.pld._distribution import convolve as convolve
from dpjax.accounting.pld._distribution import delta as delta
from dpjax.accounting.pld._distribution import delta_lower as delta_lower
from dpjax.accounting.pld._distribution import epsilon as epsilon
from dpjax.accounting.pld._distribution import epsilon_lower as epsilon_lower
from dpjax.accounting.pld._distribution import of as of
from dpjax.accounting.pld._mechanisms import discrete_gaussian as discrete_gaussian
from dpjax.accounting.pld._mechanisms import discrete_laplace as discrete_laplace
from dpjax.accounting.pld._mechanisms import epsilon_delta as epsilon_delta
from dpjax.accounting.pld._mechanisms import gaussian as gaussian
from dpjax.accounting.pld._mechanisms import gaussian_mixture as gaussian_mixture
from dpjax.accounting.pld._mechanisms import laplace as laplace
from dpjax.accounting.pld._mechanisms import poisson_gaussian as poisson_gaussian
from dpjax.accounting.pld._mechanisms import pure as pure
from dpjax.accounting.pld._mechanisms import randomized_response as randomized_response
from dpjax.accounting.pld._mechanisms import subsampled_gdp as subsampled_gdp
