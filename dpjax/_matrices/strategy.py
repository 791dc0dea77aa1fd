"""Strategies and workloads as data, for both training and the accountants.

A strategy is the lower-triangular matrix C of correlated noise C⁻¹z, where z is
independent Gaussian noise. C is a `Toeplitz` matrix, a `Scaled` matrix (Toeplitz with
rescaled columns), or the matrix of the binary `Tree`. A workload is the linear map that
an optimizer applies to the gradient sums of all steps. A `StrategySpec` is a strategy
as plain Python numbers, which can be compared, hashed and serialized.

Training uses float32. If training rounded the numbers of a strategy, training and the
accountants would use different numbers. So each of these numbers must be a float32.
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


def float32_polynomials(strategy: Toeplitz) -> tuple[np.ndarray, np.ndarray]:
    """The numerator and the denominator of a strategy, as concrete arrays f[k].

    Raises:
      ValueError: a coefficient is traced, not finite, or not exact in float32.
    """
    known: list[np.ndarray] = []
    for name, given in zip(Toeplitz._fields, strategy, strict=True):
        x = _concrete(name, given, 1)
        _check_float32(name, x, "finite numbers", np.isfinite(x))
        known.append(x)
    numerator, denominator = known
    return numerator, denominator


def float32_factors(strategy: Scaled) -> np.ndarray:
    """The factors of a scaled strategy, f32[T].

    Raises:
      ValueError: the factors are traced, out of range, or not exact in float32.
    """
    f = _concrete("factors", strategy.factors, 1)
    _check_float32("factors", f, "from 2**-20 to 2**20", (f >= LEAST) & (f <= MOST))
    return f.astype(np.float32)


def float32_decay(decay: ArrayLike) -> np.ndarray:
    """The decay of a binary tree's strategy, as a concrete number f[].

    Raises:
      ValueError: the decay is traced, not in [0, 1), or not exact in float32.
    """
    beta = _concrete("decay", decay, 0)
    _check_float32("decay", beta, "in [0, 1), a number", (beta >= 0) & (beta < 1))
    return beta


def _concrete(name: str, given: object, ndim: int) -> np.ndarray:
    x = validate.concrete(given)
    if x is None or x.ndim != ndim:
        kind = "vector" if ndim else "number"
        raise ValueError(
            f"the strategy's {name} must be a concrete {kind}; got {given!r}."
        )
    return x


def _check_float32(name: str, x: np.ndarray, rule: str, good: np.ndarray) -> None:
    if not np.all(good & (x.astype(np.float32) == x)):
        raise ValueError(
            f"the strategy's {name} must be {rule} that float32 represents exactly, "
            f"as functions of dpjax.strategies return them; got {x!r}."
        )


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
    check_strategy(strategy, num_steps)
    # The numbers are exact in float32, so they are exact as Python floats, too.
    if isinstance(strategy, Tree):
        return StrategySpec(tree_decay=float(float32_decay(strategy.decay)))
    factors = float32_factors(strategy) if isinstance(strategy, Scaled) else ()
    rows = *float32_polynomials(toeplitz_and_factors(strategy)[0]), factors
    numerator, denominator, factors = (
        tuple(np.asarray(x, np.float64).tolist()) for x in rows
    )
    return StrategySpec(numerator, denominator, factors)
