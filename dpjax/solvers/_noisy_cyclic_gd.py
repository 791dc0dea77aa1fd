"""Noisy descent on cyclic batches (Bok et al. 2024; Kong and Ribero 2024)."""

from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import _validate
from dpjax._keys import stream
from dpjax.accounting import gdp, iteration
from dpjax.solvers import _assumptions, _data, _descent, _numbers
from dpjax.solvers._descent import Result
from dpjax.solvers.guarantee import Guarantee
from dpjax.solvers.prox import Prox, none

Order = Literal["fixed", "reshuffled"]

_ORDERS = {
    "full": "every step uses all examples",
    "fixed": "an example is in the same step of every epoch",
    "reshuffled": "an example is in one step of every epoch, chosen by a key that has "
    "nothing to do with the data",
}


def last_iterate_mu(
    noise_multipliers: np.ndarray,
    *,
    batches_per_epoch: int,
    batch_size: int,
    order: Order,
    step_sizes: np.ndarray,
    setting: dict[str, Any],
) -> jax.Array:
    """The accountant for what ran: constant, scheduled, or any order of a schedule."""
    num_epochs = len(step_sizes) // batches_per_epoch
    if _descent.constant(step_sizes) and _descent.constant(noise_multipliers):
        return iteration.noisy_cyclic_gd_mu(
            noise_multipliers[0],
            num_epochs=num_epochs,
            batches_per_epoch=batches_per_epoch,
            batch_size=batch_size,
            order=order,
            **{**setting, "step_size": step_sizes[0]},
        )
    varied: dict[str, Any] = {**setting, "step_size": step_sizes}
    scheduled = iteration.scheduled_cyclic_gd_mu(
        noise_multipliers,
        batches_per_epoch=batches_per_epoch,
        batch_size=batch_size,
        **varied,
    )
    if order == "fixed":
        return scheduled
    # Any order of a schedule: composition, with the least noise of each epoch.
    worst = noise_multipliers.reshape(num_epochs, batches_per_epoch).min(axis=1)
    factor = setting["adjacency"].sensitivity_factor
    return gdp.compose(
        np.where(worst > 0, factor / np.where(worst > 0, worst, 1), np.inf)
    )


def noisy_cyclic_gd(
    loss_fn: Any,
    params: Any,
    data: Any,
    *,
    num_epochs: int,
    batch_size: int,
    order: Order,
    key: jax.Array,
    noise_multiplier: optax.ScalarOrSchedule | np.ndarray | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    prox: Prox | None = None,
    microbatch_size: int | None = None,
    **setting: Unpack[iteration.Setting],
) -> Result:
    """Train by x ↦ prox(x − η(mean over the batch + λx + noise)), batch after batch.

    Only the last iterate is released, and accounted for as such.

    Args:
      loss_fn: the loss of ONE example, `loss_fn(params, example)`, a real scalar,
        without the regulariser (λ/2)‖x‖². One from `dpjax.solvers.losses` brings its
        part of the setting along and has its labels checked.
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
      epsilon: in place of the noise multiplier the target ε, positive.
      delta: and the target δ, in (0, 1).
      prox: see `dpjax.solvers.prox`; the step size is its second argument.
      microbatch_size: see `clipped_grad`.
      **setting: the assumptions, all of them, which are handed to the accountant: see
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
    `scheduled_cyclic_gd_mu`, or by composition if reshuffled besides.

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
    _validate.one_of("order", order, ("fixed", "reshuffled"))
    num_epochs = _validate.static_int("num_epochs", num_epochs, minimum=1)
    batch_size = _validate.static_int("batch_size", batch_size, minimum=1)
    return run(
        loss_fn,
        params,
        data,
        solver="solvers.noisy_cyclic_gd",
        batches=order,
        num_epochs=num_epochs,
        batch_size=batch_size,
        key=key,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        delta=delta,
        prox=prox,
        microbatch_size=microbatch_size,
        setting=dict(setting),
    )


def run(
    loss_fn: Any,
    params: Any,
    data: Any,
    *,
    solver: str,
    batches: Literal["full", "fixed", "reshuffled"],
    num_epochs: int,
    batch_size: int | None,
    key: jax.Array,
    noise_multiplier: Any,
    epsilon: Any,
    delta: Any,
    prox: Prox | None,
    microbatch_size: int | None,
    setting: dict[str, Any],
) -> Result:
    """Noisy cyclic descent; full batches are a cycle of one."""
    num_examples = _assumptions.check(
        loss_fn,
        data,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        delta=delta,
        prox=prox,
        key=key,
        setting=setting,
    )
    size = num_examples if batch_size is None else batch_size
    if size > num_examples:
        raise ValueError(f"batch_size must be at most {num_examples}; got {size!r}.")
    if num_examples % size and np.any(np.asarray(setting["strong_convexity"]) > 0):
        raise ValueError(
            f"batch_size must divide the number of examples, {num_examples}, where "
            f"strong_convexity is above 0; got {size!r}: the last batch of an epoch "
            "would have less curvature."
        )
    _assumptions.check_loss(loss_fn, setting)
    period = -(-num_examples // size)
    setting = _assumptions.as_run(setting)
    step_sizes = _assumptions.step_sizes(setting, num_epochs * period)

    def mu_of(noise_multipliers: Any) -> jax.Array:
        return last_iterate_mu(
            noise_multipliers,
            batches_per_epoch=period,
            batch_size=size,
            order="fixed" if batches == "full" else batches,
            step_sizes=step_sizes,
            setting=setting,
        )

    if noise_multiplier is None:

        def epsilon_of(noise: jax.Array) -> jax.Array:
            return gdp.epsilon(mu_of(np.full(len(step_sizes), float(noise))), delta)

        mu_of(np.ones(len(step_sizes)))  # says what is wrong with the setting
        noise_multiplier = _assumptions.solve_noise(epsilon_of, epsilon, epsilon, delta)
    noise = _data.schedule("noise_multiplier", noise_multiplier, len(step_sizes))
    mu = mu_of(noise)

    last, curve = _descent.descend(
        jax.tree.map(jnp.asarray, params),
        _data.prepare(data),
        _descent.rows(step_sizes, period),
        _descent.rows(_numbers.stddev(noise, setting["gradient_norm"], size), period),
        _numbers.array(setting["gradient_norm"]),
        _numbers.array(setting["regularization"]),
        stream(key, solver),
        loss_fn=loss_fn,
        prox=none if prox is None else prox,
        clipped=bool(setting["clipped"]),
        batches=batches,
        batch_size=size,
        microbatch_size=microbatch_size,
    )
    return Result(
        params=_descent.narrow(last, params),
        curve=curve,
        guarantee=Guarantee(
            mechanism=f"the last of {len(step_sizes)} iterates of noisy descent",
            mu=mu,
            adjacency=setting["adjacency"],
            assumptions=_assumptions.assumptions(_ORDERS[batches], setting=setting),
        ),
        noise_multiplier=_descent.reported(noise),
    )
