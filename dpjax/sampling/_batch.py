"""What all samplers share: a batch, its sizes, and the key of a step or an epoch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import keys, validate
from dpjax._core.typing import ArrayLike, Key

_MOST = 2**31 - 1  # positions are int32


class Batch(NamedTuple):
    """Examples that take part.

    Attributes:
      indices: i32[..., b], positions in the data set; 0 where masked.
      mask: bool[..., b], False where the place is empty. Pass it to `clipped_grad`.
    """

    indices: jax.Array
    mask: jax.Array


def sizes(
    num_examples: int, batch_size: int, name: str = "batch_size"
) -> tuple[int, int]:
    """The two sizes as ints, or an error."""
    n = validate.static_int("num_examples", num_examples, minimum=1)
    b = validate.static_int(name, batch_size, minimum=1)
    if n > _MOST:
        raise ValueError(f"num_examples must be at most {_MOST}; got {num_examples!r}.")
    if b > _MOST:
        raise ValueError(f"{name} must be at most {_MOST}; got {batch_size!r}.")
    return n, b


def check_number(name: str, value: ArrayLike) -> jax.Array:
    """The number of a step or epoch as u32[], or an error."""
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer) or jnp.ndim(value):
        raise ValueError(f"{name} must be one integer; got {value!r}.")
    known = validate.concrete(value)
    if known is None:
        return jnp.asarray(value).astype(jnp.uint32)
    if not 0 <= known < 2**32:
        raise ValueError(f"{name} must be from 0 to 2**32 - 1; got {value!r}.")
    return jnp.asarray(known.astype(np.uint32))


def sampler_key(key: Key, consumer: str, name: str, number: ArrayLike) -> jax.Array:
    """The key of one step or epoch of one sampler."""
    validate.typed_key("key", key)
    return jax.random.fold_in(keys.stream(key, consumer), check_number(name, number))
