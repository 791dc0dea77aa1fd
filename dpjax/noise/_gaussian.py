"""Optax transformations that add independent Gaussian noise or enforce a step limit.

A transformation with a step limit refuses all steps beyond the number of accounted
steps. The module also draws noise for pure differential privacy (`gamma_norm_like`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.dtypes import at_least_float32, cast_like, widen
from dpjax._core.keys import is_on_one_device, map_with_keys, stream
from dpjax._core.meshes import normal_like
from dpjax._core.rounding import round_up_float32
from dpjax._core.typing import ArrayLike, Key, Shaped, Tree
from dpjax.clipping._clipped_grad import ClippedGrad


def transformation(
    init: Callable[..., Any], update: Callable[[Tree, Any], tuple[Tree, Any]]
) -> optax.GradientTransformation:
    """Make an optax transformation whose `update` ignores the argument `params`."""

    def update_without_params(
        updates: Tree, state: Any, params: Tree | None = None
    ) -> tuple[Tree, Any]:
        del params
        return update(updates, state)

    return optax.GradientTransformation(init, update_without_params)


class LimitStepsState(NamedTuple):
    """The state of `limit_steps`.

    Attributes:
      step: the number of steps done, i32[]. The count stops at num_steps + 1.
    """

    step: jax.Array


def limit_steps(num_steps: int, scale: ArrayLike = 1.0) -> optax.GradientTransformation:
    """Scale updates by `scale` for at most `num_steps` steps.

    A further step raises ValueError outside jit, and gives NaN updates inside jit.
    """
    num_steps = check_step_limit(num_steps)

    def update(updates: Tree, state: Any) -> tuple[Tree, LimitStepsState]:
        check_steps_left(state.step, num_steps)
        scaled, step = _scale_within_limit(updates, state.step, num_steps, scale)
        return scaled, LimitStepsState(step)

    return transformation(lambda _: LimitStepsState(jnp.zeros((), jnp.int32)), update)


# Outside jit the function is one program. Inside jit it is a part of the surrounding
# program.
@functools.partial(jax.jit, static_argnames="num_steps", inline=True)
def _scale_within_limit(
    updates: Shaped, step: jax.Array, num_steps: int, scale: ArrayLike
) -> tuple[Shaped, jax.Array]:
    """The updates times the scale, and the number of steps including this step.

    The argument `step` is the number of earlier steps. If `step` is at least num_steps,
    the returned updates are NaN, and the returned number is num_steps + 1.
    """
    step = jnp.minimum(step, num_steps) + 1
    # Selecting between two scalars is cheaper than selecting between updates.
    factor = jnp.where(step <= num_steps, jnp.asarray(scale), jnp.nan)
    return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates), step


def check_step_limit(num_steps: int) -> int:
    """Return num_steps as an int, or raise ValueError.

    num_steps must be a static integer from 1 to 2³¹ − 2, so that a step counter in
    int32 can hold num_steps + 1.
    """
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    validate.at_most("num_steps", num_steps, 2**31 - 2)
    return num_steps


def check_steps_left(count: jax.Array, num_steps: int) -> None:
    """Raise ValueError if `count`, the number of steps done, is at least num_steps.

    A traced count is not checked here: the caller makes the updates NaN instead.
    """
    if not isinstance(count, Tracer) and int(count) >= num_steps:
        raise ValueError(
            f"num_steps is {num_steps}, and all {num_steps} steps are done: a further "
            "step has no privacy guarantee. For a longer run, choose a larger "
            "num_steps before the first step."
        )


class IndependentNoiseState(NamedTuple):
    """The state of `add_gaussian_noise` and of `add_discrete_gaussian_noise`.

    Keep the state as secret as the data.

    Attributes:
      key: the typed key of the next step's noise, replaced in each step. Anyone who has
        the key can subtract the noise of the next step and of all later steps.
    """

    key: Key


def gaussian_like(key: Key, tree: Shaped, stddev: ArrayLike) -> Shaped:
    """Independent Gaussian noise shaped like the tree's leaves, in float32 or wider.

    Each leaf has its own key, derived from `key` and the leaf's path. No other draw may
    use `key`. `stddev` is rounded up to float32, so that the noise is never smaller
    than requested.
    """
    return _scale(_normal_like(key, tree), round_up_float32("stddev", stddev))


def _normal_like(key: Key, tree: Shaped) -> Shaped:
    """Standard Gaussian noise shaped like the tree's leaves, in float32 or wider."""
    # Noise is drawn in float32 or wider. Casting noise to a narrow dtype before the
    # addition would change its distribution; a later cast is post-processing.
    return map_with_keys(
        lambda key, x: normal_like(key, x, at_least_float32(x.dtype)), key, tree
    )


