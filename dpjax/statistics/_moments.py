"""Private sums, means, variances and covariances of clipped rows.

A variance or covariance is about the private mean or about a given center, which is
public or was released before. `standardize` releases the center and the scale of each
feature. The center is a private mean, and the scale is the square root of a private
variance.

A row x is one example, which is clipped to the L2 norm C. The row u = x / C then has a
norm of at most 1. One example's contribution to a release is a vector c(u). The table
states upper bounds on the norm of c(u), and on the distance of c(u) from the
contribution c(v) of another example. S(u) is a vector of products of u's entries:

| release | c(u) | ‖c(u)‖ | ‖c(u) − c(v)‖ |
| --- | --- | --- | --- |
| sum, mean | u | 1 | 2 |
| second moments about a given center | S(u) | 1 | √2 |
| mean and second moments together | (u, S(u)) / √2 | 1 | 3/2 |

For covariances, S(u) is the upper triangle of u uᵀ, with factors √2 off the diagonal.
For variances, S(u) is only the diagonal (u_i²).

*Proof.* For covariances, the norm of S(u) is the Frobenius norm of u uᵀ, which is ‖u‖².
Let s = ‖u‖², t = ‖v‖² and g = ⟨u, v⟩. Then ‖S(u) − S(v)‖² = s² + t² − 2g² <= 2, and
‖u − v‖² + ‖S(u) − S(v)‖² = s + t − 2g + s² + t² − 2g². For fixed g, the sum of the two
squared distances grows with s and t. At s = t = 1, the sum is 4 − 2g − 2g² <= 4.5, with
equality at g = −1/2. The square root of 4.5 / 2 is 3/2. For variances, S(u) has only
the diagonal entries, so the norms and the distances are no larger.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import keys, validate
from dpjax._core.typing import Adjacency, Arithmetic, ArrayLike, Key
from dpjax.accounting import events
from dpjax.clipping._clip import apply_scales, clip_scales, group_squares
from dpjax.statistics import _release
from dpjax.statistics._release import Noise, Released, SharedArguments


class _Moments(NamedTuple):
    """The public parameters of a release of a sum, or of second moments.

    Attributes:
      clip_norm: the L2 norm to which rows are clipped, f[].
      num_examples: the number by which sums are divided, f[]; 1 for no division.
      center: for second moments, the given center f[...], which is subtracted from each
        example. None to release the mean together with the second moments.
    """

    clip_norm: ArrayLike
    num_examples: ArrayLike = 1.0
    center: ArrayLike | None = None


def mean(
    data: ArrayLike,
    *,
    clip_norm: ArrayLike,
    noise_multiplier: ArrayLike,
    key: Key,
    adjacency: Adjacency,
    num_examples: ArrayLike | None = None,
    arithmetic: Arithmetic = "real",
) -> Released:
    """The mean of clipped rows, with Gaussian noise.

    Args:
      data: the private examples, f[n, ...]: an array, a list or a data frame.
      clip_norm: C, the bound on the L2 norm of an example, positive. If C is above
        2¹⁰⁰, every example contributes zero, as for `clipped_grad`.
      noise_multiplier: z, the standard deviation of the noise in the sum, divided by C;
        at least 0. With z = 0, the result is not private.
      key: one typed key, used only for this release. `dpjax.random_key` makes a key.
      adjacency: the relation between the data sets that the guarantee compares.
      num_examples: the public number by which the sum is divided, positive. None stands
        for n, and is invalid under ADD_REMOVE, since n is private under ADD_REMOVE.
        Under ADD_REMOVE, give a number that does not depend on the data. The result is
        then the mean of the clipped rows times n / num_examples, plus noise.
      arithmetic: "real", or "discrete" for noise on a lattice and a guarantee for the
        bits that are released.

    Returns:
      A `Released`: the mean f[...] in the default float dtype, and an event that
      describes the mechanism to accountants. The noise has standard deviation
      z C / num_examples in each coordinate. With "discrete" and d coordinates, the
      noise is larger by a factor of about 1 / (1 − z √d / 131,000).

    Raises:
      ValueError: an argument is out of range; num_examples is missing under ADD_REMOVE;
        or with "discrete", z is traced, n is above 2²² z for a positive z, or z √d is
        so large that rounding to the lattice would more than double the sensitivity.

    Privacy: the release is μ-GDP with μ = adjacency.sensitivity_factor / z. A row with
    a NaN or an infinity contributes zero. Each clipped row is truncated to multiples of
    2⁻³² C. The sum of truncated rows is exact for up to 2²¹ rows, so that rounding adds
    nothing to the sensitivity. For more rows, entries of the sum above 2²¹ C are
    rounded to float64, and the guarantee with "discrete" covers this rounding. Under
    ZERO_OUT and REPLACE, the number of rows is public. The shape of the data is visible
    to anyone who sees the program or its memory.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import Adjacency
      >>> released = mean(
      ...     jnp.full((1_000, 2), 0.5), clip_norm=1.0, noise_multiplier=5.0,
      ...     key=jax.random.key(0), adjacency=Adjacency.ZERO_OUT)
      >>> [f"{x:.2f}" for x in released.value], released.event
      (['0.50', '0.50'], Gaussian(mu=0.2))
    """
    data = _release.as_examples("data", data)
    divisor = _release.as_num_examples(num_examples, len(data), adjacency)
    shared = SharedArguments(noise_multiplier, key, adjacency, arithmetic)
    params = _Moments(_release.as_positive("clip_norm", clip_norm), divisor)
    size = _row_size(data)
    return _release.release("mean", _sum, data, params, shared, dimension=size)


def sum(  # noqa: A001  (read as `statistics.sum`)
    data: ArrayLike,
    *,
    clip_norm: ArrayLike,
    noise_multiplier: ArrayLike,
    key: Key,
    adjacency: Adjacency,
    arithmetic: Arithmetic = "real",
) -> Released:
    """The sum of clipped rows, with Gaussian noise.

    Args:
      data: the private examples, f[n, ...].
      clip_norm: C, the bound on the L2 norm of an example, positive.
      noise_multiplier: z, the standard deviation of the noise divided by C, at least 0.
      key: one typed key, used only for this release.
      adjacency: the relation between the data sets that the guarantee compares.
      arithmetic: "real", or "discrete" for noise on a lattice, as in `mean`.

    Returns:
      A `Released`: the sum f[...], with noise of standard deviation z C in each
      coordinate, and an event that describes the mechanism to accountants.

    Raises:
      ValueError: as for `mean`.

    Privacy: as for `mean`, with μ = adjacency.sensitivity_factor / z.

    Example:
      >>> import jax
      >>> from dpjax import Adjacency
      >>> released = sum(
      ...     [0.5, 1.5, float("nan")], clip_norm=1.0, noise_multiplier=0.0,
      ...     key=jax.random.key(0), adjacency=Adjacency.ADD_REMOVE)
      >>> print(f"{released.value:.3f}")
      1.500
    """
    data = _release.as_examples("data", data)
    shared = SharedArguments(noise_multiplier, key, adjacency, arithmetic)
    params = _Moments(_release.as_positive("clip_norm", clip_norm))
    size = _row_size(data)
    return _release.release("sum", _sum, data, params, shared, dimension=size)


def _sum(data: jax.Array, params: _Moments, noise: Noise) -> jax.Array:
    """Compute the noisy sum of clipped rows, divided by params.num_examples."""
    norm = params.clip_norm
    total = _release.sum_exactly(lambda x: _unit_rows(x, norm), _flatten_rows(data))
    return (noise(total) * norm / params.num_examples).reshape(data.shape[1:])


def _unit_rows(rows: jax.Array, clip_norm: Any) -> jax.Array:
    """Clip rows f64[b, d] to the L2 norm clip_norm, and divide them by clip_norm.

    The results have norms of at most 1 − 2⁻²¹, rounding errors included. A row becomes
    zero if it is not finite, if its norm in units of clip_norm is above about 1e154, or
    if clip_norm is above 2¹⁰⁰.
    """
    squares = group_squares([rows], [0], [clip_norm], num_batch_axes=1)
    finite, (scale,), _ = clip_scales(squares, [clip_norm], True)
    return apply_scales(rows, scale, finite) / clip_norm


def _row_size(data: Any) -> int:
    """The number of entries of one example."""
    return math.prod(data.shape[1:])


def _flatten_rows(data: jax.Array) -> jax.Array:
    """Reshape examples f[n, ...] to rows f[n, d] of d entries each."""
    return data.reshape(len(data), _row_size(data))


def variance(
    data: ArrayLike,
    *,
    clip_norm: ArrayLike,
    noise_multiplier: ArrayLike,
    key: Key,
    adjacency: Adjacency,
    num_examples: ArrayLike | None = None,
    center: ArrayLike | None = None,
    arithmetic: Arithmetic = "real",
) -> Released:
    """The variance of each feature of clipped rows, with Gaussian noise.

    Args:
      data: the private examples, f[n, ...].
      clip_norm: C, the bound on the L2 norm of an example minus the center, positive.
      noise_multiplier: z, at least 0: the standard deviation of the noise in each sum.
        The sums are scaled such that one example's contribution to all sums together
        has an L2 norm of at most 1.
      key: one typed key, used only for this release.
      adjacency: the relation between the data sets that the guarantee compares.
      num_examples: N, the public number by which sums are divided. None stands for n,
        and is invalid under ADD_REMOVE.
      center: a center f[...] that is public or was released before. With a center, the
        examples minus the center are clipped, and the result is the mean square of each
        feature of the clipped rows. With None, the release also estimates the mean, and
        the examples themselves are clipped.
      arithmetic: "real", or "discrete" for noise on a lattice, as in `mean`.

    Returns:
      A `Released`: the variances f[...], and an event that describes the mechanism to
      accountants. Without a center, a variance is Σ x² / N − (Σ x / N)², where the sums
      are over the values x of a feature in the clipped rows. The noise has standard
      deviation √2 z C² / N in Σ x² / N, and √2 z C / N in Σ x / N. With a center, the
      noise in the result has standard deviation z C² / N. The noise adds no bias, but
      can make a variance negative.

    Raises:
      ValueError: as for `mean`; center does not broadcast to the shape of an example.

    Privacy: under ADD_REMOVE and ZERO_OUT, the release is μ-GDP with μ = 1 / z. Under
    REPLACE, μ is 1.5 / z without a center and √2 / z with a center. A row with a NaN or
    an infinity contributes zero.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import Adjacency
      >>> released = variance(
      ...     jnp.linspace(-1, 1, 10_001), clip_norm=1.0, noise_multiplier=4.0,
      ...     key=jax.random.key(0), adjacency=Adjacency.REPLACE)
      >>> print(f"{released.value:.2f}", released.event)
      0.33 Gaussian(mu=0.375)
    """
    data = _release.as_examples("data", data)
    divisor = _release.as_num_examples(num_examples, len(data), adjacency)
    return _release.release(
        "variance",
        _variance,
        data,
        _Moments(_release.as_positive("clip_norm", clip_norm), divisor, center),
        SharedArguments(noise_multiplier, key, adjacency, arithmetic),
        distance=1.5 if center is None else _release.root_up(2),
        dimension=_row_size(data) * (1 if center is not None else 2),
    )


def _variance(data: jax.Array, params: _Moments, noise: Noise) -> jax.Array:
    """Compute noisy variances of features, without bias from the noise in the means."""
    means, second_moments, noise_variance = _moments(data, params, noise, jnp.square)
    return (second_moments - means**2 + noise_variance).reshape(data.shape[1:])


def covariance(
    data: ArrayLike,
    *,
    clip_norm: ArrayLike,
    noise_multiplier: ArrayLike,
    key: Key,
    adjacency: Adjacency,
    num_examples: ArrayLike | None = None,
    center: ArrayLike | None = None,
    arithmetic: Arithmetic = "real",
) -> Released:
    """The covariance matrix of clipped rows, with Gaussian noise.

    Args:
      data: the private examples, f[n, d].
      clip_norm: C, the bound on the L2 norm of an example minus the center, positive.
      noise_multiplier: z, at least 0: the standard deviation of the noise in each sum.
        The sums are scaled such that one example's contribution to all sums together
        has an L2 norm of at most 1.
      key: one typed key, used only for this release.
      adjacency: the relation between the data sets that the guarantee compares.
      num_examples: N, the public number by which sums are divided. None stands for n,
        and is invalid under ADD_REMOVE.
      center: a center f[d] that is public or was released before, as in `variance`.
        With None, the release also estimates the mean, and the examples themselves are
        clipped.
      arithmetic: "real", or "discrete" for noise on a lattice, as in `mean`.

    Returns:
      A `Released`: a symmetric matrix f[d, d], and an event that describes the
      mechanism to accountants. The noise adds no bias, but can make eigenvalues
      negative. With a center, the noise has standard deviation z C² / N on the
      diagonal, and z C² / (√2 N) off the diagonal. Without a center, the noise in the
      second moments Σ x xᵀ / N is √2 times as large, and the mean Σ x / N has noise of
      standard deviation √2 z C / N in each coordinate.

    Raises:
      ValueError: as for `mean`; data is not f[n, d]; center does not broadcast to f[d].

    Privacy: as for `variance`, with the same μ. The whole matrix costs no more privacy
    than its diagonal.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import Adjacency
      >>> x = jnp.array([[0.5, 0.5], [-0.5, -0.5]] * 5_000)
      >>> released = covariance(
      ...     x, clip_norm=1.0, noise_multiplier=4.0, center=jnp.zeros(2),
      ...     key=jax.random.key(0), adjacency=Adjacency.ADD_REMOVE,
      ...     num_examples=10_000)
      >>> print(released.value.round(2))
      [[0.25 0.25]
       [0.25 0.25]]
    """
    data = _release.as_examples("data", data, ndim=2)
    divisor = _release.as_num_examples(num_examples, len(data), adjacency)
    size = data.shape[1]
    return _release.release(
        "covariance",
        _covariance,
        data,
        _Moments(_release.as_positive("clip_norm", clip_norm), divisor, center),
        SharedArguments(noise_multiplier, key, adjacency, arithmetic),
        distance=1.5 if center is None else _release.root_up(2),
        dimension=size * (size + 1) // 2 + (size if center is None else 0),
    )


def _covariance(data: jax.Array, params: _Moments, noise: Noise) -> jax.Array:
    """Compute a noisy covariance matrix, without bias from the noise in the means."""
    rows, columns = np.triu_indices(data.shape[1])
    weights = np.where(rows == columns, 1.0, math.sqrt(2))

    def triangle(u: jax.Array) -> jax.Array:
        return u[:, rows] * u[:, columns] * weights

    means, second_moments, noise_variance = _moments(data, params, noise, triangle)
    size = data.shape[1]
    upper = jnp.zeros((size, size)).at[rows, columns].set(second_moments / weights)
    symmetric = upper + jnp.triu(upper, 1).T
    return symmetric - jnp.outer(means, means) + noise_variance * jnp.eye(size)


def _moments(
    data: jax.Array,
    params: _Moments,
    noise: Noise,
    squares: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the noisy mean and the noisy second moments of clipped rows.

    If `params.center` is given, the function subtracts the center from all rows before
    clipping, and the second moments are about this center.

    Args:
      data: the examples, f[n, ...], with d features each.
      params: the clip norm, the number of examples and the center.
      noise: the function that adds the noise to a sum.
      squares: a function from rows f[b, d] of norm at most 1 to the rows' contributions
        to the second moments, f[b, k].

    Returns:
      The mean f64[d], zero if a center is given; the second moments f64[k]; and the
      variance of the noise in each entry of the mean, f64[], zero if a center is given.
      The caller needs the variance because the noise increases the expected squared
      mean by this variance.
    """
    scale, n, size = params.clip_norm, params.num_examples, _row_size(data)
    center, root = params.center, math.sqrt(2)
    if center is not None:
        data = data - jnp.broadcast_to(jnp.asarray(center), data.shape[1:])

    def contribute(x: jax.Array) -> jax.Array:
        u = _unit_rows(x, scale)
        if center is not None:
            return squares(u)
        return jnp.concatenate([u, squares(u)], axis=1) / root

    noisy = noise(_release.sum_exactly(contribute, _flatten_rows(data)))
    if center is not None:
        return jnp.zeros(size), noisy * scale**2 / n, jnp.zeros(())
    moments = noisy * root / n
    noise_variance = (noise.stddev * root * scale / n) ** 2
    return moments[:size] * scale, moments[size:] * scale**2, noise_variance


