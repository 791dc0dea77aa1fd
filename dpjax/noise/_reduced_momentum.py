"""Momentum with reduced sensitivity: changes between epochs in place of gradients.

An epoch has n steps, and its anchor is the iterate at which the epoch began. The sum of
gradients of step i is g_i + r_i. Here g_i, called the anchor term, is the sum of the
gradients of the step's examples at the anchor. The drift r_i is the sum of the changes
of these gradients from the anchor to the current iterate. With the momentum coefficient
β, let

    G_t = Σ_{t−n < i <= t} β^{t−i} g_i

be the weighted sum of the last n anchor terms. Let every epoch have the same batches,
and let δ_i = g_i − g_{i−n} be the change of an anchor term since the epoch before. With
Δ_t = Σ_{t−n < i <= t} β^{t−i} δ_i, we have G_t = Δ_t + G_{t−n}. Therefore, for any γ,

    G_t = (1 − γ) (Δ_t + G_{t−n}) + γ G_t.

The estimate P_t of G_t, the estimate M_t of the weighted sum of all anchor terms, and
the private momentum m̂_t follow the recursion

    P_t = (1 − γ) P_{t−n} + Ĥ_t,    M_t = β^n M_{t−n} + P_t,
    m̂_t = (1 − β) (M_t + R̂_t).

Here Ĥ_t is a private value of Σ_{t−n < i <= t} β^{t−i} h_i, for
h_i = (1 − γ) δ_i + γ g_i, and R̂_t is a private value of Σ_{i<=t} β^{t−i} r_i. For
t < 2n, the window that ends at step t − n has fewer than n steps. So for t < 2n, P_t is
a private value Ĝ_t of G_t instead. The results are those of Algorithm 4 of Tran and
Cutkosky (2022), which has no recursion. Per step, the recursion reads O(log n) nodes of
trees with noise, and Algorithm 4 reads O((t / n) log n) nodes.

One tree for h_i is as good as one tree for (1 − γ) δ_i and another tree for γ g_i. For
two trees with sensitivities a and b and noise variances x and y, the privacy cost μ² is
a²/x + b²/y, and every estimate gets the variance x + y. The minimum product of cost and
variance is (a + b)², which is also the product for one tree of sensitivity a + b.

**Windows.** A ring buffer of tree nodes gives the private sums over a sliding window.
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
needed only until the node's parent is released. So one row for each level stores the
values without noise.

A node is in the partition of a window if the window contains the node but not the
node's parent. So a left child is used only by windows that end before the parent ends,
and a right child only by windows that begin after the parent begins.
"""

import functools
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.dtypes import widen
from dpjax._core.keys import stream
from dpjax._core.typing import ArrayLike, DTypeLike, Key
from dpjax._matrices.streaming import buffered_tree, node_level, tree_weights
from dpjax.noise._gaussian import gaussian_like
from dpjax.noise.tree import node_noise, prefix_variance

_Vectors = tuple[jax.Array, jax.Array, jax.Array]


class Ring(NamedTuple):
    """A ring buffer of weighted sums of vectors. Keep the ring as secret as the data.

    The steps are the leaves of a binary tree. A node of level k covers 2^k steps, and
    has a weighted sum of the vectors f[d] of these steps. The ring contains the sums
    that `query` will read, in this step or later, for windows of a given length.

    Attributes:
      nodes: the released sums, with noise, level by level, f[rows, d].
      noiseless: for each level, the sum, without noise, of the latest complete node,
        f[levels, d]. The sum of the node's parent is computed from this sum.
    """

    nodes: jax.Array
    noiseless: jax.Array


def _level_rows(window: int) -> tuple[np.ndarray, np.ndarray]:
    """For each level of a `Ring`, the number of rows and the index of the first row."""
    num_rows = np.array([window >> k for k in range(window.bit_length())], np.int32)
    return num_rows, np.concatenate([[0], np.cumsum(num_rows)[:-1]]).astype(np.int32)


