"""Private accuracy, loss and AUC of a model on held-out data that is also private.

Loss and accuracy are means. Let each example have a value v between 0 and a bound B.
For the loss, v is the example's loss, clipped to [0, B]. For the accuracy, B is 1, and
v is 1 if the prediction is correct and 0 otherwise. The example then contributes the
centered value 2 v / B − 1, which is in [−1, 1]. At the same privacy, under ADD_REMOVE
and ZERO_OUT, centering halves the noise in the mean. The reason is that an added
example changes the sum of v − B / 2 by at most B / 2, but changes the sum of v by up to
B. The AUC is computed from noisy histograms of scores.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core.typing import Adjacency, Arithmetic, ArrayLike, Key
from dpjax.statistics import _counts, _release
from dpjax.statistics._release import Noise, Released, SharedArguments


class _Mean(NamedTuple):
    """The public parameters of a private mean of values.

    Attributes:
      bound: the upper limit to which the values are clipped, f[].
      num_examples: the number by which the sum of the values is divided, f[].
    """

    bound: ArrayLike
    num_examples: ArrayLike


def loss(
    losses: ArrayLike,
    *,
    bound: ArrayLike,
    noise_multiplier: ArrayLike,
    key: Key,
    adjacency: Adjacency,
    num_examples: ArrayLike | None = None,
    arithmetic: Arithmetic = "real",
) -> Released:
    """The mean of held-out losses clipped to [0, bound], with Gaussian noise.

    Args:
      losses: the loss of each private example, f[n]. The model must not depend on these
        examples, unless the model is itself the result of an earlier private release.
      bound: B, the public upper limit to which losses are clipped, positive. A NaN
        counts as B.
      noise_multiplier: z, the standard deviation of the noise in the sum of losses,
        divided by B / 2; at least 0.
      key: one typed key, used only for this release.
      adjacency: the relation between the data sets that the guarantee compares.
      num_examples: the public number by which the sum is divided, positive. None stands
        for n, and is invalid under ADD_REMOVE. num_examples may differ from n. If the
        clipped losses have the mean m, the result is
        (n m + (num_examples − n) B / 2) / num_examples, plus noise.
      arithmetic: "real", or "discrete" for noise on a lattice, as in `mean`.

    Returns:
      A `Released`: the mean f[] with noise of standard deviation
      z B / (2 num_examples), and an event that describes the mechanism to accountants.
      Noise can move the mean out of [0, B].

    Raises:
      ValueError: as for `mean`; losses is not f[n]; bound is not positive.

    Privacy: the release is μ-GDP with μ = adjacency.sensitivity_factor / z. Under
    ZERO_OUT, an example whose contribution is zero counts as a loss of B / 2.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import Adjacency
      >>> released = loss(
      ...     jnp.full(2_000, 0.3), bound=4.0, noise_multiplier=2.0,
      ...     key=jax.random.key(0), adjacency=Adjacency.ZERO_OUT)
      >>> print(f"{released.value:.2f}", released.event)
      0.30 Gaussian(mu=0.5)
    """
    losses = _release.as_examples("losses", losses, ndim=1)
    divisor = _release.as_num_examples(num_examples, len(losses), adjacency)
    shared = SharedArguments(noise_multiplier, key, adjacency, arithmetic)
    params = _Mean(_release.as_positive("bound", bound), divisor)
    return _release.release("loss", _loss, losses, params, shared, dimension=1)


def _loss(data: jax.Array, params: _Mean, noise: Noise) -> jax.Array:
    """Compute the noisy mean of values clipped to [0, params.bound].

    Before the sum, each value is mapped to a contribution in [−1, 1]. A NaN counts as
    params.bound.
    """
    half = params.bound / 2
    without_nan = jnp.where(jnp.isnan(data), params.bound, data)
    rows = jnp.clip(without_nan[:, None] / half - 1, -1.0, 1.0)
    noisy = noise(_release.sum_exactly(lambda x: x, rows))[0]
    return (noisy / params.num_examples + 1) * half


def accuracy(
    predictions: ArrayLike,
    labels: ArrayLike,
    *,
    noise_multiplier: ArrayLike,
    key: Key,
    adjacency: Adjacency,
    num_examples: ArrayLike | None = None,
    arithmetic: Arithmetic = "real",
) -> Released:
    """The share of held-out examples with a correct prediction, with Gaussian noise.

    Args:
      predictions: the predicted class of each private example, i[n].
      labels: the class of each private example, i[n].
      noise_multiplier: z, at least 0. The noise in the number of correct predictions
        has standard deviation z / 2.
      key: one typed key, used only for this release.
      adjacency: the relation between the data sets that the guarantee compares.
      num_examples: the public number by which the number of correct predictions is
        divided, as in `loss`. None stands for n, and is invalid under ADD_REMOVE.
      arithmetic: "real", or "discrete" for noise on a lattice, as in `mean`.

    Returns:
      A `Released`: the accuracy f[] with noise of standard deviation
      z / (2 num_examples), and an event that describes the mechanism to accountants.
      Noise can move the accuracy out of [0, 1].

    Raises:
      ValueError: as for `mean`; predictions and labels are not both of shape [n].

    Privacy: as for `loss`, with losses 0 and 1 and bound 1.

    Example:
      >>> import jax
      >>> from dpjax import Adjacency
      >>> released = accuracy(
      ...     [0, 1, 2, 1] * 500, [0, 1, 2, 2] * 500, noise_multiplier=4.0,
      ...     key=jax.random.key(0), adjacency=Adjacency.REPLACE)
      >>> print(f"{released.value:.2f}", released.event)
      0.75 Gaussian(mu=0.5)
    """
    predictions, labels = _of_equal_length(predictions=predictions, labels=labels)
    correct = predictions == labels
    divisor = _release.as_num_examples(num_examples, len(correct), adjacency)
    shared = SharedArguments(noise_multiplier, key, adjacency, arithmetic)
    params = _Mean(1.0, divisor)
    return _release.release("accuracy", _loss, correct, params, shared, dimension=1)


def auc(
    scores: ArrayLike,
    labels: ArrayLike,
    *,
    edges: ArrayLike,
    noise_multiplier: ArrayLike,
    key: Key,
    adjacency: Adjacency,
    arithmetic: Arithmetic = "real",
) -> Released:
    """The area under the ROC curve on held-out data, from noisy histograms of scores.

    The function makes a noisy histogram of the scores of positive examples and a noisy
    histogram of the scores of negative examples, and computes the area from both
    histograms. The area is the share of pairs of a positive and a negative example in
    which the positive example is in the higher bin, plus half of the share of pairs in
    which both examples are in the same bin.

    Args:
      scores: the score of each private example, f[n].
      labels: 1 for a positive example and 0 for a negative example, i[n].
      edges: the public edges of k bins of scores, f[k + 1], increasing. A finite score
        below the edges counts in the first bin, and a finite score above the edges in
        the last bin. More bins give a finer result with more noise.
      noise_multiplier: z, the standard deviation of the noise in each count, at least
        0.
      key: one typed key, used only for this release.
      adjacency: the relation between the data sets that the guarantee compares.
      arithmetic: "real", or "discrete" for noise on a lattice, as in `mean`.

    Returns:
      A `Released`: the area f[], clipped to [0, 1], and an event that describes the
      mechanism to accountants. If a class has few examples, the result is mostly noise.

    Raises:
      ValueError: as for `mean`; edges are not two or more finite, increasing numbers;
        scores and labels are not both of shape [n].

    Privacy: the two histograms together are one `histogram` with 2k bins. So the
    release is μ-GDP with μ = 1 / z under ADD_REMOVE and ZERO_OUT, and μ = √2 / z under
    REPLACE. The function adds noise to counts and not to the area, since the area's
    sensitivity is large if a class is small. The function does not count an example
    whose score is not finite, or whose label is neither 0 nor 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from dpjax import Adjacency
      >>> scores, labels = jnp.arange(4_000) / 4_000, jnp.arange(4_000) >= 1_000
      >>> released = auc(
      ...     scores, labels, edges=jnp.linspace(0, 1, 41), noise_multiplier=2.0,
      ...     key=jax.random.key(0), adjacency=Adjacency.ADD_REMOVE)
      >>> print(released.value.round(1))
      1.0
    """
    data = _of_equal_length(scores=scores, labels=labels)
    bin_edges = _counts.check_increasing("edges", edges)
    return _release.release(
        "auc",
        _auc,
        data,
        bin_edges,
        SharedArguments(noise_multiplier, key, adjacency, arithmetic),
        distance=_release.root_up(2),
        dimension=2 * (len(bin_edges) - 1),
    )


def _auc(data: Any, edges: jax.Array, noise: Noise) -> jax.Array:
    scores, labels = data
    size = len(edges) - 1
    bins = _counts.bins_of(jnp.clip(scores, edges[0], edges[-1]), edges)
    is_valid = jnp.isfinite(scores) & ((labels == 0) | (labels == 1))
    bins = jnp.where(is_valid, bins + size * (labels == 1), 2 * size)
    negative, positive = noise(_counts.count_in_bins(bins, 2 * size)).reshape(2, size)
    # Count the pairs with the positive example in a higher bin, and half of the pairs
    # in one bin. The histograms have independent noise, so this count has no bias.
    below = jnp.cumsum(negative) - negative / 2
    pairs = jnp.maximum(jnp.sum(negative), 1) * jnp.maximum(jnp.sum(positive), 1)
    return jnp.clip(jnp.sum(positive * below) / pairs, 0.0, 1.0)


def _of_equal_length(**values: ArrayLike) -> list[jax.Array | np.ndarray]:
    """Check that named values are vectors of the same length, and return them."""
    vectors = [_release.as_examples(name, x, ndim=1) for name, x in values.items()]
    lengths = [len(x) for x in vectors]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"{' and '.join(values)} must have the same length; got {lengths}."
        )
    return vectors
