"""Random assignment: every example independently picks one batch (bin) of an epoch.

The choices of the examples are independent of each other. In contrast, in a random
order of full batches, the positions of all other examples determine the position of the
last one.

Every example's choice is drawn, and a bin is the set of examples that chose it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.keys import random_words, stream
from dpjax._core.typing import ArrayLike, Key
from dpjax.sampling._samplers import MOST, Batch, check_number, sampler_key, sizes


def _choices(n: int, m: int, key: jax.Array) -> jax.Array:
    """A number from 0 to m − 1 for every example, independent and uniform, i32[n].

    A number is a draw of 32 bits modulo m. A draw is accepted if it is below the
    largest multiple of m that is at most 2³². Fewer than m of the 2³² values are not
    accepted, since they would favour small numbers; a new draw replaces them.
    """
    # The comparison is with the largest accepted value, since 2³² exceeds uint32.
    most = np.uint32(m * (2**32 // m) - 1)

    def redraw(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        following, now = jax.random.split(carry[0])
        return following, jnp.where(carry[1] > most, random_words(now, (n,)), carry[1])

    first = stream(key, "drawn again"), random_words(key, (n,))
    _, drawn = jax.lax.while_loop(lambda carry: jnp.any(carry[1] > most), redraw, first)
    return (drawn % np.uint32(m)).astype(jnp.int32)


def _bins(n: int, m: int, key: Key, epoch: ArrayLike) -> jax.Array:
    """The bin of every example, i32[n]."""
    return _choices(n, m, sampler_key(key, "sampling.random_bins", "epoch", epoch))


def _gather(takes_part: jax.Array, b: int) -> Batch:
    """The first b examples for which takes_part, bool[n], is True, in data order."""
    (positions,) = jnp.nonzero(takes_part, size=b, fill_value=0)
    mask = jnp.arange(b) < jnp.sum(takes_part, dtype=jnp.int32)
    return Batch(jnp.where(mask, positions.astype(jnp.int32), 0), mask)


def _arguments(
    num_examples: int, num_bins: int, max_batch_size: int
) -> tuple[int, int, int]:
    n, b = sizes(num_examples, max_batch_size, "max_batch_size")
    m = validate.static_int("num_bins", num_bins, minimum=1)
    validate.at_most("num_bins", m, MOST)
    return n, m, b


def random_bins(
    num_examples: int, num_bins: int, *, max_batch_size: int, key: Key, epoch: ArrayLike
) -> Batch:
    """One epoch in which every example independently picks one step to take part in.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      num_bins: m, static, from 1 to 2³¹ − 1: the number of steps in an epoch.
      max_batch_size: b, static, the fixed size of a batch. If a bin has more than b
        examples, the first b are retained.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1. A traced number is taken modulo
        2³². With the same number in all epochs, every example takes part in the same
        step of each epoch.

    Returns:
      A `Batch` of i32[m, b] and bool[m, b], in the data's order, with padding last.
      The time is O(n log n).

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; a static epoch
        is out of range; key is not a typed key.

    Privacy: if no bin overflows, an example is in each step with probability 1 / m, for
    any knowledge of all other examples. The sampler is random allocation, under any
    adjacency, provided that the random bits are uniform and secret. Leaving examples
    out on overflow is a different mechanism. `accounting.truncation.overflow_delta`
    gives its cost, for sampling rate 1 / m and m steps for each epoch whose bins are
    drawn.

    Example:
      >>> import jax
      >>> batch = random_bins(6, 3, max_batch_size=6, key=jax.random.key(0), epoch=0)
      >>> sorted(batch.indices[batch.mask].tolist())
      [0, 1, 2, 3, 4, 5]
    """
    n, m, b = _arguments(num_examples, num_bins, max_batch_size)
    # A stable sort by bin keeps the examples of a bin in the data's order.
    bins, examples = jax.lax.sort(
        (_bins(n, m, key, epoch), jnp.arange(n, dtype=jnp.int32)), is_stable=True
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
    """One step of `random_bins`, without sorting the examples of the epoch.

    Each step draws the choices of all n examples, in O(n) time and memory.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      num_bins: m, static, from 1 to 2³¹ − 1.
      max_batch_size: b, static.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1. A traced number is taken modulo
        2³².
      step: the step's number within the epoch, i[], from 0 to m − 1; may be traced. For
        a larger number the batch consists of padding.

    Returns:
      A `Batch` of i32[b] and bool[b], row `step` of `random_bins`.

    Raises:
      ValueError: as for `random_bins`; a static step is not an integer from 0 to
        2³² − 1.

    Privacy: as for `random_bins`.

    Example:
      >>> import jax
      >>> batch = random_bins_step(
      ...     6, 3, max_batch_size=6, key=jax.random.key(0), epoch=0, step=2)
      >>> batch.indices.shape
      (6,)
    """
    n, m, b = _arguments(num_examples, num_bins, max_batch_size)
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

    Every example independently picks k of the epoch's m steps, all sets of k steps with
    the same probability.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      num_steps: m, static, from 1 to 2³¹ − 1: the number of steps in an epoch.
      num_selected: k, static, from 1 to m. A step takes O(n k²) time.
      max_batch_size: b, static. If more than b examples picked this step, the first b
        are retained.
      key: one typed key for the whole run; the epoch is folded into it.
      epoch: the epoch's number, i[], from 0 to 2³² − 1. A traced number is taken modulo
        2³².
      step: the step's number within the epoch, i[], from 0 to m − 1; may be traced. For
        a larger number the batch consists of padding.

    Returns:
      A `Batch` of i32[b] and bool[b], in the data's order, with padding last.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; num_selected is
        above num_steps; a static epoch or step is not an integer from 0 to 2³² − 1; key
        is not a typed key.

    Privacy: if no step has more than b examples, this is the random allocation of
    `accounting.allocation` with `num_selected=k`, provided that the random bits are
    uniform and secret. Leaving examples out is a different mechanism.
    `accounting.truncation.overflow_delta` gives its cost, for sampling rate k / m and m
    steps for each epoch.

    Reference: Bentley and Floyd (1987), https://doi.org/10.1145/30401.315746, for the
    set of k numbers.

    Example:
      >>> import jax
      >>> steps = [random_allocation_step(5, 3, num_selected=2, max_batch_size=5,
      ...     key=jax.random.key(0), epoch=0, step=t) for t in range(3)]
      >>> sum(int(batch.mask.sum()) for batch in steps)
      10
    """
    n, b = sizes(num_examples, max_batch_size, "max_batch_size")
    m = validate.static_int("num_steps", num_steps, minimum=1)
    k = validate.static_int("num_selected", num_selected, minimum=1)
    validate.at_most("num_steps", m, MOST)
    validate.at_most("num_selected", k, m, "num_steps, ")
    key = sampler_key(key, "sampling.random_allocation", "epoch", epoch)
    number = check_number("step", step)
    selected: list[jax.Array] = []
    # Floyd's rule makes all sets of k numbers equally likely: take a uniform number of
    # the first j + 1, or j itself if this number was chosen before.
    for i, last in enumerate(range(m - k, m)):
        drawn = _choices(n, last + 1, jax.random.fold_in(key, i))
        known = sum((drawn == x for x in selected), jnp.zeros(n, bool))
        selected.append(jnp.where(known, last, drawn))
    mine = [x.astype(jnp.uint32) == number for x in selected]
    return _gather(functools.reduce(jnp.logical_or, mine), b)
