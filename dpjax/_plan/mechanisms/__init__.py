"""How a run draws its examples, and what that costs in privacy.

1. `base`: what a way of sampling has to say. `subsampled`: batches drawn anew in every
   step. `ordered`: batches in a fixed order, or in a new order in every epoch.
2. `cyclic_poisson`, `random_bins`: batches drawn at random for noise that is correlated
   from step to step. An attacker who does not know in which steps an example took part
   learns less of the example.
3. `SAMPLINGS`: the name of each in `dpjax.plan`.
"""

from dpjax._plan.mechanisms.base import Mechanism as Mechanism
from dpjax._plan.mechanisms.cyclic_poisson import CyclicPoisson
from dpjax._plan.mechanisms.ordered import Cyclic, Reshuffled
from dpjax._plan.mechanisms.random_bins import FreshBins, RandomBins
from dpjax._plan.mechanisms.subsampled import FixedSize, Poisson
from dpjax._plan.parameters import RunParameters

SAMPLINGS: dict[str, type[Mechanism]] = {
    "poisson": Poisson,
    "fixed_size": FixedSize,
    "fixed": Cyclic,
    "reshuffled": Reshuffled,
    "cyclic_poisson": CyclicPoisson,
    "random_bins": RandomBins,
    "fresh_bins": FreshBins,
}


def mechanism_of(run: RunParameters) -> Mechanism:
    """How a run draws its examples, and what that costs."""
    return SAMPLINGS[run.sampling](run.num_examples, run.adjacency, run.shape)
