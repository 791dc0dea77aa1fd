"""Normalised SGD with momentum of reduced sensitivity (Tran and Cutkosky 2022)."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from dpjax import _validate, reduced_momentum, sampling
from dpjax._dtypes import widen
from dpjax._keys import stream
from dpjax.accounting import gdp
from dpjax.accounting.reduced_momentum import reduced_momentum_mu
from dpjax.adjacency import Adjacency
from dpjax.clipping import clip
from dpjax.reduced_momentum import Terms
from dpjax.solvers import _data, _descent, _numbers
from dpjax.solvers._allot_noise import allot_noise
from dpjax.solvers.guarantee import Guarantee


class Curve(NamedTuple):
    """What a run looked like, step by step. It is not private: keep it in house.

    Attributes:
      loss: the mean loss over the step's batch before the update, f[T].
      left_out: how many of the batch's examples contributed zero because they or their
        gradients are not finite, i[T].
      change_clipped: the share of them whose change since the last epoch was clipped,
        f[T]; 0 in the first epoch.
      drift_clipped: the share of them whose drift since the anchor was clipped, f[T].
      noise_norm: the root mean square L2 norm of the noise in the momentum, in the
        units of a mean gradient, f[T]. It depends on no data.
    """

    loss: jax.Array
    left_out: jax.Array
    change_clipped: jax.Array
    drift_clipped: jax.Array
    noise_norm: jax.Array


class Result(NamedTuple):
    """A private model and what is promised about it.

    Attributes:
      params: the last parameters, shaped like the initial ones.
      curve: a `Curve`, which the guarantee does not cover.
      guarantee: a `Guarantee` for params and for every iterate before them.
      noise_multipliers: `Terms` of the noise standard deviations of a node over the
        bound on one example's term, f[] each.
    """

    params: Any
    curve: Curve
    guarantee: Guarantee
    noise_multipliers: Terms


def _finite(x: float) -> float:
    """A tree that is never used needs no noise, and no infinity."""
    return x if math.isfinite(x) else 0.0


@functools.partial(
    jax.jit, static_argnames=("loss_fn", "batch_size", "num_epochs", "schedule")
)
def _train(
    params: Any,
    data: _data.Data,
    decay: jax.Array,
    refresh: jax.Array,
    bounds: Terms,
    stddevs: Terms,
    learning_rate: jax.Array,
    key: jax.Array,
    *,
    loss_fn: Any,
    batch_size: int,
    num_epochs: int,
    schedule: Any,
) -> tuple[Any, Any]:
    batches = sampling.cyclic(data.finite.shape[0], batch_size)
    n = batches.mask.shape[0]
    start, unravel = ravel_pytree(widen(params))
    keys = reduced_momentum.tree_keys(key)
    decay, refresh, bounds, learning_rate = jax.tree.map(
        lambda x: x.astype(start.dtype), (decay, refresh, bounds, learning_rate)
    )

    def example_terms(points: Any, example: Any, keep: jax.Array) -> Any:
        """One example's terms, from gradients at iterate, anchor and last anchor."""

        def loss(point: jax.Array) -> jax.Array:
            return loss_fn(unravel(point), example)

        losses, gradients = jax.vmap(jax.value_and_grad(loss))(points)
        keep = keep & jnp.all(jnp.isfinite(gradients))
        here, anchor, before = (clip(g, bounds.anchor, keep)[0] for g in gradients)
        change, change_norm = clip(anchor - before, bounds.change, keep)
        drift, drift_norm = clip(here - anchor, bounds.drift, keep)
        mixed = (1 - refresh) * change + refresh * anchor
        clipped = change_norm > bounds.change, drift_norm > bounds.drift
        return Terms(anchor, mixed, drift), losses[0], keep, clipped

    def step(carry: Any, inputs: Any) -> Any:
        w, anchor, before, state = carry
        number, batch = inputs
        begins = (number - 1) % n == 0
        before = jnp.where(begins, anchor, before)
        anchor = jnp.where(begins, w, anchor)
        examples = jax.tree.map(lambda x: x[batch.indices], data.examples)
        terms, losses, used, clipped = jax.vmap(example_terms, (None, 0, 0))(
            jnp.stack([w, anchor, before]),
            examples,
            batch.mask & data.finite[batch.indices],
        )
        momentum, state = reduced_momentum.update(
            state,
            number,
            jax.tree.map(lambda x: jnp.sum(x, axis=0), terms),
            steps_per_epoch=n,
            decay=decay,
            refresh=refresh,
            stddevs=stddevs,
            keys=keys,
        )
        length = jnp.linalg.norm(momentum)
        rate = learning_rate if schedule is None else schedule(number - 1)
        rate = jnp.asarray(rate, w.dtype)
        w = w - rate * momentum / jnp.where(length > 0, length, 1.0)
        share = [jnp.mean(c, where=used) for c in clipped]
        mean = jnp.mean(losses, where=used & jnp.isfinite(losses))
        left_out = jnp.sum(batch.mask & ~used, dtype=jnp.int32)
        return (w, anchor, before, state), (mean, left_out, *share)

    def epoch(carry: Any, number: jax.Array) -> Any:
        steps = number * n + jnp.arange(1, n + 1, dtype=jnp.int32)
        return jax.lax.scan(step, carry, (steps, batches))

    state = reduced_momentum.init(num_epochs * n, n, start.size, start.dtype)
    carry = start, start, start, state
    epochs = jnp.arange(num_epochs, dtype=jnp.int32)
    (last, *_), curve = jax.lax.scan(epoch, carry, epochs)
    return _descent.narrow(unravel(last), params), jax.tree.map(jnp.ravel, curve)