def empty_ring(window: int, dimension: int, dtype: DTypeLike = float) -> Ring:
    """A `Ring` of zeros, for windows of `window` steps and vectors f[dimension]."""
    num_rows, _ = _level_rows(window)
    nodes = jnp.zeros((num_rows.sum(), dimension), dtype)
    return Ring(nodes, jnp.zeros((len(num_rows), dimension), dtype))


def _level_decays(decay: jax.Array, levels: int, dtype: DTypeLike) -> jax.Array:
    """The power β^{2^k} of the decay β, for each level k = 0, 1, ..., f[levels]."""
    sizes = jnp.exp2(jnp.arange(levels, dtype=dtype))
    return jnp.power(jnp.asarray(decay, dtype), sizes)


def push(
    ring: Ring,
    value: jax.Array,
    stddev: jax.Array,
    key: Key,
    *,
    step: jax.Array,
    window: int,
    decay: jax.Array,
    active: ArrayLike = True,
) -> Ring:
    """Release the sums of the tree nodes that end at a step, and store them in a ring.

    A tree node of level k covers 2^k steps. Nodes longer than a window are left out,
    since no window contains them. The sum of a node is Σ β^{z − j} x_j over the steps j
    of the node, where x_j is the vector of step j, and z is the node's last step.
    `push` adds noise to the sum. Each new sum replaces a sum that no later window
    needs.

    Args:
      ring: the ring buffer after step t − 1.
      value: x_t, f[d].
      stddev: the standard deviation of each coordinate of the noise of a node, f[].
      key: a typed key, the same in all steps.
      step: t, i[], counted from 1.
      window: the number of steps in a window, static.
      decay: β, f[].
      active: whether to store anything; if False, the ring is returned unchanged.

    Returns:
      The ring buffer after step t.
    """
    num_rows, first_rows = (jnp.asarray(x) for x in _level_rows(window))
    factors = _level_decays(decay, len(num_rows), ring.nodes.dtype)
    # The bit operations below need an int32.
    step, value = jnp.asarray(step, jnp.int32), value.astype(ring.nodes.dtype)
    key = stream(key, "windows")
    num_completed = jnp.minimum(node_level(step) + 1, len(num_rows))

    # The nodes that end at step t have the levels from 0 to the number of trailing zero
    # bits of t. The loop starts at level 0. A right child ends where its parent ends.
    # The parent's value is the left child's value times β^{2^k}, plus the right child's
    # value, where 2^k is the length of the right child.
    def complete(level: jax.Array, carry: _Vectors) -> _Vectors:
        nodes, noiseless, value = carry
        index = step >> level
        noise = node_noise(key, level, index, value, stddev)
        # The new node replaces the oldest node of its level, which is no longer needed.
        row = first_rows[level] + (index - 1) % num_rows[level]
        nodes = jax.lax.dynamic_update_index_in_dim(nodes, value + noise, row, 0)
        left = jax.lax.dynamic_index_in_dim(noiseless, level, keepdims=False)
        noiseless = jax.lax.dynamic_update_index_in_dim(noiseless, value, level, 0)
        return nodes, noiseless, factors[level] * left + value

    # If the count is 0, the loop leaves the ring unchanged and draws no noise.
    count = jnp.where(active, num_completed, 0)
    nodes, noiseless, _ = jax.lax.fori_loop(0, count, complete, (*ring, value))
    return Ring(nodes, noiseless)


