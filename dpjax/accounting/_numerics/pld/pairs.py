"""Discrete pairs of distributions that dominate the pair of a mechanism.

Let P and Q be the output distributions of a mechanism on two neighbouring data sets.
Cut the line of outcomes z into intervals. Within an interval, the likelihood ratio of P
and Q lies between its values at the two ends. Move all mass of the interval to the
ends, such that the masses of both P and Q on the interval stay the same. This move only
helps an attacker, because outcomes at the ends can simulate an outcome within the
interval. The ends are evenly spaced in z. (Doroshenko et al. 2022 use a grid of
losses.) If a loss is spread evenly over an interval of length h, the move adds h²/6 to
the variance of the loss. For N(μ, 1) against N(0, 1) and intervals of the width Δz, the
increase is about the fraction (Δz)²/6 of the variance.

For lower bounds, release only the interval (a cell) that contains an outcome. The cell
is a post-processing of the mechanism, so that the δ of the two distributions of cells
is a lower bound. Outcomes beyond the last cells are left out, which makes δ smaller.

All mechanisms in this module are mixtures of unit Gaussians (`atoms` has the other
mechanisms). Let q be the sampling rate, and ℓ(v) = log(1 − q + q e^v). At the outcome
z, the loss of (1 − q) N(0, 1) + q N(μ, 1) against N(0, 1) is ℓ(μz − μ²/2). Against the
mirror image (1 − q) N(0, 1) + q N(−μ, 1), the loss is ℓ(μz − μ²/2) − ℓ(−μz − μ²/2).

**A Poisson-sampled step whose batch may overflow.** Two neighbouring data sets differ
in one example, the differing example. Let n be the number of examples, q the sampling
rate and b the capacity of a batch. Of the other examples, D ~ Binomial(n − 1, q) are
sampled. The other examples fill the batch with probability p = P[D >= b], which does
not depend on the differing example. If the other examples do not fill the batch, the
step is an ordinary Poisson-sampled step. If the other examples fill the batch, the
differing example takes part with probability r = q E[b / (D + 1) | D >= b]. The
differing example then displaces another example, so that the sum of gradients moves by
at most two clip norms. docs/accounting.md has the proof.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf, gammaln, logsumexp, ndtr, ndtri

from dpjax._core.float64 import SMALL, ULP
from dpjax._core.searches import bisect
from dpjax._core.typing import Adjacency
from dpjax.accounting._numerics.gaussian import LOG_SQRT_2PI, gauss_rule

INTERVALS = 4096
# The largest v for which ℓ(v) is computed directly: e^{2v} is far from overflow.
_DIRECT = 40.0
# Gauss-Legendre nodes and weights on [0, 1], for the masses within an interval.
_NODES, _WEIGHTS = (x[:, None] for x in gauss_rule(8))
# The rule for the tails of binomial distributions.
_TAIL_NODES, _TAIL_WEIGHTS = gauss_rule(16, panels=8)
_NEGLIGIBLE = 45.0  # the integral stops where the integrand is e^{−45} of its maximum
_HALVINGS = 60
# The relative error of a tail probability above 1e-300. For such a tail the error of
# k log(k / nq) is about 1e-16 times n^(1/2) times 40, and every other factor has an
# error of a few units in the last place.
TAIL_ERROR = 1e-8


class DiscreteLosses(NamedTuple):
    """Privacy losses of one mechanism, in one direction or two.

    A direction is an order of the two output distributions. The loss is the log of the
    first distribution's mass over the second distribution's mass.

    Attributes:
      loss: m losses in each of d directions, f[d, m].
      log_mass: the log of the first distribution's mass on each loss, f[d, m].
      inf_mass: the first distribution's mass on an infinite loss, f[d].
      error: a bound on the relative error of each mass, f[].
    """

    loss: jax.Array
    log_mass: jax.Array
    inf_mass: jax.Array
    error: jax.Array


class Cells(NamedTuple):
    """The masses of a pair (P, Q) in m cells, which are intervals of outcomes.

    The masses are given in two alternative forms. In the first form, the mass of a cell
    moves to the outcomes at its two ends, for upper bounds on δ. In the second form,
    only the cell that contains an outcome is released, for lower bounds on δ.

    Attributes:
      loss: the losses at the ends of cells, increasing, f[m + 1].
      mass: P's mass at each end after all mass has moved to the ends, f[m + 1].
      merged_loss: the log of the ratio of P's mass to Q's mass in each cell, f[m].
      merged_mass: P's mass in each cell, f[m].
      outside: the masses above the last cell and below the first cell (columns), of P
        and of Q (rows), f[2, 2].
      error: a bound on the relative error of each mass, f[].
    """

    loss: jax.Array
    mass: jax.Array
    merged_loss: jax.Array
    merged_mass: jax.Array
    outside: jax.Array
    error: jax.Array


def log_mixture(v: jax.Array, rate: jax.Array) -> jax.Array:
    """The log-likelihood ratio ℓ(v) = log(1 − q + q e^v) of a mixture with the rate q.

    The argument v is the log-likelihood ratio of the component with the weight q. The
    result is precise for all rates and all v.
    """
    # log(1 + q (e^v − 1)) is precise unless the argument of the log is near 0. Where
    # this argument is near 0, and where e^v or a derivative could overflow, logaddexp
    # gives log((1 − q) + q e^v). That sum is far from 1 unless q is tiny, and if q is
    # tiny the larger term is precise. Each form gets values of v from its own range
    # alone, by jnp.where, because jnp.clip has half a derivative at its ends.
    direct = (v > -1) & (v <= _DIRECT)
    log1p_form = jnp.log1p(rate * jnp.expm1(jnp.where(direct, v, 1.0)))
    mixed = rate < 1
    first = jnp.where(mixed, jnp.log1p(-jnp.where(mixed, rate, 0.5)), -jnp.inf)
    # At q = 1, `first` is constant. The derivative by q of log(1 − q + q e^v) is then
    # that of log q plus that of (1 − q) e^{−v}, which is 0 at q = 1. The limit of 600
    # prevents an overflow.
    at_one = jnp.where(mixed, 0.0, 1 - rate) * jnp.exp(jnp.minimum(-v, 600.0))
    sum_form = jnp.logaddexp(first, jnp.log(rate) + v) + at_one
    return jnp.where(direct, log1p_form, sum_form)


def phi(z: jax.Array) -> jax.Array:
    return jnp.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)


def raise_rate(rate: jax.Array) -> jax.Array:
    """A rate or weight, raised to at least SMALL (a tiny float), with a finite log."""
    # The derivative stays one, also where the rate is raised.
    return rate + jax.lax.stop_gradient(jnp.maximum(rate, SMALL) - rate)


def split(
    mu: jax.Array, rate: jax.Array, start: jax.Array, stop: jax.Array, *, count, mirror
) -> Cells:
    """Cut the outcomes from start to stop into count cells of equal width.

    A cell is an interval of outcomes. The result has the masses and losses of P and Q
    in these cells. P is (1 − q) N(0, 1) + q N(μ, 1), where q is the rate and μ is mu.
    If mirror is false, Q is N(0, 1). If mirror is true, Q is the reflection of P at
    zero; the field `outside` then has the masses of N(0, 1) in place of those of Q.
    """
    width = (stop - start) / count
    ends = start + width * np.arange(count + 1.0)

    def component(v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The numbers ℓ(v) at the ends of cells, and ℓ′(v) at the starts of cells.

        Let m be μ or −μ, and let v be the log-likelihood ratio of N(m, 1) to N(0, 1)
        at all ends of cells. Then ℓ(v) = log(1 − q + q e^v) is the log-likelihood ratio
        of (1 − q) N(0, 1) + q N(m, 1) to N(0, 1). ℓ′(v) is the fraction of the density
        of this mixture that comes from N(m, 1).
        """
        log_ratio = log_mixture(v, rate)
        return log_ratio, jnp.exp(jnp.log(rate) + v - log_ratio)[None, :-1]

    loss, fraction = component(mu * ends - mu * mu / 2)
    back = jnp.zeros_like(fraction)
    if mirror:
        mirror_loss, back = component(-mu * ends - mu * mu / 2)
        loss = loss - mirror_loss

    def growth_of(step: jax.Array) -> jax.Array:
        """The increase of the loss if μz grows by `step` from the start z of each cell.

        The computation does not subtract nearly equal numbers.
        """
        growth = jnp.log1p(fraction * jnp.expm1(step))
        return growth - jnp.log1p(back * jnp.expm1(-step)) if mirror else growth

    nodes = ends[None, :-1] + width * _NODES
    mass = width * _WEIGHTS * ((1 - rate) * phi(nodes) + rate * phi(nodes - mu))
    at_nodes = growth_of(mu * width * _NODES)
    of_cell = growth_of(jnp.reshape(mu * width, (1, 1)))
    reach = jnp.abs(mu) + jnp.maximum(jnp.abs(start), jnp.abs(stop))
    # One call of ndtr for all masses: special functions are slow to compile.
    tails = ndtr(jnp.stack([-stop, start, mu - stop, start - mu]))
    centred, shifted = jnp.split(tails, 2)
    outside = jnp.stack([(1 - rate) * centred + rate * shifted, centred])
    return divide_masses(loss, at_nodes, of_cell, mass, outside, width * reach)


