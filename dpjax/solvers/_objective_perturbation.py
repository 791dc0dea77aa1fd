"""Objective perturbation: the minimum of a random objective, plus output noise."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core import keys, validate
from dpjax._core.float64 import default_float
from dpjax._core.rounding import HIGHEST, MARGIN
from dpjax._core.typing import Adjacency, ArrayLike, Key
from dpjax.accounting import gdp, objective, profiles
from dpjax.noise._gaussian import gaussian_like
from dpjax.solvers import _checks, _descent, _precision
from dpjax.solvers._descent import Curve, Result
from dpjax.solvers.losses import Loss

# The fraction of ε that curvature alone would cost if curvature and gradients had their
# maxima at the same score. More regularisation moves the minimum further, and less
# regularisation needs more noise.
_CURVATURE_FRACTION = 0.2
# The fraction of μ for the output noise. Since squares of μ add up, the output noise
# costs 2e-4 of μ.
_OUTPUT_FRACTION = 0.02
# The maximum number of steps of Newton's method, which usually needs about ten.
_MAX_STEPS = 200
# The minimum length of a step, as a fraction of the full step of Newton's method.
_MIN_LENGTH = 2.0**-40


class _NewtonState(NamedTuple):
    """The parameters, the gradient and the number of steps of Newton's method."""

    params: jax.Array
    gradient: jax.Array
    step: jax.Array


def choose_regularization(
    epsilon: float, *, smoothness: float, num_examples: int
) -> float:
    """Choose the weight λ of the regulariser for `objective_perturbation`.

    Args:
      epsilon: the target ε, positive.
      smoothness: β, the largest curvature of one example's loss, positive.
      num_examples: n, at least 1.

    Returns:
      λ = β / (n (e^{0.2 ε} − 1)), for an objective that is a mean of n losses. The
      curvature of an example then contributes at most log(1 + β / (n λ)) = ε/5 to the
      privacy loss. λ depends on no data. At δ = 1e-3 and ε from 0.1 to 8, logistic
      losses with this λ need 5 % to 9 % more noise under REPLACE than in the limit
      λ → ∞, and at most 3 % more under ZERO_OUT.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> print(f"{choose_regularization(1.0, smoothness=0.25, num_examples=1000):.6f}")
      0.001129
    """
    validate.positive("epsilon", epsilon)
    validate.positive("smoothness", smoothness)
    num_examples = validate.static_int("num_examples", num_examples, minimum=1)
    return smoothness / (num_examples * math.expm1(_CURVATURE_FRACTION * epsilon))


def _gradient_error(
    loss: Loss, num_examples: int, dimension: int, ridge: float, stddev: float
) -> float:
    """Bound the float64 rounding error of the gradient of J near the minimum of J.

    J is the objective of `_minimise`, and `stddev` is the standard deviation of each
    coordinate of the linear term of J.
    """
    n, terms = num_examples, 2 * dimension + 64
    # ‖b‖ exceeds this bound with probability e^{−72}, which is below any rounding of δ.
    linear = stddev * (math.sqrt(dimension) + 12)
    # With Λ = ridge, Λ‖θ‖ <= ‖∇J‖ + ‖Σ∇ℓ‖ + ‖b‖. At the end of the search, ‖∇J‖ is far
    # below the other two norms.
    radius = 1.01 * (n * loss.gradient_norm + linear) / ridge
    # The error of a computed gradient is from the model of `_precision`.
    error = n * _precision.margin(n + terms) * loss.gradient_norm
    curved = n * loss.smoothness * radius + ridge * radius + linear
    return error + _precision.margin(terms) * curved


