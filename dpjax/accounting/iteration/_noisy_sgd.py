"""Privacy of the last iterate of gradient descent on random batches of fixed size.

A bound treats about the last n of t steps as subsampled releases. A subsampled release
is the output of a step whose batch contains the differing example with a probability
equal to the sampling rate. In the steps that are treated as releases, the sensitivity
is larger than under composition. The earlier steps leave a distance between the coupled
runs on two neighbouring data sets. For each bound, the noise of one or more later steps
is split into two independent parts, with 1/α² and 1/β² of the variance. The first part
hides the distance, at the privacy loss of a Gaussian mechanism. The second part is the
noise of the subsampled release of the same step. A step that uses the differing example
moves the runs apart by r noise standard deviations, and c is the Lipschitz constant of
a step. The two bounds are:

- Without a bounded set, two interpolated processes follow the two runs. Each step that
  uses the differing example moves the processes apart by 2r noise standard deviations.
  Only the noise of the last step is split. The last step and the n steps before it are
  subsampled releases. The earlier steps leave the distance 2r Σ_{n<i<t} c^i. The bound
  is Theorem C.13, with the parameters that give Theorem 4.9 for α = β, and holds for
  any c.
- On a set of diameter Δ, in noise standard deviations, one interpolated process is
  used. Before the last n steps, the runs are at most Δ apart. The noise of each of the
  last n steps is split. Shifts (see `_minorant`) reduce the distance to zero. The cost
  of all shifts together is that of a Gaussian mechanism whose GDP parameter is α times
  Δ c^n / sqrt(Σ_{i<n} c^{2i}). The bound is Theorem 4.10 for c = 1 and α = β.

Every n and every split with 1/α² + 1/β² = 1 gives a valid bound. A Gaussian
approximation chooses n and the split. The validity of the reported ε does not depend on
the approximation. The theorems are those of Bok, Su and Altschuler (2024).
"""

from collections.abc import Callable
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import ULP, float64
from dpjax._core.typing import ArrayLike
from dpjax.accounting import pld
from dpjax.accounting.iteration import _periodic, _setting
from dpjax.accounting.iteration._setting import Assumed, Bounds, Numbers, Setting, Step

# Candidates for n, relative to the best n of the Gaussian approximation.
_N_RATIOS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0)
_SPLITS = 1 + np.logspace(-3, 1, 200)  # candidates for β
_MARGIN = 1 + 64 * ULP  # a factor that rounds up


def _early_distance(step: Step, n: jax.Array, steps: int) -> jax.Array:
    """The final distance of two processes due to the steps before the last n + 1.

    The processes are the two interpolated processes of the module's docstring, for runs
    on neighbouring data sets. The result is in standard deviations of a step's noise. A
    part of the last step's noise, with 1/α² of the variance, hides the distance. The
    early steps then cost no more than a Gaussian mechanism whose μ is α times the
    result. The result is inf if the step has no finite Lipschitz constant.
    """
    # Bok, Su and Altschuler (2024), Theorem C.13, https://arxiv.org/abs/2403.00278:
    # 2 (L/bσ) Σ_{n<i<t} c^i = 2 (L/bσ) (c^{n+1} − c^t)/(1 − c), where n is the paper's
    # t − τ.
    power_sum = _periodic.power_sum(step.log_lipschitz, n + 1, jnp.asarray(steps - 1.0))
    return jnp.where(step.finite_lipschitz, 2 * step.shift * power_sum, jnp.inf)


def _diameter_cost(step: Step, n: jax.Array, steps: int) -> jax.Array:
    """The cost of reducing the distance of two runs from the diameter to 0 in n steps.

    Two coupled runs on neighbouring data sets are at most the diameter apart before the
    last n steps. A part of the noise of each of these steps, with 1/α² of the variance,
    hides this distance. All earlier steps then cost no more than a Gaussian mechanism
    whose μ is α times the result (Bok, Su and Altschuler 2024, Theorem 4.10). The
    result is inf without a bounded set.
    """
    # Theorem 4.10 has D/(ησ sqrt(n)) for c = 1. For any c, this number is
    # Δ c^n / sqrt(Σ_{i<n} c^{2i}).
    y, count = step.log_lipschitz, jnp.maximum(n, 1.0)
    down, up = jnp.where(y <= 0, y, 0.0), jnp.where(y <= 0, 0.0, y)
    falling = jnp.exp(n * down) / jnp.sqrt(_periodic.geometric(2 * down, count))
    rising = jnp.exp(up) / jnp.sqrt(_periodic.geometric(-2 * up, count))
    cost = step.diameter * jnp.where(y <= 0, falling, rising)
    return jnp.where(step.bounded, cost, jnp.inf)