def divide_masses(
    loss: jax.Array,
    at_nodes: jax.Array,
    of_cell: jax.Array,
    mass: jax.Array,
    outside: jax.Array,
    relative: jax.Array,
) -> Cells:
    """The `Cells` of P and Q, from the losses and masses at Gauss-Legendre nodes.

    Args:
      loss: the losses at the ends of the m cells, f[m + 1].
      at_nodes: the growth of the loss from the start of a cell to each of 8 nodes,
        f[8, m].
      of_cell: the growth of the loss over a cell, f[1, m].
      mass: P's mass at each node, f[8, m].
      outside: the masses above the last cell and below the first cell (columns), of P
        and of Q (rows), f[2, 2].
      relative: the width of a cell, times a bound on the distance of an outcome from
        the mean of a component of P or Q, f[].
    """
    # Doroshenko et al. (2022), https://arxiv.org/abs/2207.04380: of the mass at a loss
    # x in [a, b], the fraction (e^{−a} − e^{−x}) / (e^{−a} − e^{−b}) moves to the
    # upper end. Q's mass, which is P's times e^{−x}, then stays the same as well. The
    # code computes this fraction from x − a and b − a.
    increases = of_cell > 0
    up = jnp.expm1(-at_nodes) / jnp.expm1(-jnp.where(increases, of_cell, 1.0))
    # If the loss is constant on an interval, every fraction is valid.
    up = jnp.where(increases, jnp.minimum(up, 1.0), 1.0)
    upper, lower = (jnp.sum(mass * up, axis=0), jnp.sum(mass * (1 - up), axis=0))
    masses = jnp.pad(upper, (1, 0)) + jnp.pad(lower, (0, 1))
    # Q's mass in a cell is the sum of P's masses times e^{−x}, with x relative to the
    # loss at the lower end.
    total = jnp.sum(mass, axis=0)
    divisor = jnp.where(total > 0, total, 1.0)
    relative_change = jnp.sum(mass * jnp.expm1(-at_nodes), axis=0) / divisor
    # The relative error of Gauss's rule is 1.7e-23 (Δz)^16 f^(16) / f for the density
    # f, and f^(16) / f is about the 16th power of the distance from a mean or of μ.
    error = 64 * ULP + 1e-21 * relative**16
    merged = loss[:-1] - jnp.log1p(relative_change)
    return Cells(loss, masses, merged, total, outside, jax.lax.stop_gradient(error))


