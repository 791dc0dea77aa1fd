"""Privacy of the last iterate of any noisy maps, and of descent with schedules.

In each step, a shift reduces the distance between two coupled runs on neighbouring data
sets. The cost of a shift depends on the ratio of the shift to the noise of the step.
`_minorant` computes the shifts with the least total cost, which give the smallest μ
that shifted interpolation proves.

If examples are assigned to batches once and at random, δ is the mean of the values of δ
for the positions that an example can have in an epoch.
"""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import TINY, ULP, float64
from dpjax._core.searches import bisect, implicit_derivative
from dpjax._core.typing import ArrayLike
from dpjax.accounting._numerics.gaussian import delta_of
from dpjax.accounting.iteration import _setting
from dpjax.accounting.iteration._minorant import schedule_mu
from dpjax.accounting.iteration._setting import Assumed, Numbers, Setting


@float64("up", static=("bounded",), vectors=(0, 1, 2), elementwise=True)
def _schedule_mu64(
    c: jax.Array, s: jax.Array, tau: jax.Array, diameter: jax.Array, *, bounded: bool
) -> jax.Array:
    valid = jnp.all((c >= 0) & (c < jnp.inf) & (s >= 0) & (s < jnp.inf))
    valid = valid & jnp.all((tau >= 0) & (tau < jnp.inf)) & (diameter > 0)
    # Invalid inputs are replaced before use, so that their derivatives are not NaN.
    c, s, tau = (jnp.where(valid, x, 1.0) for x in (c, s, tau))
    # Bok, Su and Altschuler (2024), Theorem C.3, at its optimal shifts (`_minorant`).
    mu = schedule_mu(c, s, tau, diameter, bounded=bounded)
    return jnp.where(valid, mu, jnp.inf)


def _repeat_number(value: ArrayLike, steps: int) -> ArrayLike:
    """Repeat a number for every step, f[steps]; a vector is returned unchanged."""
    if jnp.ndim(value) > 0:
        return value
    # For a NumPy number the result is a NumPy array, because jnp.full would round the
    # number to the caller's precision.
    return (jnp if isinstance(value, jax.Array) else np).full(steps, value)


def optimal_shift_mu(
    lipschitz: ArrayLike,
    sensitivity: ArrayLike,
    stddev: ArrayLike,
    *,
    diameter: ArrayLike = np.inf,
) -> jax.Array:
    """The GDP parameter of the last iterate of a noisy iteration, by optimal shifts.

    Step k is X_k = P_k(φ_k(X_{k−1}) + N(0, τ_k² I)), where P_k is the proximal map of a
    convex function or the projection onto a convex set. The map φ_k depends on the data
    set, and P_k does not. The result is the smallest μ that shifted interpolation can
    prove for X_T.

    Args:
      lipschitz: c_k, the Lipschitz constants of the maps φ_k, f[*b, T] for T steps, or
        a number for all steps, at least 0.
      sensitivity: s_k, f[*b, T] or a number, at least 0: the maximum of
        ‖φ_k(x) − φ′_k(x)‖ over all points x, where φ′_k is the map of step k for a
        neighbouring data set. s_k is 0 if step k does not use the differing example.
      stddev: τ_k, the standard deviation of the noise, f[*b, T] or a number, at least
        0. At least one of lipschitz, sensitivity and stddev must be a vector.
      diameter: the diameter of a set that contains all iterates, f[*b], positive; inf
        without such a set.

    Returns:
      μ, f[*b], rounded up. μ is inf if a step with s_k > 0 and all later steps have no
      noise, and for traced arguments out of range. With a diameter, the bound may
      ignore all steps up to some step k, and use the diameter as the distance after
      step k. At most 65,535 values of k are compared. For more than 65,535 steps, μ may
      therefore be above the minimum over all k.

    Raises:
      ValueError: a static argument is out of range, lengths differ, a vector is empty,
        or lipschitz, sensitivity and stddev are all numbers.

    Privacy: the last iterate alone is μ-GDP, for all maps that satisfy the assumptions.
    The Rényi divergence of order a of the last iterate is at most a μ²/2.

    Reference: Bok, Su and Altschuler (2024), Theorem C.3, with optimal shifts. The
    shifts follow from the greatest convex minorant of the points
    (Σ_{i<=k} w_i² τ_i², Σ_{i<=k} w_i s_i), where w_k = Π_{j>k} c_j is a product.

    Example:
      >>> import numpy as np
      >>> step_sizes = 0.1 / np.sqrt(1 + np.arange(1000))
      >>> mu = optimal_shift_mu(
      ...     1 - step_sizes, 2 * step_sizes, 10 * step_sizes, diameter=1.0)
      >>> print(f"{mu:.3f}")  # composition has 6.325
      4.254
    """
    arguments = {"lipschitz": lipschitz, "sensitivity": sensitivity, "stddev": stddev}
    lengths = {}
    for name, value in arguments.items():
        validate.nonnegative(name, value)
        if jnp.ndim(value) > 0:
            lengths[name] = jnp.shape(value)[-1]
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(
            "lipschitz, sensitivity and stddev must be vectors of the same length, "
            "at least 1, or numbers, and at least one must be a vector; got lengths "
            f"{lengths}."
        )
    bounded = validate.diameter(diameter)
    (steps,) = set(lengths.values())
    vectors = (_repeat_number(value, steps) for value in arguments.values())
    return _schedule_mu64(*vectors, diameter, bounded=bounded)


