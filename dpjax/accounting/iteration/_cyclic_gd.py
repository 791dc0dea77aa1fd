"""The last iterate of noisy gradient descent, full-batch or on cyclic batches.

Steps and noise are constant, or vary by a schedule.
"""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import ULP, float64
from dpjax.accounting.iteration import _cyclic_core, _setting
from dpjax.accounting.iteration._cyclic_core import WORST_POSITION
from dpjax.accounting.iteration._minorant import schedule_mu
from dpjax.accounting.iteration._setting import Bounds, Setting


def noisy_cyclic_gd_bounds(
    noise_multiplier: jax.typing.ArrayLike,
    *,
    num_epochs: int,
    batches_per_epoch: int,
    batch_size: jax.typing.ArrayLike,
    order: _cyclic_core.Order,
    **setting: Unpack[Setting],
) -> Bounds:
    """All bounds on the last iterate of noisy gradient descent on cyclic batches.

    Args:
      noise_multiplier: noise standard deviation over gradient_norm, f[*b], at least 0.
        All arguments are as for `noisy_cyclic_gd_mu`.
      num_epochs: E, static, at least 1.
      batches_per_epoch: l, static, at least 1.
      batch_size: b, f[*b], positive.
      order: "fixed" or "reshuffled".
      **setting: all of `Setting`.

    Returns:
      `Bounds` on μ, f[*b] each. `noisy_cyclic_gd_mu` is their minimum.

    Raises:
      ValueError: as `noisy_cyclic_gd_mu`.
      TypeError: an assumption is missing.

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
    numbers, cycle, assumed = _cyclic_core.check(
        noise_multiplier,
        num_epochs=num_epochs,
        batches_per_epoch=batches_per_epoch,
        batch_size=batch_size,
        order=order,
        **setting,
    )
    static = {"cycle": cycle, "assumed": assumed}
    return Bounds(
        composition=_cyclic_core.composition64(WORST_POSITION, numbers, **static),
        contraction=_cyclic_core.contraction64(WORST_POSITION, numbers, **static),
        diameter=_cyclic_core.diameter64(WORST_POSITION, numbers, **static),
    )


def noisy_cyclic_gd_mu(
    noise_multiplier: jax.typing.ArrayLike,
    *,
    num_epochs: int,
    batches_per_epoch: int,
    batch_size: jax.typing.ArrayLike,
    order: _cyclic_core.Order,
    **setting: Unpack[Setting],
) -> jax.Array:
    """The GDP parameter of the last iterate of noisy descent on cyclic batches.

    Args:
      noise_multiplier: standard deviation of the noise on the batch's sum of gradients
        over gradient_norm, f[*b], at least 0.
      num_epochs: E, static, at least 1.
      batches_per_epoch: l, static, at least 1.
      batch_size: b, by which sums are divided, f[*b], positive.
      order: "fixed" if every epoch has the same batches in the same order; "reshuffled"
        if an example takes part in one step of each epoch, any one.
      **setting: the assumptions, all of them: see `Setting`.

    Returns:
      μ, f[*b], rounded up: the minimum of composition, the minorant, and the minorant
      from the best step at which the distance was the diameter. The value holds for the
      worst position of an example, the last of an epoch. Traced arguments out of range
      give inf.

    Raises:
      ValueError: a static argument is out of range, or an assumption fails.
      TypeError: an assumption is missing.

    Privacy: the last iterate alone, and anything computed from it, is μ-GDP under the
    adjacency. Nothing else of the run may be released.

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
    numbers, cycle, assumed = _cyclic_core.check(
        noise_multiplier,
        num_epochs=num_epochs,
        batches_per_epoch=batches_per_epoch,
        batch_size=batch_size,
        order=order,
        **setting,
    )
    return _cyclic_core.best64(WORST_POSITION, numbers, cycle=cycle, assumed=assumed)


