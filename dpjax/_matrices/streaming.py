"""(C⁻¹z)_t step by step, for each kind of strategy: with a memory, or by drawing again.

Steps count from 1. `draw` gives z_t of any step, always the same; a memory has a row
more than once the parameters' size for each of a number of rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import Tree as Leaves
from dpjax._matrices.strategy import LEAST, MOST, Scaled, Strategy, Tree
from dpjax._matrices.toeplitz import Toeplitz

Draw = Callable[[jax.Array], Leaves]


class NoiseStream(NamedTuple):
    """How the noise of a step is made.

    Attributes:
      rows: how many vectors the memory has; 0 if there is none.
      noise: from `draw`, the step and the memory to the noise and the memory after it.
    """

    rows: int
    noise: Callable[[Draw, jax.Array, Leaves], tuple[Leaves, Leaves]]


def buffered_stream(strategy: Strategy, num_steps: int) -> NoiseStream:
    """One draw a step, and a memory."""
    if isinstance(strategy, Scaled):
        return _scale_stream(buffered_stream(strategy.strategy, num_steps), strategy)
    if isinstance(strategy, Tree):
        return _buffered_tree(_weights(strategy, num_steps))
    return _buffered_recursion(*_float32_polynomials(strategy))


def recomputed_stream(strategy: Strategy, num_steps: int) -> NoiseStream:
    """No memory: what earlier steps drew is drawn again.

    Raises:
      ValueError: C⁻¹ has no few diagonals.
    """
    if isinstance(strategy, Scaled):
        return _scale_stream(recomputed_stream(strategy.strategy, num_steps), strategy)
    if isinstance(strategy, Tree):
        return _recomputed_tree(_weights(strategy, num_steps))
    numerator, denominator = _float32_polynomials(strategy)
    if numerator.size:
        raise ValueError(
            "buffer must be 'stored' for a strategy whose C⁻¹ is not banded; got "
            f"'regenerate' and numerator {numerator!r}."
        )
    return _recomputed_sum(denominator)


def _in_float32(name: str, value: object, rule: str, good: np.ndarray) -> None:
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
    """The strategy's two polynomials, as accountants have them: known, in float32."""
    known: list[np.ndarray] = []
    for name, given in zip(Toeplitz._fields, strategy, strict=True):
        x = _concrete(name, given, 1)
        _in_float32(name, x, "finite numbers", np.isfinite(x))
        known.append(x)
    numerator, denominator = known
    return numerator, denominator


def _scale_stream(recipe: NoiseStream, strategy: Scaled) -> NoiseStream:
    """The noise of the recipe, f_t times."""
    f = _concrete("factors", strategy.factors, 1)
    _in_float32("factors", f, "from 2**-20 to 2**20", (f >= LEAST) & (f <= MOST))
    factors = f.astype(np.float32)

    def noise(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        noise, memory = recipe.noise(draw, step, memory)
        factor = jnp.asarray(factors)[step - 1]
        return jax.tree.map(lambda y: factor.astype(y.dtype) * y, noise), memory

    return recipe._replace(noise=noise)


def _buffered_recursion(numerator: np.ndarray, denominator: np.ndarray) -> NoiseStream:
    """Y = D(L) / N(L) z by the transposed direct form II.

    y_t = z_t + s_1, and then s_k becomes s_{k+1} + d_k z_t − n_k y_t.
    """
    order = max(numerator.size, denominator.size)
    n, d = (np.pad(x, (0, order - x.size)) for x in (numerator, denominator))

    def remember(z: jax.Array, y: jax.Array, memory: jax.Array) -> jax.Array:
        column = (order,) + (1,) * z.ndim
        d_k, n_k = (x.reshape(column).astype(z.dtype) for x in (d, n))
        moved = jnp.concatenate([memory[1:], jnp.zeros_like(memory[:1])])
        return (moved + d_k * z[None] - n_k * y[None]).astype(memory.dtype)

    def noise(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        z = draw(step)
        if not order:
            return z, memory
        y = jax.tree.map(lambda z, m: z + m[0], z, memory)
        return y, jax.tree.map(remember, z, y, memory)

    return NoiseStream(order, noise)


def _recomputed_sum(denominator: np.ndarray) -> NoiseStream:
    """y_t = z_t + Σ_k d_k z_{t−k}, with all draws made again."""
    weights = np.append(1.0, denominator).astype(np.float32)

    def noise(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        def add(k: jax.Array, noise: Leaves) -> Leaves:
            weight = jnp.where(k < step, jnp.asarray(weights)[k], 0.0)
            return _plus(noise, weight, draw(step - k))

        return jax.lax.fori_loop(1, weights.size, add, draw(step)), memory

    return NoiseStream(0, noise)


def _plus(noise: Leaves, weight: jax.Array, z: Leaves) -> Leaves:
    def add(y: jax.Array, z: jax.Array) -> jax.Array:
        return (y + weight.astype(y.dtype) * z).astype(y.dtype)

    return jax.tree.map(add, noise, z)


def _weights(strategy: Tree, num_steps: int) -> np.ndarray:
    """−β^{2^i} for the levels whose nodes are taken back before the run ends."""
    beta = _concrete("decay", strategy.decay, 0)
    _in_float32("decay", beta, "in [0, 1), a number", (beta >= 0) & (beta < 1))
    sizes = 2.0 ** np.arange(num_steps.bit_length() - 1)
    return -np.power(np.float64(beta), sizes).astype(np.float32)


def _level(step: jax.Array) -> jax.Array:
    """The lowest bit of a step, which is the level of the node that it completes."""
    return jax.lax.population_count((step & -step) - 1)


def _buffered_tree(weights: np.ndarray) -> NoiseStream:
    """y_t = z_t − Σ_{i<j} β^{2^i} z_{t−2^i}: the latest nodes of the levels below.

    Row i holds the latest node of level i. The last level has none, as nothing takes
    its nodes back; it overwrites the row before, which has been read for the last time.
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
        return y, jax.tree.map(
            lambda m, z: jax.lax.dynamic_update_index_in_dim(
                m, z.astype(m.dtype), level, 0
            ),
            memory,
            z,
        )

    return NoiseStream(weights.size, noise)


def _recomputed_tree(weights: np.ndarray) -> NoiseStream:
    """The same with the nodes drawn again: one more a step, on average."""

    def noise(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        def add(i: jax.Array, noise: Leaves) -> Leaves:
            return _plus(noise, jnp.asarray(weights)[i], draw(step - (1 << i)))

        if not weights.size:
            return draw(step), memory
        levels = jnp.minimum(_level(step), weights.size)
        return jax.lax.fori_loop(0, levels, add, draw(step)), memory

    return NoiseStream(0, noise)
