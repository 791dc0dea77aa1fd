"""Samplers that draw a batch anew in each step, or visit all examples in an epoch.

The module begins with the code that all samplers share: batches, checks and keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import keys, validate
from dpjax._core.typing import ArrayLike, Key
from dpjax.sampling import _binomial, _order

MOST = 2**31 - 1  # the maximum int32, which is the dtype of a batch's indices


class Batch(NamedTuple):
    """The examples that take part in a step, in an array of fixed size with padding.

    Attributes:
      indices: i32[..., b], the examples' positions in the data set; 0 in padding.
      mask: bool[..., b], True for an example and False for padding. Pass the mask to
        `clipped_grad`.
    """

    indices: jax.Array
    mask: jax.Array


def check_sizes(**sizes: int) -> list[int]:
    """Return the sizes as Python ints.

    Raise ValueError if a size is not an integer from 1 to 2³¹ − 1.
    """
    for name, size in sizes.items():
        validate.static_int(name, size, minimum=1)
        validate.at_most(name, size, MOST)
    return [int(size) for size in sizes.values()]


def check_number(name: str, value: ArrayLike) -> jax.Array:
    """Return a step or epoch number as u32[].

    Raise ValueError if the number is not one integer, or is a concrete number that is
    not from 0 to 2³² − 1. A traced number is used modulo 2³². `name` is the number's
    name in the message.
    """
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer) or jnp.ndim(value):
        raise ValueError(f"{name} must be one integer; got {value!r}.")
    concrete = validate.concrete(value)
    if concrete is None:
        # The value of a traced number is unknown here, and is used modulo 2³².
        return jnp.asarray(value).astype(jnp.uint32)
    if not 0 <= concrete < 2**32:
        raise ValueError(f"{name} must be from 0 to 2**32 - 1; got {value!r}.")
    return jnp.asarray(concrete.astype(np.uint32))


def sampler_key(key: Key, consumer: str, name: str, number: ArrayLike) -> jax.Array:
    """The key from which one sampler draws in one step or epoch.

    Args:
      key: the run's typed key.
      consumer: the sampler's name, from which a separate key is derived.
      name: "step" or "epoch", for error messages.
      number: the number of the step or epoch.
    """
    validate.typed_key("key", key)
    # Each sampler has its own stream, so that its draws are independent of the noise.
    return jax.random.fold_in(keys.stream(key, consumer), check_number(name, number))


def fixed_size(
    num_examples: int, batch_size: int, *, key: Key, step: ArrayLike
) -> Batch:
    """One step with a uniformly random subset of the examples, of fixed size.

    The examples are drawn without replacement.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, from 1 to n.
      key: one typed key for the whole run; the step is folded into it.
      step: the step's number, i[], from 0 to 2³² − 1. A traced number is used modulo
        2³².

    Returns:
      A `Batch` of i32[b] and bool[b], in uniformly random order. The mask is all True.

    Raises:
      ValueError: a size is not a positive integer; n is above 2³¹ − 1; b is above n; a
        static step is out of range; key is not a typed key.

    Privacy: under `REPLACE`, the sampler is sampling without replacement with fixed
    size, at sampling rate b / n, provided that the random bits are uniform.

    Example:
      >>> import jax
      >>> batch = fixed_size(100, 3, key=jax.random.key(0), step=17)
      >>> len(set(batch.indices.tolist())), batch.mask.tolist()
      (3, [True, True, True])
    """
    n, b = check_sizes(num_examples=num_examples, batch_size=batch_size)
    validate.at_most("batch_size", batch_size, n, "num_examples, ")
    key = sampler_key(key, "sampling.fixed_size", "step", step)
    return Batch(_order.distinct(key, n, b), jnp.ones(b, bool))


def poisson(
    num_examples: int,
    sampling_rate: float,
    *,
    max_batch_size: int,
    key: Key,
    step: ArrayLike,
) -> Batch:
    """One step in which each example takes part independently with probability q.

    The number of examples is drawn first, and the examples after that. The time is
    O(b log b) for every n. In addition, the first call with given n, q and b tabulates
    the distribution of the number of examples, in time O(√n).

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      sampling_rate: q, static, in [0, 1].
      max_batch_size: b, static, the fixed size of the batch. If more than b examples
        are drawn, only b of them take part, chosen uniformly at random.
      key: one typed key for the whole run; the step is folded into it.
      step: the step's number, i[], from 0 to 2³² − 1. A traced number is used modulo
        2³².

    Returns:
      A `Batch` of i32[b] and bool[b], in uniformly random order, with padding last.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; sampling_rate
        is outside [0, 1]; a static step is out of range; key is not a typed key.

    Privacy: without overflow, the sampler is Poisson sampling at rate q under any
    adjacency, provided that the random bits are uniform. The distribution of the number
    of examples is within 1e-31 of the binomial distribution in total variation, and no
    example's probability is above q. Given the number, all subsets of this size are
    exactly equally likely. Leaving examples out on overflow is a different mechanism,
    for which `accounting.truncation` accounts.

    Example:
      >>> import jax
      >>> batch = poisson(
      ...     1000, 0.01, max_batch_size=32, key=jax.random.key(0), step=0)
      >>> batch.indices.shape, bool(batch.mask.sum() < 32)
      ((32,), True)
    """
    n, b = check_sizes(num_examples=num_examples, max_batch_size=max_batch_size)
    validate.closed_unit("sampling_rate", sampling_rate)
    step_key = sampler_key(key, "sampling.poisson", "step", step)
    return _poisson(n, float(sampling_rate), b, step_key)


def _poisson(n: int, rate: float, b: int, key: jax.Array) -> Batch:
    """Sample each of n examples with probability `rate`; retain at most b of them."""
    count_key, order_key = jax.random.split(key)
    size = min(n, b)
    count = _binomial.draw(count_key, n, rate, size)
    # The order is uniformly random. So its first `count` numbers are a uniformly random
    # subset. The shape is static, and `count` enters only through the mask.
    order = jnp.pad(_order.distinct(order_key, n, size), (0, b - size))
    mask = jnp.arange(b, dtype=jnp.int32) < count
    return Batch(jnp.where(mask, order, 0), mask)


def cyclic_poisson(
    num_examples: int,
    sampling_rate: float,
    *,
    num_groups: int,
    max_batch_size: int,
    key: Key,
    step: ArrayLike,
) -> Batch:
    """One step of Poisson sampling from one of p fixed groups of examples.

    Example i is in group i mod p, and step t samples group t mod p. So no example takes
    part in two of any p consecutive steps.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      sampling_rate: q, static, in [0, 1]. If the accountant assumes n_b steps per
        epoch, q must be p / n_b; the expected batch size is then n / n_b.
      num_groups: p, static, from 1 to n.
      max_batch_size: b, static, the fixed size of the batch. A group has ⌈n / p⌉ slots
        for examples (see Returns). If more than b slots are drawn, only b of the drawn
        slots are used, chosen uniformly at random.
      key: one typed key for the whole run; the step is folded into it.
      step: the step's number, i[], from 0 to 2³² − 1. A traced number is used modulo
        2³².

    Returns:
      A `Batch` of i32[b] and bool[b], in uniformly random order. The sampler draws from
      ⌈n / p⌉ slots per group. A group with ⌈n / p⌉ − 1 examples has one slot without an
      example. If this slot is drawn, the batch has padding in its place. So padding
      need not be last.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; num_groups is
        above n; sampling_rate is outside [0, 1]; a static step is out of range; key is
        not a typed key.

    Privacy: without overflow, the sampler is Poisson sampling of the group at rate q,
    independently in every step, provided that the random bits are uniform. An example's
    group depends on the number of examples before the example. So a guarantee holds
    under `ZERO_OUT` or `REPLACE`, and under `ADD_REMOVE` only for p = 1. Leaving
    examples out on overflow is a different mechanism, for which `accounting.truncation`
    with ⌈n / p⌉ examples accounts.

    Reference: Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153.

    Example:
      >>> import jax
      >>> batch = cyclic_poisson(
      ...     90, 0.5, num_groups=9, max_batch_size=9, key=jax.random.key(0), step=16)
      >>> set((batch.indices[batch.mask] % 9).tolist())
      {7}
    """
    n, b = check_sizes(num_examples=num_examples, max_batch_size=max_batch_size)
    validate.closed_unit("sampling_rate", sampling_rate)
    p = validate.static_int("num_groups", num_groups, minimum=1)
    validate.at_most("num_groups", num_groups, n, "num_examples, ")
    step_key = sampler_key(key, "sampling.cyclic_poisson", "step", step)
    drawn = _poisson(-(-n // p), float(sampling_rate), b, step_key)
    # uint32 can hold ⌈n / p⌉ p, which may exceed int32.
    group = check_number("step", step) % np.uint32(p)
    positions = drawn.indices.astype(jnp.uint32) * np.uint32(p) + group
    mask = drawn.mask & (positions < n)
    return Batch(jnp.where(mask, positions, 0).astype(jnp.int32), mask)


def _epoch(n: int, b: int) -> tuple[jax.Array, jax.Array]:
    """The positions of each step's examples in the epoch's order, and a mask.

    The epoch has n examples and k = ⌈n / b⌉ steps with at most b examples each.

    Returns:
      The positions, u32[k, b], which are 0 in padding; and the mask, bool[k, b], which
      is False in padding.
    """
    steps = jnp.arange(-(-n // b), dtype=jnp.uint32)
    return jax.vmap(lambda step: _step(n, b, step))(steps)


def _step(n: int, b: int, step: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The positions u32[b] and the mask bool[b] of one step, as in `_epoch`.

    A step after the epoch's last step has only padding.
    """
    number = check_number("step", step)
    in_epoch = number < -(-n // b)
    # Step 0 replaces a step out of range. Otherwise the product could wrap around to
    # the position of an example.
    first = jnp.where(in_epoch, number, 0) * np.uint32(b)
    positions = first + jnp.arange(b, dtype=jnp.uint32)
    mask = in_epoch & (positions < n)
    return jnp.where(mask, positions, 0), mask


def cyclic(num_examples: int, batch_size: int) -> Batch:
    """One epoch in the data's own order; every epoch has the same batches.

    If the data set is ordered in some way, shuffle the data set once before the run.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, at least 1.

    Returns:
      A `Batch` of i32[k, b] and bool[k, b] with k = ⌈n / b⌉ steps. Every example takes
      part once.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1.

    Privacy: an example takes part in the same step of every epoch. Accountants call
    this order "fixed". An example's step depends on the number of examples before the
    example. So a guarantee holds under `ZERO_OUT` or `REPLACE`, and not under
    `ADD_REMOVE`.

    Example:
      >>> batch = cyclic(5, 2)
      >>> print(batch.indices.tolist(), batch.mask[-1])
      [[0, 1], [2, 3], [4, 0]] [ True False]
    """
    n, b = check_sizes(num_examples=num_examples, batch_size=batch_size)
    positions, mask = _epoch(n, b)
    return Batch(positions.astype(jnp.int32), mask)


def cyclic_step(num_examples: int, batch_size: int, *, step: ArrayLike) -> Batch:
    """One step of `cyclic`, without computing the rest of the epoch.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, at least 1.
      step: the step's number within its epoch, i[], from 0 to k − 1, k = ⌈n / b⌉; may
        be traced. For a larger number the batch consists of padding.

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
    n, b = check_sizes(num_examples=num_examples, batch_size=batch_size)
    positions, mask = _step(n, b, step)
    return Batch(positions.astype(jnp.int32), mask)


def reshuffled(
    num_examples: int, batch_size: int, *, key: Key, epoch: ArrayLike
) -> Batch:
    """One epoch in a random order, which is new in each epoch.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, at least 1.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1. A traced number is used modulo
        2³².

    Returns:
      A `Batch` of i32[k, b] and bool[k, b] with k = ⌈n / b⌉ steps. Every example takes
      part once.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; a static epoch
        is out of range; key is not a typed key.

    Privacy: under `ZERO_OUT` or `REPLACE`, an example takes part in one arbitrary step
    of each epoch. Accountants call this order "reshuffled", and take the worst case
    over all assignments of examples to steps. So the guarantee does not depend on the
    distribution of the order. The order is uniformly random for n up to 2¹⁴, and a
    pseudo-random permutation for larger n.

    Example:
      >>> import jax
      >>> batch = reshuffled(4, 2, key=jax.random.key(0), epoch=3)
      >>> sorted(batch.indices.ravel().tolist())
      [0, 1, 2, 3]
    """
    n, b = check_sizes(num_examples=num_examples, batch_size=batch_size)
    return _permuted_examples(n, *_epoch(n, b), key, epoch)


def reshuffled_step(
    num_examples: int, batch_size: int, *, key: Key, epoch: ArrayLike, step: ArrayLike
) -> Batch:
    """One step of `reshuffled`, without computing the rest of the epoch.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, at least 1.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1. A traced number is used modulo
        2³².
      step: the step's number within the epoch, i[], from 0 to k − 1, k = ⌈n / b⌉; may
        be traced. For a larger number the batch consists of padding.

    Returns:
      A `Batch` of i32[b] and bool[b], row `step` of `reshuffled`.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; a static epoch
        or step is out of range; key is not a typed key.

    Privacy: a run has the privacy of `reshuffled` if the run does each step of an epoch
    once, before the run begins the next epoch.

    Example:
      >>> import jax
      >>> batch = reshuffled_step(
      ...     1_000_000_000, 2, key=jax.random.key(0), epoch=3, step=123_456_789)
      >>> batch.indices.shape
      (2,)
    """
    n, b = check_sizes(num_examples=num_examples, batch_size=batch_size)
    return _permuted_examples(n, *_step(n, b, step), key, epoch)


def _permuted_examples(
    n: int, positions: jax.Array, mask: jax.Array, key: Key, epoch: ArrayLike
) -> Batch:
    """The batch of the examples at given positions of an epoch's random order.

    `mask` is False for padding. The indices of padding become 0.
    """
    key = sampler_key(key, "sampling.reshuffled", "epoch", epoch)
    return Batch(jnp.where(mask, _order.values_at(key, n, positions), 0), mask)
