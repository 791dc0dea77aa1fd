"""A clip norm that privately follows a quantile of the norms of the gradients."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.typing import ArrayLike, Tree

# The range of clip norms that vary. Within this range, float32 can represent all
# numbers that are computed from the clip norm.
LEAST, MOST = 2.0**-60, 2.0**60


class QuantileClip(NamedTuple):
    """Adapt the clip norm so that a given share of the gradients is not clipped.

    Every step counts the gradients whose norms are at most the clip norm C, and adds
    noise to the count. The noisy count gives an estimate p of the share of these
    gradients. The step then updates C by C ← C exp(−η (p − quantile)). The sum of
    gradients gets slightly more noise than without the count, so that sum and count
    together have the privacy cost that the plan states.

    Attributes:
      initial: the first step's clip norm, from 2⁻⁶⁰ to 2⁶⁰.
      quantile: the target share of gradients whose norms are at most the clip norm, in
        (0, 1).
      learning_rate: η, positive.
      noise_multiplier: σ_b, the standard deviation of the noise on the count; more than
        z / 2, where z is the plan's noise multiplier. If None, max(b / 20, 4 z), where
        b is the plan's batch size.

    Reference: Andrew, Thakkar, McMahan and Ramaswamy (2021), Algorithm 1.
    """

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    noise_multiplier: float | None = None


class Bounded(NamedTuple):
    """A step's sum and count before noise, for a clip norm C that follows a quantile.

    Attributes:
      total: the sum of gradients clipped to C, divided by C.
      within: the number of valid examples whose gradient norms are at most C, minus
        half of the number of valid examples, f[].
    """

    total: Tree
    within: jax.Array


def check_quantile_clip(clip: QuantileClip) -> QuantileClip:
    """Check a `QuantileClip`, and convert its numbers to Python floats.

    Raises:
      ValueError: a number is not positive, or quantile is not below 1.
    """
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
    """The noise multipliers (σ, σ_b) of a step's sum and of a step's count.

    Let C be the step's clip norm. The count is the number of gradients whose norms are
    at most C, minus half of the batch's examples. σ is the standard deviation of the
    noise on the sum of clipped gradients, divided by C. σ_b is the standard deviation
    of the noise on the count.

    The sum and the count together are one Gaussian mechanism. Adding one example
    changes the sum by at most C, and the count by 1/2. So if z is the plan's noise
    multiplier, the mechanism costs as much as a sum with noise multiplier z if
    1 / σ² + (1/2)² / σ_b² = 1 / z²
    (Andrew et al. 2021, Theorem 1, https://arxiv.org/abs/1905.03871).

    Args:
      clip: the settings, of which `noise_multiplier` determines σ_b.
      noise_multiplier: z.
      batch_size: the plan's batch size, which determines σ_b if the settings do not.

    Raises:
      ValueError: σ_b is at most z / 2, so that no σ is large enough.
    """
    # The paper chooses b / 20. With σ_b >= 4 z, σ exceeds z by less than 1 %.
    of_count = clip.noise_multiplier or max(batch_size / 20, 4 * noise_multiplier)
    # 1 − share², rounded down: each of the four roundings errs by at most 2⁻⁵³. So a
    # difference that comes from rounding alone is not above 0.
    share = noise_multiplier / (2 * of_count)
    left = (1 - share) * (1 + share) - 2.0**-51
    if left <= 0:
        raise ValueError(
            "QuantileClip's noise_multiplier must be above half of the plan's "
            f"noise_multiplier, {noise_multiplier!r}; got {of_count!r}."
        )
    # The factor covers the roundings in this line, so that σ is rounded up.
    return noise_multiplier / math.sqrt(left) * (1 + 2.0**-50), of_count


def count_within_clip_norm(
    norms: jax.Array, mask: jax.Array, clip_norm: ArrayLike
) -> jax.Array:
    """Count the gradients whose norms are at most the clip norm, centered, f32[].

    An example adds 1/2 to the count if the norm of its gradient is at most clip_norm,
    and −1/2 otherwise. So adding one example changes the count by only 1/2. Padding
    adds 0.
    """
    # A comparison with NaN is False. So a NaN norm counts as clipped.
    half = jnp.where(norms <= clip_norm, jnp.float32(0.5), jnp.float32(-0.5))
    return jnp.sum(jnp.where(mask, half, jnp.float32(0.0)))


def next_clip_norm(
    clip: QuantileClip, clip_norm: jax.Array, noisy: jax.Array, batch_size: ArrayLike
) -> jax.Array:
    """The next step's clip norm, f32[], from this step's clip norm and noisy count.

    Args:
      clip: the quantile and the learning rate.
      clip_norm: this step's clip norm, f32[].
      noisy: the noisy centered count of `count_within_clip_norm`, f[].
      batch_size: b, the expected batch size.
    """
    # Andrew et al. (2021), Algorithm 1: C ← C exp(−η (b̃ − γ)). Adding 1/2 undoes the
    # centering of the count.
    share = noisy / jnp.asarray(batch_size, noisy.dtype) + 0.5
    following = clip_norm * jnp.exp(-clip.learning_rate * (share - clip.quantile))
    return jnp.clip(following, LEAST, MOST).astype(jnp.float32)
