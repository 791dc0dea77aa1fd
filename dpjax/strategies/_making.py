"""Functions that make strategies from their parameters.

Training computes noise in float32, and accountants compute in float64. So the functions
of this module round concrete coefficients to float32, and training and accounting use
the same rounded numbers. Traced coefficients are not rounded.
"""

import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike
from dpjax._matrices.strategy import LEAST, MOST, Scaled, Toeplitz, Tree, expand_roots


def independent() -> Toeplitz:
    """The strategy C = I: the noise of each step is independent of all other noise.

    Example:
      >>> independent().num_vectors
      0
    """
    return Toeplitz(np.zeros(0), np.zeros(0))


def geometric(decay: ArrayLike) -> Toeplitz:
    """The strategy with C⁻¹ = I − λL: step t adds the noise z_t − λ z_{t−1}.

    L is the shift by one step, and the z_t are independent Gaussian vectors. The
    coefficients of C are λ^k.

    Args:
      decay: λ, f[], in [0, 1).

    Raises:
      ValueError: a concrete decay is outside [0, 1), or is 1 in float32.

    Reference: "λ-CGD", https://arxiv.org/abs/2601.22334.

    Example:
      >>> print(geometric(0.5).coefficients(4))
      [1.    0.5   0.25  0.125]
      >>> print(geometric(0.5).inverse_coefficients(4))
      [ 1.  -0.5  0.   0. ]
    """
    validate.scalar("decay", decay)
    validate.half_open_unit("decay", decay)
    concrete_decay = validate.concrete(decay)
    # A traced decay is neither checked nor rounded. [None] makes a vector of one root.
    pole = jnp.asarray(decay)[None] if concrete_decay is None else concrete_decay[None]
    return Toeplitz(np.zeros(0), _polynomial("decay", pole))


def rational(zeros: ArrayLike, poles: ArrayLike) -> Toeplitz:
    """The strategy C = Π_k (1 − a_k L) / Π_k (1 − b_k L), with L the shift by one step.

    The noise needs as many stored vectors as there are poles.

    Args:
      zeros: a, f[d], in (−1, 1). The noise of step t contains the draws of earlier
        steps, with weights that decay like powers of the zeros.
      poles: b, f[d], in (−1, 1). Choose poles above the zeros, so that the noise of a
        step cancels some of the noise of earlier steps.

    Raises:
      ValueError: a concrete zero or pole is outside (−1, 1); rounding a polynomial's
        concrete coefficients to float32 moves a root out of (−1, 1); zeros and poles
        are not vectors of the same length; or zeros and poles are concrete and empty.

    Reference: the buffered linear Toeplitz matrices of McMahan, Xu and Zhang (2024),
    https://arxiv.org/abs/2408.08868, who define these matrices by partial fractions.

    Example:
      >>> print(rational([0.25], [0.75]).coefficients(3))
      [1.    0.5   0.375]
    """
    if np.ndim(zeros) != 1 or np.shape(zeros) != np.shape(poles):
        raise ValueError(
            "zeros and poles must be vectors of the same length; got shapes "
            f"{np.shape(zeros)} and {np.shape(poles)}."
        )
    return Toeplitz(_polynomial("zeros", zeros), _polynomial("poles", poles))


def banded(coefficients: ArrayLike) -> Toeplitz:
    """The strategy with p bands, C = Σ_k c_k L^k for k < p; L is the shift by one step.

    Let x be the gradient sums of all steps. If only the sum of one step changes, at
    most p rows of C x change.

    Args:
      coefficients: c_0, ..., c_{p−1}, f[p], finite, with c_0 = 1. The noise is computed
        by a recursion with these coefficients. If the polynomial Σ c_k y^k has a
        complex zero y with abs(y) <= 1, the noise grows from step to step. The caller
        must choose a polynomial without such zeros. This condition is not checked.

    Raises:
      ValueError: the coefficients are not a vector of real numbers; or concrete
        coefficients are not finite in float32, or do not begin with 1.

    Reference: Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153.

    Example:
      >>> print(banded([1.0, 0.5]).inverse_coefficients(4))
      [ 1.    -0.5    0.25  -0.125]
    """
    return Toeplitz(_drop_leading_one("coefficients", coefficients), np.zeros(0))


def banded_inverse(coefficients: ArrayLike) -> Toeplitz:
    """The strategy whose inverse C⁻¹ has p bands.

    The noise of a step is a weighted sum of the independent draws z of this step and of
    the p − 1 steps before it.

    Args:
      coefficients: the coefficients of C⁻¹, f[p], finite; the first coefficient is 1.

    Raises:
      ValueError: the coefficients are not a vector of real numbers; or concrete
        coefficients are not finite in float32, or do not begin with 1.

    Reference: https://arxiv.org/abs/2505.12128.

    Example:
      >>> print(banded_inverse([1.0, -0.5]).coefficients(4))
      [1.    0.5   0.25  0.125]
    """
    return Toeplitz(np.zeros(0), _drop_leading_one("coefficients", coefficients))


