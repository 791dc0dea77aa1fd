"""Least values of functions that JAX computes with their derivatives, in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ITERATIONS = 300


def minimize(
    value_and_grad: Callable[..., tuple[jax.Array, jax.Array]],
    x: np.ndarray,
    *args: Any,
    **kwargs: Any,
) -> np.ndarray:
    """Where the least value near a start is, f64[k], by L-BFGS-B."""
    from scipy.optimize import minimize

    def usable(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = map(np.asarray, value_and_grad(jnp.asarray(x), *args, **kwargs))
        # Beyond what floats hold the line search turns back.
        known = np.isfinite(value) and np.isfinite(slope).all()
        return (float(value), slope) if known else (np.inf, np.zeros_like(slope))

    found = minimize(
        usable, x, jac=True, method="L-BFGS-B", options={"maxiter": _ITERATIONS}
    )
    return found.x
