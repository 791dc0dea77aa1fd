"""What signatures speak of, each in one word.

A pytree is optax's: a static checker takes nested containers of arrays and numbers for
one (chex's would leave the numbers out). A loss has annotations of its own, for
parameters and examples that only its author knows, so that nothing is said of its
arguments here. `Any` is left for what comes out of a user's function and for arguments
that are passed on to it; `object` says that a value is not looked into.
"""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypeVar

import chex
import jax
import jax.core
import jax.typing
import optax

ArrayLike: TypeAlias = jax.typing.ArrayLike
DTypeLike: TypeAlias = jax.typing.DTypeLike
Key: TypeAlias = chex.PRNGKey  # a typed one; checked where it is given
Tree: TypeAlias = optax.Params
LossFn: TypeAlias = Callable[..., jax.Array]  # of parameters and ONE example
LossOfLeaves: TypeAlias = Callable[  # of the parameters' and the example's, and aux
    [Sequence[jax.Array], Sequence[jax.Array]], tuple[ArrayLike, object]
]
Atom: TypeAlias = jax.core.Atom  # of a jaxpr: a variable, or a literal in its place
Engine: TypeAlias = Literal["auto", "bookkeeping", "ghost", "vmap"]

# Where one of these comes twice, what comes out has the structure of what goes in. They
# may be trees of classes of one's own, as modules are, which a checker cannot know.
Shaped = TypeVar("Shaped")
Params = TypeVar("Params")
