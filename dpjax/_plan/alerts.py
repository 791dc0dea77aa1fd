"""Warnings about parameters with zero gradients, which only the noise changes."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.meshes import are_concrete, like
from dpjax._plan.modules import Parts
from dpjax._plan.zero_gradients import are_outputs_zero

_FROZEN = (
    "Noise alone would change a frozen or unused parameter. Pass such a parameter to "
    "the loss as a further argument, not as a part of the model."
)
_BATCH_OF_ONE = (
    "The loss is called on one example at a time, and in a batch of one these "
    "gradients vanish. A loss that compares the examples of a batch, as contrastive "
    "losses, batch statistics and BatchNorm in training mode do, has no per-example "
    "gradients. Compare each example with fixed or public values instead."
)


class Alerts:
    """The state by which a function issues each warning about zero gradients once.

    Each function that `Plan.value_and_grad` or `Plan.metrics` returns has one `Alerts`.
    """

    def __init__(self) -> None:
        """Start in the state in which no warning has been issued."""
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
        """At the first call, warn of parameters whose gradients are zero for all data.

        Args:
          loss_and_aux: the loss, a function of the trained parameters and one example.
          loss_of_two: a function of the trained parameters, and of a batch of two
            examples with the random keys of one example; None if the loss takes no
            batch axis.
          parts: the model, as `modules.split` returns it.
          batch: the pair of the examples and their random keys, with a leading axis m.
        """
        if self._saw_loss:
            return
        self._saw_loss = True
        # Shapes and dtypes suffice: the analysis traces the loss and runs nothing.
        kinds = jax.tree.map(lambda x: jax.typeof(jnp.asarray(x)), batch)
        one = jax.tree.map(lambda kind: like(kind, kind.shape[1:], kind.dtype), kinds)
        zero = _are_gradients_zero(loss_and_aux, parts.trained, one)
        self._zero = [x for x, on in zip(parts.names, zero, strict=True) if on]
        if not self._zero:
            return
        reason = _FROZEN
        # If the gradients are not zero in a batch of two, the loss compares examples.
        if loss_of_two is not None:
            try:
                data = kinds[0]
                two = jax.tree.map(lambda x: like(x, (2, *x.shape[1:]), x.dtype), data)
                zero_in_two = _are_gradients_zero(
                    loss_of_two, parts.trained, (two, one[1])
                )
            except Exception:  # a loss may work for batches of one only
                zero_in_two = zero
            if zero_in_two != zero:
                reason = _BATCH_OF_ONE
        # Level 4 is the caller of the function that `Plan.value_and_grad` returned.
        warnings.warn(
            f"the gradient of the loss with respect to {self._zero} of the model is "
            "zero for all data, but noise is added to this gradient in every step. "
            f"{reason}",
            stacklevel=4,
        )

    def warn_of_sum(
        self, sums: Any, norms: jax.Array, mask: jax.Array, names: Sequence[str]
    ) -> None:
        """Warn if the clipped sum of a parameter is zero in the first usable batch.

        A batch is usable if at least one valid example has a finite gradient. Later
        batches are not checked. Under jit the values are unknown, so that no warning is
        issued.

        Args:
          sums: the clipped sum, a tree shaped like the trained parameters.
          norms: the norm of each example's gradient, f[m].
          mask: the mask of valid examples, bool[m].
          names: the path in the model of each leaf of sums.
        """
        arrays = [*jax.tree.leaves(sums), norms, mask]
        if self._saw_sum or not are_concrete(arrays):
            return
        if not np.any(np.asarray(mask) & np.isfinite(norms)):
            return
        self._saw_sum = True
        pairs = zip(names, jax.tree.leaves(sums), strict=True)
        # `warn_of_loss` has already warned of the parameters in self._zero.
        zero = [x for x, total in pairs if x not in self._zero and not jnp.any(total)]
        if zero:
            warnings.warn(
                f"the clipped sum for {zero} of the model is exactly zero in the "
                "first batch, so noise alone moves these parameters in this step. "
                "This is expected for the matrix A of LoRA while B is zero. In all "
                "other cases, check the loss.",
                stacklevel=4,
            )


def _are_gradients_zero(
    loss_and_aux: Callable[..., Any], trained: Any, examples: Any
) -> list[bool]:
    """Tell for each leaf of `trained` whether its gradient is zero for all data."""
    gradient = jax.grad(loss_and_aux, has_aux=True)
    closed = jax.make_jaxpr(lambda *args: gradient(*args)[0])(trained, examples)
    return are_outputs_zero(closed)
