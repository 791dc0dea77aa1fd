"""Private sums over a sliding window, from a ring buffer of tree nodes.

Steps are counted from 1. The steps are the leaves of a binary tree. Node i of level k
covers the steps (i − 1) 2^k + 1, …, i 2^k, as in `dpjax.noise.tree`. The value of the
node is Σ β^{i 2^k − j} x_j over the steps j that the node covers, where x_j is the
vector of step j, and β is the decay. Each node is released once, with noise, in the
last step that the node covers. The window of the last n steps is partitioned into the
minimum number of nodes, which is O(log n). A query starts with the sum 0, and reads
these nodes from left to right. For each node, whose level is k, the query multiplies
the sum by β^{2^k}, and adds the value of the node.

At any time, windows of later steps need at most ⌊n / 2^k⌋ of the released nodes of
level k. So the ring buffer has fewer than 2n rows. A node's value without noise is
needed only until the node's parent is released. So the values without noise take one
row for each level.

A node is in the partition of a window if the window contains the node but not the
node's parent. So a left child is used only by windows that end with this child, and a
right child only by windows that begin with this child.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.keys import stream
from dpjax._core.typing import ArrayLike, DTypeLike, Key
from dpjax._matrices.streaming import node_level
from dpjax.noise.tree import node_noise

_Vectors = tuple[jax.Array, jax.Array, jax.Array]


class Ring(NamedTuple):
    """A ring buffer of weighted sums of vectors. Keep the ring as secret as the data.

    The steps are the leaves of a binary tree. A node of level k covers 2^k steps, and
    has a weighted sum of the vectors f[d] of these steps. The ring contains the sums
    that windows of the last n steps still need.

    Attributes:
      nodes: the released sums, with noise, level by level, f[rows, d].
      open: for each level, the sum, without noise, of the latest complete node,
        f[levels, d]. The sum of the node's parent is computed from this sum.
    """

    nodes: jax.Array
    open: jax.Array


def _layout(window: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of rows and the first row of each level of tree nodes in a `Ring`."""
    slots = np.array([window >> k for k in range(window.bit_length())], np.int32)
    return slots, np.concatenate([[0], np.cumsum(slots)[:-1]]).astype(np.int32)


def empty_ring(window: int, dimension: int, dtype: DTypeLike = float) -> Ring:
    """A `Ring` of zeros, for windows of `window` steps and vectors f[dimension]."""
    slots, _ = _layout(window)
    nodes = jnp.zeros((slots.sum(), dimension), dtype)
    return Ring(nodes, jnp.zeros((len(slots), dimension), dtype))


def _level_decays(decay: jax.Array, levels: int, dtype: DTypeLike) -> jax.Array:
    """The power β^{2^k} of the decay β, for each level k = 0, 1, ..., f[levels]."""
    sizes = jnp.exp2(jnp.arange(levels, dtype=dtype))
    return jnp.power(jnp.asarray(decay, dtype), sizes)