@float64("up", static=("period", "assumed"), vectors=(0,))
def _scheduled_mu64(numbers: Numbers, *, period: int, assumed: Assumed) -> jax.Array:
    steps = jax.vmap(lambda each: _setting.step(each, assumed))(numbers)
    noise, batch = numbers.noise_multiplier, numbers.batch_size
    norm, eta = numbers.gradient_norm, numbers.step_size
    unit = noise * norm * eta / batch
    shift = assumed.factor * norm * eta / batch
    positions = jnp.arange(unit.shape[0]) % period
    diameter = jnp.max(numbers.diameter)
    # The minorant needs the Lipschitz constants of all steps, and noise and shifts that
    # do not overflow or underflow. Otherwise, only composition remains.
    usable = jnp.all((unit > 0) & (unit < jnp.inf) & (shift > 0))
    usable &= jnp.all(steps.finite_lipschitz)
    # Shifts are divided by the largest shift, so that no square overflows.
    largest = jax.lax.stop_gradient(jnp.max(steps.shift))
    largest = jnp.where((largest > 0) & (largest < jnp.inf), largest, 1.0)
    unit, shift = (jnp.where(usable, x, 1.0) for x in (unit, shift))
    c = jnp.where(usable, jnp.exp(steps.log_lipschitz) * (1 + 4 * ULP), 1.0)

    def mu_of_position(position: jax.Array) -> jax.Array:
        active = positions == position
        square = jnp.sum(jnp.where(active, jnp.square(steps.shift / largest), 0.0))
        positive = square > 0  # the square root has no derivative at 0
        composition = largest * jnp.sqrt(jnp.where(positive, square, 1.0))
        composition *= 1 + (8 + unit.shape[0]) * ULP
        composition = jnp.where(positive, composition, 0.0)
        sensitivity = jnp.where(active, shift, 0.0) * (1 + 8 * ULP)
        # Bok, Su and Altschuler (2024), Theorem C.3, https://arxiv.org/abs/2403.00278.
        mu = schedule_mu(c, sensitivity, unit, diameter, bounded=assumed.bounded)
        return jnp.minimum(composition, jnp.where(usable, mu, jnp.inf))

    # The positions are computed in sequence, since each position needs the memory of a
    # minorant.
    mus = jax.lax.map(mu_of_position, jnp.arange(min(period, unit.shape[0])))
    return jnp.where(jnp.all(steps.valid), jnp.max(mus), jnp.inf)


