"""Show how the book-keeping engine treats each parameter of a loss."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpjax._core.typing import Tree
from dpjax.clipping import bookkeeping
from dpjax.clipping._clipped_grad import clipped_grad


def explain(
    loss_fn: Callable[..., Any],
    *args: Tree,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    has_aux: bool = False,
) -> bookkeeping.Explanation:
    """Show how engine="bookkeeping" treats each parameter of a loss.

    The engine weighs memory traffic against arithmetic differently in code lowered for
    CUDA, and may use rows only there. The table shows the choice for JAX's default
    backend.

    Args:
      loss_fn: as for `clipped_grad`.
      *args: the arguments of a call, with parameters and a batch. Their shapes and
        dtypes matter, and their values do not.
      argnums: as for `clipped_grad`.
      batch_argnums: as for `clipped_grad`.
      has_aux: as for `clipped_grad`.

    Returns:
      An `Explanation` with one row for each parameter. A row has the parameter's path
      and shape, the equations where the parameter meets the example, and whether its
      norm comes from rows or gradients. It also has the estimated costs an example of
      this engine and of the vmap engine, and the reason where per-example gradients are
      formed. The explanation prints as a table; `.auto` is the engine that
      engine="auto" takes.

    Raises:
      ValueError: as for `clipped_grad` and for a call of its result.

    Example:
      >>> import jax.numpy as jnp
      >>> def loss(params, x):
      ...     return jnp.sum(jnp.tanh(x @ params["w"]) * params["scale"])
      >>> params = {"w": jnp.ones((30, 20)), "scale": jnp.ones(20)}
      >>> print(explain(loss, params, jnp.ones((8, 30))))
      parameter  shape  sites                norm from  cost     vmap     why
      ['scale']  20     mul                  gradients  9.6e+02  9.6e+02  tapped itself
      ['w']      30x20  dot_general (dense)  rows       6.5e+02  2.9e+04
      auto: bookkeeping
    """
    fn = clipped_grad(
        loss_fn, 1.0, argnums=argnums, batch_argnums=batch_argnums, has_aux=has_aux
    )
    named = jax.tree_util.tree_flatten_with_path(fn.parameters(args))[0]
    return bookkeeping.explanation(
        fn.plan(*args),
        [jax.tree_util.keystr(path) for path, _ in named],
        [jnp.shape(leaf) for _, leaf in named],
    )
