"""Private normalised SGD with tree-aggregated momentum (Tran and Cutkosky 2022)."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import _validate, optimizers, sampling
from dpjax._keys import stream
from dpjax.accounting import gdp
from dpjax.accounting.tree import momentum_mu
from dpjax.adjacency import Adjacency
from dpjax.per_example import clipped_grad
from dpjax.solvers import _data, _numbers, printed
from dpjax.solvers.guarantee import Guarantee
from dpjax.tree import prefix_variance

Order = Literal["fixed", "reshuffled"]

_ASSUMPTIONS = {
    "fixed": "an example is in the same step of every epoch",
    "reshuffled": "an example is in one step of every epoch, chosen by a key that has "
    "nothing to do with the data",
}


class Curve(NamedTuple):
    """What a run looked like, step by step. The loss is not private: keep it in house.

    Attributes:
      loss: the mean loss over the step's batch before the update, f[T]; examples
        whose loss is not finite are left out.
      noise_norm: the root mean square L2 norm of the noise in the momentum, in the
        units of a mean gradient, f[T]. It depends on no data.
    """

    loss: jax.Array
    noise_norm: jax.Array


class Result(NamedTuple):
    """A private model and what is promised about it.

    Attributes:
      params: the last parameters, shaped like the initial ones.
      curve: a `Curve`, which the guarantee does not cover.
      guarantee: a `Guarantee` for params and for every iterate before them.
      noise_multiplier: the nodes' noise standard deviation over clip_norm, f[].
    """

    params: Any
    curve: Curve
    guarantee: Guarantee
    noise_multiplier: jax.Array


@functools.partial(
    jax.jit,
    static_argnames=(
        "loss_fn",
        "schedule",
        "order",
        "num_epochs",
        "batch_size",
        "microbatch_size",
    ),
)
def _train(
    params: Any,
    data: Any,
    key: jax.Array,
    stddev: jax.Array,
    decay: jax.Array,
    clip_norm: jax.Array,
    learning_rate: Any,
    *,
    loss_fn: Callable[[Any, Any], jax.Array],
    schedule: optax.Schedule | None,
    order: Order,
    num_epochs: int,
    batch_size: int,
    microbatch_size: int | None,
) -> tuple[Any, jax.Array]:
    """The last parameters and the loss of every step, compiled once for many runs."""
    num_examples = jax.tree.leaves(data)[0].shape[0]
    optimizer = optimizers.dp_nsgd(
        learning_rate if schedule is None else schedule,
        clip_norm=1.0,  # their product was rounded up
        noise_multiplier=stddev,
        expected_batch_size=batch_size,
        key=stream(key, "noise"),
        decay=decay,
        num_steps=num_epochs * -(-num_examples // batch_size),
    )
    gradient = clipped_grad(loss_fn, clip_norm, microbatch_size=microbatch_size)

    def step(carry: Any, batch: sampling.Batch) -> tuple[Any, jax.Array]:
        params, state = carry
        examples = jax.tree.map(lambda x: x[batch.indices], data)
        total, per_example = gradient(params, examples, mask=batch.mask)
        updates, state = optimizer.update(total, state, params)
        counted = batch.mask & jnp.isfinite(per_example.loss)
        loss = jnp.mean(per_example.loss, where=counted)
        return (optax.apply_updates(params, updates), state), loss

    def epoch(carry: Any, number: jax.Array) -> tuple[Any, jax.Array]:
        if order == "fixed":
            batches = sampling.cyclic(num_examples, batch_size)
        else:
            batches = sampling.reshuffled(
                num_examples, batch_size, key=stream(key, "batches"), epoch=number
            )
        return jax.lax.scan(step, carry, batches)

    carry = params, optimizer.init(params)
    (params, _), loss = jax.lax.scan(epoch, carry, jnp.arange(num_epochs))
    return params, loss.ravel()


def dp_nsgd(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    data: Any,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    order: Order,
    num_epochs: int,
    batch_size: int,
    learning_rate: optax.ScalarOrSchedule,
    decay: float,
    clip_norm: float,
    key: jax.Array,
    noise: Literal["exact", "printed"] = "exact",
    microbatch_size: int | None = None,
) -> Result:
    """Train by normalised steps along a tree-aggregated private momentum.

    Args:
      loss_fn: the loss of ONE example, `loss_fn(params, example)`, a real scalar.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of n examples.
      epsilon: the target ε, positive.
      delta: the target δ, in (0, 1).
      adjacency: `ZERO_OUT` or `REPLACE`.
      order: "fixed" for the data's order in every epoch, "reshuffled" for a random
        order in each, which costs more noise and mixes better.
      num_epochs: E, at least 1.
      batch_size: b, at least 1. An epoch has n_b = ⌈n / b⌉ steps.
      learning_rate: the length of a step, a number or an optax schedule.
      decay: the momentum coefficient β, in [0, 1).
      clip_norm: the bound C on a per-example gradient's L2 norm, positive.
      key: one typed key, for the noise and the order.
      noise: "exact" calibrates by `accounting.tree.momentum_mu`; "printed" takes the
        paper's constant (more noise), to compare with: see `solvers.printed`.
      microbatch_size: see `clipped_grad`.

    Returns:
      A `Result`: params, curve, guarantee and the noise multiplier that was used.

    Raises:
      ValueError: an argument is out of range, before any training; adjacency is
        ADD_REMOVE, under which one more example would move others to other batches.

    Privacy: params, and all iterates on the way, are μ-GDP under the adjacency, where
    guarantee.mu is at most `accounting.gdp.mu(epsilon, delta)`, so that
    guarantee.epsilon(delta) is at most epsilon. n, the shapes and the hyperparameters
    are taken as public. The curve's loss is outside the guarantee.

    Reference: Tran and Cutkosky (2022), Algorithm 1, with exact accounting.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.random.normal(jax.random.key(0), (64, 3))
      >>> y = x @ jnp.array([1.0, -1.0, 0.5])
      >>> def loss(w, example):
      ...     return 0.5 * (example[0] @ w - example[1]) ** 2
      >>> result = dp_nsgd(
      ...     loss, jnp.zeros(3), (x, y), epsilon=5.0, delta=1e-5,
      ...     adjacency=Adjacency.REPLACE, order="fixed", num_epochs=4, batch_size=16,
      ...     learning_rate=0.1, decay=0.9, clip_norm=1.0, key=jax.random.key(1))
      >>> result.params.shape, bool(result.guarantee.epsilon(1e-5) <= 5.0)
      ((3,), True)
    """
    _validate.positive("epsilon", epsilon)
    _validate.open_unit("delta", delta)
    _validate.one_of("order", order, tuple(_ASSUMPTIONS))
    _validate.one_of("noise", noise, ("exact", "printed"))
    num_epochs = _validate.static_int("num_epochs", num_epochs, minimum=1)
    batch_size = _validate.static_int("batch_size", batch_size, minimum=1)
    _validate.decay("decay", decay)
    decay, clip_norm = _numbers.down(decay), _numbers.up(clip_norm)
    _validate.positive("clip_norm", clip_norm)
    _validate.typed_key("key", key)
    if _validate.adjacency(adjacency) is Adjacency.ADD_REMOVE:
        raise ValueError(
            f"adjacency must be ZERO_OUT or REPLACE; got {adjacency!r}: one example "
            "more would move others to other batches of this fixed size."
        )
    num_examples = _data.check(loss_fn, data)
    steps_per_epoch = -(-num_examples // batch_size)
    num_steps = num_epochs * steps_per_epoch

    account = functools.partial(
        momentum_mu,
        num_steps=num_steps,
        decay=decay,
        steps_per_epoch=steps_per_epoch,
        order=order,
        adjacency=adjacency,
    )
    target_mu = float(gdp.mu(epsilon, delta))
    if noise == "printed":
        noise_multiplier = printed.dp_nsgd_noise_multiplier(
            target_mu, num_steps=num_steps, steps_per_epoch=steps_per_epoch
        )
    else:
        # μ is proportional to 1/σ. The margin covers the roundings of float32.
        noise_multiplier = _numbers.up(float(account(1.0)) / target_mu * (1 + 1e-6))

    scheduled = callable(learning_rate)
    trained, loss = _train(
        *jax.tree.map(jnp.asarray, (params, data)),
        stream(key, "solvers.dp_nsgd"),
        _numbers.array(_numbers.stddev(noise_multiplier, clip_norm)),
        _numbers.array(decay),
        _numbers.array(clip_norm),
        None if scheduled else learning_rate,
        loss_fn=loss_fn,
        schedule=learning_rate if scheduled else None,
        order=order,
        num_epochs=num_epochs,
        batch_size=batch_size,
        microbatch_size=microbatch_size,
    )
    dimension = sum(x.size for x in jax.tree.leaves(trained))
    steps = jnp.arange(1, num_steps + 1)
    coordinate = clip_norm * noise_multiplier * (1 - decay) / batch_size
    return Result(
        params=trained,
        curve=Curve(
            loss=loss,
            noise_norm=coordinate * jnp.sqrt(dimension * prefix_variance(steps, decay)),
        ),
        guarantee=Guarantee(
            mechanism=f"all {num_steps} iterates of tree-aggregated momentum",
            mu=account(noise_multiplier),
            adjacency=adjacency,
            assumptions=(
                _ASSUMPTIONS[order],
                "n, all shapes, the initial parameters and the hyperparameters are "
                "public",
                "arithmetic is real and Gaussian noise ideal",
            ),
        ),
        noise_multiplier=_numbers.array(_numbers.down(noise_multiplier)),
    )
