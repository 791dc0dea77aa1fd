"""Independent Gaussian noise."""

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
