"""Any optimizer of optax, on private means of clipped sums."""

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
    """The inner optimizer on the private mean."""
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
    """The inner optimizer in float32 at least, as the sums are.

    Its moments would otherwise begin in bfloat16 and go on in float32. On a mesh they
    lie where their parameters lie.
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
