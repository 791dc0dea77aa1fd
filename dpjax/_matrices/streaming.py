"""The noise (C⁻¹z)_t step by step, from a buffer or by recomputing earlier draws.

Steps count from 1. `draw` gives z_t of any step t, and always the same z_t for the same
t. The memory (buffer) of a stream is a pytree like the parameters, whose leaves have
one more leading axis: the rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpjax._core import validate
from dpjax._core.typing import ArrayLike
from dpjax._core.typing import Tree as Leaves
from dpjax._matrices.strategy import LEAST, MOST, Scaled, Strategy, Tree
from dpjax._matrices.toeplitz import Toeplitz

Draw = Callable[[jax.Array], Leaves]


class NoiseStream(NamedTuple):
    """How the noise of a step is generated.

    Attributes:
      rows: how many vectors of the parameters' size the memory holds; 0 without memory.
      noise: a function of `draw`, the step and the memory. It returns the step's noise
        and the memory for the next step.
    """

    rows: int
    noise: Callable[[Draw, jax.Array, Leaves], tuple[Leaves, Leaves]]


def buffered_stream(strategy: Strategy, num_steps: int) -> NoiseStream:
    """The stream with buffered noise: one draw a step, and a memory."""
    if isinstance(strategy, Scaled):
        return _scale_stream(buffered_stream(strategy.strategy, num_steps), strategy)
    if isinstance(strategy, Tree):
        return buffered_tree(tree_weights(strategy.decay, num_steps))
    return _buffered_recursion(*_float32_polynomials(strategy))


def recomputed_stream(strategy: Strategy, num_steps: int) -> NoiseStream:
    """The stream with recomputed noise: no memory, and earlier draws are made again.

    Raises:
      ValueError: C⁻¹ is not banded.
    """
    if isinstance(strategy, Scaled):
        return _scale_stream(recomputed_stream(strategy.strategy, num_steps), strategy)
    if isinstance(strategy, Tree):
        return _recomputed_tree(tree_weights(strategy.decay, num_steps))
    numerator, denominator = _float32_polynomials(strategy)
    if numerator.size:
        raise ValueError(
            "buffer must be 'stored' for a strategy whose C⁻¹ is not banded; got "
            f"'regenerate' and numerator {numerator!r}."
        )
    return _recomputed_sum(denominator)


def _in_float32(name: str, value: object, rule: str, good: np.ndarray) -> None:
    # Training uses float32. A number that it would round is not the number that the
    # accountants read, so it is refused.
    held = np.asarray(value).astype(np.float32) == value
    if not np.all(good & held):
        raise ValueError(
            f"the strategy's {name} must be {rule} that float32 holds, as "
            f"dpjax.strategies rounds them; got {value!r}."
        )


def _concrete(name: str, given: object, ndim: int) -> np.ndarray:
    x = validate.concrete(given)
    if x is None or x.ndim != ndim:
        kind = "vector" if ndim else "number"
        raise ValueError(f"the strategy's {name} must be a known {kind}; got {x!r}.")
    return x


def _float32_polynomials(strategy: Toeplitz) -> tuple[np.ndarray, np.ndarray]:
    """The numerator and denominator, concrete and exactly held by float32."""
    known: list[np.ndarray] = []
    for name, given in zip(Toeplitz._fields, strategy, strict=True):
        x = _concrete(name, given, 1)
        _in_float32(name, x, "finite numbers", np.isfinite(x))
        known.append(x)
    numerator, denominator = known
    return numerator, denominator


def _scale_stream(recipe: NoiseStream, strategy: Scaled) -> NoiseStream:
    """The stream whose noise in step t is f_t times that of the given stream."""
    f = _concrete("factors", strategy.factors, 1)
    _in_float32("factors", f, "from 2**-20 to 2**20", (f >= LEAST) & (f <= MOST))
    factors = f.astype(np.float32)

    def noise(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        noise, memory = recipe.noise(draw, step, memory)
        factor = jnp.asarray(factors)[step - 1]
        return jax.tree.map(lambda y: factor.astype(y.dtype) * y, noise), memory

    return recipe._replace(noise=noise)


def _buffered_recursion(numerator: np.ndarray, denominator: np.ndarray) -> NoiseStream:
    """The stream y = D(L) / N(L) z, as a filter in transposed direct form II.

    The noise is y_t = z_t + s_1. Then row k of the memory, s_k, becomes
    s_{k+1} + d_k z_t − n_k y_t.
    """
    order = max(numerator.size, denominator.size)
    # Both polynomials get the longer length, so that one row update serves both.
    n, d = (np.pad(x, (0, order - x.size)) for x in (numerator, denominator))

    def remember(z: jax.Array, y: jax.Array, memory: jax.Array) -> jax.Array:
        # Coefficients vary along the rows' axis and broadcast over the leaf's own axes.
        column = (order,) + (1,) * z.ndim
        d_k, n_k = (x.reshape(column).astype(z.dtype) for x in (d, n))
        moved = jnp.concatenate([memory[1:], jnp.zeros_like(memory[:1])])
        return (moved + d_k * z[None] - n_k * y[None]).astype(memory.dtype)

    def noise(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        z = draw(step)
        if not order:
            return z, memory
        # Without divisions XLA on CPUs computes z twice: for y and for the memory. The
        # result of a division is computed once and stored, because a division counts as
        # expensive. The old first row then enters y alone, and XLA need not copy it
        # before the new one is written over it. XLA does not know that the divisor is
        # 1, as steps count from 1. It would turn a division by a number that no other
        # division shares into a product, and removes optimization barriers too early.
        one = jnp.where(step > 0, jnp.float32(1), jnp.nan)
        z = jax.tree.map(lambda z: z / one.astype(z.dtype), z)
        y = jax.tree.map(lambda z, m: (z + m[0]) / one.astype(z.dtype), z, memory)
        return y, jax.tree.map(remember, z, y, memory)

    return NoiseStream(order, noise)


def _recomputed_sum(denominator: np.ndarray) -> NoiseStream:
    """The stream y_t = z_t + Σ_k d_k z_{t−k}, which recomputes all earlier draws."""
    weights = np.append(1.0, denominator).astype(np.float32)

    def noise(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        def add(k: jax.Array, noise: Leaves) -> Leaves:
            # There are no draws before step 1. The loop still makes one, with weight 0.
            weight = jnp.where(k < step, jnp.asarray(weights)[k], 0.0)
            return _plus(noise, weight, draw(step - k))

        return jax.lax.fori_loop(1, weights.size, add, draw(step)), memory

    return NoiseStream(0, noise)


def _plus(noise: Leaves, weight: jax.Array, z: Leaves) -> Leaves:
    def add(y: jax.Array, z: jax.Array) -> jax.Array:
        return (y + weight.astype(y.dtype) * z).astype(y.dtype)

    return jax.tree.map(add, noise, z)


def tree_weights(decay: ArrayLike, num_steps: int) -> np.ndarray | jax.Array:
    """−β^{2^i} for each level i whose nodes a later step of the run subtracts, f32[k].

    A traced decay must be a float32. Where it is not in [0, 1), the weights are NaN.
    """
    # Level ⌊log₂ T⌋ has one node, and no step of the run subtracts it.
    sizes = 2.0 ** np.arange(num_steps.bit_length() - 1)
    if isinstance(decay, Tracer) and decay.dtype == np.float32:
        power = jnp.power(decay[None], sizes.astype(np.float32))
        return jnp.where((decay >= 0) & (decay < 1), -power, jnp.nan)
    beta = _concrete("decay", decay, 0)
    _in_float32("decay", beta, "in [0, 1), a number", (beta >= 0) & (beta < 1))
    return -np.power(np.float64(beta), sizes).astype(np.float32)


def _level(step: jax.Array) -> jax.Array:
    """The index of the lowest set bit of a step: the level of the node it completes."""
    return jax.lax.population_count((step & -step) - 1)


def buffered_tree(weights: np.ndarray | jax.Array) -> NoiseStream:
    """The stream y_t = z_t − Σ_{i<j} β^{2^i} z_{t−2^i}, with a memory of nodes.

    The sum is over the latest nodes of the levels below j, the level of step t. Row i
    of the memory holds the latest node of level i. The last level has no row, because
    no step subtracts its node. This node overwrites the row of the level below, which
    has been read for the last time.
    """

    def noise(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        z, level = draw(step), _level(step)
        if not weights.size:
            return z, memory

        def add(i: jax.Array, noise: Leaves) -> Leaves:
            row = jax.tree.map(
                lambda m: jax.lax.dynamic_index_in_dim(m, i, keepdims=False), memory
            )
            return _plus(noise, jnp.asarray(weights)[i], row)

        y = jax.lax.fori_loop(0, jnp.minimum(level, weights.size), add, z)
        # For the last level this index is out of range, and JAX clamps it to the last
        # row.
        return y, jax.tree.map(
            lambda m, z: jax.lax.dynamic_update_index_in_dim(
                m, z.astype(m.dtype), level, 0
            ),
            memory,
            z,
        )

    return NoiseStream(weights.size, noise)


def _recomputed_tree(weights: np.ndarray | jax.Array) -> NoiseStream:
    """The stream of `buffered_tree` without a memory: it draws earlier nodes again.

    A step makes one additional draw on average.
    """

    def noise(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        def add(i: jax.Array, noise: Leaves) -> Leaves:
            return _plus(noise, jnp.asarray(weights)[i], draw(step - (1 << i)))

        if not weights.size:
            return draw(step), memory
        levels = jnp.minimum(_level(step), weights.size)
        return jax.lax.fori_loop(0, levels, add, draw(step)), memory

    return NoiseStream(0, noise)