def query(
    ring: Ring,
    step: jax.Array,
    *,
    window: int,
    decay: jax.Array,
    active: ArrayLike = True,
) -> jax.Array:
    """The private sum Σ β^{t − j} x_j over a window of n steps j, which ends at step t.

    Here x_j is the vector of step j. Before step n, the window begins at step 1. The
    query draws no noise: it adds weighted sums that `push` has released with noise.

    Args:
      ring: the ring buffer after step t.
      step: t, i[], counted from 1.
      window: n, the number of steps in the window, static.
      decay: β, f[].
      active: whether to read the ring; if False, the result is zero.

    Returns:
      The sum, f[d].
    """
    num_rows, first_rows = (jnp.asarray(x) for x in _level_rows(window))
    factors = _level_decays(decay, len(num_rows), ring.nodes.dtype)
    step = jnp.asarray(step, jnp.int32)
    start = jnp.where(active, jnp.maximum(step - window, 0), step)

    # COMPOSE(start + 1, t) from left to right (Tran and Cutkosky (2022), Algorithm 3,
    # https://arxiv.org/abs/2210.06328): choose the largest node that begins at
    # start + 1 and ends by t. Multiply the sum so far by β^{2^k}, for the node's length
    # 2^k.
    def is_incomplete(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[0] < step

    def add_node(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, total = carry
        max_level = 31 - jax.lax.clz(step - start)  # ⌊log₂(step − start)⌋
        level = jnp.minimum(node_level(start), max_level)
        row = first_rows[level] + (start >> level) % num_rows[level]
        node = jax.lax.dynamic_index_in_dim(ring.nodes, row, keepdims=False)
        return start + (1 << level), factors[level] * total + node

    zero = jnp.zeros(ring.nodes.shape[1], ring.nodes.dtype)
    return jax.lax.while_loop(is_incomplete, add_node, (start, zero))[1]


def window_variance(num_steps: int, window: int, decay: float) -> np.ndarray:
    """The variance of the noise in `query` at each step, for node noise of variance 1.

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
        num_left = step - start
        # The exponent of frexp minus 1 is exactly the floor of the base-2 logarithm.
        max_size = np.where(num_left > 0, 1 << (np.frexp(num_left)[1] - 1), 0)
        # start & −start is the largest power of two that divides start > 0.
        size = np.where(start > 0, np.minimum(max_size, start & -start), max_size)
        start = start + size
        weight = np.power(float(decay), 2.0 * (step - start))
        total += np.where(size > 0, weight, 0.0)
    return total


T = TypeVar("T")


class Terms(NamedTuple, Generic[T]):
    """Three values, one for each of three sequences of vectors that `update` sums.

    An epoch has n steps. The anchor of an epoch is the iterate at which the epoch
    began. Let g_i be the sum of the gradients of step i at the anchor. Each sequence
    has a binary tree. Each node of the tree has noise of its own, for the sum of the
    sequence over a range of steps.

    Attributes:
      anchor: the value for the sequence g_i, which `update` uses before step 2n.
      change: the value for the sequence (1 − γ) (g_i − g_{i−n}) + γ g_i, where γ is the
        argument `refresh` of `update`.
      drift: the value for the sequence of drifts. A drift is a step's sum of gradients
        at the current iterate minus g_i.
    """

    anchor: T
    change: T
    drift: T


class ReducedMomentumState(NamedTuple):
    """The state of `update`. Keep the state as secret as the data.

    The state holds sums without noise. `Terms` describes three sequences of vectors
    f[d], and a tree of noisy sums for each sequence. An epoch has n steps.

    Attributes:
      anchor: the ring buffer of the tree for `Terms.anchor`.
      change: the ring buffer of the tree for `Terms.change`.
      drift: the weighted sum of all drifts (`Terms.drift`), with noise, f[d].
      nodes: for each level of the tree for `Terms.drift` except the highest, the noise
        of the latest node, f[levels, d]. The noise of the node at the highest level
        overwrites the last row, which no later step reads.
      windows: P_t of the module's docstring for each of the last n steps t, f[n, d].
        P_t is a private weighted sum of the gradients at the anchor over the n steps up
        to step t.
      totals: M_t of the module's docstring for each of the last n steps t, f[n, d]. M_t
        is a private weighted sum of the gradients at the anchor over all steps up to
        step t.
    """

    anchor: Ring
    change: Ring
    drift: jax.Array
    nodes: jax.Array
    windows: jax.Array
    totals: jax.Array


def init(
    num_steps: int, steps_per_epoch: int, dimension: int, dtype: DTypeLike = float
) -> ReducedMomentumState:
    """The state of `update` before the first step of a run.

    Args:
      num_steps: T, the number of steps of the run.
      steps_per_epoch: n, the number of steps in an epoch.
      dimension: the number of parameters, which is the length of a sum of gradients.
      dtype: the dtype of the state, float32 or wider.
    """
    ring = empty_ring(steps_per_epoch, dimension, dtype)
    drift = jnp.zeros(dimension, dtype)
    # No step subtracts the node at the highest level.
    nodes = jnp.zeros((num_steps.bit_length() - 1, dimension), dtype)
    rows = jnp.zeros((steps_per_epoch, dimension), dtype)
    return ReducedMomentumState(ring, ring, drift, nodes, windows=rows, totals=rows)


def tree_keys(key: Key) -> Terms[Key]:
    """Derive a separate key for the noise of each sequence in `Terms`."""
    return Terms(*(stream(key, f"reduced_momentum.{name}") for name in Terms._fields))


def update(
    state: ReducedMomentumState,
    step: jax.Array,
    terms: Terms[jax.Array],
    *,
    steps_per_epoch: int,
    decay: jax.Array,
    refresh: jax.Array,
    stddevs: Terms[jax.Array],
    keys: Terms[Key],
) -> tuple[jax.Array, ReducedMomentumState]:
    """Return the private momentum m̂_t of step t, and the state after that step.

    An epoch has n steps, and its anchor is the iterate at which the epoch began. Let
    g_i be the sum of step i's gradients at the anchor. The drift r_i is the sum of the
    changes of these gradients from the anchor to the current iterate. Then m̂_t
    estimates (1 − β) Σ_{i<=t} β^{t−i} (g_i + r_i). A third sequence of vectors is
    h_i = (1 − γ) (g_i − g_{i−n}) + γ g_i. Each of the three sequences has a binary
    tree, whose nodes have noisy sums over ranges of steps.

    Args:
      state: the state before the step. `init` makes the state before the first step.
      step: t, i[], counted from 1.
      terms: the vectors of step t in the three sequences, f[d] each: `anchor` for g_t,
        `change` for h_t, and `drift` for r_t. The caller computes each vector as a sum
        of clipped vectors, one for each example. `change` is not used in the first n
        steps, and `anchor` is not used from step 2n on.
      steps_per_epoch: n, static.
      decay: the momentum coefficient β, f[].
      refresh: γ, f[], the weight of g_i in h_i.
      stddevs: for each tree, the standard deviation of the noise of one node, f[].
      keys: a typed key for each tree, as `tree_keys` makes them.

    Returns:
      m̂_t, f[d], and the new state.

    Privacy: `accounting.tree.reduced_momentum_mu` gives the guarantee of a whole run.
    """
    n, dtype = steps_per_epoch, state.drift.dtype
    step, terms = jnp.asarray(step).astype(jnp.int32), widen(terms)
    decay, refresh = jnp.asarray(decay, dtype), jnp.asarray(refresh, dtype)
    # The first case of (3) and Algorithm 4 of Tran and Cutkosky (2022),
    # https://arxiv.org/abs/2210.06328: before step 2n, P_t needs no earlier P.
    first = step < 2 * n
    release = functools.partial(push, step=step, window=n, decay=decay)
    anchor = release(
        state.anchor, terms.anchor, stddevs.anchor, keys.anchor, active=first
    )
    change = release(
        state.change, terms.change, stddevs.change, keys.change, active=step > n
    )
    # An inactive query gives zero. So the sum is the result of the active query.
    from_anchor = query(anchor, step, active=first, window=n, decay=decay)
    from_change = query(change, step, active=~first, window=n, decay=decay)

    # Steps at the same position in different epochs use the same row.
    row = (step - 1) % n

    def update_row(
        rows: jax.Array, factor: jax.Array, new: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # The new row is read from the updated array. If the old row were used twice,
        # XLA would copy all rows instead of updating them in place.
        old = jax.lax.dynamic_index_in_dim(rows, row, keepdims=False)
        rows = jax.lax.dynamic_update_index_in_dim(rows, factor * old + new, row, 0)
        return jax.lax.dynamic_index_in_dim(rows, row, keepdims=False), rows

    # P_t = (1 − γ) P_{t−n} + Ĥ, but P_t = Ĝ for t < 2n, and M_t = β^n M_{t−n} + P_t.
    # See the recursion in the module's docstring. The row holds P and M of step t − n.
    old_weight = jnp.where(first, 0.0, 1 - refresh)
    estimate, windows = update_row(state.windows, old_weight, from_anchor + from_change)
    total, totals = update_row(state.totals, jnp.power(decay, n), estimate)

    def draw(step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(keys.drift, step)
        return gaussian_like(key, state.drift, stddevs.drift)

    # The momentum of this noise is the noise N_t of tree aggregation (see `tree`).
    weights = tree_weights(decay.astype(jnp.float32), 1 << state.nodes.shape[0])
    noise: Any
    nodes: Any
    noise, nodes = buffered_tree(weights).generate(draw, step, state.nodes)
    drift = decay * state.drift + terms.drift + noise
    # (2): m̂_t = α Ĝ_{[1, t]} + α r̂_{[1, t]} with α = 1 − β.
    momentum = (1 - decay) * (total + drift)
    return momentum, ReducedMomentumState(anchor, change, drift, nodes, windows, totals)


def momentum_variance(
    num_steps: int, steps_per_epoch: int, *, decay: float, refresh: float
) -> Terms[np.ndarray]:
    """The variance that each of three noise trees adds to momentum divided by 1 − β.

    `update` returns the momentum m̂_t at step t. Each sequence in `Terms` has a tree of
    noisy sums. The result for a tree is the variance of the noise in a coordinate of
    m̂_t / (1 − β), if each node of this tree has noise of variance 1 and the other two
    trees have no noise. For other noise, multiply the result for each tree by the
    variance of the noise of one node, and add the three products.

    Args:
      num_steps: T, the number of steps, a multiple of steps_per_epoch.
      steps_per_epoch: n, the number of steps in an epoch, at least 1.
      decay: the momentum coefficient β, in [0, 1).
      refresh: γ, in [0, 1], as for `update`.

    Returns:
      `Terms` of f64[T]: entry t − 1 of each array is for step t.

    Example:
      >>> variance = momentum_variance(6, 2, decay=0.5, refresh=0.1)
      >>> variance.anchor.round(3)
      array([1.   , 1.   , 1.312, 1.322, 1.657, 1.205])
    """
    n = steps_per_epoch
    variances = window_variance(num_steps, n, decay).reshape(-1, n)
    first = (np.arange(1, num_steps + 1) < 2 * n).reshape(-1, n)
    keep, beta_n = 1 - refresh, float(decay) ** n

    # Var P, Var M and Cov(M, P) follow from their values one epoch before, since
    # P_{t−n} and M_{t−n} have no node in common with the window of step t.
    def variance(window_variances: np.ndarray) -> np.ndarray:
        rows, var_p, var_m, covariance = [], np.zeros(n), np.zeros(n), np.zeros(n)
        for row, is_first in zip(window_variances, first, strict=True):
            factors = np.where(is_first, 0.0, keep)
            var_p = factors**2 * var_p + row
            # Cov(β^n M, P_t) = β^n (1 − γ) Cov(M, P), where M and P are of step t − n.
            var_m = beta_n**2 * var_m + 2 * beta_n * factors * covariance + var_p
            covariance = beta_n * factors * covariance + var_p
            rows.append(var_m)
        return np.concatenate(rows)

    steps = np.arange(1, num_steps + 1)
    return Terms(
        anchor=variance(np.where(first, variances, 0.0)),
        change=variance(np.where(first, 0.0, variances)),
        drift=np.asarray(prefix_variance(steps, decay), np.float64),
    )
