"""The dominating pair of a Gaussian mechanism with a random sensitivity.

With sensitivities s_i ≥ 0, weights w_i and μ_i = s_i/σ, the pair is Σ w_i N(μ_i, 1)
against N(0, 1), in both directions. The loss at the outcome z is

    x(z) = log Σ w_i e^{v_i},   v_i = μ_i z − μ_i²/2,

which increases with z because no μ_i is negative.
"""

from typing import Any

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


def split(event: Any, tail: jax.Array) -> pairs.Cells:
    """The cells of Σ w_i N(μ_i, 1) against N(0, 1), for an `events.GaussianMixture`.

    Each of the masses beyond an end of the cells' range is at most about `tail`.
    """
    count = pairs.INTERVALS
    mean = jnp.stack([s / event.noise_multiplier for s in event.sensitivities])
    # Weights are raised to at least SMALL, so that their logs are finite. Then they are
    # divided by their sum.
    weight = jnp.stack(event.weights)
    weight += jax.lax.stop_gradient(jnp.maximum(weight, SMALL) - weight)
    weight /= sum(event.weights, jnp.zeros(()))
    fixed_mean, fixed_weight = jax.lax.stop_gradient((mean, weight))
    idle = pairs.tail_quantile(tail)
    # Each component has at most an equal part of the tail above the last outcome.
    touched = fixed_mean + pairs.tail_quantile(tail / (mean.size * fixed_weight))
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
    for i in range(mean.size):
        grown += share[i][None] * jnp.expm1(mean[i] * width * nodes)
        mass += weight[i] * pairs.phi(at - mean[i])
    grown = jnp.log1p(grown)
    sharp = width * (jnp.max(mean) + jnp.maximum(jnp.abs(start), jnp.abs(stop)))
    mass = width * pairs.WEIGHTS * mass
    outside = weight[None] * ndtr(jnp.stack([mean - stop, start - mean]))
    idle = ndtr(jnp.stack([-stop, start]))
    outside = jnp.stack([jnp.sum(outside, axis=1), idle])
    return pairs.divide_masses(loss, grown[:-1], grown[-1:], mass, outside, sharp)


def mixture(event: Any, tail: jax.Array) -> pairs.DiscreteLosses:
    """The losses of an `events.GaussianMixture`, in both directions."""
    return pairs.both_directions(split(event, tail))
