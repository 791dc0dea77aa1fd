"""Batches that a device cannot hold at once: the sum of the sums of their parts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core import validate
from dpjax._plan.loader import Examples


def accumulate(loss_and_grad: Callable[..., Any], size: int) -> Callable[..., Any]:
    """Take the sum of a large batch in parts, one after the other from the host.

    It is what `optax.MultiSteps` does for plain gradients. That would divide the sum
    by the number of parts and leave the noise as it is; here the noise is added once,
    to the sum. Inside one jitted call, `microbatch_size` of `Plan.value_and_grad` does
    the same.

    Args:
      loss_and_grad: what `Plan.value_and_grad` made, under `jax.jit` if you like: it is
        called with parts of one size.
      size: how many examples go to the device at a time.

    Returns:
      `fn(model, examples, *others)`, not for jit, with the same results up to rounding.
      (The counters of a flax.nnx model move on with each part, and with them its
      dropout.)

    Raises:
      ValueError: size is below 1.

    Privacy: that of loss_and_grad.

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
        weights = np.array(counts) / max(sum(counts), 1)
        value = sum(w * v for w, v in zip(weights, values, strict=True))
        if not auxes[0]:
            return value, total
        rows = np.size(examples.mask)
        aux = jax.tree.map(
            lambda *xs: jnp.concatenate(xs)[:rows], *(aux for (aux,) in auxes)
        )
        return (value, aux), total

    return fn
