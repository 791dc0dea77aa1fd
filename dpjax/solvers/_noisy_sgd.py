"""Noisy SGD on random batches of fixed size (Bok, Su and Altschuler 2024)."""

import functools
from typing import Unpack

import jax
import numpy as np
import optax

from dpjax._core import validate
from dpjax._core.typing import ArrayLike, Key, LossFn, Params, Tree
from dpjax.accounting import iteration, pld
from dpjax.accounting.iteration import Setting
from dpjax.accounting.profiles import EpsilonProfile
from dpjax.solvers._noisy_descent import Run, constant, noisy_descent
from dpjax.solvers._results import Result
from dpjax.solvers.prox import Prox

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
