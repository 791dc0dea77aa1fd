"""Momentum with reduced sensitivity: changes between epochs in place of gradients.

An epoch has n steps and the momentum coefficient is β. A step's sum of gradients is the
sum of its examples' gradients at the epoch's anchor (the iterate at which the epoch
began), called the anchor term, plus the drift since the anchor. Let G_{[s, t]} be the
sum of the anchor terms of the steps s, …, t, where the term of step i has the weight
β^{t−i}, and let every epoch have the same batches. From one epoch to the next, G over
the last n steps changes by Δ, which is the same weighted sum of the changes of the
anchor terms. Therefore, for any γ,

    G_{[t−n+1, t]} = (1 − γ)(Δ_{[t−n+1, t]} + G_{[t−2n+1, t−n]}) + γ G_{[t−n+1, t]}.

The estimate P_t of G_{[t−n+1, t]}, and the estimate M_t of the sum of all anchor terms,
follow the recursion

    P_t = (1 − γ) P_{t−n} + Ĥ_{[t−n+1, t]},    M_t = β^n M_{t−n} + P_t,
    m̂_t = (1 − β)(M_t + r̂_{[1, t]}),

where Ĥ is a private window sum of h_i = (1 − γ) δ_i + γ g_i, δ_i is the change of the
anchor term g_i since the epoch before, and r̂ is a private prefix sum of drifts. For
t < 2n there is no earlier window, and P_t = Ĝ is a private sum of the anchor terms g_i
themselves. Unrolled, the recursion is the reconstruction of Tran and Cutkosky (2022),
Algorithm 4. Per step, the recursion reads O(log n) nodes, and their algorithm reads
O(t/n log n).

One tree (`dpjax.noise._windows`) for h is as good as one tree for δ and another for g.
For two trees with sensitivities a and b and noise variances x and y, the privacy cost
is a²/x + b²/y, and every estimate gets the variance x + y. The minimum product of cost
and variance is (a + b)², which is also the product for one tree of the sum.
"""

from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.dtypes import widen
from dpjax._core.keys import stream
from dpjax._core.typing import DTypeLike, Key
from dpjax._matrices.streaming import buffered_tree, tree_weights
from dpjax.noise._gaussian import gaussian_like
from dpjax.noise._windows import Ring, empty_ring, push, query, window_variance
from dpjax.noise.tree import prefix_variance

T = TypeVar("T")


class Terms(NamedTuple, Generic[T]):
    """Three values of the same kind, one for each tree of the momentum.

    The module's docstring defines anchor, drift, γ and h_i; n is the number of steps in
    an epoch.

    Attributes:
      anchor: the value for the tree of gradients at the anchor, used while t < 2n.
      change: the value for the tree of h_i, which is (1 − γ) times the change of a
        gradient at the anchor since the last epoch, plus γ times this gradient.
      drift: the value for the tree of drifts, which are changes of gradients since the
        anchor.
    """

    anchor: T
    change: T
    drift: T


class ReducedMomentumState(NamedTuple):
    """The state of `update`, for the three trees that `Terms` describes.

    Keep the state as secret as the data, since it holds sums without noise. The
    module's docstring defines P, M and n.

    Attributes:
      anchor: the ring buffer of the anchor tree's nodes.
      change: the ring buffer of the change tree's nodes.
      drift: the weighted sum of drifts with the noise of the drift tree, f[d].
      nodes: the noise of the latest node of each level of the drift tree, f[levels, d].
      windows: the estimates P of the last n steps, f[n, d].
      totals: the estimates M of the last n steps, f[n, d].
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
      dimension: d, the length of a step's sums f[d].
      dtype: the dtype of the state, which is widened to at least float32.
    """
    ring = empty_ring(steps_per_epoch, dimension, dtype)
    drift = jnp.zeros(dimension, dtype)
    # No step subtracts the node at the highest level.
    nodes = jnp.zeros((num_steps.bit_length() - 1, dimension), dtype)
    rows = jnp.zeros((steps_per_epoch, dimension), dtype)
    return ReducedMomentumState(ring, ring, drift, nodes, windows=rows, totals=rows)


