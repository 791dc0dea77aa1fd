"""Private histograms, and quantiles by bisection with private counts."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import Adjacency, Arithmetic, ArrayLike, Key
from dpjax.statistics import _release
from dpjax.statistics._release import Noise, Released, SharedArguments


def histogram(
    data: ArrayLike,
    *,
    noise_multiplier: ArrayLike,
    key: Key,
    adjacency: Adjacency,
    edges: ArrayLike | None = None,
    num_categories: int | None = None,
    arithmetic: Arithmetic = "real",
) -> Released:
    """Count the examples in each of k public bins, with Gaussian noise.

    Args:
      data: the private examples, f[n].
      noise_multiplier: z, the standard deviation of the noise in each count, at least
        0.
      key: one typed key, used only for this release.
      adjacency: the relation between the data sets that the guarantee compares.
      edges: the public edges of k bins, f[k + 1], increasing. A bin contains its left
        edge, and the last bin also contains its right edge. None if num_categories is
        given.
      num_categories: k, if the examples are the numbers 0, ..., k − 1. Each bin then
        has one of these numbers in its middle, and width 1. None if edges are given.
      arithmetic: "real", or "discrete" for noise on a lattice, as in `mean`.

    Returns:
      A `Released`: the counts f[k], and an event that describes the mechanism to
      accountants. Noise can make a count negative.

    Raises:
      ValueError: as for `mean`; data is not f[n]; edges and num_categories are both
        given or both None; edges are not two or more finite, increasing numbers;
        num_categories is not an integer of at least 1.

    Privacy: under ADD_REMOVE and ZERO_OUT, the release is μ-GDP with μ = 1 / z, since
    an example is in at most one bin. Under REPLACE, one count may fall by 1 and
    another count may rise by 1, so μ = √2 / z. An example that is NaN or outside all
    bins is not counted.

    Example:
      >>> import jax
      >>> from dpjax import Adjacency
      >>> released = histogram(
      ...     [0, 2, 2, 1, 2], num_categories=3, noise_multiplier=0.1,
      ...     key=jax.random.key(0), adjacency=Adjacency.ADD_REMOVE)
      >>> print(released.value.round(), released.event)
      [1. 1. 3.] Gaussian(mu=10.0)
    """
    data = _release.as_examples("data", data, ndim=1)
    if (edges is None) == (num_categories is None):
        raise ValueError(
            "exactly one of edges and num_categories must be given; got "
            f"edges={edges!r} and num_categories={num_categories!r}."
        )
    if num_categories is not None:
        size = validate.static_int("num_categories", num_categories, minimum=1)
        bin_edges: Any = np.arange(size + 1) - 0.5
    else:
        bin_edges = check_increasing("edges", edges)
    shared = SharedArguments(noise_multiplier, key, adjacency, arithmetic)
    return _release.release(
        "histogram",
        _histogram,
        data,
        bin_edges,
        shared,
        distance=_release.root_up(2),
        dimension=len(bin_edges) - 1,
    )


def _histogram(data: jax.Array, edges: jax.Array, noise: Noise) -> jax.Array:
    return noise(count_in_bins(bins_of(data, edges), len(edges) - 1))


def bins_of(values: jax.Array, edges: jax.Array) -> jax.Array:
    """Find the index of each value's bin, i[n].

    A NaN, or a value outside all bins, gets the index len(edges) − 1, the number of
    bins.
    """
    size = len(edges) - 1
    bins = jnp.searchsorted(edges, values, side="right") - 1
    bins = jnp.where(values == edges[-1], size - 1, bins)
    # A NaN compares False, and is therefore outside.
    return jnp.where((values >= edges[0]) & (values <= edges[-1]), bins, size)


def count_in_bins(bins: jax.Array, size: int) -> jax.Array:
    """Count the examples in each bin, f64[size].

    Args:
      bins: the index of each example's bin, i[n]. An example with the index `size` is
        outside all bins, and is not counted.
      size: the number of bins.
    """
    # Sums of integers are exact, and an example adds 1 to at most one count.
    return jnp.bincount(bins, length=size + 1)[:size].astype(jnp.float64)


def check_increasing(name: str, value: Any) -> Any:
    """Check that a vector is increasing, and return it in float64.

    A traced vector is returned unchanged, since its numbers cannot be checked.

    Raises:
      ValueError: the value is not a vector of at least two numbers, or the numbers are
        not finite and increasing.
    """
    edges = validate.real_vector(name, value)
    if edges is None:
        edges = value
    elif not (np.all(np.isfinite(edges)) and np.all(np.diff(edges) > 0)):
        raise ValueError(f"{name} must be increasing and finite; got {value!r}.")
    if len(edges) < 2:
        raise ValueError(f"{name} must have at least two numbers; got {value!r}.")
    return edges


class _Bisection(NamedTuple):
    """The public parameters of a private search for quantiles by bisection.

    Attributes:
      shares: for each quantile, the share of the examples at or below the quantile,
        f[] or f[k].
      lower: the lower end of the interval in which the search begins, f[].
      upper: the upper end of the interval in which the search begins, f[].
      norm: an upper bound on the L2 norm of one example's contribution to the sums of
        one step, f[].
      steps: the indices 0, 1, ..., t − 1 of the steps of the bisection, i[t].
    """

    shares: np.ndarray
    lower: float
    upper: float
    norm: float
    steps: ArrayLike


def quantile(
    data: ArrayLike,
    shares: float | Sequence[float],
    *,
    lower: float,
    upper: float,
    noise_multiplier: ArrayLike,
    key: Key,
    adjacency: Adjacency,
    num_steps: int = 12,
    arithmetic: Arithmetic = "real",
) -> Released:
    """Find quantiles between public bounds, by bisection with noisy counts.

    Each step halves an interval. From a noisy count, the step estimates whether more
    than a share q of the examples is at or below the middle of the interval. If so, the
    search continues in the lower half of the interval, and otherwise in the upper half.

    Args:
      data: the private examples, f[n].
      shares: q, one number or k numbers in (0, 1), static, such as 0.5 for the median.
      lower: a public lower bound of the quantiles, static, below upper.
      upper: a public upper bound of the quantiles, static.
      noise_multiplier: z, at least 0: the noise standard deviation divided by the
        maximum L2 norm of one example's contributions to the counts of all shares in
        all steps.
      key: one typed key, used only for this release.
      adjacency: the relation between the data sets that the guarantee compares.
      num_steps: t, the number of bisections, static, from 1 to 52. More steps give a
        finer result and more noise in each count.
      arithmetic: "real", or "discrete" for noise on a lattice, as in `mean`.

    Returns:
      A `Released`: the quantiles, in the shape f[] or f[k] of shares, and an event that
      describes the mechanism to accountants. Each quantile is the middle of an interval
      of length (upper − lower) / 2ᵗ. The noise in the count of each step has standard
      deviation z √t √(Σ_j max(q_j, 1 − q_j)²), where q_j is share number j. The search
      for each share is separate, so that quantiles may be out of order.

    Raises:
      ValueError: as for `mean`, with z √t in place of z and k in place of d; data is
        not f[n]; shares is neither a number nor a vector, or is empty; a share is not
        in (0, 1); num_steps is not an integer from 1 to 52; lower or upper is traced or
        not finite; lower is not below upper.

    Privacy: under ADD_REMOVE and ZERO_OUT, the release is μ-GDP with μ = 1 / z. Under
    REPLACE, μ is at most 2 / z. Because of rounding, the μ of the event may exceed this
    bound by a factor of up to 1 + 1e-11. An example that is NaN or infinite contributes
    zero to every count.

    Reason: let m_j be the middle of the interval for the share q_j. The noisy count of
    a step for q_j is the noisy sum of 1[x <= m_j] − q_j over all examples x, where 1[·]
    is 1 if the condition holds and 0 otherwise. The sum does not use the number of
    examples. The k contributions of one example have an L2 norm of at most
    s = √(Σ_j max(q_j, 1 − q_j)²). The contributions of two examples have a distance of
    at most √k, which is at most 2s. Each m_j depends only on noisy counts of earlier
    steps.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import Adjacency
      >>> released = quantile(
      ...     jnp.linspace(0, 1, 20_001), [0.25, 0.5], lower=-10.0, upper=10.0,
      ...     noise_multiplier=4.0, key=jax.random.key(0),
      ...     adjacency=Adjacency.REPLACE)
      >>> print(released.value.round(2))
      [0.25 0.5 ]
    """
    data = _release.as_examples("data", data, ndim=1)
    share_vector = np.atleast_1d(np.asarray(shares, np.float64))
    if share_vector.ndim != 1 or not share_vector.size:
        raise ValueError(f"shares must be a number or a vector; got {shares!r}.")
    validate.open_unit("shares", share_vector)
    check_increasing("lower and upper", [lower, upper])
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    validate.at_most("num_steps", num_steps, 52)
    # The margin covers the rounding of the root, the sum and the contributions.
    norm = float(np.linalg.norm(np.maximum(share_vector, 1 - share_vector)))
    norm *= 1 + 2.0**-40
    return _release.release(
        "quantile",
        _quantile,
        data,
        _Bisection(np.asarray(shares), lower, upper, norm, np.arange(num_steps)),
        SharedArguments(noise_multiplier, key, adjacency, arithmetic),
        # Since max(q, 1 − q) is at most 1, √k / norm is at least 1 without the margins.
        # The factor here exceeds the margin in norm.
        distance=max(1.0, math.sqrt(share_vector.size) / norm * (1 + 2.0**-39)),
        dimension=share_vector.size,
        num_sums=num_steps,
    )


def _quantile(data: jax.Array, params: _Bisection, noise: Noise) -> jax.Array:
    """Find a quantile for each of params.shares, by bisection with noisy counts."""
    rows, shares = data[:, None], jnp.atleast_1d(params.shares)

    def halve(ends: tuple[jax.Array, jax.Array], step: jax.Array) -> Any:
        low, high = ends
        middle = (low + high) / 2

        def contribute(x: jax.Array) -> jax.Array:
            below = jnp.where(x <= middle, 1.0, 0.0) - shares
            return jnp.where(jnp.isfinite(x), below, 0.0) / params.norm

        above_share = noise(_release.sum_exactly(contribute, rows), step) > 0
        low = jnp.where(above_share, low, middle)
        return (low, jnp.where(above_share, middle, high)), None

    ends = jnp.full(shares.shape, params.lower), jnp.full(shares.shape, params.upper)
    (low, high), _ = jax.lax.scan(halve, ends, jnp.asarray(params.steps, jnp.uint32))
    return ((low + high) / 2).reshape(params.shares.shape)
