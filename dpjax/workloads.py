"""Workloads: the linear maps that optimizers apply to gradient sums, and to noise.

A workload is a linear map of the gradient sums g_1, g_2, ... of all steps. For example,
the momentum is m_t = β m_{t−1} + (1 − β) g_t, and SGD subtracts the sum of all η_t m_t
from the initial parameters, for learning rates η_t.

A strategy is a matrix C whose correlated noise is C⁻¹z, for independent Gaussian noise
z. The error of a strategy for a workload is the root mean square, over steps, of the
workload's outputs if the inputs are C⁻¹z alone, for z of variance 1.
`accounting.correlated.error` computes this error, and `strategies.optimize` searches
for the strategy with the least error at the same privacy.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike
from dpjax._matrices.strategy import Workload as Workload


def prefix_sum(
    *, learning_rates: ArrayLike = 1.0, weight_decay: ArrayLike = 0.0
) -> Workload:
    """The workload of plain SGD: without weight decay, the sums Σ_{s<=t} η_s g_s.

    g_s is the gradient sum of step s.

    Args:
      learning_rates: η, one number f[] or one for each step f[T], non-negative.
      weight_decay: λ, f[], non-negative and at most 1 / η. A step with the learning
        rate η multiplies the parameters by 1 − ηλ before the update.

    Raises:
      ValueError: an argument is out of range. The range of a traced number is not
        checked.

    Example:
      >>> prefix_sum().keep
      array([1.])
    """
    return momentum_sum(0.0, learning_rates=learning_rates, weight_decay=weight_decay)


def momentum(decay: ArrayLike, *, learning_rates: ArrayLike = 1.0) -> Workload:
    """The workload whose output is each step's update of SGD with momentum.

    The update of step t is η_t (1 − β) Σ_{s<=t} β^{t−s} g_s for the gradient sums g_s.

    Args:
      decay: the momentum coefficient β, f[], in [0, 1).
      learning_rates: η, one number f[] or one for each step f[T], non-negative.

    Raises:
      ValueError: an argument is out of range. The range of a traced number is not
        checked.

    Example:
      >>> momentum(0.75).denominator, momentum(0.75).rates
      (array([-0.75]), array([0.25]))
    """
    beta, rates = _decay(decay), _vector("learning_rates", learning_rates)
    validate.nonnegative("learning_rates", rates)
    return Workload(np.zeros(0), -beta, rates * (1 - beta), np.zeros(1))


def momentum_sum(
    decay: ArrayLike, *, learning_rates: ArrayLike = 1.0, weight_decay: ArrayLike = 0.0
) -> Workload:
    """The workload of SGD with momentum.

    Without weight decay, the output of step t is Σ_{s<=t} η_s m_s. The momentum is
    m_t = β m_{t−1} + (1 − β) g_t, where g_t is the gradient sum of step t.

    Args:
      decay: the momentum coefficient β, f[], in [0, 1).
      learning_rates: η, one number f[] or one for each step f[T], non-negative.
      weight_decay: λ, f[], non-negative and at most 1 / η. A step with the learning
        rate η multiplies the parameters by 1 − ηλ before the update.

    Raises:
      ValueError: an argument is out of range. The range of a traced number is not
        checked.

    Example:
      >>> momentum_sum(0.75, learning_rates=2.0, weight_decay=0.125).keep
      array([0.75])
    """
    usual = momentum(decay, learning_rates=learning_rates)
    validate.scalar("weight_decay", weight_decay)
    validate.nonnegative("weight_decay", weight_decay)
    # The share of the parameters that remains after a step.
    keep = 1 - weight_decay * _vector("learning_rates", learning_rates)
    validate.nonnegative("1 - weight_decay * learning_rates", keep)
    return usual._replace(keep=keep)


def nesterov(
    decay: ArrayLike, *, learning_rates: ArrayLike = 1.0, weight_decay: ArrayLike = 0.0
) -> Workload:
    """The workload of SGD with Nesterov's momentum.

    Without weight decay, the output of step t is Σ_{s<=t} η_s (β m_s + (1 − β) g_s).
    The momentum is m_t = β m_{t−1} + (1 − β) g_t, where g_t is the gradient sum of
    step t.

    Args:
      decay: the momentum coefficient β, f[], in [0, 1).
      learning_rates: η, one number f[] or one for each step f[T], non-negative.
      weight_decay: λ, f[], non-negative and at most 1 / η. A step with the learning
        rate η multiplies the parameters by 1 − ηλ before the update.

    Raises:
      ValueError: an argument is out of range. The range of a traced number is not
        checked.

    Example:
      >>> nesterov(0.5).rates
      array([0.75])
    """
    usual = momentum_sum(
        decay, learning_rates=learning_rates, weight_decay=weight_decay
    )
    # β / (1 − βL) + 1 = (1 + β) (1 − β / (1 + β) L) / (1 − βL).
    beta = _decay(decay)
    return usual._replace(numerator=-beta / (1 + beta), rates=usual.rates * (1 + beta))


def toeplitz(coefficients: ArrayLike) -> Workload:
    """The workload of a linear time-invariant filter of gradient sums: Σ_j a_j g_{t−j}.

    Args:
      coefficients: a_0, a_1, ..., f[k] with k >= 1, finite, with a_0 positive.

    Raises:
      ValueError: an argument is out of range. The range of a traced number is not
        checked.

    Example:
      >>> toeplitz([2.0, 1.0]).numerator
      array([0.5])
    """
    concrete = validate.real_vector("coefficients", coefficients)
    a = jnp.asarray(coefficients) if concrete is None else concrete
    if a.size == 0 or (concrete is not None and not np.all(np.isfinite(concrete))):
        raise ValueError(f"coefficients must be finite numbers; got {coefficients!r}.")
    # A workload stores its filter with a leading 1, so a_0 becomes the rate.
    validate.positive("coefficients[0]", a[0])
    return Workload(a[1:] / a[0], np.zeros(0), a[:1], np.zeros(1))


def _decay(decay: ArrayLike) -> np.ndarray | jax.Array:
    validate.scalar("decay", decay)
    validate.half_open_unit("decay", decay)
    return _vector("decay", decay)


def _vector(name: str, x: ArrayLike) -> np.ndarray | jax.Array:
    """Convert a number or vector to a vector, in float64 unless JAX traces it."""
    # A scalar becomes a vector of size 1, which a workload broadcasts over all steps.
    row = jnp.asarray(x)[None] if isinstance(x, jax.Array) and not x.ndim else x
    row = [x] if isinstance(x, int | float | np.number) else row
    concrete = validate.real_vector(name, row)
    return jnp.asarray(row) if concrete is None else concrete
