"""The sensitivity of the last iterate of gradient descent without noise."""

from typing import Unpack

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.float64 import ULP, float64
from dpjax._core.typing import ArrayLike
from dpjax.accounting.iteration import _setting
from dpjax.accounting.iteration._periodic import geometric
from dpjax.accounting.iteration._setting import Assumed, Numbers, Setting


@float64("up", static=("assumed",), elementwise=True)
def _sensitivity64(
    count: jax.Array, numbers: Numbers, *, assumed: Assumed
) -> jax.Array:
    step = _setting.step(numbers, assumed)
    examples, eta, norm = (
        jnp.where(step.valid, x, 1.0)
        for x in (numbers.batch_size, numbers.step_size, numbers.gradient_norm)
    )
    counted = (count >= 1) & (count < jnp.inf)
    count = jnp.where(counted, count, 1.0)
    y = step.log_lipschitz
    down, up = jnp.minimum(y, 0.0), jnp.maximum(y, 0.0)
    # Zhang, Zheng, Mou and Wang (2017), Lemmas 2 and 3,
    # https://arxiv.org/abs/1703.09947, with Δ_{t+1} <= c Δ_t + ηsC/n in place of their
    # recursion: (ηsC/n) Σ_{k<T} c^k. For c > 1 the sum starts from its largest power,
    # so that `geometric` gets decreasing terms.
    rising = jnp.exp((count - 1) * up) * geometric(-up, count)
    total = jnp.where(y <= 0, geometric(down, count), rising)
    total = total * (1 + 64 * ULP) + 8 * ULP * count * jnp.abs(y) * total
    distance = assumed.factor * eta * norm / examples * total * (1 + 8 * ULP)
    diameter = jnp.where(step.bounded, numbers.diameter, jnp.inf)
    distance = jnp.where(step.known, distance, jnp.inf)
    return jnp.where(step.valid & counted, jnp.minimum(distance, diameter), jnp.inf)


def gradient_descent_sensitivity(
    *, num_steps: ArrayLike, num_examples: ArrayLike, **setting: Unpack[Setting]
) -> jax.Array:
    """A bound on the change of the last iterate of full-batch descent by one example.

    Args:
      num_steps: T, f[*b], whole numbers, at least 1. A traced value that is not whole
        is rounded up, and derivatives by T are taken at the whole number.
      num_examples: n, by which sums of gradients are divided, f[*b], positive.
      **setting: all assumptions of `Setting`. There is no noise.

    Returns:
      An L2 distance Δ, f[*b], rounded up: (s η C / n) Σ_{k<T} c^k, and at most the
      diameter. Here C is the gradient norm, s is 2 under REPLACE and 1 under ZERO_OUT,
      and c is the Lipschitz constant of a step. Δ is inf where smoothness is inf.

    Raises:
      ValueError: a static argument is out of range, or an assumption fails.
      TypeError: an assumption is missing.

    Reference: Zhang, Zheng, Mou and Wang (2017), Lemmas 2 and 3. Their constants are 3
    in place of 2, and 5 (M + m) / (m M) in place of at most 2 / m.

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
