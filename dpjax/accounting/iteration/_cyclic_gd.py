"""Privacy of the last iterate of gradient descent on full batches or batch cycles.

Each bound is a separate function of the run's numbers and of an example's *tail*. The
tail of an example is 1 plus the number of steps after the last step that uses the
example. The examples of the last batch of an epoch have the shortest tail, 1, and the
worst position, because no later step's noise hides their last use.

Step sizes and noise are the same in all steps; `_shifts` has a bound for schedules. For
descent without noise, `gradient_descent_sensitivity` bounds the distance by which one
example moves the last iterate.
"""

from collections.abc import Callable
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import TINY, ULP, float64
from dpjax._core.typing import ArrayLike
from dpjax.accounting.iteration import _periodic, _setting
from dpjax.accounting.iteration._minorant import HUGE
from dpjax.accounting.iteration._periodic import Cycle
from dpjax.accounting.iteration._setting import Assumed, Bounds, Numbers, Setting, Step

Order = Literal["fixed", "reshuffled"]
_WORST_POSITION = 1.0  # the shortest tail


def _finish(square: jax.Array, shift: jax.Array, cycle: Cycle) -> jax.Array:
    """The GDP parameter μ from square = μ² / shift², rounded up; 0 only if shift is 0.

    The shift is the distance by which one example can move the iterate in a step,
    divided by the standard deviation of the step's noise. The bound on rounding errors
    depends on the numbers of epochs and of batches in `cycle`.
    """
    # The margin is above the rounding errors of sums over one epoch and over epochs.
    square = (1 + (cycle.period + cycle.epochs) * ULP) * square
    regular = (square > 0) & (square < jnp.inf)
    root = jnp.sqrt(jnp.where(regular, square, 1.0)) * (1 + 256 * ULP)
    root = jnp.where(regular, root, jnp.where(square == 0, 0.0, jnp.inf))  # NaN: inf
    has_shift = shift > 0
    mu = jnp.where(has_shift, shift, 1.0) * root
    return jnp.where(has_shift, jnp.maximum(mu, TINY), 0.0)


# Each of these functions returns a bound on μ. The argument `tail` is the tail of an
# example (see the module's docstring).


def _composition(step: Step, tail: jax.Array, cycle: Cycle):
    # Bok, Su and Altschuler (2024), Theorems 4.1 and 4.4,
    # https://arxiv.org/abs/2403.00278: (L/bσ) sqrt(E).
    return step.shift * np.sqrt(cycle.epochs) * (1 + 4 * ULP)


def _contraction(step: Step, tail: jax.Array, cycle: Cycle):
    # Bok, Su and Altschuler (2024), Theorems 4.2 and 4.5, and Kong and Ribero (2024),
    # Proposition 2.2, https://arxiv.org/abs/2407.05237, at the optimal shifts
    # (`_periodic`). A bound is proportional to the shift if the ratio of diameter and
    # shift is fixed. `_periodic` therefore computes bounds for a shift of 1.
    square = _periodic.contraction_bound(step.log_lipschitz, tail, cycle)
    return jnp.where(step.finite_lipschitz, _finish(square, step.shift, cycle), jnp.inf)


def _diameter(step: Step, tail: jax.Array, cycle: Cycle):
    if not cycle.assumed.bounded:
        return jnp.full_like(step.shift, jnp.inf)
    # Bok, Su and Altschuler (2024), Theorems 4.3 and 4.6, and Kong and Ribero (2024),
    # Theorem 4.4, from the best restart. A diameter whose square would underflow is
    # replaced by a larger diameter, and a diameter whose square would overflow is
    # ignored.
    start = step.diameter / jnp.where(step.shift > 0, step.shift, 1.0)
    usable = step.bounded & (start < HUGE)
    start = jnp.maximum(jnp.where(usable, start, 1.0), 1 / HUGE)
    # For a shift of 0, μ is 0 for every start, so that 1 can replace the shift above.
    square = _periodic.restart_bound(step.log_lipschitz, start, tail, cycle)
    return jnp.where(usable, _finish(square, step.shift, cycle), jnp.inf)


