"""Normalised SGD with momentum of reduced sensitivity (Tran and Cutkosky 2022).

`allot_noise` divides one privacy budget among three trees of noise.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.keys import stream
from dpjax._core.rounding import MARGIN
from dpjax._core.typing import Key, LossFn, Params, Tree
from dpjax.accounting import gdp
from dpjax.accounting.profiles import Gaussian, Guarantee
from dpjax.accounting.tree import reduced_momentum_mu
from dpjax.noise import reduced_momentum
from dpjax.noise.reduced_momentum import Terms
from dpjax.solvers import _calibration, _checks, _precision, _reduced_descent
from dpjax.solvers._results import Result


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
    learning_rate: optax.ScalarOrSchedule,
    decay: float,
    refresh: float,
    clip_norm: float,
    change_clip_norm: float,
    drift_clip_norm: float,
    key: Key,
) -> Result[Params, Terms[jax.Array]]:
    """Train by normalised steps along a private momentum of reduced sensitivity.

    This solver pays off where an epoch is short: with steps of length η and an L-smooth
    loss, a gradient changes by at most ηnL from epoch to epoch. Then change_clip_norm
    and drift_clip_norm may be as small as ηnL and still clip nothing.

    Args:
      loss_fn: the loss of ONE example, `loss_fn(params, example)`, a real scalar.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of N examples. An example with a
        NaN or an infinity in it contributes zero and is counted.
      epsilon: the target ε, positive.
      delta: the target δ, in (0, 1).
      adjacency: `ZERO_OUT` or `REPLACE`.
      num_epochs: E, at least 1. All epochs use the data's own order.
      batch_size: b, at least 1. An epoch has n = ⌈N / b⌉ steps.
      learning_rate: the length of a step, a number or an optax schedule.
      decay: the momentum coefficient β, in [0, 1).
      refresh: γ, in [0, 1]: the weight of the anchor's gradients in each window; their
        changes have the weight 1 − γ. The paper has γ = ηn.
      clip_norm: the bound C on an example's gradient, positive.
      change_clip_norm: the bound on the change of an example's clipped gradient from
        one epoch's anchor to the next, positive.
      drift_clip_norm: the bound on the change of an example's clipped gradient from the
        anchor to the iterate, positive.
      key: one typed key, for the noise.

    Returns:
      A `Result`: params, curve, guarantee and the noise multiplier of each tree.

    Raises:
      ValueError: an argument is out of range, before any training.

    Privacy: params, and all iterates on the way, are μ-GDP under the adjacency, μ being
    `accounting.tree.reduced_momentum_mu`, so that guarantee.epsilon(delta)
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
    target = _checks.check_target(epsilon, delta)
    validate.decay("decay", decay)
    validate.closed_unit("refresh", refresh)
    # Round first: the accountant and the program must use the same float32 numbers.
    decay, refresh = _precision.down(decay), _precision.down(refresh)
    clips = _clip_norms(clip_norm, change_clip_norm, drift_clip_norm)
    if not callable(learning_rate):
        validate.positive("learning_rate", learning_rate)
    run = _checks.epochs(
        loss_fn,
        data,
        adjacency=adjacency,
        num_epochs=num_epochs,
        batch_size=batch_size,
        key=key,
    )
    steps = {"num_steps": run.num_steps, "steps_per_epoch": run.steps_per_epoch}

    # One tree carries (1 − γ) change + γ anchor: its bound is the mix of the bounds.
    mixed = (1 - refresh) * clips.change + refresh * clips.anchor
    bounds = clips._replace(change=mixed)
    with _calibration.now():
        noise = allot_noise(
            float(gdp.mu(target.epsilon, target.delta)),
            bounds=bounds,
            decay=decay,
            refresh=refresh,
            adjacency=adjacency,
            **steps,
        )
        mu = reduced_momentum_mu(noise, decay=decay, adjacency=adjacency, **steps)
    stddevs = Terms(*map(_stddev, noise, bounds))

    scheduled = callable(learning_rate)
    last, curve = _reduced_descent.descend(
        jax.tree.map(jnp.asarray, params),
        _checks.prepare(data),
        _precision.to_float32(decay),
        _precision.to_float32(refresh),
        jax.tree.map(_precision.to_float32, clips),
        jax.tree.map(_precision.to_float32, stddevs),
        _precision.to_float32(0.0 if scheduled else learning_rate),
        stream(key, "solvers.sensitivity_reduced_nsgd"),
        loss_fn=loss_fn,
        batch_size=run.batch_size,
        num_epochs=run.num_epochs,
        schedule=learning_rate if scheduled else None,
    )

    variance = reduced_momentum.momentum_variance(**steps, decay=decay, refresh=refresh)
    norm = _noise_norm(variance, stddevs, last) * (1 - decay) / run.batch_size
    return Result(
        params=last,
        curve=curve._replace(noise_norm=jnp.asarray(norm)),
        guarantee=Guarantee(
            mechanism=f"all {run.num_steps} iterates of sensitivity-reduced momentum",
            profile=Gaussian(mu),
            adjacency=adjacency,
            assumptions=_checks.every_step("fixed"),
        ),
        num_steps=run.num_steps,
        noise_multiplier=jax.tree.map(_precision.to_float32, noise),
    )


