"""The losses of each type of event, and the valid range of its numbers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core.typing import Adjacency, ArrayLike
from dpjax.accounting import events
from dpjax.accounting._numerics.convex_order import spread
from dpjax.accounting._numerics.pld import atoms, overflow, pairs

# The maximum difference of a sum of weights from 1, for weights in float32.
WEIGHTS_TOLERANCE = 1e-6


class Domain(NamedTuple):
    """Conditions on the numbers of an event, which may be traced.

    Attributes:
      allowed: whether the numbers describe a mechanism.
      silent: whether the mechanism releases nothing.
      private: whether the privacy losses of a mechanism that is not silent are finite.
    """

    allowed: jax.Array
    silent: jax.Array
    private: jax.Array


def _of_loss(x: ArrayLike) -> Domain:
    """The valid range of a bound x on privacy loss, such as μ or ε, as a `Domain`."""
    x = jnp.asarray(x)
    return Domain(x >= 0, x == 0, x < jnp.inf)


def _of_noise(x: jax.Array) -> Domain:
    return Domain(x >= 0, x == jnp.inf, x > 0)


def _of_rate(x: jax.Array) -> Domain:
    return Domain((x >= 0) & (x <= 1), x == 0, x == x)


def _both(x: Domain, y: Domain) -> Domain:
    """The valid range of two numbers, each of which may make the mechanism silent.

    A silent mechanism releases nothing.
    """
    return Domain(x.allowed & y.allowed, x.silent | y.silent, x.private & y.private)


def _allocation(event: Any, tail: jax.Array) -> pairs.DiscreteLosses:
    sigma, num_steps = event.noise_multiplier, event.num_steps
    if event.adjacency is Adjacency.REPLACE:
        # replacement_losses pairs the truncated mass with the largest ratios, so the
        # distribution is truncated at a smaller tail.
        law = spread.allocation(sigma, num_steps, spread.narrow(tail))
        return spread.replacement_losses(law, num_steps)
    return spread.losses(spread.allocation(sigma, num_steps, tail), num_steps)


def _mixture_domain(event: Any) -> Domain:
    sensitivity, weight = jnp.stack(event.sensitivities), jnp.stack(event.weights)
    sums_to_one = jnp.abs(jnp.sum(weight) - 1) <= WEIGHTS_TOLERANCE
    allowed = jnp.all((sensitivity >= 0) & (weight >= 0)) & sums_to_one
    silent = jnp.all((sensitivity == 0) | (weight == 0))
    random = Domain(allowed, silent, jnp.all(sensitivity < jnp.inf))
    return _both(_of_noise(event.noise_multiplier), random)


def _response_domain(event: Any) -> Domain:
    p, k = event.noise_parameter, event.num_buckets
    whole = (k >= 1) & (k == jnp.floor(k)) & (k < jnp.inf)
    return Domain((p >= 0) & (p <= 1) & whole, (p == 1) | (k == 1), p > 0)


def _known_domain(event: Any) -> Domain:
    epsilon, delta = _of_loss(event.epsilon), event.delta
    allowed = epsilon.allowed & (delta >= 0) & (delta <= 1)
    return Domain(allowed, epsilon.silent & (delta == 0), epsilon.private & (delta < 1))


# A function for each type of event but `events.Gaussian`, which maps the event and the
# mass to truncate to losses.
_LOSSES: dict[type, Callable[[Any, jax.Array], pairs.DiscreteLosses]] = {
    events.PoissonGaussian: pairs.poisson,
    events.TruncatedPoissonGaussian: overflow.truncated_poisson,
    events.FixedSizeGaussian: lambda event, tail: pairs.fixed_size(
        event.mu, event.sampling_rate, tail
    ),
    events.RandomAllocation: _allocation,
    events.GaussianMixture: pairs.mixture,
    events.Laplace: atoms.laplace,
    events.DiscreteLaplace: atoms.discrete_laplace,
    events.DiscreteGaussian: atoms.discrete_gaussian,
    events.RandomizedResponse: atoms.randomized_response,
    events.Pure: atoms.two_losses,
    events.EpsilonDelta: atoms.two_losses,
}
# The domains of events whose numbers do not have separate domains.
_DOMAINS: dict[type, Callable[[Any], Domain]] = {
    events.GaussianMixture: _mixture_domain,
    events.RandomizedResponse: _response_domain,
    events.EpsilonDelta: _known_domain,
}
# The domains of the numbers of all other events, by the names of their fields.
_DOMAINS_OF_NUMBERS: dict[str, Callable[[Any], Domain]] = {
    **dict.fromkeys(("mu", "epsilon"), _of_loss),
    **dict.fromkeys(("noise_multiplier", "scale", "stddev"), _of_noise),
    "sampling_rate": _of_rate,
    "sensitivity": lambda x: _of_loss(float(x)),
}
# For each field, a number at which the losses of an event are finite.
_HARMLESS = {
    **dict.fromkeys(("mu", "epsilon", "noise_multiplier", "scale", "stddev"), 1.0),
    **dict.fromkeys(("sensitivities", "weights"), 1.0),
    **dict.fromkeys(("sampling_rate", "noise_parameter"), 0.5),
    "num_buckets": 2.0,
    "delta": 0.0,
}


def domain(event: Any) -> Domain:
    """The valid range of an event's numbers, as a `Domain`."""
    if type(event) in _DOMAINS:
        return _DOMAINS[type(event)](event)
    domains = (
        of(getattr(event, name))
        for name, of in _DOMAINS_OF_NUMBERS.items()
        if hasattr(event, name)
    )
    return functools.reduce(_both, domains)


def replace_unless(usable: jax.Array, event: Any) -> Any:
    """The event, with valid default numbers in place of its own if usable is false."""
    changes = {
        name: jax.tree.map(
            lambda x, value=value: jnp.where(usable, x, value), getattr(event, name)
        )
        for name, value in _HARMLESS.items()
        if hasattr(event, name)
    }
    return dataclasses.replace(event, **changes)


def finite_losses(event: Any, tail: jax.Array) -> pairs.DiscreteLosses:
    """The discrete losses of an event that is not `events.Gaussian`.

    The losses are finite, except that about the mass `tail` may move to an infinite
    loss.
    """
    return _LOSSES[type(event)](event, tail)
