"""Warnings about parameters that noise moves and no gradient trains."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._meshes import are_concrete, like
from dpjax._plan.modules import Parts
from dpjax._plan.zero_gradients import zero_outputs

_FROZEN = (
    "What is frozen or unused would move at random. Hand it to the loss as a further "
    "argument in place of a part of the model."
)
_BATCH_OF_ONE = (
    "The loss is called on one example at a time, and in a batch of one these "
    "gradients vanish. A loss that compares the examples of a batch, as contrastive "
    "losses, batch statistics and BatchNorm in training mode do, has no per-example "
    "gradients. Compare each example with fixed or public values instead."
)


class Alerts:
    """What one function of `Plan.value_and_grad` has to say, each thing once."""

    def __init__(self) -> None:
        """Nothing was said."""
        self._saw_loss = False
        self._saw_sum = False
        self._zero: list[str] = []

    def warn_of_loss(
        self,
        loss_and_aux: Callable[..., Any],
        loss_of_two: Callable[..., Any] | None,
        parts: Parts,
        batch: Any,
    ) -> None:
        """Warn of gradients that are zero whatever the data.

        Args:
          loss_and_aux: of the trained parameters and one example.
          loss_of_two: the same for two examples as a batch; None where the loss takes
            no batch.
          parts: the model.
          batch: the examples, with a leading axis.
        """
        if self._saw_loss:
            return
        self._saw_loss = True
        kinds = jax.tree.map(lambda x: jax.typeof(jnp.asarray(x)), batch)
        one = jax.tree.map(lambda kind: like(kind, kind.shape[1:], kind.dtype), kinds)
        zero = _zero_gradients(loss_and_aux, parts.trained, one)
        self._zero = [x for x, on in zip(parts.names, zero, strict=True) if on]
        if not self._zero:
            return
        reason = _FROZEN
        if loss_of_two is not None:
            try:
                zero_in_two = _zero_gradients(loss_of_two, parts.trained, one)
            except Exception:  # a loss may be for batches of one alone
                zero_in_two = zero
            if zero_in_two != zero:
                reason = _BATCH_OF_ONE
        warnings.warn(
            f"the loss's gradient by {self._zero} of the model is zero whatever the "
            f"data, and noise is added to it in every step. {reason}",
            stacklevel=4,
        )

    def warn_of_sum(
        self, sums: Any, norms: jax.Array, mask: jax.Array, names: Sequence[str]
    ) -> None:
        """Warn of sums that are zero in the first batch, outside jit."""
        arrays = [*jax.tree.leaves(sums), norms, mask]
        if self._saw_sum or not are_concrete(arrays):
            return
        if not np.any(np.asarray(mask) & np.isfinite(norms)):
            return
        self._saw_sum = True
        pairs = zip(names, jax.tree.leaves(sums), strict=True)
        zero = [x for x, total in pairs if x not in self._zero and not jnp.any(total)]
        if zero:
            warnings.warn(
                f"every example's gradient by {zero} of the model is zero in the first "
                "batch, so that noise alone moves these parameters. That is right for "
                "a factor of a zero, as A is in LoRA while B is zero; otherwise look "
                "at the loss.",
                stacklevel=4,
            )


def _zero_gradients(
    loss_and_aux: Callable[..., Any], trained: Any, examples: Any
) -> list[bool]:
    """Whether the gradient by each trained leaf is zero whatever the data."""
    gradient = jax.grad(loss_and_aux, has_aux=True)
    closed = jax.make_jaxpr(lambda *args: gradient(*args)[0])(trained, examples)
    return zero_outputs(closed)
