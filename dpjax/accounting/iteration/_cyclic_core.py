"""Bounds on the last iterate of noisy descent on cyclic batches, full batches included.

Each bound is a separate function of the run's numbers and of an example's *tail*, the
number of steps from its last use to the end of the run. The last batch of an epoch has
the shortest tail, one step, and is the worst position: no later step hides the use.
"""

from collections.abc import Callable
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.float64 import TINY, ULP, float64
from dpjax.accounting.iteration import _periodic, _setting
from dpjax.accounting.iteration._minorant import HUGE
from dpjax.accounting.iteration._periodic import Cycle
from dpjax.accounting.iteration._setting import Assumed, Numbers, Setting

Order = Literal["fixed", "reshuffled"]
WORST_POSITION = 1.0  # the shortest tail
_Bound = Callable[[_setting.Step, jax.Array, Cycle, Assumed], jax.Array]


def _finish(square: jax.Array, shift: jax.Array) -> jax.Array:
    """μ from μ² in units of shift², rounded up; 0 only if shift is 0."""
    regular = (square > 0) & (square < jnp.inf)
    root = jnp.sqrt(jnp.where(regular, square, 1.0)) * (1 + 256 * ULP)
    root = jnp.where(regular, root, jnp.where(square == 0, 0.0, jnp.inf))  # NaN is inf
    some = shift > 0
    mu = jnp.where(some, shift, 1.0) * root
    return jnp.where(some, jnp.maximum(mu, TINY), 0.0)


def _slack(cycle: Cycle) -> float:
    """A factor above the rounding errors of sums over one epoch and over epochs."""
    return 1 + (cycle.period + cycle.epochs) * ULP


def _composition(
    step: _setting.Step, tail: jax.Array, cycle: Cycle, assumed: Assumed
) -> jax.Array:
    # Bok, Su and Altschuler (2024), Theorems 4.1 and 4.4,
    # https://arxiv.org/abs/2403.00278: (L/bσ) sqrt(E).
    return step.shift * np.sqrt(cycle.epochs) * (1 + 4 * ULP)


def _contraction(
    step: _setting.Step, tail: jax.Array, cycle: Cycle, assumed: Assumed
) -> jax.Array:
    # Theorems 4.2 and 4.5 there, and Kong and Ribero (2024), Proposition 2.2,
    # https://arxiv.org/abs/2407.05237, at the optimal shifts (`_periodic`). The bounds
    # are homogeneous in shift and diameter, so that they are computed for a shift of 1.
    one, place = jnp.ones_like(step.shift), _place(tail, cycle)
    square = _periodic.contraction(step.log_lipschitz, one, place, cycle)
    mu = _finish(_slack(cycle) * square, step.shift)
    return jnp.where(step.known, mu, jnp.inf)


def _diameter(
    step: _setting.Step, tail: jax.Array, cycle: Cycle, assumed: Assumed
) -> jax.Array:
    if not assumed.bounded:
        return jnp.full_like(step.shift, jnp.inf)
    one, place = jnp.ones_like(step.shift), _place(tail, cycle)
    # Theorems 4.3 and 4.6 there, and Kong and Ribero's Theorem 4.4, from the best
    # restart. A diameter whose square would underflow is replaced by a larger one, and
    # a diameter whose square would overflow is ignored.
    start = step.diameter / jnp.where(step.shift > 0, step.shift, 1.0)
    near = step.bounded & (start < HUGE)
    start = jnp.maximum(jnp.where(near, start, 1.0), 1 / HUGE)
    # A shift of 0 has μ = 0 whatever the start is, so that 1 replaces it above.
    square = _periodic.restart_variance(step.log_lipschitz, one, start, place, cycle)
    mu = _finish(_slack(cycle) * square, step.shift)
    return jnp.where(near, mu, jnp.inf)


def _best(
    step: _setting.Step, tail: jax.Array, cycle: Cycle, assumed: Assumed
) -> jax.Array:
    # The contraction bound, where finite, is at most composition. It is taken without
    # a minimum, so that its derivatives hold where both are equal.
    contracted = _contraction(step, tail, cycle, assumed)
    composed = _composition(step, tail, cycle, assumed)
    least = jnp.where(contracted < jnp.inf, contracted, composed)
    return jnp.minimum(least, _diameter(step, tail, cycle, assumed))


def _place(tail: jax.Array, cycle: Cycle) -> jax.Array:
    return jnp.clip(tail, 1, cycle.period).astype(jnp.int32)


def _for_any_caller(bound: _Bound) -> Callable[..., jax.Array]:
    """Wrap a bound in the float64 scope, as a function of tails and numbers.

    The static arguments are cycle and assumed. Invalid numbers give inf.
    """

    def core(
        tail: jax.Array, numbers: Numbers, *, cycle: Cycle, assumed: Assumed
    ) -> jax.Array:
        step = _setting.step(numbers, assumed)
        return jnp.where(step.valid, bound(step, tail, cycle, assumed), jnp.inf)

    return float64("up", static=("cycle", "assumed"), elementwise=True)(core)


composition64 = _for_any_caller(_composition)
contraction64 = _for_any_caller(_contraction)
diameter64 = _for_any_caller(_diameter)
best64 = _for_any_caller(_best)


@float64("up", static=("cycle", "assumed"), elementwise=True)
def best_rdp64(
    orders: jax.Array,
    tail: jax.Array,
    numbers: Numbers,
    *,
    cycle: Cycle,
    assumed: Assumed,
) -> jax.Array:
    """The Rényi divergence a μ²/2 of each order a, with μ from the best bound."""
    step = _setting.step(numbers, assumed)
    mu = jnp.where(step.valid, _best(step, tail, cycle, assumed), jnp.inf)
    finite = mu < jnp.inf
    value = orders * jnp.square(jnp.where(finite, mu, 1.0)) / 2 * (1 + 4 * ULP)
    value = jnp.where(mu > 0, jnp.maximum(value, TINY), 0.0)
    return jnp.where((orders > 0) & finite, value, jnp.inf)


def check(
    noise_multiplier: jax.typing.ArrayLike,
    *,
    num_epochs: int,
    batches_per_epoch: int,
    batch_size: jax.typing.ArrayLike,
    order: Order,
    **setting: Unpack[Setting],
) -> tuple[Numbers, Cycle, Assumed]:
    """Validate the arguments of a run and convert them to the inputs of the bounds.

    A ValueError says which argument is wrong or which assumption fails.
    """
    epochs = validate.static_int("num_epochs", num_epochs, minimum=1)
    period = validate.static_int("batches_per_epoch", batches_per_epoch, minimum=1)
    validate.positive("batch_size", batch_size)
    validate.one_of("order", order, ("fixed", "reshuffled"))
    numbers, assumed = _setting.check(noise_multiplier, batch_size, **setting)
    cycle = Cycle(epochs, period, order == "reshuffled", assumed.convex)
    return numbers, cycle, assumed
