"""Random assignment: every example independently picks one batch (bin) of an epoch.

The choices of the examples are independent of each other. In contrast, if a random
order is divided into full batches, the batches of all other examples determine the
batch of the last example.

With at most 2¹⁶ examples, every example's choice is drawn, and a bin is the set of
examples that chose the bin. With more examples, a step first draws two numbers, as sums
of coin flips: the number of examples in earlier bins, and this number plus the number
of examples in the step's bin. All examples have a random order (`_order`), in which the
members of the first bin precede the members of the second bin, and so on. So the two
numbers give the positions of the members of the step's bin in this order, and only
these positions are evaluated.

**Counts.** The number of examples in the first j of m bins is the count of n uniform
numbers in [0, 1) that are below j / m. The fraction j / m is called a cut. The count of
numbers below 1/2 has the distribution Binomial(n, 1/2), and the same holds recursively
within each half. The binary digits of the cut select one half after another, until no
number is left in the selected interval, or the cut is the interval's lower end. The key
of each binomial draw is a function of the digits before the draw. So under one key, the
counts for all cuts are counts of the same n numbers, although these numbers are never
drawn.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.keys import two_keys
from dpjax._core.typing import ArrayLike, Key
from dpjax.sampling import _binomial, _order
from dpjax.sampling._samplers import Batch, check_number, check_sizes, sampler_key

# A number n of coins is split into its digits in base 2⁸: single coins, and groups of
# 2⁸, 2¹⁶ and 2²⁴ coins, with fewer than 2⁸ groups of each size.
_DIGIT = 8


def _heads(key: jax.Array, n: jax.Array, max_n: int) -> jax.Array:
    """Draw the number of heads in n coin flips, which is Binomial(n, 1/2), i32[].

    n is at most `max_n`, which is static and below 2³¹. Let a_0, a_1, ... be the digits
    of n in base 2⁸, from the last digit to the first. a_0 coins are flipped one by one,
    which is exact. For every k above 0, the other coins contain a_k groups of 2⁸ᵏ coins
    each. The number of heads in a group of g coins is drawn from a table with at most
    g + 1 rows. Each row adds less than 2⁻¹²⁸ to the error in total variation. So a
    group's error is less than (g + 1) 2⁻¹²⁸, and the error of the result is less than
    n 2⁻¹²⁷.
    """
    heads = jnp.zeros((), jnp.int32)
    for shift in range(0, max_n.bit_length(), _DIGIT):
        row_key, key = jax.random.split(key)
        # `max_n` is static and n is not. So the shape is the largest digit, and a mask
        # selects the number of groups that the digit of n gives.
        times = min(max_n >> shift, 2**_DIGIT - 1)
        if shift:
            sums = _binomial.draws(row_key, 2**shift, 0.5, times)
        else:  # single coins
            sums = (jax.random.bits(row_key, (times,), jnp.uint8) & 1).astype(jnp.int32)
        first = jnp.arange(times) < (n >> shift) % 2**_DIGIT
        heads += jnp.sum(jnp.where(first, sums, 0), dtype=jnp.int32)
    return heads


def count_smaller(key: jax.Array, n: int, cut: jax.Array, parts: int) -> jax.Array:
    """How many of n uniform numbers in [0, 1) are below cut / parts, i32[].

    The joint distribution of the counts for all cuts under one key is within 2⁻⁹⁰ of
    the exact distribution in total variation. For each binary digit of cut / parts,
    `_heads` draws how many numbers of an interval are in each half, and the digit
    selects the half that is the next interval. The first interval, [0, 1), holds
    n < 2³¹ numbers. After 32 digits, an interval holds fewer than 2⁸ numbers, except
    with negligible probability. For fewer than 2⁸ numbers, `_heads` draws exactly.

    Args:
      key: one typed key, which determines the n numbers. The numbers are never drawn.
      n: the number of uniform numbers, static.
      cut: u32[], at most parts.
      parts: static, below 2³¹, so that twice a remainder modulo parts fits in a uint32.
    """
    nothing = jax.random.key_data(key).ravel()[0] & cut & np.uint32(0)
    zero = nothing.astype(jnp.int32)
    # Inside `jax.shard_map`, all parts of a loop's carry must vary over the mesh as the
    # key and the cut do. So zeros computed from both are added.
    start = jax.random.fold_in(key, nothing), zero + n, cut + nothing, zero

    def is_undecided(carry: tuple[jax.Array, ...]) -> jax.Array:
        _, left, parts_left, _ = carry
        # Stop when the interval holds no number, or begins at the cut.
        return (left > 0) & (parts_left > 0)

    def digit(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        key, left, parts_left, total = carry
        # From the interval's key, 0 and 1 give the halves' keys, and 2 the count's key.
        heads = _heads(jax.random.fold_in(key, 2), left, n)
        # If the next binary digit of rest / parts is one, the lower half is below the
        # cut and is counted, and the cut is in the upper half.
        one = 2 * parts_left >= np.uint32(parts)
        return (
            jax.random.fold_in(key, one.astype(jnp.uint32)),
            jnp.where(one, left - heads, heads),
            2 * parts_left - jnp.where(one, np.uint32(parts), np.uint32(0)),
            total + jnp.where(one, heads, 0),
        )

    return jax.lax.while_loop(is_undecided, digit, start)[-1]


# The maximum number of examples for which every example's choice is drawn.
_ALL = 2**16
# The number of draws for each example. The first draw without modulo bias is used.
_TRIES = 4


def _choices(n: int, m: int, key: jax.Array) -> jax.Array:
    """An independent uniform number from 0 to m − 1 for every example, i32[n].

    Each example has four draws of 32 bits. A draw is accepted if the draw is below the
    largest multiple of m that is at most 2³². The other values, fewer than m, would
    favour small numbers. The example's number is the first accepted draw, modulo m. If
    no draw is accepted, which has probability at most (m / 2³²)⁴, the number is the
    last draw modulo m. Only in this case is the number not uniform.
    """
    draws = jax.random.bits(key, (_TRIES, n), jnp.uint32)
    # The comparison is with the largest accepted value, since 2³² exceeds uint32.
    fair = draws <= np.uint32(m * (2**32 // m) - 1)
    # argmax finds the first True. The last draw is always accepted.
    first = jnp.argmax(fair.at[-1].set(True), axis=0)
    choice = jnp.take_along_axis(draws, first[None], axis=0)[0]
    return (choice % np.uint32(m)).astype(jnp.int32)


def _bins(n: int, m: int, key: Key, epoch: ArrayLike) -> jax.Array:
    """The step of an epoch, from 0 to m − 1, that each of n examples picks, i32[n]."""
    return _choices(n, m, sampler_key(key, "sampling.random_bins", "epoch", epoch))


def _gather(takes_part: jax.Array, b: int) -> Batch:
    """The first b examples for which takes_part, bool[n], is True, in data order."""
    (positions,) = jnp.nonzero(takes_part, size=b, fill_value=0)
    mask = jnp.arange(b) < jnp.sum(takes_part, dtype=jnp.int32)
    return Batch(jnp.where(mask, positions.astype(jnp.int32), 0), mask)


def _members(
    n: int, m: int, b: int, key: Key, epoch: ArrayLike, step: ArrayLike
) -> Batch:
    """The batch of at most b examples that picked a given step of an epoch.

    The epoch has m steps, and each of n examples picks one step. The mean time over the
    steps of an epoch is O(b log n).
    """
    key = sampler_key(key, "sampling.random_bins", "epoch", epoch)
    # All steps of an epoch must see the same counts and the same order.
    count_key, order_key = two_keys(key)
    number = check_number("step", step)
    in_epoch = number < m
    # The positions of bin `step` run from the count below cut `step` to the count below
    # cut `step + 1`.
    cuts = jnp.where(in_epoch, number, 0) + jnp.arange(2, dtype=jnp.uint32)
    first, end = jax.lax.map(lambda cut: count_smaller(count_key, n, cut, m), cuts)
    mask = in_epoch & (jnp.arange(b, dtype=jnp.int32) < end - first)
    # Padding uses position n − 1, which takes the fewest rounds to evaluate.
    positions = jnp.where(mask, first + jnp.arange(b, dtype=jnp.int32), n - 1)
    examples = _order.examples_at(order_key, n, positions.astype(jnp.uint32))
    # With the maximum int32, sorting puts padding after all examples.
    examples = jnp.sort(jnp.where(mask, examples, 2**31 - 1))
    return Batch(jnp.where(mask, examples, 0), mask)


def random_bins(
    num_examples: int, num_bins: int, *, max_batch_size: int, key: Key, epoch: ArrayLike
) -> Batch:
    """One epoch in which every example independently picks one step to take part in.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      num_bins: m, static, from 1 to 2³¹ − 1: the number of steps in an epoch.
      max_batch_size: b, static, the fixed size of a batch. If a bin has more than b
        examples, only b of them take part: the first b in the data's order for n up to
        2¹⁶, and b uniformly random examples of the bin for larger n.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1. A traced number is used modulo
        2³². If all epochs have the same number, every example takes part in the same
        step of each epoch.

    Returns:
      A `Batch` of i32[m, b] and bool[m, b], in the data's order, with padding last.
      For n up to 2¹⁶ the time is O(n log n + m b). For larger n the time is that of m
      calls of `random_bins_step`.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; a static epoch
        is out of range; key is not a typed key.

    Privacy: if no bin overflows, the sampler is random allocation, in which each
    example takes part in one uniformly random step of each epoch, independently of all
    others. Up to a small error, this claim holds under any adjacency, provided that the
    random bits are uniform and secret. For n up to 2¹⁶, each example's step is within
    (m / 2³²)⁴ of uniform in total variation, whatever an adversary knows about all
    other examples. For larger n, the distribution of a whole epoch is within 2⁻⁸⁹ of
    random allocation in total variation. This distance is below 2e-27, and adds less
    than (1 + e^ε) 2e-27 to δ for each epoch drawn. Leaving examples out on overflow is
    a different mechanism. `accounting.truncation.overflow_delta` gives the cost of this
    mechanism, for sampling rate 1 / m and m steps for each epoch whose bins are drawn.

    Reference: Hoang, Morris and Rogaway (2012), https://arxiv.org/abs/1208.1176, and
    Morris and Rogaway (2014), https://eprint.iacr.org/2013/560, for n above 2¹⁶.

    Example:
      >>> import jax
      >>> batch = random_bins(6, 3, max_batch_size=6, key=jax.random.key(0), epoch=0)
      >>> sorted(batch.indices[batch.mask].tolist())
      [0, 1, 2, 3, 4, 5]
    """
    n, m, b = check_sizes(
        num_examples=num_examples, num_bins=num_bins, max_batch_size=max_batch_size
    )
    if n > _ALL:
        steps = jnp.arange(m, dtype=jnp.uint32)
        return jax.lax.map(lambda step: _members(n, m, b, key, epoch, step), steps)
    # After a stable sort by bin, the examples of a bin are in the data's order.
    bins, examples = jax.lax.sort(
        (_bins(n, m, key, epoch), jnp.arange(n, dtype=jnp.int32)), is_stable=True
    )
    ends = jnp.searchsorted(bins, jnp.arange(m + 1, dtype=jnp.int32))
    positions = ends[:-1, None] + jnp.arange(b)[None, :]
    mask = positions < ends[1:, None]
    return Batch(jnp.where(mask, examples[jnp.minimum(positions, n - 1)], 0), mask)


def random_bins_step(
    num_examples: int,
    num_bins: int,
    *,
    max_batch_size: int,
    key: Key,
    epoch: ArrayLike,
    step: ArrayLike,
) -> Batch:
    """One step of `random_bins`, without computing the rest of the epoch.

    For n up to 2¹⁶ the time is O(n). For larger n, the mean time of a step is O(b log
    n), and the memory is O(b): for each of the b slots, a step computes 1100 to 1400
    rounds of a hash, in the mean over all steps of a long epoch. The first steps of an
    epoch need more rounds than later steps, at most 1000 log₂ n for each slot.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      num_bins: m, static, from 1 to 2³¹ − 1.
      max_batch_size: b, static.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1. A traced number is used modulo
        2³².
      step: the step's number within the epoch, i[], from 0 to m − 1; may be traced. For
        a larger number the batch consists of padding.

    Returns:
      A `Batch` of i32[b] and bool[b], row `step` of `random_bins`.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; a static epoch
        or step is not an integer from 0 to 2³² − 1; key is not a typed key.

    Privacy: all steps of an epoch together are the epoch that `random_bins` draws with
    the same key, and the Privacy section of `random_bins` applies to them.

    Reference: that of `random_bins`.

    Example:
      >>> import jax
      >>> batch = random_bins_step(
      ...     6, 3, max_batch_size=6, key=jax.random.key(0), epoch=0, step=2)
      >>> batch.indices.shape
      (6,)
    """
    n, m, b = check_sizes(
        num_examples=num_examples, num_bins=num_bins, max_batch_size=max_batch_size
    )
    if n > _ALL:
        return _members(n, m, b, key, epoch, step)
    mine = _bins(n, m, key, epoch).astype(jnp.uint32) == check_number("step", step)
    return _gather(mine, b)


def random_allocation_step(
    num_examples: int,
    num_steps: int,
    *,
    num_selected: int,
    max_batch_size: int,
    key: Key,
    epoch: ArrayLike,
    step: ArrayLike,
) -> Batch:
    """One step of an epoch in which every example takes part in k random steps.

    Every example independently picks k of the epoch's m steps, and all sets of k steps
    have the same probability. For k = 1 and large n, `random_bins_step` is faster.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      num_steps: m, static, from 1 to 2³¹ − 1: the number of steps in an epoch.
      num_selected: k, static, from 1 to m. A step takes O(n k²) time.
      max_batch_size: b, static. If more than b examples picked this step, the first b
        in the data's order are retained.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1. A traced number is used modulo
        2³².
      step: the step's number within the epoch, i[], from 0 to m − 1; may be traced. For
        a larger number the batch consists of padding.

    Returns:
      A `Batch` of i32[b] and bool[b], in the data's order, with padding last.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; num_selected is
        above num_steps; a static epoch or step is not an integer from 0 to 2³² − 1; key
        is not a typed key.

    Privacy: if no step has more than b examples, the sampler is the random allocation
    of `accounting.allocation` with `num_selected=k`, provided that the random bits are
    uniform and secret. Each example's set of steps in an epoch is within k (m / 2³²)⁴
    of uniform in total variation, and independent of all other examples. Leaving
    examples out is a different mechanism. `accounting.truncation.overflow_delta` gives
    the cost of this mechanism, for sampling rate k / m and m steps for each epoch.

    Reference: Bentley and Floyd (1987), https://doi.org/10.1145/30401.315746, for
    drawing a set of k distinct numbers.

    Example:
      >>> import jax
      >>> steps = [random_allocation_step(5, 3, num_selected=2, max_batch_size=5,
      ...     key=jax.random.key(0), epoch=0, step=t) for t in range(3)]
      >>> sum(int(batch.mask.sum()) for batch in steps)
      10
    """
    n, b = check_sizes(num_examples=num_examples, max_batch_size=max_batch_size)
    m, k = check_sizes(num_steps=num_steps, num_selected=num_selected)
    validate.at_most("num_selected", k, m, "num_steps, ")
    key = sampler_key(key, "sampling.random_allocation", "epoch", epoch)
    number = check_number("step", step)
    selected: list[jax.Array] = []
    # Floyd's rule makes all sets of k numbers equally likely: take a uniform number of
    # the first j + 1, or j itself if this number was chosen before.
    for i, last in enumerate(range(m - k, m)):
        drawn = _choices(n, last + 1, jax.random.fold_in(key, i))
        is_repeat = sum((drawn == x for x in selected), jnp.zeros(n, bool))
        selected.append(jnp.where(is_repeat, last, drawn))
    mine = [x.astype(jnp.uint32) == number for x in selected]
    return _gather(functools.reduce(jnp.logical_or, mine), b)
