"""Estimates of an attack's success on given scores, without a confidence bound."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax._core import validate
from dpjax._core.float64 import float64
from dpjax._core.keys import stream
from dpjax._core.typing import ArrayLike, Key
from dpjax.auditing._thresholds import check_scores


@float64("nearest", vectors=(0, 1), elementwise=True)
def _auroc64(scores_in: jax.Array, scores_out: jax.Array) -> jax.Array:
    ordered = jnp.sort(scores_out)
    below, at_most = (
        jnp.searchsorted(ordered, scores_in, side=side) for side in ("left", "right")
    )
    # Equal scores count half. Cast before dividing: JAX would divide int32 in float32.
    pairs = (below + at_most).astype(scores_in.dtype) / 2
    return jnp.mean(pairs) / scores_out.size


@float64("nearest", vectors=(0, 1), elementwise=True)
def _true_positive_rate64(
    scores_in: jax.Array, scores_out: jax.Array, false_positive_rate: jax.Array
) -> jax.Array:
    ordered = jnp.sort(scores_out, descending=True)
    # The factor keeps a product just below an integer, by rounding, from losing it.
    allowed = jnp.floor(false_positive_rate * scores_out.size * (1 + 1e-12))
    at = jnp.minimum(allowed, scores_out.size - 1).astype(jnp.int32)
    above = jnp.mean(scores_in > ordered[at])
    return jnp.where(allowed >= scores_out.size, 1.0, above)


def auroc(scores_in: ArrayLike, scores_out: ArrayLike) -> jax.Array:
    """The share of pairs of scores in which the participating example scores higher.

    Args:
      scores_in: scores where the example took part, f[*b, n].
      scores_out: scores where the example did not take part, f[*b, m].

    Returns:
      f[*b], in [0, 1], an estimate of the area under the ROC curve. Random guessing has
      the value 0.5. Equal scores count half.

    Raises:
      ValueError: there are no scores.

    Example:
      >>> import numpy as np
      >>> print(auroc(np.array([1.0, 3.0]), np.array([0.0, 1.0])))
      0.875
    """
    check_scores(scores_in=scores_in, scores_out=scores_out)
    return _auroc64(scores_in, scores_out)


def true_positive_rate(
    scores_in: ArrayLike, scores_out: ArrayLike, false_positive_rate: ArrayLike
) -> jax.Array:
    """The true-positive rate at the threshold with a given false-positive rate.

    Args:
      scores_in: scores where the example took part, f[*b, n].
      scores_out: scores where the example did not take part, f[*b, m].
      false_positive_rate: at most this share of scores_out is above the threshold,
        f[*b], in [0, 1].

    Returns:
      The share of scores_in above the threshold, f[*b], an estimate. The largest rate
      that a guarantee allows is `accounting.fdp.true_positive_rate`.

    Raises:
      ValueError: there are no scores, or the rate is out of range.

    Example:
      >>> import numpy as np
      >>> inside, outside = np.array([1.0, 3.0, 5.0, 6.0]), np.arange(4.0)
      >>> print(true_positive_rate(inside, outside, 0.25))
      0.75
    """
    check_scores(scores_in=scores_in, scores_out=scores_out)
    validate.closed_unit("false_positive_rate", false_positive_rate)
    return _true_positive_rate64(scores_in, scores_out, false_positive_rate)


def bootstrap_quantiles(
    statistic: Callable[[jax.Array, jax.Array], jax.Array],
    scores_in: jax.Array,
    scores_out: jax.Array,
    quantiles: ArrayLike,
    *,
    num_samples: int,
    key: Key,
) -> jax.Array:
    """Bootstrap quantiles of a statistic of scores: its spread, and not a bound.

    Bootstrap quantiles prove nothing. For a statistic like ε they are too small if
    there are few scores, and they ignore the tails beyond the observed scores.

    Args:
      statistic: a function from scores_in f[n] and scores_out f[m] to a number, such as
        `auroc`.
      scores_in: f[n].
      scores_out: f[m].
      quantiles: the probabilities of the quantiles, f[*q], in [0, 1].
      num_samples: the number of resamples, static, at least 1.
      key: one typed key.

    Returns:
      The quantiles, f[*q].

    Raises:
      ValueError: an argument is out of range.

    Reference: Efron (1979), https://doi.org/10.1214/aos/1176344552.

    Example:
      >>> import jax
      >>> noise = jax.random.normal(jax.random.key(0), (2, 500))
      >>> found = bootstrap_quantiles(
      ...     auroc, noise[0] + 1.0, noise[1], jax.numpy.array([0.05, 0.95]),
      ...     num_samples=200, key=jax.random.key(1))
      >>> print(f"{found[0]:.2f} to {found[1]:.2f}")
      0.74 to 0.79
    """
    check_scores(scores_in=scores_in, scores_out=scores_out)
    validate.closed_unit("quantiles", quantiles)
    num_samples = validate.static_int("num_samples", num_samples, minimum=1)
    key = stream(validate.typed_key("key", key), "bootstrap")

    def again(key: Key) -> jax.Array:
        keys = jax.random.split(key)
        return statistic(
            *(
                jax.random.choice(k, jnp.asarray(x), (len(x),))
                for k, x in zip(keys, (scores_in, scores_out), strict=True)
            )
        )

    found = jax.vmap(again)(jax.random.split(key, num_samples))
    return jnp.quantile(found, jnp.asarray(quantiles, found.dtype))
