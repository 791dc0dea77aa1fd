"""Samplers in which every example takes part exactly once in an epoch."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import ArrayLike, Key
from dpjax.sampling import _order
from dpjax.sampling._draws import Batch, check_number, sampler_key, sizes


def _epoch(n: int, b: int) -> tuple[jax.Array, jax.Array]:
    """For each step, the positions of its examples in the epoch's order, and the mask.

    Returns:
      u32[k, b], 0 where the mask is False, and bool[k, b].
    """
    steps = -(-n // b)
    # uint32, since k b may be above the largest int32.
    places = jnp.arange(steps * b, dtype=jnp.uint32).reshape(steps, b)
    return jnp.where(places < n, places, 0), places < n


def _step(n: int, b: int, step: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The row of `_epoch` for one step; all padding for a step after the last one."""
    number = check_number("step", step)
    there = number < -(-n // b)
    # Step 0 in place of a step out of range: the product must not wrap around to the
    # position of an example.
    places = jnp.where(there, number, 0) * np.uint32(b) + jnp.arange(
        b, dtype=jnp.uint32
    )
    mask = there & (places < n)
    return jnp.where(mask, places, 0), mask


def cyclic(num_examples: int, batch_size: int) -> Batch:
    """One epoch in the data's own order; every epoch has the same batches.

    Shuffle the data set once beforehand if its order carries information.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, at least 1.

    Returns:
      A `Batch` of i32[k, b] and bool[k, b], k = ⌈n / b⌉ steps: every example once.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1.

    Privacy: an example takes part in the same step of every epoch (order "fixed"). An
    example's step depends on the number of examples before it. A guarantee therefore
    holds under `ZERO_OUT` or `REPLACE`, and not under `ADD_REMOVE`.

    Example:
      >>> batch = cyclic(5, 2)
      >>> print(batch.indices.tolist(), batch.mask[-1])
      [[0, 1], [2, 3], [4, 0]] [ True False]
    """
    places, mask = _epoch(*sizes(num_examples, batch_size))
    return Batch(places.astype(jnp.int32), mask)


def cyclic_step(num_examples: int, batch_size: int, *, step: ArrayLike) -> Batch:
    """One step of `cyclic`, without computing the rest of the epoch.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, at least 1.
      step: the step's number within its epoch, i[], from 0 to k − 1, k = ⌈n / b⌉; may
        be traced. For a larger number the batch is all padding.

    Returns:
      A `Batch` of i32[b] and bool[b], row `step` of `cyclic`.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; a static step
        is not an integer from 0 to 2³² − 1.

    Privacy: as for `cyclic`.

    Example:
      >>> batch = cyclic_step(5, 2, step=2)
      >>> print(batch.indices, batch.mask)
      [4 0] [ True False]
    """
    places, mask = _step(*sizes(num_examples, batch_size), step)
    return Batch(places.astype(jnp.int32), mask)


def reshuffled(
    num_examples: int,
    batch_size: int,
    *,
    key: Key,
    epoch: ArrayLike,
) -> Batch:
    """One epoch in a random order, which differs from epoch to epoch.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, at least 1.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1. A traced number is taken modulo
        2³².

    Returns:
      A `Batch` of i32[k, b] and bool[k, b], k = ⌈n / b⌉ steps: every example once.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; a static epoch
        is out of range; key is not a typed key.

    Privacy: an example takes part in one arbitrary step of each epoch (order
    "reshuffled"), under `ZERO_OUT` or `REPLACE`. A guarantee for that order is the
    worst case over all assignments of examples to steps, however they are drawn. The
    guarantee therefore does not depend on the distribution of the order, which is
    uniform for n up to 2¹⁴ and that of a pseudo-random permutation for larger n.

    Example:
      >>> import jax
      >>> batch = reshuffled(4, 2, key=jax.random.key(0), epoch=3)
      >>> sorted(batch.indices.ravel().tolist())
      [0, 1, 2, 3]
    """
    n, b = sizes(num_examples, batch_size)
    places, mask = _epoch(n, b)
    return _permuted_examples(n, places, mask, key, epoch)


def reshuffled_step(
    num_examples: int,
    batch_size: int,
    *,
    key: Key,
    epoch: ArrayLike,
    step: ArrayLike,
) -> Batch:
    """One step of `reshuffled`, without computing the rest of the epoch.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, at least 1.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1. A traced number is taken modulo
        2³².
      step: the step's number within the epoch, i[], from 0 to k − 1, k = ⌈n / b⌉; may
        be traced. For a larger number the batch is all padding.

    Returns:
      A `Batch` of i32[b] and bool[b], row `step` of `reshuffled`.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; a static epoch
        or step is out of range; key is not a typed key.

    Privacy: as for `reshuffled`, if the steps of each epoch are run once each, and the
    epochs in turn.

    Example:
      >>> import jax
      >>> batch = reshuffled_step(
      ...     1_000_000_000, 2, key=jax.random.key(0), epoch=3, step=123_456_789)
      >>> batch.indices.shape
      (2,)
    """
    n, b = sizes(num_examples, batch_size)
    places, mask = _step(n, b, step)
    return _permuted_examples(n, places, mask, key, epoch)


def _permuted_examples(
    n: int,
    places: jax.Array,
    mask: jax.Array,
    key: Key,
    epoch: ArrayLike,
) -> Batch:
    """The batch of examples at the given positions of the epoch's random order."""
    key = sampler_key(key, "sampling.reshuffled", "epoch", epoch)
    return Batch(jnp.where(mask, _order.values_at(key, n, places), 0), mask)
