"""Noisy SGD on random batches of fixed size (Bok, Su and Altschuler 2024)."""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import _validate
from dpjax._keys import stream
from dpjax.accounting import iteration, pld
from dpjax.adjacency import Adjacency
from dpjax.solvers import _assumptions, _data, _descent, _numbers
from dpjax.solvers._descent import Result
from dpjax.solvers.guarantee import Guarantee
from dpjax.solvers.prox import Prox, none

_LEVELS = 4  # of noise, that a schedule is rounded down to: each is compiled


class EpsilonProfile(NamedTuple):
    """The profile of a mechanism known by ε as a function of δ.

    Attributes:
      of_delta: the function, rounded up.
    """

    of_delta: Callable[[Any], jax.Array]

    def epsilon(self, delta: jax.typing.ArrayLike) -> jax.Array:
        """The ε for a δ in (0, 1), rounded up."""
        return self.of_delta(delta)

    def delta(self, epsilon: jax.typing.ArrayLike) -> jax.Array:
        """A δ for an ε >= 0, within 0.1 % of the least, searched down to 1e-30."""
        _validate.nonnegative("epsilon", epsilon, finite=False)
        low, high = np.log(1e-30), 0.0
        if self.of_delta(float(np.exp(low))) <= epsilon:
            return jnp.asarray(np.exp(low))
        while high - low > 1e-3:
            middle = (low + high) / 2
            meets = bool(self.of_delta(float(np.exp(middle))) <= epsilon)
            low, high = (low, middle) if meets else (middle, high)
        return jnp.minimum(jnp.asarray(np.exp(high) * (1 + 1e-6)), 1.0)


def _composed(noise: np.ndarray, rate: float) -> pld.PLD:
    """Every step accounted for as if it were released, at no more than its noise."""
    steps = None
    for group in np.array_split(np.sort(noise), min(_LEVELS, len(noise))):
        step = pld.compose(pld.subsampled_gdp(2 / group[0], rate), len(group))
        steps = step if steps is None else pld.convolve(steps, step)
    assert steps is not None
    return steps


def noisy_sgd(
    loss_fn: Any,
    params: Any,
    data: Any,
    *,
    num_steps: int,
    batch_size: int,
    key: jax.Array,
    noise_multiplier: optax.ScalarOrSchedule | np.ndarray | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    prox: Prox | None = None,
    microbatch_size: int | None = None,
    **setting: Unpack[iteration.Setting],
) -> Result:
    """Train by x ↦ prox(x − η(mean over a random batch + λx + noise)).

    Each step draws a uniformly random batch of fixed size. Only the last iterate is
    released, and accounted for as such.

    Args:
      loss_fn: as for `noisy_cyclic_gd`, and so are the arguments that are not here.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of n examples.
      num_steps: T, at least 1.
      batch_size: b, from 1 to n.
      key: one typed key, for the noise and the batches.
      noise_multiplier: standard deviation of the noise on the batch's sum of gradients
        over gradient_norm, positive: a number, an optax schedule, or f[T].
      epsilon: in place of the noise multiplier the target ε, positive.
      delta: and the target δ, in (0, 1).
      prox: see `dpjax.solvers.prox`.
      microbatch_size: see `clipped_grad`.
      **setting: the assumptions, all of them: see `accounting.iteration.Setting`.
        Adjacency is REPLACE.

    Returns:
      A `Result`: params, curve, guarantee and the noise multiplier.

    Raises:
      ValueError: an argument is out of range, or an assumption fails, before any
        training.
      TypeError: an assumption is missing (a ValueError too).

    Privacy: params alone has the ε(δ) of `accounting.iteration.noisy_sgd_epsilon`; with
    schedules that of composition at 4 levels of noise, which holds for all iterates.
    Nobody learns the batches. No GDP parameter is known: guarantee.mu is inf.

    Reference: Bok, Su and Altschuler (2024), (2.1) and Theorems 4.8 to 4.10.

    Example:
      >>> import jax, jax.numpy as jnp
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
    steps = _validate.static_int("num_steps", num_steps, minimum=1)
    size = _validate.static_int("batch_size", batch_size, minimum=1)
    setting_: dict[str, Any] = dict(setting)
    num_examples = _assumptions.check(
        loss_fn,
        data,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        delta=delta,
        prox=prox,
        key=key,
        setting=setting_,
    )
    if size > num_examples:
        raise ValueError(f"batch_size must be at most {num_examples}; got {size!r}.")

    if setting_["adjacency"] is not Adjacency.REPLACE:
        raise ValueError(
            "adjacency must be REPLACE for random batches of fixed size; "
            f"got {setting_['adjacency']!r}."
        )
    _assumptions.check_loss(loss_fn, setting_)
    setting_ = _assumptions.as_run(setting_)
    step_sizes = _assumptions.step_sizes(setting_, steps)
    iteration.noisy_cyclic_gd_mu(  # says what is wrong with the setting
        1.0,
        num_epochs=1,
        batches_per_epoch=1,
        batch_size=size,
        order="fixed",
        **{**setting_, "step_size": step_sizes.max()},
    )

    def epsilon_of(noise: np.ndarray, delta: Any) -> jax.Array:
        if _descent.constant(step_sizes) and _descent.constant(noise):
            return iteration.noisy_sgd_epsilon(
                noise[0],
                delta,
                num_steps=steps,
                batch_size=size,
                num_examples=num_examples,
                **{**setting_, "step_size": step_sizes[0]},
            )
        return pld.epsilon(_composed(noise, size / num_examples), delta)

    if noise_multiplier is None:
        target, at = float(epsilon), float(delta)  # type: ignore[arg-type]
        noise_multiplier = _assumptions.solve_noise(
            lambda noise: epsilon_of(np.full(steps, float(noise)), at),
            target,
            target,
            at,
        )
    noise = _data.schedule("noise_multiplier", noise_multiplier, steps)
    _validate.positive("noise_multiplier", noise)
    profile = EpsilonProfile(lambda delta: epsilon_of(noise, delta))

    last, curve = _descent.descend(
        jax.tree.map(jnp.asarray, params),
        _data.prepare(data),
        _descent.rows(step_sizes, 1),
        _descent.rows(_numbers.stddev(noise, setting_["gradient_norm"], size), 1),
        _numbers.array(setting_["gradient_norm"]),
        _numbers.array(setting_["regularization"]),
        stream(key, "solvers.noisy_sgd"),
        loss_fn=loss_fn,
        prox=none if prox is None else prox,
        clipped=bool(setting_["clipped"]),
        batches="random",
        batch_size=size,
        microbatch_size=microbatch_size,
    )
    return Result(
        params=_descent.narrow(last, params),
        curve=curve,
        guarantee=Guarantee(
            mechanism=f"the last of {steps} iterates of noisy SGD",
            mu=jnp.inf,
            adjacency=setting_["adjacency"],
            assumptions=_assumptions.assumptions(
                "each batch is a fresh uniformly random subset that nobody learns",
                setting=setting_,
            ),
            profile=profile,
        ),
        noise_multiplier=_descent.reported(noise),
    )
