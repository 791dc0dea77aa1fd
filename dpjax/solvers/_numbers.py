"""Numbers that the program and the accountant share to the last bit.

A program in float32 cannot represent a decay of 0.999: it runs with a number nearby,
whose guarantee differs. So a solver first rounds every number that its guarantee
depends on to float32, and hands the result to both the accountant and the program. Both
then represent this number exactly, whatever precision they compute in.

Bounds on contributions and noise are rounded up, and all other numbers down: a step
size that meets its upper limit still meets it, and a decay below 1 stays below 1.
"""

from typing import overload

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._core import validate
from dpjax._core.typing import ArrayLike
from dpjax.accounting.iteration import Setting

# The least normal float32. Processors may flush smaller numbers to zero.
_LEAST = float(np.finfo(np.float32).tiny)


def _round_float32(value: ArrayLike, towards: float) -> float | np.ndarray:
    """Round positive numbers to float32 in one direction; leave all others unchanged.

    Takes numbers and the direction inf or −inf. Returns a float or f64[...].
    """
    array = np.asarray(value, np.float64)
    with np.errstate(over="ignore"):
        near = array.astype(np.float32)
    # Conversion rounds to the nearest float32: step on where it went the wrong way.
    passed = near < array if towards > 0 else near > array
    near = np.where(passed, np.nextafter(near, np.float32(towards)), near)
    # Subnormal numbers become normal or zero, whatever a processor does with them.
    subnormal = _LEAST if towards > 0 else 0.0
    near = np.where(array < _LEAST, subnormal, near.astype(np.float64))
    rounded = np.where((array > 0) & (array < np.inf), near, array)
    return float(rounded) if rounded.ndim == 0 else rounded


@overload
def up(value: float) -> float: ...
@overload
def up(value: ArrayLike) -> float | np.ndarray: ...
def up(value: ArrayLike) -> float | np.ndarray:
    """The least float32 that is not below the value, as a float or f64[...]; or inf."""
    return _round_float32(value, np.inf)


@overload
def down(value: float) -> float: ...
@overload
def down(value: ArrayLike) -> float | np.ndarray: ...
def down(value: ArrayLike) -> float | np.ndarray:
    """The largest float32 that is not above the value, as a float or f64[...]."""
    return _round_float32(value, -np.inf)


def stddev(
    noise_multiplier: ArrayLike, bound: ArrayLike, divisor: float = 1.0
) -> float | np.ndarray:
    """The noise's standard deviation, noise_multiplier · bound / divisor, rounded up.

    The result is a float32, as a float or f64[...].
    """
    value = up(np.asarray(noise_multiplier) * np.asarray(bound) / divisor)
    # A product beyond float32 is rounded up to inf, and refused here.
    validate.nonnegative("noise_multiplier times the bound on a gradient", value)
    return value


def number(value: ArrayLike) -> float:
    """A scalar of a setting as a Python float, without rounding."""
    return float(np.asarray(value))


def to_float32(value: ArrayLike) -> jax.Array:
    """A result of `up` or `down` as a float32 array, which represents it exactly."""
    return jnp.asarray(value, jnp.float32)


def as_executed(setting: Setting) -> Setting:
    """The setting with the float32 numbers that the program uses.

    Step sizes are left unchanged: a `Run` has one for each step.
    """
    return {
        **setting,
        "gradient_norm": up(setting["gradient_norm"]),
        "regularization": down(setting["regularization"]),
    }
