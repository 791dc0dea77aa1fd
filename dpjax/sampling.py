"""Which examples take part in a step: batches of a fixed shape, with a mask.

Pure functions of static sizes, a key and an epoch or step number: under jit, in a
scan, and resumed from any point, the same numbers give the same batches. (Key
implementations whose bits depend on `jax.vmap`, such as "rbg", give others under it.)
A step costs what its batch does, however many examples there are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _binomial, _distinct, _keys, _permutation, _validate

_MOST = 2**31 - 1  # positions are int32


class Batch(NamedTuple):
    """Examples that take part.

    Attributes:
      indices: i32[..., b], positions in the data set; 0 where masked.
      mask: bool[..., b], False where the place is empty. Pass it to `clipped_grad`.
    """

    indices: jax.Array
    mask: jax.Array


def _sizes(num_examples: int, batch_size: int, name: str = "batch_size"):
    """The two sizes as ints, or an error."""
    n = _validate.static_int("num_examples", num_examples, minimum=1)
    b = _validate.static_int(name, batch_size, minimum=1)
    if n > _MOST:
        raise ValueError(f"num_examples must be at most {_MOST}; got {num_examples!r}.")
    if b > _MOST:
        raise ValueError(f"{name} must be at most {_MOST}; got {batch_size!r}.")
    return n, b


def _number(name: str, value: jax.typing.ArrayLike) -> jax.Array:
    """The number of a step or epoch as u32[], or an error."""
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer) or jnp.ndim(value):
        raise ValueError(f"{name} must be one integer; got {value!r}.")
    known = _validate.concrete(value)
    if known is None:
        return jnp.asarray(value).astype(jnp.uint32)
    if not 0 <= known < 2**32:
        raise ValueError(f"{name} must be from 0 to 2**32 - 1; got {value!r}.")
    return jnp.asarray(known.astype(np.uint32))


def _own(
    key: jax.Array, consumer: str, name: str, number: jax.typing.ArrayLike
) -> jax.Array:
    """The key of one step or epoch of one sampler."""
    _validate.typed_key("key", key)
    return jax.random.fold_in(_keys.stream(key, consumer), _number(name, number))


def _epoch(n: int, b: int) -> tuple[jax.Array, jax.Array]:
    """The places of all steps, u32[k, b], 0 where the mask is False."""
    steps = -(-n // b)
    places = jnp.arange(steps * b, dtype=jnp.uint32).reshape(steps, b)
    return jnp.where(places < n, places, 0), places < n


def _step(n: int, b: int, step: jax.typing.ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The row of `_epoch` at a step; beyond the last one nothing."""
    number = _number("step", step)
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
    places, mask = _epoch(*_sizes(num_examples, batch_size))
    return Batch(places.astype(jnp.int32), mask)


def cyclic_step(
    num_examples: int, batch_size: int, *, step: jax.typing.ArrayLike
) -> Batch:
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
    places, mask = _step(*_sizes(num_examples, batch_size), step)
    return Batch(places.astype(jnp.int32), mask)


def reshuffled(
    num_examples: int,
    batch_size: int,
    *,
    key: jax.Array,
    epoch: jax.typing.ArrayLike,
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
    n, b = _sizes(num_examples, batch_size)
    places, mask = _epoch(n, b)
    return _reshuffled(n, places, mask, key, epoch)


def reshuffled_step(
    num_examples: int,
    batch_size: int,
    *,
    key: jax.Array,
    epoch: jax.typing.ArrayLike,
    step: jax.typing.ArrayLike,
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
    n, b = _sizes(num_examples, batch_size)
    places, mask = _step(n, b, step)
    return _reshuffled(n, places, mask, key, epoch)


def _reshuffled(
    n: int,
    places: jax.Array,
    mask: jax.Array,
    key: jax.Array,
    epoch: jax.typing.ArrayLike,
) -> Batch:
    """The examples that an epoch has at the places."""
    key = _own(key, "sampling.reshuffled", "epoch", epoch)
    return Batch(jnp.where(mask, _permutation.at(key, n, places), 0), mask)


def fixed_size(
    num_examples: int,
    batch_size: int,
    *,
    key: jax.Array,
    step: jax.typing.ArrayLike,
) -> Batch:
    """One step on a uniformly random subset of fixed size, drawn without replacement.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, from 1 to n.
      key: one typed key for the whole run; the step is folded into it.
      step: the step's number, i[], from 0 to 2³² − 1; may be traced, and then counts
        modulo 2³².

    Returns:
      A `Batch` of i32[b] and bool[b], all of it True, in uniformly random order.

    Raises:
      ValueError: a size is not a positive integer, n is above 2³¹ − 1 or b above n; a
        static step is out of range; key is not a typed key.

    Privacy: sampling of fixed size under `REPLACE`, at the rate b / n.

    Example:
      >>> import jax
      >>> batch = fixed_size(100, 3, key=jax.random.key(0), step=7)
      >>> len(set(batch.indices.tolist())), batch.mask.tolist()
      (3, [True, True, True])
    """
    n, b = _sizes(num_examples, batch_size)
    if b > n:
        raise ValueError(
            f"batch_size must be at most num_examples, {n}; got {batch_size!r}."
        )
    key = _own(key, "sampling.fixed_size", "step", step)
    return Batch(_distinct.distinct(key, n, b), jnp.ones(b, bool))


def poisson(
    num_examples: int,
    sampling_rate: float,
    *,
    max_batch_size: int,
    key: jax.Array,
    step: jax.typing.ArrayLike,
) -> Batch:
    """One step in which every example takes part with the same probability.

    How many do is drawn first, then who they are: in O(b log b) however large n is.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      sampling_rate: q, static, in [0, 1].
      max_batch_size: the batch's fixed shape b, static. When more than b examples are
        drawn, a uniformly random b of them are kept and the rest left out.
      key: one typed key for the whole run; the step is folded into it.
      step: the step's number, i[], from 0 to 2³² − 1; may be traced, and then counts
        modulo 2³².

    Returns:
      A `Batch` of i32[b] and bool[b], in uniformly random order, masked places last.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; sampling_rate
        is outside [0, 1]; a static step is out of range; key is not a typed key.

    Privacy: with no overflow, Poisson sampling at rate q under any adjacency, given
    uniform random bits. The number of examples is within 1e-31 of its distribution in
    total variation, and no example's probability is above q. Given their number all
    subsets are equally likely, exactly. Leaving examples out on overflow is another
    mechanism: account for it by `accounting.truncation`.

    Example:
      >>> import jax
      >>> batch = poisson(
      ...     1000, 0.01, max_batch_size=32, key=jax.random.key(0), step=0)
      >>> batch.indices.shape, bool(batch.mask.sum() < 32)
      ((32,), True)
    """
    n, b = _sizes(num_examples, max_batch_size, "max_batch_size")
    _validate.closed_unit("sampling_rate", sampling_rate)
    count_key, order_key = jax.random.split(_own(key, "sampling.poisson", "step", step))
    most = min(n, b)
    count = _binomial.draw(count_key, n, float(sampling_rate), most)
    # In random order, so that the first of them are a uniformly random subset.
    order = jnp.pad(_distinct.distinct(order_key, n, most), (0, b - most))
    mask = jnp.arange(b, dtype=jnp.int32) < count
    return Batch(jnp.where(mask, order, 0), mask)
