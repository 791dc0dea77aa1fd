"""Differentially private training in JAX.

A name is imported when it is first used: `python -m dpjax --help` needs no JAX.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpjax import accounting as accounting
    from dpjax import adjacency as adjacency
    from dpjax import auditing as auditing
    from dpjax import bookkeeping as bookkeeping
    from dpjax import checkpoint as checkpoint
    from dpjax import clipping as clipping
    from dpjax import correlated as correlated
    from dpjax import ledger as ledger
    from dpjax import momentum as momentum
    from dpjax import noise as noise
    from dpjax import optimizers as optimizers
    from dpjax import per_example as per_example
    from dpjax import plot as plot
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

    __version__: str

# The same for a running program: a test holds that both lists agree.
_MODULES = (
    *("accounting", "adjacency", "auditing", "bookkeeping", "checkpoint", "clipping"),
    *("correlated", "ledger", "momentum", "noise", "optimizers", "per_example", "plot"),
    *("reduced_momentum", "sampling", "solvers", "strategies", "tree", "windows"),
    "workloads",
)
_NAMES = {
    "_explain": ("explain",),
    "_keys": ("random_key",),
    "_metrics": ("Metrics", "metrics"),
    "_plan": (
        *("Bounded", "Examples", "OfUser", "Plan", "QuantileClip", "Users"),
        *("accumulate", "by_user", "plan"),
    ),
    "adjacency": ("Adjacency",),
    "clipping": ("clip_and_sum",),
    "correlated": ("correlated_noise",),
    "momentum": ("tree_momentum",),
    "noise": ("add_gaussian_noise", "noisy_mean"),
    "optimizers": ("dp_adam", "dp_adamw", "dp_nsgd", "dp_sgd"),
    "per_example": ("PerExample", "clipped_grad"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

# Not `plot`, which `from dpjax import *` could not import without matplotlib.
__all__ = sorted({*_MODULES, *_HOMES} - {"plot"})  # pyright: ignore


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    value: Any
    if name == "__version__":
        value = importlib.metadata.version("dpjax")
    elif name in _MODULES:
        return importlib.import_module(f"dpjax.{name}")
    elif name in _HOMES:
        value = getattr(importlib.import_module(f"dpjax.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'dpjax' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, for those who complete names."""
    return [*__all__, "plot", "__doc__", "__version__"]
