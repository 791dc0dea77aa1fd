"""Gradient descent and then one draw of noise (Zhang, Zheng, Mou and Wang 2017)."""

import functools
from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import rounding, validate
from dpjax._core.float64 import default_float
from dpjax._core.keys import stream
from dpjax._core.typing import Key, LossFn, Params, Tree
from dpjax.accounting import iteration, profiles
from dpjax.accounting.iteration import Setting, _setting
from dpjax.noise._gaussian import gamma_norm_like, gaussian_like
from dpjax.solvers import _calibration, _checks, _descent, _precision
from dpjax.solvers._results import Curve, Result
from dpjax.solvers.prox import Prox, none


def _check(
    loss_fn: LossFn,
    data: Tree,
    epsilon: float,
    delta: float,
    prox: Prox | None,
    key: Key,
    setting: Setting,
) -> Setting:
    """Check the arguments, and return the setting with float32 numbers."""
    validate.positive("epsilon", epsilon)
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be in [0, 1); got {delta!r}.")
    _setting.check_names(setting)
    _checks.examples(loss_fn, data, key)
    _checks.assumptions(data, prox, setting)
    if callable(setting["step_size"]) or jnp.ndim(setting["step_size"]):
        raise ValueError(
            "step_size must be a number, because no bound on the sensitivity is "
            f"known for schedules; got {setting['step_size']!r}."
        )
    _checks.loss(loss_fn, setting)
    step_size = _precision.round_down(setting["step_size"])
    return {**_precision.executed_setting(setting), "step_size": step_size}


def _train(
    descend: Callable[..., tuple[Params, Curve]],
    params: Params,
    data: _checks.Data,
    key: Key,
    num_steps: int,
    scale: float,
    pure: bool,
    setting: Setting,
) -> tuple[Params, Curve]:
    """Train in float64, and return the private parameters and the curve.

    The parameters are cast to the caller's dtypes once, after the noise is added.

    Zhang et al. (2017), Algorithm 1, https://arxiv.org/abs/1703.09947.
    """
    # This line is outside the scope below, in which the default would be float64.
    dtype = default_float()
    with jax.enable_x64(True):
        # Lines 2 to 4 are T steps of gradient descent without noise.
        last, curve = descend(
            _precision.to_float64(params),
            data,
            _precision.to_float32(np.full((num_steps, 1), setting["step_size"])),
            # The noise of every step has standard deviation 0, so its key is unused.
            jnp.zeros((num_steps, 1), jnp.float32),
            _precision.to_float32(setting["gradient_norm"]),
            _precision.to_float32(setting["regularization"]),
            stream(key, "no noise"),
            clipped=bool(setting["clipped"]),
            batches="full",
            batch_size=data.finite.shape[0],
        )
        # Lines 5 to 10 release w_T + z. The density of z is ∝ exp(−‖z‖ / scale) for
        # δ = 0, and Gaussian otherwise. The cast comes after the noise: a cast before
        # the noise could round two iterates further apart than the sensitivity.
        draw = gamma_norm_like if pure else gaussian_like
        private = jax.tree.map(jnp.add, last, draw(stream(key, "noise"), last, scale))
        curve = curve._replace(loss=curve.loss.astype(dtype))
        return _descent.narrow(private, params), curve


