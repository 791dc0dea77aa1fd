"""Numbers that the program and the accountant share to the last bit.

A program in float32 cannot hold a decay of 0.999: it runs with a number nearby, and the
privacy of that one is another. So a solver rounds all that its guarantee depends on to
float32 before anything else, and hands the result to both: the accountant takes it
exactly, and the program holds it exactly, whatever precision it computes in.

What bounds or hides a contribution is rounded up, and the rest down: a step size that
meets its limit goes on to meet it, and a decay below 1 stays there.
"""

from typing import overload

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike
from dpjax.accounting.iteration import Setting

# Below it, processors may take a float32 for zero.
_LEAST = float(np.finfo(np.float32).tiny)


def _round_float32(value: ArrayLike, towards: float) -> float | np.ndarray:
    """The next float32 in a direction, of numbers above zero; others as they are."""
    array = np.asarray(value, np.float64)
    with np.errstate(over="ignore"):
        near = array.astype(np.float32)
    passed = near < array if towards > 0 else near > array
    near = np.where(passed, np.nextafter(near, np.float32(towards)), near)
    subnormal = _LEAST if towards > 0 else 0.0
    near = np.where(array < _LEAST, subnormal, near.astype(np.float64))
    rounded = np.where((array > 0) & (array < np.inf), near, array)
    return float(rounded) if rounded.ndim == 0 else rounded


@overload
def up(value: float) -> float: ...
@overload
def up(value: ArrayLike) -> float | np.ndarray: ...
def up(value: ArrayLike) -> float | np.ndarray:
    """The least float32 that is not below, as a float or f64[...]; perhaps inf."""
    return _round_float32(value, np.inf)


@overload
def down(value: float) -> float: ...
@overload
def down(value: ArrayLike) -> float | np.ndarray: ...
def down(value: ArrayLike) -> float | np.ndarray:
    """The largest float32 that is not above, as a float or f64[...]."""
    return _round_float32(value, -np.inf)


def stddev(
    noise_multiplier: ArrayLike, bound: ArrayLike, divisor: float = 1.0
) -> float | np.ndarray:
    """At least noise_multiplier · bound / divisor, in float32."""
    value = up(np.asarray(noise_multiplier) * np.asarray(bound) / divisor)
    validate.nonnegative("noise_multiplier times the bound on a gradient", value)
    return value


def number(value: ArrayLike) -> float:
    """One number of a setting, as it is."""
    return float(np.asarray(value))


def to_float32(value: ArrayLike) -> jax.Array:
    """What `up` or `down` gave, for the program."""
    return jnp.asarray(value, jnp.float32)


def as_executed(setting: Setting) -> Setting:
    """The setting with the numbers that run, but for the step sizes, one a step."""
    return {
        **setting,
        "gradient_norm": up(setting["gradient_norm"]),
        "regularization": down(setting["regularization"]),
    }
