"""What is released: noisy means, in the hands of the user's optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._limit import at_most
from dpjax._plan.modules import is_trained
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
    private = on_noisy_mean(inner, clip_norm, noise_multiplier, batch_size, key)
    return _on_trained(optax.chain(at_most(num_steps), private))


def _on_trained(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """For parameters with leaves that have None for a gradient, as no float has."""

    def trained(params: Any) -> Any:
        return jax.tree.map(lambda x: x if is_trained(x) else None, params)

    def init(params: Any) -> Any:
        return inner.init(trained(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            return inner.update(updates, state)
        found, state = inner.update(updates, state, trained(params))
        filled = jax.tree.map(_unmoved, found, params, is_leaf=lambda x: x is None)
        return filled, state

    return optax.GradientTransformation(init, update)


def _unmoved(update: Any, param: Any) -> Any:
    """A zero where a number has no update: optax.apply_updates adds without asking."""
    if update is None and isinstance(param, jax.Array | np.ndarray):
        number = jnp.issubdtype(param.dtype, jnp.number)
        if number or param.dtype == jnp.bool_:
            return jnp.zeros_like(param)
    return update
