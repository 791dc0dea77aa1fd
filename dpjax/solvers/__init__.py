"""Solvers: algorithms from papers that return private parameters and their guarantee.

The arguments of a solver are a loss, initial parameters, data, hyperparameters, and the
assumptions of the guarantee. The solver checks these arguments, calibrates its noise by
the accountant, trains in one compiled program, and returns the parameters with their
guarantee. The package contains:

1. `losses`: losses of linear scores, with the constants that an accountant needs.
   `prox`: proximal operators of convex terms and sets that depend on no data.
2. The solvers. The guarantee of some solvers covers only the final parameters, and
   assumes a convex or smooth loss: `objective_perturbation` (noise in the objective,
   and far less noise in the result), `output_perturbation` (one draw of noise, after
   the last step), `noisy_gd` (full batches), `noisy_cyclic_gd` (batches in a fixed or
   reshuffled order) and `noisy_sgd` (random batches). The guarantee of the other
   solvers covers every iterate, and holds for any loss: `random_round_sgd` (a random
   number of steps), `dp_nsgd`, and `sensitivity_reduced_nsgd` (for gradients that
   change little in an epoch).
3. Functions that choose hyperparameters before training: `choose_regularization` for
   `objective_perturbation`, and `choose_num_steps` for `output_perturbation`.
4. The results: `Result`, and `Curve`, which has the loss of every step (for
   `random_round_sgd` and `objective_perturbation`, a single mean loss). The guarantee
   in a `Result` is an `accounting.profiles.Guarantee`, which computes ε from δ and δ
   from ε.

Several solvers share three private modules. `_checks` refuses invalid arguments, masks
non-finite examples, and states the assumptions of guarantees in words. `_precision`
calibrates noise multipliers, and rounds hyperparameters to float32, so that the
training program and the privacy accountant use the same numbers. `_precision` also
bounds the effect of rounding on gradient descent. `_descent` runs noisy gradient
descent, and contains the result types. Each other private module contains one or more
solvers.
"""

from dpjax.solvers import losses as losses
from dpjax.solvers import prox as prox
from dpjax.solvers._descent import Curve as Curve
from dpjax.solvers._descent import Result as Result
from dpjax.solvers._dp_nsgd import dp_nsgd as dp_nsgd
from dpjax.solvers._noisy_gd import noisy_cyclic_gd as noisy_cyclic_gd
from dpjax.solvers._noisy_gd import noisy_gd as noisy_gd
from dpjax.solvers._noisy_gd import noisy_sgd as noisy_sgd
from dpjax.solvers._objective_perturbation import (
    choose_regularization as choose_regularization,
)
from dpjax.solvers._objective_perturbation import (
    objective_perturbation as objective_perturbation,
)
from dpjax.solvers._output_perturbation import choose_num_steps as choose_num_steps
from dpjax.solvers._output_perturbation import (
    output_perturbation as output_perturbation,
)
from dpjax.solvers._random_round_sgd import random_round_sgd as random_round_sgd
from dpjax.solvers._sensitivity_reduced_nsgd import (
    sensitivity_reduced_nsgd as sensitivity_reduced_nsgd,
)
