"""A private center and scale of features."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpjax._core import keys, validate
from dpjax._core.typing import Adjacency, Arithmetic, ArrayLike, Key
from dpjax.accounting import events
from dpjax.statistics._checks import as_examples, as_num_examples
from dpjax.statistics._moments import variance
from dpjax.statistics._release import Released, divide_up, root_up
from dpjax.statistics._sums import mean


class Standardization(NamedTuple):
    """A map of features, x ↦ (x − center) / scale.

    Attributes:
      center: the center of each feature, f[...].
      scale: the scale of each feature, f[...], positive.
    """

    center: jax.Array
    scale: jax.Array

    def __call__(self, x: ArrayLike) -> jax.Array:
        """The standardized features f[*b, ...], for features x of this shape."""
        # Arrays of equal rank broadcast, even if JAX is set to refuse other ranks.
        x = jnp.asarray(x)
        shape = (1,) * (x.ndim - self.center.ndim) + self.center.shape
        return (x - self.center.reshape(shape)) / self.scale.reshape(shape)


def standardize(
    data: ArrayLike,
    *,
    clip_norm: ArrayLike,
    noise_multiplier: ArrayLike,
    key: Key,
    adjacency: Adjacency,
    share: float = 0.5,
    num_examples: ArrayLike | None = None,
    arithmetic: Arithmetic = "real",
) -> Released:
    """Estimate a center and a scale of features, by a private mean and variances.

    Args:
      data: the private examples, f[n, ...].
      clip_norm: C, positive, the bound on two L2 norms: that of an example for the
        mean, and that of an example minus the center for the variances.
      noise_multiplier: z, positive and not traced. The whole release costs as much
        privacy as one `mean` with the noise multiplier z.
      key: one typed key, used only for this release.
      adjacency: the relation between the data sets that the event compares.
      share: the share of μ² that the center costs, in (0, 1). The scale costs the rest.
      num_examples: the public number to divide by, as in `mean`.
      arithmetic: "real" or "discrete", as in `mean`.

    Returns:
      A `Released`: a `Standardization` with arrays f[...], and the event of both
      releases. If a variance is below the standard deviation of its noise, this
      standard deviation replaces it, so that mere noise is not scaled up.

    Raises:
      ValueError: as for `mean`; share is not in (0, 1); noise_multiplier is traced or
        0.

    Privacy: the release is μ-GDP with μ = adjacency.sensitivity_factor / z. The
    center is a `mean`, and the scale is from a `variance` about this center. These are
    two Gaussian mechanisms, and the second one depends on the result of the first.

    Reference: Dong, Roth and Su (2022), Corollary 2.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import Adjacency
      >>> x = jnp.array([[0.5, 0.1], [0.3, -0.1]] * 2_000)
      >>> released = standardize(
      ...     x, clip_norm=1.0, noise_multiplier=1.0,
      ...     key=jax.random.key(0), adjacency=Adjacency.ZERO_OUT)
      >>> print(released.value(x[:2]).round(1))
      [[ 1.  1.]
       [-1. -1.]]
    """
    data = as_examples("data", data)
    validate.typed_key("key", key)
    validate.open_unit("share", share)
    z = validate.positive_float("noise_multiplier", noise_multiplier)
    divisor = as_num_examples(num_examples, len(data), validate.adjacency(adjacency))
    # With the adjacency's sensitivity factor f, the center has μ² = share (f / z)², and
    # the scale has the rest of (f / z)². Squares of μ add up (Dong, Roth and Su 2022,
    # Corollary 2, https://arxiv.org/abs/1905.02383). About a center, f is √2 instead of
    # 2 under REPLACE. The margin covers the four roundings of each noise multiplier.
    margin = 1 + 2.0**-49
    ratio = root_up(2) / 2 if adjacency is Adjacency.REPLACE else 1.0
    z_center = z / math.sqrt(share) * margin
    z_scale = z * ratio / math.sqrt(1 - share) * margin
    of_center, of_scale = jax.random.split(keys.stream(key, "statistics standardize"))
    release = {
        "clip_norm": clip_norm,
        "adjacency": adjacency,
        "num_examples": divisor,
        "arithmetic": arithmetic,
    }
    center = mean(data, noise_multiplier=z_center, key=of_center, **release)
    about = center.value
    spread = variance(
        data, noise_multiplier=z_scale, key=of_scale, center=about, **release
    )
    scale = _scale(spread.value, clip_norm, z_scale, divisor)
    event = events.Gaussian(divide_up(adjacency.sensitivity_factor, z))
    parts = center.event, spread.event
    apart = [x.total_variation for x in parts if isinstance(x, events.OnLattice)]
    return Released(
        Standardization(center.value, scale),
        events.OnLattice(event, sum(apart)) if apart else event,
        adjacency,
    )


@jax.jit
def _scale(
    variances: jax.Array, clip_norm: ArrayLike, z: ArrayLike, divisor: ArrayLike
) -> jax.Array:
    """The root of each variance, or of its noise's standard deviation if larger."""
    least = (jnp.asarray(clip_norm) ** 2 * z / divisor).astype(variances.dtype)
    return jnp.sqrt(jnp.maximum(variances, least))