def _scale(tree: Shaped, scale: ArrayLike) -> Shaped:
    return jax.tree.map(lambda x: x * jnp.asarray(scale, x.dtype), tree)


def gamma_norm_like(key: Key, tree: Shaped, scale: ArrayLike) -> Shaped:
    """Draw noise z of density proportional to exp(−‖z‖₂ / scale), shaped like the tree.

    z is one vector over all leaves together. The direction of z is uniform, and its L2
    norm has the distribution Gamma(d, scale), where d is the number of coordinates.

    Args:
      key: one typed key.
      tree: a pytree of real floating-point arrays. The values are not used.
      scale: Δ / ε, f[], 0 or from 2⁻¹⁰⁰ to 2¹⁰⁰, where Δ is the L2 sensitivity of the
        value to which the noise is added. The value used is scale rounded up to
        float32.

    Returns:
      Noise with the shapes of the tree's leaves, in float32 or wider.

    Raises:
      ValueError: a leaf is not a real floating-point array; scale is a Python number
        out of range.

    Privacy: adding the noise to a value of L2 sensitivity Δ is (Δ / scale)-DP, with
    δ = 0. The guarantee is for real arithmetic and ideal noise.

    Reference: Zhang, Zheng, Mou and Wang (2017), Algorithm 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> z = gamma_norm_like(jax.random.key(0), jnp.zeros(10_000), 0.5)
      >>> print(f"{jnp.linalg.norm(z) / (10_000 * 0.5):.2f}")
      1.01
    """
    key = stream(key, "noise of gamma norm")
    direction_key, norm_key = jax.random.split(key)
    # The direction of a standard Gaussian vector is uniform.
    direction = gaussian_like(direction_key, widen(tree), 1.0)
    length = optax.tree.norm(direction)
    # Zhang et al. (2017), Algorithm 1, line 6, https://arxiv.org/abs/1703.09947: the
    # integral of exp(−‖z‖ / scale) over the sphere of radius r is proportional to
    # r^{d−1} e^{−r / scale}, the density of Gamma(d, scale).
    norm = jax.random.gamma(norm_key, jnp.asarray(optax.tree.size(tree), length.dtype))
    return _scale(direction, norm * round_up_float32("scale", scale) / length)


def add_gaussian_noise(stddev: ArrayLike, *, key: Key) -> optax.GradientTransformation:
    """Add independent Gaussian noise to every step's updates.

    Put this transformation first in a chain, so that its input is the clipped sum.

    Args:
      stddev: the noise's standard deviation per coordinate, f[], in the units of the
        incoming sum (noise multiplier times clip norm), 0 or from 2⁻¹⁰⁰ to 2¹⁰⁰;
        may be traced. The value used is stddev rounded up to float32.
      key: one typed key, as `dpjax.random_key` makes, for one transformation and one
        run.

    Returns:
      An optax transformation for real floating-point updates. Noise is drawn and added
      in float32 or wider, and the result is cast back to the update's dtype.

    Raises:
      ValueError: stddev is out of range (a JAX array may give NaN updates instead); key
        is not a typed key; an update is not a real floating-point array; inside
        `jax.shard_map`, check_vma is False.

    Privacy: a step whose incoming sum has L2 sensitivity s is (s / stddev)-GDP; steps
    compose by `accounting.gdp.compose`. The guarantee is for real arithmetic and ideal
    Gaussian noise. The state holds a key that is derived from the argument `key`. Keep
    both keys as secret as the data: anyone who has either key can subtract noise.

    The key of a leaf's noise depends on the leaf's path. So transformations with the
    same key that act on different parts of a tree (`optax.masked`, `optax.partition`)
    have independent noise. Inside `jax.shard_map`, the shards of a leaf have
    independent noise, and a replicated leaf has the same noise on all devices. Under
    `jax.vmap`, two runs with the same key have the same noise. So give each run its own
    key.

    Reference: Abadi et al. (2016), Algorithm 1; Dong, Roth and Su (2022), Theorem 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = add_gaussian_noise(0.5, key=jax.random.key(0))
      >>> state = tx.init(jnp.zeros(10_000))
      >>> noisy, state = tx.update(jnp.zeros(10_000), state)
      >>> print(f"{noisy.std():.2f}")
      0.50
    """
    validate.scalar("stddev", stddev)
    validate.nonnegative("stddev", stddev)
    validate.typed_key("key", key)
    scale = round_up_float32("stddev", stddev)

    def init(_: Tree) -> IndependentNoiseState:
        return IndependentNoiseState(stream(key, "independent noise"))

    def update(updates: Tree, state: Any) -> tuple[Tree, IndependentNoiseState]:
        wide = widen(updates)
        float32_stddev = round_up_float32("stddev", scale)
        # Outside jit and on one device, separate programs draw, scale and add the
        # noise. In a single program, the compiler could round them differently.
        separate = all(map(is_on_one_device, (state.key, *jax.tree.leaves(wide))))
        draw, scaled, add = _JITTED if separate else (_draw, _scale, _add)
        noise, next_key = draw(state.key, wide)
        noisy = add(updates, wide, scaled(noise, float32_stddev))
        return noisy, IndependentNoiseState(next_key)

    return transformation(init, update)


