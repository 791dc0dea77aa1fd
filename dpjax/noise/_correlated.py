"""Optax transformations that add noise which is correlated across steps.

Any optimizer may follow in the chain. `tree_momentum` adds the noise of tree
aggregation, and returns a momentum of the noisy sums.

**Lattice.** With arithmetic="discrete", the noise is on a lattice, the multiples of a
spacing q. Let s be the sums of all steps, C the strategy's matrix and z independent
noise. In real arithmetic, step t releases s_t + (C⁻¹z)_t, which is row t of
C⁻¹(C s + z). On the lattice, z is discrete Gaussian noise, and step t releases the
integers r_t = round((C s)_t / q) + z_t. Step t then computes q (C⁻¹r)_t, which depends
only on released integers. So the rounding errors of this computation cost no privacy. A
recursion in float64 computes (C s)_t from the sums s, which have no noise yet.

**Sensitivity.** Let Δ be the L2 distance between the C s of two neighbouring data sets,
over all steps. For each data set, rounding moves a coordinate of (C s)_t by at most
q / 2, and the errors of the recursion in float64 move the coordinate by at most E q. So
the L2 distance between the integers without noise is at most
Δ / q + (1 + 2 E) √(d T), for d coordinates and T steps.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core import validate
from dpjax._core.dtypes import cast_like, widen
from dpjax._core.keys import stream
from dpjax._core.meshes import wide_zeros_like, zeros_like
from dpjax._core.rounding import round_down_float32, round_up_float32
from dpjax._core.typing import Arithmetic, ArrayLike, Key
from dpjax._core.typing import Tree as Leaves
from dpjax._matrices import streaming
from dpjax._matrices.strategy import Scaled, Strategy, Tree, check_strategy
from dpjax.noise import _discrete
from dpjax.noise._gaussian import (
    check_step_limit,
    check_steps_left,
    gaussian_like,
    transformation,
)

Buffer = Literal["stored", "regenerate"]


class CorrelatedNoiseState(NamedTuple):
    """The state of `correlated_noise`.

    Keep the state as secret as the data: it holds the key.

    Attributes:
      step: the number of steps done, i[].
      memory: for each leaf, m rows f[m, ...] in float32 or wider; () if m = 0, as with
        buffer="regenerate". The rows are computed from the noise drawn in earlier
        steps. Later steps compute their noise from the rows.
      key: the typed key from which `jax.random.fold_in` derives the key of each step.
      stddev: the standard deviation, per coordinate, of the independent noise that is
        drawn in each step, f[]. The standard deviation must not change during a run.
    """

    step: jax.Array
    memory: Leaves
    key: Key
    stddev: jax.Array


def correlated_noise(
    strategy: Strategy,
    stddev: ArrayLike,
    *,
    num_steps: int,
    key: Key,
    buffer: Buffer = "stored",
    arithmetic: Arithmetic = "real",
) -> optax.GradientTransformation:
    """Add the noise (C⁻¹z)_t to the sum of each step t, for independent Gaussian z_t.

    C is a lower triangular matrix, called the strategy. The noise of later steps
    cancels part of the noise of earlier steps. So the sum of updates, which an
    optimizer accumulates, has less noise than with independent noise. All later
    transformations in the chain (momentum, Adam, schedules) are post-processing, and
    cost no privacy.

    Args:
      strategy: the matrix C, as `dpjax.strategies` makes it.
      stddev: the standard deviation of z per coordinate, f[], in the units of the
        incoming sum (noise multiplier times clip norm), 0 or from 2⁻¹⁰⁰ to 2¹⁰⁰.
      num_steps: T, the number of steps that the guarantee covers; static.
      key: one typed key, as `dpjax.random_key` makes, for one transformation and one
        run. The state holds another key, derived from this key.
      buffer: whether to store earlier noise or to draw it again. "stored" retains m
        vectors, and draws one Gaussian vector per step. The number m is ⌊log₂ T⌋ for a
        tree, and otherwise `num_vectors` of the strategy's Toeplitz matrix.
        "regenerate" retains no vectors, and draws the Gaussian vectors of earlier steps
        again. "regenerate" is for strategies with banded C⁻¹ (`geometric`,
        `banded_inverse`, scaled or not) and for `strategies.tree`. With "regenerate",
        the sums must have the same dtypes in all steps and, inside `jax.shard_map`, the
        same sharding. Otherwise a vector drawn again would differ from the vector drawn
        first. For the same key, both modes give the same noise up to rounding.
      arithmetic: "real", or "discrete" for noise on the lattice of the multiples of
        q = stddev / 33,554,680. Let s be the sums of all steps. With discrete Gaussian
        noise z, step t then releases the integers r_t = round((C s)_t / q) + z_t. The
        result is q (C⁻¹r)_t, and the guarantee holds for the bits of all r_t.
        "discrete" needs buffer="stored" and a positive stddev. The state then holds two
        more 32-bit words for each number of the buffer. Each entry of a sum is clipped
        to [−2⁴⁰ q, 2⁴⁰ q]. If an entry of a sum is not finite, this entry of the result
        is NaN in this step. The entry is also NaN in all later steps, unless C is
        diagonal or a tree. If C is a tree, the entry may be NaN in some later steps.

    Returns:
      An optax transformation. Sums and noise are computed in float32 or wider; the
      result is cast to the incoming dtype. A step after num_steps steps raises
      ValueError outside jit, and gives NaN updates inside jit. Updates are also NaN if
      stddev changes during the run (under `optax.inject_hyperparams`), since no
      guarantee holds then.

    Raises:
      ValueError: the strategy is invalid, has a `num_vectors` above num_steps, is
        scaled by more or fewer than num_steps factors, has coefficients that float32
        cannot represent, or does not support "regenerate"; stddev is out of range (a
        JAX array may give NaN updates instead); num_steps is traced, or not from 1 to
        2³¹ − 2; key is not a typed key; buffer or arithmetic is unknown; an update is
        not a real floating-point array; the state holds vectors, and an update's shape
        differs from the parameter's; inside `jax.shard_map`, check_vma is False. With
        "discrete", further errors are: buffer is "regenerate"; stddev is 0; 3 d T
        exceeds 2⁵⁰ for d coordinates.

    Privacy: with sums of sensitivity Δ and stddev = σΔ, all T results together are
    μ-GDP for μ = `accounting.correlated.mu(strategy, σ, ...)`, even if each sum depends
    on earlier results. The guarantee is for real arithmetic and ideal Gaussian noise.
    The guarantee covers the results but not the state: anyone who has the key can
    subtract the noise.

    With arithmetic="discrete", let Δ be the sensitivity of a sum as computed in
    floating point, and let d be the number of coordinates. Then the T results together
    have at most the δ(ε) of a μ'-GDP mechanism plus d T 2⁻⁹⁵ (1 + e^ε), where μ' = μ +
    (1 + 2 E) √(d T) / 33,554,680. Let B be a number such that the float64 recursion for
    C s has rounding errors of at most B 2⁻⁵³ times the largest absolute value of an
    entry of s. Then E is the maximum of 1 and 2⁻¹³ B. E may be above 1 for strategies
    with a long memory. `noise.lattice_roundings` returns 1 + 2 E. The reason for this
    guarantee: each coordinate that a step releases has, up to a factor e^{±1e-32} in
    every probability, the distribution of a post-processing of the same coordinate with
    Gaussian noise (see `add_discrete_gaussian_noise`). The state, which must stay
    secret, also holds sums without noise.

    Leaves, masks, meshes and `jax.vmap` are treated as in `dpjax.add_gaussian_noise`.
    The state has the sharding of the parameters.

    Reference: Denisov et al. (2022), https://arxiv.org/abs/2202.08312, show that the
    guarantee also holds for sums that depend on earlier releases.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import strategies
      >>> tx = correlated_noise(
      ...     strategies.geometric(0.5), 1.0, num_steps=1000, key=jax.random.key(0))
      >>> sums = jnp.zeros(1000)
      >>> state, total = tx.init(sums), 0.0
      >>> for _ in range(16):
      ...     noise, state = tx.update(sums, state)
      ...     total = total + noise
      >>> print(f"{noise.std():.1f} and {total.std():.1f}")  # independent: 1 and 4
      1.1 and 2.2
    """
    validate.scalar("stddev", stddev)
    validate.nonnegative("stddev", stddev)
    num_steps = check_step_limit(num_steps)
    validate.typed_key("key", key)
    validate.one_of("buffer", buffer, ("stored", "regenerate"))
    validate.one_of("arithmetic", arithmetic, ("real", "discrete"))
    if arithmetic == "discrete":
        if buffer != "stored":
            raise ValueError(
                "buffer must be 'stored' with arithmetic='discrete', because the "
                f"sums of earlier steps cannot be drawn again; got {buffer!r}."
            )
        validate.positive("stddev", stddev)
        return correlated_lattice_noise(strategy, stddev, num_steps=num_steps, key=key)
    make_stream = (
        streaming.buffered_stream if buffer == "stored" else streaming.recomputed_stream
    )
    generator = make_stream(check_strategy(strategy, num_steps), num_steps)
    # Rounding up to float32 can only increase the noise.
    float32_stddev = round_up_float32("stddev", stddev)

    def init(params: Leaves) -> CorrelatedNoiseState:
        return CorrelatedNoiseState(
            step=jnp.zeros((), jnp.int32),
            memory=wide_zeros_like(params, (generator.rows,)) if generator.rows else (),
            key=stream(key, "correlated noise"),
            # A copy, since the caller may donate the state's buffers, while the closure
            # still needs the original.
            stddev=jnp.array(float32_stddev, jnp.float32, copy=True),
        )

    def update(updates: Leaves, state: Any) -> tuple[Leaves, CorrelatedNoiseState]:
        check_steps_left(state.step, num_steps)
        # With the minimum, the counter stops at num_steps + 1 and never overflows.
        step = jnp.minimum(state.step, num_steps) + 1
        wide = widen(updates)
        if generator.rows:
            jax.tree.map(_check_shape, wide, state.memory)

        def draw(step: jax.Array) -> Leaves:
            """The independent Gaussian noise of a step, shaped like the updates."""
            key = jax.random.fold_in(state.key, step)
            return gaussian_like(key, wide, state.stddev)

        noise, memory = generator.generate(draw, step, state.memory)
        is_guaranteed = (step <= num_steps) & (state.stddev == float32_stddev)
        # Inside jit no exception can depend on a value. So NaN noise refuses the step.
        nan_if_refused = jnp.where(is_guaranteed, 0.0, jnp.nan)
        private = jax.tree.map(
            lambda w, n: w + (n + nan_if_refused.astype(n.dtype)), wide, noise
        )
        return cast_like(private, updates), state._replace(step=step, memory=memory)

    return transformation(init, update)


def _check_shape(update: jax.Array, rows: jax.Array, num_axes: int = 1) -> None:
    """Raise ValueError unless the shape of `update` is the shape of one row of `rows`.

    The shape of a row is the shape of `rows` without the first `num_axes` axes.
    """
    # A smaller update would be broadcast, and several entries would get the same noise.
    if update.shape != (shape := rows.shape[num_axes:]):
        raise ValueError(
            "updates must have the shapes of the parameters that init received; got "
            f"{update.shape} for {shape}."
        )


# Rounding affects all later steps. So the noise is a sum of three draws, on a fine
# lattice: the standard deviation is 33,554,680 times the spacing, and rounding adds
# (1 + 2 E) √(d T) / 33,554,680 to μ.
DRAWS = 3
_FLOAT64 = 53  # the number of binary digits of the significand of a float64


class CorrelatedLatticeState(NamedTuple):
    """The state of `correlated_noise` with arithmetic="discrete".

    Keep the state as secret as the data: it holds sums without noise, and the key.

    Attributes:
      step: the number of steps done, i[].
      sums: for each leaf, the state of the recursion that computes C s, where C is the
        strategy's matrix, and s are the sums of all steps without noise; () if there is
        no recursion. The state consists of m float64 numbers for each entry of the
        leaf. Each float64 number is stored as two 32-bit words, u32[m, 2, ...].
      released: for each leaf, the state f[m, ...] of the recursion that computes
        q C⁻¹r from the released integers r, where q is the lattice spacing; () if there
        is no recursion.
      key: the typed key from which `jax.random.fold_in` derives the key of each step.
      spacing: the lattice spacing q as one float64, stored as two 32-bit words, u32[2].
        The spacing must not change during a run, since `sums` is in units of q.
    """

    step: jax.Array
    sums: Leaves
    released: Leaves
    key: Key
    spacing: jax.Array


def lattice_roundings(
    strategy: Strategy, num_steps: int, digits: int = _discrete.DIGITS
) -> float:
    """Bound how much rounding to the lattice adds to the sensitivity of a coordinate.

    Step t of `correlated_noise` with arithmetic="discrete" rounds (C s)_t / q to
    integers, where C is the strategy's matrix, s are the sums of all steps, and q is
    the lattice spacing. For two neighbouring data sets and one coordinate of (C s)_t,
    the distance between the two integers exceeds the distance between the two exact
    numbers by at most the result.

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
    gain = streaming.rounding_gain(strategy, num_steps)
    return 1 + 2 * max(1.0, gain * 2.0 ** (digits - _FLOAT64))


