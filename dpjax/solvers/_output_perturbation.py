"""Gradient descent and then one draw of noise (Zhang, Zheng, Mou and Wang 2017).

`choose_num_steps` chooses the number of steps of gradient descent. More steps reduce
the optimisation error, but need more noise.
"""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core import rounding, validate
from dpjax._core.float64 import default_float
from dpjax._core.keys import stream
from dpjax._core.typing import Key, LossFn, Params, Tree
from dpjax.accounting import gdp, iteration, profiles
from dpjax.noise._gaussian import gamma_norm_like, gaussian_like
from dpjax.solvers import _checks, _descent, _precision
from dpjax.solvers._descent import Result
from dpjax.solvers.prox import Prox, none


def _calibrate_one_draw(epsilon: float, delta: float) -> float:
    """Return the minimum ratio scale / sensitivity for which added noise is (ε, δ)-DP.

    For δ > 0, the noise is Gaussian, and the scale is the standard deviation of a
    coordinate. For δ = 0, the noise z has a density proportional to exp(−‖z‖ / scale).
    The caller must add a margin for rounding errors.
    """
    # At δ = 0 the density is ∝ exp(−ε‖z‖/Δ). A distance Δ changes the logarithm of the
    # density by at most ε.
    return 1 / epsilon if delta == 0 else 1 / float(gdp.mu(epsilon, delta))


# The maximum number of steps that the search considers.
_MAX_STEPS = 1_000_000