def noisy_cyclic_gd_mus(
    noise_multiplier: jax.typing.ArrayLike,
    *,
    num_epochs: int,
    batches_per_epoch: int,
    batch_size: jax.typing.ArrayLike,
    **setting: Unpack[Setting],
) -> jax.Array:
    """The GDP parameters of the l positions that an example can have in a fixed cycle.

    Args:
      noise_multiplier: as for `noisy_cyclic_gd_mu`, f[].
      num_epochs: E, static, at least 1.
      batches_per_epoch: l, static, at least 1.
      batch_size: b, f[].
      **setting: the assumptions, f[] each: see `Setting`.

    Returns:
      μ for the first to the last batch of an epoch, f[l], rounded up. If examples were
      assigned to batches at random, `random_assignment_delta` averages over positions.

    Raises:
      ValueError: a static argument is out of range, or an assumption fails.

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
    numbers, cycle, assumed = _cyclic_core.check(
        noise_multiplier,
        num_epochs=num_epochs,
        batches_per_epoch=batches_per_epoch,
        batch_size=batch_size,
        order="fixed",
        **setting,
    )
    # Batch i of l, counted from 0, is last used l − i steps before the end, the use
    # included.
    tails = np.arange(cycle.period, 0, -1, dtype=np.float64)
    return _cyclic_core.best64(tails, numbers, cycle=cycle, assumed=assumed)


def noisy_gd_bounds(
    noise_multiplier: jax.typing.ArrayLike,
    *,
    num_steps: int,
    num_examples: jax.typing.ArrayLike,
    **setting: Unpack[Setting],
) -> Bounds:
    """All bounds on the last iterate of full-batch noisy gradient descent.

    Args:
      noise_multiplier: noise standard deviation over gradient_norm, f[*b], at least 0.
        All arguments are as for `noisy_gd_mu`.
      num_steps: T, static, at least 1.
      num_examples: n, f[*b], positive.
      **setting: all of `Setting`.

    Returns:
      `Bounds` on μ, f[*b] each. `noisy_gd_mu` is their minimum.

    Raises:
      ValueError: as `noisy_gd_mu`.
      TypeError: an assumption is missing.

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
    return noisy_cyclic_gd_bounds(
        noise_multiplier,
        num_epochs=steps,
        batches_per_epoch=1,
        batch_size=num_examples,
        order="fixed",
        **setting,
    )


def noisy_gd_mu(
    noise_multiplier: jax.typing.ArrayLike,
    *,
    num_steps: int,
    num_examples: jax.typing.ArrayLike,
    **setting: Unpack[Setting],
) -> jax.Array:
    """The GDP parameter of the last iterate of full-batch noisy gradient descent.

    Args:
      noise_multiplier: standard deviation of the noise on the sum of gradients over
        gradient_norm, f[*b], at least 0.
      num_steps: T, static, at least 1.
      num_examples: n, by which sums are divided, f[*b], positive.
      **setting: the assumptions, all of them: see `Setting`.

    Returns:
      μ, f[*b], rounded up: the minimum of composition, the minorant, and the minorant
      from the best step at which the distance was the diameter. Traced arguments out of
      range give inf.

    Raises:
      ValueError: a static argument is out of range, or an assumption fails.
      TypeError: an assumption is missing.

    Privacy: the last iterate alone, and anything computed from it, is μ-GDP under the
    adjacency. For strongly convex losses, step sizes up to 2 / (M + m) and REPLACE, no
    smaller μ holds.

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
    return noisy_cyclic_gd_mu(
        noise_multiplier,
        num_epochs=steps,
        batches_per_epoch=1,
        batch_size=num_examples,
        order="fixed",
        **setting,
    )


def last_iterate_rdp(
    noise_multiplier: jax.typing.ArrayLike,
    orders: jax.typing.ArrayLike,
    *,
    num_epochs: int,
    batches_per_epoch: int,
    batch_size: jax.typing.ArrayLike,
    order: _cyclic_core.Order,
    **setting: Unpack[Setting],
) -> jax.Array:
    """The Renyi divergence of the last iterate of cyclic DP-SGD with a proximal step.

    Losses may be weakly convex, and gradients may be clipped.

    Args:
      noise_multiplier: as for `noisy_cyclic_gd_mu`, f[*b].
      orders: a, f[*b], above 1. All arguments broadcast.
      num_epochs: E, static, at least 1.
      batches_per_epoch: l, static, at least 1.
      batch_size: b, f[*b], positive.
      order: "fixed" or "reshuffled", as for `noisy_cyclic_gd_mu`.
      **setting: the assumptions, all of them: see `Setting`.

    Returns:
      a μ²/2, f[*b], rounded up. Converting μ itself (`accounting.gdp`) loses less.

    Raises:
      ValueError: a static argument is out of range, or an assumption fails.

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
    numbers, cycle, assumed = _cyclic_core.check(
        noise_multiplier,
        num_epochs=num_epochs,
        batches_per_epoch=batches_per_epoch,
        batch_size=batch_size,
        order=order,
        **setting,
    )
    return _cyclic_core.best_rdp64(
        orders, WORST_POSITION, numbers, cycle=cycle, assumed=assumed
    )