def tree_key(key: Key) -> Key:
    """Derive the key that `push` passes to `node_noise`, from the key of a run."""
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
    """Release the sums of the tree nodes that end at a step, and store them in a ring.

    A tree node of level k covers 2^k steps. Its sum is Σ β^{z − j} x_j over these
    steps, where x_j is the vector of step j, and z is the last step. `push` adds noise
    to the sum. Each new sum replaces a sum that no later window needs.

    Args:
      ring: the ring buffer after step t − 1.
      step: t, i[], counted from 1.
      value: x_t, f[d].
      window: the number of steps in a window, static.
      decay: β, f[].
      stddev: the standard deviation of each coordinate of the noise of a node, f[].
      key: a typed key, the same in all steps.
      active: whether to store anything; if False, the ring is returned unchanged.

    Returns:
      The ring buffer after step t.
    """
    slots, begins = (jnp.asarray(x) for x in _layout(window))
    factors = _level_decays(decay, len(slots), ring.nodes.dtype)
    # The bit operations below need an int32.
    step, value = jnp.asarray(step, jnp.int32), value.astype(ring.nodes.dtype)
    key = tree_key(key)
    completed = jnp.minimum(node_level(step) + 1, len(slots))

    # The nodes that end at step t have the levels from 0 to the number of trailing zero
    # bits of t. The loop starts at level 0. A right child ends where its parent ends.
    # The parent's value is the left child's value times β^{2^k}, plus the right child's
    # value, where 2^k is the length of the right child.
    def complete(level: jax.Array, carry: _Vectors) -> _Vectors:
        nodes, opened, value = carry
        index = step >> level
        noise = node_noise(key, level, index, value, stddev)
        # The new node replaces the oldest node of its level, which is no longer needed.
        row = begins[level] + (index - 1) % slots[level]
        nodes = jax.lax.dynamic_update_index_in_dim(nodes, value + noise, row, 0)
        left = jax.lax.dynamic_index_in_dim(opened, level, keepdims=False)
        opened = jax.lax.dynamic_update_index_in_dim(opened, value, level, 0)
        return nodes, opened, factors[level] * left + value

    # If the count is 0, the loop leaves the ring unchanged and draws no noise.
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
    """The private sum Σ β^{t − j} x_j over a window, the last n steps j up to step t.

    Here x_j is the vector of step j. The query draws no noise: it adds weighted sums
    that `push` has released with noise.

    Args:
      ring: the ring buffer after step t.
      step: t, i[], counted from 1.
      window: n, the number of steps in the window, static.
      decay: β, f[].
      active: whether to read the ring; if False, the result is zero.

    Returns:
      The sum, f[d].
    """
    slots, begins = (jnp.asarray(x) for x in _layout(window))
    factors = _level_decays(decay, len(slots), ring.nodes.dtype)
    step = jnp.asarray(step, jnp.int32)
    start = jnp.where(active, jnp.maximum(step - window, 0), step)

    # COMPOSE(start + 1, t) from left to right (Tran and Cutkosky (2022), Algorithm 3,
    # https://arxiv.org/abs/2210.06328): take the largest node that begins at start + 1
    # and ends by t. Multiply the sum so far by β^{2^k}, for the node's length 2^k.
    def more(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[0] < step

    def read(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, total = carry
        fits = 31 - jax.lax.clz(step - start)  # ⌊log₂(step − start)⌋
        level = jnp.minimum(node_level(start), fits)
        row = begins[level] + (start >> level) % slots[level]
        node = jax.lax.dynamic_index_in_dim(ring.nodes, row, keepdims=False)
        return start + (1 << level), factors[level] * total + node

    zero = jnp.zeros(ring.nodes.shape[1], ring.nodes.dtype)
    return jax.lax.while_loop(more, read, (start, zero))[1]


def window_variance(num_steps: int, window: int, decay: float) -> np.ndarray:
    """The variance of `query` at every step, divided by the variance of a node's noise.

    A node of the tree covers 2^k steps. `push` adds noise to the sum of each node.

    Args:
      num_steps: the number of steps T, at least 1.
      window: the number of steps n in a window, at least 1.
      decay: the decay β, in [0, 1).

    Returns:
      f64[T]: for each t = 1, …, T, the sum Σ β^{2(t − z)} over the nodes that partition
      the window max(t − n, 0) + 1, …, t, where z is the last step of a node.

    Example:
      >>> window_variance(4, 3, 0.5)  # of 2..4: nodes [2, 2] and [3, 4]
      array([1.    , 1.    , 1.25  , 1.0625])
    """
    step = np.arange(1, num_steps + 1)
    start, total = np.maximum(step - window, 0), np.zeros(num_steps)
    # The loop of `query` for all steps at once. The weight of a node that ends at z is
    # β^{t − z}.
    while np.any(start < step):
        left = step - start
        # The exponent of frexp minus 1 is exactly the floor of the base-2 logarithm.
        fits = np.where(left > 0, 1 << (np.frexp(left)[1] - 1), 0)
        # start & −start is the largest power of two that divides start > 0.
        size = np.where(start > 0, np.minimum(fits, start & -start), fits)
        start = start + size
        weight = np.power(float(decay), 2.0 * (step - start))
        total += np.where(size > 0, weight, 0.0)
    return total
