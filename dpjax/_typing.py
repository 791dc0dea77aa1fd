"""What signatures speak of, each in one word.

A pytree is optax's: a static checker takes nested containers of arrays and numbers for
one (chex's would leave the numbers out). A loss has annotations of its own, for
parameters and examples that only its author knows, so that nothing is said of its
arguments here. `Any` is left for what JAX itself leaves open: avals, carries and what
comes out of a user's function.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

import chex
import jax
import jax.typing
import optax

ArrayLike: TypeAlias = jax.typing.ArrayLike
DTypeLike: TypeAlias = jax.typing.DTypeLike
Key: TypeAlias = chex.PRNGKey  # a typed one; checked where it is given
Tree: TypeAlias = optax.Params
LossFn: TypeAlias = Callable[..., jax.Array]  # of parameters and ONE example
Engine: TypeAlias = Literal["auto", "bookkeeping", "ghost", "vmap"]

# Where one of these comes twice, what comes out has the structure of what goes in. They
# may be trees of classes of one's own, as modules are, which a checker cannot know.
Shaped = TypeVar("Shaped")
Params = TypeVar("Params")
