"""A batch in parts, one after the other.

Examples are dealt out like cards, so that each part is spread over the devices that
the batch is spread over. `optax.microbatching` does so too, but neither for typed keys
nor for sizes that do not divide.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from dpjax._core.dtypes import at_least_float32
from dpjax._core.meshes import (
    compiler_sharded,
    leading_axis,
    num_shards,
    varying,
    varying_axes,
    zeros_like,
)

Out = TypeVar("Out")


def in_microbatches(
    clipped_sum: Callable[..., tuple[Sequence[jax.Array], Out]],
    size: int,
    leaves: Sequence[jax.Array],
    examples: Sequence[jax.Array],
    mask: jax.Array,
) -> tuple[list[jax.Array], Out]:
    """The sums of a batch by those of its parts, and what each example gave.

    Args:
      clipped_sum: from a part's mask and examples to its sums, shaped like the leaves,
        and a tree of arrays with a leading axis of examples.
      size: the number of examples in a part.
      leaves: the parameters' leaves.
      examples: arrays with a leading axis b.
      mask: b[b].
    """
    batch, parts = mask.shape[0], -(-mask.shape[0] // size)
    inputs = [mask, *examples]
    spread = leading_axis(examples)
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in (*leaves, *inputs)))

    def deal(*inputs: jax.Array) -> list[jax.Array]:
        # A repeated example is no example: its mask is off.
        places = jnp.minimum(jnp.arange(parts * size), batch - 1)
        if parts * size > batch:
            inputs = tuple(x[places] for x in inputs)
        mask, *examples = inputs
        mask = mask & (jnp.arange(parts * size) < batch)
        return [
            x.reshape(size, parts, *x.shape[1:]).swapaxes(0, 1)
            for x in (mask, *examples)
        ]

    def gather(*outputs: jax.Array) -> list[jax.Array]:
        return [
            x.swapaxes(0, 1).reshape(parts * size, *x.shape[2:])[:batch]
            for x in outputs
        ]

    def step(
        sums: list[jax.Array], part: list[jax.Array]
    ) -> tuple[list[jax.Array], Out]:
        more, per_example = clipped_sum(*part)
        added = [a + b for a, b in zip(sums, varying(more, axes), strict=True)]
        return added, per_example

    across = spread if size % num_shards(examples) == 0 else None
    shardings = [jax.P(None, across, *_spec(x)[1:]) for x in inputs]
    dealt = compiler_sharded(deal, inputs, shardings)(*inputs)
    zeros = [
        zeros_like(jax.typeof(x.astype(at_least_float32(x.dtype))), x.shape)
        for x in leaves
    ]
    sums, outputs = jax.lax.scan(step, varying(zeros, axes), dealt)
    outputs, treedef = jax.tree.flatten(outputs)
    shardings = [jax.P(spread, *_spec(x)[2:]) for x in outputs]
    outputs = compiler_sharded(gather, outputs, shardings)(*outputs)
    return sums, treedef.unflatten(outputs)


def _spec(x: jax.Array) -> jax.P:
    return jax.typeof(x).sharding.spec
