"""Descent along a momentum of reduced sensitivity, in one scan.

The algorithm is Algorithm 2 of Tran and Cutkosky (2022),
https://arxiv.org/abs/2210.06328, with n steps in an epoch where the paper has N, and
batches where the paper has single examples. Two more things differ. The paper draws a
permutation in every epoch; but its equation (3), by Lemma 17, needs the same order in
all epochs, so this module uses one order. The paper assumes a Lipschitz and smooth
loss; this module clips every gradient and every difference of two gradients instead.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from dpjax import sampling
from dpjax._core.dtypes import widen
from dpjax._core.typing import Key, LossFn, Params, Tree
from dpjax.clipping._clip import clip
from dpjax.noise import reduced_momentum
from dpjax.noise.reduced_momentum import ReducedMomentumState, Terms
from dpjax.solvers import _checks
from dpjax.solvers._descent import narrow
from dpjax.solvers._results import Curve


class _Carry(NamedTuple):
    """The carry of the scan: w_t, anchors w_qn and w_(q−1)n, the momentum's state."""

    w: jax.Array
    anchor: jax.Array
    before: jax.Array
    state: ReducedMomentumState


class _Example(NamedTuple):
    """The contribution of one example to a step: clipped terms, loss and flags."""

    terms: Terms[jax.Array]
    loss: jax.Array
    used: jax.Array
    change_clipped: jax.Array
    drift_clipped: jax.Array


def _example(
    loss: Callable[[jax.Array], jax.Array],
    points: jax.Array,
    keep: jax.Array,
    refresh: jax.Array,
    bounds: Terms[jax.Array],
) -> _Example:
    """One example's clipped terms, from its gradients at w_t, w_qn and w_(q−1)n."""
    losses, gradients = jax.vmap(jax.value_and_grad(loss))(points)
    # A gradient that is not finite at any of the three points excludes the example.
    keep = keep & jnp.all(jnp.isfinite(gradients))
    here, anchor, before = (clip(g, bounds.anchor, keep)[0] for g in gradients)
    change, change_norm = clip(anchor - before, bounds.change, keep)
    drift, drift_norm = clip(here - anchor, bounds.drift, keep)
    # One tree serves for F^Δ and F^G from the third epoch on, where the window depends
    # on both: see `noise.reduced_momentum`.
    mixed = (1 - refresh) * change + refresh * anchor
    return _Example(
        terms=Terms(anchor, mixed, drift),
        loss=losses[0],
        used=keep,
        change_clipped=change_norm > bounds.change,
        drift_clipped=drift_norm > bounds.drift,
    )


@functools.partial(
    jax.jit, static_argnames=("loss_fn", "batch_size", "num_epochs", "schedule")
)
def descend(
    params: Params,
    data: _checks.Data,
    decay: jax.Array,
    refresh: jax.Array,
    bounds: Terms[jax.Array],
    stddevs: Terms[jax.Array],
    learning_rate: jax.Array,
    key: Key,
    *,
    loss_fn: LossFn,
    batch_size: int,
    num_epochs: int,
    schedule: optax.Schedule | None,
) -> tuple[Params, Curve]:
    """The last parameters and the curve, compiled once for many runs."""
    batches = sampling.cyclic(data.finite.shape[0], batch_size)
    n = batches.mask.shape[0]
    start, unravel = ravel_pytree(widen(params))
    keys = reduced_momentum.tree_keys(key)
    decay, refresh, bounds, learning_rate = jax.tree.map(
        lambda x: x.astype(start.dtype), (decay, refresh, bounds, learning_rate)
    )

    def of_example(points: jax.Array, example: Tree, keep: jax.Array) -> _Example:
        def loss(point: jax.Array) -> jax.Array:
            return loss_fn(unravel(point), example)

        return _example(loss, points, keep, refresh, bounds)

    def step(
        carry: _Carry, inputs: tuple[jax.Array, sampling.Batch]
    ) -> tuple[_Carry, Curve]:
        w, anchor, before, state = carry
        number, batch = inputs

        # An epoch begins: its first iterate w_qn is the anchor, the last one w_(q−1)n.
        begins = (number - 1) % n == 0
        before = jnp.where(begins, anchor, before)
        anchor = jnp.where(begins, w, anchor)

        # The summands of F^G, F^Δ and F^r at step t.
        found = jax.vmap(of_example, (None, 0, 0))(
            jnp.stack([w, anchor, before]),
            jax.tree.map(lambda x: x[batch.indices], data.examples),
            batch.mask & data.finite[batch.indices],
        )
        # The nodes that end at t, each with its own draw of noise, and the estimate m̂_t
        # from these nodes, by a recursion in place of Algorithm 4.
        momentum, state = reduced_momentum.update(
            state,
            number,
            jax.tree.map(lambda x: jnp.sum(x, axis=0), found.terms),
            steps_per_epoch=n,
            decay=decay,
            refresh=refresh,
            stddevs=stddevs,
            keys=keys,
        )
        # w_t = w_{t−1} − η m̂_t / ‖m̂_t‖, with no step for a momentum of zero.
        length = jnp.linalg.norm(momentum)
        rate = learning_rate if schedule is None else schedule(number - 1)
        rate = jnp.asarray(rate, w.dtype)
        w = w - rate * momentum / jnp.where(length > 0, length, 1.0)

        used = found.used
        return _Carry(w, anchor, before, state), Curve(
            loss=jnp.mean(found.loss, where=used & jnp.isfinite(found.loss)),
            left_out=jnp.sum(batch.mask & ~used, dtype=jnp.int32),
            change_clipped=jnp.mean(found.change_clipped, where=used),
            drift_clipped=jnp.mean(found.drift_clipped, where=used),
        )

    def epoch(carry: _Carry, number: jax.Array) -> tuple[_Carry, Curve]:
        steps = number * n + jnp.arange(1, n + 1, dtype=jnp.int32)
        return jax.lax.scan(step, carry, (steps, batches))

    state = reduced_momentum.init(num_epochs * n, n, start.size, start.dtype)
    epochs = jnp.arange(num_epochs, dtype=jnp.int32)
    last, curve = jax.lax.scan(epoch, _Carry(start, start, start, state), epochs)
    return narrow(unravel(last.w), params), jax.tree.map(jnp.ravel, curve)
