"""What the inversion needs to know of each type of event: its losses and its domain."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core.adjacency import Adjacency
from dpjax._core.typing import ArrayLike
from dpjax.accounting import events
from dpjax.accounting._numerics.convex_order import spread
from dpjax.accounting._numerics.pld import atoms, mixture, overflow, pairs
from dpjax.accounting._numerics.pld.pairs import DiscreteLosses

# The difference from one that a sum of weights may have, for weights in float32.
WEIGHTS_TOLERANCE = 1e-6


class Domain(NamedTuple):
    """Where the numbers of an event lie.

    Attributes:
      allowed: whether they describe a mechanism.
      silent: whether the mechanism releases nothing.
      private: whether its losses are finite, unless it is silent.
    """

    allowed: jax.Array
    silent: jax.Array
    private: jax.Array


class Mechanism(NamedTuple):
    """How the numerics treat a type of event.

    Attributes:
      losses: maps an event and a tail to discrete losses. The mass of infinite losses
        is about the tail.
      domain: maps an event to its `Domain`.
      harmless: numbers inside the domain, for fields that may have others.
    """

    losses: Callable[[Any, jax.Array], DiscreteLosses]
    domain: Callable[[Any], Domain]
    harmless: Mapping[str, float]


def _of_loss(x: ArrayLike) -> Domain:
    """The domain of a bound on privacy loss, such as μ or ε."""
    x = jnp.asarray(x)
    return Domain(x >= 0, x == 0, x < jnp.inf)


def _of_noise(x: jax.Array) -> Domain:
    return Domain(x >= 0, x == jnp.inf, x > 0)


def _of_rate(x: jax.Array) -> Domain:
    return Domain((x >= 0) & (x <= 1), x == 0, x == x)


def _both(x: Domain, y: Domain) -> Domain:
    """The domain of two numbers, either of which may silence the mechanism."""
    return Domain(x.allowed & y.allowed, x.silent | y.silent, x.private & y.private)


def _poisson_domain(event: Any) -> Domain:
    return _both(_of_noise(event.noise_multiplier), _of_rate(event.sampling_rate))


def _poisson(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The losses of a step whose batch holds its whole Poisson sample."""
    replace = event.adjacency is Adjacency.REPLACE
    pair = pairs.poisson_replace if replace else pairs.poisson
    return pair(1 / event.noise_multiplier, event.sampling_rate, tail)


def _truncated_poisson(event: Any, tail: jax.Array) -> DiscreteLosses:
    return overflow.with_overflow(
        _poisson(event, tail),
        1 / event.noise_multiplier,
        event.sampling_rate,
        tail,
        event.num_examples,
        event.max_batch_size,
    )


def _allocation(event: Any, tail: jax.Array) -> DiscreteLosses:
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


def _mixture(event: Any, tail: jax.Array) -> DiscreteLosses:
    means = [s / event.noise_multiplier for s in event.sensitivities]
    return mixture.mixture(means, event.weights, tail)


def _response_domain(event: Any) -> Domain:
    p, k = event.noise_parameter, event.num_buckets
    whole = (k >= 1) & (k == jnp.floor(k)) & (k < jnp.inf)
    return Domain((p >= 0) & (p <= 1) & whole, (p == 1) | (k == 1), p > 0)


def _discrete_domain(noise: jax.Array, sensitivity: int) -> Domain:
    return _both(_of_noise(noise), _of_loss(float(sensitivity)))


def _known_domain(event: Any) -> Domain:
    epsilon, delta = _of_loss(event.epsilon), event.delta
    allowed = epsilon.allowed & (delta >= 0) & (delta <= 1)
    return Domain(allowed, epsilon.silent & (delta == 0), epsilon.private & (delta < 1))


_NOISE = {"noise_multiplier": 1.0}
_SAMPLED = {"noise_multiplier": 1.0, "sampling_rate": 0.5}

MECHANISMS: dict[type, Mechanism] = {
    events.PoissonGaussian: Mechanism(_poisson, _poisson_domain, _SAMPLED),
    events.TruncatedPoissonGaussian: Mechanism(
        _truncated_poisson, _poisson_domain, _SAMPLED
    ),
    events.FixedSizeGaussian: Mechanism(
        lambda event, tail: pairs.fixed_size(event.mu, event.sampling_rate, tail),
        lambda event: _both(_of_loss(event.mu), _of_rate(event.sampling_rate)),
        {"mu": 1.0, "sampling_rate": 0.5},
    ),
    events.RandomAllocation: Mechanism(
        _allocation, lambda event: _of_noise(event.noise_multiplier), _NOISE
    ),
    events.GaussianMixture: Mechanism(
        _mixture,
        _mixture_domain,
        {"noise_multiplier": 1.0, "sensitivities": 1.0, "weights": 1.0},
    ),
    events.Laplace: Mechanism(
        lambda event, tail: atoms.laplace(1 / event.scale, atoms.even_points()),
        lambda event: _of_noise(event.scale),
        {"scale": 1.0},
    ),
    events.DiscreteLaplace: Mechanism(
        lambda event, tail: atoms.laplace(
            max(event.sensitivity, 1) / event.scale,
            atoms.integer_points(max(event.sensitivity, 1)),
        ),
        lambda event: _discrete_domain(event.scale, event.sensitivity),
        {"scale": 1.0},
    ),
    events.DiscreteGaussian: Mechanism(
        lambda event, tail: atoms.discrete_gaussian(
            event.stddev, max(event.sensitivity, 1), tail
        ),
        lambda event: _discrete_domain(event.stddev, event.sensitivity),
        {"stddev": 1.0},
    ),
    events.RandomizedResponse: Mechanism(
        lambda event, tail: atoms.randomized_response(
            event.noise_parameter, event.num_buckets
        ),
        _response_domain,
        {"noise_parameter": 0.5, "num_buckets": 2.0},
    ),
    events.Pure: Mechanism(
        lambda event, tail: atoms.two_losses(event.epsilon, jnp.zeros(())),
        lambda event: _of_loss(event.epsilon),
        {"epsilon": 1.0},
    ),
    events.EpsilonDelta: Mechanism(
        lambda event, tail: atoms.two_losses(event.epsilon, event.delta),
        _known_domain,
        {"epsilon": 1.0, "delta": 0.0},
    ),
}


def domain(event: Any) -> Domain:
    """The domain of an event's numbers."""
    if isinstance(event, events.Gaussian):
        return _of_loss(event.mu)
    return MECHANISMS[type(event)].domain(event)


def replace_unless(usable: jax.Array, event: Any) -> Any:
    """The event, with harmless numbers unless its own are usable."""
    gaussian = isinstance(event, events.Gaussian)
    harmless = {"mu": 1.0} if gaussian else MECHANISMS[type(event)].harmless
    changes = {
        name: jax.tree.map(
            lambda x, value=value: jnp.where(usable, x, value), getattr(event, name)
        )
        for name, value in harmless.items()
    }
    return dataclasses.replace(event, **changes)


def finite_losses(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The discrete losses of an event that is not `events.Gaussian`."""
    return MECHANISMS[type(event)].losses(event, tail)
