"""Losses of linear scores, with the constants that accountants need.

A loss scales features down to a ball of radius B, so that the constants hold for every
possible example. The gradients then need no clipping, and the guarantee assumes no
bound on the data.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax._core import rounding, validate
from dpjax._core.typing import ArrayLike

__all__ = ["Loss", "huber", "logistic", "softmax"]

# This slack covers sixteen float32 roundings, as in clipping, so that scaled features
# are within the ball.
_SLACK = 2.0**-20


@dataclasses.dataclass(frozen=True)
class Loss:
    """A convex loss of ONE example: `loss(params, (features, label))`.

    Attributes:
      feature_norm: B. The loss scales features down to an L2 norm of at most B.
      gradient_norm: an upper bound on the L2 norm of the gradient in params.
      smoothness: an upper bound on the Lipschitz constant of the gradient in params.
      generalised_linear: whether the loss depends on a single linear score ⟨w, x⟩.
      labels: a description of the allowed labels, for error messages.
      of_scores: a function from the scores and the label to the loss.
      admits: a function from an array of labels to a mask of the allowed labels.
      logistic: whether the loss is log(1 + e^{−y⟨w, x⟩}), for which
        `objective_perturbation` needs less noise.
    """

    feature_norm: float
    gradient_norm: float
    smoothness: float
    generalised_linear: bool
    labels: str
    of_scores: Callable[[jax.Array, jax.Array], jax.Array]
    admits: Callable[[np.ndarray], np.ndarray]
    logistic: bool = False

    def __call__(
        self, params: jax.Array, example: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """The loss of one example, a pair of features f[d] and a label."""
        features, label = example
        features = self.scale(features)
        dtype = jnp.promote_types(features.dtype, jnp.result_type(params))
        features, params = features.astype(dtype), params.astype(dtype)
        # The bound on gradients holds only if this product, and its transpose in the
        # gradient, have full precision.
        scores = jnp.matmul(features, params, precision=rounding.HIGHEST)
        return self.of_scores(scores, label)

    def scale(self, features: ArrayLike) -> jax.Array:
        """Scale the features f[d] of one example down to the ball of radius B."""
        features = jnp.asarray(features, jnp.result_type(features, jnp.float32))
        bound = self.feature_norm * (1 - _SLACK)
        # In units of the bound, squares of small features do not underflow, and squares
        # of large features do not overflow.
        norm = jnp.sqrt(rounding.square_sum(features, unit=bound))
        # The divisor is at least 1, so that features within the ball are not scaled up.
        return features / jnp.maximum(norm, 1.0)

    def check(self, data: object) -> None:
        """Raise a ValueError unless data is (features f[n, d], allowed labels [n]).

        A label may be NaN, since the solvers leave out its example. The method does not
        compare the lengths of the features and the labels; the solvers compare them.
        """
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise ValueError(
                "data must be a pair (features, labels) for this loss; got "
                f"{type(data).__name__} with {jax.tree.structure(data)}."
            )
        features, labels = np.asarray(data[0]), np.asarray(data[1])
        if features.ndim != 2 or labels.ndim != 1:
            raise ValueError(
                "data must be (features f[n, d], labels [n]); got shapes "
                f"{features.shape} and {labels.shape}."
            )
        real = jnp.issubdtype(labels.dtype, jnp.floating)
        # Integer labels cannot be NaN, and np.isnan does not accept all dtypes.
        present = labels[~np.isnan(labels)] if real else labels
        wrong = present[~np.asarray(self.admits(present), bool)]
        if wrong.size:
            raise ValueError(
                f"data must have labels that are {self.labels}; got {wrong[0]!r} "
                f"(number of invalid labels: {wrong.size})."
            )

    @property
    def setting(self) -> dict[str, Any]:
        """The fields of `iteration.Setting` that describe this loss, without clipping.

        The fields are gradient_norm, clipped (False), generalised_linear, smoothness,
        weak_convexity and strong_convexity (both 0).
        """
        return {
            "gradient_norm": self.gradient_norm,
            "clipped": False,
            "generalised_linear": self.generalised_linear,
            "smoothness": self.smoothness,
            "weak_convexity": 0.0,
            "strong_convexity": 0.0,
        }


def _logistic(score: jax.Array, label: jax.Array) -> jax.Array:
    return jax.nn.softplus(-jnp.asarray(label, score.dtype) * score)


def logistic(*, feature_norm: float) -> Loss:
    """Binary logistic regression: log(1 + exp(−y⟨w, x⟩)) for labels −1 and 1.

    Args:
      feature_norm: B, positive. Longer feature vectors are first scaled down to norm B.

    Returns:
      A `Loss` for parameters w f[d]. Its gradients have norm at most B, and its
      smoothness is B²/4.

    Raises:
      ValueError: feature_norm is not positive.

    Example:
      >>> loss = logistic(feature_norm=1.0)
      >>> w, x = jnp.array([2.0, 0.0]), jnp.array([30.0, 40.0])
      >>> print(f"{loss(w, (x, 1.0)):.4f}")  # the score is 2 · 0.6
      0.2633
    """
    validate.positive("feature_norm", feature_norm)
    return Loss(
        feature_norm=feature_norm,
        gradient_norm=feature_norm,
        smoothness=feature_norm**2 / 4,
        generalised_linear=True,
        labels="-1 or 1",
        of_scores=_logistic,
        admits=_signs,
        logistic=True,
    )


def _signs(labels: np.ndarray) -> np.ndarray:
    return np.abs(labels) == 1


@dataclasses.dataclass(frozen=True)
class _Huber:
    threshold: float

    def __call__(self, score: jax.Array, label: jax.Array) -> jax.Array:
        label = jnp.asarray(label, score.dtype)
        return optax.huber_loss(score, label, delta=self.threshold)


def huber(threshold: float, *, feature_norm: float) -> Loss:
    """Huber regression: a loss of the error ⟨w, x⟩ − y, for finite labels y.

    The loss is half the square of the error if the absolute error is at most the
    threshold, and linear in the absolute error beyond the threshold.

    Args:
      threshold: the largest absolute error with a quadratic loss, in units of labels,
        positive.
      feature_norm: B, positive. Longer feature vectors are first scaled down to norm B.

    Returns:
      A `Loss` for parameters w f[d]. Its gradients have norm at most threshold · B, and
      its smoothness is B².

    Raises:
      ValueError: an argument is not positive.

    Example:
      >>> loss = huber(0.5, feature_norm=1.0)
      >>> value = loss(jnp.array([1.0]), (jnp.array([1.0]), 3.0))
      >>> print(f"{value:.3f}")  # 0.5 (2 − 0.25)
      0.875
    """
    validate.positive("threshold", threshold)
    validate.positive("feature_norm", feature_norm)
    return Loss(
        feature_norm=feature_norm,
        gradient_norm=threshold * feature_norm,
        smoothness=feature_norm**2,
        generalised_linear=True,
        labels="finite numbers",
        of_scores=_Huber(threshold),
        admits=np.isfinite,
    )


@dataclasses.dataclass(frozen=True)
class _Classes:
    count: int

    def __call__(self, labels: np.ndarray) -> np.ndarray:
        return (labels == np.floor(labels)) & (labels >= 0) & (labels < self.count)


def _softmax(scores: jax.Array, label: jax.Array) -> jax.Array:
    label = jnp.asarray(label).astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(scores, label)


def softmax(num_classes: int, *, feature_norm: float) -> Loss:
    """Softmax regression: the cross-entropy for labels 0 to num_classes − 1.

    Args:
      num_classes: k, at least 2.
      feature_norm: B, positive. Longer feature vectors are first scaled down to norm B.

    Returns:
      A `Loss` for parameters w f[d, k]. Its gradients have norm at most √2 B, and its
      smoothness is B²/2. The gradients need no clipping. If a solver clips them, a step
      might not be a contraction, since the loss depends on several scores.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> loss = softmax(3, feature_norm=1.0)
      >>> print(f"{loss(jnp.zeros((2, 3)), (jnp.ones(2), jnp.array(1))):.4f}")
      1.0986
    """
    num_classes = validate.static_int("num_classes", num_classes, minimum=2)
    validate.positive("feature_norm", feature_norm)
    return Loss(
        feature_norm=feature_norm,
        gradient_norm=math.sqrt(2) * feature_norm,
        smoothness=feature_norm**2 / 2,
        generalised_linear=False,
        labels=f"whole numbers from 0 to {num_classes - 1}",
        of_scores=_softmax,
        admits=_Classes(num_classes),
    )