def _subsampled_variance(mu: jax.Array, rate: jax.Array) -> jax.Array:
    """Approximate the squared GDP parameter that one subsampled release adds, f[*b].

    Without subsampling, the release is μ-GDP. The composition of many subsampled
    releases is approximately a Gaussian mechanism.
    """
    # Bok, Su and Altschuler (2024), Lemma A.5, https://arxiv.org/abs/2403.00278. The
    # approximation may be below the privacy loss, so that it only chooses candidates.
    square = jnp.minimum(mu * mu, 500.0)  # a larger square could overflow the exp
    cdf = jax.scipy.special.ndtr
    factor = jnp.exp(square) * cdf(1.5 * mu) + 3 * cdf(-0.5 * mu) - 2
    return 2 * rate * rate * jnp.maximum(factor, 0.0)


@float64("up", static=("assumed",), elementwise=True)
def _shift64(beta: jax.Array, numbers: Numbers, *, assumed: Assumed) -> jax.Array:
    """β times the distance by which one use of the differing example moves an iterate.

    The distance is divided by the standard deviation of a step's noise. The result is
    rounded up, and inf for numbers out of range.
    """
    step = _setting.step(numbers, assumed)
    return jnp.where(step.valid, beta * step.shift * _MARGIN, jnp.inf)


# The releases of a bound: pairs of a factor of the sensitivity and a number of steps.
# In the comments below, G(μ) is the trade-off curve of a Gaussian mechanism, C stands
# for subsampling, and ⊗ for composition.
_Releases = tuple[tuple[jax.Array | float, jax.Array | int], ...]


def _releases_if_last_split(beta: jax.Array, n: jax.Array) -> _Releases:
    # Theorem C.13: G(α d) ⊗ C(G(2β L/bσ)) ⊗ C(G(2 L/bσ))^{⊗n}, with the distance d from
    # `_early_distance`. Theorem 4.9 has α = β = sqrt(2).
    return (2 * beta, 1), (2.0, n)


def _releases_if_all_split(beta: jax.Array, n: jax.Array) -> _Releases:
    # Theorem 4.10: G(α d) ⊗ C(G(2β L/bσ))^{⊗n}, with the cost d from `_diameter_cost`.
    # The theorem has α = β = sqrt(2).
    return ((2 * beta, n),)


class _Bound(NamedTuple):
    """The static description of one of the two last-iterate bounds for a run.

    One bound treats the last n + 1 steps as subsampled releases, and splits the noise
    of the last step alone. The other bound treats the last n steps as subsampled
    releases, and splits the noise of each of them. Of a split noise, a part with 1/α²
    of the variance is for the earlier steps, and a part with 1/β² of the variance is
    for the release.

    Attributes:
      early_cost: maps a step, n and the number of all steps to μ/α. The earlier steps
        cost at most as much as a Gaussian mechanism with the parameter μ.
      releases: maps β and n to one pair for each kind of subsampled release. A pair is
        a factor of the sensitivity and a number of steps.
      steps: the number of all steps.
      assumed: the static assumptions of the run's `Setting`.
    """

    early_cost: Callable[[Step, jax.Array, int], jax.Array]
    releases: Callable[[jax.Array, jax.Array], _Releases]
    steps: int
    assumed: Assumed


def _cost(n: jax.Array, rate: jax.Array, numbers: Numbers, bound: _Bound) -> jax.Array:
    """An approximation of μ² of a last-iterate bound, for every β in _SPLITS, f[200].

    The bound treats the last n or n + 1 steps as subsampled releases. If the noise of
    such a step is split, the part for the release has 1/β² of the variance.
    """
    step = jax.lax.stop_gradient(_setting.step(numbers, bound.assumed))
    # α² = β² / (β² − 1).
    beta, mu_over_alpha = jnp.asarray(_SPLITS), bound.early_cost(step, n, bound.steps)
    gaussian = mu_over_alpha * mu_over_alpha * beta * beta / (beta * beta - 1)
    return gaussian + sum(
        count * _subsampled_variance(factor * step.shift, rate)
        for factor, count in bound.releases(beta, n)
    )


