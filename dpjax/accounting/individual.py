"""Gaussian differential privacy of each example, from the norms of its gradients.

Let C be the clip norm. An example whose clipped gradient has the norm c <= C moves the
sum of a step by c, not by C. Over steps with independent noise of standard deviation s,
the GDP parameter of example i is μ_i = sqrt(Σ_t (c_{i,t} / s)²), where c_{i,t} is the
norm of the example's clipped gradient in step t. Usually, μ_i is less than the GDP
parameter of the run.

**The μ_i are private data.** This module computes the μ_i from gradients and adds no
noise. Never release the μ_i, neither one by one nor as a mean or maximum.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike


class PrivateLosses(NamedTuple):
    """The privacy losses of all examples so far. Never release these private data.

    Attributes:
      squares: the square μ_i² of each example's GDP parameter, f[n], rounded up.
    """

    squares: jax.Array


def init(num_examples: int) -> PrivateLosses:
    """The privacy losses before the first step, which are zero.

    Args:
      num_examples: n, static, at least 1.

    Returns:
      `PrivateLosses` with zeros.

    Raises:
      ValueError: num_examples is out of range.

    Example:
      >>> init(3).squares.tolist()
      [0.0, 0.0, 0.0]
    """
    n = validate.static_int("num_examples", num_examples, minimum=1)
    return PrivateLosses(jnp.zeros(n, jnp.result_type(float)))


def update(
    losses: PrivateLosses,
    norms: ArrayLike,
    indices: ArrayLike,
    *,
    mask: ArrayLike,
    clip_norm: ArrayLike,
    stddev: ArrayLike,
) -> PrivateLosses:
    """Add the privacy loss of one step with Gaussian noise.

    Args:
      losses: the losses of all earlier steps.
      norms: the norm of each example's gradient before clipping, f[b], such as the
        `norm` that `clipped_grad` returns. A NaN or a negative norm counts as
        clip_norm. A norm below the least normal number of its dtype may count as 0.
      indices: the position of each example of the batch in `losses`, i[b]. Examples
        with mask True must have distinct indices from 0 to n − 1, where n is the number
        of examples in `losses`.
      mask: True for valid examples, False for padding, bool[b].
      clip_norm: C, f[], positive.
      stddev: s, the noise standard deviation of the sum, in the units of clip_norm,
        f[], positive.

    Returns:
      The losses, with (min(norm, C) / s)² added for each valid example of the batch.
      The losses are private data. All losses are inf if the index of a valid example is
      out of range, or if a traced clip_norm or stddev is not positive.

    Raises:
      ValueError: a static argument is out of range; norms, indices and mask are not
        vectors of one length; indices are not integers; mask is not boolean.

    Privacy: see `gdp`.

    Reference: Feldman and Zrnic (2021), https://arxiv.org/abs/2008.11193; Koskela,
    Tobaben and Honkela (2023), https://arxiv.org/abs/2209.15596.

    Example:
      >>> losses = update(init(3), jnp.array([0.5, 9.0]), jnp.array([2, 0]),
      ...                 mask=jnp.array([True, True]), clip_norm=1.0, stddev=2.0)
      >>> print(gdp(losses).round(4).tolist())
      [0.5, 0.0, 0.25]
    """
    validate.positive("clip_norm", clip_norm)
    validate.positive("stddev", stddev)
    (total,) = losses
    if isinstance(indices, np.ndarray) and np.issubdtype(indices.dtype, np.integer):
        # JAX drops all bits but the lowest 32. No example has the index −1.
        low = indices.astype(np.int32)
        indices = np.where(low == indices, low, np.int32(-1))
    norms = jnp.asarray(norms, total.dtype)
    indices, mask = jnp.asarray(indices), jnp.asarray(mask)
    if norms.ndim != 1 or not norms.shape == indices.shape == mask.shape:
        raise ValueError(
            "norms, indices and mask must have the same shape [b]; got "
            f"{norms.shape}, {indices.shape} and {mask.shape}."
        )
    if not jnp.issubdtype(indices.dtype, jnp.integer) or mask.dtype != bool:
        raise ValueError(
            "indices must be integers and mask boolean; got "
            f"{indices.dtype} and {mask.dtype}."
        )
    clip, stddev = jnp.asarray(clip_norm, total.dtype), jnp.asarray(stddev, total.dtype)
    # Feldman and Zrnic (2021): the sensitivity of a step to an example is the example's
    # own clipped norm. A norm that is NaN or negative counts as the largest norm, C.
    contribution = jnp.where(norms >= 0, jnp.minimum(norms, clip), clip)
    inside = (indices >= 0) & (indices < total.size)
    # Examples with indices out of range and padding add no loss.
    positions = jnp.where(mask & inside, indices, total.size)
    # The casts to this dtype, a division, a square and a sum have at most eight
    # roundings. The computation of the norms may have rounded once more.
    margin = 1 + 8 * jnp.finfo(total.dtype).eps
    squares = jnp.square(contribution / stddev) * margin
    # The sum is rounded by half of eps at most. The added number `tiny` makes the loss
    # positive if the square underflows.
    old = total.at[positions].get(mode="fill", fill_value=0.0)
    tiny = jnp.where(contribution > 0, jnp.finfo(total.dtype).tiny, 0.0)
    new = (old + squares + tiny) * (1 + 2 * jnp.finfo(total.dtype).eps)
    total = total.at[positions].set(new, mode="drop")
    valid = jnp.all(inside | ~mask) & (clip > 0) & (stddev > 0)
    return PrivateLosses(jnp.where(valid, total, jnp.inf))


def gdp(losses: PrivateLosses) -> jax.Array:
    """The GDP parameter μ_i of each example. Never release these private data.

    Args:
      losses: the losses of all steps.

    Returns:
      μ_i, f[n], rounded up.

    Privacy: the steps must add independent Gaussian noise to sums of clipped gradients.
    Batches must not depend on the data: each batch has all examples, the batches have a
    fixed order that the attacker may know, or each batch is a Poisson sample. For
    Poisson samples, μ_i holds even against an attacker who knows the batches, but is
    not amplified by sampling. μ_i is not valid for correlated noise or under REPLACE.
    In the neighbouring data set, example i is absent (ADD_REMOVE) or contributes zero
    (ZERO_OUT). Norms depend on earlier outputs, so that μ_i is a loss of the actual
    run, not a guarantee before the run. For a guarantee, fix a limit μ in advance, and
    leave each example out of every step that would increase its μ_i above the limit.
    The run is then μ-GDP.

    Reference: Feldman and Zrnic (2021), https://arxiv.org/abs/2008.11193; Koskela,
    Tobaben and Honkela (2023), https://arxiv.org/abs/2209.15596.

    Example:
      >>> gdp(init(2)).tolist()
      [0.0, 0.0]
    """
    (total,) = losses
    return jnp.sqrt(total) * (1 + 2 * jnp.finfo(total.dtype).eps)
