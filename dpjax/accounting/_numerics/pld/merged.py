"""Discrete pairs of distributions for lower bounds on δ.

Cut the outcomes of a mechanism into cells (intervals of outcomes), as for the upper
bounds (`pairs`), and release only the cell of an outcome. The cell is a post-processing
of the mechanism, so that the δ of the two distributions of cells is a lower bound.
Outcomes beyond the last cells are left out, which makes δ smaller. The pairs of
mechanisms with few losses are exact, as in `atoms`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import SMALL, ULP
from dpjax.accounting import events
from dpjax.accounting._numerics.pld import atoms, mechanisms, pairs
from dpjax.accounting._numerics.pld.pairs import Cells, DiscreteLosses


def _log(mass: jax.Array) -> jax.Array:
    return jnp.where(mass > 0, jnp.log(jnp.maximum(mass, SMALL)), -jnp.inf)


def _both_directions(cells: Cells) -> DiscreteLosses:
    """The losses of P against Q and of Q against P, if only the cell is released.

    A cell is an interval of outcomes.
    """
    loss, log_mass = cells.merged_loss, _log(cells.merged_mass)
    return DiscreteLosses(
        jnp.stack([loss, -loss]),
        jnp.stack([log_mass, log_mass - loss]),
        jnp.zeros(2),
        cells.error,
    )


def _sampled(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The losses of a Poisson-sampled step, in which other examples contribute zero.

    Only the interval that contains an outcome is released. The intervals leave out
    about the mass `tail` at each end.
    """
    return pairs.poisson(event, tail, _both_directions)


def _fixed_size(event: Any, tail: jax.Array) -> DiscreteLosses:
    # If all other examples contribute the opposite of the given example, the given
    # example moves the sum by two clip norms if it takes part.
    cells = pairs.poisson_cells(event.mu, event.sampling_rate, tail, mirror=False)
    return _both_directions(cells)


def _mixture(event: Any, tail: jax.Array) -> DiscreteLosses:
    return _both_directions(pairs.mixture_cells(event, tail))


def _laplace(event: events.Laplace, tail: jax.Array) -> DiscreteLosses:
    """The losses of Laplace noise, if only the interval of an outcome is released.

    The intervals have equal widths between 0 and the sensitivity. The outcomes below 0
    are one more interval, and the outcomes above the sensitivity are another.
    """
    epsilon, points = 1 / jnp.asarray(event.scale), atoms.even_points()
    # The outcomes from y to y + h have the mass e^{−y} (1 − e^{−h}) / 2, and the loss
    # at their middle. The outcomes beyond 0 and ε have the losses ±ε.
    mass = -jnp.expm1(-epsilon * np.diff(points)) / 2
    log_mass = _log(mass) - epsilon * points[:-1]
    loss = epsilon * np.concatenate([1 - points[:-1] - points[1:], [1.0, -1.0]])
    beyond = np.log(0.5) - epsilon * np.array([0.0, 1.0])
    log_mass = jnp.concatenate([log_mass, beyond])
    error = ULP * (32 + 4 * epsilon)
    return DiscreteLosses(loss[None], log_mass[None], jnp.zeros(1), error)


def _discrete_laplace(event: events.DiscreteLaplace, tail: jax.Array) -> DiscreteLosses:
    """The losses of discrete Laplace noise, if only a group of integers is released.

    The integers between 0 and the sensitivity k are divided into groups of consecutive
    integers. The integers up to 0 are one more group, and the integers from k on are
    another.
    """
    k = max(event.sensitivity, 1)
    ratio = jnp.exp(-1 / jnp.asarray(event.scale))
    edges = np.round(atoms.integer_points(k) * k)
    first, last = edges[:-1] + 1, edges[1:]
    last[-1] -= 1  # the integers from k on are one outcome
    # The integers from a to c have the mass (r^a − r^{c + 1}) / (1 + r), r = e^{−1/b},
    # and the loss (k − a − c) / b.
    size = np.maximum(last - first + 1, 0)
    mass = -jnp.expm1(-size / event.scale)
    log_mass = _log(mass) - first / event.scale
    # Beyond 0 and k the geometric series add up to 1 / (1 + r) and r^k / (1 + r).
    loss = jnp.concatenate([k - first - last, np.array([k, -k])]) / event.scale
    log_mass = jnp.concatenate([log_mass, np.array([0.0, -k]) / event.scale])
    log_mass = log_mass - jnp.log1p(ratio)
    error = ULP * (32 + 4 * k / jnp.asarray(event.scale))
    return DiscreteLosses(loss[None], log_mass[None], jnp.zeros(1), error)


_MERGED: dict[type, Callable[[Any, jax.Array], DiscreteLosses]] = {
    events.PoissonGaussian: _sampled,
    # A batch that does not overflow is a Poisson sample. `lower` subtracts the rest.
    events.TruncatedPoissonGaussian: _sampled,
    events.FixedSizeGaussian: _fixed_size,
    events.GaussianMixture: _mixture,
    events.Laplace: _laplace,
    events.DiscreteLaplace: _discrete_laplace,
    events.DiscreteGaussian: atoms.discrete_gaussian_groups,
    # The losses of these pairs are exact.
    events.RandomizedResponse: mechanisms.finite_losses,
    events.Pure: mechanisms.finite_losses,
    events.EpsilonDelta: mechanisms.finite_losses,
}


def has_losses(event: Any) -> bool:
    """Whether lower bounds on δ and ε exist for this type of event."""
    return isinstance(event, events.Gaussian) or type(event) in _MERGED


def finite_losses(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The losses of an event that is not `events.Gaussian`, for lower bounds on δ.

    The losses are rounded down. About the mass `tail` may be left out at each end.
    """
    losses = _MERGED[type(event)](event, tail)
    # A loss is the log of a ratio of two masses, each with a relative error.
    loss = losses.loss - 4 * losses.error * (1 + jnp.abs(losses.loss))
    return losses._replace(loss=loss)
