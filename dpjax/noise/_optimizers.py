"""Private optimizers that take the clipped sum, for users of optax.

Each optimizer takes the sum that `clipped_grad` returns, adds noise in proportion to
noise_multiplier · clip_norm, and then divides by the *expected* batch size. A division
by the actual batch size would reveal something about which examples were sampled.
(`dp_nsgd` then normalises its updates, so that the division has almost no effect.)

Each optimizer is a chain of optax transformations. The transformations of dpjax turn
clipped sums into private means or a private momentum. The transformations of optax then
compute the updates.
"""

from collections.abc import Callable

import optax

from dpjax._core import validate
from dpjax._core.dtypes import widen
from dpjax._core.meshes import shard_like
from dpjax._core.typing import ArrayLike, Key, ScalarOrSchedule, Tree
from dpjax._matrices.strategy import Strategy
from dpjax.clipping._clipped_grad import ClippedGrad
from dpjax.noise._correlated import Buffer, correlated_noise, tree_momentum
from dpjax.noise._gaussian import noisy_mean as noisy_mean
from dpjax.noise._gaussian import stddev_of_sum


def chain_on_noisy_mean(
    inner: optax.GradientTransformation,
    clip_norm: ArrayLike | ClippedGrad,
    noise_multiplier: ArrayLike,
    expected_batch_size: ArrayLike,
    key: Key,
    num_steps: int | None,
) -> optax.GradientTransformation:
    """Chain `noisy_mean` with an optimizer, which then gets private means of gradients.

    The optimizer `inner` gets parameters and means in float32 or wider. The other
    arguments are those of `noisy_mean`.
    """
    mean = noisy_mean(
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        key=key,
        num_steps=num_steps,
    )
    return optax.chain(mean, cast_updates_to_float32(inner))


def cast_updates_to_float32(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Wrap `inner` so that it gets parameters and updates in float32 or wider.

    The resulting updates are not cast back. Without the cast, the moments of bfloat16
    parameters would start in bfloat16 and become float32 in the first step. On a mesh,
    the moments have the sharding of the parameters.
    """

    def init(params: optax.Params) -> optax.OptState:
        params = widen(params)
        return shard_like(inner.init(params), params)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        params = None if params is None else widen(params)
        return inner.update(widen(updates), state, params)

    return optax.GradientTransformation(init, update)


def dp_sgd(
    learning_rate: ScalarOrSchedule,
    *,
    clip_norm: ArrayLike | ClippedGrad,
    noise_multiplier: ArrayLike,
    expected_batch_size: ArrayLike,
    key: Key,
    num_steps: int | None = None,
    momentum: float | None = None,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """Private SGD on the clipped sum, with independent noise in every step.

    Args:
      learning_rate: a number or a schedule, as in `optax.sgd`.
      clip_norm: the bound C to which each gradient in the sum was clipped, positive; or
        the function that `clipped_grad` made.
      noise_multiplier: the standard deviation of the noise divided by C, at least 0.
      expected_batch_size: the divisor of the noisy sum, a positive constant that does
        not depend on the data.
      key: one typed key, as `dpjax.random_key` makes, for this optimizer alone.
      num_steps: the number of steps that the guarantee covers; None for no limit. A
        further step fails, as `noisy_mean` describes.
      momentum: as in `optax.sgd`; the momentum is that of the noisy means.
      nesterov: as in `optax.sgd`.

    Returns:
      An optax transformation from the clipped sum to updates.

    Raises:
      ValueError: an argument is out of range, or key is not a typed key.

    Privacy: each step in which an example takes part is (f / noise_multiplier)-GDP,
    where f is the adjacency's sensitivity factor: 1, or 2 under `REPLACE`. In a fixed
    or reshuffled order, under `ZERO_OUT` or `REPLACE`, an example takes part once per
    epoch, and E epochs are (f sqrt(E) / noise_multiplier)-GDP.

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
    inner = optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov)
    return chain_on_noisy_mean(
        inner, clip_norm, noise_multiplier, expected_batch_size, key, num_steps
    )


def dp_adam(
    learning_rate: ScalarOrSchedule,
    *,
    clip_norm: ArrayLike | ClippedGrad,
    noise_multiplier: ArrayLike,
    expected_batch_size: ArrayLike,
    key: Key,
    num_steps: int | None = None,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
) -> optax.GradientTransformation:
    """Private Adam on the clipped sum, with independent noise in every step.

    Args:
      learning_rate: a number or a schedule, as in `optax.adam`.
      clip_norm: the bound C to which each gradient in the sum was clipped, positive; or
        the function that `clipped_grad` made.
      noise_multiplier: the standard deviation of the noise divided by C, at least 0.
      expected_batch_size: the divisor of the noisy sum, a positive constant that does
        not depend on the data.
      key: one typed key, as `dpjax.random_key` makes, for this optimizer alone.
      num_steps: the number of steps that the guarantee covers; None for no limit. A
        further step fails, as `noisy_mean` describes.
      b1: as in `optax.adam`.
      b2: as in `optax.adam`.
      eps: as in `optax.adam`.

    Returns:
      An optax transformation from the clipped sum to updates.

    Raises:
      ValueError: an argument is out of range, or key is not a typed key.

    Privacy: as for `dp_sgd`; Adam's moments are functions of the noisy means.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = dp_adam(
      ...     0.1, clip_norm=2.0, noise_multiplier=0.0, expected_batch_size=4,
      ...     key=jax.random.key(0))
      >>> updates, _ = tx.update(jnp.array([8.0]), tx.init(jnp.zeros(1)))
      >>> print(updates.round(3))
      [-0.1]
    """
    inner = optax.adam(learning_rate, b1=b1, b2=b2, eps=eps)
    return chain_on_noisy_mean(
        inner, clip_norm, noise_multiplier, expected_batch_size, key, num_steps
    )


