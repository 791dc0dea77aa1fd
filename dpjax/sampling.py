"""Which examples take part in a step: batches of a fixed shape, with a mask.

Pure functions of static sizes, a key and an epoch or step number: under jit, in a
scan, and resumed from any point, the same numbers give the same batches.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax import _validate


class Batch(NamedTuple):
    """Examples that take part.

    Attributes:
      indices: i32[..., b], positions in the data set; 0 where masked.
      mask: bool[..., b], False where the place is empty. Pass it to `clipped_grad`.
    """

    indices: jax.Array
    mask: jax.Array


def _epoch(order: jax.Array, batch_size: int) -> Batch:
    """The order cut into batches, the last one filled up with masked places."""
    num_steps = -(-order.shape[0] // batch_size)
    empty = num_steps * batch_size - order.shape[0]
    indices = jnp.pad(order, (0, empty)).reshape(num_steps, batch_size)
    mask = jnp.arange(num_steps * batch_size) < order.shape[0]
    return Batch(indices, mask.reshape(num_steps, batch_size))


def cyclic(num_examples: int, batch_size: int) -> Batch:
    """One epoch in the data's own order; every epoch is the same.

    Shuffle the data set once beforehand if its order means something.

    Args:
      num_examples: n, static, at least 1.
      batch_size: b, static, at least 1.

    Returns:
      A `Batch` of i32[k, b] and bool[k, b], k = ⌈n / b⌉ steps: every example once.

    Raises:
      ValueError: a size is not a positive integer.

    Privacy: an example takes part in the same step of every epoch (order "fixed"). Its
    place depends on the number of examples before it, so a guarantee holds under
    `ZERO_OUT` or `REPLACE`, not under `ADD_REMOVE`.

    Example:
      >>> batch = cyclic(5, 2)
      >>> print(batch.indices.tolist(), batch.mask[-1])
      [[0, 1], [2, 3], [4, 0]] [ True False]
    """
    num_examples = _validate.static_int("num_examples", num_examples, minimum=1)
    batch_size = _validate.static_int("batch_size", batch_size, minimum=1)
    return _epoch(jnp.arange(num_examples, dtype=jnp.int32), batch_size)


def reshuffled(
    num_examples: int,
    batch_size: int,
    *,
    key: jax.Array,
    epoch: jax.typing.ArrayLike,
) -> Batch:
    """One epoch in a random order of its own.

    Args:
      num_examples: n, static, at least 1.
      batch_size: b, static, at least 1.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[]; may be traced.

    Returns:
      A `Batch` of i32[k, b] and bool[k, b], k = ⌈n / b⌉ steps: every example once.

    Raises:
      ValueError: a size is not a positive integer; key is not a typed key.

    Privacy: an example takes part in one step of each epoch, any one (order
    "reshuffled"), under `ZERO_OUT` or `REPLACE`.

    Example:
      >>> import jax
      >>> batch = reshuffled(4, 2, key=jax.random.key(0), epoch=3)
      >>> sorted(batch.indices.ravel().tolist())
      [0, 1, 2, 3]
    """
    num_examples = _validate.static_int("num_examples", num_examples, minimum=1)
    batch_size = _validate.static_int("batch_size", batch_size, minimum=1)
    _validate.typed_key("key", key)
    order = jax.random.permutation(jax.random.fold_in(key, epoch), num_examples)
    return _epoch(order.astype(jnp.int32), batch_size)


def fixed_size(
    num_examples: int,
    batch_size: int,
    *,
    key: jax.Array,
    step: jax.typing.ArrayLike,
) -> Batch:
    """One step on a uniformly random subset of fixed size, drawn without replacement.

    Args:
      num_examples: n, static, at least 1.
      batch_size: b, static, from 1 to n.
      key: one typed key for the whole run; the step is folded into it.
      step: the step's number, i[]; may be traced.

    Returns:
      A `Batch` of i32[b] and bool[b], all of it True, in no particular order.

    Raises:
      ValueError: a size is not a positive integer, or b is above n; key is not a typed
        key.

    Privacy: sampling of fixed size under `REPLACE`, at the rate b / n.

    Reference: Floyd's algorithm (Bentley and Floyd, 1987) where b is small.

    Example:
      >>> import jax
      >>> batch = fixed_size(100, 3, key=jax.random.key(0), step=7)
      >>> len(set(batch.indices.tolist())), batch.mask.tolist()
      (3, [True, True, True])
    """
    num_examples = _validate.static_int("num_examples", num_examples, minimum=1)
    batch_size = _validate.static_int("batch_size", batch_size, minimum=1)
    _validate.typed_key("key", key)
    if batch_size > num_examples:
        raise ValueError(
            f"batch_size must be at most num_examples, {num_examples}; got "
            f"{batch_size!r}."
        )
    key = jax.random.fold_in(key, step)
    mask = jnp.ones(batch_size, bool)
    if batch_size * batch_size > 16 * num_examples:
        order = jax.random.permutation(key, num_examples)
        return Batch(order[:batch_size].astype(jnp.int32), mask)

    # The i-th draw is from the first n − b + i + 1 places; a place that is taken
    # already makes way for the last of them, which cannot be.
    last = jnp.arange(num_examples - batch_size, num_examples, dtype=jnp.int32)
    drawn = jax.random.randint(key, (batch_size,), 0, last + 1, jnp.int32)

    def put(i: jax.Array, taken: jax.Array) -> jax.Array:
        repeated = jnp.any(taken == drawn[i])
        return taken.at[i].set(jnp.where(repeated, last[i], drawn[i]))

    indices = jax.lax.fori_loop(0, batch_size, put, jnp.full(batch_size, -1, jnp.int32))
    return Batch(indices, mask)


def poisson(
    num_examples: int,
    sampling_rate: float,
    *,
    max_batch_size: int,
    key: jax.Array,
    step: jax.typing.ArrayLike,
) -> Batch:
    """One step in which every example takes part with the same probability.

    Args:
      num_examples: n, static, at least 1.
      sampling_rate: q, static, in [0, 1]. It is realised as ⌊2³² q⌋ / 2³², never more.
      max_batch_size: the batch's fixed shape b, static. When more than b examples are
        drawn, those with the lowest indices are kept and the rest left out.
      key: one typed key for the whole run; the step is folded into it.
      step: the step's number, i[]; may be traced.

    Returns:
      A `Batch` of i32[b] and bool[b].

    Raises:
      ValueError: a size is not a positive integer; sampling_rate is outside [0, 1];
        key is not a typed key.

    Privacy: with no overflow, Poisson sampling at rate q under any adjacency. Leaving
    examples out on overflow is another mechanism: add
    `accounting.truncation.overflow_delta` to δ.

    Example:
      >>> import jax
      >>> batch = poisson(
      ...     1000, 0.01, max_batch_size=32, key=jax.random.key(0), step=0)
      >>> batch.indices.shape, bool(batch.mask.sum() < 32)
      ((32,), True)
    """
    num_examples = _validate.static_int("num_examples", num_examples, minimum=1)
    max_batch_size = _validate.static_int("max_batch_size", max_batch_size, minimum=1)
    _validate.closed_unit("sampling_rate", sampling_rate)
    _validate.typed_key("key", key)
    # Integers: a float32 uniform has steps of 2⁻²³, coarse beside a rate of 1e-6.
    threshold = math.floor(sampling_rate * 2**32)
    bits = jax.random.bits(jax.random.fold_in(key, step), (num_examples,), jnp.uint32)
    drawn = (
        bits <= jnp.uint32(threshold - 1) if threshold else jnp.zeros_like(bits, bool)
    )
    (indices,) = jnp.nonzero(drawn, size=max_batch_size, fill_value=0)
    mask = jnp.arange(max_batch_size) < jnp.sum(drawn)
    return Batch(indices.astype(jnp.int32), mask)