def effective_dimension(
    strategy: Strategy, dimension: int, num_steps: int, digits: int
) -> int:
    """The dimension to pass to `lattice_noise`, to cover the rounding of all steps.

    Let C be the strategy's matrix, s the sums of all T steps with d coordinates, and q
    the lattice spacing. Rounding adds b √(d T) q to the sensitivity of C s, where b is
    the result of `lattice_roundings`. For a dimension D, `lattice_noise` adds at least
    √D q to the sensitivity S of one sum. The sensitivity of C s is c S, where c is at
    least the norm of every column of C. The entries on the diagonal of C are 1 / f_t
    for the factors f_t of a scaled strategy, and 1 for other strategies. So c is at
    least 1 / f, where f is the maximum of 1 and all f_t. The dimension D = b² d T f²
    therefore ensures that c √D q is at least b √(d T) q.

    Args:
      strategy: the strategy C, as for `correlated_noise` with arithmetic="discrete".
      dimension: d, the number of coordinates of a sum.
      num_steps: T, the number of steps.
      digits: the sums are clipped to ±2^digits, in units of the lattice spacing.

    Returns:
      D, rounded up to an integer.
    """
    roundings, max_factor = lattice_roundings(strategy, num_steps, digits), 1.0
    if isinstance(strategy, Scaled):
        # NumPy computes the maximum, since JAX would trace the maximum under jit.
        max_factor = max(float(np.max(np.asarray(strategy.factors))), 1.0)
    return math.ceil(roundings**2 * dimension * num_steps * max_factor**2)


