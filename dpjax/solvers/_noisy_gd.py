"""Noisy gradient descent on full batches, cyclic batches and random batches.

The privacy bounds are from Bok, Su and Altschuler (2024) and Kong and Ribero (2024).

The module has one solver for each of the three kinds of batches. All three solvers call
`_noisy_descent`. This function chooses an accountant: a function that takes a run and
the run's noise multipliers f64[T], returns a profile of ε and δ, and raises an error
for an invalid setting. To calibrate the noise, `_noisy_descent` calls the accountant
with candidates for the noise multiplier. The guarantee is the accountant's profile for
the noise multipliers of the run.
"""

import functools
from typing import Generic, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import keys, validate
from dpjax._core.typing import ArrayLike, Key, LossFn, Params, ScalarOrSchedule, Tree
from dpjax.accounting import gdp, iteration, pld, profiles
from dpjax.accounting.iteration import Setting, _setting
from dpjax.accounting.profiles import FunctionProfile, Gaussian, Guarantee
from dpjax.solvers import _checks, _descent, _precision
from dpjax.solvers._descent import Result
from dpjax.solvers.prox import Prox, none


class _Args(NamedTuple, Generic[Params]):
    """The arguments that the three solvers of this module share.

    `noise` is the noise multiplier of all steps or of each step, or the target (ε, δ)
    that determines the noise.
    """

    loss_fn: LossFn
    params: Params
    data: Tree
    noise: ScalarOrSchedule | np.ndarray | _checks.Target
    key: Key
    prox: Prox | None
    microbatch_size: int | None
    setting: Setting


class _Run(NamedTuple):
    """What an accountant needs to know about a run of noisy descent.

    Attributes:
      batches: how batches are formed.
      num_examples: n.
      batch_size: b.
      period: the number of steps in an epoch.
      setting: the assumptions, with numbers rounded to the float32 values that the
        program uses. The field step_size holds such values for the T steps, as f64[T].
    """

    batches: _checks.Batches
    num_examples: int
    batch_size: int
    period: int
    setting: Setting


def _is_constant(values: ArrayLike) -> bool:
    """Whether all values of a schedule are equal."""
    return bool(np.min(values) == np.max(values))


def _last_iterate_profile(run: _Run, sigmas: np.ndarray) -> Gaussian:
    """The GDP profile of the last iterate of a run on full or cyclic batches.

    The function has three bounds: one for a constant step size and noise, one for
    schedules with full batches or a fixed order, and one for schedules with a
    reshuffled order. sigmas are the noise multipliers of the T steps, f64[T].
    """
    order: _checks.Order = "reshuffled" if run.batches == "reshuffled" else "fixed"
    step_size = run.setting["step_size"]
    if _is_constant(step_size) and _is_constant(sigmas):
        setting: Setting = {**run.setting, "step_size": np.max(step_size)}
        mu = iteration.noisy_cyclic_gd_mu(
            sigmas[0],
            num_epochs=len(sigmas) // run.period,
            batches_per_epoch=run.period,
            batch_size=run.batch_size,
            order=order,
            **setting,
        )
        return Gaussian(mu)
    sizes = {"batches_per_epoch": run.period, "batch_size": run.batch_size}
    scheduled_mu = iteration.scheduled_cyclic_gd_mu(sigmas, **sizes, **run.setting)
    if order == "fixed":
        return Gaussian(scheduled_mu)
    # In a reshuffled order, an example may be in any step of an epoch. The bound uses
    # the minimum noise of each epoch, and composes the epochs as if every iterate were
    # released: Dong, Roth and Su (2022), Corollary 2, https://arxiv.org/abs/1905.02383.
    least = sigmas.reshape(-1, run.period).min(axis=1)
    factor = run.setting["adjacency"].sensitivity_factor
    # Divide by 1 where the noise is 0, so that NumPy does not warn; μ is inf there.
    mus = np.where(least > 0, factor / np.where(least > 0, least, 1), np.inf)
    return Gaussian(gdp.compose(mus))


# The accountant rounds a schedule of noise down to at most this many levels, since each
# level needs its own privacy loss distribution and its own compilation.
_LEVELS = 4