@jax.jit  # JAX traces each of the many calls faster
def tail_quantile(tail: jax.Array) -> jax.Array:
    """A number, at least 1, above which N(0, 1) has at most the mass `tail`.

    The derivative is zero, because the number only determines where to truncate.
    """
    return jax.lax.stop_gradient(jnp.maximum(-ndtri(jnp.minimum(tail, 0.5)), 1.0))


def find_ends(mu: jax.Array, rate: jax.Array, tail: jax.Array) -> jax.Array:
    """The outcomes below and above which a mass of about `tail` may be truncated, f[2].

    N(0, 1) has about this mass below the first outcome. The mixture (1 − q) N(0, 1) + q
    N(μ, 1), with the rate q, has about this mass above the second outcome.
    """
    mu, rate = jax.lax.stop_gradient((mu, rate))
    centred, shifted = tail_quantile(tail / jnp.stack([jnp.ones_like(rate), rate]))
    return jnp.stack([-centred, jnp.maximum(centred, mu + shifted)])


def _one_entry(index: int, value: jax.Array, rest: float, count: int) -> jax.Array:
    """An array of count entries: value at the index, and rest at every other entry."""
    return jnp.where(jnp.arange(count) == index, value, rest)


def _log(mass: jax.Array) -> jax.Array:
    return jnp.log(jnp.maximum(mass, SMALL))