@float64("up", static=("period", "assumed"), vectors=(0,))
def _scheduled_mu64(
    numbers: _setting.Numbers, *, period: int, assumed: _setting.Assumed
) -> jax.Array:
    steps = jax.vmap(lambda each: _setting.step(each, assumed))(numbers)
    noise, batch = numbers.noise_multiplier, numbers.batch_size
    norm, eta = numbers.gradient_norm, numbers.step_size
    unit = noise * norm * eta / batch
    shift = assumed.factor * norm * eta / batch
    place = jnp.arange(unit.shape[0]) % period
    diameter = jnp.min(numbers.diameter)
    # If some step has no Lipschitz constant, overflows or underflows, the minorant is
    # not used, and only composition remains.
    known = jnp.all(steps.known) & jnp.all((unit > 0) & (unit < jnp.inf) & (shift > 0))
    # The squares below are of shifts relative to the largest, against overflow.
    largest = jax.lax.stop_gradient(jnp.max(steps.shift))
    largest = jnp.where((largest > 0) & (largest < jnp.inf), largest, 1.0)
    unit, shift = (jnp.where(known, x, 1.0) for x in (unit, shift))
    c = jnp.where(known, jnp.exp(steps.log_lipschitz) * (1 + 4 * ULP), 1.0)

    def one(offset: jax.Array) -> jax.Array:
        used = place == offset
        square = jnp.sum(jnp.where(used, jnp.square(steps.shift / largest), 0.0))
        some = square > 0  # the square root has no derivative at 0
        composed = largest * jnp.sqrt(jnp.where(some, square, 1.0))
        composed = jnp.where(some, composed * (1 + (8 + unit.shape[0]) * ULP), 0.0)
        moved = jnp.where(used, shift, 0.0) * (1 + 8 * ULP)
        # Bok, Su and Altschuler (2024), Theorem C.3, https://arxiv.org/abs/2403.00278.
        mu = schedule_mu(c, moved, unit, diameter, bounded=assumed.bounded)
        return jnp.minimum(composed, jnp.where(known, mu, jnp.inf))

    # One position after the other, as each needs the memory of a whole minorant.
    mus = jax.lax.map(one, jnp.arange(min(period, unit.shape[0])))
    return jnp.where(jnp.all(steps.valid), jnp.max(mus), jnp.inf)


def scheduled_cyclic_gd_mu(
    noise_multiplier: jax.typing.ArrayLike,
    *,
    batches_per_epoch: int,
    batch_size: jax.typing.ArrayLike,
    **setting: Unpack[Setting],
) -> jax.Array:
    """The GDP parameter of the last iterate of cyclic descent with schedules.

    The function is `noisy_cyclic_gd_mu` for a fixed order, with step sizes and noise
    that may be different in every step.

    Args:
      noise_multiplier: standard deviation of the noise on the batch's sum of gradients
        over gradient_norm, f[T] or a number, at least 0.
      batches_per_epoch: l, static, at least 1. Step k has batch k mod l.
      batch_size: b, by which sums are divided, positive.
      **setting: the assumptions, all of them, with step_size a number or f[T]: see
        `Setting`. Arguments that are not numbers must have length T.

    Returns:
      μ, f[], rounded up: the maximum over the positions of an example. The μ of a
      position is the minimum of composition and the minorant of `optimal_shift_mu`.

    Raises:
      ValueError: a static argument is out of range, an assumption fails, or lengths
        differ.
      TypeError: an assumption is missing.

    Privacy: the last iterate alone is μ-GDP under the adjacency. Schedules must not
    depend on the data.

    Reference: Bok, Su and Altschuler (2024), Theorem C.3, at its optimal shifts.

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
    numbers, assumed = _setting.check(noise_multiplier, batch_size, **setting)
    lengths = {jnp.shape(x) for x in numbers if jnp.ndim(x) > 0}
    if len(lengths) != 1 or any(len(shape) != 1 or shape == (0,) for shape in lengths):
        raise ValueError(
            "noise_multiplier and step_size must be numbers or have one length, at "
            f"least 1 (and not both be numbers); got shapes {sorted(lengths)}."
        )
    (shape,) = lengths
    full = [
        jnp.broadcast_to(x, shape)
        if isinstance(x, jax.Array)
        else np.broadcast_to(np.asarray(x, np.float64), shape)
        for x in numbers
    ]
    return _scheduled_mu64(_setting.Numbers(*full), period=period, assumed=assumed)
