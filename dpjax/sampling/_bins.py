"""Random bins: every example picks one of the batches of an epoch for itself.

Nobody's choice says anything of another's, which a random order of full batches does
not give: there the places of all others tell that of the last.

Up to 2¹⁶ examples all choices are drawn, and a bin is found by looking at them. Beyond,
how many examples are in the bins before it and in it is drawn first, as sums of coins
(`_counts`), and then who has these places in a random order (`_order`).
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike, Key
from dpjax.sampling import _counts, _order
from dpjax.sampling._batch import Batch, check_number, sampler_key, sizes

# All choices are drawn up to so many examples.
_ALL = 2**16
# Draws an example has, of which the first is taken that favours no bin.
_TRIES = 4


def _choices(n: int, m: int, key: Key, epoch: ArrayLike) -> jax.Array:
    """Everyone's bin, i32[n].

    A draw favours small bins beyond the multiples of m, which fewer than m of 2³² are.
    All four are with probability (m / 2³²)⁴, and only the last one's remainder is then
    not uniform.
    """
    key = sampler_key(key, "sampling.random_bins", "epoch", epoch)
    draws = jax.random.bits(key, (_TRIES, n), jnp.uint32)
    fair = draws <= np.uint32(m * (2**32 // m) - 1)
    first = jnp.argmax(fair.at[-1].set(True), axis=0)
    taken = jnp.take_along_axis(draws, first[None], axis=0)[0]
    return (taken % np.uint32(m)).astype(jnp.int32)


def _members(
    n: int, m: int, b: int, key: Key, epoch: ArrayLike, step: ArrayLike
) -> Batch:
    """One bin in O(b log n), or b of it."""
    key = sampler_key(key, "sampling.random_bins", "epoch", epoch)
    # Threefry's, as all steps have to see the same draws: others' depend on `jax.vmap`.
    words = jax.random.bits(key, (2, 2), jnp.uint32)
    count_key, order_key = jax.random.wrap_key_data(words, impl="threefry2x32")
    number = check_number("step", step)
    there = number < m
    cuts = jnp.where(there, number, 0) + jnp.arange(2, dtype=jnp.uint32)
    first, end = jax.lax.map(lambda cut: _counts.below(count_key, n, cut, m), cuts)
    mask = there & (jnp.arange(b, dtype=jnp.int32) < end - first)
    # The last place costs least.
    places = jnp.where(mask, first + jnp.arange(b, dtype=jnp.int32), n - 1)
    found = _order.examples_at(order_key, n, places.astype(jnp.uint32))
    found = jnp.sort(jnp.where(mask, found, 2**31 - 1))
    return Batch(jnp.where(mask, found, 0), mask)


def _arguments(
    num_examples: int, num_bins: int, max_batch_size: int
) -> tuple[int, int, int]:
    n, b = sizes(num_examples, max_batch_size, "max_batch_size")
    m = validate.static_int("num_bins", num_bins, minimum=1)
    if m > 2**31 - 1:
        raise ValueError(f"num_bins must be at most 2**31 - 1; got {num_bins!r}.")
    return n, m, b


def random_bins(
    num_examples: int,
    num_bins: int,
    *,
    max_batch_size: int,
    key: Key,
    epoch: ArrayLike,
) -> Batch:
    """One epoch in which every example independently picks one step to take part in.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      num_bins: m, static, from 1 to 2³¹ − 1: the steps of an epoch.
      max_batch_size: a batch's fixed shape b, static. Of a bin with more than b
        examples the first b are kept, beyond 2¹⁶ examples a uniformly random b.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1; may be traced, and then counts
        modulo 2³². The same number in all epochs keeps everyone's step.

    Returns:
      A `Batch` of i32[m, b] and bool[m, b], in the data's order, masked places last.
      It costs O(n log n); beyond 2¹⁶ examples that of m steps.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; a static epoch
        is out of range; key is not a typed key.

    Privacy: with no overflow an example is in each step with probability 1 / m, to
    within (m / 2³²)⁴, whatever is known of all other examples: random allocation, under
    any adjacency, given uniform random bits that nobody knows. Beyond 2¹⁶ examples the
    whole epoch is within 2⁻⁸⁹ of that law in total variation, which is below 2e-27 and
    adds less than (1 + e^ε) 2e-27 to δ for each epoch drawn. Leaving examples out on
    overflow is another mechanism: `accounting.truncation.overflow_delta` with sampling
    rate 1 / m, and m steps for each epoch whose bins are drawn, says what it costs.

    Reference: Hoang, Morris and Rogaway (2012), https://arxiv.org/abs/1208.1176, and
    Morris and Rogaway (2014), https://eprint.iacr.org/2013/560, beyond 2¹⁶ examples.

    Example:
      >>> import jax
      >>> batch = random_bins(6, 3, max_batch_size=6, key=jax.random.key(0), epoch=0)
      >>> sorted(batch.indices[batch.mask].tolist())
      [0, 1, 2, 3, 4, 5]
    """
    n, m, b = _arguments(num_examples, num_bins, max_batch_size)
    if n > _ALL:
        steps = jnp.arange(m, dtype=jnp.uint32)
        return jax.lax.map(lambda step: _members(n, m, b, key, epoch, step), steps)
    bins, examples = jax.lax.sort(
        (_choices(n, m, key, epoch), jnp.arange(n, dtype=jnp.int32)), is_stable=True
    )
    ends = jnp.searchsorted(bins, jnp.arange(m + 1, dtype=jnp.int32))
    places = ends[:-1, None] + jnp.arange(b)[None, :]
    mask = places < ends[1:, None]
    return Batch(jnp.where(mask, examples[jnp.minimum(places, n - 1)], 0), mask)


def random_bins_step(
    num_examples: int,
    num_bins: int,
    *,
    max_batch_size: int,
    key: Key,
    epoch: ArrayLike,
    step: ArrayLike,
) -> Batch:
    """One step of `random_bins`, at a cost that does not grow beyond 2¹⁶ examples.

    Up to there it is O(n). Beyond it is O(b log n) in time and O(b) in memory: a
    thousand rounds of a hash for each of b places, and log₂ n times as much at worst.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      num_bins: m, static, from 1 to 2³¹ − 1.
      max_batch_size: b, static.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1; may be traced, and then counts
        modulo 2³².
      step: the step's number within the epoch, i[], from 0 to m − 1; may be traced.
        Beyond them the batch is empty.

    Returns:
      A `Batch` of i32[b] and bool[b], row `step` of `random_bins`.

    Raises:
      ValueError: as `random_bins`; a static step is out of range.

    Privacy: that of `random_bins`.

    Reference: as `random_bins`.

    Example:
      >>> import jax
      >>> batch = random_bins_step(
      ...     6, 3, max_batch_size=6, key=jax.random.key(0), epoch=0, step=2)
      >>> batch.indices.shape
      (6,)
    """
    n, m, b = _arguments(num_examples, num_bins, max_batch_size)
    if n > _ALL:
        return _members(n, m, b, key, epoch, step)
    mine = _choices(n, m, key, epoch).astype(jnp.uint32) == check_number("step", step)
    (found,) = jnp.nonzero(mine, size=b, fill_value=0)
    mask = jnp.arange(b) < jnp.sum(mine, dtype=jnp.int32)
    return Batch(jnp.where(mask, found.astype(jnp.int32), 0), mask)