@functools.partial(jax.jit, static_argnames="loss")
def _minimise(
    start: jax.Array,
    data: _checks.Data,
    linear: jax.Array,
    ridge: jax.Array,
    tolerance: jax.Array,
    *,
    loss: Loss,
) -> tuple[jax.Array, Curve]:
    """Find the minimiser of the perturbed objective J by Newton's method.

    J(w) is the sum of the losses, plus (ridge/2)‖w‖² + ⟨linear, w⟩. The search ends
    when the norm of the gradient is at most the tolerance. The function returns the
    minimiser f[d], and a `Curve` without an axis of steps: the mean loss at the
    minimiser, f[], and the number of examples left out, i[]. The minimiser is NaN if
    _MAX_STEPS steps do not reach the tolerance.
    """
    examples: Any = data.examples  # `Loss.check` ensures that this is a pair
    features, labels = examples
    x = jax.vmap(loss.scale)(jnp.asarray(features, jnp.float64))
    # A masked example has zero features, and therefore no gradient and no curvature.
    x = jnp.where(data.finite[:, None], x, 0.0)
    of_score, slope_of_score = loss.of_scores, jax.grad(loss.of_scores)

    def values(w: jax.Array) -> jax.Array:
        return jax.vmap(of_score)(jnp.matmul(x, w, precision=HIGHEST), labels)

    def objective_of(w: jax.Array) -> jax.Array:
        return jnp.sum(values(w), where=data.finite) + ridge / 2 * w @ w + linear @ w

    def gradient_of(w: jax.Array) -> jax.Array:
        slopes = jax.vmap(slope_of_score)(jnp.matmul(x, w, precision=HIGHEST), labels)
        return jnp.matmul(slopes, x, precision=HIGHEST) + ridge * w + linear

    def take_step(state: _NewtonState) -> _NewtonState:
        w, g, step = state
        scores = jnp.matmul(x, w, precision=HIGHEST)
        curvatures = jax.vmap(jax.grad(slope_of_score))(scores, labels)
        hessian = jnp.matmul((x * curvatures[:, None]).T, x, precision=HIGHEST)
        factor = jax.scipy.linalg.cho_factor(hessian + ridge * jnp.eye(w.size))
        direction = jax.scipy.linalg.cho_solve(factor, g)
        value = objective_of(w)
        # Near the minimum, the change of J is less than the rounding error of J.
        slack = 64 * jnp.finfo(jnp.float64).eps * (jnp.abs(value) + len(x))

        def is_too_long(length: jax.Array) -> jax.Array:
            threshold = value - 1e-4 * length * (g @ direction) + slack
            exceeds = ~(objective_of(w - length * direction) <= threshold)
            return exceeds & (length > _MIN_LENGTH)

        length = jax.lax.while_loop(is_too_long, lambda t: t / 2, jnp.ones(()))
        w = w - length * direction
        return _NewtonState(w, gradient_of(w), step + 1)

    def is_running(state: _NewtonState) -> jax.Array:
        exceeds = ~(jnp.linalg.norm(state.gradient) <= tolerance)
        return exceeds & (state.step < _MAX_STEPS)

    first = _NewtonState(start, gradient_of(start), jnp.zeros((), jnp.int32))
    last = jax.lax.while_loop(is_running, take_step, first)
    converged = jnp.linalg.norm(last.gradient) <= tolerance
    mean_loss = jnp.mean(values(last.params), where=data.finite)
    left_out = jnp.sum(~data.finite, dtype=jnp.int32)
    return jnp.where(converged, last.params, jnp.nan), Curve(mean_loss, left_out)


