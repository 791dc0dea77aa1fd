"""Noisy descent on cyclic batches (Bok et al. 2024; Kong and Ribero 2024)."""

from typing import Unpack

import jax
import numpy as np
import optax

from dpjax._core import validate
from dpjax._core.typing import Key, LossFn, Params, Tree
from dpjax.accounting import gdp, iteration
from dpjax.accounting.iteration import Setting
from dpjax.accounting.profiles import Gaussian
from dpjax.solvers._assumptions import Order
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