def correlated_lattice_noise(
    strategy: Strategy,
    stddev: ArrayLike,
    *,
    num_steps: int,
    key: Key,
    digits: int = _discrete.DIGITS,
) -> optax.GradientTransformation:
    """Make the transformation of `correlated_noise` with arithmetic="discrete".

    The lattice consists of the multiples of q = `lattice_spacing(stddev, 3)`. Entries
    of sums are clipped to [−2^digits q, 2^digits q].
    """
    strategy = check_strategy(strategy, num_steps)
    inverse = streaming.buffered_stream(strategy, num_steps)
    forward = streaming.forward_stream(strategy, num_steps)
    spacing = _discrete.lattice_spacing(stddev, DRAWS)

    def init(params: Leaves) -> CorrelatedLatticeState:
        _discrete.check_draws(optax.tree.size(params), num_steps)

        def words(p: jax.Array) -> jax.Array:
            return zeros_like(p, jnp.uint32, (forward.rows, 2))

        with jax.enable_x64(True):
            spacing_words = _split(jnp.asarray(spacing, jnp.float64))
        return CorrelatedLatticeState(
            step=jnp.zeros((), jnp.int32),
            sums=jax.tree.map(words, params) if forward.rows else (),
            released=wide_zeros_like(params, (inverse.rows,)) if inverse.rows else (),
            key=stream(key, "discrete correlated noise"),
            spacing=spacing_words,
        )

    def update(updates: Leaves, state: Any) -> tuple[Leaves, CorrelatedLatticeState]:
        check_steps_left(state.step, num_steps)
        # With the minimum, the counter stops at num_steps + 1 and never overflows.
        step = jnp.minimum(state.step, num_steps) + 1
        wide = widen(updates)
        if forward.rows:
            jax.tree.map(lambda w, x: _check_shape(w, x, 2), wide, state.sums)
        key = jax.random.fold_in(state.key, step)
        noise = _discrete.discrete_gaussian_like(key, wide, DRAWS)
        with jax.enable_x64(True):
            q = jnp.asarray(spacing, jnp.float64)
            is_guaranteed = (step <= num_steps) & jnp.all(_split(q) == state.spacing)
            # Inside jit no exception can depend on a value. So a NaN refuses the step.
            nan_if_refused = jnp.where(is_guaranteed, 0.0, jnp.nan)
            clipped = jax.tree.map(
                lambda x: _discrete.divide_and_clip(x, q, digits), wide
            )
            rows, memory = forward.generate(
                lambda _: clipped, step, jax.tree.map(_to_float64, state.sums)
            )
            sums = jax.tree.map(_to_words, memory)

            def release(x: jax.Array, z: jax.Array, wide_sum: jax.Array) -> jax.Array:
                released = _discrete.round_and_add(x, z) * q + nan_if_refused
                return released.astype(wide_sum.dtype)

            # All later results are functions of the released integers.
            lattice = jax.tree.map(release, rows, noise, wide)
        private, released = inverse.generate(lambda _: lattice, step, state.released)
        private = cast_like(private, updates)
        return private, CorrelatedLatticeState(
            step, sums, released, state.key, state.spacing
        )

    return transformation(init, update)


