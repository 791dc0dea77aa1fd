"""The papers' algorithms: data in, private parameters and their guarantee out."""

from dpjax.solvers import losses as losses
from dpjax.solvers import prox as prox
from dpjax.solvers.dp_nsgd import dp_nsgd as dp_nsgd
from dpjax.solvers.dp_nsgd import printed_parameters as printed_parameters
from dpjax.solvers.guarantee import Guarantee as Guarantee
from dpjax.solvers.guarantee import Pure as Pure
from dpjax.solvers.noisy_cyclic_gd import noisy_cyclic_gd as noisy_cyclic_gd
from dpjax.solvers.noisy_gd import noisy_gd as noisy_gd
from dpjax.solvers.noisy_sgd import noisy_sgd as noisy_sgd
from dpjax.solvers.output_perturbation import (
    output_perturbation as output_perturbation,
)
from dpjax.solvers.random_round_sgd import random_round_sgd as random_round_sgd
from dpjax.solvers.sensitivity_reduced_nsgd import (
    sensitivity_reduced_nsgd as sensitivity_reduced_nsgd,
)
