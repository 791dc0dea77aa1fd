"""Whole optimizers for optax users: chains on the clipped sum.

Each takes the sum that `clipped_grad` returns, adds noise of standard deviation
noise_multiplier · clip_norm, and only then divides by the *expected* batch size: the
size of the batch at hand would give away who is in it.
"""

from typing import Any, Literal

import jax
import optax

from dpjax import _validate
from dpjax._dtypes import widen
from dpjax._outward import upward
from dpjax.momentum import tree_momentum
from dpjax.noise import add_gaussian_noise


def noisy_mean(
    *,
    clip_norm: jax.typing.ArrayLike,
    noise_multiplier: jax.typing.ArrayLike,
    expected_batch_size: jax.typing.ArrayLike,
    key: jax.Array,
) -> optax.GradientTransformation:
    """From the clipped sum to a private mean: what any optimizer of optax may follow.

    Args:
      clip_norm: the bound C that the sum was clipped with, positive.
      noise_multiplier: noise standard deviation over C, at least 0, dimensionless.
      expected_batch_size: a positive constant that does not depend on the data.
      key: one typed key, as `dpjax.random_key` makes, for this alone.

    Returns:
      An optax transformation: independent noise, then the division.

    Raises:
      ValueError: an argument is out of range.

    Privacy: each step in which an example takes part is (f / noise_multiplier)-GDP,
    f the adjacency's sensitivity factor.

    Reference: Abadi et al. (2016), Algorithm 1.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> tx = optax.chain(
      ...     noisy_mean(
      ...         clip_norm=2.0, noise_multiplier=0.0, expected_batch_size=4,
      ...         key=jax.random.key(0)),
      ...     optax.lion(0.1))
      >>> updates, _ = tx.update(jnp.array([8.0]), tx.init(jnp.zeros(1)), jnp.zeros(1))
      >>> print(updates)
      [-0.1]
    """
    return optax.chain(
        add_gaussian_noise(
            _stddev(clip_norm, noise_multiplier, expected_batch_size), key=key
        ),
        optax.scale(1.0 / expected_batch_size),
    )


def widened(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The inner optimizer in float32 at least, as the sums are.

    Its moments would otherwise begin in bfloat16 and go on in float32.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        params = None if params is None else widen(params)
        return inner.update(widen(updates), state, params)

    return optax.GradientTransformation(
        lambda params: inner.init(widen(params)), update
    )


def _stddev(clip_norm: Any, noise_multiplier: Any, expected_batch_size: Any) -> Any:
    """The noise of a sum, for numbers that are in range."""
    numbers = {
        "clip_norm": clip_norm,
        "noise_multiplier": noise_multiplier,
        "expected_batch_size": expected_batch_size,
    }
    for name, value in numbers.items():
        _validate.scalar(name, value)
    _validate.positive("clip_norm", clip_norm)
    _validate.nonnegative("noise_multiplier", noise_multiplier)
    _validate.positive("expected_batch_size", expected_batch_size)
    return upward("noise_multiplier times clip_norm", noise_multiplier, clip_norm)


def dp_sgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    clip_norm: jax.typing.ArrayLike,
    noise_multiplier: jax.typing.ArrayLike,
    expected_batch_size: jax.typing.ArrayLike,
    key: jax.Array,
    momentum: float | None = None,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """Private SGD on the clipped sum, with independent noise in every step.

    Args:
      learning_rate: a number or a schedule, as in `optax.sgd`.
      clip_norm: the bound C that the sum was clipped with, positive.
      noise_multiplier: noise standard deviation over C, at least 0, dimensionless.
      expected_batch_size: a positive constant that does not depend on the data.
      key: one typed key, as `dpjax.random_key` makes, for this alone.
      momentum: as in `optax.sgd`; it acts on the noisy mean.
      nesterov: as in `optax.sgd`.

    Returns:
      An optax transformation from the clipped sum to updates.

    Raises:
      ValueError: an argument is out of range.

    Privacy: each step in which an example takes part is (f / noise_multiplier)-GDP,
    f the adjacency's sensitivity factor. In a fixed or reshuffled order an example
    takes part once an epoch, and E epochs are (f sqrt(E) / noise_multiplier)-GDP.

    Reference: Abadi et al. (2016), Algorithm 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = dp_sgd(
      ...     0.1, clip_norm=2.0, noise_multiplier=0.0, expected_batch_size=4,
      ...     key=jax.random.key(0))
      >>> updates, _ = tx.update(jnp.array([8.0]), tx.init(jnp.zeros(1)))
      >>> print(updates)
      [-0.2]
    """
    return optax.chain(
        noisy_mean(
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            key=key,
        ),
        widened(optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov)),
    )


