"""The ε of runs in which each example picks a random step of the epoch, its bin.

ε follows from the theorem of docs/amplification.md. A pattern is the set of steps in
which an example takes part. The theorem needs covariances of patterns, which say how
much two patterns change the same rows of C x. Here x are the sums of clipped gradients,
one row for each step, and C is the matrix that correlates the noise. A small first
program computes the covariances, and is compiled for each number of steps. A second
program computes ε from the covariances, and takes long to compile. The covariances are
padded to a length of 1 plus a power of two, and all other numbers are traced scalars.
Runs of different lengths can therefore share the second program.

**Covariances** depend on the distance of the first steps of two patterns. Let c_t bound
the norm that a pattern with the first step s adds to row s + t of C x. The bound c_t is
the same for all s. Two patterns whose first steps are d apart have the covariance
Σ_t c_t c_{t+d}, where the sum ends at the last row. The sum has the most terms if the
first steps are 0 and d. The covariance of these two patterns therefore bounds the
covariance of any two patterns whose first steps are d apart. If examples pick a new
step in each epoch, a pattern here is the single step of one epoch.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.float64 import ULP, float64
from dpjax._matrices.strategy import Toeplitz, series_error
from dpjax.accounting._numerics import gaussian
from dpjax.accounting._numerics.convex_order import spread
from dpjax.accounting._numerics.pld.composition import epsilon_of
from dpjax.accounting._numerics.pld.pairs import log_mixture
from dpjax.accounting._schedule import Schedule
from dpjax.accounting.correlated import _chain, _trees
from dpjax.accounting.correlated._patterns import mu_of


class Covariances(NamedTuple):
    """Upper bounds on covariances of patterns, for noise of standard deviation 1.

    A pattern is the set of steps in which an example takes part. Let C be the matrix
    that correlates the noise, and x the sums of clipped gradients. Let c_t and c′_t
    bound the norms that an example adds to row t of C x under two patterns. The
    covariance of the two patterns is Σ_t c_t c′_t. If examples pick a new step in each
    epoch, `by_gap` has the covariances within one epoch, and `shared` has the
    covariance across epochs.

    Attributes:
      by_gap: f[n_b // 2 + 1], where n_b is the number of steps in an epoch. Entry d
        bounds the covariance of any two patterns that begin at steps s and s′ of an
        epoch, if min(|s − s′|, n_b − |s − s′|) is at least d.
      shared: a covariance that is added to the covariance of any two patterns, f[].
    """

    by_gap: jax.Array
    shared: jax.Array


def _correlation(c: jax.Array, size: int) -> jax.Array:
    """An upper bound on Σ_t c_t c_{t+d} for d < size, f[size], for c >= 0."""
    # Padding to twice the length makes the circular correlation a linear one.
    spectrum = jnp.fft.rfft(c, 2 * c.size)
    g = jnp.fft.irfft(jnp.square(jnp.abs(spectrum)), 2 * c.size)[: c.size]
    # A bound on the rounding errors of the Fourier transforms, as in `_patterns`.
    error = 64 * ULP * np.log2(2.0 * c.size) * jnp.sum(jnp.square(c))
    return jnp.pad(g + error, (0, max(size - c.size, 0)))[:size]


def _by_gap_on_circle(g: jax.Array, n_b: int) -> jax.Array:
    """Bounds on the covariance of two patterns by the distance of their first steps.

    The two patterns begin at steps s and s′ of an epoch of n_b steps. Entry k of the
    input g, f[n_b], bounds the covariance for |s − s′| = k. Entry d of the result,
    f[n_b // 2 + 1], bounds the covariance if the distance around the circle of an
    epoch, min(|s − s′|, n_b − |s − s′|), is at least d.
    """
    # A distance d around the circle is d or n_b − d along the line. The cumulative
    # maximum from the end covers all distances of at least d.
    gap = np.arange(n_b // 2 + 1)
    larger = jnp.maximum(g[gap], jnp.where(gap > 0, g[-gap], 0.0))
    return jax.lax.cummax(larger, reverse=True)


def random_bins(strategy: Toeplitz, num_steps: int, n_b: int) -> Covariances:
    """The `Covariances` if an example takes part in the same step of every epoch.

    Args:
      strategy: the matrix C, which correlates the noise of different steps.
      num_steps: T, the number of steps of the run.
      n_b: the number of steps in an epoch.
    """
    c, error = _coefficients(strategy, num_steps)
    epochs = -(-num_steps // n_b)
    column = jnp.pad(c, (0, epochs * n_b - num_steps)).reshape(epochs, n_b)
    column = jnp.cumsum(column, axis=0).ravel()[:num_steps]
    # A bound on ⟨u + a, v + b⟩ − ⟨u, v⟩ for the coefficients u and v of two patterns
    # and their rounding errors a and b. The norms of u and v are at most `norm`, and
    # the norms of a and b are at most `error`.
    norm, error = jnp.linalg.norm(column), epochs * error
    margin = 2 * norm * error + error**2 + 8 * num_steps * ULP * norm**2
    by_gap = _by_gap_on_circle(_correlation(column, n_b), n_b) + margin
    return Covariances(by_gap, jnp.zeros(()))


def fresh_bins(strategy: Toeplitz, num_steps: int, n_b: int) -> Covariances:
    """The `Covariances` if an example takes part in a new random step of each epoch.

    A position is the step of an epoch in which the example takes part. `by_gap` bounds
    the covariance of two positions in the same epoch. `shared` is a sum over all
    ordered pairs of two different epochs. The term of a pair bounds the covariance of
    any position in the first epoch and any position in the second epoch. Positions in
    epochs e < f are at least (f − e) n_b − (n_b − 1) steps apart.

    Args:
      strategy: the matrix C, which correlates the noise of different steps.
      num_steps: T, the number of steps of the run.
      n_b: the number of steps in an epoch.
    """
    c, error = _coefficients(strategy, num_steps)
    epochs = -(-num_steps // n_b)
    margin = (2 * jnp.linalg.norm(c) + error) * error
    g = _correlation(c, max(num_steps, n_b)) + margin
    gaps = np.arange(1, epochs) * n_b - (n_b - 1)
    covariances = jax.lax.cummax(g, reverse=True)[gaps] if epochs > 1 else jnp.zeros(0)
    # The number of ordered pairs of epochs that are 1, 2, … epochs apart.
    across_epochs = jnp.sum(2.0 * np.arange(epochs - 1, 0, -1) * covariances)
    return Covariances(_by_gap_on_circle(g[:n_b], n_b), across_epochs)


def _coefficients(strategy: Toeplitz, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """The absolute values of the first column of the strategy's matrix, f[num_steps].

    The second result bounds the L2 norm of the rounding errors of the column.
    """
    c = strategy.coefficients(num_steps)
    # A bound on rounding errors needs no derivative.
    return jnp.abs(c), series_error(*jax.lax.stop_gradient((strategy, c)))


_TRUNCATED_FRACTION = 1e-5  # the fraction of δ that mass beyond the grids may use
# Covariances are padded to a length of at least this number plus 1.
_MIN_GAPS = 128


class _Run(NamedTuple):
    """The numbers that determine the ε of a run in which examples pick random steps.

    Attributes:
      noise_multiplier: the least noise multiplier of any step, f[].
      by_gap: `by_gap` of `Covariances`, padded with zeros, f[m].
      shared: `shared` of `Covariances`, f[].
      known_mu: the GDP parameter μ for an attacker who knows the example's
        steps, f[].
      num_positions: the number of steps of an epoch in which the example may take part,
        i[]. If the run ends within its first epoch, `num_positions` is the number of
        steps of the run.
      epochs: the number of independent draws of a step, f[].
      rate: the probability that the run contains the step that the example picks, f[].
        `rate` is below 1 only if the run ends within its first epoch.
    """

    noise_multiplier: jax.Array
    by_gap: jax.Array
    shared: jax.Array
    known_mu: jax.Array
    num_positions: jax.Array
    epochs: jax.Array
    rate: jax.Array


@functools.partial(jax.jit, static_argnames=("schedule",))
def _run(
    strategy: Toeplitz,
    factors: jax.Array,
    noise_multiplier: jax.Array,
    *,
    schedule: Schedule,
) -> _Run:
    num_steps, n_b = schedule.num_steps, schedule.steps_per_epoch
    fresh = schedule.order == "reshuffled"
    # If the only epoch ends early, the run contains the example's step with probability
    # q = num_positions / n_b.
    num_positions = min(num_steps, n_b)
    covariances = fresh_bins if fresh else random_bins
    by_gap, shared = covariances(strategy, num_steps, num_positions)
    num_gaps = max(_MIN_GAPS, 1 << (num_positions // 2 - 1).bit_length())
    by_gap = jnp.pad(by_gap, (0, num_gaps + 1 - by_gap.size))
    clipped = schedule._replace(steps_per_epoch=num_positions)
    known_mu = mu_of(strategy, factors, noise_multiplier, schedule=clipped)
    # If the noise varies by step, the bound uses the least noise for all steps.
    min_factor = jnp.where(jnp.all(factors > 0), jnp.min(factors), 0.0)
    return _Run(
        noise_multiplier * min_factor,
        by_gap,
        shared,
        known_mu,
        jnp.asarray(num_positions),
        jnp.asarray(float(-(-num_steps // num_positions) if fresh else 1)),
        jnp.asarray(num_positions / n_b),
    )


def _epsilon_in_bins(
    run: _Run, delta: jax.Array, *, use_chain: bool, replace: bool
) -> jax.Array:
    """An upper bound on the ε of a run in which each example picks random steps, f[].

    The theorem of docs/amplification.md proves the bound. The bound is for an example
    that picks a step of the run. A run that ends within its first epoch contains the
    picked step only with probability `run.rate`. For such a run, `_epsilon` passes δ /
    `run.rate`, and converts the result. The function replaces the covariances of the
    steps that an example may pick by the larger covariances of a tree (`_trees`). If
    `use_chain` is true and `replace` is false, the result may be a smaller bound from a
    Gaussian chain (`_chain`). `use_chain` must be false if the example has more than
    `_chain.MAX_POSITIONS` possible steps in an epoch. `replace` is true if the
    adjacency is REPLACE. The result is inf if delta or a number of the run is out of
    range.
    """
    num_positions, epochs = run.num_positions, run.epochs
    valid = (run.noise_multiplier > 0) & (run.noise_multiplier < jnp.inf)
    valid &= (delta > 0) & (delta < 1) & jnp.all(jnp.isfinite(run.by_gap))
    target_delta = jnp.where(valid, delta, 0.5)
    scale = (1 + 64 * ULP) / jnp.where(valid, run.noise_multiplier, 1.0) ** 2
    by_gap = jnp.where(valid, run.by_gap, 1.0) * scale
    tree = _trees.best(by_gap, num_positions, target_delta, epochs)
    # Grids depend on the tail, and are not differentiated.
    tail = jax.lax.stop_gradient(_TRUNCATED_FRACTION * target_delta / epochs)
    tail = spread.replacement_tail(tail) if replace else tail
    law, variance = _trees.ratio(tree, by_gap, num_positions, tail, spread.POINTS)
    size = jnp.exp2(1.0 * tree.joins) * tree.copies
    losses = (spread.replacement_losses if replace else spread.losses)(law, 2 * size)
    # The factor that all positions share is a Gaussian mechanism with μ² = variance.
    # Under REPLACE this factor is e^Z in one run and e^{−Z} in the other, with 2μ in
    # place of μ.
    shared = jnp.where(valid, run.shared, 0.0) * scale
    variance = epochs * variance + shared
    variance = 4 * variance if replace else variance
    value = epsilon_of([(losses, epochs)], variance, target_delta)
    if use_chain and not replace:
        chain = _chain.best(by_gap, num_positions)
        tree_log_square = _trees.log_square(tree, by_gap, num_positions)
        value = _chain.smaller_epsilon(
            value, tree_log_square, chain, shared, target_delta, tail, epochs
        )
    return jnp.where(valid & ~jnp.isnan(value), value, jnp.inf)


@functools.partial(jax.jit, static_argnames=("use_chain", "replace"))
def _epsilon(
    run: _Run, delta: jax.Array, *, use_chain: bool, replace: bool
) -> jax.Array:
    target_delta = delta / run.rate * (1 - 4 * ULP)
    value = _epsilon_in_bins(run, target_delta, use_chain=use_chain, replace=replace)
    # Divergences are jointly convex, so that ε is at most the ε for an attacker who
    # knows the example's steps.
    value = jnp.minimum(value, gaussian.epsilon_of(run.known_mu, target_delta))
    # Balle, Barthe and Gaboardi (2018), https://arxiv.org/abs/1807.01647, by advanced
    # joint convexity: if a mechanism is (ε, δ)-DP for an example that takes part, the
    # mechanism is (log(1 + q(e^ε − 1)), qδ)-DP for an example that takes part with
    # probability q.
    ends_early = run.rate < 1
    mixed = log_mixture(jnp.where(ends_early, value, 1.0), run.rate) * (1 + 64 * ULP)
    value = jnp.where(ends_early, mixed, value)
    # For a target_delta of at least 1, the value is 0 even if the noise is invalid.
    return jnp.where(run.noise_multiplier > 0, value, jnp.inf)


@float64("up", static=("schedule",), vectors=(0, 1), elementwise=True, compiled=False)
def epsilon64(
    strategy: Toeplitz,
    factors: jax.Array,
    noise_multiplier: jax.Array,
    delta: jax.Array,
    *,
    schedule: Schedule,
) -> jax.Array:
    """An upper bound on the ε of a run in which each example picks random steps, f[].

    If the order of the static schedule is "fixed", an example takes part in the same
    step of every epoch. If the order is "reshuffled", an example picks a new step in
    each epoch. `factors` multiply the noise: one factor for each of the T steps of the
    run, f[T], or one factor for all steps, f[1].
    """
    run = _run(strategy, factors, noise_multiplier, schedule=schedule)
    positions = min(schedule.num_steps, schedule.steps_per_epoch)
    use_chain = positions <= _chain.MAX_POSITIONS
    return _epsilon(run, delta, use_chain=use_chain, replace=schedule.factor > 1)
