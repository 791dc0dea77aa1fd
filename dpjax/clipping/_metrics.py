"""Summaries of a batch's losses and gradient norms, to monitor a training run.

The summaries are not differentially private. They are only for people who may see the
data.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.typing import ArrayLike, Tree
from dpjax.clipping._clip import PerExample, check_mask


class Metrics(NamedTuple):
    """Summaries over the valid examples of a batch. They are not private.

    An example is valid if the mask does not exclude it. Only people who may see the
    data may see these values.

    Attributes:
      num_examples: the number of valid examples, i[].
      loss: the mean loss of the valid examples, f[]; 0 if there are no valid examples.
      fraction_clipped: the fraction f[] of valid examples whose norm is above the clip
        norm or not finite; 0 if there are no valid examples.
      norm_quantiles: quantiles f[q] of the finite gradient norms of valid examples; NaN
        if there are no finite norms.
      num_contributing: the number i[] of valid examples with a finite gradient. All
        other examples of the batch contribute zero to the clipped sum. If this number
        is 0, only noise changes the parameters.
      zero_sums: a tree of bool[] that says, for each leaf of the gradient, whether the
        clipped sum is exactly zero; None if `grads` was not passed to `metrics`.
    """

    num_examples: jax.Array
    loss: jax.Array
    fraction_clipped: jax.Array
    norm_quantiles: jax.Array
    num_contributing: jax.Array
    zero_sums: Tree | None = None


def metrics(
    per_example: PerExample,
    clip_norm: ArrayLike,
    *,
    mask: jax.Array | None = None,
    quantiles: Sequence[float] = (0.1, 0.5, 0.9),
    grads: Tree | None = None,
) -> Metrics:
    """Summarise the losses and norms from `clipped_grad` over the valid examples.

    Args:
      per_example: the second result of the function that `clipped_grad` makes.
      clip_norm: the bound C, f[].
      mask: bool[b], the mask that was passed to the function; None if all examples are
        valid.
      quantiles: the quantiles of the norms to compute, each in [0, 1].
      grads: the clipped sum, which is the first result of the function; needed only for
        the field `zero_sums` of the result.

    Returns:
      The summaries, a `Metrics`.

    Raises:
      ValueError: clip_norm is not one positive number; mask has another shape or is not
        boolean.

    Privacy: none. Only people who may see the data may see the metrics. If the metrics
    influence a choice, such as a clip norm or a time to stop, the guarantee of the run
    does not hold for releases that depend on this choice.

    Example:
      >>> import dpjax, jax.numpy as jnp
      >>> fn = dpjax.clipped_grad(lambda w, x: jnp.sum(w * x), 1.0)
      >>> mask = jnp.array([True, True, False])
      >>> _, per_example = fn(jnp.ones(2), jnp.diag(jnp.array([3.0, 0.5, 9.0]))[:, :2],
      ...                     mask=mask)
      >>> summary = dpjax.metrics(per_example, 1.0, mask=mask)
      >>> print(summary.num_examples, summary.loss, summary.fraction_clipped)
      2 1.75 0.5
    """
    validate.scalar("clip_norm", clip_norm)
    validate.positive("clip_norm", clip_norm)
    losses, norms = per_example.loss, per_example.norm
    mask = check_mask(mask, losses.shape)
    finite = mask & jnp.isfinite(norms)
    return Metrics(
        num_examples=jnp.sum(mask),
        loss=masked_mean(losses, mask),
        # With the negation, NaN norms count as clipped. norms > clip_norm is False for
        # NaN.
        fraction_clipped=masked_mean(~(norms <= clip_norm), mask),
        norm_quantiles=jnp.nanquantile(
            jnp.where(finite, norms, jnp.nan), jnp.asarray(quantiles, norms.dtype)
        ),
        num_contributing=jnp.sum(finite),
        zero_sums=jax.tree.map(lambda g: ~jnp.any(g), grads),
    )


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean f[] of the values where the mask is True; 0 if the mask is all False."""
    dtype = jnp.promote_types(values.dtype, jnp.float32)
    total = jnp.sum(jnp.where(mask, values.astype(dtype), jnp.zeros((), dtype)))
    # The maximum avoids 0 / 0 for a batch of padding.
    return total / jnp.maximum(jnp.sum(mask), 1).astype(dtype)