def _best(step: Step, tail: jax.Array, cycle: Cycle) -> jax.Array:
    # Where finite, the contraction bound is at most composition. The code takes no
    # minimum, so that the derivatives are correct where the two bounds are equal.
    contraction = _contraction(step, tail, cycle)
    composition = _composition(step, tail, cycle)
    without_diameter = jnp.where(contraction < jnp.inf, contraction, composition)
    return jnp.minimum(without_diameter, _diameter(step, tail, cycle))


_Bound = Callable[[Step, jax.Array, Cycle], jax.Array]


def _mu(tail: jax.Array, numbers: Numbers, *, bound: _Bound, cycle: Cycle):
    """A bound on μ for an example with a given tail; inf for invalid numbers of a run.

    The tail is 1 plus the number of steps after the last step that uses the example.
    `bound` computes the bound from a step's numbers, the tail and the cycle of batches.
    """
    step = _setting.step(numbers, cycle.assumed)
    clipped_tail = jnp.clip(tail, 1, cycle.period).astype(jnp.int32)
    return jnp.where(step.valid, bound(step, clipped_tail, cycle), jnp.inf)


_mu64 = float64("up", static=("bound", "cycle"), elementwise=True)(_mu)


@float64("up", static=("cycle",), elementwise=True)
def _rdp64(orders: jax.Array, tail: jax.Array, numbers: Numbers, *, cycle: Cycle):
    """The bound a μ²/2 on the Rényi divergence of the last iterate, for orders a.

    Here μ is the smallest of this module's bounds on the GDP parameter (`_best`). The
    tail is 1 plus the number of steps after the last step that uses the example.
    """
    mu = _mu(tail, numbers, bound=_best, cycle=cycle)
    finite = mu < jnp.inf
    value = orders * jnp.square(jnp.where(finite, mu, 1.0)) / 2 * (1 + 4 * ULP)
    value = jnp.where(mu > 0, jnp.maximum(value, TINY), 0.0)
    return jnp.where((orders > 0) & finite, value, jnp.inf)


def _bounds(numbers: Numbers[ArrayLike], cycle: Cycle) -> Bounds:
    """All bounds on μ for an example at the worst positions in the epochs."""

    def evaluate(bound: _Bound) -> jax.Array:
        return _mu64(_WORST_POSITION, numbers, bound=bound, cycle=cycle)

    return Bounds(*map(evaluate, (_composition, _contraction, _diameter)))


def _check(
    noise_multiplier: ArrayLike,
    num_epochs: int,
    batches_per_epoch: int,
    batch_size: ArrayLike,
    order: Order,
    setting: Setting,
) -> tuple[Numbers[ArrayLike], Cycle]:
    """Check the arguments, and return the numbers and the static description of a run.

    Raises:
      ValueError: an argument is invalid, or an assumption fails.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.
    """
    epochs = validate.static_int("num_epochs", num_epochs, minimum=1)
    period = validate.static_int("batches_per_epoch", batches_per_epoch, minimum=1)
    validate.positive("batch_size", batch_size)
    validate.one_of("order", order, ("fixed", "reshuffled"))
    numbers, assumed = _setting.check(noise_multiplier, batch_size, setting)
    return numbers, Cycle(epochs, period, order == "reshuffled", assumed)


