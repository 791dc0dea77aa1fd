"""Process a batch in microbatches, one after the other.

Consecutive examples go to different microbatches, as cards are dealt to players. So
each microbatch is sharded over the same devices as the batch, if the number of devices
divides the microbatch size. `optax.microbatching` also distributes examples in this
way, but supports no typed keys, and requires that the microbatch size divides the batch
size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax._core.dtypes import at_least_float32
from dpjax._core.meshes import (
    add_varying_axes,
    leading_axis,
    let_compiler_shard,
    num_shards,
    sharded_zeros,
    spec_of,
    varying_axes,
)
from dpjax.clipping._clip import Inputs, Summed


def in_microbatches(
    sum_of: Callable[..., Summed],
    size: int | None,
    inputs: Inputs,
    *,
    wide: bool = False,
) -> Summed:
    """Sum clipped gradients over a batch, one microbatch after another.

    Args:
      sum_of: a function of the `Inputs` of one microbatch. It returns the sums of the
        microbatch's clipped gradients, which have the shapes of the parameter leaves,
        and the per-example results.
      size: the number of examples in a microbatch; None for the whole batch.
      inputs: the parameters, the examples and the mask of the batch.
      wide: whether the sums are in float64.

    Returns:
      The sums, in float32 or wider, and the per-example results in the batch's order.
    """
    leaves, examples, mask = inputs
    # If one microbatch holds the whole batch, no scan is needed.
    if size is None or size >= mask.shape[0]:
        return sum_of(inputs)
    batch, parts = mask.shape[0], -(-mask.shape[0] // size)
    arrays = [mask, *examples]
    batch_axis = leading_axis(examples)
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in (*leaves, *arrays)))

    def split_batch(*arrays: jax.Array) -> list[jax.Array]:
        # The batch is padded with copies of the last example to fill all microbatches.
        # The mask is False for the copies.
        indices = jnp.minimum(jnp.arange(parts * size), batch - 1)
        if parts * size > batch:
            arrays = tuple(x[indices] for x in arrays)
        mask, *examples = arrays
        mask = mask & (jnp.arange(parts * size) < batch)
        # Microbatch j gets the examples j, j + parts, j + 2 parts, and so on.
        return [
            x.reshape(size, parts, *x.shape[1:]).swapaxes(0, 1)
            for x in (mask, *examples)
        ]

    def merge_outputs(*outputs: jax.Array) -> list[jax.Array]:
        # This is the inverse of `split_batch`, without the padding.
        return [
            x.swapaxes(0, 1).reshape(parts * size, *x.shape[2:])[:batch]
            for x in outputs
        ]

    def step(sums: list[jax.Array], part: list[jax.Array]) -> Summed:
        mask, *examples = part
        more, per_example = sum_of(Inputs(leaves, examples, mask))
        total = [a + b for a, b in zip(sums, add_varying_axes(more, axes), strict=True)]
        return total, per_example

    # A microbatch can be sharded only if the number of devices divides its size.
    microbatch_axis = batch_axis if size % num_shards(examples) == 0 else None
    shardings = [jax.P(None, microbatch_axis, *spec_of(x)[1:]) for x in arrays]
    microbatches = let_compiler_shard(split_batch, arrays, shardings)(*arrays)
    dtypes = [jnp.float64 if wide else at_least_float32(x.dtype) for x in leaves]
    zeros = [
        sharded_zeros(jax.typeof(x.astype(dtype)), x.shape)
        for x, dtype in zip(leaves, dtypes, strict=True)
    ]
    # In `jax.shard_map` a scan's carry must vary over the same axes in all iterations.
    sums, outputs = jax.lax.scan(step, add_varying_axes(zeros, axes), microbatches)
    outputs, treedef = jax.tree.flatten(outputs)
    shardings = [jax.P(batch_axis, *spec_of(x)[2:]) for x in outputs]
    outputs = let_compiler_shard(merge_outputs, outputs, shardings)(*outputs)
    return sums, treedef.unflatten(outputs)