def _to_float64(words: jax.Array) -> jax.Array:
    """Convert pairs of 32-bit words, u32[m, 2, ...], to float64 numbers f64[m, ...]."""
    return jax.lax.bitcast_convert_type(jnp.moveaxis(words, 1, -1), jnp.float64)


def _to_words(x: jax.Array) -> jax.Array:
    """Convert float64 numbers f64[m, ...] to pairs of 32-bit words, u32[m, 2, ...].

    A state stores words, since JAX has no float64 arrays unless `jax_enable_x64` is on.
    """
    return jnp.moveaxis(_split(x), -1, 1)


def _split(x: jax.Array) -> jax.Array:
    """Convert float64 numbers f64[*b] to pairs of 32-bit words, u32[*b, 2]."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


class TreeMomentumState(NamedTuple):
    """The state of `tree_momentum`.

    Keep the state as secret as the data: it holds the key.

    Attributes:
      noise: the state of `correlated_noise` with the strategy `strategies.tree`.
      momentum: the momentum Σ_i β^{t−i} (g_i + y_i) after t steps, f[...] for each leaf
        in float32 or wider, where g_i is the incoming sum of step i, and y_i is the
        noise added to that sum.
      decay: the momentum coefficient β, f[], rounded down to float32. The decay must
        not change during a run.
    """

    noise: CorrelatedNoiseState
    momentum: Leaves
    decay: jax.Array


def tree_momentum(
    decay: ArrayLike,
    stddev: ArrayLike,
    *,
    num_steps: int,
    key: Key,
    buffer: Buffer = "stored",
) -> optax.GradientTransformation:
    """Replace each step's sum by a private momentum of all sums so far.

    With g_i the incoming sum of step i, the update after step t is

        m̂_t = (1 − β) (Σ_{i<=t} β^{t−i} g_i + N_t),

    where N_t is the noise of tree aggregation. A node of the tree is an interval of 2^k
    steps, and has its own noise. N_t is the sum of the noise of O(log t) nodes that
    together cover the steps 1..t, weighted by powers of β. The variance of N_t is at
    most ⌊log₂ t⌋ + 1 times the variance of a node's noise. Independent noise of the
    same variance in every g_i would give a factor near 1 / (1 − β²) for large t. The
    transformation first applies `correlated_noise` with `strategies.tree(decay)`, which
    adds the noise y_t = N_t − β N_{t−1} to g_t. The momentum m_t = β m_{t−1} + g_t +
    y_t of these noisy sums then contains the noise N_t. The update is
    m̂_t = (1 − β) m_t.

    Args:
      decay: the momentum coefficient β, f[], in [0, 1).
      stddev: the standard deviation, per coordinate, of the noise of a tree node, f[],
        in the units of the incoming sum (noise multiplier times clip norm), 0 or from
        2⁻¹⁰⁰ to 2¹⁰⁰.
      num_steps: T, the number of steps that the guarantee covers; static.
      key: one typed key, as `dpjax.random_key` makes, for one transformation and one
        run. The state holds another key, derived from this key.
      buffer: whether to store earlier noise or to draw it again. "stored" retains ⌊log₂
        T⌋ vectors, and draws one Gaussian vector per step. "regenerate" retains no
        vectors, and draws two Gaussian vectors per step on average. For the same key,
        both modes give the same noise up to rounding.

    Returns:
      An optax transformation. Sums and noise are computed in float32 or wider; the
      result is cast to the incoming dtype. A step after num_steps steps raises
      ValueError outside jit, and gives NaN updates inside jit. Updates are also NaN if
      decay or stddev changes during the run (under `optax.inject_hyperparams`), since
      no guarantee holds then.

    Raises:
      ValueError: decay is outside [0, 1); stddev is out of range (a JAX array may give
        NaN updates instead); num_steps is traced, or not from 1 to 2³¹ − 2; key is not
        a typed key; buffer is unknown; an update is not a real floating-point array, or
        the update's shape differs from the parameter's; inside `jax.shard_map`,
        check_vma is False.

    Privacy: with sums of sensitivity Δ and stddev = σΔ, all T updates together are
    μ-GDP for μ = `accounting.tree.momentum_mu(σ, ...)`, even if each g_i depends on
    earlier updates. The state holds the decay rounded down to float32, and the stddev
    rounded up to float32. The guarantee holds for these values too, since μ grows with
    decay and falls with stddev. The guarantee is for real arithmetic and ideal Gaussian
    noise. The guarantee covers the updates but not the state: anyone who has the key or
    the retained vectors can subtract the noise.

    Leaves, masks, meshes and `jax.vmap` are treated as in `dpjax.add_gaussian_noise`.
    The state has the sharding of the parameters.

    Reference: Tran and Cutkosky (2022), Algorithm 1, whose α is 1 − β. Here noise is
    drawn only for nodes that are left children, since no other nodes are in N_t.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = tree_momentum(0.5, 0.0, num_steps=3, key=jax.random.key(0))
      >>> state = tx.init(jnp.zeros(()))
      >>> for _ in range(3):
      ...     momentum, state = tx.update(jnp.ones(()), state)
      ...     print(momentum)
      0.5
      0.75
      0.875
    """
    validate.scalar("decay", decay)
    validate.half_open_unit("decay", decay)
    validate.typed_key("key", key)
    # Rounding the decay down does not increase μ, since μ grows with the decay.
    float32_decay = round_down_float32(decay)
    noise = correlated_noise(
        Tree(float32_decay),
        stddev,
        num_steps=num_steps,
        key=stream(key, "tree noise"),
        buffer=buffer,
    )

    def init(params: Leaves) -> TreeMomentumState:
        return TreeMomentumState(
            noise=noise.init(params),  # pyright: ignore
            momentum=wide_zeros_like(params),
            # A copy, since the caller may donate the state's buffers, while the closure
            # still needs the original.
            decay=jnp.array(float32_decay, jnp.float32, copy=True),
        )

    def update(updates: Leaves, state: Any) -> tuple[Leaves, TreeMomentumState]:
        wide = widen(updates)
        jax.tree.map(lambda w, m: _check_shape(w, m, 0), wide, state.momentum)
        noisy, noise_state = noise.update(wide, state.noise)
        # Tran and Cutkosky (2022), Algorithm 1, https://arxiv.org/abs/2210.06328:
        # m_t = β m_{t−1} + g_t. Here the factor 1 − β is applied only at the end. The
        # noise of the sums g_t adds up to the algorithm's NOISE.
        beta = state.decay
        momentum = jax.tree.map(
            lambda m, g: beta.astype(m.dtype) * m + g.astype(m.dtype),
            state.momentum,
            noisy,
        )
        # Inside jit no exception can depend on a value: a NaN factor refuses the step.
        factor = jnp.where(beta == float32_decay, 1.0 - beta, jnp.nan)
        private = jax.tree.map(lambda m: factor.astype(m.dtype) * m, momentum)
        private = cast_like(private, updates)
        return private, state._replace(noise=noise_state, momentum=momentum)

    return transformation(init, update)
