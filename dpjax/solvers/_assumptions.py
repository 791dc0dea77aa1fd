"""What a solver takes as given: checked, rounded as it runs, and put into words."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _validate
from dpjax.accounting import calibrate
from dpjax.accounting.iteration import Setting
from dpjax.adjacency import Adjacency
from dpjax.solvers import _data, _numbers
from dpjax.solvers.losses import Loss


def check(
    loss_fn: Any,
    data: Any,
    *,
    noise_multiplier: Any,
    epsilon: Any,
    delta: Any,
    prox: Any,
    key: jax.Array,
    setting: dict[str, Any],
) -> int:
    """The number of examples, or a ValueError for what no solver here can take."""
    check_names(setting)
    num_examples = _data.check(loss_fn, data)
    _validate.typed_key("key", key)
    if _validate.adjacency(setting["adjacency"]) is Adjacency.ADD_REMOVE:
        raise ValueError(
            f"adjacency must be ZERO_OUT or REPLACE; got {setting['adjacency']!r}: "
            "sums are divided by sizes that one example more would change."
        )
    if np.any(np.asarray(setting["diameter"]) < np.inf) and prox is None:
        raise ValueError(
            "diameter must be inf without a prox that keeps iterates in a set; got "
            f"{setting['diameter']!r}."
        )
    strong = np.any(np.asarray(setting["strong_convexity"]) > 0)
    if strong and not bool(jnp.all(_data.prepare(data).finite)):
        raise ValueError(
            "data must be finite where strong_convexity is above 0: an example that is "
            "left out has no curvature (a regulariser of its own is named "
            "regularization, and allows it)."
        )
    check_noise(noise_multiplier, epsilon, delta)
    return num_examples


class SettingError(TypeError, ValueError):
    """A call without an argument that has no default, and a mistake in a value."""


def check_names(setting: dict[str, Any]) -> None:
    """Raise unless the setting has all assumptions and nothing else."""
    required = Setting.__annotations__.keys()
    missing = [name for name in required if name not in setting]
    if missing:
        raise SettingError(
            f"{', '.join(missing)} must be given: an assumption of the guarantee, for "
            "which there is no default (see accounting.iteration.Setting)."
        )
    unknown = [name for name in setting if name not in required]
    if unknown:
        raise SettingError(
            f"{', '.join(unknown)} must not be given: no argument and no assumption "
            "has that name."
        )


def check_loss(loss_fn: Any, setting: dict[str, Any]) -> None:
    """Raise where the setting claims more of a loss than the loss says of itself."""
    if not isinstance(loss_fn, Loss):
        return
    known = loss_fn.setting
    least = ["smoothness"] if setting["clipped"] else ["smoothness", "gradient_norm"]
    for name in least:
        if np.any(np.asarray(setting[name]) < known[name]):
            raise ValueError(
                f"{name} must be at least that of the loss, {known[name]!r}; got "
                f"{setting[name]!r}."
            )
    if np.any(np.asarray(setting["strong_convexity"]) > 0):
        raise ValueError(
            "strong_convexity must be 0 for this loss, which is linear in places; got "
            f"{setting['strong_convexity']!r}."
        )
    if setting["generalised_linear"] and not known["generalised_linear"]:
        raise ValueError(
            "generalised_linear must be False for this loss, which has several scores; "
            f"got {setting['generalised_linear']!r}."
        )


def as_run(setting: dict[str, Any]) -> dict[str, Any]:
    """The setting with the numbers that run (the step size is for `step_sizes`)."""
    return setting | {
        "gradient_norm": _numbers.up(setting["gradient_norm"]),
        "regularization": _numbers.down(setting["regularization"]),
    }


def step_sizes(setting: dict[str, Any], num_steps: int) -> np.ndarray:
    """The step sizes that run, f64[T]."""
    given = _data.schedule("step_size", setting["step_size"], num_steps)
    return _numbers.down(given)


def check_noise(noise_multiplier: Any, epsilon: Any, delta: Any) -> None:
    """Raise unless the noise is given either by itself or by what it has to reach."""
    if noise_multiplier is None:
        if epsilon is None or delta is None:
            raise ValueError(
                "noise_multiplier must be given, or epsilon and delta; got epsilon "
                f"{epsilon!r} and delta {delta!r}."
            )
        _validate.positive("epsilon", epsilon)
        _validate.open_unit("delta", delta)
    elif epsilon is not None or delta is not None:
        raise ValueError(
            "noise_multiplier must be None where epsilon and delta set the noise; got "
            f"{noise_multiplier!r}."
        )


def solve_noise(
    loss_of: Callable[[Any], jax.Array], goal: float, epsilon: float, delta: float
) -> float:
    """The least noise multiplier that meets a goal, with a margin for float32."""
    try:
        return _numbers.up(float(calibrate.solve(loss_of, goal)) * (1 + 1e-6))
    except ValueError as error:
        raise ValueError(
            f"epsilon {epsilon!r} at delta {delta!r} must be one that some noise "
            f"reaches: {error}"
        ) from error


ASSUMPTIONS = (
    "nothing but the last iterate is released: no other iterate, loss or count",
    "what the setting says of the loss (convexity, smoothness, and the norm of "
    "gradients unless they are clipped) is true of every possible example",
    "prox does not depend on the data and never moves two points apart",
    "n, all shapes, the initial parameters and the hyperparameters are public",
    "arithmetic is real and Gaussian noise ideal",
)


def assumptions(*more: str, setting: dict[str, Any]) -> tuple[str, ...]:
    """What the guarantee of a run rests on."""
    if np.any(np.asarray(setting["diameter"]) < np.inf):
        more += ("prox maps into a set of the stated diameter",)
    if np.any(np.asarray(setting["strong_convexity"]) > 0):
        more += ("every possible example is finite",)
    return more + ASSUMPTIONS
