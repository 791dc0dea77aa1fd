"""Plots of the standard deviation of noise by step, and of its power by frequency.

A shape is a linear map from white noise to the noise of T steps: a matrix f[T, k], or
the coefficients f[T] of a filter.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dpjax._core.typing import ArrayLike
from dpjax.plot._style import axes, finish, names, strokes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def noise(
    *shapes: ArrayLike, labels: Sequence[str] | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Draw the standard deviation of noise in the optimizer's update at each step.

    Args:
      *shapes: for each line of the plot, a linear map from independent standard
        Gaussians z to the noise of T steps. A matrix A, f[T, k], stands for the noise
        Σ_j A[t, j] z_j at step t. Coefficients c, f[T], stand for the noise
        Σ_{j<=t} c_j z_{t−j}. Both include the scale of the noise, such as the noise
        multiplier times the clip norm, divided by the batch size.
      labels: a name for each shape.
      ax: the matplotlib Axes to draw on; None for those of a new figure.

    Returns:
      The Axes, which show the root of Σ_j A[t, j]², or of Σ_{j<=t} c_j², against the
      step t.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there is no shape; a shape is not finite, or is neither a matrix nor a
        vector; the number of labels is not the number of shapes.

    Example:
      >>> ax = noise(0.1 * 0.9 ** np.arange(200), labels=["momentum of 0.9"])
      >>> print(f"{ax.lines[0].get_ydata()[-1]:.4f}")  # sqrt(0.1 / 1.9)
      0.2294
    """
    checked, legend = _check_shapes(shapes, labels)
    ax = axes(ax, (5.4, 3.6))
    for number, (shape, name) in enumerate(zip(checked, legend, strict=True)):
        steps = np.arange(1, len(shape) + 1)
        style = _sparse(number, len(steps))
        if len(steps) > 300:  # thin lines keep oscillations legible
            style["linewidth"] = 0.8
        ax.plot(steps, deviations(shape), **style, label=name)
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize="small")
    return finish(ax, "step", "standard deviation of the noise")


def spectrum(
    *shapes: ArrayLike, labels: Sequence[str] | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Draw the power of noise in the optimizer's update by frequency.

    Noise of low frequencies moves parameters the farthest.

    Args:
      *shapes: linear maps from white noise to the noise of T steps, as for `noise`.
      labels: a name for each shape.
      ax: the matplotlib Axes to draw on; None for those of a new figure.

    Returns:
      The Axes, which show the exact expected periodogram E |Σ_t x_t e^{−2πi f t}|² / T
      of the noise x of T steps, at f = 1/T, 2/T, …, up to 1/2 cycles per step. The mean
      of the periodogram over all T frequencies, including 0 and those above 1/2, is the
      mean of the steps' variances.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: there is no shape; a shape is not finite, is neither a matrix nor a
        vector, or has a single step; the number of labels is not the number of shapes.

    Example:
      >>> ax = spectrum(np.eye(8), labels=["independent noise"])
      >>> print(ax.lines[0].get_ydata())
      [1. 1. 1. 1.]
    """
    checked, legend = _check_shapes(shapes, labels)
    if any(len(shape) < 2 for shape in checked):
        raise ValueError(f"shapes must have at least two steps; got {shapes!r}.")
    ax = axes(ax, (5.4, 3.6))
    for number, (shape, name) in enumerate(zip(checked, legend, strict=True)):
        count = len(shape)
        frequencies = np.arange(1, count // 2 + 1) / count
        each = power(shape)[1 : count // 2 + 1]
        ax.loglog(frequencies, each, **_sparse(number, len(each)), label=name)
    ax.legend(frameon=False, fontsize="small")
    return finish(ax, "frequency, cycles a step", "power of the noise")


def deviations(shape: np.ndarray) -> np.ndarray:
    """Compute the standard deviation of noise at each of T steps, f64[T].

    `shape` is the linear map from white noise to this noise: a matrix f[T, k], or the
    coefficients f[T] of a filter.
    """
    if shape.ndim == 1:
        return np.sqrt(np.cumsum(shape**2))
    return np.sqrt(np.sum(shape**2, axis=1))


def power(shape: np.ndarray) -> np.ndarray:
    """Compute the expected periodogram of the noise of T steps, f64[T].

    `shape` is the linear map from white noise to this noise: a matrix f[T, k], or the
    coefficients f[T] of a filter. The frequencies are 0, 1/T, …, (T − 1)/T cycles per
    step.
    """
    count = len(shape)
    if shape.ndim == 2:
        return np.sum(np.abs(np.fft.fft(shape, axis=0)) ** 2, axis=1) / count
    # Σ_t E[x_t x_{t+l}] = Σ_j c_j (T − j − l) c_{j+l} is a correlation. The periodogram
    # is the Fourier transform of these sums over all lags l, where l and −l have equal
    # sums. Transforms of length 2T avoid circular overlap.
    later = shape * (count - np.arange(count))
    both = np.conj(np.fft.rfft(shape, 2 * count)) * np.fft.rfft(later, 2 * count)
    sums = np.fft.irfft(both, 2 * count)[:count]
    values = (2 * np.fft.fft(sums).real - sums[0]) / count
    return np.maximum(values, 0.0)  # rounding may make a zero negative


def _sparse(number: int, count: int) -> dict:
    """The style of line `number` of a plot, with markers at a few of `count` points.

    Each line has markers at different points.
    """
    every = max(1, count // 6)
    return {**strokes(number), "markevery": (number * every // 5 % every, every)}


def _check_shapes(
    shapes: Sequence[ArrayLike], labels: Sequence[str] | None
) -> tuple[list[np.ndarray], list[str]]:
    """Check linear maps of noise; return them in float64, and a label for each map.

    Raises:
      ValueError: there is no shape; a shape is neither a matrix nor a vector, or is not
        finite; or the number of labels is not the number of shapes.
    """
    if not shapes:
        raise ValueError("shapes must contain at least one shape; got none.")
    checked = [np.asarray(shape, np.float64) for shape in shapes]
    for shape, given in zip(checked, shapes, strict=True):
        if shape.ndim not in (1, 2) or not shape.size or not np.isfinite(shape).all():
            raise ValueError(
                "shapes must have finite numbers: the coefficients f[T], or the "
                f"matrix f[T, k]; got {given!r}."
            )
    otherwise = [f"shape {number}" for number in range(1, len(checked) + 1)]
    return checked, names(labels, otherwise)
