"""Noisy gradient descent on full batches (Bok, Su and Altschuler 2024)."""

from typing import Unpack

import jax
import numpy as np
import optax

from dpjax._core import validate
from dpjax._core.typing import Key, LossFn, Params, Tree
from dpjax.accounting import iteration
from dpjax.solvers._noisy_cyclic_gd import last_iterate_profile
from dpjax.solvers._noisy_descent import noisy_descent
from dpjax.solvers._results import Result
from dpjax.solvers.prox import Prox


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
