"""What a person wants to watch while a run goes on. None of it is private."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.typing import ArrayLike, Tree
from dpjax.clipping._clipped_grad import PerExample


class Metrics(NamedTuple):
    """Of the examples of a batch that are there. Not private: for the curator's eyes.

    Attributes:
      num_examples: how many there are, i[].
      loss: their mean loss, f[]; 0 if there is none.
      fraction_clipped: how many of them are longer than the clip norm, or not finite
        (these count for nothing in the sum), f[]; 0 if there is none.
      norm_quantiles: of the finite norms of their gradients, f[q]; NaN without any.
      num_contributing: how many examples have a finite gradient, i[]. The others add
        nothing to the sum. If no example contributes, noise alone moves the parameters.
      zero_sums: a tree of bool[], for each leaf of the gradient whether the
        clipped sum is exactly zero; None where no sum was given.
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
    """Sum up what `clipped_grad` says of each example, without the empty places.

    Args:
      per_example: what the function that `clipped_grad` made returns second.
      clip_norm: the bound C, f[].
      mask: bool[b], as the function was given it; None where all are there.
      quantiles: which of the norms' quantiles, each in [0, 1].
      grads: the clipped sum, which that function returns first, for `zero_sums`.

    Returns:
      `Metrics`.

    Raises:
      ValueError: clip_norm is not one positive number; mask has another shape.

    Privacy: none. It may be looked at by who may look at the data; to choose by it what
    is released, as a clip norm or when to stop, is not covered by any guarantee.

    Example:
      >>> import dpjax, jax.numpy as jnp
      >>> fn = dpjax.clipped_grad(lambda w, x: jnp.sum(w * x), 1.0)
      >>> mask = jnp.array([True, True, False])
      >>> _, per_example = fn(jnp.ones(2), jnp.diag(jnp.array([3.0, 0.5, 9.0]))[:, :2],
      ...                     mask=mask)
      >>> found = dpjax.metrics(per_example, 1.0, mask=mask)
      >>> print(found.num_examples, found.loss, found.fraction_clipped)
      2 1.75 0.5
    """
    validate.scalar("clip_norm", clip_norm)
    validate.positive("clip_norm", clip_norm)
    losses, norms = per_example.loss, per_example.norm
    mask = jnp.ones(losses.shape, bool) if mask is None else jnp.asarray(mask)
    if mask.shape != losses.shape or mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask must be a boolean array of shape {losses.shape}; got shape "
            f"{mask.shape} and dtype {mask.dtype}."
        )
    finite = mask & jnp.isfinite(norms)
    return Metrics(
        num_examples=jnp.sum(mask),
        loss=masked_mean(losses, mask),
        fraction_clipped=masked_mean(~(norms <= clip_norm), mask),
        norm_quantiles=jnp.nanquantile(
            jnp.where(finite, norms, jnp.nan), jnp.asarray(quantiles, norms.dtype)
        ),
        num_contributing=jnp.sum(finite),
        zero_sums=jax.tree.map(lambda g: ~jnp.any(g), grads),
    )


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of those that are there; 0 if none is."""
    dtype = jnp.promote_types(values.dtype, jnp.float32)
    total = jnp.sum(jnp.where(mask, values.astype(dtype), jnp.zeros((), dtype)))
    return total / jnp.maximum(jnp.sum(mask), 1).astype(dtype)