def noisy_cyclic_gd_bounds(
    noise_multiplier: ArrayLike,
    *,
    num_epochs: int,
    batches_per_epoch: int,
    batch_size: ArrayLike,
    order: Order,
    **setting: Unpack[Setting],
) -> Bounds:
    """All bounds on the μ of the last iterate of noisy descent on a cycle of batches.

    Args:
      noise_multiplier: the standard deviation of the noise on a batch's sum of
        gradients, divided by gradient_norm, f[*b], at least 0.
      num_epochs: E, static, at least 1.
      batches_per_epoch: l, static, at least 1.
      batch_size: b, positive, f[*b]. A step divides the sum of gradients by b.
      order: "fixed" or "reshuffled", as for `noisy_cyclic_gd_mu`.
      **setting: the required keyword arguments of `Setting`.

    Returns:
      `Bounds` on μ, f[*b] each. `noisy_cyclic_gd_mu` returns the minimum of the bounds.

    Raises:
      ValueError: as for `noisy_cyclic_gd_mu`.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Example:
      >>> from dpjax import Adjacency
      >>> noisy_cyclic_gd_bounds(
      ...     3.0, num_epochs=50, batches_per_epoch=40, batch_size=1500, order="fixed",
      ...     step_size=0.05, gradient_norm=5.0, clipped=True, generalised_linear=True,
      ...     smoothness=16.0, weak_convexity=0.0, strong_convexity=0.0,
      ...     regularization=0.002, diameter=float("inf"),
      ...     adjacency=Adjacency.REPLACE).winner
      'contraction'
    """
    numbers, cycle = _check(
        noise_multiplier, num_epochs, batches_per_epoch, batch_size, order, setting
    )
    return _bounds(numbers, cycle)


def noisy_cyclic_gd_mu(
    noise_multiplier: ArrayLike,
    *,
    num_epochs: int,
    batches_per_epoch: int,
    batch_size: ArrayLike,
    order: Order,
    **setting: Unpack[Setting],
) -> jax.Array:
    """The GDP parameter of the last iterate of noisy descent on a cycle of batches.

    Args:
      noise_multiplier: the standard deviation of the noise on a batch's sum of
        gradients, divided by gradient_norm, f[*b], at least 0.
      num_epochs: E, static, at least 1.
      batches_per_epoch: l, static, at least 1.
      batch_size: b, positive, f[*b]. A step divides the sum of gradients by b.
      order: "fixed" if every epoch has the same batches in the same order; "reshuffled"
        if an example takes part in one step of each epoch, which may be any step.
      **setting: the required keyword arguments of `Setting`.

    Returns:
      μ, f[*b], rounded up: the smallest of three bounds. The first bound is the μ of
      the composition of all steps. The two other bounds couple the runs on two
      neighbouring data sets. In a step, a shift reduces the distance between the two
      runs, at a cost in μ. The two bounds use the shifts with the least total cost. The
      second bound has shifts in all steps. The third bound has shifts only in the last
      steps, before which the two runs are at most `diameter` apart. μ is computed for
      the worst batches of an example, and therefore holds for every example. In a fixed
      order, the last batch of an epoch is the worst. μ is inf if the noise multiplier
      is 0, and for traced arguments out of range.

    Raises:
      ValueError: a static argument is out of range, or an assumption fails.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Privacy: the last iterate alone, and anything computed from the last iterate, is
    μ-GDP under the given adjacency. No other value of the run may be released.

    Reference: Bok, Su and Altschuler (2024), Theorems 4.4 to 4.6, with optimal shifts;
    Kong and Ribero (2024), Theorem 4.5, with the constant of `clipped_step_lipschitz`.

    Example:
      >>> from dpjax import Adjacency
      >>> setting = dict(
      ...     step_size=0.05, gradient_norm=5.0, clipped=True, generalised_linear=True,
      ...     smoothness=16.0, weak_convexity=0.0, strong_convexity=0.0,
      ...     regularization=0.002, diameter=float("inf"), adjacency=Adjacency.REPLACE)
      >>> mu = noisy_cyclic_gd_mu(
      ...     3.0, num_epochs=50, batches_per_epoch=40, batch_size=1500, order="fixed",
      ...     **setting)
      >>> print(f"{mu:.3f}")  # composition has 4.714
      0.992
    """
    numbers, cycle = _check(
        noise_multiplier, num_epochs, batches_per_epoch, batch_size, order, setting
    )
    return _mu64(_WORST_POSITION, numbers, bound=_best, cycle=cycle)


