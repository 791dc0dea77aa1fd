"""Noise that is correlated across steps, for any optimizer that follows it.

The momentum with the noise of tree aggregation is one such optimizer.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax._core import validate
from dpjax._core.dtypes import cast_like, widen
from dpjax._core.keys import stream
from dpjax._core.meshes import wide_zeros_like
from dpjax._core.rounding import round_down_float32, round_up_float32
from dpjax._core.typing import Arithmetic, ArrayLike, Key
from dpjax._core.typing import Tree as Leaves
from dpjax._matrices.strategy import Strategy, Tree, check_strategy
from dpjax._matrices.streaming import buffered_stream, recomputed_stream
from dpjax.noise._correlated_lattice import correlated_lattice_noise
from dpjax.noise._gaussian import (
    check_step_limit,
    check_steps_left,
    gaussian_like,
    transformation,
)

Buffer = Literal["stored", "regenerate"]


class CorrelatedNoiseState(NamedTuple):
    """The state of `correlated_noise`. It holds the key: as secret as the data.

    Attributes:
      step: how many steps are done, i[].
      memory: the buffers from which later noise is computed, f[m, ...] for each leaf,
        in float32 or wider; () if there are no buffers, as for "regenerate".
      key: the typed key from which each step's key is folded.
      stddev: the noise standard deviation, which must not change during a run.
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
    """Add to each step's sum the noise (C⁻¹z)_t, with z fresh Gaussian noise.

    The noise of later steps cancels part of the noise of earlier steps. The sum of
    updates that an optimizer accumulates therefore carries less noise. All that follows
    in the chain (momentum, Adam, schedules) is post-processing and costs no privacy.

    Args:
      strategy: the matrix C, as `dpjax.strategies` makes it.
      stddev: the standard deviation of z per coordinate, f[], in the units of the
        incoming sum (noise multiplier times clip norm), 0 or from 2⁻¹⁰⁰ to 2¹⁰⁰.
      num_steps: T, the number of steps that the guarantee is for; static.
      key: one typed key, as `dpjax.random_key` makes, for one transformation and one
        run. The state holds a separate stream of this key.
      buffer: "stored" retains `strategy.num_vectors` vectors (⌊log₂ T⌋ for a tree) and
        draws one Gaussian vector a step. "regenerate" retains none and draws the
        Gaussian vectors of earlier steps again. "regenerate" is for strategies whose
        C⁻¹ is banded (`geometric`, `banded_inverse`) and for the tree. The same key
        gives the same noise in both modes, up to rounding. "regenerate" relies on
        drawing the same vectors again, which holds only if sums keep their dtypes and,
        inside `jax.shard_map`, their sharding from step to step.
      arithmetic: "real", or "discrete" for integers r_t = round((C s)_t / q) + z_t on a
        lattice of spacing q = stddev / 33,554,944, with discrete Gaussian noise z. The
        result is then q (C⁻¹r)_t, and the guarantee holds for the bits of all r_t. It
        needs a known stddev that is not 0 and buffer="stored", stores two more words
        for each number of the buffer, and clips sums to at most ±2⁴⁰ q. An entry that
        is not finite is NaN from then on, unless C is diagonal.

    Returns:
      An optax transformation. Sums and noise are computed in float32 or wider; the
      result is cast to the incoming dtype. After num_steps steps a further step is
      refused: with a ValueError outside jit, and with NaN updates inside jit. Updates
      are NaN as well if stddev changes during the run (under
      `optax.inject_hyperparams`), since no guarantee holds then.

    Raises:
      ValueError: the strategy has more coefficients than num_steps, or coefficients
        that float32 cannot represent, or does not support "regenerate"; stddev is out
        of range; num_steps is below 1 or traced; key is not a typed key; buffer is
        unknown; an update is not real, or its shape differs from the parameter's;
        inside `jax.shard_map`, check_vma is False.

    Privacy: with sums of sensitivity C and stddev = σC, all T results together are
    μ-GDP for μ = `accounting.correlated.mu(strategy, σ, ...)`, also when each sum
    depends on earlier results. The guarantee is for real arithmetic and ideal Gaussian
    noise. The guarantee covers the results and not the state: anyone who has the key
    can subtract the noise.

    With arithmetic="discrete", let C be the sensitivity of the floats of a sum. Then
    the T results are μ'-GDP up to d T 2⁻⁹⁵ (1 + e^ε) in δ, for d coordinates and
    μ' = μ + (1 + 2 E) √(d T) / 33,554,944. E is 1, or 2⁻¹³ times a bound on the growth
    of rounding errors in the recursion of C where that is more, as for strategies with
    a long memory; `noise.lattice_roundings` returns 1 + 2 E. The discrete noise is
    within a factor e^{±1e-32} a draw of a post-processing of Gaussian noise
    (`add_discrete_gaussian_noise`). The state also holds sums without noise.

    Leaves, masks, meshes and `jax.vmap` are treated as in `dpjax.add_gaussian_noise`.
    The state has the sharding of the parameters.

    Reference: Denisov et al. (2022), https://arxiv.org/abs/2202.08312, show that the
    guarantee is no worse for sums that depend on earlier releases.

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
                "buffer must be 'stored' with arithmetic='discrete', since the sums of "
                f"earlier steps cannot be drawn again; got {buffer!r}."
            )
        validate.positive("stddev", stddev)
        return correlated_lattice_noise(strategy, stddev, num_steps=num_steps, key=key)
    make = buffered_stream if buffer == "stored" else recomputed_stream
    recipe = make(check_strategy(strategy, num_steps), num_steps)
    # Rounding up to float32 can only increase the noise.
    louder = round_up_float32("stddev", stddev)

    def init(params: Leaves) -> CorrelatedNoiseState:
        return CorrelatedNoiseState(
            step=jnp.zeros((), jnp.int32),
            memory=wide_zeros_like(params, (recipe.rows,)) if recipe.rows else (),
            key=stream(key, "correlated noise"),
            # A copy, since the caller may donate the buffers of the state, and the
            # closure still needs the original.
            stddev=jnp.array(louder, jnp.float32, copy=True),
        )

    def update(updates: Leaves, state: Any) -> tuple[Leaves, CorrelatedNoiseState]:
        check_steps_left(state.step, num_steps)
        # The minimum stops the counter at num_steps + 1: it never overflows.
        step = jnp.minimum(state.step, num_steps) + 1
        wide = widen(updates)
        if recipe.rows:
            jax.tree.map(_same_shape, wide, state.memory)

        def draw(step: jax.Array) -> Leaves:
            """The draw z_t times stddev, from a key into which the step is folded."""
            key = jax.random.fold_in(state.key, step)
            return gaussian_like(key, wide, state.stddev)

        noise, memory = recipe.noise(draw, step, state.memory)
        promised = (step <= num_steps) & (state.stddev == louder)
        # Inside jit no exception can depend on a value: NaN noise refuses the step.
        refusal = jnp.where(promised, 0.0, jnp.nan)
        private = jax.tree.map(
            lambda w, n: w + (n + refusal.astype(n.dtype)), wide, noise
        )
        private = cast_like(private, updates)
        return private, state._replace(step=step, memory=memory)

    return transformation(init, update)


def _same_shape(update: jax.Array, memory: jax.Array) -> None:
    if update.shape != memory.shape[1:]:
        raise ValueError(
            "updates must have the shapes of what init was given; got "
            f"{update.shape} for {memory.shape[1:]}."
        )


class TreeMomentumState(NamedTuple):
    """The state of `tree_momentum`, which is as secret as the data.

    The state is secret because it contains the key of the noise.

    Attributes:
      noise: the state of `correlated_noise` with the strategy of the tree.
      momentum: the momentum Σ_i β^{t−i} (g_i + y_i) after t steps, in float32 or wider,
        where g_i is the incoming sum of step i and y_i the noise added to that sum.
      decay: the momentum coefficient β, rounded down to float32. The decay must not
        change during a run.
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

    With g_i the incoming sum of step i, the update that comes out is

        m̂_t = (1 − β) (Σ_{i<=t} β^{t−i} g_i + N_t),

    where N_t is the noise of the O(log t) tree nodes that together cover the steps
    1..t. The noise grows with log t, whereas noise added to every g_i would grow with
    1 / (1 − β). The transformation is `correlated_noise(strategies.tree(decay), ...)`,
    followed by the momentum m_t = β m_{t−1} + g_t + y_t of the noisy sums: the noise
    y_t = N_t − β N_{t−1} makes the momentum of all noise so far equal to N_t.

    Args:
      decay: the momentum coefficient β, f[], in [0, 1); the paper's 1 − α.
      stddev: the noise standard deviation of a node per coordinate, f[], in the units
        of the incoming sum (noise multiplier times clip norm), 0 or from 2⁻¹⁰⁰ to 2¹⁰⁰.
      num_steps: T, the number of steps that the guarantee is for; static.
      key: one typed key, as `dpjax.random_key` makes, for one transformation and one
        run. The state holds a separate stream of this key.
      buffer: "stored" retains ⌊log₂ T⌋ vectors and draws one Gaussian vector a step.
        "regenerate" retains none and draws two Gaussian vectors a step on average. The
        same key gives the same noise in both modes, up to rounding.

    Returns:
      An optax transformation. Sums and noise are computed in float32 or wider; the
      result is cast to the incoming dtype. After num_steps steps a further step is
      refused: with a ValueError outside jit, and with NaN updates inside jit. Updates
      are NaN as well if decay or stddev changes during the run (under
      `optax.inject_hyperparams`), since no guarantee holds then.

    Raises:
      ValueError: decay is outside [0, 1); stddev is out of range; num_steps is below 1
        or traced; key is not a typed key; buffer is unknown; an update is not real;
        inside `jax.shard_map`, check_vma is False.

    Privacy: with sums of sensitivity C and stddev = σC, all T updates together are
    μ-GDP for μ = `accounting.tree.momentum_mu(σ, ...)`, also when each g_i depends on
    earlier updates. The state holds float32 values: a decay of at most the one given,
    and a stddev of at least the one given. Since μ grows with decay, the guarantee
    holds for these values too. The guarantee is for real arithmetic and ideal Gaussian
    noise. The guarantee covers the updates and not the state: anyone who has the key
    or the buffer can subtract the noise.

    Leaves, masks, meshes and `jax.vmap` are treated as in `dpjax.add_gaussian_noise`.
    The state has the sharding of the parameters.

    Reference: Tran and Cutkosky (2022), Algorithm 1, with noise drawn only for left
    children, since no prefix uses other nodes.

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
    validate.decay("decay", decay)
    validate.typed_key("key", key)
    # Rounding down does not increase μ, which grows with the decay.
    slower = round_down_float32(decay)
    noise = correlated_noise(
        Tree(slower),
        stddev,
        num_steps=num_steps,
        key=stream(key, "tree noise"),
        buffer=buffer,
    )

    def init(params: Leaves) -> TreeMomentumState:
        return TreeMomentumState(
            noise=noise.init(params),  # pyright: ignore
            momentum=wide_zeros_like(params),
            # A copy, since the caller may donate the buffers of the state, and the
            # closure still needs the original.
            decay=jnp.array(slower, jnp.float32, copy=True),
        )

    def update(updates: Leaves, state: Any) -> tuple[Leaves, TreeMomentumState]:
        noisy, noise_state = noise.update(widen(updates), state.noise)
        # Tran and Cutkosky (2022), Algorithm 1, https://arxiv.org/abs/2210.06328:
        # m_t = β m_{t−1} + g_t, here without the factor 1 − β until the end. The noise
        # of the sums g_t adds up to the algorithm's NOISE.
        beta = state.decay
        momentum = jax.tree.map(
            lambda m, g: beta.astype(m.dtype) * m + g.astype(m.dtype),
            state.momentum,
            noisy,
        )
        # Inside jit no exception can depend on a value: a NaN factor refuses the step.
        factor = jnp.where(beta == slower, 1.0 - beta, jnp.nan)
        private = jax.tree.map(lambda m: factor.astype(m.dtype) * m, momentum)
        private = cast_like(private, updates)
        return private, state._replace(noise=noise_state, momentum=momentum)

    return transformation(init, update)