def scheduled_cyclic_gd_mu(
    noise_multiplier: ArrayLike,
    *,
    batches_per_epoch: int,
    batch_size: ArrayLike,
    **setting: Unpack[Setting],
) -> jax.Array:
    """The GDP parameter of the last iterate of cyclic descent with schedules.

    The order of batches is fixed, as for `noisy_cyclic_gd_mu` with order="fixed". Step
    sizes and noise may be different in each of the T steps.

    Args:
      noise_multiplier: the standard deviation of the noise on a batch's sum of
        gradients, divided by gradient_norm, f[T] or a number, at least 0.
      batches_per_epoch: l, static, at least 1. Step k, counted from 0, uses batch
        k mod l.
      batch_size: b, positive, f[T] or a number. A step divides the sum of gradients by
        b.
      **setting: the required keyword arguments of `Setting`. Each numeric argument is
        f[T] or a number. At least one of noise_multiplier, batch_size and these
        arguments must be a vector. Of several diameters, the largest diameter bounds
        the distance of two iterates.

    Returns:
      μ, f[], rounded up: the maximum over the positions that an example can have in an
      epoch, which are the batches 0 to l − 1. The μ of a position is the minimum of two
      bounds: the μ of the composition of all steps, and the μ of `optimal_shift_mu`.
      μ is inf if the noise multiplier of any step is 0, and for traced arguments out of
      range.

    Raises:
      ValueError: a static argument is out of range, an assumption fails, lengths
        differ, a vector is empty, or no argument is a vector.
      TypeError: an assumption is missing or unknown. This error is also a ValueError.

    Privacy: the last iterate alone is μ-GDP under the given adjacency. Schedules must
    not depend on the data.

    Reference: Bok, Su and Altschuler (2024), Theorem C.3, with optimal shifts.

    Example:
      >>> import numpy as np
      >>> from dpjax import Adjacency
      >>> mu = scheduled_cyclic_gd_mu(
      ...     2.0, batches_per_epoch=10, batch_size=20,
      ...     step_size=0.5 / np.sqrt(1 + np.arange(100)), gradient_norm=1.0,
      ...     clipped=False, generalised_linear=True, smoothness=1.0,
      ...     weak_convexity=0.0, strong_convexity=0.0, regularization=0.1,
      ...     diameter=float("inf"), adjacency=Adjacency.REPLACE)
      >>> print(f"{mu:.3f}")  # composition has 3.162
      1.396
    """
    period = validate.static_int("batches_per_epoch", batches_per_epoch, minimum=1)
    validate.positive("batch_size", batch_size)
    numbers, assumed = _setting.check(noise_multiplier, batch_size, setting)
    shapes = {jnp.shape(x) for x in numbers if jnp.ndim(x) > 0}
    if len(shapes) != 1 or any(len(shape) != 1 or shape == (0,) for shape in shapes):
        raise ValueError(
            "noise_multiplier, batch_size and the numbers of the setting must be "
            "numbers or vectors of the same length, at least 1, and at least one must "
            f"be a vector; got shapes {sorted(shapes)}."
        )
    (shape,) = shapes
    vectors = (_repeat_number(x, *shape) for x in numbers)
    return _scheduled_mu64(Numbers(*vectors), period=period, assumed=assumed)


_HALVINGS = 80  # more than the 53 bits of a float64


def _mean_delta(mus: jax.Array, epsilon: jax.Array) -> jax.Array:
    deltas = jnp.vectorize(delta_of)(mus, epsilon)
    # The mean is rounded up, and positive even after an underflow if a δ is positive.
    mean = jnp.mean(deltas) * (1 + (8 + mus.shape[0]) * ULP)
    mean = jnp.maximum(mean, jnp.where(jnp.max(deltas) > 0, TINY, 0.0))
    return jnp.minimum(mean, 1.0)