def noisy_cyclic_gd_mus(
    noise_multiplier: ArrayLike,
    *,
    num_epochs: int,
    batches_per_epoch: int,
    batch_size: ArrayLike,
    **setting: Unpack[Setting],
) -> jax.Array:
    """The GDP parameters of the last iterate for an example in each batch of an epoch.

    The run is that of `noisy_cyclic_gd_mu` with order="fixed".

    Args:
      noise_multiplier: the standard deviation of the noise on a batch's sum of
        gradients, divided by gradient_norm, f[], at least 0.
      num_epochs: E, static, at least 1.
      batches_per_epoch: l, static, at least 1.
      batch_size: b, positive, f[]. A step divides the sum of gradients by b.
      **setting: the required keyword arguments of `Setting`, f[] each.

    Returns:
      The μ of an example in the first, …, last batch of an epoch, f[l], rounded up. If
      examples were assigned to batches at random, `random_assignment_delta` computes
      the mean of δ over the l batches. μ is inf if the noise multiplier is 0, and for
      traced arguments out of range.

    Raises:
      ValueError: a static argument is out of range, an assumption fails, or an argument
        is an array with axes.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Example:
      >>> from dpjax import Adjacency
      >>> mus = noisy_cyclic_gd_mus(
      ...     3.0, num_epochs=50, batches_per_epoch=4, batch_size=100,
      ...     step_size=0.05, gradient_norm=1.0, clipped=True, generalised_linear=True,
      ...     smoothness=1.0, weak_convexity=0.0, strong_convexity=0.0,
      ...     regularization=0.2, diameter=float("inf"),
      ...     adjacency=Adjacency.ZERO_OUT)
      >>> print(" ".join(f"{mu:.3f}" for mu in mus))
      1.012 1.022 1.033 1.060
    """
    numbers, cycle = _check(
        noise_multiplier, num_epochs, batches_per_epoch, batch_size, "fixed", setting
    )
    if any(map(jnp.ndim, numbers)):  # a vector would be paired with the positions
        raise ValueError("every argument must be one number, not an array with axes.")
    # The last use of batch i of l, counted from 0, precedes l − i − 1 steps, so that
    # the tail is l − i.
    tails = np.arange(cycle.period, 0, -1, dtype=np.float64)
    return _mu64(tails, numbers, bound=_best, cycle=cycle)


def noisy_gd_bounds(
    noise_multiplier: ArrayLike,
    *,
    num_steps: int,
    num_examples: ArrayLike,
    **setting: Unpack[Setting],
) -> Bounds:
    """All bounds on the μ of the last iterate of full-batch noisy gradient descent.

    Args:
      noise_multiplier: the standard deviation of the noise on the sum of gradients,
        divided by gradient_norm, f[*b], at least 0.
      num_steps: T, static, at least 1.
      num_examples: n, positive, f[*b]. A step divides the sum of gradients by n.
      **setting: the required keyword arguments of `Setting`.

    Returns:
      `Bounds` on μ, f[*b] each. `noisy_gd_mu` returns the minimum of the bounds.

    Raises:
      ValueError: a static argument is out of range, or an assumption fails.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Example:
      >>> from dpjax import Adjacency
      >>> noisy_gd_bounds(
      ...     10.0, num_steps=100, num_examples=500, step_size=0.1, gradient_norm=1.0,
      ...     clipped=False, generalised_linear=False, smoothness=10.0,
      ...     weak_convexity=0.0, strong_convexity=0.0, regularization=0.0,
      ...     diameter=0.001, adjacency=Adjacency.REPLACE).winner
      'diameter'
    """
    steps = validate.static_int("num_steps", num_steps, minimum=1)
    validate.positive("num_examples", num_examples)
    numbers, cycle = _check(noise_multiplier, steps, 1, num_examples, "fixed", setting)
    return _bounds(numbers, cycle)