@float64("up", static=("bound",), elementwise=True)
def _best_n64(rate: jax.Array, numbers: Numbers, *, bound: _Bound) -> jax.Array:
    n = np.unique(np.geomspace(1, bound.steps, 200).astype(int))
    n = jnp.asarray(n, jnp.float64)
    cost = jax.vmap(lambda n: jnp.min(_cost(n, rate, numbers, bound)))(n)
    return jnp.min(jnp.where(cost == jnp.min(cost), n, bound.steps))


@float64("up", static=("bound",), elementwise=True)
def _best_split64(
    n: jax.Array, rate: jax.Array, numbers: Numbers, *, bound: _Bound
) -> jax.Array:
    cost = _cost(n, rate, numbers, bound)
    return jnp.min(jnp.where(cost == jnp.min(cost), jnp.asarray(_SPLITS), _SPLITS[-1]))


@float64("up", static=("bound",), elementwise=True)
def _early_steps_mu64(
    n: jax.Array, beta: jax.Array, numbers: Numbers, *, bound: _Bound
) -> jax.Array:
    """The μ of a Gaussian mechanism that bounds the privacy loss of all early steps.

    Early steps are all steps before the last n or n + 1 steps, which the bound treats
    as subsampled releases. The early steps leave a distance between the iterates of two
    coupled runs, and a part of the later noise hides this distance. The part has 1/α²
    of the variance, where 1/α² + 1/β² = 1. μ is inf if the bound does not apply.
    """
    step = _setting.step(numbers, bound.assumed)
    alpha = beta / jnp.sqrt((beta - 1) * (beta + 1))  # 1/α² + 1/β² = 1
    mu = bound.early_cost(step, n, bound.steps) * alpha * _MARGIN
    return jnp.where(step.valid, mu, jnp.inf)


# The sampling rate, from a traced batch size and number of examples. A division in the
# callers' dtype could round the rate down, and by much in bfloat16.
_rate64 = float64("up")(jnp.divide)


def noisy_sgd_bounds(
    noise_multiplier: ArrayLike,
    delta: ArrayLike,
    *,
    num_steps: int,
    batch_size: ArrayLike,
    num_examples: ArrayLike,
    **setting: Unpack[Setting],
) -> Bounds:
    """All bounds on the ε of the last iterate of noisy descent on random batches.

    Args:
      noise_multiplier: the standard deviation of the noise on a batch's sum of
        gradients, divided by gradient_norm, f[*b], at least 0.
      delta: δ, f[*b], strictly between 0 and 1.
      num_steps: t, static, at least 1.
      batch_size: b, f[*b], positive. Each batch is a uniformly random subset of b
        examples, drawn anew in each step.
      num_examples: n, the size of the data set, f[*b], at least b.
      **setting: the required keyword arguments of `Setting`. The adjacency must be
        REPLACE.

    Returns:
      `Bounds` on ε, f[*b] each. `noisy_sgd_epsilon` returns the minimum of the bounds.

    Raises:
      ValueError: as for `noisy_sgd_epsilon`.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Example:
      >>> from dpjax import Adjacency
      >>> noisy_sgd_bounds(
      ...     3.0, 1e-5, num_steps=20000, batch_size=100, num_examples=1000,
      ...     step_size=0.05, gradient_norm=1.0, clipped=True, generalised_linear=True,
      ...     smoothness=1.0, weak_convexity=0.0, strong_convexity=0.0,
      ...     regularization=0.0, diameter=0.01, adjacency=Adjacency.REPLACE).winner
      'diameter'
    """
    steps = validate.static_int("num_steps", num_steps, minimum=1)
    validate.open_unit("delta", delta)
    for name, value in (("batch_size", batch_size), ("num_examples", num_examples)):
        validate.positive(name, value)
    size, examples = validate.concrete(batch_size), validate.concrete(num_examples)
    if size is not None and examples is not None and np.any(size > examples):
        raise ValueError(
            f"batch_size must be at most num_examples; got {batch_size!r} and "
            f"num_examples {num_examples!r}."
        )
    numbers, assumed = _setting.check(noise_multiplier, batch_size, setting)
    validate.adjacency_without_removal(setting["adjacency"])
    if size is None or examples is None:
        rate = _rate64(batch_size, num_examples)
        rate = jnp.where(rate > 0, rate, jnp.nan)  # a rate of 0 would cost nothing
    else:
        rate = np.divide(size, examples, dtype=np.float64)

    def release(beta: ArrayLike) -> pld.PLD:
        # One step on a random batch, with β times its sensitivity.
        return pld.subsampled_gdp(_shift64(beta, numbers, assumed=assumed), rate)

    def smallest_epsilon(bound: _Bound, max_n: int) -> jax.Array:
        # The smallest ε over several numbers n, each at most max_n. The bound treats
        # about the last n steps as subsampled releases.
        num_axes = max(jnp.ndim(x) for x in (*numbers, rate, delta))
        n_ratios = np.array(_N_RATIOS).reshape(-1, *[1] * num_axes)
        best_n = jax.lax.stop_gradient(_best_n64(rate, numbers, bound=bound))
        n = jnp.clip(jnp.floor(best_n * n_ratios), 1, max_n)
        beta = jax.lax.stop_gradient(_best_split64(n, rate, numbers, bound=bound))
        run_pld = pld.gaussian(_early_steps_mu64(n, beta, numbers, bound=bound))
        for factor, count in bound.releases(beta, n):
            run_pld = pld.convolve(run_pld, pld.compose(release(factor), count))
        return jnp.min(pld.epsilon(run_pld, delta), axis=0)

    # Theorem 4.8: C_{b/n}(G(L/bσ)) composed t times.
    composition = pld.epsilon(pld.compose(release(1.0), steps), delta)
    no_bound = jnp.full_like(composition, jnp.inf)
    last_split = _Bound(_early_distance, _releases_if_last_split, steps, assumed)
    all_split = _Bound(_diameter_cost, _releases_if_all_split, steps, assumed)
    return Bounds(
        composition=composition,
        contraction=smallest_epsilon(last_split, steps - 1) if steps > 1 else no_bound,
        diameter=smallest_epsilon(all_split, steps) if assumed.bounded else no_bound,
    )


