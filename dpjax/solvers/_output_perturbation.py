"""Gradient descent, then one draw of noise (Zhang, Zheng, Mou and Wang 2017)."""

from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _validate
from dpjax._float64 import default_float
from dpjax._keys import stream
from dpjax.accounting import iteration, pure
from dpjax.noise import gamma_norm_like, gaussian_like
from dpjax.solvers import (
    _assumptions,
    _data,
    _descent,
    _numbers,
    _precision,
    printed,
)
from dpjax.solvers._descent import Curve
from dpjax.solvers._num_steps import choose_num_steps, exact_scale
from dpjax.solvers.guarantee import Guarantee, Pure
from dpjax.solvers.prox import Prox, none

Noise = Literal["exact", "printed"]
_MARGIN = 1 + 1e-6  # for roundings of μ to float32, and of the noise


class Result(NamedTuple):
    """Private parameters and what is promised about them.

    Attributes:
      params: the last iterate plus noise, shaped like the initial parameters.
      curve: a `Curve`, which the guarantee does not cover.
      guarantee: a `Guarantee` for params alone.
      num_steps: T.
      sensitivity: how far one example can move the last iterate, rounding included.
      scale: of the noise: the standard deviation per coordinate, or for δ = 0 the scale
        of `gamma_norm_like`.
    """

    params: Any
    curve: Curve
    guarantee: Guarantee
    num_steps: int
    sensitivity: float
    scale: float


def output_perturbation(
    loss_fn: Any,
    params: Any,
    data: Any,
    *,
    epsilon: float,
    delta: float,
    key: jax.Array,
    num_steps: int | None = None,
    radius: float | None = None,
    noise: Noise = "exact",
    prox: Prox | None = None,
    microbatch_size: int | None = None,
    **setting: Unpack[iteration.Setting],
) -> Result:
    """Train by gradient descent on full batches without noise, and add noise once.

    Args:
      loss_fn: as for `noisy_gd`: the loss of ONE example without the regulariser
        (λ/2)‖x‖², which belongs to the setting.
      params: the initial parameters, a pytree; they must not depend on the data.
      data: a pytree whose leaves share a leading axis of n examples. An example with a
        NaN or an infinity in it contributes zero and is counted.
      epsilon: the target ε, positive.
      delta: the target δ, in [0, 1). With 0 the noise has a norm with a Gamma
        distribution and a uniform direction, else it is Gaussian.
      key: one typed key, for the noise.
      num_steps: T. By default `solvers.choose_num_steps`.
      radius: D, a guess of the distance from params to the best parameters; it is
        needed where num_steps is not given, and costs no privacy if it is wrong.
      noise: "exact" for the least noise that gives (ε, δ); "printed" for the paper's
        constants (`printed.output_perturbation_scale`), to compare with.
      prox: see `dpjax.solvers.prox`. The noise comes after it, so that the result may
        leave its set; to project once more costs nothing.
      microbatch_size: see `clipped_grad`.
      **setting: the assumptions, all of them: see `accounting.iteration.Setting`. The
        step size is a number; 1 / (smoothness + regularization) is a good one.

    Returns:
      A `Result`: params, curve, guarantee, num_steps, sensitivity, scale.

    Raises:
      ValueError: an argument is out of range, an assumption fails, or no noise is
        enough because smoothness is unknown or steps expand without bound; loss_fn
        computes gradients in less than the precision of its parameters; rounding in
        float64 could still add a twentieth to the sensitivity; before any training.
      TypeError: an assumption is missing (a ValueError too).

    Privacy: params alone is (ε, δ)-DP under the adjacency; μ-GDP, or pure ε-DP for
    δ = 0. The sensitivity is `accounting.iteration.gradient_descent_sensitivity`, plus
    what rounding can add. Descent and noise are in float64, whatever the parameters and
    the configuration, and are cast to the parameters' dtypes once, at the end: one
    example of n moves an iterate by 1/n of a step, which in float32 is not much more
    than a rounding for n = 1e5, and in bfloat16 a thousandth of one.

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
    _validate.positive("epsilon", epsilon)
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be in [0, 1); got {delta!r}.")
    _validate.one_of("noise", noise, ("exact", "printed"))
    given: dict[str, Any] = dict(setting)
    num_examples = _assumptions.check(
        loss_fn,
        data,
        noise_multiplier=0.0,
        epsilon=None,
        delta=None,
        prox=prox,
        key=key,
        setting=given,
    )
    if callable(given["step_size"]) or jnp.ndim(given["step_size"]):
        raise ValueError(
            f"step_size must be a number; got {given['step_size']!r}: there is no "
            "sensitivity for schedules yet."
        )
    _assumptions.check_loss(loss_fn, given)
    given = _assumptions.as_run(given)
    given["step_size"] = _numbers.down(given["step_size"])
    params = jax.tree.map(jnp.asarray, params)
    if num_steps is None:
        if radius is None:
            raise ValueError("num_steps must be given, or radius to choose it by.")
        dimension = sum(x.size for x in jax.tree.leaves(params))
        num_steps = choose_num_steps(
            epsilon,
            delta,
            radius=radius,
            dimension=dimension,
            num_examples=num_examples,
            **given,
        )
    num_steps = _validate.static_int("num_steps", num_steps, minimum=1)
    prox = none if prox is None else prox
    examples = _data.prepare(data)
    sensitivity = _precision.sensitivity(
        loss_fn,
        params,
        examples,
        prox,
        num_steps=num_steps,
        num_examples=num_examples,
        setting=given,
    )
    scale = float(exact_scale(epsilon, delta, sensitivity)) * _MARGIN
    if noise == "printed":
        scale = printed.output_perturbation_scale(
            epsilon, delta, num_steps=num_steps, num_examples=num_examples, **given
        )

    key, dtype = stream(key, "solvers.output_perturbation"), default_float()
    step_sizes = np.full((num_steps, 1), given["step_size"])
    draw = gamma_norm_like if delta == 0 else gaussian_like
    with jax.enable_x64(True):
        last, curve = _descent.descend(
            _precision.doubled(params),
            examples,
            _numbers.array(step_sizes),
            jnp.zeros((num_steps, 1), jnp.float32),
            _numbers.array(given["gradient_norm"]),
            _numbers.array(given["regularization"]),
            stream(key, "no noise"),
            loss_fn=loss_fn,
            prox=prox,
            clipped=bool(given["clipped"]),
            batches="full",
            batch_size=num_examples,
            microbatch_size=microbatch_size,
        )
        # Not before the noise: neighbouring iterates may be rounded far apart.
        private = jax.tree.map(jnp.add, last, draw(stream(key, "noise"), last, scale))
        private = _descent.narrow(private, params)
        curve = curve._replace(loss=curve.loss.astype(dtype))
    spent = sensitivity / scale
    return Result(
        params=private,
        curve=curve,
        guarantee=Guarantee(
            mechanism=f"the last of {num_steps} iterates of gradient descent, plus "
            + ("noise of Gamma norm" if delta == 0 else "Gaussian noise"),
            mu=pure.mu(spent) if delta == 0 else _rounded_up(spent),
            adjacency=given["adjacency"],
            assumptions=_assumptions.assumptions(
                "gradients and prox are as exact as a dot product in float64 (those of "
                "dpjax.solvers are)",
                setting=given,
            ),
            profile=Pure(_rounded_up(spent)) if delta == 0 else None,
        ),
        num_steps=num_steps,
        sensitivity=sensitivity,
        scale=scale,
    )


def _rounded_up(value: float) -> jax.Array:
    """The value in the default dtype, not below."""
    return jnp.asarray(_numbers.up(value))
