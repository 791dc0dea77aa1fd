"""Private sums over a sliding window, from a ring of tree nodes.

Steps count from 1. Node (k, i) covers the steps (i − 1) 2^k + 1, …, i 2^k, as in
`dpjax.noise.tree`, and its value is Σ β^{(its end) − j} x_j. It is released once, with
noise, in the step that completes it. The window of the last n steps is cut into the
fewest nodes, O(log n) of them, read from left to right: sum ← β^{2^k} sum + node.

Of level k no more than ⌊n / 2^k⌋ nodes are ever needed again, so that the ring has
less than 2n rows. Without its noise a node is needed only until its parent is complete:
one row for each level.

A node is in the cut of a window if it lies in the window and its parent does not. So
left children are used by a window that ends with them, and right children by one that
begins with them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.dtypes import at_least_float32
from dpjax._core.keys import stream
from dpjax._core.typing import ArrayLike, DTypeLike, Key
from dpjax.noise.tree import node_noise

_Vectors = tuple[jax.Array, jax.Array, jax.Array]


class Ring(NamedTuple):
    """Nodes of the last n steps. It holds sums without noise: as secret as the data.

    Attributes:
      nodes: released nodes, level by level, f[rows, d].
      open: by level the last node without its noise, f[levels, d].
    """

    nodes: jax.Array
    open: jax.Array


def _layout(window: int) -> tuple[np.ndarray, np.ndarray]:
    """How many rows each level has, and where they begin."""
    slots = np.array([window >> k for k in range(window.bit_length())], np.int32)
    return slots, np.concatenate([[0], np.cumsum(slots)[:-1]]).astype(np.int32)


def empty_ring(window: int, dimension: int, dtype: DTypeLike = float) -> Ring:
    """A ring for windows of that many steps and vectors f[d], float32 at least."""
    slots, _ = _layout(validate.static_int("window", window, minimum=1))
    dtype = at_least_float32(jax.dtypes.canonicalize_dtype(dtype))
    nodes = jnp.zeros((slots.sum(), dimension), dtype)
    return Ring(nodes, jnp.zeros((len(slots), dimension), dtype))


def _sizes(decay: jax.Array, levels: int, dtype: DTypeLike) -> jax.Array:
    """β^{2^k} for every level k."""
    sizes = jnp.exp2(jnp.arange(levels, dtype=dtype))
    return jnp.power(jnp.asarray(decay, dtype), sizes)


def _int32(step: ArrayLike) -> jax.Array:
    """A step's number as the bit tricks below need it, whatever it came as."""
    return jnp.asarray(step).astype(jnp.int32)


def _trailing_zeros(x: jax.Array) -> jax.Array:
    """Of an int32; 32 for zero."""
    return jax.lax.population_count((x & -x) - 1)


def tree_key(key: Key) -> Key:
    """The key that a ring's nodes are folded from."""
    return stream(key, "windows")


def push(
    ring: Ring,
    step: jax.Array,
    value: jax.Array,
    *,
    window: int,
    decay: jax.Array,
    stddev: jax.Array,
    key: Key,
    active: ArrayLike = True,
) -> Ring:
    """The ring with all nodes that this step completes; as it was if not active."""
    slots, begins = (jnp.asarray(x) for x in _layout(window))
    factors = _sizes(decay, len(slots), ring.nodes.dtype)
    step, value, key = _int32(step), value.astype(ring.nodes.dtype), tree_key(key)
    completed = jnp.minimum(_trailing_zeros(step) + 1, len(slots))

    # The nodes that end at this step are those of levels 0 to ctz(t), from the smallest
    # up: a right child ends where its parent does, so that the parent's value is the
    # left sibling's, faded over the right one's length, plus the right one's.
    def complete(level: jax.Array, carry: _Vectors) -> _Vectors:
        nodes, opened, value = carry
        index = step >> level
        noise = node_noise(key, level, index, value, stddev)
        row = begins[level] + (index - 1) % slots[level]
        nodes = jax.lax.dynamic_update_index_in_dim(nodes, value + noise, row, 0)
        left = jax.lax.dynamic_index_in_dim(opened, level, keepdims=False)
        opened = jax.lax.dynamic_update_index_in_dim(opened, value, level, 0)
        return nodes, opened, factors[level] * left + value

    count = jnp.where(active, completed, 0)
    nodes, opened, _ = jax.lax.fori_loop(0, count, complete, (*ring, value))
    return Ring(nodes, opened)


def query(
    ring: Ring,
    step: jax.Array,
    *,
    window: int,
    decay: jax.Array,
    active: ArrayLike = True,
) -> jax.Array:
    """Σ β^{t − j} x_j with noise over the last n of the steps 1..t; 0 if not active."""
    slots, begins = (jnp.asarray(x) for x in _layout(window))
    factors = _sizes(decay, len(slots), ring.nodes.dtype)
    step = _int32(step)
    start = jnp.where(active, jnp.maximum(step - window, 0), step)

    # COMPOSE(start + 1, t) from left to right (Tran and Cutkosky (2022), Algorithm 3,
    # https://arxiv.org/abs/2210.06328): the largest node that begins there and fits.
    # What is summed so far fades over its length, β^{2^k}.
    def more(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[0] < step

    def read(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, total = carry
        fits = 31 - jax.lax.clz(step - start)
        level = jnp.minimum(_trailing_zeros(start), fits)
        row = begins[level] + (start >> level) % slots[level]
        node = jax.lax.dynamic_index_in_dim(ring.nodes, row, keepdims=False)
        return start + (1 << level), factors[level] * total + node

    zero = jnp.zeros(ring.nodes.shape[1], ring.nodes.dtype)
    return jax.lax.while_loop(more, read, (start, zero))[1]


def window_variance(num_steps: int, window: int, decay: float) -> np.ndarray:
    """The variance of a query at every step, in units of one node's.

    Args:
      num_steps: T, at least 1.
      window: n, at least 1.
      decay: β, in [0, 1).

    Returns:
      Σ β^{2(t − z)} over the nodes of the steps max(t − n, 0) + 1, …, t, where z is a
      node's end, for t = 1, …, T: f64[T].

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> window_variance(4, 3, 0.5)  # of 2..4: nodes [2, 2] and [3, 4]
      array([1.    , 1.    , 1.25  , 1.0625])
    """
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    window = validate.static_int("window", window, minimum=1)
    validate.decay("decay", decay)
    step = np.arange(1, num_steps + 1)
    start, total = np.maximum(step - window, 0), np.zeros(num_steps)
    # `query` at all steps at once: a node that ends at z has weight β^{t − z}.
    while np.any(start < step):
        fits = np.frexp(np.maximum(step - start, 1))[1] - 1
        aligned = np.where(
            start > 0, np.frexp(np.maximum(start & -start, 1))[1] - 1, 63
        )
        size = np.where(start < step, 1 << np.minimum(fits, aligned), 0)
        start = start + size
        weight = np.power(float(decay), 2.0 * (step - start))
        total += np.where(size > 0, weight, 0.0)
    return total
