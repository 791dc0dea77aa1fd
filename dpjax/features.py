"""Features of one example, which cost no privacy and have norms of at most 1.

`oriented_gradients`, `bins` and `join` compute one vector from one example, and read no
other example, no label and no number that was fitted to private data. Private training
on features therefore has the guarantee of the same training on the examples. Use
`jax.vmap` to map a data set. `decimal_edges` chooses edges for `bins` from public
numbers.

Linear models on such features often need less noise than networks on raw data (Tramèr
and Boneh 2021, https://arxiv.org/abs/2011.11660). A private mean of the features
(`statistics.mean` with `clip_norm=1`) and `dpjax.recipe` complete the pipeline.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike

# The divisor of a cell includes the mean energy of all cells, times this weight.
# Without this term, cells without a contour would get the same contrast as other cells.
_MEAN_WEIGHT = 0.1
# This factor ensures that rounding in float32 makes no vector longer than 1.
_FLOAT32_FACTOR = 1 - 2.0**-20


def oriented_gradients(image: ArrayLike, *, cells: int, orientations: int) -> jax.Array:
    """The centered histogram of oriented gradients of one image, a unit vector.

    The image is divided into a grid of `cells` × `cells` rectangular cells. Each cell
    has a histogram of the directions of the image's gradient, with `orientations`
    directions that are equally spaced on the whole circle. A pixel adds the length of
    its gradient to the histograms. This length is divided linearly between the two
    nearest directions, and between the nearest cells.

    Let r_i be the root mean square of the norms of the histograms of the 3 × 3 cells
    around the cell i, where the cells at the border are repeated outside the image. Let
    r be the root mean square of the norms of all histograms. The histogram of the cell
    i is divided by √(r_i² + r² / 10), and each entry is replaced by its square root.
    Then the mean of all entries is subtracted, and the vector is divided by its norm.
    The result does not change if the image is multiplied by a positive number, or if a
    constant is added to the image.

    Args:
      image: one image f[h, w], or f[h, w, c] with channels. The histograms of channels
        are added up.
      cells: the number of cells along each axis, at least 1.
      orientations: the number of directions, at least 2.

    Returns:
      A vector f[cells · cells · orientations] in the image's dtype, or in the default
      float dtype if the image has integers or booleans. The norm of the vector is 1
      except for rounding, and never above 1. If all entries are almost equal before the
      mean is subtracted, as for a constant image, then the result is zero. An image
      with a value that is not finite gives values that are not finite.

    Raises:
      ValueError: an argument has a wrong shape or is out of range, or image is complex.

    Privacy: the function reads only one example.

    Reference: Dalal and Triggs (2005), section 6, with signed gradients and one
    neighborhood for each cell in place of overlapping blocks.

    Example:
      >>> import jax.numpy as jnp
      >>> ramp = jnp.tile(jnp.arange(8.0), (8, 1))  # rises to the right
      >>> found = oriented_gradients(ramp, cells=1, orientations=4)
      >>> print([f"{x:.2f}" for x in found])
      ['0.87', '-0.29', '-0.29', '-0.29']
    """
    cells = validate.static_int("cells", cells, minimum=1)
    orientations = validate.static_int("orientations", orientations, minimum=2)
    pixels = jnp.asarray(image)
    if pixels.ndim not in (2, 3) or 0 in pixels.shape or jnp.iscomplexobj(pixels):
        raise ValueError(f"image must be real, [h, w] or [h, w, c]; got {image!r}.")
    if not jnp.issubdtype(pixels.dtype, jnp.floating):
        pixels = pixels.astype(jnp.result_type(float))
    dtype = pixels.dtype
    # Sums are in float32 or wider. The entries are divided by their maximum, so that
    # squares neither overflow nor underflow.
    x = pixels.astype(jnp.promote_types(dtype, jnp.float32))
    x = x.reshape(*x.shape[:2], -1)
    x = x - jnp.mean(x, axis=(0, 1), keepdims=True)
    x = _divide_or_zero(x, jnp.max(jnp.abs(x)))

    # Central differences, with the first and the last value repeated at the edges.
    bordered = jnp.pad(x, ((1, 1), (1, 1), (0, 0)), mode="edge")
    down = (bordered[2:, 1:-1] - bordered[:-2, 1:-1]) / 2
    right = (bordered[1:-1, 2:] - bordered[1:-1, :-2]) / 2
    angle = jnp.arctan2(down, right) * (orientations / (2 * math.pi))
    half = orientations / 2
    direction = jnp.arange(orientations, dtype=x.dtype).reshape(1, 1, 1, -1)
    distance = jnp.abs((angle[..., None] - direction + half) % orientations - half)
    votes = jnp.maximum(0, 1 - distance) * jnp.hypot(down, right)[..., None]
    rows, columns = (_cell_weights(size, cells, x.dtype) for size in x.shape[:2])
    sums = jnp.einsum(
        "ih,jw,hwco->ijo", rows, columns, votes, precision=jax.lax.Precision.HIGHEST
    )

    energy = jnp.sum(jnp.square(sums), axis=-1)
    padded = jnp.pad(energy, 1, mode="edge")
    windows = (padded[i : i + cells, j : j + cells] for i in range(3) for j in range(3))
    mean_energy = sum(windows) / 9 + _MEAN_WEIGHT * jnp.mean(energy)
    flat = jnp.sqrt(_divide_or_zero(sums, jnp.sqrt(mean_energy)[..., None])).reshape(-1)
    flat = flat - jnp.mean(flat)
    # If no orientation and no cell stands out, the result is zero.
    norm = jnp.linalg.norm(flat)
    threshold = 1e-4 * math.sqrt(flat.size)
    unit = _divide_or_zero(flat, jnp.where(norm > threshold, norm, 0) + 0 * norm)
    return (unit * _rounding_factor(dtype)).astype(dtype)


def bins(value: ArrayLike, edges: ArrayLike) -> jax.Array:
    """Encode the bin of a number among public edges, as a unit vector.

    The result joins two codes of equal norm. The first code is the one-hot code of the
    bin. A linear model of this code can represent any step function. The second code is
    the thermometer code: +1 for each edge that is at most the value, and −1 for each
    edge above the value. In this code, neighbouring bins share weights, so that
    examples in one bin also inform the prediction in the bins beside it.

    Args:
      value: one number, f[].
      edges: increasing numbers f[k] with k >= 1 that do not depend on the data, such as
        the result of `decimal_edges`. An edge belongs to the bin above the edge.

    Returns:
      A vector f[2 k + 1] in the default float dtype. Its norm is 1 except for rounding,
      and never above 1. A NaN, which stands for a missing value, gives zeros.

    Raises:
      ValueError: value is not one number, or edges are empty, not finite or not
        increasing. Traced edges only need to be a vector of floats.

    Privacy: the function reads only one example. Edges that are quantiles of private
    data cost privacy (`statistics.quantile`).

    Example:
      >>> print([f"{x:.2f}" for x in bins(37.0, [20.0, 40.0])])
      ['0.00', '0.71', '0.00', '0.50', '-0.50']
    """
    validate.scalar("value", value)
    edge_values = validate.real_vector("edges", edges)
    if edge_values is not None and not (
        edge_values.size
        and np.all(np.isfinite(edge_values))
        and np.all(np.diff(edge_values) > 0)
    ):
        raise ValueError(f"edges must be finite, increasing numbers; got {edges!r}.")
    x, cuts = (jnp.asarray(a, jnp.result_type(float)) for a in (value, edges))
    above = x[None] >= cuts
    bin_index = jnp.sum(above, dtype=jnp.int32)
    one_hot = (jnp.arange(cuts.size + 1) == bin_index[None]).astype(x.dtype)
    signs = jnp.where(above, 1.0, -1.0).astype(x.dtype)
    code = jnp.concatenate([one_hot, signs / math.sqrt(cuts.size)])
    unit = code * (math.sqrt(0.5) * _rounding_factor(x.dtype))
    return jnp.where(jnp.isnan(x)[None], jnp.zeros_like(unit), unit)


def decimal_edges(low: float, high: float, *, parts: int = 10) -> np.ndarray:
    """Choose edges for `bins` from the range of a column alone.

    The edges are of two kinds: the boundaries between equal parts of the range, which
    resolve evenly spread values, and decimal numbers, which resolve values near 0. The
    decimal numbers are 0, and ±1, ±2 and ±5 times the four largest powers of ten up to
    max(|low|, |high|).

    Args:
      low: the lower end of the range.
      high: the upper end of the range, above low. Both ends must be public, and not the
        extremes of private data.
      parts: the number of equal parts, at least 1.

    Returns:
      Increasing edges f64[k], strictly between low and high. If parts is 1, or no
      float64 number is between low and high, the result may be empty. `bins` does not
      accept an empty result.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> print(decimal_edges(0, 100, parts=4))
      [ 0.1  0.2  0.5  1.   2.   5.  10.  20.  25.  50.  75. ]
    """
    validate.scalar("low", low)
    validate.scalar("high", high)
    parts = validate.static_int("parts", parts, minimum=1)
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"high must be above low={low!r}, both finite; got {high!r}.")
    top = math.floor(math.log10(max(abs(low), abs(high))))
    decades = [10.0**k for k in range(top - 3, top + 1)]
    decimal = [m * x for x in decades for m in (1, 2, 5)]
    # The halves cannot overflow: the difference of the ends could.
    equal = 2 * np.linspace(low / 2, high / 2, parts + 1)[1:-1]
    edges = np.unique(np.concatenate([equal, decimal, np.negative(decimal), [0.0]]))
    return edges[(edges > low) & (edges < high)]


def join(*parts: ArrayLike) -> jax.Array:
    """Join features of several kinds into one vector of norm at most 1.

    Args:
      *parts: at least one vector f[d_i] of norm at most 1.

    Returns:
      The concatenated vectors, divided by the square root of the number of parts,
      f[Σ d_i].

    Raises:
      ValueError: there is no part, or a part is not a vector.

    Privacy: the function reads only one example.

    Example:
      >>> import jax
      >>> joined = join(bins(1.0, [0.0]), jax.nn.one_hot(1, 2))
      >>> print([f"{x:.2f}" for x in joined])
      ['0.00', '0.50', '0.50', '0.00', '0.71']
    """
    vectors = [jnp.asarray(x) for x in parts]
    if not vectors or any(x.ndim != 1 for x in vectors):
        raise ValueError(f"parts must be one or more vectors; got {parts!r}.")
    joined = jnp.concatenate(vectors) * 1.0  # integers become floats
    return joined * (_rounding_factor(joined.dtype) / math.sqrt(len(vectors)))


def _rounding_factor(dtype: np.dtype) -> float:
    """A factor below 1, which ensures that rounding makes no unit vector longer than 1.

    The factor depends on `dtype`, the dtype of the vector's entries.
    """
    return min(_FLOAT32_FACTOR, 1 - 4 * float(jnp.finfo(dtype).eps))


def _divide_or_zero(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """The quotient x / divisor; where the divisor is 0, the product 0 · x."""
    divisor = jnp.broadcast_to(divisor, x.shape)
    return jnp.where(divisor == 0, 0 * x, x / jnp.where(divisor == 0, 1, divisor))


def _cell_weights(size: int, cells: int, dtype: np.dtype) -> jax.Array:
    """Divide each pixel of an image axis between the nearest cells of a grid.

    Args:
      size: the number of pixels along the axis.
      cells: the number of cells of equal size along the axis.
      dtype: the dtype of the result.

    Returns:
      The weight of each pixel in each cell, f[cells, size]. The weights of a pixel sum
      to 1.
    """
    centers = (np.arange(cells) + 0.5) * size / cells - 0.5
    distance = np.abs(np.arange(size)[None] - centers[:, None]) * cells / size
    weights = np.maximum(0, 1 - distance)
    return jnp.asarray(weights / weights.sum(axis=0, keepdims=True), dtype)