def objective_perturbation(
    loss: Loss,
    params: ArrayLike,
    data: tuple[ArrayLike, ArrayLike],
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    key: Key,
    regularization: float | None = None,
    prior_mu: float = 0.0,
) -> Result[jax.Array, float]:
    """Minimise a mean of losses with a regulariser and one random linear term.

    The objective is Σℓ_i(w)/n + (λ/2)‖w‖² + ⟨b, w⟩/n, where ℓ_i is the loss of example
    i and b is a draw of N(0, σ² I). The function finds the minimiser by Newton's method
    in float64, so you choose neither a step size nor a number of steps. Ill-conditioned
    features only make the search slower. The function then adds Gaussian output noise,
    which hides the distance between the computed and the exact minimiser.

    Args:
      loss: a loss of `solvers.losses` with one linear score: `logistic` or `huber`. If
        you make a `losses.Loss` yourself, the guarantee assumes that the bounds that
        you state in this loss are true.
      params: the initial parameters of the search, f[d]. Output noise hides their
        effect on the result.
      data: features f[n, d] and labels [n]. An example with a NaN or an infinity
        contributes zero, and curve.left_out counts it.
      epsilon: the target ε, positive.
      delta: the target δ, in (0, 1).
      adjacency: ZERO_OUT or REPLACE.
      key: one typed key, for the linear term and the output noise.
      regularization: λ, positive; `solvers.choose_regularization` by default. A larger
        λ needs less noise.
      prior_mu: the GDP parameter, under the same adjacency, of earlier releases from
        which the loss or the features were computed, such as a private estimate of the
        scale of the features. (ε, δ) includes the cost of these releases.

    Returns:
      A `Result` with params, f[d], curve, guarantee, num_steps, noise_multiplier and
      scale. params is NaN if Newton's method does not converge in 200 steps.
      curve.loss, f[], is the mean loss at the minimum, without the regulariser.
      num_steps is 1, the number of releases. noise_multiplier is σ/L for the bound L on
      the norm of a gradient, and scale is σ.

    Raises:
      ValueError: an argument is out of range; loss is not a `losses.Loss` with one
        linear score; adjacency is ADD_REMOVE; or no noise reaches ε, because λ is too
        small or prior_mu is too large.

    Privacy: params, together with the releases that prior_mu accounts for, is (ε, δ)-DP
    under the adjacency, by `accounting.objective.delta`. The search is in float64, and
    ends when the norm of the computed gradient is at most a bound on the gradient's
    rounding error. Output noise hides the remaining distance from the minimiser. The μ
    of the output noise is 2 % of `accounting.gdp.mu(epsilon, delta)`. The guarantee
    assumes that the search converges on both data sets.

    Reference: Redberg, Koskela and Wang (2023), with the bound of
    `accounting.objective`; for inexact minima, Iyengar, Near, Song, Thakkar, Thakurta
    and Wang (2019), Algorithm 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax.solvers import losses
      >>> x = jax.random.normal(jax.random.key(0), (500, 3))
      >>> result = objective_perturbation(
      ...     losses.logistic(feature_norm=1.0), jnp.zeros(3), (x, jnp.sign(x[:, 0])),
      ...     epsilon=1.0, delta=1e-5, adjacency=Adjacency.REPLACE,
      ...     key=jax.random.key(1))
      >>> print(result.params.shape, bool(result.guarantee.epsilon(1e-5) <= 1.0))
      (3,) True
    """
    if not isinstance(loss, Loss) or not loss.generalised_linear:
        raise ValueError(
            "loss must be a losses.Loss of one linear score, because the bound on "
            f"the determinant of the curvature needs a single score; got {loss!r}."
        )
    target = _checks.check_target(epsilon, delta)
    _checks.check_adjacency(adjacency)
    num_examples = _checks.check_examples(loss, data, key)
    examples, start = _checks.mask_nonfinite(data), jnp.asarray(params)
    if start.shape != jnp.shape(data[0])[1:]:
        raise ValueError(
            f"params must have shape {jnp.shape(data[0])[1:]}; got {start.shape}."
        )
    if regularization is None:
        regularization = choose_regularization(
            epsilon, smoothness=loss.smoothness, num_examples=num_examples
        )
    validate.positive("regularization", regularization)
    validate.nonnegative("prior_mu", prior_mu)
    ridge, dimension = num_examples * float(regularization), start.size

    with _precision.now():
        output_mu = _OUTPUT_FRACTION * float(gdp.mu(epsilon, delta))
        terms = {
            "curvature": loss.smoothness / ridge * MARGIN,
            "logistic": loss.logistic,
            "adjacency": adjacency,
            "other_mu": math.hypot(output_mu, prior_mu) * MARGIN,
        }

        delta_of = functools.partial(objective.delta, epsilon=epsilon, **terms)
        if not delta_of(math.inf) <= delta:
            raise ValueError(
                "regularization must be larger or prior_mu smaller, because no noise "
                f"reaches epsilon {epsilon!r} at delta {delta!r}; got regularization "
                f"{regularization!r} and prior_mu {prior_mu!r}."
            )
        noise_multiplier = _precision.solve_noise(delta_of, delta, target)
        stddev = float(_precision.stddev(noise_multiplier, loss.gradient_norm))
        profile = profiles.FunctionProfile(
            functools.partial(objective.epsilon, noise_multiplier, **terms),
            functools.partial(objective.delta, noise_multiplier, **terms),
        )
        error = _gradient_error(loss, num_examples, dimension, ridge, stddev)
        # The search ends where the norm of the computed gradient is at most `error`,
        # and the norm of the exact gradient is then below 2 error. J is Λ-strongly
        # convex, so the computed point is within 2 error / Λ of the minimum. For two
        # data sets, these two distances add up to at most 4 error / Λ.
        output_stddev = 4 * error / ridge / output_mu * MARGIN

    key, dtype = keys.stream(key, "solvers.objective_perturbation"), default_float()
    # Draws are in float32, since JAX lowers a draw of 64 bits wrongly in a program
    # without x64.
    template = jnp.zeros(start.shape, jnp.float32)
    linear = gaussian_like(keys.stream(key, "linear"), template, stddev)
    noise = gaussian_like(keys.stream(key, "output"), template, output_stddev)
    with jax.enable_x64(True):
        wide, linear, noise = _precision.to_float64((start, linear, noise))
        minimum, curve = _minimise(wide, examples, linear, ridge, error, loss=loss)
        private = _descent.cast_like(minimum + noise, start)
        curve = curve._replace(loss=curve.loss.astype(dtype))
    guarantee = profiles.Guarantee(
        "the minimum of an objective with a Gaussian linear term, plus Gaussian noise",
        profile,
        adjacency,
        _checks.assume_minimum(),
    )
    return Result(private, curve, guarantee, 1, noise_multiplier, scale=stddev)
