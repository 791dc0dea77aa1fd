"""Many whole runs at once, on a data set and on a neighbouring data set."""

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
    """The outputs of runs, or the scores of these outputs.

    Attributes:
      inside: the outputs of runs on the data set with the example, stacked along a
        leading axis.
      outside: the outputs of runs on the neighbouring data set, stacked along a leading
        axis.
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
    """Run an algorithm many times on a data set, and as many times on its neighbour.

    Args:
      run: a function from a data set and one typed key to the released values, a tree
        of arrays: the last iterate, or all updates of `jax.lax.scan`. The function is
        vmapped over keys alone. The key is a tracer, so that the optimizer must be made
        inside the function. Any solver of `dpjax.solvers` may be called inside, and
        calibrates its noise there. Jit the expensive parts.
      data: the data set with the audited example.
      neighbour: the data set without this example, or with another in its place. Its
        shapes may differ.
      num_runs: the number of runs on each data set, static.
      key: one typed key, from which each run gets a key of its own.
      batch_size: how many runs are computed at once, in a compiled loop; None for all.
        The loop traces everything that a run does. A run that calibrates a solver's
        noise needs None, because calibration cannot be traced.

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
        # The data are constants and not tracers: solvers check their values.
        one = functools.partial(run, data)
        if batch_size is None:
            # Without jit only values that depend on a key are traced, and calibration
            # depends on no key.
            return jax.vmap(one)(keys)
        size = min(batch_size, num_runs)
        return jax.jit(functools.partial(jax.lax.map, one, batch_size=size))(keys)

    return Outputs(many(data, keys[:num_runs]), many(neighbour, keys[num_runs:]))


def linear_scores(outputs: Outputs) -> Outputs:
    """Scores of half of the runs, by a linear test that is fitted to the other half.

    Args:
      outputs: trees with leading axes n, at least 4.

    Returns:
      Scores f[n − n // 2] of the runs to which the test was not fitted. These scores
      are independent, as `epsilon_lower` and `mu_lower` require, whatever the outputs
      are. The test is Fisher's discriminant, the best test for Gaussian outputs with a
      common covariance.

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
    # Fit on the first half and score the second: the scores are then independent.
    known, other = zip(
        *((x[: len(x) // 2], x[len(x) // 2 :]) for x in (inside, outside)), strict=True
    )
    means = [x.mean(axis=0) for x in known]
    spread = jnp.concatenate([x - m[None] for x, m in zip(known, means, strict=True)])
    scale = jnp.std(spread, axis=0)
    # A coordinate that never varies keeps its unit.
    scale = jnp.where(scale > 0, scale, 1.0)
    # Fisher's discriminant Σ⁻¹(m₁ − m₀), in units of each coordinate's standard
    # deviation. A small multiple of I is added to Σ, which is singular for few runs.
    unit = spread / scale[None]
    covariance = unit.T @ unit / len(unit) + 1e-3 * jnp.eye(len(scale))
    direction = jnp.linalg.solve(covariance, (means[0] - means[1]) / scale) / scale
    return Outputs(*(x @ direction for x in other))
