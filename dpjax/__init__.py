"""Differentially private training in JAX."""

import importlib
import importlib.metadata
import typing

from dpjax import _former
from dpjax import accounting as accounting
from dpjax import auditing as auditing
from dpjax import checkpoint as checkpoint
from dpjax import ledger as ledger
from dpjax import reduced_momentum as reduced_momentum
from dpjax import sampling as sampling
from dpjax import solvers as solvers
from dpjax import strategies as strategies
from dpjax import tree as tree
from dpjax import windows as windows
from dpjax import workloads as workloads
from dpjax._explain import explain as explain
from dpjax._keys import random_key as random_key
from dpjax._metrics import Metrics as Metrics
from dpjax._metrics import metrics as metrics
from dpjax._plan import Bounded as Bounded
from dpjax._plan import Examples as Examples
from dpjax._plan import OfUser as OfUser
from dpjax._plan import Plan as Plan
from dpjax._plan import QuantileClip as QuantileClip
from dpjax._plan import Users as Users
from dpjax._plan import accumulate as accumulate
from dpjax._plan import by_user as by_user
from dpjax._plan import plan as plan
from dpjax.adjacency import Adjacency as Adjacency
from dpjax.clipping import clip_and_sum as clip_and_sum
from dpjax.correlated import correlated_noise as correlated_noise
from dpjax.momentum import tree_momentum as tree_momentum
from dpjax.noise import add_gaussian_noise as add_gaussian_noise
from dpjax.noise import noisy_mean as noisy_mean
from dpjax.optimizers import dp_adam as dp_adam
from dpjax.optimizers import dp_adamw as dp_adamw
from dpjax.optimizers import dp_nsgd as dp_nsgd
from dpjax.optimizers import dp_sgd as dp_sgd
from dpjax.per_example import PerExample as PerExample
from dpjax.per_example import clipped_grad as clipped_grad

if typing.TYPE_CHECKING:
    from dpjax import plot as plot

__version__ = importlib.metadata.version("dpjax")

_former.modules("dpjax")


def __getattr__(name: str) -> typing.Any:
    """Pictures, for which matplotlib is needed: imported when asked for."""
    if name == "plot":
        return importlib.import_module("dpjax.plot")
    raise AttributeError(f"module 'dpjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is public, for who completes names."""
    hidden = ("importlib", "typing")
    public = {x for x in globals() if not x.startswith("_") and x not in hidden}
    return sorted(public | {"plot", "__version__", "__doc__"})