class Standardization(NamedTuple):
    """A map of features, x ↦ (x − center) / scale.

    Attributes:
      center: the center of each feature, f[...].
      scale: the scale of each feature, f[...], positive.
    """

    center: jax.Array
    scale: jax.Array

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Standardize features f[*b, ...], whose last axes are those of `center`."""
        # Arrays of equal rank broadcast, even if JAX is set to refuse arrays of
        # different ranks.
        x = jnp.asarray(x)
        shape = (1,) * (x.ndim - self.center.ndim) + self.center.shape
        return (x - self.center.reshape(shape)) / self.scale.reshape(shape)


def standardize(
    data: ArrayLike,
    *,
    clip_norm: ArrayLike,
    noise_multiplier: ArrayLike,
    key: Key,
    adjacency: Adjacency,
    share: float = 0.5,
    num_examples: ArrayLike | None = None,
    arithmetic: Arithmetic = "real",
) -> Released:
    """Estimate a center and a scale of each feature, by a private mean and variance.

    Args:
      data: the private examples, f[n, ...].
      clip_norm: C, positive. For the mean, each example is clipped to the L2 norm C.
        For the variances, each example minus the center is clipped to the L2 norm C.
      noise_multiplier: z, positive and not traced. The whole release costs as much
        privacy as one `mean` with the noise multiplier z.
      key: one typed key, used only for this release.
      adjacency: the relation between the data sets that the guarantee compares.
      share: the share of the release's μ² that the center costs, static, in (0, 1).
        The scale costs the rest.
      num_examples: the public number by which sums are divided. None stands for n, and
        is invalid under ADD_REMOVE.
      arithmetic: "real", or "discrete" for noise on a lattice, as in `mean`.

    Returns:
      A `Released`: a `Standardization` with arrays f[...], and an event that describes
      both mechanisms to accountants. A scale is the square root of a noisy variance. So
      that every scale is positive, each noisy variance is first raised to at least the
      standard deviation of its noise. With "discrete", this minimum is the standard
      deviation that the noise would have with "real".

    Raises:
      ValueError: as for `mean`; share is not in (0, 1); noise_multiplier is traced or
        0.

    Privacy: the release is μ-GDP with μ = adjacency.sensitivity_factor / z. The center
    is a `mean`, and the scale is the square root of a `variance` about this center. The
    release composes these two Gaussian mechanisms, of which the second depends on the
    result of the first.

    Reference: Dong, Roth and Su (2022), Corollary 2.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import Adjacency
      >>> x = jnp.array([[0.5, 0.1], [0.3, -0.1]] * 2_000)
      >>> released = standardize(
      ...     x, clip_norm=1.0, noise_multiplier=1.0,
      ...     key=jax.random.key(0), adjacency=Adjacency.ZERO_OUT)
      >>> print(released.value(x[:2]).round(1))
      [[ 1.  1.]
       [-1. -1.]]
    """
    data = _release.as_examples("data", data)
    validate.typed_key("key", key)
    validate.open_unit("share", share)
    z = validate.positive_float("noise_multiplier", noise_multiplier)
    divisor = _release.as_num_examples(num_examples, len(data), adjacency)
    # With the adjacency's sensitivity factor f, the center has μ² = share (f / z)², and
    # the scale has the rest of (f / z)². Squares of μ add up (Dong, Roth and Su 2022,
    # Corollary 2, https://arxiv.org/abs/1905.02383). For a variance about a given
    # center, the factor under REPLACE is √2 instead of 2. The margin covers the four
    # roundings of each noise multiplier.
    margin = 1 + 2.0**-49
    ratio = _release.root_up(2) / 2 if adjacency is Adjacency.REPLACE else 1.0
    z_center = z / math.sqrt(share) * margin
    z_scale = z * ratio / math.sqrt(1 - share) * margin
    center_key, scale_key = jax.random.split(keys.stream(key, "statistics standardize"))
    arguments = {
        "clip_norm": clip_norm,
        "adjacency": adjacency,
        "num_examples": divisor,
        "arithmetic": arithmetic,
    }
    center = mean(data, noise_multiplier=z_center, key=center_key, **arguments)
    variances = variance(
        data, noise_multiplier=z_scale, key=scale_key, center=center.value, **arguments
    )
    scale = _scale(variances.value, clip_norm, z_scale, divisor)
    gaussian = events.Gaussian(_release.divide_up(adjacency.sensitivity_factor, z))
    parts = center.event, variances.event
    variations = [x.total_variation for x in parts if isinstance(x, events.OnLattice)]
    event: events.Event = gaussian
    if variations:
        event = events.OnLattice(gaussian, math.fsum(variations))
    return Released(Standardization(center.value, scale), event, adjacency)


@jax.jit
def _scale(
    variances: jax.Array, clip_norm: ArrayLike, z: ArrayLike, divisor: ArrayLike
) -> jax.Array:
    """Compute the scale of each feature, the square root of its noisy variance.

    The function first raises each variance to at least z clip_norm² / divisor. With
    "real" arithmetic, this minimum is the standard deviation of the noise in the
    variance: z is the noise multiplier of the variances, and divisor is the number by
    which the sum of squares was divided.
    """
    min_variance = (jnp.asarray(clip_norm) ** 2 * z / divisor).astype(variances.dtype)
    return jnp.sqrt(jnp.maximum(variances, min_variance))
