"""What is released: noisy means, in the hands of the user's optimizer."""

import jax
import optax

from dpjax._private_mean import on_noisy_mean


def optimizer(
    inner: optax.GradientTransformation,
    *,
    clip_norm: float,
    noise_multiplier: float,
    batch_size: int,
    num_steps: int,
    key: jax.Array,
) -> optax.GradientTransformation:
    """Noise on the clipped sum, division by the expected size, inner, and the end."""
    return on_noisy_mean(inner, clip_norm, noise_multiplier, batch_size, key, num_steps)