def noisy_sgd_epsilon(
    noise_multiplier: ArrayLike,
    delta: ArrayLike,
    *,
    num_steps: int,
    batch_size: ArrayLike,
    num_examples: ArrayLike,
    **setting: Unpack[Setting],
) -> jax.Array:
    """The ε of the last iterate of noisy descent on random batches of fixed size.

    Args:
      noise_multiplier: the standard deviation of the noise on a batch's sum of
        gradients, divided by gradient_norm, f[*b], at least 0.
      delta: f[*b], strictly between 0 and 1.
      num_steps: t, static, at least 1.
      batch_size: b, f[*b], positive. Each batch is a uniformly random subset of b
        examples, drawn anew in each step.
      num_examples: n, the size of the data set, f[*b], at least b.
      **setting: the required keyword arguments of `Setting`. The adjacency must be
        REPLACE.

    Returns:
      ε, f[*b], rounded up: the minimum of three bounds. The first bound composes all
      steps, and also holds if all iterates are released. The two other bounds hold for
      the last iterate alone. Each of the two treats the outputs of about the last k
      steps as released, and is the minimum over up to 9 values of k. All bounds are
      computed with privacy-loss distributions (`accounting.pld`). ε is inf if the noise
      multiplier is 0, and for traced arguments out of range, with two exceptions. ε is
      0 if the noise multiplier is positive, delta is at least 1, and no other argument
      is out of range. ε is also 0 if the noise multiplier is inf and delta is 0.

    Raises:
      ValueError: a static argument is out of range, or an assumption fails.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Privacy: the last iterate alone, and anything computed from the last iterate, is
    (ε, δ)-DP under REPLACE. The batches must stay secret.

    Reference: Bok, Su and Altschuler (2024), Theorems 4.8 to 4.10 and C.13.

    Example:
      >>> from dpjax import Adjacency
      >>> epsilon = noisy_sgd_epsilon(
      ...     3.0, 1e-5, num_steps=2000, batch_size=1500, num_examples=60000,
      ...     step_size=0.05, gradient_norm=5.0, clipped=True, generalised_linear=True,
      ...     smoothness=16.0, weak_convexity=0.0, strong_convexity=0.0,
      ...     regularization=0.002, diameter=float("inf"), adjacency=Adjacency.REPLACE)
      >>> print(f"{epsilon:.2f}")
      4.44
    """
    return noisy_sgd_bounds(
        noise_multiplier,
        delta,
        num_steps=num_steps,
        batch_size=batch_size,
        num_examples=num_examples,
        **setting,
    ).best