def dp_adamw(
    learning_rate: ScalarOrSchedule,
    *,
    clip_norm: ArrayLike | ClippedGrad,
    noise_multiplier: ArrayLike,
    expected_batch_size: ArrayLike,
    key: Key,
    num_steps: int | None = None,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: Tree | Callable[..., Tree] | None = None,
) -> optax.GradientTransformation:
    """Private Adam on the clipped sum, with decoupled weight decay.

    Args:
      learning_rate: a number or a schedule, as in `optax.adamw`.
      clip_norm: the bound C to which each gradient in the sum was clipped, positive; or
        the function that `clipped_grad` made.
      noise_multiplier: the standard deviation of the noise divided by C, at least 0.
      expected_batch_size: the divisor of the noisy sum, a positive constant that does
        not depend on the data.
      key: one typed key, as `dpjax.random_key` makes, for this optimizer alone.
      num_steps: the number of steps that the guarantee covers; None for no limit. A
        further step fails, as `noisy_mean` describes.
      b1: as in `optax.adamw`.
      b2: as in `optax.adamw`.
      eps: as in `optax.adamw`.
      weight_decay: as in `optax.adamw`.
      mask: the mask of the parameters that decay, as in `optax.adamw`. The mask must
        not depend on the data.

    Returns:
      An optax transformation from the clipped sum to updates; `update` needs params.

    Raises:
      ValueError: an argument is out of range, or key is not a typed key.

    Privacy: as for `dp_sgd`. The initial parameters must not depend on the data. Then
    the decay costs no privacy, since the parameters depend on the data only through the
    noisy means of earlier steps.

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
    inner = optax.adamw(
        learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask
    )
    return chain_on_noisy_mean(
        inner, clip_norm, noise_multiplier, expected_batch_size, key, num_steps
    )


def dp_nsgd(
    learning_rate: ScalarOrSchedule,
    *,
    clip_norm: ArrayLike | ClippedGrad,
    noise_multiplier: ArrayLike,
    expected_batch_size: ArrayLike,
    key: Key,
    decay: ArrayLike,
    num_steps: int,
    buffer: Buffer = "stored",
    strategy: Strategy | None = None,
) -> optax.GradientTransformation:
    """Private normalised SGD on the clipped sum, with momentum and correlated noise.

    Every update points against the private momentum. The norm of an update is
    learning_rate · r / (r + 1e-6), where r is the norm of the momentum divided by
    expected_batch_size.

    Args:
      learning_rate: the step length, a number or a schedule.
      clip_norm: the bound C to which each gradient in the sum was clipped, positive; or
        the function that `clipped_grad` made.
      noise_multiplier: the standard deviation of the noise divided by C, at least 0.
        Without a strategy, "the noise" is that of one tree node in `tree_momentum`.
        With a strategy, "the noise" is the independent noise that `correlated_noise`
        draws in a step.
      expected_batch_size: the divisor of the momentum, a positive constant that does
        not depend on the data.
      key: one typed key, as `dpjax.random_key` makes, for this optimizer alone.
      decay: the momentum coefficient β, in [0, 1).
      num_steps: T, the number of steps that the guarantee covers; static.
      buffer: "stored" or "regenerate", as for `tree_momentum` and `correlated_noise`.
      strategy: the matrix that correlates the noise across steps, as `dpjax.strategies`
        makes it; None for `tree_momentum`.

    Returns:
      An optax transformation from the clipped sum to updates.

    Raises:
      ValueError: an argument is out of range; an argument is invalid for
        `tree_momentum`, or with a strategy for `correlated_noise`.

    Privacy: the whole run is μ-GDP. Without a strategy, μ is
    `accounting.tree.momentum_mu(noise_multiplier, ...)`. With a strategy, μ is
    `accounting.correlated.mu(strategy, noise_multiplier, ...)`. A step after num_steps
    steps fails, as `tree_momentum` describes.

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
    stddev = stddev_of_sum(clip_norm, noise_multiplier, expected_batch_size)
    arguments = {"num_steps": num_steps, "key": key, "buffer": buffer}
    if strategy is None:
        momentum = tree_momentum(decay, stddev, **arguments)
    else:
        validate.half_open_unit("decay", decay)
        momentum = optax.chain(
            correlated_noise(strategy, stddev, **arguments),
            # Normalisation removes the scale. So the bias of ema needs no correction.
            cast_updates_to_float32(optax.ema(decay, debias=False)),
        )
    return optax.chain(
        momentum,
        optax.scale(1.0 / expected_batch_size),
        optax.normalize_by_update_norm(),
        optax.scale_by_learning_rate(learning_rate),
    )
