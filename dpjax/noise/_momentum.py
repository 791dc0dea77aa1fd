"""Tree-aggregated momentum."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax._core import validate
from dpjax._core.dtypes import at_least_float32, widen
from dpjax._core.keys import stream
from dpjax._core.outward import round_down_float32, round_up_float32
from dpjax._core.placement import zeros_like
from dpjax._core.typing import ArrayLike, Key, Tree
from dpjax.noise._limit import check_steps_left
from dpjax.noise.tree import (
    empty_prefixes,
    regenerated_prefix_noise,
    stored_prefix_noise,
)

Buffer = Literal["stored", "regenerate"]


class TreeMomentumState(NamedTuple):
    """What the momentum carries. It is as secret as the data: it holds raw sums.

    Attributes:
      step: steps done, i[].
      momentum: Σ_i β^{t−i} g_i without noise, in float32 at least.
      prefixes: prefix noises by level for buffer="stored", () for "regenerate".
      key: the typed key that every node's noise is folded from.
      decay: β as it runs, which must not change during a run.
      stddev: the nodes' noise standard deviation, which must not change either.
    """

    step: jax.Array
    momentum: Tree
    prefixes: Tree
    key: Key
    decay: jax.Array
    stddev: jax.Array


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

    where N_t is the noise of the O(log t) tree nodes that make up the steps 1..t. It
    grows with log t, where noise added to every g_i would grow with 1 / (1 − β).

    Args:
      decay: the momentum coefficient β, f[], in [0, 1); the paper's 1 − α.
      stddev: the noise standard deviation of a node per coordinate, f[], in the units
        of the incoming sum (noise multiplier times clip norm), 0 or from 2⁻¹⁰⁰ to 2¹⁰⁰.
      num_steps: T, the number of steps that the guarantee is for; static.
      key: one typed key, as `dpjax.random_key` makes. A stream of its own goes into
        the state; a key serves one transformation and one run.
      buffer: "stored" keeps ⌊log₂ T⌋ + 1 vectors and draws one Gaussian a step;
        "regenerate" keeps none and draws up to ⌊log₂ T⌋ + 1. The same key gives the
        same noise either way, up to rounding.

    Returns:
      An optax transformation. Sums and noise are kept in float32 at least; the result
      is cast to the incoming dtype. Past num_steps it refuses: a ValueError outside
      jit, NaN updates inside. The same NaN answers a decay or stddev that changes
      during the run (under `optax.inject_hyperparams`), for which no guarantee holds.

    Raises:
      ValueError: decay is outside [0, 1); stddev is no such number; num_steps is below
        1 or traced; key is not a typed key; buffer is unknown; an update is not real;
        inside `jax.shard_map`, check_vma is False.

    Privacy: with sums of sensitivity C and stddev = σC, all T updates together are
    μ-GDP for μ = `accounting.tree.momentum_mu(σ, ...)`, also when each g_i depends on
    earlier updates. What runs is float32: the state's decay, at most the one given, and
    its stddev, at least the one given; μ grows with decay, so that it holds for both.
    The guarantee is for real arithmetic and ideal Gaussian noise, and covers the
    updates, not the state: who has the key can subtract the noise.

    Leaves, masks, meshes and `jax.vmap` are as for `dpjax.add_gaussian_noise`; the
    state lies where the parameters lie.

    Reference: Tran and Cutkosky (2022), Algorithm 1, with noise drawn for left
    children alone, the only nodes that any prefix uses.

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
    validate.scalar("stddev", stddev)
    validate.nonnegative("stddev", stddev)
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    validate.typed_key("key", key)
    validate.one_of("buffer", buffer, ("stored", "regenerate"))
    if num_steps >= 2**31 - 1:
        raise ValueError(f"num_steps must be below 2**31 - 1; got {num_steps!r}.")
    slower, louder = round_down_float32(decay), round_up_float32("stddev", stddev)

    def init(params: Tree) -> TreeMomentumState:
        return TreeMomentumState(
            step=jnp.zeros((), jnp.int32),
            momentum=jax.tree.map(
                lambda p: zeros_like(p, at_least_float32(jnp.result_type(p))), params
            ),
            prefixes=empty_prefixes(params, num_steps) if buffer == "stored" else (),
            key=stream(key, "tree noise"),
            # Copies: the originals may be donated with the state around this one.
            decay=jnp.array(slower, jnp.float32, copy=True),
            stddev=jnp.array(louder, jnp.float32, copy=True),
        )

    def update(
        updates: Tree, state: Any, params: Tree | None = None
    ) -> tuple[Tree, TreeMomentumState]:
        del params
        check_steps_left(state.step, num_steps)
        step = jnp.minimum(state.step, num_steps) + 1
        beta, scale = state.decay, state.stddev
        promised = (step <= num_steps) & (beta == slower) & (scale == louder)

        # Tran and Cutkosky (2022), Algorithm 1, https://arxiv.org/abs/2210.06328:
        # m_t = β m_{t−1} + g_t, here without the factor 1 − β until the end,
        momentum = jax.tree.map(
            lambda m, g: beta.astype(m.dtype) * m + g.astype(m.dtype),
            state.momentum,
            widen(updates),
        )
        # NOISE is the prefix noise N_t, and
        noise, prefixes = _prefix_noise(buffer, state, step, momentum, num_steps)
        # m̂_t = (1 − β)(m_t + NOISE). A NaN factor makes the refusal as well.
        factor = jnp.where(promised, 1.0 - beta, jnp.nan)
        private = jax.tree.map(
            lambda u, m, n: (factor.astype(m.dtype) * (m + n)).astype(
                jnp.result_type(u)
            ),
            updates,
            momentum,
            noise,
        )
        return private, state._replace(step=step, momentum=momentum, prefixes=prefixes)

    return optax.GradientTransformation(init, update)


def _prefix_noise(
    buffer: Buffer,
    state: TreeMomentumState,
    step: jax.Array,
    tree: Tree,
    num_steps: int,
) -> tuple[Tree, Tree]:
    """N_t shaped like the tree, two ways to the same draws, and what is stored."""
    given = {"decay": state.decay, "stddev": state.stddev}
    if buffer == "stored":
        return stored_prefix_noise(state.key, step, state.prefixes, tree, **given)
    noise = regenerated_prefix_noise(
        state.key, step, tree, num_steps=num_steps, **given
    )
    return noise, ()
