"""Searches for the strategy with the least error at the same privacy.

`optimize` searches for the Toeplitz strategy of a given kind. `scheduled` searches for
the size of the noise in each step.

A strategy is the matrix C of correlated noise C⁻¹z, where z is independent Gaussian
noise. A workload is the linear map A that an optimizer applies to the gradient sums x.
The error is the root mean square of A C⁻¹z over all steps, and μ is the parameter of
Gaussian differential privacy. The search minimizes the product of the error and μ. This
product does not depend on the scale of the noise, and is computed at noise
multiplier 1.

**A lower bound** on this product holds for all strategies. Let E be the number of
epochs, n_b the number of steps per epoch, and T the number of steps. Let sens be the
sensitivity, the maximum distance by which one example moves C x. The product is
sens · ‖A C⁻¹‖_F / √T. An example contributes at the same position in every epoch, and
its contributions may have any signs. A pattern is a vector over all steps that has
these signs at the example's steps and zeros elsewhere. For θ in [0, 1] let
R = (1 − θ) I + θ 11ᵀ, a matrix of size E. Then W = R ⊗ I / n_b, with I of size n_b, is
an average of outer products of patterns. Hence sens² >= ‖C W^{1/2}‖_F². Let ‖·‖_* be
the nuclear norm. Since ‖X‖_F ‖Y‖_F >= ‖XY‖_*,

    sens · ‖A C⁻¹‖_F >= ‖A C⁻¹‖_F ‖C W^{1/2}‖_F >= ‖A W^{1/2}‖_*,

for every C, lower-triangular or not. If an order of examples allows more patterns, the
sensitivity is at least as large. So the bound also holds for such an order.

**The size of the noise in each step.** The strategy of `scheduled` is C = T diag(s),
where T is now a Toeplitz matrix and s has a weight for each step. The noise is C⁻¹z for
independent Gaussian z. In step t this noise is (T⁻¹z)_t times the factor f_t = 1 / s_t.
The error is proportional to ‖A diag(f) T⁻¹‖_F. Let π be the steps in which an example
takes part. Let G_π have the entries of |TᵀT| in π × π, and zeros elsewhere. Then the
sensitivity is at most the maximum of r_π = √(sᵀG_π s) over all π. In a fixed order,
each position in the epoch has one π. At the best s, r_π is the same for every position.
So each s_t is divided by r_π for the position of step t, and the search then minimizes
the error alone.

For independent noise, T = I. Then the squared error is proportional to Σ_t w_t / s_t²,
where w_t is the squared norm of column t of A. An example's squared sensitivity is
Σ_{t∈π} s_t². By Lagrange's multiplier for this π, s_t⁴ is proportional to w_t among the
steps of π. If batches are reshuffled, all steps of an epoch share one s, and w is
summed over each epoch.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.float64 import scope
from dpjax._core.interpret import without_compiler
from dpjax._core.searches import minimize
from dpjax._matrices.strategy import (
    Scaled,
    Toeplitz,
    Workload,
    check_strategy,
    check_workload,
)
from dpjax.accounting._schedule import Order
from dpjax.accounting.correlated import _patterns
from dpjax.accounting.correlated._error import error, square_error
from dpjax.accounting.correlated._privacy import mu
from dpjax.strategies import _making

# The nuclear norm is computed for matrices up to this size, since it takes cubic time.
# For larger matrices, only the lower bound by circulants is used.
_MAX_DENSE_SIZE = 1024
# More than the relative rounding error of the bounds in float64. The bound is lowered
# by this fraction, so that it remains a lower bound.
_ROUNDING = 1e-9


def coefficients(workload: Workload, num_steps: int) -> np.ndarray:
    """The first column of a workload's matrix, at the mean rate and keep, f64[T].

    The column has the coefficients of rate · N(L) / (D(L) (1 − keep L)), where L is the
    shift by one step. The polynomials N and D have the leading coefficient 1 and then
    the workload's numerator and denominator as coefficients. rate and keep are the
    means over the steps of the workload's `rates` and `keep`. Each step multiplies the
    previous output by the step's entry of `keep`.
    """
    top, bottom = (np.append(1.0, np.asarray(x)) for x in workload[:2])
    rate, keep = (float(np.mean(np.asarray(x))) for x in workload[2:])
    return rate * ratio(top, np.polymul(bottom, np.array([1.0, -keep])), num_steps)


def ratio(top: np.ndarray, bottom: np.ndarray, n: int) -> np.ndarray:
    """The first n coefficients of the power series of top(L) / bottom(L), f64[n].

    The polynomials are in the shift L by one step. The arguments are the polynomials'
    coefficients in ascending order of the powers of L, with 1 as the first coefficient.
    """
    from scipy.linalg import blas  # here, since the import takes long

    # The coefficients solve a triangular band system. `scipy.signal.lfilter` gives the
    # same numbers, but importing `scipy.signal` takes long.
    band = np.repeat(bottom[:, None], n, axis=1)
    right_side = np.append(top, np.zeros(n))[:n]
    return blas.dtbsv(bottom.size - 1, band, right_side, lower=1)  # pyright: ignore


def lower_bound(workload: Workload, num_steps: int, n_b: int) -> float:
    """A lower bound on the GDP parameter μ times the error, for all strategies.

    The error is the root mean square of the noise in the workload's outputs. Both μ and
    the error are at noise multiplier 1. The workload's `rates` and `keep` must be the
    same in all steps. n_b is the number of steps per epoch.
    """
    from scipy.optimize import fminbound

    n_b = min(n_b, num_steps)
    # The construction of W needs whole epochs. If the last epoch is incomplete, the
    # bound omits the steps of this epoch. The omitted steps can only increase μ and the
    # errors.
    a = coefficients(workload, num_steps // n_b * n_b)
    sums = _diagonals(a, n_b)

    def bound(theta: float) -> float:
        """A lower bound on the nuclear norm of X = A W^{1/2}.

        A is the matrix of the workload, and W is the matrix of the module's docstring
        for this θ. Let U be a block of a unitary circulant matrix. The spectral norm of
        U is at most 1, so that the nuclear norm of X is at least tr(UᵀX). The result is
        the maximum of tr(UᵀX) over all blocks U. Let d be the sums of X along its
        diagonals. At the maximum, the eigenvalues of the circulant matrix have the
        phases of the Fourier transform of d.
        """
        alpha, gamma = _weights(theta, a.size // n_b, n_b)
        d = alpha * sums[0] + gamma * sums[1]
        return float(np.mean(np.abs(np.fft.fft(d, 2 * a.size))))

    # The bound holds for every θ. So an inexact maximum only loosens the bound.
    best = np.asarray(fminbound(lambda x: -bound(x), 0.0, 1.0)).item()
    bounds = [bound(0.0), bound(best)]
    if a.size <= _MAX_DENSE_SIZE:
        bounds.append(_nuclear_norm(a, n_b, best))
    return float(max(bounds) * (1 - _ROUNDING) / np.sqrt(num_steps))


def _weights(theta: float, epochs: int, n_b: int) -> tuple[float, float]:
    """The numbers α and γ for which W^{1/2} = α I + γ (11ᵀ / E) ⊗ I.

    Here W = R ⊗ I / n_b with R = (1 − θ) I + θ 11ᵀ, for E epochs of n_b steps. The root
    has this form since 11ᵀ / E is a projection.
    """
    alpha = np.sqrt((1 - theta) / n_b)
    return alpha, np.sqrt((1 - theta + theta * epochs) / n_b) - alpha


def _nuclear_norm(a: np.ndarray, n_b: int, theta: float) -> float:
    """The nuclear norm of A W^{1/2}, for the Toeplitz matrix A with the first column a.

    W^{1/2} = α I + γ (11ᵀ / E) ⊗ I for E epochs of n_b steps. `_weights` computes α and
    γ from θ.
    """
    from scipy.linalg import svdvals, toeplitz

    epochs = a.size // n_b
    alpha, gamma = _weights(theta, epochs, n_b)
    matrix = toeplitz(a, np.zeros(a.size))
    # A ((11ᵀ / E) ⊗ I): in every epoch, each column becomes the mean of the columns at
    # its position.
    means = matrix.reshape(a.size, epochs, n_b).mean(axis=1)
    return np.sum(svdvals(alpha * matrix + gamma * np.tile(means, epochs)))


def _diagonals(a: np.ndarray, n_b: int) -> tuple[np.ndarray, np.ndarray]:
    """The sums along all diagonals of the matrices A and A ((11ᵀ / E) ⊗ I).

    A is the lower-triangular Toeplitz matrix with the first column a, f64[T]. E is the
    number of epochs of n_b steps, 1 is the vector of E ones, and I has size n_b. Each
    result is f64[2T − 1], for the diagonals l = −T + 1, …, T − 1, where l is the row
    minus the column. Neither matrix is formed.
    """
    steps, epochs = a.size, a.size // n_b
    lags = np.arange(-steps + 1, steps)
    # With zeros on both sides, a_k is 0 for k < 0, and all indices below are valid.
    padded = np.concatenate([np.zeros(2 * steps), a, np.zeros(2 * steps)])
    means = np.zeros(lags.size)
    for k in range(-epochs + 1, epochs):
        # The columns s, from first to end, for which s + l and s − k n_b are steps.
        first = np.maximum(np.maximum(0, -lags), k * n_b)
        end = np.minimum(np.minimum(steps, steps - lags), steps + k * n_b)
        count = np.maximum(end - first, 0)
        means += count / epochs * padded[2 * steps + k * n_b + lags]
    return (steps - np.abs(lags)) * padded[2 * steps + lags], means


Kind = Literal["geometric", "rational", "banded", "banded_inverse"]
_STATIC = ("kind", "num_steps", "steps_per_epoch", "order")
# A descent needs 5 to 50 evaluations, and compiling one of them takes 0.4 to 2 s. NumPy
# is faster if its estimated time is below this limit, for up to about 600 steps.
_MAX_SECONDS = 0.05


@without_compiler
def _roots(x: jax.Array | np.ndarray) -> jax.Array:
    """Map real numbers x to numbers in (0, 1), 1 − e^{−softplus(x)}, f[k].

    The results are the numbers r in the factors 1 − r L of a strategy's numerator and
    denominator, where L is the shift by one step. The search changes x.
    """
    return -jnp.expm1(-jax.nn.softplus(x))


def _free_roots(distance: np.ndarray) -> np.ndarray:
    """The real numbers x, f[k], that `_roots` maps to 1 − distance.

    The argument has the distance of each zero or pole from 1, f[k]. Distances are
    clipped to the range from 1e-9 to 1 − 1e-9.
    """
    # The distances 0 and 1 would give infinite parameters.
    p = -np.log(np.clip(distance, 1e-9, 1 - 1e-9))
    return p + np.log(-np.expm1(-p))


def _bands(x: jax.Array | np.ndarray) -> jax.Array:
    """Map real numbers x, f[k], to a polynomial with zeros outside of the unit circle.

    The result has the polynomial's coefficients after the leading 1, f[k]. The power
    series of the polynomial's reciprocal decays. The Levinson recursion computes the
    polynomial from its reflection coefficients, which are tanh x.
    """
    a = jnp.zeros(0)
    for k in jnp.tanh(x):
        a = jnp.append(a + k * a[::-1], k)
    return a


def _free_bands(a: np.ndarray) -> np.ndarray:
    """The real numbers x, f[k], that `_bands` maps to the coefficients a.

    The reflection coefficients of a are clipped to the range from −0.9999 to 0.9999. If
    a reflection coefficient is out of this range, `_bands` maps the result to other
    coefficients than a.
    """
    x = []
    while a.size:
        # A reflection coefficient of ±1 or beyond does not give a decaying inverse.
        k = np.clip(a[-1], -0.9999, 0.9999)
        x.append(np.arctanh(k))
        a = (a[:-1] - k * a[-2::-1]) / (1 - k * k) if a.size > 1 else a[:0]
    return np.array(x[::-1])


@without_compiler
def _prepend_one(x: jax.Array | np.ndarray) -> jax.Array:
    return jnp.append(1.0, x)


def _strategy(kind: Kind, x: jax.Array | np.ndarray) -> Toeplitz:
    """The strategy of the given kind, from its unconstrained parameters, f[k].

    From concrete parameters, the result is the strategy that training runs, with
    coefficients rounded to float32. For the kinds "geometric" and "rational", the
    function raises ValueError if rounding moves a zero or a pole of the strategy out of
    (−1, 1).
    """
    if kind == "banded":
        return _making.banded(_prepend_one(x))
    if kind == "banded_inverse":
        return _making.banded_inverse(_prepend_one(_bands(x)))
    roots = _roots(x)
    if kind == "geometric":
        return _making.geometric(roots[0])
    return _making.rational(roots[: x.size // 2], roots[x.size // 2 :])


@functools.partial(without_compiler, max_seconds=_MAX_SECONDS)
@functools.partial(jax.jit, static_argnames=_STATIC)
def _value_and_grad(
    x: jax.Array,
    workload: Workload,
    *,
    kind: Kind,
    num_steps: int,
    steps_per_epoch: int,
    order: Order,
) -> tuple[jax.Array, jax.Array]:
    """The logarithm of the product of μ and the error, f[], and its gradient, f[k].

    μ is the parameter of Gaussian differential privacy, and the error is the root mean
    square of the noise in the workload's outputs. The gradient is with respect to the
    strategy's unconstrained parameters x. For order "fixed" and a strategy C with
    negative entries, μ is replaced by an upper bound.
    """

    def value(x: jax.Array) -> jax.Array:
        strategy = _strategy(kind, x)
        one = jnp.ones(1)
        if order == "fixed":  # the exact value for C >= 0, otherwise an upper bound
            square = _patterns.fixed_order_bound(strategy, num_steps, steps_per_epoch)
        else:
            squared = _patterns.SQUARED_SENSITIVITY[order]
            square = squared(strategy, one, num_steps, steps_per_epoch)
        error = square_error(strategy, one, workload, num_steps)
        return (jnp.log(square) + jnp.log(error)) / 2

    return jax.value_and_grad(value)(x)


def _start_point(
    kind: Kind, size: int, workload: Workload, num_steps: int
) -> np.ndarray:
    """The unconstrained parameters of a strategy, at which the search starts.

    The result is f[2 size] for the kind "rational", and f[size] for all other kinds.
    The strategy of these parameters approximates A^{1/2}, the square root of the
    workload's matrix A. If no example takes part twice, the error of the strategy
    A^{1/2} is near the least error.
    """
    if kind in ("banded", "banded_inverse"):
        a = coefficients(workload, size + 1)
        # The power series of the square root of 1 + a_1 / a_0 L + ..., term by term.
        root = np.eye(1, size + 1)[0]
        for k in range(1, size + 1):
            root[k] = (a[k] / a[0] - root[1:k] @ root[k - 1 : 0 : -1]) / 2
        if kind == "banded":
            return root[1:]
        return _free_bands(ratio(np.ones(1), root, size + 1)[1:])
    poles = np.abs(np.roots(np.append(1.0, np.asarray(workload.denominator))))
    # The slowest decay of the workload. Poles nearer to 1 than 1 / T make no difference
    # in a run of T steps.
    max_decay = np.max(np.append(poles, np.mean(np.asarray(workload.keep))))
    min_distance = max(1 - float(max_decay), 1 / num_steps)
    if kind == "geometric":
        return _free_roots(np.array([math.sqrt(min_distance)]))
    # Poles and zeros alternate. The logarithms of their distances from 1 are evenly
    # spaced, as in rational approximations of a square root.
    distances = min_distance ** (1 - np.arange(2 * size) / (2 * size))
    return np.concatenate([_free_roots(distances[1::2]), _free_roots(distances[::2])])


class Optimized(Toeplitz):
    """A `Toeplitz` strategy; `gap` bounds the ratio of its error to the least error.

    Attributes:
      product: the error in the workload for which the strategy was optimized, times the
        GDP parameter μ under `ZERO_OUT`, both at noise multiplier 1.
      run: the workload, the number of steps, and the number of steps per epoch.
    """

    product: float = math.nan
    run: tuple[Workload, int, int] | None = None

    @functools.cached_property
    def bound(self) -> float:
        """A lower bound on the error times μ of any strategy in the same run, or NaN.

        The error and μ are as in the attribute `product`, which is their product for
        this strategy. The bound is NaN if the attribute `run` is None, or if the
        workload's `rates` or `keep` has a separate number for each step.
        """
        # The lower bound is proven only for workloads with the same numbers in every
        # step.
        if self.run is None or any(np.size(x) > 1 for x in self.run[0][2:]):
            return math.nan
        return lower_bound(*self.run)

    @property
    def gap(self) -> float:
        """An upper bound on the ratio of this strategy's error to the least error.

        The least error is the minimum over all strategies with the same μ. If `bound`
        is NaN, the gap is NaN.
        """
        return self.product / self.bound


def optimize(
    kind: Kind,
    workload: Workload,
    *,
    num_steps: int,
    steps_per_epoch: int,
    order: Order = "fixed",
    num_vectors: int = 1,
) -> Optimized:
    """Search for the strategy of a kind with the least error in a workload.

    The search compares strategies at the same privacy.

    Args:
      kind: "geometric", "rational" (num_vectors poles), "banded" or "banded_inverse"
        (num_vectors + 1 bands).
      workload: the linear map that the optimizer applies to the gradient sums. Its
        numbers must be concrete, not traced.
      num_steps: T, static, at least 1.
      steps_per_epoch: n_b, static, at least 1.
      order: how examples take part, as for `accounting.correlated.mu`.
      num_vectors: the number of vectors of the parameters' size that the noise may
        store from step to step, from 1 to num_steps. With buffer="regenerate", the
        noise of "geometric" and "banded_inverse" stores no vector. For "geometric",
        num_vectors must be 1. For "rational", the result has fewer poles if fewer poles
        give a smaller error after rounding to float32.

    Returns:
      A strategy, with coefficients rounded to float32. Its `gap` is proven: at the same
      μ, the error of any strategy, of any kind and with any number of stored vectors,
      is at least 1 / gap times the error of the result, up to the rounding of
      `accounting.correlated.error`. The proof covers every order, since every order
      allows an example to take part at the same position of each epoch. If the
      workload's `rates` or `keep` has a separate number for each step, the proof does
      not apply, and `gap` is NaN.

    Raises:
      ValueError: an argument is out of range; a number of the workload is traced; or
        all rates of the workload are 0.

    Reference: L-BFGS-B (scipy) minimizes the product of μ and the error. The search
    starts at a strategy near the square root of the workload's matrix.

    Example:
      >>> from dpjax import workloads
      >>> best = optimize("geometric", workloads.momentum(0.9), num_steps=1000,
      ...                 steps_per_epoch=100)
      >>> print(f"{-best.denominator[0]:.3f}, at most {best.gap:.3f} of the best")
      0.626, at most 1.043 of the best
    """
    validate.one_of("kind", kind, get_args(Kind))
    validate.one_of("order", order, get_args(Order))
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    n_b = validate.static_int("steps_per_epoch", steps_per_epoch, minimum=1)
    size = validate.static_int("num_vectors", num_vectors, minimum=1)
    check_workload(workload, num_steps, to_optimize=True)
    if size > (1 if kind == "geometric" else num_steps):
        raise ValueError(
            "num_vectors must be 1 for kind 'geometric', and at most num_steps, "
            f"{num_steps}, for other kinds; got {num_vectors!r} for {kind!r}."
        )
    run = {"num_steps": num_steps, "steps_per_epoch": n_b, "order": order}
    with scope():
        candidates = _candidates(kind, size, workload, run)
        best = min(candidates, key=lambda strategy: strategy.product)
    best.run = workload, num_steps, n_b
    return best


def _candidates(
    kind: Kind, size: int, workload: Workload, run: dict[str, Any]
) -> Iterator[Optimized]:
    """Yield the strategies that the searches find, rounded to float32.

    For the kind "rational" there is one search for each number of poles up to `size`,
    since more poles may be worse after the coefficients are rounded. `run` has the
    values of num_steps, steps_per_epoch and order.
    """
    num_steps = run["num_steps"]
    for count in range(1 if kind == "rational" else size, size + 1):
        start = _start_point(kind, count, workload, num_steps)
        x = minimize(_value_and_grad, start, workload, kind=kind, **run)
        try:
            strategy = Optimized(*_strategy(kind, x))
        except ValueError:  # rounding to float32 moved a root out of (−1, 1)
            if count == 1:
                raise
            continue
        # This is the product of the rounded strategy, with μ from the accountant.
        gdp_mu = mu(strategy, 1.0, **run, adjacency=Adjacency.ZERO_OUT)
        strategy.product = float(gdp_mu) * float(error(strategy, workload, num_steps))
        yield strategy


EpochOrder = Literal["fixed", "reshuffled"]
# The minimum w, relative to the maximum. A step with w = 0 may have any noise. With
# this clamp, such a step has 1000 times the least noise, since s is w to the power 1/4.
_MIN_RATIO = 1e-12


def _rescale_weights(
    strategy: Toeplitz, s: jax.Array, num_steps: int, n_b: int, order: EpochOrder
) -> jax.Array:
    """Rescale the weights s of C = T diag(s) to sensitivity 1, f[num_steps].

    T is the Toeplitz strategy. An epoch has n_b steps. The sensitivity to an example is
    a bound on the distance by which this example moves C x, where x are the gradient
    sums. For the order "fixed", the input s has one weight for each step. Each weight
    is divided by the sensitivity to an example that takes part in this step. For
    "reshuffled", the input s has one weight for each epoch, and all weights are divided
    by the same number.
    """
    if order == "fixed":
        c = strategy.coefficients(num_steps)
        squares = _patterns.squares_by_position(c, s, n_b)
        return s / jnp.sqrt(squares[jnp.arange(num_steps) % n_b])
    s = jnp.repeat(s, n_b)[:num_steps]
    return s / jnp.sqrt(_patterns.reshuffled_order(strategy, s, num_steps, n_b))


@functools.partial(jax.jit, static_argnames=("num_steps", "n_b", "order"))
def _closed_form_weights(
    workload: Workload, *, num_steps: int, n_b: int, order: EpochOrder
) -> jax.Array:
    """The weights s, f[num_steps], for which C = diag(s) has the least error.

    The error is the root mean square of the noise in the workload's outputs. The
    weights are scaled such that one example moves C x by at most 1, where x are the
    gradient sums. The noise of C = diag(s) is independent from step to step. For
    "reshuffled", s is the same in all steps of an epoch.
    """
    identity = Toeplitz(jnp.zeros(0), jnp.zeros(0))
    # The squared error is Σ_t w_t f_t². So its derivative at f = 1 is 2 w, and the
    # factor 2 cancels in _rescale_weights.
    w = jax.grad(lambda f: square_error(identity, f, workload, num_steps))(
        jnp.ones(num_steps)
    )
    if order == "reshuffled":
        # All steps of an epoch share one s. So their w add up.
        w = jnp.sum(jnp.pad(w, (0, -num_steps % n_b)).reshape(-1, n_b), axis=1)
    s = jnp.power(jnp.maximum(w, _MIN_RATIO * jnp.max(w)), 0.25)
    return _rescale_weights(identity, s, num_steps, n_b, order)


@functools.partial(jax.jit, static_argnames=("num_steps", "n_b", "order"))
def _error_and_grad(
    log_s: jax.Array,
    strategy: Toeplitz,
    workload: Workload,
    *,
    num_steps: int,
    n_b: int,
    order: EpochOrder,
) -> tuple[jax.Array, jax.Array]:
    """The logarithm of the error of C = T diag(s), f[], and the logarithm's gradient.

    T is the Toeplitz strategy. The gradient is with respect to log s. The positive
    weights s are first rescaled to sensitivity 1 by `_rescale_weights`. The error is
    the root mean square of the noise in the workload's outputs.
    """

    def value(log_s: jax.Array) -> jax.Array:
        s = _rescale_weights(strategy, jnp.exp(log_s), num_steps, n_b, order)
        return jnp.log(square_error(strategy, 1 / s, workload, num_steps)) / 2

    return jax.value_and_grad(value)(log_s)


def scheduled(
    strategy: Toeplitz,
    workload: Workload,
    *,
    num_steps: int,
    steps_per_epoch: int,
    order: EpochOrder = "fixed",
) -> Scaled:
    """Search for the best factor of the noise in each step, for a workload.

    The best factors are those with the least error at the same privacy.

    If learning rates fall, later gradient sums matter less to the result. Later steps
    may then have more noise, which allows less noise in earlier steps at the same
    privacy.

    Args:
      strategy: a Toeplitz strategy, such as a result of `optimize`.
      workload: the linear map that the optimizer applies to the gradient sums. Its
        numbers must be concrete, not traced.
      num_steps: T, static, at least 1.
      steps_per_epoch: n_b, static, at least 1.
      order: "fixed" or "reshuffled", as for `accounting.correlated.mu`. For
        "reshuffled" the factor is the same for all steps of an epoch.

    Returns:
      The strategy with factors f, scaled so that the mean of f⁻² is 1. For independent
      noise these factors are the best. For other strategies the factors are the result
      of a descent. At the same μ, the error is at most the error of the strategy
      without factors.

    Raises:
      ValueError: an argument is out of range; a number of the strategy or of the
        workload is traced; or all rates of the workload are 0.

    Reference: for independent noise, the method of Lagrange multipliers gives the
    factors in closed form. For other noise, L-BFGS-B (scipy) minimizes the error.

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
    validate.one_of("order", order, get_args(EpochOrder))
    if not isinstance(check_strategy(strategy, num_steps), Toeplitz):
        raise ValueError(f"strategy must be a Toeplitz strategy; got {strategy!r}.")
    validate.concrete_numbers("strategy", strategy)
    check_workload(workload, num_steps, to_optimize=True)
    # A plain Toeplitz: the product and bound of `Optimized` hold without factors only.
    matrix = Toeplitz(*strategy)
    run = {"num_steps": num_steps, "n_b": min(n_b, num_steps), "order": order}
    with scope():
        if not matrix.num_vectors:
            s = _closed_form_weights(workload, **run)
        else:
            size = num_steps if order == "fixed" else -(-num_steps // run["n_b"])
            log_s = minimize(_error_and_grad, np.zeros(size), matrix, workload, **run)
            s = _rescale_weights(matrix, jnp.exp(jnp.asarray(log_s)), **run)
        s = np.asarray(s)
    # Only ratios of factors matter, since the noise multiplier sets the noise's scale.
    return _making.scaled(matrix, np.sqrt(np.mean(np.square(s))) / s)
