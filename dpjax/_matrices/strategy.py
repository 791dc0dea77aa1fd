"""Strategies and workloads as data, for both training and the accountants.

A strategy is the lower-triangular matrix C of correlated noise C⁻¹z, where z is
independent Gaussian noise. C is a `Toeplitz` matrix, a `Scaled` matrix (Toeplitz with
rescaled columns), or the matrix of the binary `Tree`. A workload is the linear map that
an optimizer applies to the gradient sums of all steps. A `StrategySpec` is a strategy
as plain Python numbers, which can be compared, hashed and serialized.

A Toeplitz matrix is N(L) / D(L), a ratio of two polynomials that begin with 1, with L
the shift by one step. The inverse is D(L) / N(L), and a product of matrices multiplies
their numerators and their denominators. A recursion applies the matrix to vectors that
arrive one step after the other. The recursion stores as many vectors as the longer
polynomial has coefficients after its leading 1.

Training uses float32. If training rounded the numbers of a strategy, training and the
accountants would use different numbers. So each number must be exact in float32.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike

# Up to this number of coefficients, operations on numbers are faster than on arrays.
_SHORT = 4


class Toeplitz(NamedTuple):
    """The strategy C = (1 + Σ n_k L^k) / (1 + Σ d_k L^k), L the shift by one step.

    C is the matrix of correlated noise C⁻¹z, where z is independent Gaussian noise.
    This class is a pytree, and only holds the coefficients. `dpjax.correlated_noise`
    and the accountants use them.

    Attributes:
      numerator: n_1, ..., n_p, f[p].
      denominator: d_1, ..., d_q, f[q].
    """

    numerator: ArrayLike
    denominator: ArrayLike

    def coefficients(self, n: int) -> jax.Array:
        """The first n coefficients of C, f[n], which begin with c_0 = 1.

        Entry (t, s) of C is c_{t−s} for s <= t.
        """
        return series(self.numerator, self.denominator, n)

    def inverse_coefficients(self, n: int) -> jax.Array:
        """The first n coefficients of C⁻¹, f[n], which begin with 1.

        Let b be these coefficients, and let z_t be independent Gaussian vectors. Then
        the correlated noise of step t is Σ_j b_j z_{t−j}.
        """
        return series(self.denominator, self.numerator, n)

    def matrix(self, n: int) -> jax.Array:
        """The first n rows and columns of the matrix C, f[n, n]."""
        return lower(self.coefficients(n))

    @property
    def num_vectors(self) -> int:
        """The number of vectors that a recursion for the noise C⁻¹z stores.

        Each vector has the size of the parameters.
        """
        return max(np.shape(x)[-1] for x in self)


def lower(c: jax.Array) -> jax.Array:
    """The lower-triangular Toeplitz matrix f[n, n] with the coefficients c, f[n]."""
    lag = np.subtract.outer(np.arange(c.size), np.arange(c.size))
    # Above the diagonal the index is clamped to 0, and the entry replaced by 0.
    return jnp.where(lag >= 0, c[np.maximum(lag, 0)], 0.0)


def times(p: ArrayLike, q: ArrayLike) -> jax.Array:
    """The coefficients of the product of two polynomials that begin with 1.

    The arguments and the result omit this leading 1.
    """
    p, q = (jnp.concatenate([jnp.ones(1), jnp.asarray(x, float)]) for x in (p, q))
    return jnp.convolve(p, q)[1:]


def expand_roots(roots: ArrayLike) -> jax.Array:
    """The coefficients of Π_k (1 − r_k L) after the leading 1, for the roots r, f[p].

    The roots r_k are the reciprocals of the zeros of this polynomial in L. The result
    has as many coefficients as there are roots.
    """
    return functools.reduce(times, [-r[None] for r in jnp.asarray(roots)], jnp.zeros(0))


def series(numerator: ArrayLike, denominator: ArrayLike, n: int) -> jax.Array:
    """The first n coefficients of the power series of N / D, f[n].

    The arguments are the coefficients of the polynomials N and D after their leading 1.
    """
    top = jnp.concatenate([jnp.ones(1), jnp.asarray(numerator, float)])
    top = jnp.pad(top, (0, max(n - top.size, 0)))[:n]
    bottom = jnp.asarray(denominator, top.dtype)
    if not bottom.size:
        return top

    # h_t = n_t − Σ_k d_k h_{t−k}. Powers of the recursion's companion matrix would need
    # fewer sequential steps, but their terms cancel where poles are close together.
    def step(earlier: jax.Array, n_t: jax.Array) -> tuple[jax.Array, jax.Array]:
        h_t = n_t - bottom @ earlier
        return jnp.concatenate([h_t[None], earlier[:-1]]), h_t

    def short_step(earlier: tuple[jax.Array, ...], n_t: jax.Array):
        products = (d * h for d, h in zip(taps, earlier, strict=True))
        h_t = n_t - functools.reduce(operator.add, products)
        return (h_t, *earlier[:-1]), h_t

    if bottom.size > _SHORT:
        return jax.lax.scan(step, jnp.zeros_like(bottom), top)[1]
    taps = [bottom[k] for k in range(bottom.size)]
    return jax.lax.scan(short_step, (jnp.zeros_like(top[0]),) * bottom.size, top)[1]


def series_error(strategy: Toeplitz, h: jax.Array) -> jax.Array:
    """An upper bound on the L2 norm of the rounding errors of h, f[].

    The strategy is N / D for two polynomials N and D. h has the first n coefficients of
    the power series of N / D, as `series` computed them by a recursion. Let r be the
    rounding errors of the recursion's steps. Then D h = N − r, and the error of h is
    r / D. Let g be the computed coefficients of 1 / D, and s the rounding errors of the
    recursion for g. Then D g = 1 − s, and so 1 / D = g / (1 − s). For power series a
    and b that are cut off at n terms, ‖a b‖₂ <= ‖a‖₁ ‖b‖₂ and ‖a b‖₁ <= ‖a‖₁ ‖b‖₁.
    Therefore the error has the norm ‖r g / (1 − s)‖₂ <= ‖r‖₂ ‖g‖₁ / (1 − ‖s‖₁). If the
    bound on ‖s‖₁ is 1/2 or more, the result is infinite.
    """
    n, bottom = h.size, jnp.asarray(strategy.denominator, h.dtype)
    if not bottom.size:
        return jnp.zeros((), h.dtype)
    g = series(jnp.zeros(0), bottom, n)
    # A step of the recursion has at most bottom.size + 4 roundings. These roundings are
    # relative to the sizes of the step's terms, which the norms below bound.
    unit = (bottom.size + 4) * jnp.finfo(h.dtype).eps
    gain = 2 + jnp.sum(jnp.abs(bottom))
    top = jnp.linalg.norm(jnp.asarray(strategy.numerator, h.dtype)) + 1
    r = unit * (gain * jnp.linalg.norm(h) + top)
    s = unit * (gain * jnp.sum(jnp.abs(g)) + 1)
    inverse = jnp.sum(jnp.abs(g)) / (1 - s)
    # The factor 1.1 covers the rounding of the sums in this bound itself. The geometric
    # series 1 / (1 − s) needs s < 1. From s = 1/2 on, the bound is infinite.
    return jnp.where(s < 0.5, 1.1 * inverse * r, jnp.inf)


class Workload(NamedTuple):
    """The linear map that an optimizer applies to the gradient sums of all T steps.

    The output of step t is x_t = keep_t x_{t−1} + rates_t h_t, with x_0 = 0. Here
    h = N(L) / D(L) g is the result of a filter of the gradient sums g_t, where L is the
    shift by one step.

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
        raise ValueError(f"workload must be made by dpjax.workloads; got {workload!r}.")
    for name in ("rates", "keep"):
        size = np.shape(getattr(workload, name))[-1]
        if size not in (1, num_steps):
            raise ValueError(
                f"the workload's {name} must be one number, or one number for each of "
                f"the num_steps = {num_steps} steps; got {size} numbers."
            )
    if to_optimize:
        validate.concrete_numbers("workload", workload)
        if not np.any(np.asarray(workload.rates)):
            raise ValueError(
                f"workload must have a learning rate other than 0; got {workload!r}."
            )
    return workload