def _random_batch_profile(run: _Run, sigmas: np.ndarray) -> FunctionProfile:
    """The profile ε(δ) of a run on random batches.

    With a constant step size and noise, the profile holds for the last iterate. With
    schedules, the profile holds for all iterates together. sigmas are the noise
    multipliers of the T steps, f64[T].
    """
    validate.positive("noise_multiplier", sigmas)
    step_size = np.max(run.setting["step_size"])
    constant: Setting = {**run.setting, "step_size": step_size}
    # The call discards its value, and raises an error if the setting is out of range.
    _setting.check(1.0, run.batch_size, constant)

    def epsilon(delta: ArrayLike) -> jax.Array:
        if _is_constant(run.setting["step_size"]) and _is_constant(sigmas):
            return iteration.noisy_sgd_epsilon(
                sigmas[0],
                delta,
                num_steps=len(sigmas),
                batch_size=run.batch_size,
                num_examples=run.num_examples,
                **constant,
            )
        return pld.epsilon(_compose(sigmas, run.batch_size / run.num_examples), delta)

    return FunctionProfile(epsilon, functools.partial(profiles.search_delta, epsilon))


def _compose(sigmas: np.ndarray, rate: float) -> pld.PLD:
    """The privacy loss distribution of the composition of all steps on random batches.

    sigmas are the noise multipliers of the T steps, f64[T]. The function first rounds
    them down to at most _LEVELS different numbers. rate is the batch size divided by
    the number of examples.
    """

    # The bound is C_{b/n}(G(2/σ)), since one example moves a sum by 2C under REPLACE:
    # Bok, Su and Altschuler (2024), Theorem 4.8, https://arxiv.org/abs/2403.00278.
    def compose_group(group: np.ndarray) -> pld.PLD:
        return pld.compose(pld.subsampled_gdp(2 / group[0], rate), len(group))

    # After sorting, the first noise of each group is its minimum, which is the level.
    groups = np.array_split(np.sort(sigmas), min(_LEVELS, len(sigmas)))
    return functools.reduce(pld.convolve, map(compose_group, groups))


