"""The step limit: a mechanism refuses steps beyond those that were accounted for."""

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
      step: how many steps are done, i32[]. The count stops at one above the limit.
    """

    step: jax.Array


def limit_steps(num_steps: int, scale: ArrayLike = 1.0) -> optax.GradientTransformation:
    """Scale updates by `scale` for at most `num_steps` steps.

    A further step raises ValueError outside jit, and gives NaN updates inside jit.
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
        # The selection is between two scalars, which is cheaper than between updates.
        factor = jnp.where(step <= num_steps, jnp.asarray(scale), jnp.nan)
        passed = jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)
        return passed, LimitStepsState(step)

    return optax.GradientTransformation(init, update)


def check_steps_left(count: jax.Array, num_steps: int) -> None:
    """Raise ValueError if all steps are done. A traced count is not checked here."""
    if not isinstance(count, Tracer) and int(count) >= num_steps:
        raise ValueError(
            f"num_steps is {num_steps} and that many steps are done: a further step "
            "has no privacy guarantee. Declare more steps from the start."
        )
