"""The GDP parameter of a run with correlated noise."""

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.float64 import ULP, float64
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax._matrices import strategy as matrices
from dpjax.accounting import _schedule, tree
from dpjax.accounting._schedule import Order, Schedule, mu_of_sensitivity
from dpjax.accounting.correlated import _patterns

WORST = {
    "fixed": _patterns.fixed_order,
    "reshuffled": _patterns.reshuffled_order,
    "separated": _patterns.separated_steps,
}


def mu_of(
    strategy: matrices.Toeplitz,
    factors: jax.Array,
    noise_multiplier: jax.Array,
    *,
    schedule: Schedule,
) -> jax.Array:
    """An upper bound on the GDP parameter μ of a run with correlated noise, f[].

    The caller must enable float64: the arguments are float64 arrays.

    Args:
      strategy: the matrix C, which turns white noise z into the correlated noise C⁻¹z.
      factors: the factor by which the noise of each step is multiplied, f[T], or one
        factor for all steps, f[1].
      noise_multiplier: the standard deviation of z over the clip norm, f[].
      schedule: the steps in which an example may take part, static.
    """
    # μ² = max_π Σ_{s,t∈π} |(CᵀC)_st| / σ², because releasing x + C⁻¹z is equivalent to
    # releasing C x + z: Denisov et al. (2022), https://arxiv.org/abs/2202.08312. This
    # also holds if sums depend on earlier releases, because an example moves C x by at
    # most μσ for all values of these releases.
    weights = 1 / factors
    num_steps, n_b, order, factor, most = schedule
    square = WORST[order](strategy, weights, num_steps, n_b)
    times = -(-num_steps // n_b)
    if most is not None and most < times:
        times = most
        few = _patterns.few_separated_steps
        few = _patterns.few_reshuffled_steps if order == "reshuffled" else few
        # The bound for a whole pattern also holds for every subset of the pattern.
        square = jnp.minimum(square, few(strategy, weights, num_steps, n_b, most))
    # Sums have at most T terms. The rounding errors of the coefficients act like a
    # strategy of their own: they move C x by `off` for each participation.
    fixed = jax.lax.stop_gradient(strategy)
    off = matrices.series_error(fixed, fixed.coefficients(num_steps))
    off = times * off * jnp.max(weights)
    moved = jnp.sqrt(square) * (1 + (256 + 8 * num_steps) * ULP) + off
    mu = mu_of_sensitivity(factor * moved * (1 + 8 * ULP), noise_multiplier)
    return jnp.where(jnp.isfinite(moved) & jnp.all(factors > 0), mu, jnp.inf)


_mu64 = float64("up", static=("schedule",), vectors=(0, 1), elementwise=True)(mu_of)


def mu_of_strategy(
    strategy: matrices.Strategy, noise_multiplier: ArrayLike, schedule: Schedule
) -> jax.Array:
    """The result of `mu` for valid arguments.

    Raises:
      ValueError: the strategy is a tree, and trees do not support this schedule.
    """
    num_steps, n_b, order, _, most = schedule
    if isinstance(strategy, matrices.Tree):
        if most is not None:
            raise ValueError(
                f"max_participations must be None if strategy is a tree; got {most}."
            )
        if order == "separated":
            raise ValueError(
                "order must be 'fixed' or 'reshuffled' if strategy is a tree; got "
                f"{order!r}."
            )
        return tree._momentum_mu64(noise_multiplier, strategy.decay, schedule=schedule)
    # An epoch that is longer than the run has the same result, but would pad arrays.
    schedule = schedule._replace(steps_per_epoch=min(n_b, num_steps))
    shape, factors = matrices.toeplitz_and_factors(strategy)
    return _mu64(shape, factors, noise_multiplier, schedule=schedule)


def mu(
    strategy: matrices.Strategy,
    noise_multiplier: ArrayLike,
    *,
    num_steps: int,
    steps_per_epoch: int,
    order: Order,
    adjacency: Adjacency,
    max_participations: int | None = None,
) -> jax.Array:
    """The GDP parameter of all sums that `dpjax.correlated_noise` releases.

    Args:
      strategy: the matrix C, which turns white noise z into the correlated noise C⁻¹z,
        with coefficients f[*b, k].
      noise_multiplier: the standard deviation of z over the clip norm, f[*b], at least
        0.
      num_steps: T, static, at least 1. All T steps count.
      steps_per_epoch: n_b, static, at least 1.
      order: "fixed" if an example has the same position in every epoch. μ is then exact
        for C >= 0; for other C it is an upper bound by the absolute values of CᵀC.
        "reshuffled" if an example takes part in at most one step of each epoch, in any
        step. μ is then an upper bound. This bound is at most 0.2 % above the exact μ if
        C is a filter with one pole and a smaller zero. "separated" if the steps of an
        example are at least n_b apart. μ is then exact for C >= 0 with coefficients
        that do not grow, and otherwise an upper bound. For a strategy from
        `strategies.scaled`, μ is exact only under "fixed" (for C >= 0). For a tree,
        `tree.momentum_mu` computes μ, but not under "separated".
      adjacency: which data sets are compared. Under ADD_REMOVE, the batch of any other
        example must not depend on the added example. Batches of fixed size violate this
        condition.
      max_participations: the maximum number of steps of the run in which one example
        takes part, static, at least 1; None if only the order limits these steps. The
        caller's sampler must enforce the limit: an example that has reached the limit
        must not take part in any later step. A tree needs None.

    Returns:
      μ, f[*b], rounded up; inf if there is no noise, a traced value is out of range, or
      coefficients overflow.

    Raises:
      ValueError: a static argument is out of range, or `strategy` is not a strategy,
        has more coefficients than num_steps, or does not support this order.

    Privacy: an example may take part in any subset of the steps that the order allows,
    of at most max_participations steps. With this limit, μ is exact for order="fixed"
    and "separated", if C >= 0 has coefficients that do not grow and is not from
    `strategies.scaled`. Otherwise μ is an upper bound. The guarantee holds for sums of
    sensitivity 1 clip norm that may depend on all earlier releases, for real arithmetic
    and ideal Gaussian noise.

    Reference: Denisov et al. (2022), https://arxiv.org/abs/2202.08312. For separated
    steps: Kalinin and Lampert (2024), https://arxiv.org/abs/2405.13763, Theorem 2.

    Example:
      >>> from dpjax import strategies
      >>> for strategy in strategies.independent(), strategies.geometric(0.5):
      ...     value = mu(strategy, 4.0, num_steps=1000, steps_per_epoch=100,
      ...                order="fixed", adjacency=Adjacency.ZERO_OUT)
      ...     print(f"{value:.3f}")
      0.791
      0.913
    """
    validate.nonnegative("noise_multiplier", noise_multiplier, finite=False)
    validate.one_of("order", order, tuple(WORST))
    schedule = _schedule.check(num_steps, steps_per_epoch, order, adjacency)
    strategy = matrices.check_strategy(strategy, schedule.num_steps)
    if max_participations is not None:
        most = validate.static_int("max_participations", max_participations, minimum=1)
        # A limit that no example can reach would only compile the same program again.
        if most < -(-schedule.num_steps // schedule.steps_per_epoch):
            schedule = schedule._replace(max_participations=most)
    return mu_of_strategy(strategy, noise_multiplier, schedule)
