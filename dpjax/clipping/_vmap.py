"""The vmap engine, which forms all per-example gradients and clips them."""

from collections.abc import Sequence

import jax
import jax.extend.core as jex

from dpjax._core.dtypes import widen
from dpjax._core.typing import ArrayLike, Arrays
from dpjax.clipping import _clip
from dpjax.clipping._bookkeeping.jaxpr.equations import evaluate
from dpjax.clipping._clip import Inputs, PerExample, Summed, Wide


def clipped_sum(
    closed: jex.ClosedJaxpr,
    groups: Sequence[int],
    clip_norms: Sequence[ArrayLike],
    inputs: Inputs,
    *,
    wide: Wide | None = None,
) -> Summed:
    """The sum of clipped gradients, with each example's loss, norm and aux.

    Args:
      closed: the loss's jaxpr, which maps the parameter leaves and one example to the
        loss and aux.
      groups: for each parameter leaf, the number of its group (`Groups`).
      clip_norms: for each group, the bound on the norm.
      inputs: the parameters, the examples and the mask of the batch.
      wide: the setting for sums in float64; None for sums in float32.
    """

    def one(*example: jax.Array) -> tuple[list[jax.Array], jax.Array, list[jax.Array]]:
        def loss_and_aux(leaves: Arrays) -> tuple[jax.Array, list[jax.Array]]:
            loss, *aux = evaluate(closed, [*leaves, *example])
            return loss, aux

        value_and_grad = jax.value_and_grad(loss_and_aux, has_aux=True)
        (loss, aux), gradient = value_and_grad(list(inputs.leaves))
        # In float32 or wider, so that norms and sums are not rounded to narrow dtypes.
        return widen(gradient), loss, aux

    with _clip.loss_scope(wide):
        gradients, loss, aux = jax.vmap(one)(*inputs.examples)

    def sum_gradients(
        gradients: Arrays, clip_norms: Sequence[ArrayLike], mask: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        def squares_of(leaves: Arrays) -> list[jax.Array]:
            return _clip.group_squares(leaves, groups, clip_norms)

        squares = jax.vmap(squares_of)(gradients)
        finite, scales, norm = _clip.clip_scales(squares, clip_norms, mask)
        return [
            _clip.sum_in_memory(x, scales[group], finite, wide=wide is not None)
            for x, group in zip(gradients, groups, strict=True)
        ], norm

    summed = inputs.let_compiler_shard(sum_gradients)
    grads, norm = summed(gradients, clip_norms, inputs.mask)
    return grads, PerExample(loss, norm, aux)