def _noise_norm(
    variance: Terms[np.ndarray], stddevs: Terms[float], params: Tree
) -> np.ndarray:
    """The root mean square norm of the noise in m̂_t / (1 − β), f[T]."""
    coordinate = np.sum([v * s * s for v, s in zip(variance, stddevs, strict=True)], 0)
    return np.sqrt(sum(x.size for x in jax.tree.leaves(params)) * coordinate)


def _clip_norms(anchor: float, change: float, drift: float) -> Terms[float]:
    """Check the three clip norms, and round them up to float32."""
    clips = Terms(*(_precision.up(x) for x in (anchor, change, drift)))
    validate.positive("clip_norm", clips.anchor)
    validate.positive("change_clip_norm", clips.change)
    validate.positive("drift_clip_norm", clips.drift)
    return clips


def _stddev(noise_multiplier: float, bound: float) -> float:
    """The noise's standard deviation in a tree's nodes; 0 for a tree never used."""
    used = math.isfinite(noise_multiplier)
    return float(_precision.stddev(noise_multiplier, bound)) if used else 0.0


def allot_noise(
    target_mu: float,
    *,
    bounds: Terms[float],
    num_steps: int,
    steps_per_epoch: int,
    decay: float,
    refresh: float,
    adjacency: Adjacency,
) -> Terms[float]:
    """The noise multipliers for μ-GDP with the least noise in the mean over all steps.

    With a noise variance s², a tree contributes A/s² to μ² and V s² to the momentum's
    variance. For a given μ² the variance is least at s² ∝ sqrt(A/V).

    Args:
      target_mu: μ, positive.
      bounds: the bounds on the norms of one example's terms in the three trees.
      num_steps: T, a multiple of steps_per_epoch.
      steps_per_epoch: n, at least 1.
      decay: β, in [0, 1).
      refresh: γ, in [0, 1].
      adjacency: which data sets are compared.

    Returns:
      `Terms` of noise standard deviations divided by the bounds; inf for a tree that is
      never used.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> noise = allot_noise(
      ...     1.0, bounds=Terms(1.0, 0.1, 0.05), num_steps=400, steps_per_epoch=50,
      ...     decay=0.9, refresh=0.1, adjacency=Adjacency.REPLACE)
      >>> print([f"{x:.2f}" for x in noise])
      ['6.51', '20.88', '31.90']
    """
    validate.positive("target_mu", target_mu)
    for name, bound in bounds._asdict().items():
        validate.positive(f"bounds.{name}", bound)
    mu = functools.partial(
        reduced_momentum_mu,
        num_steps=num_steps,
        decay=decay,
        steps_per_epoch=steps_per_epoch,
        adjacency=adjacency,
    )
    variance = reduced_momentum.momentum_variance(
        num_steps, steps_per_epoch, decay=decay, refresh=refresh
    )
    # Minimise Σ V s² where Σ A/s² is given (Lagrange): s⁴ ∝ A/V, tree by tree.
    shares: list[float] = []
    for k, bound in enumerate(bounds):
        # Infinite noise in the other two trees leaves this tree's cost alone.
        alone = [math.inf] * 3
        alone[k] = 1.0
        cost = float(mu(alone)) ** 2
        added = float(np.mean(variance[k])) * bound**2
        unused = cost == 0 or added == 0
        shares.append(math.inf if unused else math.sqrt(math.sqrt(cost / added)))
    # μ is inversely proportional to a common factor of the three noises. MARGIN covers
    # the roundings on the way.
    scale = float(mu(shares)) / target_mu * MARGIN
    return Terms(*(_precision.up(share * scale) for share in shares))
