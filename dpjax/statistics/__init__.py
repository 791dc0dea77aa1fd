"""Private statistics: pure functions from private data to a private value.

Each function clips or counts the examples, adds Gaussian noise to sums, and returns a
`Released`: the private value, and an event that describes the mechanism. From the
event, `accounting.profiles.of`, a ledger or a composition computes the privacy cost.
All functions work under `jax.jit`, also with traced data, and under `jax.vmap` over
keys. (The noise multiplier must not be traced in `standardize`, or with noise on a
lattice.)

1. **Sums of clipped rows**: `sum` and `mean`. `variance` and `covariance` also use
   second moments. `standardize` returns a `Standardization` of features.
2. **Counts**: `histogram` in public bins, and `quantile` by bisection.
3. **Evaluation** on held-out private data: `accuracy`, `loss`, `auc`.
"""

from dpjax.statistics._counts import histogram as histogram
from dpjax.statistics._counts import quantile as quantile
from dpjax.statistics._evaluation import accuracy as accuracy
from dpjax.statistics._evaluation import auc as auc
from dpjax.statistics._evaluation import loss as loss
from dpjax.statistics._moments import Standardization as Standardization
from dpjax.statistics._moments import covariance as covariance
from dpjax.statistics._moments import mean as mean
from dpjax.statistics._moments import standardize as standardize
from dpjax.statistics._moments import sum as sum  # noqa: A004
from dpjax.statistics._moments import variance as variance
from dpjax.statistics._release import Released as Released
