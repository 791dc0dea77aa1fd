"""The examples of a batch, read from arrays or data sets and placed on devices.

In `batches`, the CPU draws the positions of a batch's examples in the data set. So the
draw of the next batch does not wait until the accelerator finishes a step, and a thread
can read batches before their steps. On a mesh, all processes draw the same positions
from the same key. Each process then reads only the examples of its own devices.
"""

import collections
import concurrent.futures
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpjax._core import keys, validate
from dpjax._core.platforms import host
from dpjax._core.typing import ArrayLike
from dpjax._plan.mechanisms import mechanism_of
from dpjax._plan.parameters import RunParameters
from dpjax._plan.users import OfUser, Users, by_position, is_tree_of_arrays
from dpjax.sampling import Batch
from dpjax.sampling._order import permutation


class Examples(NamedTuple):
    """The examples of a step, padded to a constant number of slots.

    A slot is an index into the leading axis of the arrays.

    Attributes:
      data: a tree of arrays with a leading axis of m slots. Padding slots hold copies
        of an example, so that the shapes are constant.
      mask: bool[m], False for padding. `Plan.value_and_grad` leaves padding out of the
        gradient and the mean loss, but the loss's auxiliary output has a row for every
        slot.
      step: the step's number, i32[], if the clip norm varies by a schedule; None
        otherwise.
      first: for a part of a batch, the slot in the batch at which the part begins,
        i32[]; None for a whole batch.
      plan: the plan that drew the batch, static under jit. The gradient functions of
        other plans refuse the batch. None for a batch that the caller assembled.
    """

    data: Any
    mask: ArrayLike
    step: ArrayLike | None = None
    first: ArrayLike | None = None
    plan: RunParameters | None = None

    def parts(self, size: int) -> "Iterator[Examples]":
        """Split the m slots into parts of `size` slots each; pad the last part.

        Padding repeats the batch's last slot, with the mask False.

        Raises:
          ValueError: size is not an integer of at least 1. The iteration raises this
            error, not the call.
        """
        size = validate.static_int("size", size, minimum=1)
        total = np.size(self.mask)
        for first in range(0, total, size):
            # Padding beyond the end of the batch repeats the data of its last slot.
            rows = np.arange(first, first + size)
            slots = np.minimum(rows, total - 1)
            mask = np.asarray(self.mask)[slots] & (rows < total)
            part = jax.tree.map(lambda x, slots=slots: x[slots], by_position(self.data))
            yield Examples(part, mask, self.step, np.int32(first), self.plan)


def take_examples(data: Any, batch: Batch) -> Examples:
    """Select the examples of a batch from a tree of NumPy or JAX arrays.

    Examples from NumPy arrays stay on the host, except under jit.
    """
    traced = isinstance(batch.indices, Tracer)

    def take(x: Any) -> Any:
        if traced or isinstance(x, jax.Array):
            indices = jnp.asarray(batch.indices)
            # All positions are in range. So the default mode's check is not needed.
            return jnp.take(jnp.asarray(x), indices, axis=0, mode="clip")
        return x[np.asarray(batch.indices)]

    return Examples(jax.tree.map(take, data), batch.mask)


def attach_plan(plan: RunParameters, examples: Examples, step: ArrayLike) -> Examples:
    """Add the plan to a batch, and the step if the clip norm has a schedule."""
    varies = any(segment.clip != 1.0 for segment in plan.segments)
    return examples._replace(plan=plan, step=step if varies else None)


