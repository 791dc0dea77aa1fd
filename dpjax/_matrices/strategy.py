"""Strategies and workloads as data, for both training and the accountants.

A strategy is the lower-triangular matrix C of correlated noise C⁻¹z, where z is
independent Gaussian noise. C is a `Toeplitz` matrix, a `Scaled` matrix (Toeplitz with
rescaled columns), or the matrix of the binary `Tree`. A workload is the linear map that
an optimizer applies to the gradient sums of all steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike
from dpjax._matrices.toeplitz import Toeplitz


class Workload(NamedTuple):
    """The linear map that an optimizer applies to the gradient sums of all steps.

    The output of step t is x_t = keep_t x_{t−1} + rates_t h_t. Here h = N(L) / D(L) g
    is a filter of the gradient sums g_t, with L the shift by one step.

    Attributes:
      numerator: the coefficients of N after its leading 1, f[k].
      denominator: the coefficients of D after its leading 1, f[m].
      rates: rates_t, f[T], or f[1] for all steps.
      keep: keep_t, f[T], or f[1] for all steps. With keep = 0, the output is rates_t
        h_t. With keep = 1, the output is the running sum of rates_t h_t.
    """

    numerator: ArrayLike
    denominator: ArrayLike
    rates: ArrayLike
    keep: ArrayLike


def check_workload(
    workload: Workload, num_steps: int, *, to_optimize: bool = False
) -> Workload:
    """Return the workload; raise ValueError if it is invalid for num_steps steps.

    With `to_optimize`, the workload is also invalid if JAX traces its numbers, or if
    all of its rates, which are the learning rates of the steps, are 0.
    """
    if not isinstance(workload, Workload) or not all(np.ndim(x) for x in workload):
        raise ValueError(
            f"workload must be a workload of dpjax.workloads; got {workload!r}."
        )
    for name in ("rates", "keep"):
        size = np.shape(getattr(workload, name))[-1]
        if size not in (1, num_steps):
            raise ValueError(
                f"the workload's {name} must be one number, or one number for each of "
                f"num_steps, {num_steps}; got {size} numbers."
            )
    if to_optimize:
        if any(validate.concrete(x) is None for x in workload):
            raise ValueError(
                "workload must have concrete numbers, not traced values; got "
                f"{workload!r}."
            )
        if not np.any(np.asarray(workload.rates)):
            raise ValueError(
                f"workload must have at least one rate above 0; got {workload!r}."
            )
    return workload


# The range of the factors by which `Scaled` multiplies the noise of a step.
LEAST, MOST = 2.0**-20, 2.0**20


class Scaled(NamedTuple):
    """A strategy that multiplies a Toeplitz strategy's noise by a factor in each step.

    The matrix is C = T diag(1 / factors), where T is the Toeplitz strategy.

    Attributes:
      strategy: T.
      factors: the factor of each step, f[n].
    """

    strategy: Toeplitz
    factors: ArrayLike

    def matrix(self, n: int) -> jax.Array:
        """The first n rows and columns of the matrix C, f[n, n]."""
        return self.strategy.matrix(n) / jnp.asarray(self.factors)[None, :n]


class Tree(NamedTuple):
    """The strategy C of the binary tree mechanism, for momentum with decay β.

    The noise is C⁻¹z with independent Gaussian z_t. Steps count from 1. Each node of
    the binary tree covers a range of steps. Let j be the index of the lowest set bit of
    t. Then the largest node that ends with step t covers the steps s with
    t − 2^j < s <= t. Entry (t, s) of C is β^{t−s} for these steps s, and 0 for all
    others. Row t of C⁻¹ has 1 in column t, and −β^{2^i} in column t − 2^i for each
    i < j. Let N_t be the sum of the noise of all steps s <= t with the weights β^{t−s},
    which is the noise in the momentum. Then N_t = z_t + β^{2^j} N_{t−2^j}, and the
    noise of step t is N_t − β N_{t−1}.

    Attributes:
      decay: β, f[].
    """

    decay: ArrayLike

    def matrix(self, n: int) -> jax.Array:
        """The first n rows and columns of the matrix C, f[n, n]."""
        ends, steps = np.ogrid[1 : n + 1, 1 : n + 1]
        # t & −t is the lowest set bit of t, 2^j: the number of steps of t's node.
        within = (steps <= ends) & (steps > ends - (ends & -ends))
        # Exponents outside of the node are set to 0, since β = 0 has no finite negative
        # powers, and their gradient would be NaN.
        gap = np.where(within, ends - steps, 0)
        return jnp.where(within, jnp.power(jnp.asarray(self.decay), gap), 0.0)


Strategy = Toeplitz | Scaled | Tree


def check_strategy(strategy: Strategy, num_steps: int) -> Strategy:
    """Return the strategy; raise ValueError if it is invalid for num_steps steps."""
    if isinstance(strategy, Tree):
        validate.half_open_unit("the strategy's decay", strategy.decay)
        return strategy
    toeplitz, factors = toeplitz_and_factors(strategy)
    if not isinstance(toeplitz, Toeplitz) or not all(np.ndim(x) for x in toeplitz):
        raise ValueError(
            f"strategy must be a strategy of dpjax.strategies; got {toeplitz!r}."
        )
    for x in map(validate.concrete, toeplitz):
        if x is not None and not np.issubdtype(x.dtype, np.floating):
            raise ValueError(f"strategy must have real coefficients; got {toeplitz!r}.")
    if toeplitz.num_vectors > num_steps:
        raise ValueError(
            f"strategy must have at most num_steps, {num_steps}, coefficients after "
            "the leading coefficient 1 of each polynomial; got "
            f"{toeplitz.num_vectors}."
        )
    if isinstance(strategy, Scaled) and np.shape(factors)[-1:] != (num_steps,):
        raise ValueError(
            f"strategy must have one factor for each of num_steps, {num_steps}; "
            f"got factors of shape {np.shape(factors)}."
        )
    return strategy


def toeplitz_and_factors(strategy: Toeplitz | Scaled) -> tuple[Toeplitz, ArrayLike]:
    """The Toeplitz strategy T and the noise factors of C = T diag(1 / factors).

    For a strategy that is not scaled, the factors are a single 1.
    """
    if isinstance(strategy, Scaled):
        return strategy.strategy, strategy.factors
    return strategy, np.ones(1)