def tree_keys(key: Key) -> Terms[Key]:
    """An independent key for each of the three trees, derived from one typed key."""
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

    m̂_t estimates (1 − β) Σ_{i<=t} β^{t−i} s_i, where s_i is the sum of step i's clipped
    gradients. An epoch has n steps. s_i is the sum g_i of gradients at the epoch's
    anchor, the iterate at which the epoch began, plus the drift s_i − g_i since then.
    For each of three sequences, a tree of sums over ranges of steps adds noise: for
    g_i, for the drifts, and for h_i = (1 − γ) (g_i − g_{i−n}) + γ g_i.

    Args:
      state: the state before the step. `init` makes the state before the first step.
      step: t, i[], counted from 1.
      terms: the values for step t of the three sequences, as sums of clipped terms of
        examples, f[d] each: `anchor` for g_t, `change` for h_t, and `drift`. `change`
        is not used in the first n steps, and `anchor` is not used from step 2n on.
      steps_per_epoch: n, static.
      decay: the momentum coefficient β, f[].
      refresh: γ, f[]: the weight of g_i in h_i.
      stddevs: the standard deviation of the noise in a node of each tree, f[] each.
      keys: a typed key for each tree, as `tree_keys` makes them.

    Returns:
      m̂_t, f[d], and the new state.

    Privacy: `accounting.tree.reduced_momentum_mu` gives the guarantee of a whole run.
    """
    n, dtype = steps_per_epoch, state.drift.dtype
    step, terms = jnp.asarray(step).astype(jnp.int32), widen(terms)
    decay, refresh = jnp.asarray(decay, dtype), jnp.asarray(refresh, dtype)
    # The first case of (3) and Algorithm 4 of Tran and Cutkosky (2022),
    # https://arxiv.org/abs/2210.06328: before step 2n there is no earlier window.
    first = step < 2 * n
    anchor = push(
        state.anchor,
        step,
        terms.anchor,
        stddev=stddevs.anchor,
        key=keys.anchor,
        active=first,
        window=n,
        decay=decay,
    )
    change = push(
        state.change,
        step,
        terms.change,
        stddev=stddevs.change,
        key=keys.change,
        active=step > n,
        window=n,
        decay=decay,
    )
    # An inactive query gives zero. So the sum of both queries is the active one.
    from_anchor = query(anchor, step, active=first, window=n, decay=decay)
    from_change = query(change, step, active=~first, window=n, decay=decay)

    # Steps at the same position in different epochs use the same row.
    row = (step - 1) % n

    def inherit(
        rows: jax.Array, factor: jax.Array, new: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # The new row is read from the updated array. If the old row were used twice,
        # XLA would copy all rows instead of updating them in place.
        old = jax.lax.dynamic_index_in_dim(rows, row, keepdims=False)
        rows = jax.lax.dynamic_update_index_in_dim(rows, factor * old + new, row, 0)
        return jax.lax.dynamic_index_in_dim(rows, row, keepdims=False), rows

    # P_t = (1 − γ) P_{t−n} + Ĥ, but P_t = Ĝ for t < 2n, and M_t = β^n M_{t−n} + P_t.
    # See the recursion in the module's docstring. The row holds P and M of step t − n.
    keep = jnp.where(first, 0.0, 1 - refresh)
    estimate, windows = inherit(state.windows, keep, from_anchor + from_change)
    total, totals = inherit(state.totals, jnp.power(decay, n), estimate)

    def draw(step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(keys.drift, step)
        return gaussian_like(key, state.drift, stddevs.drift)

    # The momentum of the drift tree's noise up to a step is the noise of the prefix.
    weights = tree_weights(decay.astype(jnp.float32), 1 << state.nodes.shape[0])
    noise: Any
    nodes: Any
    noise, nodes = buffered_tree(weights).noise(draw, step, state.nodes)
    drift = decay * state.drift + terms.drift + noise
    # (2): m̂_t = α Ĝ_{[1, t]} + α r̂_{[1, t]} with α = 1 − β.
    momentum = (1 - decay) * (total + drift)
    return momentum, ReducedMomentumState(anchor, change, drift, nodes, windows, totals)


def momentum_variance(
    num_steps: int, steps_per_epoch: int, *, decay: float, refresh: float
) -> Terms[np.ndarray]:
    """For each noise tree, the variance of m̂_t / (1 − β) if no other tree has noise.

    m̂_t is the momentum that `update` returns at step t, whose three trees are those for
    anchor terms, their changes and drifts. The results are for nodes of unit
    variance. The variance of a coordinate of m̂_t / (1 − β) is a sum over the three
    trees, of the result for the tree times the noise variance of the tree's nodes.

    Args:
      num_steps: T, a whole number of epochs.
      steps_per_epoch: n, at least 1.
      decay: the momentum coefficient β, in [0, 1).
      refresh: γ, in [0, 1]: the weight of gradients, against their changes since the
        last epoch, in the change tree (h_i in the module's docstring).

    Returns:
      `Terms` of f64[T]: entry t − 1 of each array is for step t. The windows of the
      steps t, t − n, t − 2n, … have no node in common. So the variances of the
      estimates P_t and M_t, and their covariance, follow a recursion.

    Example:
      >>> variance = momentum_variance(6, 2, decay=0.5, refresh=0.1)
      >>> variance.anchor.round(3)
      array([1.   , 1.   , 1.312, 1.322, 1.657, 1.205])
    """
    n = steps_per_epoch
    fresh = window_variance(num_steps, n, decay).reshape(-1, n)
    first = (np.arange(1, num_steps + 1) < 2 * n).reshape(-1, n)
    keep, fade = 1 - refresh, float(decay) ** n

    # Var P, Var M and Cov(M, P) follow from their values one epoch before, since
    # P_{t−n} and M_{t−n} have no node in common with the window of step t.
    def variance(fresh_of: np.ndarray) -> np.ndarray:
        rows, p, m, both = [], np.zeros(n), np.zeros(n), np.zeros(n)
        for row, base in zip(fresh_of, first, strict=True):
            inherit = np.where(base, 0.0, keep)
            p = inherit**2 * p + row
            # Cov(β^n M, P_t) = β^n (1 − γ) Cov(M, P), where M and P are of step t − n.
            m = fade**2 * m + 2 * fade * inherit * both + p
            both = fade * inherit * both + p
            rows.append(m)
        return np.concatenate(rows)

    steps = np.arange(1, num_steps + 1)
    return Terms(
        anchor=variance(np.where(first, fresh, 0.0)),
        change=variance(np.where(first, 0.0, fresh)),
        drift=np.asarray(prefix_variance(steps, decay), np.float64),
    )
