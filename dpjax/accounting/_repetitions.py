"""Probability distributions of K, the number of runs of a search.

A search makes K runs of a mechanism and releases the best run. K is drawn independently
of the data. The generating function of K is G(x) = E[x^K]. From the derivative G′, the
module `_selected` bounds the privacy loss of a search.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import ULP
from dpjax._core.typing import ArrayLike, Key

# The smallest γ. The errors of the first probability grow with |log γ|.
_MIN_STOP = 1e-100


class _RandomRepetitions:
    """A distribution of the random number K of runs. `sample` draws K."""

    mean: float

    def __post_init__(self) -> None:
        # NumPy's narrow floats would compute probabilities with their own precision.
        for field in dataclasses.fields(self):  # pyright: ignore
            object.__setattr__(self, field.name, float(getattr(self, field.name)))

    def probabilities(self) -> Iterator[tuple[int, float]]:
        """Yield (k, P(K = k)) for each possible value k of K, in increasing order."""
        raise NotImplementedError

    @property
    def total_variation(self) -> float:
        """An upper bound on the error of `sample`, as a total variation distance.

        Because of rounding, the distribution of the draws is not exactly that of K.
        """
        # The cumulative sum in 128-bit integers is exact. The k-th probability of a
        # recursion has an error of 4 k roundings. A Poisson probability has the errors
        # of its logarithm, which has three terms of up to k log k each. The errors of
        # the first probability of a negative binomial distribution grow with the shape.
        shape = max(getattr(self, "shape", 0.0), 0.0)
        return 16 * ULP * (self.mean + 4 + shape) * math.log(self.mean + 8)

    def sample(self, key: Key) -> int:
        """Draw K, the number of runs, with the random bits of the key."""
        words = np.asarray(jax.random.bits(key, (4,), jnp.uint32)).tolist()
        uniform = sum(word << 32 * i for i, word in enumerate(words))
        cumulative = 0
        for k, probability in self.probabilities():  # pyright: ignore
            # The integer sum is exact. Only the fractional part of 2¹²⁸ P(K = k) is
            # dropped.
            cumulative += int(math.ldexp(probability, 128))
            # Rounding may keep the sum below `uniform`. The second condition then ends
            # the loop.
            if uniform < cumulative or (k > self.mean and probability < 1e-30):
                return k
        raise AssertionError


class _NegativeBinomial(_RandomRepetitions):
    """A truncated negative binomial distribution of the number K of runs.

    The distribution has two parameters, η and γ. η is the attribute `shape`, and γ is
    the property `stop`. P(K = k) is proportional to (1 − γ)^k Γ(k + η) / k!, for k = 1,
    2, ….
    """

    shape: float

    def __post_init__(self) -> None:
        validate.above_one("mean", self.mean)
        super().__post_init__()
        in_range = -1 < self.shape < math.inf and self._mean(_MIN_STOP) >= self.mean
        if not in_range or float(np.asarray(self.derivative(0.0))) < 1e-290:
            raise ValueError(
                "shape must be finite and above -1, with γ >= 1e-100 and P(K = 1) >= "
                f"1e-290; got shape {self.shape!r} and mean {self.mean!r}."
            )

    @functools.cached_property
    def stop(self) -> float:
        """The parameter γ in (0, 1) at which the mean number of runs is `mean`."""
        if self.shape == 1:
            return 1 / self.mean
        # Bounds on log γ. E[K] falls from at least `mean` to 1.
        low, high = math.log(_MIN_STOP), -1e-15
        for _ in range(200):
            middle = (low + high) / 2
            above = self._mean(math.exp(middle)) > self.mean
            low, high = (middle, high) if above else (low, middle)
        return math.exp(high)

    def _mean(self, stop: float) -> float:
        """The mean η (1 − γ) / (γ (1 − γ^η)) of K, for γ = stop and η = shape.

        For η = 0, the result is the limit for η → 0.
        """
        log_power = self.shape * math.log(stop)
        # The limit of η / (1 − γ^η) for η → 0 is 1 / log(1/γ).
        quotient = log_power / math.expm1(min(log_power, 700.0)) if log_power else 1.0
        log = math.log(stop)
        return math.expm1(log) / log / stop * quotient

    @property
    def steepness(self) -> float:
        """An upper bound on G″(x) / G′(x) for x in [0, 1].

        G(x) = E[x^K] is the generating function of the number K of runs.
        """
        return (1 + self.shape) / self.stop

    def probabilities(self) -> Iterator[tuple[int, float]]:
        """Yield (k, P(K = k)) for each possible value k of K, in increasing order."""
        continuation, eta = 1 - self.stop, self.shape
        probability = float(np.asarray(self.derivative(0.0)))
        for k in itertools.count(1):
            yield k, probability
            probability *= continuation * (k + eta) / (k + 1)

    def derivative(self, x: ArrayLike) -> ArrayLike:
        """The derivative of the generating function E[x^K] of the number K of runs.

        For x in [0, 1] the derivative is E[K] (γ / (1 − (1 − γ) x))^(1 + η), where γ is
        `stop` and η is `shape`.
        """
        remainder = self.stop + (1 - self.stop) * (1 - x)
        return self.mean * (self.stop / remainder) ** (1 + self.shape)


@dataclasses.dataclass(frozen=True)
class TruncatedNegativeBinomial(_NegativeBinomial):
    """The truncated negative binomial distribution of K, the number of runs.

    P(K = k) is proportional to (1 − γ)^k Γ(k + η) / k!, for k = 1, 2, …. At the same
    mean, a distribution with a smaller shape has a heavier tail, and usually costs less
    privacy.

    Attributes:
      shape: η, above -1. η = 1 gives the distribution `Geometric`, and η = 0 gives
        `Logarithmic`. Neither γ below 1e-100 nor P(K = 1) below 1e-290 is allowed, so a
        shape near -1 or a large shape limits the mean.
      mean: E[K], above 1. The mean determines γ, the property `stop`.

    Reference: Papernot and Steinke (2022), Definition 1.

    Example:
      >>> law = TruncatedNegativeBinomial(0.5, 10.0)
      >>> print(f"{law.stop:.4f} {law.derivative(1.0):.1f}")
      0.0625 10.0
    """

    shape: float
    mean: float


@dataclasses.dataclass(frozen=True)
class Geometric(_NegativeBinomial):
    """The geometric distribution of K, the number of runs.

    Each run is the last with probability 1/mean.

    Attributes:
      mean: E[K], the mean number of runs, above 1.

    Example:
      >>> [round(p, 3) for (_, p), _ in zip(Geometric(4.0).probabilities(), range(3))]
      [0.25, 0.188, 0.141]
    """

    mean: float
    shape = 1.0  # the η of the negative binomial law; not a field


@dataclasses.dataclass(frozen=True)
class Logarithmic(_NegativeBinomial):
    """The logarithmic distribution of K, the number of runs.

    P(K = k) is proportional to (1 − γ)^k / k, for k = 1, 2, ….

    Attributes:
      mean: E[K], the mean number of runs, above 1. The mean determines γ, the property
        `stop`.

    Example:
      >>> print(f"{Logarithmic(3.9).stop:.3f}")
      0.100
    """

    mean: float
    shape = 0.0  # the η of the negative binomial law; not a field


@dataclasses.dataclass(frozen=True)
class Poisson(_RandomRepetitions):
    """The Poisson distribution of K, the number of runs.

    If K is 0, the mechanism does not run.

    Attributes:
      mean: E[K], the mean number of runs, positive.

    Example:
      >>> print(f"{Poisson(3.0).derivative(0.0):.4f}")
      0.1494
    """

    mean: float

    def __post_init__(self) -> None:
        validate.positive("mean", self.mean)
        super().__post_init__()

    @property
    def steepness(self) -> float:
        """An upper bound on G″(x) / G′(x) for x in [0, 1].

        G(x) = E[x^K] is the generating function of the number K of runs.
        """
        return self.mean

    def probabilities(self) -> Iterator[tuple[int, float]]:
        """Yield (k, P(K = k)) for each possible value k of K, in increasing order."""
        for k in itertools.count():
            # The code uses logarithms, since e^−mean underflows for a large mean.
            log = k * math.log(self.mean) - self.mean - math.lgamma(k + 1)
            yield k, math.exp(log)

    def derivative(self, x: ArrayLike) -> ArrayLike:
        """The derivative of the generating function E[x^K] of the number K of runs.

        The derivative is mean e^(mean (x − 1)).
        """
        return self.mean * np.exp(self.mean * (x - 1))


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A fixed number of runs, which need not be secret.

    Attributes:
      count: the number of runs, at least 1.

    Example:
      >>> Fixed(3).derivative(0.5)
      0.75
    """

    count: int
    total_variation = 0.0  # `sample` returns the count without a draw

    def __post_init__(self) -> None:
        validate.static_int("count", self.count, minimum=1)

    @property
    def mean(self) -> float:
        """The mean number of runs, which is the count."""
        return float(self.count)

    @property
    def steepness(self) -> float:
        """An upper bound on x G″(x) / G′(x) for x in [0, 1].

        G(x) = x^count is the generating function of the fixed number of runs. For a
        count above 1, the quotient G″(x) / G′(x) is unbounded near 0.
        """
        return float(self.count)

    def sample(self, key: Key) -> int:
        """The fixed count. The key has no effect."""
        del key
        return self.count

    def probabilities(self) -> Iterator[tuple[int, float]]:
        """Yield the count and its probability, which is 1."""
        yield self.count, 1.0

    def derivative(self, x: ArrayLike) -> ArrayLike:
        """The derivative count x^(count − 1) of the generating function x^count."""
        return self.count * x ** (self.count - 1)


Repetitions = Geometric | Logarithmic | Poisson | TruncatedNegativeBinomial | Fixed


def check(repetitions: object) -> None:
    """Raise a ValueError unless the argument is a distribution of this module."""
    if not isinstance(repetitions, Repetitions):
        raise ValueError(
            "repetitions must be a distribution of dpjax.accounting.selection, such "
            f"as Geometric(10.0); got {repetitions!r}."
        )