def choose_num_steps(
    epsilon: float,
    delta: float,
    *,
    radius: float,
    dimension: int,
    num_examples: int,
    **setting: Unpack[iteration.Setting],
) -> int:
    """Choose the number of steps T of `output_perturbation` for a small excess loss.

    The function computes a bound on the excess loss for about 1400 candidates from 1 to
    a million, and returns the smallest candidate whose bound is at most 1 % above the
    minimum. The bound is the sum of two terms. Let D be the radius, η the step size,
    β = smoothness + regularization and m = strong_convexity + regularization. The first
    term bounds the optimisation error: (β/2) e^{−2ηmβT/(m+β)} D² if m > 0, and
    2D²/(ηT) if m = 0. The second term is (β/2) E‖z‖², where z is the noise that
    `output_perturbation` adds after T steps. T depends on no data.

    Args:
      epsilon: the target ε, positive.
      delta: the target δ, in [0, 1).
      radius: D, a guess of the distance from the initial to the best parameters,
        positive.
      dimension: d, the number of parameters.
      num_examples: n, the number of examples.
      **setting: the assumptions of the guarantee, as for `output_perturbation`. The
        bound assumes a convex loss (weak_convexity 0) and a finite smoothness.

    Returns:
      T, at least 1 and at most a million.

    Raises:
      ValueError: an argument is out of range, or an assumption fails; weak_convexity
        is above 0; smoothness is inf.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Reference: Zhang, Zheng, Mou and Wang (2017). The proofs of Theorems 2 and 3 bound
    the excess loss by these two terms. T grows with num_examples at the same rate as
    the number of steps in these theorems.

    Example:
      >>> from dpjax import Adjacency
      >>> setting = dict(
      ...     step_size=1.0, gradient_norm=1.0, clipped=False, generalised_linear=True,
      ...     smoothness=0.25, weak_convexity=0.0, strong_convexity=0.0,
      ...     regularization=0.1, diameter=float("inf"), adjacency=Adjacency.REPLACE)
      >>> choose_num_steps(
      ...     1.0, 0.001, radius=2.0, dimension=10, num_examples=1000, **setting)
      60
    """
    validate.positive("epsilon", epsilon)
    validate.half_open_unit("delta", delta)
    validate.positive("radius", radius)
    validate.whole_count("num_examples", num_examples)
    dimension = validate.static_int("dimension", dimension, minimum=1)
    # Candidates have geometric spacing, since T needs only a relative precision.
    steps = np.unique(np.geomspace(1, _MAX_STEPS, 2000).astype(np.int64))
    sensitivity = iteration.gradient_descent_sensitivity(
        num_steps=steps, num_examples=num_examples, **setting
    )
    if np.any(setting["weak_convexity"]) or np.any(np.isinf(setting["smoothness"])):
        rule = "weak_convexity must be 0, and smoothness finite, to choose num_steps"
        raise ValueError(f"{rule}; got {setting}.")
    scale = np.float64(sensitivity) * _calibrate_one_draw(epsilon, delta)
    # E‖z‖² is d scale² for Gaussian noise. For δ = 0, E‖z‖² is E Gamma(d)² scale²,
    # which equals d(d + 1) scale².
    norm_factor = dimension * (dimension + 1) if delta == 0 else dimension
    lam, eta = np.max(setting["regularization"]), np.max(setting["step_size"])
    m = lam + np.max(setting["strong_convexity"])
    beta = lam + np.max(setting["smoothness"])
    # The excess loss after T steps is from Zhang et al. (2017), proofs of Theorem 2
    # (m > 0) and Theorem 3, https://arxiv.org/abs/1703.09947. Here m is the strong
    # convexity of the objective. The smoothness beta converts a distance to a loss.
    if m > 0:
        decrease = np.exp(-2 * eta * m * beta * steps / (m + beta))
        optimisation_error = beta / 2 * radius**2 * decrease
    else:
        optimisation_error = 2 * radius**2 / (eta * steps)
    bound = optimisation_error + beta / 2 * norm_factor * scale**2
    return int(steps[np.argmax(bound <= 1.01 * np.min(bound))])


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
        NaN or an infinity contributes zero, and curve.left_out counts it. If
        strong_convexity is above 0, all examples must be finite.
      epsilon: the target ε, positive.
      delta: the target δ, in [0, 1). For δ = 0 the noise has a Gamma-distributed norm
        and a uniform direction; for δ > 0 the noise is Gaussian.
      key: one typed key, for the noise.
      num_steps: T, at least 1. By default, `solvers.choose_num_steps` chooses T.
      radius: D, a guess of the distance from params to the best parameters. Without
        num_steps, the function needs D to choose T. A wrong D costs no privacy.
      prox: a function of the parameters and the step size: see `dpjax.solvers.prox`.
        With a finite diameter, a prox is required. The noise is added after the last
        prox, so the result may be outside the set of a projection. You can project the
        result again without further privacy cost.
      microbatch_size: as for `clipped_grad`.
      **setting: all assumptions of the guarantee, as `accounting.iteration.Setting`
        lists them. All numbers must be scalars, and step_size cannot be a schedule. A
        common step_size is 1 / (smoothness + regularization). adjacency must be
        ZERO_OUT or REPLACE.

    Returns:
      A `Result` with params, curve, guarantee, num_steps, noise_multiplier, sensitivity
      and scale.

    Raises:
      ValueError: an argument is out of range; num_steps and radius are both None; an
        assumption fails; the sensitivity is inf, for instance because smoothness is
        inf; the gradient of loss_fn casts float64 numbers to fewer bits; or rounding in
        float64 could add more than a twentieth to the sensitivity. The solver raises
        the error before any training.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Privacy: params alone is (ε, δ)-DP under the adjacency. For δ > 0, params is μ-GDP;
    for δ = 0, params is ε-DP. The sensitivity is
    `accounting.iteration.gradient_descent_sensitivity`, plus the distance that rounding
    can add. Descent and noise are always in float64, with a single cast to the
    parameters' dtypes at the end. The reason is that one of n examples moves an iterate
    by about 1/n of a step. For n = 1e5, this distance is not much more than a rounding
    error in float32, and far less than a rounding error in bfloat16.

    Reference: Zhang, Zheng, Mou and Wang (2017), Algorithm 1, with exact constants.

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
    validate.positive("epsilon", epsilon)
    validate.half_open_unit("delta", delta)
    num_examples = _checks.check_last_iterate(loss_fn, data, prox, key, setting)
    if callable(setting["step_size"]) or jnp.ndim(setting["step_size"]):
        raise ValueError(
            "step_size must be a number, because no bound on the sensitivity is "
            f"known for schedules; got {setting['step_size']!r}."
        )
    _checks.check_loss(loss_fn, setting)
    setting = _precision.executed_setting(setting)
    prox, examples = none if prox is None else prox, _checks.mask_nonfinite(data)
    start = jax.tree.map(jnp.asarray, params)

    # Calibration gives concrete numbers, also if the caller maps over keys.
    with _precision.now():
        if num_steps is None:
            if radius is None:
                raise ValueError("num_steps must be given, or else radius.")
            num_steps = choose_num_steps(
                epsilon,
                delta,
                radius=radius,
                dimension=optax.tree.size(start),
                num_examples=num_examples,
                **setting,
            )
        num_steps = validate.static_int("num_steps", num_steps, minimum=1)
        sensitivity = _precision.sensitivity(
            loss_fn, start, examples, prox, num_steps=num_steps, setting=setting
        )
        scale = _calibrate_one_draw(epsilon, delta) * rounding.MARGIN
        scale *= sensitivity

    # Zhang et al. (2017), Algorithm 1, https://arxiv.org/abs/1703.09947. Lines 2 to 4
    # are T steps of gradient descent without noise: the noise of every step has
    # standard deviation 0.
    key = stream(key, "solvers.output_perturbation")
    steps = np.full((num_steps, 1), setting["step_size"])
    numbers = steps, 0 * steps, setting["gradient_norm"], setting["regularization"]
    # This line is outside of the scope below, in which the default dtype would be
    # float64.
    dtype = default_float()
    with jax.enable_x64(True):
        last, curve = _descent.descend(
            _precision.to_float64(start),
            examples,
            *_precision.to_float32(numbers),
            stream(key, "no noise"),
            loss_fn=loss_fn,
            prox=prox,
            clipped=bool(setting["clipped"]),
            batches="full",
            batch_size=num_examples,
            microbatch_size=microbatch_size,
        )
        # Lines 5 to 10 release w_T + z. The density of z is ∝ exp(−‖z‖ / scale) for
        # δ = 0, and Gaussian otherwise. The cast comes after the noise: a cast before
        # the noise could round two iterates further apart than the sensitivity.
        draw = gamma_norm_like if delta == 0 else gaussian_like
        private = jax.tree.map(jnp.add, last, draw(stream(key, "noise"), last, scale))
        curve = curve._replace(loss=curve.loss.astype(dtype))
        private = _descent.cast_like(private, start)

    # The sensitivity divided by the scale is ε for Gamma-norm noise, and μ for Gaussian
    # noise. The quotient is rounded up and cast to the default dtype.
    mu_or_epsilon = jnp.asarray(_precision.round_up(sensitivity / scale))
    noise_name = "noise of Gamma norm" if delta == 0 else "Gaussian noise"
    guarantee = profiles.Guarantee(
        f"the last of {num_steps} iterates of gradient descent, plus {noise_name}",
        (profiles.Gaussian if delta else profiles.Pure)(mu_or_epsilon),
        setting["adjacency"],
        _checks.assume_last_iterate(_checks.PRECISION, setting),
    )
    return Result(
        private, curve, guarantee, num_steps, scale / sensitivity, sensitivity, scale
    )
