"""The constants that the papers publish: for comparison, never as a guarantee.

A function's name begins with the solver whose paper it quotes. Up to ε = 10 all of
these functions give more noise than is needed; for a larger ε they may give too little
noise. The solvers' "exact" noise is the noise that is needed.
"""

import math
from typing import NamedTuple, Unpack

import numpy as np

from dpjax._core import validate
from dpjax.accounting import iteration

__all__ = [
    "dp_nsgd_noise_multiplier",
    "dp_nsgd_parameters",
    "output_perturbation_scale",
    "random_round_noise_multiplier",
]


class PrintedParameters(NamedTuple):
    """The parameters that Tran and Cutkosky's Theorem 6 sets.

    Attributes:
      num_steps: T.
      learning_rate: the step length η.
      decay: β = 1 − α.
      noise_multiplier: a node's noise standard deviation over the clip norm.
    """

    num_steps: int
    learning_rate: float
    decay: float
    noise_multiplier: float


def dp_nsgd_noise_multiplier(
    mu: float, *, num_steps: int, steps_per_epoch: int
) -> float:
    """The noise multiplier that Tran and Cutkosky publish for μ-GDP under REPLACE.

    Their Algorithm 1 gives each node noise of variance 16 V (αG)² / μ², where V is the
    largest number of nodes that one example can affect. The value is for comparison:
    `accounting.tree.momentum_mu` allows less than half of this noise.

    Args:
      mu: the GDP parameter, positive; the paper's 1/σ.
      num_steps: T, at least 1.
      steps_per_epoch: n_b, at least 1; the paper's N, which has batches of one.

    Returns:
      4 sqrt(V) / μ, noise standard deviation over clip norm.

    Raises:
      ValueError: an argument is out of range.

    Reference: Tran and Cutkosky (2022), Algorithm 1 and Theorem 4, with R the depth
    ⌊log₂ T⌋ of the tree.

    Example:
      >>> dp_nsgd_noise_multiplier(1.0, num_steps=1000, steps_per_epoch=100)
      36.0
    """
    validate.positive("mu", mu)
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    n_b = validate.static_int("steps_per_epoch", steps_per_epoch, minimum=1)
    # V of their Algorithm 1, https://arxiv.org/abs/2210.06328. At a level whose nodes
    # are no longer than an epoch, T / N nodes contain the example; at a higher level
    # all nodes do. Noise of variance 16 α² G² V / μ² is 4 sqrt(V) / μ in units of αG.
    depth, epoch_depth = num_steps.bit_length() - 1, n_b.bit_length() - 1
    below = (min(depth, epoch_depth) + 1) * num_steps / n_b
    above = sum(num_steps >> level for level in range(epoch_depth + 1, depth + 1))
    return 4.0 * math.sqrt(below + above) / mu


def dp_nsgd_parameters(
    epsilon: float, delta: float, *, steps_per_epoch: int, dimension: int
) -> PrintedParameters:
    """The parameters of Tran and Cutkosky's Theorem 6, for comparison.

    Args:
      epsilon: positive; the theorem assumes δ >= e^{−ε}.
      delta: in (0, 1).
      steps_per_epoch: n_b, at least 1; the paper's N, which has batches of one.
      dimension: d, the number of parameters, at least 1.

    Returns:
      T, η = 1/sqrt(n_b T), β = 1 − α and the noise multiplier 4σ sqrt(V), where
      T log₂ T = ε n_b² / sqrt(d log(1/δ)) rounded down to whole epochs, at least one,
      α = ε n_b / (T log₂ T sqrt(d log(1/δ))), at most 1, and σ = 2 sqrt(log(1/δ)) / ε.
      Up to ε = 10 log(1/δ) these parameters give (ε, δ) under REPLACE, with more noise
      than is needed.

    Raises:
      ValueError: an argument is out of range.

    Reference: Tran and Cutkosky (2022), Theorems 4 and 6.

    Example:
      >>> printed = dp_nsgd_parameters(
      ...     2.0, 1e-5, steps_per_epoch=1000, dimension=100)
      >>> printed.num_steps, round(printed.decay, 4)
      (4000, 0.9988)
    """
    validate.positive("epsilon", epsilon)
    validate.open_unit("delta", delta)
    n_b = validate.static_int("steps_per_epoch", steps_per_epoch, minimum=1)
    dimension = validate.static_int("dimension", dimension, minimum=1)
    # Their Theorem 6, https://arxiv.org/abs/2210.06328, with σ as in Theorem 4.
    privacy = math.sqrt(dimension * math.log(1 / delta)) / epsilon
    epochs = 1
    while (epochs + 1) * n_b * math.log2((epochs + 1) * n_b) <= n_b**2 / privacy:
        epochs += 1
    num_steps = epochs * n_b
    alpha = n_b / (num_steps * max(math.log2(num_steps), 1.0) * privacy)
    mu = epsilon / (2 * math.sqrt(math.log(1 / delta)))
    return PrintedParameters(
        num_steps=num_steps,
        learning_rate=1 / math.sqrt(n_b * num_steps),
        decay=1 - min(alpha, 1.0),
        noise_multiplier=dp_nsgd_noise_multiplier(
            mu, num_steps=num_steps, steps_per_epoch=n_b
        ),
    )


