"""The dominating pair of a Gaussian mechanism with a random sensitivity.

With sensitivities s_i ≥ 0, weights w_i and μ_i = s_i/σ, the pair is Σ w_i N(μ_i, 1)
against N(0, 1), in both directions. The loss at the outcome z is

    x(z) = log Σ w_i e^{v_i},   v_i = μ_i z − μ_i²/2,

which increases with z because no μ_i is negative.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr

from dpjax._core.float64 import SMALL
from dpjax.accounting._numerics.pld import pairs

# The largest v for which e^v is computed directly: e^{2v} is far from overflow.
_DIRECT = 40.0


def _log_mixture(v: jax.Array, weight: jax.Array) -> jax.Array:
    """The logarithm of Σ_i w_i e^{v_i} over the first axis, precise even near zero.

    The weights w_i add up to one.
    """
    # Where the sum is near one, log1p of Σ w_i (e^{v_i} − 1) is precise, because the
    # weights add up to one. Elsewhere the logarithm is not small, and the largest term
    # is taken out of the sum.
    capped = jnp.minimum(v, _DIRECT)
    excess = jnp.sum(weight * jnp.expm1(capped), axis=0)
    near = (excess > -0.5) & (jnp.max(v, axis=0) <= _DIRECT)
    term = jnp.log(weight) + v
    top = jax.lax.stop_gradient(jnp.max(term, axis=0))
    far = jnp.log(jnp.sum(jnp.exp(term - top[None]), axis=0)) + top
    return jnp.where(near, jnp.log1p(jnp.where(near, excess, 0.0)), far)


def split(
    means: Sequence[jax.Array], weights: Sequence[jax.Array], tail: jax.Array
) -> tuple[pairs.Cells, jax.Array, jax.Array]:
    """The cells of Σ w_i N(μ_i, 1) against N(0, 1), and the ends of the cells' range.

    Each of the masses beyond an end of the range is at most about `tail`.
    """
    count = pairs.INTERVALS
    mean, weight = jnp.stack(means), jnp.stack(weights)
    fixed_mean, fixed_weight = jax.lax.stop_gradient((mean, weight))
    idle = pairs.tail_quantile(tail)
    # Each component has at most an equal part of the tail above the last outcome.
    touched = fixed_mean + pairs.tail_quantile(tail / (len(means) * fixed_weight))
    start, stop = -idle, jnp.maximum(idle, jnp.max(touched))
    width = (stop - start) / count
    ends = start + width * np.arange(count + 1.0)
    v = mean[:, None] * ends[None] - (mean * mean / 2)[:, None]
    loss = _log_mixture(v, weight[:, None])
    # The share of each component in the mixture at the start of a cell.
    share = jnp.exp(jnp.log(weight)[:, None] + v - loss[None])[:, :-1]
    nodes = np.append(pairs.NODES, [[1.0]], axis=0)
    grown, mass, at = 0.0, 0.0, ends[None, :-1] + width * pairs.NODES
    # The loop adds one component after the other, since an array of all components
    # would be m times as large.
    for i in range(len(means)):
        grown += share[i][None] * jnp.expm1(mean[i] * width * nodes)
        mass += weight[i] * pairs.phi(at - mean[i])
    grown = jnp.log1p(grown)
    sharp = width * (jnp.max(mean) + jnp.maximum(jnp.abs(start), jnp.abs(stop)))
    mass = width * pairs.WEIGHTS * mass
    cells = pairs.divide_masses(loss, grown[:-1], grown[-1:], mass, sharp)
    return cells, start, stop


def normalise(weights: Sequence[jax.Array]) -> list[jax.Array]:
    """The weights divided by their sum, which are positive.

    Each weight is first raised to at least SMALL, so that its log is finite.
    """
    total = sum(weights, jnp.zeros(()))
    raised = [jax.lax.stop_gradient(jnp.maximum(w, SMALL) - w) + w for w in weights]
    return [w / total for w in raised]


def mixture(
    means: Sequence[jax.Array], weights: Sequence[jax.Array], tail: jax.Array
) -> pairs.DiscreteLosses:
    """The losses of Σ w_i N(μ_i, 1) against N(0, 1), in both directions."""
    weights = normalise(weights)
    cells, start, stop = split(means, weights, tail)
    mean, weight = jnp.stack(means), jnp.stack(weights)
    masses = weight[None] * ndtr(jnp.stack([mean - stop, start - mean]))
    above, below = jnp.sum(masses, axis=1)
    idle_above, idle_below = ndtr(jnp.stack([-stop, start]))
    return pairs.both_directions(cells, above, below, idle_above, idle_below)
