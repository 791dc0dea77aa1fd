"""Objective perturbation: the minimiser of a regularised objective with linear noise.

The release is the minimiser θ of J(θ) = Σ_i ℓ_i(θ) + (Λ/2)‖θ‖² + ⟨b, θ⟩, for one draw b
of N(0, σ² I). Each loss ℓ_i is a convex function of one linear score ⟨x_i, θ⟩, with
gradients of norms at most L and a curvature of at most β. Then δ(ε) <= Σ_j
δ_G(m_j, ε − c_j), where δ_G(m, ·) is the privacy profile of the Gaussian mechanism with
μ = m. The few terms j belong to vectors v_j, called corners. Step 4 defines the v_j and
m_j, and steps 4 and 5 define the c_j. The proof has six steps.

1. **Density.** J has one minimiser θ for each b, and b = b_D(θ) = −(Σ∇ℓ_i(θ) + Λθ). The
   map b_D is Lipschitz, and so is its inverse, because J is Λ-strongly convex. So θ has
   the density p_D(θ) = φ_σ(b_D(θ)) |H_D(θ)|, with the density φ_σ of b and the
   determinant of H_D = Σ∇²ℓ_i + ΛI. If the gradients are only Lipschitz, ∇²ℓ_i exists
   almost everywhere.
2. **Loss.** Let D and D' be neighbouring data sets. In addition to the common examples,
   D may have one example z, and D' may have one example z'. Let v(θ) = b_D'(θ) − b_D(θ)
   and b = b_D(θ). If the data set is D, then b has the distribution N(0, σ² I). The
   privacy loss is log p_D/p_D' = (2⟨b, v⟩ + ‖v‖²) / (2σ²) + log |H_D| − log |H_D'|.
3. **Determinants.** Let H >= ΛI be the matrix of the common examples, and f(⟨x, θ⟩)
   the loss of example z. Example z adds the matrix f''(⟨x, θ⟩) x xᵀ of rank one, so
   0 <= log |H_D| − log |H| = log(1 + f'' xᵀH⁻¹x) <= log(1 + f'' ‖x‖² / Λ). In the same
   way log |H_D'| >= log |H|, so log |H_D| − log |H_D'| has the same upper bound.
4. **Corners.** The gradient of an example is s x/‖x‖ with |s| <= L, so v is in the
   convex hull of vectors v_j that depend on z and z' alone. ⟨b, v⟩ + ‖v‖²/2 is convex
   in v, and therefore at most its maximum over the v_j. At v = v_j, (2⟨b, v⟩ + ‖v‖²) /
   (2σ²) is X_j, the privacy loss of the Gaussian mechanism with m_j = ‖v_j‖/σ. By step
   3, c = log(1 + β/Λ) is at least log |H_D| − log |H_D'|. Then the loss is at most
   c + max_j X_j, and δ(ε) is at most
   E(1 − e^{ε − c − max X_j})₊ <= Σ_j E(1 − e^{ε − c − X_j})₊ = Σ_j δ_G(m_j, ε − c).
5. **Logistic losses** have gradients p x̃ and curvatures p(1 − p) x̃x̃ᵀ, where x̃ is −y x
   and p is in [0, 1]. The bound of step 3 is then log(1 + κ p(1 − p)), with κ = 4β/Λ.
   This bound is concave in p, and therefore at most its tangent at any point t. Step 4
   is also valid for a bound that is linear in p: each corner has its own c_j, and at
   p = 1, where gradients are largest, c_j is small.
6. **Other releases.** Let objective perturbation be composed with a μ_o-GDP mechanism,
   such as the release of statistics before θ, or noise that is added to θ. The privacy
   loss of the other mechanism adds to every X_j, and the distribution of b does not
   depend on that mechanism. So the term of corner j is at most the δ of a composition
   of two Gaussian mechanisms, and sqrt(m_j² + μ_o²) takes the place of m_j.

Redberg, Koskela and Wang (2023), https://arxiv.org/abs/2401.00583, prove steps 1 to 4
for ADD_REMOVE, with the constant |log(1 − β/Λ)|.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import TINY, ULP, float64
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax.accounting import calibrate
from dpjax.accounting._numerics import gaussian

__all__ = ["delta", "epsilon"]

# The code uses the best of the bounds from all tangents. The tangent at t = 1/2 is
# flat.
_TANGENTS = np.linspace(0.5, 1.0, 17)[:, None]


def _corners(
    curvature: jax.Array, logistic: bool, replaced: bool
) -> tuple[np.ndarray, jax.Array]:
    """The norms ‖v_j‖ / L of the corners, f[k], and constants c_j, f[tangents, k].

    Corners are vectors v_j whose convex hull contains the difference of the gradients
    of two neighbouring data sets. L bounds the norm of an example's gradient. The
    privacy loss at corner j is at most c_j plus the loss of a Gaussian mechanism with
    the sensitivity ‖v_j‖. For logistic losses, each row has the c_j of one tangent
    (step 5 of the module's docstring), and each row gives a valid bound. For other
    losses, the array has one row. `curvature` is β/Λ, as for `delta`. `replaced` says
    whether each data set has an example that the other data set lacks. If so, and if
    losses are not logistic, the norms depend on the examples. The result then has the
    largest and the smallest norm, 2 and 0, and `_delta64` covers all norms between.
    """
    if not logistic:
        # v is in the parallelogram with the corners ±L x/‖x‖ ± L x'/‖x'‖. Opposite
        # corners have equal norms, and the squares of the two different norms add up to
        # 4L². `_delta64` chooses the worst two norms.
        norms = np.array([2.0, 2.0, 0.0, 0.0]) if replaced else np.ones(2)
        return norms, jnp.full((1, norms.size), jnp.log1p(curvature))
    # f'' ‖x‖² / Λ <= κ p(1 − p), with κ p(1 − p) = β/Λ at p = 1/2.
    kappa, t = 4 * curvature, _TANGENTS
    inside = 1 + kappa * t * (1 - t)
    slope = kappa * (1 - 2 * t) / inside
    at_0, at_1 = jnp.log(inside) - slope * t, jnp.log(inside) + slope * (1 - t)
    if not replaced:
        return np.array([0.0, 1.0]), jnp.concatenate([at_0, at_1], axis=1)
    # v = p x̃ − p' x̃': (p, p') = (0, 0), (0, 1), (1, 0) and (1, 1).
    norms = np.array([0.0, 1.0, 1.0, 2.0])
    return norms, jnp.concatenate([at_0, at_0, at_1, at_1], axis=1)


@float64("up", static=("logistic", "replaced"), elementwise=True)
def _delta64(
    noise_multiplier: jax.Array,
    curvature: jax.Array,
    other_mu: jax.Array,
    epsilon: jax.Array,
    *,
    logistic: bool,
    replaced: bool,
) -> jax.Array:
    norms, constants = _corners(curvature, logistic, replaced)
    margin = 1 + 8 * ULP

    squares = (norms / noise_multiplier) ** 2 + other_mu * other_mu
    squares = jnp.maximum(squares, jnp.where(norms > 0, TINY, 0.0))  # no underflow
    positive = squares > 0  # the square root has no derivative at 0
    m = jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1.0)) * margin, 0.0)

    # The 64 ULP exceed the roundings of `constants`, whose terms are at most 4β/Λ.
    epsilons = epsilon - constants - 64 * ULP * (1 + curvature + epsilon)
    epsilons = jnp.where(epsilon < jnp.inf, epsilons, jnp.inf)
    if replaced and not logistic:
        # δ_G is convex in m² where its slope φ(a) / (2m) grows: a b >= 1, with a and b
        # of `_numerics.gaussian`, so ε² >= m² + m⁴/4 for the largest m. In the worst
        # case, one of the two squares is then the sum of both squares, and the other
        # square is 0. If δ_G is not convex, the code uses the sum for both squares.
        square = m[0] * m[0]
        convex = epsilons[0, 0] ** 2 >= (square + square * square / 4) * margin
        m = jnp.where(convex & (epsilons[0, 0] > 0), m, m[0])
    deltas = gaussian.delta_of(jnp.broadcast_to(m, epsilons.shape), epsilons)
    bound = jnp.minimum(jnp.min(jnp.sum(deltas, axis=1)) * (1 + 16 * ULP), 1.0)
    valid = (noise_multiplier > 0) & (curvature >= 0) & (curvature < jnp.inf)
    return jnp.where(valid & (other_mu >= 0) & (epsilon >= 0), bound, 1.0)


def delta(
    noise_multiplier: ArrayLike,
    epsilon: ArrayLike,
    *,
    curvature: ArrayLike,
    logistic: bool,
    adjacency: Adjacency,
    other_mu: ArrayLike = 0.0,
) -> jax.Array:
    """An upper bound on the δ of objective perturbation for generalised linear models.

    The release is the minimiser θ of Σ_i ℓ_i(θ) + (Λ/2)‖θ‖² + ⟨b, θ⟩, where ℓ_i is the
    loss of example i, and b is one draw of N(0, σ² I).

    Args:
      noise_multiplier: σ/L, at least 0, f[*b], where L bounds the norm of one example's
        gradient.
      epsilon: f[*b], at least 0.
      curvature: β/Λ, f[*b], at least 0, where β bounds the curvature of one example's
        loss.
      logistic: whether the losses are logistic, log(1 + e^{−y⟨x, θ⟩}) with y = ±1. L is
        then the bound on ‖x‖, and β = L²/4. If false, a loss may be any convex function
        of one linear score ⟨x, θ⟩.
      adjacency: which data sets are compared. Λ and σ are the same for both data sets.
      other_mu: the GDP parameter of the composition of all other releases that δ
        covers, f[*b]: statistics released before θ, and noise added to θ.

    Returns:
      δ, f[*b], rounded up. The result is 1 for a noise multiplier of 0, for a traced
      argument out of range, and for a NaN.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: the exact minimiser and the other releases together are (ε, δ)-DP. θ must
    be unconstrained, and Λ must be positive. An approximate minimiser whose distance to
    the exact minimiser is always at most τ can be released with Gaussian noise of
    standard deviation s. This release is also (ε, δ)-DP if other_mu includes the GDP
    parameter 2τ/s.

    Reference: Redberg, Koskela and Wang (2023). The proof in this module's docstring
    extends their bound for generalised linear models.

    Example:
      >>> of = dict(curvature=0.05, logistic=True, adjacency=Adjacency.REPLACE)
      >>> print(f"{delta(8.0, 1.0, **of):.1e}")
      2.9e-06
    """
    validate.nonnegative("noise_multiplier", noise_multiplier, finite=False)
    validate.nonnegative("epsilon", epsilon, finite=False)
    validate.nonnegative("curvature", curvature)
    validate.nonnegative("other_mu", other_mu, finite=False)
    return _delta64(
        noise_multiplier,
        curvature,
        other_mu,
        epsilon,
        logistic=validate.flag("logistic", logistic),
        replaced=validate.adjacency(adjacency) is Adjacency.REPLACE,
    )


_delta = delta  # `epsilon` has an argument called delta


def epsilon(
    noise_multiplier: ArrayLike,
    delta: float,
    *,
    curvature: ArrayLike,
    logistic: bool,
    adjacency: Adjacency,
    other_mu: ArrayLike = 0.0,
) -> jax.Array:
    """The least ε at which `objective.delta` is at most δ, found by a search.

    Args:
      noise_multiplier: σ/L, f[], positive. The function `objective.delta` defines the
        symbols.
      delta: the target δ, in (0, 1).
      curvature: β/Λ, f[], at least 0.
      logistic: whether the losses are logistic.
      adjacency: which data sets are compared.
      other_mu: the GDP parameter of the composition of all other releases, f[].

    Returns:
      The least ε > 0 whose δ(ε) is at most delta, f[], rounded up. Under `jax.jit` or
      `jax.vmap`, the result is inf if no ε meets delta.

    Raises:
      ValueError: an argument is out of range, or no ε meets delta.

    Example:
      >>> of = dict(curvature=0.05, logistic=True, adjacency=Adjacency.REPLACE)
      >>> print(f"{epsilon(8.0, 1e-5, **of):.3f}")
      0.926
    """
    validate.open_unit("delta", delta)
    delta_of = functools.partial(
        _delta,
        noise_multiplier,
        curvature=curvature,
        logistic=logistic,
        adjacency=adjacency,
        other_mu=other_mu,
    )
    return calibrate.solve(delta_of, delta)