def log_mass_of(mass: jax.Array) -> jax.Array:
    """The logarithm of a mass, −∞ for 0, with finite derivatives."""
    return jnp.where(mass > 0, _log(mass), -jnp.inf)


def poisson_cells(
    mu: jax.Array, rate: jax.Array, tail: jax.Array, mirror: bool
) -> Cells:
    """The `Cells` of P and Q, for outcomes between two ends.

    Q has a mass of about `tail` below the first end, and P has a mass of about `tail`
    above the last end. The docstring of `split` defines P and Q for mu, rate and
    mirror.
    """
    rate = raise_rate(rate)
    start, stop = find_ends(mu, rate, tail)
    start = -stop if mirror else start
    return split(mu, rate, start, stop, count=INTERVALS, mirror=mirror)


def end_losses(cells: Cells) -> DiscreteLosses:
    """The losses of P against Q and of Q against P, if mass moves to the ends of cells.

    A cell is an interval of outcomes. The mass outside of all cells moves to an
    infinite loss or to the smallest loss.
    """
    # The truncated mass at large losses gets an infinite loss. The truncated mass at
    # small losses gets the smallest loss of the grid, which is at least the loss of the
    # truncated mass.
    loss, mass, size = cells.loss, cells.mass, cells.loss.size
    (above, below), (q_above, q_below) = cells.outside
    log_p = _log(mass + _one_entry(0, below, 0.0, size))
    q_last = _one_entry(size - 1, _log(q_above), -jnp.inf, size)
    return DiscreteLosses(
        jnp.stack([loss, -loss]),
        jnp.stack([log_p, jnp.logaddexp(_log(mass) - loss, q_last)]),
        jnp.stack([above, q_below]),
        cells.error,
    )


def cell_losses(cells: Cells) -> DiscreteLosses:
    """The losses of P against Q and of Q against P, if only a cell is released.

    The released cell is the interval that contains the outcome. The mass outside of all
    cells is left out.
    """
    loss, log_mass = cells.merged_loss, log_mass_of(cells.merged_mass)
    return DiscreteLosses(
        jnp.stack([loss, -loss]),
        jnp.stack([log_mass, log_mass - loss]),
        jnp.zeros(2),
        cells.error,
    )


def poisson(
    event: Any,
    tail: jax.Array,
    losses_of: Callable[[Cells], DiscreteLosses] = end_losses,
) -> DiscreteLosses:
    """The losses of a Poisson-sampled step whose batch holds all sampled examples.

    Let q be the sampling rate, and 1/μ the noise multiplier. Under ADD_REMOVE and
    ZERO_OUT, the dominating pair is (1 − q) N(0, 1) + q N(μ, 1) against N(0, 1), in
    both orders. Under REPLACE, the pair is (1 − q) N(0, 1) + q N(μ, 1) against (1 − q)
    N(0, 1) + q N(−μ, 1). The second distribution is then the mirror image of the first
    distribution, so that both orders have the same losses. A mass of about `tail` is
    truncated at each end of the outcomes. `losses_of` maps the masses in intervals of
    outcomes to losses in both orders.
    """
    # Zhu, Dong and Wang (2022), Theorem 11, https://arxiv.org/abs/2106.08567: the pair
    # is (1 − q) N(0, 1) + q N(μ, 1) and N(0, 1), in both directions.
    mu, rate = 1 / event.noise_multiplier, event.sampling_rate
    mirror = event.adjacency is Adjacency.REPLACE
    *arrays, error = losses_of(poisson_cells(mu, rate, tail, mirror))
    count = 1 if mirror else 2  # the number of directions
    # At q = 1 both orders of the pair have equal losses, so that each order gives the
    # bound. Their derivatives by q differ. The first order is chosen, since its δ is
    # usually the larger one for q < 1; no bound depends on this.
    arrays = (jnp.where(rate < 1, x[:count], x[:1]) for x in arrays)
    return DiscreteLosses(*arrays, error)


