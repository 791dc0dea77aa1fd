"""Quick estimates of the ε of sampled Gaussian steps, for the start of a search.

An estimate is not a bound, and no guarantee relies on an estimate. Estimates only save
evaluations of an accountant. The code moves the privacy losses of a step to a grid. The
total probability, the mean and the variance of the losses stay the same. A Fourier
transform then composes the steps. For many steps, the relative difference between the
estimate and the accountant's ε is usually about 1e-5. For a few steps at a small
sampling rate, the relative difference may be a percent.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from dpjax._core.adjacency import Adjacency
from dpjax._core.float64 import TINY
from dpjax.accounting.events import Composed, FixedSizeGaussian

# The number of privacy losses on the grid, and the number of outcomes of one step.
_GRID, _OUTCOMES = 2**14, 2_000


class Overflow(NamedTuple):
    """Estimates of how batches that exceed their capacity change a run's δ and ε.

    The function `overflow` computes the estimates. Its argument `share` is the fraction
    of δ that is reserved for these batches.

    Attributes:
      log_probability: log p, for the probability p of overflow that increases δ by
        about share · δ. Here each batch of the steps with the largest sampling rate
        exceeds its capacity with probability p, and no other batch does. If the
        increase is less than share · δ even for p = 1, then p is 1.
      epsilon_gap: the ε at (1 − share) δ minus the ε at δ, if no batch exceeds its
        capacity. The gap is TINY, the least positive normal float, if the estimate of
        δ(epsilon) is at most delta / 2, for the arguments `epsilon` and `delta` of
        `overflow`.
    """

    log_probability: float
    epsilon_gap: float


def _losses(event: Any, *, overflows: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The privacy losses of one step and their probabilities, f[n] each.

    `event` describes a Gaussian step on a random sample. If `overflows` is true, the
    batch exceeds its capacity. The example in which the data sets differ then displaces
    another example.
    """
    rate, fixed_size = event.sampling_rate, isinstance(event, FixedSizeGaussian)
    sigma = None if fixed_size else np.float64(event.noise_multiplier)
    mu = event.mu if sigma is None else (1 + overflows) / sigma
    z = np.linspace(-9.0, 9.0 + mu, _OUTCOMES)

    def log_mixture(v: np.ndarray) -> np.ndarray:
        return np.logaddexp(np.log1p(-rate), np.log(rate) + v)

    loss = log_mixture(mu * z - mu * mu / 2)
    other_mass = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    mass = other_mass * np.exp(loss)
    if fixed_size or overflows:  # the dominating pair of `pairs.fixed_size`
        loss, mass, other_mass = (x[z > mu / 2] for x in (loss, mass, other_mass))
        remainder = 1 - np.sum(mass + other_mass)
        return np.hstack([loss, -loss, 0.0]), np.hstack([mass, other_mass, remainder])
    if event.adjacency is Adjacency.REPLACE:
        loss = loss - log_mixture(-mu * z - mu * mu / 2)
    return loss, mass


class _Run:
    """The estimated distribution of the total privacy loss of a run, on a grid.

    The grid has evenly spaced privacy losses. The spacing grows with the argument
    `epsilon` of the constructor, a rough value of the run's ε.

    Attributes:
      losses: the losses of the grid that are at least 0, f[n].
      transform: the Fourier transform of the distribution, n + 1 complex numbers.
      deltas: δ(ε) with ε = loss, for each loss in `losses`, f[n].
    """

    def __init__(self, steps: Composed, epsilon: float) -> None:
        variance = 0.0
        for step in steps.steps:
            loss, mass = _losses(step.event)
            variance += step.count * (mass @ loss**2 - (mass @ loss) ** 2)
        # Losses above `top` have hardly any probability. The Fourier transform moves
        # this probability to the other end of the grid.
        top = 3 * epsilon + 10 * math.sqrt(variance)
        self.losses = np.arange(_GRID // 2) * (2 * top / _GRID)
        self.transform = np.ones(_GRID // 2 + 1, complex)
        for step in steps.steps:
            self.transform *= self.transform_of_step(*_losses(step.event)) ** step.count
        self.deltas = self.deltas_of(self.transform)

    def transform_of_step(self, loss: np.ndarray, mass: np.ndarray) -> np.ndarray:
        """The Fourier transform of the distribution of one step's privacy loss.

        `loss`, f[k], has the privacy losses of the step, and `mass`, f[k], their
        probabilities. The probability of each loss is divided among three points of the
        grid.
        """
        position = loss / self.losses[1]
        nearest = np.rint(position)
        u = position - nearest
        # The weights of three grid points: sum 1, mean u, second moment u².
        weights = ((u - 1) * u / 2, 1 - u * u, (u + 1) * u / 2)
        points = np.hstack([nearest - 1, nearest, nearest + 1]).astype(int) % _GRID
        masses = np.hstack([mass * weight for weight in weights])
        return np.fft.rfft(np.bincount(points, masses, _GRID))

    def deltas_of(self, transform: np.ndarray) -> np.ndarray:
        """δ(ε) with ε = loss, for each loss in `losses`, f[n].

        `transform` is the Fourier transform of the distribution of the total privacy
        loss.
        """
        mass = np.fft.irfft(transform)[: self.losses.size]
        mass_above, other_mass_above = (
            np.cumsum(x[::-1])[::-1] for x in (mass, mass * np.exp(-self.losses))
        )
        return mass_above - np.exp(self.losses) * other_mass_above

    def epsilon(self, delta: float) -> float:
        """ε(δ), by linear interpolation of log δ between points of the grid."""
        i = max(int(np.argmax(self.deltas <= delta)), 1)
        before, after = np.log(np.maximum(self.deltas[i - 1 : i + 1], TINY) / delta)
        return float(self.losses[i - 1] + self.losses[1] * before / (before - after))


@np.errstate(all="ignore")
def epsilon(steps: Composed, delta: float, rough_epsilon: float) -> float:
    """Estimate the ε of composed steps at δ. `rough_epsilon` is near this ε."""
    return _Run(steps, rough_epsilon).epsilon(delta)


@np.errstate(all="ignore")
def overflow(steps: Composed, epsilon: float, delta: float, share: float) -> Overflow:
    """Estimate how batches that exceed their capacity change the δ and ε of a run.

    `delta` is the δ of the run, and `share` is the fraction of δ that is reserved for
    these batches. `epsilon` is the ε of the run at (1 − share) δ if no batch exceeds
    its capacity.
    """
    run = _Run(steps, epsilon)
    sampled: Any = steps.steps
    step = max(sampled, key=lambda step: step.event.sampling_rate)
    usual, overflowing = (_losses(step.event, overflows=x) for x in (False, True))
    # The batch of one step exceeds its capacity.
    ratio = run.transform_of_step(*overflowing) / run.transform_of_step(*usual)
    overflow_deltas = run.deltas_of(run.transform * ratio)
    usual_delta, overflow_delta = (
        np.interp(epsilon, run.losses, x) for x in (run.deltas, overflow_deltas)
    )
    relative_increase = step.count * (overflow_delta / usual_delta - 1)
    epsilon_gap = epsilon - run.epsilon(usual_delta / (1 - share))
    log_probability = math.log(share / max(relative_increase, share))
    return Overflow(log_probability, epsilon_gap if usual_delta > delta / 2 else TINY)
