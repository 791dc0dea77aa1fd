"""Code that depends on the platform that a program is lowered for."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.core
import jax.numpy as jnp

from dpjax._typing import Tree

Out = TypeVar("Out")


def on_platform(
    name: str,
    there: Callable[..., Out],
    elsewhere: Callable[..., Out],
    *args: Tree,
) -> Out:
    """`there(*args)` on one platform, `elsewhere(*args)` on all others.

    Which one is not known when a program is traced: it may be lowered for another
    platform than this machine's, or for several (`jax.export`).
    """
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        return jax.lax.platform_dependent(*args, default=elsewhere, **{name: there})
    # Nothing is staged: it runs where the arrays are.
    leaves = [x for x in jax.tree.leaves(args) if _is_concrete(x)]
    found = {d.platform for x in leaves for d in x.devices()}
    return (there if name in (found or {jax.default_backend()}) else elsewhere)(*args)


def _is_concrete(x: object) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
