"""Type aliases for the signatures of dpjax.

`Tree`, the alias for a pytree, is `optax.Params`. With this alias a static checker
accepts nested containers of arrays and numbers. Only the author of a loss knows the
types of its parameters and examples. So the alias `LossFn` does not restrict the
arguments. Signatures use `Any` for results of a user's function and for arguments that
are passed on to such a function, and `object` for values that are not inspected.
`help` shows an alias of `TypeAliasType` by its name, and other aliases by their
definition. This module also exports `Adjacency`, for the signatures of accountants.
"""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypeVar

import jax
import jax.core
import jax.typing
import numpy as np
import optax
from typing_extensions import TypeAliasType

from dpjax._core.adjacency import Adjacency as Adjacency

ArrayLike = TypeAliasType("ArrayLike", jax.typing.ArrayLike)
Arrays: TypeAlias = Sequence[jax.Array]
DTypeLike = TypeAliasType("DTypeLike", jax.typing.DTypeLike)
Key: TypeAlias = jax.Array  # a typed key, which validate.typed_key checks
Tree = TypeAliasType("Tree", optax.Params)
ScalarOrSchedule = TypeAliasType("ScalarOrSchedule", optax.ScalarOrSchedule)
LossFn: TypeAlias = Callable[..., jax.Array]  # a function of parameters and ONE example
Atom: TypeAlias = jax.core.Atom  # an input of a jaxpr's equation: variable or literal
Engine: TypeAlias = Literal["auto", "bookkeeping", "ghost", "vmap"]
Arithmetic: TypeAlias = Literal["real", "discrete"]

# 32-bit words, of JAX or of NumPy.
Bits = TypeVar("Bits", jax.Array, np.ndarray)

# If a signature has one of these variables twice, the output has the input's tree
# structure. The trees may have user-defined nodes, such as modules, which a static
# checker cannot know. So the variables have no bound.
Shaped = TypeVar("Shaped")
Params = TypeVar("Params")
