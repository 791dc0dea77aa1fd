"""The exact privacy loss of mechanisms that add the noise of binary trees.

Each node of a tree releases a sum of terms with independent noise. An example that
takes part several times changes several nodes, and several terms of a node. All these
changes can have the same direction, and Gaussian mechanisms compose exactly. Therefore
μ² is a sum over nodes, for the steps of an example at which this sum is largest.

The formulas below are for ADD_REMOVE and ZERO_OUT. Under REPLACE, μ is twice as large,
since one example then changes each sum by up to two clip norms.

1. `momentum_mu` accounts for the left children of one tree, which are the nodes that
   momentum needs.
2. `reduced_momentum_mu` accounts for three trees, for momentum whose terms have reduced
   sensitivity. Two of the trees release the nodes of sliding windows. The third tree
   releases its left children.

**Momentum.** Let g_i be the sum of clipped gradients of step i, C the clip norm, and β
the momentum coefficient. Node [y, z] contains the steps y, …, z. The node releases
Σ_i β^{z−i} g_i plus noise of standard deviation σ C. An example that takes part at the
steps P therefore changes the node by at most C Σ_{p in P∩[y,z]} β^{z−p}. All
contributions can have the same direction, and Gaussian noise on adaptive queries
composes exactly. The mechanism is therefore μ-GDP with

    μ² = (1/σ²) max_P Σ_{released [y,z]} (Σ_{p in P∩[y,z]} β^{z−p})²,

and with no smaller μ. The released nodes are the left children, which end at the odd
multiples of their size. For batches in a fixed order, this module evaluates the
maximum. For batches in a reshuffled order, this module evaluates an upper bound on the
maximum.

**Momentum with reduced sensitivity.** An anchor is the iterate at which an epoch
begins. Three trees release nodes, for T steps with n steps in each epoch:

- The *anchor* terms are gradients at the anchor. The tree releases the nodes of the
  sums over the steps max(t − n, 0) + 1, …, t for t < 2n.
- The *change* terms combine gradients at the anchor and changes of these gradients from
  epoch to epoch. The tree releases the nodes of the sums over the steps t − n + 1, …, t
  for 2n <= t <= T.
- The *drift* terms are changes of gradients since the anchor. The tree releases the
  nodes of the sums over the steps 1, …, t for t <= T, which are the left children.

In the first two trees, the steps of a sum form a window. A window consists of the
fewest dyadic nodes: the nodes inside the window whose parents are not inside the
window. A node [y + 1, z] of size m is therefore released if some window [t − n + 1, t]
of the tree satisfies t − n <= y and z <= t, and the condition

- t < z + m for a left child, whose parent ends at step z + m;
- t − n > y − m for a right child, whose parent begins after step y − m.

An example takes part at the steps p, p + n, p + 2n, …, which are the same in every
tree. The example's terms have norms of at most c. The example changes a node that ends
at z by at most Σ_i β^{z − i} c, over the example's steps i in the node, and all
contributions can have the same direction. A node of the first two trees is at most as
long as a window, and therefore contains at most one step of the example. Gaussian noise
on adaptive queries composes exactly. The mechanism is therefore μ-GDP with

    μ² = max_p Σ_trees (c/s)² Σ_{released nodes} (Σ_i β^{z − i})²,

where c and s, the standard deviation of the noise, may differ between trees. No smaller
μ holds for terms whose only known bound is c. (The changes of a bounded gradient cannot
have the same direction at all steps. The bound does not use this fact.)
"""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.float64 import TINY, ULP, float64
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax.accounting._schedule import Schedule, check_schedule, mu_of_sensitivity


def _geometric_sum(ratio: jax.Array, count: int) -> jax.Array:
    """The sum 1 + r + … + r^{count−1} for the ratio r, by doubling.

    The computation has no cancellation near r = 1, and has a derivative at r = 0.
    """
    # Over the leading bits of count: S_{2k} = S_k (1 + r^k), S_{k+1} = 1 + r S_k.
    total, power = jnp.zeros_like(ratio), jnp.ones_like(ratio)
    for bit in bin(count)[2:]:
        total, power = total * (1 + power), power * power
        if bit == "1":
            total, power = 1 + ratio * total, power * ratio
    return total


