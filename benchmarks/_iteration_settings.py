"""Define the settings of published tables as arguments of `accounting.iteration`."""

import numpy as np

from dpjax import Adjacency
from dpjax.accounting import iteration

INF = float("inf")
SMOOTH = {
    "gradient_norm": 1.0,
    "clipped": False,
    "generalised_linear": False,
    "weak_convexity": 0.0,
    "strong_convexity": 0.0,
    "regularization": 0.0,
    "diameter": INF,
    "adjacency": Adjacency.REPLACE,
}


def contracting(lipschitz):
    """Return a strongly convex loss whose step has the given Lipschitz constant."""
    return SMOOTH | {
        "step_size": 1.0,
        "smoothness": 1.0,
        "strong_convexity": 1.0 - lipschitz,
    }


def logistic(regularization):
    """Return clipped, regularised logistic regression on images of norm at most 8."""
    return SMOOTH | {
        "step_size": 0.05,
        "gradient_norm": 5.0,
        "clipped": True,
        "generalised_linear": True,
        "smoothness": 16.0,
        "regularization": regularization,
    }


def logistic_mu(epochs, regularization):
    return iteration.noisy_cyclic_gd_bounds(
        3.0,
        num_epochs=epochs,
        batches_per_epoch=40,
        batch_size=1500,
        order="fixed",
        **logistic(regularization),
    )


def rdp_epsilon(mu, delta):
    """Convert μ to ε by the Rényi divergences a μ²/2, at the best of many orders a."""
    a = 1 + np.logspace(-3, 4, 4000)
    loss = np.log1p(-1 / a) - (np.log(delta) + np.log(a)) / (a - 1)
    return max(0.0, float(np.min(a * float(mu) ** 2 / 2 + loss)))
