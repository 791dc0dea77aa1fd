"""Noisy gradient descent: on full, cyclic and random batches of fixed size.

The bounds are those of Bok, Su and Altschuler (2024) and Kong and Ribero (2024).
"""

import functools
from typing import Unpack

import jax
import numpy as np
import optax

from dpjax._core import validate
from dpjax._core.typing import ArrayLike, Key, LossFn, Params, Tree
from dpjax.accounting import gdp, iteration, pld
from dpjax.accounting.iteration import Setting
from dpjax.accounting.profiles import EpsilonProfile, Gaussian
from dpjax.solvers._checks import Order
from dpjax.solvers._noisy_descent import Run, constant, noisy_descent
from dpjax.solvers._results import Result
from dpjax.solvers.prox import Prox


def last_iterate_profile(run: Run, noise: np.ndarray) -> Gaussian:
    """The GDP profile of the last iterate of a cyclic run.

    Constant step sizes and noise, schedules in a fixed order, and schedules in a random
    order each have their own bound.
    """
    order: Order = "reshuffled" if run.batches == "reshuffled" else "fixed"
    if constant(run.step_sizes) and constant(noise):
        setting: Setting = {**run.setting, "step_size": run.step_sizes[0]}
        mu = iteration.noisy_cyclic_gd_mu(
            noise[0],
            num_epochs=len(noise) // run.period,
            batches_per_epoch=run.period,
            batch_size=run.batch_size,
            order=order,
            **setting,
        )
        return Gaussian(mu)
    setting = {**run.setting, "step_size": run.step_sizes}
    scheduled = iteration.scheduled_cyclic_gd_mu(
        noise, batches_per_epoch=run.period, batch_size=run.batch_size, **setting
    )
    if order == "fixed":
        return Gaussian(scheduled)
    # In a random order an example may be in any step of an epoch: take the least noise
    # of each epoch, and compose the epochs as if every iterate were released (Dong,
    # Roth and Su (2022), Corollary 2, https://arxiv.org/abs/1905.02383).
    worst = noise.reshape(-1, run.period).min(axis=1)
    factor = setting["adjacency"].sensitivity_factor
    # Divide by 1 where the noise is 0, so that NumPy does not warn; μ is inf there.
    mus = np.where(worst > 0, factor / np.where(worst > 0, worst, 1), np.inf)
    return Gaussian(gdp.compose(mus))


def noisy_cyclic_gd(
    loss_fn: LossFn,
    params: Params,
    data: Tree,
    *,
    num_epochs: int,
    batch_size: int,
    order: Order,
    key: Key,
    noise_multiplier: optax.ScalarOrSchedule | np.ndarray | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    prox: Prox | None = None,
    microbatch_size: int | None = None,
    **setting: Unpack[iteration.Setting],
) -> Result[Params, jax.Array]:
    """Train by x ↦ prox(x − η(mean over the batch + λx + noise)), batch after batch.

    Only the last iterate is released, and the guarantee is for this release alone.

    Args:
      loss_fn: the loss of ONE example, `loss_fn(params, example)`, a real scalar,
        without the regulariser (λ/2)‖x‖². A loss from `dpjax.solvers.losses` supplies
        its part of the setting, and its labels are checked.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of n examples. An example with a
        NaN or an infinity in it contributes zero and is counted.
      num_epochs: E, at least 1. An epoch has l = ⌈n / b⌉ steps.
      batch_size: b, from 1 to n. It has to divide n if strong_convexity is above 0.
      order: "fixed" for the data's order in every epoch, "reshuffled" for a random
        order in each.
      key: one typed key, for the noise and the order.
      noise_multiplier: standard deviation of the noise on the batch's sum of gradients
        over gradient_norm, at least 0: a number, an optax schedule, or f[E l].
      epsilon: the target ε, positive; it and delta replace the noise multiplier.
      delta: the target δ, in (0, 1).
      prox: see `dpjax.solvers.prox`; the step size is its second argument.
      microbatch_size: see `clipped_grad`.
      **setting: all assumptions that the accountant needs: see
        `accounting.iteration.Setting`. step_size may be an optax schedule or f[E l].
        With clipped=True gradients are clipped to gradient_norm; if not, that norm is
        an assumption, and so is that a finite example has finite gradients.

    Returns:
      A `Result`: params, curve, guarantee and the noise multiplier.

    Raises:
      ValueError: an argument is out of range, or an assumption fails or contradicts
        another, before any training.
      TypeError: an assumption is missing (a ValueError too).

    Privacy: params alone is μ-GDP under the adjacency, μ by
    `accounting.iteration.noisy_cyclic_gd_mu`; with schedules by
    `scheduled_cyclic_gd_mu`, or by composition if the order is reshuffled too.

    Reference: Bok, Su and Altschuler (2024), (2.1); Kong and Ribero (2024), Algorithm
    1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import Adjacency
      >>> from dpjax.solvers import losses
      >>> x = jax.random.normal(jax.random.key(0), (200, 3))
      >>> loss = losses.logistic(feature_norm=1.0)
      >>> result = noisy_cyclic_gd(
      ...     loss, jnp.zeros(3), (x, jnp.sign(x[:, 0])), num_epochs=20, batch_size=50,
      ...     order="fixed", key=jax.random.key(1), noise_multiplier=5.0,
      ...     **loss.setting, step_size=1.0, regularization=0.1,
      ...     diameter=float("inf"), adjacency=Adjacency.REPLACE)
      >>> print(result.params.shape, f"{result.guarantee.epsilon(1e-5):.2f}")
      (3,) 2.19
    """
    validate.one_of("order", order, ("fixed", "reshuffled"))
    return noisy_descent(
        loss_fn,
        params,
        data,
        solver="noisy_cyclic_gd",
        accountant=last_iterate_profile,
        batches=order,
        num_epochs=validate.static_int("num_epochs", num_epochs, minimum=1),
        batch_size=batch_size,
        key=key,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        delta=delta,
        prox=prox,
        microbatch_size=microbatch_size,
        setting=setting,
    )


