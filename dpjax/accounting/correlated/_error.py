"""The error that a strategy's noise leaves in what an optimizer steps along."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _validate
from dpjax._float64 import float64
from dpjax._toeplitz import Toeplitz, checked, series, times
from dpjax._workload import Workload, fits


def square_error(strategy: Toeplitz, workload: Workload, num_steps: int) -> jax.Array:
    """‖A C⁻¹‖_F² / T."""
    # h = N_A / D_A C⁻¹ z.
    numerator = times(workload.numerator, strategy.denominator)
    denominator = times(workload.denominator, strategy.numerator)
    rates, keep = (jnp.asarray(x) for x in (workload.rates, workload.keep))
    if rates.size == keep.size == 1:
        w = series(numerator, times(denominator, -keep), num_steps)
        return jnp.square(rates[0]) * (_rows(num_steps) @ jnp.square(w))
    rates, keep = (jnp.broadcast_to(x, (num_steps,)) for x in (rates, keep))
    return _varying(numerator, denominator, rates, keep) / num_steps


def _rows(num_steps: int) -> np.ndarray:
    """In how many of the outputs each coefficient is, over T."""
    return np.arange(num_steps, 0.0, -1.0) / num_steps


def _varying(
    numerator: jax.Array, denominator: jax.Array, rates: jax.Array, keep: jax.Array
) -> jax.Array:
    """Σ_t Var x_t for x_t = k_t x_{t−1} + r_t h_t, by the covariance of the states.

    The filter is h_t = z_t + e₀ᵀs_t, s_{t+1} = F s_t + g z_t: its transposed direct
    form II.
    """
    order = max(numerator.size, denominator.size, 1)
    n, d = (jnp.pad(x, (0, order - x.size)) for x in (numerator, denominator))
    matrix, drive = jnp.eye(order, k=1).at[:, 0].add(-d), n - d

    def step(
        carry: tuple[jax.Array, ...], now: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        inner, cross, outer = carry  # Cov(s_t), Cov(s_t, x_{t−1}), Var x_{t−1}
        rate, k = now
        outer = (
            k * k * outer + rate * rate * (1 + inner[0, 0]) + 2 * k * rate * cross[0]
        )
        cross = matrix @ (k * cross + rate * inner[:, 0]) + rate * drive
        inner = matrix @ inner @ matrix.T + jnp.outer(drive, drive)
        return (inner, cross, outer), outer

    start = jnp.zeros((order, order)), jnp.zeros(order), jnp.zeros(())
    _, variances = jax.lax.scan(step, start, (rates, keep))
    return jnp.sum(variances)


@float64("nearest", static=("num_steps",), vectors=(0, 1), elementwise=True)
def _error64(strategy: Toeplitz, workload: Workload, *, num_steps: int) -> jax.Array:
    return jnp.sqrt(square_error(strategy, workload, num_steps))


def error(strategy: Toeplitz, workload: Workload, num_steps: int) -> jax.Array:
    """The root mean square of the noise in a workload, for white noise of variance 1.

    That is ‖A C⁻¹‖_F / √T per coordinate, over all T steps. At noise multiplier σ and
    clip norm C it is σC times as much. To compare strategies at the same privacy take
    it times `mu` at noise multiplier 1.

    Args:
      strategy: what makes the noise, its coefficients f[*b, k].
      workload: what the sums are used for; rates and keep for one step or for T.
      num_steps: T, static, at least 1.

    Returns:
      f[*b].

    Raises:
      ValueError: num_steps is out of range or not that of the workload; the strategy
        is none or has more coefficients than num_steps.

    Reference: Denisov et al. (2022), https://arxiv.org/abs/2202.08312, where A C⁻¹ is
    the decoder B.

    Example:
      >>> from dpjax import strategies, workloads
      >>> for strategy in strategies.independent(), strategies.geometric(0.5):
      ...     print(f"{error(strategy, workloads.momentum(0.9), 1000):.4f}")
      0.2289
      0.1356
    """
    num_steps = _validate.static_int("num_steps", num_steps, minimum=1)
    strategy, workload = checked(strategy, num_steps), fits(workload, num_steps)
    return _error64(strategy, workload, num_steps=num_steps)
