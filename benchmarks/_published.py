"""Compute the noise that papers publish, to compare with the noise that is needed."""

import math

import numpy as np


def dp_nsgd_noise_multiplier(mu, *, num_steps, steps_per_epoch):
    """Return the noise multiplier of Tran and Cutkosky (2022), for μ-GDP under REPLACE.

    The source is their Algorithm 1 and Theorem 4.
    """
    # V of their Algorithm 1, https://arxiv.org/abs/2210.06328. At a level whose nodes
    # are no longer than an epoch, T / N nodes contain the example; at a higher level
    # all nodes do. Noise of variance 16 α² G² V / μ² is 4 sqrt(V) / μ in units of αG.
    depth, epoch_depth = num_steps.bit_length() - 1, steps_per_epoch.bit_length() - 1
    below = (min(depth, epoch_depth) + 1) * num_steps / steps_per_epoch
    above = sum(num_steps >> level for level in range(epoch_depth + 1, depth + 1))
    return 4.0 * math.sqrt(below + above) / mu


def output_perturbation_scale(epsilon, delta, *, num_steps, num_examples, **setting):
    """Return the noise scale of Zhang et al. (2017), Algorithm 1."""
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
