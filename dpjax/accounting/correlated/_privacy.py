"""The GDP parameter and the ε of a run with correlated noise."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import ULP, float64
from dpjax._core.typing import Adjacency, ArrayLike
from dpjax._matrices import strategy as matrices
from dpjax._matrices.strategy import Toeplitz
from dpjax.accounting import gdp, pld, tree
from dpjax.accounting._schedule import Order, Schedule, check_schedule
from dpjax.accounting.correlated import _bins
from dpjax.accounting.correlated._patterns import SQUARED_SENSITIVITY, mu_of

Sampling = Literal[
    "fixed", "reshuffled", "separated", "random_bins", "fresh_bins", "cyclic_poisson"
]
# The order of `mu` that allows every pattern of the bins. This order gives the μ for an
# attacker who knows the example's steps.
_ORDER_OF_BINS = {"random_bins": "fixed", "fresh_bins": "reshuffled"}

_mu64 = float64("up", static=("schedule",), vectors=(0, 1), elementwise=True)(mu_of)


def _mu_of_strategy(
    strategy: matrices.Strategy, noise_multiplier: ArrayLike, schedule: Schedule
) -> jax.Array:
    """The result of `mu` for valid arguments.

    Raises:
      ValueError: the strategy is a tree, and the schedule has the order "separated" or
        limits the participations.
    """
    num_steps, n_b, order, _, max_participations = schedule
    if isinstance(strategy, matrices.Tree):
        if max_participations is not None:
            raise ValueError(
                "max_participations must be None, or at least the number of epochs, "
                f"if strategy is a tree; got {max_participations}."
            )
        if order == "separated":
            raise ValueError(
                f"order must be 'fixed' or 'reshuffled' for a tree; got {order!r}."
            )
        return tree._momentum_mu64(noise_multiplier, strategy.decay, schedule=schedule)
    # An epoch that is longer than the run has the same result, but would pad arrays.
    schedule = schedule._replace(steps_per_epoch=min(n_b, num_steps))
    toeplitz, factors = matrices.toeplitz_and_factors(strategy)
    return _mu64(toeplitz, factors, noise_multiplier, schedule=schedule)


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
      strategy: the matrix C, with coefficients f[*b, k]. C turns white noise z into
        the correlated noise C⁻¹z.
      noise_multiplier: the standard deviation of z divided by the clip norm, f[*b], at
        least 0.
      num_steps: T, the number of all steps of the run, static, at least 1.
      steps_per_epoch: n_b, static, at least 1.
      order: "fixed" if an example has the same position in every epoch. μ is then exact
        if C has no negative entry (C >= 0), and otherwise an upper bound, computed from
        the absolute values of the entries of CᵀC. "reshuffled" if an example takes part
        in at most one step of each epoch, which may be any step. μ is then an upper
        bound. This bound is at most 0.2 % above the exact μ if C is a filter with one
        pole and one zero, the pole is non-negative, and the zero is smaller than the
        pole. "separated" if the steps of an example are at least n_b apart. μ is then
        exact for C >= 0 with non-increasing coefficients, and otherwise an upper bound.
        For a strategy from `strategies.scaled`, μ is exact only for "fixed" (for
        C >= 0). For a tree, μ is that of `tree.momentum_mu`, and "separated" is
        invalid.
      adjacency: which data sets are compared. Under ADD_REMOVE, the batches of the
        other examples must not depend on the added example. Batches of fixed size
        violate this condition.
      max_participations: the maximum number of steps of the run in which one example
        takes part, static, at least 1; None if only the order limits the number. The
        caller's sampler must enforce the limit: an example that has reached the limit
        must not take part in any later step. For a tree, a limit below the number of
        epochs is invalid.

    Returns:
      μ, f[*b], rounded up; inf if there is no noise, a traced value is out of range, or
      coefficients overflow.

    Raises:
      ValueError: noise_multiplier is negative or NaN; a static argument is out of
        range; `strategy` is not a strategy, has more than num_steps coefficients after
        the leading 1, or has a number of factors other than num_steps; `strategy` is a
        tree, and order is "separated" or max_participations is below the number of
        epochs.

    Privacy: an example may take part in any set of at most max_participations steps
    that the order allows. With a limit that is below the number of epochs, μ is an
    upper bound. This bound is exact for "fixed" and "separated" if the coefficients of
    C are non-negative and non-increasing, except for C from `strategies.scaled`. The
    guarantee holds for real arithmetic and ideal Gaussian noise, if one example changes
    each sum by at most the clip norm (twice the clip norm under REPLACE). Sums may
    depend on all earlier releases.

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
    validate.one_of("order", order, tuple(SQUARED_SENSITIVITY))
    schedule = check_schedule(num_steps, steps_per_epoch, order, adjacency)
    strategy = matrices.check_strategy(strategy, schedule.num_steps)
    if max_participations is not None:
        most = validate.static_int("max_participations", max_participations, minimum=1)
        # A limit that no example can exceed is ignored, so that no second program is
        # compiled.
        if most < -(-schedule.num_steps // schedule.steps_per_epoch):
            schedule = schedule._replace(max_participations=most)
    return _mu_of_strategy(strategy, noise_multiplier, schedule)


def _cyclic_poisson(
    strategy: matrices.Strategy,
    noise_multiplier: ArrayLike,
    delta: ArrayLike,
    schedule: Schedule,
    adjacency: Adjacency,
) -> jax.Array:
    """The ε of a run with cyclic Poisson sampling, f[*b].

    The examples form p fixed groups, and the strategy matrix C has p bands. Step t
    samples each example of group t mod p with probability min(1, p / n_b), for epochs
    of n_b steps. For a run of T steps, ε is that of ⌈T / p⌉ Gaussian steps on Poisson
    samples with this rate. The sensitivity of each Gaussian step is the norm of a
    column of C.

    Raises:
      ValueError: the strategy is a tree, scaled, or not banded.
    """
    # A strategy with a denominator has coefficients at all lags.
    if not isinstance(strategy, Toeplitz) or np.shape(strategy.denominator)[-1]:
        raise ValueError(
            f"strategy must be banded (unscaled) for cyclic Poisson; got {strategy!r}."
        )
    bands = 1 + np.shape(strategy.numerator)[-1]
    # Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153, Theorem 4: at
    # steps s and s + p an example moves disjoint rows of C x. The run is therefore
    # equivalent to ⌈T / p⌉ Gaussian steps with the norm of a column as sensitivity and
    # the sampling rate p / n_b.
    column_noise_multiplier = _column_noise64(strategy, noise_multiplier)
    rate = min(1.0, bands / schedule.steps_per_epoch)
    step = pld.poisson_gaussian(column_noise_multiplier, rate, adjacency=adjacency)
    return pld.epsilon(pld.compose(step, -(-schedule.num_steps // bands)), delta)


@float64("down", vectors=(0,), elementwise=True)
def _column_noise64(strategy: Toeplitz, noise_multiplier: jax.Array) -> jax.Array:
    # Every column of C has the entries 1, n_1, …, n_k, where n is the numerator. The
    # result is rounded down, the safe direction for a noise multiplier.
    square = 1 + jnp.sum(jnp.square(strategy.numerator))
    return noise_multiplier / jnp.sqrt(square) * (1 - 64 * ULP)


def epsilon(
    strategy: matrices.Strategy,
    noise_multiplier: ArrayLike,
    delta: ArrayLike,
    *,
    num_steps: int,
    steps_per_epoch: int,
    sampling: Sampling,
    adjacency: Adjacency,
) -> jax.Array:
    """An upper bound on the ε of all sums that `dpjax.correlated_noise` releases.

    Args:
      strategy: the matrix C, with coefficients f[*b, k]. C turns white noise z into
        the correlated noise C⁻¹z. For random and fresh bins, C must not be a tree. If C
        is from `strategies.scaled`, the bound for random and fresh bins uses the least
        noise of any step for all steps.
      noise_multiplier: the standard deviation of z divided by the clip norm, f[*b],
        positive and finite.
      delta: f[*b], strictly between 0 and 1.
      num_steps: T, static, at least 1.
      steps_per_epoch: n_b, static, at least 1.
      sampling: "fixed", "reshuffled" or "separated" for an order as in `mu`, without
        amplification. "random_bins" if every example picks one of the n_b steps of an
        epoch once, uniformly at random and independently of all other examples, and
        takes part in this step of every epoch. "fresh_bins" if every example picks a
        new step in each epoch. "cyclic_poisson", for a banded strategy with p
        coefficients, if examples form p fixed groups, and step t samples each example
        of group t mod p independently with probability min(1, p / n_b).
      adjacency: which data sets are compared. Under ADD_REMOVE, the batches of the
        other examples must not depend on the added example. Groups by position in the
        data violate this condition.

    Returns:
      ε, f[*b], rounded up. For a traced noise_multiplier or delta out of range, ε is
      inf if the value is NaN or at most 0, and ε is 0 for an infinite noise_multiplier
      or a delta of at least 1. These rules assume that the other value is in range.
      For random and fresh bins, ε is at most the ε that follows from `mu`, with order
      "fixed" for random bins and "reshuffled" for fresh bins (docs/amplification.md
      shows how tight the bound is). For cyclic Poisson sampling, `accounting.pld`
      computes ε from ⌈T / p⌉ Poisson-sampled Gaussian steps. For all other schemes, ε
      follows from `mu` by `gdp.epsilon`.
      For random and fresh bins, only the derivatives by noise_multiplier and delta are
      correct. A derivative by the strategy leaves out terms of the bound, and is wrong.

    Raises:
      ValueError: noise_multiplier, delta or a static argument is out of range;
        `strategy` is not a strategy, has more than num_steps coefficients after the
        leading 1, or has a number of factors other than num_steps; `strategy` is a
        tree, and sampling is neither "fixed" nor "reshuffled"; sampling is
        "cyclic_poisson", and `strategy` is neither banded nor independent, or is from
        `strategies.scaled`.

    Privacy: the guarantee holds for real arithmetic and ideal Gaussian noise, if one
    example changes each sum by at most the clip norm (twice the clip norm under
    REPLACE). Sums may depend on all earlier releases. For bins and cyclic Poisson
    sampling, the steps in which an example takes part must be drawn independently of
    the data, of the noise and of other examples, and must stay secret.

    Reference: Kahane (1986) for bins; Balle, Barthe and Gaboardi (2018) for an epoch
    that ends early; Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153,
    Theorem 4, for cyclic Poisson sampling.

    Example:
      >>> from dpjax import strategies
      >>> for sampling in "fixed", "random_bins":
      ...     value = epsilon(strategies.geometric(0.5), 4.0, 1e-5, num_steps=1000,
      ...                     steps_per_epoch=100, sampling=sampling,
      ...                     adjacency=Adjacency.ZERO_OUT)
      ...     print(f"{value:.1f}")
      3.9
      0.8
    """
    validate.positive("noise_multiplier", noise_multiplier)
    validate.open_unit("delta", delta)
    validate.one_of("sampling", sampling, get_args(Sampling))
    order: Any = _ORDER_OF_BINS.get(sampling, sampling)
    schedule = check_schedule(num_steps, steps_per_epoch, order, adjacency)
    strategy = matrices.check_strategy(strategy, schedule.num_steps)
    if sampling == "cyclic_poisson":
        return _cyclic_poisson(strategy, noise_multiplier, delta, schedule, adjacency)
    if sampling not in _ORDER_OF_BINS:
        return gdp.epsilon(_mu_of_strategy(strategy, noise_multiplier, schedule), delta)
    if isinstance(strategy, matrices.Tree):
        raise ValueError(
            f"strategy must not be a tree with sampling {sampling!r}; got {strategy!r}."
        )
    # The smaller of two bounds: one for an attacker who does not know the example's
    # steps, and one for an attacker who knows these steps.
    toeplitz, factors = matrices.toeplitz_and_factors(strategy)
    return _bins.epsilon64(
        toeplitz, factors, noise_multiplier, delta, schedule=schedule
    )
