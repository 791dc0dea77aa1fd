"""A strategy as data, which what makes noise and what accounts for it both read.

It is a lower-triangular matrix C: a `Toeplitz` one; such a one with columns of other
lengths, `Scaled`; or that of the binary `Tree`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike
from dpjax._matrices.toeplitz import Toeplitz

# Of the noise of one step to that of another.
LEAST, MOST = 2.0**-20, 2.0**20


class Scaled(NamedTuple):
    """The noise of a Toeplitz strategy, in each step some factor times as much.

    That is C = T diag(1 / f), T being the strategy and f the factors.

    Attributes:
      strategy: T.
      factors: f, f[n], one a step.
    """

    strategy: Toeplitz
    factors: ArrayLike

    def matrix(self, n: int) -> jax.Array:
        """C over the first n steps, f[n, n]."""
        return self.strategy.matrix(n) / jnp.asarray(self.factors)[None, :n]

    def inverse_matrix(self, n: int) -> jax.Array:
        """C⁻¹ over the first n steps, f[n, n]."""
        rows = jnp.asarray(self.factors)[:n, None]
        return rows * self.strategy.inverse_matrix(n)


class Tree(NamedTuple):
    """The binary tree's noise, for momentum that fades by decay.

    Step t, from 1 on, completes the node of the steps t − 2^j < s <= t, j being the
    lowest bit of t. Row t of C holds β^{t−s} at its steps, and C⁻¹ has −β^{2^i} in
    column t − 2^i for all i < j: with z_t for the noise of a node, and N_t for that of
    the momentum, N_t = z_t + β^{2^j} N_{t−2^j}, and N_t − β N_{t−1} comes out.

    Attributes:
      decay: β, f[].
    """

    decay: ArrayLike

    def matrix(self, n: int) -> jax.Array:
        """C over n steps, f[n, n]."""
        ends, steps = np.ogrid[1 : n + 1, 1 : n + 1]
        within = (steps <= ends) & (steps > ends - (ends & -ends))
        gap = np.where(within, ends - steps, 0)
        return jnp.where(within, jnp.power(jnp.asarray(self.decay), gap), 0.0)

    def inverse_matrix(self, n: int) -> jax.Array:
        """C⁻¹ over n steps, f[n, n]."""
        ends, steps = np.ogrid[1 : n + 1, 1 : n + 1]
        gap = ends - steps
        follows = (gap > 0) & (gap == (steps & -steps))
        taken = jnp.power(jnp.asarray(self.decay), np.where(follows, gap, 0))
        return jnp.eye(n) - jnp.where(follows, taken, 0.0)


Strategy = Toeplitz | Scaled | Tree


def check_strategy(strategy: Strategy, num_steps: int) -> Strategy:
    """The strategy itself, if it is one for so many steps."""
    if isinstance(strategy, Scaled):
        _toeplitz(strategy.strategy, num_steps)
        if np.shape(strategy.factors)[-1:] != (num_steps,):
            raise ValueError(
                f"strategy must have a factor for each of num_steps, {num_steps}; got "
                f"shape {np.shape(strategy.factors)}."
            )
    elif isinstance(strategy, Tree):
        validate.decay("the strategy's decay", strategy.decay)
    else:
        _toeplitz(strategy, num_steps)
    return strategy


def _toeplitz(strategy: Toeplitz, num_steps: int) -> None:
    if not isinstance(strategy, Toeplitz) or not all(np.ndim(x) for x in strategy):
        raise ValueError(
            f"strategy must be one that dpjax.strategies makes; got {strategy!r}."
        )
    for x in map(validate.concrete, strategy):
        if x is not None and not np.issubdtype(x.dtype, np.floating):
            raise ValueError(f"strategy must have real coefficients; got {strategy!r}.")
    if strategy.num_vectors > num_steps:
        raise ValueError(
            f"strategy must have at most num_steps, {num_steps}, coefficients after "
            f"its leading ones; got {strategy.num_vectors}."
        )


def toeplitz_and_factors(strategy: Toeplitz | Scaled) -> tuple[Toeplitz, ArrayLike]:
    """T and f of either, f being one number where nothing is scaled."""
    if isinstance(strategy, Scaled):
        return strategy.strategy, strategy.factors
    return strategy, np.ones(1)