# The range of the factors by which `Scaled` multiplies the noise of a step.
LEAST, MOST = 2.0**-20, 2.0**20


class Scaled(NamedTuple):
    """A strategy that multiplies a Toeplitz strategy's noise by a factor in each step.

    The matrix is C = T diag(1 / factors), where T is the Toeplitz strategy.

    Attributes:
      strategy: T.
      factors: the factor of each step, f[num_steps], for a run of num_steps steps.
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
        # powers, and the gradient of such a power would be NaN.
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
            f"strategy must have at most num_steps = {num_steps} coefficients after "
            "the leading coefficient 1 of each polynomial; got "
            f"{toeplitz.num_vectors}."
        )
    if isinstance(strategy, Scaled) and np.shape(factors)[-1:] != (num_steps,):
        raise ValueError(
            "strategy must have one factor for each of the num_steps = "
            f"{num_steps} steps; got factors of shape {np.shape(factors)}."
        )
    return strategy


def toeplitz_and_factors(strategy: Toeplitz | Scaled) -> tuple[Toeplitz, ArrayLike]:
    """The Toeplitz strategy T and the noise factors of C = T diag(1 / factors).

    For a strategy that is not scaled, the factors are a single 1.
    """
    if isinstance(strategy, Scaled):
        return strategy.strategy, strategy.factors
    return strategy, np.ones(1)


def float32_polynomials(strategy: Toeplitz) -> list[np.ndarray]:
    """The numerator and the denominator of a strategy, as concrete arrays f[k].

    Raises:
      ValueError: a coefficient is traced, not finite, or not exact in float32.
    """
    polynomials: list[np.ndarray] = []
    for name, coefficients in zip(Toeplitz._fields, strategy, strict=True):
        x = _require_concrete(name, coefficients, 1)
        _require_float32(name, x, "finite numbers", np.isfinite(x))
        polynomials.append(x)
    return polynomials


def float32_factors(strategy: Scaled) -> np.ndarray:
    """The factors of a scaled strategy, f32[T], for a run of T steps.

    Raises:
      ValueError: the factors are traced, not from 2**-20 to 2**20, or not exact in
        float32.
    """
    f = _require_concrete("factors", strategy.factors, 1)
    _require_float32("factors", f, "from 2**-20 to 2**20", (f >= LEAST) & (f <= MOST))
    return f.astype(np.float32)


def float32_decay(decay: ArrayLike) -> np.ndarray:
    """The decay of a binary tree's strategy, as a concrete number f[].

    Raises:
      ValueError: the decay is traced, not in [0, 1), or not exact in float32.
    """
    beta = _require_concrete("decay", decay, 0)
    _require_float32("decay", beta, "in [0, 1)", (beta >= 0) & (beta < 1))
    return beta


def _require_concrete(name: str, value: object, ndim: int) -> np.ndarray:
    x = validate.concrete(value)
    if x is None or x.ndim != ndim:
        kind = "vector" if ndim else "number"
        raise ValueError(
            f"the strategy's {name} must be a concrete {kind}; got {value!r}."
        )
    return x


def _require_float32(name: str, x: np.ndarray, rule: str, valid: np.ndarray) -> None:
    if not np.all(valid & (x.astype(np.float32) == x)):
        raise ValueError(
            f"the strategy's {name} must be {rule}, and exact in float32, like the "
            f"numbers of strategies that dpjax.strategies makes; got {x!r}."
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

        The strategy has at most num_steps numbers of each kind: coefficients of the
        numerator, coefficients of the denominator, and factors.
        """
        if self.tree_decay is not None:
            return Tree(np.float64(self.tree_decay))
        toeplitz = self.toeplitz(num_steps)
        factors = np.array(self.factors[:num_steps], np.float64)
        return Scaled(toeplitz, factors) if factors.size else toeplitz

    def toeplitz(self, num_steps: int) -> Toeplitz:
        """The Toeplitz matrix T of C = T diag(1 / f), for a run of num_steps steps.

        `StrategySpec` defines C and f. The result has at most num_steps coefficients of
        the numerator, and at most num_steps coefficients of the denominator. Further
        coefficients do not change the first num_steps rows of C.
        """
        rows = self.numerator, self.denominator
        return Toeplitz(*(np.array(x[:num_steps], np.float64) for x in rows))

    def __str__(self) -> str:
        """The matrix C as a phrase.

        A Toeplitz matrix is a quotient of polynomials in L, the shift by one step.
        """
        if self.tree_decay is not None:
            return f"the matrix of the binary tree for momentum of {self.tree_decay}"
        top, bottom = (
            " ".join(["1", *(f"{x:+.9g} L^{k}" for k, x in enumerate(row, 1))])
            for row in self[:2]
        )
        scaling = ", with its columns divided by a factor for each step" * bool(
            self.factors
        )
        return f"({top}) / ({bottom}), where L is the shift by one step{scaling}"


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