def noisy_gd_mu(
    noise_multiplier: ArrayLike,
    *,
    num_steps: int,
    num_examples: ArrayLike,
    **setting: Unpack[Setting],
) -> jax.Array:
    """The GDP parameter of the last iterate of full-batch noisy gradient descent.

    Args:
      noise_multiplier: the standard deviation of the noise on the sum of gradients,
        divided by gradient_norm, f[*b], at least 0.
      num_steps: T, static, at least 1.
      num_examples: n, positive, f[*b]. A step divides the sum of gradients by n.
      **setting: the required keyword arguments of `Setting`.

    Returns:
      μ, f[*b], rounded up: the smallest of three bounds. The first bound is the μ of
      the composition of all steps. The two other bounds couple the runs on two
      neighbouring data sets. In a step, a shift reduces the distance between the two
      runs, at a cost in μ. The two bounds use the shifts with the least total cost. The
      second bound has shifts in all steps. The third bound has shifts only in the last
      steps, before which the two runs are at most `diameter` apart. μ is inf if the
      noise multiplier is 0, and for traced arguments out of range.

    Raises:
      ValueError: a static argument is out of range, or an assumption fails.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Privacy: the last iterate alone, and anything computed from the last iterate, is
    μ-GDP under the given adjacency. Let m and M be the least and the largest curvature
    of an example's loss with the regulariser. μ is exact under the following
    conditions: the adjacency is REPLACE; m is positive; the step size is at most
    2 / (M + m); the diameter is inf; weak_convexity is 0; and gradients are not
    clipped, or the loss is generalised linear.

    Reference: Bok, Su and Altschuler (2024), Theorems 4.1 to 4.3, with optimal shifts.

    Example:
      >>> from dpjax import Adjacency
      >>> mu = noisy_gd_mu(
      ...     20.0, num_steps=160, num_examples=100, step_size=0.05, gradient_norm=1.0,
      ...     clipped=False, generalised_linear=False, smoothness=10.0,
      ...     weak_convexity=0.0, strong_convexity=1.0, regularization=0.0,
      ...     diameter=float("inf"), adjacency=Adjacency.REPLACE)
      >>> print(f"{mu:.4f}")  # composition has 1.2649
      0.6243
    """
    steps = validate.static_int("num_steps", num_steps, minimum=1)
    validate.positive("num_examples", num_examples)
    numbers, cycle = _check(noise_multiplier, steps, 1, num_examples, "fixed", setting)
    return _mu64(_WORST_POSITION, numbers, bound=_best, cycle=cycle)


def last_iterate_rdp(
    noise_multiplier: ArrayLike,
    orders: ArrayLike,
    *,
    num_epochs: int,
    batches_per_epoch: int,
    batch_size: ArrayLike,
    order: Order,
    **setting: Unpack[Setting],
) -> jax.Array:
    """Bound the Rényi divergence of the last iterate of cyclic noisy descent.

    Losses may be weakly convex, and gradients may be clipped.

    Args:
      noise_multiplier: the standard deviation of the noise on a batch's sum of
        gradients, divided by gradient_norm, f[*b], at least 0.
      orders: a, the orders of the divergence, f[*b], above 1. All arguments broadcast.
      num_epochs: E, static, at least 1.
      batches_per_epoch: l, static, at least 1.
      batch_size: b, positive, f[*b]. A step divides the sum of gradients by b.
      order: "fixed" if every epoch has the same batches in the same order; "reshuffled"
        if an example takes part in one step of each epoch, which may be any step.
      **setting: the required keyword arguments of `Setting`.

    Returns:
      a μ²/2, f[*b], rounded up, with the μ of `noisy_cyclic_gd_mu`. The result is inf
      where μ is inf, and for a traced order that is NaN or at most 0. To obtain ε,
      convert μ by `accounting.gdp`, since the ε from the divergence is larger.

    Raises:
      ValueError: a static argument is out of range, or an assumption fails.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Reference: Kong and Ribero (2024), Theorems 4.3 to 4.5, with optimal shifts and with
    the constant of `clipped_step_lipschitz` in place of their Proposition 3.4(b).

    Example:
      >>> from dpjax import Adjacency
      >>> rdp = last_iterate_rdp(
      ...     2.0, 8.0, num_epochs=10, batches_per_epoch=50, batch_size=32,
      ...     order="fixed", step_size=0.1, gradient_norm=1.0, clipped=True,
      ...     generalised_linear=False, smoothness=1.0, weak_convexity=0.5,
      ...     strong_convexity=0.0, regularization=0.0, diameter=float("inf"),
      ...     adjacency=Adjacency.REPLACE)
      >>> print(f"{rdp:.2f}")  # composition has 40
      7.37
    """
    if (given := validate.concrete(orders)) is not None and not np.all(given > 1):
        raise ValueError(f"orders must be above 1; got {orders!r}.")
    numbers, cycle = _check(
        noise_multiplier, num_epochs, batches_per_epoch, batch_size, order, setting
    )
    return _rdp64(orders, _WORST_POSITION, numbers, cycle=cycle)


