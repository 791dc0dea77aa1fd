"""Correlated noise on a lattice, the multiples of a spacing q.

Let s be the sums of all steps, C the strategy's matrix and z independent noise. In real
arithmetic, step t releases s_t + (C⁻¹z)_t, which is row t of C⁻¹(C s + z). On the
lattice, z is discrete Gaussian noise, and step t releases the integers
r_t = round((C s)_t / q) + z_t. Step t then computes q (C⁻¹r)_t, which depends only on
released integers. So the rounding errors of this computation cost no privacy. A
recursion in float64 computes the rows (C s)_t from sums that are not private.

**Sensitivity.** Let neighbouring data sets change C s by Δ over all steps, in L2 norm.
For each data set, rounding moves a coordinate of (C s)_t by at most q / 2, and the
errors of the recursion in float64 move the coordinate by at most E q. So the integers
change by at most Δ / q + (1 + 2 E) √(d T) in L2 norm, for d coordinates and T steps.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core.dtypes import cast_like, widen
from dpjax._core.keys import stream
from dpjax._core.meshes import wide_zeros_like, zeros_like
from dpjax._core.typing import ArrayLike, Key, Tree
from dpjax._matrices.strategy import Scaled, Strategy, check_strategy
from dpjax._matrices.streaming import buffered_stream, forward_stream, rounding_gain
from dpjax.noise._discrete import (
    DIGITS,
    check_draws,
    discrete_gaussian_like,
    divide_and_clip,
    lattice_spacing,
    round_and_add,
)
from dpjax.noise._gaussian import check_steps_left, transformation

# Rounding affects all later steps. So three draws make a fine lattice: a standard
# deviation is 33,554,944 lattice points, and rounding adds
# (1 + 2 E) √(d T) / 33,554,944 to μ.
DRAWS = 3
_FLOAT64 = 53  # the number of binary digits of a float64


class CorrelatedLatticeState(NamedTuple):
    """The state of `correlated_noise` with arithmetic="discrete".

    Keep the state as secret as the data: it holds sums without noise, and the key.

    Attributes:
      step: the number of steps done, i[].
      sums: the state of the recursion that computes C s, for the strategy's matrix C
        and the sums s of all steps without noise. The state consists of m float64
        numbers for each entry of a leaf, each stored as two 32-bit words,
        u32[m, 2, ...]; () if there is no recursion.
      released: the state of the recursion that computes C⁻¹r from the released integers
        r, f[m, ...] for each leaf; () if there is no recursion.
      key: the typed key from which `jax.random.fold_in` derives the key of each step.
    """

    step: jax.Array
    sums: Tree
    released: Tree
    key: Key


def lattice_roundings(
    strategy: Strategy, num_steps: int, digits: int = DIGITS
) -> float:
    """A bound on the distance that rounding adds to one coordinate of one step.

    Step t of `correlated_noise` with arithmetic="discrete" rounds (C s)_t / q to
    integers, where C is the strategy's matrix, s are the sums of all steps, and q is
    the lattice spacing. The bound is for the distance of these integers between two
    neighbouring data sets.

    Args:
      strategy: the strategy C, as for `correlated_noise` with arithmetic="discrete".
      num_steps: the number of steps.
      digits: the sums are clipped to ±2^digits, in units of the lattice spacing.

    Returns:
      1 + 2 E, in units of the lattice spacing. For each of the two data sets, rounding
      to an integer moves a coordinate by at most 1/2, and the errors of the float64
      recursion that computes C s move the coordinate by at most E.

    Example:
      >>> from dpjax import strategies
      >>> lattice_roundings(strategies.geometric(0.9), 1000)
      3.0
    """
    gain = rounding_gain(strategy, num_steps)
    return 1 + 2 * max(1.0, gain * 2.0 ** (digits - _FLOAT64))


def effective_dimension(
    strategy: Strategy, dimension: int, num_steps: int, digits: int
) -> int:
    """The dimension to pass to `lattice_noise`, to cover the rounding of all steps.

    Let C be the strategy's matrix, s the sums of all T steps with d coordinates, and q
    the lattice spacing. Rounding adds b √(d T) q to the sensitivity of C s, where
    `lattice_roundings` returns b. For the dimension D, `lattice_noise` adds at least
    √D q to the sensitivity S of one sum. The sensitivity of C s is S times a factor,
    which is at least the norm of a column of C. This norm is at least 1 / f, where f is
    the maximum of 1 and the factors of a scaled strategy. So D = b² d T f² suffices.

    Args:
      strategy: the strategy C, as for `correlated_noise` with arithmetic="discrete".
      dimension: d, the number of coordinates of a sum.
      num_steps: T, the number of steps.
      digits: the sums are clipped to ±2^digits, in units of the lattice spacing.

    Returns:
      D, rounded up to an integer.
    """
    moved, largest = lattice_roundings(strategy, num_steps, digits), 1.0
    if isinstance(strategy, Scaled):
        # NumPy computes the maximum here, since JAX would trace it under jit.
        largest = max(float(np.max(np.asarray(strategy.factors))), 1.0)
    return math.ceil(moved**2 * dimension * num_steps * largest**2)


def correlated_lattice_noise(
    strategy: Strategy,
    stddev: ArrayLike,
    *,
    num_steps: int,
    key: Key,
    digits: int = DIGITS,
) -> optax.GradientTransformation:
    """The optax transformation of `correlated_noise` with arithmetic="discrete".

    The lattice consists of the multiples of q = `lattice_spacing(stddev, 3)`. Sums are
    clipped to ±2^digits q.
    """
    strategy = check_strategy(strategy, num_steps)
    inverse = buffered_stream(strategy, num_steps)
    forward = forward_stream(strategy, num_steps)
    spacing = lattice_spacing(stddev, DRAWS)

    def init(params: Tree) -> CorrelatedLatticeState:
        check_draws(optax.tree.size(params), num_steps)

        def words(p: jax.Array) -> jax.Array:
            return zeros_like(p, jnp.uint32, (forward.rows, 2))

        return CorrelatedLatticeState(
            step=jnp.zeros((), jnp.int32),
            sums=jax.tree.map(words, params) if forward.rows else (),
            released=wide_zeros_like(params, (inverse.rows,)) if inverse.rows else (),
            key=stream(key, "discrete correlated noise"),
        )

    def update(updates: Tree, state: Any) -> tuple[Tree, CorrelatedLatticeState]:
        check_steps_left(state.step, num_steps)
        # With the minimum, the counter stops at num_steps + 1 and never overflows.
        step = jnp.minimum(state.step, num_steps) + 1
        # Inside jit no exception can depend on a value. So a NaN refuses the step.
        refusal = jnp.where(step <= num_steps, 0.0, jnp.nan)
        wide = widen(updates)
        key = jax.random.fold_in(state.key, step)
        noise = discrete_gaussian_like(key, wide, DRAWS)
        with jax.enable_x64(True):
            q = jnp.asarray(spacing, jnp.float64)
            in_units = jax.tree.map(lambda x: divide_and_clip(x, q, digits), wide)
            rows, memory = forward.noise(
                lambda _: in_units, step, jax.tree.map(_to_float64, state.sums)
            )
            sums = jax.tree.map(_to_words, memory)
            # All later results are functions of the released integers.
            lattice = jax.tree.map(
                lambda x, z, y: (round_and_add(x, z) * q + refusal).astype(y.dtype),
                rows,
                noise,
                wide,
            )
        private, released = inverse.noise(lambda _: lattice, step, state.released)
        private = cast_like(private, updates)
        return private, CorrelatedLatticeState(step, sums, released, state.key)

    return transformation(init, update)


def _to_float64(words: jax.Array) -> jax.Array:
    """Convert pairs of 32-bit words, u32[m, 2, ...], to float64 numbers f64[m, ...]."""
    return jax.lax.bitcast_convert_type(jnp.moveaxis(words, 1, -1), jnp.float64)


def _to_words(x: jax.Array) -> jax.Array:
    """Convert float64 numbers f64[m, ...] to pairs of 32-bit words, u32[m, 2, ...].

    A state stores words, since JAX has no float64 arrays unless `jax_enable_x64` is on.
    """
    return jnp.moveaxis(jax.lax.bitcast_convert_type(x, jnp.uint32), -1, 1)
