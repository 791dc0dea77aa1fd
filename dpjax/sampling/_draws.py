"""Samplers that draw anew in every step."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike, Key
from dpjax.sampling import _binomial, _distinct
from dpjax.sampling._batch import Batch, check_number, sampler_key, sizes


def fixed_size(
    num_examples: int,
    batch_size: int,
    *,
    key: Key,
    step: ArrayLike,
) -> Batch:
    """One step on a uniformly random subset of fixed size, drawn without replacement.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      batch_size: b, static, from 1 to n.
      key: one typed key for the whole run; the step is folded into it.
      step: the step's number, i[], from 0 to 2³² − 1; may be traced, and then counts
        modulo 2³².

    Returns:
      A `Batch` of i32[b] and bool[b], all of it True, in uniformly random order.

    Raises:
      ValueError: a size is not a positive integer, n is above 2³¹ − 1 or b above n; a
        static step is out of range; key is not a typed key.

    Privacy: sampling of fixed size under `REPLACE`, at the rate b / n.

    Example:
      >>> import jax
      >>> batch = fixed_size(100, 3, key=jax.random.key(0), step=17)
      >>> len(set(batch.indices.tolist())), batch.mask.tolist()
      (3, [True, True, True])
    """
    n, b = sizes(num_examples, batch_size)
    if b > n:
        raise ValueError(
            f"batch_size must be at most num_examples, {n}; got {batch_size!r}."
        )
    key = sampler_key(key, "sampling.fixed_size", "step", step)
    return Batch(_distinct.distinct(key, n, b), jnp.ones(b, bool))


def poisson(
    num_examples: int,
    sampling_rate: float,
    *,
    max_batch_size: int,
    key: Key,
    step: ArrayLike,
) -> Batch:
    """One step in which every example takes part with the same probability.

    How many do is drawn first, then who they are: in O(b log b) however large n is.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      sampling_rate: q, static, in [0, 1].
      max_batch_size: the batch's fixed shape b, static. When more than b examples are
        drawn, a uniformly random b of them are kept and the rest left out.
      key: one typed key for the whole run; the step is folded into it.
      step: the step's number, i[], from 0 to 2³² − 1; may be traced, and then counts
        modulo 2³².

    Returns:
      A `Batch` of i32[b] and bool[b], in uniformly random order, masked places last.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; sampling_rate
        is outside [0, 1]; a static step is out of range; key is not a typed key.

    Privacy: with no overflow, Poisson sampling at rate q under any adjacency, given
    uniform random bits. The number of examples is within 1e-31 of its distribution in
    total variation, and no example's probability is above q. Given their number all
    subsets are equally likely, exactly. Leaving examples out on overflow is another
    mechanism: account for it by `accounting.truncation`.

    Example:
      >>> import jax
      >>> batch = poisson(
      ...     1000, 0.01, max_batch_size=32, key=jax.random.key(0), step=0)
      >>> batch.indices.shape, bool(batch.mask.sum() < 32)
      ((32,), True)
    """
    n, b = sizes(num_examples, max_batch_size, "max_batch_size")
    validate.closed_unit("sampling_rate", sampling_rate)
    return _poisson(
        n, float(sampling_rate), b, sampler_key(key, "sampling.poisson", "step", step)
    )


def _poisson(n: int, rate: float, b: int, key: jax.Array) -> Batch:
    """A Poisson sample of n examples, and b of them at most."""
    count_key, order_key = jax.random.split(key)
    most = min(n, b)
    count = _binomial.draw(count_key, n, rate, most)
    # In random order, so that the first of them are a uniformly random subset.
    order = jnp.pad(_distinct.distinct(order_key, n, most), (0, b - most))
    mask = jnp.arange(b, dtype=jnp.int32) < count
    return Batch(jnp.where(mask, order, 0), mask)


def cyclic_poisson(
    num_examples: int,
    sampling_rate: float,
    *,
    num_groups: int,
    max_batch_size: int,
    key: Key,
    step: ArrayLike,
) -> Batch:
    """One step in which those of one group take part, each with the same probability.

    Example i is in the group i mod p, and step t samples the group t mod p: so nobody
    takes part in two of p steps that follow each other.

    Args:
      num_examples: n, static, from 1 to 2³¹ − 1.
      sampling_rate: q, static, in [0, 1]: p / n_b for an account of n_b steps an epoch,
        which makes batches of n / n_b.
      num_groups: p, static, from 1 to n.
      max_batch_size: the batch's fixed shape b, static. When more than b places are
        drawn, a uniformly random b of them are kept and the rest left out.
      key: one typed key for the whole run; the step is folded into it.
      step: the step's number, i[], from 0 to 2³² − 1; may be traced, and then counts
        modulo 2³².

    Returns:
      A `Batch` of i32[b] and bool[b]. ⌈n / p⌉ places are sampled, of which a group with
      one example less has an empty one.

    Raises:
      ValueError: a size is not a positive integer, or is above 2³¹ − 1; num_groups is
        above n; sampling_rate is outside [0, 1]; a static step is out of range; key is
        not a typed key.

    Privacy: with no overflow, Poisson sampling at rate q of the group, independently in
    every step, given uniform random bits. An example's group depends on the number of
    those before it, so a guarantee holds under `ZERO_OUT` or `REPLACE`, not under
    `ADD_REMOVE` but for p = 1. Leaving examples out on overflow is another mechanism:
    account for it by `accounting.truncation` with ⌈n / p⌉ examples.

    Reference: Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153.

    Example:
      >>> import jax
      >>> batch = cyclic_poisson(
      ...     90, 0.5, num_groups=9, max_batch_size=9, key=jax.random.key(0), step=16)
      >>> set((batch.indices[batch.mask] % 9).tolist())
      {7}
    """
    n, b = sizes(num_examples, max_batch_size, "max_batch_size")
    validate.closed_unit("sampling_rate", sampling_rate)
    p = validate.static_int("num_groups", num_groups, minimum=1)
    if p > n:
        raise ValueError(
            f"num_groups must be at most num_examples, {n}; got {num_groups!r}."
        )
    own = sampler_key(key, "sampling.cyclic_poisson", "step", step)
    drawn = _poisson(-(-n // p), float(sampling_rate), b, own)
    group = check_number("step", step) % np.uint32(p)
    places = drawn.indices.astype(jnp.uint32) * np.uint32(p) + group
    mask = drawn.mask & (places < n)
    return Batch(jnp.where(mask, places, 0).astype(jnp.int32), mask)