def _log_weighted_sum(v: jax.Array, weight: jax.Array) -> jax.Array:
    """The logarithm of Σ_i w_i e^{v_i} over the first axis.

    The weights w_i add up to one. The result is precise even near zero.
    """
    # Where the sum is near one, log1p of Σ w_i (e^{v_i} − 1) is precise, because the
    # weights add up to one. Elsewhere the logarithm is not small.
    excess = jnp.sum(weight * jnp.expm1(jnp.minimum(v, _DIRECT)), axis=0)
    near_one = (excess > -0.5) & (jnp.max(v, axis=0) <= _DIRECT)
    general = logsumexp(jnp.log(weight) + v, axis=0)
    return jnp.where(near_one, jnp.log1p(jnp.where(near_one, excess, 0.0)), general)


def mixture_cells(event: Any, tail: jax.Array) -> Cells:
    """The `Cells` of Σ w_i N(μ_i, 1) against N(0, 1), for an `events.GaussianMixture`.

    The sensitivities s_i >= 0 have the weights w_i, and μ_i = s_i/σ for the noise
    multiplier σ. The loss at the outcome z is x(z) = log Σ w_i e^{v_i} with v_i = μ_i z
    − μ_i²/2. The loss increases with z, because no μ_i is negative. Each of the two
    distributions has at most about the mass `tail` beyond each end of the cells.
    """
    mean = jnp.stack([s / event.noise_multiplier for s in event.sensitivities])
    # Weights are raised to at least SMALL, so that their logs are finite. Then they are
    # divided by their sum.
    weight = raise_rate(jnp.stack(event.weights)) / sum(event.weights, jnp.zeros(()))
    fixed_mean, fixed_weight = jax.lax.stop_gradient((mean, weight))
    centred = tail_quantile(tail)
    # Each component has at most an equal part of the tail above the last outcome.
    shifted = fixed_mean + tail_quantile(tail / (mean.size * fixed_weight))
    start, stop = -centred, jnp.maximum(centred, jnp.max(shifted))
    width = (stop - start) / INTERVALS
    ends = start + width * np.arange(INTERVALS + 1.0)
    v = mean[:, None] * ends[None] - (mean * mean / 2)[:, None]
    loss = _log_weighted_sum(v, weight[:, None])
    # The fraction of the density that each component has at the start of a cell.
    fraction = jnp.exp(jnp.log(weight)[:, None] + v - loss[None])[:, :-1]
    nodes = np.append(_NODES, [[1.0]], axis=0)
    growth, mass, points = 0.0, 0.0, ends[None, :-1] + width * _NODES
    # The loop adds one component after the other, since an array of all components
    # would be m times as large.
    for i in range(mean.size):
        growth += fraction[i][None] * jnp.expm1(mean[i] * width * nodes)
        mass += weight[i] * phi(points - mean[i])
    growth = jnp.log1p(growth)
    relative = width * (jnp.max(mean) + jnp.maximum(jnp.abs(start), jnp.abs(stop)))
    mass = width * _WEIGHTS * mass
    outside = weight[None] * ndtr(jnp.stack([mean - stop, start - mean]))
    centred = ndtr(jnp.stack([-stop, start]))
    outside = jnp.stack([jnp.sum(outside, axis=1), centred])
    return divide_masses(loss, growth[:-1], growth[-1:], mass, outside, relative)