_delta64 = float64("up", vectors=(0,), elementwise=True)(_mean_delta)


@float64("up", vectors=(0,), elementwise=True)
def _epsilon64(mus: jax.Array, delta: jax.Array) -> jax.Array:
    constant_mus, target = jax.lax.stop_gradient((mus, delta))
    zero, start = jnp.zeros_like(delta), jnp.ones_like(delta)

    def suffices(epsilon: jax.Array) -> jax.Array:
        return _mean_delta(constant_mus, epsilon) <= target

    # Double ε until its δ is at most the goal, then bisect. The goal has a derivative
    # only through the implicit function theorem below.
    high = jax.lax.while_loop(
        lambda high: ~suffices(high) & (high < jnp.inf), lambda high: 2 * high, start
    )
    finite = high < jnp.inf
    low = jnp.where(high > 1, high / 2, 0.0)
    root = bisect(suffices, low, jnp.where(finite, high, start), _HALVINGS)
    root = jnp.where(suffices(zero), zero, jnp.where(finite, root, jnp.inf))
    on_curve = (root > 0) & finite & (target > 0)
    root = implicit_derivative(lambda e: _mean_delta(mus, e) - delta, root, on_curve)
    return jnp.where(delta > 0, root, jnp.inf)


def _check(mus: ArrayLike) -> None:
    if jnp.ndim(mus) == 0 or jnp.shape(mus)[-1] == 0:
        raise ValueError(f"mus must have a non-empty last axis; got {mus!r}.")
    validate.nonnegative("mus", mus, finite=False)


def random_assignment_delta(mus: ArrayLike, epsilon: ArrayLike) -> jax.Array:
    """The δ of a run that assigned examples to positions in an epoch once, at random.

    Args:
      mus: the GDP parameter at each of l positions, f[*b, l], at least 0, from
        `noisy_cyclic_gd_mus`.
      epsilon: ε, f[*b], at least 0.

    Returns:
      The mean of δ(ε) over the l positions, f[*b], rounded up. At a position with the
      GDP parameter μ, δ(ε) is the δ of μ-GDP, and 1 for a traced μ that is NaN or
      negative. The result is 1 for a traced ε that is NaN or negative.

    Raises:
      ValueError: a static argument is out of range, or mus is a number or has an empty
        last axis.

    Privacy: the δ assumes that, for any data, every example has each position with the
    same probability, and that the assignment stays secret. The δ of the worst position
    needs neither assumption.

    Example:
      >>> import numpy as np
      >>> print(f"{random_assignment_delta(np.array([0.2, 0.4, 1.0]), 1.0):.4f}")
      0.0427
    """
    _check(mus)
    validate.nonnegative("epsilon", epsilon, finite=False)
    return _delta64(mus, epsilon)


def random_assignment_epsilon(mus: ArrayLike, delta: ArrayLike) -> jax.Array:
    """The ε of a run that assigned examples to positions in an epoch once, at random.

    Args:
      mus: the GDP parameter at each of l positions, f[*b, l], at least 0, from
        `noisy_cyclic_gd_mus`.
      delta: δ, f[*b], strictly between 0 and 1.

    Returns:
      The least ε with `random_assignment_delta(mus, ε) <= δ`, f[*b], rounded up. The
      result is inf if no ε satisfies this inequality, and for a traced δ that is NaN or
      at most 0. The result is 0 for a traced δ of at least 1.

    Raises:
      ValueError: a static argument is out of range, or mus is a number or has an empty
        last axis.

    Privacy: the assumptions are those of `random_assignment_delta`.

    Example:
      >>> import numpy as np
      >>> print(f"{random_assignment_epsilon(np.array([0.2, 0.4, 1.0]), 1e-5):.3f}")
      4.113
    """
    _check(mus)
    validate.open_unit("delta", delta)
    return _epsilon64(mus, delta)
