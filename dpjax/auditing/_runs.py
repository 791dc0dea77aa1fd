"""Many whole runs at once, on a data set and on a neighbour of it."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from dpjax._core import validate
from dpjax._core.keys import stream
from dpjax._core.typing import Key, Tree


class Outputs(NamedTuple):
    """What runs gave, or scores of them.

    Attributes:
      inside: of runs on the data set with the example, a leading axis a run.
      outside: of those on its neighbour.
    """

    inside: Tree
    outside: Tree


def train_many(
    run: Callable[[Tree, Key], Tree],
    data: Tree,
    neighbour: Tree,
    *,
    num_runs: int,
    key: Key,
    batch_size: int | None = None,
) -> Outputs:
    """The outputs of as many runs on a data set and on its neighbour, each with a key.

    Args:
      run: from a data set and one typed key to what is released, a tree of arrays: the
        last iterate, or all updates of `jax.lax.scan`. It is vmapped over keys alone:
        the key is a tracer, so that the optimizer is made inside. So may be all of
        `dpjax.solvers`, which calibrate their noise on the way. Jit what is heavy.
      data: the data set with the example in question.
      neighbour: the one without it, or with another in its place. Its shapes may
        differ.
      num_runs: of each, static.
      key: one typed key. Each run gets its own, which no other has.
      batch_size: how many runs are done at once, in a compiled loop, in which all that
        a run does is traced, a solver's calibration too, which fails; None for all.

    Returns:
      `Outputs`, with leading axes of num_runs.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def run(data, key):
      ...     return jnp.sum(data) + jax.random.normal(key)
      >>> outputs = train_many(
      ...     run, jnp.ones(3), jnp.ones(2), num_runs=4000, key=jax.random.key(0))
      >>> print(f"{outputs.inside.mean() - outputs.outside.mean():.1f}")
      1.0
    """
    num_runs = validate.static_int("num_runs", num_runs, minimum=1)
    if batch_size is not None:
        batch_size = validate.static_int("batch_size", batch_size, minimum=1)
    keys = jax.random.split(
        stream(validate.typed_key("key", key), "audited runs"), 2 * num_runs
    )

    def many(data: Tree, keys: jax.Array) -> Tree:
        # The data is a constant of the program: solvers look at its values.
        one = functools.partial(run, data)
        if batch_size is None:
            # Not jitted: only what depends on a key is traced, and no calibration does.
            return jax.vmap(one)(keys)
        size = min(batch_size, num_runs)
        return jax.jit(functools.partial(jax.lax.map, one, batch_size=size))(keys)

    return Outputs(many(data, keys[:num_runs]), many(neighbour, keys[num_runs:]))


def linear_scores(outputs: Outputs) -> Outputs:
    """Scores of half of the runs by the best linear test that the others suggest.

    Args:
      outputs: trees with leading axes n, at least 4.

    Returns:
      Scores f[n − n // 2] of those runs that the test was not fitted to: they are
      independent, as `epsilon_lower` and `mu_lower` ask for, whatever the outputs are.
      The test is Fisher's discriminant, the best one for Gaussian outputs of one
      covariance.

    Raises:
      ValueError: there are fewer than 4 runs.

    Example:
      >>> import jax
      >>> noise = jax.random.normal(jax.random.key(0), (2, 1000, 3))
      >>> scores = linear_scores(Outputs(noise[0] + 1.0, noise[1]))
      >>> gap = scores.inside.mean() - scores.outside.mean()
      >>> print(f"{gap / scores.outside.std():.1f}")  # √3 would be all there is
      1.6
    """
    inside, outside = (jax.vmap(lambda tree: ravel_pytree(tree)[0])(x) for x in outputs)
    if min(len(inside), len(outside)) < 4:
        raise ValueError(
            f"outputs must have 4 runs at least; got {len(inside)} and {len(outside)}."
        )
    known, other = zip(
        *((x[: len(x) // 2], x[len(x) // 2 :]) for x in (inside, outside)), strict=True
    )
    means = [x.mean(axis=0) for x in known]
    spread = jnp.concatenate([x - m[None] for x, m in zip(known, means, strict=True)])
    scale = jnp.std(spread, axis=0)
    scale = jnp.where(scale > 0, scale, 1.0)
    # Fisher's discriminant Σ⁻¹(m₁ − m₀), in units of each coordinate's deviation; a
    # small multiple of I is added to Σ, which few runs leave singular.
    unit = spread / scale[None]
    covariance = unit.T @ unit / len(unit) + 1e-3 * jnp.eye(len(scale))
    direction = jnp.linalg.solve(covariance, (means[0] - means[1]) / scale) / scale
    return Outputs(*(x @ direction for x in other))
