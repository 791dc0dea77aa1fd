"""The papers' algorithms: data in, private parameters and their guarantee out."""

from dpjax.solvers.dp_nsgd import dp_nsgd as dp_nsgd
from dpjax.solvers.dp_nsgd import printed_parameters as printed_parameters
from dpjax.solvers.guarantee import Guarantee as Guarantee
