"""Noisy gradient descent: on full, cyclic and random batches of fixed size.

The bounds are those of Bok, Su and Altschuler (2024) and Kong and Ribero (2024).

The three solvers differ in their batches and in their accountant, which turns the noise
of every step into a profile of ε and δ. The accountant is called with trial noises
during calibration, and once more with the noise that the run uses.
"""

import functools
from collections.abc import Callable
from typing import Generic, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import keys, validate
from dpjax._core.typing import ArrayLike, Key, LossFn, Params, ScalarOrSchedule, Tree
from dpjax.accounting import gdp, iteration, pld, profiles
from dpjax.accounting.iteration import Setting, _setting
from dpjax.accounting.profiles import FunctionProfile, Gaussian, Guarantee, Profile
from dpjax.solvers import _calibration, _checks, _descent, _precision
from dpjax.solvers._results import Result
from dpjax.solvers.prox import Prox, none


class _Given(NamedTuple, Generic[Params]):
    """The arguments that all three solvers have; the noise may be a target."""

    loss_fn: LossFn
    params: Params
    data: Tree
    noise: ScalarOrSchedule | np.ndarray | _checks.Target
    key: Key
    prox: Prox | None
    microbatch_size: int | None
    setting: Setting


class _Run(NamedTuple):
    """A run of noisy descent as its accountant sees it.

    Attributes:
      batches: how the batches are made.
      num_examples: n.
      batch_size: b.
      period: the number of steps in an epoch.
      step_sizes: the step sizes that the program uses, f64[T].
      setting: the assumptions, with the numbers that the program uses.
    """

    batches: _checks.Batches
    num_examples: int
    batch_size: int
    period: int
    step_sizes: np.ndarray
    setting: Setting


# Maps a run and its noise multipliers f64[T] to a profile; raises for a bad setting.
_Accountant = Callable[[_Run, np.ndarray], Profile]


