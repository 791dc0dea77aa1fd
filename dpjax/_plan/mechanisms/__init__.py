"""How a run draws its examples, and what that costs in privacy.

1. `base`: the interface that every way of sampling implements. `subsampled`: batches
   drawn anew in every step. `ordered`: batches in a fixed order, or in a new order in
   every epoch.
2. `amplified`: batches drawn at random for noise that is correlated
   from step to step. An attacker who does not know in which steps an example took part
   learns less about the example.
3. `SAMPLINGS`: the class for each value of the argument `sampling` of `dpjax.plan`.
"""

from dpjax._plan.mechanisms.amplified import CyclicPoisson, FreshBins, RandomBins
from dpjax._plan.mechanisms.base import Mechanism as Mechanism
from dpjax._plan.mechanisms.ordered import Cyclic, Reshuffled
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
    """The mechanism of a run: how it draws examples, and what that costs in privacy."""
    return SAMPLINGS[run.sampling](run.num_examples, run.adjacency, run.shape)
