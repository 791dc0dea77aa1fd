"""What signatures speak of, each in one word.

A pytree is chex's, as in optax: a static checker takes nested containers of arrays for
one. A loss has annotations of its own, for parameters and examples that only its author
knows, so that nothing is said of its arguments here.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

import chex
import jax
import jax.typing

ArrayLike: TypeAlias = jax.typing.ArrayLike
DTypeLike: TypeAlias = jax.typing.DTypeLike
Key: TypeAlias = chex.PRNGKey  # a typed one; checked where it is given
Tree: TypeAlias = chex.ArrayTree
LossFn: TypeAlias = Callable[..., jax.Array]  # of parameters and ONE example
Engine: TypeAlias = Literal["auto", "bookkeeping", "ghost", "vmap"]
