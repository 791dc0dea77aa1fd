"""Auditing: lower bounds on a mechanism's privacy loss, proven by attacks.

A guarantee bounds the success of every attack from above. The success of one attack
bounds the true privacy loss from below, with a stated confidence. If the lower bound
exceeds the reported privacy loss, the report is wrong; otherwise nothing is proven.

`check` tests the sensitivity of a user's own function. `check` measures the distance by
which one example moves the function's result, and compares this distance with the
claimed sensitivity.

Functions from a mechanism to scores:

1. `plant` adds canaries to a loss. A canary is an example with a known gradient.
   `released` returns the values that a mechanism releases. `white_by_strategy` returns
   a map that makes the noise in these values white. `matched_filter` computes a score
   for each canary from the values. `mixture_scores` computes the scores of canaries
   that took part in random steps.
2. `train_many` runs an algorithm many times on a data set, and as many times on a
   neighbouring data set. `linear_scores` computes scores for half of these runs.
3. `train_shadows`, `log_odds` and `likelihood_ratios` are for membership inference,
   which tests whether an example was in a model's training data. The test compares the
   model with other models that were trained in the same way.

Functions from scores to a bound or an estimate:

1. `epsilon_lower` and `mu_lower` compute bounds from independent scores. These bounds
   use many thresholds. The bound of `epsilon_at` uses one threshold, which
   `best_threshold` chooses. `gaussian_mu_lower` gives the tightest bound, but needs
   Gaussian scores of a Gaussian mechanism.
2. `one_run_epsilon_lower` and `one_run_mu_lower` compute bounds from one run with many
   canaries. Each canary takes part with probability 1/2. The canaries' scores may
   depend on each other in any way.
3. `auroc`, `true_positive_rate` and `bootstrap_quantiles` compute estimates, which
   prove nothing.
"""

from dpjax.auditing._attacks import Marked as Marked
from dpjax.auditing._attacks import Outputs as Outputs
from dpjax.auditing._attacks import Planted as Planted
from dpjax.auditing._attacks import Shadows as Shadows
from dpjax.auditing._attacks import Whiten as Whiten
from dpjax.auditing._attacks import likelihood_ratios as likelihood_ratios
from dpjax.auditing._attacks import linear_scores as linear_scores
from dpjax.auditing._attacks import log_odds as log_odds
from dpjax.auditing._attacks import matched_filter as matched_filter
from dpjax.auditing._attacks import mixture_scores as mixture_scores
from dpjax.auditing._attacks import plant as plant
from dpjax.auditing._attacks import released as released
from dpjax.auditing._attacks import train_many as train_many
from dpjax.auditing._attacks import train_shadows as train_shadows
from dpjax.auditing._attacks import white_by_strategy as white_by_strategy
from dpjax.auditing._check import Finding as Finding
from dpjax.auditing._check import Report as Report
from dpjax.auditing._check import check as check
from dpjax.auditing._one_run import one_run_epsilon_lower as one_run_epsilon_lower
from dpjax.auditing._one_run import one_run_mu_lower as one_run_mu_lower
from dpjax.auditing._scores import auroc as auroc
from dpjax.auditing._scores import best_threshold as best_threshold
from dpjax.auditing._scores import bootstrap_quantiles as bootstrap_quantiles
from dpjax.auditing._scores import epsilon_at as epsilon_at
from dpjax.auditing._scores import epsilon_lower as epsilon_lower
from dpjax.auditing._scores import gaussian_mu_lower as gaussian_mu_lower
from dpjax.auditing._scores import mu_lower as mu_lower
from dpjax.auditing._scores import true_positive_rate as true_positive_rate