def noisy_gd(
    loss_fn: LossFn,
    params: Params,
    data: Tree,
    *,
    num_steps: int,
    key: Key,
    noise_multiplier: optax.ScalarOrSchedule | np.ndarray | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    prox: Prox | None = None,
    microbatch_size: int | None = None,
    **setting: Unpack[iteration.Setting],
) -> Result[Params, jax.Array]:
    """Train by x ↦ prox(x − η(mean over all examples + λx + noise)).

    Only the last iterate is released, and the guarantee is for this release alone.

    Args:
      loss_fn: the loss of ONE example, as for `noisy_cyclic_gd`.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of n examples.
      num_steps: T, at least 1.
      key: one typed key, for the noise.
      noise_multiplier: standard deviation of the noise on the sum of gradients over
        gradient_norm, at least 0: a number, an optax schedule, or f[T].
      epsilon: the target ε, positive; it and delta replace the noise multiplier.
      delta: the target δ, in (0, 1).
      prox: see `dpjax.solvers.prox`.
      microbatch_size: see `clipped_grad`.
      **setting: all assumptions, as for `noisy_cyclic_gd`: see
        `accounting.iteration.Setting`.

    Returns:
      A `Result`: params, curve, guarantee and the noise multiplier.

    Raises:
      ValueError: an argument is out of range, or an assumption fails, before any
        training.
      TypeError: an assumption is missing (a ValueError too).

    Privacy: params alone is μ-GDP under the adjacency, μ by
    `accounting.iteration.noisy_gd_mu`, with schedules by `scheduled_cyclic_gd_mu`.

    Reference: Bok, Su and Altschuler (2024), (2.1) and Theorems 4.1 to 4.3.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import Adjacency
      >>> from dpjax.solvers import losses, prox
      >>> x = jax.random.normal(jax.random.key(0), (200, 3))
      >>> loss = losses.huber(0.5, feature_norm=1.0)
      >>> result = noisy_gd(
      ...     loss, jnp.zeros(3), (x, x[:, 0]), num_steps=30, key=jax.random.key(1),
      ...     epsilon=2.0, delta=1e-5, prox=prox.l1(0.01), **loss.setting,
      ...     step_size=0.5, regularization=0.1, diameter=float("inf"),
      ...     adjacency=Adjacency.REPLACE)
      >>> print(f"{result.guarantee.epsilon(1e-5):.3f}")
      2.000
    """
    return noisy_descent(
        loss_fn,
        params,
        data,
        solver="noisy_gd",
        accountant=last_iterate_profile,
        # A full batch is an epoch of one step.
        batches="full",
        num_epochs=validate.static_int("num_steps", num_steps, minimum=1),
        batch_size=None,
        key=key,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        delta=delta,
        prox=prox,
        microbatch_size=microbatch_size,
        setting=setting,
    )


# A schedule of noise is rounded down to at most this many levels. Each level needs a
# privacy loss distribution of its own, which takes a compilation.
_LEVELS = 4