def _check(
    given: _Given, batches: _checks.Batches, num_epochs: int, batch_size: int | None
) -> _Run:
    """Check the arguments, and return the run in the numbers that the program uses."""
    setting = given.setting
    _setting.check_names(setting)
    num_examples = _checks.examples(given.loss_fn, given.data, given.key)
    _checks.assumptions(given.data, given.prox, setting)
    size = num_examples if batch_size is None else batch_size
    size = _checks.size(size, num_examples)
    if batches == "random":
        validate.adjacency_without_removal(setting["adjacency"])
    elif num_examples % size and np.any(np.asarray(setting["strong_convexity"]) > 0):
        raise ValueError(
            f"batch_size must divide the number of examples, {num_examples}, where "
            f"strong_convexity is above 0; got {size!r}: the last batch of an epoch "
            "would have less curvature."
        )
    _checks.loss(given.loss_fn, setting)
    # A random batch is drawn afresh in every step, so a step is an epoch of its own.
    period = 1 if batches == "random" else -(-num_examples // size)
    steps = _checks.schedule("step_size", setting["step_size"], num_epochs * period)
    # Rounded down, a step size that meets its upper limit still meets it.
    steps = np.asarray(_precision.round_down(steps))
    setting = _precision.executed_setting(setting)
    return _Run(batches, num_examples, size, period, steps, setting)


def _constant(values: np.ndarray) -> bool:
    """Whether all values of a schedule are equal."""
    return bool(np.all(values == values[0]))


def _last_iterate(run: _Run, noise: np.ndarray) -> Gaussian:
    """The GDP profile of the last iterate of a cyclic run.

    Constant step sizes and noise, schedules in a fixed order, and schedules in a random
    order each have their own bound.
    """
    order: _checks.Order = "reshuffled" if run.batches == "reshuffled" else "fixed"
    if _constant(run.step_sizes) and _constant(noise):
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


# A schedule of noise is rounded down to at most this many levels. Each level needs a
# privacy loss distribution of its own, which takes a compilation.
_LEVELS = 4


def _random_batches(run: _Run, noise: np.ndarray) -> FunctionProfile:
    """The profile ε(δ) of a run on random batches.

    It is the last iterate's profile, or with schedules that of all iterates.
    """
    validate.positive("noise_multiplier", noise)
    largest: Setting = {**run.setting, "step_size": run.step_sizes.max()}
    # The value is not needed: the call raises for a setting that is out of range.
    _setting.check(1.0, run.batch_size, largest)

    def epsilon(delta: ArrayLike) -> jax.Array:
        if _constant(run.step_sizes) and _constant(noise):
            return iteration.noisy_sgd_epsilon(
                noise[0],
                delta,
                num_steps=len(noise),
                batch_size=run.batch_size,
                num_examples=run.num_examples,
                **largest,
            )
        return pld.epsilon(_compose(noise, run.batch_size / run.num_examples), delta)

    return FunctionProfile(epsilon, functools.partial(profiles.search_delta, epsilon))


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


def _noisy_descent(
    solver: str,
    accountant: _Accountant,
    given: _Given[Params],
    batches: _checks.Batches,
    num_epochs: int,
    batch_size: int | None,
) -> Result[Params, jax.Array]:
    """Run noisy gradient descent, and return the last iterate and its guarantee.

    With full batches every epoch has a single step.
    """
    run = _check(given, batches, num_epochs, batch_size)
    setting, num_steps = run.setting, len(run.step_sizes)

    noise = given.noise
    if isinstance(noise, _checks.Target):
        noise = _calibrate(run, accountant, noise)
    noise = _checks.schedule("noise_multiplier", noise, num_steps)
    profile = accountant(run, noise)

    stddevs = _precision.stddev(noise, setting["gradient_norm"], run.batch_size)
    by_epoch = (np.reshape(x, (-1, run.period)) for x in (run.step_sizes, stddevs))
    numbers = (*by_epoch, setting["gradient_norm"], setting["regularization"])
    last, curve = _descent.descend(
        jax.tree.map(jnp.asarray, given.params),
        _checks.prepare(given.data),
        *_precision.to_float32(numbers),
        keys.stream(given.key, f"solvers.{solver}"),
        loss_fn=given.loss_fn,
        prox=none if given.prox is None else given.prox,
        clipped=bool(setting["clipped"]),
        batches=batches,
        batch_size=run.batch_size,
        microbatch_size=given.microbatch_size,
    )

    guarantee = Guarantee(
        f"the last of {num_steps} iterates of {solver}",
        profile,
        setting["adjacency"],
        _checks.assume_last_iterate(batches, setting),
    )
    # The given noise, rounded down to float32, so that the reported number never
    # exceeds the noise that was added.
    noise = _precision.round_down(noise[0] if _constant(noise) else noise)
    private = _descent.narrow(last, given.params)
    return Result(private, curve, guarantee, num_steps, _precision.to_float32(noise))


def _calibrate(run: _Run, accountant: _Accountant, target: _checks.Target) -> float:
    """The least noise multiplier, the same in all steps, that meets the target."""

    def epsilon_of(noise: jax.Array) -> jax.Array:
        noises = np.full(len(run.step_sizes), float(noise))
        return accountant(run, noises).epsilon(target.delta)

    # It raises its own error for a bad setting, before the search begins.
    accountant(run, np.ones(len(run.step_sizes)))
    return _calibration.solve_noise(epsilon_of, target.epsilon, target)


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
    epochs = validate.static_int("num_epochs", num_epochs, minimum=1)
    noise = _checks.noise(noise_multiplier, epsilon, delta)
    given = _Given(loss_fn, params, data, noise, key, prox, microbatch_size, setting)
    return _noisy_descent(
        "noisy_cyclic_gd", _last_iterate, given, order, epochs, batch_size
    )


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
    """Train by x ↦ prox(x − η(mean over all examples + λx + noise)).

    Only the last iterate is released, and the guarantee is for this release alone.

    Args:
      loss_fn: the loss of ONE example, as for `noisy_cyclic_gd`.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of n examples.
      num_steps: T, at least 1.
      key: one typed key, for the noise.
      noise_multiplier: standard deviation of the noise on the sum of gradients,
        divided by gradient_norm, at least 0: a number, an optax schedule, or f[T].
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
    steps = validate.static_int("num_steps", num_steps, minimum=1)
    noise = _checks.noise(noise_multiplier, epsilon, delta)
    given = _Given(loss_fn, params, data, noise, key, prox, microbatch_size, setting)
    # A full batch is an epoch of one step.
    return _noisy_descent("noisy_gd", _last_iterate, given, "full", steps, None)


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
    steps = validate.static_int("num_steps", num_steps, minimum=1)
    noise = _checks.noise(noise_multiplier, epsilon, delta)
    given = _Given(loss_fn, params, data, noise, key, prox, microbatch_size, setting)
    return _noisy_descent(
        "noisy_sgd", _random_batches, given, "random", steps, batch_size
    )
