"""Private sums and means of clipped rows."""

import math
from typing import Any, NamedTuple

import jax

from dpjax._core.typing import Adjacency, Arithmetic, ArrayLike, Key
from dpjax.clipping._clip import apply_scales, clip_scales, group_squares
from dpjax.statistics import _release
from dpjax.statistics._release import Noise, Released, SharedArguments


class _Sums(NamedTuple):
    """The public parameters of a private sum.

    Attributes:
      clip_norm: the L2 norm to which rows are clipped, f[].
      num_examples: the number by which the sum is divided, f[]; 1 for no division.
    """

    clip_norm: ArrayLike
    num_examples: ArrayLike = 1.0


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
      clip_norm: C, the bound on the L2 norm of an example, positive.
      noise_multiplier: z, the standard deviation of the noise in the sum, divided by C;
        at least 0. With z = 0, the result is not private.
      key: one typed key, such as from `dpjax.random_key`, used only for this release.
      adjacency: the relation between the data sets that the guarantee compares.
      num_examples: the public number by which the sum is divided, positive. None stands
        for n, and is invalid under ADD_REMOVE, since n is private there. Under
        ADD_REMOVE, give a number that does not depend on the data. The result is then
        the mean times n / num_examples, plus noise.
      arithmetic: "real", or "discrete" for noise on a lattice and a guarantee for the
        bits that are released.

    Returns:
      A `Released`: the mean f[...] in the default float dtype, and an event that
      describes the mechanism to accountants. The noise has standard deviation
      z C / num_examples in each coordinate. With "discrete" and d coordinates, the
      noise is larger by a factor of about 1 / (1 − z √d / 131,000).

    Raises:
      ValueError: an argument is out of range; num_examples is missing under ADD_REMOVE;
        or with "discrete", noise_multiplier is traced, n is above 2²² z, or z √d is so
        large that rounding to the lattice would add more than the sensitivity.

    Privacy: the release is μ-GDP with μ = adjacency.sensitivity_factor / z. A row with
    a NaN or an infinity contributes zero. Each clipped row is truncated to multiples of
    2⁻³² C, and the sum of truncated rows is exact, so that rounding adds nothing to the
    sensitivity. Under ZERO_OUT and REPLACE, the number of rows is public. The shape of
    the data is visible to anyone who sees the program or its memory.

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
    params = _Sums(_release.as_positive("clip_norm", clip_norm), divisor)
    size = row_size(data)
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
    params = _Sums(_release.as_positive("clip_norm", clip_norm))
    size = row_size(data)
    return _release.release("sum", _sum, data, params, shared, dimension=size)


def _sum(data: jax.Array, params: _Sums, noise: Noise) -> jax.Array:
    """Compute the noisy sum of clipped rows, divided by params.num_examples."""
    norm = params.clip_norm
    noisy = noise(_release.sum_exactly(lambda x: unit_rows(x, norm), flat(data)))
    return (noisy * norm / params.num_examples).reshape(data.shape[1:])


def unit_rows(rows: jax.Array, clip_norm: Any) -> jax.Array:
    """Clip rows f64[b, d] to the L2 norm clip_norm, and divide them by clip_norm.

    Without rounding, the results would have norms of at most 1 − 2⁻²⁰. With rounding,
    the results have norms of at most 1 − 2⁻²¹. A row that is not finite becomes zero.
    """
    squares = group_squares([rows], [0], [clip_norm], kept=1)
    finite, (scale,), _ = clip_scales(squares, [clip_norm], True)
    return apply_scales(rows, scale, finite) / clip_norm


def row_size(data: Any) -> int:
    """The number of features of an example."""
    return math.prod(data.shape[1:])


def flat(data: jax.Array) -> jax.Array:
    """Reshape examples f[n, ...] to rows f[n, d] of d features each."""
    return data.reshape(len(data), row_size(data))
