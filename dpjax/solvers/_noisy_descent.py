"""Noisy descent from data to guarantee: the code that its three solvers share.

The solvers differ in their batches and in their accountant, which turns the noise of
every step into a profile of ε and δ. The accountant is called with trial noises during
calibration, and once more with the noise that the run uses.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core import validate
from dpjax._core.keys import stream
from dpjax._core.typing import Key, LossFn, Params, Tree
from dpjax.accounting.iteration import Setting
from dpjax.accounting.profiles import Guarantee, Profile
from dpjax.solvers import _calibration, _checks, _descent, _precision
from dpjax.solvers._results import Result
from dpjax.solvers.prox import Prox, none


class Run(NamedTuple):
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
Accountant = Callable[[Run, np.ndarray], Profile]


def noisy_descent(
    loss_fn: LossFn,
    params: Params,
    data: Tree,
    *,
    solver: str,
    accountant: Accountant,
    batches: _checks.Batches,
    num_epochs: int,
    batch_size: int | None,
    key: Key,
    noise_multiplier: optax.ScalarOrSchedule | np.ndarray | None,
    epsilon: float | None,
    delta: float | None,
    prox: Prox | None,
    microbatch_size: int | None,
    setting: Setting,
) -> Result[Params, jax.Array]:
    """The last iterate and its guarantee; full batches are epochs of a single step."""
    given = _checks.noise(noise_multiplier, epsilon, delta)
    run = _validate_run(
        loss_fn, data, batches, num_epochs, batch_size, key, prox, setting
    )
    setting, num_steps = run.setting, len(run.step_sizes)

    if isinstance(given, _checks.Target):
        given = _calibrate(run, accountant, given)
    noise = _checks.schedule("noise_multiplier", given, num_steps)
    profile = accountant(run, noise)

    stddevs = _precision.stddev(noise, setting["gradient_norm"], run.batch_size)
    last, curve = _descent.descend(
        jax.tree.map(jnp.asarray, params),
        _checks.prepare(data),
        _precision.to_float32(run.step_sizes.reshape(-1, run.period)),
        _precision.to_float32(np.reshape(stddevs, (-1, run.period))),
        _precision.to_float32(setting["gradient_norm"]),
        _precision.to_float32(setting["regularization"]),
        stream(key, f"solvers.{solver}"),
        loss_fn=loss_fn,
        prox=none if prox is None else prox,
        clipped=bool(setting["clipped"]),
        batches=batches,
        batch_size=run.batch_size,
        microbatch_size=microbatch_size,
    )

    return Result(
        params=_descent.narrow(last, params),
        curve=curve,
        guarantee=Guarantee(
            mechanism=f"the last of {num_steps} iterates of {solver}",
            profile=profile,
            adjacency=setting["adjacency"],
            assumptions=_checks.assume_last_iterate(batches, setting),
        ),
        num_steps=num_steps,
        # The given noise, rounded down to float32, so that the reported number never
        # exceeds the noise that was added.
        noise_multiplier=_precision.to_float32(
            _precision.down(noise[0] if constant(noise) else noise)
        ),
    )


def _validate_run(
    loss_fn: LossFn,
    data: Tree,
    batches: _checks.Batches,
    num_epochs: int,
    batch_size: int | None,
    key: Key,
    prox: Prox | None,
    setting: Setting,
) -> Run:
    """Check the arguments, and return the run in the numbers that the program uses."""
    _checks.names(setting)
    num_examples = _checks.examples(loss_fn, data, key)
    _checks.assumptions(data, prox, setting)
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
    _checks.loss(loss_fn, setting)
    # A random batch is drawn afresh in every step, so a step is an epoch of its own.
    period = 1 if batches == "random" else -(-num_examples // size)
    step_sizes = _checks.schedule(
        "step_size", setting["step_size"], num_epochs * period
    )
    return Run(
        batches=batches,
        num_examples=num_examples,
        batch_size=size,
        period=period,
        # Rounded down, a step size that meets its upper limit still meets it.
        step_sizes=np.asarray(_precision.down(step_sizes)),
        setting=_precision.as_executed(setting),
    )


def _calibrate(run: Run, accountant: Accountant, target: _checks.Target) -> float:
    """The least noise multiplier, the same in all steps, that meets the target."""

    def profile(noise: float) -> Profile:
        return accountant(run, np.full(len(run.step_sizes), noise))

    def epsilon_of(noise: jax.Array) -> jax.Array:
        return profile(float(noise)).epsilon(target.delta)

    profile(1.0)  # raises its own error for a bad setting, before the search begins
    return _calibration.solve_noise(epsilon_of, target.epsilon, target)


def constant(values: np.ndarray) -> bool:
    """Whether all values of a schedule are equal."""
    return bool(np.all(values == values[0]))
