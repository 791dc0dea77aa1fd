"""A private momentum of clipped sums, with the noise of tree aggregation."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax._core import validate
from dpjax._core.dtypes import at_least_float32, widen
from dpjax._core.keys import stream
from dpjax._core.meshes import zeros_like
from dpjax._core.rounding import round_down_float32, round_up_float32
from dpjax._core.typing import ArrayLike, Key, Tree
from dpjax.noise._gaussian import check_steps_left
from dpjax.noise.tree import (
    empty_prefixes,
    regenerated_prefix_noise,
    stored_prefix_noise,
)

Buffer = Literal["stored", "regenerate"]


class TreeMomentumState(NamedTuple):
    """The state of `tree_momentum`. It holds sums without noise: as secret as the data.

    Attributes:
      step: how many steps are done, i[].
      momentum: Σ_i β^{t−i} g_i without noise, in float32 or wider.
      prefixes: prefix noises by level for buffer="stored", () for "regenerate".
      key: the typed key from which the key of every node's noise is folded.
      decay: β rounded down to float32, which must not change during a run.
      stddev: the standard deviation of each node's noise, rounded up to float32, which
        must not change during a run.
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

    where N_t is the noise of the O(log t) tree nodes that together cover the steps
    1..t. The noise grows with log t, whereas noise added to every g_i would grow with
    1 / (1 − β).

    Args:
      decay: the momentum coefficient β, f[], in [0, 1); the paper's 1 − α.
      stddev: the noise standard deviation of a node per coordinate, f[], in the units
        of the incoming sum (noise multiplier times clip norm), 0 or from 2⁻¹⁰⁰ to 2¹⁰⁰.
      num_steps: T, the number of steps that the guarantee is for; static.
      key: one typed key, as `dpjax.random_key` makes, for one transformation and one
        run. The state holds a separate stream of this key.
      buffer: "stored" retains ⌊log₂ T⌋ + 1 vectors and draws one Gaussian vector a
        step. "regenerate" retains none and draws up to ⌊log₂ T⌋ + 1 a step. The same
        key gives the same noise in both modes, up to rounding.

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
    can subtract the noise.

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
    validate.scalar("stddev", stddev)
    validate.nonnegative("stddev", stddev)
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    validate.typed_key("key", key)
    validate.one_of("buffer", buffer, ("stored", "regenerate"))
    if num_steps >= 2**31 - 1:
        raise ValueError(f"num_steps must be below 2**31 - 1; got {num_steps!r}.")
    # Both roundings are in the direction that does not increase μ.
    slower, louder = round_down_float32(decay), round_up_float32("stddev", stddev)

    def init(params: Tree) -> TreeMomentumState:
        return TreeMomentumState(
            step=jnp.zeros((), jnp.int32),
            momentum=jax.tree.map(
                lambda p: zeros_like(p, at_least_float32(jnp.result_type(p))), params
            ),
            prefixes=empty_prefixes(params, num_steps) if buffer == "stored" else (),
            key=stream(key, "tree noise"),
            # Copies, since the caller may donate the buffers of the state, and the
            # closure still needs the originals.
            decay=jnp.array(slower, jnp.float32, copy=True),
            stddev=jnp.array(louder, jnp.float32, copy=True),
        )

    def update(
        updates: Tree, state: Any, params: Tree | None = None
    ) -> tuple[Tree, TreeMomentumState]:
        del params
        check_steps_left(state.step, num_steps)
        # The minimum stops the counter at num_steps + 1: it never overflows.
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
        # m̂_t = (1 − β)(m_t + NOISE). Inside jit no exception can depend on a value: a
        # NaN factor refuses the step.
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
    """The prefix noise N_t with the shapes of the tree, and the new stored prefixes.

    Both buffer modes use the same draws. For "regenerate" nothing is stored: ().
    """
    given = {"decay": state.decay, "stddev": state.stddev}
    if buffer == "stored":
        return stored_prefix_noise(state.key, step, state.prefixes, tree, **given)
    noise = regenerated_prefix_noise(
        state.key, step, tree, num_steps=num_steps, **given
    )
    return noise, ()
