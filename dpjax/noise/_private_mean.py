"""Chains of a private mean of clipped sums and any optimizer of optax."""

import optax

from dpjax._core.dtypes import widen
from dpjax._core.placement import shard_like
from dpjax._core.typing import ArrayLike, Key
from dpjax.clipping._clipped_grad import ClippedGrad
from dpjax.noise._gaussian import noisy_mean


def chain_on_noisy_mean(
    inner: optax.GradientTransformation,
    clip_norm: ArrayLike | ClippedGrad,
    noise_multiplier: ArrayLike,
    expected_batch_size: ArrayLike,
    key: Key,
    num_steps: int | None,
) -> optax.GradientTransformation:
    """An optax chain: the private mean of `noisy_mean`, then the inner optimizer."""
    mean = noisy_mean(
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        key=key,
        num_steps=num_steps,
    )
    return optax.chain(mean, cast_updates_to_float32(inner))


def cast_updates_to_float32(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """The inner optimizer with parameters and updates cast to float32 or wider.

    Without the cast, the moments of bfloat16 parameters would begin in bfloat16 and
    change to float32 at the first step. On a mesh, the moments have the sharding of
    their parameters.
    """

    def init(params: optax.Params) -> optax.OptState:
        params = widen(params)
        return shard_like(inner.init(params), params)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        params = None if params is None else widen(params)
        return inner.update(widen(updates), state, params)

    return optax.GradientTransformation(init, update)
