"""Search for the best size of the noise in each step, for a given workload.

Let x be the gradient sums, and A the workload, the linear map that an optimizer applies
to x. The strategy is C = T diag(s), where T is a Toeplitz matrix and s has a weight for
each step. The noise is C⁻¹z for independent Gaussian z. In step t this noise is
(T⁻¹z)_t times the factor f_t = 1 / s_t. The error is proportional to ‖A diag(f) T⁻¹‖_F.
The sensitivity of an example is the maximum distance by which this example moves C x.
Let π be the steps in which the example takes part, and let G_π have the entries of
|TᵀT| in π × π. Then the sensitivity is at most the root of sᵀG_π s. At the best s, the
bound is the same for every position in the epoch. So each s_t is divided by the bound
for its position, and the search then minimizes the error alone.

For independent noise, T = I. Then the squared error is proportional to Σ_t w_t / s_t²,
where w_t is the squared norm of column t of A. An example's squared sensitivity is
Σ_{t∈π} s_t². By Lagrange's multiplier, s_t⁴ is proportional to w_t.
"""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import scope
from dpjax._core.searches import minimize
from dpjax._matrices.strategy import (
    Scaled,
    Toeplitz,
    Workload,
    check_strategy,
    check_workload,
)
from dpjax.accounting.correlated import _patterns
from dpjax.accounting.correlated._error import square_error
from dpjax.strategies import _making

Order = Literal["fixed", "reshuffled"]
# The minimum w, relative to the maximum. A step with w = 0 may have any noise. With
# this clamp, such a step has 1000 times the least noise, since s is w to the power 1/4.
_LEAST = 1e-12


def _columns(
    strategy: Toeplitz, s: jax.Array, num_steps: int, n_b: int, order: Order
) -> jax.Array:
    """Rescale the weights s of C = T diag(s) to sensitivity 1, f[num_steps].

    T is the Toeplitz strategy. The sensitivity is a bound on the distance by which one
    example moves C x. For the order "fixed", the input s has one weight for each step.
    Each weight is divided by the sensitivity for the examples at the step's position in
    the epoch. For "reshuffled", the input s has one weight for each epoch, and all
    weights are divided by the same number.
    """
    if order == "fixed":
        c = strategy.coefficients(num_steps)
        moved = _patterns.by_place(c, s, n_b)
        return s / jnp.sqrt(moved[jnp.arange(num_steps) % n_b])
    s = jnp.repeat(s, n_b)[:num_steps]
    return s / jnp.sqrt(_patterns.reshuffled_order(strategy, s, num_steps, n_b))


@functools.partial(jax.jit, static_argnames=("num_steps", "n_b", "order"))
def _in_closed_form(
    workload: Workload, *, num_steps: int, n_b: int, order: Order
) -> jax.Array:
    """The weights s for which C = diag(s) has the least error in a workload, f[T].

    The weights are scaled such that one example moves C x by at most 1. The noise of
    C = diag(s) is independent from step to step.
    """
    nothing = Toeplitz(jnp.zeros(0), jnp.zeros(0))
    # The squared error is Σ_t w_t f_t². So its derivative at f = 1 is 2 w, and the
    # factor 2 cancels in _columns.
    w = jax.grad(lambda f: square_error(nothing, f, workload, num_steps))(
        jnp.ones(num_steps)
    )
    if order == "reshuffled":
        # All steps of an epoch share one s. So their w add up.
        w = jnp.sum(jnp.pad(w, (0, -num_steps % n_b)).reshape(-1, n_b), axis=1)
    s = jnp.power(jnp.maximum(w, _LEAST * jnp.max(w)), 0.25)
    return _columns(nothing, s, num_steps, n_b, order)


@functools.partial(jax.jit, static_argnames=("num_steps", "n_b", "order"))
def _value_and_grad(
    log_s: jax.Array,
    strategy: Toeplitz,
    workload: Workload,
    *,
    num_steps: int,
    n_b: int,
    order: Order,
) -> tuple[jax.Array, jax.Array]:
    """The logarithm of the error of C = T diag(s), f[], and its gradient by log s.

    T is the Toeplitz strategy. The positive weights s are first rescaled to sensitivity
    1 by `_columns`. The error is the root mean square of the noise in the workload.
    """

    def value(log_s: jax.Array) -> jax.Array:
        s = _columns(strategy, jnp.exp(log_s), num_steps, n_b, order)
        return jnp.log(square_error(strategy, 1 / s, workload, num_steps)) / 2

    return jax.value_and_grad(value)(log_s)


def scheduled(
    strategy: Toeplitz,
    workload: Workload,
    *,
    num_steps: int,
    steps_per_epoch: int,
    order: Order = "fixed",
) -> Scaled:
    """A strategy with the best factor for the noise in each step, for a workload.

    If learning rates fall, later sums matter less to the result. Later steps may then
    have more noise, which allows less noise in earlier steps at the same privacy.

    Args:
      strategy: a Toeplitz strategy, such as a result of `optimize`.
      workload: the linear map that the optimizer applies to the gradient sums. Its
        numbers must be concrete, not traced.
      num_steps: T, static, at least 1.
      steps_per_epoch: n_b, static, at least 1.
      order: "fixed" or "reshuffled", as for `accounting.correlated.mu`. For
        "reshuffled" the factor is the same for all steps of an epoch.

    Returns:
      The strategy with factors f, where the mean of f⁻² is 1. For independent noise
      these factors are the best. For other strategies the factors are the result of a
      descent, and the error is at most that of the strategy without factors.

    Raises:
      ValueError: an argument is out of range; a number is traced.

    Reference: Lagrange's multiplier for independent noise. For other noise, L-BFGS-B
    (scipy) minimizes the error.

    Example:
      >>> import optax
      >>> from dpjax import strategies, workloads
      >>> falling = optax.cosine_decay_schedule(1.0, 1000)(np.arange(1000))
      >>> work = workloads.momentum(0.9, learning_rates=falling)
      >>> best = scheduled(strategies.independent(), work, num_steps=1000,
      ...                  steps_per_epoch=100)
      >>> print(best.factors[[0, 500, 900]].round(2))
      [0.74 1.05 4.91]
    """
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    n_b = validate.static_int("steps_per_epoch", steps_per_epoch, minimum=1)
    validate.one_of("order", order, get_args(Order))
    if not isinstance(check_strategy(strategy, num_steps), Toeplitz):
        raise ValueError(f"strategy must be a Toeplitz strategy; got {strategy!r}.")
    validate.concrete_numbers("strategy", strategy)
    check_workload(workload, num_steps, to_optimize=True)
    # A plain Toeplitz: the product and bound of `Optimized` hold without factors only.
    shape = Toeplitz(*strategy)
    given = {"num_steps": num_steps, "n_b": min(n_b, num_steps), "order": order}
    with scope():
        if not shape.num_vectors:
            s = _in_closed_form(workload, **given)
        else:
            size = num_steps if order == "fixed" else -(-num_steps // given["n_b"])
            log_s = minimize(_value_and_grad, np.zeros(size), shape, workload, **given)
            s = _columns(shape, jnp.exp(jnp.asarray(log_s)), **given)
        s = np.asarray(s)
    # Only ratios of factors matter, since the noise multiplier sets the noise's scale.
    return _making.scaled(shape, np.sqrt(np.mean(np.square(s))) / s)
