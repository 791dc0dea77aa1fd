"""Auditing: attacks on one's own guarantees, and what their success proves.

A guarantee bounds every attack from above. An attack that is carried out bounds what is
true from below, with a stated confidence. Where the lower bound exceeds what was
reported, the report is wrong; where it is below, nothing is proven.

From scores to a bound:

1. `epsilon_lower`, `mu_lower`: from the scores of independent attacks, at all
   thresholds; `epsilon_at` with one from `best_threshold`. `gaussian_mu_lower`: of a
   Gaussian mechanism, where it loses least.
2. `one_run_epsilon_lower`, `one_run_mu_lower`: from canaries that took part in one run
   by coins, however their scores depend on each other.
3. `auroc`, `true_positive_rate`, `bootstrap_quantiles`: estimates, which prove nothing.
"""

from dpjax.auditing._estimates import auroc as auroc
from dpjax.auditing._estimates import bootstrap_quantiles as bootstrap_quantiles
from dpjax.auditing._estimates import true_positive_rate as true_positive_rate
from dpjax.auditing._gaussian import gaussian_mu_lower as gaussian_mu_lower
from dpjax.auditing._one_run import one_run_epsilon_lower as one_run_epsilon_lower
from dpjax.auditing._one_run import one_run_mu_lower as one_run_mu_lower
from dpjax.auditing._thresholds import best_threshold as best_threshold
from dpjax.auditing._thresholds import epsilon_at as epsilon_at
from dpjax.auditing._thresholds import epsilon_lower as epsilon_lower
from dpjax.auditing._thresholds import mu_lower as mu_lower
