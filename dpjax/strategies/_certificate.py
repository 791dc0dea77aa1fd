"""How little error any strategy can have at a given privacy.

Let an example's contributions have any signs, at the same place of every epoch. For θ
in [0, 1] the matrix W = R ⊗ I / n_b, R = (1 − θ) I + θ 11ᵀ, is an average of the outer
products of such patterns, so that sens² >= ‖C W^{1/2}‖_F². As ‖X‖_F ‖Y‖_F >= ‖XY‖_*,

    sens · ‖A C⁻¹‖_F >= ‖A C⁻¹‖_F ‖C W^{1/2}‖_F >= ‖A W^{1/2}‖_*,

for every C, lower-triangular or not. Orders with more patterns are no better off.
"""

import numpy as np

from dpjax._matrices.workload import Workload

# Nuclear norms of matrices of this size are computed; of larger ones bounded.
_DENSE = 1024
# More than what they err by, relatively.
_ROUNDING = 1e-9


def coefficients(workload: Workload, num_steps: int) -> np.ndarray:
    """Those of a workload, f64[T]: of one that varies, those of its mean numbers."""
    top, bottom = (np.append(1.0, np.asarray(x)) for x in workload[:2])
    rate, keep = (float(np.mean(np.asarray(x))) for x in workload[2:])
    bottom = np.polymul(bottom, np.array([1.0, -keep]))
    return rate * ratio(top, bottom, num_steps)


def ratio(top: np.ndarray, bottom: np.ndarray, n: int) -> np.ndarray:
    """The first n coefficients of a ratio of two polynomials of the shift, f64[n]."""
    from scipy.signal import lfilter  # it takes longer to import than all of dpjax

    return np.asarray(lfilter(top, bottom, np.eye(1, n)[0]))


def lower_bound(workload: Workload, num_steps: int, n_b: int) -> float:
    """A lower bound on μ times error at noise multiplier 1, for any strategy."""
    from scipy.optimize import fminbound

    n_b = min(n_b, num_steps)
    # The first steps alone, where the last epoch is cut short.
    a = coefficients(workload, num_steps // n_b * n_b)
    sums = _diagonals(a, n_b)

    def bound(theta: float) -> float:
        """tr(UᵀX) at its largest, X = A W^{1/2}, U a compressed unitary circulant.

        U has norm 1 at most, so that the nuclear norm of X is at least that. The best
        circulant aligns with the phases of d's transform, d being the sums of X along
        its diagonals.
        """
        alpha, gamma = _weights(theta, a.size // n_b, n_b)
        d = alpha * sums[0] + gamma * sums[1]
        return float(np.mean(np.abs(np.fft.fft(d, 2 * a.size))))

    best = np.asarray(fminbound(lambda x: -bound(x), 0.0, 1.0)).item()
    bounds = [bound(0.0), bound(best)]
    if a.size <= _DENSE:
        bounds.append(_nuclear_norm(a, n_b, best))
    return float(max(bounds) * (1 - _ROUNDING) / np.sqrt(num_steps))


def _weights(theta: float, epochs: int, n_b: int) -> tuple[float, float]:
    """α and γ of W^{1/2} = α I + γ (11ᵀ / E) ⊗ I."""
    alpha = np.sqrt((1 - theta) / n_b)
    return alpha, np.sqrt((1 - theta + theta * epochs) / n_b) - alpha


def _nuclear_norm(a: np.ndarray, n_b: int, theta: float) -> float:
    """‖A W^{1/2}‖_*."""
    from scipy.linalg import svdvals, toeplitz

    epochs = a.size // n_b
    alpha, gamma = _weights(theta, epochs, n_b)
    matrix = toeplitz(a, np.zeros(a.size))
    means = matrix.reshape(a.size, epochs, n_b).mean(axis=1)
    return np.sum(svdvals(alpha * matrix + gamma * np.tile(means, epochs)))


def _diagonals(a: np.ndarray, n_b: int) -> tuple[np.ndarray, np.ndarray]:
    """The sums along diagonals −T < l < T of A, and of A ((11ᵀ / E) ⊗ I)."""
    steps, epochs = a.size, a.size // n_b
    lags = np.arange(-steps + 1, steps)
    padded = np.concatenate([np.zeros(2 * steps), a, np.zeros(2 * steps)])
    means = np.zeros(lags.size)
    for k in range(-epochs + 1, epochs):
        # Columns s for which s + l and s − k n_b are steps.
        first = np.maximum(np.maximum(0, -lags), k * n_b)
        end = np.minimum(np.minimum(steps, steps - lags), steps + k * n_b)
        count = np.maximum(end - first, 0)
        means += count / epochs * padded[2 * steps + k * n_b + lags]
    return (steps - np.abs(lags)) * padded[2 * steps + lags], means
