"""Normalised SGD with momentum of reduced sensitivity (Tran and Cutkosky 2022).

This is Algorithm 2 of Tran and Cutkosky (2022), https://arxiv.org/abs/2210.06328, with
these changes:

1. A step uses a batch in place of one example. An epoch has n steps, a number that the
   paper calls N.
2. All epochs use the same order of the examples. The paper draws a permutation in every
   epoch, but the paper's equation (3), by Lemma 17, needs the same order in all epochs.
3. Every gradient and every difference of two gradients is clipped. The paper instead
   assumes a Lipschitz and smooth loss.

The momentum's noise comes from three trees, which `noise._reduced_momentum.Terms`
defines. The first tree is for the gradients at the anchor (the iterate at which an
epoch began), the second mainly for the changes of these gradients from epoch to epoch,
and the third for the drifts of the gradients since the anchor. `allot_noise` divides
one privacy budget among the trees.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from dpjax import sampling
from dpjax._core import validate
from dpjax._core.dtypes import widen
from dpjax._core.keys import stream
from dpjax._core.rounding import MARGIN
from dpjax._core.typing import Adjacency, Key, LossFn, Params, ScalarOrSchedule, Tree
from dpjax.accounting import gdp
from dpjax.accounting.profiles import Gaussian, Guarantee
from dpjax.accounting.tree import reduced_momentum_mu
from dpjax.clipping._clip import clip
from dpjax.noise import _reduced_momentum as reduced_momentum
from dpjax.noise._reduced_momentum import ReducedMomentumState, Terms
from dpjax.solvers import _checks, _precision
from dpjax.solvers._descent import Curve, Result, cast_like


def allot_noise(
    target_mu: float,
    mu_of: Callable[[Sequence[float]], jax.Array],
    variance: Terms[float],
) -> Terms[float]:
    """The three noise multipliers for μ-GDP that add the least noise to the momentum.

    `Terms` describes the three trees of noise: anchor, change and drift. The noise in
    the momentum is measured by its variance, averaged over all steps. Let s be the
    noise multiplier of a tree: the standard deviation of a node's noise, divided by the
    bound on one example's term in the tree. Each tree has two constants A and V: the
    tree contributes A/s² to μ² and V s² to the variance of the momentum. For a given
    μ², the variance is minimal if s² is proportional to sqrt(A/V).

    Args:
      target_mu: μ, positive.
      mu_of: the μ of a run as a function of the three noise multipliers.
      variance: V for each tree.

    Returns:
      `Terms` of the noise multipliers s; inf for a tree with A = 0 or V = 0.

    Example:
      >>> from dpjax.accounting.tree import reduced_momentum_mu
      >>> mu_of = functools.partial(
      ...     reduced_momentum_mu, num_steps=400, steps_per_epoch=50, decay=0.9,
      ...     adjacency=Adjacency.REPLACE)
      >>> noise = allot_noise(1.0, mu_of, Terms(1.0, 0.1, 0.005))
      >>> print([f"{x:.2f}" for x in noise])
      ['7.02', '16.81', '32.40']
    """
    # The minimum of Σ V s² for a given Σ A/s² has s⁴ ∝ A/V in each tree (Lagrange).
    noises: list[float] = []
    for k, unit in enumerate(variance):
        # With infinite noise in the other two trees, μ² is the cost of this tree alone.
        multipliers = [math.inf] * 3
        multipliers[k] = 1.0
        cost = float(mu_of(multipliers)) ** 2
        unused = cost == 0 or unit == 0
        noises.append(math.inf if unused else math.sqrt(math.sqrt(cost / unit)))
    # μ is inversely proportional to a common factor of the three noises. MARGIN covers
    # the rounding errors of this computation.
    scale = float(mu_of(noises)) / target_mu * MARGIN
    return Terms(*(_precision.round_up(noise * scale) for noise in noises))


_Carry = tuple[jax.Array, ReducedMomentumState]  # the iterate, the momentum's state


class _Example(NamedTuple):
    """The contribution of one example to a step: clipped terms, loss and flags."""

    terms: Terms[jax.Array]
    loss: jax.Array
    used: jax.Array
    change_clipped: jax.Array
    drift_clipped: jax.Array


@functools.partial(jax.jit, static_argnames=("loss_fn", "run"))
def _train(
    params: Params,
    data: _checks.Data,
    decay: jax.Array,
    refresh: jax.Array,
    bounds: Terms[jax.Array],
    stddevs: Terms[jax.Array],
    learning_rate: jax.Array | optax.Schedule,
    key: Key,
    *,
    loss_fn: LossFn,
    run: _checks.Epochs,
) -> tuple[Params, Curve]:
    """Train, and return the last parameters and the `Curve` of all steps.

    Runs that differ only in the values of traced arguments share one compiled program.
    """
    batches = sampling.cyclic(data.finite.shape[0], run.batch_size)
    n = run.steps_per_epoch
    start, unravel = ravel_pytree(widen(params))
    keys = reduced_momentum.tree_keys(key)
    decay, refresh, bounds, learning_rate = jax.tree.map(
        lambda x: x.astype(start.dtype), (decay, refresh, bounds, learning_rate)
    )

    def of_example(points: jax.Array, example: Tree, is_used: jax.Array) -> _Example:
        def loss(point: jax.Array) -> jax.Array:
            return loss_fn(unravel(point), example)

        losses, gradients = jax.vmap(jax.value_and_grad(loss))(points)
        # An example is left out if any of its three gradients is not finite.
        is_used = is_used & jnp.all(jnp.isfinite(gradients))
        clipped = [clip(g, bounds.anchor, is_used)[0] for g in gradients]
        at_iterate, anchor, at_previous = clipped
        change, change_norm = clip(anchor - at_previous, bounds.change, is_used)
        drift, drift_norm = clip(at_iterate - anchor, bounds.drift, is_used)
        # From step 2n on, one tree carries both changes and gradients at the anchor:
        # see `noise._reduced_momentum`.
        mixed = (1 - refresh) * change + refresh * anchor
        return _Example(
            terms=Terms(anchor, mixed, drift),
            loss=losses[0],
            used=is_used,
            change_clipped=change_norm > bounds.change,
            drift_clipped=drift_norm > bounds.drift,
        )

    def step(
        anchors: tuple[jax.Array, jax.Array],
        carry: _Carry,
        inputs: tuple[jax.Array, sampling.Batch],
    ) -> tuple[_Carry, Curve]:
        w, state = carry
        number, batch = inputs
        # The results contain each example's terms of the three trees at step t.
        results = jax.vmap(of_example, (None, 0, 0))(
            jnp.stack([w, *anchors]), *data.select(batch)
        )
        # The update adds noise to each node that ends at t, and computes the estimate
        # m̂_t from these nodes, by a recursion in place of Algorithm 4.
        momentum, state = reduced_momentum.update(
            state,
            number,
            jax.tree.map(lambda x: jnp.sum(x, axis=0), results.terms),
            steps_per_epoch=n,
            decay=decay,
            refresh=refresh,
            stddevs=stddevs,
            keys=keys,
        )
        # w_t = w_{t−1} − η m̂_t / ‖m̂_t‖; a momentum of zero gives no step.
        length = jnp.linalg.norm(momentum)
        rate = learning_rate
        rate = jnp.asarray(rate(number - 1) if callable(rate) else rate, w.dtype)
        w = w - rate * momentum / jnp.where(length > 0, length, 1.0)

        used = results.used
        return (w, state), Curve(
            loss=jnp.mean(results.loss, where=used & jnp.isfinite(results.loss)),
            left_out=jnp.sum(batch.mask & ~used, dtype=jnp.int32),
            change_clipped=jnp.mean(results.change_clipped, where=used),
            drift_clipped=jnp.mean(results.drift_clipped, where=used),
        )

    def epoch(
        carry: tuple[jax.Array, _Carry], number: jax.Array
    ) -> tuple[tuple[jax.Array, _Carry], Curve]:
        # The first iterate w_qn of an epoch is its anchor; the previous anchor is
        # w_(q−1)n.
        previous_anchor, (anchor, state) = carry
        steps = number * n + jnp.arange(1, n + 1, dtype=jnp.int32)
        step_of_epoch = functools.partial(step, (anchor, previous_anchor))
        last, curve = jax.lax.scan(step_of_epoch, (anchor, state), (steps, batches))
        return (anchor, last), curve

    state = reduced_momentum.init(run.num_steps, n, start.size, start.dtype)
    epochs = jnp.arange(run.num_epochs, dtype=jnp.int32)
    (_, (last, _)), curve = jax.lax.scan(epoch, (start, (start, state)), epochs)
    return cast_like(unravel(last), params), jax.tree.map(jnp.ravel, curve)


def sensitivity_reduced_nsgd(
    loss_fn: LossFn,
    params: Params,
    data: Tree,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    num_epochs: int,
    batch_size: int,
    learning_rate: ScalarOrSchedule,
    decay: float,
    refresh: float,
    clip_norm: float,
    change_clip_norm: float,
    drift_clip_norm: float,
    key: Key,
) -> Result[Params, Terms[jax.Array]]:
    """Train by normalised SGD with a private momentum of reduced sensitivity.

    The momentum uses three sums of clipped vectors: the gradients at the anchor, which
    is the iterate at which the epoch began; the changes of these gradients from one
    epoch to the next; and the drifts, which are the changes of the gradients since the
    anchor. The smaller the bounds change_clip_norm and drift_clip_norm are, the less
    noise the solver adds. With n steps of length η in an epoch and an L-smooth loss, a
    gradient changes by at most ηnL in an epoch. The bounds change_clip_norm = ηnL and
    drift_clip_norm = ηnL then clip nothing.

    Args:
      loss_fn: the loss of ONE example, `loss_fn(params, example)`, a real scalar.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of N examples. An example with a
        NaN or an infinity, in its numbers or in its gradients, contributes zero, and
        curve.left_out counts it.
      epsilon: the target ε, positive.
      delta: the target δ, in (0, 1).
      adjacency: `ZERO_OUT` or `REPLACE`.
      num_epochs: E, at least 1. All epochs use the data's own order.
      batch_size: b, at least 1. An epoch has n = ⌈N / b⌉ steps.
      learning_rate: the length of a step, a positive number or an optax schedule.
      decay: the momentum coefficient β, in [0, 1).
      refresh: γ, in [0, 1]. Before step 2n, counted from 1, the momentum uses the
        gradients at the anchor. From step 2n on, the momentum uses these gradients with
        weight γ, and their changes since the previous anchor with weight 1 − γ. The
        paper has γ = ηn.
      clip_norm: the bound C on the L2 norm of an example's gradient, positive.
      change_clip_norm: the bound on the L2 norm of the change of an example's clipped
        gradient from one epoch's anchor to the next anchor, positive.
      drift_clip_norm: the bound on the L2 norm of the change of an example's clipped
        gradient from the anchor to the current iterate, positive.
      key: one typed key, for the noise.

    Returns:
      A `Result` with params, curve, guarantee, num_steps and noise_multiplier. The
      noise_multiplier has one number for each of the three trees of noise.

    Raises:
      ValueError: an argument is out of range, or adjacency is ADD_REMOVE. The solver
        raises the error before any training.

    Privacy: params and all earlier iterates together are μ-GDP under the adjacency,
    where μ is `accounting.tree.reduced_momentum_mu`, and guarantee.epsilon(delta) is at
    most epsilon. The guarantee assumes no smoothness, since the vectors of all three
    sums are clipped. The guarantee assumes that N, the shapes, the initial parameters
    and the hyperparameters are public. The guarantee does not cover the curve.

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
    target = _checks.check_target(epsilon, delta)
    validate.half_open_unit("decay", decay)
    validate.closed_unit("refresh", refresh)
    # Rounding comes first: accountant and program must use the same float32 numbers.
    decay, refresh = _precision.round_down(decay), _precision.round_down(refresh)
    unrounded = Terms(clip_norm, change_clip_norm, drift_clip_norm)
    clips = jax.tree.map(_precision.round_up, unrounded)
    validate.positive("clip_norm", clips.anchor)
    validate.positive("change_clip_norm", clips.change)
    validate.positive("drift_clip_norm", clips.drift)
    rate: Any = learning_rate
    if callable(rate):
        # A schedule is a tree without arrays, and so static in the compiled program.
        rate = jax.tree_util.Partial(rate)
    else:
        validate.positive("learning_rate", rate)
    run = _checks.check_epochs(loss_fn, data, adjacency, num_epochs, batch_size, key)

    # One tree carries (1 − γ) change + γ anchor, so its bound is this sum of bounds.
    mixed = (1 - refresh) * clips.change + refresh * clips.anchor
    bounds = clips._replace(change=mixed)
    steps = {"num_steps": run.num_steps, "steps_per_epoch": run.steps_per_epoch}
    mu_of = functools.partial(
        reduced_momentum_mu, **steps, decay=decay, adjacency=adjacency
    )
    variance = reduced_momentum.momentum_variance(**steps, decay=decay, refresh=refresh)
    unit = jax.tree.map(lambda v, c: float(np.mean(v)) * c**2, variance, bounds)
    with _precision.now():
        mu = float(gdp.mu(target.epsilon, target.delta))
        noise = allot_noise(mu, mu_of, unit)
        mu = mu_of(noise)
    # The multiplier of an unused tree is infinite, and this tree draws no noise.
    stddevs = jax.tree.map(
        lambda s, c: _precision.stddev(s, c) if math.isfinite(s) else 0.0, noise, bounds
    )

    last, curve = _train(
        jax.tree.map(jnp.asarray, params),
        _checks.mask_nonfinite(data),
        *_precision.to_float32((decay, refresh, clips, stddevs, rate)),
        stream(key, "solvers.sensitivity_reduced_nsgd"),
        loss_fn=loss_fn,
        run=run,
    )

    # norm is the root mean square norm of the noise in m̂_t / (1 − β), f[T].
    coordinate = np.sum([v * s * s for v, s in zip(variance, stddevs, strict=True)], 0)
    norm = np.sqrt(optax.tree.size(last) * coordinate)
    norm = jnp.asarray(norm * (1 - decay) / run.batch_size)
    mechanism = f"all {run.num_steps} iterates of sensitivity-reduced momentum"
    assumptions = _checks.assume_every_step("fixed")
    guarantee = Guarantee(mechanism, Gaussian(mu), adjacency, assumptions)
    reported = _precision.to_float32(noise)
    curve = curve._replace(noise_norm=norm)
    return Result(last, curve, guarantee, run.num_steps, reported)