def _noisy_descent(
    solver: str,
    args: _Args[Params],
    batches: _checks.Batches,
    num_epochs: int,
    batch_size: int | None,
) -> Result[Params, jax.Array]:
    """Run noisy gradient descent, and return the last iterate and its guarantee.

    With full batches or random batches, every epoch has a single step, so num_epochs is
    the number of steps. For full batches, batch_size is None.
    """
    setting = args.setting
    num_examples = _checks.check_last_iterate(
        args.loss_fn, args.data, args.prox, args.key, setting
    )
    size = num_examples if batch_size is None else batch_size
    size = _checks.check_batch_size(size, num_examples)
    if batches == "random":
        validate.adjacency_without_removal(setting["adjacency"])
    elif num_examples % size and _checks.is_strongly_convex(setting):
        raise ValueError(
            f"batch_size must divide the number of examples, {num_examples}, if "
            "strong_convexity is above 0, because a smaller last batch of an epoch "
            f"would have less curvature; got {size!r}."
        )
    _checks.check_loss(args.loss_fn, setting)
    # Every step draws a new random batch, so each step is an epoch.
    period = 1 if batches == "random" else -(-num_examples // size)
    num_steps = num_epochs * period
    step_sizes = _checks.evaluate_schedule("step_size", setting["step_size"], num_steps)
    setting = _precision.executed_setting({**setting, "step_size": step_sizes})
    run = _Run(batches, num_examples, size, period, setting)
    accountant = _random_batch_profile if batches == "random" else _last_iterate_profile

    noise = args.noise
    if isinstance(noise, _checks.Target):
        ones, delta = np.ones(num_steps), noise.delta
        # The accountant raises its own error for an invalid setting before the search.
        accountant(run, ones)
        noise = _precision.solve_noise(
            lambda x: accountant(run, float(x) * ones).epsilon(delta),
            noise.epsilon,
            noise,
        )
    noise = _checks.evaluate_schedule("noise_multiplier", noise, num_steps)
    profile = accountant(run, noise)

    stddevs = _precision.stddev(noise, setting["gradient_norm"], size)
    by_epoch = (np.reshape(x, (-1, period)) for x in (setting["step_size"], stddevs))
    numbers = (*by_epoch, setting["gradient_norm"], setting["regularization"])
    last, curve = _descent.descend(
        jax.tree.map(jnp.asarray, args.params),
        _checks.mask_nonfinite(args.data),
        *_precision.to_float32(numbers),
        keys.stream(args.key, f"solvers.{solver}"),
        loss_fn=args.loss_fn,
        prox=none if args.prox is None else args.prox,
        clipped=bool(setting["clipped"]),
        batches=batches,
        batch_size=size,
        microbatch_size=args.microbatch_size,
    )

    guarantee = Guarantee(
        f"the last of {num_steps} iterates of {solver}",
        profile,
        setting["adjacency"],
        _checks.assume_last_iterate(_checks.BATCHES[batches], setting),
    )
    # The reported noise multiplier is rounded down to float32, so that it never exceeds
    # the noise multiplier of the added noise.
    noise = _precision.round_down(noise[0] if _is_constant(noise) else noise)
    private = _descent.cast_like(last, args.params)
    return Result(private, curve, guarantee, num_steps, _precision.to_float32(noise))


def noisy_cyclic_gd(
    loss_fn: LossFn,
    params: Params,
    data: Tree,
    *,
    num_epochs: int,
    batch_size: int,
    order: _checks.Order,
    key: Key,
    noise_multiplier: ScalarOrSchedule | np.ndarray | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    prox: Prox | None = None,
    microbatch_size: int | None = None,
    **setting: Unpack[iteration.Setting],
) -> Result[Params, jax.Array]:
    """Train by noisy gradient descent on batches in a fixed or reshuffled order.

    A step is x ↦ prox(x − η(mean gradient of the batch + λx + noise)), where η is
    step_size and λ is regularization. The mean gradient is the batch's sum of gradients
    divided by b, also for a smaller last batch. The solver releases only the last
    iterate, and the guarantee covers only this value.

    Args:
      loss_fn: the loss of ONE example, `loss_fn(params, example)`, a real scalar,
        without the regulariser (λ/2)‖x‖². A loss from `dpjax.solvers.losses` supplies
        its part of the setting as `loss.setting`. For such a loss, the solver checks
        that the labels in data are valid.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of n examples. An example with a
        NaN or an infinity contributes zero, and curve.left_out counts it. If
        strong_convexity is above 0, all examples must be finite.
      num_epochs: E, at least 1. An epoch has l = ⌈n / b⌉ steps.
      batch_size: b, from 1 to n. If strong_convexity is above 0, b must divide n.
      order: "fixed" for the data's order in every epoch, or "reshuffled" for a new
        random order in each epoch.
      key: one typed key, for the noise and the order.
      noise_multiplier: the standard deviation of the noise in a batch's sum of
        gradients, divided by gradient_norm; at least 0. A number, an optax schedule, or
        f[E l], one number for each step.
      epsilon: the target ε, positive; epsilon and delta replace noise_multiplier.
      delta: the target δ, in (0, 1).
      prox: a function of the parameters and the step size, such as those from
        `dpjax.solvers.prox`. None for steps without a prox. With a finite diameter, a
        prox is required.
      microbatch_size: as for `clipped_grad`.
      **setting: all assumptions of the guarantee, as `accounting.iteration.Setting`
        lists them. step_size may be an optax schedule or f[E l]; all other numbers must
        be scalars. adjacency must be ZERO_OUT or REPLACE. With clipped=True, the
        solver clips gradients to the norm gradient_norm, and an example with a
        non-finite gradient contributes zero. With clipped=False, the guarantee assumes
        that finite examples have gradients of norm at most gradient_norm.

    Returns:
      A `Result` with params, curve, guarantee, num_steps and noise_multiplier.

    Raises:
      ValueError: an argument is out of range, an assumption fails, two assumptions
        contradict each other, or no noise reaches the target. The solver raises the
        error before any training.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Privacy: params alone is μ-GDP under the adjacency. For a constant step size and
    noise, μ is `accounting.iteration.noisy_cyclic_gd_mu`. For schedules in a fixed
    order, μ is `accounting.iteration.scheduled_cyclic_gd_mu`. For schedules in a
    reshuffled order, μ is that of a composition of E Gaussian mechanisms, one for each
    epoch, with the minimum noise multiplier of the epoch.

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
    epochs = validate.static_int("num_epochs", num_epochs, minimum=1)
    noise = _checks.check_noise(noise_multiplier, epsilon, delta)
    args = _Args(loss_fn, params, data, noise, key, prox, microbatch_size, setting)
    return _noisy_descent("noisy_cyclic_gd", args, order, epochs, batch_size)


def noisy_gd(
    loss_fn: LossFn,
    params: Params,
    data: Tree,
    *,
    num_steps: int,
    key: Key,
    noise_multiplier: ScalarOrSchedule | np.ndarray | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    prox: Prox | None = None,
    microbatch_size: int | None = None,
    **setting: Unpack[iteration.Setting],
) -> Result[Params, jax.Array]:
    """Train by noisy gradient descent on full batches.

    A step is x ↦ prox(x − η(mean gradient of all examples + λx + noise)), where η is
    step_size and λ is regularization. The solver releases only the last iterate, and
    the guarantee covers only this value.

    Args:
      loss_fn: the loss of ONE example, as for `noisy_cyclic_gd`.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of n examples. An example with a
        NaN or an infinity contributes zero, and curve.left_out counts it. If
        strong_convexity is above 0, all examples must be finite.
      num_steps: T, at least 1.
      key: one typed key, for the noise.
      noise_multiplier: the standard deviation of the noise in the sum of gradients,
        divided by gradient_norm; at least 0. A number, an optax schedule, or f[T].
      epsilon: the target ε, positive; epsilon and delta replace noise_multiplier.
      delta: the target δ, in (0, 1).
      prox: a function of the parameters and the step size: see `dpjax.solvers.prox`.
        With a finite diameter, a prox is required.
      microbatch_size: as for `clipped_grad`.
      **setting: all assumptions (`accounting.iteration.Setting`), as for
        `noisy_cyclic_gd`. step_size may be an optax schedule or f[T]. adjacency must be
        ZERO_OUT or REPLACE.

    Returns:
      A `Result` with params, curve, guarantee, num_steps and noise_multiplier.

    Raises:
      ValueError: an argument is out of range, an assumption fails, or no noise reaches
        the target. The solver raises the error before any training.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Privacy: params alone is μ-GDP under the adjacency. For a constant step size and
    noise, μ is `accounting.iteration.noisy_gd_mu`. For schedules, μ is
    `accounting.iteration.scheduled_cyclic_gd_mu`.

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
    steps = validate.static_int("num_steps", num_steps, minimum=1)
    noise = _checks.check_noise(noise_multiplier, epsilon, delta)
    args = _Args(loss_fn, params, data, noise, key, prox, microbatch_size, setting)
    # With full batches, an epoch has one step.
    return _noisy_descent("noisy_gd", args, "full", steps, None)


def noisy_sgd(
    loss_fn: LossFn,
    params: Params,
    data: Tree,
    *,
    num_steps: int,
    batch_size: int,
    key: Key,
    noise_multiplier: ScalarOrSchedule | np.ndarray | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    prox: Prox | None = None,
    microbatch_size: int | None = None,
    **setting: Unpack[iteration.Setting],
) -> Result[Params, jax.Array]:
    """Train by noisy gradient descent on random batches of fixed size.

    A step is x ↦ prox(x − η(mean gradient of the batch + λx + noise)), where η is
    step_size and λ is regularization. Each step draws a new uniformly random batch. The
    solver releases only the last iterate, and the guarantee covers only this value.

    Args:
      loss_fn: the loss of ONE example, as for `noisy_cyclic_gd`.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of n examples. An example with a
        NaN or an infinity contributes zero, and curve.left_out counts it. If
        strong_convexity is above 0, all examples must be finite.
      num_steps: T, at least 1.
      batch_size: b, from 1 to n.
      key: one typed key, for the noise and the batches.
      noise_multiplier: the standard deviation of the noise in a batch's sum of
        gradients, divided by gradient_norm; positive. A number, an optax schedule, or
        f[T].
      epsilon: the target ε, positive; epsilon and delta replace noise_multiplier.
      delta: the target δ, in (0, 1).
      prox: a function of the parameters and the step size: see `dpjax.solvers.prox`.
        With a finite diameter, a prox is required.
      microbatch_size: as for `clipped_grad`.
      **setting: all assumptions (`accounting.iteration.Setting`), as for
        `noisy_cyclic_gd`. step_size may be an optax schedule or f[T]. adjacency must be
        REPLACE.

    Returns:
      A `Result` with params, curve, guarantee, num_steps and noise_multiplier.

    Raises:
      ValueError: an argument is out of range, an assumption fails, or no noise reaches
        the target. The solver raises the error before any training.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Privacy: for a constant step size and noise, params alone has the ε(δ) of
    `accounting.iteration.noisy_sgd_epsilon`. For schedules, ε(δ) is that of the
    composition of all steps, as if every iterate were released. This composition rounds
    each noise multiplier down to one of at most 4 numbers. The guarantee assumes that
    nobody learns the batches. The accountant computes no GDP parameter, so guarantee.mu
    is None.

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
    steps = validate.static_int("num_steps", num_steps, minimum=1)
    noise = _checks.check_noise(noise_multiplier, epsilon, delta)
    args = _Args(loss_fn, params, data, noise, key, prox, microbatch_size, setting)
    return _noisy_descent("noisy_sgd", args, "random", steps, batch_size)