def _profile(run: Run, noise: np.ndarray) -> EpsilonProfile:
    """The profile ε(δ) of a run on random batches.

    It is the last iterate's profile, or with schedules that of all iterates.
    """
    validate.positive("noise_multiplier", noise)
    largest: Setting = {**run.setting, "step_size": run.step_sizes.max()}
    # The value is not needed: the call raises for a setting that is out of range.
    iteration.noisy_cyclic_gd_mu(
        1.0,
        num_epochs=1,
        batches_per_epoch=1,
        batch_size=run.batch_size,
        order="fixed",
        **largest,
    )

    def epsilon(delta: ArrayLike) -> jax.Array:
        if constant(run.step_sizes) and constant(noise):
            return iteration.noisy_sgd_epsilon(
                noise[0],
                delta,
                num_steps=len(noise),
                batch_size=run.batch_size,
                num_examples=run.num_examples,
                **largest,
            )
        return pld.epsilon(_compose(noise, run.batch_size / run.num_examples), delta)

    return EpsilonProfile(epsilon)


def _compose(noise: np.ndarray, rate: float) -> pld.PLD:
    """The privacy loss distribution of all steps, composed as if each were released.

    Each step counts with at most its own noise, rounded down to a level.
    """

    # C_{b/n}(G(2/σ)), since one example moves a sum by 2C under REPLACE: Bok, Su and
    # Altschuler (2024), Theorem 4.8, https://arxiv.org/abs/2403.00278.
    def level(group: np.ndarray) -> pld.PLD:
        return pld.compose(pld.subsampled_gdp(2 / group[0], rate), len(group))

    # Sorted, so that a level's first noise is its least, which bounds all the others.
    groups = np.array_split(np.sort(noise), min(_LEVELS, len(noise)))
    return functools.reduce(pld.convolve, map(level, groups))


def noisy_sgd(
    loss_fn: LossFn,
    params: Params,
    data: Tree,
    *,
    num_steps: int,
    batch_size: int,
    key: Key,
    noise_multiplier: optax.ScalarOrSchedule | np.ndarray | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    prox: Prox | None = None,
    microbatch_size: int | None = None,
    **setting: Unpack[iteration.Setting],
) -> Result[Params, jax.Array]:
    """Train by x ↦ prox(x − η(mean over a random batch + λx + noise)).

    Each step draws a uniformly random batch of fixed size. Only the last iterate is
    released, and the guarantee is for this release alone.

    Args:
      loss_fn: the loss of ONE example, as for `noisy_cyclic_gd`.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of n examples.
      num_steps: T, at least 1.
      batch_size: b, from 1 to n.
      key: one typed key, for the noise and the batches.
      noise_multiplier: standard deviation of the noise on the batch's sum of gradients
        over gradient_norm, positive: a number, an optax schedule, or f[T].
      epsilon: the target ε, positive; it and delta replace the noise multiplier.
      delta: the target δ, in (0, 1).
      prox: see `dpjax.solvers.prox`.
      microbatch_size: see `clipped_grad`.
      **setting: all assumptions, as for `noisy_cyclic_gd`: see
        `accounting.iteration.Setting`. Adjacency is REPLACE.

    Returns:
      A `Result`: params, curve, guarantee and the noise multiplier.

    Raises:
      ValueError: an argument is out of range, or an assumption fails, before any
        training.
      TypeError: an assumption is missing (a ValueError too).

    Privacy: params alone has the ε(δ) of `accounting.iteration.noisy_sgd_epsilon`; with
    schedules that of composition at 4 levels of noise, which holds for all iterates.
    The guarantee assumes that nobody learns the batches. No GDP parameter is known:
    guarantee.mu is None.

    Reference: Bok, Su and Altschuler (2024), (2.1) and Theorems 4.8 to 4.10.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import Adjacency
      >>> from dpjax.solvers import losses
      >>> x = jax.random.normal(jax.random.key(0), (200, 3))
      >>> loss = losses.logistic(feature_norm=1.0)
      >>> result = noisy_sgd(
      ...     loss, jnp.zeros(3), (x, jnp.sign(x[:, 0])), num_steps=100, batch_size=10,
      ...     key=jax.random.key(1), noise_multiplier=2.0, **loss.setting,
      ...     step_size=1.0, regularization=0.1, diameter=float("inf"),
      ...     adjacency=Adjacency.REPLACE)
      >>> print(result.params.shape, result.curve.loss.shape)
      (3,) (100,)
    """
    return noisy_descent(
        loss_fn,
        params,
        data,
        solver="noisy_sgd",
        accountant=_profile,
        batches="random",
        num_epochs=validate.static_int("num_steps", num_steps, minimum=1),
        batch_size=batch_size,
        key=key,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        delta=delta,
        prox=prox,
        microbatch_size=microbatch_size,
        setting=setting,
    )
