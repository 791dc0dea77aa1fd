"""What is released: noisy means, in the hands of the user's optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core.dtypes import widen
from dpjax._core.outward import round_down_float32
from dpjax._plan import quantile
from dpjax._plan.modules import is_trained
from dpjax._plan.parameters import RunParameters
from dpjax._plan.schedule import Segment, values_at
from dpjax.noise._correlated import Buffer, correlated_noise
from dpjax.noise._gaussian import add_gaussian_noise, noisy_mean, stddev_of_sum
from dpjax.noise._limit import limit_steps
from dpjax.noise._private_mean import cast_updates_to_float32


def optimizer(
    plan: RunParameters,
    inner: optax.GradientTransformation,
    key: jax.Array,
    buffer: Buffer,
) -> optax.GradientTransformationExtraArgs:
    """The end of the run, noise and division by the expected size, and inner."""
    strategy = plan.strategy
    if plan.schedule or plan.quantile:
        mean = optax.chain(limit_steps(plan.num_steps), _varying_mean(plan, key))
    elif strategy is not None:
        stddev = stddev_of_sum(plan.clip_norm, plan.noise_multiplier, plan.batch_size)
        noise = correlated_noise(
            strategy, stddev, num_steps=plan.num_steps, key=key, buffer=buffer
        )
        mean = optax.chain(noise, optax.scale(1.0 / plan.batch_size))
    else:
        mean = noisy_mean(
            clip_norm=plan.clip_norm,
            noise_multiplier=plan.noise_multiplier,
            expected_batch_size=plan.batch_size,
            key=key,
            num_steps=plan.num_steps,
        )
    return _on_trained(optax.chain(mean, cast_updates_to_float32(inner)))


class VaryingState(NamedTuple):
    """What a run carries whose numbers vary.

    Attributes:
      step: how many steps are done, i32[].
      clip_norm: the next step's, f32[].
      noise: the state of the noise, with its key.
    """

    step: jax.Array
    clip_norm: jax.Array
    noise: optax.OptState


def clip_norm_of(state: Any) -> jax.Array:
    """The next step's clip norm, from an optimizer's state, wherever in it it is."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, VaryingState))
    found = [x.clip_norm for x in nodes if isinstance(x, VaryingState)]
    if len(found) != 1:
        raise ValueError(
            "state must be that of one optimizer of a plan whose numbers vary; got "
            f"{len(found)} of them in {jax.tree.structure(state)}."
        )
    return found[0]


def _varying_mean(plan: RunParameters, key: jax.Array) -> optax.GradientTransformation:
    """Private means where noise, clip norm or batch size vary.

    What comes in is in units of the plan's clip norm, whatever a step's own is (or of
    the step's, where it follows a quantile): so that its sensitivity does not depend on
    which step it was made for. The noise of a step, in units of the plan's, is a factor
    r: the sum is divided by it, gets the plan's noise, and is multiplied by it.
    """
    constant = (Segment(0, 1.0, 1.0, plan.batch_size),)
    schedule, follows = plan.schedule or constant, plan.quantile
    sigma, clip_norm = plan.noise_multiplier, plan.clip_norm
    of_count = 1.0
    if follows:
        sigma, of_count = quantile.noise_of(follows, sigma, plan.batch_size)
    unit = 1.0 if follows else clip_norm
    noise = add_gaussian_noise(stddev_of_sum(unit, sigma, plan.batch_size), key=key)
    # The count in units in which its noise is σ, and no larger than that.
    weight = round_down_float32(sigma / of_count)

    def init(params: Any) -> VaryingState:
        start = jnp.asarray(clip_norm, jnp.float32)
        return VaryingState(jnp.zeros((), jnp.int32), start, noise.init(params))

    def update(
        updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, VaryingState]:
        if follows and not isinstance(updates, quantile.Bounded):
            raise ValueError(
                "updates must be a dpjax.Bounded sum, as value_and_grad of this plan "
                "gives it, since the clip norm follows a quantile (flax.nnx.Optimizer "
                f"does not hand it on: use the optimizer itself); got {type(updates)}."
            )
        now = values_at(schedule, state.step)
        released = widen(updates)
        if follows:
            released = released._replace(within=released.within * weight)
        smaller = _scale_tree(released, 1 / jnp.asarray(now.noise))
        noisy, noise_state = noise.update(smaller, state.noise, params)
        noisy = _scale_tree(noisy, jnp.asarray(now.noise))
        scale, following = jnp.asarray(now.clip), state.clip_norm
        if follows:
            count, noisy = noisy.within / weight, noisy.total
            scale = state.clip_norm
            following = quantile.next_clip_norm(follows, scale, count, now.batch_size)
        mean = _scale_tree(noisy, scale / jnp.asarray(now.batch_size, jnp.float32))
        return mean, VaryingState(state.step + 1, following, noise_state)

    return optax.GradientTransformation(init, update)


def _scale_tree(tree: Any, factor: jax.Array) -> Any:
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), tree)


def _on_trained(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """For parameters with leaves that have None for a gradient, as no float has."""

    def trained(params: Any) -> Any:
        return jax.tree.map(lambda x: x if is_trained(x) else None, params)

    def init(params: Any) -> Any:
        _refuse_masks("params", params)
        return inner.init(trained(params))

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        _refuse_masks("updates", updates)
        if extra_args:
            raise ValueError(
                "a plan's optimizer takes no further arguments: a value computed from "
                "the data, such as the loss for reduce_on_plateau or polyak_sgd, would "
                f"enter the update without noise; got {sorted(extra_args)}."
            )
        if params is None:
            return inner.update(updates, state)
        found, state = inner.update(updates, state, trained(params))
        filled = jax.tree.map(_zero_updates, found, params, is_leaf=lambda x: x is None)
        return filled, state

    return optax.GradientTransformationExtraArgs(init, update)


def _refuse_masks(name: str, tree: Any) -> None:
    """Raise where a part of a tree was masked: it would be released without noise."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    if any(isinstance(x, optax.MaskedNode) for x in leaves):
        raise ValueError(
            f"{name} must be the whole tree, got one with optax.MaskedNode: around a "
            "plan's optimizer, optax.masked and optax.partition (multi_transform) pass "
            "the masked parts of the clipped sum on without noise. Put the mask "
            "inside: plan.optimizer(optax.masked(inner, mask), key=key), or "
            "plan.optimizer(optax.partition(...), key=key)."
        )


def _zero_updates(update: Any, param: Any) -> Any:
    """A zero where a number has no update: optax.apply_updates adds without asking."""
    if update is None and isinstance(param, jax.Array | np.ndarray):
        number = jnp.issubdtype(param.dtype, jnp.number)
        if number or param.dtype == jnp.bool_:
            return jnp.zeros_like(param)
    return update
