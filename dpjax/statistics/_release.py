"""Releases of sums over private examples, with Gaussian noise and a privacy cost.

Each example x contributes a vector c(x) of L2 norm at most 1 to a sum over all
examples. A statistic is computed from such sums with noise. A release has three parts:

1. **Sum.** `sum_exactly` truncates each entry of a contribution towards zero to a
   multiple of 2⁻³². Truncation increases no norm. `sum_exactly` then adds up integers.
   The order of the addition therefore does not change the sum. One example changes the
   sum only by the example's truncated contribution.
2. **Noise.** Let z be the noise multiplier and t the number of sums. Each sum receives
   noise of standard deviation σ = z √t per coordinate. A sum may depend on all earlier
   noisy sums. With `arithmetic="discrete"`, the sum is rounded to a lattice, the
   multiples of a fixed spacing. σ then grows by at least the factor by which this
   rounding increases the sensitivity.
3. **Event.** The event describes the mechanism to accountants. If one example changes
   each sum by at most r in norm, each sum is a Gaussian mechanism with μ = r / (z √t).
   The release composes t such mechanisms adaptively. The release is therefore μ-GDP
   with μ = r / z, the square root of the sum of the mechanisms' μ² (Dong, Roth and Su
   2022, Corollary 2).

All other computations of a statistic use only the noisy sums, and are post-processing.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import meshes, rounding, validate
from dpjax._core.float64 import default_float
from dpjax._core.keys import stream
from dpjax._core.typing import Adjacency, Arithmetic, ArrayLike, Key
from dpjax.accounting import events
from dpjax.noise import _discrete

# Contributions are integers times 2⁻³². A sum of fewer than 2³¹ contributions of at
# most 1 each is below 2⁶³ in these units.
_UNIT = 2.0**-32
_ROW_LIMIT = 2**31
# The maximum number of entries of contributions that are in memory at the same time.
_BLOCK = 2**22
# One draw of the noise combines two draws from the table. The spacing is then about
# 2⁻¹⁷ of the standard deviation, and a coordinate saturates at 2⁴⁰ spacings, which is
# above 2²² standard deviations.
_DRAWS = 2
_LATTICE_RANGE = 2**22


@dataclasses.dataclass(frozen=True)
class Released:
    """A private result, and an event from which accountants compute the privacy cost.

    A `Released` is a pytree. If the event contains only Python numbers, the event is
    static in the pytree, so that `jax.jit` and `jax.vmap` do not round the numbers. The
    event describes one release. If `jax.vmap` makes n releases, the privacy cost is the
    composition of n copies of the event. One row of the data is one example. The
    guarantee protects a user only if every user has at most one row.

    Attributes:
      value: the private result, an array or a NamedTuple of arrays.
      event: the description of the mechanism for accountants, an `events.Gaussian`, or
        for `arithmetic="discrete"` an `events.OnLattice`.
      adjacency: the relation between the data sets that the guarantee compares.
    """

    value: Any
    event: events.Gaussian | events.OnLattice
    adjacency: Adjacency


def _flatten(released: Released) -> tuple[list[Any], Any]:
    value = jax.tree_util.GetAttrKey("value"), released.value
    event, adjacency = released.event, released.adjacency
    # An event of Python numbers is static. An event with arrays is a child of the tree.
    if all(isinstance(x, int | float) for x in jax.tree.leaves(event)):
        return [value], (event, adjacency)
    return [value, (jax.tree_util.GetAttrKey("event"), event)], (None, adjacency)


def _unflatten(structure: Any, children: Any) -> Released:
    event, adjacency = structure
    value, event = (*children, event) if event is not None else children
    return Released(value, event, adjacency)


jax.tree_util.register_pytree_with_keys(Released, _flatten, _unflatten)


class Noise(NamedTuple):
    """A function that adds noise to the sums from which a statistic is computed.

    The statistic's value may depend on the data only through the noisy sums.

    Attributes:
      key: a key for this statistic, derived from the user's key.
      stddev: the standard deviation of the noise in each coordinate, f64[].
      arithmetic: "real", or "discrete" for noise on a lattice.
    """

    key: Key
    stddev: jax.Array
    arithmetic: Arithmetic

    def __call__(self, sums: jax.Array, step: ArrayLike = 0) -> jax.Array:
        """Add noise to sums f64[k]; the noise of different steps is independent."""
        key = jax.random.fold_in(self.key, step)
        if self.arithmetic == "discrete":
            noise = _discrete.LatticeNoise(self.stddev, _DRAWS)
            return _discrete.release_on_lattice(key, sums, noise)
        # Draw in float32: JAX lowers a 64-bit draw wrongly in a program without x64.
        noise = jax.random.normal(key, sums.shape, jnp.float32)
        return sums + self.stddev * noise.astype(jnp.float64)


# A function of data, public parameters and a `Noise` that returns a private value.
Statistic = Callable[[Any, Any, Noise], Any]


class SharedArguments(NamedTuple):
    """The arguments that all statistics share.

    Attributes:
      noise_multiplier: the noise standard deviation divided by the maximum L2 norm of
        one example's contributions to all sums together, f[].
      key: one typed key, used only for this release.
      adjacency: the relation between the data sets that the guarantee compares.
      arithmetic: "real", or "discrete" for noise on a lattice.
    """

    noise_multiplier: ArrayLike
    key: Key
    adjacency: Adjacency
    arithmetic: Arithmetic


def release(
    name: str,
    statistic: Statistic,
    data: Any,
    params: Any,
    shared: SharedArguments,
    *,
    dimension: int,
    num_sums: int = 1,
    distance: float = 2.0,
) -> Released:
    """Release a statistic of private data, with an event for accountants.

    Args:
      name: the name of the statistic. The statistic's key is derived from the user's
        key and this name.
      statistic: a module-level function of the data, the public parameters and a
        `Noise`. The statistic may use the data only in `num_sums` noisy sums, to each
        of which an example contributes a vector of L2 norm at most 1.
      data: arrays with a leading axis of examples, as `as_examples` returns.
      params: the public parameters of the statistic, a pytree.
      shared: the noise multiplier, the key, the adjacency and the arithmetic.
      dimension: the number of entries of one sum.
      num_sums: the number of sums.
      distance: an upper bound on the L2 distance between the contributions of two
        examples to one sum, at least 1. The event under REPLACE depends on this bound.
    """
    validate.adjacency(shared.adjacency)
    validate.typed_key("key", shared.key)
    validate.one_of("arithmetic", shared.arithmetic, ("real", "discrete"))
    num_examples = len(jax.tree.leaves(data)[0])
    if num_examples >= _ROW_LIMIT:
        raise ValueError(f"data must have fewer than 2**31 rows; got {num_examples}.")
    validate.scalar("noise_multiplier", shared.noise_multiplier)
    validate.nonnegative("noise_multiplier", shared.noise_multiplier)
    concrete = validate.concrete(shared.noise_multiplier)
    z = jnp.asarray(shared.noise_multiplier) if concrete is None else float(concrete)
    # Without REPLACE, one example moves each sum only by its own contribution.
    factor = distance if shared.adjacency is Adjacency.REPLACE else 1.0
    event: events.Gaussian | events.OnLattice = events.Gaussian(divide_up(factor, z))
    if shared.arithmetic == "discrete":
        stddev = _lattice_stddev(z, dimension, num_sums, num_examples)
        # The factor 2 covers the factors e^{±4ϑ(2)} in `dpjax.noise._discrete`, which
        # are within 1e-33 of 1.
        draws = _DRAWS * dimension * num_sums
        event = events.OnLattice(event, 2 * draws * _discrete.TOTAL_VARIATION)
    else:
        stddev = rounding.round_up_float32("noise_multiplier", z, root_up(num_sums))
    dtype = default_float()  # the dtype outside of the context below
    promotion = jax.numpy_dtype_promotion("standard")
    ranks = jax.numpy_rank_promotion("allow")
    # In this context, JAX traces and runs statistics in float64.
    with jax.enable_x64(True), promotion, ranks:
        value = _run(
            name, statistic, data, params, shared.key, stddev, shared.arithmetic, dtype
        )
    return Released(value, event, shared.adjacency)


@functools.partial(
    jax.jit, static_argnames=("name", "statistic", "arithmetic", "dtype")
)
def _run(
    name: str,
    statistic: Statistic,
    data: Any,
    params: Any,
    key: Key,
    stddev: ArrayLike,
    arithmetic: Arithmetic,
    dtype: np.dtype,
) -> Any:
    """Compute a statistic in float64, and return its value in the given dtype."""

    def widen(x: ArrayLike) -> jax.Array:
        return jnp.asarray(x).astype(jnp.float64)

    def compute(data: Any, params: Any, key: Key, stddev: ArrayLike) -> Any:
        noise = Noise(stream(key, f"statistics {name}"), widen(stddev), arithmetic)
        data, params = jax.tree.map(widen, (data, params))
        value = statistic(data, params, noise)
        return jax.tree.map(lambda x: x.astype(dtype), value)

    # Since sums are exact, a mesh changes no bit of the result.
    return meshes.let_compiler_shard(compute, data, jax.P())(data, params, key, stddev)


def sum_exactly(
    contribute: Callable[[jax.Array], jax.Array], rows: jax.Array
) -> jax.Array:
    """Sum the contributions of all rows as integers, and return the sum f64[k].

    Each entry of a contribution is truncated towards zero to a multiple of 2⁻³². An
    entry that is not finite counts as zero. The sum of the truncated entries is exact,
    except that a sum above 2²¹ is rounded to float64.

    Args:
      contribute: a function from rows f64[b, m] to their contributions f64[b, k], each
        of L2 norm at most 1. The contribution of a row of NaN must be zero or NaN,
        since rows of NaN pad the data.
      rows: the examples, f64[n, m].
    """

    def sum_in_units(rows: jax.Array) -> jax.Array:
        contributions = contribute(rows)
        finite = jnp.where(jnp.isfinite(contributions), contributions, 0.0)
        # Truncation towards zero increases no coordinate's magnitude, and so no norm.
        return jnp.sum(jnp.trunc(finite / _UNIT).astype(jnp.int64), axis=0)

    count, width = rows.shape
    size = jax.eval_shape(contribute, rows).shape[1]
    length = max(1, _BLOCK // max(size, width, 1))
    if count <= length:
        total = sum_in_units(rows)
    else:
        rows = jnp.pad(rows, ((0, -count % length), (0, 0)), constant_values=jnp.nan)
        blocks = rows.reshape(-1, length, width)
        start = jnp.zeros(size, jnp.int64)
        total, _ = jax.lax.scan(lambda t, b: (t + sum_in_units(b), None), start, blocks)
    # Above 2⁵³, the conversion rounds by at most 2⁻⁵³ of the sum. A coordinate on the
    # lattice is below 2⁴⁰ spacings q, so this error is at most 2⁻¹³ q. Rounding d
    # coordinates to the lattice adds a distance of at most √d q (1 + 2⁻¹¹). This bound
    # covers the conversion error on both data sets, and an error of 2⁻¹³ q of the
    # quotient.
    return total.astype(jnp.float64) * _UNIT


def _lattice_stddev(
    z: float | jax.Array, dimension: int, num_sums: int, num_examples: int
) -> ArrayLike:
    """Compute the noise's standard deviation for sums that are rounded to a lattice.

    Rounding increases the sensitivity by a factor. The result is z √num_sums times at
    least this factor, where z is the noise multiplier.

    Raises:
      ValueError: z is traced, num_examples is too large for z, or rounding would more
        than double the sensitivity.
    """
    if not isinstance(z, float):
        raise ValueError(
            "noise_multiplier must be a concrete number, not a traced value, with "
            f"arithmetic='discrete'; got {z!r}."
        )
    per_sum = z * root_up(num_sums)
    if 0 < _LATTICE_RANGE * per_sum < num_examples:
        raise ValueError(
            f"data must have at most {int(_LATTICE_RANGE * per_sum)} rows with "
            "arithmetic='discrete', which is 2**22 times the standard deviation of the "
            "noise in a sum of contributions of norm at most 1; "
            f"got {num_examples}."
        )
    # The sensitivity is at least 1. So a factor that suffices for a sensitivity of 1
    # also suffices for the actual sensitivity.
    noise = _discrete.lattice_noise(
        1.0, per_sum, dimension, maximum=per_sum, draws=_DRAWS
    )
    return rounding.round_up_float32("noise_multiplier", noise.stddev)


def divide_up(factor: float, z: float | jax.Array) -> ArrayLike:
    """Return factor / z, rounded up, or infinity if z is 0."""
    if not isinstance(z, float):
        return jnp.nextafter(factor / jnp.asarray(z), jnp.inf)
    if z == 0:
        return math.inf
    mu = factor / z
    exact = Fraction(factor) / Fraction(z)
    return mu if Fraction(mu) >= exact else math.nextafter(mu, math.inf)


def root_up(number: float) -> float:
    """The square root of a Python number, rounded up if it is not exact."""
    root = math.sqrt(number)
    return root if Fraction(root) ** 2 >= number else math.nextafter(root, math.inf)


def as_positive(name: str, value: ArrayLike) -> ArrayLike:
    """Check that a number is positive and finite, and return it."""
    validate.scalar(name, value)
    validate.positive(name, value)
    return value


def as_examples(
    name: str, value: Any, *, ndim: int | None = None
) -> jax.Array | np.ndarray:
    """Return the value as an array of real numbers with a leading axis of examples.

    Raises:
      ValueError: the value is not an array of real numbers, or has no leading axis, or
        does not have `ndim` axes.
    """
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
    except (TypeError, ValueError):  # lists of different lengths
        array = np.empty(0, object)
    kinds = jnp.bool_, jnp.integer, jnp.floating
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise ValueError(f"{name} must be an array of real numbers; got {value!r}.")
    if array.ndim == 0 or (ndim is not None and array.ndim != ndim):
        rule = "a leading axis of examples" if ndim is None else f"{ndim} axes"
        raise ValueError(f"{name} must have {rule}; got shape {array.shape}.")
    return array


def as_num_examples(value: ArrayLike | None, length: int, adjacency: Adjacency) -> Any:
    """The public divisor of a sum: the given number, or else the length of the data.

    Raises:
      ValueError: the number is missing although the length of the data is private, or
        the number is not positive.
    """
    if value is None:
        if validate.adjacency(adjacency) is Adjacency.ADD_REMOVE:
            raise ValueError(
                "num_examples must be a public number under Adjacency.ADD_REMOVE, "
                "where the length of the data is private; got None."
            )
        value = length
    return as_positive("num_examples", value)
