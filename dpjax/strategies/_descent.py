"""Minimize functions whose values and gradients JAX computes, in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A cap on the iterations, in case a descent does not converge.
_ITERATIONS = 300


def minimize(
    value_and_grad: Callable[..., tuple[jax.Array, jax.Array]],
    x: np.ndarray,
    *args: Any,
    **kwargs: Any,
) -> np.ndarray:
    """The minimizer that L-BFGS-B finds from a start x, f64[k].

    The further arguments are passed on to `value_and_grad`.
    """
    from scipy.optimize import minimize

    def usable(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = map(np.asarray, value_and_grad(jnp.asarray(x), *args, **kwargs))
        # Where a value or a gradient overflows, an infinite value makes the line search
        # take a shorter step. The zero gradient keeps NaN out of scipy's updates.
        known = np.isfinite(value) and np.isfinite(slope).all()
        return (float(value), slope) if known else (np.inf, np.zeros_like(slope))

    found = minimize(
        usable, x, jac=True, method="L-BFGS-B", options={"maxiter": _ITERATIONS}
    )
    return found.x
