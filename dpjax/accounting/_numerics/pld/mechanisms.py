"""The losses of each type of event, and checks that its numbers are valid."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core.typing import Adjacency, ArrayLike
from dpjax.accounting import events
from dpjax.accounting._numerics.convex_order import spread
from dpjax.accounting._numerics.pld import atoms, pairs

# The maximum difference of a sum of weights from 1, for weights in float32.
WEIGHTS_TOLERANCE = 1e-6


class Domain(NamedTuple):
    """Conditions on the numbers of an event, which may be traced.

    Attributes:
      allowed: whether the numbers describe a mechanism. If not, upper bounds are δ = 1
        and ε = ∞, and lower bounds are 0.
      silent: whether the mechanism releases nothing.
      private: whether an upper bound below δ = 1 or below ε = ∞ exists. For example, a
        mechanism without noise is not private. If `private` and `silent` are false, the
        bounds are those of an event that is not allowed.
    """

    allowed: jax.Array
    silent: jax.Array
    private: jax.Array


def _loss_domain(x: ArrayLike) -> Domain:
    """The `Domain` of a number x with which the privacy loss grows, such as μ or ε."""
    x = jnp.asarray(x)
    return Domain(x >= 0, x == 0, x < jnp.inf)


def _noise_domain(x: jax.Array) -> Domain:
    return Domain(x >= 0, x == jnp.inf, x > 0)


def _rate_domain(x: jax.Array) -> Domain:
    return Domain((x >= 0) & (x <= 1), x == 0, x == x)


def _count_domain(x: jax.Array) -> Domain:
    """The `Domain` of a positive whole number x, such as a number of steps."""
    is_count = (x >= 1) & (x == jnp.floor(x)) & (x < jnp.inf)
    return Domain(is_count, x != x, is_count)


def _intersect(x: Domain, y: Domain) -> Domain:
    """The `Domain` of an event with two numbers, from the `Domain` of each number.

    The mechanism releases nothing if one of the two numbers makes it silent.
    """
    return Domain(x.allowed & y.allowed, x.silent | y.silent, x.private & y.private)


def _allocation_losses(event: Any, tail: jax.Array) -> pairs.DiscreteLosses:
    replace = event.adjacency is Adjacency.REPLACE
    # replacement_losses pairs the truncated mass with the largest ratios, so the
    # distribution is truncated at a smaller tail.
    tail = spread.replacement_tail(tail) if replace else tail
    law = spread.allocation_upper_bound(event.noise_multiplier, event.num_steps, tail)
    losses = spread.replacement_losses if replace else spread.losses
    return losses(law, event.num_steps)


def _fixed_size_losses(event: Any, tail: jax.Array) -> pairs.DiscreteLosses:
    return pairs.fixed_size(event.mu, event.sampling_rate, tail)


def _poisson_cell_losses(event: Any, tail: jax.Array) -> pairs.DiscreteLosses:
    """The losses of a Poisson-sampled step, if all common examples contribute zero.

    The common examples are those that are in both data sets. Only the interval that
    contains an outcome is released. The intervals leave out about the mass `tail` at
    each end.
    """
    return pairs.poisson(event, tail, pairs.cell_losses)


def _fixed_size_cell_losses(event: Any, tail: jax.Array) -> pairs.DiscreteLosses:
    # If all other examples contribute the opposite of the given example, the given
    # example moves the sum by two clip norms if it takes part.
    cells = pairs.poisson_cells(event.mu, event.sampling_rate, tail, mirror=False)
    return pairs.cell_losses(cells)


def _mixture_cell_losses(event: Any, tail: jax.Array) -> pairs.DiscreteLosses:
    return pairs.cell_losses(pairs.mixture_cells(event, tail))


def _mixture_domain(event: Any) -> Domain:
    sensitivity, weight = jnp.stack(event.sensitivities), jnp.stack(event.weights)
    sums_to_one = jnp.abs(jnp.sum(weight) - 1) <= WEIGHTS_TOLERANCE
    allowed = jnp.all((sensitivity >= 0) & (weight >= 0)) & sums_to_one
    silent = jnp.all((sensitivity == 0) | (weight == 0))
    weighted = Domain(allowed, silent, jnp.all(sensitivity < jnp.inf))
    return _intersect(_noise_domain(event.noise_multiplier), weighted)


def _response_domain(event: Any) -> Domain:
    p, k = event.noise_parameter, event.num_buckets
    allowed = (p >= 0) & (p <= 1) & _count_domain(k).allowed
    return Domain(allowed, (p == 1) | (k == 1), p > 0)


def _epsilon_delta_domain(event: Any) -> Domain:
    epsilon, delta = _loss_domain(event.epsilon), event.delta
    allowed = epsilon.allowed & (delta >= 0) & (delta <= 1)
    return Domain(allowed, epsilon.silent & (delta == 0), epsilon.private & (delta < 1))


_Losses = Callable[[Any, jax.Array], pairs.DiscreteLosses]
# For each type of event but `events.Gaussian`, two functions that map the event and the
# mass to truncate to losses: for upper bounds on δ, and for lower bounds. The second is
# None for events without a lower bound.
_LOSSES: dict[type, tuple[_Losses, Any]] = {
    events.PoissonGaussian: (pairs.poisson, _poisson_cell_losses),
    # A batch that does not overflow is a Poisson sample. `lower` subtracts the rest.
    events.TruncatedPoissonGaussian: (pairs.truncated_poisson, _poisson_cell_losses),
    events.FixedSizeGaussian: (_fixed_size_losses, _fixed_size_cell_losses),
    events.RandomAllocation: (_allocation_losses, None),
    events.GaussianMixture: (pairs.mixture, _mixture_cell_losses),
    events.Laplace: (atoms.laplace, atoms.laplace_cells),
    events.DiscreteLaplace: (atoms.discrete_laplace, atoms.discrete_laplace_groups),
    events.DiscreteGaussian: (atoms.discrete_gaussian, atoms.discrete_gaussian_groups),
    # The losses of these pairs are exact.
    events.RandomizedResponse: (atoms.randomized_response, atoms.randomized_response),
    events.Pure: (atoms.two_losses, atoms.two_losses),
    events.EpsilonDelta: (atoms.two_losses, atoms.two_losses),
}
# The domains of events whose numbers do not have separate domains.
_DOMAINS: dict[type, Callable[[Any], Domain]] = {
    events.GaussianMixture: _mixture_domain,
    events.RandomizedResponse: _response_domain,
    events.EpsilonDelta: _epsilon_delta_domain,
}
_COUNTS = "num_steps", "num_examples", "max_batch_size"  # positive whole numbers
# The domains of the numbers of all other events, by the names of their fields.
_DOMAINS_OF_NUMBERS: dict[str, Callable[[Any], Domain]] = {
    **dict.fromkeys(("mu", "epsilon"), _loss_domain),
    **dict.fromkeys(("noise_multiplier", "scale", "stddev"), _noise_domain),
    **dict.fromkeys(_COUNTS, _count_domain),
    "sampling_rate": _rate_domain,
    "sensitivity": lambda x: _loss_domain(float(x)),
}
# For each field, a number at which the losses of an event are finite.
_HARMLESS = {
    **dict.fromkeys(("mu", "epsilon", "noise_multiplier", "scale", "stddev"), 1.0),
    **dict.fromkeys(("sensitivities", "weights"), 1.0),
    **dict.fromkeys(("sampling_rate", "noise_parameter"), 0.5),
    **dict.fromkeys((*_COUNTS, "num_buckets"), 2.0),
    "delta": 0.0,
}


def domain(event: Any) -> Domain:
    """Whether the numbers of an event are valid, as a `Domain`."""
    if type(event) in _DOMAINS:
        return _DOMAINS[type(event)](event)
    domains = (
        domain_of(getattr(event, name))
        for name, domain_of in _DOMAINS_OF_NUMBERS.items()
        if hasattr(event, name)
    )
    return functools.reduce(_intersect, domains)


def replace_unless(usable: jax.Array, event: Any) -> Any:
    """The event if usable is true, and otherwise the event with harmless numbers."""
    changes = {
        name: jax.tree.map(
            lambda x, value=value: jnp.where(usable, x, value), getattr(event, name)
        )
        for name, value in _HARMLESS.items()
        if hasattr(event, name)
    }
    return dataclasses.replace(event, **changes)


def upper_losses(event: Any, tail: jax.Array) -> pairs.DiscreteLosses:
    """The losses of an event that is not `events.Gaussian`, for upper bounds on δ.

    A mass of approximately `tail` may move to an infinite loss. An
    `events.EpsilonDelta` also has an infinite loss with probability δ.
    """
    upper, _ = _LOSSES[type(event)]
    return upper(event, tail)


def lower_losses(event: Any, tail: jax.Array) -> pairs.DiscreteLosses:
    """The losses of an event that is not `events.Gaussian`, for lower bounds on δ.

    The losses are rounded down. Outcomes with about the mass `tail` at each end may be
    left out.
    """
    _, lower = _LOSSES[type(event)]
    losses = lower(event, tail)
    # A loss is the log of a ratio of two masses, each with a relative error.
    loss = losses.loss - 4 * losses.error * (1 + jnp.abs(losses.loss))
    return losses._replace(loss=loss)


def has_lower_losses(event: Any) -> bool:
    """Whether lower bounds on δ and ε exist for this type of event."""
    _, lower = _LOSSES.get(type(event), (None, None))
    return isinstance(event, events.Gaussian) or lower is not None
