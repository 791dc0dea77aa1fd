"""Closed forms from the literature, beside which `accounting.iteration` is compared.

`iteration.noisy_gd_mu` and `iteration.noisy_cyclic_gd_mu` are never larger than these
closed forms. Here r = L/(bσ) is the gradient sensitivity over the batch size and the
noise standard deviation on the mean gradient, and c is the Lipschitz constant of a
step. The run has E epochs of l batches; l is 1 for full batches.
"""

import numpy as np


def contraction_mu(r, c, *, num_epochs, batches_per_epoch):
    """μ by contraction alone, for full batches or the last batch; c in (0, 1]."""
    # Bok, Su and Altschuler (2024), Theorems 4.2 (full) and 4.5 (cyclic),
    # https://arxiv.org/abs/2403.00278, and their limits at c = 1.
    epochs, period = num_epochs, batches_per_epoch
    y = np.log(np.where(c >= 1, 0.5, c))

    def ratio(count):
        """(1 − c^k)/(1 + c^k)."""
        return np.tanh(-count * y / 2)

    full = ratio(epochs) / ratio(1)
    earlier = -np.exp((2 * period - 2) * y) * np.expm1(2 * y)
    cyclic = 1 + earlier / np.expm1(period * y) ** 2 * ratio(period * (epochs - 1))
    limit = 1 + (epochs - 1) / period
    return r * np.sqrt(np.where(c >= 1, limit, full if period == 1 else cyclic))


def diameter_mu(r, diameter, *, batches_per_epoch):
    """μ of convex losses on a set of diameter Δ = D/(ησ), after Δ/r epochs or more."""
    # Bok, Su and Altschuler (2024), Theorems 4.3 and 4.6.
    # The factor corrects a quotient that rounding raised slightly above an integer.
    waits = np.ceil(diameter / r * (1 - 1e-14))
    first = 0.0 if batches_per_epoch == 1 else r * r
    return np.sqrt(first + (3 * r * diameter + r * r * waits) / batches_per_epoch)


def expansion_mu(r, c, *, num_epochs, batches_per_epoch):
    """μ of a cycle in which noise hides each use before the next, for the last batch.

    Optimal shifts do not improve on it for c >= 1.
    """
    # Kong and Ribero (2024), Proposition 2.2(a), https://arxiv.org/abs/2407.05237: a
    # use with l steps to the next costs r² θ(l) = r² / Σ_{i<l} c^{−2i}, and the last
    # use costs r² θ(1).
    y = np.log(np.asarray(c)) * -2
    safe = np.where(y == 0, 1.0, y)
    run = np.expm1(batches_per_epoch * safe) / np.expm1(safe)
    run = np.where(y == 0, batches_per_epoch, run)
    return r * np.sqrt((num_epochs - 1) / run + 1)
