"""A lower bound on the error that any strategy can have at a given privacy.

An example contributes at the same position in every epoch, and its contributions may
have any signs. A vector of these signs, with zeros at all other steps, is a pattern.
For θ in [0, 1] the matrix W = R ⊗ I / n_b, with R = (1 − θ) I + θ 11ᵀ, is an average of
the outer products of patterns. Hence the sensitivity obeys sens² >= ‖C W^{1/2}‖_F². As
‖X‖_F ‖Y‖_F >= ‖XY‖_*,

    sens · ‖A C⁻¹‖_F >= ‖A C⁻¹‖_F ‖C W^{1/2}‖_F >= ‖A W^{1/2}‖_*,

for every C, lower-triangular or not. An order of examples that allows more patterns has
at least this sensitivity, so the bound holds for that order too.
"""

import numpy as np

from dpjax._matrices.workload import Workload

# The nuclear norm of a matrix up to this size is computed. It takes cubic time, so only
# the lower bound by circulants is used for a larger matrix.
_DENSE = 1024
# More than the relative rounding error of the bounds in float64. The published bound is
# lowered by it, so that it stays a lower bound.
_ROUNDING = 1e-9


def coefficients(workload: Workload, num_steps: int) -> np.ndarray:
    """The first T coefficients of a workload's filter, f64[T].

    Where the rates or keep factors vary with the step, their means are used instead.
    """
    top, bottom = (np.append(1.0, np.asarray(x)) for x in workload[:2])
    rate, keep = (float(np.mean(np.asarray(x))) for x in workload[2:])
    bottom = np.polymul(bottom, np.array([1.0, -keep]))
    return rate * ratio(top, bottom, num_steps)


def ratio(top: np.ndarray, bottom: np.ndarray, n: int) -> np.ndarray:
    """The first n coefficients of a ratio of two polynomials of the shift, f64[n]."""
    from scipy.signal import lfilter  # it takes longer to import than all of dpjax

    return np.asarray(lfilter(top, bottom, np.eye(1, n)[0]))


def lower_bound(workload: Workload, num_steps: int, n_b: int) -> float:
    """A lower bound on μ times error at noise multiplier 1, for any strategy.

    The workload's numbers must be the same in every step.
    """
    from scipy.optimize import fminbound

    n_b = min(n_b, num_steps)
    # The construction of W needs whole epochs. Where the last epoch is cut short, only
    # the steps before it are bounded. Later steps can only add to μ and to the errors.
    a = coefficients(workload, num_steps // n_b * n_b)
    sums = _diagonals(a, n_b)

    def bound(theta: float) -> float:
        """The maximum of tr(UᵀX), for X = A W^{1/2} and U a compressed circulant.

        U is a block of a unitary circulant matrix, so its spectral norm is at most 1,
        and the nuclear norm of X is at least tr(UᵀX). With d for the sums of X along
        its diagonals, the best circulant aligns with the phases of d's transform.
        """
        alpha, gamma = _weights(theta, a.size // n_b, n_b)
        d = alpha * sums[0] + gamma * sums[1]
        return float(np.mean(np.abs(np.fft.fft(d, 2 * a.size))))

    # The bound holds for every θ, so an inexact maximum costs tightness, not validity.
    best = np.asarray(fminbound(lambda x: -bound(x), 0.0, 1.0)).item()
    bounds = [bound(0.0), bound(best)]
    if a.size <= _DENSE:
        bounds.append(_nuclear_norm(a, n_b, best))
    return float(max(bounds) * (1 - _ROUNDING) / np.sqrt(num_steps))


def _weights(theta: float, epochs: int, n_b: int) -> tuple[float, float]:
    """α and γ of W^{1/2} = α I + γ (11ᵀ / E) ⊗ I, from θ, the epochs E and n_b."""
    alpha = np.sqrt((1 - theta) / n_b)
    return alpha, np.sqrt((1 - theta + theta * epochs) / n_b) - alpha


def _nuclear_norm(a: np.ndarray, n_b: int, theta: float) -> float:
    """The nuclear norm ‖A W^{1/2}‖_*, from the coefficients of A, n_b and θ."""
    from scipy.linalg import svdvals, toeplitz

    epochs = a.size // n_b
    alpha, gamma = _weights(theta, epochs, n_b)
    matrix = toeplitz(a, np.zeros(a.size))
    # A ((11ᵀ / E) ⊗ I): every epoch gets the mean of the columns at one position.
    means = matrix.reshape(a.size, epochs, n_b).mean(axis=1)
    return np.sum(svdvals(alpha * matrix + gamma * np.tile(means, epochs)))


def _diagonals(a: np.ndarray, n_b: int) -> tuple[np.ndarray, np.ndarray]:
    """The sums along diagonals −T < l < T of A, and of A ((11ᵀ / E) ⊗ I).

    The two results are f64[2T − 1] each; neither matrix is formed.
    """
    steps, epochs = a.size, a.size // n_b
    lags = np.arange(-steps + 1, steps)
    # Zeros on both sides: a_k is 0 for k < 0, and no index below leaves the array.
    padded = np.concatenate([np.zeros(2 * steps), a, np.zeros(2 * steps)])
    means = np.zeros(lags.size)
    for k in range(-epochs + 1, epochs):
        # The columns s, from first to end, for which s + l and s − k n_b are steps.
        first = np.maximum(np.maximum(0, -lags), k * n_b)
        end = np.minimum(np.minimum(steps, steps - lags), steps + k * n_b)
        count = np.maximum(end - first, 0)
        means += count / epochs * padded[2 * steps + k * n_b + lags]
    return (steps - np.abs(lags)) * padded[2 * steps + lags], means