def dp_adam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    clip_norm: jax.typing.ArrayLike,
    noise_multiplier: jax.typing.ArrayLike,
    expected_batch_size: jax.typing.ArrayLike,
    key: jax.Array,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
) -> optax.GradientTransformation:
    """Private Adam on the clipped sum, with independent noise in every step.

    Args:
      learning_rate: a number or a schedule, as in `optax.adam`.
      clip_norm: the bound C that the sum was clipped with, positive.
      noise_multiplier: noise standard deviation over C, at least 0, dimensionless.
      expected_batch_size: a positive constant that does not depend on the data.
      key: one typed key, as `dpjax.random_key` makes, for this alone.
      b1: as in `optax.adam`.
      b2: as in `optax.adam`.
      eps: as in `optax.adam`.

    Returns:
      An optax transformation from the clipped sum to updates.

    Raises:
      ValueError: an argument is out of range.

    Privacy: as for `dp_sgd`; the moments are functions of the noisy means.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = dp_adam(
      ...     0.1, clip_norm=2.0, noise_multiplier=0.0, expected_batch_size=4,
      ...     key=jax.random.key(0))
      >>> updates, _ = tx.update(jnp.array([8.0]), tx.init(jnp.zeros(1)))
      >>> print(updates.round(3))
      [-0.1]
    """
    return optax.chain(
        noisy_mean(
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            key=key,
        ),
        widened(optax.adam(learning_rate, b1=b1, b2=b2, eps=eps)),
    )


def dp_adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    clip_norm: jax.typing.ArrayLike,
    noise_multiplier: jax.typing.ArrayLike,
    expected_batch_size: jax.typing.ArrayLike,
    key: jax.Array,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
) -> optax.GradientTransformation:
    """Private Adam with decoupled weight decay on the clipped sum.

    Args:
      learning_rate: a number or a schedule, as in `optax.adamw`.
      clip_norm: the bound C that the sum was clipped with, positive.
      noise_multiplier: noise standard deviation over C, at least 0, dimensionless.
      expected_batch_size: a positive constant that does not depend on the data.
      key: one typed key, as `dpjax.random_key` makes, for this alone.
      b1: as in `optax.adamw`.
      b2: as in `optax.adamw`.
      eps: as in `optax.adamw`.
      weight_decay: as in `optax.adamw`; it reads the parameters, which are private.
      mask: as in `optax.adamw`: which parameters decay. It must not read the data.

    Returns:
      An optax transformation from the clipped sum to updates; `update` needs params.

    Raises:
      ValueError: an argument is out of range.

    Privacy: as for `dp_sgd`; what decays is private already.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = dp_adamw(
      ...     0.1, clip_norm=2.0, noise_multiplier=0.0, expected_batch_size=4,
      ...     key=jax.random.key(0), weight_decay=0.5)
      >>> params = jnp.array([10.0])
      >>> updates, _ = tx.update(jnp.array([8.0]), tx.init(params), params)
      >>> print(updates.round(3))
      [-0.6]
    """
    return optax.chain(
        noisy_mean(
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            key=key,
        ),
        widened(
            optax.adamw(
                learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask
            )
        ),
    )


def dp_nsgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    clip_norm: jax.typing.ArrayLike,
    noise_multiplier: jax.typing.ArrayLike,
    expected_batch_size: jax.typing.ArrayLike,
    key: jax.Array,
    decay: jax.typing.ArrayLike,
    num_steps: int,
    buffer: Literal["stored", "regenerate"] = "stored",
) -> optax.GradientTransformation:
    """Private normalised SGD with tree-aggregated momentum, on the clipped sum.

    Every step has length learning_rate, in the direction of the private momentum.

    Args:
      learning_rate: the step length, a number or a schedule.
      clip_norm: the bound C that the sum was clipped with, positive.
      noise_multiplier: a tree node's noise standard deviation over C, at least 0.
      expected_batch_size: a positive constant that does not depend on the data.
      key: one typed key, as `dpjax.random_key` makes, for this alone.
      decay: the momentum coefficient β, in [0, 1).
      num_steps: T, the number of steps that the guarantee is for; static.
      buffer: see `tree_momentum`.

    Returns:
      An optax transformation from the clipped sum to updates.

    Raises:
      ValueError: an argument is out of range.

    Privacy: the whole run is μ-GDP for μ = `accounting.tree.momentum_mu(
    noise_multiplier, ...)`. Past num_steps it refuses, as `tree_momentum` does.

    Reference: Tran and Cutkosky (2022), Algorithm 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = dp_nsgd(
      ...     0.5, clip_norm=2.0, noise_multiplier=0.0, expected_batch_size=4,
      ...     key=jax.random.key(0), decay=0.9, num_steps=10)
      >>> updates, _ = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> print(updates.round(3))
      [-0.3 -0.4]
    """
    return optax.chain(
        tree_momentum(
            decay,
            _stddev(clip_norm, noise_multiplier, expected_batch_size),
            num_steps=num_steps,
            key=key,
            buffer=buffer,
        ),
        optax.scale(1.0 / expected_batch_size),
        optax.normalize_by_update_norm(),
        optax.scale_by_learning_rate(learning_rate),
    )
