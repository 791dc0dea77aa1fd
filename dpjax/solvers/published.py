"""The constants that papers publish: for comparison, and never for a guarantee.

A function's name begins with the name of the solver whose paper states the constant. Up
to ε = 10, all of these functions give more noise than privacy needs; for a larger ε,
they may give too little. The solvers' "exact" noise is the noise that privacy needs.
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
      noise_multiplier: a node's noise standard deviation divided by the clip norm.
    """

    num_steps: int
    learning_rate: float
    decay: float
    noise_multiplier: float


def dp_nsgd_noise_multiplier(
    mu: float, *, num_steps: int, steps_per_epoch: int
) -> float:
    """The noise multiplier that Tran and Cutkosky publish for μ-GDP under REPLACE.

    Their Algorithm 1 adds noise of variance 16 V (αG)² / μ² to each node of the tree,
    where V is the maximum number of nodes that one example can affect. The value is for
    comparison: by `accounting.tree.momentum_mu`, less than half of this noise suffices.

    Args:
      mu: the GDP parameter μ, positive; 1/σ in the paper.
      num_steps: T, at least 1.
      steps_per_epoch: n_b, at least 1; N in the paper, whose batches have one example.

    Returns:
      4 sqrt(V) / μ, the noise standard deviation divided by the clip norm.

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
    # V is from their Algorithm 1, https://arxiv.org/abs/2210.06328. At a level whose
    # nodes are at most as long as an epoch, T / N nodes contain the example; at higher
    # levels, all nodes do. Noise of variance 16 α² G² V / μ² has the standard deviation
    # 4 sqrt(V) / μ in units of αG.
    depth, epoch_depth = num_steps.bit_length() - 1, n_b.bit_length() - 1
    below = (min(depth, epoch_depth) + 1) * num_steps / n_b
    above = sum(num_steps >> level for level in range(epoch_depth + 1, depth + 1))
    return 4.0 * math.sqrt(below + above) / mu


def dp_nsgd_parameters(
    epsilon: float, delta: float, *, steps_per_epoch: int, dimension: int
) -> PrintedParameters:
    """The parameters of Tran and Cutkosky's Theorem 6, for comparison.

    Args:
      epsilon: the target ε, positive; the theorem assumes δ >= e^{−ε}.
      delta: the target δ, in (0, 1).
      steps_per_epoch: n_b, at least 1; N in the paper, whose batches have one example.
      dimension: d, the number of parameters, at least 1.

    Returns:
      Four numbers, with p = ε / sqrt(d log(1/δ)). num_steps is the largest multiple T
      of n_b with T log₂ T <= p n_b², but at least n_b. learning_rate is 1/sqrt(n_b T).
      decay is 1 − α with α = min(1, p n_b / (T log₂ T)). noise_multiplier is
      4σ sqrt(V) with σ = 2 sqrt(log(1/δ)) / ε and V as for `dp_nsgd_noise_multiplier`.
      Up to ε = 10 log(1/δ), these numbers give (ε, δ) under REPLACE, with more noise
      than privacy needs.

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
      epsilon: the target ε, positive.
      delta: the target δ, in [0, 1); 0 for pure differential privacy.
      num_steps: T, at least 1.
      num_examples: n, at least 1.
      **setting: the assumptions of the guarantee, as for `output_perturbation`.

    Returns:
      The scale, which is Δ/ε for δ = 0, and sqrt(2 log(2/δ)) Δ/ε for δ > 0. The
      sensitivity Δ is 3ηLT/n for a convex objective, and 5L(μ + β)/(nμβ) for a
      μ-strongly convex objective of smoothness β. L bounds the gradient without the
      regulariser, which makes the published scale smaller.

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
    # The density of the noise is ∝ exp(−ε‖z‖/Δ) or exp(−ε²‖z‖² / (4 log(2/δ) Δ²)), by
    # Algorithm 1, lines 6 and 8.
    wide = 1.0 if delta == 0 else math.sqrt(2 * math.log(2 / delta))
    return wide * sensitivity / epsilon


def random_round_noise_multiplier(
    epsilon: float, delta: float, *, num_examples: int
) -> float:
    """The noise multiplier that Zhang et al. publish for random rounds, for comparison.

    Args:
      epsilon: the target ε, in (0, 1].
      delta: the target δ, in (0, 1).
      num_examples: n, at least 1; batches have one example, and runs up to n² rounds.

    Returns:
      2 sqrt(log(3n/δ) log(2/δ)) / ε, the noise standard deviation divided by the bound
      L on a gradient.

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
        raise ValueError(
            f"epsilon must be at most 1, as in the paper; got {epsilon!r}."
        )
    # Zhang et al. (2017), Algorithm 2, line 5, https://arxiv.org/abs/1703.09947: for
    # L = 1, the density is ∝ exp(−ε²‖z‖² / (8 log(3n/δ) log(2/δ))).
    inside = math.log(3 * num_examples / delta) * math.log(2 / delta)
    return 2 * math.sqrt(inside) / epsilon
