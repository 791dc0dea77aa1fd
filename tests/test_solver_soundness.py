"""Every solver from inside: what one example moves, what hides it, and whence it comes.

The noise, or the momentum, is swapped for one that records what it is given and leaves
nothing of it: so two runs on neighbouring data have the same iterates, and all sums of
one can be laid beside those of the other.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import Adjacency, optimizers, reduced_momentum, solvers
from dpjax._keys import stream
from dpjax.accounting.reduced_momentum import reduced_momentum_mu
from dpjax.accounting.tree import momentum_mu
from dpjax.solvers import _descent, losses, random_round_sgd
from dpjax.solvers import dp_nsgd as nsgd
from dpjax.solvers import sensitivity_reduced_nsgd as reduced

KEY = jax.random.key(17)
LOGISTIC = losses.logistic(feature_norm=1.1)
C, SIGMA, BATCH = 0.37, 2.9, 3
SETTING = {
    **LOGISTIC.setting,
    "step_size": 0.3,
    "gradient_norm": C,
    "clipped": True,
    "regularization": 0.1,
    "diameter": math.inf,
    "adjacency": Adjacency.REPLACE,
}
MOMENTUM = {
    "epsilon": 2.0,
    "delta": 1e-3,
    "adjacency": Adjacency.REPLACE,
    "num_epochs": 3,
    "batch_size": BATCH,
    "learning_rate": 0.1,
    "decay": 0.999,
    "clip_norm": C,
}
ROUNDS = {
    "adjacency": Adjacency.REPLACE,
    "max_rounds": 6,
    "batch_size": BATCH,
    "step_size": 0.5,
    "smoothness": 0.4,
    "clip_norm": C,
}
# The module called "random_round_sgd" is shadowed by its function.
ROUNDS_MODULE = __import__("sys").modules["dpjax.solvers.random_round_sgd"]
NSGD_MODULE = __import__("sys").modules["dpjax.solvers.dp_nsgd"]
REDUCED_MODULE = __import__("sys").modules["dpjax.solvers.sensitivity_reduced_nsgd"]


def neighbours(n=8):
    """Two data sets that differ as much as they can in one example."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 3)).astype(np.float32)
    y = np.sign(x[:, 0]).astype(np.float32)
    x[4] = [0.0, 3.0, 0.0]
    other = y.copy()
    y[4], other[4] = 1.0, -1.0
    return (x, y), (x, other)


class Record(NamedTuple):
    """One draw: the key's bits, the sum that it hides, its standard deviation."""

    key: np.ndarray
    total: np.ndarray
    stddev: float
