"""Strategies as plain Python numbers, which can be compared, hashed and serialized.

A strategy is the lower-triangular matrix C of correlated noise C⁻¹z, where z is
independent Gaussian noise.
"""

from typing import NamedTuple

import numpy as np

from dpjax._core.typing import ArrayLike
from dpjax._matrices import streaming as _correlating
from dpjax._matrices.strategy import (
    Scaled,
    Strategy,
    Tree,
    check_strategy,
    toeplitz_and_factors,
)
from dpjax._matrices.toeplitz import Toeplitz


class StrategySpec(NamedTuple):
    """The numbers that determine the matrix C of correlated noise C⁻¹z.

    C is the matrix of the binary tree mechanism (`Tree`), or a Toeplitz matrix with
    rescaled columns: C = (1 + Σ n_k L^k) / (1 + Σ d_k L^k) diag(1 / f). Here L is the
    shift by one step.

    Attributes:
      numerator: n_1, n_2, ...
      denominator: d_1, d_2, ...
      factors: f, one number for each step; () if all factors are 1.
      tree_decay: the decay β of the momentum for which `Tree` is made; None if C is a
        Toeplitz matrix with rescaled columns.
    """

    numerator: tuple[float, ...] = ()
    denominator: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()
    tree_decay: float | None = None

    def strategy(self, num_steps: int) -> Strategy:
        """The strategy that these numbers describe, for a run of num_steps steps.

        The numbers of later steps are left out.
        """
        if self.tree_decay is not None:
            return Tree(np.float64(self.tree_decay))
        toeplitz = self.toeplitz(num_steps)
        factors = np.array(self.factors[:num_steps], np.float64)
        return Scaled(toeplitz, factors) if factors.size else toeplitz

    def toeplitz(self, num_steps: int) -> Toeplitz:
        """The Toeplitz matrix T of C = T diag(1 / f), for a run of num_steps steps.

        The result has at most num_steps coefficients n_k and as many d_k. Further
        coefficients do not change the first num_steps rows of C.
        """
        rows = self.numerator, self.denominator
        return Toeplitz(*(np.array(x[:num_steps], np.float64) for x in rows))

    def __str__(self) -> str:
        """The matrix C as a phrase, with polynomials in the shift L by one step."""
        if self.tree_decay is not None:
            return f"the matrix of the binary tree for momentum of {self.tree_decay}"
        top, bottom = (
            " ".join(["1", *(f"{x:+.9g} L^{k}" for k, x in enumerate(row, 1))])
            for row in self[:2]
        )
        by_step = ", with its columns divided by a factor for each step" * bool(
            self.factors
        )
        return f"({top}) / ({bottom}), where L is the shift by one step{by_step}"


def spec_of(strategy: Strategy, num_steps: int) -> StrategySpec:
    """The plain numbers of a strategy, for a run of num_steps steps.

    Raises:
      ValueError: a number is traced, float32 cannot represent a number exactly, or the
        strategy is invalid for num_steps steps.
    """
    # The noise stream is not used. Building the stream makes the checks that training
    # makes.
    _correlating.buffered_stream(check_strategy(strategy, num_steps), num_steps)
    # The numbers are exact in float32, so they are exact as Python floats, too.
    if isinstance(strategy, Tree):
        return StrategySpec(tree_decay=float(np.asarray(strategy.decay)))
    (numerator, denominator), factors = toeplitz_and_factors(strategy)
    return StrategySpec(
        _numbers(numerator),
        _numbers(denominator),
        _numbers(factors) if isinstance(strategy, Scaled) else (),
    )


def _numbers(x: ArrayLike) -> tuple[float, ...]:
    return tuple(np.asarray(x, np.float64).tolist())
