"""Shared parts of all samplers: batches, checks of sizes, keys of steps and epochs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import keys, validate
from dpjax._core.typing import ArrayLike, Key

_MOST = 2**31 - 1  # the largest int32, the dtype of a batch's indices


class Batch(NamedTuple):
    """The examples that take part in a step, in an array of fixed size with padding.

    Attributes:
      indices: i32[..., b], the examples' positions in the data set; 0 in padding.
      mask: bool[..., b], True for an example and False for padding. Pass the mask to
        `clipped_grad`.
    """

    indices: jax.Array
    mask: jax.Array


def sizes(
    num_examples: int, batch_size: int, name: str = "batch_size"
) -> tuple[int, int]:
    """Return both sizes as Python ints, or raise ValueError if one is out of range."""
    n = validate.static_int("num_examples", num_examples, minimum=1)
    b = validate.static_int(name, batch_size, minimum=1)
    if n > _MOST:
        raise ValueError(f"num_examples must be at most {_MOST}; got {num_examples!r}.")
    if b > _MOST:
        raise ValueError(f"{name} must be at most {_MOST}; got {batch_size!r}.")
    return n, b


def check_number(name: str, value: ArrayLike) -> jax.Array:
    """Return a step or epoch number as u32[], or raise ValueError if out of range."""
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer) or jnp.ndim(value):
        raise ValueError(f"{name} must be one integer; got {value!r}.")
    known = validate.concrete(value)
    if known is None:
        # The value of a traced number is not known here: the number wraps modulo 2³².
        return jnp.asarray(value).astype(jnp.uint32)
    if not 0 <= known < 2**32:
        raise ValueError(f"{name} must be from 0 to 2**32 - 1; got {value!r}.")
    return jnp.asarray(known.astype(np.uint32))


def sampler_key(key: Key, consumer: str, name: str, number: ArrayLike) -> jax.Array:
    """The key of one step or epoch of one sampler.

    Args:
      key: the run's typed key.
      consumer: the name of the sampler's key stream.
      name: "step" or "epoch", for error messages.
      number: the number of the step or epoch.
    """
    validate.typed_key("key", key)
    # Each sampler has its own stream, so that its draws are independent of the noise.
    return jax.random.fold_in(keys.stream(key, consumer), check_number(name, number))