@float64("up", static=("assumed",), elementwise=True)
def _sensitivity64(
    count: jax.Array, numbers: Numbers, *, assumed: Assumed
) -> jax.Array:
    step = _setting.step(numbers, assumed)
    examples, eta, norm = (
        jnp.where(step.valid, x, 1.0)
        for x in (numbers.batch_size, numbers.step_size, numbers.gradient_norm)
    )
    valid_count = (count >= 1) & (count < jnp.inf)
    count = jnp.where(valid_count, count, 1.0)
    # Zhang, Zheng, Mou and Wang (2017), Lemmas 2 and 3,
    # https://arxiv.org/abs/1703.09947, with Δ_{t+1} <= c Δ_t + ηsC/n in place of their
    # recursion: (ηsC/n) Σ_{k<T} c^k.
    y = step.log_lipschitz
    power_sum = _periodic.power_sum(y, jnp.zeros_like(count), count - 1)
    power_sum = power_sum * (1 + 64 * ULP) + 8 * ULP * count * jnp.abs(y) * power_sum
    distance = assumed.factor * eta * norm / examples * power_sum * (1 + 8 * ULP)
    diameter = jnp.where(step.bounded, numbers.diameter, jnp.inf)
    distance = jnp.where(step.finite_lipschitz, distance, jnp.inf)
    return jnp.where(step.valid & valid_count, jnp.minimum(distance, diameter), jnp.inf)


def gradient_descent_sensitivity(
    *, num_steps: ArrayLike, num_examples: ArrayLike, **setting: Unpack[Setting]
) -> jax.Array:
    """Bound the L2 sensitivity of the last iterate of full-batch gradient descent.

    The steps have no noise. The L2 sensitivity is the largest distance between the last
    iterates for two neighbouring data sets.

    Args:
      num_steps: T, f[*b], whole numbers, at least 1. A traced value that is not whole
        is rounded up, and derivatives are taken at the rounded value.
      num_examples: n, positive, f[*b]. A step divides the sum of gradients by n.
      **setting: the required keyword arguments of `Setting`.

    Returns:
      An L2 distance Δ, f[*b], rounded up: the minimum of (s η C / n) Σ_{k<T} c^k and
      the diameter. Here η is the step size, C is gradient_norm, s is 2 under REPLACE
      and 1 otherwise, and c is the Lipschitz constant of a step. Δ is inf where
      smoothness is inf, even if the diameter is finite, and for traced arguments out of
      range.

    Raises:
      ValueError: a static argument is out of range, or an assumption fails.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Reference: Zhang, Zheng, Mou and Wang (2017), Lemmas 2 and 3, with smaller
    constants: s is at most 2 in place of 3. For curvatures from m > 0 to M and step
    sizes of at most 2 / (M + m), s η Σ_k c^k is at most 2 / m in place of
    5 (M + m) / (m M).

    Example:
      >>> from dpjax import Adjacency
      >>> distance = gradient_descent_sensitivity(
      ...     num_steps=1000, num_examples=500, step_size=1.0, gradient_norm=1.0,
      ...     clipped=False, generalised_linear=True, smoothness=0.25,
      ...     weak_convexity=0.0, strong_convexity=0.0, regularization=0.1,
      ...     diameter=float("inf"), adjacency=Adjacency.REPLACE)
      >>> print(f"{distance:.4f}")
      0.0400
    """
    validate.positive("num_steps", num_steps)
    num_steps = validate.whole_count("num_steps", num_steps)
    validate.positive("num_examples", num_examples)
    numbers, assumed = _setting.check(1.0, num_examples, setting)
    return _sensitivity64(num_steps, numbers, assumed=assumed)