def sensitivity_reduced_nsgd(
    loss_fn: Any,
    params: Any,
    data: Any,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    num_epochs: int,
    batch_size: int,
    learning_rate: optax.ScalarOrSchedule,
    decay: float,
    refresh: float,
    clip_norm: float,
    change_clip_norm: float,
    drift_clip_norm: float,
    key: jax.Array,
) -> Result:
    """Train by normalised steps along a private momentum of reduced sensitivity.

    It pays where an epoch is short: with steps of length η and an L-smooth loss a
    gradient changes by at most ηnL from epoch to epoch, so that the last two clip norms
    may be that small and clip nothing.

    Args:
      loss_fn: the loss of ONE example, `loss_fn(params, example)`, a real scalar.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of N examples. An example with a
        NaN or an infinity in it contributes zero and is counted.
      epsilon: the target ε, positive.
      delta: the target δ, in (0, 1).
      adjacency: `ZERO_OUT` or `REPLACE`.
      num_epochs: E, at least 1. All have the data's own order.
      batch_size: b, at least 1. An epoch has n = ⌈N / b⌉ steps.
      learning_rate: the length of a step, a number or an optax schedule.
      decay: the momentum coefficient β, in [0, 1).
      refresh: γ, in [0, 1]: how much of the anchor's gradients, rather than of their
        changes, goes into each window. The paper has ηn.
      clip_norm: the bound C on an example's gradient, positive.
      change_clip_norm: the bound on the change of an example's clipped gradient from
        one epoch's anchor to the next, positive.
      drift_clip_norm: the bound on its change from the anchor to the iterate, positive.
      key: one typed key, for the noise.

    Returns:
      A `Result`: params, curve, guarantee, noise multipliers.

    Raises:
      ValueError: an argument is out of range, before any training.

    Privacy: params, and all iterates on the way, are μ-GDP under the adjacency, μ being
    `accounting.reduced_momentum.reduced_momentum_mu`, so that guarantee.epsilon(delta)
    is at most epsilon. No smoothness is assumed: all three terms are clipped. The
    curve is outside the guarantee.

    Reference: Tran and Cutkosky (2022), Algorithm 2, by a recursion in place of
    Algorithm 4 and with exact accounting in place of Theorem 8.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax.solvers import losses
      >>> x = jax.random.normal(jax.random.key(0), (64, 3))
      >>> result = sensitivity_reduced_nsgd(
      ...     losses.logistic(feature_norm=1.0), jnp.zeros(3), (x, jnp.sign(x[:, 0])),
      ...     epsilon=5.0, delta=1e-5, adjacency=Adjacency.REPLACE, num_epochs=5,
      ...     batch_size=16, learning_rate=0.1, decay=0.8, refresh=0.2, clip_norm=1.0,
      ...     change_clip_norm=0.1, drift_clip_norm=0.1, key=jax.random.key(1))
      >>> result.params.shape, bool(result.guarantee.epsilon(1e-5) <= 5.0)
      ((3,), True)
    """
    _validate.positive("epsilon", epsilon)
    _validate.open_unit("delta", delta)
    if _validate.adjacency(adjacency) is Adjacency.ADD_REMOVE:
        raise ValueError(
            f"adjacency must be ZERO_OUT or REPLACE; got {adjacency!r}: one example "
            "more would move others to other batches of this fixed size."
        )
    num_epochs = _validate.static_int("num_epochs", num_epochs, minimum=1)
    batch_size = _validate.static_int("batch_size", batch_size, minimum=1)
    _validate.decay("decay", decay)
    _validate.closed_unit("refresh", refresh)
    decay, refresh = _numbers.down(decay), _numbers.down(refresh)
    clip_norm, change_clip_norm, drift_clip_norm = (
        _numbers.up(x) for x in (clip_norm, change_clip_norm, drift_clip_norm)
    )
    _validate.positive("clip_norm", clip_norm)
    _validate.positive("change_clip_norm", change_clip_norm)
    _validate.positive("drift_clip_norm", drift_clip_norm)
    _validate.typed_key("key", key)
    if not callable(learning_rate):
        _validate.positive("learning_rate", learning_rate)
    n = -(-_data.check(loss_fn, data) // batch_size)
    num_steps = num_epochs * n

    mixed = (1 - refresh) * change_clip_norm + refresh * clip_norm
    bounds = Terms(clip_norm, mixed, drift_clip_norm)
    noise = allot_noise(
        float(gdp.mu(epsilon, delta)),
        bounds=bounds,
        num_steps=num_steps,
        steps_per_epoch=n,
        decay=decay,
        refresh=refresh,
        adjacency=adjacency,
    )
    stddevs = Terms(
        *(_numbers.stddev(_finite(s), c) for s, c in zip(noise, bounds, strict=True))
    )
    params = jax.tree.map(jnp.asarray, params)
    scheduled = callable(learning_rate)
    last, (loss, left_out, change_clipped, drift_clipped) = _train(
        params,
        _data.prepare(data),
        _numbers.array(decay),
        _numbers.array(refresh),
        jax.tree.map(
            _numbers.array, Terms(clip_norm, change_clip_norm, drift_clip_norm)
        ),
        jax.tree.map(_numbers.array, stddevs),
        _numbers.array(0.0 if scheduled else learning_rate),
        stream(key, "solvers.sensitivity_reduced_nsgd"),
        loss_fn=loss_fn,
        batch_size=batch_size,
        num_epochs=num_epochs,
        schedule=learning_rate if scheduled else None,
    )
    variance = reduced_momentum.momentum_variance(
        num_steps, n, decay=decay, refresh=refresh
    )
    coordinate = sum(v * s * s for v, s in zip(variance, stddevs, strict=True))
    dimension = sum(x.size for x in jax.tree.leaves(params))
    return Result(
        params=last,
        curve=Curve(
            loss=loss,
            left_out=left_out,
            change_clipped=change_clipped,
            drift_clipped=drift_clipped,
            noise_norm=jnp.asarray(
                (1 - decay) / batch_size * np.sqrt(dimension * coordinate)
            ),
        ),
        guarantee=Guarantee(
            mechanism=f"all {num_steps} iterates of momentum of reduced sensitivity",
            mu=reduced_momentum_mu(
                noise,
                num_steps=num_steps,
                decay=decay,
                steps_per_epoch=n,
                adjacency=adjacency,
            ),
            adjacency=adjacency,
            assumptions=(
                "an example is in the same step of every epoch",
                "n, all shapes, the initial parameters and the hyperparameters are "
                "public",
                "arithmetic is real and Gaussian noise ideal",
            ),
        ),
        noise_multipliers=jax.tree.map(_numbers.array, noise),
    )