def output_perturbation_scale(
    epsilon: float,
    delta: float,
    *,
    num_steps: int,
    num_examples: int,
    **setting: Unpack[iteration.Setting],
) -> float:
    """The noise scale that Zhang et al. publish, for comparison.

    Args:
      epsilon: positive.
      delta: in [0, 1); 0 for pure differential privacy.
      num_steps: T, at least 1.
      num_examples: n, at least 1.
      **setting: as for `output_perturbation`.

    Returns:
      Δ/ε for δ = 0 and sqrt(2 log(2/δ)) Δ/ε else, with Δ = 3ηLT/n for a convex and
      5L(μ + β)/(nμβ) for a μ-strongly convex objective of smoothness β. L is the
      gradient norm without the regulariser, which makes the published scale smaller.

    Reference: Zhang, Zheng, Mou and Wang (2017), Algorithm 1, Lemmas 2 and 3.

    Example:
      >>> from dpjax import Adjacency
      >>> setting = dict(
      ...     step_size=1.0, gradient_norm=1.0, clipped=False, generalised_linear=True,
      ...     smoothness=0.25, weak_convexity=0.0, strong_convexity=0.0,
      ...     regularization=0.1, diameter=float("inf"), adjacency=Adjacency.REPLACE)
      >>> scale = output_perturbation_scale(
      ...     1.0, 0.001, num_steps=100, num_examples=1000, **setting)
      >>> print(f"{scale:.4f}")
      0.2506
    """
    lam = float(np.max(setting["regularization"]))
    mu = lam + float(np.max(setting["strong_convexity"]))
    beta = lam + float(np.max(setting["smoothness"]))
    L = float(np.max(setting["gradient_norm"]))
    # Zhang et al. (2017), https://arxiv.org/abs/1703.09947: Lemma 3, then Lemma 2.
    if mu > 0:
        sensitivity = 5 * L * (mu + beta) / (num_examples * mu * beta)
    else:
        eta = float(np.max(setting["step_size"]))
        sensitivity = 3 * eta * L * num_steps / num_examples
    # Algorithm 1, lines 6 and 8: exp(−ε‖z‖/Δ) or exp(−ε²‖z‖² / (4 log(2/δ) Δ²)).
    wide = 1.0 if delta == 0 else math.sqrt(2 * math.log(2 / delta))
    return wide * sensitivity / epsilon


def random_round_noise_multiplier(
    epsilon: float, delta: float, *, num_examples: int
) -> float:
    """The noise multiplier of the paper's Algorithm 2, relative to L, for comparison.

    Args:
      epsilon: in (0, 1].
      delta: in (0, 1).
      num_examples: n, at least 1. The paper has batches of one and up to n² rounds.

    Returns:
      2 sqrt(log(3n/δ) log(2/δ)) / ε.

    Raises:
      ValueError: an argument is out of range.

    Reference: Zhang, Zheng, Mou and Wang (2017), Algorithm 2 and Theorem 4.

    Example:
      >>> print(f"{random_round_noise_multiplier(1.0, 0.001, num_examples=1000):.1f}")
      21.3
    """
    validate.positive("epsilon", epsilon)
    validate.open_unit("delta", delta)
    validate.static_int("num_examples", num_examples, minimum=1)
    if epsilon > 1:
        raise ValueError(f"epsilon must be at most 1, as printed; got {epsilon!r}.")
    # Zhang et al. (2017), Algorithm 2, line 5, https://arxiv.org/abs/1703.09947, L = 1:
    # exp(−ε²‖z‖² / (8 log(3n/δ) log(2/δ))).
    inside = math.log(3 * num_examples / delta) * math.log(2 / delta)
    return 2 * math.sqrt(inside) / epsilon
