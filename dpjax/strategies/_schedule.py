"""How much noise each step should have, where steps do not matter equally.

With factors f_t = 1 / s_t on the noise of a Toeplitz matrix T, C = T diag(s). The error
is ‖A diag(f) T⁻¹‖_F, and an example at the steps π moves C x by the root of sᵀG_π s, G
the entries of |TᵀT| in π × π. At the best s no place in the epoch is moved less than
another, so s is divided by that root for its own place, and what is left is to make the
error small.

For independent noise the error is Σ_t w_t / s_t², w_t the square of A's column t, and
an example moves Σ_{t∈π} s_t². By Lagrange's multiplier s_t⁴ is proportional to w_t.
"""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import scope
from dpjax._matrices.strategy import Scaled, check_strategy
from dpjax._matrices.toeplitz import Toeplitz
from dpjax._matrices.workload import Workload, check_workload
from dpjax.accounting.correlated import _patterns
from dpjax.accounting.correlated._error import square_error
from dpjax.strategies import _making
from dpjax.strategies._descent import minimize

Order = Literal["fixed", "reshuffled"]
# Of the largest w: a step that moves nothing may have any noise, and gets 1000 times.
_LEAST = 1e-12


def _columns(
    strategy: Toeplitz, s: jax.Array, num_steps: int, n_b: int, order: Order
) -> jax.Array:
    """s, f[T] or f[E] for all steps of an epoch, at the sensitivity 1, f[T]."""
    if order == "fixed":
        c = strategy.coefficients(num_steps)
        moved = _patterns.by_place(c, s, n_b)
        return s / jnp.sqrt(moved[jnp.arange(num_steps) % n_b])
    s = jnp.repeat(s, n_b)[:num_steps]
    return s / jnp.sqrt(_patterns.reshuffled(strategy, s, num_steps, n_b))


@functools.partial(jax.jit, static_argnames=("num_steps", "n_b", "order"))
def _in_closed_form(
    workload: Workload, *, num_steps: int, n_b: int, order: Order
) -> jax.Array:
    """The best columns for independent noise, f[T]."""
    nothing = Toeplitz(jnp.zeros(0), jnp.zeros(0))
    # Σ_t w_t f_t², and so its derivative at f = 1 is 2 w.
    w = jax.grad(lambda f: square_error(nothing, f, workload, num_steps))(
        jnp.ones(num_steps)
    )
    if order == "reshuffled":
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
    """The logarithm of the error at sensitivity 1, f[], and its derivative."""

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
    """The same noise, in each step as much of it as is best for a workload.

    Where learning rates fall, later steps may have more noise, so that earlier ones
    have less of it at the same privacy.

    Args:
      strategy: a Toeplitz strategy, as `optimize` finds it.
      workload: what the sums are used for, of known numbers.
      num_steps: T, static, at least 1.
      steps_per_epoch: n_b, static, at least 1.
      order: "fixed" or "reshuffled", as for `accounting.correlated.mu`. For the latter
        the noise is the same throughout an epoch.

    Returns:
      The strategy with factors that have 1 for the root of the mean of their f⁻². For
      independent noise no factors are better; for others they are found by descent, and
      no worse than none.

    Raises:
      ValueError: an argument is out of range; a number is traced.

    Reference: Lagrange's multiplier for independent noise, L-BFGS-B (scipy) for others,
    through μ and error.

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
    check_workload(workload, num_steps)
    if any(validate.concrete(x) is None for x in (*strategy, *workload)):
        raise ValueError(
            "strategy and workload must be known, not traced; got "
            f"{strategy!r} and {workload!r}."
        )
    if not np.any(np.asarray(workload.rates)):
        raise ValueError(f"workload must have a rate above 0; got {workload!r}.")
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
    return _making.scaled(shape, np.sqrt(np.mean(np.square(s))) / s)
