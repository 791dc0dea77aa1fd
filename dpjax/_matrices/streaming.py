"""Generate the correlated noise (C⁻¹z)_t step by step, for the matrix C of a strategy.

Steps count from 1. The function `draw` maps a step t to the independent Gaussian vector
z_t, and gives the same z_t in every call with the same t. The noise of a step depends
on draws of earlier steps. So a `NoiseStream` either stores sums of earlier draws in a
memory, or calls `draw` again for earlier steps. The memory is a pytree with the
structure of the parameters. Each leaf of the memory has an additional leading axis,
whose entries are called rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dpjax._core.typing import ArrayLike
from dpjax._core.typing import Tree as Leaves
from dpjax._matrices.strategy import (
    Scaled,
    Strategy,
    Tree,
    float32_decay,
    float32_factors,
    float32_polynomials,
)

Draw = Callable[[jax.Array], Leaves]


class NoiseStream(NamedTuple):
    """A generator of the correlated noise (C⁻¹z)_t, step by step.

    C is the matrix of a strategy. The function `draw` maps a step t to the independent
    Gaussian vector z_t. The memory stores sums of draws, which later steps need.

    Attributes:
      rows: the number of vectors of the parameters' size in the memory; 0 without
        memory.
      generate: a function of `draw`, the step and the memory. The function returns the
        step's noise and the memory for the next step.
    """

    rows: int
    generate: Callable[[Draw, jax.Array, Leaves], tuple[Leaves, Leaves]]


def buffered_stream(strategy: Strategy, num_steps: int) -> NoiseStream:
    """Make a stream of a strategy's noise, with a memory of sums of earlier draws.

    The stream draws one Gaussian vector in each step.
    """
    if isinstance(strategy, Scaled):
        return _scale_stream(buffered_stream(strategy.strategy, num_steps), strategy)
    if isinstance(strategy, Tree):
        return buffered_tree(tree_weights(strategy.decay, num_steps))
    return _buffered_recursion(*float32_polynomials(strategy))


def recomputed_stream(strategy: Strategy, num_steps: int) -> NoiseStream:
    """Make a stream of a strategy's noise that stores no vectors.

    If the noise of a step depends on draws of earlier steps, the stream repeats these
    draws. num_steps is the number of steps of the run.

    Raises:
      ValueError: the strategy is a Toeplitz matrix, possibly scaled, whose inverse C⁻¹
        is not banded. (For a `Tree`, C⁻¹ is not banded either. But the noise of a
        `Tree` in each step is a weighted sum of few draws, which can be repeated.)
    """
    if isinstance(strategy, Scaled):
        return _scale_stream(recomputed_stream(strategy.strategy, num_steps), strategy)
    if isinstance(strategy, Tree):
        return _recomputed_tree(tree_weights(strategy.decay, num_steps))
    numerator, denominator = float32_polynomials(strategy)
    if numerator.size:
        raise ValueError(
            "buffer must be 'stored' for a strategy whose C⁻¹ is not banded; got "
            f"'regenerate' and numerator {numerator!r}."
        )
    return _recomputed_sum(denominator)


def forward_stream(strategy: Strategy, num_steps: int) -> NoiseStream:
    """Make a stream of the vectors (C s)_t, for a strategy C and sums s_t of gradients.

    Here `NoiseStream.generate` returns (C s)_t in place of noise. The argument `draw`
    of `generate` maps a step t to the sum s_t, and is called for the current step only.
    The memory has the dtype of the sums. The memory depends on the data and is not
    private.
    """
    if isinstance(strategy, Scaled):
        return _divide_stream(forward_stream(strategy.strategy, num_steps), strategy)
    if isinstance(strategy, Tree):
        weights = tree_weights(strategy.decay, num_steps)
        return buffered_tree(-weights, stores_result=True)
    numerator, denominator = float32_polynomials(strategy)
    # C = N(L) / D(L): the filter of C⁻¹ with its polynomials exchanged.
    return _buffered_recursion(denominator, numerator)


def rounding_gain(strategy: Strategy, num_steps: int) -> float:
    """Bound the rounding error of each coordinate of the vectors of `forward_stream`.

    The bound is in units of u B. Here B bounds the absolute value of each coordinate of
    the vectors that enter the stream, and u is the unit roundoff of their dtype.
    """
    if isinstance(strategy, Scaled):
        min_factor = float(np.min(float32_factors(strategy)))
        # Dividing a sum by its factor rounds once, and changes the largest magnitude.
        return (rounding_gain(strategy.strategy, num_steps) + 1) / min_factor
    if isinstance(strategy, Tree):
        weights = np.abs(np.asarray(tree_weights(strategy.decay, num_steps)))
        # Σ_i β^i bounds a result, and also the total effect of an error at each node.
        decay = float(float32_decay(strategy.decay))
        powers = decay ** np.arange(min(num_steps, 2**20))
        return 3 * (weights.size + 1) * (float(np.sum(powers)) * (1 + 1e-6)) ** 2 + 1
    from scipy.signal import lfilter  # here, since importing SciPy takes long

    numerator, denominator = float32_polynomials(strategy)
    n, d = (np.append(1.0, x.astype(np.float64)) for x in (numerator, denominator))
    impulse = np.zeros(num_steps)
    impulse[0] = 1.0
    # A result is at most Σ |c_k| B, for the coefficients c_k of N / D. The filter 1 / D
    # turns errors in the memory into errors of the results.
    result_gain = np.sum(np.abs(lfilter(n, d, impulse)))
    error_gain = np.sum(np.abs(lfilter([1.0], d, impulse)))
    memory_gain = np.sum(np.abs(n[1:])) + np.sum(np.abs(d[1:])) * result_gain
    order = max(numerator.size, denominator.size)
    # A row is a sum of three terms, with four roundings; a result has two more.
    return float(4 * order * memory_gain * error_gain + 2 * result_gain + 1)


def _divide_stream(generator: NoiseStream, strategy: Scaled) -> NoiseStream:
    """Change a stream: the input `draw(t)` is divided by the strategy's factor f_t."""
    factors = float32_factors(strategy)

    def generate(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        def draw_divided(step: jax.Array) -> Leaves:
            factor = jnp.asarray(factors)[step - 1]
            return jax.tree.map(lambda s: s / factor.astype(s.dtype), draw(step))

        return generator.generate(draw_divided, step, memory)

    return generator._replace(generate=generate)


def _scale_stream(generator: NoiseStream, strategy: Scaled) -> NoiseStream:
    """Change a stream: the noise of step t is scaled by the strategy's factor f_t."""
    factors = float32_factors(strategy)

    def generate(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        noise, memory = generator.generate(draw, step, memory)
        factor = jnp.asarray(factors)[step - 1]
        return jax.tree.map(lambda y: factor.astype(y.dtype) * y, noise), memory

    return generator._replace(generate=generate)


def _buffered_recursion(numerator: np.ndarray, denominator: np.ndarray) -> NoiseStream:
    """Make a stream of the noise y = D(L) / N(L) z, where the z_t are the draws.

    L is the shift by one step. The polynomials N and D have the coefficients n_k and
    d_k after a leading 1. The filter is in transposed direct form II: let s_k be row k
    of the memory. The noise of step t is y_t = z_t + s_1. Then s_k becomes
    s_{k+1} + d_k z_t − n_k y_t.
    """
    order = max(numerator.size, denominator.size)
    # Both polynomials get the longer length, so that one row update serves both.
    n, d = (np.pad(x, (0, order - x.size)) for x in (numerator, denominator))

    def next_memory(z: jax.Array, y: jax.Array, memory: jax.Array) -> jax.Array:
        # Coefficients vary along the rows' axis and broadcast over the leaf's own axes.
        column = (order,) + (1,) * z.ndim
        d_k, n_k = (x.reshape(column).astype(z.dtype) for x in (d, n))
        shifted = jnp.concatenate([memory[1:], jnp.zeros_like(memory[:1])])
        return (shifted + d_k * z[None] - n_k * y[None]).astype(memory.dtype)

    def generate(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        z = draw(step)
        if not order:
            return z, memory
        # Without divisions XLA on CPUs computes z twice: for y and for the memory. The
        # result of a division is computed once and stored, because a division counts as
        # expensive. The old first row then enters y alone, and XLA need not copy this
        # row before writing the new row. XLA does not know that the divisor is 1, as
        # steps count from 1. XLA would turn a division into a product if no other
        # division had this divisor, and removes optimization barriers too early.
        one = jnp.where(step > 0, jnp.float32(1), jnp.nan)
        z = jax.tree.map(lambda z: z / one.astype(z.dtype), z)
        y = jax.tree.map(lambda z, m: (z + m[0]) / one.astype(z.dtype), z, memory)
        return y, jax.tree.map(next_memory, z, y, memory)

    return NoiseStream(order, generate)


def _recomputed_sum(denominator: np.ndarray) -> NoiseStream:
    """Make a stream of the noise y_t = z_t + Σ_k d_k z_{t−k}, without a memory.

    z_t is the draw of step t. The d_k are the entries of `denominator`.
    """
    weights = np.append(1.0, denominator).astype(np.float32)

    def generate(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        def add(k: jax.Array, noise: Leaves) -> Leaves:
            # For steps before step 1, the loop makes a draw with weight 0.
            weight = jnp.where(k < step, jnp.asarray(weights)[k], 0.0)
            return _add_weighted(noise, weight, draw(step - k))

        return jax.lax.fori_loop(1, weights.size, add, draw(step)), memory

    return NoiseStream(0, generate)


def _add_weighted(noise: Leaves, weight: jax.Array, z: Leaves) -> Leaves:
    def add(y: jax.Array, z: jax.Array) -> jax.Array:
        return (y + weight.astype(y.dtype) * z).astype(y.dtype)

    return jax.tree.map(add, noise, z)


def tree_weights(decay: ArrayLike, num_steps: int) -> np.ndarray | jax.Array:
    """The weights −β^{2^i} for i = 0, ..., k − 1, f32[k], where β is the decay.

    Here k = ⌊log₂ num_steps⌋. In the binary tree mechanism (`Tree`), weight i belongs
    to the noise of a tree node that covers 2^i steps. The noise of a later step
    contains this noise, times weight i. If a traced decay is not in [0, 1), the weights
    are NaN.

    Raises:
      ValueError: a concrete decay is not in [0, 1) or not exact in float32, or the
        dtype of a traced decay is not float32.
    """
    # Level ⌊log₂ T⌋ has one node, and no step of the run subtracts it.
    sizes = 2.0 ** np.arange(num_steps.bit_length() - 1)
    if isinstance(decay, Tracer) and decay.dtype == np.float32:
        power = jnp.power(decay[None], sizes.astype(np.float32))
        return jnp.where((decay >= 0) & (decay < 1), -power, jnp.nan)
    return -np.power(np.float64(float32_decay(decay)), sizes).astype(np.float32)


def node_level(step: jax.Array) -> jax.Array:
    """The level of the largest node, in a binary tree, that ends with a step, i32[].

    The leaves of the tree are the steps. A node of level j covers 2^j steps. The level
    is the number of trailing zero bits of the step, and 32 for step 0.
    """
    # x & −x isolates the lowest set bit. Subtracting one from that bit gives a one for
    # each trailing zero.
    return jax.lax.population_count((step & -step) - 1)


def buffered_tree(
    weights: np.ndarray | jax.Array, *, stores_result: bool = False
) -> NoiseStream:
    """Make a stream of the noise y_t = z_t + Σ_{i<j} w_i z_{t−2^i} of a binary tree.

    The w_i are the weights. A node of level j covers 2^j steps. The draw z_t is the
    noise of the largest node that ends with step t, and j is the level of this node.
    Row i of the memory stores the noise of the latest node of level i. The highest
    level in the run has a single node, whose noise no later step needs. So this level
    has no row. The node's noise overwrites the last row, which no later step reads.

    With `stores_result`, the rows store y_t in place of z_t. The stream is then
    y_t = z_t + Σ_{i<j} w_i y_{t−2^i}.
    """

    def generate(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        z, level = draw(step), node_level(step)
        if not weights.size:
            return z, memory

        def add(i: jax.Array, noise: Leaves) -> Leaves:
            row = jax.tree.map(
                lambda m: jax.lax.dynamic_index_in_dim(m, i, keepdims=False), memory
            )
            return _add_weighted(noise, jnp.asarray(weights)[i], row)

        y = jax.lax.fori_loop(0, jnp.minimum(level, weights.size), add, z)
        # For the highest level of the run, the index `level` is out of range, and JAX
        # clamps the index to the last row.
        return y, jax.tree.map(
            lambda m, z: jax.lax.dynamic_update_index_in_dim(
                m, z.astype(m.dtype), level, 0
            ),
            memory,
            y if stores_result else z,
        )

    return NoiseStream(weights.size, generate)


def _recomputed_tree(weights: np.ndarray | jax.Array) -> NoiseStream:
    """Make the stream of `buffered_tree` without a memory, by repeating earlier draws.

    A step repeats one earlier draw on average.
    """

    def generate(draw: Draw, step: jax.Array, memory: Leaves) -> tuple[Leaves, Leaves]:
        def add(i: jax.Array, noise: Leaves) -> Leaves:
            return _add_weighted(noise, jnp.asarray(weights)[i], draw(step - (1 << i)))

        if not weights.size:
            return draw(step), memory
        levels = jnp.minimum(node_level(step), weights.size)
        return jax.lax.fori_loop(0, levels, add, draw(step)), memory

    return NoiseStream(0, generate)