def mixture(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The losses of an `events.GaussianMixture`, for both orders of the data sets.

    A mass of about `tail` is truncated at each end of the outcomes.
    """
    return end_losses(mixture_cells(event, tail))


def fixed_size(mu: jax.Array, rate: jax.Array, tail: jax.Array) -> DiscreteLosses:
    """The losses of the symmetric pair (P, Q) whose trade-off curve is C_q(G_μ).

    C_q(G_μ) is the curve of a μ-GDP mechanism on a random batch of fixed size, with the
    sampling rate q. The pair has the positive losses of (1 − q) N(0, 1) + q N(μ, 1)
    against N(0, 1), with the same masses. For each positive loss x, the loss −x has
    e^{−x} times the mass of x. The rest of the mass has a loss of zero. A mass of about
    `tail` moves to an infinite loss.

    Reference: Bok, Su and Altschuler (2024), Proposition D.4.
    """
    rate = raise_rate(rate)
    half, (_, stop) = INTERVALS // 2, find_ends(mu, rate, tail)
    # The loss of the mixture against N(0, 1) is zero at z = μ/2, and positive above.
    cells = split(mu, rate, mu / 2, stop, count=half, mirror=False)
    # Bok, Su and Altschuler (2024), Proposition D.4, https://arxiv.org/abs/2403.00278:
    # the losses above zero are the mixture's losses x. The losses below zero are their
    # mirror image, with masses times e^{−x}. Both together are the losses of one
    # direction. The mass at a loss of zero is in place of the mass below the cells.
    at_zero = (1 - rate) * erf(mu / np.sqrt(8))
    outside = jnp.stack([jnp.stack([cells.outside[0, 0], at_zero]), cells.outside[1]])
    loss, log_mass, inf_mass, error = end_losses(cells._replace(outside=outside))
    loss, log_mass = loss.reshape(1, -1), log_mass.reshape(1, -1)
    return DiscreteLosses(loss, log_mass, inf_mass[:1], error)


def _stirling(n: jax.Array) -> jax.Array:
    """The error log n! − log(√(2πn) (n/e)^n) of Stirling's formula, for n >= 1."""
    # The series in 1/n is precise only for large n; the direct difference would cancel
    # there. Each form gets arguments of its own range, so that both stay finite.
    large = n > 15
    m = jnp.where(large, n, 16.0)
    square = 1 / (m * m)
    series = (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680))) / m
    k = jnp.where(large, 1.0, n)
    direct = gammaln(k + 1) - (k + 0.5) * jnp.log(k) + k - LOG_SQRT_2PI
    return jnp.where(large, series, direct)


def _log_pmf(k: jax.Array, n: jax.Array, rate: jax.Array) -> jax.Array:
    """The log of P[Binomial(n, q) = k] for 1 <= k <= n, where q is the rate.

    Reference: Loader (2000).
    """

    def deviance(x: jax.Array, mean: jax.Array) -> jax.Array:
        # x log(x / mean) + mean − x. Near the mean, log1p avoids the cancellation.
        relative = (mean - x) / x
        is_near = jnp.abs(relative) < 0.5
        ratio = jnp.log1p(jnp.where(is_near, relative, 0.0))
        return x * (relative - jnp.where(is_near, ratio, jnp.log(mean / x)))

    rest = n - k
    inner = rest > 0
    rest = jnp.where(inner, rest, 1.0)
    log_pmf = _stirling(n) - _stirling(k) - _stirling(rest)
    log_pmf = log_pmf - deviance(k, n * rate) - deviance(rest, n * (1 - rate))
    log_pmf = log_pmf - jnp.log(2 * np.pi * k * rest / n) / 2
    return jnp.where(inner, log_pmf, n * jnp.log(rate))


