"""Gradient accumulation for batches that do not fit on a device at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core import validate
from dpjax._plan.loader import Examples


def accumulate(loss_and_grad: Callable[..., Any], size: int) -> Callable[..., Any]:
    """Compute the clipped sum of a large batch in parts, one part at a time.

    A loop on the host adds the sums of the parts, and the optimizer then adds noise
    once to the total. `optax.MultiSteps` accumulates ordinary gradients, but is not
    suitable here: it would divide the sum by the number of parts and leave the noise
    as it is. Inside one jitted call, `microbatch_size` of `Plan.value_and_grad` has the
    same effect.

    Args:
      loss_and_grad: the function that `Plan.value_and_grad` returns, with or without
        `jax.jit`. All parts have one size, so that it compiles once.
      size: how many examples are sent to the device at a time.

    Returns:
      `fn(model, examples, *others)`, which is not for jit, with the results of
      loss_and_grad up to rounding. The counters of a flax.nnx model are incremented for
      each part, so that dropout with them differs from a call with the whole batch.

    Raises:
      ValueError: size is below 1.

    Privacy: the results have the sensitivity of those of loss_and_grad.

    Example:
      >>> import dpjax, jax, jax.numpy as jnp, numpy as np
      >>> plan = dpjax.plan(num_examples=100, batch_size=50, num_steps=10, delta=1e-3,
      ...                   noise_multiplier=1.0, clip_norm=1.0)
      >>> whole = jax.jit(plan.value_and_grad(lambda w, x: jnp.mean(x @ w)))
      >>> in_parts = dpjax.accumulate(whole, 16)
      >>> data = np.linspace(0.0, 1.0, 200).reshape(100, 2).astype(np.float32)
      >>> batch = plan.load(data, 0, jax.random.key(0))
      >>> w = jnp.ones(2)
      >>> bool(jnp.allclose(whole(w, batch)[1], in_parts(w, batch)[1]))
      True
    """
    size = validate.static_int("size", size, minimum=1)

    def fn(
        model: Any, examples: Examples, *others: Any, **named: Any
    ) -> tuple[Any, Any]:
        counts, values, auxes, total = [], [], [], None
        for part in examples.parts(size):
            out, grads = loss_and_grad(model, part, *others, **named)
            value, *aux = out if isinstance(out, tuple) else (out,)
            counts.append(np.sum(part.mask))
            values.append(value)
            auxes.append(aux)
            total = grads if total is None else optax.tree.add(total, grads)
        # The batch's mean weighs each part's mean by its number of valid examples.
        weights = np.array(counts) / max(sum(counts), 1)
        value = sum(w * v for w, v in zip(weights, values, strict=True))
        if not auxes[0]:
            return value, total
        # The last part may have padding beyond the end of the batch, which is cut off.
        rows = np.size(examples.mask)
        aux = jax.tree.map(
            lambda *xs: jnp.concatenate(xs)[:rows], *(aux for (aux,) in auxes)
        )
        return (value, aux), total

    return fn
