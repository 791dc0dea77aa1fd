"""The error of an optimizer's outputs, for noise that a strategy matrix correlates.

A workload describes how the optimizer computes the outputs from the noisy sums.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import float64
from dpjax._core.typing import ArrayLike
from dpjax._matrices import strategy as matrices
from dpjax._matrices.strategy import Strategy, Toeplitz, Tree, Workload, series, times


def square_error(
    strategy: Toeplitz, factors: jax.Array, workload: Workload, num_steps: int
) -> jax.Array:
    """The mean squared error ‖A diag(s) C⁻¹‖_F² / T of an optimizer's outputs.

    The workload's matrix A maps the sums of T = num_steps steps to the outputs. C is
    the Toeplitz matrix of the strategy, and s are the `factors`, f[T] or f[1]. The
    noise of the sums is diag(s) C⁻¹z, for white noise z of variance 1.
    """
    rates, keep = (jnp.asarray(x) for x in (workload.rates, workload.keep))
    if rates.size == keep.size == factors.size == 1:
        # With constant rates, A C⁻¹ is a Toeplitz filter: h = N_A / D_A C⁻¹ z, followed
        # by x_t = k x_{t−1} + h_t, which adds a factor to the denominator.
        numerator = times(workload.numerator, strategy.denominator)
        denominator = times(workload.denominator, strategy.numerator)
        w = series(numerator, times(denominator, -keep), num_steps)
        # The fraction of the T outputs that each coefficient of the filter affects.
        affected = np.arange(num_steps, 0.0, -1.0) / num_steps
        return jnp.square(rates[0] * factors[0]) * (affected @ jnp.square(w))
    return jnp.sum(variances(strategy, factors, workload, num_steps)) / num_steps


def variances(
    strategy: Toeplitz, factors: jax.Array, workload: Workload, num_steps: int
) -> jax.Array:
    """The variance of the noise in each output x_t of an optimizer, f[T].

    The strategy is a filter C = N_C / D_C, with a numerator and a denominator. The
    correlated noise is y = (D_C / N_C) z, with z white noise of variance 1. The noise
    of the sum at step t is g_t = f_t y_t, where f_t is an entry of `factors`. The
    workload computes h = (N_A / D_A) g with a second filter, and from h the outputs
    x_t = k_t x_{t−1} + r_t h_t, where k_t and r_t are entries of the workload's `keep`
    and `rates`. The function computes the covariance of the filters' states by a
    recursion.
    """
    matrix_c, gain_c = _state_space(strategy.denominator, strategy.numerator)
    matrix_a, gain_a = _state_space(workload.numerator, workload.denominator)
    p, q = gain_c.size, gain_a.size
    size = p + q + 1
    zeros = jnp.zeros((size, size))
    constant = zeros.at[:p, :p].set(matrix_c).at[p:-1, p:-1].set(matrix_a)

    def step(
        covariance: jax.Array, entries: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        factor, rate, k = entries
        # The state is (a, b, x), with the state a of the strategy's filter and the
        # state b of the workload's filter. The input of b is f_t y_t with y_t = z_t +
        # a₀, and the input of x is h_t.
        inputs = jnp.concatenate([jnp.zeros(p), gain_a, rate[None]])
        matrix = constant.at[:, 0].add(factor * inputs)
        matrix = matrix.at[-1, p].add(rate).at[-1, -1].set(k)
        gain = factor * inputs + jnp.concatenate([gain_c, jnp.zeros(q + 1)])
        covariance = matrix @ covariance @ matrix.T + jnp.outer(gain, gain)
        return covariance, covariance[-1, -1]

    sequences = factors, workload.rates, workload.keep
    by_step = tuple(jnp.broadcast_to(x, (num_steps,)) for x in sequences)
    return jax.lax.scan(step, zeros, by_step)[1]


def _state_space(
    numerator: ArrayLike, denominator: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """The matrix F and the vector g of the state-space form of a filter N / D.

    N and D are polynomials with the first coefficient 1. The arguments hold their other
    coefficients. The filter maps u to y by y_t = u_t + e₀ᵀs_t and
    s_{t+1} = F s_t + g u_t, in transposed direct form II. The state s has at least one
    entry, even for N = D = 1.
    """
    order = max(np.shape(numerator)[-1], np.shape(denominator)[-1], 1)
    n, d = (
        jnp.pad(jnp.asarray(x), (0, order - np.shape(x)[-1]))
        for x in (numerator, denominator)
    )
    return jnp.eye(order, k=1).at[:, 0].add(-d), n - d


@float64("nearest", static=("num_steps",), vectors=(1,), elementwise=True)
def _tree_error64(decay: jax.Array, workload: Workload, *, num_steps: int) -> jax.Array:
    """The root mean square error ‖A C⁻¹‖_F / √T of an optimizer's outputs, f[].

    A is the matrix of the workload, C⁻¹ is the matrix by which a binary tree correlates
    noise, and T is num_steps. The squared error is a sum over the levels of the tree.
    Only the left child of each node has noise. A left child of level j covers 2^j
    steps. Its noise is added at the last of these steps, t. At step t + 2^j, the same
    noise times β^{2^j} is subtracted, where β is the decay.
    """
    # The coefficients of the workload without its rate, a Toeplitz filter.
    bottom = times(workload.denominator, -jnp.asarray(workload.keep))
    a = series(workload.numerator, bottom, num_steps)
    # Σ_{u<m} a_u², for m = 0, …, T.
    squares = jnp.append(0.0, jnp.cumsum(jnp.square(a)))
    total = jnp.zeros(())
    for level in range(num_steps.bit_length()):
        size = 1 << level
        # The number of outputs from each node's last step on. The total variance that a
        # node adds to these outputs is Σ_u (a_u − β^{2^j} a_{u − 2^j})², a sum with one
        # term for each output.
        left = num_steps + 1 - np.arange(size, num_steps + 1, 2 * size)
        shifted = jnp.append(jnp.zeros(size), a)[:num_steps]
        products = jnp.append(0.0, jnp.cumsum(a * shifted))
        # The square is expanded, so that prefix sums give the sums for all nodes.
        taken = jnp.power(decay, size)
        total += jnp.sum(
            squares[left]
            + jnp.square(taken) * squares[np.maximum(left - size, 0)]
            - 2 * taken * products[left]
        )
    return jnp.sqrt(jnp.square(jnp.asarray(workload.rates)[0]) * total / num_steps)


@float64("nearest", static=("num_steps",), vectors=(0, 1, 2), elementwise=True)
def _error64(
    strategy: Toeplitz, factors: jax.Array, workload: Workload, *, num_steps: int
) -> jax.Array:
    return jnp.sqrt(square_error(strategy, factors, workload, num_steps))


def error(strategy: Strategy, workload: Workload, num_steps: int) -> jax.Array:
    """The root mean square noise in a workload's outputs, for noise z of variance 1.

    The error is ‖A C⁻¹‖_F / √T per coordinate, over all T steps. For a noise multiplier
    σ and a clip norm c, multiply the error by σ c. To compare strategies at the same
    privacy, multiply the error by the strategy's μ at noise multiplier 1
    (`correlated.mu`).

    Args:
      strategy: the matrix C, given by its coefficients f[*b, k]. The correlated noise
        is C⁻¹z.
      workload: the map A from the gradient sums of all steps to the optimizer's
        outputs. The `rates` and the `keep` of the workload have length 1 or T.
      num_steps: T, static, at least 1.

    Returns:
      The root mean square error per coordinate, f[*b].

    Raises:
      ValueError: num_steps is out of range; `rates` or `keep` has a length other than 1
        and T; `workload` is not a workload; `strategy` is not a strategy, or has more
        than num_steps coefficients after the leading 1; `strategy` is a `Scaled` and
        does not have exactly num_steps factors; `strategy` is a tree, and `rates` or
        `keep` has more than one value.

    Reference: Denisov et al. (2022), https://arxiv.org/abs/2202.08312, where A C⁻¹ is
    the decoder B.

    Example:
      >>> from dpjax import strategies, workloads
      >>> for strategy in strategies.independent(), strategies.geometric(0.5):
      ...     print(f"{error(strategy, workloads.momentum(0.9), 1000):.4f}")
      0.2289
      0.1356
    """
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    strategy = matrices.check_strategy(strategy, num_steps)
    workload = matrices.check_workload(workload, num_steps)
    if isinstance(strategy, Tree):
        if any(np.shape(x)[-1] > 1 for x in (workload.rates, workload.keep)):
            raise ValueError(
                "workload must have one value of rates and one value of keep for the "
                f"error of a tree; got {workload!r}."
            )
        return _tree_error64(strategy.decay, workload, num_steps=num_steps)
    shape, factors = matrices.toeplitz_and_factors(strategy)
    return _error64(shape, factors, workload, num_steps=num_steps)