def check(data: Any, plan: RunParameters) -> None:
    """Raise ValueError unless a plan can draw its examples from data.

    Data must be a tree of arrays, or support `len` and integer indexing. The number of
    examples must be the plan's num_examples. If the unit of the plan is a user, a user
    counts as one example, and data must be a result of `by_user` or `Users.stacked`. If
    the unit is an example, data must not be a result of these functions.
    """
    if isinstance(data, Users | OfUser) != (plan.unit == "user"):
        raise ValueError(
            f"data must {'' if plan.unit == 'user' else 'not '}be made by "
            f"dpjax.by_user, because the plan protects one {plan.unit}; got "
            f"{type(data)}."
        )
    if is_tree_of_arrays(data):
        sizes = {np.shape(x)[:1] for x in jax.tree.leaves(data)}
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        sizes = {(len(data),)}
    else:
        raise ValueError(
            "data must be a pytree of arrays, or support len and integer indexing; "
            f"got {type(data)}. The plan itself draws the examples of each step: a "
            "loader with an order of its own would draw them differently from the "
            "sampling that the guarantee accounts for."
        )
    if sizes != {(plan.num_examples,)}:
        counts = sorted(size[0] if size else 0 for size in sizes)
        raise ValueError(
            f"data must have num_examples {plan.unit}s, {plan.num_examples}; got "
            f"{counts}. The guarantee holds only for a data set of the planned size. "
            "Convert columns that are lists to arrays."
        )


def draw_batch(plan: RunParameters, step: ArrayLike, key: jax.Array) -> Batch:
    """Draw the positions of a step's examples, and a mask that is False for padding."""
    mechanism = mechanism_of(plan)

    def draw(size: int) -> Batch:
        return mechanism.draw(size, plan.max_batch_size, step, key)

    sizes = sorted({x.batch_size for x in plan.segments})
    if len(sizes) == 1:
        batch = draw(sizes[0])
    else:
        # A sampler needs a static batch size. So each batch size has a branch, and the
        # step, which may be traced, selects a branch.
        number = jnp.sum(jnp.asarray(sizes) < plan.values_at(step).batch_size)
        batch = jax.lax.switch(number, [functools.partial(draw, x) for x in sizes])
    if plan.arithmetic == "discrete" and mechanism.order is None:
        return _shuffle_slots(batch, step, key)
    return batch


def _shuffle_slots(batch: Batch, step: ArrayLike, key: jax.Array) -> Batch:
    """Move a batch's examples to uniformly random slots, with padding in between.

    A slot is an index into the batch's arrays. If k examples are in uniformly random
    slots, then any k − 1 of these examples are also in uniformly random slots. So the
    batches of two data sets that differ in one example can be coupled such that the
    batches differ in one slot only. The guarantee of arithmetic="discrete" needs this
    coupling, because its bound on rounding errors is for batches that differ in one
    slot.
    """
    key = jax.random.fold_in(keys.stream(key, "order of slots"), step)
    # This permutation is exactly uniform. JAX's own permutation is not, since two of
    # its random words can be equal.
    order = permutation(key, batch.mask.shape[0])
    return Batch(batch.indices[order], batch.mask[order])


# A plan is hashable, so that one compiled program draws all steps of a plan.
_draw = jax.jit(draw_batch, static_argnums=0)


def batches(
    plan: RunParameters,
    data: Any,
    key: jax.Array,
    start: int,
    sharding: jax.sharding.Sharding | None,
    prefetch: int,
) -> Iterator[Examples]:
    """Iterate over the batches of a run, as `Plan.batches` describes.

    If an argument is wrong, the call itself raises. A generator function would raise
    only when the caller asks for the first batch.
    """
    check(data, plan)
    validate.typed_key("key", key)
    first = validate.static_int("start", start, minimum=0)
    validate.at_most("start", start, plan.num_steps, "num_steps, ")
    num_ahead = validate.static_int("prefetch", prefetch, minimum=0)
    read = _read_items
    if is_tree_of_arrays(data):
        # Arrays of other libraries are converted once, instead of in every step.
        data, read = by_position(data), take_examples
    if sharding is not None:
        read = _shard_reader(read, sharding, plan.max_batch_size)

    def draw(step: int) -> Batch:
        with jax.default_device(host()):
            return jax.device_get(_draw(plan, step, jax.device_put(key, host())))

    def load(step: int, batch: Batch) -> Examples:
        return attach_plan(plan, read(data, batch), np.int32(step))

    jobs = (functools.partial(load, i, draw(i)) for i in range(first, plan.num_steps))
    return _prefetch(jobs, num_ahead)


