"""Independent Gaussian noise, and noise for pure differential privacy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import _validate
from dpjax._dtypes import at_least_float32, widen


class AddGaussianNoiseState(NamedTuple):
    """The key that the next step's noise comes from.

    Attributes:
      key: a typed key; each step replaces it. Who has it can remove the noise.
    """

    key: jax.Array


def gaussian_like(key: jax.Array, tree: Any, stddev: jax.typing.ArrayLike) -> Any:
    """Gaussian noise shaped like the tree, in float32 at least, a key for each leaf."""
    leaves, treedef = jax.tree.flatten(tree)

    def draw(index: int, leaf: jax.Array) -> jax.Array:
        dtype = at_least_float32(leaf.dtype)
        unit = jax.random.normal(jax.random.fold_in(key, index), leaf.shape, dtype)
        return unit * jnp.asarray(stddev, dtype)

    return jax.tree.unflatten(treedef, [draw(i, x) for i, x in enumerate(leaves)])


def gamma_norm_like(key: jax.Array, tree: Any, scale: jax.typing.ArrayLike) -> Any:
    """Noise of density proportional to exp(−‖z‖₂ / scale), one draw over all leaves.

    Its direction is uniform and its norm, which all leaves share, has the distribution
    Gamma(d, scale), d being the number of coordinates of the tree.

    Args:
      key: one typed key.
      tree: a pytree of real arrays, for its structure, shapes and dtypes.
      scale: f[], at least 0; a sensitivity Δ over ε.

    Returns:
      Noise shaped like the tree, in float32 at least.

    Raises:
      ValueError: scale is negative or not finite; key is not a typed key.

    Privacy: adding it to a value of L2 sensitivity Δ is (Δ / scale)-DP, δ being 0.

    Reference: Zhang, Zheng, Mou and Wang (2017), Algorithm 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> z = gamma_norm_like(jax.random.key(0), jnp.zeros(10_000), 0.5)
      >>> print(f"{jnp.linalg.norm(z) / (10_000 * 0.5):.2f}")
      1.01
    """
    _validate.nonnegative("scale", scale)
    _validate.typed_key("key", key)
    direction_key, norm_key = jax.random.split(key)
    direction = gaussian_like(direction_key, tree, 1.0)
    leaves = jax.tree.leaves(direction)
    dimension = sum(x.size for x in leaves)
    length = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in leaves))
    norm = jax.random.gamma(norm_key, jnp.asarray(dimension, length.dtype))
    factor = norm * scale / length
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), direction)


def add_gaussian_noise(
    stddev: jax.typing.ArrayLike, *, key: jax.Array
) -> optax.GradientTransformation:
    """Add fresh Gaussian noise to every step's updates.

    Put it right after the clipped sum, before anything that depends on the data.

    Args:
      stddev: the noise's standard deviation per coordinate, f[], in the units of the
        incoming sum (noise multiplier times clip norm), at least 0; may be traced.
      key: one typed key, as `jax.random.key` makes. It is copied into the state.

    Returns:
      An optax transformation. It takes real updates of any dtypes; noise is drawn and
      added in float32 at least and the result cast back to the update's dtype.

    Raises:
      ValueError: stddev is negative or not finite; key is not a typed key; an update
        is not real.

    Privacy: a step whose incoming sum has L2 sensitivity s is (s / stddev)-GDP; steps
    compose by `accounting.gdp.compose`. The guarantee is for real arithmetic and ideal
    Gaussian noise. The state holds the key and must be kept as secret as the data.

    Reference: Abadi et al. (2016), Algorithm 1; Dong, Roth and Su (2022), Theorem 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = add_gaussian_noise(0.5, key=jax.random.key(0))
      >>> state = tx.init(jnp.zeros(10_000))
      >>> noisy, state = tx.update(jnp.zeros(10_000), state)
      >>> print(f"{noisy.std():.2f}")
      0.50
    """
    _validate.nonnegative("stddev", stddev)
    _validate.typed_key("key", key)

    def init(params: Any) -> AddGaussianNoiseState:
        del params
        return AddGaussianNoiseState(jnp.copy(key))

    def update(
        updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, AddGaussianNoiseState]:
        del params
        wide = widen(updates)
        following, current = jax.random.split(state.key)
        noise = gaussian_like(current, wide, stddev)
        noisy = jax.tree.map(
            lambda u, w, z: (w + z).astype(jnp.result_type(u)), updates, wide, noise
        )
        return noisy, AddGaussianNoiseState(following)

    return optax.GradientTransformation(init, update)
