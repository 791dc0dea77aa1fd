"""Differentially private training in JAX.

A name is imported when it is first used, so that `python -m dpjax --help` needs no JAX.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpjax import accounting as accounting
    from dpjax import auditing as auditing
    from dpjax import checkpoint as checkpoint
    from dpjax import clipping as clipping
    from dpjax import features as features
    from dpjax import ledger as ledger
    from dpjax import noise as noise
    from dpjax import plot as plot
    from dpjax import sampling as sampling
    from dpjax import solvers as solvers
    from dpjax import statistics as statistics
    from dpjax import strategies as strategies
    from dpjax import workloads as workloads
    from dpjax._core.adjacency import Adjacency as Adjacency
    from dpjax._core.keys import random_key as random_key
    from dpjax._plan.loader import Examples as Examples
    from dpjax._plan.optimizer import accumulate as accumulate
    from dpjax._plan.parameters import Bounded as Bounded
    from dpjax._plan.parameters import QuantileClip as QuantileClip
    from dpjax._plan.plan import Plan as Plan
    from dpjax._plan.recipe import recipe as recipe
    from dpjax._plan.solve import plan as plan
    from dpjax._plan.tuning import tune as tune
    from dpjax._plan.users import by_user as by_user
    from dpjax.clipping._clip import clip_and_sum as clip_and_sum
    from dpjax.clipping._clipped_grad import PerExample as PerExample
    from dpjax.clipping._clipped_grad import clipped_grad as clipped_grad
    from dpjax.clipping._clipped_grad import explain as explain
    from dpjax.clipping._metrics import metrics as metrics
    from dpjax.ledger._budget import budget as budget
    from dpjax.noise._correlated import correlated_noise as correlated_noise
    from dpjax.noise._correlated import tree_momentum as tree_momentum
    from dpjax.noise._discrete import (
        add_discrete_gaussian_noise as add_discrete_gaussian_noise,
    )
    from dpjax.noise._gaussian import add_gaussian_noise as add_gaussian_noise
    from dpjax.noise._gaussian import noisy_mean as noisy_mean
    from dpjax.noise._optimizers import dp_adam as dp_adam
    from dpjax.noise._optimizers import dp_adamw as dp_adamw
    from dpjax.noise._optimizers import dp_nsgd as dp_nsgd
    from dpjax.noise._optimizers import dp_sgd as dp_sgd

    __version__: str

# The same names for imports at run time. A test checks that both lists agree.
_MODULES = (
    *("accounting", "auditing", "checkpoint", "clipping", "features", "ledger"),
    *("noise", "plot", "sampling", "solvers", "statistics", "strategies"),
    "workloads",
)
_NAMES = {
    "_core.adjacency": ("Adjacency",),
    "_core.keys": ("random_key",),
    "_plan.loader": ("Examples",),
    "_plan.optimizer": ("accumulate",),
    "_plan.parameters": ("Bounded", "QuantileClip"),
    "_plan.plan": ("Plan",),
    "_plan.solve": ("plan",),
    "_plan.users": ("by_user",),
    "_plan.recipe": ("recipe",),
    "_plan.tuning": ("tune",),
    "clipping._clip": ("clip_and_sum",),
    "clipping._clipped_grad": ("PerExample", "clipped_grad", "explain"),
    "clipping._metrics": ("metrics",),
    "ledger._budget": ("budget",),
    "noise._correlated": ("correlated_noise", "tree_momentum"),
    "noise._discrete": ("add_discrete_gaussian_noise",),
    "noise._gaussian": ("add_gaussian_noise", "noisy_mean"),
    "noise._optimizers": ("dp_adam", "dp_adamw", "dp_nsgd", "dp_sgd"),
}
# From each public name to the module that defines it.
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

# `plot` is left out, since `from dpjax import *` would fail without matplotlib.
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
    # Stored in the module, so that the next access does not call this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, for `dir` and tab completion."""
    return [*__all__, "plot", "__doc__", "__version__"]
