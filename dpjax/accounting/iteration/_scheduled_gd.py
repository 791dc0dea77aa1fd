"""The last iterate of cyclic gradient descent with schedules of steps and noise."""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import ULP, float64
from dpjax._core.typing import ArrayLike
from dpjax.accounting.iteration import _setting
from dpjax.accounting.iteration._minorant import schedule_mu
from dpjax.accounting.iteration._setting import Assumed, Numbers, Setting


@float64("up", static=("period", "assumed"), vectors=(0,))
def _scheduled_mu64(numbers: Numbers, *, period: int, assumed: Assumed) -> jax.Array:
    steps = jax.vmap(lambda each: _setting.step(each, assumed))(numbers)
    noise, batch = numbers.noise_multiplier, numbers.batch_size
    norm, eta = numbers.gradient_norm, numbers.step_size
    unit = noise * norm * eta / batch
    shift = assumed.factor * norm * eta / batch
    place = jnp.arange(unit.shape[0]) % period
    diameter = jnp.min(numbers.diameter)
    # If the constant of some step is unknown, overflows or underflows, the minorant is
    # not used, and only composition remains.
    known = jnp.all(steps.known) & jnp.all((unit > 0) & (unit < jnp.inf) & (shift > 0))
    # Shifts are divided by the largest shift, so that no square overflows.
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

    # The map runs one position at a time, since each needs the memory of a minorant.
    mus = jax.lax.map(one, jnp.arange(min(period, unit.shape[0])))
    return jnp.where(jnp.all(steps.valid), jnp.max(mus), jnp.inf)


def scheduled_cyclic_gd_mu(
    noise_multiplier: ArrayLike,
    *,
    batches_per_epoch: int,
    batch_size: ArrayLike,
    **setting: Unpack[Setting],
) -> jax.Array:
    """The GDP parameter of the last iterate of cyclic descent with schedules.

    The function extends `noisy_cyclic_gd_mu` for a fixed order to step sizes and noise
    that may be different in every step.

    Args:
      noise_multiplier: standard deviation of the noise on the batch's sum of gradients
        over gradient_norm, f[T] or a number, at least 0.
      batches_per_epoch: l, static, at least 1. Step k has batch k mod l.
      batch_size: b, by which sums are divided, positive.
      **setting: all assumptions of `Setting`, with step_size a number or f[T].
      Arguments that are not numbers must have length T.

    Returns:
      μ, f[], rounded up: the maximum over the positions of an example. The μ of a
      position is the smaller one of two bounds: that of composition, and that of
      `optimal_shift_mu`.

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
    numbers, assumed = _setting.check(noise_multiplier, batch_size, setting)
    lengths = {jnp.shape(x) for x in numbers if jnp.ndim(x) > 0}
    if len(lengths) != 1 or any(len(shape) != 1 or shape == (0,) for shape in lengths):
        raise ValueError(
            "noise_multiplier and step_size must be vectors of the same length, at "
            f"least 1, or one of them must be a number; got shapes {sorted(lengths)}."
        )
    (shape,) = lengths
    full = [
        jnp.broadcast_to(x, shape)
        if isinstance(x, jax.Array)
        else np.broadcast_to(np.asarray(x, np.float64), shape)
        for x in numbers
    ]
    return _scheduled_mu64(Numbers(*full), period=period, assumed=assumed)
