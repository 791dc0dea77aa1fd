"""Checks of the arguments of solvers, and the assumptions of their guarantees in words.

The functions `check_...` raise an error before any training. The functions `assume_...`
return the assumptions of a guarantee in words, since code cannot check all assumptions.
`mask_nonfinite` masks the examples that contain a NaN or an infinity.
"""

from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import sampling
from dpjax._core import validate
from dpjax._core.typing import Adjacency, ArrayLike, Key, LossFn, Tree
from dpjax.accounting.iteration import Setting, _setting
from dpjax.clipping._clip import batch_size as leading_axis
from dpjax.solvers.losses import Loss
from dpjax.solvers.prox import Prox


class Data(NamedTuple):
    """Examples, and a mask of the examples that a solver may use.

    Attributes:
      examples: the data; `mask_nonfinite` replaces non-finite examples by zeros.
      finite: bool[n], False for padding and for the examples that `mask_nonfinite`
        replaced by zeros.
    """

    examples: Tree
    finite: jax.Array

    def select(self, batch: sampling.Batch) -> "Data":
        """Return the examples of a batch, with `finite` set to False for padding."""
        examples = jax.tree.map(lambda x: x[batch.indices], self.examples)
        return Data(examples, batch.mask & self.finite[batch.indices])


@jax.jit
def mask_nonfinite(data: Tree) -> Data:
    """Replace each example that has a NaN or an infinity by zeros, and add a mask."""

    def prepare_example(example: Tree) -> Data:
        flags = jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), example)
        finite = jax.tree.reduce(jnp.logical_and, flags)
        # Use jnp.where in place of a product, since 0 · NaN is NaN.
        used = jax.tree.map(lambda x: jnp.where(finite, x, jnp.zeros_like(x)), example)
        return Data(used, finite)

    return jax.vmap(prepare_example)(data)


def evaluate_schedule(
    name: str, value: ArrayLike | optax.Schedule, num_steps: int
) -> np.ndarray:
    """The values of a number, array or schedule at all T = num_steps steps, f64[T]."""
    if callable(value):
        value = jax.vmap(value)(jnp.arange(num_steps))
    array = np.asarray(value, np.float64)
    if array.shape not in ((), (num_steps,)):
        raise ValueError(
            f"{name} must be a number, a schedule, or an array of one value for each "
            f"of the {num_steps} steps; got shape {array.shape}."
        )
    return np.broadcast_to(array, (num_steps,))


Order = Literal["fixed", "reshuffled"]  # the order of the examples in each epoch
Batches = Literal["full", "fixed", "reshuffled", "random"]

BATCHES: dict[Batches, str] = {
    "full": "every step uses all examples",
    "fixed": "an example is in the same step of every epoch",
    "reshuffled": (
        "an example is in one step of every epoch, chosen by a key that is "
        "independent of the data"
    ),
    "random": "each batch is a fresh, secret, uniformly random subset",
}
# Assumptions of every guarantee.
_ALWAYS = (
    "n, all shapes, the initial parameters and the hyperparameters are public",
    "arithmetic is real and Gaussian noise ideal",
)
# Assumptions of guarantees that hold for the last iterate alone.
_CONTRACTION = (
    "nothing but the last iterate is released: no other iterate, loss or count",
    "every assumption of the setting about the loss (convexity, smoothness, and the "
    "norm of gradients unless they are clipped) is true for every possible example",
    "prox does not depend on the data and never moves two points apart",
)
# The bound on rounding in `_precision` assumes this precision of gradients and prox.
PRECISION = (
    "gradients and prox are as exact as a dot product in float64 (those of "
    "dpjax.solvers are)"
)


def assume_every_step(batches: Batches) -> tuple[str, ...]:
    """State the assumptions of a guarantee that covers the iterates of all steps.

    `batches` names the way in which the solver forms its batches.
    """
    return (BATCHES[batches], *_ALWAYS)


def assume_last_iterate(assumption: str, setting: Setting) -> tuple[str, ...]:
    """State the assumptions of a guarantee that covers only the last iterate.

    The result begins with the text `assumption`, and always has the assumptions that
    all these guarantees share. A finite diameter adds one assumption, and so does a
    positive strong convexity.
    """
    more: tuple[str, ...] = ()
    if has_bounded_set(setting):
        more += ("prox maps into a set of the stated diameter",)
    if is_strongly_convex(setting):
        # An example that is left out contributes no curvature.
        more += ("every possible example is finite",)
    return (assumption, *more, *_CONTRACTION, *_ALWAYS)


def assume_minimum() -> tuple[str, ...]:
    """State the assumptions of the guarantee of `objective_perturbation`."""
    return (
        "nothing but the result is released",
        "Newton's method reaches its tolerance on both data sets; if it does not, "
        "the result is NaN",
        PRECISION,
        *_ALWAYS,
    )


Noise = TypeVar("Noise")


class Target(NamedTuple):
    """The (ε, δ) for which the noise is calibrated."""

    epsilon: float
    delta: float


class Epochs(NamedTuple):
    """The number of epochs, the batch size, and the number of steps in an epoch."""

    num_epochs: int
    batch_size: int
    steps_per_epoch: int

    @property
    def num_steps(self) -> int:
        """The number of steps T of the whole run."""
        return self.num_epochs * self.steps_per_epoch


def check_examples(loss_fn: LossFn, data: Tree, key: Key) -> int:
    """Check the data and the key, and return the number of examples.

    A loss with a method `check`, such as a `losses.Loss`, also checks the data.
    """
    validate.typed_key("key", key)
    num_examples = leading_axis("data", data)
    check = getattr(loss_fn, "check", None)
    if check is not None:
        check(data)
    return num_examples


