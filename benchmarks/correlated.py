"""Noise shaped for the optimizer: its error beside the best, and its time.

    python benchmarks/correlated.py [--part error|optimize|step] [--without-peers]

Error is μ times the root mean square of the noise in a workload, fixed order, over a
lower bound for any strategy. Needs the extra `bench` for jax_privacy's strategies: its
dense ones are optimised for the workload, the others for prefix sums, as it has them.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from _results import OURS, Table, parser, print_tables, require, write
from _timing import said, take_turns
from scipy.linalg import toeplitz

from dpjax import (
    Adjacency,
    add_gaussian_noise,
    correlated_noise,
    strategies,
    tree,
    workloads,
)
from dpjax.accounting import correlated
from dpjax.accounting.tree import momentum_mu
from dpjax.strategies import _certificate

KEY = jax.random.key(0)
ROUNDS = 21
# Steps an epoch, epochs, decay.
SETTINGS = [(100, 10, 0.9), (23, 20, 0.95), (100, 10, 0.99), (1000, 8, 0.999)]
DENSE = 1000  # steps; jax_privacy's dense strategies take minutes beyond
OUR_KINDS = {
    "geometric, no vector": ("geometric", 1),
    "rational, 1 vector": ("rational", 1),
    "rational, 3 vectors": ("rational", 3),
}


def coefficients(workload, num_steps):
    return _certificate.coefficients(workload, num_steps)


def of_matrix(c, a, n_b):
    """μ times error of a dense strategy, at the worst place of an epoch."""
    gram = np.abs(c.T @ c)
    worst = max(gram[o::n_b, o::n_b].sum() for o in range(n_b))
    return np.sqrt(worst / len(c)) * np.linalg.norm(a @ np.linalg.inv(c))


def of_coefficients(c, workload, num_steps, n_b):
    """The same of a Toeplitz strategy with coefficients c >= 0, by its inverse."""
    c = np.asarray(c, np.float64) / c[0]
    noise = _certificate.ratio(np.ones(1), c, num_steps)
    moved = np.pad(c, (0, -c.size % n_b)).reshape(-1, n_b).cumsum(0).ravel()[: c.size]
    w = np.convolve(coefficients(workload, num_steps), noise)[:num_steps]
    return np.linalg.norm(moved) * np.sqrt(w**2 @ np.arange(num_steps, 0, -1) / num_steps)


def of_tree(decay, num_steps, n_b):
    """That of the tree, in the momentum of its own decay."""
    mu = momentum_mu(
        1.0,
        num_steps=num_steps,
        decay=decay,
        steps_per_epoch=n_b,
        order="fixed",
        adjacency=Adjacency.ZERO_OUT,
    )
    variance = tree.prefix_variance(np.arange(1, num_steps + 1), decay)
    return mu * (1 - decay) * np.sqrt(np.mean(variance))


def of_strategy(strategy, workload, num_steps, n_b):
    mu = correlated.mu(
        strategy,
        1.0,
        num_steps=num_steps,
        steps_per_epoch=n_b,
        order="fixed",
        adjacency=Adjacency.ZERO_OUT,
    )
    return mu * correlated.error(strategy, workload, num_steps)


def peers(num_steps, n_b, epochs, workload):
    """jax_privacy's strategies by name: products."""
    from jax_privacy.matrix_factorization import buffered_toeplitz, dense
    from jax_privacy.matrix_factorization import toeplitz as banded

    found = {}
    with jax.enable_x64(True):
        bands = min(n_b, 32)
        c = banded.optimize_banded_toeplitz(num_steps, bands)
        c = np.pad(np.asarray(c), (0, num_steps - bands))
        product = functools.partial(
            of_coefficients, workload=workload, num_steps=num_steps, n_b=n_b
        )
        found[f"jax_privacy banded, {bands} bands"] = product(c)
        blt = buffered_toeplitz.optimize(
            n=num_steps,
            min_sep=n_b,
            max_participations=epochs,
            error="mean",
            max_buffers=3,
        )
        found["jax_privacy BLT, at most 3 vectors"] = product(
            np.asarray(blt.toeplitz_coefs(num_steps))
        )
        if num_steps <= DENSE:
            a = toeplitz(coefficients(workload, num_steps), np.zeros(num_steps))
            # Its search ends at a gradient of 1e-3, so that numbers must not be small.
            c = dense.optimize(num_steps, epochs=epochs, A=jnp.asarray(100 * a))
            found["jax_privacy dense"] = of_matrix(np.asarray(c), a, n_b)
    return found
