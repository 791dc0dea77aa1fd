"""How three trees of noise share one privacy budget."""

import functools
import math

import numpy as np

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.outward import MARGIN
from dpjax.accounting.tree import reduced_momentum_mu
from dpjax.noise import reduced_momentum
from dpjax.noise.reduced_momentum import Terms
from dpjax.solvers import _numbers


def allot_noise(
    target_mu: float,
    *,
    bounds: Terms[float],
    num_steps: int,
    steps_per_epoch: int,
    decay: float,
    refresh: float,
    adjacency: Adjacency,
) -> Terms[float]:
    """The noise multipliers for μ-GDP with the least noise in the mean over all steps.

    With a noise variance s², a tree contributes A/s² to μ² and V s² to the momentum's
    variance. For a given μ² the variance is least at s² ∝ sqrt(A/V).

    Args:
      target_mu: μ, positive.
      bounds: the bounds on the norms of one example's terms in the three trees.
      num_steps: T, a multiple of steps_per_epoch.
      steps_per_epoch: n, at least 1.
      decay: β, in [0, 1).
      refresh: γ, in [0, 1].
      adjacency: which data sets are compared.

    Returns:
      `Terms` of noise standard deviations divided by the bounds; inf for a tree that is
      never used.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> noise = allot_noise(
      ...     1.0, bounds=Terms(1.0, 0.1, 0.05), num_steps=400, steps_per_epoch=50,
      ...     decay=0.9, refresh=0.1, adjacency=Adjacency.REPLACE)
      >>> print([f"{x:.2f}" for x in noise])
      ['6.51', '20.88', '31.90']
    """
    validate.positive("target_mu", target_mu)
    for name, bound in bounds._asdict().items():
        validate.positive(f"bounds.{name}", bound)
    mu = functools.partial(
        reduced_momentum_mu,
        num_steps=num_steps,
        decay=decay,
        steps_per_epoch=steps_per_epoch,
        adjacency=adjacency,
    )
    variance = reduced_momentum.momentum_variance(
        num_steps, steps_per_epoch, decay=decay, refresh=refresh
    )
    # Minimise Σ V s² where Σ A/s² is given (Lagrange): s⁴ ∝ A/V, tree by tree.
    shares: list[float] = []
    for k, bound in enumerate(bounds):
        # Infinite noise in the other two trees leaves this tree's cost alone.
        alone = [math.inf] * 3
        alone[k] = 1.0
        cost = float(mu(alone)) ** 2
        added = float(np.mean(variance[k])) * bound**2
        unused = cost == 0 or added == 0
        shares.append(math.inf if unused else math.sqrt(math.sqrt(cost / added)))
    # μ is inversely proportional to a common factor of the three noises. MARGIN covers
    # the roundings on the way.
    scale = float(mu(shares)) / target_mu * MARGIN
    return Terms(*(_numbers.up(share * scale) for share in shares))