def _small_tail(k: jax.Array, n: jax.Array, rate: jax.Array) -> jax.Array:
    """P[Binomial(n, q) >= k] for k >= (n + 1) q, with a small relative error.

    q is the rate. The probability is k P[Binomial(n, q) = k] times the integral over
    t > 0 of exp(−kt) ((1 − q e⁻ᵗ) / (1 − q))^(n − k). The log of that integrand is
    concave and decreasing.
    """
    odds = rate / (1 - rate)

    def exponent(t: jax.Array) -> jax.Array:
        return (n - k) * jnp.log1p(-odds * jnp.expm1(-t)) - k * t

    def is_negligible(t: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(exponent(t)) < -_NEGLIGIBLE

    # The upper limit of the integral only truncates it, so it has no derivative. The
    # factor ((1 − q e⁻ᵗ) / (1 − q))^(n − k) is at most (1 − q)^(k − n), which
    # determines upper_limit.
    upper_limit = jax.lax.stop_gradient((_NEGLIGIBLE - (n - k) * jnp.log1p(-rate)) / k)
    end = bisect(is_negligible, jnp.zeros_like(upper_limit), upper_limit, _HALVINGS)
    area = end * jnp.sum(_TAIL_WEIGHTS * jnp.exp(exponent(end * _TAIL_NODES)))
    return k * area * jnp.exp(_log_pmf(k, n, rate))


def upper_tail(k: jax.Array, n: jax.Array, rate: jax.Array) -> jax.Array:
    """P[Binomial(n, q) >= k], f[], for integers k >= 1 and n >= 0, where q is the rate.

    The relative error is at most the constant TAIL_ERROR for probabilities above
    1e-300.
    """
    inside = (k <= n) & (rate > 0) & (rate < 1)
    certain = (k <= n) & (rate >= 1)
    k, n, rate = (jnp.where(inside, x, y) for x, y in ((k, 1.0), (n, 2.0), (rate, 0.5)))
    # With X ~ Binomial(n, q), P[X < k] is P[n − X >= n − k + 1], and n − X is
    # Binomial(n, 1 − q). The integral gives the smaller of the two tails.
    rare = k >= (n + 1) * rate
    start, p = (jnp.where(rare, k, n - k + 1), jnp.where(rare, rate, 1 - rate))
    tail = _small_tail(start, n, p)
    tail = jnp.where(rare, tail, 1 - tail)
    return jnp.where(inside, tail, jnp.where(certain, 1.0, 0.0))


def truncated_poisson(event: Any, tail: jax.Array) -> DiscreteLosses:
    """The losses of a Poisson-sampled step whose batch may overflow.

    Two neighbouring data sets differ in one example, the differing example. Whether the
    other examples fill the batch does not depend on the differing example. The bound
    may therefore assume that the attacker knows whether the other examples fill the
    batch.

    Let s be the probability that a batch overflows and contains the differing example.
    If s exceeds `tail`, the result mixes two sets of losses by their probabilities: the
    losses if the other examples fill the batch, and the losses if the other examples do
    not fill the batch. If s is at most `tail`, the result has the losses of a step
    without overflow, and an infinite loss with probability s. If max_batch_size is at
    least num_examples, s is 0.
    """
    usual = poisson(event, tail)  # the losses without overflow
    n, b = event.num_examples, event.max_batch_size
    mu, rate = 1 / event.noise_multiplier, event.sampling_rate
    full = upper_tail(b, n - 1, rate)
    # The probability that the example is in a batch that overflows. The margin exceeds
    # the errors of both tails, so that the ratio overflow / full errs upwards as well.
    overflow = upper_tail(b + 1, n, rate) * b / n * (1 + 4 * TAIL_ERROR)
    # This probability may underflow, but it is zero only if all examples fit.
    overflow = jnp.where(b < n, jnp.maximum(overflow, SMALL), 0.0)
    # In the rare case, a full batch without the differing example gets the losses of a
    # step without overflow. The bound stays valid, because such a full batch reveals
    # nothing about the differing example.
    rare = overflow <= tail
    conditional_rate = jnp.clip(overflow / jnp.maximum(full, SMALL), SMALL, rate)
    # In the rare case full_losses get no mass, and are finite because they are computed
    # at the sampling rate.
    full_losses = fixed_size(2 * mu, jnp.where(rare, rate, conditional_rate), tail)
    not_full = jnp.where(rare, 1.0, jnp.maximum(1 - full * (1 - TAIL_ERROR), SMALL))
    full = jnp.clip(full * (1 + TAIL_ERROR), SMALL, 1.0)
    log_full = jnp.where(rare, -jnp.inf, jnp.log(full))

    def join_columns(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.concatenate([x, jnp.broadcast_to(y, (len(x), y.shape[1]))], axis=1)

    # Each pair has its own relative error. The inversion weights masses by e^{λ loss},
    # which may favour the pair with less mass, so the larger error holds for both.
    error = jnp.maximum(usual.error, jnp.where(rare, 0.0, full_losses.error))
    masses = usual.log_mass + jnp.log(not_full), full_losses.log_mass + log_full
    overflow = jnp.where(rare, overflow, full * full_losses.inf_mass)
    return DiscreteLosses(
        join_columns(usual.loss, full_losses.loss),
        join_columns(*masses),
        not_full * usual.inf_mass + overflow,
        error,
    )
