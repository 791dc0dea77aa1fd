"""Hyperparameters for private training of a linear model, from public sizes alone."""

import dataclasses
import math
from types import MappingProxyType

import optax

from dpjax._core import validate
from dpjax._core.adjacency import Adjacency
from dpjax._core.float64 import scope
from dpjax.accounting import gdp

# Each number was chosen on held-out parts of the training data of three data sets. The
# page docs/recipe.md has the accuracies, and the changes that did not help.
_NUM_STEPS = 60
_CLIP_NORM = 0.25
_MEAN_SHARE = 0.05
_INTERCEPT = 0.3
_LOGIT_NOISE = 2 / math.sqrt(3)
# For features of norm 1, a private mean whose noise has a larger norm than
# _MAX_MEAN_NOISE is no better than the center 0.
_MAX_MEAN_NOISE = 0.5
_TUNED_ON = "Set on held-out training examples of digits, Bank and Wine. "


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Public hyperparameters of a linear model, as `dpjax.recipe` chooses them.

    Attributes:
      batch_size: the number of examples in a step, which is the number of all examples.
      num_steps: the number of steps.
      clip_norm: the bound on the L2 norm of the gradient of one example.
      learning_rate: η, the learning rate of the first step. The learning rate falls
        linearly, and would be 0 in the step after the last step.
      mean_share: the share of the privacy budget that a private mean of the features
        costs, measured in μ² of Gaussian differential privacy; 0 if no mean is
        computed.
      mean_noise_multiplier: the argument noise_multiplier of `statistics.mean` at which
        the mean costs mean_share; infinity if no mean is computed.
      intercept: the constant that is appended to the features of each example, after
        the features are centered and divided by their norm.
      reasons: the reason for each number in words, by the name of the attribute.
    """

    batch_size: int
    num_steps: int
    clip_norm: float
    learning_rate: float
    mean_share: float
    mean_noise_multiplier: float
    intercept: float
    reasons: MappingProxyType[str, str]

    def optimizer(self) -> optax.GradientTransformation:
        """Gradient descent whose learning rate falls linearly to 0 over the run."""
        return optax.sgd(optax.linear_schedule(self.learning_rate, 0, self.num_steps))


def recipe(
    epsilon: float,
    delta: float,
    *,
    num_examples: int,
    num_features: int,
    adjacency: Adjacency,
) -> Recipe:
    """Choose hyperparameters for a private linear model on features of norm at most 1.

    The function uses only its arguments, which are public, and reads no examples. So
    its result costs no privacy. The numbers are for the following pipeline. First,
    compute a private mean of the features, unless the recipe's `mean_share` is 0.
    Subtract this mean from each example's features, divide the difference by its norm,
    and append an intercept. Then train softmax regression by noisy full-batch gradient
    descent, with all parameters initially 0.

    Args:
      epsilon: the ε of mean and training together, positive.
      delta: the δ of mean and training together, in (0, 1).
      num_examples: n, public.
      num_features: d, the number of features of one example.
      adjacency: ZERO_OUT or REPLACE. Under ADD_REMOVE, n is private, and there are no
        full batches.

    Returns:
      A `Recipe`.

    Raises:
      ValueError: an argument is out of range; adjacency is ADD_REMOVE.

    Privacy: the recipe by itself guarantees nothing. Draw the mean and the plan from
    the same `dpjax.budget(epsilon, delta, slack=0, ...)`.

    Reference: Tramèr and Boneh (2021), section 2.

    Example:
      >>> import dpjax
      >>> replace = dpjax.Adjacency.REPLACE
      >>> numbers = dpjax.recipe(
      ...     1.0, 1e-5, num_examples=1437, num_features=128, adjacency=replace)
      >>> print(numbers.num_steps, numbers.clip_norm, f"{numbers.learning_rate:.0f}")
      60 0.25 25
      >>> account = dpjax.budget(1.0, 1e-5, adjacency=replace, slack=0)
      >>> run = account.plan(
      ...     share=1 - numbers.mean_share, num_examples=1437, sampling="fixed",
      ...     batch_size=numbers.batch_size, num_steps=numbers.num_steps,
      ...     clip_norm=numbers.clip_norm)
      >>> print(f"{run.noise_multiplier:.0f}")
      59
    """
    epsilon = validate.positive_float("epsilon", epsilon)
    delta = validate.positive_float("delta", delta)
    validate.open_unit("delta", delta)
    n = validate.static_int("num_examples", num_examples, minimum=1)
    d = validate.static_int("num_features", num_features, minimum=1)
    if validate.adjacency(adjacency) is Adjacency.ADD_REMOVE:
        raise ValueError(
            "adjacency must be ZERO_OUT or REPLACE for full batches; "
            f"got {adjacency!r}."
        )
    factor = adjacency.sensitivity_factor
    with scope():
        # The factor covers rounding: the μ of a budget for (ε, δ) is lower by 2e-12.
        mu = float(gdp.mu(epsilon, delta)) * (1 - 1e-9)
    z_mean = factor / (mu * math.sqrt(_MEAN_SHARE))
    # In a sum of vectors of norm 1, the noise has standard deviation z_mean per entry.
    has_mean = z_mean * math.sqrt(d) / n <= _MAX_MEAN_NOISE
    share = _MEAN_SHARE if has_mean else 0.0
    # The noise in a step's mean gradient has the standard deviation f C √T / (μ n). For
    # T learning rates that fall linearly from η, the root of the sum of squares is
    # η √(T / 3). The product is the standard deviation of the noise in a weight, and in
    # a logit for features of norm 1.
    rate = (
        _LOGIT_NOISE
        * (mu * math.sqrt(1 - share) * n)
        * math.sqrt(3)
        / (factor * _CLIP_NORM * _NUM_STEPS)
    )
    return Recipe(
        batch_size=n,
        num_steps=_NUM_STEPS,
        clip_norm=_CLIP_NORM,
        learning_rate=rate,
        mean_share=share,
        mean_noise_multiplier=z_mean if has_mean else math.inf,
        intercept=_INTERCEPT,
        reasons=MappingProxyType(
            {
                "batch_size": "Full batches have an exact μ, and need no slack of δ.",
                "num_steps": _TUNED_ON + "100 and 120 steps changed little.",
                "clip_norm": _TUNED_ON
                + "Gradients of examples that are not yet learned "
                "have equal norms; 0.5 was worse where ε is large.",
                "learning_rate": _TUNED_ON + "Noise alone moves a logit by a standard "
                f"deviation of {_LOGIT_NOISE:.2f}, so the rate grows with μ n.",
                "mean_share": "Set on held-out training examples of digits, where 10 % "
                "and 20 % were no better. There is no "
                f"mean if the norm of its noise exceeds {_MAX_MEAN_NOISE}.",
                "mean_noise_multiplier": "The mean costs mean_share of μ².",
                "intercept": "A small constant lengthens gradients little. It was "
                "not varied.",
            }
        ),
    )