def output_perturbation(
    loss_fn: LossFn,
    params: Params,
    data: Tree,
    *,
    epsilon: float,
    delta: float,
    key: Key,
    num_steps: int | None = None,
    radius: float | None = None,
    prox: Prox | None = None,
    microbatch_size: int | None = None,
    **setting: Unpack[iteration.Setting],
) -> Result[Params, float]:
    """Train by gradient descent on full batches, and add noise to the last iterate.

    Args:
      loss_fn: the loss of ONE example, as for `noisy_cyclic_gd`. The regulariser
        (λ/2)‖x‖² is not part of the loss; the setting gives λ as regularization.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of n examples. An example with a
        NaN or an infinity contributes zero, and curve.left_out counts it.
      epsilon: the target ε, positive.
      delta: the target δ, in [0, 1). For δ = 0 the noise has a Gamma-distributed norm
        and a uniform direction; for δ > 0 the noise is Gaussian.
      key: one typed key, for the noise.
      num_steps: T, at least 1. By default, T is `solvers.choose_num_steps`.
      radius: D, a guess of the distance from params to the best parameters. Without
        num_steps, the function needs D to choose T. A wrong D costs no privacy.
      prox: a function of the parameters and the step size: see `dpjax.solvers.prox`.
        The noise is added after the last prox, so that the result may be outside the
        set of a projection. You can project it again without further privacy cost.
      microbatch_size: as for `clipped_grad`.
      **setting: all assumptions of the guarantee, as `accounting.iteration.Setting`
        lists them. step_size must be a number and not a schedule, for instance
        1 / (smoothness + regularization).

    Returns:
      A `Result`: params, curve, guarantee, num_steps, noise_multiplier, sensitivity and
      scale.

    Raises:
      ValueError: an argument is out of range; an assumption fails; no noise suffices,
        because smoothness is unknown or steps expand without bound; loss_fn computes
        gradients in fewer bits than its parameters have; or rounding in float64 could
        add more than a twentieth to the sensitivity. All checks are before training.
      TypeError: an assumption is missing. This error is also a ValueError.

    Privacy: params alone is (ε, δ)-DP under the adjacency. For δ > 0, params is μ-GDP;
    for δ = 0, it is ε-DP. The sensitivity is
    `accounting.iteration.gradient_descent_sensitivity`, plus the distance that rounding
    can add. Descent and noise are always in float64, with a single cast to the
    parameters' dtypes at the end. The reason is that one of n examples moves an iterate
    by 1/n of a step. For n = 1e5, this distance is not much more than a rounding error
    in float32, and a thousandth of a rounding error in bfloat16.

    Reference: Zhang, Zheng, Mou and Wang (2017), Algorithm 1, with its constants
    replaced by exact ones.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import Adjacency
      >>> from dpjax.solvers import losses
      >>> x = jax.random.normal(jax.random.key(0), (500, 3))
      >>> loss = losses.logistic(feature_norm=1.0)
      >>> result = output_perturbation(
      ...     loss, jnp.zeros(3), (x, jnp.sign(x[:, 0])), epsilon=1.0, delta=0.0,
      ...     key=jax.random.key(1), radius=5.0, **loss.setting, step_size=2.0,
      ...     regularization=0.1, diameter=float("inf"), adjacency=Adjacency.REPLACE)
      >>> print(f"{result.guarantee.epsilon(0.0):.4f} {result.sensitivity:.4f}")
      1.0000 0.0400
    """
    setting = _check(loss_fn, data, epsilon, delta, prox, key, setting)
    prox, examples = none if prox is None else prox, _checks.prepare(data)
    start, num_examples = jax.tree.map(jnp.asarray, params), len(examples.finite)

    # Calibration gives concrete numbers, also if the caller maps over keys.
    with _calibration.now():
        if num_steps is None:
            if radius is None:
                raise ValueError(
                    "num_steps must be given, or radius must be given to choose "
                    "num_steps."
                )
            num_steps = _calibration.choose_num_steps(
                epsilon,
                delta,
                radius=radius,
                dimension=sum(x.size for x in jax.tree.leaves(start)),
                num_examples=num_examples,
                **setting,
            )
        num_steps = validate.static_int("num_steps", num_steps, minimum=1)
        sensitivity = _precision.sensitivity(
            loss_fn, start, examples, prox, num_steps=num_steps, setting=setting
        )
        scale = _calibration.calibrate_one_draw(epsilon, delta) * rounding.MARGIN
        scale *= sensitivity

    descend = functools.partial(
        _descent.descend, loss_fn=loss_fn, prox=prox, microbatch_size=microbatch_size
    )
    key = stream(key, "solvers.output_perturbation")
    private, curve = _train(
        descend, start, examples, key, num_steps, scale, delta == 0, setting
    )

    # The sensitivity divided by the scale is ε for Gamma-norm noise, and μ for Gaussian
    # noise. The quotient is rounded up and cast to the default dtype.
    spent = jnp.asarray(_precision.round_up(sensitivity / scale))
    drawn = "noise of Gamma norm" if delta == 0 else "Gaussian noise"
    guarantee = profiles.Guarantee(
        f"the last of {num_steps} iterates of gradient descent, plus {drawn}",
        profiles.Pure(spent) if delta == 0 else profiles.Gaussian(spent),
        setting["adjacency"],
        _checks.assume_one_draw(setting),
    )
    relative = scale / sensitivity
    return Result(private, curve, guarantee, num_steps, relative, sensitivity, scale)
