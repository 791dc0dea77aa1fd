"""The exact privacy of momentum with reduced sensitivity.

Three trees release nodes, for T steps with n steps in each epoch:

- *anchor* terms: the nodes that make up the sums of max(t − n, 0) + 1, …, t for t < 2n;
- *change* terms: the nodes that make up the sums of t − n + 1, …, t for 2n <= t <= T;
- *drift* terms: the nodes of COMPOSE(1, t) for t <= T, which are the left children.

A window is divided into the fewest dyadic nodes: the nodes inside the window whose
parents are not inside it. A node [y + 1, z] of size s is therefore released if some
window [t − n + 1, t] in use has t − n <= y and z <= t, and
  for a left child: t < z + s, as its parent ends with z + s;
  for a right child: t − n > y − s, as its parent begins after y − s.

An example takes part at the steps p, p + n, p + 2n, …, which are the same in every
tree. Its terms have norm at most c. The example changes a node that ends at z by at
most Σ β^{z − i} c, over its steps i in the node, and all contributions can align. A
node of the first two trees is no longer than a window, so that it contains at most one
step of the example. Gaussian noise on adaptive queries composes exactly. The mechanism
is therefore μ-GDP with

    μ² = max_p Σ_trees (c/s)² Σ_{released nodes} (Σ_i β^{z − i})²,

where s is the noise's standard deviation. No smaller μ holds for terms whose only known
bound is c. (Change terms are differences of bounded gradients and cannot align
indefinitely. The bound does not use this fact.)
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.float64 import TINY, ULP, float64
from dpjax.accounting.tree._momentum import fixed_order_totals


def window_totals(
    decay: jax.Array, num_steps: int, window: int, first: int, last: int
) -> jax.Array:
    """Σ_{released nodes} β^{2(z − i)} by position i mod n, for windows first to last.

    The windows are the `window` steps up to t, for t = first, …, last. The result is
    f[window].
    """
    step = jnp.arange(1, num_steps + 1)
    total = jnp.zeros(window, decay.dtype)
    for level in range(window.bit_length()):
        size = 1 << level
        index = (step - 1) >> level
        before, end = index << level, (index + 1) << level
        left = index % 2 == 0
        # The first and last t whose window releases the node: see the module docstring.
        soonest = jnp.where(left, end, jnp.maximum(end, before - size + window + 1))
        latest = jnp.where(
            left, jnp.minimum(end + size - 1, before + window), before + window
        )
        soonest, latest = jnp.maximum(soonest, first), jnp.minimum(latest, last)
        moved = jnp.where(soonest <= latest, jnp.power(decay, 2 * (end - step)), 0.0)
        total = total.at[step % window].add(moved)
    return total


@float64("up", static=("num_steps", "steps_per_epoch", "factor"), elementwise=True)
def _reduced_momentum_mu64(
    anchor: jax.Array,
    change: jax.Array,
    drift: jax.Array,
    decay: jax.Array,
    *,
    num_steps: int,
    steps_per_epoch: int,
    factor: float,
) -> jax.Array:
    n = steps_per_epoch
    # Tran and Cutkosky (2022), Theorem 8, https://arxiv.org/abs/2210.06328, has three
    # groups of nodes, each at its largest sensitivity. Here every node counts with its
    # own sensitivity.
    trees = (
        (anchor, window_totals(decay, num_steps, n, 1, min(2 * n - 1, num_steps))),
        (change, window_totals(decay, num_steps, n, 2 * n, num_steps)),
        (drift, fixed_order_totals(decay, num_steps, n)),
    )
    # In units of the least noise, so that no square overflows or underflows.
    noises = jnp.stack([anchor, change, drift])
    noisy = (noises > 0) & (noises < jnp.inf)
    unit = jax.lax.stop_gradient(jnp.min(jnp.where(noisy, noises, jnp.inf)))
    unit = jnp.where(unit < jnp.inf, unit, 1.0)
    square = jnp.zeros(n)
    for noise, totals in trees:
        # A tree that releases no node (totals 0) needs no noise.
        quiet = noise <= 0
        cost = totals * jnp.square(unit / jnp.where(quiet, 1.0, noise))
        square += jnp.where(quiet & (totals > 0), jnp.inf, cost)
    most = jnp.max(square)
    some = most > 0
    # Rounding errors grow with the number of terms that are added.
    terms = 3 * num_steps.bit_length() * (-(-num_steps // n))
    mu = factor * jnp.sqrt(jnp.where(some, most, 1.0)) / unit
    mu = jnp.maximum(mu * (1 + (128 + terms) * ULP), TINY)
    mu = jnp.where(some, mu, 0.0)
    valid = (decay >= 0) & (decay < 1) & (anchor >= 0) & (change >= 0)
    return jnp.where(valid & (drift >= 0), mu, jnp.inf)


def reduced_momentum_mu(
    noise_multipliers: Sequence[jax.typing.ArrayLike],
    *,
    num_steps: int,
    decay: jax.typing.ArrayLike,
    steps_per_epoch: int,
    adjacency: Adjacency,
) -> jax.Array:
    """The GDP parameter of all momenta of `dpjax.noise.reduced_momentum` together.

    Args:
      noise_multipliers: for anchor terms, change terms and drift terms the noise
        standard deviation of a node over the bound on one example's term, f[*b] each,
        at least 0.
      num_steps: T, static, at least 1.
      decay: the momentum coefficient β, f[*b], in [0, 1).
      steps_per_epoch: n, static, at least 1. Every epoch must have the same batches in
        the same order; otherwise the estimator does not estimate the momentum.
      adjacency: which data sets are compared, as for `momentum_mu`.

    Returns:
      μ, f[*b], rounded up; inf where a tree that is used has no noise, and for traced
      values out of range.

    Raises:
      ValueError: a static argument is out of range.

    Privacy: releasing all nodes is μ-GDP, and so is every momentum and iterate.

    Reference: Tran and Cutkosky (2022), Algorithms 2 and 4, with the exact sum in place
    of Theorem 8.

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
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    validate.decay("decay", decay)
    n = validate.static_int("steps_per_epoch", steps_per_epoch, minimum=1)
    return _reduced_momentum_mu64(
        anchor,
        change,
        drift,
        decay,
        num_steps=num_steps,
        steps_per_epoch=n,
        factor=validate.adjacency(adjacency).sensitivity_factor,
    )
