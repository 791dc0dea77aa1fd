"""The end of a run: a mechanism that was accounted for so many steps takes no more."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from dpjax._core import validate
from dpjax._core.typing import ArrayLike, Tree


class LimitStepsState(NamedTuple):
    """The state of `limit_steps`.

    Attributes:
      step: how many steps are done, i32[], and no more than one too many.
    """

    step: jax.Array


def limit_steps(num_steps: int, scale: ArrayLike = 1.0) -> optax.GradientTransformation:
    """Scale updates for so many steps, and then refuse.

    A further step is a ValueError outside jit, and NaN updates inside.
    """
    num_steps = validate.static_int("num_steps", num_steps, minimum=1)
    if num_steps >= 2**31 - 1:
        raise ValueError(
            "num_steps must be below 2**31 - 1, where its count ends; got "
            f"{num_steps!r}."
        )

    def init(params: Tree) -> LimitStepsState:
        del params
        return LimitStepsState(jnp.zeros((), jnp.int32))

    def update(
        updates: Tree, state: Any, params: Tree | None = None
    ) -> tuple[Tree, LimitStepsState]:
        del params
        check_steps_left(state.step, num_steps)
        step = jnp.minimum(state.step, num_steps) + 1
        # One number is chosen, and not each of the updates.
        factor = jnp.where(step <= num_steps, jnp.asarray(scale), jnp.nan)
        passed = jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)
        return passed, LimitStepsState(step)

    return optax.GradientTransformation(init, update)


def check_steps_left(count: jax.Array, num_steps: int) -> None:
    """Raise once so many steps are done, where their count is known."""
    if not isinstance(count, Tracer) and int(count) >= num_steps:
        raise ValueError(
            f"num_steps is {num_steps} and that many steps are done: a further step "
            "has no privacy guarantee. Declare more steps from the start."
        )