def _prefetch(jobs: Iterator[Callable[[], Examples]], count: int) -> Iterator[Examples]:
    """Call the functions `jobs` in order, and yield their results in this order.

    Args:
      jobs: functions that read one batch each.
      count: the number of batches that a thread reads before the caller asks for them;
        0 for no thread.
    """
    if not count:
        for job in jobs:
            yield job()
        return
    thread = concurrent.futures.ThreadPoolExecutor(1)
    try:
        futures = collections.deque(
            thread.submit(j) for j in itertools.islice(jobs, count)
        )
        while futures:
            futures.extend(thread.submit(job) for job in itertools.islice(jobs, 1))
            yield futures.popleft().result()
    finally:  # queued reads are cancelled if the caller stops early or a read fails
        thread.shutdown(cancel_futures=True)


def _shard_reader(
    read: Callable[[Any, Batch], Examples], sharding: jax.sharding.Sharding, size: int
) -> Callable[[Any, Batch], Examples]:
    """Return a function that reads a batch into arrays with the given sharding.

    The function reads only the examples of this process's devices.

    Args:
      read: a function of the data set and of a `Batch` of positions, which returns the
        examples at these positions.
      sharding: the sharding of the batch's leading axis.
      size: the length of the leading axis.

    Raises:
      ValueError: sharding does not divide the axis into shards of equal sizes, or
        divides another axis.
    """
    try:
        indices = sharding.addressable_devices_indices_map((size,))
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"sharding must divide the {size} slots of a batch (max_batch_size) "
            f"evenly, and must not divide any other axis; got {sharding!r}."
        ) from error
    ranges = {device: _shard_range(index, size) for device, index in indices.items()}

    def read_range(data: Any, batch: Batch, first: int, end: int) -> Examples:
        shard = jax.tree.map(lambda x: x[first:end], batch)
        return jax.tree.map(np.asarray, read(data, shard))

    def read_whole(data: Any, batch: Batch) -> Examples:
        # Devices that hold the same slots (replicas) share one read.
        parts = {span: read_range(data, batch, *span) for span in set(ranges.values())}

        def join_shards(*leaves: np.ndarray) -> jax.Array:
            piece_of = dict(zip(parts, leaves, strict=True))
            pieces = [jax.device_put(piece_of[r], d) for d, r in ranges.items()]
            shape = (size, *leaves[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, pieces)

        return jax.tree.map(join_shards, *parts.values())

    return read_whole


def _shard_range(index: tuple[slice, ...] | None, size: int) -> tuple[int, int]:
    """Return the first index of a device's shard of an axis, and 1 + the last index.

    Args:
      index: the device's value in `sharding.addressable_devices_indices_map`; None if
        the shard is the whole axis.
      size: the length of the axis.
    """
    return (slice(None) if index is None else index[0]).indices(size)[:2]


def _read_items(data: Any, batch: Batch) -> Examples:
    """Read a batch from a data set with integer indexing, and stack its examples.

    Padding slots hold copies of an example, so that all batches have the same shapes.
    The mask is False for padding.
    """
    mask = np.asarray(batch.mask)
    present = _get_items(data, np.asarray(batch.indices)[mask].tolist())
    # A batch without examples also needs an example, for the shapes of its arrays.
    filled = [present[0] if present else data[0]] * mask.size
    # Examples stay in their slots. If padding were removed, batches with and without an
    # example could differ in several slots (`_shuffle_slots`).
    for slot, example in zip(np.flatnonzero(mask), present, strict=True):
        filled[slot] = example
    stacked = jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *filled)
    return Examples(stacked, mask)


def _get_items(data: Any, positions: list[int]) -> list[Any]:
    """Return the examples at the given positions of a data set.

    If the data set has the method `__getitems__`, one call reads all examples. Without
    this method, a call of `__getitem__` reads each example.

    Raises:
      ValueError: the data set does not return one example for each position.
    """
    if positions and hasattr(data, "__getitems__"):
        examples = list(data.__getitems__(positions))
    else:
        examples = [data[i] for i in positions]
    num_returned = sum(x is not None for x in examples)
    if num_returned != len(positions):  # such as a data set that filters its examples
        raise ValueError(
            f"data must return {len(positions)} examples for {len(positions)} "
            f"positions; got {num_returned} examples."
        )
    return examples