def scaled(strategy: Toeplitz, factors: ArrayLike) -> Scaled:
    """Multiply the noise of a Toeplitz strategy by a factor in each step.

    Args:
      strategy: a Toeplitz strategy.
      factors: f[T], from 2**-20 to 2**20, one for each step of the run. Traced factors
        are not checked. `scheduled` searches for the best factors for a workload.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> print(scaled(geometric(0.5), [1.0, 2.0, 4.0]).matrix(3).round(3))
      [[1.   0.   0.  ]
       [0.5  0.5  0.  ]
       [0.25 0.25 0.25]]
    """
    if not isinstance(strategy, Toeplitz):
        raise ValueError(f"strategy must be a Toeplitz strategy; got {strategy!r}.")
    values = validate.real_vector("factors", factors)
    if values is None:
        return Scaled(strategy, jnp.asarray(factors))
    rounded = _round_float32(values)
    if rounded.size == 0 or not np.all((rounded >= LEAST) & (rounded <= MOST)):
        raise ValueError(f"factors must be from 2**-20 to 2**20; got {factors!r}.")
    return Scaled(strategy, rounded)


def tree(decay: ArrayLike) -> Tree:
    """The strategy of the binary tree mechanism, for momentum with the given decay.

    Let `dpjax.correlated_noise` add this strategy's noise, and put `optax.trace` with
    the same decay β after it. The output of `optax.trace` times 1 − β then has the same
    noise as `dpjax.tree_momentum`. In a run of T steps, `dpjax.correlated_noise` stores
    ⌊log₂ T⌋ vectors with buffer="stored". With buffer="regenerate",
    `dpjax.correlated_noise` stores no vector, and repeats one earlier draw per step on
    average.

    Args:
      decay: the momentum coefficient β, f[], in [0, 1).

    Raises:
      ValueError: a concrete decay is outside [0, 1), or is 1 in float32.

    Reference: Tran and Cutkosky (2022), Algorithm 1, https://arxiv.org/abs/2210.06328.

    Example:
      >>> print(tree(0.5).matrix(4))
      [[1.    0.    0.    0.   ]
       [0.5   1.    0.    0.   ]
       [0.    0.    1.    0.   ]
       [0.125 0.25  0.5   1.   ]]
    """
    validate.scalar("decay", decay)
    validate.half_open_unit("decay", decay)
    concrete_decay = validate.concrete(decay)
    if concrete_decay is None:
        return Tree(jnp.asarray(decay))
    rounded = _round_float32(concrete_decay)
    # A decay below 1 in float64 may round up to 1. The tree is not defined for 1.
    if rounded == 1:
        raise ValueError(f"decay must be below 1 in float32, too; got {decay!r}.")
    return Tree(rounded)


def _drop_leading_one(name: str, coefficients: ArrayLike) -> ArrayLike:
    """The coefficients after the leading 1, rounded to float32 if they are concrete.

    Raises:
      ValueError: concrete coefficients do not begin with 1, or are not finite in
        float32; or the coefficients are not a vector of real numbers.
    """
    values = validate.real_vector(name, coefficients)
    if values is None:
        return jnp.asarray(coefficients)[1:]
    rounded = _round_float32(values)
    if rounded.size == 0 or values[0] != 1 or not np.all(np.isfinite(rounded)):
        raise ValueError(
            f"{name} must be finite in float32 and begin with 1; got {coefficients!r}."
        )
    return rounded[1:]


def _polynomial(name: str, roots: ArrayLike) -> ArrayLike:
    """The coefficients of Π_k (1 − r_k L) after the leading 1, for the roots r, f[p].

    Coefficients from concrete roots are rounded to float32. Traced roots are not
    checked, and their coefficients are not rounded.

    Raises:
      ValueError: a concrete root is outside (−1, 1); rounding the coefficients moves a
        root out of (−1, 1); there is no root; or the roots are not a vector of real
        numbers.
    """
    concrete_roots = validate.real_vector(name, roots)
    if concrete_roots is None:
        return expand_roots(jnp.asarray(roots))
    if concrete_roots.size == 0 or not np.all(np.abs(concrete_roots) < 1):
        raise ValueError(f"{name} must be 1 or more numbers in (-1, 1); got {roots!r}.")
    rounded = _round_float32(np.poly(concrete_roots)[1:])
    # Rounding may move roots that are close together out of (−1, 1).
    if not np.all(np.abs(np.roots([1.0, *rounded])) < 1):
        raise ValueError(
            f"{name} must be farther from -1 and 1"
            f"{' and from each other' * (concrete_roots.size > 1)}, because rounding "
            "the polynomial's coefficients to float32 moves a root out of (-1, 1); got "
            f"{np.asarray(roots).tolist()!r}."
        )
    return rounded


def _round_float32(values: np.ndarray) -> np.ndarray:
    # A number beyond float32 becomes infinite, and the callers' checks refuse it.
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(np.float64)
