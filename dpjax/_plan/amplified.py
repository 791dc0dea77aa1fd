"""Batches drawn at random for noise that is correlated from step to step.

Who does not know in which steps an example took part learns less of it. For independent
noise `mechanisms.Poisson` is such a way; here are those that a correlation allows.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import sampling, strategies
from dpjax._core.adjacency import Adjacency
from dpjax._core.float64 import default_float
from dpjax._core.typing import ArrayLike
from dpjax._plan.mechanisms import (
    Cyclic,
    FixedSize,
    Losses,
    Mechanism,
    Poisson,
    Reshuffled,
)
from dpjax.accounting import correlated, pld, truncation

# Of δ, for bins that overflow: the first that is enough.
_SHARES = (0.01, 0.1, 0.5, 0.9)
# What a search for δ ends at.
_LEAST_DELTA, _HALVINGS = 1e-30, 20


class CyclicPoisson(Mechanism):
    """One group of the examples after the other, each with the same probability."""

    correlates = True
    varies = False
    overflows = True
    reason = "one example fewer moves all later ones to other groups"

    @property
    def groups(self) -> int:
        """As many as C has bands: then no two steps of an example share a row of it."""
        return 1 if self.shape is None else 1 + len(self.shape.numerator)

    @property
    def population(self) -> int:
        """Those of a group."""
        return -(-self.num_examples // self.groups)

    def refuse(self, shape, batch_size):
        """All but bands, and groups that are too small for the batch."""
        if shape.denominator or shape.factors or shape.tree_decay is not None:
            raise ValueError(
                "strategy must be a banded one with sampling='cyclic_poisson'; got C "
                f"{shape}."
            )
        bands = 1 + len(shape.numerator)
        if bands * batch_size > self.num_examples:
            raise ValueError(
                f"batch_size must be at most num_examples over the {bands} bands, "
                f"{self.num_examples // bands}; got {batch_size!r}."
            )

    def rate(self, batch_size: int) -> float:
        """The probability within a group."""
        return min(1.0, self.groups * batch_size / self.num_examples)

    def draw(self, batch_size, max_batch_size, step, key):
        """As `sampling.cyclic_poisson`."""
        return sampling.cyclic_poisson(
            self.num_examples,
            self.rate(batch_size),
            num_groups=self.groups,
            max_batch_size=max_batch_size,
            key=key,
            step=step,
        )

    def profile(self, numbers):
        """Poisson-sampled steps of a column's norm, at every p-th step.

        As `accounting.correlated.epsilon`, with groups that overflow.
        """
        bands = () if self.shape is None else self.shape.numerator
        norm = np.linalg.norm([1.0, *bands]) * (1 + 2.0**-40)
        replace = self.adjacency is Adjacency.REPLACE
        steps = -(-int(np.asarray(numbers.num_steps)) // self.groups)
        step = pld.Mechanism(
            numbers.noise_multiplier / norm,
            self.rate(int(np.asarray(numbers.batch_size))),
            steps,
            "truncated_replace" if replace else "truncated",
            self.population,
            numbers.max_batch_size,
        )
        return Losses(pld.PLD((step,)))

    def words(self, batch_size, max_batch_size):
        """Groups, the rate, the room, and what becomes of the rest."""
        return (
            f"example i is in group i mod {self.groups}, step t takes each example of "
            f"group t mod {self.groups} independently with probability "
            f"{self.groups} * {batch_size}/{self.num_examples}; of more than "
            f"{max_batch_size} in one step a uniformly random subset of that size is "
            "kept, which is accounted for"
        )


class Bins(NamedTuple):
    """The profile of a run in random bins, from ε by δ where no bin overflows."""

    ideal: Callable[[ArrayLike], jax.Array]
    overflow: Callable[[ArrayLike], jax.Array]

    @property
    def mu(self) -> None:
        """No GDP parameter is known."""

    def epsilon(self, delta: ArrayLike) -> jax.Array:
        """The ε for a δ in (0, 1), rounded up."""
        delta = np.asarray(delta, np.float64)
        least = float(self.overflow(0.0))
        if least == 0:
            return self.ideal(delta)
        for share in _SHARES:
            if np.any(least > share * delta):
                continue
            # (ε, (1 − share) δ) without overflow, and the rest of δ for that.
            found = self.ideal((1 - share) * delta)
            if bool(np.all(self.overflow(found) <= share * delta)):
                return found
        return jnp.full(delta.shape, jnp.inf)

    def delta(self, epsilon: ArrayLike) -> jax.Array:
        """The δ for an ε >= 0, rounded up: the least found whose ε is no larger."""
        target = np.asarray(epsilon, np.float64)
        low = np.full(target.shape, math.log(_LEAST_DELTA))
        high = np.zeros(target.shape)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = np.vectorize(lambda x: float(self.epsilon(math.exp(x))))(middle)
            enough = found <= target
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        found = np.minimum(np.exp(high) * (1 + 1e-6), 1.0)
        return jnp.asarray(found, default_float())


@functools.lru_cache(maxsize=256)  # the room for a batch is looked for at the same few
def _ideal(
    mechanism: "RandomBins",
    noise_multiplier: float,
    batch_size: int,
    num_steps: int,
    dtype: np.dtype,
    delta: float,
) -> float:
    """ε where no bin overflows, rounded up to a dtype that is the default one."""
    # Independent noise is geometric noise of λ = 0, whose program it then shares.
    shape = strategies.geometric(0.0)
    if mechanism.shape is not None and any(mechanism.shape[:2]):
        shape = mechanism.shape.toeplitz(num_steps)
    found = correlated.epsilon(
        shape,
        noise_multiplier,
        delta,
        num_steps=num_steps,
        steps_per_epoch=mechanism.steps_per_epoch(batch_size),
        sampling="fresh_bins" if mechanism._fresh else "random_bins",
        adjacency=mechanism.adjacency,
    )
    return float(found)


class RandomBins(Mechanism):
    """Every example picks one step of the epoch for itself, and keeps it."""

    correlates = True
    varies = False
    overflows = True
    covers = tuple(Adjacency)

    def taken(self, batch_size):
        """All examples, over the steps of an epoch."""
        return self.num_examples / self.steps_per_epoch(batch_size)

    def draw(self, batch_size, max_batch_size, step, key):
        """As `sampling.random_bins_step`."""
        bins = self.steps_per_epoch(batch_size)
        step = jnp.asarray(step)
        return sampling.random_bins_step(
            self.num_examples,
            bins,
            max_batch_size=max_batch_size,
            key=key,
            epoch=self._drawing(step // bins),
            step=step % bins,
        )

    def refuse(self, shape, batch_size):
        """All but Toeplitz matrices."""
        if shape.factors or shape.tree_decay is not None:
            raise ValueError(
                f"strategy must be a Toeplitz strategy in random bins; got C {shape}."
            )

    def _drawing(self, epoch: jax.Array) -> jax.Array:
        """The number of the drawing that an epoch goes by."""
        return epoch * 0

    _fresh = False

    def profile(self, numbers):
        """As `accounting.correlated.epsilon`, and `truncation.overflow_delta`."""
        steps, size = (
            int(np.asarray(x)) for x in (numbers.num_steps, numbers.batch_size)
        )
        bins = self.steps_per_epoch(size)
        noise = float(np.asarray(numbers.noise_multiplier))

        def ideal(delta: ArrayLike) -> jax.Array:
            of = functools.partial(_ideal, self, noise, size, steps, default_float())
            found = [of(x) for x in np.ravel(delta).tolist()]
            return jnp.asarray(found).reshape(np.shape(delta))

        def overflow(epsilon: ArrayLike) -> jax.Array:
            return truncation.overflow_delta(
                epsilon,
                num_examples=self.num_examples,
                sampling_rate=1 / bins,
                max_batch_size=int(np.asarray(numbers.max_batch_size)),
                num_steps=steps if self._fresh else min(steps, bins),
            )

        return Bins(ideal, overflow)

    def words(self, batch_size, max_batch_size):
        """The bins, the room, and what becomes of the rest."""
        anew = "anew in every epoch" if self._fresh else "the same in every epoch"
        bins = self.steps_per_epoch(int(batch_size))
        return (
            f"every example picks one of the {bins} steps of an epoch, uniformly at "
            f"random and independently of others, {anew}; of more than "
            f"{max_batch_size} in one step so many are kept, which is accounted for"
        )


class FreshBins(RandomBins):
    """Every example picks one step of each epoch for itself."""

    _fresh = True

    def _drawing(self, epoch):
        """Every epoch has its own."""
        return epoch


SAMPLINGS: dict[str, type[Mechanism]] = {
    "poisson": Poisson,
    "fixed_size": FixedSize,
    "fixed": Cyclic,
    "reshuffled": Reshuffled,
    "cyclic_poisson": CyclicPoisson,
    "random_bins": RandomBins,
    "fresh_bins": FreshBins,
}