def _geometric_sums(ratio: jax.Array, counts: jax.Array, largest: int) -> jax.Array:
    """The sum 1 + r + … + r^{c−1} for each count c and the ratio r.

    Every count must be `largest` or `largest` − 1.
    """
    few, many = (_geometric_sum(ratio, c) for c in (max(largest - 1, 0), largest))
    return jnp.where(counts == largest, many, few)


def _fixed_order_squares(decay: jax.Array, num_steps: int, n_b: int) -> jax.Array:
    """The squared sensitivity of the left children of a tree, by position, f[n_b].

    An epoch has n_b steps. An example at position p takes part at the steps p + e n_b
    of all epochs e. The squared sensitivity to this example is
    Σ_nodes (Σ_e β^{z − p − e n_b})², where z is the step at which a node ends, and β is
    the decay. The sum over e is over the example's steps in the node.
    """
    # For gap = (z − p) mod n_b, the example's steps in the node are z − gap,
    # z − gap − n_b, …, so that the inner sum depends only on the gap and the node's
    # size. z mod n_b is periodic over the nodes of a level. So each square is added
    # once for each value of z mod n_b, times the number of nodes with this value.
    ratio = jnp.power(decay, n_b)
    total = jnp.zeros(n_b, decay.dtype)
    for level in range(num_steps.bit_length()):
        size = 1 << level
        nodes = (num_steps // size + 1) // 2
        period = n_b // math.gcd(n_b, 2 * size)
        node = jnp.arange(min(nodes, period))
        ends = (2 * node + 1) * size
        repeats = (nodes - 1 - node) // period + 1

        gap = jnp.arange(min(size, n_b))
        participations = (size - 1 - gap) // n_b + 1
        sums = _geometric_sums(ratio, participations, (size - 1) // n_b + 1)
        inner = jnp.power(decay, gap) * sums
        offset = (ends[:, None] - gap[None, :]) % n_b
        total = total.at[offset].add(repeats[:, None] * jnp.square(inner)[None, :])
    return total


def _reshuffled_order_square(decay: jax.Array, num_steps: int, n_b: int) -> jax.Array:
    """A bound on the squared sensitivity to an example with any one step in each epoch.

    The squared sensitivity is Σ inner(node)² over the left children of a binary tree.
    Here inner(node) is Σ_{p in P∩node} β^{z−p}, for the decay β, the step z at which
    the node ends, and the steps P of the example. So the squared sensitivity is
    Σ_{p in P} Σ_{nodes ∋ p} β^{z−p} · inner(node). Within inner(node), the bound keeps
    the term β^{z−p} of the step p. For every other epoch, the bound has the term of the
    epoch's last step in the node, which is the largest possible term. The part of each
    epoch in the sum then depends only on the step p of this epoch, and the function
    maximises each part. The bound is exact if no node contains steps of two epochs.
    """
    num_epochs = -(-num_steps // n_b)
    step = jnp.arange(1, num_epochs * n_b + 1)
    epoch_end = ((step - 1) // n_b + 1) * n_b
    powers = jnp.power(decay, jnp.arange(num_steps + 1))
    ratio = powers[n_b] if n_b <= num_steps else jnp.zeros_like(decay)
    total = jnp.zeros(step.shape, decay.dtype)
    for level in range(num_steps.bit_length()):
        size = 1 << level
        node = (step - 1) >> level
        end = (node + 1) << level
        released = (node % 2 == 0) & (end <= num_steps)

        own = powers[jnp.clip(end - step, 0, num_steps)]
        own_best = powers[jnp.clip(end - epoch_end, 0, num_steps)]
        # An earlier epoch contributes at most β^{z − (the epoch's last step)}, and the
        # epoch that contains z contributes at most 1.
        earlier = (end - 1) // n_b - (end - size) // n_b
        latest = powers[jnp.clip((end - 1) % n_b + 1, 0, num_steps)]
        max_earlier = -(-(size - 1) // n_b)
        best = 1 + latest * _geometric_sums(ratio, earlier, max_earlier)
        total += jnp.where(released, own * (own + best - own_best), 0.0)
    return jnp.sum(jnp.max(total.reshape(num_epochs, n_b), axis=1))


@float64("up", static=("schedule",), elementwise=True)
def _momentum_mu64(
    noise_multiplier: jax.Array, decay: jax.Array, *, schedule: Schedule
) -> jax.Array:
    """The μ of `momentum_mu`; inf for a decay or noise multiplier out of range."""
    num_steps, n_b = schedule.num_steps, schedule.steps_per_epoch
    # In Tran and Cutkosky (2022), Theorem 10, https://arxiv.org/abs/2210.06328, μ² is
    # V · (the largest sensitivity of a node)² / σ², for V nodes. Here each node counts
    # with its own sensitivity:
    # μ² = max_P Σ_nodes (Σ_{p in P∩node} β^{z−p})² / σ².
    if schedule.order == "fixed":
        square = jnp.max(_fixed_order_squares(decay, num_steps, n_b))
    else:
        square = _reshuffled_order_square(decay, num_steps, n_b)
    # The terms are positive and added one after the other, so that relative rounding
    # errors grow with their number. 64 covers the errors within a term.
    terms = num_steps.bit_length() * (-(-num_steps // n_b))
    bound = schedule.factor * jnp.sqrt(square) * (1 + (64 + terms) * ULP)
    mu = mu_of_sensitivity(bound, noise_multiplier)
    return jnp.where((decay >= 0) & (decay < 1), mu, jnp.inf)


def momentum_mu(
    noise_multiplier: ArrayLike,
    *,
    num_steps: int,
    decay: ArrayLike,
    steps_per_epoch: int,
    order: Literal["fixed", "reshuffled"],
    adjacency: Adjacency,
) -> jax.Array:
    """The GDP parameter of all updates of `dpjax.tree_momentum` together.

    Args:
      noise_multiplier: the standard deviation of the noise of a tree node, divided by
        the clip norm, f[*b], at least 0.
      num_steps: T, the number of steps of the run, static, at least 1.
      decay: the momentum coefficient β, f[*b], in [0, 1).
      steps_per_epoch: n_b, the number of steps in an epoch, static, at least 1.
      order: "fixed" if every epoch has the same batches in the same order. μ is then
        exact for an example in the worst of the n_b batches. "reshuffled" if an example
        takes part in at most one step of each epoch, which can be any step. μ is then
        an upper bound.
      adjacency: which data sets are compared. Under ADD_REMOVE, the batch of any other
        example must not depend on the added example. Batches of fixed size violate this
        condition.

    Returns:
      μ, f[*b], rounded up; inf if there is no noise or a traced value is out of range.

    Raises:
      ValueError: a static argument is out of range.

    Reference: Tran and Cutkosky (2022), Algorithm 1 and Theorem 10. Their Theorem 4
    uses the largest sensitivity of any node for every node, and this function uses the
    sensitivity of each node.

    Example:
      >>> mu = momentum_mu(
      ...     4.0, num_steps=1000, decay=0.9, steps_per_epoch=100, order="fixed",
      ...     adjacency=Adjacency.ZERO_OUT)
      >>> print(f"{(4.0 * mu) ** 2:.2f}")
      25.02
    """
    validate.nonnegative("noise_multiplier", noise_multiplier, finite=False)
    validate.half_open_unit("decay", decay)
    validate.one_of("order", order, ("fixed", "reshuffled"))
    schedule = check_schedule(num_steps, steps_per_epoch, order, adjacency)
    return _momentum_mu64(noise_multiplier, decay, schedule=schedule)


def _window_squares(
    decay: jax.Array, num_steps: int, window: int, first: int, last: int
) -> jax.Array:
    """The squared sensitivity of the nodes of sliding windows, by position, f[n].

    For t = first, …, last, a window has the last n = `window` steps up to step t, or
    the steps 1, …, t if t < n. Each window consists of nodes of a binary tree, and all
    these nodes are released. Entry r is the sum of β^{2(z − i)} over all steps i with
    i mod n = r, and over all released nodes that contain i. Here z is the step at which
    a node ends, and β is the decay.
    """
    step = jnp.arange(1, num_steps + 1)
    total = jnp.zeros(window, decay.dtype)
    for level in range(window.bit_length()):
        size = 1 << level
        index = (step - 1) >> level
        before, end = index << level, (index + 1) << level
        left = index % 2 == 0
        # The first and last t whose window releases the node: see the module docstring.
        earliest = jnp.where(left, end, jnp.maximum(end, before - size + window + 1))
        latest = before + window
        latest = jnp.where(left, jnp.minimum(end + size - 1, latest), latest)
        earliest, latest = jnp.maximum(earliest, first), jnp.minimum(latest, last)
        terms = jnp.where(earliest <= latest, jnp.power(decay, 2 * (end - step)), 0.0)
        total = total.at[step % window].add(terms)
    return total


@float64("up", static=("schedule",), elementwise=True)
def _reduced_momentum_mu64(
    anchor: jax.Array,
    change: jax.Array,
    drift: jax.Array,
    decay: jax.Array,
    *,
    schedule: Schedule,
) -> jax.Array:
    num_steps, n = schedule.num_steps, schedule.steps_per_epoch
    # Tran and Cutkosky (2022), Theorem 8, https://arxiv.org/abs/2210.06328, has three
    # groups of nodes, and counts each node with the largest sensitivity in its group.
    # Here each node counts with its own sensitivity.
    trees = (
        (anchor, _window_squares(decay, num_steps, n, 1, min(2 * n - 1, num_steps))),
        (change, _window_squares(decay, num_steps, n, 2 * n, num_steps)),
        (drift, _fixed_order_squares(decay, num_steps, n)),
    )
    # Costs are in units of the least noise, so that no square overflows or underflows.
    noises = jnp.stack([anchor, change, drift])
    noisy = (noises > 0) & (noises < jnp.inf)
    unit = jax.lax.stop_gradient(jnp.min(jnp.where(noisy, noises, jnp.inf)))
    unit = jnp.where(unit < jnp.inf, unit, 1.0)
    square = jnp.zeros(n)
    for noise, squares in trees:
        # A tree that releases no node (totals 0) needs no noise.
        noiseless = noise <= 0
        cost = squares * jnp.square(unit / jnp.where(noiseless, 1.0, noise))
        square += jnp.where(noiseless & (squares > 0), jnp.inf, cost)
    max_square = jnp.max(square)
    positive = max_square > 0
    # Rounding errors grow with the number of terms that are added.
    terms = 3 * num_steps.bit_length() * (-(-num_steps // n))
    mu = schedule.factor * jnp.sqrt(jnp.where(positive, max_square, 1.0)) / unit
    mu = jnp.maximum(mu * (1 + (128 + terms) * ULP), TINY)
    mu = jnp.where(positive, mu, 0.0)
    return jnp.where((decay >= 0) & (decay < 1) & jnp.all(noises >= 0), mu, jnp.inf)


def reduced_momentum_mu(
    noise_multipliers: Sequence[ArrayLike],
    *,
    num_steps: int,
    decay: ArrayLike,
    steps_per_epoch: int,
    adjacency: Adjacency,
) -> jax.Array:
    """The GDP parameter of all momenta of `sensitivity_reduced_nsgd` together.

    Args:
      noise_multipliers: for each of three trees, the noise standard deviation of a node
        divided by the bound on one example's term, f[*b], at least 0. The trees are for
        gradients at the first iterate of an epoch (anchor terms), for the changes of
        these gradients between epochs (change terms), and for changes of gradients
        within an epoch (drift terms).
      num_steps: T, the number of steps of the run, static, at least 1.
      decay: the momentum coefficient β, f[*b], in [0, 1).
      steps_per_epoch: n, the number of steps in an epoch, static, at least 1. Every
        epoch must have the same batches in the same order, since the change terms
        compare the gradients of the same batch in two epochs.
      adjacency: which data sets are compared. Under ADD_REMOVE, the batch of any other
        example must not depend on the added example. Batches of fixed size violate this
        condition.

    Returns:
      μ, f[*b], rounded up; inf if a tree that releases a node has no noise, or if a
      traced value is out of range.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: the release of all nodes is μ-GDP. All momenta and iterates are computed
    from the nodes. The release of all momenta and iterates is therefore also μ-GDP.

    Reference: Tran and Cutkosky (2022), Algorithms 2 and 4. The exact sum over all
    nodes replaces their Theorem 8.

    Example:
      >>> mu = reduced_momentum_mu(
      ...     (8.0, 8.0, 8.0), num_steps=1000, decay=0.99, steps_per_epoch=100,
      ...     adjacency=Adjacency.ZERO_OUT)
      >>> print(f"{mu:.3f}")
      1.287
    """
    anchor, change, drift = noise_multipliers
    for noise in noise_multipliers:
        validate.nonnegative("noise_multipliers", noise, finite=False)
    validate.half_open_unit("decay", decay)
    schedule = check_schedule(num_steps, steps_per_epoch, "fixed", adjacency)
    return _reduced_momentum_mu64(anchor, change, drift, decay, schedule=schedule)
