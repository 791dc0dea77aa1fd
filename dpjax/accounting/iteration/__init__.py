"""Privacy of the last iterate, if no earlier iterate is released.

Later noise hides a part of the privacy loss of earlier steps. Contractive steps reduce
the privacy loss too, because they bring the runs on two neighbouring data sets closer
together. Shifted interpolation is a proof that uses the noise and the contractions. The
proof couples the two runs. In each step a shift reduces the distance between the two
runs, at a cost in μ² that depends on the ratio of the shift to the step's noise. The
*optimal shifts* have the least total cost, and follow from a greatest convex minorant
(`optimal_shift_mu`). Composition and the published closed forms correspond to special
choices of the shifts. The μ of the optimal shifts is therefore never larger than the μ
of composition or of a closed form for the same run.

**Files**, in the order in which the code computes a bound:

1. `_setting` checks the assumptions on loss, steps and data. The assumptions determine
   the maximum factor by which a gradient step, clipped or not, multiplies a distance.
   `_setting` also expresses the distances of a step in standard deviations of the
   step's noise.
2. `_minorant` has the optimal shifts of any schedule, computed from the last step to
   the first. `_periodic` has the optimal shifts in closed form, for identical steps of
   which every l-th uses the differing example.
3. Four files have the bounds for the algorithms. `_shifts` has bounds for any noisy
   maps, for schedules of steps and noise, and for the mean of δ over the positions that
   an example can have in an epoch. `_cyclic_gd` has bounds for full batches, with or
   without noise, and for cycles of batches. `_noisy_sgd` has bounds for random batches.
   `_langevin` has bounds for Langevin Monte Carlo and the exponential mechanism.
4. `published` has closed forms as published, for comparison.

docs/iteration.md lists the assumptions that each bound needs.
"""

from dpjax.accounting.iteration import published as published
from dpjax.accounting.iteration._cyclic_gd import (
    gradient_descent_sensitivity as gradient_descent_sensitivity,
)
from dpjax.accounting.iteration._cyclic_gd import last_iterate_rdp as last_iterate_rdp
from dpjax.accounting.iteration._cyclic_gd import (
    noisy_cyclic_gd_bounds as noisy_cyclic_gd_bounds,
)
from dpjax.accounting.iteration._cyclic_gd import (
    noisy_cyclic_gd_mu as noisy_cyclic_gd_mu,
)
from dpjax.accounting.iteration._cyclic_gd import (
    noisy_cyclic_gd_mus as noisy_cyclic_gd_mus,
)
from dpjax.accounting.iteration._cyclic_gd import noisy_gd_bounds as noisy_gd_bounds
from dpjax.accounting.iteration._cyclic_gd import noisy_gd_mu as noisy_gd_mu
from dpjax.accounting.iteration._langevin import (
    exponential_mechanism_mu as exponential_mechanism_mu,
)
from dpjax.accounting.iteration._langevin import langevin_mu as langevin_mu
from dpjax.accounting.iteration._noisy_sgd import noisy_sgd_bounds as noisy_sgd_bounds
from dpjax.accounting.iteration._noisy_sgd import noisy_sgd_epsilon as noisy_sgd_epsilon
from dpjax.accounting.iteration._setting import Bounds as Bounds
from dpjax.accounting.iteration._setting import Setting as Setting
from dpjax.accounting.iteration._setting import (
    clipped_step_lipschitz as clipped_step_lipschitz,
)
from dpjax.accounting.iteration._setting import step_lipschitz as step_lipschitz
from dpjax.accounting.iteration._shifts import optimal_shift_mu as optimal_shift_mu
from dpjax.accounting.iteration._shifts import (
    random_assignment_delta as random_assignment_delta,
)
from dpjax.accounting.iteration._shifts import (
    random_assignment_epsilon as random_assignment_epsilon,
)
from dpjax.accounting.iteration._shifts import (
    scheduled_cyclic_gd_mu as scheduled_cyclic_gd_mu,
)