def _draw(key: Key, tree: Shaped) -> tuple[Shaped, Key]:
    """Standard Gaussian noise shaped like the tree, and the key of the next step."""
    # The current key is used only once. So no later state reveals this noise.
    next_key, current_key = jax.random.split(key)
    return _normal_like(current_key, tree), next_key


def _add(updates: Shaped, wide: Shaped, noise: Shaped) -> Shaped:
    """Add noise to `wide`, and cast the result to the dtypes of `updates`.

    `wide` holds the updates in float32 or wider.
    """
    return cast_like(optax.tree.add(wide, noise), updates)


_JITTED = jax.jit(_draw), jax.jit(_scale), jax.jit(_add)


def noisy_mean(
    *,
    clip_norm: ArrayLike | ClippedGrad,
    noise_multiplier: ArrayLike,
    expected_batch_size: ArrayLike,
    key: Key,
    num_steps: int | None = None,
) -> optax.GradientTransformation:
    """Turn the clipped sum into a private mean, as input for any optimizer of optax.

    Args:
      clip_norm: the norm C to which each example's gradient in the sum was clipped,
        positive; or the function that `clipped_grad` made, which holds C. With the
        function, `optax.inject_hyperparams` needs "clip_norm" in static_args.
      noise_multiplier: the standard deviation of the noise divided by C, at least 0.
      expected_batch_size: the divisor of the noisy sum, a positive constant that does
        not depend on the data.
      key: one typed key, as `dpjax.random_key` makes, for this transformation alone.
      num_steps: the number of steps that the guarantee covers; None for no limit. A
        further step raises ValueError outside jit, and gives NaN updates inside jit.

    Returns:
      An optax transformation that adds independent noise and then divides by
      expected_batch_size. Do not wrap the transformation in `optax.MultiSteps`, which
      replaces the sums of k steps by the mean of these sums. The noise would then be k
      times as large as the mean needs. Instead, add the clipped sums of k parts of a
      batch, and then do one step.

    Raises:
      ValueError: an argument is out of range, or key is not a typed key.

    Privacy: each step in which an example takes part is (f / noise_multiplier)-GDP,
    where f is the adjacency's sensitivity factor: 1, or 2 under `REPLACE`.

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
    # Abadi et al. (2016), Algorithm 1, https://arxiv.org/abs/1607.00133:
    # (Σ clipped g + N(0, σ²C² I)) / L, where L is the expected batch size.
    stddev = stddev_of_sum(clip_norm, noise_multiplier, expected_batch_size)
    scale = 1.0 / expected_batch_size
    division = (
        optax.scale(scale) if num_steps is None else limit_steps(num_steps, scale)
    )
    return optax.chain(add_gaussian_noise(stddev, key=key), division)


def stddev_of_sum(
    clip_norm: ArrayLike | ClippedGrad,
    noise_multiplier: ArrayLike,
    expected_batch_size: ArrayLike,
) -> ArrayLike:
    """Check the arguments, and return the noise standard deviation for a clipped sum.

    Args:
      clip_norm: the clip norm C, or the function that `clipped_grad` made.
      noise_multiplier: the noise standard deviation divided by C.
      expected_batch_size: a positive number, which is only checked.

    Returns:
      noise_multiplier times clip_norm, rounded up to float32.
    """
    # If the data sets differ by one added or removed example, the sensitivity of the
    # clipped sum is the clip norm. For other adjacencies, the accounting has a factor.
    if isinstance(clip_norm, ClippedGrad):
        clip_norm = clip_norm.sensitivity(Adjacency.ADD_REMOVE)
    validate.scalar("noise_multiplier", noise_multiplier)
    validate.nonnegative("noise_multiplier", noise_multiplier)
    sizes = {"clip_norm": clip_norm, "expected_batch_size": expected_batch_size}
    for name, value in sizes.items():
        validate.scalar(name, value)
        validate.positive(name, value)
    return round_up_float32(
        "noise_multiplier times clip_norm", noise_multiplier, clip_norm
    )
