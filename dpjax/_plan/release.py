"""What is released: noisy means, in the hands of the user's optimizer."""

import jax
import optax

from dpjax._limit import at_most
from dpjax.optimizers import noisy_mean, widened


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
    return optax.chain(
        at_most(num_steps),
        noisy_mean(
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            expected_batch_size=batch_size,
            key=key,
        ),
        widened(inner),
    )
