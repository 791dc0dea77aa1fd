"""Noise that is correlated from step to step, for any optimizer behind it."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax._core import validate
from dpjax._core.dtypes import at_least_float32, widen
from dpjax._core.keys import stream
from dpjax._core.outward import round_up_float32
from dpjax._core.placement import zeros_like
from dpjax._core.typing import ArrayLike, Key, Tree
from dpjax._matrices import streaming as _correlating
from dpjax._matrices.strategy import Strategy, check_strategy
from dpjax.noise._gaussian import gaussian_like
from dpjax.noise._limit import check_steps_left

Buffer = Literal["stored", "regenerate"]


class CorrelatedNoiseState(NamedTuple):
    """What the noise carries. It is as secret as the data: it holds noise, and its key.

    Attributes:
      step: steps done, i[].
      memory: what the noise to come remembers, f[m, ...] a leaf, in float32 at least;
        () where it remembers nothing, as for "regenerate".
      key: the typed key that every step's draw is folded from.
      stddev: the noise standard deviation, which must not change during a run.
    """

    step: jax.Array
    memory: Tree
    key: Key
    stddev: jax.Array


def correlated_noise(
    strategy: Strategy,
    stddev: ArrayLike,
    *,
    num_steps: int,
    key: Key,
    buffer: Buffer = "stored",
) -> optax.GradientTransformation:
    """Add to each step's sum the noise (C⁻¹z)_t, with z fresh Gaussian noise.

    Later steps take back some of the noise of earlier ones, so that what an optimizer
    adds up carries less of it. Whatever follows in the chain (momentum, Adam,
    schedules) costs no privacy.

    Args:
      strategy: C, as `dpjax.strategies` makes it.
      stddev: the standard deviation of z per coordinate, f[], in the units of the
        incoming sum (noise multiplier times clip norm), 0 or from 2⁻¹⁰⁰ to 2¹⁰⁰.
      num_steps: T, the number of steps that the guarantee is for; static.
      key: one typed key, as `dpjax.random_key` makes. A stream of its own goes into
        the state; a key serves one transformation and one run.
      buffer: "stored" keeps `strategy.num_vectors` vectors (⌊log₂ T⌋ for a tree) and
        draws one Gaussian a step; "regenerate", for strategies whose C⁻¹ is banded
        (`geometric`, `banded_inverse`) and the tree, keeps none and draws those of
        earlier steps again. The same key gives the same noise either way, up to
        rounding. What is drawn again is what was drawn only if sums keep their dtypes
        and, inside `jax.shard_map`, their pieces from step to step, which "regenerate"
        relies on.

    Returns:
      An optax transformation. Sums and noise are kept in float32 at least; the result
      is cast to the incoming dtype. Past num_steps it refuses: a ValueError outside
      jit, NaN updates inside. The same NaN answers a stddev that changes during the
      run (under `optax.inject_hyperparams`), for which no guarantee holds.

    Raises:
      ValueError: the strategy has more coefficients than num_steps, some that float32
        does not hold, or is not to be regenerated; stddev is no such number; num_steps
        is below 1 or traced; key is not a typed key; buffer is unknown; an update is
        not real, or of another shape than the parameters; inside `jax.shard_map`,
        check_vma is False.

    Privacy: with sums of sensitivity C and stddev = σC, all T results together are
    μ-GDP for μ = `accounting.correlated.mu(strategy, σ, ...)`, also when each sum
    depends on earlier results. The guarantee is for real arithmetic and ideal Gaussian
    noise, and covers the results, not the state: who has the key can subtract it.

    Leaves, masks, meshes and `jax.vmap` are as for `dpjax.add_gaussian_noise`; the
    state lies where the parameters lie.

    Reference: Denisov et al. (2022), https://arxiv.org/abs/2202.08312, who show that
    sums which depend on earlier releases are no worse.

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
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    validate.typed_key("key", key)
    validate.one_of("buffer", buffer, ("stored", "regenerate"))
    if num_steps >= 2**31 - 1:
        raise ValueError(f"num_steps must be below 2**31 - 1; got {num_steps!r}.")
    make = (
        _correlating.buffered_stream
        if buffer == "stored"
        else _correlating.recomputed_stream
    )
    recipe = make(check_strategy(strategy, num_steps), num_steps)
    louder = round_up_float32("stddev", stddev)

    def init(params: Tree) -> CorrelatedNoiseState:
        def room(p: jax.Array) -> jax.Array:
            return zeros_like(p, at_least_float32(jnp.result_type(p)), (recipe.rows,))

        return CorrelatedNoiseState(
            step=jnp.zeros((), jnp.int32),
            memory=jax.tree.map(room, params) if recipe.rows else (),
            key=stream(key, "correlated noise"),
            # A copy: the original may be donated with the state around this one.
            stddev=jnp.array(louder, jnp.float32, copy=True),
        )

    def update(
        updates: Tree, state: Any, params: Tree | None = None
    ) -> tuple[Tree, CorrelatedNoiseState]:
        del params
        check_steps_left(state.step, num_steps)
        step = jnp.minimum(state.step, num_steps) + 1
        wide = widen(updates)
        if recipe.rows:
            jax.tree.map(_same_shape, wide, state.memory)

        def draw(step: jax.Array) -> Tree:
            """z_t times stddev, from a key of the step's own."""
            key = jax.random.fold_in(state.key, step)
            return gaussian_like(key, wide, state.stddev)

        noise, memory = recipe.noise(draw, step, state.memory)
        promised = (step <= num_steps) & (state.stddev == louder)
        refusal = jnp.where(promised, 0.0, jnp.nan)
        private = jax.tree.map(
            lambda u, w, n: (w + (n + refusal.astype(n.dtype))).astype(
                jnp.result_type(u)
            ),
            updates,
            wide,
            noise,
        )
        return private, state._replace(step=step, memory=memory)

    return optax.GradientTransformation(init, update)


def _same_shape(update: jax.Array, memory: jax.Array) -> None:
    if update.shape != memory.shape[1:]:
        raise ValueError(
            "updates must have the shapes of what init was given; got "
            f"{update.shape} for {memory.shape[1:]}."
        )
