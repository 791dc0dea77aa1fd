"""Tree aggregation: dyadic intervals of steps, each with noise of its own.

Steps are counted from 1. Each interval [(i − 1) 2^k + 1, i 2^k] is a node of a binary
tree, with the level k and the number i. Each node (k, i) has independent noise ζ_{k,i}.
COMPOSE(1, t) is the minimum set of nodes that together cover the steps 1..t. The set
has one node for each bit k that is set in t: the node (k, t >> k), whose last step is
t − (t mod 2^k). With the momentum coefficient β, the noise in the momentum at step t is

    N_t = Σ_{(k, i) in COMPOSE(1, t)} β^{t mod 2^k} ζ_{k,i}.

Several nodes may have the last step t, but COMPOSE sets that begin at step 1 contain
only the largest of these nodes. So the strategy `strategies.tree` identifies this node
by its last step, and `correlated_noise` draws the noise of one node in each step.
"""

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.typing import ArrayLike, Key, Shaped
from dpjax.noise._gaussian import gaussian_like


def compose(start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Split the steps start..end into the minimum number of dyadic intervals.

    A dyadic interval consists of the steps (i − 1) 2^k + 1, ..., i 2^k, for integers
    i >= 1 and k >= 0.

    Args:
      start: the first step, at least 1.
      end: the last step, at least start.

    Returns:
      The intervals (first, last) from left to right.

    Raises:
      ValueError: start or end is not an integer; start is below 1; end is below start.

    Reference: Tran and Cutkosky (2022), Algorithm 3.

    Example:
      >>> compose(1, 7)
      ((1, 4), (5, 6), (7, 7))
      >>> compose(4, 9)
      ((4, 4), (5, 8), (9, 9))
    """
    start = validate.static_int("start", start, minimum=1)
    end = validate.static_int("end", end, minimum=start)
    intervals = []
    # Tran and Cutkosky (2022), Algorithm 3, https://arxiv.org/abs/2210.06328.
    while start <= end:
        # The largest 2^k that divides start − 1, with an interval that ends by `end`.
        # Every power of two divides start − 1 = 0.
        max_size = 1 << ((end - start + 1).bit_length() - 1)
        aligned = (start - 1) & -(start - 1) or max_size
        size = min(max_size, aligned)
        intervals.append((start, start + size - 1))
        start += size
    return tuple(intervals)


def prefix_variance(step: ArrayLike, decay: ArrayLike) -> jax.Array:
    """The variance of the noise that tree aggregation adds to Σ_{s<=t} β^{t−s} g_s.

    Here g_s is the gradient sum of step s. The call `compose(1, t)` of this module
    splits the steps 1, …, t into intervals. Each interval has independent noise of
    variance 1. The noise of an interval that ends at step z has the weight β^{t − z}.
    So the variance is the sum of β^{2(t − z)} over these intervals.

    Args:
      step: t, i[*b], at least 1.
      decay: the momentum coefficient β, f[*b], in [0, 1).

    Returns:
      The variance, f[*b]. In each coordinate of the update of `tree_momentum` at step
      t, the variance of the noise is stddev² (1 − β)² times this number, where stddev
      is the argument of `tree_momentum`.

    Raises:
      ValueError: a concrete step is below 1, or a concrete decay is outside [0, 1).

    Example:
      >>> print(prefix_variance(7, 0.5))  # ends at 4, 6 and 7: 1/64 + 1/4 + 1
      1.265625
    """
    validate.positive("step", step)
    validate.half_open_unit("decay", decay)
    step, decay = jnp.broadcast_arrays(jnp.asarray(step), jnp.asarray(decay, float))

    # The squared weights β^(t − z) of Algorithm 1 in Tran and Cutkosky (2022),
    # https://arxiv.org/abs/2210.06328: the node of bit k ends at z = t − (t mod 2^k).
    def add_level(k: jax.Array, total: jax.Array) -> jax.Array:
        gap = step & ((1 << k) - 1)
        weight = jnp.power(decay, 2 * gap.astype(decay.dtype))
        return total + jnp.where((step >> k) & 1, weight, 0.0)

    # A step below 2³¹ has at most 31 bits.
    return jax.lax.fori_loop(0, 31, add_level, jnp.zeros_like(decay))


def node_noise(
    key: Key, level: ArrayLike, index: ArrayLike, tree: Shaped, stddev: jax.Array
) -> Shaped:
    """The Gaussian noise of one node of tree aggregation, as a pytree.

    A node of level k is an interval of 2^k steps. The node's key is derived from the
    midpoint of the interval, which is (2i − 1) 2^k half steps after the beginning of
    the run. No two nodes have the same midpoint. Each leaf has its own key, derived
    from the node's key.

    Args:
      key: the typed key of all nodes.
      level: k, the level of the node.
      index: i, the number of the node in its level, counted from 1. The last step of
        the node is i 2^k.
      tree: a pytree whose shapes and dtypes the noise gets.
      stddev: the standard deviation of each coordinate, f[].
    """
    # uint32, since (2i − 1) 2^k may exceed the maximum int32.
    level, index = jnp.asarray(level, jnp.uint32), jnp.asarray(index, jnp.uint32)
    middle = (2 * index - 1) << level
    return gaussian_like(jax.random.fold_in(key, middle), tree, stddev)
