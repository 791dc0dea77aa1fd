"""A clip norm that follows a quantile of the gradients' norms, privately."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.typing import ArrayLike, Tree

# Where clip norms that vary may be, so that float32 holds what is made of them.
LEAST, MOST = 2.0**-60, 2.0**60


class QuantileClip(NamedTuple):
    """Clip so that a given share of the examples is not clipped.

    In every step it is counted, with noise, how many gradients are within the bound,
    and the bound is moved by it: C ← C exp(−η (share within − quantile)). The noise of
    the gradients grows a little, so that both together cost what the plan says.

    Attributes:
      initial: the first step's clip norm, from 2⁻⁶⁰ to 2⁶⁰.
      quantile: the share that is to be within, in (0, 1).
      learning_rate: η, positive.
      noise_multiplier: σ_b, the standard deviation of the noise on the count, above
        half of the plan's noise multiplier z. None for b / 20, or 4 z if that is more.

    Reference: Andrew, Thakkar, McMahan and Ramaswamy (2021), Algorithm 1.
    """

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    noise_multiplier: float | None = None


class Bounded(NamedTuple):
    """What a step releases where the clip norm follows a quantile.

    Attributes:
      total: the sum of gradients clipped to C, over C.
      within: Σ (1[norm <= C] − 1/2) over the examples that are there, f[].
    """

    total: Tree
    within: jax.Array


def check_quantile_clip(clip: QuantileClip) -> QuantileClip:
    """The same as numbers of Python, which are in range."""
    numbers = {
        name: validate.positive_float(name, value)
        for name, value in clip._asdict().items()
        if value is not None
    }
    validate.open_unit("quantile", clip.quantile)
    return clip._replace(**numbers)


def noise_of(
    clip: QuantileClip, noise_multiplier: float, batch_size: int
) -> tuple[float, float]:
    """σ of the gradients' sum over C, and σ_b of the count.

    Both are one Gaussian mechanism: an example moves the sum by 1 and the count by 1/2,
    which is 1 / z in units of the noise if 1 / σ² + (1/2)² / σ_b² = 1 / z².
    (Andrew et al. 2021, Theorem 1, https://arxiv.org/abs/1905.03871.)
    """
    of_count = clip.noise_multiplier or max(batch_size / 20, 4 * noise_multiplier)
    # Where little is left, it is all rounding: four of them by at most 2⁻⁵³ each.
    share = noise_multiplier / (2 * of_count)
    left = (1 - share) * (1 + share) - 2.0**-51
    if left <= 0:
        raise ValueError(
            "QuantileClip's noise_multiplier must be above half of the plan's, "
            f"{noise_multiplier!r}; got {of_count!r}."
        )
    # A unit of its last place for each of the few roundings.
    return noise_multiplier / math.sqrt(left) * (1 + 2.0**-50), of_count


def count_unclipped(
    norms: jax.Array, mask: jax.Array, clip_norm: ArrayLike
) -> jax.Array:
    """What the examples add to the count, 1/2 each way; 0 for an empty place."""
    half = jnp.where(norms <= clip_norm, jnp.float32(0.5), jnp.float32(-0.5))
    return jnp.sum(jnp.where(mask, half, jnp.float32(0.0)))


def next_clip_norm(
    clip: QuantileClip, clip_norm: jax.Array, noisy: jax.Array, batch_size: ArrayLike
) -> jax.Array:
    """The next clip norm."""
    # Andrew et al. (2021), Algorithm 1: C ← C exp(−η (b̃ − γ)).
    share = noisy / jnp.asarray(batch_size, noisy.dtype) + 0.5
    following = clip_norm * jnp.exp(-clip.learning_rate * (share - clip.quantile))
    return jnp.clip(following, LEAST, MOST).astype(jnp.float32)