def check_adjacency(adjacency: Adjacency) -> None:
    """Raise a ValueError unless the adjacency is ZERO_OUT or REPLACE."""
    if validate.adjacency(adjacency) is Adjacency.ADD_REMOVE:
        raise ValueError(
            f"adjacency must be ZERO_OUT or REPLACE; got {adjacency!r}. A further "
            "example would change the sizes by which sums are divided, and would "
            "move other examples to other batches."
        )


def check_batch_size(batch_size: int, num_examples: int) -> int:
    """Check that a batch size is from 1 to the number of examples, and return it."""
    batch_size = validate.static_int("batch_size", batch_size, minimum=1)
    validate.at_most("batch_size", batch_size, num_examples)
    return batch_size


def check_epochs(
    loss_fn: LossFn,
    data: Tree,
    adjacency: Adjacency,
    num_epochs: int,
    batch_size: int,
    key: Key,
) -> Epochs:
    """Check arguments of a solver with momentum, and return its `Epochs`.

    An epoch of n examples has ⌈n / batch_size⌉ steps. The last batch may have padding.
    """
    check_adjacency(adjacency)
    num_epochs = validate.static_int("num_epochs", num_epochs, minimum=1)
    batch_size = validate.static_int("batch_size", batch_size, minimum=1)
    num_examples = check_examples(loss_fn, data, key)
    return Epochs(num_epochs, batch_size, -(-num_examples // batch_size))


def check_noise(
    noise_multiplier: Noise | None, epsilon: float | None, delta: float | None
) -> Noise | Target:
    """Return the noise multiplier if the caller gave one, else the target (ε, δ).

    The function raises a ValueError unless the caller gave either the noise multiplier
    alone, or both ε and δ.
    """
    if noise_multiplier is not None:
        if epsilon is not None or delta is not None:
            raise ValueError(
                "noise_multiplier must be None if epsilon or delta is given; got "
                f"{noise_multiplier!r}."
            )
        return noise_multiplier
    if epsilon is None or delta is None:
        raise ValueError(
            "noise_multiplier must be given, or both epsilon and delta; got "
            f"epsilon {epsilon!r} and delta {delta!r}."
        )
    return check_target(epsilon, delta)


def check_target(epsilon: float, delta: float) -> Target:
    """Return the target; raise a ValueError unless ε > 0 and δ is in (0, 1)."""
    validate.positive("epsilon", epsilon)
    validate.open_unit("delta", delta)
    return Target(float(epsilon), float(delta))


def check_last_iterate(
    loss_fn: LossFn, data: Tree, prox: Prox | None, key: Key, setting: Setting
) -> int:
    """Check arguments of a solver that releases only its last iterate.

    The entries of `setting` are the assumptions of the guarantee.

    Returns:
      The number of examples.

    Raises:
      ValueError: an assumption is missing or unknown; the data or the key are invalid;
        the adjacency is ADD_REMOVE; an assumption other than step_size is an array with
        axes; the diameter is finite but prox is None; or strong_convexity is above 0
        but the data contain a NaN or an infinity.
    """
    _setting.check_names(setting)
    num_examples = check_examples(loss_fn, data, key)
    check_adjacency(setting["adjacency"])
    for name in setting.keys() - {"step_size"}:
        if np.ndim(setting[name]):
            raise ValueError(f"{name} must be one number; got {setting[name]!r}.")
    if has_bounded_set(setting) and prox is None:
        raise ValueError(
            "diameter must be inf unless prox maps into a bounded set; got "
            f"{setting['diameter']!r}."
        )
    if is_strongly_convex(setting) and not bool(jnp.all(mask_nonfinite(data).finite)):
        raise ValueError(
            "data must be finite if strong_convexity is above 0, because a "
            "non-finite example is left out and then has no curvature. State the "
            "curvature of a regulariser as regularization, which allows non-finite "
            "data."
        )
    return num_examples


def has_bounded_set(setting: Setting) -> bool:
    """Whether the setting bounds the diameter of the set that contains the iterates."""
    return bool(np.any(np.asarray(setting["diameter"]) < np.inf))


def is_strongly_convex(setting: Setting) -> bool:
    """Whether the setting states that the loss of every example is strongly convex."""
    return bool(np.any(np.asarray(setting["strong_convexity"]) > 0))


def check_loss(loss_fn: LossFn, setting: Setting) -> None:
    """Raise a ValueError if the setting contradicts the bounds of a `losses.Loss`.

    The function compares the smoothness, the strong convexity and the number of linear
    scores. Without clipping, the function also compares the bound on gradients. The
    function does not check a loss that is not a `losses.Loss`.
    """
    if not isinstance(loss_fn, Loss):
        return
    loss_setting = loss_fn.setting
    # With clipping, the setting may state any bound on gradients, because clipping
    # enforces this bound.
    names = ["smoothness"] if setting["clipped"] else ["smoothness", "gradient_norm"]
    for name in names:
        if np.any(np.asarray(setting[name]) < loss_setting[name]):
            raise ValueError(
                f"{name} must be at least the {name} of the loss, "
                f"{loss_setting[name]!r}; got {setting[name]!r}."
            )
    if is_strongly_convex(setting):
        raise ValueError(
            "strong_convexity must be 0 for this loss, because the loss of an example "
            "with zero features is constant; got "
            f"{setting['strong_convexity']!r}."
        )
    if setting["generalised_linear"] and not loss_setting["generalised_linear"]:
        raise ValueError(
            "generalised_linear must be False for this loss, because the loss has "
            f"several scores; got {setting['generalised_linear']!r}."
        )
