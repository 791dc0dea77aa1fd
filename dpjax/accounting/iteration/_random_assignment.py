"""Examples assigned to batches at random once: δ is the mean over their positions."""

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.float64 import TINY, ULP, float64
from dpjax._core.searches import bisect, implicit_derivative
from dpjax.accounting._numerics.gaussian import delta_of

_HALVINGS = 80  # more than the 53 bits of a float64


def _mean_delta(mus: jax.Array, epsilon: jax.Array) -> jax.Array:
    each = jnp.vectorize(delta_of)(mus, epsilon)
    # Rounded up, and positive even after an underflow if some δ is positive.
    mean = jnp.mean(each) * (1 + (8 + mus.shape[0]) * ULP)
    mean = jnp.maximum(mean, jnp.where(jnp.max(each) > 0, TINY, 0.0))
    return jnp.minimum(mean, 1.0)


_delta64 = float64("up", vectors=(0,), elementwise=True)(_mean_delta)


@float64("up", vectors=(0,), elementwise=True)
def _epsilon64(mus: jax.Array, delta: jax.Array) -> jax.Array:
    fixed, goal = jax.lax.stop_gradient((mus, delta))
    zero, start = jnp.zeros_like(delta), jnp.ones_like(delta)

    def meets(epsilon: jax.Array) -> jax.Array:
        return _mean_delta(fixed, epsilon) <= goal

    # Double ε until its δ is at most the goal, then bisect. The goal has a derivative
    # only through the implicit function theorem below.
    high = jax.lax.while_loop(
        lambda high: ~meets(high) & (high < jnp.inf), lambda high: 2 * high, start
    )
    finite = high < jnp.inf
    low = jnp.where(high > 1, high / 2, 0.0)
    root = bisect(meets, low, jnp.where(finite, high, start), _HALVINGS)
    root = jnp.where(meets(zero), zero, jnp.where(finite, root, jnp.inf))
    on_curve = (root > 0) & finite & (goal > 0)
    root = implicit_derivative(lambda e: _mean_delta(mus, e) - delta, root, on_curve)
    return jnp.where(delta > 0, root, jnp.inf)


def _check(mus: jax.typing.ArrayLike) -> None:
    if jnp.ndim(mus) == 0 or jnp.shape(mus)[-1] == 0:
        raise ValueError(f"mus must have a non-empty last axis; got {mus!r}.")
    validate.nonnegative("mus", mus, finite=False)


def random_assignment_delta(
    mus: jax.typing.ArrayLike, epsilon: jax.typing.ArrayLike
) -> jax.Array:
    """δ of a run whose examples were assigned to positions in an epoch at random, once.

    Args:
      mus: the GDP parameter at each position, f[*b, l], from `noisy_cyclic_gd_mus`.
      epsilon: ε, f[*b], at least 0.

    Returns:
      The mean of δ_μ(ε) over the positions, f[*b], rounded up.

    Raises:
      ValueError: a static argument is out of range, or mus has no last axis.

    Privacy: this δ assumes that every example is equally likely at every position, for
    any data, and that the assignment stays secret. The δ of the worst position holds
    without both assumptions.

    Example:
      >>> import numpy as np
      >>> print(f"{random_assignment_delta(np.array([0.2, 0.4, 1.0]), 1.0):.4f}")
      0.0427
    """
    _check(mus)
    validate.nonnegative("epsilon", epsilon, finite=False)
    return _delta64(mus, epsilon)


def random_assignment_epsilon(
    mus: jax.typing.ArrayLike, delta: jax.typing.ArrayLike
) -> jax.Array:
    """ε of a run whose examples were assigned to positions in an epoch at random, once.

    Args:
      mus: the GDP parameter at each position, f[*b, l], from `noisy_cyclic_gd_mus`.
      delta: δ, f[*b], strictly between 0 and 1.

    Returns:
      The least ε with `random_assignment_delta(mus, ε) <= δ`, f[*b], rounded up. A
      traced δ at or below 0 gives inf.

    Raises:
      ValueError: a static argument is out of range, or mus has no last axis.

    Example:
      >>> import numpy as np
      >>> print(f"{random_assignment_epsilon(np.array([0.2, 0.4, 1.0]), 1e-5):.3f}")
      4.113
    """
    _check(mus)
    validate.open_unit("delta", delta)
    return _epsilon64(mus, delta)
