"""Samplers by which every example takes part once in an epoch."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import ArrayLike, Key
from dpjax.sampling import _permutation
from dpjax.sampling._batch import Batch, check_number, sampler_key, sizes


def _epoch(n: int, b: int) -> tuple[jax.Array, jax.Array]:
    """The places of all steps, u32[k, b], 0 where the mask is False."""
    steps = -(-n // b)
    places = jnp.arange(steps * b, dtype=jnp.uint32).reshape(steps, b)
    return jnp.where(places < n, places, 0), places < n


def _step(n: int, b: int, step: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The row of `_epoch` at a step; beyond the last one nothing."""
    number = check_number("step", step)
    there = number < -(-n // b)
    places = jnp.where(there, number, 0) * np.uint32(b) + jnp.arange(
        b, dtype=jnp.uint32
    )
    mask = there & (places < n)
    return jnp.where(mask, places, 0), mask


def cyclic(num_examples: int, batch_size: int) -> Batch:
    """One epoch in the data's own order; every epoch is the same.

    Shuffle the data set once beforehand if its order means something.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, at least 1.

    Returns:
      A `Batch` of i32[k, b] and bool[k, b], k = ⌈n / b⌉ steps: every example once.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1.

    Privacy: an example takes part in the same step of every epoch (order "fixed"). Its
    place depends on the number of examples before it, so a guarantee holds under
    `ZERO_OUT` or `REPLACE`, not under `ADD_REMOVE`.

    Example:
      >>> batch = cyclic(5, 2)
      >>> print(batch.indices.tolist(), batch.mask[-1])
      [[0, 1], [2, 3], [4, 0]] [ True False]
    """
    places, mask = _epoch(*sizes(num_examples, batch_size))
    return Batch(places.astype(jnp.int32), mask)


def cyclic_step(num_examples: int, batch_size: int, *, step: ArrayLike) -> Batch:
    """One step of `cyclic`, at the cost of a step.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, at least 1.
      step: the step's number within its epoch, i[], from 0 to k − 1, k = ⌈n / b⌉; may
        be traced. Beyond them the batch is empty.

    Returns:
      A `Batch` of i32[b] and bool[b], row `step` of `cyclic`.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; a static step
        is not an integer from 0 to 2³² − 1.

    Privacy: that of `cyclic`.

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
    """One epoch in a random order of its own.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, at least 1.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1; may be traced, and then counts
        modulo 2³².

    Returns:
      A `Batch` of i32[k, b] and bool[k, b], k = ⌈n / b⌉ steps: every example once.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; a static epoch
        is out of range; key is not a typed key.

    Privacy: an example takes part in one step of each epoch, any one (order
    "reshuffled"), under `ZERO_OUT` or `REPLACE`. A guarantee for that order is the
    worst over all assignments of examples to steps, whatever draws them. So nothing
    depends on the order being uniformly random, which it is up to 2¹⁴ examples, or that
    of a pseudo-random permutation, which it is beyond.

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
    """One step of `reshuffled`, at the cost of a step.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, at least 1.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1; may be traced, and then counts
        modulo 2³².
      step: the step's number within the epoch, i[], from 0 to k − 1, k = ⌈n / b⌉; may
        be traced. Beyond them the batch is empty.

    Returns:
      A `Batch` of i32[b] and bool[b], row `step` of `reshuffled`.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; a static epoch
        or step is out of range; key is not a typed key.

    Privacy: that of `reshuffled`, if steps and epochs are taken in turn.

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
    """The examples that an epoch has at the places."""
    key = sampler_key(key, "sampling.reshuffled", "epoch", epoch)
    return Batch(jnp.where(mask, _permutation.values_at(key, n, places), 0), mask)
